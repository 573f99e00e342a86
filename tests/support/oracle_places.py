"""Where a plan says that bytes lie, judged by the definitions in `tightship.plan`; a part of the oracle.

Steps are right when this is asked. Shares no code with the verifier, and is written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tightship.graph import Graph, Op
from tightship.plan import Plan, Residence

__all__ = ["faults_of_places"]


def faults_of_places(
    graph: Graph, plan: Plan, before: list[int], inside: Callable[[Graph], int]
) -> list[str]:
    """``before``: of each step, a bit set of those that have ended when it begins. ``inside``: what a called graph
    needs beyond its inputs."""
    if not plan.residences:
        stated = [n for n in ("arena", "handed") if getattr(plan, n)]
        return [f"{n} without any residence" for n in stated]
    stays = _stays(graph, plan)
    return [
        *_homes(graph, plan, stays), *_workspace(graph, plan, inside), *_bounds(graph, plan),
        *_shared(graph, plan, stays, before),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Stay:
    """Of a form: until which step, of how many bytes, and the step after which they may be another's."""

    end: int
    size: int
    released: int


Key = tuple[str, int, int]  # form, storage (of a state: op), first step


def _stays(graph: Graph, plan: Plan) -> dict[Key, _Stay]:
    steps, stays = plan.steps, dict[Key, _Stay]()
    since: dict[tuple[str, int], tuple[int, int]] = {}
    home = [v.storage for v in graph.values]
    there = {home[v] for v in graph.inputs}

    def end(form: str, s: int, i: int) -> None:
        start, size = since.pop((form, s))
        stays[form, s, start] = _Stay(i, size, i)

    for i, step in enumerate(steps):
        if step.kind == "free":
            for s in (step.op,) if step.form == "state" else step.storages:
                end(step.form, s, i)
        elif step.kind in ("compute", "recompute"):
            op, again = graph.ops[step.op], step.kind == "recompute"
            for old, _ in step.reuses:
                end("full", old, i)
            if step.saves:
                since["state", step.op] = (i, op.state)
            elif again and op.state:  # the present one, set aside
                stays["state", step.op, i] = _Stay(i + 1, op.state, i)
            for s in _made(graph, op, home, there if not again else set()):
                if again and s not in step.storages:
                    stays["full", s, i] = _Stay(i + 1, graph.storages[s].size, i)
                else:
                    since["full", s] = (i, graph.storages[s].size)
            there |= {home[v] for v in op.outputs}
        else:
            form = {"offload": "host", "compress": "packed"}.get(step.kind, "full")
            for s in step.storages:
                since[form, s] = (i, step.nbytes if form == "packed" else graph.storages[s].size)
    for form, s in [*since]:
        end(form, s, len(steps))
    return stays


def _made(graph: Graph, op: Op, home: list[int], there: set[int]) -> list[int]:
    old = {home[v] for v in op.inputs} | set(op.mutates) | {home[v] for v in graph.inputs} | there
    return [s for s in dict.fromkeys(home[v] for v in op.outputs) if s not in old]


def _key(r: Residence) -> Key:
    return r.form, r.request if r.form == "state" else r.storage, r.start


def _unit(graph: Graph) -> int:
    return 512 if any(op.device.startswith("cuda") for op in graph.ops) else 64


def _homes(graph: Graph, plan: Plan, stays: dict[Key, _Stay]) -> list[str]:
    """Each form has one place for as long as it is there, and nothing else has one."""
    wrong, left = [], dict(stays)
    results = {graph.values[v].storage for v in graph.outputs}
    for r in plan.residences:
        if r.storage == -1 and r.form != "state":
            continue
        stay = left.pop(_key(r), None)
        if stay is None or r.end != stay.end:
            wrong.append(f"{r.form} of {r.storage} is not there in [{r.start}, {r.end})")
            continue
        if not stay.size <= r.size < stay.size + _unit(graph):
            wrong.append(f"{r.form} of {r.storage} has {stay.size} bytes, not {r.size}")
        pools = {"device"} if r.storage < 0 else {"device", graph.storages[r.storage].pool}
        if r.form == "full" and r.storage in results and r.end == len(plan.steps):
            pools |= {"out"}
        if r.pool not in ({"host"} if r.form == "host" else pools):
            wrong.append(f"{r.form} of {r.storage} cannot lie in {r.pool}")
        if r.last != -1 or r.first < -1 or (r.first >= 0 and not _asked(graph, plan, r)):
            wrong.append(
                f"{r.form} of {r.storage} is taken after it is asked for, or given back within a step"
            )
        if r.request != -1 and r.form != "state":
            wrong.append(f"{r.form} of {r.storage} is no request")
    wrong += [f"{form} of {s} has no place from {start} on" for (form, s, start), x in left.items() if x.size]
    return wrong


def _asked(graph: Graph, plan: Plan, r: Residence) -> bool:
    """Whether its op asks for these bytes at event ``first`` or later."""
    step = plan.steps[r.start]
    if step.kind not in ("compute", "recompute") or r.form != "full":
        return False
    op, home = graph.ops[step.op], [v.storage for v in graph.values]
    made = _made(graph, op, home, set())
    asked = [
        q.start for q in op.requests if q.storage >= 0 and made[q.storage : q.storage + 1] == [r.storage]
    ]
    return bool(asked) and r.first <= min(asked)


