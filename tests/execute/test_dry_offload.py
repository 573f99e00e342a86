"""Leaving the memory of a GPU, on a CUDA runtime that computes nothing: planned bytes, the order of copies, values.

Copies are real there and kernels are not: `watched` writes what ops would write, and looks for it where it is read.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from execute.test_dry_cuda import REASON, dry, program  # noqa: E402, F401
from support import dry_cuda  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

HOW = """
from support import plans, watched

def planner(graph, budget):
    return plans.placed(graph, plans.evicted(graph, HOW))
watched.packing_runs()
step = tightship.fit(model, loss, optimizer, x, strict=True, cache=CACHE, planner=planner)
plan, executor = step.plan, step._variants[0].executor
"""
WATCHED = """
seen = watched.Watched(executor)
for number in range(2):
    seen.start()
    step(x)
    found = seen.races()
    assert step.last.as_planned and step.last.misses == 0, step.last
    assert step.last.measured_peak == plan.peak or not number  # the first step makes the optimizer's state
left = plan.count("offload"), plan.count("compress")
streams = len(seen.kernels), len(seen.copying - seen.kernels)
print(plan.peak < plan.peak_before, *left, seen.back, len(found), *streams)
"""


def watched(dry, name, how, body=""):  # noqa: F811
    text = program(name, f"HOW = {how!r}\n{HOW}\n{body}\n{WATCHED}")
    less, *counts = dry_cuda.run(dry, text).split()
    return less == "True", *map(int, counts)


STREAMS = {"overlap": 1, "tight": 1, "searched": 2}


@pytest.mark.parametrize("how", STREAMS)
@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_what_is_copied_out_comes_back_in_time_as_it_was(dry, name, how):  # noqa: F811
    less, offloads, _, back, races, *streams = watched(dry, name, how)
    assert (less or how != "tight") and offloads > 10 and back >= 2 * offloads
    assert races == 0 and streams == [1, STREAMS[how]]


@pytest.mark.parametrize(
    "broken",
    [
        "from tightship.execute import host_pool; host_pool.Copied.result = lambda self: None",
        "torch.cuda.Stream.wait_stream = lambda self, other: None",
    ],
)
def test_without_waiting_the_order_would_be_wrong_and_is_seen_to_be(dry, broken):  # noqa: F811
    *_, races, _, copying = watched(dry, "gpt", "searched", broken)
    assert races > 0 and copying == 2


def test_a_copy_back_follows_the_copy_out_that_it_waits_for(dry):  # noqa: F811
    body = """
from support import watched
from tightship.execute.host_pool import PinnedPool
pool, memory = PinnedPool(512, "cuda:0"), torch.zeros(1024, dtype=torch.uint8, device="cuda")
memory[:512] = 7
seen = watched.Seen()
for after in (True, False):
    seen.start()
    out = pool.write(1, memory.data_ptr(), 512, 0)
    pool.read(2, memory.data_ptr() + 512, 512, 0, [out] if after else [])
    print(len(seen.races()))
"""
    assert dry_cuda.run(dry, f"{program('gpt', body)}").split() == ["0", "1"]


@pytest.mark.parametrize("name", ["bert", "pooled"])
def test_masks_and_indices_are_packed_where_planned_and_come_back(dry, name):  # noqa: F811
    _, _, packed, back, races, *_ = watched(dry, name, "compress")
    assert packed > 0 and back >= 2 * packed and races == 0


DROPPED = """
from support.runs import Dropped
from tightship.errors import Infeasible

model, x, loss = Dropped().cuda(), torch.randn(512, 64).cuda(), lambda model, batch: model(batch)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(cache=None, work=2_000_000, strict=True)
try:
    tightship.fit(model, loss, optimizer, x, "20%", **options)
except Infeasible as error:
    least = error.best_peak
from tightship.execute import compile as compiled

generator, drawn, at, with_state = torch.cuda.default_generators[0], [], {}, compiled.with_state

def noted(action, place, **how):
    def run(env):
        at.setdefault(place, []).append(generator.get_offset())
        action(env)
    return with_state(run, place, **how)

