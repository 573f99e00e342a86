"""Whether code only raises for one of the answers to a question: assertions, checks of arguments.

Read from the bytecode of the frame that asks (`dis`): the answer is tested by a jump, and one side of it comes to a
``raise`` on every way.
"""

from __future__ import annotations

import bisect
import dis
import functools
import os
import sys
from collections.abc import Collection
from types import CodeType

import torch

__all__ = ["answer_without_error"]

_TORCH = os.path.dirname(os.path.abspath(str(torch.__file__))) + os.sep
_BETWEEN = tuple(_TORCH + name for name in ("_tensor.py", "_ops.py", "overrides.py", "utils" + os.sep))
"""What runs between the code that asks and the question."""
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))) + os.sep
_CALLS = {"PRECALL", "CALL"}
_PASSED = {"TO_BOOL", "CACHE", "EXTENDED_ARG"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_GOES_ON = {"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE"}
_LEAVES = {*_GOES_ON, "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL"}
_RAISES = {"RAISE_VARARGS", "RERAISE", "CLEANUP_THROW", "WITH_EXCEPT_START"}
"""What raises; the exit of a ``with`` lets errors pass."""


def answer_without_error() -> bool | None:
    """Which truth of what is being asked for does not end in a ``raise``; None if both go on, or the caller's code
    catches errors. Of torch's code, what its modules do around hooks raises them again."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN, *_BETWEEN)):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    found = _answer(frame.f_code, frame.f_lasti)
    while found is not None and frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        code = frame.f_code
        if not code.co_filename.startswith(_TORCH) and _catches(code, frame.f_lasti):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return found


@functools.lru_cache(1024)
def _answer(code: CodeType, at: int) -> bool | None:
    rows = list(dis.get_instructions(code))
    places = {row.offset: n for n, row in enumerate(rows)}
    n = bisect.bisect_right(rows, at, key=lambda row: row.offset) - 1  # it, or one of its inline caches
    if rows[n].opname in _CALLS:
        n = _after_call(rows, n)
    holds = True
    while True:
        two = [(row.opname, row.argval) for row in rows[n : n + 2]]
        if two == [("STORE_FAST", two[0][1]), ("LOAD_FAST", two[0][1])]:  # good = …; if good
            n += 2
        elif rows[n].opname in (*_PASSED, "UNARY_NOT"):
            holds ^= rows[n].opname == "UNARY_NOT"
            n += 1
        else:
            break
    name = rows[n].opname
    if not name.startswith("POP_JUMP") or not name.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    jumps_on = name.endswith("_IF_TRUE")
    sides = {jumps_on: places[rows[n].argval], not jumps_on: n + 1}
    ends = {answer: _raises(rows, begin, places) for answer, begin in sides.items()}
    return None if ends[True] == ends[False] else ends[False] is holds


def _after_call(rows: list[dis.Instruction], n: int) -> int:
    """What follows ``bool(…)`` or ``….item()``; the call itself if it is another, which may ask for more."""
    k = n - 1
    while rows[k].opname in (*_CALLS, *_PASSED):
        k -= 1
    after = next(m for m in range(n, len(rows)) if rows[m].opname not in (*_CALLS, *_PASSED))
    if rows[n].argval == 0:
        return after if rows[k].argval == "item" else n
    there = 0
    while rows[n].argval == 1 and k >= 0 and rows[k].opcode not in _JUMPS:
        if there == 1 and (rows[k].opname, rows[k].argval) == ("LOAD_GLOBAL", "bool"):
            return after
        there += dis.stack_effect(rows[k].opcode, rows[k].arg)
        k -= 1
    return n


def _raises(
    rows: list[dis.Instruction], begin: int, places: dict[int, int], leaves: Collection[str] = _LEAVES
) -> bool:
    """Whether every way from there comes to a ``raise``, and nothing is handed out before."""
    ways, seen, found = [begin], set[int](), False
    while ways:
        n = ways.pop()
        if n in seen:
            continue
        seen.add(n)
        name = rows[n].opname
        if name in _RAISES:
            found = True
            continue
        if name in leaves or n + 1 == len(rows):
            return False
        if rows[n].opcode in _JUMPS:
            ways.append(places[rows[n].argval])
        if name not in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"):
            ways.append(n + 1)
    return found


@functools.lru_cache(1024)
def _catches(code: CodeType, at: int) -> bool:
    """Whether an ``except`` of this code goes on after an error of what is being called: one that raises in its turn
    does not, nor does a ``finally``."""
    rows = list(dis.get_instructions(code))
    places = {row.offset: n for n, row in enumerate(rows)}
    return any(
        not _raises(rows, places[entry.target], places, _GOES_ON)
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
        if entry.start <= at < entry.end
    )
