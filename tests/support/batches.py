"""What the tests' models are trained on: ``batch_fn(step)`` is always the same for the same step."""

import inspect
from typing import Any

import torch
import torch.nn.functional as F


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def tokens(step: int, vocabulary: int = 64, shape: tuple[int, int] = (2, 12)) -> torch.Tensor:
    return torch.randint(3, vocabulary, shape, generator=generator(step))


def language_batch(step: int) -> dict[str, torch.Tensor]:
    ids = tokens(step)
    return {"input_ids": ids, "labels": ids}


def masked_batch(step: int) -> dict[str, torch.Tensor]:
    """A batch whose second row is padded, with another amount of padding in each step."""
    ids = tokens(step)
    mask = torch.ones_like(ids)
    mask[1, -2 - step % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def image_batch(size: int = 32, channels: int = 3, classes: int = 4, key: str = "pixel_values"):
    def batch(step: int) -> dict[str, torch.Tensor]:
        g = generator(step)
        x = torch.randn(2, channels, size, size, generator=g)
        return {key: x, "labels": torch.randint(0, classes, (2,), generator=g)}

    return batch


def labeled(step: int, classes: int = 3) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(step), "labels": torch.randint(0, classes, (2,), generator=generator(step))}


def seq2seq_batch(step: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(step), "labels": tokens(step + 500, shape=(2, 7))}


def cross_entropy(net, batch):
    x, y = batch
    return F.cross_entropy(net(x), y)


def pairs(shape: tuple[int, ...], classes: int = 4):
    def batch(step: int):
        g = generator(step)
        return torch.randn(*shape, generator=g), torch.randint(0, classes, shape[:1], generator=g)

    return batch


def cache_argument(model: Any) -> str:
    """What a language model of transformers, or its class, takes the cache as: renamed in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
