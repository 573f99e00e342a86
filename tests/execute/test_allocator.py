"""The allocator counts exactly, places exactly where it was told, and never places over anything alive."""

import gc
import random
import threading
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from support.blocks import KB, block  # noqa: E402
from tightship.execute import allocator  # noqa: E402
from tightship.execute.allocator import (  # noqa: E402
    Arena,
    Event,
    Meter,
    Script,
    record,
    replay,
    suspended,
)


def first_fit(events: list[Event]) -> tuple[list[int], list[int], list[int]]:
    """Sizes, offsets and step starts from a recording; blocks that outlive it lie in the arena for good."""
    sizes: list[int] = []
    offsets: list[int] = []
    starts = [0] * (2 + max(event.step for event in events))
    live: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.kind == "free":
            del live[event.id]
            continue
        offset = 0
        for low, high in sorted(live.values()):
            if low - offset >= event.nbytes:
                break
            offset = max(offset, high)
        live[event.id] = (offset, offset + event.nbytes)
        sizes.append(event.nbytes)
        offsets.append(offset)
        starts[event.step + 1] = len(sizes)
    for step in range(1, len(starts)):
        starts[step] = max(starts[step], starts[step - 1])
    return sizes, offsets, starts


def left(events: list[Event]) -> list[Event]:
    """The requests for blocks that outlive a recording."""
    freed = {event.id for event in events if event.kind == "free"}
    return [event for event in events if event.kind == "alloc" and event.id not in freed]


def peak_of(events: list[Event]) -> int:
    level = peak = 0
    for event in events:
        level += event.nbytes if event.kind == "alloc" else -event.nbytes
        peak = max(peak, level)
    return peak


Steps = list[Callable[[dict[str, torch.Tensor]], None]]


def run(steps: Steps, seek: Callable[[int], None], values: dict[str, torch.Tensor]) -> None:
    for number, step in enumerate(steps):
        seek(number)
        step(values)


def network() -> tuple[Steps, dict[str, torch.Tensor]]:
    """A step with temporaries inside ops: convolution, layer norm, broadcast matmul, backward, deletions."""
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(4, 8, 16, 16, generator=generator),
        "w": torch.randn(12, 8, 3, 3, generator=generator).requires_grad_(),
        "g": torch.randn(256, generator=generator).requires_grad_(),
        "m": torch.randn(12, 256, 40, generator=generator).requires_grad_(),
    }

    def convolve(v: dict[str, torch.Tensor]) -> None:
        v["c"] = torch.conv2d(v["x"], v["w"], padding=1)

    def norm(v: dict[str, torch.Tensor]) -> None:
        v["n"] = torch.layer_norm(v.pop("c").view(4, 12, 256), [256], v["g"])

    def multiply(v: dict[str, torch.Tensor]) -> None:
        v["y"] = torch.matmul(v.pop("n")[:, :, None], v["m"]).square().mean()

    def backward(v: dict[str, torch.Tensor]) -> None:
        v["dw"], v["dg"], v["dm"] = torch.autograd.grad(v["y"], (v["w"], v["g"], v["m"]))

    return [convolve, norm, multiply, backward], given


