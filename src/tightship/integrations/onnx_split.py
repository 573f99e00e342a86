"""An ONNX model with regions in slices of rows: Slice, copies of the nodes for each slice, Concat.

`windows` says of each node which rows of its inputs it needs; `tightship.analysis.patches` which regions to take;
`split` writes the model's nodes anew. Padding is per side in ONNX, so that a slice computes its own rows and no more.
What a region makes is joined by a Concat: until then its slices are there, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import onnx
from onnx import helper

from tightship.analysis.patches import DIM, Finder, Patches, Region, Rows, Take, Window, bounds_of, made_rows
from tightship.errors import Infeasible, Unsupported
from tightship.files import scratch_folder
from tightship.frontends.onnx.lower import Program, lower
from tightship.frontends.onnx.nested import bodies
from tightship.integrations.onnx_write import write_model
from tightship.plan import Plan
from tightship.planners.default import EXACT
from tightship.units import format_bytes

__all__ = ["advice", "finder", "planned", "split", "windows"]

_POINTWISE: Final = frozenset(
    "Abs Neg Floor Ceil Round Reciprocal Sqrt Exp Log Erf Sin Cos Sign Relu LeakyRelu Elu Selu Celu ThresholdedRelu "
    "Gelu Sigmoid HardSigmoid HardSwish Mish Softplus Softsign Tanh Clip Cast Identity Add Sub Mul Div Pow Min Max "
    "Sum Mean PRelu Where Equal Less Greater And Or Not BatchNormalization".split()
)
"""Ops that need, for each row of the result, the same row of their operands; others of theirs are broadcast."""
_WINDOWED: Final = {"Conv": 1, "MaxPool": None, "AveragePool": None, "LpPool": None}
"""Ops that slide over rows, and the input that has the kernel's shape where no attribute says it."""
_TRIES: Final = 8


def _attributes(node: Any) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def windows(program: Program, k: int) -> Mapping[int, Window] | None:
    """The windows of a node by the storages that it reads in rows; None where it cannot be computed in rows."""
    graph, node = program.graph, program.model.proto.graph.node[program.nodes[k]]
    number = {graph.values[v].name: v for v in (*graph.ops[k].inputs, *graph.ops[k].outputs)}
    made = [n for n in node.output if n]
    if node.domain not in ("", "ai.onnx") or list(bodies(node)) or len(made) != 1 or graph.ops[k].random:
        return None
    out = graph.values[number[made[0]]].shape
    if len(out) <= DIM or out[DIM] < 2:
        return None
    if node.op_type in _WINDOWED:
        given = graph.values[number[node.input[0]]]
        window = _sliding(node, given.shape, out, [graph.values[number[n]].shape for n in node.input if n])
        return None if window is None else {given.storage: window}
    attributes = _attributes(node)
    joins = node.op_type == "Concat" and attributes.get("axis", 0) % len(out) != DIM
    if not joins and (node.op_type not in _POINTWISE or attributes.get("training_mode", 0)):
        return None
    cut = {}
    for name in node.input:
        if not name:
            continue
        value = graph.values[number[name]]
        own = DIM - len(out) + len(value.shape)
        alone = node.op_type == "BatchNormalization" and name != node.input[0]
        if not alone and own >= 0 and value.shape[own] == out[DIM]:
            if own != DIM:
                return None
            cut[value.storage] = Window(out[DIM], out[DIM], even=False)
    return cut or None


