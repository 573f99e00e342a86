"""Undoing what a run of Python code changed, as far as it can be reached from the code.

``fit`` runs a step's code once before the first step. Counters, schedules, iterators and random generators must then
be where they were. They are found by what the code can reach: closures, the globals that it names, defaults and
attributes of functions, bound objects, classes, and what those hold.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import io
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tightship.errors import Infeasible, Unplannable, Unsupported
from tightship.frontends.torch.containers import CONTAINERS, contents, refill

__all__ = ["globals_of", "python_state_kept"]


LIMIT = 200_000
"""Objects looked at, at most, the nearest to the code first: large data sets are rarely what changes."""
ELEMENTS = 10_000
"""Elements of one container looked into, at most."""
ARRAY = 1 << 26
"""Bytes of the largest NumPy array that is kept."""

Undo = Callable[[], None]


@contextlib.contextmanager
def python_state_kept(*roots: Any, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Puts back what code inside changes of the objects that the functions and objects ``roots`` can reach, if
    ``when`` says so at the end.

    Raises ``Unsupported`` where a generator or another iterator that cannot be set back has moved on, unless what
    ended the code is an error after which nothing goes on from there.
    """
    found = _Reachable()
    found.look_at(roots)
    ended: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended = error
        raise
    finally:
        if when():
            moved = found.moved()
            found.undo()
            if moved is not None and (ended is None or isinstance(ended, (Unplannable, Infeasible))):
                raise Unsupported(
                    f"{moved}, which the step's code moves on",
                    "fit runs that code once beforehand and cannot set it back",
                    "make a new one and pass prepare=False: the first step then captures",
                ) from ended


