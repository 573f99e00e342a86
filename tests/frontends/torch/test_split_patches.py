"""Networks patch by patch: the same results as in one piece, whichever regions in whatever number of slices."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightship.analysis.patches import Finder, Window
from tightship.errors import Unsupported, VerificationFailed
from tightship.frontends.torch import split as recording
from tightship.frontends.torch.capture.step import capture_forward
from tightship.frontends.torch.program import evaluate
from tightship.frontends.torch.split import split
from tightship.frontends.torch.split_windows import windows
from tightship.simulate import baseline, replay


def run(program, model, x):
    own = {"parameter": dict(model.named_parameters()), "buffer": dict(model.named_buffers()), "input": [x]}
    own["constant"] = program.constants
    given = {s.value: own[s.role][s.key].detach().clone() for s in program.slots}
    return evaluate(
        program.calls, program.graph.values, dict(enumerate(program.bases)), given, program.results, {}
    )


def finder_of(program):
    return Finder(program.graph, partial(windows, program))


def regions_of(program):
    """Every region between two ops, not only those at the points that the search looks at."""
    finder, n = finder_of(program), len(program.graph.ops)
    found = [finder.region(i, j) for i in range(n) for j in range(i + 2, n + 1)]
    return finder, [r for r in found if r is not None]


def randomized(model):
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(0, 0.3)
            m.running_var.uniform_(0.5, 2)
    return model.eval().double()


class Residual(nn.Module):
    def __init__(self, width, stride=1, inplace=True):
        super().__init__()
        self.up, self.down = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(3 * width, width, 1)
        self.deep = nn.Conv2d(3 * width, 3 * width, 3, stride, 1, groups=3 * width, bias=False)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(3 * width), nn.BatchNorm2d(3 * width), nn.BatchNorm2d(width)]
        )
        self.act, self.stride = nn.ReLU6(inplace=inplace), stride

    def forward(self, x):
        y = self.act(self.norms[0](self.up(x)))
        y = self.norms[2](self.down(self.act(self.norms[1](self.deep(y)))))
        return x + y if self.stride == 1 else y


class Padded(nn.Module):
    def __init__(self, pads, kernel, stride):
        super().__init__()
        self.pads, self.conv = pads, nn.Conv2d(3, 5, kernel, stride)

    def forward(self, x):
        return torch.sigmoid(self.conv(F.pad(x, self.pads))) * 2


class Branches(nn.Module):
    """Branches with windows of unlike sizes; one is read, in more rows, before it is written in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 4, 5, 1, 2),
            nn.Conv2d(4, 4, 3, 1, 2, dilation=2),
        )

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        y += 1
        return torch.cat([z, self.c(y), F.max_pool2d(y, 3, 1, 1)], 1) * torch.ones(12, 1, 1, dtype=x.dtype)


NETS = {
    "strides": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 5, 3, 2), nn.Tanh()),
    "wide padding": lambda: nn.Sequential(nn.Conv2d(3, 4, 7, 1, 6), nn.SiLU(), nn.Conv2d(4, 4, 2, 2, 1)),
    "dilated": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 1, 2, 2), nn.ELU(), nn.Conv2d(4, 4, 3, 2, 3, 3)),
    "residual": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), Residual(4), Residual(4, 2), Residual(4)),
    "not in place": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4, inplace=False), nn.Hardswish()),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.GELU(),
        nn.AvgPool2d(2, 2, 1, count_include_pad=False),
    ),
    "padded": lambda: Padded((1, 2, 3, 0), 4, 2),
    "padded below": lambda: Padded((0, 1, 0, 3), 3, 2),
    "branches": Branches,
}  # fmt: skip


