"""What ranks agree on before a step sends anything: the same collectives in the same order, and one plan for those
with the same ops. What a rank says of its program and plan is a `Told`; plans go from one rank to others as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tightship.analysis.bounds import lower_bound
from tightship.errors import Enough, Infeasible, Unsupported
from tightship.execute.ranks import Ranks, marked
from tightship.frontends.torch import collectives
from tightship.frontends.torch.program import Program, Ref
from tightship.graph import Graph, Request
from tightship.plan import Plan, Step
from tightship.planners.layout import lay_out
from tightship.planners.run import decision_plan
from tightship.serde import dumps_graph, dumps_plan, loads_graph, loads_plan
from tightship.simulate import replay
from tightship.verify import check

__all__ = [
    "Given",
    "Moved",
    "Told",
    "begun_alike",
    "check_orders",
    "check_plans",
    "check_sequences",
    "check_trained",
    "follow",
    "in_captured_order",
    "in_one_order",
    "leader_of",
    "other_layers",
    "read",
    "refusal",
    "told_groups",
    "told_of",
    "written",
]


class Told(NamedTuple):
    """What a rank says of its step: a digest of its ops, wherever in tensors these find their parts; the collectives
    among them (how many, and a digest of what they are, in order); the same of its plan, if it has one; a digest of
    each group of ranks that they send among, in the order in which they come up; a digest of what it trains; one of
    what its optimizer is set to; how many of its plan's collectives have run, for what its code has looked at; and
    whether it writes buffers."""

    ops: str
    calls: tuple[int, str]
    plan: tuple[int, str] | None
    groups: tuple[str, ...]
    trained: str = ""
    options: str = ""
    begun: int = 0
    writes: bool = False

    @staticmethod
    def of(row: Sequence[Any]) -> Told:
        ops, calls, plan, groups, *rest = row
        return Told(ops, tuple(calls), None if plan is None else tuple(plan), tuple(groups), *rest)


def told_of(captured: Program, plan: Plan | None = None, program: Program | None = None) -> Told:
    """``plan`` is of ``program``, which has other ops than were captured where parameters stream."""
    ops = range(len(captured.calls))
    steps = [] if plan is None else [s.op for s in plan.steps if s.kind in ("compute", "recompute")]
    groups: dict[tuple[int, ...], int] = {}
    calls = _calls(captured, ops, groups)
    planned = None if plan is None else _calls(program or captured, steps, groups)
    trained, alike = _digest(trained_by(captured)), _planned_alike(captured)
    return Told(alike, calls, planned, told_groups(groups), trained, writes=_writes_buffers(captured))


def told_groups(groups: Iterable[Iterable[int]]) -> tuple[str, ...]:
    """What a rank says of groups that it sends among."""
    return tuple(_digest(sorted(ranks)) for ranks in groups)


def _digest(row: Iterable[object]) -> str:
    return hashlib.sha256(repr([*row]).encode()).hexdigest()[:12]


def trained_by(program: Program) -> list[str]:
    """Parameters that a program writes, or whose gradients it leaves, by name."""
    graph = program.graph
    written = {s for row in graph.uses.mutates for s in row}
    found = {
        slot.key
        for slot in program.slots
        if slot.role in ("parameter", "gradient") and graph.values[slot.value].storage in written
    }
    return sorted({*found, *program.gradients})


def _writes_buffers(program: Program) -> bool:
    homes = {program.graph.values[s.value].storage for s in program.slots if s.role == "buffer"}
    return any(not homes.isdisjoint(op.mutates) for op in program.graph.ops)


def _planned_alike(captured: Program) -> str:
    """The same for programs that the same plan is for: where in a tensor each rank has its part makes no
    difference."""
    graph = captured.graph
    if not any(v.offset for v in graph.values):
        return graph.digest
    return replace(graph, values=tuple(replace(v, offset=0) if v.offset else v for v in graph.values)).digest


def _calls(program: Program, ops: Iterable[int], groups: dict[tuple[int, ...], int]) -> tuple[int, str]:
    """Ranks of one mesh send among other ranks, so a group is told by how many came up before it, and its size."""
    rows = []
    for k in ops:
        call = program.calls[k]
        if isinstance(call.fn, collectives.Collective):
            group = call.fn.group(call.args)
            among = groups.setdefault(group, len(groups)), len(group)
            rows.append(call.fn.describe(call.args, lambda a: _described(program, a), among))
    return len(rows), hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]


def _described(program: Program, argument: Any) -> Any:
    if isinstance(argument, Ref):
        value = program.graph.values[argument.value]
        storage = program.graph.storages[value.storage]
        named = storage.kind == "parameter" or storage.name.endswith(".grad")
        return value.dtype, value.shape, storage.name if named else ""
    if isinstance(argument, (list, tuple)):
        return [_described(program, a) for a in argument]
    return argument


def other_layers(told: Sequence[Any]) -> bool:
    """Whether some ranks have run layers that others have not."""
    rows = [Told.of(row) for row in told]
    return len({(row.calls, row.trained) for row in rows}) > 1


def check_sequences(ranks: Ranks, told: Sequence[Any]) -> None:
    """Raises ``PeerFailed`` where steps, or those plans that there are, would send other things on other ranks."""
    rows = [Told.of(row) for row in told]
    if len({row.calls for row in rows}) > 1:
        texts = [f"a step of {n} collectives ({digest[:8]})" for n, digest in (row.calls for row in rows)]
        what = (
            "steps that send other things (batches or models of other shapes, or code that runs other layers on "
            "some ranks: have all take the same branch, or say find_unused_parameters=True, where each rank has all "
            "parameters)"
        )
        raise ranks.differ(what, texts)
    if not _meet([row.groups for row in rows]):
        texts = [f"collectives among {len(row.groups)} groups ({_digest(row.groups)[:8]})" for row in rows]
        raise ranks.differ("steps that send among other ranks (models on other meshes)", texts)


def check_trained(ranks: Ranks, told: Sequence[Any], captured: Program) -> None:
    """Raises ``PeerFailed`` where ranks would train other parameters, or parts of these: one that a rank alone has
    frozen may be gathered and averaged as ever, and would be half trained."""
    if len({Told.of(row).trained for row in told}) == 1:
        return
    _, rows = ranks.agreed("comparing what is trained", lambda: trained_by(captured), lambda names: names)
    everywhere = set(rows[0]).intersection(*rows)
    texts = [_trained_beside(sorted({*row} - everywhere), len(row)) for row in rows]
    rule = (
        "steps that train other parameters (frozen, or given to the optimizer, on some ranks alone: have all ranks "
        "do the same)"
    )
    raise ranks.differ(rule, texts)


def _trained_beside(names: Sequence[str], count: int) -> str:
    more = ", ".join([*map(repr, names[:3]), *(["…"] if len(names) > 3 else [])])
    return f"trains {count} parameters" + (f", among them {more}" if more else "")


def begun_alike(told: Sequence[Any]) -> bool:
    """Whether steps go on from where all ranks are, by plans that send the same."""
    rows = [Told.of(row) for row in told]
    return not any(row.begun for row in rows) or len({(row.begun, row.plan) for row in rows}) == 1


def in_one_order(told: Sequence[Any]) -> bool:
    """Whether the plans of all ranks send the same in the same order."""
    return len({Told.of(row).plan for row in told}) == 1


def check_orders(ranks: Ranks, told: Sequence[Any]) -> None:
    """Raises ``PeerFailed`` where plans would send in other orders."""
    if in_one_order(told):
        return
    texts = [f"a plan of {n} collectives ({digest[:8]})" for n, digest in (row[2] for row in told)]
    rule = (
        "plans for batches of other shapes that send in another order (give all ranks batches of one shape)"
    )
    raise ranks.differ(rule, texts)


def follow(graph: Graph, text: str, limit: int | None) -> Plan:
    """For a graph of the same ops on tensors of other sizes: what another rank's plan (of `written`) does, in its
    order, with places of this rank's own. Raises ``Unsupported`` where ops differ, ``Infeasible`` beyond ``limit``
    bytes."""
    document, *_ = json.loads(text)
    plan, other = loads_plan(document.encode(), "the plan of another rank")
    assert other is not None
    if _ops_of(graph) != _ops_of(other) or any(s.kind not in _SIZELESS for s in plan.steps):
        raise Unsupported(
            "a step that runs other ops on some ranks, or on batches of other shapes by a plan that copies values,",
            "no plan sends in the order of the other ranks'", "run the same code on batches of one shape everywhere",
        )  # fmt: skip
    capacity = None if limit is None else max(limit - graph.static_bytes, 0)
    plan = replace(plan, steps=_in_places_of(graph, plan.steps))
    line, layout = replay(graph, plan.steps), lay_out(graph, plan.steps, capacity=capacity)
    needed = max(line.peak, graph.static_bytes + layout.arena + layout.handed)
    if limit is not None and needed > limit:
        bound = int(lower_bound(graph))
        raise Infeasible(budget=limit, lower_bound=bound, best_peak=line.peak, placed=needed)
    made = replace(
        decision_plan(graph, plan.steps, line, plan.planner),
        residences=layout.residences,
        arena=layout.arena,
        handed=layout.handed,
        budget=limit,
        lower_bound=int(lower_bound(graph)),
        moved=plan.moved,
    )
    check(graph, made)
    return made


def in_captured_order(program: Program) -> Program:
    """The program whose collectives run once, in the order in which its code calls them."""
    ops, last = list(program.graph.ops), -1
    for k, call in enumerate(program.calls):
        if isinstance(call.fn, collectives.Collective):
            control = ops[k].control if last < 0 else tuple(sorted({*ops[k].control, last}))
            ops[k], last = replace(ops[k], effect=True, control=control), k
    note = "ranks run other ops, or have batches of other shapes: what they send goes once, in the order of the code"
    graph = program.graph.with_ops(tuple(ops))
    return replace(program, graph=graph, notes=tuple(dict.fromkeys((*program.notes, note))))


def _in_places_of(graph: Graph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, of a graph whose results may take the places of other inputs (empty tensors have none): what this
    graph's may not take is freed behind the op."""
    now: list[int] = []  # by step, its number here
    made: list[Step] = []
    for step in steps:
        waits = tuple(now[w] for w in step.waits)
        allowed = graph.ops[step.op].overwrites if step.reuses else ()
        kept = tuple(pair for pair in step.reuses if pair in allowed)
        now.append(len(made))
        made.append(replace(step, waits=waits, reuses=kept))
        freed = tuple(a for a, b in step.reuses if (a, b) not in allowed)
        if freed:
            made.append(Step("free", storages=freed, waits=(now[-1],) if step.stream else ()))
    return tuple(made)


