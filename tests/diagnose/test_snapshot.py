"""What is said of a snapshot is what happened: compared with the allocator that wrote it, request by request."""

import contextlib
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from tightship import BadInput, explain
from tightship.baselines.torch_allocator import CachingAllocator, OutOfMemory
from tightship.baselines.torch_allocator_settings import Settings, rounded
from tightship.cli import main
from tightship.diagnose.snapshot import requests_of
from tightship.frontends.memory_snapshot import read_snapshot

RECORDED = Path(__file__).parents[1] / "data/snapshots/torch-2.13-two-streams.pickle"


def frame(line):
    return [
        {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"},
        {"filename": "/home/me/train.py", "line": line, "name": "step"},
    ]


def trained(seed=0, count=300, settings=None):
    """An allocator after random requests, and what was alive and reserved after each."""
    a, rng = CachingAllocator(settings or Settings(), history=True), random.Random(seed)
    kept, alive = [], [0]
    for _ in range(count):
        if kept and rng.random() < 0.45:
            address, size = kept.pop(rng.randrange(len(kept)))
            a.free(address)
            alive.append(alive[-1] - size)
        else:
            size = rng.choice([100, 5000, 600_000, 3 << 20, rng.randrange(1 << 20, 40 << 20)])
            kept.append((a.alloc(size, 0, frame(rng.randrange(3))), size))
            alive.append(alive[-1] + size)
    return a, kept, alive


def saved(tmp_path, snapshot):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return path


@pytest.mark.parametrize("seed", range(4))
def test_peaks_arena_and_lines(tmp_path, seed):
    a, _, alive = trained(seed)
    (d,) = explain(saved(tmp_path, a.snapshot())).devices
    assert (d.peak, d.reserved, d.simulated) == (max(alive), a.peak, a.peak)
    assert d.peak <= d.lower_bound <= d.arena <= d.reserved
    assert sum(row.bytes for row in d.lines) == d.peak
    assert {row.line for row in d.lines} <= {f"me/train.py:{k} step" for k in range(3)}
    x = d.layout
    assert x.requested + x.rounding + x.stranded + x.cached == x.reserved == d.reserved
    assert sum(p.alone for p in d.pins) <= x.stranded
    assert not d.notes


def test_the_end_of_a_block_that_was_not_split_is_the_blocks_own(tmp_path):
    a = CachingAllocator(history=True)
    for size in (20_500_000, 12 << 20, 3 << 20, 600_000):
        a.alloc(size, 0, frame(1))
    (d,) = explain(saved(tmp_path, a.snapshot())).devices
    x = d.layout
    assert x.requested + x.rounding == a.allocated > x.requested + 400_000
    assert x.stranded == a.reserved - a.allocated


def test_a_record_that_began_late(tmp_path):
    """Peaks within the record are the same: what was there before is known from the end, or from its free."""
    a, _, alive = trained(5)
    snapshot = a.snapshot()
    events = snapshot["device_traces"][0]
    cut = len(events) // 2
    snapshot["device_traces"][0] = events[cut:]
    path = saved(tmp_path, snapshot)
    (d,) = explain(path).devices
    assert any("the record begins after" in note for note in d.notes)
    made = [e for e in events[:cut] if e["action"] in ("alloc", "free_completed")]
    assert d.peak == max(alive[len(made) :])
    requests = requests_of(read_snapshot(path).devices[0])
    assert int((requests.lower < 0).sum()) == 2 * sum(e["action"] == "alloc" for e in made) - len(made)


def test_no_record_at_all(tmp_path):
    a, kept, alive = trained(6)
    snapshot = a.snapshot() | {"device_traces": [[]]}
    (d,) = explain(saved(tmp_path, snapshot)).devices
    assert d.peak == alive[-1] == sum(size for _, size in kept)
    assert d.reserved == a.reserved
    assert any("no record of events" in note for note in d.notes)


def test_running_out_of_memory(tmp_path):
    a = CachingAllocator(history=True, capacity=100 << 20)
    kept = [a.alloc(5 << 20, 0, frame(1)) for _ in range(20)]
    for address in kept[::2]:
        a.free(address)
    with pytest.raises(OutOfMemory):
        a.alloc(30 << 20)
    (d,) = explain(saved(tmp_path, a.snapshot())).devices
    (failure,) = d.failures
    assert failure.asked == 30 << 20 and failure.idle >= failure.asked
    assert "without fragmentation it would have fit" in str(explain(saved(tmp_path, a.snapshot())))
    assert d.layout.stranded == 50 << 20 and d.layout.cached == 0
    assert d.pins[0].line == "me/train.py:1 step" and d.pins[0].alone == 50 << 20


def test_pending_frees_count_as_alive_and_private_pools_beside(tmp_path):
    a, *_ = trained(7, 60)
    snapshot = a.snapshot()
    used = next(b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated")
    peak = explain(saved(tmp_path, snapshot)).devices[0].peak
    used["state"] = "active_pending_free"
    assert explain(saved(tmp_path, snapshot)).devices[0].peak == peak
    for segment in snapshot["segments"]:
        segment["segment_pool_id"] = (0, 1)
    (d,) = explain(saved(tmp_path, snapshot)).devices
    assert d.private == a.reserved and d.reserved == d.peak == d.arena == 0
    assert any("private pools" in note for note in d.notes)


@pytest.mark.parametrize("address", [0, -1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_requests_anywhere_in_the_address_space(tmp_path, address):
    a, _, _ = trained(count=40)
    snapshot = a.snapshot()
    (trace,) = snapshot["device_traces"]
    last = max(k for k, e in enumerate(trace) if e["action"] == "alloc")
    trace[last]["addr"] = address
    with contextlib.suppress(BadInput):
        (d,) = explain(saved(tmp_path, snapshot)).devices
        assert d.peak > 0


def test_several_devices_and_unknown_events(tmp_path):
    a, *_ = trained(8, 60)
    snapshot = a.snapshot()
    events = snapshot["device_traces"][0]
    snapshot["device_traces"] = [[], [*events, {"action": "user_defined", "addr": 0, "size": 0}]]
    for segment in snapshot["segments"]:
        segment["device"] = 1
    (d,) = explain(saved(tmp_path, snapshot)).devices
    assert d.device == 1 and d.reserved == a.peak
    assert any("kinds that are not known" in note for note in d.notes)


def test_expandable_segments(tmp_path):
    a, _, alive = trained(9, settings=Settings(expandable_segments=True))
    (d,) = explain(saved(tmp_path, a.snapshot())).devices
    assert (d.peak, d.reserved) == (max(alive), a.peak)
    assert d.simulated == d.reserved
    x = d.layout
    assert x.requested + x.rounding + x.stranded + x.cached == x.reserved == a.reserved
    a.empty_cache()
    assert a.reserved == x.reserved - x.cached, "pages that nothing lies in are given back"
    assert {"without expandable_segments", "a planned arena"} <= {s.name for s in d.savings}


SETTINGS = [
    ("", None, None),
    ("", 160 << 20, None),
    ("expandable_segments:True", 160 << 20, None),
    ("max_split_size_mb:25", 160 << 20, None),
    ("roundup_power2_divisions:[4:2,>:8]", 160 << 20, None),
    ("garbage_collection_threshold:0.5", None, 400 << 20),
    ("expandable_segments:True,max_split_size_mb:30,roundup_power2_divisions:4", None, None),
]


@pytest.mark.parametrize(("conf", "capacity", "limit"), SETTINGS)
def test_the_recorded_settings_are_simulated_exactly(tmp_path, conf, capacity, limit):
    """With a device that ran full, and with a cache that was emptied by hand."""
    a, rng, kept = CachingAllocator(Settings.parse(conf), capacity, limit, history=True), random.Random(0), []
    for _ in range(300):
        if kept and rng.random() < 0.47:
            a.free(kept.pop(rng.randrange(len(kept))))
        elif rng.random() > 0.99:
            a.empty_cache()
        else:
            with contextlib.suppress(OutOfMemory):
                size = rng.choice([100, 600_000, 3 << 20, rng.randrange(1 << 20, 40 << 20)])
                kept.append(a.alloc(size, 0, frame(0)))
    (d,) = explain(saved(tmp_path, a.snapshot()), seconds=0.3).devices
    assert d.settings == conf and d.simulated == d.reserved == a.peak
    assert d.capacity in (None, capacity) and (capacity is None or d.failures)
    tried = {s.name: s for s in d.savings if s.how == "simulated"}
    for key in Settings().__dataclass_fields__:
        name = key.replace("max_split_size", "max_split_size_mb")
        if name in conf:
            assert f"without {name}" in tried
    if capacity is not None:
        assert all(s.failed is not None and s.reserved <= capacity for s in tried.values())


def test_settings_are_parsed_said_and_refused_as_by_torch(tmp_path):
    text = "max_split_size_mb:128,roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    found = Settings.parse(f" {text.replace(',', ' , ')} ")
    assert found.roundup_power2_divisions == (8,) * 7 + (2, 4, 2, 4) + (1,) * 5
    assert Settings.parse(str(found)) == found and found.max_split_size == 128 << 20
    assert [rounded(n, Settings.parse("roundup_power2_divisions:4")) for n in (1, 4096, 4097, 5121, 6 << 20)] == [
        512, 4096, 5120, 6144, 6 << 20,
    ]  # fmt: skip
    for bad, said in [
        ("max_split_size_mb:3", "must be at least 20"),
        ("max_split_size_mb", "must be key:value"),
        ("expandable_segments:yes", "True or False"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[2", "must be key:value"),
        ("max_split_size_mb:x", "not a value of this setting"),
        ("pinned_use_background_threads:True", "unknown allocator setting"),
    ]:
        with pytest.raises(BadInput, match=said):
            Settings.parse(bad)


def test_settings_that_somebody_wants_to_try(tmp_path, capsys):
    text = "max_split_size_mb:32,expandable_segments:True"
    assert main(["explain", str(RECORDED), "--alloc-conf", text, "--json"]) == 0
    names = [s["name"] for s in json.loads(capsys.readouterr().out)["devices"][0]["savings"]]
    assert str(Settings.parse(text)) in names
    assert main(["explain", str(RECORDED), "--alloc-conf", "nonsense:1", "--json"]) == 2
    assert "unknown allocator setting 'nonsense'" in capsys.readouterr().out
    assert main(["explain", "a.onnx", "--alloc-conf", text]) == 2
    assert "--alloc-conf requires a memory snapshot" in capsys.readouterr().err


def test_which_call_stacks_strand_the_bytes(tmp_path):
    """Two ways into one line; each keeps a segment of its own, the third shares one."""

    def stack(*lines):
        return [{"filename": "/home/me/train.py", "line": k, "name": "f"} for k in lines]

    a, kept = CachingAllocator(history=True, capacity=60 << 20), []
    for k in range(3):
        kept.append((a.alloc(9 << 20, 0, stack(1, 10 + k)), a.alloc(9 << 20, 0, stack(5))))
    for _, rest in kept[:2]:
        a.free(rest)
    with pytest.raises(OutOfMemory):
        a.alloc(30 << 20)
    (d,) = explain(saved(tmp_path, a.snapshot()), seconds=0.3).devices
    found = {s.frames: (s.alone, s.shared, s.count) for s in d.stacks}
    assert found == {
        ("me/train.py:1 f", "me/train.py:10 f"): (11 << 20, 0, 1),
        ("me/train.py:1 f", "me/train.py:11 f"): (11 << 20, 0, 1),
        ("me/train.py:1 f", "me/train.py:12 f"): (0, 2 << 20, 1),
        ("me/train.py:5 f",): (0, 2 << 20, 1),
    }
    assert d.layout.stranded == 24 << 20
    assert "me/train.py:10 f" in str(explain(saved(tmp_path, a.snapshot()), seconds=0.3))


def test_torchs_own_snapshot_is_simulated_exactly():
    (d,) = explain(RECORDED).devices
    assert d.simulated == d.reserved == 375390208
    assert d.optimal and d.arena == 313238528 and d.streams == 2


@pytest.mark.parametrize(
    ("name", "settings", "reserved", "failures"),
    [
        ("max-split-out-of-memory", "max_split_size_mb:25", 262144000, 10),
        ("expandable-out-of-memory", "expandable_segments:True", 262144000, 2),
    ],
)
def test_torchs_own_snapshots_of_a_full_device_in_other_settings(name, settings, reserved, failures):
    """Recorded on a device of 250 MiB; the cache was emptied by hand a few times, too."""
    (d,) = explain(RECORDED.with_name(f"torch-2.13-{name}.pickle"), seconds=1).devices
    assert (d.settings, d.capacity) == (settings, 250 << 20)
    assert d.simulated == d.reserved == reserved and len(d.failures) == failures


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_the_command_fits_the_width_and_writes_a_page(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = tmp_path / "page.html"
    assert main(["explain", str(RECORDED), "--report", str(page)]) == 0
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if "─" in line]
    assert tables and max(map(len, tables)) <= columns
    assert "train.py" in page.read_text() and "://" not in page.read_text().split("</style>")[0]


def test_json_and_errors(tmp_path, capsys):
    assert main(["explain", str(RECORDED), "--json"]) == 0
    assert '"fragmentation"' in capsys.readouterr().out
    empty = tmp_path / "empty.pickle"
    empty.write_bytes(b"")
    assert main(["explain", str(empty)]) == 2
    assert main(["explain", str(RECORDED), "--budget", "1GiB"]) == 2
    assert main(["explain", str(tmp_path / "none.pickle")]) == 2
    assert "--budget requires a model or a plan" in capsys.readouterr().err


def test_the_simulated_allocator_reuses_joins_and_gives_back():
    a = CachingAllocator()
    one, two, three = a.alloc(600_000), a.alloc(600_000), a.alloc(600_000)
    assert a.reserved == 2 << 20 and (one, two, three) == (one, one + 600_064, one + 1_200_128)
    a.free(one), a.free(two)
    assert a.alloc(1 << 20) == one, "free neighbors are joined"
    a.free(three), a.free(one)
    a.empty_cache()
    assert a.reserved == 0 and a.peak == 2 << 20
    assert np.diff([a.alloc(11 << 20), a.reserved])[0] != 0 and a.reserved == 12 << 20
