"""Bytes, budgets and seconds as people write and read them."""

import math
import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final, SupportsIndex, TypeAlias

from tightship.errors import BadInput

__all__ = [
    "BUDGET_FORMS",
    "MAX_BYTES",
    "NARROW",
    "Budget",
    "BudgetLike",
    "format_bytes",
    "format_seconds",
    "parse_budget",
    "parse_bytes",
    "percent",
    "resolve_budget",
    "visible",
]

MAX_BYTES: Final = 2**63 - 1  # sizes are signed 64-bit integers in the C++ core
MAX_PERCENT: Final = 1000
NARROW: Final = 60
"""Columns that are enough for every table and message in a terminal."""

_DECIMAL: Final = ("kB", "MB", "GB", "TB", "PB", "EB")
_BINARY: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_UNITS: Final = {
    "b": 1,
    **{unit.lower(): 1000 ** (i + 1) for i, unit in enumerate(_DECIMAL)},
    **{unit.lower(): 1024 ** (i + 1) for i, unit in enumerate(_BINARY)},
}
_ACCEPTED: Final = f"B, {', '.join(_DECIMAL)}, {', '.join(_BINARY)}"
_SIZE_RULE: Final = f"invalid size: give bytes such as 6GiB, 512MB or 1024 (units: {_ACCEPTED})"
BUDGET_FORMS: Final = (
    "bytes with a unit (6GiB, 512MB), a percentage of the unplanned peak (60%), or static+60%: the static set and "
    "that share of what the unplanned step needs beyond it"
)
"""What a budget may be, in the words of the command line."""
_BUDGET_RULE: Final = (
    f"invalid budget: give bytes such as 6GiB or 512MB (units: {_ACCEPTED}), "
    "a percentage of the unplanned peak such as 60%, or static+60%: the static set and that share of the rest"
)
_TOO_LARGE: Final = "a size is at most 2^63-1 bytes"
_NUMBER: Final = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE_TEXT: Final = re.compile(_NUMBER + r"\s*([A-Za-z]*)")
_PERCENT_TEXT: Final = re.compile(r"(static\s*\+\s*)?" + _NUMBER + r"\s*%", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory a plan may use: either ``bytes``, or a ``fraction`` of the unplanned peak.

    ``beyond_static``: the static set, and the fraction of what the unplanned step needs beyond it.
    """

    bytes: int | None = None
    fraction: float | None = None
    beyond_static: bool = False

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.fraction is None):
            given = "neither" if self.bytes is None else "both"
            raise BadInput(f"a budget takes bytes or a fraction, and {given} is given", place="Budget")
        if self.bytes is not None:
            _whole(self.bytes, "bytes must be a whole number", "Budget.bytes")
            if self.beyond_static:
                raise BadInput("beyond_static requires a fraction, not bytes", self.bytes, "Budget")
        elif (
            isinstance(self.fraction, bool)
            or not isinstance(self.fraction, (int, float))
            or not 0 < self.fraction <= MAX_PERCENT / 100
        ):
            rule = f"the fraction must be above 0 and at most {MAX_PERCENT // 100}"
            raise BadInput(rule, self.fraction, "Budget.fraction")

    def resolve(self, unplanned_peak: int, *, static: int | None = None) -> int:
        """The budget in bytes: a fraction of ``unplanned_peak`` is rounded down. ``static``: bytes of the static set,
        which are part of the peak; None where there is no such set, and ``BadInput`` for a share beyond it.
        """
        if self.bytes is not None:
            return self.bytes
        if self.beyond_static and static is None:
            raise BadInput("memory without a static set takes bytes or a percentage", str(self), "budget")
        kept = static if self.beyond_static and static is not None else 0
        if min(unplanned_peak, unplanned_peak - kept) < 0:
            raise BadInput("the peak must not be negative", unplanned_peak, "Budget.resolve")
        # Through the decimal text: 29% of 100 is 29, where the nearest binary fraction gives 28.
        return min(kept + math.floor(Fraction(str(self.fraction)) * (unplanned_peak - kept)), MAX_BYTES)

    @property
    def below_unplanned(self) -> bool:
        """Whether it is a share of the unplanned peak that the unplanned step itself is not within."""
        return self.fraction is not None and self.fraction < 1

    def __str__(self) -> str:
        if self.bytes is not None:
            return format_bytes(self.bytes)
        percent = format((Decimal(str(self.fraction)) * 100).normalize(), "f")
        if self.beyond_static:
            return f"the static set and {percent}% of what the unplanned step needs beyond it"
        return f"{percent}% of the unplanned peak"


BudgetLike: TypeAlias = Budget | str | int | None
"""A budget as somebody gives it: bytes, text such as ``6GiB`` or ``60%``; None for no budget."""


def parse_bytes(text: str | SupportsIndex, place: str = "") -> int:
    """Read a size: ``6GiB``, ``1.5 GiB``, ``512MB``, ``1024``; an int is taken as bytes.

    Units are decimal (``MB``) or binary (``MiB``), upper or lower case. A fraction of a unit is rounded down
    to whole bytes. ``place`` tells the error message where the text came from.
    """
    if not isinstance(text, str):
        return _whole(text, _SIZE_RULE, place)
    match = _SIZE_TEXT.fullmatch(text.strip())
    if match is None:
        raise BadInput(_SIZE_RULE, text, place)
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower() or "b")
    if scale is None:
        raise BadInput(f"unknown unit {unit!r}: the units are {_ACCEPTED}", text, place)
    # Decimal reads any number of digits, and is compared before it is multiplied, so nothing is ever rounded.
    value = Decimal(number)
    if value > MAX_BYTES or (size := Fraction(value) * scale) > MAX_BYTES:
        raise BadInput(_TOO_LARGE, text, place)
    if scale == 1 and size.denominator != 1:
        raise BadInput("bytes must be a whole number", text, place)
    return math.floor(size)


def parse_budget(budget: "str | SupportsIndex | Budget", place: str = "budget") -> Budget:
    """Read a budget: a size as in ``parse_bytes``, or a percentage of the unplanned peak such as ``60%``, or
    ``static+60%``: the static set and that share of what the unplanned step needs beyond it.

    Floats are refused, because 0.6 may mean a fraction or be a slip for 0.6GiB.
    """
    if isinstance(budget, Budget):
        return budget
    if not isinstance(budget, str):
        return Budget(bytes=_whole(budget, _BUDGET_RULE, place))
    stripped = budget.strip()
    if stripped.endswith("%"):
        match = _PERCENT_TEXT.fullmatch(stripped)
        percent = Decimal(match[2]) if match else Decimal(0)
        fraction = float(percent.scaleb(-2))
        # Both are checked: a tiny percentage is above 0 and yet 0 as a float.
        if not 0 < percent <= MAX_PERCENT or fraction == 0:
            raise BadInput(
                f"invalid percentage: it must be above 0% and at most {MAX_PERCENT}%", budget, place
            )
        return Budget(fraction=fraction, beyond_static=bool(match and match[1]))
    if not _SIZE_TEXT.fullmatch(stripped):
        raise BadInput(_BUDGET_RULE, budget, place)
    return Budget(bytes=parse_bytes(stripped, place))


def resolve_budget(
    budget: BudgetLike, unplanned_peak: int, place: str = "budget", *, static: int | None = None
) -> int | None:
    """The bytes of a budget as somebody gave it; None, and nothing else, is no budget: 0 bytes are one. ``static`` as
    for `Budget.resolve`."""
    return None if budget is None else parse_budget(budget, place).resolve(unplanned_peak, static=static)


def format_bytes(size: int) -> str:
    """A size for people: ``6.00 GiB``, ``512 B``; differences may be negative."""
    sign, magnitude = ("-", -size) if size < 0 else ("", size)
    if magnitude < 1024:
        return f"{sign}{magnitude} B"
    for power, unit in enumerate(_BINARY, start=1):
        # The next unit already where rounding to two digits would say "1024.00".
        if magnitude * 200 < (1024 * 200 - 1) * 1024**power or unit == _BINARY[-1]:
            break
    hundredths = round(Fraction(magnitude * 100, 1024**power))
    return f"{sign}{hundredths // 100}.{hundredths % 100:02d} {unit}"


def format_seconds(seconds: float) -> str:
    """A time for people, in three digits: ``12.3 ms``, ``1.23 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 59.95:
        for scale, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms"), (1.0, "s")):
            scaled = seconds * scale
            if scaled < 999.5 or unit == "s":
                break
        digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
        return f"{scaled:.{digits}f} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(part: float, whole: float) -> str:
    """A change from ``whole`` to ``part``: ``-38.2 %``, ``+0.4 %``."""
    change = 100 * (part / whole - 1) if whole else 0.0
    return "±0 %" if abs(change) < 0.05 else f"{change:+.1f} %"


def _whole(value: object, rule: str, place: str) -> int:
    """An integer of any kind (NumPy's too) as a size; bools and floats are not integers here."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise BadInput(rule, value, place)
    size = operator.index(value)
    if size < 0:
        raise BadInput("a size must not be negative", value, place)
    if size > MAX_BYTES:
        raise BadInput(_TOO_LARGE, value, place)
    return size


_UNSEEN = {
    code: f"<U+{code:04X}>"
    for codes in (
        range(9), range(11, 32), range(0x7F, 0xA0), (0x061C, 0x200E, 0x200F), range(0x202A, 0x202F),
        range(0x2066, 0x206A),
    )
    for code in codes
}  # fmt: skip
"""Control characters but for tab and line feed, and those that change the direction of text."""


def visible(text: str) -> str:
    """Text in which no character hides, reorders or overwrites others, or is an order to a terminal: names that come
    from files are shown so."""
    return text.translate(_UNSEEN)
