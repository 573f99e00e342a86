"""Rematerialization as XLA does it, against what XLA did: the same instructions, the same peaks."""

import lzma
import re
from dataclasses import replace

import pytest

from support import hlo_data
from support.hlo_made import deep_module
from support.hlo_small import CHAIN, LOOP, K, module, same_results
from support.xla_trackers import faults
from tightship.baselines import xla_remat
from tightship.baselines.xla_body import Body, Tracker
from tightship.errors import BadInput
from tightship.hlo import Module, parse, to_text
from tightship.hlo.module import Names
from tightship.hlo.remat.as_plan import as_plan
from tightship.hlo.remat.instructions import suffixed
from tightship.hlo.remat.lower import bounds, repeatable
from tightship.hlo.remat.peak import module_peak, peaks, result_bytes, sequential_order
from tightship.verify import verify

MIB = 2**20


class Logged:
    """What XLA's log says it did."""

    def __init__(self, name: str) -> None:
        text = hlo_data.log(name)
        self.chosen = tuple(re.findall(r"recomputation: \{([^}]*)\}", text))
        self.limit = float(re.search(r"memory limit of ([\d.]+)MiB", text)[1])  # type: ignore[index]
        now = re.search(r"module now .*\((\d+) bytes\), was .*\((\d+) bytes\)", text)
        self.after, self.before = int(now[1]), int(now[2])  # type: ignore[index]
        self.added = int(re.findall(r"(\d+) net instructions added", text)[-1])


@pytest.fixture(scope="module", params=hlo_data.GPU)
def case(request: pytest.FixtureRequest) -> tuple[Module, Module, Logged, xla_remat.Result]:
    name = request.param
    before, after = hlo_data.module(name, hlo_data.BEFORE), hlo_data.module(name, hlo_data.AFTER)
    logged = Logged(name)
    return before, after, logged, xla_remat.plan(before, int(logged.limit * MIB))


class TestXlasOwnModules:
    def test_recomputes_the_same_instructions_in_the_same_order(self, case) -> None:
        assert case[3].recomputed == case[2].chosen

    def test_starts_from_xlas_peak_and_ends_at_xlas_peak(self, case) -> None:
        _, _, logged, made = case
        assert (made.peak_before, made.peak_after) == (logged.before, logged.after)
        assert made.met == (logged.after <= logged.limit * MIB)

    def test_adds_as_many_instructions(self, case) -> None:
        assert case[3].added == case[2].added

    def test_what_is_written_needs_what_xlas_module_needs(self, case) -> None:
        _, after, _, made = case
        assert module_peak(made.module) == module_peak(after)

    def test_the_schedule_is_xlas(self, case) -> None:
        _, after, _, made = case

        def of(m: Module) -> list[object]:
            return [(i.name, i.opcode, i.operands, str(i.shape)) for i in m.entry.instructions]

        assert of(made.module) == of(after)

    def test_text_can_be_read_again(self, case) -> None:
        made = case[3].module
        assert parse(to_text(made)) == made


def test_R01_results_are_charged_when_an_instruction_begins_and_operands_released_when_it_ends() -> None:  # noqa: N802
    m = module(CHAIN)
    body = Body(m.entry, Names(()))
    tracker = Tracker(m, body)
    during, after = {}, {}
    for node in body:
        tracker.begin(node)
        during[node.name] = tracker.use
        tracker.end()
        after[node.name] = tracker.use
    assert (during["a"], after["a"]) == (K, K)
    assert (during["c"], after["c"]) == (3 * K, 2 * K)
    assert after["zero"] == 0  # nobody uses it


def test_R02_a_buffer_is_reached_through_every_alias() -> None:  # noqa: N802
    m = module("""ENTRY %main (p: f32[512,512]) -> f32[512,512] {
  %p = f32[512,512]{1,0} parameter(0)
  %a = f32[512,512]{1,0} tanh(%p)
  %flat = f32[262144]{0} bitcast(%a)
  %b = f32[262144]{0} negate(%flat)
  %back = f32[512,512]{1,0} bitcast(%b)
  ROOT %c = f32[512,512]{1,0} negate(%back)
}
""")
    assert module_peak(m) == 3 * K  # a and b at b, the result throughout; a is gone at c


def test_R03_parameters_and_results_belong_to_the_caller() -> None:  # noqa: N802
    m = module("ENTRY %main (p: f32[512,512]) -> f32[512,512] {\n  %p = f32[512,512]{1,0} parameter(0)\n"
               "  ROOT %a = f32[512,512]{1,0} tanh(%p)\n}\n")  # fmt: skip
    assert peaks(m)["main"] == 0
    assert result_bytes(m) == module_peak(m) == K


