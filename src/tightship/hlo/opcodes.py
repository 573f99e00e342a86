"""The opcodes there are, and which of them run once.

An opcode that is not here is read all the same: its results share no bytes with anything, and it is never run again.
"""

from __future__ import annotations

__all__ = ["EFFECTS", "KNOWN", "ONCE"]


def _words(*lines: str) -> frozenset[str]:
    """Every line is whole words: a word that went on in the next line would become two others."""
    return frozenset(word for line in lines for word in line.split())


_COLLECTIVES = _words(
    "all-gather all-gather-done all-gather-start all-reduce all-reduce-done all-reduce-start all-to-all",
    "collective-broadcast collective-permute collective-permute-done collective-permute-start",
    "ragged-all-to-all reduce-scatter",
)

EFFECTS = _COLLECTIVES | _words(
    "after-all async-done async-start async-update copy-done copy-start infeed outfeed",
    "recv recv-done rng rng-get-and-update-state send send-done",
)
"""What other ranks, the host or a generator of random numbers notice, or what is one half of a pair."""

_CALLS = _words("call conditional custom-call while")

ONCE = EFFECTS | _CALLS | _words("constant opt-barrier parameter partition-id tuple")
"""What is never run again (R6): effects, calls, and what belongs to the caller."""

KNOWN = ONCE | _words(
    "abs acos acosh add add-dependency and asin asinh atan2 atanh batch-norm-grad batch-norm-inference",
    "batch-norm-training bitcast bitcast-convert broadcast cbrt ceil cholesky clamp compare complex concatenate",
    "convert convolution copy cosine cosh count-leading-zeros divide domain dot dynamic-reshape dynamic-slice",
    "dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather get-dimension-size",
    "get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum mulhi multiply negate not",
    "or pad popcnt power ragged-dot real reduce reduce-precision reduce-window remainder replica-id reshape",
    "reverse rng-bit-generator round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select",
    "select-and-scatter set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh",
    "slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple-select xor",
)
