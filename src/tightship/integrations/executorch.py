"""Placement for ExecuTorch: an algorithm for its ``MemoryPlanningAlgorithmSuite``, verified.

    from executorch.exir import ExecutorchBackendConfig
    from tightship.integrations.executorch import memory_planning_pass

    program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=memory_planning_pass()))

ExecuTorch places the tensors of a method in arenas by a greedy algorithm, one arena for each memory id, and does
not check what other algorithms do. Its live ranges include both ends; ids begin at 1, since 0 stands for
constants. A tensor with a storage base lies inside that base's bytes and is not placed on its own. Bytes that the
branches of control flow need lie below everything else.

With a ``TargetMemoryMap``, tensors without a memory id lie in its banks so that what is read and written costs
least (`tightship.planners.banks`), and those with one in theirs:

    algorithm = PlaceTensors(target=TargetMemoryMap([Bank("tcm", 65536, 1), Bank("sram", 524288, 2)]), speeds=(8, 1))
    memory_planning_pass(algorithm)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir.memory_planning import (
    MemoryAlgoResult,
    MemoryPlanningAlgorithmSuite,
    SpecAllocResult,
    get_node_tensor_specs,
    greedy,
)
from executorch.exir.passes import MemoryPlanningPass

from tightship.errors import BadInput, VerificationFailed, Violation
from tightship.graph import aligned
from tightship.plan import Buffer, Pool, Problem, Solution
from tightship.planners.banks import assign_banks
from tightship.planners.packing import DEFAULT, Search, pack
from tightship.verify.placement import check_solution

__all__ = ["PlaceTensors", "memory_planning_pass"]

_FIRST_POOL = 1


@dataclass(frozen=True, slots=True)
class PlaceTensors:
    """The algorithm. ``planner``: of placements, by name; ``seconds``, ``work`` and ``seed`` limit its search in
    each arena (the same seed and work give the same offsets unless the time ended it). ``target``: ExecuTorch's
    ``TargetMemoryMap`` of banks to choose from, in spill order; ``speeds``: of its banks, in bytes per unit of time
    (none: each is half as fast as the one before it).

    Raises ``BadInput`` for tensors without a live range or whose storage base is not placed with them, and when no
    placement was found that keeps the capacity of every bank; ``VerificationFailed`` if what came out were wrong.
    """

    planner: str = DEFAULT
    seconds: float = 5.0
    work: int = 200_000
    seed: int = 0
    target: Any = None
    speeds: tuple[float, ...] = ()

    __name__ = "tightship"  # by which the suite knows it

    def __call__(
        self, alignment: int, specs: Iterable[Any], graph_module: Any, _signature: Any, extra_padding: int = 0
    ) -> MemoryAlgoResult:
        rows = sorted(specs, key=_order)
        banks = self._banks(alignment)
        strictest = math.lcm(alignment, *(bank.alignment or 1 for bank in banks))
        for spec in rows:
            spec.realign(strictest)
        known = set(rows)
        given = list(getattr(graph_module, "input_mem_buffer_sizes", None) or ())
        reserved = {k: aligned(n, alignment) for k, n in enumerate(given) if n and k >= _FIRST_POOL}
        for spec in rows:
            if (root := _root(spec)) is not spec and root not in known:
                rule = f"storage base {_name(root)} is missing: a tensor's storage base is placed with it"
                raise BadInput(rule, place=_name(spec))
        home = {spec: _pool(spec) for spec in rows if _root(spec) is spec}
        offsets: dict[Any, int] = {}
        if banks:
            offsets = self._banked(home, reserved, extra_padding, _uses(graph_module))
        pools: dict[int, list[Any]] = {}
        for spec, pool in home.items():
            pools.setdefault(pool, []).append(spec)
        for pool, roots in pools.items():
            if not all(spec in offsets for spec in roots):
                offsets |= self._placed(roots, reserved.get(pool, 0))
        for spec in rows:
            offsets[spec] = _offset(spec, offsets)
        sizes = [0] * (1 + max([_FIRST_POOL, *pools, *reserved, *(bank.mem_id for bank in banks)]))
        for pool, nbytes in reserved.items():
            sizes[pool] = nbytes
        for spec in rows:
            pool = home[_root(spec)]
            sizes[pool] = max(sizes[pool], offsets[spec] + spec.allocated_memory)
        _check(rows, home, offsets, sizes, reserved)
        padded = [n + extra_padding if k in pools else n for k, n in enumerate(sizes)]
        _check_banks(banks, padded)
        return MemoryAlgoResult(_results(rows, home, offsets), padded)

    def _banks(self, alignment: int) -> Sequence[Any]:
        """The target's banks, checked as ExecuTorch checks them."""
        banks = [] if self.target is None else list(self.target.banks)
        for bank in banks:
            if bank.alignment is not None and bank.alignment % alignment:
                fault = f"alignment {bank.alignment} is no multiple of the graph's, {alignment}"
                raise BadInput(fault, place=f"bank {bank.name!r}")
        if len(self.speeds) not in (0, len(banks)):
            fault = f"{len(self.speeds)} speeds of {len(banks)} banks: give one of each, or none"
            raise BadInput(fault, place="PlaceTensors.speeds")
        return banks

    def _banked(
        self, home: dict[Any, int], reserved: Mapping[int, int], padding: int, uses: Mapping[int, int]
    ) -> dict[Any, int]:
        """Offsets of what lies in the banks, whose memory ids become their homes."""
        banks = {bank.mem_id: bank for bank in self.target.banks}
        pools = tuple(
            Pool(bank.name, max(0, bank.size - reserved.get(k, 0) - padding), speed=speed)
            for (k, bank), speed in zip(banks.items(), self.speeds or _halved(len(banks)), strict=True)
        )
        rows = [spec for spec, pool in home.items() if spec.mem_id is None or pool in banks]
        real = [spec for spec in rows if spec.allocated_memory]
        ids = {bank.name: k for k, bank in banks.items()}
        first = next(iter(banks))
        home |= {spec: first for spec in rows if spec.mem_id is None}
        offsets = {spec: reserved.get(home[spec], 0) for spec in rows}  # of tensors without bytes
        buffers = tuple(
            _buffer(
                k, spec, () if spec.mem_id is None else (banks[int(spec.mem_id)].name,), uses.get(id(spec))
            )
            for k, spec in enumerate(real)
        )
        if real:
            search = Search(self.seed, self.work, self.seconds)
            found = assign_banks(Problem(buffers, pools=pools), self.planner, search).solution
            for spec, at, (name, _) in zip(real, found.offsets, found.homes, strict=True):
                home[spec] = ids[name]
                offsets[spec] = reserved.get(ids[name], 0) + at
        return offsets

    def _placed(self, roots: Sequence[Any], since: int) -> dict[Any, int]:
        """Offsets of one arena's tensors, from ``since`` up."""
        real = [spec for spec in roots if spec.allocated_memory]
        offsets = dict.fromkeys(roots, since)  # of tensors without bytes
        if real:
            problem = Problem(tuple(_buffer(k, spec) for k, spec in enumerate(real)))
            found = pack(problem, self.planner, Search(self.seed, self.work, self.seconds))
            offsets |= {spec: since + at for spec, at in zip(real, found.offsets, strict=True)}
        return offsets


