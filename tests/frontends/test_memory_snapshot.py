"""Memory snapshots are read without being run: what PyTorch writes is understood, anything else is refused."""

import gzip
import json
import pickle
import pickletools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightship import BadInput, _core
from tightship.baselines.torch_allocator import CachingAllocator
from tightship.cli import main
from tightship.frontends.memory_snapshot import NO_STACK, is_snapshot, read_snapshot
from tightship.requests import SnapshotRequest

RECORDED = Path(__file__).parents[1] / "data/snapshots/torch-2.13-two-streams.pickle"
"""Written by torch 2.13's own allocator and ``_dump_snapshot``, on a CUDA runtime that computes nothing."""

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=4), inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=30,
)


def built(tree, kind, number):
    """The value, as Python has it."""
    if kind in (6, 8):
        items = [built(tree, int(k), int(n)) for k, n in zip(*tree.items(number), strict=True)]
        return items if kind == 6 else tuple(items)
    if kind == 7:
        items = [built(tree, int(k), int(n)) for k, n in zip(*tree.items(number), strict=True)]
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind == 3:
        return number
    return {1: lambda n: None, 2: bool, 4: tree.real, 5: lambda n: tree.text(n).decode()}[kind](number)


def wrapped(value):
    """Integers as the reader has them: 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple, dict)):
        return value
    if isinstance(value, int):
        return value - (1 << 64) if value >= 1 << 63 else value
    if isinstance(value, dict):
        return {k: wrapped(v) for k, v in value.items()}
    return type(value)(map(wrapped, value))


@given(plain, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back(value, protocol):
    tree = _core.PlainPickle(pickle.dumps(value, protocol))
    assert built(tree, *tree.root) == wrapped(value)


def small_snapshot():
    allocator = CachingAllocator(history=True)
    frames = [{"filename": "/home/me/train.py", "line": 3, "name": "step"}]
    kept = [allocator.alloc(n, 0, frames) for n in (100, 3 << 20, 30 << 20)]
    allocator.free(kept[1])
    return allocator.snapshot()


def write(tmp_path, value, protocol=4, change=lambda data: data):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(change(pickle.dumps(value, protocol)))
    return path


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_bytes_are_read_or_refused(tmp_path_factory, data):
    good = bytearray(pickle.dumps(small_snapshot(), data.draw(st.sampled_from([2, 4]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.mktemp("m") / "s.pickle"
    path.write_bytes(good)
    try:
        assert str(SnapshotRequest(path, 0.5).solve())
    except BadInput as error:
        assert str(path) in str(error)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(data):
    for begin in (b"", b"\x80\x04"):
        try:
            _core.PlainPickle(begin + data)
        except ValueError as error:
            assert "byte" in str(error)


class Evil:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_calls_a_function_is_refused_and_not_run(tmp_path, capsys, protocol):
    with pytest.raises(BadInput, match="GLOBAL, which no snapshot has"):
        read_snapshot(write(tmp_path, {"segments": [], "device_traces": [Evil()]}, protocol))
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "it holds an empty list"),
        (3, "it holds an integer"),
        ([3], r"segments\[0\].*'blocks' is missing"),
        ({"a": 1}, "has 'segments' or 'device_traces', and this has neither"),
        ({"segments": {}, "device_traces": []}, "segments.*: a dict, and must be a list"),
        ({"segments": [3], "device_traces": []}, r"segments\[0\].*'blocks' is missing"),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "size": 1}]]},
            r"\[0\]\[0\].*'addr' is missing",
        ),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "size": -1, "addr": 1}]]},
            "'size' is -1, and must be at least 0",
        ),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "size": 1 << 62, "addr": 1}] * 3]},
            "more than 2.62",
        ),
        ({"segments": [], "device_traces": [[{"action": 1}]]}, "'action' is an integer, and must be a text"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_place(tmp_path, value, said):
    with pytest.raises(BadInput, match=said):
        read_snapshot(write(tmp_path, value))


def as_torch_1_13(snapshot):
    """The list of segments, with the history of each block that was ever asked for."""
    for segment in snapshot["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"], segment["frames"], segment["requested_size"]
        for block in segment["blocks"]:
            last = {"addr": block.pop("address"), "real_size": block.pop("requested_size")}
            last["frames"] = block.pop("frames")
            earlier = {"addr": last["addr"], "real_size": 7, "frames": []}
            if block["state"] != "inactive":
                block["history"] = [last, earlier]
    return snapshot["segments"]


def as_torch_2_0(snapshot):
    segments = as_torch_1_13(snapshot)
    for event in snapshot["device_traces"][0]:
        del event["time_us"], event["pool_id"]
    return {"segments": segments, "device_traces": snapshot["device_traces"]}


def as_torch_2_1(snapshot):
    """Before private pools, expandable segments and annotations were said."""
    for segment in snapshot["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"]
        for block in segment["blocks"]:
            del block["address"]
    del snapshot["external_annotations"], snapshot["allocator_settings"]["roundup_power2_divisions"]
    return snapshot


def as_the_profilers(snapshot):
    """Events alone."""
    return {"device_traces": snapshot["device_traces"]}


def as_xpu(snapshot):
    """What ``torch.xpu`` writes: settings of its own, no annotations."""
    del snapshot["external_annotations"]
    return snapshot | {"allocator_settings": {"PYTORCH_ALLOC_CONF": "", "expandable_segments": False}}


@pytest.mark.parametrize("old", [as_torch_1_13, as_torch_2_0, as_torch_2_1, as_the_profilers, as_xpu])
def test_what_earlier_versions_wrote_is_read_as_far_as_it_says_something(tmp_path, old):
    now = read_snapshot(write(tmp_path, small_snapshot()))
    then = read_snapshot(write(tmp_path, old(small_snapshot())))
    (one,), (two,) = now.devices, then.devices
    if old is not as_the_profilers:
        used = two.blocks.state == 1
        assert two.blocks.address.tolist() == one.blocks.address.tolist()
        assert two.blocks.requested[used].tolist() == one.blocks.requested[used].tolist() == [100, 30 << 20]
        lines = [[s.lines(d.blocks.stack[used])[1] for s, d in ((now.stacks, one), (then.stacks, two))]]
        assert lines == [[["me/train.py:3 step"]] * 2]
    if old is not as_torch_1_13:
        assert two.events.size.tolist() == one.events.size.tolist()
    answer = SnapshotRequest(tmp_path / "snapshot.pickle", 0.5).solve()
    assert str(answer) and answer.devices[0].peak == (
        100 + (30 << 20) + (old is not as_torch_1_13) * (3 << 20)
    )


def segment(**more):
    block = {"size": 1 << 20, "state": "inactive", "requested_size": 0}
    return {"address": 0, "total_size": 1 << 20, "segment_type": "large", "blocks": [block], **more}


def test_bytes_that_two_segments_or_blocks_share_are_refused(tmp_path):
    apart = [segment(), segment(address=1 << 20), segment(device=1)]
    assert len(read_snapshot(write(tmp_path, apart)).devices) == 2
    with pytest.raises(BadInput, match=r"segments\[1\].*it overlaps segments\[0\]"):
        read_snapshot(write(tmp_path, [segment(), segment(address=(1 << 20) - 1)]))
    with pytest.raises(BadInput, match=r"blocks\[0\].*'address' is 5, and the blocks before it end at 0"):
        read_snapshot(write(tmp_path, [segment(blocks=[segment()["blocks"][0] | {"address": 5}])]))


HOSTILE = {
    "a gzip file": gzip.compress(RECORDED.read_bytes()),
    "a zip archive": b"PK\x03\x04" + bytes(40),
    "utf-16": '{"segments": []}'.encode("utf-16"),
    "nested 100,000 deep": b"\x80\x04]\x94" + b"]\x94" * 100_000 + b"a" * 100_000 + b".",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "two 61 times over": b"\x80\x04" + b"".join(b"]\x94(" + b"h\x00" * 10 + b"e" for _ in range(60)) + b".",
    "bytes of a terabyte": pickle.dumps([segment(total_size=1 << 40, is_expandable=True, blocks=[
        {"size": 1 << 40, "state": "active_allocated", "requested_size": 1 << 40}])]),
    "bytes of 2^61": pickle.dumps([segment(total_size=1 << 61, is_expandable=True, blocks=[
        {"size": 1 << 61, "state": "active_allocated", "requested_size": 1 << 61}])]),
    "requests that share bytes": pickle.dumps({"device_traces": [
        [{"action": "alloc", "addr": k * 512, "size": 1 << 39} for k in range(5000)]]}),
    "a cache that is emptied again and again": pickle.dumps({"device_traces": [[
        {"action": action, "addr": k << 20, "size": 512 << 10}
        for k in range(4_000) for action in ("alloc", "free_completed", "segment_free")[:: 1 + k % 2]]]}),
    "settings of other kinds": pickle.dumps({"segments": [segment()], "allocator_settings": {
        "max_split_size": "x", "roundup_power2_divisions": {"1": -3, "4": 7, "8": "x"}, "expandable_segments": 3,
        "garbage_collection_threshold": float("nan"), "PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:9,[["}}),
    "frames of other kinds": pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 0, "size": 9, "frames": [
        3, None, "s", {"filename": 5, "line": "x", "name": None}, {"filename": "\x1b[31m.py", "name": "a\nb\0"}]}]]}),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files_are_answered_or_refused_at_once(tmp_path, what, capsys):
    """Whatever a file says: an answer or a refusal with the file's name, as JSON, within some memory and seconds."""
    path = tmp_path / "s.pickle"
    path.write_bytes(HOSTILE[what])
    tracemalloc.start()
    status = main(["explain", str(path), "--seconds", "0.5", "--json"])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    answer = json.loads(capsys.readouterr().out)
    assert status in (0, 2) and most < 200 << 20, (status, most)
    assert status == 0 or str(path) in answer["error"]["message"]
    for line in (f for d in answer.get("devices", []) for s in d["stacks"] for f in s["frames"]):
        assert not {"\n", "\r"} & set(line)