_SIZELESS: Final = ("compute", "recompute", "free")


def _ops_of(graph: Graph) -> list[Any]:
    """What plans go by. Which views ops read may differ: a rank's part may be less than what fills it up."""
    storages = [v.storage for v in graph.values]
    return [
        (op.name, [storages[v] for v in op.inputs], [storages[v] for v in op.outputs]) for op in graph.ops
    ]


def _meet(told: Sequence[tuple[str, ...]]) -> bool:
    """Whether the ranks of each group name this group, wherever in their order one of them does."""
    for row in zip(*told, strict=True):
        members: dict[str, list[int]] = {}
        for rank, group in enumerate(row):
            members.setdefault(group, []).append(rank)
        if any(_digest(found) != group for group, found in members.items()):
            return False
    return True


def leader_of(ranks: Ranks, told: Sequence[Any]) -> tuple[int, bool]:
    """Which rank of those that have this rank's ops plans for them: one that has a plan, if there is one; and whether
    one of them has none."""
    rows = [Told.of(row) for row in told]
    alike = [r for r, row in enumerate(rows) if row.ops == rows[ranks.rank].ops]
    having = [r for r in alike if rows[r].plan is not None]
    return (having or alike)[0], len(having) < len(alike)


class Moved(NamedTuple):
    """What of a measured program streams: its input values, and in how many pieces updates run (`Streamed`)."""

    base: Program
    values: tuple[int, ...]
    pieces: int


