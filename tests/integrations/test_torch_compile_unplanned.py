"""Whatever the torch.compile backend does not plan it says: once, as a warning, in the notes, and as an error under
strict."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from support.compiled import deep, equal, step
from tightship import errors
from tightship.integrations.torch_compile import Fallback, compiled_notes, compiled_plans

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SHORT = {"seconds": 5.0, "work": 1_000_000}


@torch.compiler.disable
def disabled(x):
    return x.sin().exp()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
            self.cell = nn.LSTM(16, 16, batch_first=True) if "Recurrent" in type(self).__name__ else None

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Recurrent(Model):
    """Dynamo leaves a function that has a recurrent layer at hand to eager as a whole."""

    def forward(self, x):
        return self.last(self.cell(self.first(x)[:, None])[0][:, 0])


class RecurrentWithin(Model):
    """Here one of two functions."""

    def middle(self, x):
        return self.cell(x[:, None])[0][:, 0]


class Loop(Model):
    """Dynamo leaves a function that breaks in a loop to eager as a whole."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.first(x).sin()
            torch._dynamo.graph_break()
        return self.last(x)


class Disabled(Model):
    def middle(self, x):
        return disabled(x)


class Reading(Model):
    def middle(self, x):
        with open(__file__) as f:
            f.read(1)
        return x * 1.0


def run(model, **options):
    x = torch.randn(8, 16)
    call = torch.compile(model, backend="tightship", options={**SHORT, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            got = step(call, model, x)
    model.zero_grad()
    assert equal(got, step(model, model, x))
    return call, [str(w.message) for w in found if w.category is Fallback]


@pytest.mark.parametrize("make", [Recurrent, RecurrentWithin, Loop, Disabled, Reading])
def test_what_runs_outside_of_graphs_is_said_once_and_refused_under_strict(make):
    call, said = run(make())
    assert len(said) == len(set(said)) >= 1
    assert all("without a plan and outside the budget" in text for text in said)
    assert set(said) <= set(compiled_notes(call))
    torch._dynamo.reset()
    model = make()
    strict = torch.compile(model, backend="tightship", options={**SHORT, "strict": True, "budget": "1GiB"})
    for _ in range(2):
        with pytest.raises(errors.Unsupported, match="outside of planned graphs"):
            strict(torch.randn(8, 16))


@pytest.mark.parametrize("make", [Recurrent, Loop])
def test_it_is_said_of_every_model_of_a_class(make):
    for _ in range(2):
        assert len(run(make())[1]) >= 1


class Wrapper(nn.Module):
    """Breaks before it has any op, and calls a module of torch's there."""

    def __init__(self):
        super().__init__()
        self.body = deep(dropout=0.0)

    def forward(self, x):
        try:
            torch._dynamo.graph_break()
            return self.body(x)
        finally:
            torch._dynamo.graph_break()


def test_a_module_of_torch_s_that_is_called_outside_of_all_graphs_is_said():
    call, said = run(Wrapper())
    assert compiled_plans(call) or said


def test_a_module_of_torch_s_in_which_the_graph_breaks_says_why():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 8, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    call = torch.compile(model, backend="tightship", options={**SHORT})
    with pytest.warns(Fallback, match=r"whose graph breaks there: .*Tensor\.item\(\)"):
        assert torch.equal(call(x, mask=mask), model(x, mask=mask))  # it compares the mask with a causal one
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        call(x, mask=mask, is_causal=True)
    assert compiled_plans(call)


def test_what_runs_in_eager_is_said_of_each_model_that_has_the_same_options():
    options, x = {**SHORT}, torch.randn(8, 16)
    first, second = torch.compile(Recurrent(), backend="tightship", options=options), deep(dropout=0.0)
    second.compile(backend="tightship", options=options)
    for call, name in ((first, "Recurrent|forward"), (second, "Sequential")):
        with pytest.warns(Fallback, match=f"({name}).* runs in eager"):
            call(x)


def test_a_module_of_torch_s_that_compiles_itself_says_which_call_compiles_all_of_it():
    model = deep(dropout=0.0)
    model.compile(backend="tightship", options=SHORT)
    with pytest.warns(Fallback, match=r"torch\.compile\(module, …\) of this one compiles all of it"):
        model(torch.randn(8, 16))
    torch._dynamo.reset()
    call, said = run(deep(dropout=0.0))
    assert len(compiled_plans(call)) == 1 and not said


def test_a_recurrent_model_says_which_function_and_why():
    call, (text,) = run(Recurrent(), budget="1KiB")
    assert "forward (test_torch_compile_unplanned.py:" in text and "RNN, GRU, or LSTM" in text
    assert compiled_plans(call) == ()


class Logged(Model):
    def middle(self, x):
        torch._dynamo.graph_break()
        if x.sum() > -1e9:
            print(end="")
        return x


def test_a_break_at_which_nothing_runs_is_a_note():
    call, said = run(Logged(), strict=True)
    assert said == [] and len(compiled_plans(call)) >= 2
    assert any("a graph break follows" in n for n in compiled_notes(call))


def test_a_model_compiled_whole_says_nothing():
    call, said = run(deep())
    assert said == [] and not any("runs in eager" in n for n in compiled_notes(call))


def test_a_model_that_has_not_run_says_that_nothing_is_planned():
    call = torch.compile(deep(), backend="tightship", options=dict(SHORT))
    assert any("nothing is planned" in n for n in compiled_notes(call))


def test_other_backends_are_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fallback)
        torch.compile(Loop(), backend="eager")(torch.randn(8, 16))


class Scripted(Model):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)

            def gated(x):  # one of its own, which nobody else has run
                return x * torch.sigmoid(x) * torch.tanh(x)

            self.gate = torch.jit.script(gated)

    def middle(self, x):
        return self.gate(x)


def test_torchscript_runs_at_a_graph_break():
    """Dynamo would trace what was scripted, whose gradients have other last bits from the second call on."""
    options = {"budget": "100%", **SHORT}
    gradients = []
    for planned in (False, True):
        model = Scripted()
        run = torch.compile(model, backend="tightship", options=options) if planned else model
        draw = torch.Generator().manual_seed(0)
        rows = []
        with pytest.warns(Fallback, match=r"TorchScript \(gated\)") if planned else nullcontext():
            for _ in range(4):
                run(torch.randn(8, 16, generator=draw)).square().mean().backward()
                rows += [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
        gradients.append(rows)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(compiled_plans(run)) == 2


def test_torchscript_is_refused_where_all_is_to_be_planned():
    compiled = torch.compile(
        Scripted(), backend="tightship", options={"budget": "100%", "strict": True, **SHORT}
    )
    with pytest.raises(errors.Unsupported, match="TorchScript"):
        compiled(torch.randn(8, 16)).sum().backward()


def test_seconds_bound_measuring_too():
    """Nothing is timed when there are none; what ops ask of the allocator is measured all the same."""
    compiled = torch.compile(
        deep(), backend="tightship", options={"budget": "100%", "seconds": 0.0, "cache": None}
    )
    compiled(torch.randn(8, 16)).sum().backward()
    assert any("timed in one run or none" in n for n in compiled_notes(compiled))