@pytest.mark.parametrize("key", ["segments", "device_traces"])
def test_one_list_that_is_named_again_and_again_is_refused(tmp_path, key):
    """A file of some kilobytes would have millions of entries."""
    blocks = [{"size": 0, "state": "inactive"}] * 2000
    one = [segment(total_size=0, blocks=blocks, device=0)] * 2000
    events = [[{"action": "alloc", "addr": 1, "size": 1}] * 2000] * 2000
    path = write(tmp_path, {key: one if key == "segments" else events})
    assert path.stat().st_size < 20_000
    with pytest.raises(BadInput, match="entries in a file of so many bytes"):
        read_snapshot(path)


def test_empty_truncated_and_followed_files(tmp_path):
    path = write(tmp_path, small_snapshot(), change=lambda data: b"")
    with pytest.raises(BadInput, match="the file is empty"):
        read_snapshot(path)
    data = pickle.dumps(small_snapshot())
    for end in range(1, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(BadInput):
            read_snapshot(path)
    path.write_bytes(data + b"x")
    with pytest.raises(BadInput, match="1 bytes follow"):
        read_snapshot(path)
    path.write_bytes(b"not a pickle")
    with pytest.raises(BadInput, match="begins like this"):
        read_snapshot(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04" + b"]" * 200_000 + b".", "far more memory"),
        (b"\x80\x04" + b"(" * 1000, "nested deeper"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "incomplete"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f", "an integer of"),
        (b"\x80\x04Nr\xff\xff\xff\xff.", "one after the other"),
        (b"\x80\x04h\x05.", "was not remembered"),
        (b"\x80\x04\x95" + b"\xff" * 8, "within a frame"),
    ],
)
def test_lengths_and_depth_are_bounded_before_anything_is_allocated(data, said):
    with pytest.raises(ValueError, match=said):
        _core.PlainPickle(data)


def test_what_pickletools_has_made_smaller_is_read(tmp_path):
    one = read_snapshot(write(tmp_path, small_snapshot()))
    two = read_snapshot(write(tmp_path, small_snapshot(), change=pickletools.optimize))
    assert np.array_equal(one.devices[0].events.size, two.devices[0].events.size)


def test_a_snapshot_of_torchs_own_writer():
    assert is_snapshot(str(RECORDED))
    (device,) = read_snapshot(RECORDED).devices
    with RECORDED.open("rb") as file:
        known = pickle.load(file)  # ours, and only here
    events = known["device_traces"][0]
    assert device.events.size.tolist() == [e["size"] for e in events]
    assert device.segments.size.sum() == sum(s["total_size"] for s in known["segments"])
    blocks = [b for s in known["segments"] for b in s["blocks"]]
    assert device.blocks.address.tolist() == [b["address"] for b in blocks]
    number, names = read_snapshot(RECORDED).stacks.lines(device.events.stack)
    assert {names[k] for k in number} == {"project/train.py:4 weights", "project/train.py:5 activation"} | (
        {names[k] for k in number if names[k] == NO_STACK or "<module>" in names[k]}
    )
