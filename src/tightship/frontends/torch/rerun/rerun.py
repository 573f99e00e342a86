"""Running a step's Python code in every step, on stand-ins that compute nothing.

The code runs as in eager, once a step and with all its side effects, but every torch function that it calls is
answered from a `FunctionTrace` of an earlier run. As long as it asks the same, what was planned is what eager would
run. Numbers that differ are taken over into the program's ops. Anything else that differs makes the run go on on fake
tensors (the calls so far are made up for), and is a new program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch import compat, compat_calls, compat_capture, compat_packed
from tightship.frontends.torch.capture.readings import Reading, readings_now
from tightship.frontends.torch.capture.tape import Origin
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.refusals import heeded, told
from tightship.frontends.torch.rerun.arguments import (
    Arguments,
    map_tensors,
    name_of,
    own_containers,
    plainly_same,
    same_plain,
)
from tightship.frontends.torch.rerun.calls import (
    MAKES_DATA,
    READS,
    can_look,
    check_call,
    functions_in,
    hands_back,
    has_already,
    repeats,
)
from tightship.frontends.torch.rerun.execution import Capturing, Execution
from tightship.frontends.torch.rerun.function_trace import (
    ExecutionState,
    FunctionCall,
    FunctionTrace,
    add_hook,
    form,
    unknown,
    write_back,
)
from tightship.frontends.torch.rerun.outcome import function_key, inner_key
from tightship.frontends.torch.rerun.watched import Watched
from tightship.garbage import garbage_apart

__all__ = ["Rerun"]


class _Differs(Exception):
    """The call being made is not the recorded one."""


Read = Callable[[FunctionTrace, Mapping[int, torch.Tensor]], Any]
Contents = Sequence[torch.Tensor]
Tell = Callable[[Reading], Contents | None]


class Rerun(TorchFunctionMode):
    """One run of the Python code of a step, by ``run``.

    ``candidates`` are traces of earlier runs, the likeliest first; ``start`` makes a capture where none of them fits.
    ``batch_of`` puts a trace's stand-ins in the batch's place, ``read`` gives the caller's own tensors to guards, and
    ``tell`` what a reading of the trace says, for which its step has to run; None where it does not.

    Afterwards ``trace`` is what was followed or written. ``execution`` is there where something had to be captured;
    ``actual`` holds the arguments of calls with other numbers, ``answers`` the other numbers that data gave with what
    their guards say, ``told`` the contents that it has looked at, ``bound`` the constants of this step by number.
    """

    def __init__(
        self, candidates: Sequence[FunctionTrace], start: Callable[[], Capturing],
        batch_of: Callable[[FunctionTrace], Any], read: Read, tell: Tell = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.candidates, self._start, self._batch_of, self._read = candidates, start, batch_of, read
        self._tell = tell
        self.trace = candidates[0] if candidates else FunctionTrace()
        self.execution = None if candidates else Execution(start(), self.trace)
        self.actual: dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self.answers: dict[int, tuple[Any, Any]] = {}
        self.told: dict[int, list[Contents]] = {}
        self.bound: dict[int, torch.Tensor] = {}
        self._at = 0
        self._inside = False
        self._used: set[int] = set()
        self._others: dict[int, int] = {}  # numbers of tensors that are not this trace's own, by id
        self._held: list[Any] = []  # keeps their ids from being given to others
        self._thread = threading.get_ident()
        self._watched = Watched()
        self.shown = [self.trace]  # the traces whose tensors the code has seen

    def run(self, code: Callable[[Any], Any]) -> Any:
        """What ``code(batch)`` returns, every torch function that it calls being answered here."""
        batch = self._batch_of(self.trace) if self.execution is None else self.execution.capture.stand_ins
        grad = torch.is_grad_enabled()
        try:
            methods = compat_packed.methods_of_tensors(self._may_look)
            garbage = garbage_apart(partial(self._step_aside, True), self._step_aside)
            with heeded(), garbage, compat_calls.calls_seen(self.special), methods, self:
                return code(batch)
        except BaseException:
            torch.set_grad_enabled(grad)  # whatever failed may have failed in no_grad's exit, too
            raise

    def _step_aside(self, aside: bool) -> bool:
        """Whether calls run as they are from now on, and returns whether they did before."""
        before, self._inside = self._inside, aside
        return before

    def settle(self, results: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """To be called when the code has returned ``results``: their numbers. A trace that goes on from here, or has
        other results, is not what was followed."""
        self._watched.check()
        if self.execution is None and self._at < len(self.trace.calls):
            ended = [c for c in self.candidates if len(c.calls) == self._at and self._leads_here(c)]
            if ended:
                self._change_to(ended[0])
            else:
                self.go_on()
        numbers = tuple(self.number(t) for t in results)
        if self.execution is None and (
            numbers != self.trace.results or not self._holds(self.trace.end_guards)
        ):
            self.go_on()
            numbers = tuple(self.number(t) for t in results)
        self.trace.results = numbers
        return numbers

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that the code has seen; -1 for a constant that it handed no function."""
        n = self.trace.index.get(id(tensor))
        n = self._others.get(id(tensor), -1) if n is None else n
        if n < 0 and compat.is_fake(tensor):
            raise unknown("among the results")
        return n

    @property
    def other_numbers(self) -> dict[int, int]:
        """Numbers of tensors that the code has seen and that are not the trace's own, by id."""
        return dict(self._others)

    def made_again(self, bound: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Captures all calls of the trace anew, with the constants ``bound``, instead of running the code. Returns
        the new numbers of its tensors."""
        self._at, self.bound = len(self.trace.calls), dict(bound)
        return self.go_on()

    # --- calls ---

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        return self._called(func, args, kwargs or {})

    def special(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls that torch's function modes do not see: autograd functions, scripted code, functional transforms."""
        if self._inside or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        if isinstance(func, compat_calls.Special):
            func.keys = tuple(inner_key(f) for f in func.inner_code)
            func.functions = tuple(map(function_key, functions_in(args, kwargs)))
        self._inside = True
        try:
            return self._called(func, args, kwargs)
        finally:
            self._inside = False

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.execution is None:
            try:
                return self._follow(func, args, kwargs)
            except _Differs:
                pass
            known = self.trace
            for other in self.candidates:
                if other is known or self._at >= len(other.calls) or not self._leads_here(other):
                    continue
                self._change_to(other)
                try:
                    if self._holds(_decisive(other.calls[: self._at])):
                        return self._follow(func, args, kwargs)
                except _Differs:
                    pass
                self._change_to(known)
            self.go_on()
            assert self.execution is not None
            self.execution.capture.resume()
        inside, self._inside = self._inside, True
        try:
            return self._capture(func, args, kwargs)
        except TightshipError as no:
            told(no)
            raise
        finally:
            self._inside = inside

    # --- following a trace ---

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._at >= len(self.trace.calls):
            raise _Differs
        call = self.trace.calls[self._at]
        if call.func is not func and call.func != func:
            raise _Differs
        if call.bound or call.repeats or not plainly_same(args, kwargs, call.args, call.kwargs):
            self._compare(call, args, kwargs)
        state = call.state
        if not state.is_now():
            raise _Differs
        if state.saves or compat_capture.saving_hooks():  # only running them tells what they do
            raise _Differs
        if call.kind == "read":
            inside, self._inside = self._inside, True  # what runs for it belongs to no trace
            try:
                answer = self._looked_again(call, func, args, kwargs)
            finally:
                self._inside = inside
        elif call.reads_number:
            answer = self._number(call)
        elif call.guards and not (
            self._at not in self.actual and self._holds(call.guards) and self._reads_the_same(call)
        ):
            raise _Differs
        else:
            answer = self._answer(call, func, args, kwargs)
        self._at += 1
        return answer

    def _number(self, call: FunctionCall) -> Any:
        """The number that data say now, the one of the trace or another."""
        (guard,) = call.guards
        if self._at in self.actual or not guard.tells(self.actual):
            raise _Differs
        said = guard.answer(self._read(self.trace, self.bound))
        if said == guard.expected:
            return call.answer
        try:
            answer = type(call.answer)(said)
        except (TypeError, ValueError, OverflowError):  # eager raises
            raise _Differs from None
        self.answers[self._at] = answer, said
        return answer

    def _answer(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Any:
        if call.kind == "op":
            if call.bound and self.bound:
                return map_tensors(lambda t: self.bound.get(self.trace.index[id(t)], t), call.answer)
            return list(call.answer) if type(call.answer) is list else call.answer
        if call.kind in ("last", "hook", "nothing"):
            return None
        answer = func(*args, **kwargs)
        if call.kind == "data":
            if form(answer) != self.trace.constants[call.first]:
                raise _Differs
            self._bind(call.first, answer)
        return answer

    def _looked_again(self, call: FunctionCall, func: Any, args: Any, kwargs: Any) -> Any:
        """What the code's look at contents says now."""
        (guard,) = call.guards
        contents = self._contents(0, guard)
        if contents is None:
            raise _Differs
        answer = self._shown(func, contents[0], args, kwargs, guard.graph)
        if type(answer) is bool and answer is not call.answer:
            raise _Differs
        return answer

    def _contents(self, nth: int, guard: Any) -> Contents | None:
        """What the call being made looks at, ``nth`` in it; None where its step cannot be run for that."""
        known = self.told.setdefault(self._at, [])
        if nth == len(known):
            if isinstance(guard, Reading):
                contents = self._tell(guard)
            elif guard.tells(self.actual):
                contents = (guard.answer(self._read(self.trace, self.bound)),)
            else:
                contents = None
            if contents is None:
                return None
            known.append(contents)
        return known[nth]

    def _reads_the_same(self, call: FunctionCall) -> bool:
        """Whether what a call depends on of what the step computes is as it was when it was captured."""
        inside, self._inside = self._inside, True
        try:
            for n, guard in enumerate(g for g in call.guards if isinstance(g, Reading)):
                contents = self._contents(n, guard)
                if contents is None or guard.finish(contents) != guard.expected:
                    return False
            return True
        finally:
            self._inside = inside

    def _shown(self, func: Any, contents: torch.Tensor, args: Any, kwargs: Any, graph: str) -> Any:
        """The answer of a function that looks at contents."""
        answer = compat.of_contents(func, contents, args, kwargs, graph)
        if name_of(func) in ("numpy", "__array__") and not self._watched.add(contents, whatever=True):
            answer.flags.writeable = False  # too large to be watched
        return answer

    def _compare(self, call: FunctionCall, args: Any, kwargs: Any) -> None:
        if call.kind == "data":  # what it makes of its arguments is compared
            return
        if call.bound:
            self._bind_constants(call, args, kwargs)
        compared = Arguments(lambda key: self.trace.index.get(key, self._others.get(key)))
        if not compared.alike((tuple(args), kwargs), (call.args, call.kwargs), self.trace.index.get):
            raise _Differs
        if compared.structural(call.func) or (compared.differs and hands_back(call)):
            raise _Differs
        if compared.differs and isinstance(call.func, compat_calls.Special):  # code of the caller's own
            known = self.trace.renumbering
            if known is None or not known.looks_alike(self.trace, call, tuple(args), kwargs, self.number):
                raise _Differs
        if compared.differs or call.repeats:
            self.actual[self._at] = (call.func, tuple(args), dict(kwargs))
            self._held.append(args)

    def _bind_constants(self, call: FunctionCall, args: Any, kwargs: Any) -> None:
        """Each step may bring another tensor of the same form where the trace has a constant."""
        trace = self.trace
        now, known = list(tensors_in((tuple(args), kwargs))), list(tensors_in((call.args, call.kwargs)))
        if len(now) != len(known):
            raise _Differs
        for t, k in zip(now, known, strict=True):
            n = trace.index[id(k)]
            if n not in trace.constants:
                continue
            if n in self.bound:
                if self.bound[n] is not t:
                    raise _Differs
            elif t is k:
                if form(t) != trace.constants[n]:
                    raise _Differs
                self._bind(n, t)
            else:
                stranger = id(t) not in trace.index and id(t) not in self._others and not compat.is_fake(t)
                if not stranger or n in trace.rigid or form(t) != trace.constants[n] or self._shares(t):
                    raise _Differs
                self._bind(n, t)

    def _bind(self, n: int, tensor: torch.Tensor) -> None:
        self.bound[n] = tensor
        self._others[id(tensor)] = n
        self._held.append(tensor)
        self._watched.add(tensor)

    def _shares(self, tensor: torch.Tensor) -> bool:
        """Whether a new constant lies in bytes that the step knows by another name."""
        key = compat.storage_key(tensor)
        real = [t for t in self.trace.tensors[: self.trace.inputs] if not compat.is_fake(t)]
        leaves = self._read(self.trace, {}).values()
        return any(compat.storage_key(t) == key for t in (*real, *self.bound.values(), *leaves))

    def _holds(self, guards: Sequence[Any], trace: FunctionTrace | None = None) -> bool:
        if not guards:
            return True
        tensors = self._read(trace or self.trace, self.bound)
        return all(g.holds(tensors, self.actual) for g in guards)

    def take_numbers(self) -> None:
        """Makes the numbers of this run those of the trace."""
        for k, (answer, said) in self.answers.items():
            call = self.trace.calls[k]
            call.answer, call.guards = answer, (replace(call.guards[0], expected=said),)
        for k, (func, args, kwargs) in self.actual.items():
            call = self.trace.calls[k]
            call.func = func
            args, kwargs = map_tensors(lambda t: self.trace.tensors[self.number(t)], (args, kwargs))
            call.args, call.kwargs = own_containers(args), own_containers(kwargs)

    # --- other traces ---

    def _leads_here(self, other: FunctionTrace) -> bool:
        """Whether the calls so far are also the first ones of ``other``."""
        if self.trace.common(other) < self._at or not all(
            other.constants.get(n) == form(t) and n not in other.rigid for n, t in self.bound.items()
        ):
            return False
        return self._holds(_decisive(other.calls[: self._at]), other)

    def _change_to(self, other: FunctionTrace) -> None:
        known = self.trace
        for k in range(self._at):
            a, b = known.calls[k], other.calls[k]
            compared = Arguments(known.index.get)
            compared.alike((a.args, a.kwargs), (b.args, b.kwargs), other.index.get)
            if compared.differs and k not in self.actual:
                self.actual[k] = (a.func, a.args, a.kwargs)
            if a.kind != "read" and a.reads_number and b.reads_number:
                self.answers[k] = self.answers.get(k, (a.answer, a.guards[0].expected))
        self._others |= {id(t): n for n, t in enumerate(known.tensors[: self._seen_so_far()])}
        self._held.append(known)
        self.trace = other
        self.shown.append(other)

    def _seen_so_far(self) -> int:
        calls = self.trace.calls
        return calls[self._at].first if self._at < len(calls) else len(self.trace.tensors)

    # --- capturing ---

    def go_on(self) -> dict[int, int]:
        """Makes the calls so far on fake tensors, in a new trace; the run can then go on with others. Returns the new
        numbers of tensors by those that they had."""
        inside, self._inside = self._inside, True  # what this calls itself belongs to no trace
        try:
            return self._make_again()
        finally:
            self._inside = inside

    def _make_again(self) -> dict[int, int]:
        known, trace = self.trace, FunctionTrace()
        with compat_capture.listed_as_they_lie():
            self.execution = Execution(self._start(), trace)
        # With other numbers a call may hand back its argument, or no longer: tensors get numbers of their own.
        new = {n: n for n in range(trace.inputs)}
        others = self._others
        trace.elsewhere = lambda key: new.get(known.index.get(key, others.get(key, -1)))
        states = compat_capture.States()
        with states.kept(), compat_capture.without_saving_hooks():  # calls under them are not followed
            for k, call in enumerate(known.calls[: self._at]):
                states.set(call.state)
                if k in self.answers:
                    call = replace(call, answer=self.answers[k][0])
                asked = self.actual.get(k, (call.func, call.args, call.kwargs))
                self._again(trace, new, call, *asked, told=self.told.get(k, ()))
        self.execution.capture.place(None)
        seen = {id(t): n for n, t in enumerate(known.tensors) if compat.is_fake(t)}
        self._others = {key: new[n] for key, n in {**self._others, **seen}.items() if n in new}
        trace.elsewhere = self._others.get
        self._held.append(known)
        self.trace = trace
        self.shown.append(trace)
        self.actual, self.answers, self.bound, self.told = {}, {}, {}, {}
        return new

    def _again(
        self, trace: FunctionTrace, new: dict[int, int], call: FunctionCall, func: Any, args: Any, kwargs: Any,
        *, told: Sequence[Contents] = (),
    ) -> None:  # fmt: skip
        """Makes a call of the known trace; ``new`` are the numbers of its tensors in the new one."""
        execution = self.execution
        assert execution is not None
        known = self.trace
        first, answer = len(trace.tensors), call.answer

        def own(t: torch.Tensor) -> torch.Tensor:
            n = known.index.get(id(t), self._others.get(id(t), -1))
            if n in known.constants:
                return self.bound.get(n, t)
            return trace.tensors[new[n]] if n in new else t

        args, kwargs = map_tensors(own, tuple(args)), map_tensors(own, dict(kwargs))
        guards = len(execution.capture.guards)
        if call.kind == "data":
            answer = self.bound[call.first]
            execution.constant(answer)
        elif call.kind == "now":
            self._note_constants(trace, args, kwargs, used=False)
            if isinstance(func, compat_calls.Special):
                func(*args, **kwargs)
        elif call.kind == "last":
            self._note_constants(trace, args, kwargs)
            execution.write_back(*args)
        elif call.kind == "hook":
            execution.add_hook(*args)
        elif call.kind in ("op", "read"):
            execution.capture.place(call.origin)
            self._note_constants(trace, args, kwargs)
            answer, _ = self._made(func, args, kwargs, told)
            if call.kind == "read":
                call = replace(call, answer=answer)
        made, before = list(tensors_in(answer)), list(tensors_in(call.answer))
        if not same_plain(answer, call.answer) or len(made) != len(before):
            raise Unsupported(
                f"{name_of(func)} at {call.origin} with a number that changes", "the shape of its result follows it",
                "keep the number as it was when the step was captured",
            )  # fmt: skip
        new.update({known.index[id(a)]: trace.index[id(b)] for a, b in zip(before, made, strict=True)})
        self._write_down(trace, call.kind, func, args, kwargs, answer, call.state, call.origin, first, guards)

    def _capture(self, func: Any, args: Any, kwargs: Any) -> Any:
        execution, trace = self.execution, self.trace
        assert execution is not None

        def own(t: torch.Tensor) -> torch.Tensor:
            n = self._others.get(id(t), -1) if id(t) not in trace.index else -1
            return trace.tensors[n] if n >= 0 else t

        args, kwargs = map_tensors(own, tuple(args)), map_tensors(own, dict(kwargs))
        origin, state = execution.capture.origin(), ExecutionState.now()
        tensors, name = list(tensors_in((args, kwargs))), name_of(func)
        first, guards = len(trace.tensors), len(execution.capture.guards)
        if func is write_back:
            kind, answer = "last", None
            self._note_constants(trace, args, kwargs)
            execution.write_back(*args)
        elif func is add_hook:
            kind, answer = "hook", None
            execution.add_hook(*args)
        elif not tensors and name in MAKES_DATA:
            kind, answer = "data", func(*args, **kwargs)
            execution.constant(answer)
            self._watched.add(answer)
        elif tensors and name in READS and all(self._is_data(t) for t in tensors):
            kind, answer = "now", func(*args, **kwargs)
            self._note_constants(trace, args, kwargs, used=False)
            first = len(trace.tensors)
        elif name == "data.__set__" and has_already(trace, *args):
            kind, answer = "nothing", None
        else:
            check_call(name, args, kwargs, origin, trace, execution.capture)
            self._note_constants(trace, args, kwargs)
            answer, looked = self._made(func, args, kwargs)
            kind = "op" if tensors or next(tensors_in(answer), None) is not None else "now"
            kind = "read" if looked else kind
        self._write_down(trace, kind, func, args, kwargs, answer, state, origin, first, guards)
        return list(answer) if type(answer) is list else answer

    def _made(self, func: Any, args: Any, kwargs: Any, told: Sequence[Contents] = ()) -> tuple[Any, bool]:
        """The answer of a call made on fake tensors, and whether the code looks at contents by it, which it has been
        ``told`` if it is made again."""
        execution, name = self.execution, name_of(func)
        assert execution is not None
        capture = execution.capture
        guards = len(capture.guards)
        special = isinstance(func, compat_calls.Special)
        with capture.looking(told) if not special else nullcontext():
            if can_look(name, args):
                contents = execution.contents(func, args[0])
                return self._shown(func, contents, args, kwargs, capture.guards[-1].graph), True
            answer = execution.call(func, args, kwargs)
        new, given = capture.guards[guards:], list(tensors_in((args, kwargs)))
        return answer, name in READS and len(given) == len(new) == 1 and isinstance(new[0], Reading)

    def _may_look(self) -> bool:
        """Whether the code itself is running, and may look at what it computes."""
        return readings_now() is not None and not self._inside and threading.get_ident() == self._thread

    def _write_down(
        self, trace: FunctionTrace, kind: str, func: Any, args: Any, kwargs: Any, answer: Any,
        state: ExecutionState, origin: Origin, first: int, guards: int,
    ) -> None:  # fmt: skip
        assert self.execution is not None
        numbers = [trace.index[id(t)] for t in tensors_in((args, kwargs)) if id(t) in trace.index]
        answer = list(answer) if type(answer) is list else answer
        trace.calls.append(
            FunctionCall(
                func, own_containers(args), own_containers(kwargs), answer, kind, state, origin, first,
                bound=any(n in trace.constants for n in numbers), repeats=repeats(func, args, kwargs),
                guards=tuple(self.execution.capture.guards[guards:]),
            )
        )  # fmt: skip

    def _note_constants(self, trace: FunctionTrace, args: Any, kwargs: Any, *, used: bool = True) -> None:
        """Constants among the arguments get their numbers before the call's own results do."""
        assert self.execution is not None
        for t in tensors_in((args, kwargs)):
            if id(t) not in trace.index and not compat.is_fake(t) and not compat.is_functorch(t):
                self.execution.constant(t)
                self._watched.add(t)
            n = trace.index.get(id(t))
            if used and n in trace.constants:
                self._used.add(n)

    def _is_data(self, tensor: torch.Tensor) -> bool:
        """Whether the contents are there: a constant that no op of this step can have written."""
        n = self.trace.index.get(id(tensor))
        known = n is None or n in self.trace.constants
        return known and n not in self._used and not compat.is_fake(tensor)


def _decisive(calls: Sequence[FunctionCall]) -> list[Any]:
    """The guards of calls that no other number satisfies."""
    return [g for call in calls if not call.reads_number for g in call.guards]