def _sliding(
    node: Any, shape: Sequence[int], out: Sequence[int], inputs: Sequence[Sequence[int]]
) -> Window | None:
    at, count = _attributes(node), len(shape) - DIM
    weights = _WINDOWED[node.op_type]
    kernel = at.get("kernel_shape") or (inputs[weights][DIM:] if weights is not None else ())
    if at.get("ceil_mode", 0) or not kernel:
        return None
    stride = (at.get("strides") or [1] * count)[0]
    dilation = (at.get("dilations") or [1] * count)[0]
    pads, auto = at.get("pads") or [0] * 2 * count, at.get("auto_pad", b"NOTSET")
    before, after = pads[0], pads[count]
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        both = max(0, (out[DIM] - 1) * stride + (kernel[0] - 1) * dilation + 1 - shape[DIM])
        before, after = both // 2, both - both // 2
        if auto == b"SAME_LOWER":
            before, after = after, before
    return Window(shape[DIM], out[DIM], kernel[0], stride, before, after, dilation, even=False)


def finder(program: Program) -> Finder:
    """What regions there are in a model."""
    return Finder(program.graph, lambda k: windows(program, k), joins=True)


# --- writing the nodes anew ---


def split(program: Program, patches: Sequence[tuple[Region, int]]) -> Program:
    """The model with each of these regions in so many slices. Raises ``Unsupported`` for what is no such region."""
    proto = onnx.ModelProto()
    proto.CopyFrom(program.model.proto)
    _Writer(program, proto.graph).run(patches)
    meta = program.graph.meta
    model = replace(program.model, proto=proto)
    sizes = _sizes(program)
    return lower(model, sizes, views=bool(meta["views"]), in_place=str(meta["in_place"]))


def _sizes(program: Program) -> dict[str, Any]:
    """The sizes of the model's inputs that it does not state itself."""
    known = {v.name: v for v in program.graph.values}
    found: dict[str, Any] = {}
    for x in program.model.proto.graph.input:
        dims = x.type.tensor_type.shape.dim
        for d, n in zip(dims, known[x.name].shape if x.name in known else (), strict=False):
            if d.dim_param and not d.HasField("dim_value"):
                found[d.dim_param] = n
    return found