compiled.with_state = noted
step = tightship.fit(model, loss, optimizer, x, least - 1024, allow="recompute,redraw", **options)
plan = step.plan
for _ in range(2):
    before = generator.get_offset()
    at.clear()
    step(x)
    assert step.last.as_planned and step.last.measured_peak == plan.peak
    assert at and all(len(row) > 1 and len(set(row)) == 1 for row in at.values()), at
    drawn.append(generator.get_offset() - before)
again = sum(s.kind == "recompute" and step.graph.ops[s.op].random for s in plan.steps)
before = generator.get_offset()
model(x)
print(again, sum(s.saves for s in plan.steps), *drawn, generator.get_offset() - before)
"""


def test_dropout_is_drawn_again_from_its_state_which_then_is_what_it_was(dry):  # noqa: F811
    """The offset of CUDA's generator counts what was drawn: an op that runs again begins at its own, and after a
    step it is eager's."""
    again, saved, first, second, eager = map(int, dry_cuda.run(dry, program("gpt", DROPPED)).split())
    assert again >= saved > 0
    assert first == second == eager > 0


ALLOWED = """
from support import watched
watched.packing_runs()
step = tightship.fit(model, loss, optimizer, x, strict=True, cache=CACHE, budget=BUDGET, work=1_000_000,
                     allow="compress,offload")
plan, executor = step.plan, step._variants[0].executor
assert plan.met and step.graph.machine.measured
"""


def test_the_search_copies_out_and_packs(dry):  # noqa: F811
    text = program("bert", ALLOWED + WATCHED, budget="70%")
    less, offloads, _, back, races, *_ = dry_cuda.run(dry, text).split()
    assert less == "True" and int(offloads) > 0 and int(back) > 0 and races == "0"


TIERED = """
import glob, os
from support import watched
watched.packing_runs()
from tightship.execute import host_pool
host_pool.PIECE = 100_000
step = tightship.fit(model, loss, optimizer, x, strict=True, cache=CACHE, budget=BUDGET, work=1_000_000,
                     allow="offload", pinned=PINNED, folder=".")
plan, executor = step.plan, step._variants[0].executor
pool, path = executor._pool, f"/proc/self/fd/{executor._pool._file.descriptor}"
assert plan.met and pool.pinned == 150_000 < plan.host and not glob.glob("*")
assert pool.size == plan.host and os.stat(path).st_size >= plan.host - pool.pinned
"""
BROKEN = """
os.dup2(os.open("/dev/null", os.O_RDONLY), executor._pool._file.descriptor)
for number in range(2):
    try:
        step(x)
    except OSError as error:
        print(type(error).__name__, executor.arena.live)  # alive is the optimizer's state
"""


def test_what_is_beyond_the_pinned_memory_goes_to_a_file(dry, tmp_path, monkeypatch):  # noqa: F811
    """Storages that lie in both, and in several pieces, among them."""
    monkeypatch.chdir(tmp_path)
    text = program("gpt", "PINNED = '150kB'\n" + TIERED + WATCHED, budget="70%")
    less, offloads, _, back, races, *_ = dry_cuda.run(dry, text).split()
    assert less == "True" and int(offloads) > 0 and int(back) >= 2 * int(offloads) and races == "0"


