"""Synthetic scheduled HLO modules, as large as asked for."""

import random

__all__ = ["deep_module"]


def deep_module(instructions: int, seed: int = 0) -> str:
    """A training step in small: a forward chain whose results are kept, a backward chain that uses them in
    reverse, an update of donated parameters every few layers; about ``instructions`` in all."""
    rng = random.Random(seed)
    layers = max(1, (instructions - 2) // 8)
    weights = max(1, layers // 50)
    shape = "f32[64,64]{1,0}"
    lines = [f"  %w{k} = {shape} parameter({k})" for k in range(weights)]
    lines.append(f"  %x0 = f32[16,64]{{1,0}} parameter({weights})")
    for k in range(layers):
        n = rng.choice((16, 16, 16, 32))
        lines += [
            f"  %d{k} = f32[16,64]{{1,0}} dot(%x{k}, %w{k % weights}), lhs_contracting_dims={{1}}, "
            f'rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/layer{k}/dot" source_line={k}}}',
            f"  %b{k} = f32[{n},64]{{1,0}} broadcast(%d{k}), dimensions={{0,1}}",
            f"  %t{k} = f32[{n},64]{{1,0}} tanh(%b{k})",
            f"  %x{k + 1} = f32[16,64]{{1,0}} slice(%t{k}), slice={{[0:16], [0:64]}}",
        ]
    lines.append(f"  %g{layers} = f32[16,64]{{1,0}} negate(%x{layers})")
    for k in reversed(range(layers)):
        lines += [
            f"  %m{k} = f32[16,64]{{1,0}} multiply(%g{k + 1}, %x{k + 1})",
            f"  %a{k} = f32[16,64]{{1,0}} add(%m{k}, %d{k})",
            f"  %g{k} = f32[16,64]{{1,0}} dot(%a{k}, %w{k % weights}), lhs_contracting_dims={{1}}, "
            f"rhs_contracting_dims={{1}}",
        ]
    new = [f"  %n{k} = {shape} subtract(%w{k}, %w{k})" for k in range(weights)]
    outs = ", ".join(f"%n{k}" for k in range(weights))
    shapes = ", ".join([shape] * weights)
    alias = ", ".join(f"{{{k}}}: ({k}, {{}}, may-alias)" for k in range(weights))
    head = f"HloModule deep, is_scheduled=true, input_output_alias={{ {alias} }}\n\nENTRY %main {{\n"
    return head + "\n".join([*lines, *new, f"  ROOT %out = ({shapes}) tuple({outs})"]) + "\n}\n"
