"""What XLA says of a program that it compiled, or would compile: bytes, operations, the module with its schedule."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tightship.errors import Unsupported

__all__ = [
    "Look",
    "Memory",
    "compile_for",
    "look_at",
    "memory_of",
    "operations_of",
    "placed_as",
    "scheduled_text",
]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a compiled program on one device, by XLA's analysis (`memory_analysis`): what the caller gives, what
    it gets, how much of that lies in what was given (donated), and temporaries."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @property
    def static(self) -> int:
        """What is there whatever is planned."""
        return self.arguments + self.outputs - self.aliased

    @property
    def results(self) -> int:
        """What it gets in bytes of their own."""
        return self.outputs - self.aliased

    @property
    def total(self) -> int:
        return self.static + self.temporaries


class Look(NamedTuple):
    """What XLA says of a program: ``operations`` are 0 where they were not counted, and ``module`` is its text with
    its schedule, empty where XLA did not write it."""

    memory: Memory
    operations: float
    module: str = ""


def memory_of(compiled: Any) -> Memory:
    """What XLA says of a compiled program. Raises ``Unsupported`` where it says nothing."""
    found = compiled.memory_analysis()
    if found is None:
        raise Unsupported(
            "planning for this backend", "XLA gives no analysis of its memory", "use CPU, GPU or TPU"
        )
    sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes)
    return Memory(*sizes, found.temp_size_in_bytes)


def operations_of(compiled: Any) -> float:
    """Operations of a compiled program as XLA counts them: the body of a loop once. 0 where it does not say."""
    found = compiled.cost_analysis()
    rows = found if isinstance(found, (list, tuple)) else (found,)
    return float(next((x["flops"] for x in rows if x and "flops" in x), 0.0))


def placed_as(compiled: Any) -> dict[str, Any]:
    """Options of `jax.jit` for what takes and gives flat lists and places them as a compiled program does; none on
    one device. What a program does not read lies anywhere."""
    given, made = (
        jax.tree.leaves(x, is_leaf=lambda s: s is None)
        for x in (compiled.input_shardings, compiled.output_shardings)
    )
    if all(s is None or len(s.device_set) == 1 for s in (*given, *made)):
        return {}
    return {"in_shardings": tuple(given), "out_shardings": made}


_CPU_ORDER = "xla_cpu_scheduler_type"
_MEMORY_FIRST = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""XLA's order for CPUs is one for concurrency by default, in which what is recomputed runs as early as it can."""
_QUICK = {"xla_backend_optimization_level": 0}
"""Memory is decided before code is optimized."""


def compile_for(lowered: Any, *, memory: bool, quick: bool, dump: str | None = None) -> Any:
    """``lowered``, compiled: on CPUs in XLA's order for ``memory``, and ``quick``, only to be looked at; ``dump``: a
    folder for what XLA says of it."""
    options: dict[str, Any] = {}
    if jax.default_backend() == "cpu":
        options = {_CPU_ORDER: _MEMORY_FIRST} if memory else {}
        options |= _QUICK if quick else {}
        options |= {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if dump else {}
    while True:
        try:
            return lowered.compile(options or None)
        except Exception as error:
            unknown = [name for name in options if f"option: '{name}'" in str(error)]
            if not unknown:
                raise
            options = {name: x for name, x in options.items() if name not in unknown}


_STOP = "tightship_stop"
"""A function that nobody has: XLA looks for it once every buffer has its place, before it makes code."""
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)", re.MULTILINE)


def look_at(lowered: Any, *, memory: bool, counted_within: float = math.inf) -> Look:
    """Memory of the program that XLA would compile, and its operations, unless it takes more than so many bytes in
    all. On CPUs without making its code, which takes most of the time: to the byte what the compiled program has, for
    it is that program's assignment of buffers."""
    found = _stopped(lowered, memory, counted_within) if jax.default_backend() == "cpu" else None
    if found is None:
        compiled = compile_for(lowered, memory=memory, quick=True)
        found = Look(memory_of(compiled), operations_of(compiled))
    return found


def _stopped(lowered: Any, memory: bool, counted_within: float = math.inf) -> Look | None:
    """Memory and operations of a program, off what XLA wrote of it."""
    found = _written(lowered, memory)
    if found is None:
        return None
    sizes = _assigned(found[0])
    return Look(sizes, _counted(found[1]) if sizes.total <= counted_within else 0.0, found[1])


def scheduled_text(lowered: Any, *, memory: bool) -> str:
    """The module that XLA would compile, with its schedule, as text."""
    found = _written(lowered, memory) if jax.default_backend() == "cpu" else None
    if found is None:
        return str(compile_for(lowered, memory=memory, quick=True).as_text())
    return found[1]


def _written(lowered: Any, memory: bool) -> tuple[str, str] | None:
    """What XLA wrote of a program before it found no ``_STOP``: its assignment of buffers, and the module. None where
    it did not, as for a program that it divides among devices: there it takes no effect that has no place."""
    with tempfile.TemporaryDirectory(prefix="tightship-") as folder:
        try:
            module = lowered.compiler_ir("stablehlo")
            if module.operation.attributes["mhlo.num_partitions"].value > 1:
                return None
            stop = _with_stop(module)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError, StopIteration):
            return None  # another JAX, which builds modules in another way
        try:
            compile_for(lowered, memory=memory, quick=True, dump=folder)
            return None
        except Exception as error:
            if _STOP not in str(error):
                raise
        finally:
            stop.operation.erase()
        names = (f"*cpu_after_optimizations{end}.txt" for end in ("-buffer-assignment", ""))
        assigned, text = (next(Path(folder).glob(name), None) for name in names)
        if assigned is None or text is None:
            return None
        return assigned.read_text(), text.read_text()


def _with_stop(module: Any) -> Any:
    """An operation that stops the compiler, in a module of StableHLO."""
    from jax.interpreters.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    functions = (op for op in module.body.operations if op.operation.name == "func.func")
    main = next(f for f in functions if f.attributes["sym_name"].value == "main")
    block = main.regions[0].blocks[0]
    with module.context, ir.Location.unknown(), ir.InsertionPoint.at_block_begin(block):
        nothing = ir.RankedTensorType.get([0], ir.F32Type.get())
        return stablehlo.CustomCallOp(
            [nothing], [], call_target_name=ir.StringAttr.get(_STOP), has_side_effect=ir.BoolAttr.get(True)
        )


def _assigned(text: str) -> Memory:
    """The sizes that `memory_analysis` gives, from XLA's text of an assignment of buffers."""
    sizes = dict.fromkeys(("parameter", "maybe-live-out", "both", "preallocated-temp"), 0)
    for size, told in _ALLOCATION.findall(text):
        of = [name for name in sizes if name in told]
        for name in (*of, *(("both",) if {"parameter", "maybe-live-out"} <= set(of) else ())):
            sizes[name] += int(size)
    return Memory(*sizes.values())


def _counted(text: str) -> float:
    """Operations of a compiled module; 0 where jaxlib counts none by its text."""
    try:
        from jaxlib import _hlo, _jax

        found = _jax.hlo_module_cost_analysis(jax.devices()[0].client, _hlo.hlo_module_from_text(text))
    except Exception:
        return 0.0
    return float(found.get("flops", 0.0))
