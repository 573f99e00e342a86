"""What is promised after each fault (docs/reliability.md): kills, two processes, limits of memory, homes that are
none, files of others that would hide what they are."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from support.chains import chain
from support.hostile import hostile
from support.strategies import random_graph
from tightship import api, cli
from tightship.errors import BadInput
from tightship.files import part_of, remove_parts, scratch_folder, write_file
from tightship.graph import DEEPEST, Graph, Op, Request, Storage, Value, replace
from tightship.plan import Plan
from tightship.serde import load_plan, save_graph, save_plan
from tightship.units import visible

REPEATS = 12
EVIL = "ok\u202egnp.exe\x1b[2J\u2066"


def started(code: str, *given: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


WRITER = """
import sys
from tightship.serde import load_plan, save_plan
plan, graph = load_plan(sys.argv[1])
print("ready", flush=True)
while True:
    save_plan(plan, sys.argv[1], graph)
"""


def test_a_plan_that_is_being_written_is_whole_after_a_kill(tmp_path: Path) -> None:
    """The file is the old one or the new one; beside it may lie a part, under a name of its own."""
    path, rng = tmp_path / "plan.json", random.Random(0)
    graph = random_graph(1, 300)
    plan = api.plan_graph(graph, seconds=0.2).plan
    save_plan(plan, path, graph)
    for _ in range(REPEATS // 3):
        writer = started(WRITER, str(path))
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() / 10)
        writer.kill()
        writer.communicate()
        assert load_plan(path)[0] == plan
    assert all(p == path or p.name.startswith(".plan.json.") for p in tmp_path.iterdir())


MEASURES = """
import sys, itertools
from tightship.execute.cache import Cache, Measurement
print("ready", flush=True)
for k in itertools.count():
    cache = Cache(sys.argv[1], "m")
    assert not cache.note, cache.note
    cache.put(f"{sys.argv[2]}.{k}", Measurement(float(k % 100), 64, ((64, -1, 0, 1),)))
    cache.save()
    assert not cache.note, cache.note
"""


def test_a_cache_is_whole_after_kills_and_beside_other_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tightship.execute.cache import Cache

    both = [started(MEASURES, str(tmp_path), str(k)) for k in range(2)]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
    time.sleep(0.5)
    both[0].kill()
    time.sleep(0.2)
    assert both[1].poll() is None, both[1].communicate()[1].decode()[-500:]
    both[1].kill()
    for one in both:
        one.communicate()
    cache = Cache(tmp_path, "m")
    assert not cache.note
    assert cache.get("0.0") or cache.get("1.0")


ABSURD = [
    b"\xff\xfe{", b"", b"[" * 5000, b'{"machine": "m", "entries": {"\xff": [1.0]}}',
    *(b'{"machine": "m", "entries": {"k": [%s]}}' % row for row in (
        b"1e308", b"-1", b"1.0, 1180591620717411303424", b"1.0, -1", b"1.0, 0, [[-64, -1, 0, 1]]",
        b"1.0, 0, [[4611686018427387904, -1, 0, 1]]", b"1.0, 0, [], [-7]", b"1.0, 0, [], null, -1")),
]  # fmt: skip


@pytest.mark.parametrize("data", ABSURD)
def test_a_profile_with_what_nobody_measured_is_as_good_as_none(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("torch")
    from tightship.execute.cache import Cache, Measurement

    (tmp_path / "profile-m.json").write_bytes(data)
    cache = Cache(tmp_path, "m")
    assert cache.get("k") is None
    assert "made again" in cache.note
    cache.put("k", Measurement(1.0))
    cache.save()
    again = Cache(tmp_path, "m")
    assert again.get("k") == Measurement(1.0)
    assert not again.note


@pytest.mark.parametrize("data", [b"\xff\xfe{", b"[" * 100_000, b"{}", b""])
def test_a_kept_plan_that_is_damaged_is_made_again(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("torch")
    from tightship.execute.cache import KeptPlans
    from tightship.planners.default import Options

    planner, graph = KeptPlans(tmp_path, Options(seconds=1.0)), chain(3)
    made = planner(graph)
    (path,) = tmp_path.glob("plan-*")
    path.write_bytes(data)
    again = planner(graph)
    assert again.steps == made.steps
    assert any("made again" in note for note in again.notes)
    assert not planner(graph).notes


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tightship.execute import cache

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TIGHTSHIP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert cache.default_folder() is None


_LITTLE_MEMORY = """
import os, resource, sys
from tightship.files import from_json, to_json
from tightship.serde import GraphDocument

text = open(sys.argv[1], "rb").read()
graph = from_json(text, GraphDocument)
pages = int(open("/proc/self/statm").read().split()[0])

