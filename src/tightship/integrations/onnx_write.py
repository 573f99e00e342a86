"""A plan -> an ONNX model: nodes in the planned order, clones for what is recomputed, the plan in the metadata.

A runtime that keeps the file's order then needs what the plan says. Numbers stay the same to the bit, because
every node is one of the model's own or a copy of one.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import onnx

from tightship.errors import BadInput, Unsupported
from tightship.files import PathLike, part_of, unwritable
from tightship.frontends.onnx.load import LARGEST_FILE, Model, external, stamp, tensors
from tightship.frontends.onnx.lower import Program
from tightship.frontends.onnx.nested import bodies
from tightship.frontends.onnx.types import (
    IN_PLACE,
    NO_TENSOR,
    TensorType,
    element_type,
    may_overwrite,
    viewed,
)
from tightship.frontends.onnx.wire import fattened, held, held_lists
from tightship.plan import Plan, Step
from tightship.serde import dumps_plan

__all__ = [
    "KEY_OFFSETS",
    "KEY_PLAN",
    "KEY_SESSION",
    "bring_data",
    "data_name",
    "planned_nodes",
    "rename_data",
    "write_model",
]

KEY_PLAN, KEY_OFFSETS, KEY_SESSION = "tightship.plan", "tightship.offsets", "tightship.session"
_KEYS: Final = (KEY_PLAN, KEY_OFFSETS, KEY_SESSION)
_BLOCK: Final = 1 << 24  # bytes copied at once


def write_model(
    program: Program,
    plan: Plan,
    path: PathLike,
    session: Mapping[str, Any] | None = None,
    *,
    named: PathLike | None = None,
) -> list[Path]:
    """Write the model as the plan has it. Weights are copied from the file it was read from, range by range; external
    data stays where it is when the new file lies in the same folder, otherwise it is copied beside it. The file
    appears complete and checked, or not at all. ``session``: how onnxruntime should run it, kept in the metadata.
    ``named``: the file that errors name, where it is not yet this one. Returns the files of data that it has made.

    Raises ``BadInput`` where it cannot be written, the model's file has changed meanwhile or onnx's checker does not
    accept the new one, ``Unsupported`` for steps other than compute, recompute and free.
    """
    target, name = Path(path), os.fspath(path if named is None else named)
    nodes, offsets = planned_nodes(program, plan)
    proto = _rearranged(program, nodes, plan, offsets)
    if session is not None:
        proto.metadata_props.add(key=KEY_SESSION, value=json.dumps(session))
    brought = bring_data(program.model, target.parent)
    try:
        with _removed_unless_done(brought), part_of(target, ".onnx") as part:
            _write_pieces(proto, program.model, part)
            _check(proto, part)
            os.replace(part, target)
        return brought
    except onnx.checker.ValidationError as error:
        said = " ".join(str(error).split())
        raise BadInput(f"onnx's checker rejects the model: {said}", place=name) from error
    except OSError as error:
        raise unwritable(error, name) from error


def _write_pieces(proto: Any, model: Model, path: Path) -> None:
    """A model that was read without the contents of its large tensors, written with them."""
    pieces = fattened(proto)
    size = sum(len(p) if isinstance(p, bytes) else p.size for p in pieces)
    if size > LARGEST_FILE:
        fault = (
            f"file of {size} bytes with its plan; the limit is {LARGEST_FILE}, put weights into external data"
        )
        raise BadInput(fault, place=str(model.path))
    with open(model.path, "rb") as source, open(path, "wb") as file:
        if stamp(os.fstat(source.fileno())) != model.stamp:
            raise BadInput("the file has changed since it was read", place=str(model.path))
        for p in pieces:
            if isinstance(p, bytes):
                file.write(p)
                continue
            source.seek(p.offset)
            left = p.size
            while left:
                block = source.read(min(left, _BLOCK))
                if not block:
                    raise BadInput("the file has changed since it was read", place=str(model.path))
                file.write(block)
                left -= len(block)
        file.flush()
        os.fsync(file.fileno())


def _check(proto: Any, path: Path) -> None:
    """onnx's checker on the file at ``path``; raises what it raises. It reads models whole, so large tensors, whose
    sizes have been checked against their shapes, are said to lie beside a file without them: in the one to check.
    """
    large = [t for t in tensors(proto) if held(t) is not None]
    versions = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
    own = _of_runtime(proto, versions)
    lists = any(held_lists(n) for n in proto.graph.node)
    if not (large or own or lists):
        onnx.checker.check_model(os.fspath(path))
        return
    about = onnx.ModelProto()
    about.CopyFrom(proto)
    for tensor in tensors(about):
        if held(tensor) is not None:
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=path.name)
    for node in _of_runtime(about, versions):
        node.domain = "com.microsoft"
    if own and "com.microsoft" not in versions:
        about.opset_import.add(domain="com.microsoft", version=1)
    with part_of(path, ".onnx") as slim:
        slim.write_bytes(about.SerializeToString())
        onnx.checker.check_model(os.fspath(slim))


def _of_runtime(proto: Any, versions: Mapping[str, int]) -> list[Any]:
    """Nodes that onnxruntime's optimizer has written into onnx's domain, of ops that this opset does not have."""
    version, work, found = versions.get("", 1), [proto.graph], []
    while work:
        for node in work.pop().node:
            work += bodies(node)
            if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type, version, ""):
                found.append(node)
    return found


def planned_nodes(program: Program, plan: Plan) -> tuple[list[Any], dict[str, list[int]]]:
    """The nodes of the plan in order; and of each value made, by name: offset, size, and the positions of the node
    that makes it and of the node before which it is freed."""
    if plan.digest != program.graph.digest:
        fault = f"the plan was made for another model, of digest {plan.digest[:12]}"
        raise BadInput(fault, place=str(program.model.path))
    writer = _Writer(program)
    for i, step in enumerate(plan.steps):
        writer.step(i, step)
    return writer.finish(), writer.offsets(plan)


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.proto = program.model.proto.graph
        self.nodes: list[Any] = [n for n in self.proto.node if n.op_type == "Constant" and not n.domain]
        self.first = len(self.nodes)
        self.number = {v.name: k for k, v in enumerate(self.graph.values) if k not in program.parts}
        self.maker = {v: o for o, op in enumerate(self.graph.ops) for v in op.outputs}
        self.stay = [0] * len(self.graph.storages)  # how often a storage has been made
        self.name: dict[int, tuple[str, int]] = {}  # of a value now, and the stay it is of
        self.clones: dict[int, int] = {}
        self.taken = _names_in(self.proto)
        self.called = {n.name for n in self.proto.node}
        self.at: dict[int, int] = {}  # step -> position of its node
        self.made: dict[tuple[int, int], int] = {}  # storage, step -> stay that begins there
        self.names: dict[tuple[int, int], list[str]] = {}  # storage, stay -> names of its values
        self.swapped: dict[str, str] = {}

    def step(self, i: int, step: Step) -> None:
        self.at[i] = len(self.nodes)
        if step.kind == "compute":
            self.emit(i, step.op, frozenset(self.graph.uses.defines[step.op]), again=False)
        elif step.kind == "recompute":
            self.emit(i, step.op, frozenset(step.storages), again=True)
        elif step.kind != "free":
            raise Unsupported(
                f"a step of kind {step.kind!r} in a model", "onnx has nodes for computing only",
                "plan with recomputation only",
            )  # fmt: skip

    def emit(self, i: int, op: int, kept: frozenset[int], *, again: bool) -> None:
        original = self.proto.node[self.program.nodes[op]]
        node = onnx.NodeProto()
        node.CopyFrom(original)
        read = [v for v in self.graph.ops[op].inputs if v not in self.program.parts]
        needed = {self.graph.values[v].name: self.current(i, v) for v in read}
        _rename_inputs(node, {old: new for old, new in needed.items() if old != new})
        defined = set(self.graph.uses.defines[op])
        for s in defined & kept:
            self.stay[s] += 1
            self.made[s, i] = self.stay[s]
        if again:
            n = self.clones[op] = self.clones.get(op, 0) + 1
            node.name = _fresh(f"{self.graph.ops[op].name}__again{n}", self.called)
        for k, name in enumerate(node.output):
            if not name:
                continue
            v = self.number[name]
            s = self.graph.values[v].storage
            if again:
                node.output[k] = _fresh(f"{name}__again{self.clones[op]}", self.taken)
            if s in kept or s not in defined:
                self.name[v] = node.output[k], self.stay[s]
                self.names.setdefault((s, self.stay[s]), []).append(node.output[k])
        for v in self.program.parts.intersection(self.graph.ops[op].outputs):
            s = self.graph.values[v].storage
            self.names.setdefault((s, self.stay[s]), []).append(self.graph.values[v].name)
        self.nodes.append(node)

    def current(self, i: int, v: int) -> str:
        """The name of a value's bytes at step ``i``; views of what has been made again are made again."""
        s = self.graph.values[v].storage
        if s in self.graph.static and v not in self.maker:
            return self.graph.values[v].name
        if v not in self.name:
            fault = f"{self.graph.values[v].name!r} is read before the op that computes it"
            raise BadInput(fault, place=f"step {i} of the plan")
        name, stay = self.name[v]
        if stay == self.stay[s]:
            return name
        op = self.maker[v]
        if viewed(self.proto.node[self.program.nodes[op]]) is None:
            raise BadInput(f"{self.graph.values[v].name!r} is read but not recomputed", place="plan")
        self.emit(i, op, frozenset(), again=True)
        return self.name[v][0]

    def finish(self) -> list[Any]:
        """The nodes, in which results have the names the model's users know."""
        swap: dict[str, str] = {}
        for v in self.graph.outputs:
            if v in self.program.parts:
                continue
            if v in self.maker and (now := self.current(-1, v)) != (known := self.graph.values[v].name):
                swap |= {now: known, known: now}
        if swap:
            for node in self.nodes:
                _rename_inputs(node, swap)
                for k, name in enumerate(node.output):
                    node.output[k] = swap.get(name, name)
        self.swapped = swap
        return self.nodes

    def offsets(self, plan: Plan) -> dict[str, list[int]]:
        """Offset, size, first and last position by name, for every stay of a storage in memory."""
        found: dict[str, list[int]] = {}
        for r in plan.residences:
            stay = self.made.get((r.storage, r.start))
            if stay is None:
                continue  # scratch, or made by a recomputation and not kept
            last = self.at[r.end] if r.end < len(plan.steps) else len(self.nodes)
            for name in self.names.get((r.storage, stay), ()):
                found[self.swapped.get(name, name)] = [r.offset, r.size, self.at[r.start], last]
        return found


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _names_in(graph: Any) -> set[str]:
    names = {x.name for x in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)}
    for node in graph.node:
        names.update(node.output)
        for inner in bodies(node):
            names |= _names_in(inner)
    return names


