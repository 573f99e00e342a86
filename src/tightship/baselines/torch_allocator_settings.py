"""The settings of PyTorch's caching allocator that say where bytes lie: ``PYTORCH_ALLOC_CONF``, as its text is parsed
(c10/core/AllocatorConfig.cpp) and as memory snapshots carry it, and what a request takes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightship.errors import BadInput

__all__ = ["LARGE_SEGMENT", "ROUND", "Settings", "rounded"]

ROUND = 512
"""Bytes that sizes are multiples of."""
LARGE_SEGMENT = 20 << 20
_INTERVALS = 16
"""Intervals of sizes that have their own divisions, from 1 MiB on, each twice the one before."""


@dataclass(frozen=True)
class Settings:
    """What ``PYTORCH_ALLOC_CONF`` sets, in bytes; the defaults are PyTorch's. ``max_split_size``: blocks of that size
    are not split (None: all are); ``roundup_power2_divisions``: for sizes from 1, 2, 4, … MiB on, how many steps
    there are to the next power of two (0: none)."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Of ``max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4]``. Raises ``BadInput`` for a value that
        PyTorch refuses, and for a setting that has nothing to do with where bytes lie."""
        found = cls()
        for key, value in _pairs(text):
            if key not in _PARSED:
                known = ", ".join(_PARSED)
                raise BadInput(f"unknown allocator setting {key!r}: those that are simulated are {known}")
            name, read = _PARSED[key]
            try:
                found = replace(found, **{name: read(value)})
            except ValueError as error:
                rule = str(error) if type(error) is _Fault else "not a value of this setting"
                raise BadInput(f"{key} is {value!r}: {rule}") from None
        return found

    @classmethod
    def recorded(cls, values: Mapping[str, object]) -> Settings:
        """Those that a snapshot carries. What it has as numbers goes before the text they were set with."""
        of_text: dict[str, Any] = {}
        for text in (v for k, v in values.items() if k.endswith("ALLOC_CONF") and isinstance(v, str)):
            for key in ("max_non_split_rounding_mb", "large_segment_size_mb"):
                if there := re.search(rf"(?:^|,)\s*{key}\s*:\s*(\d{{1,9}})\s*(?:,|$)", text):
                    of_text[_PARSED[key][0]] = int(there[1]) << 20
        split, share = values.get("max_split_size"), values.get("garbage_collection_threshold")
        rounding = values.get("roundup_power2_divisions")
        given = rounding if isinstance(rounding, Mapping) else {}
        steps = [given.get(str(1 << k), 0) for k in range(_INTERVALS)]
        return cls(
            **of_text,
            expandable_segments=values.get("expandable_segments") is True,
            max_split_size=split if type(split) is int and 0 < split < 1 << 62 else None,
            garbage_collection_threshold=float(share) if isinstance(share, float) and 0 < share < 1 else 0.0,
            roundup_power2_divisions=tuple(
                n if type(n) is int and 0 <= n < 1 << 40 and not n & (n - 1) else 0 for n in steps
            ),
        )

    def __str__(self) -> str:
        """As it is set; empty for the defaults."""
        plain, said = Settings(), []
        for key, (name, _) in _PARSED.items():
            value = getattr(self, name)
            if value == getattr(plain, name):
                continue
            if isinstance(value, tuple):
                said.append(f"{key}:{_said(value)}")
            else:
                said.append(f"{key}:{value >> 20 if key.endswith('_mb') else value}")
        return ",".join(said)


def _said(steps: Sequence[int]) -> str:
    """Divisions: the first stand for smaller sizes, too, and the last after ``>``."""
    begin = next((k for k, n in enumerate(steps) if n != steps[0]), _INTERVALS)
    if begin == _INTERVALS and steps[0]:
        return str(steps[0])
    end = 1 + max(k for k, n in enumerate(steps) if n != steps[-1])
    middle = [f"{1 << k}:{n}" for k, n in enumerate(steps[:end]) if k >= begin - 1]
    return f"[{','.join([*middle, f'>:{steps[-1]}'])}]"


class _Fault(ValueError):
    """Why PyTorch refuses a value."""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Keys and values; a value in brackets stays as it is."""
    plain, at = "".join(text.split()), 0
    while at < len(plain):
        key, colon, rest = plain[at:].partition(":")
        end = rest.find("]") + 1 if rest.startswith("[") else rest.find(",") % (len(rest) + 1)
        if not colon or not key or not end:
            raise BadInput(f"allocator settings are {text!r}: they must be key:value,key:value")
        yield key, rest[:end]
        at += len(key) + 1 + end + 1


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise _Fault("it must be True or False")
    return text == "True"


def _share(text: str) -> float:
    if not 0 < float(text) < 1:
        raise _Fault("it must lie between 0 and 1")
    return float(text)


def _megabytes(text: str) -> int:
    if int(text) < LARGE_SEGMENT >> 20:
        raise _Fault(f"it must be at least {LARGE_SEGMENT >> 20}")
    return min(int(text), 1 << 40) << 20


def _divisions(text: str) -> tuple[int, ...]:
    if not text.startswith("["):
        return (_power(text),) * _INTERVALS
    found, last = [0] * _INTERVALS, None
    for item in text[1:-1].split(","):
        size, _, many = item.partition(":")
        if size == ">":
            after = 1 if last is None else last + 1
            found[after:] = [_power(many, zero=True)] * (_INTERVALS - after)
            continue
        at = min(_power(size).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            found[:at] = [_power(many, zero=True)] * at
        found[at], last = _power(many, zero=True), at
    return tuple(found)


def _power(text: str, *, zero: bool = False) -> int:
    number = int(text)
    if number < (not zero) or number & (number - 1):
        raise _Fault("sizes and divisions must be powers of two")
    return number


_PARSED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_size", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes),
    "large_segment_size_mb": ("large_segment_size", _megabytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}


def rounded(size: int, settings: Settings | None = None) -> int:
    """What a request takes of a block."""
    if settings is not None and size >= ROUND:
        k = min(max(size.bit_length() - 21, 0), _INTERVALS - 1)
        steps = settings.roundup_power2_divisions[k]
        if steps > 1 and size > ROUND * steps:
            floor = 1 << (size.bit_length() - 1)
            unit = floor >> (steps.bit_length() - 1)
            if size == floor:
                return size
            return -(-size // unit) * unit if unit else 2 * floor
    return max(ROUND, -(-size // ROUND) * ROUND)
