"""A training run that does not fit: less than half the memory, the same losses to the bit.

    python examples/training.py        # some seconds, on the CPU

A transformer is trained twice from the same weights: by the ordinary loop, and within a budget.
"""

from typing import Any

import torch
from torch import nn

import tightship


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def step() -> dict[str, Any]:
    """The parts of one step: what `tightship plan training:step --budget 45%` asks for, too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 96), blocks, nn.Linear(96, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "loss_fn": loss_of, "optimizer": optimizer, "sample": batches(1)[0]}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(256, (8, 128), generator=made) for _ in range(2)) for _ in range(count)]


def main() -> None:
    data = batches(4)
    model, loss_fn, optimizer, _ = step().values()
    losses = []
    for batch in data:  # the ordinary loop
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    model, loss_fn, optimizer, _ = step().values()  # the same weights again
    train = tightship.fit(model, loss_fn, optimizer, data[0], budget="45%", seconds=2.0)
    print(tightship.Planned(train.plan, train.graph))
    assert [train(batch).item() for batch in data] == losses  # to the bit

    used = train.measure()
    assert used["measured_peak"] == used["planned_peak"] <= used["budget"]
    print("measured peak = planned peak, within the budget; losses equal to the bit")


if __name__ == "__main__":
    main()
