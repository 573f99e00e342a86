"""Actions of the steps that move bytes instead of running ops: offload, fetch, compress, decompress; and of the
random states from which ops are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tightship.errors import BadInput
from tightship.execute import allocator, codecs
from tightship.execute.host_pool import HostPool
from tightship.execute.script import device_of
from tightship.frontends.torch import compat
from tightship.frontends.torch.program import Program, dtype_of
from tightship.graph import Value, aligned, alignment_of
from tightship.plan import Plan, Step

__all__ = ["Action", "Environment", "Transfers", "host_offsets", "with_state"]

Action = Callable[[list[Any]], None]


class Environment:
    """The layout of the environment and what it holds before a run: constants, and None for every value."""

    def __init__(self, values: int) -> None:
        self.initial: list[Any] = [None] * values

    def constant(self, value: Any) -> int:
        self.initial.append(value)
        return len(self.initial) - 1


def host_offsets(program: Program, plan: Plan) -> tuple[dict[tuple[int, int], int], int]:
    """Where each residence on the host lies, by (storage, first step), and the bytes they span: as placed, or one
    after the other in a plan without placement."""
    placed = {(r.storage, r.start): r.offset for r in plan.residences if r.form == "host"}
    end, offsets = 0, {}
    for i, step in enumerate(plan.steps):
        for s in step.storages if step.kind == "offload" else ():
            at = placed.get((s, i), end if not plan.residences else -1)
            size = program.graph.storages[s].size
            if at < 0 and size:
                name = program.graph.storages[s].name
                raise BadInput(f"no offset says where on the host {name!r} goes", place=f"step {i}")
            offsets[s, i] = max(at, 0)
            end = max(end, offsets[s, i] + size)
    return offsets, end


class Transfers:
    """Makes the actions of one plan. Compressed forms and copies have indices in the environment."""

    def __init__(self, program: Program, plan: Plan, environment: Environment, pool: HostPool | None) -> None:
        self.program, self.graph, self.environment, self.pool = program, program.graph, environment, pool
        self.device = device_of(program.graph) or "cpu"
        self.offsets, _ = host_offsets(program, plan)
        self.extent: dict[int, int] = {}
        for v in self.graph.values:
            self.extent[v.storage] = max(self.extent.get(v.storage, 0), _reach(v))
        self.packed: dict[int, tuple[int, str]] = {}  # storage -> index, codec
        self.hosted: dict[int, int] = {}  # storage -> offset
        self.copies: dict[int, tuple[int, ...]] = {}  # step of a copy stream -> indices of its copies
        self.latest: dict[int, int] = {}  # copy stream -> its latest step

    def waits(self, i: int, step: Step) -> Action | None:
        """Waiting for the copies that a step on stream 0 waits for. On a copy stream a step that frees is over when
        those before it are."""
        indices = tuple(p for w in step.waits for p in self.copies.get(w, ()))
        if step.stream:
            if step.kind == "free":
                self.copies[i] = (*self.copies.get(self.latest.get(step.stream, -1), ()), *indices)
                self.latest[step.stream] = i
            return None
        if not indices:
            return None

        def run(env: list[Any]) -> None:
            for index in indices:
                for job in env[index] or ():
                    job.result()

        return run

    def sent(self, i: int, step: Step) -> int:
        """The index of what waits for a step that sends between ranks."""
        index = self.environment.constant(None)
        self.copies[i], self.latest[step.stream] = (index,), i
        return index

    def move(self, i: int, step: Step) -> Action:
        """The action of a step of kind offload, fetch, compress or decompress."""
        if step.kind in ("offload", "fetch"):
            return self._copy(i, step)
        if step.stream:
            rule = f"{step.kind} on stream {step.stream}: only stream 0 compresses and decompresses"
            raise BadInput(rule, place=f"step {i} of the plan")
        make = partial(self._compress, step) if step.kind == "compress" else self._decompress
        return _each([make(s) for s in step.storages])

    def forget(self, step: Step) -> tuple[int, ...]:
        """The indices emptied when compressed forms are freed; what the host holds needs none."""
        if step.form == "packed":
            return tuple(self.packed.pop(s)[0] for s in step.storages)
        return ()

    # --- codecs ---

    def _compress(self, step: Step, s: int) -> Action:
        index = self.environment.constant(None)
        self.packed[s] = index, step.codec
        base, count = self.program.bases[s], self.extent[s]
        name, codec, nbytes, device = self.graph.storages[s].name, step.codec, step.nbytes, self.device
        dtype = dtype_of(self.graph.values[base].dtype)
        unchecked = device != "cpu"

        def run(env: list[Any]) -> None:
            nonlocal unchecked
            full = _flat(env[base], dtype, count)
            if unchecked:
                with allocator.unplanned(device):
                    codecs.check(codec, full, name)
                unchecked = False
            packed = env[index] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            codecs.compress(codec, full, packed, name)

        return run

    def _decompress(self, s: int) -> Action:
        index, codec = self.packed[s]
        base, count, make = self.program.bases[s], self.extent[s], self._maker(s)
        dtype = dtype_of(self.graph.values[base].dtype)

        def run(env: list[Any]) -> None:
            env[base] = full = make()
            codecs.decompress(codec, env[index], _flat(full, dtype, count))

        return run

    def _maker(self, s: int) -> Callable[[], Any]:
        """Makes a storage again as its op made it, contents aside."""
        value: Value = self.graph.values[self.program.bases[s]]
        size, dtype, device = self.graph.storages[s].size, dtype_of(value.dtype), self.device
        whole = aligned(_reach(value) * dtype.itemsize, alignment_of(device)) == size
        if whole and value.offset == 0 and _reach(value) == self.extent[s]:
            return partial(torch.empty_strided, value.shape, value.stride, dtype=dtype, device=device)

        def make() -> Any:
            memory = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
            return torch.empty(0, dtype=dtype, device=device).set_(
                memory, value.offset, value.shape, value.stride
            )

        return make

    # --- copies ---

    def _copy(self, i: int, step: Step) -> Action:
        """Begins the copies of a step; on stream 0 they are waited for at once."""
        assert self.pool is not None
        pool, stream = self.pool, step.stream
        index = self.environment.constant(None)
        after = [p for w in step.waits for p in self.copies.get(w, ())]
        self.copies[i] = (index,)
        self.latest[stream] = i
        parts = [self._part(i, step.kind, s) for s in step.storages]

        def run(env: list[Any]) -> None:
            earlier = [job for p in after for job in env[p] or ()]
            env[index] = jobs = [part(env, pool, stream, earlier) for part in parts]
            if not stream:
                for job in jobs:
                    job.result()

        return run

    def _part(self, i: int, kind: str, s: int) -> Callable[[list[Any], HostPool, int, Sequence[Any]], Any]:
        base, size = self.program.bases[s], self.graph.storages[s].size
        out, make = kind == "offload", self._maker(s)
        if out:
            self.hosted[s] = self.offsets[s, i]
        offset = self.hosted[s]

        def begin(env: list[Any], pool: HostPool, stream: int, after: Sequence[Any]) -> Any:
            if not out:
                env[base] = make()
            memory, copy = env[base].untyped_storage(), pool.write if out else pool.read
            return copy(stream, memory.data_ptr(), min(size, memory.nbytes()), offset, after)

        return begin


def _reach(value: Value) -> int:
    """Elements of its storage up to the last one of the value."""
    if 0 in value.shape:
        return 0
    return value.offset + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))


def _flat(tensor: Any, dtype: torch.dtype, count: int) -> Any:
    """All elements of a tensor's storage in a row."""
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), 0, (count,), (1,))


def _each(actions: Sequence[Action]) -> Action:
    def run(env: list[Any]) -> None:
        for action in actions:
            action(env)

    return actions[0] if len(actions) == 1 else run


# --- random states ---


def with_state(action: Action, index: int, *, again: bool, device: str = "cpu", nbytes: int = 0) -> Action:
    """The action of a random op that saves the random state at ``index`` before it draws, or draws ``again`` from
    the one there and leaves the present one as it was. A GPU's is held by the host: ``nbytes`` of ``device`` are
    taken for it, as the plan counts them."""
    generator = compat.generator_of(device)

    def state() -> tuple[Any, Any]:
        room = None if device == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
        return generator.get_state(), room

    def saving(env: list[Any]) -> None:
        env[index] = state()
        action(env)

    def drawing(env: list[Any]) -> None:
        present = state()
        generator.set_state(env[index][0])
        try:
            action(env)
        finally:
            generator.set_state(present[0])

    return drawing if again else saving
