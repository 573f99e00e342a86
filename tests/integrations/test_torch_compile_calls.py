"""One code that is called several times before the first backward pass: layers that are compiled one by one."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tightship.errors import Infeasible  # noqa: E402
from tightship.integrations.torch_compile import Fallback, compiled_session, measured_step  # noqa: E402

WIDTH, ROWS, LAYERS = 32, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def one_by_one(how, *, apart=False, **options):
    """The model, its layers compiled one by one in one of the ways that people do; and what has the options. With
    ``apart`` each layer is given a dict of its own."""
    model, shared = Model(), {"seconds": 1, **options}
    torch._dynamo.reset()
    for k, block in enumerate(model.blocks):
        given = {**shared} if apart else shared
        if how == "compile":
            block.compile(backend="tightship", options=given)
        elif how == "wrapped":
            model.blocks[k] = torch.compile(block, backend="tightship", options=given)
        else:
            block.forward = torch.compile(block.forward, backend="tightship", options=given)
    first = model.blocks[0]
    return model, first.forward if how == "forward" else first


def loss_of(model):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return model(x).sum()


def gradients(model):
    model.zero_grad()
    loss_of(model).backward()
    return [p.grad for p in model.parameters()]


def step(model, first):
    """Bytes of a training step, planned and measured."""
    model.zero_grad()
    with measured_step(first) as found:
        loss_of(model).backward()
        model.zero_grad()
    return found


@pytest.mark.parametrize("mode", ["exact", "compiled"])
@pytest.mark.parametrize("budget", ["100%", "static+70%"])
def test_layers_share_a_budget_that_are_compiled_one_by_one(budget, mode):
    model, first = one_by_one("compile", budget=budget, mode=mode, strict=True)
    found = gradients(model)
    expected = gradients(Model())
    close = 0 if mode == "exact" else 1e-4
    assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in zip(found, expected, strict=True))
    ledger = compiled_session(first).ledger
    assert len(ledger.entries) == LAYERS
    assert len(compiled_session(first).graphs) == 1
    memory = step(model, first)
    # What the caller's own code makes between graphs is measured, and not planned: the sum, and its gradient.
    assert memory.measured <= memory.planned + 2 * 64
    assert memory.planned <= ledger.limit
    whole = sum(e.unplanned_rest for e in ledger.entries.values())
    kept = sum(e.rest for e in ledger.entries.values())
    assert kept == whole if budget == "100%" else kept < 0.8 * whole


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.of, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.block = Block()

    def forward(self, x):
        q, k, v = self.of(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.block(x + self.out((weights @ v).transpose(1, 2).reshape(x.shape)))


def test_what_one_call_leaves_is_there_for_the_others():
    """In compiled mode what counts is what all calls take, not each call's part of it: a candidate that takes more
    while it runs, and keeps less, is not thrown away."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.Sequential(*(Attention() for _ in range(LAYERS)))
    for layer in layers:
        layer.compile(
            backend="tightship", options={"budget": "60%", "seconds": 1, "mode": "compiled", "cache": None}
        )
    for _ in range(2):
        layers.zero_grad()
        layers(torch.randn(8, 32, WIDTH, requires_grad=True)).sum().backward()
    ledger = compiled_session(layers[0]).ledger
    assert ledger.planned_step() <= ledger.limit
    (graph,) = compiled_session(layers[0]).graphs
    assert graph.plan.lowered <= 6


@pytest.mark.parametrize("how", ["compile", "wrapped", "forward"])
@pytest.mark.parametrize("sized", [False, True])
def test_layers_with_options_of_their_own_share_where_these_are_equal(how, sized):
    """A dict in the loop that compiles them is another object each time, and the same budget."""
    whole, first = one_by_one(how, budget="100%")
    gradients(whole)
    limit = compiled_session(first).ledger.limit * 4 // 5
    model, _ = one_by_one(how, apart=True, budget=limit if sized else "80%", strict=True)
    x = torch.randn(ROWS, WIDTH)  # the first layer's graph has no gradient of it, the others' have
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    blocks = [b.forward if how == "forward" else b for b in model.blocks]
    sessions = [compiled_session(b) for b in blocks]
    assert all(s is sessions[0] for s in sessions)
    assert len(sessions[0].ledger.entries) == LAYERS
    assert sessions[0].ledger.planned_step() <= sessions[0].ledger.limit


