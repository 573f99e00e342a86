"""The CUDA allocator against a stand-in for the CUDA runtime; the same on a GPU where there is one."""

import ctypes
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support import plans  # noqa: E402
from support.chains import chain  # noqa: E402
from tightship.errors import Unsupported  # noqa: E402
from tightship.execute import allocator  # noqa: E402
from tightship.execute import native as extension  # noqa: E402
from tightship.execute.allocator import (  # noqa: E402
    Arena,
    Meter,
    Miss,
    Script,
    record,
    replay,
)
from tightship.execute.fit import fit  # noqa: E402
from tightship.execute.interpreter import Executor  # noqa: E402
from tightship.execute.script import device_of  # noqa: E402

try:
    native = extension.build_and_import("cuda")
except extension.NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

COMPILER = next((c for c in map(shutil.which, ("cc", "gcc", "clang")) if c), None)
UNIT = 512
A, B = 11, 12
"""Two streams."""


class Device:
    """The stand-in, and the functions that torch would call."""

    def __init__(self, path: Path) -> None:
        self.runtime = ctypes.CDLL(str(path))
        library = ctypes.CDLL(native.__file__)
        self._free = library.ts_free
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._malloc = library.ts_malloc
        self._malloc.argtypes, self._malloc.restype = (
            [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p],
            ctypes.c_void_p,
        )
        self._record = library.ts_record_stream
        self._record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def __getattr__(self, name: str) -> int:
        return ctypes.c_longlong.in_dll(self.runtime, f"fake_{name}").value

    def live(self, device: int = 0) -> int:
        return int((ctypes.c_longlong * 2).in_dll(self.runtime, "fake_live")[device])

    def limit(self, nbytes: int, device: int = 0) -> None:
        (ctypes.c_longlong * 2).in_dll(self.runtime, "fake_limit")[device] = nbytes

    def malloc(self, units: int, device: int = 0, stream: int = A) -> int:
        """As torch does, but with errors as exceptions, which C++ may throw and ctypes may not pass on."""
        return int(native.try_malloc(units * UNIT, device, stream))

    def free(self, data: int, stream: int = A) -> None:
        self._free(data, 0, 0, stream)

    def record_stream(self, data: int, stream: int) -> None:
        self._record(data, stream)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("cuda") / "libfake_cudart.so"
    source = Path(__file__).parents[1] / "support" / "fake_cuda.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", str(source), "-o", str(path)], check=True)
    native.open(str(path))
    return Device(path)


@pytest.fixture
def device(stand_in, monkeypatch):
    """The stand-in, with nothing alive before and after."""
    monkeypatch.setitem(allocator._natives, "cuda", native)
    native.empty_spare()
    assert stand_in.live() == stand_in.live(1) == 0 == native.meter_current() == native.reserved()
    yield stand_in
    stand_in.limit(0)
    native.empty_spare()
    assert stand_in.live() == stand_in.live(1) == 0 == native.meter_current() == native.reserved()


def planned(units, offsets, starts, limit=None):
    return Script(
        [n * UNIT for n in units], [o * UNIT if o >= 0 else -1 for o in offsets], starts,
        None if limit is None else limit * UNIT, kind="cuda",
    )  # fmt: skip


# ---- plain blocks


def test_blocks_are_counted_in_units_of_512_and_kept_for_their_size_and_stream(device):
    mallocs = device.mallocs
    with Meter("cuda") as meter:
        a, b = device._malloc(100, 0, A), device.malloc(2)
        assert (meter.current, device.live()) == (3 * UNIT, 3 * UNIT)
        device.free(a)
        device.free(b)
        assert meter.current == 0 and native.spare() == 3 * UNIT
        again, other = device.malloc(2), device.malloc(2, stream=B)
        assert again == b != other
    assert device.mallocs == mallocs + 3 and meter.peak == 4 * UNIT and native.spare() == UNIT
    native.empty_spare()
    assert device.live() == 4 * UNIT
    device.free(again)
    device.free(other, B)


def test_nothing_asked_is_nothing_given(device):
    assert device._malloc(0, 0, A) is None
    device.free(0)
    device.free(12345)  # unknown: not ours to free


def test_a_full_device_gets_the_spare_blocks_back_before_it_says_so(device):
    device.limit(8 * UNIT)
    a, b = device.malloc(4), device.malloc(4)
    device.free(a)
    c = device.malloc(3)
    assert native.spare() == 0 and device.live() == 7 * UNIT
    with pytest.raises(RuntimeError, match="CUDA out of memory: device 0 has no 1024 bytes left"):
        device.malloc(2)
    assert device.runtime.cudaGetLastError() == 0
    for data in (b, c):
        device.free(data)


def test_a_block_used_on_another_stream_is_waited_for(device):
    syncs = device.syncs
    a, b = device.malloc(2), device.malloc(2)
    device.record_stream(a, A)
    device.record_stream(b, B)
    device.free(a)
    assert (device.syncs, native.spare()) == (syncs, 2 * UNIT)
    device.free(b)
    assert (device.syncs, native.spare(), device.live()) == (syncs + 1, 2 * UNIT, 2 * UNIT)


