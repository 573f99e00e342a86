"""PyTorch's own samples of its ops, modules and optimizers, each trained in eager and by tightship.

    python benchmarks/torch_samples.py [--what ops|modules|optimizers] [--mode fit|exact|compiled] [--match REGEX]
                                       [--samples N] [--limit SECONDS]

``op_db``, ``module_db`` and ``optim_db`` of ``torch.testing._internal`` are what PyTorch tests itself with: over 500
differentiable ops, over 100 modules, all optimizers, each with arguments of many kinds. Each sample becomes a model
whose parameters are the tensors that require gradients; it takes steps on batches that scale them by 1, 0, 1.125,
-1e-30 and infinity (modules and optimizers: common ones), as what follows from data may do so then. ``--mode``: by
`tightship.fit` (the default), or by torch.compile with tightship's backend in exact or compiled mode. Losses,
parameters and buffers must be eager's bit by bit, or those of ``aot_eager`` or Inductor where torch.compile itself
runs other ops; with ``fit`` the planned peak must be the measured one. What is neither, nor refused in a sentence, is
printed, and the exit status is 1. Needs expecttest (`pip install --group compatibility`).
"""

from __future__ import annotations

import argparse
import copy
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

import tightship
from tightship.errors import TightshipError

ODD = (1.0, 0.0, 1.125, -1e-30, float("inf"))
USUAL = (1.0, 1.125, 1.25)
GOOD = ("identical", "torch.compile's bits", "in eager", "refused", "eager fails", "no gradient")
STOCK = {"exact": "aot_eager", "compiled": "inductor"}

Sample = tuple[str, Callable[[], nn.Module], tuple[float, ...], Callable[[nn.Module], Any]]
"""Its name, the model, the batches, and its optimizer."""


class Late(Exception):
    pass