class _Reachable:
    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept, or another object could get the id
        self._todo: deque[Any] = deque()
        self._undo: list[Undo] = []
        self._moving: list[tuple[Any, Any]] = []
        # Of iterators that cannot be set back, by id: a copy takes their place.
        self._copies: dict[int, Any] = {}
        self._replaceable: set[int] = set()
        self._gone: set[int] = set()

    def look_at(self, roots: Iterable[Any]) -> None:
        self._todo.extend(roots)
        while self._todo and len(self._seen) < LIMIT:
            x = self._todo.popleft()
            if isinstance(x, _PLAIN) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            self._visit(x)

    def undo(self) -> None:
        for put_back in reversed(self._undo):
            put_back()
        self._undo.clear()  # they hold this, which holds all that was found

    def moved(self) -> str | None:
        """An iterator that is no longer where it was and cannot be set back."""
        gone = [x for x, was in self._moving if _position(x) != was]
        stuck = [x for x in gone if id(x) not in self._copies or id(x) not in self._replaceable]
        self._gone = {id(x) for x in gone}
        return f"a {type(stuck[0]).__name__}" if stuck else None

    def _held(self, values: Iterable[Any]) -> None:
        """Values to look at, in places where others can be put."""
        values = list(values)
        self._replaceable |= {id(v) for v in values}
        self._todo += values

    def _now(self, value: Any) -> Any:
        return self._copies[id(value)] if id(value) in self._gone and id(value) in self._copies else value

    # --- kinds of objects ---

    def _visit(self, x: Any) -> None:
        if isinstance(x, types.FunctionType):
            self._function(x)
        elif isinstance(x, types.MethodType):
            self._todo += [x.__self__, x.__func__]
        elif isinstance(x, (staticmethod, classmethod)):
            self._todo.append(x.__func__)
        elif isinstance(x, property):
            self._todo += [x.fget, x.fset]
        elif isinstance(x, functools.partial):
            self._todo += [x.func, x.args, x.keywords]
        elif isinstance(x, type):
            self._class(x)
        elif isinstance(x, CONTAINERS):
            self._container(x)
        elif isinstance(x, (tuple, frozenset)):
            self._todo += contents(x)[:ELEMENTS]
        elif isinstance(x, io.IOBase):
            self._file(x)
        elif isinstance(x, types.GeneratorType) or hasattr(type(x), "__next__"):
            self._iterator(x)
        elif not self._drawing(x) and not isinstance(x, torch.Tensor) and not _of_threads(x):
            self._object(x)

    def _function(self, fn: types.FunctionType) -> None:
        if _of_a_library(fn.__module__):
            return
        for cell in fn.__closure__ or ():
            self._cell(cell)
        self._todo += [fn.__defaults__, fn.__kwdefaults__, vars(fn)]
        for name in globals_of(fn.__code__):
            if name in fn.__globals__:
                self._entry(fn.__globals__, name)
                self._module(fn.__globals__[name], fn.__code__)
            else:
                self._undo.append(functools.partial(fn.__globals__.pop, name, None))

    def _cell(self, cell: types.CellType) -> None:
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            return
        self._undo.append(lambda: setattr(cell, "cell_contents", self._now(held)))
        self._held([held])

    def _entry(self, scope: dict[str, Any], name: str) -> None:
        held = scope[name]

        def put_back() -> None:
            if scope.get(name) is not self._now(held):
                scope[name] = self._now(held)

        self._undo.append(put_back)
        self._held([held])

    def _module(self, module: Any, code: types.CodeType) -> None:
        """What a function names of a module of the caller's: ``config.beta``."""
        if not isinstance(module, types.ModuleType) or _of_a_library(module.__name__):
            return
        for name in code.co_names:
            if name in vars(module):
                self._entry(vars(module), name)

    def _class(self, cls: type) -> None:
        if _of_a_library(cls.__module__):
            return
        for name, held in list(vars(cls).items()):
            if name.startswith("__") and name not in ("__init__", "__call__", "__getattr__"):
                continue
            self._todo.append(held)
            if not callable(held) and not isinstance(held, _DESCRIPTORS):
                self._undo.append(functools.partial(_set_class_attribute, cls, name, held))
        self._todo += cls.__mro__[1:]

    def _container(self, x: Any) -> None:
        held = contents(x)

        def put_back() -> None:
            if isinstance(held, dict):
                refill(x, {k: self._now(v) for k, v in held.items()})
            else:
                refill(x, [self._now(v) for v in held] if isinstance(held, list) else held)

        self._undo.append(put_back)
        values = held.values() if isinstance(held, dict) else held
        self._held(v for v, _ in zip(values, range(ELEMENTS), strict=False))

    def _file(self, x: Any) -> None:
        """One that is only read is where it was; nothing is taken out of one that is written."""
        with contextlib.suppress(OSError, ValueError):
            in_memory = isinstance(x, (io.StringIO, io.BytesIO))
            if x.readable() and x.seekable() and (in_memory or not x.writable()):
                at = x.tell()
                self._undo.append(lambda: x.seek(at) and None)

    def _iterator(self, x: Any) -> None:
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
            self._todo += [a for a in _reduced(x)[1] if hasattr(type(a), "__next__")]
        state = _state(x)
        if state is not None and hasattr(type(x), "__setstate__"):
            self._undo.append(lambda: _set_state(x, state))
        elif _own(x, "__dict__") is not None:
            self._object(x)
        else:
            self._moving.append((x, _position(x)))
            with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
                self._copies[id(x)] = copy.copy(x)

    def _drawing(self, x: Any) -> bool:
        """Generators of random numbers."""
        if isinstance(x, random.Random):
            state = x.getstate()
            self._undo.append(lambda: x.setstate(state))
            return True
        if isinstance(x, torch.Generator):
            kept = x.get_state()
            self._undo.append(lambda: x.set_state(kept) and None)
            return True
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        if isinstance(x, numpy.random.Generator):
            bits, drawn = x.bit_generator, x.bit_generator.state
            self._undo.append(lambda: setattr(bits, "state", drawn))
            return True
        if isinstance(x, numpy.random.RandomState):
            whole = x.get_state(legacy=False)
            self._undo.append(lambda: x.set_state(whole))
            return True
        if isinstance(x, numpy.ndarray):
            if x.nbytes <= ARRAY and x.dtype != object and x.flags.writeable:
                content = x.copy()
                self._undo.append(lambda: numpy.copyto(x, content))
            return True
        return False

    def _object(self, x: Any) -> None:
        self._todo.append(type(x))
        attributes = _own(x, "__dict__")
        if isinstance(attributes, dict):
            held = dict(attributes)

            def put_back() -> None:
                if not _of_threads(x):  # the step's code may have started one
                    refill(attributes, {k: self._now(v) for k, v in held.items()})

            self._undo.append(put_back)
            self._held(held.values())
        for name in _slots(type(x)):
            value = _own(x, name, self)
            if value is not self:
                self._undo.append(functools.partial(object.__setattr__, x, name, value))
                self._todo.append(value)


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, types.CodeType,
    types.BuiltinFunctionType, types.ModuleType, slice, range,
)  # fmt: skip
_DESCRIPTORS = (property, staticmethod, classmethod, types.MemberDescriptorType, types.GetSetDescriptorType)
_LIBRARIES = {
    "torch", "numpy", "scipy", "transformers", "builtins", "tightship", "jax", "tensorflow", "pandas", "sympy",
    "pytest", "_pytest", "pluggy", "IPython", "ipykernel",
    *sys.stdlib_module_names,
} - {"__main__"}  # fmt: skip