def test_each_device_has_its_blocks_and_the_current_one_stays(device):
    a = device.malloc(3, device=1)
    assert (device.live(0), device.live(1)) == (0, 3 * UNIT)
    current = ctypes.c_int(-1)
    device.runtime.cudaGetDevice(ctypes.byref(current))
    assert current.value == 0
    device.free(a)


# ---- recordings and replays


def test_a_recording_sees_every_request_in_order(device):
    with record("cuda") as recording:
        a = device.malloc(1)
        recording.seek(3)
        b = device.malloc(2)
        device.free(a)
    assert [(e.kind, e.id, e.nbytes, e.data_ptr, e.step) for e in recording.events] == [
        ("alloc", 0, UNIT, a, -1), ("alloc", 1, 2 * UNIT, b, 3), ("free", 0, UNIT, a, 3),
    ]  # fmt: skip
    device.free(b)


def test_the_kth_request_lies_at_its_planned_offset_of_one_block(device):
    arena = Arena(10 * UNIT, "cuda:0")
    mallocs = device.mallocs
    script = planned([2, 3, 4, 1], [0, 2, 5, -1], [0, 2, 4])
    for _ in range(3):
        with Meter("cuda") as meter, replay(arena, script) as session:
            session.seek(0)
            a, b = device.malloc(2), device.malloc(3)
            device.free(a)
            session.seek(1)
            c, d = device.malloc(4), device.malloc(1)
        assert [x - arena.base for x in (a, b, c)] == [0, 2 * UNIT, 5 * UNIT]
        stats = session.stats
        assert stats.as_planned and (stats.served, stats.escaped) == (3, 1)
        assert stats.peak == meter.peak == 8 * UNIT and stats.high_water == 9 * UNIT
        for data in (b, c, d):
            device.free(data)
        assert arena.live == 0
    assert device.mallocs == mallocs + 1  # for what escapes, once: it is kept afterwards


def test_what_deviates_goes_elsewhere_and_is_named(device):
    arena = Arena(8 * UNIT, "cuda:0")
    with replay(arena, planned([1, 1, 1, 1], [0, 1, 2, 2], [0, 4])) as session:
        session.seek(0)
        wrong, stray, right = device.malloc(2), device.malloc(1, stream=B), device.malloc(1)
        over, extra = device.malloc(1), device.malloc(1)
        foreign = device.malloc(1, device=1)
    inside = [arena.base <= x < arena.base + arena.size for x in (wrong, stray, right, over, extra, foreign)]
    assert inside == [False, False, True, False, False, False]
    assert session.stats.first_misses == (
        Miss(0, 0, 2 * UNIT, UNIT, "size"), Miss(0, 1, UNIT, UNIT, "stream"), Miss(0, 3, UNIT, UNIT, "occupied"),
        Miss(0, 4, UNIT, -1, "extra"),
    )  # fmt: skip
    for data in (wrong, stray, right, over, extra, foreign):
        device.free(data)


def test_the_limit_names_the_step(device):
    arena = Arena(4 * UNIT, "cuda:0")
    with (
        pytest.raises(RuntimeError, match="budget exceeded at step 1: asked 1024, live 512, limit 1024"),
        replay(arena, planned([1, 2], [0, 1], [0, 1, 2], limit=2)) as session,
    ):
        session.seek(0)
        kept = device.malloc(1)
        session.seek(1)
        device.malloc(2)
    assert session.stats.failed_step == 1
    device.free(kept)


def test_an_arena_that_another_stream_used_is_waited_for(device):
    arena = Arena(4 * UNIT, "cuda:0")
    script = planned([1], [0], [0, 1])
    syncs = device.syncs
    for stream, waited in ((A, 0), (A, 0), (B, 1), (B, 1), (A, 2)):
        with replay(arena, script) as session:
            session.seek(0)
            device.free(device.malloc(1, stream=stream))
        assert session.stats.as_planned and device.syncs == syncs + waited


def test_what_outlives_the_arena_keeps_its_memory(device):
    arena = Arena(4 * UNIT, "cuda:0")
    with replay(arena, planned([1], [1], [0, 1])) as session:
        session.seek(0)
        kept = device.malloc(1)
    del arena, session
    assert native.reserved() == device.live() == 4 * UNIT
    device.free(kept)
    assert native.reserved() == device.live() == 0


def test_no_memory_for_an_arena_is_a_memory_error(device):
    device.limit(UNIT)
    with pytest.raises(MemoryError, match="out of memory"):
        Arena(2 * UNIT, "cuda:0")