def _rename_inputs(node: Any, names: Mapping[str, str]) -> None:
    """Put new names for what a node reads, also where a graph inside it reads it."""
    if not names:
        return
    for k, name in enumerate(node.input):
        node.input[k] = names.get(name, name)
    for graph in bodies(node):
        own = {x.name for x in (*graph.input, *graph.initializer)} | {n for x in graph.node for n in x.output}
        outside = {old: new for old, new in names.items() if old not in own}
        for inner in graph.node:
            _rename_inputs(inner, outside)
        for out in graph.output:
            out.name = outside.get(out.name, out.name)


def _rearranged(program: Program, nodes: list[Any], plan: Plan, offsets: dict[str, list[int]]) -> Any:
    """A copy of the model with other nodes and with the plan in its metadata."""
    proto = onnx.ModelProto()
    proto.CopyFrom(program.model.proto)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    notes = [(e.key, e.value) for e in proto.metadata_props if e.key not in _KEYS]
    columns = ["offset", "size", "made_at", "freed_before"]
    table = {"arena": plan.arena, "columns": columns, "values": offsets}
    notes += [
        (KEY_PLAN, dumps_plan(plan).decode()), (KEY_OFFSETS, json.dumps(table, separators=(",", ":"))),
    ]  # fmt: skip
    del proto.metadata_props[:]
    for key, value in notes:
        proto.metadata_props.add(key=key, value=value)
    _declare(proto, program)
    _name_dimensions(proto, program)
    return proto


