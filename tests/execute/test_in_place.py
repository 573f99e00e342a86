"""Results laid over inputs: the arena counts their bytes once, ops are tried first, and steps stay what they are."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from support.blocks import KB, block  # noqa: E402
from support.models import MODELS  # noqa: E402
from support.runs import Pair, eager  # noqa: E402
from tightship.errors import Infeasible  # noqa: E402
from tightship.execute import bench, profile  # noqa: E402
from tightship.execute.allocator import (  # noqa: E402
    Arena,
    Meter,
    Miss,
    Script,
    replay,
)
from tightship.execute.fit import fit  # noqa: E402
from tightship.execute.interpreter import Executor  # noqa: E402
from tightship.frontends.torch.capture import lower  # noqa: E402
from tightship.frontends.torch.capture.step import capture_step  # noqa: E402
from tightship.frontends.torch.program import Ref  # noqa: E402
from tightship.planners import default  # noqa: E402

aten = torch.ops.aten


# ---- the arena


def test_a_block_may_lie_over_an_input_and_counts_once():
    arena = Arena(2 * KB)
    script = Script([KB, KB, KB], [0, 0, KB], [0, 1, 2, 3], limit=KB, over=[0, 1, 0])
    with Meter() as meter, replay(arena, script) as session:
        session.seek(0)
        below = block(1)
        session.seek(1)
        above = block(1)
        assert above.data_ptr() == below.data_ptr() and arena.live == KB
        del below
        assert arena.live == KB
        del above
        assert arena.live == 0
        session.seek(2)
        after = block(1)
    assert session.stats.as_planned and session.stats.peak == meter.peak == KB == arena.live
    del after
    assert arena.live == 0 == session.stats.start


def test_an_input_held_longer_than_its_step_is_named():
    arena = Arena(KB)
    with replay(arena, Script([KB, KB], [0, 0], [0, 1, 2], over=[0, 1])) as session:
        session.seek(0)
        below = block(1)
        session.seek(1)
        above = block(1)
    stats = session.stats
    assert (stats.requests, stats.served, stats.misses) == (2, 1, 1)
    assert stats.first_misses == (Miss(1, 1, KB, KB, "held"),)
    del below, above
    assert arena.live == 0


def test_nothing_lies_over_what_is_not_exactly_there():
    """Another size, another offset, a place taken already: to the heap; an empty place: as planned."""
    arena = Arena(4 * KB)
    sizes, offsets = [KB, KB, KB, KB, 2 * KB], [0, 0, 0, KB, 0]
    with replay(arena, Script(sizes, offsets, [0, 1, 3, 5], over=[0, 1, 1, 1, 1])) as session:
        session.seek(0)
        below = block(1)
        session.seek(1)
        above, third = block(1), block(1)
        del below
        session.seek(2)
        beside, larger = block(1), torch.empty(2 * KB, dtype=torch.uint8)
    at = [t.data_ptr() - arena.base for t in (above, third, beside, larger)]
    assert at[0] == 0 and at[2] == KB
    assert all(not 0 <= x < arena.size for x in (at[1], at[3]))
    assert session.stats.occupied == session.stats.misses == 2


# ---- ops are tried


def call_of(fn, *args):
    from tightship.frontends.torch.program import Call, Ref, flat
    from tightship.graph import Graph, Op, Storage, Value, aligned

    given = [a for a in args if isinstance(a, torch.Tensor)]
    made = flat(fn(*args))
    tensors = [*given, *(t for t in made if t is not None)]
    values = tuple(
        Value(f"t{k}", k, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride())
        for k, t in enumerate(tensors)
    )
    storages = tuple(
        Storage(v.name, aligned(t.untyped_storage().nbytes())) for v, t in zip(values, tensors, strict=True)
    )
    n, numbers = len(given), iter(range(len(tensors)))
    refs = tuple(Ref(next(numbers)) if isinstance(a, torch.Tensor) else a for a in args)
    results = tuple(-1 if t is None else next(numbers) for t in made)
    outputs = tuple(v for v in results if v >= 0)
    graph = Graph((Op("op", str(fn), tuple(range(n)), outputs),), values, storages, tuple(range(n)), outputs)
    return graph, Call(fn, refs, {}, results)


def tried(fn, *args):
    arenas = []

    def room(size):
        arenas.append(Arena(size))
        return arenas[-1]

    return bench.in_place_inputs(*call_of(fn, *args), "cpu", room)


def test_an_elementwise_op_keeps_its_result_over_each_input_laid_out_alike():
    x = torch.randn(300, 70)
    assert tried(aten.gelu_backward.default, x, x + 1) == (0, 1)
    assert tried(aten.mul.Tensor, x, x[0]) == (0,)  # the other one is broadcast
    assert tried(aten.add.Tensor, x, x.t().contiguous().t()) == (0,)
    assert tried(aten.where.self, x > 0, x, x + 1) == (1, 2)
    assert tried(aten.tanh.default, x.half()) == (0,)


def test_an_op_that_is_no_such_is_found_out(monkeypatch):
    x = torch.randn(300, 70)
    assert tried(aten.mm.default, x[:70].clone(), x[:70].clone()) == () == tried(torch.tanh, x)
    monkeypatch.setattr(bench, "in_place_operands", lambda _fn, args, _kwargs: tuple(a.value for a in args))
    square = x[:70].clone()
    assert tried(aten.mm.default, square, square + 1) == ()
    assert tried(lambda a: a.flip(0), x) == ()
    assert tried(lambda a: a + a.flip(0).flip(0), x) == (0,)  # all that is read elsewhere is read before
    assert tried(lambda a: torch.zeros_like(a).add_(a), x) == ()


def rows(name):
    """Calls of an op that works by rows (or by blocks of columns, by channels), and what may be overwritten."""
    x, y = torch.randn(2, 6, 37, 53), torch.randn(2, 6, 37, 53)
    last, rank2 = {"memory_format": torch.channels_last}, torch.randn(301, 70)
    if "softmax" in name:
        for t, dim in [
            (rank2, 1),
            (rank2, 0),
            (x, 3),
            (x, 2),
            (x, 0),
            (torch.randn(3, 50257), 1),
            (rank2[0], 0),
        ]:
            narrow = (torch.float64, torch.bfloat16, torch.float16) if t is rank2 else ()
            for dtype in (torch.float32, *narrow):
                a = t.to(dtype)
                if "backward" in name:
                    yield (a, torch.softmax(a, dim), dim, dtype), (0, 1)
                else:
                    yield (a, dim, False), (0,)
    elif "layer_norm" in name:
        for t in (rank2, x):
            for weight in (torch.randn(t.shape[-1]), None):
                if "backward" not in name:
                    yield (t, [t.shape[-1]], weight, weight, 1e-5), (0,)
                    continue
                _, mean, rstd = aten.native_layer_norm(t, [t.shape[-1]], weight, weight, 1e-5)
                for mask in ([True, False, False], [True] * 3)[: 1 if weight is None else 2]:
                    grad = torch.randn_like(t)
                    yield (grad, t, [t.shape[-1]], mean, rstd, weight, weight, mask), (0, 1)
    elif "group_norm" in name:
        for form in ({}, last):
            a, grad, w = x.contiguous(**form), y.contiguous(**form), torch.randn(6)
            if "backward" not in name:
                yield (a, w, w, 2, 6, 37 * 53, 3, 1e-5), (0,)
                continue
            _, mean, rstd = aten.native_group_norm(a, w, w, 2, 6, 37 * 53, 3, 1e-5)
            for mask in ([True] * 3, [True, False, False]):
                yield (grad, a, mean, rstd, w, 2, 6, 37 * 53, 3, mask), (0, 1)
    else:
        for form in ({}, last):
            a, grad, w = x.contiguous(**form), y.contiguous(**form), torch.randn(6)
            _, mean, rstd = aten.native_batch_norm(a, w, w, None, None, True, 0.1, 1e-5)
            for dtype in (torch.float32, torch.bfloat16):
                yield (
                    (grad.to(dtype), a.to(dtype), w, None, None, mean, rstd, True, 1e-5, [True] * 3),
                    (0, 1),
                )


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(lower._BY_ROW))
def test_an_op_by_rows_keeps_its_results_over_its_inputs(name, threads):
    """Every kind of kernel: along the last dimension and others, of one row, in 16 bits, with several threads."""
    for args, wanted in rows(name):
        for count in (1, 5):
            threads(count)
            assert tried(getattr(aten, name).default, *args) == wanted, (count, args[1:])


def test_an_op_by_rows_that_takes_two_passes_is_found_out():
    """A batch norm between layouts writes its result from the input first, and reads the gradient afterwards."""
    x, w = torch.randn(2, 6, 37, 53), torch.randn(6)
    laid, fn = torch.randn(6, 2, 37, 53).transpose(0, 1), aten.native_batch_norm_backward.default
    _, mean, rstd = aten.native_batch_norm(laid, w, w, None, None, True, 0.1, 1e-5)
    args = x, laid, w, None, None, mean, rstd, True, 1e-5, [True] * 3
    assert fn(*args)[0].stride() == x.stride() and tried(fn, *args) == ()


def test_an_op_that_looks_at_its_input_again_is_found_out(monkeypatch):
    """What is masked is looked for when the softmax is there, which matters where all of a row is."""
    monkeypatch.setattr(bench, "in_place_operands", lambda _fn, args, _kwargs: (args[0].value,))
    x = torch.randn(300, 70)
    assert tried(aten._softmax.default, x, 1, False) == (0,)
    assert tried(aten._safe_softmax.default, x, 1, None) == ()


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_rows_of_which_all_is_masked_are_those_of_eager(budget):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.norm = torch.nn.Linear(16, 48), torch.nn.LayerNorm(16)

        def forward(self, batch):
            x, mask = batch
            for _ in range(3):
                q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                x = x + made.transpose(1, 2).flatten(2)
            return x

    mask = torch.ones(4, 1, 12, 12, dtype=torch.bool).tril()
    mask[:, :, :, :3] = False  # padded at the left: the first rows see nothing
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 12, 16)
    twin = copy.deepcopy(model)
    mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))

    def loss_fn(model, batch):
        return model(batch).square().mean()

    step = fit(model, loss_fn, mine, (x, mask), budget, cache=None, seconds=1.0, seconds_per_op=0.0)
    for k in range(3):
        assert torch.equal(step((x + k, mask)), eager(twin, loss_fn, other, (x + k, mask)))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert step.measure()["measured_peak"] == step.measure()["planned_peak"]
    safe = [op for op in step.program.graph.ops if op.target == "aten._safe_softmax.default"]
    assert safe and not any(op.overwrites for op in safe)


def test_a_value_that_an_op_by_rows_reads_elsewhere_keeps_its_place():
    assert (
        lower.in_place_operands(aten.native_layer_norm.default, (Ref(0), [1, 70], Ref(0), None, 1e-5), {})
        == ()
    )
    assert lower.in_place_operands(
        aten.native_layer_norm.default, (Ref(0), [1, 70], Ref(1), None, 1e-5), {}
    ) == (0,)
    assert lower.in_place_operands(aten.native_layer_norm.default, (Ref(0), [70], None, None, 1e-5), {}) == (
        0,
    )


def test_an_op_that_differs_loses_what_it_claimed(monkeypatch, tmp_path):
    model, loss, batch = MODELS["mlp"]()
    program = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    claimed = sum(len(o.overwrites) for o in program.graph.ops)
    assert claimed
    kept = profile.profile(program, cache=tmp_path, seconds_per_op=0.0).graph
    assert sum(len(o.overwrites) for o in kept.ops) == claimed and kept.digest == program.graph.digest
    monkeypatch.setattr(profile, "in_place_inputs", lambda *_args: ())
    again = profile.profile(program, cache=tmp_path, seconds_per_op=0.0).graph  # known from the first time
    assert again.digest == kept.digest
    lost = profile.profile(program, cache=None, seconds_per_op=0.0).graph
    assert sum(len(o.overwrites) for o in lost.ops) == 0 and lost.digest != kept.digest


@pytest.mark.parametrize("name", ["cnn", "gpt2", "resnet", "swin"])
def test_every_op_of_a_model_that_claims_it_can_do_it(name):
    model, loss, batch = MODELS[name]()
    program = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    graph = program.graph
    wrong = []
    for k, op in enumerate(graph.ops):
        if op.overwrites:
            safe = (
                profile._Profiler(
                    program, profile.Cache(None, ""), {"cpu": True}, 0.0, profile._Hurry(math.inf)
                )
                .op(k)
                .overwrites
            )
            wrong += [op.name] if safe != op.overwrites else []
    assert not wrong and any(op.overwrites for op in graph.ops)


def test_what_is_claimed_is_elementwise_and_laid_out_alike():
    for name in ("gpt2", "cnn"):
        model, loss, batch = MODELS[name]()
        graph = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0)).graph
        for op in graph.ops:
            for a, b in op.overwrites:
                made = next((graph.values[i] for i in op.outputs if graph.values[i].storage == b), None)
                assert a not in graph.static and made is not None
                for v in (graph.values[i] for i in op.inputs):
                    assert v.storage != a or (v.dtype, v.shape, v.stride) == (
                        made.dtype,
                        made.shape,
                        made.stride,
                    )
    assert lower.elementwise(aten.gelu_backward.default) and lower.elementwise(aten.hardtanh_backward.default)
    for fn in (
        aten.add_.Tensor,
        aten.add.out,
        aten.clone.default,
        aten.frexp.Tensor,
        aten.mm.default,
        torch.relu,
    ):
        assert not lower.elementwise(fn)


# ---- steps


def planner(budget):
    """The default plan within ``budget``, or with a little more than the least that is reached."""

    def plan(graph, _budget=None):
        o = default.Options(work=200_000, seconds=60.0)
        try:
            return default.plan(graph, budget, o)
        except Infeasible as no:
            return default.plan(graph, int(max(no.best_peak, no.placed or 0) * 1.03), o)

    return plan


@pytest.mark.parametrize("budget", [None, "45%"])
@pytest.mark.parametrize("name", ["cnn", "in_place", "lstm", "gpt2", "bert", "resnet", "llama_sdpa"])
def test_steps_are_those_of_eager_and_take_the_planned_bytes(name, budget, tmp_path):
    pair = Pair(name)
    step = fit(
        pair.model, pair.loss_fn, pair.optimizer, pair.batch(0),
        planner=planner(budget), strict=True, cache=tmp_path, seconds_per_op=0.0,
    )  # fmt: skip
    assert any(s.reuses for s in step.plan.steps)
    for number in range(3):
        pair.compare(step, number)
    assert step.last.exact and step.last.misses == 0
    assert step.last.measured_peak == step.last.process_peak == step.plan.peak
    taken = [step.program.calls[s.op].fn for s in step.plan.steps if s.reuses]
    assert not all(map(lower.elementwise, taken))


def test_somebody_who_holds_an_input_is_noticed():
    """A tensor of the run that is still held when a result takes its place."""
    model, loss, batch = MODELS["gpt2"]()
    program = capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
    program = profile.profile(program, cache=None, seconds_per_op=0.0)
    plan = default.plan(program.graph, None, default.Options(work=1000))
    executor = Executor(program, plan)
    taken = next(i for i, s in enumerate(plan.steps) if s.reuses)
    at = next(k for k, i in enumerate(executor._code.instructions) if i.step == taken and i.op >= 0)
    instruction, held = executor._code.instructions[at], []
    storage = plan.steps[taken].reuses[0][0]

    def run(env):
        held.extend(
            env[v] for v, x in enumerate(program.graph.values) if x.storage == storage and env[v] is not None
        )
        instruction.run(env)

    executor._code.instructions[at] = profile.replace(instruction, run=run)
    from tightship.execute.binding import Binding

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves = torch.utils._pytree.tree_leaves(batch(0))
    with pytest.warns(UserWarning, match="held"):
        executor.run(Binding(program, model, optimizer).tensors(leaves))
    assert held


class Cells(torch.nn.Module):
    """Gates of a GRU, written in place, with something wide before every cell."""

    def __init__(self, width: int = 48, steps: int = 4) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.steps = steps

    def forward(self, x):
        state = x
        for _ in range(self.steps):
            state = self.cell(self.narrow(torch.nn.functional.silu(self.wide(state))), state)
        return state


@pytest.mark.slow
def test_a_step_makes_again_what_was_written_over_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    model, batch = Cells(), torch.randn(256, 48)
    twin = Cells()
    twin.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))

    def loss(m, x):
        return m(x).square().mean()

    with pytest.raises(Infeasible) as no:
        fit(
            model,
            loss,
            ours,
            batch,
            "static+1%",
            progress=False,
            cache=tmp_path,
            seconds_per_op=0.0,
            work=4_000_000,
        )
    step = fit(
        model,
        loss,
        ours,
        batch,
        int(no.value.best_peak),
        progress=False,
        cache=tmp_path,
        seconds_per_op=0.0,
        work=4_000_000,
    )
    ops = step.graph.ops
    assert any(s.kind == "recompute" and ops[s.op].mutates for s in step.plan.steps)
    for _ in range(2):
        found = step(batch)
        theirs.zero_grad()
        (wanted := loss(twin, batch)).backward()
        theirs.step()
        assert torch.equal(found, wanted.detach())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert step.measure()["measured_peak"] == step.plan.peak
