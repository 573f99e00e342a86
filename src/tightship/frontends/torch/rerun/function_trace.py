"""The torch functions that a step's Python code calls: what was asked, of which tensors, and what was answered.

A trace is what a step's Python code looks like from torch's side. Running that code again with the same answers costs
microseconds a call and computes nothing, and whatever it does otherwise (another function, number, tensor, order)
shows as a call that differs. Tensors are compared by their number in the trace: inputs first, then constants and
results in the order in which they appear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tightship.cached import cached_property
from tightship.errors import Unplannable
from tightship.frontends.torch import compat, compat_calls, compat_capture
from tightship.frontends.torch.capture.readings import Reading
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.rerun.arguments import Arguments, map_tensors, same_plain
from tightship.process_local import NotCopied

__all__ = [
    "ExecutionState",
    "Form",
    "FunctionCall",
    "FunctionTrace",
    "add_hook",
    "form",
    "nowhere",
    "unknown",
    "write_back",
]


Form = tuple[Any, ...]


def form(tensor: torch.Tensor) -> Form:
    """What a program depends on beside a constant's contents: another tensor of the same form can stand for it."""
    nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else -1
    strides = (tuple(tensor.stride()), tensor.storage_offset()) if nbytes >= 0 else ()
    flags = tensor.requires_grad, tensor.grad_fn is not None, tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tuple(tensor.shape), strides, nbytes, str(tensor.device), flags


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """What a call depends on beside its arguments: gradient and inference mode, autocast's type by device, and
    whether hooks of the caller's take what is saved for the backward pass."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
    saves: bool = False

    @staticmethod
    def now() -> ExecutionState:
        autocast: tuple[tuple[str, torch.dtype, bool], ...] = ()
        if compat.any_autocast():
            cache = torch.is_autocast_cache_enabled()
            kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
            autocast = tuple((k, torch.get_autocast_dtype(k), cache) for k in kinds)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return ExecutionState(*modes, autocast, compat_capture.saving_hooks())

    def is_now(self) -> bool:
        """Whether ``now()`` is the same, but for ``saves``; asked at each call of a step."""
        if (
            torch.is_grad_enabled() is not self.grad
            or torch.is_inference_mode_enabled() is not self.inference
        ):
            return False
        if not compat.any_autocast():
            return not self.autocast
        at, cache = 0, torch.is_autocast_cache_enabled()
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                if self.autocast[at : at + 1] != ((kind, torch.get_autocast_dtype(kind), cache),):
                    return False
                at += 1
        return at == len(self.autocast)


@dataclass(slots=True)
class FunctionCall:
    """One call as the Python code made it. ``kind``: ``op`` has the recorded ``answer``; ``data`` makes a tensor of
    Python's data and is run in every step, ``now`` reads such a tensor or sets a mode, and is run, too; ``last`` is
    `write_back`, which has its turn behind the backward pass, and ``hook`` is `add_hook`, which has it there;
    ``read`` looks at contents, which the one of its ``guards`` says in each step.

    ``bound``: an argument is a constant, of which each step may bring another. ``first`` is the number of the first
    tensor that it made; ``guards`` are what its answer says of data. ``repeats``: Python code of the caller's runs
    inside it or in its backward pass, which only running it again can tell to be the same.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Any
    kind: str
    state: ExecutionState
    origin: Any
    first: int
    bound: bool = False
    repeats: bool = False
    guards: tuple[Any, ...] = ()

    @property
    def reads_number(self) -> bool:
        """Whether the answer is a number that data say, or what is made of contents, nothing else: another one is as
        good. One of yes or no is not: another path may follow."""
        if self.kind == "read":
            return type(self.answer) is not bool
        return type(self.answer) in (int, float) and len(self.guards) == 1 and not self.guards[0].requests

    @property
    def read(self) -> list[Any]:
        """What it depends on of what the step computes."""
        return [g.expected for g in self.guards if isinstance(g, Reading)]


def add_hook(parameter: torch.Tensor, hook: Any) -> None:
    """Asks that ``hook`` (a `GradientHook`) be called in the backward pass when ``parameter`` gets its
    gradient."""


def write_back(buffer: torch.Tensor, now: torch.Tensor) -> None:
    """Asks that ``buffer`` hold what is in ``now``, which the step has put in its place, when gradients are there:
    these are made of what it held before."""


def nowhere(key: int) -> int | None:
    """Of no tensor the number is known by its id."""
    return None