def memory_planning_pass(algorithm: PlaceTensors | None = None, **flags: Any) -> MemoryPlanningPass:
    """ExecuTorch's pass with the better of its own greedy placement and ``algorithm``'s; with banks, which its own
    knows nothing of, ``algorithm``'s alone.

    ``flags`` are the pass's: ``alloc_graph_input``, ``alloc_graph_output``, ``alignment``, …
    """
    ours = algorithm or PlaceTensors()
    suite = MemoryPlanningAlgorithmSuite([ours] if ours.target is not None else [greedy, ours])
    return MemoryPlanningPass(memory_planning_algo=suite, **flags)


# --- ExecuTorch's tensors -----------------------------------------------------------------------------------


def _order(spec: Any) -> tuple[Any, ...]:
    """The order in which tensors are placed: older versions give a set, whose order differs between runs."""
    if not spec.lifetime or None in spec.lifetime:
        raise BadInput("a tensor to place without a live range", spec.lifetime, _name(spec))
    return (*spec.lifetime, -spec.nbytes(), str(spec.dtype), tuple(spec.shape))


def _name(spec: Any) -> str:
    return f"{spec.dtype}{list(spec.shape)} alive in {spec.lifetime}"


def _pool(spec: Any) -> int:
    pool = _FIRST_POOL if spec.mem_id is None else int(spec.mem_id)
    if pool < _FIRST_POOL:
        raise BadInput(f"memory id {pool}: it must be at least 1, as 0 is for constants", place=_name(spec))
    return pool


def _root(spec: Any) -> Any:
    seen = [spec]
    while (base := getattr(seen[-1], "storage_base", None)) is not None:
        if any(base is other for other in seen):
            raise BadInput("its storage bases form a cycle", place=_name(spec))
        seen.append(base)
    return seen[-1]


