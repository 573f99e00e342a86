"""Modules of HLO as they are written: computations of instructions, frozen.

Instructions are referred to by name; names are unique within a module. What the text says of an instruction
beyond shape, opcode and operands is kept as text (``attributes``), in its order, and read on demand.

``flattened`` gives each call of a computation that runs with its caller's buffers a copy of its own: a buffer inside
a computation that two calls run would be two. XLA does so before it schedules, so a scheduled module has none left
to make. Computations applied element by element, and the insides of fusions, stay shared. Source of the copies: XLA,
``FlattenCallGraph``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tightship.cached import cached_property
from tightship.errors import Unsupported
from tightship.hlo.opcodes import Opcode, opcode
from tightship.hlo.shape import Shape

__all__ = [
    "CALLS",
    "Computation",
    "Instruction",
    "Module",
    "Names",
    "Place",
    "check_copies",
    "declared",
    "flattened",
    "inlined",
    "names_in",
    "run_keys",
    "runs",
]

CALLS = frozenset(
    "calls to_apply condition body branch_computations true_computation false_computation called_computations"
    " select scatter update_computation comparator".split()
)
"""Attributes that name computations."""

_NAME = re.compile(r"%?([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_ESCAPED = re.compile(r"\\(.)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')


def names_in(text: str) -> tuple[str, ...]:
    """The names of ``%a`` or ``{%a, %b}``."""
    if "/*" in text:
        text = _COMMENT.sub(" ", text)
    return tuple(m[1] for m in _NAME.finditer(text))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's program."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. ``payload`` is what stands between the parentheses when that is no list of operands: the
    number of a parameter, the value of a constant. ``line`` is where the text has it (not part of equality)."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...] = ()
    payload: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    root: bool = False
    line: int = field(default=0, compare=False)

    @property
    def row(self) -> Opcode:
        """What its opcode does, in the table of opcodes."""
        return opcode(self.opcode)

    def attribute(self, key: str, default: str = "") -> str:
        for name, text in self.attributes:
            if name == key:
                return text
        return default

    def has(self, key: str) -> bool:
        return any(name == key for name, _ in self.attributes)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations it runs, in the order of the text."""
        return tuple(n for key, text in self.attributes if key in CALLS for n in names_in(text))

    @property
    def control_predecessors(self) -> tuple[str, ...]:
        return names_in(self.attribute("control-predecessors"))

    @property
    def parameter_number(self) -> int:
        return int(self.payload) if self.opcode == "parameter" else -1

    @property
    def tuple_index(self) -> int:
        """The part a get-tuple-element takes."""
        return int(self.attribute("index", "-1"))

    @property
    def custom_call_target(self) -> str:
        return self.attribute("custom_call_target").strip('"')

    @property
    def trips(self) -> int:
        """How many times a loop runs its body, if the text says so (up to 2^31); else 1."""
        found = _TRIPS.search(self.attribute("backend_config"))
        return min(int(found[1][:11]), 2**31) if found else 1

    @property
    def op_name(self) -> str:
        """What the framework called it: ``jit(step)/while/body/dot_general``."""
        return self.metadata("op_name")

    def metadata(self, key: str) -> str:
        """A field of the metadata (op_name, source_file, source_line, stack_frame_id …), or nothing."""
        text = self.attribute("metadata")
        at = text.find(key + "=")
        if at < 0:
            return ""
        at += len(key) + 1
        if text[at : at + 1] == '"':
            found = _TEXT.match(text, at)
            return _ESCAPED.sub(r"\1", found[1]) if found else ""
        return re.split(r"[\s}]", text[at:], maxsplit=1)[0]

    def but(self, **changes: object) -> Instruction:
        """The same instruction with some of its attributes changed, added or (None) taken away; ``_`` in a name
        stands for itself."""
        kept = tuple((k, str(changes.pop(k)) if k in changes else v) for k, v in self.attributes)
        added = tuple((k, str(v)) for k, v in changes.items() if v is not None)
        return replace(self, attributes=(*kept, *added))


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text, which is the schedule when the module is scheduled.

    ``signature`` says whether the header lists parameters and result. ``tail`` is what follows the closing
    brace (``, execution_thread="host"``).
    """

    name: str
    instructions: tuple[Instruction, ...]
    entry: bool = False
    signature: bool = True
    attributes: tuple[tuple[str, str], ...] = ()
    line: int = field(default=0, compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """By parameter number."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: i.parameter_number))

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """For each instruction those that have it as an operand, each once, in the order of the text."""
        found: dict[str, dict[str, None]] = {i.name: {} for i in self.instructions}
        for i in self.instructions:
            for operand in i.operands:
                found[operand][i.name] = None
        return {name: tuple(users) for name, users in found.items()}