def status(work, more):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)
        try:
            work()
        except MemoryError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for work in (lambda: to_json(graph), lambda: from_json(text, GraphDocument)):
    print(*(status(work, k << 18) for k in range(80)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_json_is_refused_where_memory_runs_out_at_any_place(tmp_path: Path) -> None:
    """msgspec's own functions end the process with SIGSEGV there."""
    save_graph(random_graph(6, 3_000), tmp_path / "graph.json")
    done = subprocess.run(
        [sys.executable, "-c", _LITTLE_MEMORY, str(tmp_path / "graph.json")], capture_output=True, check=True
    )
    for line in done.stdout.decode().splitlines():
        assert set(line.split()) == {"0", "3"}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")
def test_too_little_memory_is_a_sentence_and_json(tmp_path: Path) -> None:
    """Python and the imports need 150 MiB of address space."""
    save_graph(random_graph(6, 15_000), tmp_path / "graph.json")
    command = [
        "sh",
        "-c",
        'ulimit -v 204800 && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "tightship",
        "plan",
        str(tmp_path / "graph.json"),
        "--seconds",
        "2",
        "--json",
    ]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "plan.json")],
        capture_output=True,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 3, done.stderr.decode()[-500:]
    assert json.loads(done.stdout)["error"]["type"] == "InternalError"
    assert b"out of memory" in done.stderr
    assert b"Traceback" not in done.stderr
    assert not (tmp_path / "plan.json").exists()


def test_an_interrupt_at_any_time_leaves_no_half_file(tmp_path: Path) -> None:
    save_graph(random_graph(2, 400), tmp_path / "graph.json")
    target, rng = tmp_path / "plan.json", random.Random(1)
    code = "import sys; from tightship.cli import main; print('ready', file=sys.stderr, flush=True); sys.exit(main())"
    for _ in range(REPEATS // 3):
        one = started(
            code, "plan", str(tmp_path / "graph.json"), "-b", "90%", "--seconds", "2", "-o", str(target)
        )
        assert one.stderr is not None
        assert one.stderr.readline() == b"ready\n"
        time.sleep(0.05 + rng.random())
        one.send_signal(signal.SIGINT)
        _, said = one.communicate()
        # Once Python itself is ending, the signal ends it, which a shell says as 130, too.
        assert one.returncode in (0, 1, 130, -signal.SIGINT), said.decode()[-500:]
        assert b"Traceback" not in said
        if target.exists():
            load_plan(target)
            target.unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["graph.json"]


def test_an_interrupt_while_modules_are_imported_is_a_word_and_a_status() -> None:
    code = (
        "import sys; sys.argv[0] = '/bin/tightship'; print('ready', file=sys.stderr, flush=True);"
        "from tightship.cli import main; import time; time.sleep(5)"
    )
    for k in range(REPEATS // 3):
        one = started(code, "plan", "x.json", "--json")
        assert one.stderr is not None
        assert one.stderr.readline() == b"ready\n"
        time.sleep(0.4 + 0.15 * k)
        one.send_signal(signal.SIGINT)
        said, errors = one.communicate()
        assert (one.returncode, errors) == (130, b"tightship: interrupted\n"), errors.decode()[-800:]
        assert json.loads(said)["error"]["type"] == "Interrupted"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (getattr(signal, "SIGHUP", 1), 129)])
