import gc
import weakref
from dataclasses import replace

import pytest
import torch

from support import plans
from support.runs import Pair, eager
from tightship.errors import BadInput, BudgetExceeded, Unsupported, VerificationFailed
from tightship.execute import allocator
from tightship.execute.binding import Binding
from tightship.execute.compile import compile_plan
from tightship.execute.interpreter import Executor, PeakMismatch
from tightship.execute.profile import model as modeled
from tightship.execute.profile import profile
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.program import Call
from tightship.frontends.torch.structure import flatten
from tightship.plan import Step


class Bound:
    """A captured and measured step of a test model, with its tensors."""

    def __init__(self, name="mlp", optimizer="sgd", measured=True):
        self.pair = Pair(name, optimizer)
        pair = self.pair
        program = capture_step(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0))
        self.program = profile(program, cache=None, seconds_per_op=0.0) if measured else modeled(program)
        self.graph = self.program.graph

    def inputs(self, number=0):
        binding = Binding(self.program, self.pair.model, self.pair.optimizer)
        return binding.tensors(flatten(self.pair.batch(number)))

    def executor(self, plan=None, **options):
        return Executor(self.program, plan or plans.keep(self.graph), **{"strict": True} | options)

    def compare(self, executor, number):
        self.pair.compare(lambda _batch: executor.run(self.inputs(number))[0], number)


@pytest.fixture
def bound():
    return Bound()


def storage_named(graph, text):
    return next(
        s for s, storage in enumerate(graph.storages) if text in storage.name and s not in graph.static
    )


def test_runs_the_plan_in_an_arena_of_its_own(bound):
    executor = bound.executor()
    for number in range(3):
        bound.compare(executor, number)
        assert executor.last.as_planned
        assert executor.last.misses == 0 and executor.last.arena == executor.plan.arena == executor.extent
    assert executor.arena.live == 0


def test_every_temporary_is_gone_after_a_run(bound):
    executor = bound.executor(plans.recompute(bound.graph))
    (loss,) = executor.run(bound.inputs())
    assert executor.arena.live == 64
    del loss
    assert executor.arena.live == 0


def test_inputs_are_not_held(bound):
    executor = bound.executor()
    inputs = bound.inputs()
    batch = next(k for k, s in enumerate(bound.program.slots) if s.role == "input")
    watched = weakref.ref(inputs[batch])
    executor.run(inputs)
    del inputs
    gc.collect()
    assert watched() is None


def test_results_lie_outside_the_arena(bound):
    executor = bound.executor()
    (loss,) = executor.run(bound.inputs())
    base, size = executor.arena.base, executor.arena.size
    assert not base <= loss.data_ptr() < base + size
    assert loss.grad_fn is None and not loss.requires_grad


def test_the_modes_of_the_caller_do_not_reach_the_ops(bound):
    executor, inputs = bound.executor(), bound.inputs()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.enable_grad():
        (loss,) = executor.run(inputs)
    pair = bound.pair
    expected = eager(pair.twin, pair.loss_fn, pair.twin_optimizer, pair.batch(0))
    assert torch.equal(loss, expected)
    pair.same()


def test_dropped_results_of_a_recomputed_op_are_dropped_at_once():
    bound = Bound("cnn")
    plan = plans.recompute(bound.graph)
    several = [
        i for i in compile_plan(bound.program, plan).instructions
        if i.op >= 0 and len(i.made) < sum(v >= 0 for v in bound.program.calls[i.op].results)
    ]  # fmt: skip
    assert several
    executor = bound.executor(plan)
    for number in range(3):
        bound.compare(executor, number)


def test_views_are_derived_once_per_residence_and_only_when_used():
    bound = Bound("viewed")
    plan = plans.keep(bound.graph)
    code = compile_plan(bound.program, plan)
    assert not any(i.op < 0 and i.made for i in code.instructions)
    used = {v for o in bound.graph.ops for v in o.inputs} - {s.value for s in bound.program.slots}
    derived = sum(1 for i in code.instructions if i.op < 0) - sum(s.kind == "free" for s in plan.steps)
    bases = {v for c in bound.program.calls for v in c.results}
    assert derived == len(used - bases)


# ---- what a plan must be


def test_a_plan_for_another_graph_is_refused(bound):
    other = Bound("cnn")
    with pytest.raises(BadInput, match="graph it was made for"):
        bound.executor(plans.keep(other.graph))


def test_an_offload_without_a_place_is_refused(bound):
    plan = plans.keep(bound.graph)
    steps = (*plan.steps, Step("offload", storages=(0,)))
    with pytest.raises(BadInput, match="where on the host"):
        bound.executor(replace(plan, steps=steps))


def test_a_request_without_a_place_is_refused(bound):
    plan = plans.keep(bound.graph)
    with pytest.raises(BadInput, match="where each request"):
        bound.executor(replace(plan, residences=plan.residences[1:]))


def test_a_residence_that_is_too_small_is_refused(bound):
    plan = plans.keep(bound.graph)
    big = max(range(len(plan.residences)), key=lambda k: plan.residences[k].size)
    rows = [replace(r, size=64) if k == big else r for k, r in enumerate(plan.residences)]
    with pytest.raises(BadInput, match="too small for a request"):
        bound.executor(replace(plan, residences=tuple(rows)))


def test_the_wrong_number_of_inputs(bound):
    with pytest.raises(BadInput, match="slot"):
        bound.executor().run([])


