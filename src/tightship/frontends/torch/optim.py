"""Updater: the optimizer's step for one parameter, as one opaque op.

Any optimizer that treats its parameters independently gives the same bits when it steps them one at a time, so the
update of a parameter can run as soon as its gradient is there, and the gradient be freed.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.frontends.torch import compat

__all__ = ["Updater", "updaters"]

_INDEPENDENT = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip


class Updater:
    """``updater(param, grad, *state)`` steps one parameter of the real optimizer with the gradient ``grad``.

    It works on the optimizer's own parameter and state, which the caller's tensors are (they are named in the
    call so that a planner sees them); hyperparameters are those of the real group at the time of the call.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: int,
        param: torch.Tensor,
        name: str,
        known: dict[Any, Any] | None = None,
    ) -> None:
        """``known`` remembers what state parameters of one kind get; share it between updaters."""
        self.optimizer = optimizer
        self.group = group
        self.param = param
        self.name = name
        self.state_keys, self.state_like = _state_of(optimizer, group, param, {} if known is None else known)
        self._mini = _mini(optimizer, group, param)
        self._step = compat.plain_step(type(optimizer))

    def __call__(self, param: torch.Tensor, grad: torch.Tensor, *state: torch.Tensor) -> None:
        self._mini.state = self.optimizer.state
        _run(self._mini, self._step, self.optimizer.param_groups[self.group], self.param, grad)

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """The optimizer's state of this parameter, in the order of ``state_keys``; ``materialised`` must hold."""
        state = self.optimizer.state[self.param]
        return tuple(state[k] for k in self.state_keys)

    @property
    def materialised(self) -> bool:
        """Whether all of the state exists (optimizers create it at their first step)."""
        state = self.optimizer.state.get(self.param, {})
        return all(isinstance(state.get(k), torch.Tensor) for k in self.state_keys)

    def rehearsal(self) -> Callable[[], None]:
        """The same update on copies of parameter and state, for measuring: changes nothing real.

        State that does not exist yet is created by a first update here, before the returned function runs.
        """
        param = torch.nn.Parameter(self.param.detach().clone(), self.param.requires_grad)
        grad = torch.zeros_like(param)
        mini = _mini(self.optimizer, self.group, param)
        mini.state = defaultdict(dict)
        if self.materialised:
            mini.state[param] = copy.deepcopy(self.optimizer.state.get(self.param, {}))
        group = self.optimizer.param_groups[self.group]
        if not self.materialised:
            _run(mini, self._step, group, param, grad)
        return lambda: _run(mini, self._step, group, param, grad)


def updaters(
    optimizer: torch.optim.Optimizer, model_parameters: Mapping[str, torch.Tensor]
) -> dict[str, Updater]:
    """An updater for each parameter of the optimizer that requires a gradient, by the model's name for it.

    Raises ``Unsupported`` for optimizers that do not treat parameters independently or have hooks around their
    step, ``BadInput`` for one that does not hold the model's parameters.
    """
    _check(optimizer)
    names = {id(p): n for n, p in reversed(list(model_parameters.items()))}
    made: dict[str, Updater] = {}
    known: dict[Any, Any] = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if not p.requires_grad:
                continue
            if id(p) not in names:
                raise BadInput(
                    "every parameter of the optimizer is one of the model's",
                    tuple(p.shape),
                    f"group {g}, entry {k}",
                )
            made[names[id(p)]] = Updater(optimizer, g, p, names[id(p)], known)
    if not made:
        raise BadInput(
            "the optimizer holds a parameter of the model that requires a gradient", place="optimizer"
        )
    return made


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput("the optimizer is a torch.optim.Optimizer", type(optimizer).__name__, "optimizer")
    cls = type(optimizer)
    closure = inspect.signature(compat.plain_step(cls)).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Unsupported(
            f"the optimizer {cls.__name__}",
            "its step needs a closure that runs the model again",
            "use AdamW or SGD",
        )
    if compat.optimizer_hooks(optimizer):
        raise Unsupported(
            f"a {cls.__name__} with step hooks",
            "its step runs once per parameter",
            "call them after the step",
        )
    if not _known_independent(cls):
        _probe(optimizer)


