"""Ops on several threads in one arena: no legal interleaving corrupts a value, and a wrong place is seen."""

# ruff: noqa: N802

from functools import cache

import pytest
import torch

from support.models import MODELS
from tightship.analysis.concurrency import waves
from tightship.analysis.order import predecessors
from tightship.baselines.memonger import Options, recycled
from tightship.errors import BadInput
from tightship.execute.parallel import ParallelExecutor
from tightship.frontends.torch.capture.step import capture_loss
from tightship.frontends.torch.structure import flatten
from tightship.planners.layout import in_any_order, in_order, in_steps
from tightship.planners.packing import Search, pack

NAMES = ("mlp", "cnn", "two_losses", "lstm", "torch_transformer", "gpt2")


@cache
def prepared(name: str):
    """A model's forward and backward pass, and a function that gives its inputs anew."""
    model, _, batch = MODELS[name]()
    sample = batch(0)
    sample = sample[0] if isinstance(sample, tuple) else sample
    program = capture_loss(model, sample)
    names = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = flatten(sample)

    def inputs():
        found = []
        for slot in program.slots:
            if slot.role == "constant":
                found.append(program.constants[slot.key])
            else:
                found.append(leaves[slot.key] if slot.role == "input" else names[slot.key])
        return [t.detach().clone() for t in found]

    return program, inputs


def places(life, planner: str = "portfolio") -> tuple[dict[int, int], int]:
    packed = pack(life.problem, planner, Search(work=20_000, seconds=20.0))
    return dict(zip(life.storages, packed.offsets, strict=True)), packed.arena


def run(executor: ParallelExecutor, inputs, seed: int | None = None):
    torch.manual_seed(7)
    return executor.run(inputs(), seed)


@cache
def expected(name: str):
    """One op at a time, every storage in bytes of its own."""
    program, inputs = prepared(name)
    return run(ParallelExecutor(program, *places(in_order(program.graph), "naive"), threads=1), inputs)


def same(found, wanted) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_no_interleaving_corrupts_a_value(name: str) -> None:
    program, inputs = prepared(name)
    offsets, arena = places(in_any_order(program.graph))
    assert arena < places(in_order(program.graph), "naive")[1]
    for threads in (1, 3):
        executor = ParallelExecutor(program, offsets, arena, threads=threads, poison=True)
        for seed in (None, *range(8)):
            assert same(run(executor, inputs, seed), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_interleavings_corrupt_no_value(name: str) -> None:
    program, inputs = prepared(name)
    executor = ParallelExecutor(program, *places(in_any_order(program.graph)), threads=4, poison=True)
    assert all(same(run(executor, inputs, seed), expected(name)) for seed in range(500))


@pytest.mark.parametrize("name", ["cnn", "gpt2"])
def test_buffers_shared_by_name_hold_in_any_order_too(name: str) -> None:
    program, inputs = prepared(name)
    found, _ = recycled(program.graph, Options(any_order=True))
    starts = [sum(found.sizes[:k]) for k in range(len(found.sizes))]
    offsets = {s: starts[b] for s, b in found.of.items()}
    executor = ParallelExecutor(program, offsets, sum(found.sizes), threads=3, poison=True)
    for seed in range(8):
        assert same(run(executor, inputs, seed), expected(name))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_A07_steps_of_n_ops_run_in_the_arena_of_their_steps(name: str, width: int) -> None:
    program, inputs = prepared(name)
    steps = waves(predecessors(program.graph), width)
    executor = ParallelExecutor(
        program, *places(in_steps(program.graph, width)), threads=width, poison=True, steps=steps
    )
    for seed in (None, *range(8)):
        assert same(run(executor, inputs, seed), expected(name))


def test_A07_the_arena_of_steps_is_right_in_these_steps_alone() -> None:
    """The test above can fail: without the steps, and in other steps, the same arena is not right."""
    program, inputs = prepared("gpt2")
    graph = program.graph
    offsets, arena = places(in_steps(graph, 2))
    free = ParallelExecutor(program, offsets, arena, threads=1, poison=True)
    assert not all(same(run(free, inputs, seed), expected("gpt2")) for seed in range(8))
    with pytest.raises(BadInput, match="comes after those of all it waits for"):
        ParallelExecutor(program, offsets, arena, steps=[0] * len(graph.ops))


def test_a_placement_for_one_order_is_corrupted_by_others() -> None:
    """The test above can fail: the arena of the graph's own order is right for that order alone."""
    program, inputs = prepared("gpt2")
    executor = ParallelExecutor(program, *places(in_order(program.graph)), threads=1, poison=True)
    assert same(run(executor, inputs), expected("gpt2"))
    assert not all(same(run(executor, inputs, seed), expected("gpt2")) for seed in range(8))


def test_says_what_is_wrong() -> None:
    program, inputs = prepared("mlp")
    offsets, arena = places(in_any_order(program.graph))
    with pytest.raises(BadInput, match="a place within the arena"):
        ParallelExecutor(program, {}, arena)
    with pytest.raises(BadInput, match="at least one thread"):
        ParallelExecutor(program, offsets, arena, threads=0)
    executor = ParallelExecutor(program, offsets, arena)
    with pytest.raises(BadInput, match="an input for each slot"):
        executor.run([])
    broken = [torch.zeros(3), *inputs()[1:]]
    with pytest.raises(RuntimeError):  # an op that fails ends the run on every thread
        executor.run(broken)
