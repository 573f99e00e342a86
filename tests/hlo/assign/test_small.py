"""Small modules in which one rule of XLA's shows, against its dumps."""

import lzma

import pytest

from support import hlo_data, hlo_dumps
from tightship.baselines import xla_assign
from tightship.hlo import Module, parse, to_text
from tightship.hlo.assign import tight

FOLDER = hlo_data.FOLDER / "small"
NAMES = sorted(p.name.removesuffix(".txt.xz") for p in FOLDER.glob("*.xz") if "-" not in p.name)


def text(name: str, part: str = "") -> str:
    return lzma.decompress((FOLDER / f"{name}{part}.txt.xz").read_bytes()).decode()


def module(name: str) -> Module:
    return parse(text(name), name)


def test_there_are_modules_of_both_machines() -> None:
    assert {n[:3] for n in NAMES} == {"cpu", "gpu"} and len(NAMES) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_alias_sets_live_ranges_and_every_offset_are_xlas(name: str) -> None:
    made = xla_assign.plan(module(name))
    theirs = text(name, "-buffer-assignment")
    assert to_text(made.live.points.module).rstrip() == text(name).rstrip()
    assert hlo_dumps.our_values(made.live.points) == hlo_dumps.values(text(name, "-buffer-assignment-values"))
    assert hlo_dumps.our_ranges(made.live) == hlo_dumps.ranges(text(name, "-live-range"))
    assert {"total": made.total, "temp": made.temp} == hlo_dumps.total(theirs)
    ours = {str(b): offset for a in made.allocations for b, offset in a.held.items()}
    assert {n for n, (_, offset, _) in hlo_dumps.offsets(theirs).items() if ours[n] != offset} == set()
    assert made.target == name[:3]


@pytest.mark.parametrize("name", NAMES)
def test_ours_is_between_the_bound_and_xlas(name: str) -> None:
    theirs, ours = xla_assign.plan(module(name)), tight.plan(module(name), tight.Options(work=2_000))
    assert ours.lower_bound <= ours.total <= theirs.total
