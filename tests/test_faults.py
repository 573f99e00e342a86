"""What is promised after a disk that fails, a signal or too little memory (docs/reliability.md): a part of the
campaign's class ``faults`` (benchmarks/soak.py), always the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from support.faults import SCENARIOS, Fault, Server, _of_an_import, judged, random_fault, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

VERBS = [name for name, about in SCENARIOS.items() if not about.torch]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.mark.parametrize("kind", ["full", "short", "kill", "term"])
def test_every_write_of_a_plan_may_fail(server: Server, kind: str) -> None:
    calls = server.calls("plan --json")
    assert calls >= 4
    faults = [Fault(kind, at) for at in range(1, calls + 1)]
    faults += [Fault(kind, 2, stays=True)] if kind in ("full", "short") else []
    assert [said for fault in faults if (said := judged(server, "plan --json", fault))] == []


@pytest.mark.parametrize("scenario", VERBS)
def test_a_fault_at_any_time_of_a_verb_leaves_nothing_behind(server: Server, scenario: str) -> None:
    rng = random.Random(scenario)
    assert server.calls(scenario) > 0
    assert [
        said for _ in range(2) if (said := judged(server, scenario, random_fault(server, scenario, rng)))
    ] == []


@pytest.mark.parametrize(
    ("scenario", "fault"),
    [("fit, offload", Fault("io", 6)), ("fit, stream", Fault("io", 9)), ("fit, stream", Fault("int", 5))],
    ids=str,
)
def test_a_step_that_copies_loses_nothing(server: Server, scenario: str, fault: Fault) -> None:
    calls = server.calls(scenario)
    assert calls > fault.at
    assert judged(server, scenario, fault) == ""


AROUND = [
    Fault("twin"), Fault("threads"), Fault("twin", seconds=0.05), Fault("later", 1), Fault("earlier", 3),
    Fault("homeless"), Fault("no compiler"), Fault("read-only", 1, stays=True),
]  # fmt: skip
CHANGED = [
    *(("plan --json", fault) for fault in AROUND),
    *(("plan MODEL, optimized", fault) for fault in AROUND[:3]),
    *(("fit, kept", fault) for fault in AROUND[:2]),
    *(
        pytest.param(name, fault, marks=pytest.mark.slow)
        for name in ("fit, kept", "fit, build")
        for fault in AROUND[2:]
    ),
]


@pytest.mark.parametrize(("scenario", "fault"), CHANGED, ids=str)
def test_what_is_around_a_process_changes_no_answer(server: Server, scenario: str, fault: Fault) -> None:
    assert judged(server, scenario, fault) == ""


def test_the_judge_can_say_no(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that is cut off, one that nobody asked for, a status that is none, and a word that is missing."""
    ended = {"status": 0, "hangs": False, "calls": 4, "hindered": 1, "twin": 0, "stderr": ""}
    monkeypatch.setattr(Server, "run", lambda self, scenario, fault: ended)
    out = server.base / "case" / "out"
    assert "was not written" in judged(server, "plan --json", Fault())
    monkeypatch.setattr(Server, "clean", lambda self, scenario: None)
    (out / "plan.json").write_bytes(b'{"steps": [')
    assert "neither the old nor a whole one" in judged(server, "plan --json", Fault())
    (out / "plan.json").write_bytes(b'{"steps": []}')
    assert judged(server, "plan --json", Fault()) == ""
    (out / ".plan.json.0a0a0a0a.tmp").touch()
    assert "left behind" in judged(server, "plan --json", Fault())
    ended["status"] = 2
    assert "status 2, not one of" in judged(server, "plan --json", Fault())
    assert "without a word" in judged(server, "plan --json", Fault("io", 1))
    ended["stderr"] = "Traceback"
    assert "traceback" in judged(server, "plan --json", Fault("io", 1))


def test_what_torch_raises_while_it_is_imported_is_told_apart() -> None:
    """Half imported, it needs a process of its own to be tried again."""
    for place, of_an_import in (("/x/torch/_dynamo/package.py", True), ("/x/other.py", False)):
        with pytest.raises(OSError, match="full") as caught:
            exec(compile("raise OSError('full')", place, "exec"), {})
        assert _of_an_import(caught.value) is of_an_import
