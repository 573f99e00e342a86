"""Plans that pack, copy out and draw again: the same bits as eager, and the planned peak to the byte."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tightship
from execute.test_interpreter import Bound
from support import plans
from support.plans import evicted
from support.runs import Dropped, Pair, beyond, eager
from tightship import simulate
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute import allocator
from tightship.execute.compile import compile_plan
from tightship.execute.interpreter import Executor
from tightship.execute.transfers import Environment, Transfers
from tightship.plan import Plan, Step
from tightship.planners.evict import compress
from tightship.planners.evict.problem import OFFLOAD, EvictionProblem
from tightship.verify import check

ZOO = ("cnn", "gpt2", "bert", "resnet", "in_place", "viewed")


def held(bound, steps, runs=2, **changes):
    """The plan verifies, runs to the same bits, and has the peak it was planned to have."""
    plan = replace(plans.placed(bound.graph, tuple(steps)), **changes)
    check(bound.graph, plan)
    executor = bound.executor(plan)
    for number in range(runs):
        bound.compare(executor, number)
        assert executor.last.as_planned
        assert executor.last.measured_peak == plan.peak == simulate.replay(bound.graph, steps).peak
        assert executor.last.misses == executor.last.short == 0
    return plan


@pytest.mark.parametrize("how", ["compress", "overlap", "tight"])
@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "unet"))])
def test_the_same_bits_and_the_planned_peak(name, how):
    bound = Bound(name)
    plan = held(bound, evicted(bound.graph, how))
    if how != "compress":
        assert plan.count("offload") == plan.count("fetch") > 0 < plan.host
    if how == "tight":
        assert plan.peak < plan.peak_before


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_results_wait_outside_and_are_back_at_the_end(name):
    bound = Bound(name)
    graph = bound.graph
    frame = EvictionProblem(graph, tuple(range(len(graph.ops))), means=("offload",))
    ends = frame.gaps[:, 2] == len(graph.ops)
    assert ends.any() and set(frame.gaps[ends, 0].tolist()) <= graph.kept
    plan = held(bound, frame.steps(ends.astype("uint8") * OFFLOAD))
    assert plan.count("offload") == plan.count("fetch") == ends.sum()


@pytest.mark.parametrize(
    ("name", "codecs"), [("bert", {"mask"}), ("resnet", {"uint8"}), ("gpt2", {"mask", "bits", "uint8"})]
)
def test_masks_and_indices_are_packed(name, codecs):
    bound = Bound(name)
    plan = held(bound, evicted(bound.graph, "compress"))
    assert {s.codec for s in plan.steps if s.kind == "compress"} == codecs
    assert plan.peak < plan.peak_before


def test_without_an_arena_the_bits_are_the_same():
    bound = Bound("bert", measured=False)
    for how in ("compress", "overlap"):
        plan = plans.placed(bound.graph, evicted(bound.graph, how))
        for one in (plan, replace(plan, residences=(), arena=0, host=0)):
            executor = bound.executor(one)
            bound.compare(executor, 0)
            assert executor.notes
            bound = Bound("bert", measured=False)


def _redrawn(graph):
    """Every random op saves its state; its mask goes after the forward pass and is drawn again."""
    uses, again = graph.uses, {}
    for k, op in enumerate(graph.ops):
        s = (*uses.mutates[k], *uses.defines[k])[0] if op.random else -1
        back = [r for r in uses.readers[s] if graph.ops[r].phase == "backward"] if op.random else []
        if back:
            again.setdefault(back[0], []).append(s)
    saved = {w for row in again.values() for s in row for w in uses.writers[s] if graph.ops[w].random}
    sequence = []
    for k in range(len(graph.ops)):
        for w in sorted(w for s in again.get(k, []) for w in uses.writers[s]):
            made = tuple(s for s in uses.defines[w] if s in again[k])
            sequence.append(Step("recompute", op=w, storages=made))
        sequence.append(Step("compute", op=k, saves=k in saved))
    steps = []
    for step in plans.with_frees(graph, sequence):
        steps.append(step)
        if step.kind == "recompute" and step.op in saved:
            steps.append(Step("free", op=step.op, form="state"))
    return steps, len(saved)


@pytest.mark.parametrize("name", ["bert", "gpt2", "cnn", "t5"])
def test_dropout_is_drawn_again_with_the_same_masks(name):
    bound = Bound(name)
    steps, count = _redrawn(bound.graph)
    assert count
    plan = held(bound, steps, runs=3)
    assert sum(s.kind == "recompute" and bound.graph.ops[s.op].random for s in plan.steps) == count


def test_a_mask_drawn_from_another_state_would_be_noticed(monkeypatch):
    """The tests above fail if the saved state is not what the ops draw from."""
    bound = Bound("bert")
    steps, _ = _redrawn(bound.graph)
    executor = bound.executor(plans.placed(bound.graph, tuple(steps)))
    real, other, calls = torch.default_generator, torch.Generator().manual_seed(7).get_state(), []

    class Forgetful:
        def get_state(self):
            return real.get_state()

        def set_state(self, state):
            calls.append(1)
            real.set_state(other if len(calls) % 2 else state)  # the present state comes back as it was

    monkeypatch.setattr(torch, "default_generator", Forgetful())
    executor = bound.executor(executor.plan)
    with pytest.raises(AssertionError):
        bound.compare(executor, 0)


def test_a_random_op_is_not_run_again_without_its_state():
    bound = Bound("bert")
    steps, _ = _redrawn(bound.graph)
    bare = tuple(replace(s, saves=False) for s in steps if s.form != "state")
    with pytest.raises(BadInput, match="recomputed without a saved state"):
        bound.executor(replace(plans.keep(bound.graph), steps=bare, residences=()))


def test_a_copy_that_fails_is_raised_and_the_next_run_is_right():
    bound = Bound("mlp")
    plan = plans.placed(bound.graph, evicted(bound.graph, "tight"))
    executor = bound.executor(plan)

    inputs = bound.inputs()
    with beyond(64), pytest.raises(OSError, match="too large"):
        executor.run(inputs)
    assert executor.arena.live == 0
    bound = Bound("mlp")
    bound.compare(bound.executor(plan), 0)


def test_a_codec_that_does_not_fit_raises_and_corrupts_nothing():
    bound = Bound("resnet")
    steps = evicted(bound.graph, "compress")
    plan = plans.placed(bound.graph, steps)
    graph = bound.graph
    narrow = [replace(s, codec="mask", nbytes=s.nbytes) if s.kind == "compress" else s for s in steps]
    executor = bound.executor(replace(plan, steps=tuple(narrow), digest=graph.digest))
    with pytest.raises(BadInput, match="zeros and one other number"):
        executor.run(bound.inputs())


def test_a_folder_without_room_is_refused_before_anything_runs(tmp_path):
    bound = Bound("mlp")
    plan = plans.placed(bound.graph, evicted(bound.graph, "tight"))
    with pytest.raises(BadInput, match="offloaded bytes"):
        bound.executor(plan, folder=tmp_path / "missing")
    bound.compare(bound.executor(plan, folder=tmp_path), 0)
    assert any("ignored without a GPU" in n for n in bound.executor(plan, folder=tmp_path, pinned=1).notes)


def test_other_devices_are_refused_in_words():
    bound = Bound("cnn", measured=False)
    plan = plans.placed(bound.graph, evicted(bound.graph, "tight"))

    def on(*devices):
        ops = tuple(replace(op, device=devices[k % len(devices)]) for k, op in enumerate(bound.graph.ops))
        return replace(bound.program, graph=bound.graph.with_ops(ops))

    with pytest.raises(Unsupported, match=r"'offload' on xpu:0.*CPU and CUDA only"):
        compile_plan(on("xpu:0"), plan)
    with pytest.raises(Unsupported, match=r"'offload' on several devices"):
        compile_plan(on("cuda:0", "cuda:1"), plan)
    packed = replace(plan, steps=(Step("compress", codec="mask"),))
    with pytest.raises(Unsupported, match=r"compressing with 'mask' on cuda:0"):
        compile_plan(on("cuda:0"), packed)


def test_lossy_packing_runs_and_is_not_the_same():
    bound = Bound("mlp")
    frame = EvictionProblem(bound.graph, tuple(range(len(bound.graph.ops))))
    found = compress.plan(frame, 0, compress.Options(lossy=True))
    assert {s.codec for s in found.steps if s.codec} == {"bf16"}
    plan = replace(plans.placed(bound.graph, found.steps), lossy=True)
    check(bound.graph, plan)
    executor = bound.executor(plan)
    executor.run(bound.inputs())
    assert executor.last.as_planned


@pytest.mark.parametrize(
    ("allow", "budget"),
    [
        ("compress", "95%"),
        ("offload", "62%"),
        ("recompute,compress,offload", "60%"),
        ("recompute", "62%"),
    ],
)
def test_fit_does_what_is_allowed(allow, budget, tmp_path):
    """The default search, end to end: capture, measured copies, plan, verified, run bit-identically."""
    pair = Pair("bert", "sgd")
    step = tightship.fit(
        pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), budget, allow=allow, strict=True, cache=None,
        seconds_per_op=0.0, work=2_000_000, folder=tmp_path,
    )  # fmt: skip
    for number in range(2):
        pair.compare(step, number)
    plan, kinds = step.plan, {s.kind for s in step.plan.steps} - {"compute", "free"}
    assert plan.met and step.last.measured_peak == plan.peak and step.last.misses == 0
    of = {"recompute": {"recompute"}, "compress": {"compress", "decompress"}}
    assert kinds and kinds <= set().union(*(of.get(a, {"offload", "fetch"}) for a in allow.split(",")))
    assert (plan.host > 0) == ("offload" in kinds) and os.listdir(tmp_path) == []


def test_the_search_draws_dropout_again_where_nothing_else_is_left():
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    options = {"cache": None, "seconds_per_op": 0.0, "work": 5_000_000, "strict": True}
    loss_fn = lambda m, batch: m(batch)  # noqa: E731
    with pytest.raises(Infeasible) as alone:
        tightship.fit(model, loss_fn, optimizers[0], x, "20%", redraw=False, **options)
    budget = alone.value.best_peak - 1024  # less than recomputation reaches
    step = tightship.fit(model, loss_fn, optimizers[0], x, budget, **options)
    assert sum(s.saves for s in step.plan.steps) > 0
    for number in range(3):
        torch.manual_seed(number)
        expected = eager(twin, loss_fn, optimizers[1], x)
        torch.manual_seed(number)
        assert torch.equal(step(x), expected)
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert step.last.measured_peak == step.plan.peak <= budget


@pytest.mark.skipif(not allocator.available(), reason="peaks cannot be measured here")
def test_a_budget_that_checkpoints_meet_is_met_with_dropout():
    """PyTorch's checkpoints draw masks again; a plan for what they were measured to need does, too."""

    class Blocks(torch.nn.Module):
        def __init__(self, checkpoints):
            super().__init__()
            drops = [
                torch.nn.Dropout(0.1) for _ in range(6)
            ]  # whose masks are more than what a checkpoint saves
            kinds = [(torch.nn.Linear(64, 64), torch.nn.GELU(), *drops) for _ in range(24)]
            self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*some) for some in kinds)
            self.checkpoints = checkpoints

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            return x.square().mean()

    def made(checkpoints=False):
        torch.manual_seed(0)
        model = Blocks(checkpoints)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    x, loss_fn = torch.randn(1024, 64), lambda m, batch: m(batch)
    model, optimizer = made(checkpoints=True)
    static = sum(p.nbytes for p in model.parameters()) + x.nbytes
    torch.manual_seed(1)
    with allocator.Meter() as meter:
        expected = eager(model, loss_fn, optimizer, x)
    options = {"cache": None, "seconds_per_op": 0.0, "work": 2_000_000, "strict": True}
    ours, optimizer = made()
    step = tightship.fit(ours, loss_fn, optimizer, x, static + meter.peak, **options)
    assert sum(s.saves for s in step.plan.steps) > 0
    torch.manual_seed(1)
    assert torch.equal(step(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), model.parameters(), strict=True))
    assert step.last.measured_peak == step.plan.peak <= static + meter.peak
    other, optimizer = made()
    with pytest.raises(Infeasible):
        tightship.fit(other, loss_fn, optimizer, x, static + meter.peak, redraw=False, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_that_copies_out_of_a_gpu_says_that_there_is_none():
    bound = Bound("cnn", measured=False)
    plan = plans.placed(bound.graph, evicted(bound.graph, "tight"))
    ops = tuple(replace(op, device="cuda:0") for op in bound.graph.ops)
    program = replace(bound.program, graph=bound.graph.with_ops(ops))
    with pytest.raises(Unsupported, match=r"offloading from cuda:0.*no CUDA device"):
        Executor(program, replace(plan, digest=""))


def test_a_copy_waits_for_what_a_copy_stream_frees():
    """A step that frees on a copy stream is over when the copies before it, and those it waits for, are."""
    bound = Bound("mlp", measured=False)
    graph = bound.graph
    first, second = [s for s, x in enumerate(graph.storages) if x.size and s not in graph.static][:2]
    steps = (
        Step("offload", storages=(first,), stream=1),
        Step("fetch", storages=(first,), stream=2, waits=(0,)),
        Step("free", storages=(first,), form="host", stream=2),
        Step("offload", storages=(second,), stream=1, waits=(2,)),
    )
    asked = []

    class Pool:
        def write(self, stream, address, size, offset, after=()):
            asked.append(("write", tuple(after)))
            return f"write {len(asked)}"

        def read(self, stream, address, size, offset, after=()):
            asked.append(("read", tuple(after)))
            return f"read {len(asked)}"

    plan = Plan("", steps)
    environment = Environment(len(graph.values))
    moves = Transfers(bound.program, plan, environment, Pool())
    runs = []
    for i, step in enumerate(steps):
        assert moves.waits(i, step) is None
        if step.kind != "free":
            runs.append(moves.move(i, step))
    env = [*environment.initial]
    for s in (first, second):
        env[bound.program.bases[s]] = torch.zeros(graph.storages[s].size // 4)
    for run in runs:
        run(env)
    assert asked == [("write", ()), ("read", ("write 1",)), ("write", ("read 2",))]
