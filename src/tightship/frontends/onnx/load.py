"""A model's file -> its protobuf message: bounded, without weights, functions inlined.

Nothing is believed that can be checked cheaply: what is not weights is taken out of the file and measured before it
is parsed, see `wire`; functions are counted before they are inlined, because twenty lines can stand for a billion
nodes; a path to weights must lead to a place within the model's folder.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx
import onnx.inliner
import onnx.shape_inference
import onnx.version_converter
from google.protobuf.message import DecodeError

from tightship.errors import BadInput, Unsupported
from tightship.files import unreadable
from tightship.frontends.builder import UniqueNames
from tightship.frontends.onnx import wire
from tightship.frontends.onnx.nested import bodies, read_by
from tightship.frontends.onnx.sequences import listed, sliced
from tightship.frontends.onnx.wire import held_lists

__all__ = [
    "LARGEST_FILE",
    "LARGEST_STRUCTURE",
    "MOST_NODES",
    "OLDEST",
    "Model",
    "check_external",
    "external",
    "fixed_weights",
    "has_sparse",
    "read",
    "stamp",
    "tensors",
]

LARGEST_FILE: Final = 2**31 - 1
"""Bytes a protobuf file may have; larger models keep their weights beside it."""
LARGEST_STRUCTURE: Final = 1 << 27
"""Bytes of a file that may be other than weights."""
MOST_NODES: Final = 1_000_000
"""Nodes a model may have once its functions are inlined."""
OLDEST: Final = 13
"""The oldest opset that is read as it is; older models are converted to it."""

_MAP: Final = "SequenceMap"
_FAULT: Final = "not an ONNX model (a protobuf message of type ModelProto)"


@dataclass(frozen=True)
class Model:
    """A model as it was read: ``proto`` without functions, external data, and the contents of large tensors (see
    `wire.held`), from the file at ``path``, which had this ``stamp``; ``notes`` say what was changed on the way."""

    path: Path
    proto: Any
    inlined: int = 0
    stamp: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def opsets(self) -> dict[str, int]:
        """Version by domain; the default domain is ``""``."""
        return {_domain(o.domain): o.version for o in self.proto.opset_import}


def read(path: str | os.PathLike[str], *, convert: bool = True) -> Model:
    """Read a model's file; external data stays where it is.

    A model of an opset older than `OLDEST` is converted by onnx's converter, without its weights, which stay where
    they are; without ``convert`` it stays as it is. Raises ``BadInput`` naming file and place for whatever is wrong
    with it, ``Unsupported`` for an old opset that the converter does not take.
    """
    place = os.fspath(path)
    data, known = _opened(path)
    proto = _parsed(data, place)
    try:
        _check(proto, place)
        _check_text(proto, place)
        _one_name(proto)
        for tensor in tensors(proto):
            check_external(tensor, Path(place).parent, place)
        if convert and not {t.name for t in proto.graph.initializer} <= {i.name for i in proto.graph.input}:
            fixed_weights(proto)  # as runtimes have it: the oldest format knows no such weights
        notes: tuple[str, ...] = ()
        if any([_sorted(g) for g, _ in [*_graphs(proto)][::-1] if g is not None]):  # inner ones first
            notes = ("nodes that stood before what they read are in order",)
        inlined = len(proto.functions)
        if inlined:
            proto = _inlined(proto, place)
        proto = _maps_as_loops(proto, place)
        proto, said = _converted(proto, place) if convert else (proto, ())
        notes += said
        if parts := sum(sliced(g) for g, _ in _graphs(proto) if g is not None):
            notes += (f"{parts} tensors that are read from sequences of parts are slices",)
        if lists := sum(listed(g) for g, _ in _graphs(proto) if g is not None):
            notes += (f"{lists} nodes read the tensors of sequences themselves",)
        if names := sum(_told_apart(nodes) for _, nodes in _graphs(proto)):
            notes += (f"onnxruntime loads no two nodes of one name: {names} renamed",)
    except UnicodeError as error:
        raise BadInput("a name that is not UTF-8", place=place) from error
    except RecursionError as error:
        raise BadInput("graphs nested too deep", place=place) from error
    return Model(Path(place), proto, inlined, known, notes)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _opened(path: str | os.PathLike[str]) -> tuple[bytes, tuple[int, ...]]:
    """What a file holds besides weights, and what it can be recognized by."""
    place = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would not even open
            raise BadInput("not a regular file", place=place)
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if about.st_size > LARGEST_FILE:
                fault = f"file of {about.st_size} bytes; the largest is {LARGEST_FILE}, keep weights in external data"
                raise BadInput(fault, place=place)
            return wire.slim(wire.from_file(file.fileno()), about.st_size, LARGEST_STRUCTURE), stamp(about)
    except wire.TooLarge as error:
        fault = f"{error.args[0]} bytes that are not weights (a message counted as 64 at least)"
        raise BadInput(f"{fault}; the limit is {LARGEST_STRUCTURE}", place=place) from error
    except OSError as error:
        raise unreadable(error, place) from error
    except ValueError as error:
        raise BadInput(f"{_FAULT}: {error}", place=place) from error


def stamp(about: os.stat_result) -> tuple[int, ...]:
    """What a file that has not been touched has kept."""
    return about.st_size, about.st_mtime_ns, about.st_ino, about.st_dev


def _parsed(data: bytes, place: str) -> Any:
    try:
        proto = onnx.ModelProto.FromString(data)
    except (DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise BadInput(f"{_FAULT}: {error}", place=place) from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise BadInput(f"{_FAULT}: it has no graph or no opsets", place=place)
    for what, version in (("IR", proto.ir_version), *(("opset", o.version) for o in proto.opset_import)):
        if not 0 <= version < 1 << 31:
            raise BadInput(f"{_FAULT}: there is no {what} version {version}", place=place)
    return proto


def _check(proto: Any, place: str) -> None:
    newest, version = onnx.defs.onnx_opset_version(), _opset(proto)
    if version > newest:
        fault = f"unknown opset {version}; the installed onnx {onnx.__version__} knows opsets up to {newest}"
        raise BadInput(fault, place=place)


def fixed_weights(proto: Any, inputs: Collection[str] | None = None) -> None:
    """Leave only ``inputs`` among a model's inputs (None: all that are no weights). In the oldest files every weight
    is listed as an input, which from IR version 4 on says that a caller may replace it."""
    if proto.ir_version >= 4:
        return
    weights = {t.name for t in proto.graph.initializer}
    kept = [i for i in proto.graph.input if (i.name not in weights if inputs is None else i.name in inputs)]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    proto.ir_version = _IR_OF_OLDEST


def _opset(proto: Any) -> int:
    return max((int(o.version) for o in proto.opset_import if _domain(o.domain) == ""), default=OLDEST)


def _graphs(proto: Any) -> Iterator[tuple[Any, Any]]:
    """Every graph of a model with its nodes, also those inside nodes; of a function the nodes alone."""
    work = [*((None, f.node) for f in proto.functions), (proto.graph, proto.graph.node)]
    while work:
        graph, nodes = work.pop()
        yield graph, nodes
        work += ((g, g.node) for node in nodes for g in bodies(node))


def _check_text(proto: Any, place: str) -> None:
    """Names that are not UTF-8 come as bytes, and would go wrong in a hundred places."""
    names: list[Any] = [x for f in proto.functions for x in (f.name, f.domain, *f.input, *f.output)]
    names += [o.domain for o in proto.opset_import]
    for graph, nodes in _graphs(proto):
        if graph is not None:
            names.append(graph.name)
            for info in (*graph.input, *graph.output, *graph.value_info):
                names.append(info.name)
                names.extend(d.dim_param for d in info.type.tensor_type.shape.dim)
            for tensor in graph.initializer:
                names.append(tensor.name)
                names.extend(x for e in tensor.external_data for x in (e.key, e.value))
        for node in nodes:
            names += [node.name, node.op_type, node.domain, *node.input, *node.output]
            names += [x for e in node.metadata_props for x in (e.key, e.value)]
            names += [a.name for a in node.attribute]
    wrong = next((n for n in names if not isinstance(n, str)), None)
    if wrong is not None:
        raise BadInput(f"name that is not UTF-8: {wrong!r}", place=place)


# --- nodes in order ---


def _sorted(graph: Any) -> bool:
    """Put nodes after what they read, as onnx wants it and onnxruntime does for itself (converters to float16 append
    their casts). Whether anything moved; a cycle is left to whoever reads the graph next."""
    maker = {o: k for k, n in enumerate(graph.node) for o in n.output if o}
    read = [{maker[i] for i in read_by(n) if i in maker} for n in graph.node]
    if all(max(row, default=-1) < k for k, row in enumerate(read)):
        return False
    readers: list[list[int]] = [[] for _ in read]
    for k, row in enumerate(read):
        for m in row:
            readers[m].append(k)
    missing = [len(row) for row in read]
    ready, order = [k for k, many in enumerate(missing) if not many], []
    while ready:  # a heap: of those that are ready the first in the file
        order.append(k := heapq.heappop(ready))
        for r in readers[k]:
            missing[r] -= 1
            if not missing[r]:
                heapq.heappush(ready, r)
    if len(order) < len(read):
        return False
    nodes = [graph.node[k] for k in order]
    copied = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copied)
    return True


def _one_name(proto: Any) -> None:
    """Onnx's own domain by one name, which it may also have as ``ai.onnx``: onnx's checker and converter know one."""
    named = [n for _, nodes in _graphs(proto) for n in nodes if n.domain]
    for which in (proto.opset_import, *(f.opset_import for f in proto.functions)):
        if not any(o.domain == "" for o in which):
            named += [o for o in which if o.domain]
    for x in named:
        x.domain = _domain(x.domain)


def _told_apart(nodes: Any) -> int:
    """Give nodes of a graph names of their own, as plans call them (`UniqueNames`), where they have those of others:
    how many."""
    given, taken, count = UniqueNames(n.name for n in nodes if n.name), set[str](), 0
    for node in (n for n in nodes if n.name):
        if node.name in taken:
            node.name = given(node.name)
            count += 1
        taken.add(node.name)
    return count


def has_sparse(proto: Any) -> bool:
    """Whether a model has weights of which only some elements are written."""
    return any(graph is not None and len(graph.sparse_initializer) for graph, _ in _graphs(proto))


# --- weights beside the file ---


def tensors(proto: Any) -> Iterator[Any]:
    """Every tensor of a model's graph that may have its bytes elsewhere: initializers and attributes."""
    for graph, nodes in _graphs(proto):
        if graph is not None:
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for a in (a for node in nodes for a in node.attribute):
            if a.HasField("t"):
                yield a.t
            yield from a.tensors