def _name_dimensions(proto: Any, program: Program) -> None:
    """Say of a result that onnxruntime may write over an input that both have one shape. It does so only where it
    knows that, and of sizes which it cannot infer it knows nothing unless they have names."""
    values = {v.name: v for k, v in enumerate(program.graph.values) if k not in program.parts}
    made = {n for node in proto.graph.node for n in node.output}
    infos = {x.name: x for x in (*proto.graph.value_info, *proto.graph.output)}
    for node in proto.graph.node:
        for i in may_overwrite(node, IN_PLACE[0]):
            pair = [values.get(n) for n in (node.input[i], node.output[0])]
            one, other = pair
            if one is None or other is None or one.shape != other.shape or one.name not in made:
                continue
            for v in (one, other):
                if v.name not in infos:
                    infos[v.name] = proto.graph.value_info.add(name=v.name)
                    infos[v.name].type.tensor_type.elem_type = element_type(v.dtype)
            _one_shape(infos[one.name], infos[other.name], len(one.shape))


def _one_shape(given: Any, made: Any, rank: int) -> None:
    """Give two values the same dimensions, those of unknown size by names of their own."""
    rows = []
    for info in (given, made):
        info.type.tensor_type.shape.SetInParent()
        dims = info.type.tensor_type.shape.dim
        while len(dims) < rank:
            dims.add()
        rows.append(dims)
    for axis, (a, b) in enumerate(zip(*rows, strict=True)):
        known = next((d.dim_value for d in (a, b) if d.HasField("dim_value")), None)
        name = next((d.dim_param for d in (a, b) if d.dim_param), f"tightship.{given.name}.{axis}")
        for d in (a, b):
            if known is None:
                d.dim_param = name
            else:
                d.dim_value = known