class TestRecord:
    def test_events_are_exact_and_in_order(self) -> None:
        early = block(1)
        with record() as recording:
            a = torch.empty(100, dtype=torch.uint8)
            recording.seek(3)
            b = block(2)
            place = a.data_ptr(), b.data_ptr()
            del a, early
        assert recording.events == [
            Event("alloc", 0, 128, place[0], -1),
            Event("alloc", 1, 2 * KB, place[1], 3),
            Event("free", 0, 128, place[0], 3),
        ]
        with record() as second:
            del b  # belongs to another recording
        assert second.events == []

    def test_layer_norm_keeps_two_statistics(self) -> None:
        x, g = torch.ones(8, 1024), torch.ones(1024)
        with record() as recording:
            out = torch.native_layer_norm(x, [1024], g, g, 1e-5)
        assert [(e.kind, e.nbytes) for e in recording.events] == [
            ("alloc", 8 * 4 * KB), ("alloc", 64), ("alloc", 64)
        ]  # fmt: skip
        del out

    def test_temporaries_of_ops_are_seen(self) -> None:
        a, b = torch.ones(4, 1, 64, 32), torch.ones(4, 32, 64)
        with record() as recording:
            out = torch.matmul(a, b)
        sizes = [event.nbytes for event in recording.events if event.kind == "alloc"]
        assert out.nbytes in sizes
        assert len(sizes) == 3  # both operands are expanded into memory first
        assert sum(event.kind == "free" for event in recording.events) == 2
        x, w = torch.ones(2, 3, 16, 16), torch.ones(5, 3, 3, 3)
        with record() as recording:
            out = torch.conv2d(x, w)
        assert peak_of(recording.events) >= out.nbytes
        assert any(e.kind == "alloc" and e.data_ptr == out.data_ptr() for e in recording.events)

    def test_other_threads_are_not_recorded_and_may_free(self) -> None:
        box: list[torch.Tensor] = []
        with record() as recording:
            box.append(block(4))
            thread = threading.Thread(target=lambda: (box.clear(), block(9)))
            thread.start()
            thread.join()
        assert [(e.kind, e.nbytes) for e in recording.events] == [("alloc", 4 * KB)]

    def test_misuse_is_refused(self) -> None:
        with record() as recording:
            with pytest.raises(RuntimeError, match="not ended"):
                _ = recording.events
            with pytest.raises(RuntimeError, match="already"), record():
                pass
            with pytest.raises(RuntimeError, match="already"), replay(Arena(64), Script([64], [0], [0, 1])):
                pass
        with pytest.raises(RuntimeError, match="neither"):
            recording.seek(0)


