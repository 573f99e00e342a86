"""The torch.compile backend in the ways people use it, bit-identical."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

from support.compiled import QUICK, batch, compiled, deep, equal, pair, step
from tightship import errors
from tightship.execute import allocator
from tightship.execute.allocator import Meter
from tightship.frontends.torch.program import Ref
from tightship.integrations.torch_compile import Fallback, compiled_notes, compiled_plans

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

needs_allocator = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")


# --- sizes and modes ---


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_batch_of_another_size_is_planned_anew_and_kept(dynamic):
    model, other = deep(), deep()
    call = torch.compile(model, backend="tightship", options={**QUICK, "budget": "90%"}, dynamic=dynamic)
    for n in (48, 32, 48, 40, 48, 32):
        assert equal(step(call, model, batch(n)), step(other, other, batch(n)))
    assert sorted(p.name for p in compiled_plans(call)) == ["0/0", "0/1", "0/2"]
    assert len({p.plan.peak for p in compiled_plans(call)}) == 3


def test_sizes_that_are_marked_as_dynamic_are_planned_one_by_one():
    """Dynamo raised that the code made numbers of them."""
    model, other = deep(), deep()
    call = torch.compile(model, backend="tightship", options={**QUICK, "budget": "90%"})
    for n in (48, 32, 48):
        x = batch(n)
        torch._dynamo.mark_dynamic(x, 0)
        assert equal(step(call, model, x), step(other, other, batch(n)))
    assert sorted(p.name for p in compiled_plans(call)) == ["0/0", "0/1"]


def test_more_sizes_than_dynamo_compiles_run_in_eager_after_a_warning():
    model, other = deep(2), deep(2)
    options = {**QUICK, "eager_fallback": True}
    call = torch.compile(model, backend="tightship", options=options, dynamic=False, recompile_limit=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for n in (2, 3, 4, 5, 6, 3, 5):
            assert equal(step(call, model, batch(n)), step(other, other, batch(n)))
    warning, again = [w for w in found if w.category is Fallback]
    assert "recompile limit" in str(again.message) and str(again.message) in compiled_notes(call)
    assert "graph 0/2 is the last of its function's: Dynamo compiles a function 3 times" in str(
        warning.message
    )
    assert str(warning.message) in compiled_notes(call)
    first, *more = compiled_plans(call)
    assert len(more) == 2
    first.last = None
    step(call, model, batch(2))
    assert first.last is not None and first.last.as_planned


def test_under_strict_a_size_beyond_those_is_refused_and_the_others_still_run():
    model, other = deep(2), deep(2)
    call = torch.compile(model, backend="tightship", options={**QUICK}, dynamic=False, recompile_limit=2)
    with pytest.warns(Fallback, match="last of its function's"):
        for n in (2, 3):
            step(call, model, batch(n)), step(other, other, batch(n))
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match="recompile limit"):
            call(batch(4))
    assert equal(step(call, model, batch(3)), step(other, other, batch(3)))


def test_dynamo_can_be_told_to_compile_more_sizes():
    model, other = deep(2), deep(2)
    call = torch.compile(model, backend="tightship", options={**QUICK}, dynamic=False, recompile_limit=12)
    for n in range(2, 12):
        assert equal(step(call, model, batch(n)), step(other, other, batch(n)))
    assert len(compiled_plans(call)) == 10 and not any("last of" in n for n in compiled_notes(call))


class Named(torch.Tensor):
    pass


class Plain(torch.Tensor):
    """As torchvision's: what comes of it is a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Named, Plain])