def _workspace(graph: Graph, plan: Plan, inside: Callable[[Graph], int]) -> list[str]:
    """What an op needs while it runs has a place: its requests one by one, or all as one block."""
    wrong, rows = [], dict[int, list[Residence]]()
    for r in plan.residences:
        if r.storage == -1 and r.form != "state":
            rows.setdefault(r.start, []).append(r)
    for i, step in enumerate(plan.steps):
        mine = rows.pop(i, [])
        if step.kind not in ("compute", "recompute"):
            wrong += [f"no op runs at step {i}" for _ in mine]
            continue
        op = graph.ops[step.op]
        called = max((inside(g) for g in op.calls), default=0)
        parts = {j for j, q in enumerate(op.requests) if q.storage < 0 and q.size}
        wrong += [f"step {i} needs no request {r.request} so" for r in mine if not _right_request(op, r)]
        blocks = [r for r in mine if r.request == -1]
        placed = [r.request for r in mine if r.request >= 0]
        whole = bool(op.requests) and parts <= set(placed)
        need = called if whole else called + op.workspace
        if len(blocks) > 1 or len(placed) != len(set(placed)):
            wrong.append(f"step {i} has two places for one need")
        if sum(r.size for r in blocks) < need:
            wrong.append(f"step {i} has no place for {need} bytes while it runs")
    wrong += [f"there is no step {i}" for i in rows]
    return wrong


def _right_request(op: Op, r: Residence) -> bool:
    if r.end != r.start + 1 or r.form != "full" or r.pool == "out" or r.request < -1:
        return False
    if r.request == -1:
        return (r.first, r.last) == (-1, -1)
    if r.request >= len(op.requests) or op.requests[r.request].storage >= 0:
        return False
    q = op.requests[r.request]
    return r.size >= q.size and -1 <= r.first <= q.start and (r.last == -1 or r.last >= q.end >= 0)


def _bounds(graph: Graph, plan: Plan) -> list[str]:
    wrong = []
    handed = sum(r.size for r in plan.residences if r.pool == "out")
    if handed != plan.handed:
        wrong.append(f"{plan.handed} bytes are said to be handed out, not {handed}")
    for r in plan.residences:
        if r.pool == "out" or not r.size:  # it lies where the caller's allocator puts it
            continue
        top = {"device": plan.arena, "host": plan.host}.get(r.pool)
        if r.offset < 0 or (top is not None and r.offset + r.size > top):
            wrong.append(f"storage {r.storage} lies outside of its pool")
        if r.offset % _unit(graph):
            wrong.append(f"storage {r.storage} lies at {r.offset}")
    return wrong


def _shared(graph: Graph, plan: Plan, stays: dict[Key, _Stay], before: list[int]) -> list[str]:
    """Bytes are one residence's at a time, and another's when the step that let go of them has surely ended. A result
    that takes the place of an input lies exactly there."""
    wrong = []
    taken = {(old, new, i) for i, step in enumerate(plan.steps) for old, new in step.reuses}
    rows = [r for r in plan.residences if r.size and r.pool != "out"]
    for a, b in _meeting(rows):
        if _at_one_time(a, b):
            wrong.append(f"storages {a.storage} and {b.storage} share bytes of {a.pool}")
            continue
        one, two = (a, b) if (a.start, a.first) <= (b.start, b.first) and a.end <= b.end else (b, a)
        stay = stays.get(_key(one))
        released = one.start if stay is None or (one.storage == -1 and one.form != "state") else stay.released
        if released != two.start and released < len(plan.steps) and not before[two.start] >> released & 1:
            wrong.append(f"step {released} may still use what step {two.start} takes")
    begun = {(r.storage, r.start): r for r in plan.residences if r.form == "full"}
    ended = {(r.storage, r.end): r for r in plan.residences if r.form == "full"}
    for old, new, i in taken:
        a, b = ended.get((old, i)), begun.get((new, i))
        if (
            a
            and b
            and replace(a, storage=0, start=0, end=0, first=-1) != replace(b, storage=0, start=0, end=0)
        ):
            wrong.append(f"storage {new} does not lie where {old} was")
    return wrong


def _meeting(rows: list[Residence]) -> Iterable[tuple[Residence, Residence]]:
    for i, a in enumerate(rows):
        for b in rows[:i]:
            if a.pool == b.pool and a.offset < b.offset + b.size and b.offset < a.offset + a.size:
                yield b, a


def _at_one_time(a: Residence, b: Residence) -> bool:
    """Within one step, events order what is taken and given back; both with the step itself meet."""

    def times(r: Residence) -> tuple[tuple[int, int], tuple[int, int]]:
        return (r.start, max(r.first, 0)), (r.end - 1, r.last) if r.last >= 0 else (r.end, 0)

    (a0, a1), (b0, b1) = times(a), times(b)
    return max(a0, b0) < min(a1, b1)