class Scaled(nn.Module):
    """``call(*args, **kwargs)`` of a sample; the tensors that require gradients are parameters, times the batch."""

    def __init__(self, call: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call, self.leaves = call, []
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        for k, x in enumerate(leaves):
            if not isinstance(x, torch.Tensor):
                self.leaves.append(x)
            elif x.requires_grad:
                setattr(self, f"p{k}", nn.Parameter(x.detach().clone()))
                self.leaves.append((f"p{k}",))
            else:
                self.register_buffer(f"b{k}", x.detach().clone())
                self.leaves.append((f"b{k}",))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        rows = [x if type(x) is not tuple else getattr(self, x[0]) for x in self.leaves]
        rows = [x * batch if isinstance(x, nn.Parameter) else x for x in rows]
        args, kwargs = pytree.tree_unflatten(rows, self.spec)
        return summed(self.call(*args, **kwargs), batch)


def summed(out: Any, batch: torch.Tensor) -> torch.Tensor:
    total = batch * 0
    for y in pytree.tree_leaves(out):
        if isinstance(y, torch.Tensor) and y.requires_grad:
            total = total + (torch.view_as_real(y) if y.is_complex() else y).sin().sum()
    return total


# --- what PyTorch has samples of ---


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def spread(rows: list[Any], count: int) -> list[Any]:
    return rows[:: max(1, len(rows) // count)][:count]


def ops(count: int) -> Iterator[Sample]:
    from torch.testing._internal import common_methods_invocations as found

    found.wrapper_set_seed = lambda op, *args, **kwargs: op(
        *args, **kwargs
    )  # a step that seeds runs in eager
    for op in found.op_db:
        if not op.supports_autograd or torch.float32 not in op.supported_backward_dtypes("cpu"):
            continue
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        rows = spread(list(op.sample_inputs("cpu", torch.float32, requires_grad=True)), count)
        with suppress(Exception):  # not every sample can be laid out otherwise
            rows.append(rows[0].noncontiguous())
        for k, row in enumerate(rows):
            model = partial(Scaled, op.op, (row.input, *row.args), row.kwargs)
            yield f"{name}[{k}]", model, ODD, sgd


def modules(count: int) -> Iterator[Sample]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for training in (True, False):
            rows = list(info.module_inputs_func(info, "cpu", torch.float32, True, training))
            for k, row in enumerate(spread([r for r in rows if r.forward_input is not None], count)):
                built, given = row.constructor_input, row.forward_input

                def make(
                    info: Any = info, built: Any = built, given: Any = given, on: bool = training
                ) -> nn.Module:
                    torch.manual_seed(0)
                    inner = info.module_cls(*built.args, **built.kwargs)
                    return Scaled(inner, given.args, given.kwargs).train(on)

                yield f"{info.name}[{k}, training={training}]", make, USUAL, sgd


def optimizers(_count: int) -> Iterator[Sample]:
    from torch.testing._internal.common_optimizers import (
        _get_optim_inputs_including_global_cliquey_kwargs,
        optim_db,
    )

    for info in optim_db:
        for row in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
            if row.kwargs.get("differentiable") or row.kwargs.get("capturable"):
                continue

            def made(model: nn.Module, info: Any = info, row: Any = row) -> Any:
                alone = info.optim_cls.__name__ == "Muon"
                own = [p for p in model.parameters() if p.dim() == 2 or not alone]
                return info.optim_cls(own, **copy.deepcopy(row.kwargs))

            yield f"{info.optim_cls.__name__}({row.kwargs})", perceptron, USUAL, made


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return Scaled(inner, (torch.randn(6, 8),), {})


# --- one sample ---


def trained(model: nn.Module, call: Any, optimizer: Any, batches: tuple[float, ...]) -> dict[str, Any]:
    torch.manual_seed(1)
    losses = []
    for x in batches:
        loss = call(torch.tensor(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return state_of(model, losses)


def state_of(model: nn.Module, losses: list[torch.Tensor]) -> dict[str, Any]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()} | dict(enumerate(losses))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(bits(a[k]), bits(b[k])) for k in a)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Comparable: NaN equals NaN."""
    t = t if t.layout is torch.strided else t.to_dense()
    return torch.view_as_real(t).nan_to_num(nan=12345.0) if t.is_complex() else t.nan_to_num(nan=12345.0)


def fitted(
    make: Callable[[], nn.Module], batches: tuple[float, ...], optimizer: Any
) -> tuple[str, dict[str, Any]]:
    """What came of it, and the state; by `tightship.fit`."""
    model = make()
    step = tightship.fit(
        model, lambda m, batch: m(batch), optimizer(model), torch.tensor(batches[0]), "100%",
        cache=None, seconds=1.0, seconds_per_op=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    losses = [step(torch.tensor(x)).detach().clone() for x in batches]
    bytes_ = step.measure()
    if any("eager" in note for note in step.notes):
        return "in eager", state_of(model, losses)
    if bytes_["planned_peak"] != bytes_["measured_peak"]:
        return f"planned {bytes_['planned_peak']}, measured {bytes_['measured_peak']}", state_of(
            model, losses
        )
    return "identical", state_of(model, losses)


def compiled(
    make: Callable[[], nn.Module], batches: tuple[float, ...], optimizer: Any, **kwargs: Any
) -> dict[str, Any]:
    torch._dynamo.reset()
    model = make()
    return trained(model, torch.compile(model, **kwargs), optimizer(model), batches)


def outcome(mode: str, make: Callable[[], nn.Module], batches: tuple[float, ...], optimizer: Any) -> str:
    try:
        model = make()
        if not model(torch.tensor(1.0)).requires_grad:
            return "no gradient"
        wanted, again = (trained(m, m, optimizer(m), batches) for m in (make(), make()))
    except Late:
        raise
    except Exception:  # negative samples, closures, backward passes that there are not
        return "eager fails"
    if not same(wanted, again):
        return "eager fails"
    try:
        if mode == "fit":
            word, found = fitted(make, batches, optimizer)
        else:
            options = {"budget": "100%", "mode": mode, "seconds": 1.0}
            word, found = (
                "identical",
                compiled(make, batches, optimizer, backend="tightship", options=options),
            )
    except TightshipError:
        return "refused"
    except Late:
        raise
    except Exception as error:
        stock = failing(make, batches, optimizer, mode)
        return (
            "eager fails" if stock else f"raised {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
    if same(wanted, found):
        return word
    if mode != "fit" and same(compiled(make, batches, optimizer, backend=STOCK[mode]), found):
        return "torch.compile's bits"
    return "other results"


def failing(make: Callable[[], nn.Module], batches: tuple[float, ...], optimizer: Any, mode: str) -> bool:
    """Whether torch.compile fails at it with its own backend, too."""
    if mode == "fit":
        return False
    try:
        compiled(make, batches, optimizer, backend=STOCK[mode])
    except Late:
        raise
    except Exception:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("ops", "modules", "optimizers"), default="ops")
    parser.add_argument("--mode", choices=("fit", "exact", "compiled"), default="fit")
    parser.add_argument("--match", default="", metavar="REGEX")
    parser.add_argument("--samples", type=int, default=3, help="of each op, or of each mode of a module")
    parser.add_argument("--limit", type=int, default=90, metavar="SECONDS", help="for one sample")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def late(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    counts: Counter[str] = Counter()
    for name, make, batches, optimizer in globals()[options.what](options.samples):
        if not re.search(options.match, name):
            continue
        signal.alarm(options.limit)
        try:
            word = outcome(options.mode, make, batches, optimizer)
        except Late:
            word = "not done"
        signal.alarm(0)
        counts[word if word in (*GOOD, "not done") else "fault"] += 1
        if word not in GOOD:
            print(f"{name}: {word}", flush=True)
    print(", ".join(f"{n} {word}" for word, n in counts.most_common()))
    return int(counts["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())