@pytest.mark.parametrize("seed", range(5))
def test_a_random_script_never_places_over_anything_alive(device, seed):
    rng = random.Random(seed)
    count = 300
    units = [rng.randrange(1, 30) for _ in range(count)]
    offsets = [rng.choice([-1, rng.randrange(0, 200)]) for _ in range(count)]
    arena = Arena(240 * UNIT, "cuda:0")
    live: dict[int, tuple[int, int]] = {}
    most = 0
    with Meter("cuda") as meter, replay(arena, planned(units, offsets, range(count + 1))) as session:
        for k in range(count):
            session.seek(k)
            data, size = device.malloc(units[k]), units[k] * UNIT
            assert all(data + size <= a or a + n <= data for a, n in live.values())
            ctypes.memset(data, k % 251, size)
            live[k] = data, size
            most = max(most, sum(n for _, n in live.values()))
            if len(live) > 12:
                victim = rng.choice(list(live))
                data, size = live.pop(victim)
                assert ctypes.string_at(data, size) == bytes([victim % 251]) * size
                device.free(data)
    stats = session.stats
    assert stats.requests == count == stats.served + stats.escaped + stats.misses
    assert stats.misses == stats.occupied > 0 < stats.served
    assert stats.peak == meter.peak == most
    for data, _ in live.values():
        device.free(data)


def test_the_first_steps_own_requests_may_be_anything(device):
    arena = Arena(2 * UNIT, "cuda:0")
    with replay(arena, planned([1, 1], [0, 0], [0, 1, 2])) as session:
        session.seek(0)
        allocator.aside("cuda")
        state = device.malloc(7)
        session.seek(1)
        device.free(device.malloc(1))
    assert session.stats.as_planned and session.stats.escaped == 1
    device.free(state)


# ---- which allocator


def on(graph, devices):
    """The graph with its ops on these devices, in turn."""
    ops = tuple(replace(op, device=devices[k % len(devices)]) for k, op in enumerate(graph.ops))
    return graph.with_ops(ops)


def test_the_graphs_device_says_where_its_arena_is(device):
    graph = chain(6)
    assert device_of(graph) == "cpu"
    assert device_of(on(graph, ["cuda:1"])) == "cuda:1"
    assert device_of(on(graph, ["cuda:0", "cpu"])) is None
    step = fit(*trained(), planner=plans.keep, cache=None, seconds_per_op=0.0)
    program, plan = step.program, step.plan

    def moved(*devices):
        return Executor(replace(program, graph=on(program.graph, devices)), plan)

    arena = moved("cuda:1").reserve(1000)
    assert (arena.kind, arena.size, device.live(1)) == ("cuda", 2 * UNIT, 2 * UNIT)
    del arena
    assert any("several devices" in n for n in moved("cuda:0", "cpu").notes)
    assert any("CPU and CUDA" in n for n in moved("xpu:0").notes)


def trained():
    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    return model, lambda net, batch: net(batch).sum(), torch.optim.SGD(model.parameters(), lr=0.1), x


# ---- torch


def test_without_a_device_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"):
        allocator.load("cuda")
    assert allocator.instead("cuda") == "plan for it without running"
    assert allocator.why_not("cuda") == "there is no CUDA device" and not allocator.available("cuda")
    with pytest.raises(Unsupported, match="an arena on tpu"):
        allocator.load("tpu")


def test_a_runtime_that_is_not_there_or_is_something_else(stand_in):
    with pytest.raises(OSError, match="no_such_runtime"):
        native.open("no_such_runtime.so")
    with pytest.raises(OSError, match="cudaMalloc"):
        native.open("libm.so.6")
    native.open(stand_in.runtime._name)


ON_A_GPU = """
import torch
from tightship.execute import allocator
native = allocator.load("cuda")
import tightship

def made():
    torch.manual_seed(0)
    parts = torch.nn.Linear, torch.nn.GELU, torch.nn.Dropout
    rows = [m for _ in range(6) for m in (parts[0](256, 256), parts[1](), parts[2](0.3))]
    model = torch.nn.Sequential(*rows).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

x = torch.randn(512, 256, device="cuda")
loss = lambda model, batch: model(batch).pow(2).mean()
(model, optimizer), (twin, other) = made(), made()
step = tightship.fit(model, loss, optimizer, x, budget=BUDGET, allow=ALLOW, strict=True, cache=None)
for number in range(4):
    torch.manual_seed(number)
    got = step(x)
    torch.manual_seed(number)
    expected = loss(twin, x)
    other.zero_grad()
    expected.backward()
    other.step()
    assert torch.equal(got, expected.detach())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert step.last.as_planned and step.last.measured_peak == step.plan.peak, step.last
assert {s.kind for s in step.plan.steps} & {"recompute", "offload", "compress"}
print("held")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("allow", "budget"),
    [
        ("recompute", "80%"),
        ("offload", "70%"),
        ("compress", "95%"),
        ("recompute,redraw,compress,offload", "60%"),
    ],
)
def test_a_training_step_on_a_gpu_is_eagers_and_within_its_budget(allow, budget):
    text = f"ALLOW, BUDGET = {allow!r}, {budget!r}\n{ON_A_GPU}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.strip() == "held", done.stderr


def test_the_runtime_is_named_after_torchs_version(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert extension.runtime() == "libcudart.so.13"