def test_an_input_that_changed(bound):
    inputs = bound.inputs()
    k = next(k for k, s in enumerate(bound.program.slots) if s.role == "input")
    inputs[k] = inputs[k].double()
    with pytest.raises(BadInput, match="float64 instead of float32"):
        bound.executor().run(inputs)


def test_a_plan_without_places_is_run_from_the_heap_and_measured(bound):
    plan = replace(plans.keep(bound.graph), residences=(), arena=0)
    executor = bound.executor(plan)
    bound.compare(executor, 0)
    assert executor.last.as_planned and executor.last.arena == 0
    assert any("places nothing" in note for note in executor.notes)


def test_unmeasured_requests_mean_no_arena():
    bound = Bound(measured=False)
    executor = bound.executor()
    bound.compare(executor, 0)
    assert executor.last is None and executor.extent == 0
    assert any("not measured" in note for note in executor.notes)


# ---- when it does not go as planned


def test_overlapping_places_are_noticed_and_do_no_harm(bound):
    plan = plans.keep(bound.graph)
    wrong = replace(plan, residences=tuple(replace(r, offset=0) for r in plan.residences))
    executor = bound.executor(wrong, strict=False)
    with pytest.warns(PeakMismatch, match="occupied"):
        bound.compare(executor, 0)
    assert executor.last.misses > 0
    assert executor.last.measured_peak == plan.peak
    with pytest.raises(VerificationFailed, match="occupied"):
        bound.executor(wrong).run(bound.inputs(1))


def test_another_peak_than_planned_is_noticed(bound):
    plan = replace(plans.keep(bound.graph), peak=12345)
    with pytest.warns(PeakMismatch, match=r"12345 B"):
        bound.executor(plan, strict=False).run(bound.inputs())
    with pytest.raises(VerificationFailed, match="planned"):
        bound.executor(plan).run(bound.inputs())


def test_a_result_that_is_not_what_was_captured_is_refused(bound):
    k = next(k for k, c in enumerate(bound.program.calls) if len(c.results) == 1 and c.results[0] >= 0)
    call = bound.program.calls[k]

    def other(*args, **kwargs):
        return call.fn(*args, **kwargs).double()

    calls = list(bound.program.calls)
    calls[k] = Call(other, call.args, call.kwargs, call.results)
    bound.program = replace(bound.program, calls=tuple(calls))
    with pytest.raises(Unsupported, match="float64 instead of float32") as error:
        bound.executor(strict=False).run(bound.inputs())
    assert bound.graph.ops[k].target in str(error.value)


def test_going_beyond_the_budget_names_the_op(bound):
    plan = plans.keep(bound.graph)
    executor = bound.executor(replace(plan, budget=plan.peak - 1))
    with pytest.raises(BudgetExceeded) as error:
        executor.run(bound.inputs())
    op = next(k for k, o in enumerate(bound.graph.ops) if o.name == error.value.op)
    assert error.value.place == bound.graph.place(op)
    assert error.value.budget == plan.peak - 1
    assert executor.arena.live == 0
    assert bound.executor(replace(plan, budget=plan.peak)).run(bound.inputs())


def failing(bound, position, error):
    def fail(*_args, **_kwargs):
        raise error

    calls = list(bound.program.calls)
    calls[position] = replace(calls[position], fn=fail)
    return replace(bound.program, calls=tuple(calls))


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_in_an_op_frees_everything_and_comes_out_as_it_is(bound, error):
    position = len(bound.program.calls) - 1
    executor = Executor(failing(bound, position, error), plans.keep(bound.graph))
    before = [p.clone() for p in bound.pair.model.parameters()]
    with pytest.raises(type(error)) as caught:
        executor.run(bound.inputs())
    assert caught.value is error
    assert executor.arena.live == 0
    # The last update did not run, those before it did.
    changed = [not torch.equal(p, b) for p, b in zip(bound.pair.model.parameters(), before, strict=True)]
    assert changed.count(False) == 1


def test_two_executors_share_an_arena(bound):
    other = Bound("cnn")
    plan, second = plans.keep(bound.graph), plans.recompute(other.graph)
    arena = allocator.Arena(max(plan.arena, second.arena))
    executors = [(bound, bound.executor(plan, arena=arena)), (other, other.executor(second, arena=arena))]
    for number in range(3):
        for each, executor in executors:
            each.compare(executor, number)
            assert executor.arena is arena


def test_replays_with_requests_of_their_own_are_placed_by_their_own():
    bound = Bound("cnn")
    (k, call), *_ = bound.program.replays.items()

    def greedy(*args, **kwargs):
        scratch = torch.empty(4096)
        out = call.fn(*args, **kwargs)
        del scratch
        return out

    replays = bound.program.replays | {k: replace(call, fn=greedy)}
    bound.program = profile(replace(bound.program, replays=replays), cache=None, seconds_per_op=0.0)
    bound.graph = bound.program.graph
    assert len(bound.program.replay_requests[k]) == len(bound.graph.ops[k].requests) + 1
    plan = plans.recompute(bound.graph)
    assert any(s.kind == "recompute" and s.op == k for s in plan.steps)
    executor = bound.executor(plan, strict=False)
    bound.compare(executor, 0)
    assert executor.last.misses == 0 and executor.last.short == 0
    assert executor.last.measured_peak <= plan.peak
