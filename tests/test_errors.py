"""The error family: what each message says, what the command line exits with, and that errors travel."""

import pickle

import pytest

from tightship import errors
from tightship.errors import (
    BadInput,
    BudgetExceeded,
    CheckFailed,
    Infeasible,
    InternalError,
    PeerFailed,
    TightshipError,
    UnknownAlias,
    UnknownSize,
    Unplannable,
    Unsupported,
    VerificationFailed,
)

GIB = 1024**3

EXAMPLES = [
    TightshipError("plain"),
    BadInput("a size is not negative", -1, "op 'relu'"),
    BadInput("a model has at least one op"),
    UnknownSize("a value has a size in bytes", None, "value 'x'"),
    UnknownAlias("an op has an alias rule", "aten::foo", "op 'foo'"),
    Infeasible(
        budget=GIB, lower_bound=2 * GIB, best_peak=3 * GIB, top=[("h", GIB, "encoder.0 · model.py:7")]
    ),
    InternalError(KeyError("a")),
    VerificationFailed(["overlap at step 3"], "plan.json"),
    BudgetExceeded("conv", 4096, 1024, "stem · net.py:3"),
    CheckFailed("model.py:7"),
    PeerFailed({1: "ValueError: no"}, "planning"),
    Unsupported("double backward", "the graph has none", "use eager"),
    Unplannable("a mask of activations", "its shape follows from what the step computes", "use torch.where"),
]


def by_name(error: TightshipError) -> str:
    return type(error).__name__


def test_every_public_error_is_of_the_family_and_has_an_example() -> None:
    family = {getattr(errors, name) for name in errors.__all__}
    assert all(issubclass(cls, TightshipError) for cls in family)
    assert family == {type(error) for error in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=by_name)
def test_exit_status_says_not_achievable_or_bad_input(error: TightshipError) -> None:
    not_achievable = isinstance(
        error, (Infeasible, VerificationFailed, BudgetExceeded, CheckFailed, PeerFailed)
    )
    assert error.exit_status == (1 if not_achievable else 3 if isinstance(error, InternalError) else 2)


@pytest.mark.parametrize("error", EXAMPLES, ids=by_name)
def test_errors_survive_pickling(error: TightshipError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_bad_input_states_rule_value_and_place() -> None:
    error = BadInput("a size is not negative", -1, "op 'relu'")
    assert str(error) == "op 'relu': a size is not negative, got -1"
    assert (error.rule, error.value, error.place) == ("a size is not negative", -1, "op 'relu'")


def test_bad_input_tells_none_from_nothing() -> None:
    assert str(BadInput("a size is known", None)) == "a size is known, got None"
    assert str(BadInput("a model has ops")) == "a model has ops"


def test_bad_input_cuts_long_values_in_the_message_only() -> None:
    error = BadInput("a name is short", "x" * 10_000)
    assert len(str(error)) < 200
    assert error.value == "x" * 10_000


def test_infeasible_says_all_of_it_in_units() -> None:
    top = [("h.3", 2 * GIB, "decoder.3 · model.py:12"), ("mask", 512, "")]
    error = Infeasible(budget=GIB, lower_bound=GIB // 2, best_peak=3 * GIB, top=top)
    text = str(error)
    for part in ("1.00 GiB", "512.00 MiB", "3.00 GiB", "2.00 GiB", "h.3", "decoder.3 · model.py:12", "512 B"):
        assert part in text
    assert error.top == tuple(top)
    assert not error.impossible
    assert text.startswith("no plan found") and "these ops" not in text


def test_infeasible_tells_proved_from_not_found_and_near_sizes_apart() -> None:
    error = Infeasible(budget=GIB, lower_bound=GIB + 1, best_peak=GIB + 1)
    assert error.impossible
    assert str(error).startswith("no plan can meet")
    assert str(GIB) in str(error)
    assert str(GIB + 1) in str(error)
    said = str(error).splitlines()[1]
    assert said.startswith(
        "the lower bound is that of these ops, run one by one; the same model as other ops"
    )
    assert str(error.with_advice(["less"])).splitlines()[1] == said


def test_infeasible_says_when_only_the_places_do_not_fit() -> None:
    error = Infeasible(budget=GIB, lower_bound=1, best_peak=GIB - 512, placed=GIB + 2048)
    assert "the best peak reached 1.00 GiB (1073741312 B), within the budget, but" in str(error)
    assert "1.00 GiB (1073743872 B) are needed, 2.00 KiB (2048 B) above it" in str(error)
    assert "-" not in str(error)


def test_verification_failed_keeps_every_violation_and_shows_the_first() -> None:
    error = VerificationFailed([f"violation {i}" for i in range(25)], "plan.json")
    assert len(error.violations) == 25
    assert "plan.json" in str(error)
    assert "25 violations" in str(error)
    assert "violation 9" in str(error)
    assert "violation 10" not in str(error)
    assert "15 more" in str(error)


def test_budget_exceeded_names_op_bytes_budget_and_place() -> None:
    text = str(BudgetExceeded("conv", 4096, 1024, "stem · net.py:3"))
    for part in ("'conv'", "4.00 KiB", "1.00 KiB", "stem · net.py:3"):
        assert part in text


def test_unsupported_says_what_why_and_what_to_do_instead() -> None:
    text = str(Unsupported("double backward", "the graph has none", "use eager"))
    assert text == "double backward is not supported: the graph has none; instead, use eager"


def test_of_a_compiled_step_the_bound_is_not_that_of_ops_one_by_one() -> None:
    of_ops, of_compiled = (
        str(Infeasible(budget=10, lower_bound=20, best_peak=30, compiled=c)) for c in (False, True)
    )
    assert "one by one" in of_ops and "one by one" not in of_compiled and "compiled step" in of_compiled


@pytest.mark.parametrize(("place", "lost"), [("<frozen importlib._bootstrap>", True), ("core.py", False)])
def test_memory_that_ends_within_an_import_is_too_little_memory(place: str, lost: bool) -> None:
    """Python then says `SystemError`, of which it has lost the reason; elsewhere that is somebody's fault."""
    code = compile("raise SystemError('error return without exception set')", place, "exec")
    with pytest.raises(SystemError) as caught:
        exec(code, {})
    assert ("out of memory" in str(InternalError(caught.value))) is lost
