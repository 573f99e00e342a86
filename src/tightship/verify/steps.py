"""Replay a plan's steps and note every rule they break; the result says which residences they imply and the peak.

A wrong step is noted and then taken for what it most likely meant, so that one mistake gives few violations.

Which ops have effects is told by their names alone, since what a graph says of its ops comes from those who plan with
it: names are HLO's opcodes, jax's primitives (with underscores for hyphens) and PyTorch's ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tightship.cached import cached_property
from tightship.graph import Graph
from tightship.machine import LOSSY
from tightship.plan import FORMS, KINDS, Plan, Step
from tightship.verify.codecs import Codecs
from tightship.verify.facts import Facts, Ledger, place_of
from tightship.verify.lanes import MAX_STREAMS, Clocks, Lanes

__all__ = ["COPIES", "ImpliedResidence", "Inspection", "Replay", "has_effects"]


_BETWEEN_RANKS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter", "psum", "pmax", "pmin", "ppermute", "pbroadcast", "pgather",
)  # fmt: skip
_WITH_THE_HOST = ("infeed", "outfeed", "send", "recv", "after-all")
_HALVES = ("async", "copy")
"""Ops only by what follows their names: ``-start``, ``-update``, ``-done``."""
_DRAWS = ("rng", "rng-get-and-update-state")
_PARTS = ("-start", "-update", "-done")
_NAMESPACES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_REPEATED = ("_c10d_functional.all_gather_into_tensor.", "_c10d_functional.all_gather_into_tensor_coalesced.")
"""Change nothing, so that all ranks may run them again; a graph says whether they do."""
_BESIDE = ("_c10d_functional.all_gather_into_tensor.default", "tightship.fetch", "tightship.store")


@lru_cache(maxsize=1 << 12)
def has_effects(target: str) -> bool:
    """Whether an op of this name is noticed by other ranks, the host or a later draw, or is half of a pair."""
    if target.startswith(_NAMESPACES):
        return not target.startswith(_REPEATED)
    name = target.replace("_", "-")
    whole = name
    for part in _PARTS:
        whole = whole.removesuffix(part)
    if whole != name and whole in _HALVES:
        return True
    return whole in _BETWEEN_RANKS or whole in _WITH_THE_HOST or name in _DRAWS


def runs_beside(target: str) -> bool:
    """Whether an op of this name may run on another stream than 0: it gathers parts of several ranks by itself, or
    copies what streams from or to the host."""
    return target.endswith(_BESIDE)


COPIES = {
    "offload": ("full", "host"),
    "fetch": ("host", "full"),
    "compress": ("full", "packed"),
    "decompress": ("packed", "full"),
}
"""By kind of step: the form that is read, and the one that is made of it."""


class ImpliedResidence(NamedTuple):
    """A form of a storage is resident in steps ``[start, end)`` and is ended by step ``released``. In the form
    ``state``, ``storage`` is the op whose random state it is."""

    storage: int
    form: str
    start: int
    end: int
    size: int
    released: int


@dataclass(slots=True)
class _Copy:
    """A resident form: since which step, with the contents after how many writes, in how many bytes."""

    start: int
    version: int
    size: int


class Replay:
    """``implied`` are the residences that the steps imply, ``ran`` (step, op) all op runs, ``took`` (step, storage,
    the one whose place it takes), ``peak`` bytes with the static set, ``host_peak`` bytes offloaded."""

    def __init__(
        self,
        graph: Graph,
        facts: Facts,
        steps: Sequence[Step],
        clocks: Clocks,
        ledger: Ledger,
        lossy: bool = False,
    ) -> None:
        self.graph, self.facts, self.steps, self.clocks = graph, facts, steps, clocks
        self.lossy = lossy
        self.note = ledger.add
        self.lanes = Lanes(clocks, steps)
        self.implied: list[ImpliedResidence] = []
        self.ran: list[tuple[int, int]] = []
        self.took: list[tuple[int, int, int]] = []
        self.live = self.peak = facts.static_bytes
        self.host_live = self.host_peak = 0
        self._at: dict[int, int] = {}  # op -> the step that computed it
        self._written = [0] * len(graph.storages)  # writes by first runs so far
        self._random = (-1, -1)  # (op, step) of the last random op in the graph's order
        self._forms: dict[str, dict[int, _Copy]] = {form: {} for form in FORMS}
        for s in facts.static:
            self._forms["full"][s] = _Copy(-1, 0, graph.storages[s].size)

    def run(self) -> None:
        for i, step in enumerate(self.steps):
            self._waits(i, step)
            level = self.live
            if step.kind in ("compute", "recompute"):
                level = self._op(i, step)
            elif step.kind in COPIES:
                self._copy(i, step)
            elif step.kind == "free":
                self._free(i, step)
            else:
                self.note("unknown", i, (str(step.kind),), f"a step's kind is one of {', '.join(KINDS)}")
            if level > self.peak or self.live > self.peak:
                self.peak = max(level, self.live)
        self._end()

    def _waits(self, i: int, step: Step) -> None:
        for w in step.waits:
            if not 0 <= w < i:
                self.note("unknown", i, (str(w),), f"waits for step {w}, which does not come earlier")
        if step.stream < 0 or (i == 0 and self.clocks.too_many):
            self.note(
                "unknown", i, (str(step.stream),), f"a plan has streams from 0 on, at most {MAX_STREAMS}"
            )

    def _name(self, s: int, form: str = "full") -> str:
        return self.graph.ops[s].name if form == "state" else self.graph.storages[s].name

    def _valid(self, i: int, s: int) -> bool:
        if 0 <= s < len(self.graph.storages):
            return True
        self.note("unknown", i, (str(s),), f"there is no storage {s}")
        return False

    # Ops

    def _op(self, i: int, step: Step) -> int:
        """Returns the bytes in use while the op runs."""
        k = step.op
        if not 0 <= k < len(self.graph.ops):
            self.note("unknown", i, (str(k),), f"there is no op {k}")
            return self.live
        op, again = self.graph.ops[k], step.kind == "recompute"
        if step.stream and not runs_beside(op.target):
            self.note(
                "lane",
                i,
                (op.name,),
                f"{place_of(op)} runs on stream {step.stream}, and only gathers and copies may",
            )
        if again and k not in self._at:
            self.note("impure-recompute", i, (op.name,), f"{place_of(op)} is recomputed but has not run yet")
            return self.live
        if not again and k in self._at:
            self.note(
                "repeated-op", i, (op.name,), f"{place_of(op)} was already computed at step {self._at[k]}"
            )
            return self.live
        if again:
            self._pure(i, k)
        else:
            self._order(i, k)
            self._at[k] = i
        skip = frozenset(op.updates) if again else frozenset()
        self._reads(i, k, again, skip)
        self._writes(i, k, again, skip)
        defined = self.facts.makes[k]
        state = op.state if step.saves or again else 0
        need = sum([self.graph.storages[s].size for s in defined]) + self.facts.extra[k] + state
        for a, b in step.reuses:
            self._reuse(i, k, step, a, b)
        level = self.live + need
        if step.saves:
            self._save(i, k, again)
        elif again and op.state:
            self.implied.append(ImpliedResidence(k, "state", i, i + 1, op.state, i))
        self.ran.append((i, k))
        self._results(i, k, step, again)
        return level

    def _pure(self, i: int, k: int) -> None:
        op = self.graph.ops[k]
        effect = op.effect or has_effects(op.target)
        if effect or (op.random and k not in self._forms["state"]):
            what = "has effects" if effect else "draws from the random state, which is not saved,"
            self.note("impure-recompute", i, (op.name,), f"{place_of(op)} {what} and runs only once")
        elif op.random:
            self._late(i, self.lanes.read(i, ("state", k)), op.name)
        for s in self._foreign_writes(k):
            message = f"{place_of(op)} would write {self._name(s)}, which is the caller's, a second time"
            self.note("impure-recompute", i, (op.name, self._name(s)), message)

    def _save(self, i: int, k: int, again: bool) -> None:
        op = self.graph.ops[k]
        if again or not op.random or not op.state:
            self.note("unknown", i, (op.name,), f"{place_of(op)} has no random state that can be saved here")
            return
        self._make(i, "state", k, 0, op.state)

    def _foreign_writes(self, k: int) -> list[int]:
        updates = self.graph.ops[k].updates
        return [s for s in self.facts.writes[k] if s in self.facts.static and s not in updates]

    def _order(self, i: int, k: int) -> None:
        op = self.graph.ops[k]
        for c in op.control:
            before = self.graph.ops[c]
            if c not in self._at:
                self.note("order", i, (op.name, before.name), f"{before.name} must run before {place_of(op)}")
            else:
                self._follows(i, self._at[c], op.name)
        if op.random:
            last, at = self._random
            if k < last:
                name = self.graph.ops[last].name
                message = f"{place_of(op)} draws from the random state before {name} does"
                self.note("order", i, (op.name, name), message)
            self._follows(i, at, op.name)
            self._random = max(last, k), i

    def _follows(self, i: int, earlier: int, subject: str) -> None:
        """Step ``i`` needs step ``earlier`` to have ended."""
        if not self.clocks.before(earlier, i):
            self._late(i, [earlier], subject)

    def _late(self, i: int, running: list[int], subject: str) -> None:
        for a in running:
            message = f"uses {subject}, but step {a} ({self.steps[a].kind}) may still be running"
            self.note("lane", i, (subject,), message)

    def _reads(self, i: int, k: int, again: bool, skip: frozenset[int]) -> None:
        full, single = self._forms["full"], self.clocks.single
        if self.facts.views[k]:
            self._views(i, k)
        for s, need in self.facts.sees[k].items():
            if s in skip:
                continue
            here = full.get(s)
            if single and here is not None and here.version == need:
                continue
            op, name, maker = self.graph.ops[k], self._name(s), self.facts.maker[s]
            if here is None and maker not in self._at:
                source = self.graph.ops[maker].name if maker >= 0 else "any op"
                message = f"{place_of(op)} uses {name}, which {source} has not made yet"
                self.note("use-before-definition", i, (name, op.name), message)
            elif here is None:
                self.note(
                    "not-resident", i, (name, op.name), f"{place_of(op)} uses {name}, which is not there"
                )
            elif here.version != need:
                # As the first runs left it, yet not as wanted: then the first runs are out of order.
                code = "stale" if again or here.version != self._written[s] else "hazard"
                message = f"{place_of(op)} must see {name} after {need} writes, not after {here.version}"
                self.note(code, i, (name, op.name), message)
            self._late(i, self.lanes.read(i, ("full", s)), name)

    def _views(self, i: int, k: int) -> None:
        """A view is there with its storage, in every residence, but not before the op that makes it has run."""
        op = self.graph.ops[k]
        for v, maker in self.facts.views[k].items():
            name, source = self.graph.values[v].name, self.graph.ops[maker].name
            if maker not in self._at:
                message = f"{place_of(op)} reads {name}, a view that {source} has not made yet"
                self.note("use-before-definition", i, (name, op.name), message)
            else:
                self._follows(i, self._at[maker], name)

    def _writes(self, i: int, k: int, again: bool, skip: frozenset[int]) -> None:
        foreign = self._foreign_writes(k) if again else []
        for s in self.facts.writes[k]:
            if s in skip or s in foreign:
                continue
            if not again:
                self._written[s] += 1
            if s in self._forms["full"]:
                self._forms["full"][s].version += 1
            self._late(i, self.lanes.write(i, ("full", s)), self._name(s))

    def _reuse(self, i: int, k: int, step: Step, a: int, b: int) -> None:
        """The residence of ``a`` ends and ``b`` takes its place."""
        if not (self._valid(i, a) and self._valid(i, b)):
            return
        op, full, storages = self.graph.ops[k], self._forms["full"], self.graph.storages
        kept = step.storages if step.kind == "recompute" else self.facts.makes[k]
        why = ""
        if (a, b) not in op.overwrites or a not in self.facts.sees[k] or a in self.facts.writes[k]:
            why = f"which {place_of(op)} may not overwrite so"
        elif storages[a].size != storages[b].size:
            why = f"which has {storages[a].size} bytes, not {storages[b].size}"
        elif a in self.facts.static:
            why = "which is the caller's"
        elif a not in full:
            why = "which is not there, or whose place is taken already"
        elif b not in kept or b in full or (i, b) in (row[:2] for row in self.took[-len(step.reuses) :]):
            why = "but is not what this step makes, or has a place already"
        if why:
            message = f"{self._name(b)} takes the place of {self._name(a)}, {why}"
            self.note("reuse", i, (self._name(b), self._name(a)), message)
            return
        self._drop(i, "full", a)
        self.took.append((i, b, a))

    def _results(self, i: int, k: int, step: Step, again: bool) -> None:
        defined = self.facts.makes[k]
        keep = [s for s in step.storages if self._valid(i, s)] if again else defined
        for s in keep:
            if s not in defined:
                op = self.graph.ops[k]
                self.note(
                    "unknown", i, (self._name(s), op.name), f"{op.name} does not define {self._name(s)}"
                )
            else:
                self._make(i, "full", s, 1, self.graph.storages[s].size)
        for s in defined:
            if not again:
                self._written[s] += 1
            elif s not in keep:
                self.implied.append(ImpliedResidence(s, "full", i, i + 1, self.graph.storages[s].size, i))

    # Forms

    def _make(self, i: int, form: str, s: int, version: int, size: int) -> None:
        if s in self._forms[form]:
            name = self._name(s, form)
            message = f"makes {name} ({form}), which is already there"
            self.note("already-resident", i, (name,), message)
            return
        self._forms[form][s] = _Copy(i, version, size)
        if not self.clocks.single:
            self.lanes.make(i, (form, s))
        if form != "host":
            self.live += size
        else:
            self.host_live += size
            self.host_peak = max(self.host_peak, self.host_live)

    def _drop(self, i: int, form: str, s: int) -> None:
        """Step ``i`` ends a residence that there is."""
        here = self._forms[form].pop(s)
        if not self.clocks.single:
            self._late(i, self.lanes.write(i, (form, s)), self._name(s, form))
        self.implied.append(ImpliedResidence(s, form, here.start, i, here.size, i))
        if form != "host":
            self.live -= here.size
        else:
            self.host_live -= here.size

    def _copy(self, i: int, step: Step) -> None:
        source, target = COPIES[step.kind]
        if step.kind == "compress" and step.nbytes < 1:
            self.note("unknown", i, (str(step.nbytes),), "a packed form has at least one byte")
        for s in step.storages:
            if not self._valid(i, s):
                continue
            here = self._forms[source].get(s)
            if here is None:
                message = f"{step.kind} of {self._name(s)}, whose {source} form is not there"
                self.note("not-resident", i, (self._name(s),), message)
            self._late(i, self.lanes.read(i, (source, s)), self._name(s))
            if target == "packed":
                self._codec(i, step, s, None if here is None else here.version)
            size = step.nbytes if target == "packed" else self.graph.storages[s].size
            self._make(i, target, s, self._written[s] if here is None else here.version, size)

    def _codec(self, i: int, step: Step, s: int, version: int | None) -> None:
        why = self.codecs.fault(s, step.codec, step.nbytes, self.lossy)
        if not why and step.codec not in LOSSY and version not in (None, self.facts.final[s]):
            why = "it is packed before its last write, when its range is not known"
        if why:
            self.note("codec", i, (self._name(s),), f"{self._name(s)} cannot be packed so: {why}")

    @cached_property
    def codecs(self) -> Codecs:
        return Codecs(self.graph, self.facts)

    def _free(self, i: int, step: Step) -> None:
        if step.form not in FORMS:
            self.note("unknown", i, (str(step.form),), f"a form is one of {', '.join(FORMS)}")
            return
        if step.form == "state":
            if step.op not in self._forms["state"] or step.storages:
                message = f"op {step.op} has no saved random state to be freed"
                self.note("foreign-free", i, (str(step.op),), message)
            if step.op in self._forms["state"]:
                self._drop(i, "state", step.op)
            return
        full, there = step.form == "full", self._forms[step.form]
        for s in step.storages:
            if not self._valid(i, s):
                continue
            if full and s in self.facts.static:
                name = self._name(s)
                self.note("foreign-free", i, (name,), f"frees {name}, which is the caller's")
            elif s not in there:
                name = self._name(s)
                self.note("foreign-free", i, (name,), f"frees {name} ({step.form}), which is not there")
            else:
                self._drop(i, step.form, s)

    def _end(self) -> None:
        n, full = len(self.steps), self._forms["full"]
        for k, op in enumerate(self.graph.ops):
            if k not in self._at:
                self.note("missing-op", -1, (op.name,), f"{place_of(op)} is never computed")
        for s in sorted(self.facts.kept):
            if s not in full or full[s].version != self.facts.final[s]:
                what = "is not there" if s not in full else f"is there after only {full[s].version} writes"
                message = f"{self._name(s)} is a result and {what} when the plan ends"
                self.note("lost-output", n - 1, (self._name(s),), message)
        for form, copies in self._forms.items():
            for s, here in copies.items():
                if form == "full" and s in self.facts.static:
                    continue
                if form != "full" or s not in self.facts.kept:
                    name = self._name(s, form)
                    self.note("leak", here.start, (name,), f"{name} ({form}) is never freed")
                self.implied.append(ImpliedResidence(s, form, here.start, n, here.size, n))


@dataclass(frozen=True)
class Inspection:
    """A plan for a graph under inspection: what checks read, and the ledger that they write."""

    graph: Graph
    plan: Plan
    facts: Facts
    clocks: Clocks
    replay: Replay
    ledger: Ledger
    depth: int

    def note(self, code: str, subject: str, message: str) -> None:
        """Something is wrong with the plan as a whole."""
        self.ledger.add(code, -1, (subject,), message)
