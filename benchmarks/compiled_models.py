"""Models of the benchmark of compiled code, from configurations, with random weights, of small sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "TEN", "with_checkpoints"]


class Block(nn.Module):
    """A block of a GPT, its attention written out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = F.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1), self.dropout, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)


class GPT(nn.Module):
    """A GPT that gives its loss."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        length: int = 128,
        vocabulary: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def gpt(dropout: float = 0.0) -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 128, a batch of 8 times 128 tokens, a vocabulary of 512."""
    return GPT(dropout=dropout), tuple(torch.randint(0, 512, (8, 128)) for _ in range(2))


class Loss(nn.Module):
    """A model whose output's mean square is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


class Residual(nn.Module):
    """Two convolutions with group norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rows = [m for _ in range(2) for m in (nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width))]
        self.body = nn.Sequential(*rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def convnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Residual blocks of convolutions with group norms, on 16 images of 32 by 32."""
    body = [nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1)]
    return Loss(nn.Sequential(*body, nn.Flatten(), nn.Linear(32, 10))), (torch.randn(16, 3, 32, 32),)


class Answer(nn.Module):
    """A model of transformers with the mean square of what it answers as its loss."""

    def __init__(self, model: nn.Module, names: Sequence[str], result: str = "logits") -> None:
        super().__init__()
        self.model, self.names, self.result = model, tuple(names), result

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        answer = self.model(**dict(zip(self.names, inputs, strict=True)))
        return getattr(answer, self.result).square().mean()


def tokens(rows: int = 8, length: int = 64, vocabulary: int = 256) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length))


def gpt2(layers: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """GPT-2 of a width of 64, on 8 times 64 tokens."""
    import transformers as t

    config = t.GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=256, n_positions=64, use_cache=False
    )
    return Answer(t.GPT2LMHeadModel(config), ["input_ids"]), (tokens(),)


def llama() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64, two heads of keys, on 8 times 64 tokens."""
    import transformers as t

    config = t.LlamaConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=256, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return Answer(t.LlamaForCausalLM(config), ["input_ids"]), (tokens(),)


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64 with dropout, on 8 times 64 tokens."""
    import transformers as t

    config = t.BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, vocab_size=256,
        max_position_embeddings=64,
    )  # fmt: skip
    return Answer(t.BertForMaskedLM(config), ["input_ids"]), (tokens(),)


def t5() -> tuple[nn.Module, tuple[Any, ...]]:
    """Two layers each of 64, on 8 times 64 and 8 times 32 tokens."""
    import transformers as t

    config = t.T5Config(
        d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, vocab_size=256, use_cache=False
    )
    return Answer(t.T5ForConditionalGeneration(config), ["input_ids", "decoder_input_ids"]), (
        tokens(), tokens(length=32),
    )  # fmt: skip


def vit() -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers of 64, on 8 images of 64 by 64 in patches of 8."""
    import transformers as t

    config = t.ViTConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, image_size=64, patch_size=8
    )  # fmt: skip
    return Answer(t.ViTForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


def convnext() -> tuple[nn.Module, tuple[Any, ...]]:
    """Widths of 16 to 64, two blocks of each, on 8 images of 64 by 64."""
    import transformers as t

    config = t.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[2, 2, 2, 2])
    return Answer(t.ConvNextForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


def resnet50() -> tuple[nn.Module, tuple[Any, ...]]:
    """ResNet-50's blocks at an eighth of its width, on 8 images of 64 by 64."""
    import transformers as t

    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3])
    return Answer(t.ResNetForImageClassification(config), ["pixel_values"]), (torch.randn(8, 3, 64, 64),)


class Double(nn.Sequential):
    """Two convolutions with group norms, of a U-Net."""

    def __init__(self, a: int, b: int) -> None:
        rows = [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()]
        super().__init__(*rows, nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, width), Double(width, 2 * width)])
        self.middle = Double(2 * width, 4 * width)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * k * width, k * width, 2, stride=2) for k in (2, 1))
        self.up = nn.ModuleList([Double(4 * width, 2 * width), Double(2 * width, width)])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([kept.pop(), grow(x)], 1))
        return self.last(x)


class Experts(nn.Module):
    """A block of a mixture: every expert sees all tokens, weighted by a softmax over the best two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores, chosen = self.gate(h).topk(2, -1)
        weights = torch.zeros_like(self.gate(h)).scatter(-1, chosen, scores.softmax(-1))
        made = F.gelu(torch.einsum("btd,edf->betf", h, self.up))
        return x + torch.einsum("betd,bte->btd", torch.einsum("betf,efd->betd", made, self.down), weights)


def mixture() -> tuple[nn.Module, tuple[Any, ...]]:
    """Three layers of 64, four experts, 8 times 64 tokens."""
    return Loss(nn.Sequential(*(Experts(64, 4) for _ in range(3)))), (torch.randn(8, 64, 64),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "gpt": gpt,
    "gpt-dropout": lambda: gpt(0.1),
    "convnet": convnet,
    "gpt2-6": lambda: gpt2(6),
    "gpt2-12": lambda: gpt2(12),
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "convnext": convnext,
    "resnet50": resnet50,
    "unet": lambda: (Loss(UNet()), (torch.randn(4, 3, 64, 64),)),
    "mixture": mixture,
}

TEN = ("gpt2-6", "gpt2-12", "llama", "bert", "t5", "vit", "convnext", "resnet50", "unet", "mixture")
"""The models whose bytes are shown at five budgets."""

BLOCKS = {
    "Block", "Residual", "Double", "Experts", "GPT2Block", "LlamaDecoderLayer", "BertLayer", "T5Block", "ViTLayer",
    "ConvNextLayer", "ResNetBottleNeckLayer",
}  # fmt: skip
"""Classes that a checkpoint goes around."""


def with_checkpoints(model: nn.Module) -> nn.Module:
    """The model with a checkpoint around each block."""
    found = [m for m in model.modules() if type(m).__name__ in BLOCKS]
    assert found, f"no blocks in {type(model).__name__}"
    for block in found:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model