def test_a_process_that_is_told_to_end_does_so_as_with_ctrl_c(
    tmp_path: Path, number: int, status: int
) -> None:
    """With a plan, if there is one by then; where the signal is ignored, as under nohup, it stays so."""
    save_graph(random_graph(2, 4000), tmp_path / "graph.json")  # seconds of search
    code = (
        "import sys, signal; signal.signal(int(sys.argv.pop(1)), getattr(signal, sys.argv.pop(1)));"
        "from tightship.cli import main; print('ready', file=sys.stderr, flush=True); sys.exit(main())"
    )
    given = ("plan", str(tmp_path / "graph.json"), "-b", "90%", "--json", "-o", str(tmp_path / "plan.json"))
    for how, seconds, allowed in (("SIG_DFL", "60", {status}), ("SIG_IGN", "1", {0, 1})):
        one = started(code, str(int(number)), how, *given, "--seconds", seconds)
        assert one.stderr is not None
        assert one.stderr.readline() == b"ready\n"
        time.sleep(0.8)
        one.send_signal(number)
        said, errors = one.communicate()
        assert one.returncode in allowed, errors.decode()[-500:]
        assert b"Traceback" not in errors
        rows = json.loads(said)
        told = bool(rows.get("interrupted")) or rows.get("error", {}).get("message") == "terminated"
        assert told == (how == "SIG_DFL")
    assert {p.name for p in tmp_path.iterdir()} <= {"graph.json", "plan.json"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_an_error_that_a_signal_led_to_is_an_end_and_no_fault(tmp_path: Path) -> None:
    """Code that is interrupted may say so in errors of its own, modules of C++ among it."""
    code = (
        "import os, signal, sys, tightship.cli as cli\n"
        "def meets(*_):\n    try:\n        os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "    except KeyboardInterrupt:\n        raise SystemError('error return without exception set') from None\n"
        "cli.parser = meets; sys.exit(cli.main())"
    )
    one = started(code, "planners")
    assert one.communicate(timeout=60) == (b"", b"tightship: terminated\n")
    assert one.returncode == 143


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_word_ends_the_process_without_a_traceback(number: int) -> None:
    """Python still runs what others registered for its end, torch's libraries for one."""
    code = (
        "import sys, os, atexit, time; from tightship.cli import main; atexit.register(time.sleep, 20);"
        f"atexit.register(os.kill, os.getpid(), {int(number)}); sys.exit(main())"
    )
    one = started(code, "planners", "--json")
    said, errors = one.communicate(timeout=60)
    assert (one.returncode, errors) == (-number, b"")
    assert json.loads(said)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_what_killed_processes_left_goes_with_the_next_write_and_nothing_else(tmp_path: Path) -> None:
    import fcntl

    left = tmp_path / ".plan.json.0123abcd.tmp"
    inner = tmp_path / ".plan.json.0123abcd.onnx.89abcdef.onnx"
    alive = tmp_path / ".plan.json.4567abcd.tmp"
    others = [
        tmp_path / name for name in (".plan.json.swp", ".plan.json.0123.tmp", ".other.json.0123abcd.tmp")
    ]
    for path in (left, inner, alive, *others):
        path.write_bytes(b"{")
    with alive.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_file(tmp_path / "plan.json", b"{}")
        assert {*tmp_path.iterdir()} == {tmp_path / "plan.json", alive, *others}
    write_file(tmp_path / "plan.json", b"[]")
    assert {*tmp_path.iterdir()} == {tmp_path / "plan.json", *others}
    remove_parts(tmp_path)
    assert {*tmp_path.iterdir()} == {tmp_path / "plan.json", *others[:2]}
    assert (tmp_path / "plan.json").read_bytes() == b"[]"


@pytest.mark.parametrize("length", [8, 49, 50, 51, 64, 180])
def test_a_file_of_any_name_is_written_by_way_of_a_part_that_is_written_whole_itself(
    tmp_path: Path, length: int
) -> None:
    target = tmp_path / ("n" * (length - 5) + ".onnx")
    other = tmp_path / ("n" * (length - 5) + "2.onnx")
    with part_of(target, ".onnx") as part, part_of(other, ".onnx") as neighbor:
        write_file(part, b"1")
        remove_parts(tmp_path)  # as another process would: what is written here is not left
        write_file(neighbor, b"2")
        write_file(part, b"3")
        remove_parts(tmp_path, target.name)
        assert part.read_bytes() == b"3" and neighbor.read_bytes() == b"2"
        os.replace(part, target)
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_temporary_folders_of_killed_processes_go_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "tightship-scratch-left" / "inner").mkdir(parents=True)
    (tmp_path / "tightship-scratch-left" / "model.onnx").touch()
    (tmp_path / "tightship-other").mkdir()
    (tmp_path / "tightship-scratch-link").symlink_to(tmp_path / "tightship-other")
    with scratch_folder() as one, scratch_folder() as two:
        assert one.is_dir() and two.is_dir() and one != two
        assert not (tmp_path / "tightship-scratch-left").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"tightship-other", "tightship-scratch-link"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="there can be no temporary folder"), scratch_folder():
        pass


@pytest.mark.parametrize("years", [-30, 30])
def test_a_clock_that_jumps_ends_no_search(monkeypatch: pytest.MonkeyPatch, years: int) -> None:
    """With every look the time of day is years away; what is planned stays the same."""
    graph, now = chain(12), [time.time()]
    expected = api.plan_graph(graph, "90%", seconds=60.0, work=2_000).plan

    def jumps() -> float:
        now[0] += years * 365 * 86_400
        return now[0]

    monkeypatch.setattr(time, "time", jumps)
    assert api.plan_graph(graph, "90%", seconds=60.0, work=2_000).plan.steps == expected.steps


# --- graphs that others make ---


def nested(depth: int, width: int = 1) -> Graph:
    graph = chain(1)
    for _ in range(depth):
        op = Op("call", "call", (0,), (1,), calls=(graph,) * width)
        graph = Graph((op,), (Value("i", 0), Value("o", 1)), (Storage("i", 64), Storage("o", 64)), (0,), (1,))
    return graph