def _offset(spec: Any, roots: dict[Any, int]) -> int:
    root, at = _root(spec), 0
    while spec is not root:
        at += spec.storage_base_offset
        spec = spec.storage_base
    return roots[root] + at


def _halved(count: int) -> tuple[float, ...]:
    return tuple(0.5**k for k in range(count))


def _uses(graph_module: Any) -> dict[int, int]:
    """Bytes of each tensor, by its id, that are read and written: by each node that takes or makes it once."""
    found: dict[int, int] = {}
    for node in getattr(getattr(graph_module, "graph", None), "nodes", ()):
        if "alloc" in node.name and not node.all_input_nodes:
            continue  # room for a result, which nothing is written to yet
        near = [node, *node.all_input_nodes]
        for spec in {id(s): s for n in near for s in get_node_tensor_specs(n)}.values():
            root = _root(spec)
            found[id(root)] = found.get(id(root), 0) + spec.nbytes()
    return found


def _buffer(number: int, spec: Any, pools: tuple[str, ...] = (), traffic: int | None = None) -> Buffer:
    first, last = spec.lifetime
    return Buffer(
        f"{number}: {_name(spec)}", first, last + 1, spec.allocated_memory, spec.alignment, pools=pools,
        traffic=traffic,
    )  # fmt: skip


def _results(
    rows: Sequence[Any], home: Mapping[Any, int], offsets: dict[Any, int]
) -> dict[Any, SpecAllocResult]:
    """Objects, in ExecuTorch's sense, are runs of bytes that no tensor reaches beyond."""
    found: dict[Any, SpecAllocResult] = {}
    number, pool, end = -1, 0, 0
    for spec in sorted(rows, key=lambda s: (home[_root(s)], offsets[s], -s.allocated_memory)):
        at = offsets[spec]
        if (own := home[_root(spec)]) != pool or at >= end or number < 0:
            number, pool, end = number + 1, own, at
        end = max(end, at + spec.allocated_memory)
        found[spec] = SpecAllocResult(own, number, at)
    return found


# --- verification -------------------------------------------------------------------------------------------


def _check(
    rows: Sequence[Any],
    home: Mapping[Any, int],
    offsets: dict[Any, int],
    sizes: Sequence[int],
    reserved: dict[int, int],
) -> None:
    """Everything that is wrong with the placement as ExecuTorch will see it, from its own live ranges."""
    wrong: list[Violation] = []
    for pool, size in enumerate(sizes):
        roots = [s for s in rows if s is _root(s) and home[s] == pool and s.allocated_memory]
        buffers = [_buffer(k, s) for k, s in enumerate(roots)]
        if roots and (below := reserved.get(pool, 0)):
            first, last = min(b.lower for b in buffers), max(b.upper for b in buffers)
            buffers.append(Buffer("control flow", first, last, below, pinned=0))
        at = [offsets[s] for s in roots] + [0] * (len(buffers) - len(roots))
        wrong += check_solution(Problem(tuple(buffers)), Solution(tuple(at), size))
    wrong += [v for s in rows if s is not _root(s) for v in _inside(s, offsets)]
    if wrong:
        raise VerificationFailed(wrong, "placement for ExecuTorch")


def _check_banks(banks: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise ``BadInput`` naming the first bank that is too small, with what control flow and padding take."""
    for bank in banks:
        if sizes[bank.mem_id] > bank.size:
            fault = (
                f"{sizes[bank.mem_id]} bytes of tensors in {bank.size}: no placement was found that keeps the "
                "capacity of every bank; give one more room, or add a bank"
            )
            raise BadInput(fault, place=f"bank {bank.name!r}")


def _inside(spec: Any, offsets: dict[Any, int]) -> list[Violation]:
    """A tensor within its base: bytes, alignment, and lives no longer."""
    base, at = spec.storage_base, offsets[spec]
    start, end = offsets[base], offsets[base] + base.allocated_memory
    rules = (
        ("out-of-bounds", start <= at and at + spec.allocated_memory <= end, "lies beyond its storage base"),
        ("misaligned", at % spec.alignment == 0, f"does not start at a multiple of {spec.alignment}"),
        (
            "overlap",
            base.lifetime[0] <= spec.lifetime[0] and spec.lifetime[1] <= base.lifetime[1],
            "is alive when its storage base is not",
        ),
    )
    name = _name(spec)
    return [
        Violation(code, spec.lifetime[0], (name,), f"{name} {what}")
        for code, holds, what in rules
        if not holds
    ]
