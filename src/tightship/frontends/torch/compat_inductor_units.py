"""The C++ kernels of a pass, several in one translation unit.

A part of ``compat``, under the same rule as `compat_inductor`: private interfaces of one version.

Inductor builds each kernel by itself. Of the second of the processor that it takes, nine tenths go into reading
headers and linking: a kernel more in the same translation unit takes a tenth of that. The functions are compiled with
the same flags, each from its own text, so that they compute the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

__all__ = ["several_kernels_a_unit"]

FEWEST, MOST = 4, 32
"""Kernels of a translation unit: fewer are not worth it, and the compiler takes memory for each."""

_INCLUDE: Final = re.compile(r"\s*#include [^\n]*\n")
_KERNEL: Final = re.compile(r'\s*extern "C"\s+void\s+kernel(?=\()')

_CALL = """
static PyObject* kernel_{k}_py(PyObject*, PyObject* args) {{
    try {{
        if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {count}) [[unlikely]]
            throw std::runtime_error("a tuple of {count} args required");
        kernel_{k}({args});
        Py_RETURN_NONE;
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }}
    return nullptr;
}}
static PyMethodDef kernel_{k}_def = {{"kernel_{k}", kernel_{k}_py, METH_VARARGS, ""}};
"""

_ALL = """
static PyObject* all_kernels() {{
    PyObject* found = PyTuple_New({count});
    if (!found) return nullptr;
    PyMethodDef* defs[] = {{{defs}}};
    for (Py_ssize_t k = 0; k < {count}; ++k) {{
        PyObject* one = PyCFunction_New(defs[k], nullptr);
        if (!one) {{
            Py_DECREF(found);
            return nullptr;
        }}
        PyTuple_SET_ITEM(found, k, one);
    }}
    return found;
}}
"""


@dataclass(frozen=True)
class _Kernel:
    """A kernel that is not built yet: the C++ types of what it takes, and its text."""

    types: tuple[str, ...]
    includes: tuple[str, ...]
    function: str  # from its parameters on

    @classmethod
    def of(cls, types: Sequence[str], text: str) -> _Kernel | None:
        """None of a text that is more than one function by that name, behind lines that include headers."""
        includes, at = [], 0
        while found := _INCLUDE.match(text, at):
            includes.append(found[0].strip())
            at = found.end()
        head = _KERNEL.match(text, at)
        if head is None or re.search(r"\bkernel\b", text[head.end() :]) or not _one_body(text[head.end() :]):
            return None
        return cls(tuple(types), tuple(includes), text[head.end() :])


def _one_body(text: str) -> bool:
    """Whether nothing follows the first block of a function."""
    depth = 0
    for found in re.finditer(r"[{}]", text):
        depth += 1 if found[0] == "{" else -1
        if depth <= 0:
            return depth == 0 and not text[found.end() :].strip()
    return False


def _functions(kernels: Sequence[_Kernel]) -> str:
    """C++ of all kernels, each by a name of its own."""
    includes = dict.fromkeys(line for kernel in kernels for line in kernel.includes)
    texts = (f'extern "C" void kernel_{k}{kernel.function}' for k, kernel in enumerate(kernels))
    return "\n".join((*includes, *texts))


def _calls(kernels: Sequence[_Kernel]) -> str:
    """C++ that Python calls them by."""
    calls = []
    for k, kernel in enumerate(kernels):
        types = [name.replace("const ", "") for name in kernel.types]
        args = ", ".join(f"parse_arg<{name}>(args, {n})" for n, name in enumerate(types))
        calls.append(_CALL.format(k=k, count=len(types), args=args))
    defs = ", ".join(f"&kernel_{k}_def" for k in range(len(kernels)))
    return "".join((*calls, _ALL.format(count=len(kernels), defs=defs)))


def _unit(kernels: Sequence[_Kernel], submit: Any) -> Callable[[], Callable[[], tuple[Any, ...]]]:
    """A module's one function, which gives all kernels, in their order, once its compiler is through."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Unit(CppPythonBindingsCodeCache):  # type: ignore[misc]
        call_entry_function = "return all_kernels();"
        extra_parse_arg = _calls(kernels).replace("{", "{{").replace("}", "}}")  # a template

    made: Callable[[], Any] = Unit.load_pybinding_async([], _functions(kernels), submit_fn=submit)
    return made


@contextmanager
def several_kernels_a_unit() -> Iterator[None]:
    """Inside, what Inductor has written is built with several kernels in one translation unit, a few for each of its
    compiling processes; what other threads compile meanwhile is not changed."""
    from torch._inductor.async_compile import AsyncCompile

    here = threading.get_ident()
    waiting: WeakKeyDictionary[Any, dict[_Kernel, None]] = WeakKeyDictionary()
    one, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        kernel = _Kernel.of(argtypes, source_code) if threading.get_ident() == here else None
        if kernel is None:
            return one(self, argtypes, source_code)
        waiting.setdefault(self, {})[kernel] = None
        return kernel

    def wait_for_all(self: Any, scope: dict[str, Any]) -> None:
        built = _built(tuple(waiting.pop(self, ())), self.submit)
        scope.update({name: built[x]() for name, x in scope.items() if isinstance(x, _Kernel)})
        wait(self, scope)

    AsyncCompile.cpp_pybinding, AsyncCompile.wait = cpp_pybinding, wait_for_all
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = one, wait


def _built(kernels: Sequence[_Kernel], submit: Any) -> Mapping[_Kernel, Callable[[], Any]]:
    """How each kernel is had, once the compilers are under way."""
    from torch._inductor.async_compile import get_compile_threads

    threads = get_compile_threads()
    size = min(MOST, max(FEWEST, -(-len(kernels) // threads)))
    found: dict[_Kernel, Callable[[], Any]] = {}
    for unit in (kernels[k : k + size] for k in range(0, len(kernels), size)):
        load = _unit(unit, submit if threads > 1 else None)
        for k, kernel in enumerate(unit):
            found[kernel] = partial(_loaded, load, k)
    return found


def _loaded(load: Callable[[], Callable[[], tuple[Any, ...]]], k: int) -> Any:
    return load()()[k]