def test_R04_a_loop_makes_no_buffer() -> None:  # noqa: N802
    m = module(LOOP)
    body = Body(m.entry, Names(()))
    tracker = Tracker(m, body)
    assert tracker.made(body.by_name["loop"]) == 0
    (k,) = (k for k in body.by_name["a"].defined)
    assert tracker.buffers[k].indirect
    assert body.by_name["row"] in {use.node for use in tracker.buffers[k].users}


def test_R05_recomputes_at_the_instruction_that_is_over_the_limit() -> None:  # noqa: N802
    m = module(CHAIN)
    assert xla_remat.plan(m, 3 * K + 4).recomputed == ()
    made = xla_remat.plan(m, 3 * K)
    assert (made.peak_before, made.peak_after, made.recomputed) == (3 * K + 4, 2 * K + 4, ("a",))


@pytest.mark.parametrize("opcode", ["custom-call", "all-reduce", "rng", "parameter", "constant", "while"])
def test_R06_some_instructions_are_never_repeated(opcode: str) -> None:  # noqa: N802
    i = replace(module(CHAIN).entry.by_name["a"], opcode=opcode)
    assert not repeatable(module(CHAIN), i)


def test_R06_a_copy_that_changes_no_layout_is_never_repeated() -> None:  # noqa: N802
    for layout, count in (("1,0", 0), ("0,1", 1)):
        m = module(
            CHAIN.replace("tanh(%p)", "copy(%p)").replace(
                "%a = f32[512,512]{1,0}", f"%a = f32[512,512]{{{layout}}}"
            )
        )
        assert len(xla_remat.plan(m, 2 * K + 4).recomputed) == count


def test_R07_R09_R10_the_gain_is_what_is_live_and_the_clone_goes_before_the_next_use() -> None:  # noqa: N802
    m = module(CHAIN)
    made = xla_remat.plan(m, 2 * K + 4)
    assert made.recomputed == ("a",)
    names = [i.name for i in made.module.entry.instructions]
    assert "a" not in names  # nobody had used it: a move
    assert names.index("d") < names.index("a.remat") < names.index("e")
    assert made.added == 0
    assert same_results(m, made.module)


def test_R08_an_operand_is_free_when_its_producer_is_in_the_group() -> None:  # noqa: N802
    text = CHAIN.replace("tanh(%p)", "tanh(%q)").replace(
        "  %a =", "  %q = f32[512,512]{1,0} sine(%p)\n  %a ="
    )
    m = module(text)
    assert xla_remat.plan(m, 2 * K + 4).recomputed == ()  # alone, a's dead operand costs what a gains
    assert xla_remat.plan(m, 2 * K + 4, xla_remat.Options(block=2, effort=10)).recomputed == ("q", "a")


def test_R10_names_of_clones_count_up() -> None:  # noqa: N802
    assert suffixed("a") == "a.remat"
    assert suffixed("a.remat") == "a.remat2"
    assert suffixed("a.remat2") == "a.remat3"
    assert suffixed("a.rematx") == "a.rematx.remat"


def test_R11_control_dependencies_are_kept() -> None:  # noqa: N802
    tied = CHAIN.replace("exponential(%p)", "exponential(%p), control-predecessors={%a}")
    made = xla_remat.plan(module(tied), 2 * K + 4)
    assert made.recomputed == ()  # its control successor has run
    assert parse(to_text(made.module)).entry.by_name["b"].control_predecessors == ("a",)


def test_R14_a_called_computation_has_the_limit_less_what_is_live_at_the_call() -> None:  # noqa: N802
    m = module(LOOP)
    order = sequential_order(m)
    assert order.index("body") < order.index("main")
    tables = 4 + 2 * 8  # the constant and the tuple's addresses
    assert peaks(m)["main"] == K + tables + peaks(m)["body"] + peaks(m)["test"]
    limit = module_peak(m) - K + 64
    made = xla_remat.plan(m, limit)
    assert made.recomputed == ("u",)
    assert made.met
    assert "u.remat" in {i.name for i in made.module.by_name["body"].instructions}
    assert same_results(m, made.module)


def test_R15_says_when_the_limit_was_not_reached() -> None:  # noqa: N802
    made = xla_remat.plan(module(CHAIN), 1)
    assert not made.met
    assert made.peak_after == module_peak(made.module) <= made.peak_before


@pytest.mark.parametrize("name", hlo_data.CPU[1:4])
def test_R16_the_books_are_right_after_every_step(name: str) -> None:  # noqa: N802
    m = hlo_data.module(name)
    walk = xla_remat._Walk(xla_remat._Run(m, xla_remat.Options()), m.entry, int(0.7 * peaks(m)[m.entry.name]))
    recompute, steps = walk._recompute, []

    def checked(node: object) -> None:
        recompute(node)  # type: ignore[arg-type]
        steps.append(faults(walk.tracker))

    walk._recompute = checked  # type: ignore[method-assign,assignment]
    walk.run()
    assert steps
    assert not any(steps)