@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_batches_of_a_class_of_their_own(kind, mode):
    """AOTAutograd's wrapper raised that no handler knows the class (stock aot_eager does)."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(torch.relu(x).unsqueeze(0)).squeeze(0)
            return x

    model, other = Net(), Net()
    call = torch.compile(model, backend="tightship", options={**QUICK, "budget": "100%", "mode": mode})
    for k in range(2):
        x = batch(48)[:, :16] + k
        out, wanted = call(x.as_subclass(kind)), other(x.as_subclass(kind))
        assert type(out) is type(wanted)
        for o in (out, wanted):
            o.as_subclass(torch.Tensor).square().mean().backward()
        same = torch.equal if mode == "exact" else torch.allclose
        assert same(out.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor))
        assert all(same(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert [p.name for p in compiled_plans(call)] == ["0/0"]


def test_evaluation_is_planned_without_a_backward_pass():
    call, model, other = pair(budget="90%")
    model.eval(), other.eval()
    with torch.no_grad():
        assert torch.equal(call(batch()), other(batch()))
    with torch.inference_mode():
        assert torch.equal(call(batch()), other(batch()))
    model.train(), other.train()
    assert equal(step(call, model, batch()), step(other, other, batch()))
    kinds = [p.kind for p in compiled_plans(call)]
    assert kinds[-1] == "training" and set(kinds[:-1]) == {"inference"}
    assert any("not held to it" in n for n in compiled_notes(call))


def test_a_model_without_gradients():
    model = deep(dropout=0.0).requires_grad_(False)
    call = compiled(model, budget="100%")
    assert torch.equal(call(batch()), model(batch()))
    assert [p.kind for p in compiled_plans(call)] == ["inference"]


def test_a_function():
    @torch.compile(backend="tightship", options=(options := {**QUICK}))
    def function(a, b):
        return (a @ b).relu().sum(), a * 2

    a, b = batch(16).requires_grad_(), batch(16, 1).requires_grad_()
    first, second = function(a, b)
    (first + second.sum()).backward()
    got = a.grad, b.grad
    a.grad = b.grad = None
    ((a @ b).relu().sum() + (a * 2).sum()).backward()
    assert equal(got, (a.grad, b.grad))
    assert len(compiled_plans(function)) == 1 and options["strict"]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = deep()

    def forward(self, x):
        return self.body(x)


def test_a_module_compiled_in_place():
    model, other = Named(), Named()
    model.compile(backend="tightship", options={**QUICK, "budget": "90%"})
    assert equal(step(model, model, batch()), step(other, other, batch()))
    (piece,) = compiled_plans(model)
    assert piece.graph.storages[0].name == "body.0.weight" and piece.graph.storages[0].kind == "parameter"
    assert any(o.module.startswith("body.") for o in piece.graph.ops)


# --- autograd ---


def test_an_input_that_requires_grad():
    call, model, other = pair()
    x, y = batch().requires_grad_(), batch().requires_grad_()
    assert equal(step(call, model, x), step(other, other, y))
    assert torch.equal(x.grad, y.grad)


def test_gradients_accumulate():
    call, model, other = pair(budget="90%")
    for seed in range(4):
        x = batch(seed=seed)
        assert equal(step(call, model, x, seed), step(other, other, x, seed))


@needs_allocator
def test_two_forward_passes_before_a_backward_pass_do_not_share_an_arena():
    call, model, other = pair()
    xs = [batch(seed=k) for k in range(3)]

    def losses(net):
        torch.manual_seed(1)
        a, b, c = [net(x).sum() for x in xs]
        (a * b + c).backward()
        return [p.grad.clone() for p in model_of[net].parameters()]

    model_of = {call: model, other: other}
    for _ in range(3):
        assert equal(losses(call), losses(other))
    (piece,) = compiled_plans(call)
    assert piece.unplaced == 6
    assert any("ran outside the arena" in n for n in piece.notes)
    assert equal(step(call, model, xs[0]), step(other, other, xs[0]))
    assert piece.unplaced == 6 and piece.last.arena > 0


@needs_allocator
def test_a_graph_that_is_never_used_does_not_block_the_arena_once_dropped():
    call, model, _ = pair()
    unused = call(batch())
    step(call, model, batch())
    (piece,) = compiled_plans(call)
    assert piece.unplaced == 1
    del unused
    gc.collect()
    step(call, model, batch())
    assert piece.unplaced == 1


def test_a_retained_graph_can_be_used_again():
    call, model, other = pair()
    for net, its in ((call, model), (other, other)):
        torch.manual_seed(1)
        loss = net(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        its.found = [p.grad.clone() for p in its.parameters()]
    assert equal(model.found, other.found)
    assert any("retain_graph" in n for n in compiled_notes(call))


def test_saved_tensors_may_be_moved_by_hooks():
    call, model, other = pair()
    with torch.autograd.graph.save_on_cpu():
        got = step(call, model, batch())
    assert equal(got, step(other, other, batch()))


def test_gradients_of_outputs_may_be_parts_of_larger_tensors():
    call, model, other = pair()
    for net, its in ((call, model), (other, other)):
        torch.manual_seed(1)
        torch.cat([net(batch(8)), net(batch(8, 1))]).pow(2).sum().backward()
        its.found = [p.grad.clone() for p in its.parameters()]
    assert equal(model.found, other.found)


def test_a_gradient_in_another_layout_than_its_result_is_said_once():
    """AOTAutograd makes it contiguous, and sums over it may come out otherwise than in eager."""
    call, model, _ = pair()
    for _ in range(2):
        call(batch(8)).pow(2).mean().backward()
    assert not compiled_notes(call)
    with pytest.warns(Fallback, match="result 0 of graph 0/0 comes in another layout"):
        call(batch(8)).t().contiguous().pow(3).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(batch(8)).t().contiguous().pow(3).sum().backward()
    assert len([n for n in compiled_notes(call) if "another layout" in n]) == 1
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_that_is_one_number_is_a_note():
    call, _, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(batch(8)).sum().backward()
    assert any("another layout" in n for n in compiled_notes(call))


def test_outputs_that_share_memory_and_inputs_that_come_back():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = deep(1)

        def forward(self, x):
            h = self.lin(x).relu()
            return h, h.view(-1), x, h.detach(), (h * 2)[1:], 3, None

    model, other = Several(), Several()
    call = compiled(model)
    torch.manual_seed(1)
    a = call(batch())
    torch.manual_seed(1)
    b = other(batch())
    for left, right in zip(a, b, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    for net, out in ((model, a), (other, b)):
        (out[0].sum() + out[4].sin().sum()).backward()
        net.found = [p.grad for p in net.parameters()]
    assert equal(model.found, other.found)


def test_inputs_that_share_memory_at_first_need_not_share_it_later():
    call = compiled(lambda a, b: (a * b).sin())
    whole = batch(1).flatten()
    for a, b in ((whole[:8], whole[8:]), (whole[:8], batch(1, 2).flatten()[:8]), (whole[2:10], whole[1:9])):
        assert torch.equal(call(a, b), (a * b).sin())


# --- memory ---


@needs_allocator
def test_nothing_stays_in_the_arena_after_a_step_and_the_arena_goes_with_the_model():
    gc.collect()
    before = allocator.reserved()
    call, model, _ = pair()
    step(call, model, batch())
    (piece,) = compiled_plans(call)
    model.zero_grad()
    assert piece._frame_arena.arena.live == 0 and allocator.reserved() > before
    del call, model, piece
    torch._dynamo.reset()
    gc.collect()
    assert allocator.reserved() == before


@needs_allocator
def test_without_an_arena_the_peak_is_measured_all_the_same():
    call, model, other = pair(arena=False, budget="80%")
    assert equal(step(call, model, batch()), step(other, other, batch()))
    (piece,) = compiled_plans(call)
    assert piece.last.measured_peak == piece.plan.peak <= piece.plan.budget < piece.plan.peak_before
    assert piece.last.arena == 0


def test_without_a_compiler_the_plan_is_run_and_not_measured(monkeypatch):
    monkeypatch.setattr(allocator, "why_not", lambda _kind: "no C++ compiler")
    call, model, other = pair(cache=None)
    assert equal(step(call, model, batch()), step(other, other, batch()))
    assert any("no C++ compiler" in n for n in compiled_notes(call))


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = deep(), deep()
        self.a[-1] = nn.Linear(16, 16)

    def forward(self, x):
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h)


@needs_allocator
@pytest.mark.parametrize("budget", ["120KiB", "90KiB", "70KiB", "60KiB"])
def test_graphs_share_one_budget_in_bytes(budget):
    torch.manual_seed(0)
    model = Broken()
    other = copy.deepcopy(model)
    x = batch(64)
    call = compiled(model, budget=budget)
    step(call, model, x)
    model.zero_grad()
    with Meter() as meter:
        got = step(call, model, x)[:1]
    static = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4
    assert meter.peak + static <= int(budget[:-3]) * 1024
    assert equal(got, step(other, other, x)[:1])
    assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert len(compiled_plans(call)) == 2


def test_too_small_a_budget_for_the_later_graph_is_infeasible():
    model = Broken()
    with pytest.raises(errors.Infeasible):
        step(compiled(model, budget="45KiB"), model, batch(64))


class Remembering(nn.Module):
    """Uses large buffers before it overwrites them; their old contents are gone when the backward pass runs."""

    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        for k in range(4):
            self.register_buffer(f"memory{k}", torch.zeros(64, 16))

    def forward(self, x):
        for k, lin in enumerate(self.lin):
            memory = self.get_buffer(f"memory{k}")
            x = torch.sigmoid(lin(x) * memory.sin())
            memory.mul_(0.9).add_(x.detach() * 0.1)
        return x


def test_nothing_is_made_again_from_a_buffer_that_was_overwritten():
    torch.manual_seed(0)
    model = Remembering()
    other = copy.deepcopy(model)
    call = compiled(model, budget="80%")
    for _ in range(3):
        assert equal(step(call, model, batch(64)), step(other, other, batch(64)))
        assert equal(list(model.buffers()), list(other.buffers()))
    assert compiled_plans(call)[0].plan.count("recompute")


def test_batch_norm_is_made_again_without_its_statistics():
    def net():
        torch.manual_seed(0)
        rows = [m for _ in range(5) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Sigmoid())]
        return nn.Sequential(*rows)

    model, other = net(), net()
    call = compiled(model, budget="65%")
    for _ in range(3):
        assert equal(step(call, model, batch(128)), step(other, other, batch(128)))
        assert equal(list(model.buffers()), list(other.buffers()))
    (piece,) = compiled_plans(call)
    again = {piece.graph.ops[s.op].target for s in piece.plan.steps if s.kind == "recompute"}
    assert "aten.native_batch_norm.default" in again


def test_what_a_random_op_gives_is_saved_whole():
    call, model, _ = pair(budget="85%")
    step(call, model, batch())
    (piece,) = compiled_plans(call)
    ops = [piece.graph.ops[s.op] for s in piece.plan.steps if s.kind == "recompute"]
    assert ops and not any(o.random for o in ops)


def test_what_the_caller_gets_is_not_made_again():
    call, model, _ = pair(budget="85%")
    step(call, model, batch())
    (piece,) = compiled_plans(call)
    given = {piece.graph.values[r.value].storage for r in piece._joint.forward if isinstance(r, Ref)}
    again = {s for t in piece.plan.steps if t.kind == "recompute" for s in t.storages}
    assert given and not given & again


# --- models that share code ---


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x).tanh()


def plain(model):
    return compiled(model)


def through_the_module(model):
    model.compile(backend="tightship", options=dict(QUICK))
    return model


@pytest.mark.parametrize(
    ("make", "second"),
    [(Net, plain), (Net, through_the_module), (Net, copy.deepcopy), (deep, plain), (deep, copy.deepcopy)],
)
def test_models_for_which_dynamo_runs_one_code_share_its_plans(make, second):
    first = compiled(make())
    other = second(first if second is copy.deepcopy else make())
    assert not compiled_plans(other)
    first(batch()).square().mean().backward()
    (p,) = compiled_plans(first)
    p.last = None
    other(batch()).square().mean().backward()
    assert compiled_plans(other) == (p,) and p.last is not None and p.last.as_planned
    assert compiled_notes(other) == compiled_notes(first)


@pytest.mark.parametrize("different", [{"budget": "100%"}, {"strict": False}])
def test_models_with_other_options_have_plans_of_their_own(different):
    first, other = compiled(Net()), compiled(Net(), **different)
    first(batch()).square().mean().backward()
    assert not compiled_plans(other)
    other(batch()).square().mean().backward()
    assert len(compiled_plans(other)) == len(compiled_plans(first)) == 1
    assert compiled_plans(other) != compiled_plans(first)


class Windows(nn.Module):
    """Channels last behind a convolution's layout, as attention in windows has them: a gradient comes to dropout in
    another layout than its mask has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.of, self.dropout = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x):  # windows of half the height and width
        b, c, h, w = x.shape
        apart = x.view(b, c, 2, h // 2, 2, w // 2).permute(0, 3, 5, 2, 4, 1)
        made = self.dropout(self.of(apart)) + apart
        whole = made.permute(0, 5, 3, 1, 4, 2).reshape(b, c, h, w)
        return (whole.mean((2, 3)).softmax(1) * torch.arange(16.0)).sum()


@pytest.mark.parametrize("size", [2, 4])  # windows of one pixel, whose sizes of one have any strides
def test_gradients_of_dropout_in_the_layout_of_what_follows(size):
    """The graph takes them to be contiguous, as they are on CUDA, and views them (stock ``aot_eager`` raises)."""
    found = []
    for backend in (None, "tightship"):
        model = Windows()
        run = torch.compile(model, backend=backend, options=QUICK) if backend else model
        torch.manual_seed(1)
        run(torch.randn(4, 16, size, size)).backward()
        found.append([p.grad for p in model.parameters()])
    assert compiled_plans(run)
    assert all(map(torch.equal, *found))


class Normalized(nn.Module):
    """Batch norm of features that come last, as in encoders of series: what it makes is contiguous on the CPU."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(16, 16), norm
        self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.norm(self.first(x).transpose(1, -1)).transpose(1, -1)
        return (self.third(self.second(h).softmax(-1)).softmax(-1) * torch.arange(4.0)).sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.BatchNorm1d, (8, 3, 16)), (nn.BatchNorm2d, (2, 3, 5, 16)), (nn.InstanceNorm1d, (8, 3, 16))],
)
def test_batch_norm_of_what_is_transposed_is_followed_by_eagers_ops(norm, shape, training):
    found = []
    for backend in (None, "tightship"):
        model = Normalized(norm(16)).train(training)
        run = torch.compile(model, backend=backend, options=QUICK) if backend else model
        torch.manual_seed(1)
        run(torch.randn(shape)).backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert compiled_plans(run)
    assert all(map(torch.equal, *found))
