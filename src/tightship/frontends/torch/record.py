"""Recorder: takes down the ATen ops of a program that runs on fake tensors, below autograd.

Control flow that depends on data is followed where it is known to be the same in every step: where the data comes
from constants, or from the batch or buffers, in which case a ``Guard`` repeats the question before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.origin import Origin, Tracker
from tightship.frontends.torch.probe import Prober
from tightship.frontends.torch.tape import Record, Tape, TapeValue
from tightship.frontends.torch.views import evaluate

__all__ = ["Guard", "Recorder"]

_READS_DATA = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
_ALWAYS_UNSUPPORTED = {
    "aten::_local_scalar_dense": "keep the value in a tensor (torch.where instead of an if, no .item())",
    "aten::nonzero": "use a mask and torch.where, so that the shape does not depend on the data",
    "aten::masked_select": "multiply by the mask instead of selecting",
    "aten::unique": "use an op whose result has a fixed shape",
}


@dataclass(frozen=True)
class Guard:
    """Something read from data when the step was captured, on which the captured ops depend.

    ``sources`` are the (role, key) of the caller's tensors the answer depends on. ``holds`` asks again.
    """

    sources: tuple[tuple[str, Any], ...]
    expected: Any
    place: str
    _ask: Callable[[Mapping[tuple[str, Any], torch.Tensor]], Any]

    def holds(self, tensors: Mapping[tuple[str, Any], torch.Tensor]) -> bool:
        """Whether the answer is the captured one, given the tensors of ``sources``."""
        return bool(self._ask(tensors) == self.expected)


class Recorder(compat.TorchDispatchMode):
    """Dispatch mode that fills ``tape``; enter it above a fake mode.

    Raises ``Unsupported``, with op, module and source line, where the program depends on data it does not have.
    """

    def __init__(self, tape: Tape, fake: Any, tracker: Tracker) -> None:
        super().__init__()
        self.tape = tape
        self.phase = "forward"
        self.guards: list[Guard] = []
        self._fake = fake
        self._prober = Prober(fake)
        self._tracker = tracker

    @contextmanager
    def in_phase(self, phase: str) -> Any:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fn.namespace in ("prim", "profiler") or not hasattr(fn, "_schema"):
            return fn(*args, **kwargs)
        if fn._schema.name == "aten::lift_fresh" and not compat.is_fake(args[0]):
            out = fn(*args)
            self.tape.constant(out, args[0])
            return out
        if fn in compat.LAZY_BITS:
            with self:
                return compat.LAZY_BITS[fn](*args)  # the bits are not part of the bytes; do now what they put off
        if compat.is_composite(fn, _device(args)):
            return self._decomposed(fn, args, kwargs)
        origin = self._tracker.forward() if self.phase == "forward" else self._tracker.backward()
        args, kwargs = self._faked(args), self._faked(kwargs)
        taken, taken_kw = self.tape.refs(args, str(origin)), self.tape.refs(kwargs, str(origin))
        if fn._schema.name in _READS_DATA:
            return self._answer(fn, taken, taken_kw, origin)
        out = self._run(fn, args, kwargs, origin)
        count = compat.flop_formula(fn)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        record = self.tape.record(fn, taken, taken_kw, out, phase=self.phase, origin=origin, flops=flops)
        if record is not None and self.phase == "backward" and not origin.module:
            record.origin = self._inherited(record)
        return out

    def _run(self, fn: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        try:
            return self._prober.correct(fn, args, kwargs, fn(*args, **kwargs))
        except compat.DATA_ERRORS as e:
            raise _unsupported(fn, origin, str(e)) from e
        except (RuntimeError, NotImplementedError) as e:
            # Some formulas refuse what the kernel takes, and some ops have none.
            out = self._prober.made_up(fn, args, kwargs)
            if out is None:
                e.add_note(f"while capturing {fn} at {origin}")
                raise
            return out

    def _decomposed(self, fn: Any, args: Any, kwargs: Any) -> Any:
        # Composite ops arrive here only where autograd is switched off altogether (inference mode).
        with self:
            return compat.decompose(fn, args, kwargs)

    def _faked(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            if compat.is_fake(tree):
                return tree
            fake = self._fake.from_tensor(tree)
            self.tape.constant(fake, tree)
            return fake
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._faked(x) for x in tree)
        if isinstance(tree, dict):
            return {k: self._faked(x) for k, x in tree.items()}
        return tree

    def _inherited(self, record: Record) -> Origin:
        """Between autograd nodes (sums of gradients): the place of what is summed."""
        made = {s for v in record.reads for s in (self.tape.storage(v),)}
        for r in reversed(self.tape.records[-64:]):
            if r is not record and any(v >= 0 and self.tape.storage(v) in made for v in r.results):
                return r.origin
        return Origin()

    # --- questions to the data ---

    def _answer(self, fn: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        tape = self.tape
        needed, sources = self._slice([r.value for r in args if hasattr(r, "value")], fn, origin)
        values, bases = tape.values, {s: st.base for s, st in enumerate(tape.storages)}
        question = Record(fn, str(fn), args, kwargs)
        fixed = {v: tape.real[v] for v in sources if _role(tape, v)[0] == "constant"}
        asked = {v: _role(tape, v) for v in sources if v not in fixed}

        def ask(tensors: Mapping[tuple[str, Any], torch.Tensor]) -> Any:
            given = fixed | {v: tensors[role] for v, role in asked.items()}
            return _ask(needed, question, values, bases, given)

        with compat.without_modes():
            answer = ask({role: tape.real[v] for v, role in asked.items()})
        if asked:
            self.guards.append(Guard(tuple(asked.values()), answer, f"{fn} · {origin}", ask))
        return answer

    def _slice(self, wanted: list[int], fn: Any, origin: Origin) -> tuple[list[Record], list[int]]:
        """The records that compute ``wanted`` and the caller's values they start from."""
        tape = self.tape
        open_storages = {tape.storage(v) for v in wanted}
        needed: list[Record] = []
        for r in reversed(tape.records):
            touched = {tape.storage(v) for v in r.results if v >= 0} | set(r.writes)
            if not touched & open_storages:
                continue
            if r.random or r.effect:
                raise _unsupported(fn, origin, f"its data comes from {r.target} at {r.origin}")
            needed.append(r)
            open_storages |= {tape.storage(v) for v in r.reads}
        written = {s for r in needed for s in r.writes}
        sources = []
        for v, role, key in tape.slots:
            s = tape.storage(v)
            if s not in open_storages:
                continue
            if role in ("parameter", "state") or s in written or v not in tape.real:
                raise _unsupported(fn, origin, f"its data comes from {role} {key}")
            sources.append(v)
        return needed[::-1], sources


def _device(args: Any) -> str:
    for a in args:
        if isinstance(a, torch.Tensor):
            return str(a.device.type)
        if isinstance(a, (list, tuple)) and (inner := _device(a)):
            return inner
    return ""


def _role(tape: Tape, value: int) -> tuple[str, Any]:
    return next((role, key) for v, role, key in tape.slots if v == value)


def _ask(
    needed: list[Record],
    question: Record,
    values: list[TapeValue],
    bases: Mapping[int, int],
    given: Mapping[int, torch.Tensor],
) -> Any:
    parts = [evaluate(needed, values, bases, given, r.value) for r in question.args if hasattr(r, "value")]
    return question.fn(*parts)


def _unsupported(fn: Any, origin: Origin, why: str) -> Unsupported:
    instead = _ALWAYS_UNSUPPORTED.get(fn._schema.name, "use an op whose result and shape do not depend on the data")
    where = f" at {origin}" if str(origin) else ""
    return Unsupported(f"{fn}{where}", f"the ops of a step must not depend on data ({why})", instead)
