"""Types and sizes of every result of a GraphDef, by TensorFlow's own shape functions; nothing is run.

TensorFlow's importer checks the graph and infers shapes; what it does not know is taken from the attribute
``_output_shapes``, where the graph was written with it. A loop's or branch's results are those of its functions,
for the inputs it has; a list of tensors has as many bytes as its elements. What nobody knows is an
error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import tensorflow as tf

from tightship.errors import BadInput, UnknownSize
from tightship.frontends.builder import bounded
from tightship.frontends.tensorflow.functions import (
    BRANCHES,
    DEEPEST,
    LOOPS,
    Body,
    Frame,
    Library,
    acyclic,
    frames_of,
    inlined,
)
from tightship.frontends.tensorflow.lists import (
    FORWARDS_LISTS,
    GROWS,
    READS_ARRAY,
    STRING,
    WRITES_ARRAY,
    Items,
    Lists,
    Made,
    first_name,
)
from tightship.frontends.tensorflow.load import GraphFile
from tightship.frontends.tensorflow.nodes import FEEDS, HANDLES, in_order, name_of
from tightship.frontends.tensorflow.shapes import (
    SEGMENTS,
    fill,
    form,
    known_shape,
    plain,
    read_as,
    segments_shape,
    split_given,
    static_value,
    with_shapes,
)
from tightship.frontends.tensorflow.turns import Shape, grown, most_turns, turns_until

__all__ = ["Called", "Made", "Types", "infer", "variable_bytes"]


@dataclass(frozen=True)
class Types:
    """By name of a node: its ``results``, whether it is ``stateful`` (not of what it gets alone), and which of its
    inputs it takes as references (``refs``)."""

    results: Mapping[str, tuple[Made, ...]]
    stateful: frozenset[str]
    refs: Mapping[str, tuple[int, ...]]
    called: Mapping[str, tuple[Called, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Called:
    """A function that a node runs, for the inputs that it gives: the graph, its loops, its types."""

    body: Body
    proto: Any
    frames: Mapping[str, Frame]
    types: Types


def infer(
    file: GraphFile,
    shapes: Mapping[str, tuple[int, ...]],
    library: Library,
    frames: Mapping[str, Frame],
    needed: set[str] | None = None,
    *,
    whole: bool = False,
) -> Types:
    """The types of a file's graph for these shapes of its placeholders. Raises ``UnknownSize`` naming every result
    without a size that something ``needed`` (all) reads, ``BadInput`` for what TensorFlow does not accept."""
    fed, said = split_given(file.proto, shapes)
    proto = with_shapes(file, fed) if shapes else file.proto
    return _Inference(str(file.path), proto, library, frames, needed, said=said, whole=whole).run()


class _Inference(Lists):
    """The types of one graph; ``given``: what a function's placeholders are given; ``deep``: functions around it;
    ``said``: shapes of results that follow from data, also of functions' nodes, of which it has ``heard`` those that
    there are; ``whole``: it is all planned, as nothing is fetched; ``function``: which one it is; ``constants``:
    those of its placeholders that have the same small value in every turn."""

    def __init__(
        self,
        place: str,
        proto: Any,
        library: Library,
        frames: Mapping[str, Frame],
        needed: set[str] | None = None,
        given: Mapping[str, Made] | None = None,
        deep: int = 0,
        said: Mapping[str, tuple[int, ...]] | None = None,
        whole: bool = False,
        function: str = "",
        heard: set[str] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        if deep > DEEPEST:
            raise BadInput(f"functions call each other more than {DEEPEST} deep", place=place)
        around = f"{function}/" if function else ""
        nodes = acyclic(proto, frames.values())
        self.all_said, self.heard = said or {}, set[str]() if heard is None else heard
        known = {n.name for n in nodes.node}
        texts = {t: t.removeprefix(around) for t in self.all_said if t.startswith(around)}
        own = {text: t for t, text in texts.items() if text.partition(":")[0] in known}
        self.heard.update(own.values())
        super().__init__(place, around, {text: self.all_said[t] for text, t in own.items()})
        self.proto, self.library, self.needed, self.deep, self.whole = nodes, library, needed, deep, whole
        self.given, self.constants = given or {}, constants or {}
        self.back = {m: back for f in frames.values() for m, (_, back) in f.carried.items()}
        self.nodes = {n.name: n for n in self.proto.node}
        self.called: dict[str, tuple[Called, ...]] = {}
        self.grown: dict[str, tuple[list[Shape], list[Shape]]] = {}  # after a loop's first and last turn
        self.computed: dict[str, Any] = {}  # by result, sizes whose value is known
        self.learned: dict[str, tuple[int, ...]] = {}  # by result, shapes that TensorFlow is told

    def run(self) -> Types:
        place = {n: k for k, n in enumerate(self.nodes)}
        read = {n: list(dict.fromkeys(map(name_of, node.input))) for n, node in self.nodes.items()}
        order = in_order(read, place.__getitem__)
        teaching = [n for n in order if self.nodes[n].op in LOOPS | BRANCHES | _ELEMENT.keys() | WRITES_ARRAY]
        for _ in range(len(teaching) + len(self.said) + _CHAIN):
            self.ops = self._imported()
            self._check_placeholders()
            learned = self._walk(order)
            if not learned and any(self._items_of(b) for b in self.back.values()):
                learned = self._walk(order)  # what lists hold is known where they are written
            if not learned:
                break
        self._check_results()
        self._invariant()
        if not self.deep and (never := [t for t in self.all_said if t not in self.heard]):
            raise BadInput(f"unknown result {never[0]!r}: the function has no such node", place="--shape")
        rest = {n: () for n in self.nodes if n not in self.results}  # on a cycle
        ops = self.ops
        stateful = frozenset(n for n, op in ops.items() if op.op_def.is_stateful)
        refs = {
            n: tuple(i for i, t in enumerate(op._input_types) if t._is_ref_dtype) for n, op in ops.items()
        }
        return Types(self.results | rest, stateful, {n: r for n, r in refs.items() if r}, self.called)

    def _check_placeholders(self) -> None:
        """Raise ``UnknownSize`` naming the graph's placeholders without sizes, from which all others follow."""
        unknown = {}
        for name, node in self.nodes.items():
            if node.op in FEEDS and name not in self.given and (self.needed is None or name in self.needed):
                noted = list(node.attr["_output_shapes"].list.shape) if "_output_shapes" in node.attr else []
                tensor = self.ops[name].outputs[0]
                if tensor.dtype.base_dtype in (tf.variant, tf.resource):
                    continue
                if known_shape(tensor.shape, noted[0] if noted else None) is None:
                    unknown[name] = form(tensor.shape)
        if unknown:
            names = ", ".join(list(unknown)[:_NAMED]) + f" and {len(unknown) - _NAMED} more" * (
                len(unknown) > _NAMED
            )
            hint = ",".join(f"{n}={form}" for n, form in list(unknown.items())[:_NAMED])
            raise UnknownSize(f"unknown size of {names}; give --shape {hint}", place=self.place)

    def _check_results(self) -> None:
        """Raise ``UnknownSize`` naming results without sizes, ``BadInput`` where one has another than it was said."""
        for text, sizes in self.said.items():
            if text in self.learned or text in self.counted:
                continue
            name, _, port = text.partition(":")
            outputs = self.ops[name].outputs
            if not port.isdecimal() or int(port) >= len(outputs):
                raise BadInput(f"unknown result {text!r}; {name} has {len(outputs)}", place="--shape")
            known = outputs[int(port)].shape
            if not known.is_fully_defined() or tuple(known.as_list()) != sizes:
                raise BadInput(f"{text} is {known} in the graph, not {list(sizes)}", place="--shape")
        unknown = [n for n in self.unknown if self.needed is None or name_of(n) in self.needed]
        vague = [n for n in self.vague if self.needed is None or n in self.needed]
        if vague and not unknown:
            raise UnknownSize(self.vague[vague[0]], place=f"{self.place}: node {vague[0]!r}")
        if not unknown:
            return
        names = ", ".join(unknown[:_NAMED]) + f" and {len(unknown) - _NAMED} more" * (len(unknown) > _NAMED)
        name, _, port = unknown[0].partition(":")
        letters = form(self.ops[name].outputs[int(port or 0)].shape)
        asked = f"give --shape {self.around}{unknown[0]}={letters}, or say them where the graph is made"
        asked += " (tf.ensure_shape)"
        if self.whole:
            asked += "; what is not run can be left out: say what is, --fetch NAME"
        raise UnknownSize(f"unknown size of {names}; they follow from data: {asked}", place=self.place)

    def _invariant(self) -> None:
        """Raise ``UnknownSize`` where a loop's value changes its shape from turn to turn."""
        for merge, back in self.back.items():
            first, later = self.results.get(merge, ()), self.results.get(back, ())
            if first and later and first[0].shape != later[0].shape:
                fault = f"the loop's value has shape {list(first[0].shape)} and then {list(later[0].shape)}"
                raise UnknownSize(
                    f"{fault}; carry values of a fixed shape, or use control flow of v2",
                    place=f"{self.place}: node {merge!r}",
                )
        for name, called in self.called.items():
            if self.nodes[name].op in LOOPS:
                given = [self._input(i).shape for i in self.nodes[name].input if not i.startswith("^")]
                made = [m.shape if m else given[k] for k, m in enumerate(_returned(called[1]))]
                begun, ends = self.grown.get(name, (made, given))
                for k, (one, two) in enumerate(zip(ends, made, strict=False)):
                    if one != two:
                        fault = f"value {k} of the loop has shape {list(given[k])} and then {list(begun[k])}"
                        letters = "x".join(
                            str(a) if a == b else "N" for a, b in zip(given[k], begun[k], strict=False)
                        )
                        asked = f"give the shape that it has in the end, --shape {self.around}{name}:{k}={letters}"
                        by_data = name not in self.grown and len(given[k]) == len(begun[k])
                        rule = f"{asked}, or {_STEADY}" if by_data else _STEADY
                        raise UnknownSize(f"{fault}; {rule}", place=f"{self.place}: node {name!r}")

    def _imported(self) -> dict[str, Any]:
        graph = tf.Graph()
        try:
            with graph.as_default():
                tf.graph_util.import_graph_def(self._whole(), name="")
            return {n: graph.get_operation_by_name(n) for n in self.nodes}
        except (ValueError, TypeError, KeyError, RuntimeError, tf.errors.OpError) as error:
            said = " ".join(str(error).split())[:400]
            raise BadInput(f"TensorFlow rejects the graph: {said}", place=self.place) from error

    def _whole(self) -> Any:
        """The graph with the functions of the file, and with the shapes of lists' elements that are known."""
        functional = self.deep > 0 and any(n.op in LOOPS | BRANCHES for n in self.proto.node)
        if not functional and not self.learned and not self.constants and not self.computed:
            return self.proto
        whole = type(self.proto)(node=self.proto.node, versions=self.proto.versions)
        whole.library.CopyFrom(self.library.proto)
        said = {text.removesuffix(":0"): sizes for text, sizes in self.learned.items()}
        for node in whole.node:
            node.input[:] = [read_as(i, said, self.computed) for i in node.input]
            if node.name in self.constants:
                fill(node, self.constants[node.name], node.attr["dtype"].type)
        for text, value in self.computed.items():
            fill(
                whole.node.add(name=f"{plain(text)}/computed"),
                value,
                self._tensor(text).dtype.as_datatype_enum,
            )
        for text, sizes in said.items():
            shaped = whole.node.add(name=f"{plain(text)}/shaped", op="EnsureShape", input=[text])
            shaped.attr["T"].type = self._tensor(text).dtype.base_dtype.as_datatype_enum
            shaped.attr["shape"].shape.CopyFrom(tf.TensorShape(sizes).as_proto())
        return whole

    def _walk(self, order: Iterable[str]) -> bool:
        """Types of all nodes in order; whether shapes became known that TensorFlow is to go on with."""
        self.unknown: list[str] = []
        unknown = self.open = set[str]()  # of these and of those whose shapes are known by now
        found = False
        for name in order:
            node, op = self.nodes[name], self.ops[name]
            bodies: list[tuple[Made | None, ...]] = []
            open_ = not unknown.isdisjoint(map(first_name, node.input))
            if found and open_ and node.op in LOOPS | BRANCHES:
                return True
            left_out = self._is_left_out(name)
            if node.op in LOOPS | BRANCHES and not (open_ and left_out):
                with (
                    suppress(BadInput) if open_ or left_out else nullcontext()
                ):  # what it is given is unknown, and is said, or of no interest
                    self.called[name] = self._bodies(node)
                    bodies = [_returned(c) for c in self.called[name][node.op in LOOPS :]]
            noted = list(node.attr["_output_shapes"].list.shape) if "_output_shapes" in node.attr else []
            row, learned = [], False
            for k, tensor in enumerate(op.outputs):
                shape = known_shape(tensor.shape, noted[k] if k < len(noted) else None)
                if node.op == "ReadVariableOp" and not tensor.shape.is_fully_defined():
                    shape = None  # not all that follows from it was noted
                if shape is None:
                    shape = self.learned.get(f"{name}:{k}")
                if shape is None:
                    shape = _RESERVED.get((node.op, k))
                if shape is None and (inner := _agreed(bodies, k)) is not None:
                    shape, learned = inner.shape, True
                if shape is None:
                    unknown.add(first_name(f"{name}:{k}"))
                if shape is None and self._learns(node, k, tensor.shape, unknown):
                    found, shape = True, ()
                found |= shape is None and self._computes(node)
                if shape is None and tensor.dtype.base_dtype not in (tf.variant, tf.resource):
                    self.unknown.append(name if node.op in FEEDS else f"{name}:{k}")
                    shape = ()
                row.append(self._made(node, k, tensor.dtype, shape or (), bodies))
            self.results[name] = tuple(row)
            found |= node.op in WRITES_ARRAY and self._array_learns(node)
            if learned and "output_shapes" in node.attr:
                node.attr["output_shapes"].list.ClearField("shape")
                node.attr["output_shapes"].list.shape.extend(tf.TensorShape(m.shape).as_proto() for m in row)
                return True
        return found

    def _tensor(self, text: str) -> Any:
        name, _, port = text.partition(":")
        return self.ops[name].outputs[int(port or 0)]

    def _computes(self, node: Any) -> bool:
        """Whether sizes that a node reads are known, and TensorFlow is told: it computes none behind an assertion."""
        data = [i for i in node.input if not i.startswith("^") and first_name(i) not in self.computed]
        tensors = {first_name(i): self._tensor(i) for i in data}
        sizes = {i: t for i, t in tensors.items() if t.dtype.base_dtype.is_integer and t.op.type != "Const"}
        found = {i: value for i, t in sizes.items() if (value := static_value(t)) is not None}
        self.computed |= found
        return bool(found)

    def _is_left_out(self, name: str) -> bool:
        return self.needed is not None and name not in self.needed

    def _learns(self, node: Any, k: int, known: Any, unknown: set[str]) -> bool:
        """Whether a list, a table, a variable outside of a function, constant ids of segments, or the user say the
        shape of a result, which TensorFlow is then told."""
        text = f"{node.name}:{k}"
        if text in self.learned:
            return False
        shape = self.said.get(text)
        if shape is not None and not known.is_compatible_with(shape):
            raise BadInput(f"{text} is {known} in the graph, not {list(shape)}", place="--shape")
        if shape is None and k == _ELEMENT.get(node.op):
            shape = self._element_shape(node, unknown)
        if shape is None and node.op in SEGMENTS:
            shape = segments_shape(self.ops[node.name])
        if shape is None or not known.is_compatible_with(shape):
            return False
        self.learned[text] = shape
        return True

    def _element_shape(self, node: Any, unknown: set[str]) -> tuple[int, ...] | None:
        """What a node takes out of a list, a table or a variable."""
        data = [i for i in node.input if not i.startswith("^")]
        held = self._input(data[0])
        if node.op in READS_ARRAY:
            return self._array_shape(node, data)
        if held.items is None:
            shape = self._read(node, held)
            if node.op == "LookupTableFindV2" and shape is not None:
                return None if first_name(data[1]) in unknown else (*self._input(data[1]).shape, *shape)
            return shape
        shape = held.items.shape
        if shape is not None and node.op == "TensorListStack":
            return None if held.items.count is None else (held.items.count, *shape)
        return (len(shape),) if shape is not None and node.op == "TensorListElementShape" else shape

    def _read(self, node: Any, held: Made) -> tuple[int, ...] | None:
        """The shape of a variable that is read: its handle's, or what was noted where the graph was made."""
        noted = list(node.attr["_output_shapes"].list.shape) if "_output_shapes" in node.attr else []
        if held.variable is not None or not held.handle or not noted:
            return held.variable
        return known_shape(tf.TensorShape(None), noted[0])

    def _bodies(self, node: Any) -> tuple[Called, ...]:
        """The functions a node runs, with types for what it gives them."""
        given = [self._input(i) for i in node.input if not i.startswith("^")]
        if node.op not in LOOPS:
            return self._called_with(node, given[1:])
        found = self._called_with(node, given)
        begun, first = [m.shape for m in given], [m.shape if m else () for m in _returned(found[1])]
        if begun == first:
            return found
        data = [i for i in node.input if not i.startswith("^")]
        bodies = [self.library.body(n) for n in self.library.called(node)]
        turns = self._turns_said(node, begun, first)
        if turns is None:
            turns = most_turns(bodies[0], bodies[1], lambda k: self._constant(data[k]))
        if turns:  # what a turn needs is counted of the last one
            last = [self._of_shape(m, s) for m, s in zip(given, grown(begun, first, turns - 1), strict=True)]
            found, self.grown[node.name] = self._called_with(node, last), (first, grown(begun, first, turns))
        return found

    def _turns_said(self, node: Any, begun: Sequence[Shape], first: Sequence[Shape]) -> int | None:
        """The turns after which a value that a loop carries has the shape that the user says of its result: how many
        they are follows from data."""
        for k, (one, two) in enumerate(zip(begun, first, strict=True)):
            text = f"{node.name}:{k}"
            if one == two or (said := self.said.get(text)) is None:
                continue
            turns = turns_until(one, two, said)
            if turns is None:
                fault = (
                    f"{text} is {list(one)}, and {list(two)} after a turn, which never leads to {list(said)}"
                )
                raise BadInput(fault, place="--shape")
            self.counted.add(text)
            return turns
        return None

    @staticmethod
    def _of_shape(made: Made, shape: tuple[int, ...]) -> Made:
        """The same of another shape."""
        if made.shape == shape or not math.prod(made.shape):
            return made
        return replace(made, shape=shape, nbytes=made.nbytes // math.prod(made.shape) * math.prod(shape))

    def _called_with(self, node: Any, given: list[Made]) -> tuple[Called, ...]:
        """The functions a node runs, with types for ``given``."""
        found, same = [], self._same_in_every_turn(node)
        for name in self.library.called(node):
            body = self.library.body(name)
            if len(body.arguments) != len(given):
                fault = f"{len(given)} inputs for function {name!r} of {len(body.arguments)}"
                raise BadInput(fault, place=f"{self.place}: node {node.name!r}")
            proto = inlined(type(body.proto).FromString(body.proto.SerializeToString()), self.library)
            made = dict(zip(body.arguments, given, strict=True))
            for inner in proto.node:
                if inner.name in made and made[inner.name].dtype not in ("variant", "resource"):
                    inner.attr["shape"].shape.CopyFrom(tf.TensorShape(made[inner.name].shape).as_proto())
            where = f"{self.place}: function {name!r}"
            frames = frames_of(proto, where)
            inner_ = _Inference(
                where, proto, self.library, frames, None, made, self.deep + 1, self.all_said, function=name,
                heard=self.heard, constants={body.arguments[k]: value for k, value in same.items()},
            )  # fmt: skip
            types = inner_.run()
            found.append(Called(body, proto, frames, types))
        return tuple(found)

    def _same_in_every_turn(self, node: Any) -> dict[int, Any]:
        """Of what a loop or branch is given, by position, small values that are known, and that a loop only hands
        on: sizes, mostly, that it computes others with."""
        data = [i for i in node.input if not i.startswith("^")]
        if node.op not in LOOPS:
            data = data[1:]
        else:
            body = self.library.body(self.library.called(node)[1])
            pairs = zip(body.arguments, body.results, data, strict=False)
            data = [text if body.origin(result) == own else "" for own, result, text in pairs]
        values = ((k, self._constant(text)) for k, text in enumerate(data) if text)
        return {k: v for k, v in values if v is not None and v.size <= _SMALL and v.dtype.kind in "iub"}

    def _made(self, node: Any, k: int, dtype: Any, shape: tuple[int, ...], bodies: list[Any]) -> Made:
        where, text = f"{self.place}: node {node.name!r}", f"{node.name}:{k}"
        base = dtype.base_dtype
        if node.name in self.given:
            made = self.given[node.name]
            return replace(made, nbytes=0) if base in (tf.variant, tf.resource) else made
        if base == tf.resource:
            return Made(
                "resource", (), self._held(node, where), handle=True, variable=self._variable(node, k)
            )
        if base != tf.variant:
            nbytes = bounded(math.prod(shape) * (STRING if base == tf.string else base.size), where)
            return Made(base.name, shape, nbytes, ref=dtype._is_ref_dtype)
        items = self._list(node, k, bodies)
        if items is not None and items.count is None and len(said := self.said.get(text, ())) == 1:
            items = replace(items, count=said[0])
            self.counted.add(text)
        if items is None or (node.op not in GROWS and items.total() is None):
            # It is counted where it is made, or where it leaves the loop; what it is made of is asked for first.
            asked = not self.open.isdisjoint(map(first_name, node.input))
            if self.deep or asked or node.op in FORWARDS_LISTS or self._is_left_out(node.name):
                return Made("variant", (), 0, items=items or Items())
            fault = (
                f"unknown bytes of what {node.op} makes, a value that holds others (variant); give loops dense "
                "tensors instead (tf.RaggedTensor.to_tensor), and leave datasets out of the graph (--fetch, --feed)"
            )
            if items is not None:
                fault = (
                    f"a list of tensors of unknown length; give --shape {self.around}{text}=N, the loop that "
                    "fills it a maximum (tf.while_loop(..., maximum_iterations=n)), or the array its size and its "
                    "elements' shape"
                )
            raise UnknownSize(fault, place=where)
        empty = node.op in GROWS
        return Made("variant", (), 0 if empty else bounded(items.total() or 0, where), items=items)

    def _variable(self, node: Any, k: int) -> tuple[int, ...] | None:
        """The shape of the variable, or of a table's values, that result ``k`` is a handle of, where it is known."""
        if (said := _SAYS.get(node.op)) is not None:
            shape = tf.TensorShape(node.attr[said].shape if said else [])
            return tuple(shape.as_list()) if shape.is_fully_defined() else None
        data = [i for i in node.input if not i.startswith("^")]
        at = k if node.op in LOOPS | {"IdentityN"} else 0
        hands_on = node.op in LOOPS | {"IdentityN"} | FORWARDS_LISTS
        return self._input(data[at]).variable if hands_on and at < len(data) else None


_SMALL: Final = 64
"""Elements of a constant that is known inside of a loop or branch."""
_STEADY: Final = (
    "carry values of a fixed shape, or that grow by as much in each of a number of turns that is known "
    "(tf.while_loop(..., maximum_iterations=n))"
)
_CHAIN: Final = 16
"""Times at most that sizes are computed of which others follow."""
_NAMED: Final = 6
"""Values that a message names."""
_RESERVED: Final = {("FusedBatchNormV3", 5): (0,), ("_FusedBatchNormEx", 5): (0,)}
"""By op and result, the shape that kernels for CPUs give what TensorFlow has no shape for: bytes that cuDNN sets
aside for the gradient."""
_ELEMENT: Final = {
    "TensorListElementShape": 0, "TensorListGetItem": 0, "TensorListPopBack": 1, "TensorListStack": 0,
    "ReadVariableOp": 0, "LookupTableFindV2": 0,
    "TensorArrayReadV3": 0, "TensorArrayGatherV3": 0, "TensorArrayConcatV3": 0,
}  # fmt: skip
"""Kinds that take elements out of a list, say their shape, or read a variable or table: as which result."""
_SAYS: Final = {
    **dict.fromkeys(HANDLES, "shape"), "HashTableV2": "", "MutableHashTableV2": "",
    "MutableHashTableOfTensorsV2": "value_shape", "AnonymousHashTable": "", "AnonymousMutableHashTable": "",
    "AnonymousMutableHashTableOfTensors": "value_shape",
}  # fmt: skip
"""Kinds of handles, and the attribute that says the shape of what is read: of one number where there is none. The
keys of these tables are single ones, which those of the others need not be."""


def _returned(called: Called) -> tuple[Made | None, ...]:
    """What a function returns."""
    row = []
    for text in called.body.results:
        name, _, port = text.partition(":")
        made = called.types.results.get(name, ())
        row.append(made[int(port or 0)] if int(port or 0) < len(made) else None)
    return tuple(row)


def _agreed(bodies: list[tuple[Made | None, ...]], k: int) -> Made | None:
    """The result that all functions agree on the shape of."""
    found = [row[k] if k < len(row) else None for row in bodies]
    first = found[0] if found else None
    if first is None or any(m is None or m.shape != first.shape for m in found):
        return None
    return first


def variable_bytes(node: Any, place: str) -> int:
    """Bytes of the variable that a node (``VarHandleOp``) is the handle of. Raises ``UnknownSize``."""
    shape = tf.TensorShape(node.attr["shape"].shape)
    if not shape.is_fully_defined():
        raise UnknownSize(f"unknown size of a variable of shape {shape}", place=place)
    return int(shape.num_elements()) * int(tf.dtypes.as_dtype(node.attr["dtype"].type).size)