def external(tensor: Any) -> dict[str, str]:
    """Where a tensor's bytes are (location, offset, length, …); empty if they are in the message."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return {}
    return {entry.key: entry.value for entry in tensor.external_data}


def check_external(tensor: Any, folder: Path, place: str) -> None:
    """Raise ``BadInput`` for a path that leads out of ``folder``, by name or by link, or a range that is none."""
    about = external(tensor)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    where = f"{place}: tensor {tensor.name!r}"
    location = about.get("location", "")
    leads_out = os.path.isabs(location) or os.path.normpath(location).split(os.sep)[0] == ".."
    if not location or "\0" in location or leads_out:
        raise BadInput(
            f"external data at {location!r}; give a relative path in the model's folder", place=where
        )
    root = os.path.realpath(folder)
    if os.path.commonpath([root, os.path.realpath(os.path.join(root, location))]) != root:
        fault = f"external data at {location!r} lies outside of the model's folder when links are followed"
        raise BadInput(fault, place=where)
    for key in ("offset", "length"):
        if key in about and not (about[key].isascii() and about[key].isdigit() and len(about[key]) < 19):
            raise BadInput(f"{key} of external data is {about[key]!r}, not a number of bytes", place=where)


# --- functions ---


def _inlined(proto: Any, place: str) -> Any:
    """The same model without functions."""
    count, size = _expanded(proto, place)
    if count > MOST_NODES:
        raise BadInput(
            f"{count} nodes once its functions are inlined; the limit is {MOST_NODES}", place=place
        )
    if size > LARGEST_STRUCTURE:
        fault = f"nodes of {size} bytes once its functions are inlined; the limit is {LARGEST_STRUCTURE}"
        raise BadInput(fault, place=place)
    _to_one_opset(proto)
    try:
        made = onnx.inliner.inline_local_functions(proto)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BadInput(f"cannot inline the model's functions: {error}", place=place) from error
    for f in made.functions:  # onnx leaves those of other opsets where they are
        versions = {_domain(o.domain): o.version for o in f.opset_import}
        raise Unsupported(
            f"{place}: function {f.name!r} of opset {versions.get('', 'none')} in a model of opset {_opset(proto)}",
            "onnx does not inline functions of another opset",
            "convert it with onnx.inliner.inline_local_functions(model, convert_version=True)",
        )
    return made


def _to_one_opset(proto: Any) -> None:
    """Give functions the model's opset where all of their ops are the same in both: onnx inlines no others."""
    version = _opset(proto)
    for f in proto.functions:
        own = next((o for o in f.opset_import if _domain(o.domain) == ""), None)
        if own is None or own.version == version:
            continue
        work, same = [f.node], True
        while work and same:
            nodes = work.pop()
            work += (g.node for n in nodes for g in bodies(n))
            same = all(_since(n, own.version) == _since(n, version) for n in nodes if not _domain(n.domain))
        if same:
            own.version = version