class Given(NamedTuple):
    """A rank's program as another has measured it, and the plan: of the program, or of what it becomes where tensors
    stream."""

    program: Program
    plan: Plan
    moved: Moved | None


def written(program: Program, plan: Plan, moved: Moved | None = None) -> str:
    """A plan with the measured graph, for ranks with the same ops."""
    row = moved and [dumps_graph(moved.base.graph).decode(), _again(moved.base), moved.values, moved.pieces]
    return json.dumps([dumps_plan(plan, program.graph).decode(), _again(program), program.notes, row])


def _again(program: Program) -> list[Any]:
    """Requests of ops that run again."""
    rows = program.replay_requests.items()
    return [[k, [[r.size, r.storage, r.start, r.end] for r in row]] for k, row in rows]


_REFUSED: Final = "refused"
_FIELDS: Final = (
    "budget",
    "lower_bound",
    "best_peak",
    "top",
    "placed",
    "at",
    "advice",
    "compiled",
    "modeled",
)


def refusal(no: Infeasible) -> str:
    """In the place of a plan: why there is none."""
    enough = [[e.nbytes, e.options] for e in no.enough]
    return _REFUSED + json.dumps([str(no), {n: getattr(no, n) for n in _FIELDS}, enough])


def check_plans(ranks: Ranks, plans: Sequence[str]) -> None:
    """Raises ``Infeasible`` where nobody has found a plan, ``PeerFailed`` where somebody has not."""
    refused = {
        r: json.loads(text.removeprefix(_REFUSED))
        for r, text in enumerate(plans)
        if text.startswith(_REFUSED)
    }
    if not refused:
        return
    if len(refused) < sum(bool(text) for text in plans):
        raise ranks.differ(
            "planning", [refused[r][0] if r in refused else "a plan was found" for r in range(ranks.size)]
        )
    _, fields, enough = next(iter(refused.values()))
    found = [Enough(nbytes, tuple((n, x) for n, x in options)) for nbytes, options in enough]
    raise marked(Infeasible(**fields, enough=found))


def read(captured: Program, text: str) -> Given:
    """What `written` has made, which is verified before it runs."""
    document, again, notes, row = json.loads(text)
    plan, graph = loads_plan(document.encode(), "the plan of another rank")
    assert graph is not None
    if row is None:
        program = replace(_measured_as(captured, graph, again), notes=tuple(notes))
        return Given(program, replace(plan, digest=program.graph.digest), None)
    base = _measured_as(captured, loads_graph(row[0].encode(), "the graph of another rank"), row[1])
    return Given(replace(base, notes=tuple(notes)), plan, Moved(base, tuple(row[2]), row[3]))


def _measured_as(captured: Program, graph: Graph, again: Any) -> Program:
    requests = {k: tuple(Request(*r) for r in row) for k, row in again}
    return replace(captured, graph=replace(graph, values=captured.graph.values), replay_requests=requests)