@pytest.mark.parametrize("size", [(1, 3, 23, 9), (2, 3, 16, 8)], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_region_in_each_number_of_slices_gives_the_whole(name, size):
    torch.manual_seed(0)
    model, x = randomized(NETS[name]()), torch.randn(size, dtype=torch.float64)
    program = capture_forward(model, x)
    with torch.no_grad():
        want = model(x)
    _, found = regions_of(program)
    assert found
    draw = random.Random(0)
    for region in found if len(found) < 12 else draw.sample(found, 12):
        for count in sorted({2, 3, region.rows}):
            made = split(program, {}, [(region, count)]) if count <= region.rows else None
            assert made is None or torch.allclose(run(made, model, x)[0], want, rtol=1e-12, atol=1e-12)


def test_rows_in_the_layout_of_channels_last():
    torch.manual_seed(0)
    model = randomized(NETS["residual"]()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 24, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    program = capture_forward(model, x)
    _, found = regions_of(program)
    assert found
    for region in found[:: max(1, len(found) // 8)]:
        made = split(program, {}, [(region, 3)])
        with torch.no_grad():
            assert torch.allclose(run(made, model, x)[0], model(x), rtol=1e-12, atol=1e-12)


def test_sequences_are_cut_along_their_steps():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 8, 5, 2, 2), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.GELU()
    ).double()
    x = torch.randn(1, 2, 64, dtype=torch.float64)
    program = capture_forward(model, x)
    _, found = regions_of(program)
    made = split(program, {}, [(max(found, key=lambda r: len(r.ops)), 8)])
    with torch.no_grad():
        assert torch.allclose(run(made, model, x)[0], model(x), rtol=1e-12, atol=1e-12)


def test_what_the_search_promises_is_what_the_slices_need_and_compute():
    torch.manual_seed(0)
    model = randomized(NETS["residual"]())
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    program = capture_forward(model, x)
    finder = finder_of(program)
    choices = list(finder.limits(max(finder.needs) - 1))
    assert len(choices) > 2
    whole, before = sum(op.flops for op in program.graph.ops), max(finder.needs)
    for choice in choices:
        assert choice.peak < before
        before = choice.peak
        graph = split(program, {}, choice.slices).graph
        assert replay(graph, baseline(graph)).peak <= choice.peak
        copied = sum(op.flops for op in graph.ops if "copy_" in op.target or "clone" in op.target)
        made = sum(op.flops for op in graph.ops) - whole - copied
        assert 0 < choice.extra <= made * 1.2 + 1


@pytest.mark.parametrize("size", [9, 16, 23])
def test_rows_of_a_window_are_those_that_a_convolution_reads(size):
    """By what a convolution does: rows of the result that stay the same when others of the operand change."""
    draw = random.Random(size)
    for _ in range(40):
        kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)
        pad = draw.randint(0, (kernel - 1) * dilation)
        conv = nn.Conv2d(1, 1, (kernel, 1), (stride, 1), (pad, 0), (dilation, 1), bias=False).double()
        nn.init.ones_(conv.weight)
        x = torch.rand(1, 1, size, 1, dtype=torch.float64)
        with torch.no_grad():
            whole = conv(x)
        made = whole.shape[2]
        window = Window(size, made, kernel, stride, pad, pad, dilation)
        a = draw.randrange(made)
        b = draw.randint(a + 1, made)
        take = window.take((a, b))
        weight = conv.weight
        with torch.no_grad():
            part = F.conv2d(
                x[:, :, take.start : take.stop], weight, None, (stride, 1), (take.before, 0), (dilation, 1)
            )
        assert part.shape[2] == take.made
        assert torch.allclose(part[:, :, take.skip : take.skip + b - a], whole[:, :, a:b], rtol=1e-13)


# ---- what is not cut, and what is found out


class Gated(nn.Module):
    """A mean over all rows in the middle."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.b(y * y.mean((2, 3), keepdim=True))


def test_what_needs_all_rows_ends_a_region():
    program = capture_forward(Gated(), torch.randn(1, 3, 16, 16))
    _, found = regions_of(program)
    mean = next(k for k, op in enumerate(program.graph.ops) if "mean" in op.target)
    assert found
    assert all(mean not in region.ops for region in found)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ReLU()),
        nn.Sequential(nn.Softmax(dim=2), nn.LayerNorm(16)),
        nn.Sequential(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten()),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4)),
        nn.Sequential(nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1)),
    ],
    ids=lambda m: type(m[0]).__name__,
)
def test_ops_that_are_not_in_the_table_are_left_whole(model):
    program = capture_forward(model.eval(), torch.randn(1, 3, 16, 16))
    assert not regions_of(program)[1]


def test_numbers_of_slices_that_make_no_sense_are_refused():
    program = capture_forward(NETS["strides"](), torch.randn(1, 3, 24, 8))
    _, (region, *_) = regions_of(program)
    for count in (1, region.rows + 1):
        with pytest.raises(Unsupported, match=f"{count} slices"):
            split(program, {}, [(region, count)])


def test_a_window_that_is_wrong_breaks_a_rule(monkeypatch):
    """Rows one off, with as many of them as before: shapes fit, numbers would not."""
    program = capture_forward(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(1, 3, 24, 8)
    )
    _, found = regions_of(program)
    region = max(found, key=lambda r: len(r.ops))
    split(program, {}, [(region, 4)])
    take = Window.take

    def off(self, wanted):
        right = take(self, wanted)
        moved = self.kernel > 1 and right.stop < self.length
        return replace(right, start=right.start + 1, stop=right.stop + 1) if moved else right

    monkeypatch.setattr(Window, "take", off)
    with pytest.raises(VerificationFailed, match="S2"):
        split(program, {}, [(region, 4)])


@pytest.mark.parametrize("bounds", [[(0, 4), (3, 8)], [(0, 3), (4, 8)], [(0, 4), (0, 4)]], ids=str)
def test_slices_that_do_not_lie_side_by_side_break_a_rule(monkeypatch, bounds):
    program = capture_forward(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), torch.randn(1, 3, 8, 8)
    )
    _, (region, *_) = regions_of(program)
    monkeypatch.setattr(recording, "bounds_of", lambda units, slices: bounds)
    with pytest.raises(VerificationFailed, match="S1"):
        split(program, {}, [(region, 2)])


def test_rows_of_vectors_and_scalars_are_none_to_cut():
    class Weighted(nn.Module):
        def forward(self, x):
            weight = torch.ones(4).mul(2).add(1)
            return x * weight.sum().sqrt()

    program = capture_forward(Weighted(), torch.randn(2, 3, 4, 4))
    found = [windows(program, k) for k in range(len(program.graph.ops))]
    assert found[-1] is not None and not any(found[:-1])