def _since(node: Any, version: int) -> int:
    """The opset that brought what an opset has for a node's op; 0 for none."""
    known = onnx.defs.has(node.op_type, version, "")
    return int(onnx.defs.get_schema(node.op_type, version, "").since_version) if known else 0


def _maps_as_loops(proto: Any, place: str) -> Any:
    """The same model with a Loop for each SequenceMap, as onnx defines it and onnxruntime runs it."""
    maps = [n for _, nodes in _graphs(proto) for n in nodes if n.op_type == _MAP and not n.domain]
    if not maps:
        return proto
    try:
        made = onnx.inliner.inline_selected_functions(proto, [("", _MAP)], inline_schema_functions=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise BadInput(f"cannot write {_MAP} {maps[0].name!r} as a Loop: {error}", place=place) from error
    if any(n.op_type == _MAP and not n.domain for _, nodes in _graphs(made) for n in nodes):
        raise Unsupported(
            f"{place}: {_MAP} {maps[0].name!r}", "types of what it reads are missing, and onnx writes no Loop for it",
            "declare them (onnx.shape_inference.infer_shapes)",
        )  # fmt: skip
    return made


def _expanded(proto: Any, place: str) -> tuple[int, int]:
    """Nodes of the model after inlining, and their bytes; raises ``BadInput`` for functions that call themselves."""
    functions = {(_domain(f.domain), f.name, f.overload): f for f in proto.functions}
    known: dict[Any, tuple[int, int]] = {}
    open_: set[Any] = set()

    def of(nodes: Any) -> tuple[int, int]:
        counts = [one(n) for n in nodes]
        return sum(n for n, _ in counts), sum(size for _, size in counts)

    def one(node: Any) -> tuple[int, int]:
        inner = sum(of(g.node)[0] for g in bodies(node))
        key = (_domain(node.domain), node.op_type, node.overload)
        if key not in functions:
            return 1 + inner, node.ByteSize()
        if key in open_:
            raise BadInput(f"function {node.op_type!r} calls itself", place=place)
        if key not in known:
            open_.add(key)
            known[key] = of(functions[key].node)
            open_.discard(key)
        return known[key][0] + inner, known[key][1] + node.ByteSize()

    return of(proto.graph.node)


# --- older opsets ---

_IR_OF_OLDEST: Final = 7
"""The version of the file format that came with `OLDEST`."""


_REFUSED: Final = (
    onnx.version_converter.ConvertError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError,
    RuntimeError, ValueError, TypeError, DecodeError,
)  # fmt: skip


def _converted(proto: Any, place: str) -> tuple[Any, tuple[str, ...]]:
    """The same model in opset `OLDEST`, if it is of an older one, and what is said of it.

    The converter sees large tensors without their contents, and keeps names, types and shapes alone: all else is put
    back afterwards.
    """
    version = _opset(proto)
    if version >= OLDEST:
        return proto, ()
    if has_sparse(proto):
        raise _inconvertible(version, place, "it does not take sparse initializers")
    if version < 12:
        _without_masks(proto, version, place)
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    kept, lists = _emptied(bare), _with_lists(proto)
    try:
        made = onnx.version_converter.convert_version(bare, OLDEST)
    except _REFUSED as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise _inconvertible(version, place, said) from error
    _mend(made, version, place)
    for tensor in tensors(made):
        original = kept.pop(tensor.name, None)
        if original is not None:
            tensor.CopyFrom(original)
    for node in (n for _, nodes in _graphs(made) for n in nodes):
        if (original := lists.pop(_key(node), None)) is not None:
            node.CopyFrom(original)
    if lists:
        raise _inconvertible(version, place, f"it drops the node {next(iter(lists.values())).name!r}")
    if kept:
        raise _inconvertible(version, place, f"it drops the tensor {next(iter(kept.values())).name!r}")
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    if [o.name for o in made.graph.output] != [o.name for o in proto.graph.output]:
        raise _inconvertible(version, place, "it renames results")
    for kind in ("node", "initializer"):  # not the types: it makes up names for dimensions
        changed.graph.ClearField(kind)
        getattr(changed.graph, kind).extend(getattr(made.graph, kind))
    fixed_weights(changed)
    changed.ir_version = max(proto.ir_version, _IR_OF_OLDEST)
    for opset in changed.opset_import:
        if _domain(opset.domain) == "":
            opset.version = OLDEST
    return changed, (f"opset {version} converted to {OLDEST} by onnx.version_converter",)


def _mend(proto: Any, version: int, place: str) -> None:
    """What onnx's converter gets wrong without saying so, put right, or refused.

    Until opset 10, Upsample and Resize counted coordinates from the corner and rounded down (Resize to fewer:
    up), of which the converter says nothing to the new op; until 12, Hardmax flattened what comes before its axis.
    """
    if version <= 12 and any(n.op_type == "Hardmax" for _, nodes in _graphs(proto) for n in nodes):
        raise _inconvertible(version, place, "Hardmax meant another thing before opset 13")
    if version > 10:
        return
    known = {
        n.output[0]: a.t
        for _, nodes in _graphs(proto)
        for n in nodes
        for a in n.attribute
        if a.name == "value"
    }
    known |= {t.name: t for graph, _ in _graphs(proto) if graph is not None for t in graph.initializer}
    for node in (n for _, nodes in _graphs(proto) for n in nodes if n.op_type == "Resize" and not n.domain):
        node.attribute.add().CopyFrom(
            onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric")
        )
        if any(a.name == "mode" and a.s == b"linear" for a in node.attribute):
            continue
        scales = known.get(node.input[2])
        factors = [] if scales is None else onnx.numpy_helper.to_array(scales).tolist()
        if not factors or min(factors) < 1 < max(factors):
            raise _inconvertible(
                version, place, "Resize by factors that it does not know rounded in ways of its own"
            )
        rounding = "ceil" if min(factors) < 1 else "floor"
        node.attribute.add().CopyFrom(onnx.helper.make_attribute("nearest_mode", rounding))


def _without_masks(proto: Any, version: int, place: str) -> None:
    """Masks that Dropout makes for nobody are not made, others are refused: until opset 9 they were of another type,
    and until 11 runtimes filled them otherwise, of which the converter says nothing."""
    graphs = list(_graphs(proto))
    needed = {i for _, nodes in graphs for n in nodes for i in n.input}
    needed |= {o.name for graph, _ in graphs if graph is not None for o in graph.output}
    for graph, nodes in graphs:
        dropped = set()
        for node in (n for n in nodes if n.op_type == "Dropout" and not n.domain and len(n.output) > 1):
            if node.output[1] in needed:
                reason = f"the mask of Dropout {node.output[1]!r} meant another thing before opset 12"
                raise _inconvertible(version, place, reason)
            dropped.add(node.output.pop())
        if graph is not None and dropped:
            types = [t for t in graph.value_info if t.name not in dropped]
            del graph.value_info[:]
            graph.value_info.extend(types)


def _inconvertible(version: int, place: str, reason: str) -> Unsupported:
    return Unsupported(
        f"opset {version} of {place}",
        f"onnx.version_converter cannot convert it to {OLDEST}, the oldest that is read: {reason}",
        f"export the model with opset {OLDEST} or newer",
    )


def _with_lists(proto: Any) -> dict[Any, Any]:
    """Nodes of which lists are in the file alone, which the converter would lose. None is of onnx's own ops."""
    return {_key(n): n for _, nodes in _graphs(proto) for n in nodes if held_lists(n)}


def _key(node: Any) -> Any:
    return node.domain, node.op_type, *node.output


def _emptied(proto: Any) -> dict[str, Any]:
    """Take from a model the contents of the tensors that lie elsewhere, and give them names that are theirs alone.
    Returns the tensors as they were, by that name."""
    kept: dict[str, Any] = {}
    named = {t.name for graph, _ in _graphs(proto) if graph is not None for t in graph.initializer}
    for k, tensor in enumerate(tensors(proto)):
        if not tensor.external_data:
            continue
        original = onnx.TensorProto()
        original.CopyFrom(tensor)
        if tensor.name not in named:  # of an attribute: nobody reads it by name
            original.name = tensor.name = f"tightship.tensor.{k}"
        if tensor.name in kept:
            raise Unsupported(
                f"a model of an old opset with two large tensors called {tensor.name!r}",
                "they could not be told apart once it is converted", f"export it with opset {OLDEST} or newer",
            )  # fmt: skip
        kept[tensor.name] = original
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
    return kept