def _known_independent(cls: type) -> bool:
    return cls.__module__.startswith("torch.optim.") and cls.__name__ in _INDEPENDENT


def _mini(optimizer: torch.optim.Optimizer, group: int, param: torch.Tensor) -> Any:
    """An optimizer of the same class and settings with one parameter; made without its constructor, whose
    defaults may differ from the group's values."""
    cls: Any = type(optimizer)
    mini = cls.__new__(cls)
    mini.__dict__.update(vars(optimizer))
    mini.__dict__.pop("step", None)  # what a scheduler put there counts steps of the real optimizer
    compat.clean_optimizer_hooks(mini)
    mini.param_groups = [{**optimizer.param_groups[group], "params": [param]}]
    return mini


def _run(mini: Any, step: Callable[..., Any], group: Mapping[str, Any], param: Any, grad: Any) -> None:
    mini.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
    before, param.grad = param.grad, grad
    try:
        step(mini)
    finally:
        param.grad = None if before is grad else before


def _state_of(
    optimizer: torch.optim.Optimizer, group: int, param: torch.Tensor, known: dict[Any, Any]
) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Keys and tensors (of the right metadata, perhaps fake) of the state the optimizer has or will create."""
    state = optimizer.state.get(param)
    if not state:
        kind = group, tuple(param.shape), param.stride(), param.dtype, param.device
        if kind not in known:
            known[kind] = _first_state(optimizer, group, param)
        state = known[kind]
    kept = {k: t for k, t in state.items() if isinstance(t, torch.Tensor)}
    for k, t in state.items():
        if isinstance(t, (list, tuple, dict)) and t:
            raise Unsupported(
                f"the optimizer state {k!r}", "it holds tensors in a container", "use another optimizer"
            )
    return tuple(kept), tuple(kept.values())


def _first_state(optimizer: torch.optim.Optimizer, group: int, param: torch.Tensor) -> dict[Any, Any]:
    step = compat.plain_step(type(optimizer))

    def run(scratch: torch.Tensor) -> dict[Any, Any]:
        mini = _mini(optimizer, group, scratch)
        mini.state = defaultdict(dict)
        real = {**optimizer.param_groups[group]}
        _run(mini, step, real, scratch, torch.zeros_like(scratch))
        return dict(mini.state[scratch])

    try:
        with compat.fake_mode() if not compat.is_fake(param) else param.fake_mode:  # type: ignore[attr-defined]
            fake = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
            return run(torch.nn.Parameter(fake, param.requires_grad))
    except (RuntimeError, NotImplementedError):
        scratch = torch.zeros_like(param, memory_format=torch.preserve_format)
        return run(torch.nn.Parameter(scratch, param.requires_grad))


def _probe(optimizer: torch.optim.Optimizer) -> None:
    """Step two small parameters together and one by one; other bits mean that the class couples parameters."""
    step = compat.plain_step(type(optimizer))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 4, generator=generator), torch.randn(3, 4, generator=generator)]
    scales = (1, 50)
    grads = [
        [torch.randn(p.shape, generator=generator) * s for p, s in zip(start, scales, strict=True)]
        for _ in range(3)
    ]

    def stepped(together: bool) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.clone()) for p in start]
        lots = [params] if together else [[p] for p in params]
        minis = []
        for lot in lots:
            mini = _mini(optimizer, 0, lot[0])
            mini.param_groups = [copy.copy(mini.param_groups[0]) | {"params": lot}]
            mini.state = defaultdict(dict)
            minis.append(mini)
        for row in grads:
            for p, g in zip(params, row, strict=True):
                p.grad = g.clone()
            for mini in minis:
                step(mini)
        return [p.detach() for p in params]

    try:
        same = all(map(torch.equal, stepped(True), stepped(False)))
    except Exception as e:
        raise Unsupported(
            f"the optimizer {type(optimizer).__name__}", f"it cannot step one parameter: {e}"
        ) from e
    if not same:
        raise Unsupported(
            f"the optimizer {type(optimizer).__name__}", "its update of one parameter depends on the others",
            "use an optimizer that treats parameters independently",
        )  # fmt: skip