def test_a_module_without_a_schedule_is_refused() -> None:
    with pytest.raises(BadInput, match="schedule"):
        xla_remat.plan(module(CHAIN, "HloModule m\n\n"), 1)


def test_jaxlib_reads_the_result_and_accepts_its_schedule(case) -> None:
    hlo = pytest.importorskip("jaxlib._hlo", reason="jaxlib is not installed")
    hlo.hlo_module_from_text(to_text(case[3].module)).schedule().verify()


def test_R15_a_module_with_a_dead_instruction_is_verified() -> None:  # noqa: N802
    m = parse(
        "HloModule m, is_scheduled=true\n\nENTRY e {\n  p = f32[1024] parameter(0)\n  a = f32[1024] negate(p)\n"
        "  d = f32[1024] exponential(a)\n  b = f32[1024] cosine(p)\n  c = f32[1024] add(a, b)\n"
        "  g = f32[1024] multiply(c, a)\n  ROOT r = f32[1024] negate(g)\n}\n"
    )
    made = xla_remat.plan(m, int(0.7 * module_peak(m)))
    assert "d" not in made.module.entry.by_name
    graph, plan = as_plan(m, made, "xla")
    assert "d" not in {op.name for op in graph.ops} and plan.steps


def live_module(instructions: int, seed: int) -> str:
    """One whose backward chain is used; that of ``deep_module`` is dead, all of it."""
    dead, live = "subtract(%w0, %w0)", "dot(%g0, %a0), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    text = deep_module(instructions, seed)
    assert dead in text
    return text.replace(dead, live)


def small(name: str) -> str:
    return lzma.decompress((hlo_data.FOLDER / "small" / f"{name}.txt.xz").read_bytes()).decode()


IN_PLACE = """HloModule m, is_scheduled=true

ENTRY e {
  p = f32[1024] parameter(0)
  a = f32[1024] negate(p)
  b = f32[1024] exponential(a)
  q = f32[1024] add(a, b)
  c = (f32[1024], s32[]) custom-call(a), custom_call_target="sort", output_to_operand_aliasing={{0}: (0, {})}
  c0 = f32[1024] get-tuple-element(c), index=0
  d = f32[1024] cosine(c0)
  h = f32[1024] sine(d)
  i = f32[1024] add(h, q)
  j = f32[1024] multiply(b, i)
  k = f32[1024] multiply(j, c0)
  ROOT r = f32[1024] negate(k)
}
"""
MADE = {
    "dead": deep_module(40, 0),
    "dead, larger": deep_module(150, 2),
    "live": live_module(40, 0),
    "live, other sizes": live_module(48, 1),
    "in place": IN_PLACE,
    "gpu_chol_grad": small("gpu_chol_grad"),
    "gpu_moe": small("gpu_moe"),
}


@pytest.mark.parametrize(
    "allow", ["recompute", "compress,recompute", "offload", "recompute,compress,offload"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "dead, larger" else n for n in MADE]
)
def test_every_choice_of_options_gives_a_verified_plan(name: str, allow: str) -> None:
    m = parse(MADE[name])
    before, least = module_peak(m), bounds(m, tuple(allow.split(",")))
    for block, effort in ((1, 1), (3, 2), (8, 4)):
        for share in (0, 50, 85):
            made = xla_remat.plan(m, before * share // 100, xla_remat.Options(block, effort, allow))
            graph, plan = as_plan(m, made, "xla", least)
            assert verify(graph, plan) == [] and least[m.entry.name] <= plan.peak


def test_a_clone_reads_and_makes_nothing_that_has_been_written_over() -> None:
    m = parse(IN_PLACE)
    for block in (1, 3, 8):
        made = xla_remat.plan(m, 0, xla_remat.Options(block, 4))
        again = {made.origin.get(name, name) for name in made.recomputed}
        assert not again & {"a", "b", "q", "c"}
        (written,) = [i for i in made.module.entry.instructions if i.opcode == "custom-call"]
        assert made.module.entry.by_name["k"].operands[1] == "c0" and written.operands == ("a",)


def test_a_bound_is_none_of_what_is_dead() -> None:
    m = parse(MADE["dead"])
    made = xla_remat.plan(m, 0)
    assert len(made.module.entry.instructions) < len(m.entry.instructions)
    assert bounds(m)[m.entry.name] <= module_peak(made.module) - result_bytes(m)