@dataclass
class _Writer:
    program: Program
    proto: Any
    parts: dict[tuple[int, str], tuple[str, Rows]] = field(default_factory=dict)  # by slice and value

    first: int = 0  # of the region that is written

    def run(self, patches: Sequence[tuple[Region, int]]) -> None:
        nodes = list(self.program.model.proto.graph.node)
        at = {self.program.nodes[region.first]: (region, count) for region, count in patches}
        gone = {self.program.nodes[k] for region, _ in patches for k in region.ops}
        made: list[Any] = []
        for n, node in enumerate(nodes):
            if n in at:
                made += self.region(nodes, *at[n])
            if n not in gone:
                made.append(node)
        first = [x for x in made if x.op_type == "Constant"]  # regions may stand before those that they read
        rest = [x for x in made if x.op_type != "Constant"]
        del self.proto.node[:]
        self.proto.node.extend([*first, *rest])

    def region(self, nodes: Sequence[Any], region: Region, count: int) -> Iterator[Any]:
        graph, where = self.program.graph, finder(self.program)
        result = self.result(nodes, region)
        self.parts.clear()
        self.first, joined = region.first, []
        for i, rows in enumerate(bounds_of(region.rows, count)):
            wanted = where.wanted(region, rows)
            for k in region.ops:
                mine = made_rows(graph, k, wanted)
                if mine is not None:
                    yield from self.slice(nodes[self.program.nodes[k]], k, i, region, mine)
            yield from self.cut(i, result, rows)
            joined.append(self.name(i, result, rows))
        yield helper.make_node("Concat", joined, [result], name=f"{result}/joined", axis=DIM)

    def result(self, nodes: Sequence[Any], region: Region) -> str:
        """The value that others read of what a region makes."""
        program = self.program
        inside = {program.nodes[k] for k in region.ops}
        made = {n for k in inside for n in nodes[k].output if n}
        read = {x for n, node in enumerate(nodes) if n not in inside for x in _reads(node)}
        read |= {o.name for o in self.proto.output}
        found = [n for n in made if n in read]
        if len(found) != 1:
            raise Unsupported("splitting a model", f"a region makes {len(found)} values that others read")
        return found[0]

    def slice(self, node: Any, k: int, i: int, region: Region, rows: Rows) -> Iterator[Any]:
        """One node for one slice."""
        graph, cut = self.program.graph, region.windows[k]
        number = {graph.values[v].name: v for v in graph.ops[k].inputs}
        take = next(iter(cut.values())).take(rows)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{graph.ops[k].name}__rows{i}"
        for n, name in enumerate(node.input):
            if name and graph.values[number[name]].storage in cut and self.sliced(k, name):
                yield from self.cut(i, name, (take.start, take.stop))
                copy.input[n] = self.name(i, name, (take.start, take.stop))
        if node.op_type in _WINDOWED:
            _pad(copy, take, next(iter(cut.values())), node, self.widths(node))
        copy.output[0] = f"{node.output[0]}__rows{i}"
        self.parts[i, node.output[0]] = copy.output[0], rows
        yield copy

    def widths(self, node: Any) -> tuple[Sequence[int], Sequence[int]]:
        """The shapes of what a node reads and makes."""
        shapes = {v.name: v.shape for v in self.program.graph.values}
        return shapes[node.input[0]], shapes[node.output[0]]

    def sliced(self, k: int, name: str) -> bool:
        """Of a batch norm, the first operand alone, even if another were the same storage."""
        return name == self.program.model.proto.graph.node[self.program.nodes[k]].input[0] or (
            self.program.model.proto.graph.node[self.program.nodes[k]].op_type != "BatchNormalization"
        )

    def name(self, i: int, value: str, rows: Rows) -> str:
        known = self.parts.get((i, value))
        if known is not None and known[1] == rows:
            return known[0]
        return f"{value}__rows{self.first}_{i}_{rows[0]}_{rows[1]}"

    def cut(self, i: int, value: str, rows: Rows) -> Iterator[Any]:
        """A Slice that gives these rows of a value, or of the slice's part of it, unless they are there."""
        known, name = self.parts.get((i, value)), self.name(i, value, rows)
        if (known is not None and known[1] == rows) or (i, name) in self.parts:
            return
        source, first = (value, 0) if known is None else (known[0], known[1][0])
        self.parts[i, name] = name, rows
        given = [source, *(self.number(n) for n in (rows[0] - first, rows[1] - first, DIM))]
        yield helper.make_node("Slice", given, [name], name=name)

    def number(self, n: int) -> str:
        """An initializer of one number."""
        name = f"tightship.rows.{n}"
        if all(t.name != name for t in self.proto.initializer):
            self.proto.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [1], [n]))
        return name


def _reads(node: Any) -> Iterator[str]:
    yield from node.input
    for graph in bodies(node):
        for inner in graph.node:
            yield from _reads(inner)
        yield from (o.name for o in graph.output)


def _pad(
    copy: Any, take: Take, window: Window, node: Any, shapes: tuple[Sequence[int], Sequence[int]]
) -> None:
    """The padding of a slice, said by number for every side."""
    at, (given, made) = _attributes(node), shapes
    count = len(given) - DIM
    pads = list(at.get("pads") or [0] * 2 * count)
    auto = at.get("auto_pad", b"NOTSET")
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        for d in range(count):
            inner = replace(window, length=given[DIM + d], made=made[DIM + d])
            kernel = (at.get("kernel_shape") or [inner.kernel] * count)[d]
            stride = (at.get("strides") or [1] * count)[d]
            dilation = (at.get("dilations") or [1] * count)[d]
            both = max(0, (inner.made - 1) * stride + (kernel - 1) * dilation + 1 - inner.length)
            low, high = both // 2, both - both // 2
            pads[d], pads[count + d] = (low, high) if auto == b"SAME_UPPER" else (high, low)
    pads[0], pads[count] = take.before, take.after
    kept = [a for a in copy.attribute if a.name not in ("pads", "auto_pad")]
    del copy.attribute[:]
    copy.attribute.extend([*kept, helper.make_attribute("pads", pads)])