@pytest.mark.parametrize("events", [(0, 2**31), (2**40, -1), (-2, 5)])
def test_events_of_a_request_are_numbers_that_are_counted_with(events: tuple[int, int]) -> None:
    op = Op("make", "f", (), (0,), workspace=64, requests=(Request(64, -1, *events),))
    with pytest.raises(BadInput, match="events of a request"):
        Graph((op,), (Value("v", 0),), (Storage("s", 64),), (), (0,))


@pytest.mark.parametrize("what", ["IR", "opset"])
def test_versions_that_no_model_has_are_refused(tmp_path: Path, what: str) -> None:
    onnx = pytest.importorskip("onnx")
    from tightship.sources import read_onnx

    model = onnx.ModelProto()
    model.ParseFromString(hostile("model", 0, 0)[1])
    if what == "IR":
        model.ir_version = 1 << 59
    else:
        model.opset_import[0].version = 1 << 59
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BadInput, match=f"there is no {what} version"):
        read_onnx(tmp_path / "m.onnx")


def test_graphs_lie_in_one_another_only_so_deep_and_so_many() -> None:
    assert nested(DEEPEST).nesting == (DEEPEST, DEEPEST)
    with pytest.raises(BadInput, match=f"at most {DEEPEST} deep"):
        nested(DEEPEST + 1)
    assert nested(10, 2).nesting == (10, 2046)
    with pytest.raises(BadInput, match="called inside of a graph"):
        nested(30, 2)


@pytest.mark.parametrize("verb", [["plan"], ["explain"], ["frontier", "--points", "2", "--seconds", "1"]])
def test_every_verb_reads_deep_graphs_and_empty_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    """Also into a page."""
    for name, graph in (("deep", nested(DEEPEST - 1)), ("wide", nested(9, 2)), ("empty", Graph((), (), ()))):
        path = tmp_path / f"{name}.json"
        save_graph(graph, path)
        page = [] if verb[0] == "explain" else ["--report", str(tmp_path / "page.html")]
        assert cli.main([verb[0], str(path), *verb[1:], *page, "--json"]) == 0
        json.loads(capsys.readouterr().out)


# --- what is shown ---


def test_characters_that_hide_or_reorder_are_shown() -> None:
    assert visible(EVIL) == "ok<U+202E>gnp.exe<U+001B>[2J<U+2066>"
    assert visible("a\tb\nünï 漢字 ⟨x⟩ 🙂") == "a\tb\nünï 漢字 ⟨x⟩ 🙂"


def test_names_order_nothing_where_they_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = chain(3)
    storages = tuple(replace(s, name=EVIL) for s in graph.storages)
    save_graph(replace(graph, storages=storages, name=EVIL), tmp_path / "g.json")
    paths = [tmp_path / "page.html", tmp_path / "picture.svg"]
    given = ["--report", str(paths[0]), "--picture", str(paths[1])]
    assert cli.main(["plan", str(tmp_path / "g.json"), *given]) == 0
    assert cli.main(["explain", str(tmp_path / "g.json")]) == 0
    (tmp_path / EVIL).write_text("{")
    assert cli.main(["plan", str(tmp_path / EVIL)]) == 2
    said = capsys.readouterr()
    for text in (said.out, said.err, *(p.read_text() for p in paths)):
        assert not {"\u202e", "\u2066", "\x1b"} & set(text)
        assert "<U+202E>" in text or "&lt;U+202E&gt;" in text


def test_a_page_may_ask_for_nothing(tmp_path: Path) -> None:
    planned = api.plan_graph(chain(3), seconds=0.2)
    planned.report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    head = text[: text.index("<title>")]
    assert "Content-Security-Policy" in head
    assert "default-src 'none'" in head


def test_a_plan_of_absurd_numbers_is_refused() -> None:
    with pytest.raises(BadInput):
        Plan("", (), time=float("inf"))


def test_a_scratch_folder_that_somebody_takes_for_one_that_was_left_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making and locking it; and nothing is left where a signal comes as it is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened, made, taken = os.open, os.mkdir, []

    def open_too_late(path: str, *how: int, **where: Any) -> int:
        if not taken:
            taken.append(path)
            os.rmdir(path)
        return opened(path, *how, **where)

    def interrupted(path: str, mode: int) -> None:
        made(path, mode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_too_late)
        with scratch_folder() as folder:
            assert folder.is_dir() and str(folder) != taken[0]
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", interrupted)
        with pytest.raises(KeyboardInterrupt), scratch_folder():
            pass
    assert not list(tmp_path.iterdir())


def test_an_import_that_a_signal_ended_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules of C++ make an ImportError of it, with the interrupt as its cause."""

    def broken(*_: object) -> None:
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(cli, "parser", broken)
    assert cli.main(["planners", "--json"]) == 130
    assert "internal error" not in capsys.readouterr().err