def _declare(proto: Any, program: Program) -> None:
    """Inputs and results without a type or a shape get them, the shape's rank alone: the checker asks for them, and
    runtimes do not."""
    tensors_ = (v for k, v in enumerate(program.graph.values) if k not in program.parts)
    values = {v.name: v for v in tensors_ if v.dtype != TensorType(NO_TENSOR).name}
    for x in (*proto.graph.input, *proto.graph.output):
        if x.name not in values or x.type.WhichOneof("value") not in (None, "tensor_type"):
            continue
        found, tensor = values[x.name], x.type.tensor_type
        if not tensor.elem_type:
            tensor.elem_type = element_type(found.dtype)
        if not tensor.HasField("shape"):
            tensor.shape.SetInParent()
            for _ in found.shape:
                tensor.shape.dim.add()


# --- external data ---


def bring_data(model: Model, folder: Path) -> list[Path]:
    """External data beside the new file: the same, or a copy (links the checker refuses); never over another, and all
    of it or none. Returns what was copied."""
    made = list[Path]()
    if os.path.realpath(model.path.parent) != os.path.realpath(folder):
        with _removed_unless_done(made):
            _copy_data(model, folder, made)
    return made


@contextlib.contextmanager
def _removed_unless_done(paths: list[Path]) -> Iterator[None]:
    """What is there when the context fails, or a signal ends it, is not left: nobody reads it."""
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _copy_data(model: Model, folder: Path, made: list[Path]) -> None:
    source = model.path.parent
    for location in sorted({about["location"] for t in tensors(model.proto) if (about := external(t))}):
        old, new = source / location, folder / location
        try:
            if new.exists():
                if not filecmp.cmp(old, new, shallow=False):
                    raise BadInput(
                        f"external data would replace another file, {str(new)!r}; write into another folder",
                        place=str(folder),
                    )
                continue
            new.parent.mkdir(parents=True, exist_ok=True)
            with part_of(new) as part:
                shutil.copyfile(old, part)
                made.append(new)
                os.replace(part, new)
        except OSError as error:
            fault = f"cannot write external data {location!r}: {error.strerror or error}"
            raise BadInput(fault, place=str(folder)) from error


def data_name(target: Path, data: Path) -> str:
    """A name for ``data`` beside ``target``, after its own: one that is free there, or that of a file like it."""
    numbered = (f"{target.name}.{k}.data" for k in itertools.count(2))
    for name in itertools.chain([f"{target.name}.data"], numbered):
        there = target.with_name(name)
        if not os.path.lexists(there) or (there.is_file() and filecmp.cmp(data, there, shallow=False)):
            return name
    raise AssertionError("numbers do not end")


def rename_data(model: Model, data: Path, name: str) -> None:
    """Another name for a file of a model's external data."""
    os.replace(data, data.with_name(name))
    for tensor in tensors(model.proto):
        if external(tensor).get("location") == data.name:
            next(e for e in tensor.external_data if e.key == "location").value = name
