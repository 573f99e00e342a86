"""A loop whose model Inductor compiles, on tensors without data: its passes line by line, before kernels exist.

A backend for ``torch.compile``: Inductor lowers each pass as it would by itself, and stops where it would write
kernels. What is called in the place of a pass makes, hands over and lets go of tensors without data as its lines say
(`compat_inductor_lines`), so that storages live as long as they do in the compiled loop. Code between graphs,
autograd and the optimizer run as in eager, above a tape that takes down all of it (`EagerLoop`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from tightship.errors import Unsupported
from tightship.execute.compiled import Asked, Measured
from tightship.execute.eager_peak import LARGEST, Emulated
from tightship.frontends.torch import compat, compat_inductor, compat_ops
from tightship.frontends.torch.capture.eager_loop import EagerLoop
from tightship.frontends.torch.capture.joint import origin_of
from tightship.frontends.torch.capture.tape import Origin
from tightship.frontends.torch.compat_compile import outside
from tightship.frontends.torch.compat_inductor import Event, Kernel, Lowered

__all__ = ["Emulation"]

_MADE: Final = Emulated()


class Emulation:
    """The backend, for the loop whose tape takes down what lives. ``run``: kernels that Inductor calls and has not
    written are run once each, for what they ask for by themselves."""

    def __init__(self, loop: EagerLoop, *, run: bool) -> None:
        self.loop, self._run = loop, run
        self._measured = Measured("cpu")
        self._foreseen: dict[str, Asked] = {}

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compat_inductor.dry_graph(gm, inputs, self._emulated)

    def _emulated(self, kind: str, lowered: Lowered, graph: GraphModule) -> Callable[[list[Any]], list[Any]]:
        return _Pass(self, kind, lowered, graph).run

    def asked(self, kernel: Kernel, named: bool) -> tuple[Asked, bool]:
        """What a kernel asks for, and whether that is known: if not, it is its results, of those that have a name:
        others are written into tensors that there are."""
        if self._run and self._measured.recorded and kernel.nbytes <= LARGEST:
            return self._measured(kernel), True
        if not named:
            return Asked((), -1), False
        if kernel.key not in self._foreseen:
            with outside(), self.loop.mode:
                self._foreseen[kernel.key] = _results_of(kernel.prepare(0.0, 0)())
        return self._foreseen[kernel.key], False


def _results_of(result: Any) -> Asked:
    events: list[tuple[int, int]] = []

    def tree(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(map(tree, x))
        if not isinstance(x, torch.Tensor):
            return -1
        events.append((len(events), int(x.untyped_storage().nbytes())))
        return len(events) - 1

    made = tree(result)
    return Asked(tuple(events), made)


_Held = Any
"""What a variable holds: a tensor, None, or a tuple of those."""


class _Pass:
    """One pass. ``run`` does what its lines do to memory."""

    def __init__(self, owner: Emulation, kind: str, lowered: Lowered, graph: GraphModule) -> None:
        self._owner, self._kind, self._lowered = owner, kind, lowered
        self._tape, self._recorder = owner.loop.tape, owner.loop.recorder
        self._origins = {n.name: origin_of(n) for n in graph.graph.nodes}
        (output,) = graph.graph.find_nodes(op="output")
        self._results = [x.meta.get("val") if isinstance(x, Node) else x for x in output.args[0]]
        self._flops = _all_flops(graph)
        self._constants: dict[str, _Held] | None = None
        self._env: dict[str, _Held] = {}

    def run(self, args: list[Any]) -> list[Any]:
        """Empties ``args`` and returns the pass's results."""
        if self._kind == "backward":
            self._tape.node_runs(compat.backward_sequence())
        with compat.without_modes(), torch.no_grad():
            if self._constants is None:
                self._constants = dict(self._given())
            self._env = dict(zip(self._lowered.inputs, args, strict=True)) | self._constants
            args.clear()
            self._flops_left = self._flops
            for event in self._lowered.events:
                getattr(self, f"_{event.kind}")(event)
            rows = zip(self._lowered.outputs, self._lowered.strides, self._results, strict=True)
            results = [self._result(*row) for row in rows]
            self._env = {}
        if self._kind == "backward":
            self._tape.node_ran(compat.backward_sequence())
        return results

    def _given(self) -> Iterator[tuple[str, _Held]]:
        """Tensors that the code owns: there before the loop."""
        for name, nbytes in self._lowered.constants:
            t = self._blank(nbytes)
            self._tape.given(t, t)
            yield name, t

    def _blank(self, nbytes: int) -> torch.Tensor:
        mode, device = self._owner.loop.mode, torch.device("cpu")
        return compat.blank_like(mode, (nbytes,), (1,), 0, torch.uint8, device)

    def _op(
        self, target: str, event: Event, sizes: Sequence[int], fn: Emulated = _MADE
    ) -> list[torch.Tensor]:
        made = [self._blank(n) for n in sizes]
        flops, self._flops_left = self._flops_left, 0
        self._tape.emulated(
            fn, target, lambda: made, phase=self._recorder.phase, origin=self._origins.get(event.origin, Origin()),
            flops=flops,
        )  # fmt: skip
        return made

    def _result(self, name: str, stride: tuple[int, ...] | None, like: Any) -> Any:
        held = self._env[name] if name else None
        if not isinstance(like, torch.Tensor):
            return like if held is None else held
        if not isinstance(held, torch.Tensor):
            raise Unsupported(f"the result {name!r} of a compiled pass", "it is no tensor of its lines")
        if not all(
            isinstance(n, int) for n in like.shape
        ):  # a random state, whose size only its kernel knows
            return held
        shape, stride = tuple(like.shape), tuple(like.stride()) if stride is None else stride
        if (tuple(held.shape), held.stride(), held.dtype) == (shape, stride, like.dtype):
            return held
        return compat.blank_like(self._owner.loop.mode, shape, stride, 0, like.dtype, like.device, held)

    # --- the lines ---

    def _make(self, event: Event) -> None:
        (self._env[event.name],) = self._op("compiled code", event, [event.nbytes])

    def _alias(self, event: Event) -> None:
        self._env[event.name] = self._env[event.source]

    def _drop(self, event: Event) -> None:
        del self._env[event.name]

    def _item(self, event: Event) -> None:
        held = self._env[event.source]
        for k in event.path:
            held = held[k] if isinstance(held, tuple) else held
        self._env[event.name] = held

    def _call(self, event: Event) -> None:
        assert event.kernel is not None
        asked, known = self._owner.asked(event.kernel, bool(event.name))
        sizes = {i: n for i, n in asked.events if n >= 0}
        steps = [n if n >= 0 else -sizes[i] for i, n in asked.events if i in sizes]
        ended = {i for i, n in asked.events if n < 0}
        kept = [i for i in sizes if i not in ended]
        most = max(accumulate(steps), default=0) + asked.beside
        target = event.kernel.key.partition(",")[0].strip("('")
        made = self._op(target, event, [sizes[i] for i in kept], Emulated(most, known))
        result = _tree(asked.result, dict(zip(kept, made, strict=True)))
        given = tuple(self._env[name] for name in event.given)
        if event.name:
            self._env[event.name] = (result, *given) if given and not isinstance(result, tuple) else result


def _tree(tree: Any, made: dict[int, torch.Tensor]) -> _Held:
    return tuple(_tree(x, made) for x in tree) if isinstance(tree, tuple) else made.get(tree)


def _all_flops(graph: GraphModule) -> int:
    total = 0
    for n in graph.graph.nodes:
        if isinstance(n.target, torch._ops.OpOverload):
            args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: a.meta.get("val"))
            total += compat_ops.flops_of(n.target, args, kwargs, n.meta.get("val"))
    return total
