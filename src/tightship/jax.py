"""JAX's training steps within a budget: `fit` and the policies of `jax.checkpoint`."""

from tightship.integrations.jax import (
    Fit,
    FittedStep,
    Memory,
    Policy,
    fit,
    plan_policies,
    plan_policy,
    temp_bytes,
)

__all__ = ["Fit", "FittedStep", "Memory", "Policy", "fit", "plan_policies", "plan_policy", "temp_bytes"]
