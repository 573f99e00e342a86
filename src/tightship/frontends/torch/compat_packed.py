"""Ops that read data by themselves. Those of packed sequences read the batch size of each step from memory, in C++,
where a tensor without data has none. What they are made of is called here instead, by the rules of
ATen/native/PackedSequence.cpp and RNN.cpp.

A part of ``compat``, under the same rule: nothing else in tightship may import private interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightship.errors import Unplannable
from tightship.frontends.torch import eager_paths, scalar_lists
from tightship.frontends.torch.compat_capture import nothing_compiled_elsewhere, patched
from tightship.frontends.torch.refusals import told

_TOLIST = FakeTensor.tolist


@contextmanager
def methods_of_tensors(when: Callable[[], bool]) -> Iterator[None]:
    """Methods of stand-ins that no function mode sees do for the code of a step what they do for tensors: they are
    asked for all numbers at once, and for a tensor of the plain class."""

    def tolist(self: torch.Tensor) -> Any:
        return torch.Tensor.tolist(self) if when() else _TOLIST(self)  # type: ignore[no-untyped-call]

    def as_subclass(self: torch.Tensor, kind: type[torch.Tensor]) -> Any:
        if not issubclass(FakeTensor, kind):  # ``type(x)`` of a stand-in is a plain class, too
            what = f"a tensor of the class {kind.__name__} made in a step"
            raise told(Unplannable(what, "its class may do something else", "use plain tensors"))
        return self.view_as(self)

    with patched(FakeTensor, "tolist", tolist), patched(FakeTensor, "as_subclass", as_subclass):
        yield


class DataReaders:
    """Makes such calls. ``contents(tensor, op)`` is a tensor with the data that the ops that follow depend on."""

    def __init__(self, contents: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        self._contents = contents

    def instead(self, func: Any) -> Any:
        """What is called in the place of ``func``. No function mode: some modules take another path under one."""
        name = getattr(func, "__name__", "")
        if name == "_pack_padded_sequence":
            return lambda *args: _Pack.apply(*args, self._contents)  # type: ignore[no-untyped-call]
        if name == "_pad_packed_sequence":
            return lambda *args: _padded(self._contents, *args)
        if name == "tolist":  # stand-ins have one of their own, which `torch.Tensor.tolist(x)` passes by
            return lambda tensor: _TOLIST(tensor)
        if name == "ctc_loss":
            return _by_tensors(func)
        if name not in _PACKED and name != "tensor_split":
            return eager_paths.as_in_eager(scalar_lists.instead(func))

        def called(*args: Any, **kwargs: Any) -> Any:
            if name in _PACKED and args[0].is_cuda and torch.backends.cudnn.enabled:
                raise Unplannable(
                    f"{name} with cuDNN", "it reads where its weights lie, and draws from a state of its own",
                    "say torch.backends.cudnn.enabled = False around it: then it is planned as PyTorch's own ops",
                )  # fmt: skip
            if (
                len(args) > 1
                and isinstance(args[1], torch.Tensor)
                and isinstance(_list_of(name, args), _MANY)
            ):
                packet = getattr(torch.ops.aten, name)
                op = packet.tensor_indices_or_sections if name == "tensor_split" else packet.data
                args = args[0], self._contents(args[1], op), *args[2:]
            return func(*args, **kwargs)

        return called

    @contextmanager
    def active(self) -> Iterator[None]:
        """Packed sequences, wherever modules call for them, tensors made of lists in which tensors are, and what
        takes another path than in eager."""
        packed = [(torch._VF, name) for name in ("_pack_padded_sequence", "_pad_packed_sequence", *_PACKED)]
        functions = ("ctc_loss", *scalar_lists.FUNCTIONS, *eager_paths.FUNCTIONS)
        with ExitStack() as stack:
            for owner, name in (*packed, *((torch, name) for name in functions)):
                stack.enter_context(patched(owner, name, self.instead(getattr(owner, name))))
            stack.enter_context(nothing_compiled_elsewhere())
            stack.enter_context(eager_paths.active())
            yield


def _list_of(name: str, args: Any) -> Any:
    return args[_PACKED[name]] if name in _PACKED else ()


_PACKED = {"lstm": 2, "gru": 3, "rnn_tanh": 3, "rnn_relu": 3}
"""Recurrent nets, and which argument is a list where the first two are a packed sequence."""
_MANY = (list, tuple)


def _by_tensors(func: Any) -> Any:
    """``ctc_loss``, which writes lengths that are lists into a tensor without data. Of tensors on the CPU it makes
    lists in eager, so the numbers are the same."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if args and args[0].device.type == "cpu":
            args = (*args[:2], *map(_lengths, args[2:4]), *args[4:])
            kwargs = {k: _lengths(x) if k in _LENGTHS else x for k, x in kwargs.items()}
        return func(*args, **kwargs)

    return called


def _lengths(given: Any) -> Any:
    return torch.tensor(given, dtype=torch.int64) if isinstance(given, _MANY) else given


_LENGTHS = ("input_lengths", "target_lengths")


class _Pack(torch.autograd.Function):
    """``_pack_padded_sequence``, whose gradient reads data."""

    @staticmethod
    def forward(ctx: Any, given: Any, lengths: Any, batch_first: bool, contents: Any) -> Any:
        op: Any = torch.ops.aten._pack_padded_sequence.default
        packed, _ = op(given, lengths, batch_first)
        steps = int(contents(lengths, op).max())
        sizes = (lengths > torch.arange(steps).unsqueeze(1)).sum(1)  # which follow from the lengths alone
        ctx.mark_non_differentiable(sizes)
        ctx.shape, ctx.batch_first = given.shape, batch_first
        ctx.sizes = contents(sizes, op).tolist()
        return packed, sizes

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        shape = list(ctx.shape)
        if ctx.batch_first:
            shape[:2] = shape[1::-1]
        made, at = gradient.new_zeros(shape), 0
        for step, n in enumerate(ctx.sizes):
            made[step].narrow(0, 0, n).copy_(gradient.narrow(0, at, n))
            at += n
        return made.transpose(0, 1) if ctx.batch_first else made, None, None, None


def _padded(
    contents: Any, data: Any, batch_sizes: Any, batch_first: bool, padding: float, total: int
) -> tuple[Any, Any]:
    """``_pad_packed_sequence``."""
    op: Any = torch.ops.aten._pad_packed_sequence.default
    sizes = contents(batch_sizes, op).tolist()
    if 0 < total < len(sizes):
        raise ValueError(f"total_length={total} is less than the longest sequence of {len(sizes)} steps")
    made = data.new_full((max(total, len(sizes)), sizes[0], *data.shape[1:]), padding)
    at = first = 0
    for step, n in enumerate((*sizes[1:], 0), 1):
        last = sizes[step - 1]
        if n != last:
            count = last * (step - first)
            part = data.narrow(0, at, count).view(step - first, last, *data.shape[1:])
            made.narrow(0, first, step - first).narrow(1, 0, last).copy_(part)
            at, first = at + count, step
    lengths = (batch_sizes.unsqueeze(1) > torch.arange(sizes[0])).sum(0)
    return made.transpose(0, 1) if batch_first else made, lengths
