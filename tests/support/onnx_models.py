"""Real architectures with random weights, exported to ONNX by torch's exporter and kept for the next time."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from support.batches import cache_argument

__all__ = ["MODELS", "OnnxModel", "exported"]


@dataclass(frozen=True)
class OnnxModel:
    """``make(small)`` gives (module, arguments, dynamic shapes); ``shape`` is what ``--shape`` must then say."""

    make: Callable[[bool], tuple[nn.Module, tuple[Any, ...], Any]]
    shape: str
    names: tuple[str, ...] = ()


def exported(name: str, folder: Path, *, small: bool = True) -> Path:
    """The file of a model, made on first use."""
    path = folder / f"{name}{'-small' if small else ''}-{torch.__version__.split('+')[0]}.onnx"
    if not path.exists():
        torch.manual_seed(0)
        module, args, dynamic = MODELS[name].make(small)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module.eval(), args, dynamo=True, dynamic_shapes=dynamic, verbose=False,
                input_names=MODELS[name].names or None,
            )  # fmt: skip
        part = path.with_name(f"{path.stem}.{os.getpid()}.onnx")
        program.save(os.fspath(part), external_data=False)
        os.replace(part, path)
    return path


# --- architectures of our own ---


class ConvNorm(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: Any = 1, **more: Any) -> None:
        pad = kernel // 2 if isinstance(kernel, int) else tuple(k // 2 for k in kernel)
        conv = nn.Conv2d(inputs, outputs, kernel, padding=more.pop("padding", pad), bias=False, **more)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Mixed(nn.Module):
    """A block of Inception v3: four branches over one input, joined."""

    def __init__(self, inputs: int, n: int) -> None:
        super().__init__()
        self.one = ConvNorm(inputs, n)
        self.five = nn.Sequential(ConvNorm(inputs, n * 3 // 4), ConvNorm(n * 3 // 4, n, 5))
        self.three = nn.Sequential(
            ConvNorm(inputs, n), ConvNorm(n, n * 3 // 2, 3), ConvNorm(n * 3 // 2, n * 3 // 2, 3)
        )
        self.wide = nn.Sequential(ConvNorm(inputs, n), ConvNorm(n, n, (1, 7)), ConvNorm(n, n, (7, 1)))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, n // 2))
        self.outputs = n + n + n * 3 // 2 + n + n // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.five(x), self.three(x), self.wide(x), self.pool(x)], 1)


class Inception(nn.Module):
    def __init__(self, n: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, n, 3, stride=2), ConvNorm(n, n, 3), nn.MaxPool2d(3, 2))
        self.mixed = nn.ModuleList()
        width = n
        for _ in range(blocks):
            self.mixed.append(Mixed(width, n))
            width = self.mixed[-1].outputs
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for k, block in enumerate(self.mixed):
            x = block(x)
            if k % 3 == 2:
                x = nn.functional.max_pool2d(x, 3, 2)
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """DenseNet: each layer reads all that came before it in its block."""

    def __init__(self, growth: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(ConvNorm(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.between = nn.ModuleList(), nn.ModuleList()
        for count in blocks:
            layers = nn.ModuleList()
            for _ in range(count):
                layers.append(nn.Sequential(
                    nn.BatchNorm2d(width), nn.ReLU(), ConvNorm(width, 4 * growth),
                    nn.Conv2d(4 * growth, growth, 3, padding=1),
                ))  # fmt: skip
                width += growth
            self.blocks.append(layers)
            self.between.append(nn.Sequential(ConvNorm(width, width // 2), nn.AvgPool2d(2)))
            width //= 2
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layers, between in zip(self.blocks, self.between, strict=True):
            parts = [x]
            for layer in layers:
                parts.append(layer(torch.cat(parts, 1)))
            x = between(torch.cat(parts, 1))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """With two heads, as for a mask and its border."""

    def __init__(self, n: int, depth: int) -> None:
        super().__init__()
        widths = [n * 2**k for k in range(depth)]
        self.down = nn.ModuleList(
            nn.Sequential(ConvNorm(3 if k == 0 else widths[k - 1], w, 3), ConvNorm(w, w, 3))
            for k, w in enumerate(widths)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:-1])
        self.join = nn.ModuleList(
            nn.Sequential(ConvNorm(2 * w, w, 3), ConvNorm(w, w, 3)) for w in widths[:-1]
        )
        self.mask, self.border = nn.Conv2d(n, 1, 1), nn.Conv2d(n, 1, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = []
        for k, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if k else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.mask(x), self.border(x)


class HighRes(nn.Module):
    """HRNet-like: parallel branches of several resolutions that exchange at every stage."""

    def __init__(self, n: int, stages: int) -> None:
        super().__init__()
        self.stem = ConvNorm(3, n, 3, stride=2)
        self.start = nn.ModuleList(
            ConvNorm(n if k == 0 else n * 2 ** (k - 1), n * 2**k, 3, stride=2 if k else 1) for k in range(3)
        )
        self.stages = nn.ModuleList()
        for _ in range(stages):
            same = nn.ModuleList(
                nn.Sequential(ConvNorm(n * 2**k, n * 2**k, 3), ConvNorm(n * 2**k, n * 2**k, 3))
                for k in range(3)
            )
            mix = nn.ModuleList(
                nn.ModuleList(nn.Conv2d(n * 2**a, n * 2**b, 1) for a in range(3)) for b in range(3)
            )
            self.stages.append(nn.ModuleList([same, mix]))
        self.head = nn.Conv2d(n * 7, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        levels = []
        for block in self.start:
            x = block(x)
            levels.append(x)
        for same, mix in self.stages:
            levels = [block(x) for block, x in zip(same, levels, strict=True)]
            levels = [
                sum(
                    nn.functional.interpolate(conv(x), size=levels[b].shape[2:])
                    for conv, x in zip(row, levels, strict=True)
                )
                for b, row in enumerate(mix)
            ]
        size = levels[0].shape[2:]
        return self.head(torch.cat([nn.functional.interpolate(x, size=size) for x in levels], 1))


# --- of transformers ---


class Last(nn.Module):
    """Only tensors come out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.names, args, strict=True)))[0]


