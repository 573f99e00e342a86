import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from support.chains import chain
from tightship.planners.default import Options, plan
from tightship.report.numbers import BANDS
from tightship.report.picture import PANEL, SLOTS, picture, ticks
from tightship.units import format_bytes

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawn():
    graph = chain(20, 1 << 20)
    made = plan(graph, "60%", Options(work=200_000, seconds=2.0))
    return graph, made, picture(graph, made, title="a <chain> & more")


def test_it_is_one_self_contained_svg_and_the_same_each_time(drawn):
    graph, made, text = drawn
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in text
    assert text == picture(graph, made, title="a <chain> & more")


def test_it_shows_the_plans_numbers(drawn):
    _, made, text = drawn
    words = " ".join(ET.fromstring(text).itertext())
    for size in (made.peak, made.peak_before, made.budget, made.lower_bound):
        assert format_bytes(size) in words
    assert f"{made.count('recompute')} ops recomputed" in words
    assert "a <chain> & more" in words


def test_the_highest_outline_is_the_peak(drawn):
    """The peak is drawn, at its height, in both panels."""
    _, made, text = drawn
    top = ticks(max(made.peak_before, made.budget))[-1]
    for panel, peak in enumerate((made.peak_before, made.peak)):
        paths = re.findall(r'<path class="\w+" d="M[\d.]+ ([\d.]+)([^"]*)"', text)
        paths = paths[len(BANDS) * panel : len(BANDS) * (panel + 1)]
        heights = [float(base) - float(y) for base, rest in paths for y in re.findall(r"V([\d.]+)", rest)]
        assert max(heights) == pytest.approx(peak / top * PANEL, abs=0.1)


def test_nothing_is_drawn_outside(drawn):
    *_, text = drawn
    across = [float(x) for x in re.findall(r"H([\d.]+)", text)]
    assert max(across) <= 74 + SLOTS


@pytest.mark.parametrize("most", [1, 64, 999, 1000, 1024, 5000, 10**6, 3 * 2**30, 7 * 10**14])
def test_a_scale_is_round_and_reaches_the_top(most):
    levels = ticks(most)
    assert levels[0] == 0 and levels[-1] >= most
    assert len(levels) <= 9
    assert len({b - a for a, b in pairwise(levels)}) == 1


def test_a_graph_without_times_is_drawn_over_its_steps():
    graph = chain(4)
    timeless = graph.with_ops(tuple(op.__class__(**{**fields(op), "time": 0.0}) for op in graph.ops))
    text = picture(timeless, plan(timeless, "100%", Options(work=10_000, seconds=1.0)))
    assert ">step</text>" in text


def fields(op):
    return {name: getattr(op, name) for name in op.__dataclass_fields__}
