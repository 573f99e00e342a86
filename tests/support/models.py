"""Tiny models for tests: ``MODELS[name]()`` gives (model, loss_fn, batch_fn). Random weights, no downloads.

``loss_fn(model, batch)`` is None for models that return their own loss. ``batch_fn(step)`` gives the batch of a
step, always the same for the same step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.batches import (
    cross_entropy,
    image_batch,
    labeled,
    language_batch,
    masked_batch,
    pairs,
    seq2seq_batch,
    tokens,
)

MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Callable[[int], Any]]]] = {}


def model(factory):
    """Register a factory by its name; the weights are the same each time it is called."""

    def seeded():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = factory()
        made[0].train()
        return made

    MODELS[factory.__name__] = seeded
    return seeded


# --- plain torch ----------------------------------------------------------------------------------------------


@model
def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), cross_entropy, pairs((6, 8))


@model
def cnn():
    """Batch norm, in-place activation, pooling, dropout."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 4),
    )  # fmt: skip
    return net, cross_entropy, pairs((4, 3, 16, 16))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, ids):
        return self.head(torch.tanh(self.frozen(self.embed(ids))))


@model
def tied():
    """Two names for one weight, a parameter without a gradient, a frozen layer."""

    def loss(net, ids):
        return F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())

    return Tied(), loss, lambda step: tokens(step, 20)


class Viewed(nn.Module):
    """A view that forward and backward both read, and a write through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 12)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        a, b, c = self.lin(x).chunk(3, dim=-1)
        y = torch.sigmoid(a) * b.t().t()
        z = torch.zeros(x.shape[0], 8)
        z[:, ::2] = y
        z[:, 1::2].add_(c)
        return self.out(z.view(x.shape[0], 2, 4).transpose(0, 1).mean(0))


@model
def viewed():
    return Viewed(), cross_entropy, pairs((6, 8))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.a(x)
        h.add_(x).mul_(1.5)
        h.unsqueeze_(0)
        h = F.leaky_relu_(h * 1.0, 0.1) * 2
        h.squeeze_(0)
        return self.b(F.dropout(h + 1, 0.2, inplace=True))


@model
def in_place():
    return InPlace(), cross_entropy, pairs((6, 8))


class Buffers(nn.Module):
    """Buffers written in place and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        return self.lin(x - self.mean) / self.count


@model
def buffers():
    return Buffers(), cross_entropy, pairs((6, 8))


@model
def two_losses():
    """A loss with other results beside it."""
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def loss(net, batch):
        x, y = batch
        out = net(x)
        first, second = F.cross_entropy(out, y), out.pow(2).mean()
        return first + 0.1 * second, {"first": first, "second": second, "name": "both", "logits": out}

    return net, loss, pairs((6, 8))


@model
def loss_module():
    return nn.Sequential(nn.Linear(8, 4)), nn.CrossEntropyLoss(label_smoothing=0.1), pairs((6, 8))


@model
def norms():
    """Group, instance and layer norm, instance norm with statistics."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ELU(), nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Hardswish(), nn.Flatten(), nn.LayerNorm(512),
        nn.Linear(512, 4),
    )  # fmt: skip
    return net, cross_entropy, pairs((4, 3, 12, 12))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = cell(8, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


@model
def lstm():
    return Recurrent(nn.LSTM), cross_entropy, pairs((3, 5, 8))


@model
def gru():
    return Recurrent(nn.GRU), cross_entropy, pairs((3, 5, 8))


@model
def torch_transformer():
    net = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False),
        nn.Flatten(), nn.Linear(40, 4),
    )  # fmt: skip
    return net, cross_entropy, pairs((3, 5, 8))


@model
def unet():
    """Skip connections, transposed convolution, interpolation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
            self.up, self.c = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            a = F.relu(self.a(x))
            b = F.relu(self.b(a))
            y = self.c(torch.cat([a, self.up(b)], 1))
            y = F.interpolate(y, scale_factor=0.5, mode="bilinear", align_corners=False)
            return y.mean((2, 3))

    return Net(), cross_entropy, pairs((2, 3, 8, 8))


@model
def checkpointed():
    """Checkpointing inside the model, with dropout."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2))
            self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))
            self.c = nn.Linear(8, 4)

        def forward(self, x):
            x = checkpoint(self.a, x, use_reentrant=False)
            return self.c(checkpoint(self.b, x, use_reentrant=True))

    return Net(), cross_entropy, pairs((6, 8))


@model
def autocast():
    """Mixed precision through autocast."""
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))

    def loss(net, batch):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    return net, loss, pairs((6, 8))


# --- Hugging Face ---------------------------------------------------------------------------------------------


def hf():
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _gpt2(attention: str):
    t = hf()
    config = t.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return t.GPT2LMHeadModel(config), None, language_batch


@model
def gpt2():
    return _gpt2("eager")


@model
def gpt2_sdpa():
    return _gpt2("sdpa")


@model
def gpt2_padded():
    return (*_gpt2("sdpa")[:2], masked_batch)


def _encoder(name: str, **extra: Any):
    t = hf()
    config = getattr(t, f"{name}Config")(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64,
        max_position_embeddings=32, num_labels=3, **extra,
    )  # fmt: skip
    return getattr(t, f"{name}ForSequenceClassification")(config), None, labeled


@model
def bert():
    return _encoder("Bert", attn_implementation="eager")


@model
def bert_sdpa():
    return _encoder("Bert", attn_implementation="sdpa")


@model
def bert_padded():
    def batch(step: int):
        b = masked_batch(step)
        return labeled(step) | {"attention_mask": b["attention_mask"]}

    return (*_encoder("Bert", attn_implementation="sdpa")[:2], batch)


@model
def vit():
    t = hf()
    config = t.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
        patch_size=8, num_labels=4, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return t.ViTForImageClassification(config), None, image_batch(16)


@model
def resnet():
    t = hf()
    config = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=4
    )  # fmt: skip
    return t.ResNetForImageClassification(config), None, image_batch()


def _llama(name: str = "Llama", attention: str = "sdpa", **extra: Any):
    t = hf()
    config = getattr(t, f"{name}Config")(
        **{
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 32,
            "attn_implementation": attention, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        } | extra,
    )  # fmt: skip
    return getattr(t, f"{name}ForCausalLM")(config), None, language_batch


@model
def llama():
    return _llama(attention="eager")


@model
def llama_sdpa():
    return _llama()


@model
def llama_padded():
    return (*_llama()[:2], masked_batch)


@model
def convnext():
    t = hf()
    config = t.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_labels=4, drop_path_rate=0.1
    )
    return t.ConvNextForImageClassification(config), None, image_batch()


@model
def swin():
    t = hf()
    config = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=4
    )
    return t.SwinForImageClassification(config), None, image_batch()


@model
def t5():
    t = hf()
    config = t.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    return t.T5ForConditionalGeneration(config), None, seq2seq_batch


class Stateful(nn.Module):
    """A net that replaces its state, in buffers: it goes from batch to batch without gradients, and what
    it was is saved for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 8), nn.Linear(8, 3)
        self.register_buffer("h", torch.zeros(6, 8))
        self.register_buffer("c", torch.zeros(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.head(h)