class TestReplay:
    def test_there_may_be_as_many_arenas_as_graphs_that_are_compiled(self) -> None:
        arenas = [Arena(64) for _ in range(1500)]
        for arena in (arenas[0], arenas[-1]):
            with replay(arena, Script([64], [0], [0, 1])) as session:
                session.seek(0)
                kept = torch.empty(64, dtype=torch.uint8)
            assert session.stats.as_planned and arena.live == 64
            del kept
            assert arena.live == 0

    def test_a_training_step_is_bit_identical_and_lies_where_planned(self) -> None:
        steps, given = network()
        run(steps, lambda _: None, dict(given))  # lazily made state of torch is not part of a step
        eager = dict(given)
        with record() as recording:
            run(steps, recording.seek, eager)
        sizes, offsets, starts = first_fit(recording.events)
        high_water = max(o + s for o, s in zip(offsets, sizes, strict=True))
        arena, script = Arena(high_water), Script(sizes, offsets, starts)
        kept = left(recording.events)
        where = {event.data_ptr: arena.base + offsets[event.id] for event in kept}
        for _ in range(2):
            planned = dict(given)
            with Meter() as meter, replay(arena, script) as session:
                run(steps, session.seek, planned)
            stats = session.stats
            assert stats.as_planned, stats
            assert stats.served == stats.requests == len(sizes)
            assert stats.peak == meter.peak == peak_of(recording.events)
            assert (stats.high_water, stats.heap_peak, stats.start) == (high_water, 0, 0)
            assert stats.live == arena.live == sum(event.nbytes for event in kept)
            for name in ("y", "dw", "dg", "dm"):
                assert torch.equal(planned[name], eager[name]), name
                assert planned[name].data_ptr() == where[eager[name].data_ptr()], name
            del planned
            assert arena.live == 0

    def test_arena_starts_on_a_page_and_blocks_lie_at_their_offsets(self) -> None:
        arena = Arena(10 * KB)
        assert arena.base % 4096 == 0
        assert arena.size == 10 * KB
        with replay(arena, Script([KB, 100, KB], [9 * KB, 0, -1], [0, 2, 3])) as session:
            session.seek(0)
            a, b = block(1), torch.empty(100, dtype=torch.uint8)
            session.seek(1)
            c = block(1)
        assert a.data_ptr() - arena.base == 9 * KB
        assert b.data_ptr() == arena.base
        assert not 0 <= c.data_ptr() - arena.base < arena.size
        assert session.stats == allocator.ReplayStats(
            requests=3, served=2, escaped=1, misses=0, occupied=0, short=0, start=0, peak=2 * KB + 128,
            heap_peak=KB, high_water=10 * KB, live=2 * KB + 128, failed_step=None, first_misses=(),
        )  # fmt: skip
        del c
        assert arena.live == KB + 128

    def test_other_sizes_and_extra_requests_go_to_the_heap(self) -> None:
        arena = Arena(8 * KB)
        with replay(arena, Script([KB, KB, KB, KB], [0, KB, 2 * KB, 3 * KB], [0, 2, 4])) as session:
            early = torch.full((KB,), 6, dtype=torch.uint8)
            session.seek(0)
            wrong = torch.full((2 * KB,), 7, dtype=torch.uint8)
            right = torch.full((KB,), 8, dtype=torch.uint8)
            extra = torch.full((KB,), 9, dtype=torch.uint8)
            session.seek(1)
            after = torch.full((KB,), 5, dtype=torch.uint8)
        for tensor, value in ((early, 6), (wrong, 7), (right, 8), (extra, 9), (after, 5)):
            assert bool((tensor == value).all())
        assert (right.data_ptr(), after.data_ptr()) == (arena.base + KB, arena.base + 2 * KB)
        stats = session.stats
        assert (stats.requests, stats.served, stats.misses, stats.short) == (5, 2, 3, 1)
        assert not stats.as_planned
        assert stats.first_misses == (
            allocator.Miss(-1, 0, KB, -1, "extra"),
            allocator.Miss(0, 0, 2 * KB, KB, "size"),
            allocator.Miss(0, 2, KB, -1, "extra"),
        )
        assert stats.heap_peak == 4 * KB

    def test_a_block_is_never_placed_over_a_live_one(self) -> None:
        arena = Arena(8 * KB)
        script = Script([2 * KB, 2 * KB, 2 * KB, 2 * KB], [KB, 0, 2 * KB, 3 * KB], [0, 4])
        with replay(arena, script) as session:
            session.seek(0)
            kept = [torch.full((2 * KB,), value, dtype=torch.uint8) for value in range(4)]
        assert [0 <= t.data_ptr() - arena.base < arena.size for t in kept] == [True, False, False, True]
        assert all(bool((tensor == value).all()) for value, tensor in enumerate(kept))
        assert (session.stats.misses, session.stats.occupied) == (2, 2)
        assert {miss.kind for miss in session.stats.first_misses} == {"occupied"}

    def test_the_limit_names_the_step(self) -> None:
        arena = Arena(8 * KB)
        with (
            pytest.raises(
                RuntimeError, match=r"tightship: budget exceeded at step 1: asked 2048, live 1024, limit 2048"
            ),
            replay(arena, Script([KB, 2 * KB], [0, -1], [0, 1, 2], limit=2 * KB)) as session,
        ):
            session.seek(0)
            kept = block(1)
            session.seek(1)
            block(2)
        assert session.stats.failed_step == 1
        assert not session.stats.as_planned
        assert (arena.live, session.stats.peak) == (KB, KB)
        del kept
        with replay(arena, Script([KB, KB], [0, -1], [0, 2], limit=2 * KB)) as session:
            session.seek(0)
            kept = [block(1), block(1)]  # exactly the limit is within it
        assert session.stats.as_planned
        del kept

    def test_steps_left_early_are_counted_and_steps_may_repeat(self) -> None:
        arena = Arena(KB)
        with replay(arena, Script([KB, KB], [0, 0], [0, 1, 2])) as session:
            session.seek(1)
            session.seek(0)
            block(1)
            session.seek(0)
            block(1)
            session.seek(1)
        assert (session.stats.short, session.stats.misses, session.stats.served) == (2, 0, 2)

    def test_suspended_requests_are_plain_heap(self) -> None:
        arena = Arena(KB)
        with replay(arena, Script([KB], [0], [0, 1])) as session:
            session.seek(0)
            with suspended(), suspended():
                state = block(5)
            kept = block(1)
        assert session.stats.as_planned
        assert session.stats.peak == arena.live == KB
        with record() as recording, suspended():
            del state, kept
        assert recording.events == []

    def test_other_threads_are_not_served_but_may_free(self) -> None:
        arena = Arena(KB)
        seen: list[torch.Tensor] = []
        with replay(arena, Script([KB, KB], [0, 0], [0, 2])) as session:
            session.seek(0)
            box = [block(1)]
            thread = threading.Thread(target=lambda: (box.clear(), seen.append(block(1))))
            thread.start()
            thread.join()
            assert arena.live == 0
            again = block(1)
        assert session.stats.as_planned
        assert again.data_ptr() == arena.base
        assert seen[0].data_ptr() != arena.base

    def test_two_threads_replay_in_two_arenas(self) -> None:
        def work(failures: list[object]) -> None:
            arena = Arena(4 * KB)
            with replay(arena, Script([KB] * 4, [0, KB, 2 * KB, 3 * KB], [0, 4])) as session:
                for value in range(200):
                    session.seek(0)
                    kept = [torch.full((KB,), value % 250, dtype=torch.uint8) for _ in range(4)]
                    if any(bool((tensor != value % 250).any()) for tensor in kept):
                        failures.append(value)
                    del kept
            if session.stats.served != 800:
                failures.append(session.stats)

        failures: list[object] = []
        threads = [threading.Thread(target=work, args=(failures,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # comparing allocates too: those requests are "extra" and go to the heap
        assert failures == []

    def test_a_random_script_never_corrupts(self) -> None:
        rng = random.Random(0)
        count = 400
        sizes = [rng.randrange(1, 40) * 64 for _ in range(count)]
        offsets = [rng.choice([-1, rng.randrange(0, 300) * 64]) for _ in range(count)]
        arena = Arena(340 * 64)
        live: dict[int, torch.Tensor] = {}
        with replay(arena, Script(sizes, offsets, range(count + 1))) as session:
            for k in range(count):
                session.seek(k)
                live[k] = torch.empty(sizes[k], dtype=torch.uint8).fill_(k % 251)
                if len(live) > 12:
                    victim = rng.choice(list(live))
                    content = live.pop(victim).numpy()
                    assert (content == victim % 251).all()
                    del content
            assert arena.live == sum(sizes[k] for k in live)
        stats = session.stats
        assert stats.requests == count == stats.served + stats.escaped + stats.misses
        assert stats.misses == stats.occupied > 0 < stats.served
        assert all((tensor.numpy() == k % 251).all() for k, tensor in live.items())


class TestLifetimes:
    @pytest.fixture(autouse=True)
    def nothing_reserved(self) -> Iterator[None]:
        gc.collect()
        before = allocator.reserved()
        yield
        gc.collect()
        assert allocator.reserved() == before

    def test_an_escaping_tensor_keeps_the_memory(self) -> None:
        before = allocator.reserved()
        arena = Arena(4 * KB)
        with replay(arena, Script([KB, KB], [KB, -1], [0, 2])) as session:
            session.seek(0)
            kept = torch.full((KB,), 3, dtype=torch.uint8)
            heap = torch.full((KB,), 4, dtype=torch.uint8)
        del arena, session
        gc.collect()
        assert allocator.reserved() == before + 4 * KB
        view = kept[10:20]
        del kept
        assert bool((view == 3).all())
        del view
        assert allocator.reserved() == before  # the heap block does not keep it
        assert bool((heap == 4).all())

    def test_forward_and_backward_are_two_sessions(self) -> None:
        arena = Arena(4 * KB)
        with replay(arena, Script([2 * KB, KB], [0, -1], [0, 2])) as forward:
            forward.seek(0)
            saved, loss = block(2), block(1)
        block(50)  # the user's own, between the two
        with replay(arena, Script([KB, 2 * KB], [2 * KB, 0], [0, 1, 2], limit=5 * KB)) as backward:
            backward.seek(0)
            gradient = block(1)
            del saved
            backward.seek(1)
            other = block(2)
        assert (forward.stats.peak, forward.stats.live) == (3 * KB, 3 * KB)
        assert backward.stats.as_planned
        assert (backward.stats.start, backward.stats.peak, backward.stats.live) == (3 * KB, 4 * KB, 4 * KB)
        assert (backward.stats.heap_peak, backward.stats.high_water) == (KB, 3 * KB)
        del gradient, other, loss
        assert arena.live == 0

    def test_the_session_keeps_its_arena_and_script(self) -> None:
        with replay(Arena(KB), Script([KB], [0], [0, 1])) as session:
            gc.collect()
            session.seek(0)
            kept = torch.full((KB,), 5, dtype=torch.uint8)
        assert session.stats.as_planned
        assert bool((kept == 5).all())

    def test_storages_grow_out_of_the_arena(self) -> None:
        arena = Arena(KB)
        with replay(arena, Script([KB], [0], [0, 1])) as session:
            session.seek(0)
            kept = torch.full((KB,), 5, dtype=torch.uint8)
        kept.resize_(4 * KB)
        assert bool((kept[:KB] == 5).all())
        assert arena.live == 0


# --- what an update asks for ----------------------------------------------------------------------------------


def _room(sizes, arena_size=4096):
    arena = allocator.Arena(arena_size)
    return arena, allocator.Script(sizes, [0] * len(sizes), range(len(sizes) + 1))


def test_a_room_holds_whatever_its_step_asks_for_and_counts_as_a_whole():
    arena, script = _room([512, 512])
    with allocator.replay(arena, script) as session:
        session.seek(0)
        allocator.open_room()
        first, second = torch.empty(32), torch.empty(32)
        del first
        third = torch.empty(16)  # in the first hole
        at = third.data_ptr() - arena.base, second.data_ptr() - arena.base
        del second, third
        assert arena.live == 512 and allocator.settle() == 0 and arena.live == 0
        session.seek(1)
        torch.empty(128)
    assert at == (0, 128)
    stats = session.stats
    assert (stats.peak, stats.misses, stats.requests, stats.served) == (512, 0, 2, 2)


@pytest.mark.parametrize("loose", [False, True])
def test_what_does_not_fit_a_room_lies_in_the_heap(loose):
    arena, script = _room([512])
    with allocator.replay(arena, script) as session:
        session.seek(0)
        allocator.open_room(loose=loose)
        held = torch.empty(96), torch.empty(64)
        allocator.settle()
        del held
    stats = session.stats
    assert (stats.misses, stats.escaped, stats.peak) == (int(not loose), int(loose), 512 + 256)
    assert arena.live == 0


def test_what_stays_in_a_room_is_told_and_counts():
    arena, script = _room([512])
    with allocator.replay(arena, script) as session:
        session.seek(0)
        allocator.open_room()
        kept = torch.empty(32)
        assert allocator.settle() == 1 and arena.live == 128
    del kept
    assert arena.live == 0 and session.stats.misses == 0


@pytest.mark.parametrize("slack", [0, 256])
def test_what_is_set_aside_counts_as_planned(slack):
    arena, script = _room([512])
    with allocator.replay(arena, script) as session:
        session.seek(0)
        allocator.aside("cpu", 256, slack)
        kept = torch.empty(128)
        allocator.settle()
        assert arena.live == 0  # it stands for what it replaced
    assert session.stats.peak == (256 if slack else 512)
    assert session.stats.misses == 0 and kept.numel() == 128


@pytest.mark.parametrize("threads", [1, 3])
def test_what_workers_of_a_parallel_kernel_ask_for_stands_beside_a_recording(threads: int) -> None:
    """The backward pass of attention has each thread make a row of its own."""
    q = torch.randn(2, 6, 32, 16)
    out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with allocator.record() as recording:
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                q, q, q, q, out, logs, 0.0, False
            )
        with allocator.record() as other:
            torch.randn(64)
    finally:
        torch.set_num_threads(before)
    row = 32 * 4
    assert recording.beside == (threads - 1) * row
    assert row in [e.nbytes for e in recording.events]  # that of this thread
    assert other.beside == 0
