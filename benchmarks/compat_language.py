"""Language: decoders, mixtures of experts, recurrent models, encoders, and from one language to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import BUDGET, Row, Training, hugging_face, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Language"
WORDS = 99
TEXT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=WORDS,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DECODER = TEXT | {"num_key_value_heads": 2, "attention_dropout": 0.1}
EXPERTS = DECODER | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "output_router_logits": True,
}  # fmt: skip
SEQ2SEQ = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=WORDS, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2,
)  # fmt: skip
T5 = dict(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=WORDS, decoder_start_token_id=0)

Batch = Callable[[int], dict[str, Any]]


def tokens(step: int, shape: tuple[int, int] = (2, 24)) -> torch.Tensor:
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(step))


def language(step: int) -> dict[str, Any]:
    return {"input_ids": tokens(step), "labels": tokens(step)}


def padded(step: int) -> dict[str, Any]:
    """The second row is padded on the right, by another amount in each step."""
    ids = tokens(step)
    mask = torch.ones_like(ids)
    mask[1, -3 - step :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classes(step: int) -> dict[str, Any]:
    return padded(step) | {"labels": tokens(step, (2, 1))[:, 0] % 3}


def words(step: int) -> dict[str, Any]:
    """A class for each token."""
    batch = padded(step)
    return batch | {"labels": torch.where(batch["labels"] < 0, -100, batch["labels"] % 3)}


def spans(step: int) -> dict[str, Any]:
    batch, ends = padded(step), tokens(step, (2, 2)) % 20
    return {k: batch[k] for k in ("input_ids", "attention_mask")} | {
        "start_positions": ends[:, 0], "end_positions": ends[:, 1]
    }  # fmt: skip


def pairs(step: int) -> dict[str, Any]:
    batch = padded(step)
    return batch | {"labels": tokens(step + 50, (2, 10))}


def rows() -> Iterator[Row]:
    yield from decoders()
    yield from experts()
    yield from recurrent()
    yield from encoders()
    yield from translators()
    yield Row("nn.Transformer with masks", (), partial(trained, _transformer))
    yield Row("LSTM language model, state carried over", (), partial(trained, _lstm))


def decoders() -> Iterator[Row]:
    gpt2 = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=WORDS)
    more: dict[str, tuple[dict[str, Any], Batch]] = {
        "GPT2": (gpt2, padded),
        "Llama": (DECODER, padded),
        "Mistral": (DECODER | {"sliding_window": 8}, padded),
        "Gemma": (DECODER | {"head_dim": 16}, language),
        "Gemma2": (DECODER | {"head_dim": 16, "sliding_window": 8}, padded),
        "Qwen2": (DECODER, language),
        "Qwen3": (DECODER | {"head_dim": 16}, padded),
        "Phi": (DECODER | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}, language),
        "Phi3": (DECODER | {"resid_pdrop": 0.1}, language),
        "OPT": (TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.3}, padded),
        "Bloom": (
            {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "hidden_dropout": 0.1},
            padded,
        ),
        "Falcon": (DECODER | {"hidden_dropout": 0.1, "alibi": True}, language),
        "GPTNeoX": (DECODER | {"hidden_dropout": 0.1}, language),
    }
    for name, (settings, batch) in more.items():
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        # OPT's first step may drop a layer: a share of what that needs would be too little for the others.
        budget = "1MiB" if name == "OPT" else BUDGET
        yield hugging_face(name, head, settings, batch, budget=budget)
    yield hugging_face("XLNet", "LMHeadModel", _xlnet(), language)


def _xlnet() -> dict[str, Any]:
    return dict(d_model=32, n_layer=2, n_head=2, d_inner=64, vocab_size=WORDS)


def experts() -> Iterator[Row]:
    latent = dict(
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
        n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    switch = T5 | dict(
        num_experts=4, expert_capacity=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    )
    yield hugging_face("Mixtral", "ForCausalLM", EXPERTS, padded)
    yield hugging_face(
        "Qwen3Moe", "ForCausalLM", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}, language
    )
    yield hugging_face("GptOss", "ForCausalLM", EXPERTS | {"head_dim": 16, "sliding_window": 8}, language)
    yield hugging_face("DeepseekV3", "ForCausalLM", EXPERTS | latent, language)
    yield hugging_face("SwitchTransformers", "ForConditionalGeneration", switch, pairs)


def recurrent() -> Iterator[Row]:
    mamba = TEXT | {"state_size": 4, "time_step_rank": 4}
    mamba2 = TEXT | {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
    rwkv = dict(
        hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, vocab_size=WORDS, context_length=64
    )
    jamba = DECODER | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False,
    }  # fmt: skip
    yield hugging_face("Mamba", "ForCausalLM", mamba, language)
    yield hugging_face("Mamba2", "ForCausalLM", mamba2, language)
    yield hugging_face("Rwkv", "ForCausalLM", rwkv, language)
    yield hugging_face("Jamba", "ForCausalLM", jamba, language)
    griffin = DECODER | {"lru_width": 32, "head_dim": 16}
    yield hugging_face("RecurrentGemma", "ForCausalLM", griffin, language, loss_fn=_uncached)


def _uncached(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def encoders() -> Iterator[Row]:
    yield hugging_face("Bert", "ForSequenceClassification", TEXT | {"num_labels": 3}, classes)
    yield hugging_face("Bert", "ForMaskedLM", TEXT, padded)
    distil = dict(dim=32, hidden_dim=64, n_layers=2, n_heads=2, vocab_size=WORDS, num_labels=3)
    yield hugging_face("DistilBert", "ForTokenClassification", distil, words)
    yield hugging_face("Roberta", "ForQuestionAnswering", TEXT, spans)
    yield hugging_face("Albert", "ForSequenceClassification", TEXT | {"embedding_size": 16}, _two)
    deberta = TEXT | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32, "num_labels": 3,
    }  # fmt: skip
    yield hugging_face("DebertaV2", "ForSequenceClassification", deberta, classes)
    modern = TEXT | {"num_labels": 3, "global_attn_every_n_layers": 2, "local_attention": 8}
    yield hugging_face("ModernBert", "ForSequenceClassification", modern | {"cls_token_id": 1}, classes)
    yield hugging_face("Longformer", "ForSequenceClassification", TEXT | {"attention_window": 8}, _two)
    yield hugging_face("BigBird", "ForMaskedLM", TEXT | {"attention_type": "original_full"}, padded)
    yield hugging_face("Funnel", "ForSequenceClassification", _funnel(), _two)


def _funnel() -> dict[str, Any]:
    return dict(block_sizes=[1, 1], d_model=32, n_head=2, d_head=16, d_inner=64, vocab_size=WORDS)


def _two(step: int) -> dict[str, Any]:
    batch = classes(step)
    return batch | {"labels": batch["labels"] % 2}


def translators() -> Iterator[Row]:
    yield hugging_face("T5", "ForConditionalGeneration", T5, pairs)
    yield hugging_face("Bart", "ForConditionalGeneration", SEQ2SEQ | {"encoder_layerdrop": 0.2}, pairs)
    yield hugging_face("Marian", "MTModel", SEQ2SEQ, pairs)
    yield hugging_face("LongT5", "ForConditionalGeneration", T5 | {"local_radius": 4}, pairs)


# --- of torch alone -------------------------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32, padding_idx=0)
        self.net = nn.Transformer(32, 2, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.net(
            self.embed(source), self.embed(target), tgt_mask=causal, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return self.head(out)


def _transformer() -> Training:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        target = batch["labels"]
        scores = model(batch["input_ids"], target[:, :-1], batch["attention_mask"] == 0)
        return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)

    return Training(Translator(), loss, pairs)


class LSTM(nn.Module):
    """Its state goes from one batch to the next, cut off from the gradients of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 32, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, WORDS)
        self.register_buffer("h", torch.zeros(2, 2, 32))
        self.register_buffer("c", torch.zeros(2, 2, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.lstm(self.embed(ids), (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.head(out)


def _lstm() -> Training:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Training(LSTM(), loss, language)