def globals_of(code: types.CodeType) -> set[str]:
    """The names that code reads of its module, and ``<writes>`` if it may change any."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= globals_of(const)
    writes = {"STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"}
    return names | {"<writes>" for i in dis.get_instructions(code) if i.opname in writes}


def _of_threads(x: Any) -> bool:
    """Whether threads agree by an object: others wait for it or change it, too, and what they did is not undone. With
    no other thread it is as any other, but that no thread can be set back that has begun."""
    modules = {cls.__module__.partition(".")[0] for cls in type(x).__mro__}
    if not modules.isdisjoint(_OF_THREADS):
        return True
    return not modules.isdisjoint(("threading", "queue")) and (
        isinstance(x, threading.Thread) or threading.active_count() > 1
    )


_OF_THREADS = ("_thread", "_queue", "asyncio", "concurrent", "multiprocessing", "socket", "subprocess")


def _own(x: Any, name: str, default: Any = None) -> Any:
    """An attribute that the object has by itself: what stands for a module that is not there raises when it is asked
    for others."""
    try:
        return object.__getattribute__(x, name)
    except (AttributeError, TypeError):
        return default


def _of_a_library(module: Any) -> bool:
    return str(module or "").partition(".")[0] in _LIBRARIES


def _set_class_attribute(cls: type, name: str, held: Any) -> None:
    if vars(cls).get(name) is not held:
        setattr(cls, name, held)


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for c in cls.__mro__:
        given = vars(c).get("__slots__", ())
        names += [given] if isinstance(given, str) else list(given)
    return [n for n in names if not n.startswith("__")]


def _reduced(iterator: Any) -> Any:
    """How it would be pickled, in its own words: Python's default makes an object of a base class of it, which may
    take over what it holds (and close it)."""
    if vars(object)["__reduce__"] is getattr(type(iterator), "__reduce__", None):
        raise TypeError(iterator)
    return iterator.__reduce__()


def _state(iterator: Any) -> Any:
    """What ``__setstate__`` of the iterator takes; None if it tells nothing."""
    try:
        parts = _reduced(iterator)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    state = parts[2] if len(parts) > 2 else None
    return tuple(x.copy() if isinstance(x, list) else x for x in state) if isinstance(state, tuple) else state


def _set_state(iterator: Any, state: Any) -> None:
    if _state(iterator) != state:
        iterator.__setstate__(
            tuple(x.copy() if isinstance(x, list) else x for x in state)
            if isinstance(state, tuple)
            else state
        )


def _position(iterator: Any) -> Any:
    """Something that changes when the iterator moves on."""
    frame = getattr(iterator, "gi_frame", None)
    if isinstance(iterator, types.GeneratorType):
        return None if frame is None else (frame.f_lasti, len(frame.f_locals), _plain(frame.f_locals))
    try:
        parts = _reduced(iterator)
        return _plain({k: repr(v) for k, v in enumerate(parts[1:])})
    except (TypeError, NotImplementedError, AttributeError):
        return getattr(iterator, "line_num", None)


def _plain(values: dict[Any, Any]) -> tuple[Any, ...]:
    return tuple((k, v) for k, v in values.items() if isinstance(v, (bool, int, float, str)))