# --- whether, and into how many ---


def planned(
    program: Program, limit: int, plan_of: Callable[[Any], Plan], *, exact: bool
) -> tuple[Program, Plan]:
    """The model and its plan within a limit, in slices where it needs them, with as few operations more as it allows.
    ``exact``: onnxruntime gives equal results on random data, or the slices are not taken.

    Raises ``Infeasible``, and ``Unsupported`` where ``exact`` cannot be checked.
    """
    try:
        return program, plan_of(program.graph)
    except Infeasible as no:
        refused = no
    if exact and importlib.util.find_spec("onnxruntime") is None:
        raise Unsupported(
            "allow=split of an ONNX model", "onnxruntime, which says whether results are equal, is not installed",
            "install it, or give split-rounding",
        )  # fmt: skip
    where, said = finder(program), ""
    choice: Patches | None = where.best(limit)
    for _ in range(_TRIES):
        if choice is None:
            break
        made = split(program, choice.slices)
        try:
            plan = plan_of(made.graph)
        except Infeasible as no:
            said = f"slices of rows need {format_bytes(no.placed or no.best_peak)}"
        else:
            if not exact or _equal(program, made, plan):
                notes = (*plan.notes, *_notes(program, made, choice, exact=exact))
                return made, replace(plan, notes=notes)
            said = "in slices of rows, onnxruntime gives other bits (allow=split-rounding takes them)"
            where.ban(choice.slices)
            choice = where.best(limit)
            continue
        choice = where.best(where.below(choice))
    least = where.least() if choice is None else None
    if not said:
        needs = "" if least is None else f"slices of rows need {format_bytes(least.peak)} at least"
        said = needs or "no nodes can be computed in slices of rows"
    raise refused.with_advice((*refused.advice, f"splitting: {said}"))


def advice(program: Program, limit: int, allow: str) -> tuple[str, ...]:
    """What slices of rows would come to where they were not allowed."""
    where = finder(program)
    choice = where.best(limit) or where.least()
    if choice is None:
        return ()
    more = 100 * choice.extra / max(sum(op.flops for op in program.graph.ops), 1)
    nodes = sum(len(r.ops) for r, _ in choice.slices)
    return (
        f"splitting (allow={allow},{EXACT}): {format_bytes(choice.peak)} then, {nodes} nodes in slices of rows, "
        f"{more:+.1f} % operations",
    )


def _notes(program: Program, made: Program, choice: Patches, *, exact: bool) -> Iterator[str]:
    graph = program.graph
    for region, count in choice.slices:
        ends = f"{graph.ops[region.first].name} to {graph.ops[region.stop - 1].name}"
        yield f"split: {len(region.ops)} nodes from {ends} in {count} slices of {region.rows} rows"
    whole = sum(op.flops for op in graph.ops)
    more = sum(op.flops for op in made.graph.ops) - whole
    yield f"split: {more:,} operations more than in one piece ({100 * more / max(whole, 1):+.2f} %)"
    if exact:
        yield "split: equal results in onnxruntime on random data"


def _equal(program: Program, made: Program, plan: Plan) -> bool:
    """Whether onnxruntime gives equal results for the model as it was and in slices, on random data."""
    import numpy as np

    from tightship.integrations.onnxruntime import measure, random_feeds

    graph = program.graph
    shapes = {
        graph.values[v].name: graph.values[v].shape for v in graph.inputs
        if graph.storages[graph.values[v].storage].kind == "input"
    }  # fmt: skip
    feeds = random_feeds(program.model.path, shapes)
    with scratch_folder() as folder:
        path = folder / "slices.onnx"
        write_model(made, plan, path)
        one, other = measure(program.model.path, feeds), measure(path, feeds)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one.outputs, other.outputs, strict=True))
