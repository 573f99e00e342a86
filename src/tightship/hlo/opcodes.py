"""The opcodes of HLO: one table of what each does with its operands, its bytes and the world outside.

Everything that treats opcodes differently asks this table. An opcode without a row is read all the same: its results
share no bytes with anything, and it is never run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["OPCODES", "Opcode", "opcode"]


@dataclass(frozen=True, slots=True)
class Opcode:
    """One row.

    ``operands``: at least so many. ``same_parts``: the result is a tuple of the same parts as the first operand.
    ``callees``: attributes that name computations it gives its operands; ``runs``: it runs those one after another,
    with the buffers of its operands; ``holds``: they take memory while it runs.
    ``makes``: *results*; only *addresses* of what its operands are; or what is *given* with the module.
    ``forwards``: which operands' buffers stand where in its result, by ``HloDataflowAnalysis`` (the rules are in
    ``dataflow``); ``is_operand``: ``TuplePointsToAnalysis``, by which rematerialization counts, takes its result for
    its first operand. ``reads``: *all* of an operand, its *table* of addresses, or *nothing* of it.
    ``writes_over``: which operands it writes its results over (the rules are in ``alias``). ``elementwise``: an
    element of the result needs only the same element of each operand.
    ``effect``: a *collective*, something the *host* notices, a draw of the *rng*, half of a pair (*async*, *copy*).
    ``again``: whether it may run again (R6): *yes*; *inside* of what is called only; *no*.
    ``removable``: dead code if nobody uses its result. ``flops``: how they are counted (in ``remat.cost``).
    ``cut``: along which dimensions it may be computed in slices (the rules are in ``split_rules``).
    ``combines``: what it makes of the parts of a reduction by it: the same, *exactly*, or up to *rounding*.
    """

    name: str
    operands: int = 0
    same_parts: bool = False
    callees: tuple[str, ...] = ()
    runs: bool = False
    holds: bool = False
    makes: str = "results"
    forwards: str = ""
    is_operand: bool = False
    reads: str = "all"
    writes_over: str = ""
    elementwise: bool = False
    effect: str = ""
    again: str = "yes"
    removable: bool = True
    flops: str = "elements"
    cut: str = ""
    combines: str = ""

    @property
    def repeatable(self) -> bool:
        """Whether one instruction by itself may run again."""
        return self.again == "yes" and not self.effect

    @property
    def passes_on(self) -> bool:
        """Whether it only hands on one operand's array under a name of its own."""
        return self.makes == "addresses" and self.operands == 1


_WHOLE: dict[str, Any] = {"operands": 1, "forwards": "whole"}
_PLACED: dict[str, Any] = {"operands": 1, "same_parts": True}
_ASYNC: dict[str, Any] = {"effect": "async", "holds": True}
_HOST: dict[str, Any] = {"effect": "host", "removable": False}
_MOVES: dict[str, Any] = {"flops": "none"}
_GIVEN: dict[str, Any] = {"makes": "given", "again": "inside", "flops": "none"}
_ADDRESSES: dict[str, Any] = {"makes": "addresses", "flops": "none"}
_EACH: dict[str, Any] = {"elementwise": True, "cut": "each"}
_CALL: dict[str, Any] = {"runs": True, "holds": True, "again": "no", "removable": False, "flops": "callees"}

