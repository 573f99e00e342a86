"""Plans for inner targets: moved by what replays say, and taught by them where nothing fits."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tightship import simulate
from tightship.analysis.bounds import lower_bound
from tightship.errors import Infeasible
from tightship.execute import aiming, compiled_search
from tightship.execute.aiming import Aim, Candidate, fastest
from tightship.frontends.torch.capture.fused_step import fuse_step
from tightship.frontends.torch.compat_inductor import NotLowered
from tightship.planners import default


@pytest.fixture(scope="module")
def model():
    def gradients(x, *weights):
        with torch.enable_grad():
            weights = [w.detach().requires_grad_() for w in weights]
            for w in weights:
                x = torch.tanh(x @ w)
            loss = x.square().sum()
        return loss.detach(), *torch.autograd.grad(loss, weights)

    inputs = torch.randn(256, 16), *(torch.randn(16, 16) for _ in range(6))
    return fuse_step(make_fx(gradients, tracing_mode="fake")(*inputs), 1)


def aim(model, budget, beyond):
    """Code that takes ``beyond(name, bytes)`` where the model takes so many bytes while it makes a node."""

    def candidate(plan):
        line = simulate.replay(model.graph, plan.steps)
        rows = [
            (model.calls[s.op].name, beyond(model.calls[s.op].name, line.during[k]))
            for k, s in enumerate(plan.steps)
            if s.kind in ("compute", "recompute")
        ]
        peak = max(n for _, n in rows)
        replay = SimpleNamespace(levels=lambda: [rows])
        return Candidate(plan, "tightship", peak, peak, replay, 0, plan.time, plan=plan)

    return Aim(model, default.Options(), candidate, budget, model.graph.static_bytes)


def test_nothing_looser_is_lowered_where_hardly_any_time_is_to_be_saved(model):
    whole = simulate.replay(model.graph, default.plan(model.graph, None).steps).peak
    made = aim(model, (least(model) + whole) // 2, lambda _, n: n - 20000)
    counted, candidate = [], made.candidate

    def cheap(plan):
        counted.append(plan)
        return dataclasses.replace(candidate(plan), seconds=made.slack / 2)

    made.candidate = cheap
    assert [c.needed <= made.budget for c in made.run()] == [True]
    counted.clear(), made.known.clear(), made.found.clear()
    made.candidate = lambda plan: dataclasses.replace(cheap(plan), seconds=made.slack * 100)
    assert len(made.run()) == len(counted) > 1


def least(model):
    with pytest.raises(Infeasible) as found:
        planned(model, int(lower_bound(model.graph)) - 1)
    try:
        return planned(model, found.value.lower_bound).peak
    except Infeasible as no:
        return no.best_peak


def planned(model, budget):
    made = aim(model, budget, lambda _, n: n)
    return default.plan(model.graph, budget, made.options, problem=made._problem(budget))


def test_what_code_takes_beyond_its_model_is_left_free(model):
    beyond = 5000
    budget = (least(model) + simulate.replay(model.graph, default.plan(model.graph, None).steps).peak) // 2
    found = aim(model, budget, lambda _, n: n + beyond).run()
    assert len(found) <= aiming.LOWERINGS
    best = max(c.needed for c in found if c.needed <= budget)
    assert budget - best <= 16 * 1024  # one activation: nothing looser is to be had


def test_a_target_that_is_proven_to_be_too_low_is_replaced_by_what_is_least(model):
    """Of a target below its bound the planner says so at once, and has not looked for the least."""
    low = least(model)
    bound = int(lower_bound(model.graph))
    for target in (bound - 64, model.graph.static_bytes):
        found = aim(model, target, lambda _, n: n).run()
        assert min(c.needed for c in found) == low


def test_where_nothing_fits_the_model_learns_where_code_takes_more(model):
    low = least(model)
    plan = planned(model, low)
    line = simulate.replay(model.graph, plan.steps)
    runs = [k for k, s in enumerate(plan.steps) if s.kind == "compute"]
    quiet = min(
        runs, key=lambda k: line.during[k]
    )  # where the model has room, the code takes all of it and more
    name, more = model.calls[plan.steps[quiet].op].name, low - line.during[quiet] + 4096
    made = aim(model, low + 64, lambda n, nbytes: nbytes + (more if n == name else 0))
    found = made.run()
    assert made.learned
    taught = [op for k, op in enumerate(made.graph.ops) if op.workspace]
    assert [model.calls[made.graph.ops.index(op)].name for op in taught] == [name]
    assert taught[0].workspace >= more
    assert all(c.plan.digest == model.graph.digest for c in found)


def test_what_the_compiler_fails_at_is_left_out_and_others_are_looked_at(model):
    def fails(*_args):
        raise NotLowered("a way to write the graph", "Inductor fails at it")

    made = aim(model, least(model) + 4096, lambda _, n: n)
    made.candidate = fails
    assert made.run() == []
    first, other = (Candidate(None, str(n), n, n, None, 0, 1.0) for n in (made.budget + 1, made.budget))
    seeds = SimpleNamespace(
        seed=lambda share: share,
        seconds=lambda _: 1.0,
        least=lambda _: 0,
        lowered=lambda share, _: fails() if share == 0.7 else other,
    )
    assert fastest([first], (0.7, 0.5), seeds, made.budget, 0, made) is other
    with pytest.raises(Infeasible) as found:
        fastest([first], (0.7,), seeds, made.budget, 0, made)
    assert found.value.best_peak == first.needed


def test_a_budget_below_what_the_planner_reaches_gives_its_least_plan_and_ends(model):
    low = least(model)
    found = aim(model, low - 64, lambda _, n: n).run()
    assert found
    assert min(c.needed for c in found) <= low  # nearer to it, a search may get further down


def test_pointwise_results_of_fused_code_take_the_places_of_what_they_are_made_from(model):
    """x, the product and its tanh: no more than two of them at once."""
    pairs = {p for op in model.graph.ops for p in op.overwrites}
    sizes = {(model.graph.storages[a].size, model.graph.storages[b].size) for a, b in pairs}
    assert sizes == {(256 * 16 * 4, 256 * 16 * 4)}
    with pytest.raises(Infeasible) as apart:
        default.plan(model.graph, 1, default.Options(place=False))
    assert least(model) < apart.value.best_peak


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_read_in_another_order_is_not_written_over_and_bounds_allow_for_it(turned):
    def gradients(a, b, c):
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            made = torch.bmm(a, b)  # one matrix of each
            loss = torch.sigmoid(c + (made.transpose(0, 1) if turned else made)).square().sum()
        return loss.detach(), *torch.autograd.grad(loss, [a])

    inputs = torch.randn(8, 8, 16), torch.randn(8, 16, 32), torch.randn(8, 8, 32)
    step = fuse_step(make_fx(gradients, tracing_mode="fake")(*inputs), 1)
    (at,) = (k for k, n in step.calls.items() if n.name.startswith("sigmoid") and "backward" not in n.name)
    (made,) = (s for s, name in step.nodes.items() if name == "bmm")
    assert (made in dict(step.graph.ops[at].overwrites)) is not turned
    assert made in dict(step.may[at])


def test_a_near_miss_is_met_by_a_lower_target_and_teaches_nothing_at_first(model):
    whole = simulate.replay(model.graph, default.plan(model.graph, None).steps).peak
    budget = planned(model, (least(model) + whole) // 2).peak
    made = aim(model, budget, lambda _, n: n + 500)
    found = made.run()
    assert found[0].needed > budget >= min(c.needed for c in found)
    assert not made.learned


def test_a_lesson_is_no_reason_to_end_where_nothing_fits(model):
    """The least of the model that has learned is above the one before: a plan of each is looked at."""
    low = least(model)
    made = aim(model, low - 64, lambda n, nbytes: nbytes + (4096 if n.startswith("mm") else 0))
    assert len(made._aimed(1, aiming.FEW)) > 1
    assert made.learned


def test_after_a_miss_by_few_bytes_another_plan_is_looked_at(model):
    """Code that takes a byte too much where it is of the first plan, whose peak is some bytes below the target."""
    whole = simulate.replay(model.graph, default.plan(model.graph, None).steps).peak
    peak = planned(model, (least(model) + whole) // 2).peak
    made = aim(model, peak + 1000, lambda _, n: n)
    lowered, inner = [], made.candidate

    def nearly(plan):
        c = inner(plan)
        lowered.append(c.needed)
        needed = c.needed if c.needed < lowered[0] else made.budget + 1
        return dataclasses.replace(c, needed=needed, replay=SimpleNamespace(levels=lambda: [[]]))

    made.candidate = nearly
    assert any(c.needed <= made.budget for c in made.run())
    assert lowered[1] < lowered[0] < made.budget


def test_no_target_is_planned_for_twice_on_the_same_model(model, monkeypatch):
    seen, plan = [], default.plan

    def counted(graph, target, *args, **kwargs):
        seen.append((graph.columns.workspace.tobytes(), target))
        return plan(graph, target, *args, **kwargs)

    monkeypatch.setattr(default, "plan", counted)
    low = least(model)
    seen.clear()
    made = aim(model, low + 64, lambda n, nbytes: nbytes + (1 << 16))
    made.run()
    dataclasses.replace(made, budget=made.static, learned=[], found=[]).run()
    assert len(seen) == len(set(seen)) > 2


def test_what_is_written_for_memory_is_tried_before_the_least_of_what_does_not_fit():
    """Of two graphs: what is chosen says which one it is of."""
    parts = dict.fromkeys(compiled_search.CompiledSearch.__abstractmethods__)
    kind = type(
        "Fake", (compiled_search.CompiledSearch,), parts | {"model": object(), "static": 100, "shares": ()}
    )
    first = Candidate(None, "", 999, 999, None)
    fit = Candidate(None, "", 450, 450, None)

    def searched(fits, peaks, bounds=(0, 0)):
        tried = []

        def search(own, name):
            def of(budget, given, how="whole"):
                assert given is first
                tried.append((name, how))
                own.count += 1
                if (name, how) != fits:
                    raise Infeasible(
                        budget=budget, lower_bound=0, best_peak=peaks[len(tried) - 1], compiled=True
                    )
                return fit

            return of

        plain, lean = (kind(default.Options(), None, None, looks=False) for _ in range(2))
        plain.unplanned = None
        plain.bound, lean.bound = (lambda first, n=n: n for n in bounds)
        plain.search, lean.search, lean.stock = search(plain, "plain"), search(lean, "lean"), lambda: first

        def leans():
            plain._leans()
            return lean

        plain.lean = leans
        try:
            peak = plain.within(500, first).peak
        except Infeasible as no:
            assert (no.budget, no.lower_bound) == (500, 100)
            assert no.modeled == (min(bounds) if min(bounds) > 500 and len(tried) < 5 else None)
            peak = no.best_peak
        assert plain.count == len(tried)
        return tried, plain.leaned, compiled_search.LEAN in plain.notes, peak

    every = [
        ("plain", "briefly"),
        ("lean", "whole"),
        ("plain", "whole"),
        ("plain", "least"),
        ("lean", "least"),
    ]
    for n, fits in enumerate(every):
        leaned = fits[0] == "lean"
        assert searched(fits, [900] * 5) == (every[: n + 1], leaned, leaned, fit.peak)
    for k in range(5):
        peaks = [700 if k == n else 900 for n in range(5)]
        assert searched(None, peaks) == (every, True, True, 700)
    # where neither can fit by its model, the least is looked for alone; replays that came to less say otherwise
    impossible = [("plain", "briefly"), ("plain", "least")]
    assert searched(None, [900, 800], (700, 600)) == (impossible, False, False, 800)
    for bounds, peaks in (((700, 400), [900] * 5), ((700, 600), [590, *[900] * 4])):
        assert searched(None, peaks, bounds)[0] == every


def test_what_was_far_is_searched_on_only_where_nothing_else_fits(model):
    """Briefly, a search ends with the first pass where all was far; as a whole, it goes on from there."""
    made = aim(model, least(model) + 64, lambda n, nbytes: nbytes + (1 << 16))
    brief = list(made.run(briefly=True))
    assert brief and all(map(made._far, brief)) and made.hopeless(min(c.seconds for c in brief))
    whole = made.run()
    assert whole[: len(brief)] == brief and len(whole) == len(set(map(id, whole))) > len(brief)


def test_others_are_looked_at_where_they_are_faster_than_what_is_written_for_memory(model):
    """What others save of the graph itself goes before the lean graph's, but where ours of as long was far off."""
    parts = dict.fromkeys(compiled_search.CompiledSearch.__abstractmethods__)
    parts |= {"model": model, "static": 0, "shares": (0.5,), "seconds": lambda self, made: made}
    parts |= {"seed": lambda self, share: 1.0, "least": lambda self, made: 0}
    kind = type("Fake", (compiled_search.CompiledSearch,), parts)
    other = Candidate(1.0, "other", 90, 90, None, seconds=1.0)
    first, lean = (Candidate(None, "", n, n, None, seconds=t) for n, t in ((999, 0.0), (95, 3.0)))
    for missed, best in ((0.5, other), (2.0, lean)):
        search = kind(default.Options(), None, None, looks=False)
        search.aim = Aim(model, default.Options(), search.ours, 100, 0)
        search.aim.found = [Candidate(None, "", 200, 200, None, seconds=missed)]
        search.lowered = lambda made, share: other
        search._leans()
        assert search._unless_others(100, first, lean) is best
        assert search.leaned is (best is lean)


def test_inductors_own_are_left_where_a_lower_share_takes_more():
    """Of a falling and then rising row the lowest is found; blocks computed again are another matter."""
    peaks = {0.7: 80, 0.5: 60, 0.3: 65, 0.1: 70, 0.0: 75, None: 40}
    lowered, first = [], Candidate(None, "own", 100, 100, None)

    def lower(made, share):
        lowered.append(share)
        return Candidate(made, "", peaks[share], peaks[share], None, seconds=1.0)

    seeds = SimpleNamespace(seed=lambda s: str(s), seconds=lambda _: 1.0, least=lambda _: 0, lowered=lower)
    assert fastest([first], (*aiming.STOCK, None), seeds, 50, 0).needed == 40
    assert lowered == [0.7, 0.5, 0.3, None]
    with pytest.raises(Infeasible) as found:
        fastest([first], aiming.STOCK, seeds, 50, 0)
    assert found.value.best_peak == 60
