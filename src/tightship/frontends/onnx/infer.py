"""Shape inference: a type for every value of a model, given the sizes of its symbolic dimensions.

Node by node, in the file's order: onnx's own inference for the node's result types, given the types of its inputs
and the contents of those that are known; then, where all contents are known and few, the node itself is evaluated
(shapes are computed from shapes). A dimension that stays unknown gets a name, and the walk goes on with it, so that
all of them can be named at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import shape_inference

from tightship.errors import BadInput, UnknownSize, Unsupported
from tightship.frontends.onnx import contrib, lists
from tightship.frontends.onnx.constants import (
    MOST,
    constant_tensor,
    constant_type,
    constant_value,
    evaluated,
)
from tightship.frontends.onnx.control_flow import BODIES
from tightship.frontends.onnx.load import Model
from tightship.frontends.onnx.nested import label
from tightship.frontends.onnx.types import (
    MOST_TENSORS,
    Dim,
    Shapes,
    TensorType,
    not_a_tensor,
    parts_of,
    type_of,
)

__all__ = ["Scope", "infer"]

_LIKE_FIRST: Final = frozenset(
    "Gelu FastGelu QuickGelu BiasGelu LayerNormalization SimplifiedLayerNormalization SkipLayerNormalization "
    "SkipSimplifiedLayerNormalization RotaryEmbedding GroupNorm GroupNormalization MeanVarianceNormalization "
    "ThresholdedRelu".split()
)
"""Ops without inference of their own (of any domain) whose first result is like their first input."""


@dataclass
class Scope:
    """What is known of the values of one graph; ``bodies[k]`` are the graphs inside its node ``k``, by attribute.
    Names that it does not know are its parent's."""

    proto: Any
    parent: Scope | None = None
    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    bodies: dict[int, dict[str, Scope]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def type(self, name: str) -> TensorType | None:
        found = self.types.get(name)
        return found if found is not None or self.parent is None else self.parent.type(name)

    def value(self, name: str) -> np.ndarray | None:
        if name in self.types:
            return self.values.get(name)
        return None if self.parent is None else self.parent.value(name)


def infer(model: Model, shapes: Shapes) -> Scope:
    """Types of all values of the model's graph.

    Raises ``UnknownSize`` naming every dimension of an input that has no size, or every dimension if all inputs' have
    one, ``BadInput`` for graphs that make no sense, ``Unsupported`` for values that are not tensors.
    """
    walk = _Walk(model, shapes)
    scope = walk.graph(model.proto.graph, None, None)
    shapes.check_used(walk.names, "--shape")
    if walk.unknown:
        raise walk.missing()
    scope.notes = tuple(walk.notes)
    return scope


MOST_LISTED: Final = 1 << 20
"""Tensors that a model's sequences have, all of them together, at most."""
_HINTED: Final = 8
"""Dimensions that a message writes out as they are given."""
_DECLARE: Final = (
    "an op of a domain that neither onnx nor onnxruntime knows needs the type and shape of its results in the "
    "model's value_info (onnx.helper.make_tensor_value_info)"
)


class _Walk:
    def __init__(self, model: Model, shapes: Shapes) -> None:
        self.model, self.shapes, self.place = model, shapes, str(model.path)
        self.opsets = model.opsets
        self.imports = list(model.proto.opset_import)
        self.unknown: dict[str, str] = {}  # by name: which axis of what it is
        self.of_inputs: tuple[str, ...] = ()  # those among them that are dimensions of the model's inputs
        self.notes: list[str] = []
        self.listed = 0  # tensors in sequences
        self.shapeless: set[str] = set()  # values among them of which not even the rank is known
        self.names: dict[str, None] = {}  # of the dimensions that can be given

    def missing(self) -> UnknownSize:
        """What is said of sizes that are unknown: of those that follow from others, these."""
        asked = list(self.of_inputs or self.unknown)  # with these sizes the others may be known, too
        unknown = [n for n in asked if not (parts := parts_of(n)) or not parts <= self.names.keys()] or asked
        names = ", ".join(f"{n} ({self.unknown[n]})" for n in unknown)
        hint = ",".join(f"{n}={'NxM' if n in self.shapeless else 'N'}" for n in unknown[:_HINTED])
        more = ",…" if len(unknown) > _HINTED else ""
        return UnknownSize(f"unknown size of {names}; give --shape {hint}{more}", place=self.place)

    # --- graphs ---

    def graph(self, proto: Any, parent: Scope | None, inputs: Sequence[TensorType] | None) -> Scope:
        """``inputs`` are the types a body is called with; without them the graph declares its own."""
        scope = Scope(proto, parent)
        for tensor in proto.initializer:
            self._once(scope, tensor.name, f"{self.place}: initializer")
            scope.types[tensor.name] = constant_type(tensor, self.place)
            if scope.types[tensor.name].count <= MOST:
                value = constant_value(tensor, self.model.path.parent, self.place)
                if value is not None:
                    scope.values[tensor.name] = value
        for sparse in proto.sparse_initializer:
            dims = tuple(int(d) for d in sparse.dims)
            scope.types[sparse.values.name] = TensorType(sparse.values.data_type, dims)
        self._inputs(scope, inputs)
        declared = self._declared(proto)
        for k, node in enumerate(proto.node):
            self._node(scope, k, node, declared)
        for out in proto.output:
            if scope.type(out.name) is None:
                raise BadInput(
                    f"no node computes the output {out.name!r}", place=f"{self.place}: graph {proto.name!r}"
                )
        return scope

    def _once(self, scope: Scope, name: str, where: str) -> None:
        if name in scope.types:
            raise BadInput(f"duplicate value {name!r}", place=where)

    def _inputs(self, scope: Scope, given: Sequence[TensorType] | None) -> None:
        names = [i for i in scope.proto.input if i.name not in scope.types]  # initializers may be listed, too
        if given is not None:
            if len(names) != len(given):
                fault = f"{len(names)} inputs where its node passes {len(given)}"
                raise BadInput(fault, place=f"{self.place}: graph {scope.proto.name!r}")
            for i, t in zip(names, given, strict=True):
                scope.types[i.name] = t
            return
        for i in names:
            self._once(scope, i.name, f"{self.place}: input")
            t = type_of(i.type, f"{self.place}: input {i.name!r}")
            scope.types[i.name] = self._resolve(i.name, t, root=True, of=f"input {i.name!r}")
        self.of_inputs = tuple(self.unknown)

    def _declared(self, proto: Any) -> dict[str, TensorType]:
        """What the file says of its values; types that cannot be planned are met where they are made."""
        found = {}
        for info in (*proto.value_info, *proto.output):
            if info.type.WhichOneof("value") == "tensor_type":
                found[info.name] = type_of(info.type, f"{self.place}: value {info.name!r}")
        return found

    def _resolve(
        self, name: str, t: TensorType, *, root: bool, of: str, declared: TensorType | None = None
    ) -> TensorType:
        """The type with names for what is unknown; ``root``: what is unknown begins here; ``of``: what the value
        is."""
        if declared is not None and declared.shape is not None:
            t = _completed(t, declared)
        if t.is_list:
            return self._resolve_list(name, t, root=root, of=of)
        self.names.update((d, None) for d in t.shape or () if isinstance(d, str) and d)
        t = self.shapes.applied(name, t)
        if t.shape is None:
            if root:
                self.names[name] = None
                self.unknown[name] = f"the whole shape of {of}"
                self.shapeless.add(name)
            return t
        dims_: list[Dim] = []
        for axis, d in enumerate(t.shape):
            if d == "":
                d = f"{name}[{axis}]"
                self.names[d] = None
            if isinstance(d, str) and root:
                self.unknown.setdefault(d, f"axis {axis} of {of}")
            dims_.append(d)
        return TensorType(t.dtype, tuple(dims_))

    def _resolve_list(self, name: str, t: TensorType, *, root: bool, of: str) -> TensorType:
        """The same of a sequence, whose tensors are called ``name[0]``, ``name[1]``, …"""
        self.names[name] = None
        t = self.shapes.counted(name, t)
        if t.items is None:
            if root:
                self.unknown[name] = f"the number of tensors in {of}"
            return t
        self.listed += len(t.items)
        if len(t.items) > MOST_TENSORS or self.listed > MOST_LISTED:
            raise Unsupported(
                f"{self.place}: {of}", f"a sequence has at most {MOST_TENSORS} tensors, all together {MOST_LISTED}",
                "cut off the nodes around it (onnx.utils.extract_model)",
            )  # fmt: skip
        items = tuple(
            x
            if x.known and not self.shapes.says(f"{name}[{k}]")
            else self._resolve(f"{name}[{k}]", x, root=root, of=f"tensor {k} of {of}")
            for k, x in enumerate(t.items)
        )
        return lists.with_items(t, items)

    # --- nodes ---

    def _node(self, scope: Scope, k: int, node: Any, declared: Mapping[str, TensorType]) -> None:
        where = f"{self.place}: node {label(node, k)!r} ({node.op_type})"
        names = [n for n in node.input if n]
        inputs = [self.known(scope, n, where) for n in names]
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            self._constant(scope, node, where)
            return
        types = self._results(scope, k, node, where)
        if len(types) < sum(1 for n in node.output if n):
            types += [TensorType(0)] * (len(node.output) - len(types))
        root = all(t.known for t in inputs)
        settled = []
        for name, t in zip(node.output, types, strict=False):
            if not name:
                settled.append(t)
                continue
            self._once(scope, name, where)
            of = f"{name!r}, a result of {node.op_type} {label(node, k)!r}"
            t = self._resolve(name, t, root=root, of=of, declared=declared.get(name))
            if t.known and any(n < 0 for n in t.sizes):
                raise BadInput(f"negative dimension in the shape {t.sizes} of {name!r}", place=where)
            if not t.dtype:
                if self.unknown and (
                    self.of_inputs or not root
                ):  # the runtime is asked for types where sizes are known
                    raise self.missing()
                raise UnknownSize(f"unknown type of the value {name!r}; {_DECLARE}", place=where)
            scope.types[name] = t
            settled.append(t)
        self._evaluate(scope, node, names, settled)

    def known(self, scope: Scope, name: str, where: str) -> TensorType:
        found = scope.type(name)
        if found is None and any(name in node.output for node in scope.proto.node):
            rule = f"value {name!r} is computed from what is computed from it: nodes are in no cycle"
            raise BadInput(rule, place=where)  # nodes in the wrong order alone have been put in order
        if found is None:
            raise BadInput(f"unknown value {name!r}: no node before this one computes it", place=where)
        return found

    def _constant(self, scope: Scope, node: Any, where: str) -> None:
        if len(node.attribute) != 1 or len(node.output) != 1:
            raise BadInput(f"{len(node.attribute)} values of a Constant, which has one", place=where)
        tensor = constant_tensor(node, where)
        self._once(scope, node.output[0], where)
        scope.types[node.output[0]] = constant_type(tensor, where)
        value = constant_value(tensor, self.model.path.parent, where)
        if value is not None:
            scope.values[node.output[0]] = value

    def _evaluate(self, scope: Scope, node: Any, names: Sequence[str], types: Sequence[TensorType]) -> None:
        if node.domain not in ("", "ai.onnx") or not node.output:
            return
        said = lists.value_of(node, [scope.type(n) if n else None for n in node.input])
        if said is not None:
            scope.values[node.output[0]] = said
            return
        if node.op_type in ("Shape", "Size"):
            t = scope.type(node.input[0]) if node.input else None
            if t is None or not t.known:
                return
            bounds = {a.name: int(a.i) for a in node.attribute}
            sizes = t.sizes[bounds.get("start", 0) : bounds.get("end", len(t.sizes))]
            found = np.array(sizes if node.op_type == "Shape" else t.count, dtype=np.int64)
            scope.values[node.output[0]] = found
            return
        known = {n: v for n in names if (v := scope.value(n)) is not None}
        if len(known) < len(set(names)):
            return
        results = evaluated(node, known, types, self.opsets)
        for name, value in zip(node.output, results or (), strict=False):
            if name:
                scope.values[name] = value
                scope.types[name] = TensorType(scope.types[name].dtype, value.shape)
                for axis in range(value.ndim):
                    self.unknown.pop(f"{name}[{axis}]", None)
                self.unknown.pop(name, None)

    def _results(self, scope: Scope, k: int, node: Any, where: str) -> list[TensorType]:
        standard = node.domain in ("", "ai.onnx")
        if standard and node.op_type in BODIES:
            return BODIES[node.op_type](self, scope, k, node, where)
        given = [self.known(scope, n, where) if n else None for n in node.input]
        if lists.handles(node, given):
            return lists.results(node, given, scope.value, where)
        for name, t in zip(node.input, given, strict=True):
            if t is not None and t.is_list:
                raise not_a_tensor(f"{where}: input {name!r}, a sequence")
        domain = "" if standard else node.domain
        version = self.opsets.get(domain)
        if version is None:
            fault = f"unknown domain {node.domain!r}: it is not among the model's opsets (opset_import)"
            raise BadInput(fault, place=where)
        types: dict[str, TensorType] = {}
        if onnx.defs.has(node.op_type, version, domain):
            types = self._by_onnx(scope, node, domain, version, where)
        found = [types.get(name, TensorType(0)) for name in node.output]
        if found and found[0].shape is None and node.op_type in _LIKE_FIRST and node.input:
            like = self.known(scope, node.input[0], where)
            found[0] = TensorType(found[0].dtype or like.dtype, like.shape)
        if standard and node.op_type == "StringNormalizer" and not any(a.strings for a in node.attribute):
            found[0] = self.known(scope, node.input[0], where)  # it has no stopwords to leave out
        standard_ml = domain == contrib.LEARNING
        if all(t.known for t in found) or (onnx.defs.has(node.op_type, version, domain) and not standard_ml):
            return found
        names = [n for n in node.input if n]
        values = {n: v for n in names if (v := scope.value(n)) is not None}
        known = {n: self.known(scope, n, where) for n in names}
        asked = contrib.results(node, known, values, self.opsets)
        if isinstance(asked, str):
            raise BadInput(f"onnxruntime does not take these inputs: {asked}", place=where)
        if asked is None and standard and found[0].shape is None:
            raise BadInput(f"unknown op {node.op_type!r}: it is not in opset {version}", place=where)
        return found if asked is None else asked

    def _by_onnx(
        self, scope: Scope, node: Any, domain: str, version: int, where: str
    ) -> dict[str, TensorType]:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
        inputs = {n: _proto(self.known(scope, n, where)) for n in node.input if n}
        data = {}
        for n in inputs:
            value = scope.value(n)
            if value is not None and value.size <= 1024:
                data[n] = onnx.numpy_helper.from_array(value, n)
        try:
            found = shape_inference.infer_node_outputs(
                schema, node, inputs, data, opset_imports=self.imports, ir_version=self.model.proto.ir_version
            )
        except (
            shape_inference.InferenceError,
            onnx.checker.ValidationError,
            RuntimeError,
            ValueError,
        ) as error:
            said = " ".join(str(error).split())
            raise BadInput(f"inconsistent inputs or attributes: {said}", place=where) from error
        if schema.has_function and not schema.has_type_and_shape_inference_function:
            found = self._by_function(node, domain, inputs)
        for n, t in found.items():
            for axis, d in enumerate(t.tensor_type.shape.dim):
                if d.dim_value < 0:
                    raise BadInput(
                        f"{n!r} would have {d.dim_value} elements along axis {axis}: the inputs' sizes are too small "
                        "for it; give larger ones with --shape",
                        place=where,
                    )
        return {n: type_of(t, f"{where}: {n}") for n, t in found.items() if t.WhichOneof("value")}

    def _by_function(self, node: Any, domain: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Result types of an op that has a function in place of an inference of its own."""
        given = [onnx.ValueInfoProto(name=n, type=t) for n, t in inputs.items()]
        made = [onnx.ValueInfoProto(name=n) for n in node.output if n]
        graph = onnx.helper.make_graph([node], "node", given, made)
        model = onnx.helper.make_model(graph, opset_imports=self.imports, ir_version=8)
        return {o.name: o.type for o in shape_inference.infer_shapes(model).graph.output}

    # --- nodes with graphs inside ---

    def body(
        self, scope: Scope, k: int, name: str, node: Any, types: Sequence[TensorType], where: str
    ) -> Scope:
        found = [a.g for a in node.attribute if a.name == name and a.HasField("g")]
        if not found:
            raise BadInput(f"no graph {name!r}, which a node of this op has", place=where)
        inner = self.graph(found[0], scope, types)
        scope.bodies.setdefault(k, {})[name] = inner
        return inner

    def drop(self, scope: Scope, k: int, name: str, unknown: dict[str, str], notes: int) -> None:
        """Forget a body, and what was unknown or said in it."""
        scope.bodies.get(k, {}).pop(name, None)
        self.unknown = unknown
        del self.notes[notes:]

    def outputs(self, inner: Scope, count: int, where: str) -> list[TensorType]:
        if len(inner.proto.output) != count:
            raise BadInput(
                f"{len(inner.proto.output)} outputs of its body where {count} are needed", place=where
            )
        return [self.known(inner, o.name, where) for o in inner.proto.output]


def _completed(t: TensorType, declared: TensorType) -> TensorType:
    """What was inferred, and where that says nothing, what the file declares."""
    assert declared.shape is not None
    dtype = t.dtype or declared.dtype
    if t.shape is None:
        return TensorType(dtype, declared.shape)
    if len(declared.shape) != len(t.shape):
        return t
    both = zip(t.shape, declared.shape, strict=True)
    return TensorType(dtype, tuple(a if isinstance(a, int) or a else b for a, b in both))


def _proto(t: TensorType) -> Any:
    """A ``TypeProto``, where the shape is left out of what has none."""
    return onnx.helper.make_tensor_type_proto(t.dtype, None if t.shape is None else list(t.shape))
