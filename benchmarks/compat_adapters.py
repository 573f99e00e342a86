"""Adapters: small trained parts beside a frozen model, as peft puts them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from torch import nn

TITLE = "Adapters on frozen models"
WORDS = 99


def rows() -> Iterator[Row]:
    linear = ["q_proj", "v_proj"]
    kinds: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
        "LoRA on Llama": (llama, "LoraConfig", {"target_modules": linear, "lora_dropout": 0.1}),
        "rsLoRA on every linear layer": (
            llama, "LoraConfig", {"target_modules": "all-linear", "use_rslora": True, "r": 4},
        ),
        "DoRA": (llama, "LoraConfig", {"target_modules": linear, "use_dora": True}),
        "LoRA on GPT-2, embeddings too": (gpt2, "LoraConfig", {"target_modules": ["c_attn", "wte"], "r": 4}),
        "AdaLoRA": (llama, "AdaLoraConfig", {"target_modules": linear, "total_step": 100, "init_r": 4}),
        "IA3": (llama, "IA3Config", {"target_modules": [*linear, "down_proj"], "feedforward_modules": ["down_proj"]}),
        "prefix tuning": (llama, "PrefixTuningConfig", {"num_virtual_tokens": 4}),
        "prompt tuning": (llama, "PromptTuningConfig", {"num_virtual_tokens": 4}),
        "P-tuning": (llama, "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
        "VeRA": (llama, "VeraConfig", {"target_modules": ["q_proj"], "r": 4}),
        "LoHa": (llama, "LoHaConfig", {"target_modules": linear, "r": 4}),
        "layer norms alone": (llama, "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    }  # fmt: skip
    for name, (model, config, options) in kinds.items():
        yield Row(name, ("peft", "transformers"), partial(trained, partial(_adapted, model, config, options)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=WORDS
    )
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=WORDS))


def _adapted(make: Callable[[], nn.Module], config: str, options: dict[str, Any]) -> Training:
    import peft

    model = peft.get_peft_model(make(), getattr(peft, config)(task_type="CAUSAL_LM", **options))

    def batch(step: int) -> Any:
        ids = torch.randint(3, WORDS, (2, 24), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        mask[1, -3 - step :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def trainable(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    return Training(model.train(), None, batch, parameters=trainable)
