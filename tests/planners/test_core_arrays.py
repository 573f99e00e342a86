"""Wrong arrays never reach the searches of the core: each is refused with its name, or does no harm.

Valid calls of everything that is bound are recorded once. Then each argument of each call is replaced by each wrong
one, and the call is made: it has to raise an ordinary error or return. A crash ends the test run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.chains import chain
from support.core_calls import CALLS, HARMLESS, LIVES, ORDINARY, SIZES, Call, deep, hostile_call, wrong
from support.strategies import random_graph
from tightship import _core
from tightship.graph import Value
from tightship.planners.evict.problem import EvictionProblem


@pytest.mark.parametrize("call", HARMLESS, ids=lambda call: call.name)
def test_a_valid_call_is_taken(call: Call) -> None:
    call.make(**call.arguments)


@pytest.mark.parametrize("call", HARMLESS, ids=lambda call: call.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_a_wrong_argument_is_an_ordinary_error_or_does_no_harm(call: Call) -> None:
    for name, value in call.arguments.items():
        for word, other in wrong(value):
            try:
                call.with_(name, other)
            except ORDINARY as error:
                assert str(error), f"{name} {word}"


def test_everything_that_is_bound_and_takes_something_gets_wrong_arguments() -> None:
    """What takes nothing but itself cannot be given anything wrong; making one is a call of the class."""
    bound: set[str] = set()
    for name, thing in vars(_core).items():
        if isinstance(thing, type):
            methods = {n: m for n, m in vars(thing).items() if callable(m) and not n.startswith("__")}
            bound |= {f"{name}.{n}" for n, m in methods.items() if "(self)" not in m.__nb_signature__[0][0]}
        elif callable(thing):
            bound.add(name)
    assert len(bound) > 40
    assert bound - {call.name for call in HARMLESS} == set()


@pytest.mark.parametrize("call", HARMLESS, ids=lambda call: call.name)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_several_wrong_arguments_at_once_do_no_harm_either(call: Call) -> None:
    assert all(hostile_call(call, seed) for seed in range(20))


def test_tuples_too_deep_for_the_machines_stack_are_an_error() -> None:
    """The digest writes shapes out, and shapes are not looked into when a graph is made."""
    graph = random_graph(1, 3)
    value = Value("deep", 0, "float32", deep(200_000))
    with pytest.raises(RecursionError):
        _ = replace(graph, values=(*graph.values, value)).digest


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_arrays_of_another_length_are_refused_by_name(call: Call) -> None:
    for name, value in call.arguments.items():
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match=r"entries|\] is |is empty"):
                call.with_(name, np.append(value, value))


@pytest.mark.parametrize(
    "name, at, value, fault",
    [
        ("size", 3, -1, r"size\[3\] is -1; must be from 0 to 2\^62"),
        ("size", 3, 2**62, r"size\[3\] is 4611686018427387904; must be from 0"),
        ("alignment", 1, 0, r"alignment\[1\] is 0; must be from 1"),
        ("pinned", 2, -7, r"pinned\[2\] is -7; must be from 0 to 2\^62, or -1"),
        ("upper", 2, 1, r"upper\[2\] is 1; a live range must end after it begins, here at 1"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_its_place_and_the_rule(name: str, at: int, value: int, fault: str) -> None:
    arguments = LIVES | SIZES
    wrong_one = arguments[name].copy()
    wrong_one[at] = value
    with pytest.raises(ValueError, match=fault):
        _core.Placer(**(arguments | {name: wrong_one}))


def test_sizes_that_add_up_beyond_64_bits_are_refused() -> None:
    one = np.ones(8, np.int64)
    with pytest.raises(ValueError, match=r"size\[3\] is .*; the sum of all sizes must be at most 2\^62"):
        _core.Placer(0 * one, one, one << 60, one, -one)


def test_copies_outside_of_a_file_are_refused() -> None:
    copier = _core.Copier(-1)
    for size, offset in ((-1, 0), (0, -1), (2**62, 0)):
        with pytest.raises(ValueError, match="must be from 0 to 2"):
            copier.begin(0, True, 0, size, offset, [])
    with pytest.raises((ValueError, TypeError)):
        copier.begin(0, True, 0, 1, 0, [None])  # type: ignore[list-item]
    copier.close()


def test_decisions_of_a_chain_are_one_per_gap() -> None:
    graph = chain(6)
    engine = EvictionProblem(graph, tuple(range(len(graph.ops)))).engine
    with pytest.raises(ValueError, match="decisions has 1 entries instead of"):
        engine.evaluate(np.zeros(1, np.uint8), 100)


def test_the_search_of_states_ends_with_its_time_within_one_state_too() -> None:
    (call,) = (c for c in CALLS if c.name == "Engine.states")
    *_, ended, _, interrupted = call.make(
        **(call.arguments | {"limit": 2**31 - 1, "work": 2**62, "seconds": 0.05})
    )
    assert not (ended or interrupted)


def test_progress_may_answer_with_anything_that_is_true_or_not() -> None:
    (call,) = (c for c in CALLS if c.name == "Engine.anneal")
    heard: list[int] = []
    call.make(**(call.arguments | {"progress": lambda peak, *_: heard.append(peak), "work": 200_000}))
    assert heard