@dataclass(frozen=True)
class Module:
    """A module: ``attributes`` of its header as text, ``tables`` (file names, stack frames) as text by title.
    ``file`` is what messages call it, ``notes`` say what had to be assumed (neither is part of equality)."""

    name: str
    computations: tuple[Computation, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    tables: tuple[tuple[str, tuple[str, ...]], ...] = ()
    file: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def attribute(self, key: str, default: str = "") -> str:
        return next((text for name, text in self.attributes if name == key), default)

    @property
    def scheduled(self) -> bool:
        return self.attribute("is_scheduled") == "true"

    @cached_property
    def by_name(self) -> Mapping[str, Computation]:
        return {c.name: c for c in self.computations}

    @cached_property
    def entry(self) -> Computation:
        return next((c for c in self.computations if c.entry), self.computations[-1])

    @property
    def instructions(self) -> Iterator[Instruction]:
        return (i for c in self.computations for i in c.instructions)

    @cached_property
    def aliases(self) -> Mapping[tuple[int, ...], tuple[int, tuple[int, ...], str]]:
        """Donated inputs: position in the result -> (parameter number, position in it, kind)."""
        return {
            _index(m[1]): (int(m[2]), _index(m[3]), m[4] or "may-alias")
            for m in _ALIAS.finditer(self.attribute("input_output_alias"))
        }

    def place(self, instruction: Instruction) -> Place | None:
        """The line of the user's program an instruction comes from, if the text says so."""
        file, line = instruction.metadata("source_file"), instruction.metadata("source_line")
        if file:
            return Place(file, int(line or 0))
        frame = instruction.metadata("stack_frame_id")
        return self._frames.get(int(frame)) if frame.isdigit() else None

    @cached_property
    def _frames(self) -> Mapping[int, Place]:
        tables = dict(self.tables)
        files = {int(n): text.strip('"') for n, text in _rows(tables.get("FileNames", ()))}
        functions = {int(n): text.strip('"') for n, text in _rows(tables.get("FunctionNames", ()))}
        locations = {int(n): _fields(text) for n, text in _rows(tables.get("FileLocations", ()))}
        found = {}
        for n, text in _rows(tables.get("StackFrames", ())):
            at = locations.get(_fields(text).get("file_location_id", 0), {})
            file = files.get(at.get("file_name_id", 0))
            if file is not None:
                found[int(n)] = Place(
                    file, at.get("line", 0), functions.get(at.get("function_name_id", 0), "")
                )
        return found


_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}(?:,\s*([\w-]+))?\)")
_PAIR = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}")
_FIELD = re.compile(r"(\w+)=(\d+)")


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(k) for k in text.replace(" ", "").split(",") if k)


def _fields(text: str) -> dict[str, int]:
    return {m[1]: int(m[2]) for m in _FIELD.finditer(text)}