_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    # what is given, and what only hands addresses on
    ("parameter", _GIVEN | {"removable": False}),
    ("constant", _GIVEN | {"elementwise": True}),
    ("tuple", _ADDRESSES | {"forwards": "operands", "reads": "nothing", "again": "inside"}),
    ("get-tuple-element", _ADDRESSES | {"operands": 1, "forwards": "element", "reads": "table"}),
    ("bitcast", _ADDRESSES | _WHOLE | {"is_operand": True}),
    ("domain", _WHOLE | _PLACED | _MOVES | {"is_operand": True, "reads": "nothing"}),
    ("add-dependency", _WHOLE | _PLACED | _MOVES | {"is_operand": True}),
    ("opt-barrier", _WHOLE | _PLACED | _MOVES | {"is_operand": True, "again": "no"}),
    # element by element
    (
        "abs acos acosh asin asinh atan2 atanh cbrt ceil clamp compare complex convert cosh cosine"
        " count-leading-zeros divide erf exponential exponential-minus-one floor imag is-finite log log-plus-one"
        " logistic multiply negate not popcnt power real reduce-precision remainder sign sine"
        " round-nearest-afz round-nearest-even rsqrt shift-left shift-right-arithmetic shift-right-logical sinh"
        " sqrt stochastic-convert subtract tan tanh xor",
        _EACH,
    ),
    ("and maximum minimum or", _EACH | {"combines": "exactly"}),
    ("add", _EACH | {"combines": "rounding"}),
    ("bitcast-convert", _EACH | {"flops": "none"}),
    ("copy", _PLACED | _MOVES | _EACH | {"forwards": "parts", "reads": "table"}),
    ("map", _EACH | {"flops": "operands"}),
    ("select", _EACH | {"operands": 3, "forwards": "either"}),
    ("tuple-select", {"operands": 3, "forwards": "either"}),
    # elements elsewhere, or of others
    ("replica-id", _MOVES),
    ("broadcast", _MOVES | {"cut": "broadcast"}),
    ("iota", _MOVES | {"cut": "iota"}),
    ("reshape", _MOVES | {"cut": "reshape"}),
    ("transpose", _MOVES | {"cut": "transpose"}),
    ("concatenate reverse", _MOVES | {"cut": "others"}),
    ("slice dynamic-slice", _MOVES | {"cut": "full"}),
    ("pad", _MOVES | {"cut": "pad"}),
    ("gather", _MOVES | {"cut": "gather"}),
    ("partition-id", _MOVES | {"again": "inside"}),
    ("dynamic-update-slice", _MOVES | {"operands": 2, "writes_over": "first", "cut": "update"}),
    ("set-dimension-size", {"operands": 2, "writes_over": "first"}),
    ("scatter", {"operands": 3, "writes_over": "results", "flops": "operands", "cut": "scatter"}),
    ("sort", {"operands": 1, "flops": "operands", "cut": "others"}),
    ("reduce", {"flops": "operands", "cut": "reduce"}),
    ("reduce-window select-and-scatter", {"flops": "operands"}),
    ("dot", {"operands": 2, "flops": "dot", "cut": "dot"}),
    ("convolution", {"operands": 2, "flops": "convolution", "cut": "convolution"}),
    ("triangular-solve", {"operands": 2}),
    ("batch-norm-grad batch-norm-inference batch-norm-training cholesky dynamic-reshape fft", {}),
    ("get-dimension-size mulhi ragged-dot rng-bit-generator scaled-dot scan topk", {}),
    # what calls computations
    ("fusion", {"callees": ("calls",), "writes_over": "fusion", "flops": "callees"}),
    ("custom-call", {"writes_over": "declared", "again": "inside", "removable": False, "flops": "custom"}),
    ("call", _CALL | {"callees": ("to_apply",)}),
    ("while", _CALL | {"callees": ("condition", "body"), "operands": 1}),
    (
        "conditional",
        _CALL | {"callees": ("branch_computations", "true_computation", "false_computation"), "operands": 2},
    ),
    ("async-start", _CALL | _ASYNC | {"callees": ("calls",), "writes_over": "declared", "removable": True}),
    ("async-update", _ASYNC | {"operands": 1, "forwards": "leaves", "is_operand": True}),
    ("async-done", _ASYNC | {"operands": 1, "forwards": "second"}),
    # copies in two halves
    ("copy-start", {"effect": "copy", "operands": 1, "forwards": "copy-start"}),
    ("copy-done", {"effect": "copy", "operands": 1, "forwards": "copy-done"}),
    # other ranks
    ("all-gather all-reduce all-to-all collective-broadcast reduce-scatter", {"effect": "collective"}),
    ("all-gather-start", {"effect": "collective", "operands": 1, "forwards": "all-gather-start"}),
    ("all-gather-done", {"effect": "collective", "operands": 1, "forwards": "second"}),
    ("all-reduce-start", {"effect": "collective", "operands": 1, "writes_over": "operands"}),
    ("all-reduce-done", _WHOLE | {"effect": "collective"}),
    ("collective-permute", {"effect": "collective", "writes_over": "permute"}),
    (
        "collective-permute-start",
        {"effect": "collective", "operands": 1, "forwards": "permute-start", "writes_over": "permute"},
    ),
    ("collective-permute-done", {"effect": "collective", "operands": 1, "forwards": "second"}),
    ("ragged-all-to-all", {"effect": "collective", "operands": 2, "writes_over": "second"}),
    # the host, and random numbers
    ("infeed outfeed recv send-done", _HOST),
    ("after-all", _HOST | _MOVES),
    ("send", _HOST | {"operands": 1, "forwards": "send"}),
    ("recv-done", _HOST | {"operands": 1, "forwards": "recv-done"}),
    ("rng", {"effect": "rng", "elementwise": True}),
    ("rng-get-and-update-state", {"effect": "rng", "removable": False}),
)
"""Names that share their facts, with what differs from the defaults."""


def _table() -> Iterator[tuple[str, Opcode]]:
    for names, facts in _ROWS:
        for name in names.split():
            yield name, Opcode(name, **facts)


OPCODES: Mapping[str, Opcode] = dict(_table())
"""The table, by name."""


def opcode(name: str) -> Opcode:
    """The row of an opcode; of one that is not known, a row that promises nothing."""
    return OPCODES.get(name) or Opcode(name, again="no")