def test_a_file_that_cannot_be_written_is_heard_of_in_the_step(dry, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    text = program("gpt", "PINNED = '150kB'\n" + TIERED + BROKEN, budget="70%")
    first, alive, second, then = dry_cuda.run(dry, text).split()
    assert first == second == "OSError" and alive == then


def test_on_torchs_own_allocator_copies_are_in_order_too(dry):  # noqa: F811
    """There a block that is asked for was another's before, and what used it may still be running."""
    own = (
        HOW.replace("strict=True", "strict=False")
        + """
assert executor.arena is None and step.notes
seen = watched.Watched(executor)
for _ in range(2):
    seen.start()
    step(x)
    print(plan.count("offload"), seen.back, len(seen.races()))
"""
    )
    text = "HOW = 'searched'\n" + own
    text = program("gpt", text).replace('native = allocator.load("cuda")', "torch.zeros(8).cuda()")
    offloads, back, races = map(int, dry_cuda.run(dry, text).split()[-3:])
    assert back >= offloads > 10 and races == 0


RANDOM = """
import numpy as np
from support import plans, watched
from tightship.execute.interpreter import Executor
from tightship.planners.evict.problem import KEEP, OFFLOAD, COMPRESS, EvictionProblem
from tightship.planners.evict.lowering import pure_random_ops, save_random_states
from tightship.verify import check

watched.packing_runs()
step = tightship.fit(model, loss, optimizer, x, strict=True, cache=CACHE)
step(x)
variant, means = step._variants[0], ("recompute", "compress", "offload")
graph, total = step.graph, dict.fromkeys(("offload", "compress", "recompute"), 0)
for seed in range(SEEDS):
    draw = np.random.default_rng(seed)
    frame = EvictionProblem(pure_random_ops(graph), tuple(range(len(graph.ops))), means=means)
    way = draw.choice(OFFLOAD + 1, len(frame.gaps), p=draw.dirichlet(np.ones(OFFLOAD + 1)))
    bits = np.where(frame.engine.allowed >> way & 1, way, KEEP).astype(np.uint8)
    while not frame.cost(bits, 0).valid:  # not everything can be made again at once
        bits[(bits < COMPRESS) & (draw.random(len(bits)) < 0.2)] = KEEP
    plan = plans.placed(graph, save_random_states(graph, frame.steps(bits)))
    check(graph, plan)
    variant.executor = executor = Executor(step.program, plan, strict=True)
    seen = watched.Watched(executor)
    seen.start()
    step(x)
    assert not seen.races(), seed
    assert step.last.as_planned and step.last.measured_peak == plan.peak and step.last.misses == 0, seed
    for kind in total:
        total[kind] += plan.count(kind)
print(*total.values())
"""


@pytest.mark.parametrize("name", ["bert", "pooled"])
def test_any_way_out_of_memory_is_as_planned_ordered_and_right(dry, name):  # noqa: F811
    """Random decisions for every stay between two uses, none of which a search would take."""
    assert all(int(n) > 0 for n in dry_cuda.run(dry, program(name, "SEEDS = 12\n" + RANDOM)).split())


SHARED = """
from support import plans

def planner(graph, budget):
    return plans.placed(graph, plans.evicted(graph, "overlap"))

step = tightship.fit(model, loss, optimizer, x[:2], strict=True, cache=CACHE, planner=planner)
first = step._variants[0].executor
had = first.pool.size
step(x), step(x[:2]), step(x)
assert step.last.as_planned and len(step._variants) == 2
pools = {id(v.executor.pool) for v in step._variants}
print(len(pools), first.pool.size > had, first.pool.size == step.plan.host)
"""
REFUSED = """
from tightship.errors import BadInput
from tightship.execute import host_pool
pool = host_pool.PinnedPool(1000, "cuda:0")
pin = host_pool._Runtime.pin
host_pool._Runtime.pin = lambda self, address, size: 2 if size > 1000 else pin(self, address, size)
for ask in (lambda: host_pool.PinnedPool(2000, "cuda:0"), lambda: pool.reserve(2000), lambda: pool.reserve(1 << 62)):
    try:
        ask()
    except BadInput as error:
        print(str(error).split(":")[0])
memory = torch.full((1000,), 3, dtype=torch.uint8).cuda()
pool.write(1, memory.data_ptr(), 1000, 0)
assert pool.size == 1000 and pool._memory[999] == 3
host_pool._Runtime.pin = lambda *_: 2
step = tightship.fit(model, loss, optimizer, x, strict=True, cache=None, budget="90%")
step(x)
print(step.graph.machine.offload == 1.6e10)
"""


def test_kinds_of_batches_share_the_pinned_memory(dry):  # noqa: F811
    assert dry_cuda.run(dry, program("gpt", SHARED)) == "1 True True"


def test_memory_that_cannot_be_pinned_is_said_and_only_who_copies_needs_it(dry):  # noqa: F811
    told = dry_cuda.run(dry, program("gpt", REFUSED)).splitlines()
    assert told == ["the host pool"] * 3 + ["True"]