class WithPast(nn.Module):
    """A decoder's step: one more token, the keys and values so far, and those with the token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for k, (keys, values) in enumerate(past):
            cache.update(keys, values, k)
        out = self.model(input_ids=ids, use_cache=True, **{cache_argument(self.model): cache})
        return out.logits, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def _bert(small: bool) -> Any:
    from transformers import BertConfig, BertModel

    size = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 500,
    }
    model = BertModel(
        BertConfig(**(size if small else {"num_hidden_layers": 12}), attn_implementation="eager"),
        add_pooling_layer=False,
    )
    batch, seq = Dim("batch"), Dim("seq", min=2, max=512)
    dims = {0: batch, 1: seq}
    args = (torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long))
    return Last(model, ("input_ids", "attention_mask")), args, ((dims, dims),)


def _llama(small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    n = 64 if small else 512
    layers = 2 if small else 8
    config = LlamaConfig(
        hidden_size=n, intermediate_size=3 * n, num_hidden_layers=layers, num_attention_heads=n // 16,
        num_key_value_heads=n // 32, vocab_size=500 if small else 8000, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.ones(2, 4, dtype=torch.long)
    past = [(torch.randn(2, n // 32, 12, 16), torch.randn(2, n // 32, 12, 16)) for _ in range(layers)]
    batch, seq, length = Dim("batch"), Dim("seq"), Dim("past")
    kept = {0: batch, 2: length}
    return WithPast(LlamaForCausalLM(config)), (ids, past), ({0: batch, 1: seq}, [(kept, kept)] * layers)


def _resnet(small: bool) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    more = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 2, 2, 1]} if small else {}
    model = ResNetForImageClassification(ResNetConfig(**more))
    return Last(model, ("pixel_values",)), (torch.randn(2, 3, 64, 64),), (({0: Dim("batch")},),)


def _images(model: nn.Module, size: int) -> Any:
    return model, (torch.randn(2, 3, size, size),), ({0: Dim("batch")},)


MODELS = {
    "bert": OnnxModel(_bert, "batch=1,seq=128"),
    "resnet50": OnnxModel(_resnet, "batch=1"),
    "unet": OnnxModel(
        lambda small: _images(UNet(8, 3) if small else UNet(32, 5), 32 if small else 256), "batch=1"
    ),
    "llama": OnnxModel(_llama, "batch=1,seq=8,past=120"),
    "inception": OnnxModel(
        lambda small: _images(Inception(8, 3) if small else Inception(64, 9), 64 if small else 224), "batch=1"
    ),
    "densenet": OnnxModel(
        lambda small: _images(
            Dense(8, (3, 3)) if small else Dense(32, (6, 12, 24, 16)), 64 if small else 224
        ),
        "batch=1",
    ),
    "hrnet": OnnxModel(
        lambda small: _images(HighRes(8, 2) if small else HighRes(32, 4), 32 if small else 256), "batch=1"
    ),
}