@dataclass
class FunctionTrace(NotCopied):
    """``tensors`` are those that the code gets to see, by number: the caller's own parameters, buffers and
    constants, stand-ins without data for everything else. The first ``inputs`` are parameters, buffers and, from
    ``leaves`` on, the batch's. ``constants`` gives the form of each constant; for those in ``rigid``, which share
    bytes, no other can stand. ``results`` are the numbers of what the code handed back; ``end_guards`` are what its
    backward pass says of data. ``attributes`` and ``caches`` are where it left stand-ins behind. ``batch`` has a
    ``structure.TensorLeaf`` for each tensor of the batch, ``kept`` are the numbers of what its code keeps for later,
    which the program hands back behind the results, ``superseded`` says that another trace of the same calls
    hands back more, ``program`` what was captured, ``renumbering`` (a
    ``numbers.Renumbering``) tells how its numbers follow. ``references`` counts who holds the tensors between runs,
    None before the first run is over. ``elsewhere`` gives the number of a tensor of an earlier trace,
    by id, which the code has been shown in this run.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    calls: list[FunctionCall] = field(default_factory=list)
    constants: dict[int, Form] = field(default_factory=dict)
    rigid: set[int] = field(default_factory=set)
    results: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    superseded: bool = False
    inputs: int = 0
    leaves: int = 0
    attributes: tuple[tuple[torch.nn.Module, str], ...] = ()
    caches: tuple[Any, ...] = ()
    end_guards: tuple[Any, ...] = ()
    batch: tuple[Any, ...] = ()
    program: Any = None
    renumbering: Any = None
    references: list[int] | None = None
    elsewhere: Callable[[int], int | None] = nowhere

    @property
    def repeats(self) -> bool:
        return any(c.repeats for c in self.calls)

    @cached_property
    def places(self) -> dict[int, list[int]]:
        """The calls that each tensor occurs in, when all are made."""
        found: dict[int, list[int]] = {}
        for k, call in enumerate(self.calls):
            for n in {self.index[id(t)] for t in tensors_in((call.args, call.kwargs, call.answer))}:
                found.setdefault(n, []).append(k)
        return found

    @cached_property
    def asked_leaves(self) -> frozenset[int]:
        """The batch's tensors, counted from 0, of which something was asked or which were handed back: all where the
        caller's code runs inside of a call, as that may ask without being seen."""
        hidden = any(c.repeats or isinstance(c.func, compat_calls.Special) for c in self.calls)
        seen = range(self.inputs) if hidden else {*self.places, *self.results}
        return frozenset(n - self.leaves for n in range(self.leaves, self.inputs) if n in seen)

    def takes(self, batch: Sequence[Any]) -> bool:
        """Whether the step's code, on a batch of such tensors, can ask for what it has asked for here. Whatever else
        is in the batch shows when it is used, and so does a tensor that was not."""
        return (
            not self.superseded
            and len(batch) == len(self.batch)
            and all(
                a == b or n not in self.asked_leaves
                for n, (a, b) in enumerate(zip(batch, self.batch, strict=True))
            )
        )

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that may be new."""
        n = self.index.setdefault(id(tensor), len(self.tensors))
        if n == len(self.tensors):
            self.tensors.append(tensor)
        return n

    def take(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is in the place of ``old``, a tensor of the caller's, from now on."""
        n = self.index.get(id(old))
        if n is None:
            return
        places = self.places.get(n, ())
        del self.index[id(old)]
        self.tensors[n], self.index[id(new)] = new, n
        for call in (self.calls[k] for k in places):
            call.args, call.kwargs, call.answer = map_tensors(
                lambda t: new if t is old else t, (call.args, call.kwargs, call.answer)
            )

    def common(self, other: FunctionTrace) -> int:
        """How many of the first calls are the same in both, whatever the numbers among their arguments."""
        for k, (a, b) in enumerate(zip(self.calls, other.calls, strict=False)):
            if a.func != b.func or a.kind != b.kind or a.first != b.first or a.state != b.state:
                return k
            here = Arguments(self.index.get)
            there = other.index.get
            if not here.alike((a.args, a.kwargs), (b.args, b.kwargs), there) or here.structural(a.func):
                return k
            if [self.index[id(t)] for t in tensors_in(a.answer)] != [
                there(id(t)) for t in tensors_in(b.answer)
            ] or not (same_plain(a.answer, b.answer) or (a.reads_number and b.reads_number)):
                return k
            if a.kind != "read" and a.read != b.read:
                return k
        return min(len(self.calls), len(other.calls))


def unknown(where: str) -> Unplannable:
    """The error for a tensor that no call is known to have made."""
    return Unplannable(
        f"a tensor {where} whose origin is not known",
        "an earlier step has made it, or code that calls no function of torch",
        "keep what steps hand on in buffers, or hand it back as a result and into the next batch",
    )
