"""Compiled mode: C++ kernels are built several in one translation unit, and compute what each by itself does."""

import threading

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

from support.compiled import numbers
from tightship.frontends.torch import compat_inductor_units as units
from tightship.integrations.torch_compile import compiled_plans

pytestmark = [
    pytest.mark.filterwarnings("error::tightship.execute.interpreter.PeakMismatch"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

PLAIN = (
    '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C"  void  kernel(float* x)\n{\n    x[0] = 1;\n}\n'
)


class Scaled(nn.Module):
    """Matrix products, each with a kernel of its own before the next one."""

    def __init__(self, layers=9):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(layers))

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = torch.sin(layer(x) * (1.25 + k))
        return x


@pytest.fixture
def built(monkeypatch):
    """How many kernels each translation unit has that is built, or found built."""
    found, load = [], CppPythonBindingsCodeCache.load_async

    def counted(text, *args, **kwargs):
        found.append(text.count('extern "C" void kernel_') or 1)
        return load(text, *args, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", counted)
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    return found


def gradients(model, backend, **options):
    torch._dynamo.reset()
    call = torch.compile(model, backend=backend, dynamic=False, **options)
    model.zero_grad()
    loss = call(numbers(16, 24)).square().mean()
    loss.backward()
    return call, [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def ours(model):
    call, found = gradients(model, "tightship", options={"mode": "compiled", "strict": True, "cache": None})
    assert all(g.last.measured_peak == g.last.planned_peak for g in compiled_plans(call))
    return found


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_share_translation_units_and_keep_their_bits(processes, built):
    model = Scaled()
    before = vars(AsyncCompile)["cpp_pybinding"], vars(AsyncCompile)["wait"]
    with torch._inductor.config.patch(compile_threads=processes):
        found = ours(model)
        together = list(built)
        built.clear()
        _, reference = gradients(model, "inductor")
    assert (vars(AsyncCompile)["cpp_pybinding"], vars(AsyncCompile)["wait"]) == before
    assert set(built) == {1} and sum(together) == len(built)
    assert len(together) <= 2 * processes < len(built) / 4  # two passes
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def test_a_unit_has_no_more_kernels_than_a_compiler_has_memory_for(built, monkeypatch):
    monkeypatch.setattr(units, "MOST", 5)
    with torch._inductor.config.patch(compile_threads=1):
        ours(Scaled())
    assert max(built) == 5 and len(built) >= 4


def test_what_is_not_one_function_is_built_by_itself(built, monkeypatch):
    of, texts = units._Kernel.of, []

    def every_other(types, text):
        texts.append(text)
        return None if len(texts) % 2 else of(types, text)

    monkeypatch.setattr(units._Kernel, "of", every_other)
    model = Scaled()
    with torch._inductor.config.patch(compile_threads=1):
        found = ours(model)
    assert sum(built) == len(texts) and built.count(1) >= len(texts) // 2
    _, reference = gradients(model, "inductor")
    assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def test_equal_kernels_are_built_once(built):
    class Twice(nn.Module):
        def forward(self, x):
            return torch.sin(x) @ torch.ones(24, 24), x

    calls = [torch.compile(Twice(), backend="tightship", options={"mode": "compiled", "cache": None})] * 2
    for call in calls:
        call(numbers(16, 24))
    assert len(built) == 1


def test_what_another_thread_compiles_meanwhile_is_as_inductor_builds_it(built):
    text = PLAIN.replace("x[0] = 1", "x[0] = 41")

    def build():
        with torch._inductor.config.patch(compile_threads=1):
            AsyncCompile().cpp_pybinding(["float*"], text)(x)

    x = torch.zeros(1)
    with units.several_kernels_a_unit():
        other = threading.Thread(target=build)
        other.start()
        other.join()
    assert built == [1] and x.item() == 41


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        pytest.param(PLAIN, True, id="one function"),
        pytest.param(PLAIN.replace("1;", '1; TORCH_CHECK(x, "a {} b");'), True, id="braces in pairs"),
        pytest.param(PLAIN + "static int more;\n", False, id="something behind it"),
        pytest.param(PLAIN.replace("extern", "inline int f() { return 1; }\nextern"), False, id="a helper before it"),
        pytest.param(PLAIN.replace("#include", "#define X 1\n#include"), False, id="a macro"),
        pytest.param(PLAIN.replace("1;", "1; kernel(x);"), False, id="its own name inside"),
        pytest.param(PLAIN.replace("kernel", "another"), False, id="another name"),
        pytest.param(PLAIN.replace("}", ""), False, id="no end"),
        pytest.param(PLAIN.partition("{")[0], False, id="no body"),
        pytest.param("", False, id="nothing"),
    ],
)  # fmt: skip
def test_only_a_text_that_is_one_function_shares_a_unit(text, fits):
    assert (units._Kernel.of(["float*"], text) is not None) == fits


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_the_compiler_says_of_a_unit_is_the_error(processes, built, monkeypatch):
    monkeypatch.setattr(units, "_CALL", units._CALL + "no C++ at all")
    with (
        torch._inductor.config.patch(compile_threads=processes),
        pytest.raises(Exception, match=r"(?i)c\+\+ compile error"),
    ):
        ours(Scaled(2))
