"""Recorder: takes down the ATen ops of a program that runs on fake tensors, below autograd."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.frontends.torch import compat
from tightship.frontends.torch.capture.data_guards import READS_DATA, Guard, Questions
from tightship.frontends.torch.capture.probe import Prober, made_of
from tightship.frontends.torch.capture.tape import Origin, Record, Tape, Tracker

__all__ = ["Recorder"]


class Recorder(compat.TorchDispatchMode):
    """Dispatch mode that fills ``tape``; enter it above a fake mode.

    Raises ``Unsupported``, with op, module and source line, where the program depends on data it does not have.
    """

    def __init__(self, tape: Tape, fake: Any, tracker: Tracker) -> None:
        super().__init__()
        self.tape = tape
        self.phase = "forward"
        self.questions = Questions(tape)
        self._fake = fake
        self._prober = Prober(fake)
        self._tracker = tracker
        self.asked = -1  # the number of the torch function's call being made
        self._asked_by_sequence: dict[int, int] = {}
        self.refusal: Unsupported | None = None  # the last one, which TorchScript makes an error of its own
        self._owners: dict[int, tuple[str, Any]] | None = (
            None  # of bytes that belong to the model, found when first needed
        )

    @property
    def guards(self) -> list[Guard]:
        """What must be true of the data for the recorded ops to be the right ones."""
        return self.questions.guards

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
                return compat.LAZY_BITS[fn](
                    *args
                )  # the bits are not part of the bytes; do now what they put off
        if compat.is_composite(fn, _device(args)):
            return self._decomposed(fn, args, kwargs)
        origin = self._tracker.forward() if self.phase == "forward" else self._tracker.backward()
        asked = self._asked()
        args, kwargs = self._faked(args), self._faked(kwargs)
        taken, taken_kw = self.tape.refs(args, str(origin)), self.tape.refs(kwargs, str(origin))
        if fn._schema.name in READS_DATA:
            return self.questions.value(fn, taken, origin, self.phase)
        if kwargs.get("generator") is not None:
            raise Unsupported(
                f"{fn} at {origin} with a generator", "the step draws from torch's own random state alone",
                "leave generator out",
            )  # fmt: skip
        try:
            out = self._run(fn, args, kwargs, origin)
        except compat.DATA_ERRORS:
            out = made_of(self.questions.shapes(fn, taken, taken_kw, origin))
        count = compat.flop_formula(fn)
        flops = int(count(*args, **kwargs, out_val=out)) if count else 0
        record = self.tape.record(fn, taken, taken_kw, out, phase=self.phase, origin=origin, flops=flops)
        if record is not None:
            record.asked = asked
        if record is not None and self.phase == "backward" and not origin.module:
            record.origin = self._inherited(record)
        return out

    def _asked(self) -> int:
        """The function's call that this op, or the op whose gradient it computes, belongs to."""
        if self.phase == "backward":
            return self._asked_by_sequence.get(compat.backward_sequence(), -1)
        # An op without a gradient finds the node of the one before it, which is not its own.
        self._asked_by_sequence.setdefault(compat.forward_sequence(), self.asked)
        return self.asked

    def _run(self, fn: Any, args: Any, kwargs: Any, origin: Origin) -> Any:
        try:
            return self._prober.correct(fn, args, kwargs, fn(*args, **kwargs))
        except compat.DATA_ERRORS:
            raise
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
            self._check_foreign(tree)
            fake = self._fake.from_tensor(tree)
            self.tape.constant(fake, tree)
            return fake
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._faked(x) for x in tree)
        if isinstance(tree, dict):
            return {k: self._faked(x) for k, x in tree.items()}
        return tree

    def _check_foreign(self, tensor: torch.Tensor) -> None:
        """Raises ``Unsupported`` for a constant in bytes of a parameter or buffer: it has a stand-in, through which
        alone gradients and changes are seen."""
        if self._owners is None:
            tape = self.tape
            roles = {v: (role, key) for v, role, key in tape.slots if role in ("parameter", "buffer")}
            self._owners = {compat.storage_key(t): roles[v] for v, t in tape.real.items() if v in roles}
        owner = self._owners.get(compat.storage_key(tensor))
        if owner is not None:
            where = self._tracker.here()
            self.refusal = Unsupported(
                f"reading the {owner[0]} {owner[1]!r} at {where} by another tensor, or from scripted code",
                "its gradient and its updates would not be seen",
                "use the model's own tensor (with .detach() where no gradient is wanted), and plain Python",
            )
            raise self.refusal

    def _inherited(self, record: Record) -> Origin:
        """Between autograd nodes (sums of gradients): the place of what is summed."""
        made = {s for v in record.reads for s in (self.tape.storage(v),)}
        for r in reversed(self.tape.records[-64:]):
            if r is not record and any(v >= 0 and self.tape.storage(v) in made for v in r.results):
                return r.origin
        return Origin()


def _device(args: Any) -> str:
    for a in args:
        if isinstance(a, torch.Tensor):
            return str(a.device.type)
        if isinstance(a, (list, tuple)) and (inner := _device(a)):
            return inner
    return ""
