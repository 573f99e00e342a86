"""The demonstration's models: real architectures, random weights, small synthetic data that can be learned.

Nothing is downloaded. A batch is a function of its number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightship.errors import Unsupported

__all__ = ["Workload", "bert", "gpt2", "resnet50", "vit"]

Batch = dict[str, torch.Tensor]
CLASSES, VOCABULARY = 10, 512


@dataclass(frozen=True)
class Workload:
    """``make()`` builds a model to train, with the same weights each time; ``batch(k)`` is its k-th batch."""

    key: str
    title: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], Batch]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        why, instead = f"its models come from transformers ({error})", "pip install 'tightship[demo]'"
        raise Unsupported("the demonstration", why, instead) from error
    transformers.logging.set_verbosity_error()
    return transformers


def _seeded(build: Callable[[Any], torch.nn.Module], config: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build(config).train()

    return make


def _generator(k: int) -> torch.Generator:
    return torch.Generator().manual_seed(1234 + k)


def _counting(batch: int, length: int) -> Callable[[int], Batch]:
    """Sequences that count up in steps of 1 to 4 from anywhere: the next token follows from the last two."""

    def made(k: int) -> Batch:
        g = _generator(k)
        start = torch.randint(0, VOCABULARY, (batch, 1), generator=g)
        stride = torch.randint(1, 5, (batch, 1), generator=g)
        ids = (start + stride * torch.arange(length)) % VOCABULARY
        return {"input_ids": ids, "labels": ids.clone()}

    return made


def _stripes(batch: int, size: int) -> Callable[[int], Batch]:
    """Noisy stripes; the class is their direction."""

    def made(k: int) -> Batch:
        g = _generator(k)
        labels = torch.randint(0, CLASSES, (batch,), generator=g)
        angle = labels.double() * (math.pi / CLASSES)
        row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        along = angle.cos()[:, None, None] * row + angle.sin()[:, None, None] * column
        clean = (along * (8 * math.pi / size)).sin().float()[:, None].expand(-1, 3, -1, -1)
        return {"pixel_values": clean + 0.3 * torch.randn(clean.shape, generator=g), "labels": labels}

    return made


def gpt2(
    *, layers: int = 12, width: int = 256, heads: int = 4, length: int = 128, batch: int = 8
) -> Workload:
    t = _transformers()
    config = t.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=VOCABULARY, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    title, data = f"GPT-2, {layers} layers, width {width}", _counting(batch, length)
    return Workload("gpt2", title, _seeded(t.GPT2LMHeadModel, config), data)


def bert(
    *, layers: int = 12, width: int = 256, heads: int = 4, length: int = 128, batch: int = 8
) -> Workload:
    t = _transformers()
    config = t.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        vocab_size=VOCABULARY, max_position_embeddings=length,
    )  # fmt: skip
    title, data = f"BERT, {layers} layers, width {width}", _counting(batch, length)
    return Workload("bert", title, _seeded(t.BertForMaskedLM, config), data)


def resnet50(
    *, depths: tuple[int, ...] = (3, 4, 6, 3), widths: tuple[int, ...] = (256, 512, 1024, 2048),
    size: int = 96, batch: int = 16,
) -> Workload:  # fmt: skip
    t = _transformers()
    config = t.ResNetConfig(
        depths=list(depths), hidden_sizes=list(widths), embedding_size=widths[0] // 4,
        num_labels=CLASSES, problem_type="single_label_classification",
    )  # fmt: skip
    title = f"{'ResNet-50' if depths == (3, 4, 6, 3) else 'ResNet'}, {batch} images of {size}×{size}"
    return Workload("resnet50", title, _seeded(t.ResNetForImageClassification, config), _stripes(batch, size))


def vit(*, layers: int = 12, width: int = 192, heads: int = 3, size: int = 96, batch: int = 8) -> Workload:
    t = _transformers()
    config = t.ViTConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=size, patch_size=8, num_labels=CLASSES, problem_type="single_label_classification",
    )  # fmt: skip
    title = f"ViT, {layers} layers, width {width}"
    return Workload("vit", title, _seeded(t.ViTForImageClassification, config), _stripes(batch, size))
