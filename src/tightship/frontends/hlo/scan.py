"""Reading HLO text token by token, with the place of what is wrong."""

from __future__ import annotations

import re
from typing import NoReturn

from tightship.errors import BadInput
from tightship.frontends.hlo.shape import BITS, Shape

__all__ = ["Scan"]

_DEPTH = 64
"""Tuples nested deeper than this are refused: nothing real is, and recursion has to end."""

_RANK = 256
"""Dimensions an array has at most."""

_SHOWN = 24
_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|/\*.*?\*/|//[^\n]*", re.S)
_BLANK = re.compile(r"\s*")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]\n]*)\](\{[^{}\n]*\})?")
_NAME = re.compile(r"%?([\w.\-]+)")
_KEY = re.compile(r"\s*,\s*([\w.\-]+)\s*=\s*")
_PLAIN = re.compile(r'[^,\s{}()"\[\]]+')
_GROUP = re.compile(rf'\{{(?:[^{{}}()"\[\]]|{_STRING})*\}}')
_NESTED = re.compile(rf"[{{}}()\[\]]|{_STRING}")
_QUOTED = re.compile(_STRING)
_DIM = re.compile(r"\s*(<=)?(\d+|\?)\s*\Z")
_APART = re.compile(r"[ \t]+(?=\{)")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def _spaces(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else re.sub(r"[^\n]", " ", text)


class Scan:
    """A position in a text. ``file`` is for messages. Comments read as blanks,
    but stay where text is kept as it is."""

    def __init__(self, text: str, file: str) -> None:
        self.given = text
        self.text = _COMMENT.sub(_spaces, text) if "/*" in text or "//" in text else text
        self.file = file
        self.at = 0
        self._shapes: dict[str, Shape] = {}

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise ``BadInput``: line, column, what was expected there and what stands there."""
        at = self.at if at is None else at
        found = self.text[at : at + _SHOWN].partition("\n")[0]
        if at >= len(self.text):
            found = "the end of the text"
        elif not found:
            found = "the end of the line"
        column = at - self.text.rfind("\n", 0, at)
        raise BadInput(f"expected {expected}", found, f"{self.file}:{self.line(at)}:{column}")

    def blank(self) -> None:
        """Skip blanks and line ends."""
        found = _BLANK.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def ahead(self, text: str) -> bool:
        self.blank()
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Whether ``text`` stands next, after blanks; goes past it if so."""
        found = self.ahead(text)
        self.at += len(text) if found else 0
        return found

    def expect(self, text: str, why: str = "") -> None:
        if not self.take(text):
            self.fail(f"{text!r}{' ' + why if why else ''}")

    def name(self, what: str) -> str:
        self.blank()
        found = self.match(_NAME)
        return found[1] if found else self.fail(what)

    def shape(self, depth: int = 0) -> Shape:
        """An array, a token or a tuple of shapes."""
        self.blank()
        found = self.match(_ARRAY)
        if found is not None:
            known = self._shapes.get(found[0])
            if known is None:
                known = self._shapes[found[0]] = self._array(found)
            return known
        start = self.at
        if not self.take("("):
            self.fail("a shape, like f32[2,3]{1,0} or (f32[], s32[2])")
        if depth == _DEPTH:
            self.fail(f"tuples nested at most {_DEPTH} deep", start)
        parts: list[Shape] = []
        while not self.take(")"):
            if parts:
                self.expect(",", "or ')' in a tuple shape")
            parts.append(self.shape(depth + 1))
        return Shape("tuple", parts=tuple(parts))

    def _array(self, found: re.Match[str]) -> Shape:
        dtype, inside, layout = found.groups()
        if dtype not in BITS and dtype not in ("token", "opaque"):
            self.fail("an element type, like f32", found.start())
        dims: list[int] = []
        dynamic: list[bool] = []
        for text in inside.split(",") if inside.strip() else ():
            dim = _DIM.match(text)
            if dim is None:
                self.fail("a dimension: a number, <=number or ?", found.start(2))
            dims.append(-1 if dim[2] == "?" else int(dim[2]))
            dynamic.append(bool(dim[1]) or dim[2] == "?")
        if len(dims) > _RANK:
            self.fail(f"at most {_RANK} dimensions", found.start(2))
        marks = tuple(dynamic) if any(dynamic) else ()
        return Shape(dtype, tuple(dims), layout[1:-1] if layout else None, dynamic=marks)

    def attributes(self) -> tuple[tuple[str, str], ...]:
        """``, key=value`` as often as it stands there; values as text."""
        found: list[tuple[str, str]] = []
        while (key := self.match(_KEY)) is not None:
            found.append((key[1], self.value()))
        return tuple(found)

    def value(self) -> str:
        """The text of a value: words, strings and anything in brackets, up to a comma or a blank; a brace after
        a blank belongs to it, as in the replica groups ``mesh['a'=2,'b'=4] {'a'}``."""
        start = self.at
        while self.at < len(self.text):
            if self.match(_PLAIN) or self.match(_GROUP) or self.match(_QUOTED):
                continue
            if self.at > start and self.match(_APART):
                continue
            if self.text[self.at] not in _CLOSING:
                break
            self.bracketed()
        if self.at == start:
            self.fail("the value of an attribute")
        return self.given[start : self.at]

    def bracketed(self) -> str:
        """The text between the bracket that stands here and the one that closes it; goes past both."""
        start = at = self.at
        waiting: list[str] = []
        while True:
            found = _NESTED.search(self.text, at)
            if found is None:
                self._unclosed(start, len(self.text))
            at, token = found.end(), found[0]
            if token in _CLOSING:
                waiting.append(_CLOSING[token])
            elif token[0] != '"':
                if token != waiting.pop():
                    self._unclosed(start, found.start())
                if not waiting:
                    self.at = at
                    return self.given[start + 1 : at - 1]

    def _unclosed(self, start: int, at: int) -> NoReturn:
        self.fail(f"a bracket that closes the {self.text[start]!r} of line {self.line(start)}", at)
