"""Sizes, budgets and times as text: what is read, what is refused, and that writing and reading agree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightship.errors import BadInput
from tightship.units import MAX_BYTES, Budget, format_bytes, format_seconds, parse_budget, parse_bytes

sizes = st.integers(min_value=0, max_value=MAX_BYTES)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * 1024**3),
        ("512MB", 512_000_000),
        ("1024", 1024),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("  7 kb ", 7000),
        ("7KIB", 7168),
        (".5KiB", 512),
        ("2.KiB", 2048),
        ("10 B", 10),
        ("1.0", 1),
        ("0", 0),
        ("0.3GiB", 322122547),  # 322122547.2, rounded down
        ("1PiB", 1024**5),
        (str(MAX_BYTES), MAX_BYTES),
        (4096, 4096),
        (np.int32(7), 7),
    ],
)
def test_sizes_that_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size
    assert type(parse_bytes(text)) is int


BAD_SIZES = [
    "",
    "  ",
    "-1",
    "-6GiB",
    "+6GiB",
    "nan",
    "inf",
    "NaN GiB",
    "GiB",
    "6XiB",
    "6G",
    "6 GiB GiB",
    "1e9",
    "1_000",
    "1,5GiB",
    "0x10",
    "1.5",
    "1.5B",
    "1.2.3MB",
    "٣GiB",  # digits, but not ours
    "8EiB",
    "60%",
    "9" * 10_000 + "B",
    str(MAX_BYTES + 1),
    -1,
    MAX_BYTES + 1,
    True,
    1.0,
    float("nan"),
    None,
    b"6GiB",
]


@pytest.mark.parametrize("text", BAD_SIZES, ids=lambda bad: repr(bad)[:20])
def test_sizes_that_are_refused_by_value_and_place(text: object) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bytes(text, "--budget")  # type: ignore[arg-type]
    assert caught.value.value is text
    assert str(caught.value).startswith("--budget: ")


@pytest.mark.parametrize("text", ["6G", "six", "", None])
def test_refusals_name_the_accepted_units(text: object) -> None:
    with pytest.raises(BadInput, match=r"kB, MB, GB.*KiB, MiB, GiB"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(sizes)
def test_exact_bytes_round_trip(size: int) -> None:
    assert parse_bytes(f"{size}") == parse_bytes(f"{size} B") == parse_bytes(size) == size


@given(sizes)
def test_written_sizes_are_read_back_within_their_rounding(size: int) -> None:
    text = format_bytes(size)
    number, unit = text.split()
    assert size < 1024 or 1 <= float(number) < 1024
    if size > MAX_BYTES - 2**53:  # rounded up to 8.00 EiB, which is past the limit
        return
    assert abs(parse_bytes(text) - size) <= 0.005 * parse_bytes(f"1{unit}") + 1


@given(st.decimals(min_value=0, max_value=1000, places=3), st.sampled_from(["kB", "MiB", "GB", "TiB"]))
def test_case_and_space_do_not_matter(number: object, unit: str) -> None:
    expected = parse_bytes(f"{number}{unit}")
    assert parse_bytes(f"{number} {unit.upper()}") == parse_bytes(f" {number}{unit.lower()} ") == expected


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_budget):
        try:
            parse(text)
        except BadInput as error:
            assert error.value is not None


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (6 * 1024**3, "6.00 GiB"),
        (1024**2 - 1, "1.00 MiB"),  # not "1024.00 KiB"
        (-1536, "-1.50 KiB"),
        (2**80, "1048576.00 EiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.2e-9, "4.20 ns"),
        (1.5e-6, "1.50 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (1.234, "1.23 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.9, "1 h 00 min"),
        (3720, "1 h 02 min"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_budgets_in_bytes() -> None:
    assert parse_budget("6GiB") == Budget(bytes=6 * 1024**3)
    assert parse_budget(4096) == Budget(bytes=4096)
    assert parse_budget(Budget(bytes=1)) == Budget(bytes=1)
    assert parse_budget("6GiB").resolve(unplanned_peak=1) == 6 * 1024**3


@pytest.mark.parametrize(
    ("text", "peak", "size"),
    [("60%", 1000, 600), ("29%", 100, 29), (" 12.5 % ", 1001, 125), ("1000%", 7, 70), ("0.1%", 999, 0)],
)
def test_percentages_are_of_the_unplanned_peak_rounded_down(text: str, peak: int, size: int) -> None:
    assert parse_budget(text).resolve(peak) == size


@pytest.mark.parametrize("text", ["static+60%", "Static + 60 %", " static+60.0%"])
def test_a_share_beyond_the_static_set(text: str) -> None:
    budget = parse_budget(text)
    assert budget == Budget(fraction=0.6, beyond_static=True)
    assert budget.resolve(1000, static=400) == 760
    assert budget.resolve(1000, static=0) == 600
    assert str(budget) == "the static set and 60% of what the unplanned step needs beyond it"
    with pytest.raises(BadInput, match="without a static set"):
        budget.resolve(1000)


@pytest.mark.parametrize(
    "text", ["static", "static+", "static+6GiB", "static60%", "+60%", "static+0%", "static+60%+1"]
)
def test_other_sums_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_budget(text)


@given(st.integers(1, 100_000), sizes)
def test_percentages_are_exact(hundredths: int, peak: int) -> None:
    text = f"{hundredths // 100}.{hundredths % 100:02d}%"
    assert parse_budget(text).resolve(peak) == min(hundredths * peak // 10_000, MAX_BYTES)
    assert parse_budget(str(parse_budget(text)).split()[0]) == parse_budget(text)


@pytest.mark.parametrize(
    "text",
    [
        *("0%", "-5%", "1000.1%", "%", "nan%", "60%%", "6GiB%", "", "lots", "6G", "-1"),
        *("0." + "0" * 400 + "1%", "9" * 10_000 + "%"),
        *(0.6, True, None, -3),
    ],
    ids=lambda bad: repr(bad)[:20],
)
def test_budgets_that_are_refused(text: object) -> None:
    with pytest.raises(BadInput) as caught:
        parse_budget(text)  # type: ignore[arg-type]
    assert "budget" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"bytes": 1, "fraction": 0.5}, {"bytes": -1}, {"bytes": True}),
        *({"fraction": bad} for bad in (0.0, -0.5, float("nan"), 10.5, "0.5", True)),
    ],
    ids=str,
)
def test_budget_holds_exactly_one_sound_field(fields: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Budget(**fields)  # type: ignore[arg-type]


def test_a_negative_peak_is_refused() -> None:
    with pytest.raises(BadInput):
        parse_budget("60%").resolve(-1)
