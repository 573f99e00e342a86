"""Program: a Graph together with what PyTorch needs to run it.

View ops are not ops of the graph: a view is a *value*, derived from its storage's current tensor by metadata
(dtype, shape, stride, offset), so that a storage that was recomputed somewhere else serves its views too. A
view value counts as an output of the op that defines its storage (or as a graph input, for storages of the
caller).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tightship.graph import Graph, Request
from tightship.process_local import NotCopied

__all__ = ["Call", "Program", "Ref", "Slot"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in an argument tree for the tensor of a graph value."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """How to run one op: ``fn(*args, **kwargs)`` with every ``Ref`` replaced by its tensor.

    ``results`` holds, for each element of the flattened result, the graph value it is, or -1 when nobody needs
    it (None results, or the mutated argument handed back).
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a graph input's tensor comes from.

    ``role``: parameter, buffer, state (of the optimiser), input (of the batch), constant. ``key`` finds it:
    the qualified name for parameters and buffers, (parameter name, state key) for state, the index of the
    flattened batch's leaf for inputs, the index into ``Program.constants`` for constants.
    """

    value: int
    role: str
    key: Any


@dataclass(frozen=True)
class Program(NotCopied):
    """``calls[i]`` runs ``graph.ops[i]``; ``replays[i]`` runs it as a recomputation where that differs (an op
    with running statistics computes its results without touching them).

    ``bases[s]`` is the value that spans storage ``s`` the way its defining op returns it (or, for an input, the
    caller's tensor): the one from which the other values of ``s`` are derived. ``slots`` are the graph's input
    values (one per distinct caller tensor, views of it excluded). ``results`` are the values the step hands
    back, in order; ``result_spec`` (a ``structure.Results``) puts them back into the caller's structure.
    ``asked[i]`` is the call of a torch function from which ``calls[i]`` follows, by its number in the step's trace,
    -1 where that is not known. ``replay_requests[i]`` are the measured requests of ``replays[i]`` where they differ
    from those of the op.
    ``batch`` (a ``structure.BatchSpec``) says what a batch must look like, and each of ``guards`` (a
    ``questions.Guard``) what must be true of its data, for the captured ops to be the ones eager would run.
    """

    graph: Graph
    calls: tuple[Call, ...]
    replays: dict[int, Call]
    bases: tuple[int, ...]
    slots: tuple[Slot, ...]
    results: tuple[int, ...]
    result_spec: Any = None
    constants: tuple[Any, ...] = ()
    notes: tuple[str, ...] = field(default=())
    guards: tuple[Any, ...] = ()
    batch: Any = None
    replay_requests: dict[int, tuple[Request, ...]] = field(default_factory=dict)
    asked: tuple[int, ...] = ()
