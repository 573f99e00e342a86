"""Nodes as a TensorFlow graph has them, free of its messages: names, kinds, inputs by name, and who reads whom.

A node's inputs are ``name`` or ``name:port``, then those it only waits for, as ``^name``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from tightship.errors import BadInput

__all__ = [
    "CONTROL",
    "FEEDS",
    "HANDLES",
    "SWITCHES",
    "VARIABLES",
    "Node",
    "Web",
    "caller_kind",
    "flops_of",
    "forwarded",
    "from_rows",
    "in_order",
    "name_of",
    "reads_handle",
    "to_rows",
    "whole",
    "written_over",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a TensorFlow graph; ``hinted``: it carries ``_recompute_hint``."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    device: str = ""
    hinted: bool = False


def name_of(given: str) -> str:
    """The node that an input comes from: of ``^a`` and of ``a:1`` it is ``a``."""
    return given.lstrip("^").partition(":")[0]


def to_rows(nodes: Iterable[Node]) -> list[list[Any]]:
    """The nodes as JSON has them, for ``Graph.meta``."""
    return [[n.name, n.kind, list(n.inputs), n.device, n.hinted] for n in nodes]


def from_rows(rows: Iterable[Sequence[Any]]) -> list[Node]:
    """What `to_rows` wrote. Raises ``BadInput``."""
    found = []
    for row in rows:
        match row:
            case [str(name), str(kind), [*inputs], str(device), bool(hinted)]:
                found.append(Node(name, kind, tuple(map(str, inputs)), device, hinted))
            case _:
                raise BadInput(
                    f"invalid node {row!r}; write [name, kind, inputs, device, hinted]", place="meta"
                )
    return found


class Web:
    """Nodes by name, what each of them reads, who reads it, and the first-come order of ready nodes.

    Raises ``BadInput`` for names that there are not, or twice, and for cycles."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = {n.name: n for n in nodes}
        if len(self.nodes) != len(nodes):
            twice = next(n.name for k, n in enumerate(nodes) if n.name in {m.name for m in nodes[:k]})
            raise BadInput(f"duplicate node name {twice!r}")
        self.read: dict[str, tuple[str, ...]] = {}
        readers: dict[str, dict[str, None]] = {n.name: {} for n in nodes}
        for n in nodes:
            self.read[n.name] = tuple(dict.fromkeys(map(name_of, n.inputs)))
            for m in self.read[n.name]:
                if m not in readers:
                    raise BadInput(f"unknown input {m!r}", place=f"node {n.name!r}")
                readers[m][n.name] = None
        self.readers = {n: tuple(r) for n, r in readers.items()}
        come = count()
        self.order = in_order(self.read, lambda n: next(come))
        if len(self.order) < len(self.nodes):
            done = set(self.order)
            raise BadInput(f"cycle through node {next(n for n in self.nodes if n not in done)!r}")


def in_order(read: Mapping[str, Collection[str]], key: Callable[[str], Any]) -> list[str]:
    """Names after all that they read, of those that are ready the one of the least key first; those on a cycle, and
    behind it, are left out. A key is asked for once, when its name is ready."""
    readers: dict[str, list[str]] = {n: [] for n in read}
    for n, row in read.items():
        for m in row:
            readers[m].append(n)
    missing = {n: len(row) for n, row in read.items()}
    ready = [(key(n), n) for n, many in missing.items() if not many]
    heapq.heapify(ready)
    order = []
    while ready:
        n = heapq.heappop(ready)[1]
        order.append(n)
        for m in readers[n]:
            missing[m] -= 1
            if not missing[m]:
                heapq.heappush(ready, (key(m), m))
    return order


FEEDS: Final = frozenset("Placeholder PlaceholderV2 PlaceholderWithDefault".split())
VARIABLES: Final = frozenset("Variable VariableV2".split())
HANDLES: Final = frozenset("VarHandleOp VarHandlesOp".split())

SWITCHES: Final = frozenset("Switch RefSwitch _SwitchN".split())
"""Kinds that hand their first input to one of their results, which the second says."""

CONTROL: Final = SWITCHES | frozenset(
    "Enter RefEnter Exit RefExit NextIteration RefNextIteration Merge RefMerge LoopCond".split()
)
"""Kinds that loops and branches are made of."""