def _rows(lines: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for line in lines:
        number, _, rest = line.partition(" ")
        if number.isdigit():
            yield number, rest


def run_keys(i: Instruction) -> tuple[str, ...]:
    """The attributes whose computations an instruction runs one after another, with its own operands."""
    return tuple(key for key in i.row.callees if i.has(key)) if i.row.runs else ()


def runs(i: Instruction) -> tuple[str, ...]:
    """Computations an instruction runs one after another with its own operands (not element by element): a
    loop's condition before its body, the branches of a conditional in the order of their operands."""
    return tuple(n for key in run_keys(i) for n in names_in(i.attribute(key)))


def declared(i: Instruction) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """``output_to_operand_aliasing``: (operand, position in it, position in the result)."""
    text = i.attribute("output_to_operand_aliasing")
    return tuple((int(m[2]), _index(m[3]), _index(m[1])) for m in _PAIR.finditer(text))


CLONE_LIMIT = 2_000_000
"""The most instructions a module may come to: calls within calls multiply."""


def flattened(module: Module) -> Module:
    """The same module where nothing needs a copy. Clones stand behind what they are copies of, with names of their
    own, and a note says how many there are. Raises ``Unsupported`` beyond ``CLONE_LIMIT`` instructions."""
    if not _shared(module):
        return module
    check_copies(module)
    return _Flattening(module).run()


def check_copies(module: Module) -> None:
    """Raises ``Unsupported`` where a module has more than ``CLONE_LIMIT`` instructions once each call has a copy of
    what it runs: a file of a few lines can say more than any machine holds."""
    sizes: dict[str, int] = {}
    open_ = [module.entry.name]
    while open_:  # what a computation runs before itself; no recursion, calls may lie deep in one another
        rows = module.by_name[open_[-1]].instructions
        inside = [n for i in rows for n in runs(i)]
        if missing := [n for n in dict.fromkeys(inside) if n not in sizes and n not in open_]:
            open_ += missing[:1]
        else:
            sizes[open_.pop()] = len(rows) + sum(sizes.get(n, 0) for n in inside)
    if (size := sizes[module.entry.name]) > CLONE_LIMIT:
        raise Unsupported(
            f"a module of more than {CLONE_LIMIT} instructions",
            f"there are {size:,} once each call has a copy of what it runs",
            "compile the module with XLA first, which inlines calls",
        )


def _shared(module: Module) -> set[str]:
    """Computations that run in several places."""
    called = Counter(n for i in module.instructions for n in i.called)
    run = {n for i in module.instructions for n in runs(i)}
    return {n for n in run if called[n] > 1}


class Names:
    """Names of a module, each once: a name that is taken gets a number."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)
        self.last: dict[str, int] = {}

    def new(self, name: str) -> str:
        numbered, k = name, self.last.get(name, 0)
        while numbered in self.taken:
            k += 1
            numbered = f"{name}.{k}"
        self.last[name] = k
        self.taken.add(numbered)
        return numbered


class _Flattening:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.taken = _elsewhere(module)
        self.names = Names([c.name for c in module.computations] + [i.name for i in module.instructions])
        self.made: dict[str, list[Computation]] = {c.name: [] for c in module.computations}
        self.clones: Counter[str] = Counter()

    def run(self) -> Module:
        self._visit(self.module.entry, self.module.entry.name)
        reached = {c.name for found in self.made.values() for c in found}
        computations = [
            d
            for c in self.module.computations
            for d in ([] if c.name in reached else [c]) + self.made[c.name]
        ]
        listed = ", ".join(f"{name} {n + 1} times" for name, n in self.clones.most_common(3))
        more = f" and {len(self.clones) - 3} others" if len(self.clones) > 3 else ""
        note = f"computations run from several places are copied for each of them: {listed}{more}"
        return replace(
            self.module,
            computations=tuple(computations),
            notes=(*self.module.notes, *([note] if self.clones else [])),
        )

    def _visit(self, c: Computation, name: str) -> None:
        """Computation ``c`` as it is run in one place, under a name of its own there."""
        renamed = c.name != name
        names = {i.name: self.names.new(f"{i.name}.clone") for i in c.instructions} if renamed else {}
        body = []
        for i in c.instructions:
            if renamed:
                i = _renamed(i, names)
            body.append(self._with_callees(i))
        self.made[c.name].append(replace(c, name=name, instructions=tuple(body)))

    def _with_callees(self, i: Instruction) -> Instruction:
        changed: dict[str, object] = {}
        for key in run_keys(i):
            text = i.attribute(key)
            own = []
            for callee in names_in(text):
                own.append(self._own(callee))
                self._visit(self.module.by_name[callee], own[-1])
            if tuple(own) != names_in(text):
                listed = ", ".join(f"%{n}" for n in own)
                changed[key] = f"{{{listed}}}" if text.lstrip().startswith("{") else listed
        return i.but(**changed) if changed else i

    def _own(self, callee: str) -> str:
        """A name for ``callee`` in one more place that runs it."""
        if callee not in self.taken:
            self.taken.add(callee)
            return callee
        self.clones[callee] += 1
        return self.names.new(f"{callee}.clone")


def _elsewhere(module: Module) -> set[str]:
    """Computations that are called in another way, too, or by what does not run in the program's order."""
    run, work = {module.entry.name}, [module.entry]
    while work:
        for i in work.pop().instructions:
            for n in runs(i):
                if n not in run:
                    run.add(n)
                    work.append(module.by_name[n])
    return {
        n
        for c in module.computations
        for i in c.instructions
        for n in i.called
        if c.name not in run or n not in runs(i)
    }


def _renamed(i: Instruction, names: dict[str, str]) -> Instruction:
    before = i.attribute("control-predecessors")
    i = replace(i, name=names[i.name], operands=tuple(names[o] for o in i.operands))
    if not before:
        return i
    listed = ", ".join(f"%{names[n]}" for n in names_in(before))
    return i.but(**{"control-predecessors": f"{{{listed}}}"})


# -- calls inlined -------------------------------------------------------------------------------------------------


def inlined(module: Module) -> Module:
    """The same module whose entry calls nothing: in place of each call stands what it runs, and no tuple that is
    only taken apart again. What loops and branches run is as it is."""
    if not any(i.opcode == "call" for i in module.entry.instructions):
        return module
    check_copies(module)
    names = Names([c.name for c in module.computations] + [i.name for i in module.instructions])
    body, whole, root = list[Instruction](), dict[str, Instruction](), module.entry.root.name

    def copied(c: Computation, known: dict[str, str], inside: bool) -> None:
        """The instructions of a computation; ``known``: what its names are in the entry."""
        for i in c.instructions:
            given = tuple(known[o] for o in i.operands)
            if i.opcode == "call":
                callee = module.by_name[i.called[0]]
                theirs = {p.name: given[p.parameter_number] for p in callee.parameters}
                copied(callee, theirs, True)
                known[i.name] = theirs[callee.root.name]
            elif i.opcode == "get-tuple-element" and whole[given[0]].opcode == "tuple":
                known[i.name] = whole[given[0]].operands[i.tuple_index]
            elif i.name not in known:
                made = _renamed(i, {**known, i.name: names.new(i.name) if inside else i.name})
                known[i.name] = made.name
                whole[made.name] = replace(made, root=False)
                body.append(whole[made.name])

    known: dict[str, str] = {}
    copied(module.entry, known, False)
    last = known[root]
    used = {last} | {o for i in body for o in i.operands}
    rows = (replace(i, root=i.name == last) for i in body if i.opcode != "tuple" or i.name in used)
    entry = replace(module.entry, instructions=tuple(rows))
    reached = _reached(module, entry)
    rest = (entry if c.name == entry.name else c for c in module.computations)
    return replace(module, computations=tuple(c for c in rest if c.name in reached))


def _reached(module: Module, entry: Computation) -> set[str]:
    """The computations that an entry reaches."""
    found, work = {entry.name}, [entry]
    while work:
        fresh = {n for i in work.pop().instructions for n in i.called} - found
        found |= fresh
        work += [module.by_name[n] for n in fresh]
    return found