@pytest.mark.parametrize("how", ["compile", "wrapped", "forward"])
def test_layers_are_known_that_will_run_the_same_code(how):
    """What one layer keeps leaves room for what the others will."""
    whole, first = one_by_one(how, budget="100%")
    gradients(whole)
    limit = compiled_session(first).ledger.limit
    model, first = one_by_one(how, budget=limit * 4 // 5)
    gradients(model)
    memory = step(model, first)
    assert memory.planned <= limit * 4 // 5
    assert memory.measured <= memory.planned + 2 * 64


def test_layers_with_other_options_do_not_share():
    limits = []
    for budget in ("100%", None):
        torch._dynamo.reset()
        model, options = Model(), {"seconds": 1, "budget": budget or limits[0]}
        for k, block in enumerate(model.blocks):
            if k < 2:
                block.compile(backend="tightship", options=options)
            else:
                block.compile(backend="aot_eager")
        gradients(model)
        entries = compiled_session(model.blocks[0]).ledger.entries.values()
        assert len(entries) == 2
        assert all(e.rest == e.unplanned_rest for e in entries)  # no room is left for layers of other calls
        limits.append(compiled_session(model.blocks[0]).ledger.limit)


@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_regions_as_accelerate_compiles_them(mode):
    """Layers one by one, and all other modules by themselves, in a copy of the model."""
    utils = pytest.importorskip("accelerate.utils", reason="accelerate is not installed")

    def run(budget):
        torch._dynamo.reset()
        given = {"budget": budget, "seconds": 1, "mode": mode}
        model = utils.compile_regions(Headed(), backend="tightship", options=given)
        found = gradients(model)
        close = 0 if mode == "exact" else 1e-4
        expected = gradients(Headed())
        assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in zip(found, expected, strict=True))
        first = model.blocks[0]
        ledger = compiled_session(first).ledger
        assert len(ledger.entries) == LAYERS + 1
        assert step(model, first).planned <= ledger.limit
        return ledger.limit

    limit = run("100%")
    run("85%")
    run(
        int((0.8 if mode == "exact" else 1.5) * limit)
    )  # of bytes, layers that come first take half if they can