_FORWARD: Final = SWITCHES | frozenset(
    "Identity IdentityN RefIdentity Snapshot StopGradient PreventGradient CheckNumerics EnsureShape Reshape Squeeze "
    "ExpandDims Bitcast Enter RefEnter NextIteration RefNextIteration LoopCond ReadVariableOp "
    "DestroyTemporaryVariable OptionalFromValue OptionalGetValue".split()
)
"""Kinds whose results are their inputs' bytes."""
_READS_HANDLE: Final = frozenset(
    "ReadVariableOp VarIsInitializedOp VariableShape ResourceGather ResourceGatherNd Identity IdentityN Switch "
    "StopGradient DestroyResourceOp ResourceStridedSlice".split()
)

Shape = tuple[int, ...]


def caller_kind(kind: str, fed: bool) -> str:
    """What a node's result is where it belongs to the caller (input, constant, parameter), else nothing."""
    if fed or kind in FEEDS:
        return "input"
    if kind == "Const":
        return "constant"
    return "parameter" if kind in VARIABLES or kind in HANDLES else ""


def forwarded(kind: str, port: int, inputs: int) -> int | None:
    """The index of the input whose bytes result ``port`` of a node with so many ``inputs`` is, if it is one."""
    if kind not in _FORWARD or not inputs:
        return None
    return port if kind == "IdentityN" and port < inputs else 0


_ELEMENTWISE: Final = frozenset(
    "Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e BiasAdd Ceil ClipByValue Cos Cosh Digamma Elu Erf "
    "Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Floor Inv Invert LeakyRelu Lgamma Log "
    "Log1p LogSoftmax LogicalNot MatrixBandPart Ndtri Neg OnesLike Reciprocal Relu Relu6 Rint Round Rsqrt Selu "
    "Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Square Tan Tanh ZerosLike".split()
)
"""Kinds whose kernels write their result over the first input, where nothing else needs it."""
_PAIRWISE: Final = frozenset(
    "Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Div DivNoNan EluGrad Equal FloorDiv FloorMod Greater "
    "GreaterEqual Igamma Igammac InvGrad LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalOr Maximum "
    "Minimum Mod Mul MulNoNan NotEqual Pow RealDiv ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad "
    "SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub TanhGrad TruncateDiv "
    "TruncateMod Xdivy Xlog1py Xlogy".split()
)
"""Kinds whose kernels write their result over either of two inputs."""
_ENTROPY: Final = frozenset("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits".split())


def written_over(kind: str, port: int, inputs: int) -> tuple[int, ...]:
    """The inputs, the first choice first, over which the CPU's kernel writes result ``port`` of a node, where the
    input has its type and as many elements and nothing else needs it (``forward_input_or_allocate_output``). As
    TensorFlow 2.21 does it with oneDNN, where batch norm takes new bytes."""
    if kind in _ENTROPY:
        return (0,) if port == 1 else ()
    if port:
        return ()
    if kind in _ELEMENTWISE:
        return (0,)
    if kind in _PAIRWISE:
        return (0, 1)
    if kind in ("Select", "SelectV2"):
        return (1, 2)
    return tuple(range(inputs)) if kind == "AddN" else ()


_WHOLE: Final = frozenset(
    "All Any BroadcastTo Cast Max Mean Min MirrorPad Pack Pad PadV2 Prod Slice Sum Tile".split()
)
"""Kinds whose result is their first input's bytes where it is all of it: nothing is cut off, added or reduced."""


def whole(kind: str, port: int) -> int | None:
    """The input whose bytes a result is where both have one type and as many elements."""
    return 0 if kind in _WHOLE and port == 0 else None


def reads_handle(kind: str) -> bool:
    """Whether a kind that takes a variable's handle only reads the variable; what is not known writes it."""
    return kind in _READS_HANDLE


def flops_of(kind: str, given: Sequence[Shape], made: Sequence[Shape], *, transposed: bool = False) -> int:
    """Floating-point operations of a node with inputs and results of these shapes: products exactly, everything else
    one for each element of the larger side. ``transposed``: of the first factor of a product."""
    if kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3") and len(given[0]) >= 2:
        return 2 * math.prod(made[0]) * given[0][-2 if transposed else -1]
    if kind == "Conv2D" and len(given) > 1 and len(given[1]) == 4:
        return 2 * math.prod(made[0]) * math.prod(given[1][:3])
    if kind == "DepthwiseConv2dNative" and len(given) > 1 and len(given[1]) == 4:
        return 2 * math.prod(made[0]) * math.prod(given[1][:2])
    if kind == "Conv2DBackpropInput" and len(given) > 2 and len(given[1]) == 4:
        return 2 * math.prod(given[2]) * math.prod(given[1][:3])
    if kind == "Conv2DBackpropFilter" and len(given) > 2 and len(made[0]) == 4:
        return 2 * math.prod(given[2]) * math.prod(made[0][:3])
    return max(sum(map(math.prod, given)), sum(map(math.prod, made)), 0)
