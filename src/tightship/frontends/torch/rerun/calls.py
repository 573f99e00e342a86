"""What a single call of a torch function does to a step: whether it looks at contents, runs the caller's code, hands
its argument back, or cannot be answered on stand-ins."""

from __future__ import annotations

from typing import Any

import torch

from tightship.errors import Unplannable
from tightship.frontends.torch import compat, compat_calls
from tightship.frontends.torch.capture.readings import readings_now
from tightship.frontends.torch.capture.tape import Origin
from tightship.frontends.torch.program import tensors_in
from tightship.frontends.torch.rerun.arguments import name_of
from tightship.frontends.torch.rerun.execution import Capturing
from tightship.frontends.torch.rerun.function_trace import FunctionCall, FunctionTrace, add_hook
from tightship.frontends.torch.rerun.outcome import understood

__all__ = [
    "MAKES_DATA",
    "READS",
    "SHOWN",
    "can_look",
    "check_call",
    "functions_in",
    "hands_back",
    "has_already",
    "repeats",
]


MAKES_DATA = {"tensor", "as_tensor", "asarray", "scalar_tensor", "from_numpy", "frombuffer", "from_dlpack"}
"""Functions that make tensors of Python's data, where no tensor is among their arguments."""

READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__", "is_nonzero", "equal",
    "allclose", "numpy", "__array__", "__contains__", "__format__", "__repr__", "__str__", "data_ptr", "__reversed__",
}  # fmt: skip
"""Functions that hand contents to Python: of tensors that the step does not write, they are run in every step."""

SHOWN = {"__repr__", "__format__", "__str__", "numpy", "__array__", "data_ptr", "__dlpack__"}
_CONTENTS = {"tolist", "numpy", "__array__", "__repr__", "__str__", "__format__"}
"""Of these, functions that are given copies of contents in the place of tensors without any."""
_OF_GRADIENTS = ("grad.__get__", "grad.__set__", "backward")
_SETTERS = {"grad.__set__", "set_", "resize_"}


def can_look(name: str, args: Any) -> bool:
    """Whether a function that needs contents can be given copies of them."""
    if name not in _CONTENTS or not args or readings_now() is None:
        return False
    return compat.is_fake(args[0]) or type(args[0]) is torch.Tensor


def check_call(
    name: str, args: Any, kwargs: Any, origin: Origin, trace: FunctionTrace, capture: Capturing
) -> None:
    """Raises ``Unplannable`` for a call, the next one of ``trace``, that ``capture`` cannot do as eager would."""
    if name in SHOWN and not can_look(name, args):
        raise Unplannable(
            f"{name} of a tensor in a step at {origin}", "its contents are there only when the step has run",
            "hand the tensor back as a result and look at it there",
        )  # fmt: skip
    if name in _OF_GRADIENTS and _meets_gradients(name, args, kwargs, capture):
        raise Unplannable(
            f"code of a step at {origin} that reads, sets or adds to gradients from before",
            "it runs before the step adds to them", "clear gradients before such a step",
        )  # fmt: skip
    if name not in _SETTERS or not args:
        return
    n = trace.index.get(id(args[0]))
    own = n is None or n < trace.inputs or n in trace.constants
    if not own or compat.is_fake(args[0]):
        return
    if name == "grad.__set__" and len(args) > 1 and args[1] is None:
        return
    if (
        name == "resize_"
        and tuple(args[1] if args[1:] and type(args[1]) is not int else args[1:]) == args[0].shape
    ):
        return
    raise Unplannable(
        f"{name.removesuffix('.__set__')} of a parameter, buffer or constant set in a step at {origin}",
        "the step runs on stand-ins for them", "set it before the step",
    )  # fmt: skip


def _meets_gradients(name: str, args: Any, kwargs: Any, capture: Capturing) -> bool:
    """Whether a call finds or leaves something else in a parameter's gradient than in eager, where that is the
    one that the step adds to."""
    if name != "backward":
        return capture.adds_to(args[0])
    inputs = kwargs.get("inputs")
    return any(map(capture.adds_to, tensors_in(inputs) if inputs else (None,)))


def has_already(trace: FunctionTrace, tensor: torch.Tensor, data: Any) -> bool:
    """Whether what a tensor's data is set to is what was read there, and is there still: so modules move parameters
    to where they are."""
    for c in reversed(trace.calls):
        if name_of(c.func) == "data.__set__" and c.args[0] is tensor and c.kind != "nothing":
            return False
        if c.answer is data:
            return name_of(c.func) == "data.__get__" and c.args[0] is tensor
    return False


def repeats(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the caller's own Python code runs inside the call or in its backward pass, with an unknown outcome."""
    if func is add_hook:
        return args[1].key is None
    if isinstance(func, compat_calls.Special):
        return None in func.keys or None in func.functions
    return not all(map(understood, functions_in(args, kwargs)))


def functions_in(args: Any, kwargs: Any) -> list[Any]:
    """What may be called among arguments."""
    return [x for x in (*args, *kwargs.values()) if callable(x) and not isinstance(x, (torch.Tensor, type))]


def hands_back(call: FunctionCall) -> bool:
    """Whether an argument came back as the answer, which with another number may be a tensor of its own. Functions
    that write in place always hand it back."""
    if name_of(call.func).endswith("_"):
        return False
    given = {id(t) for t in tensors_in((call.args, call.kwargs))}
    return any(id(t) in given for t in tensors_in(call.answer))