class Headed(Model):
    """With a head that runs in eager: its gradients are there before those of any layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.head(super().forward(x)).tanh()


@pytest.mark.parametrize("budget", ["100%", "static+70%", "90%"])
def test_with_an_optimizer_the_budget_is_of_the_whole_step(budget):
    torch._dynamo.reset()
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for block in model.blocks:
        block.compile(backend="tightship", options={"seconds": 1, "budget": budget, "optimizer": optimizer})
    first = model.blocks[0]

    def train():
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    with measured_step(first) as memory:
        train()
    ledger = compiled_session(first).ledger
    assert memory.planned <= ledger.limit
    outside = 4 * ROWS * 2 * WIDTH * 4  # the head's results and their gradients
    assert memory.measured <= memory.planned + outside


def test_calls_that_nobody_knew_of_are_counted():
    """A function that is compiled, in a loop: nothing says how often it is called."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    options = {"budget": "100%", "seconds": 1}

    def layer(x):
        return torch.tanh(torch.tanh(x @ weight) * 2)

    def run(given, calls):
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="tightship", options=given)
        x = torch.randn(ROWS, WIDTH)
        for _ in range(calls):
            x = compiled(x)
        x.sum().backward()
        return compiled

    compiled = run(options, 6)
    ledger = compiled_session(compiled).ledger
    assert sorted(k for _, k in ledger.entries) == list(range(6))
    bytes_of_six = ledger.limit
    run({**options, "budget": bytes_of_six}, 6)
    with pytest.raises(
        Infeasible, match=r"(?s)call \d of it.*kept by graph \d.*runs several times before"
    ) as caught:
        run({**options, "budget": bytes_of_six * 3 // 4}, 6)
    assert caught.value.best_peak > bytes_of_six * 3 // 4
    told = run({**options, "budget": bytes_of_six * 3 // 4, "calls": 6}, 6)
    assert max(e.rest for e in compiled_session(told).ledger.entries.values()) < 3 * ROWS * WIDTH * 4


def test_a_call_counts_until_what_it_made_is_gone():
    """Forward passes whose backward passes never come do not add up."""
    model, first = one_by_one("compile", budget="100%")
    for _ in range(3):
        loss_of(model)
    gradients(model)
    for _ in range(3):
        loss_of(model)
    memory = step(model, first)
    ledger = compiled_session(first).ledger
    assert len(ledger.entries) == LAYERS
    assert memory.measured <= memory.planned + 2 * 64
    first_loss = loss_of(model)  # two whose backward passes are to come: more than the budget is of
    for _ in range(2):
        with pytest.raises(Infeasible, match="call 5 of it"):
            loss_of(model)
    del first_loss
    assert len(ledger.entries) == LAYERS


def test_backward_passes_come_in_any_order():
    model, first = one_by_one("compile")
    losses = [loss_of(model) for _ in range(3)]
    ledger = compiled_session(first).ledger

    def waiting():
        return ledger.place(ledger._calls[-1].place[0] if ledger._calls else 0)[1]

    assert waiting() == 3 * LAYERS
    for k in (0, 2, 1):
        losses[k].backward()
        left = {0: 2, 2: 1, 1: 0}[k]
        assert waiting() == left * LAYERS


def test_a_percentage_that_is_not_met_is_said_in_every_step():
    """What a percentage comes to is known when the first backward pass begins."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def layer(x):
        return torch.tanh(torch.tanh(x @ weight) * 2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="tightship", options={"budget": "100%", "seconds": 1})
    out = compiled(torch.randn(ROWS, WIDTH)).sum()
    compiled_session(compiled).ledger._training.limit = 1
    for _ in range(2):
        with pytest.raises(Infeasible):
            out.backward(retain_graph=True)


class Checkpointed(Model):
    reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def checkpointed(**options):
    torch._dynamo.reset()
    model = Checkpointed()
    for block in model.blocks:
        block.compile(backend="tightship", options={"seconds": 1, **options})
    return model, model.blocks[0]


@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_what_checkpoints_drop_is_not_counted(mode):
    """Of a layer in a checkpoint its result alone stays: budgets that only they can meet are met."""
    kept, first = one_by_one("compile", budget="100%", mode=mode)
    gradients(kept)
    whole = compiled_session(first).ledger.limit
    model, first = checkpointed(budget="100%", mode=mode)
    found, expected = gradients(model), gradients(Checkpointed())
    close = 0 if mode == "exact" else 1e-4
    assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in zip(found, expected, strict=True))
    limit = compiled_session(first).ledger.limit
    assert limit < 0.9 * whole
    memory = step(model, first)
    assert memory.measured <= memory.planned + 2 * 64
    assert memory.planned <= limit
    tight, first = checkpointed(budget=memory.planned, mode=mode)
    gradients(tight)
    assert step(tight, first).planned <= memory.planned


@pytest.mark.parametrize(
    "make", [lambda **o: one_by_one("compile", **o), checkpointed], ids=["kept", "dropped"]
)
def test_what_layers_need_is_said_at_once_whatever_they_were_given(make):
    """Bytes that would do for all of them, also where the others leave the first one less than nothing."""
    said = set()
    for budget in (20_000, 100_000, 200_000):
        model, _ = make(budget=budget)
        with pytest.raises(Infeasible) as no:
            gradients(model)
        said.add(no.value.best_peak)
    (needed,) = said
    model, first = make(budget=needed)
    gradients(model)
    assert step(model, first).planned <= needed


def test_a_checkpoint_that_is_reentrant_is_said_to_hide_calls(monkeypatch):
    monkeypatch.setattr(Checkpointed, "reentrant", True)
    model, _ = checkpointed(budget="100%")
    with pytest.warns(Fallback, match="use_reentrant=True: other layers"):
        found = gradients(model)
    assert all(map(torch.equal, found, gradients(Checkpointed())))


class Norm(nn.Module):
    """The gradient of a square begins with an op that reads no tangent: run in the forward pass, its result would be
    kept beside the rest."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual):
        x = x + residual
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        scaled = self.weight * scaled
        torch._dynamo.graph_break()
        return torch.tanh(scaled).sum() + x.sum()


def test_no_more_is_kept_between_passes_than_without_a_plan():
    torch._dynamo.reset()
    options = {"budget": "100%", "seconds": 1}
    compiled = torch.compile(Norm(), backend="tightship", options=options)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    compiled(x * 1, x * 2).backward()
    entries = compiled_session(compiled).ledger.entries.values()
    assert len(entries) > 1
    assert all(e.rest <= e.unplanned_rest for e in entries)


@pytest.mark.parametrize("kept", ["an error", "a loss"])
def test_what_an_earlier_step_saved_is_said_to_be_there(kept):
    torch.manual_seed(0)
    torch._dynamo.reset()
    m = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    x, held = torch.randn(256, 32), []
    compiled = torch.compile(m, backend="tightship", options={"budget": "100%"})

    def forward(fails=False):
        loss = compiled(x).square().mean()
        if fails:
            raise ArithmeticError("no")
        return loss

    forward().backward()
    try:
        held.append(forward(fails=kept == "an error"))
    except ArithmeticError as error:
        held.append(error)
    with pytest.raises(Infeasible) as refused:
        forward()
    expected = {
        "an error": "the ArithmeticError of test_torch_compile_calls.py:",
        "a loss": "what an earlier call of the same code saved for its backward pass is still there",
    }
    assert expected[kept] in str(refused.value)
    held.clear()
    del refused
    gc.collect()
    forward().backward()


def discriminator(**options):
    """A discriminator that its loss calls with real and with made samples, as GANs do; returns the two losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [m for k in range(5) for m in (nn.Linear(16 if k == 0 else 64, 64), nn.LeakyReLU(0.2))]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    call = torch.compile(model, backend="tightship", options={"seconds": 1, "calls": 2, **options})
    real, made = (torch.randn(256, 16, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    losses = []
    for _ in range(2):
        loss = nn.functional.softplus(-call(real)).mean() + nn.functional.softplus(call(made)).mean()
        loss.backward()
        losses.append(loss.item())
        model.zero_grad()
        del loss
    return losses


@pytest.mark.parametrize("mode", ["exact", "compiled"])
def test_what_two_calls_are_said_to_need_is_enough_for_both(mode):
    expected = discriminator(mode=mode)
    with pytest.raises(Infeasible) as no:
        discriminator(mode=mode, budget=250_000)
    assert discriminator(mode=mode, budget=no.value.best_peak) == pytest.approx(expected, abs=1e-5)


def test_a_percentage_is_of_all_calls_that_were_said_though_the_first_step_has_one():
    """Pipelines begin with one pass that finds out about shapes."""

    def trained(model, call):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(4)]
        call(given[0]).pow(2).mean().backward()
        for _ in range(2):
            optimizer.zero_grad()
            losses = [call(x).pow(2).mean() for x in given]
            for loss in losses:
                loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch._dynamo.reset()
    model = Model()
    options = {"seconds": 1, "budget": "80%", "calls": 4, "strict": True}
    compiled = torch.compile(model, backend="tightship", options=options)
    found, other = trained(model, compiled), Model()
    assert all(map(torch.equal, found, trained(other, other)))
    ledger = compiled_session(compiled).ledger
    assert len(ledger.entries) == 4
    assert ledger.planned_step() <= ledger.limit
