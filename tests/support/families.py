"""Many Hugging Face families, tiny: ``FAMILIES[name]()`` gives (model, loss_fn, batch_fn) as ``models.MODELS``.

Random weights, no downloads. For slow tests of breadth; ``models`` has the ones for everyday tests.
"""

from collections.abc import Callable
from typing import Any

import torch

from support.batches import generator, image_batch, labeled, language_batch, seq2seq_batch, tokens
from support.models import hf

FAMILIES: dict[str, Callable[[], Any]] = {}

TEXT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION = dict(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=16,
    patch_size=8,
)
EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
SEQ2SEQ = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, max_position_embeddings=32, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
)  # fmt: skip
SMALL_RESNET = dict(layer_type="basic", embedding_size=8)


def family(factory):
    def seeded():
        hf()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = factory()
        made[0].train()
        return made

    FAMILIES[factory.__name__] = seeded
    return factory


def add(name: str, build: Callable[[], Any], batches: Callable[[int], Any], loss_fn: Any = None) -> None:
    def factory():
        return build(), loss_fn, batches

    factory.__name__ = name
    family(factory)


def made(name: str, head: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """A model of class ``name + head`` with ``settings`` for its configuration."""
    return lambda: getattr(hf(), name + head)(getattr(hf(), name + "Config")(**settings))


# --- language -------------------------------------------------------------------------------------------------

DECODERS = [
    "Bloom", "Cohere", "Falcon", "Gemma", "Gemma2", "GPTNeoX", "Granite", "Mistral", "Mpt", "Olmo", "Olmo2", "OPT",
    "Phi", "Phi3", "Qwen2", "Qwen3", "StableLm", "Starcoder2",
]  # fmt: skip
EXPERT_DECODERS = [
    "Mixtral",
    "Olmoe",
    "Qwen2Moe",
    "Qwen3Moe",
    "GptOss",
    "DeepseekV2",
    "DeepseekV3",
    "Qwen3Next",
]
EXTRA: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 2}, "Mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 16}, "Gemma": {"head_dim": 8}, "Gemma2": {"head_dim": 8},
    "Qwen3": {"head_dim": 8}, "GptOss": {"head_dim": 8},
    "DeepseekV2": LATENT | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "DeepseekV3": LATENT | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "Qwen3Next": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
    },
    "Qwen2Moe": {"shared_expert_intermediate_size": 16},
}  # fmt: skip
for n in DECODERS:
    add(n, made(n, "ForCausalLM", TEXT | {"num_key_value_heads": 2} | EXTRA.get(n, {})), language_batch)
for n in EXPERT_DECODERS:
    settings = TEXT | EXPERTS | {"num_key_value_heads": 2} | EXTRA.get(n, {})
    add(n, made(n, "ForCausalLM", settings), language_batch)

RECURRENT = {
    "Mamba": TEXT | {"state_size": 4, "time_step_rank": 4},
    "FalconMamba": TEXT | {"state_size": 4, "time_step_rank": 4},
    "Mamba2": TEXT | {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "Jamba": TEXT | {
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False,
    },
}  # fmt: skip
for n, settings in RECURRENT.items():
    add(n, made(n, "ForCausalLM", settings), language_batch, lambda net, b: net(**b, use_cache=False).loss)

ENCODERS = [
    "Albert", "ConvBert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "FNet", "MegatronBert", "MPNet",
    "Nystromformer", "Roberta", "RoFormer", "SqueezeBert",
]  # fmt: skip
ENCODER_EXTRA: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 8}, "ConvBert": {"embedding_size": 16}, "SqueezeBert": {"embedding_size": 16},
    "DistilBert": {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}, "Electra": {"embedding_size": 8},
    "RoFormer": {"embedding_size": 16}, "Nystromformer": {"segment_means_seq_len": 12, "num_landmarks": 4},
}  # fmt: skip
for n in ENCODERS:
    settings = TEXT | {"num_labels": 3} | ENCODER_EXTRA.get(n, {})
    add(n, made(n, "ForSequenceClassification", settings), labeled)

for n in ["Bart", "Blenderbot", "BlenderbotSmall", "M2M100", "Marian", "MBart", "Pegasus", "PLBart"]:
    add(n, made(n, "MTModel" if n == "Marian" else "ForConditionalGeneration", SEQ2SEQ), seq2seq_batch)
for n in ["MT5", "UMT5", "LongT5"]:
    settings = dict(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    add(n, made(n, "ForConditionalGeneration", settings), seq2seq_batch)


# --- vision ---------------------------------------------------------------------------------------------------

IMAGES: dict[str, dict[str, Any]] = {
    "Beit": VISION | {"use_relative_position_bias": True, "drop_path_rate": 0.1},
    "DeiT": VISION,
    "Dinov2": VISION | {"drop_path_rate": 0.1},
    "Data2VecVision": VISION,
}
HIERARCHIES: dict[str, dict[str, Any]] = {
    "ConvNextV2": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "FocalNet": {
        "image_size": 32, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "PoolFormer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "Swinv2": {"image_size": 32, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
    "Bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2},
    "MobileNetV2": {"depth_multiplier": 0.25},
}  # fmt: skip
for n, settings in IMAGES.items():
    add(n, made(n, "ForImageClassification", settings | {"num_labels": 4}), image_batch(16))
for n, settings in HIERARCHIES.items():
    add(n, made(n, "ForImageClassification", settings | {"num_labels": 4}), image_batch(32))


def images(step: int, size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=generator(step))


@family
def segformer():
    config = hf().SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=3,
    )  # fmt: skip

    def batch(step):
        labels = torch.randint(0, 3, (2, 32, 32), generator=generator(step))
        return {"pixel_values": images(step, 32), "labels": labels}

    return hf().SegformerForSemanticSegmentation(config), None, batch


@family
def vit_mae():
    decoder = dict(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )  # fmt: skip
    net = hf().ViTMAEForPreTraining(hf().ViTMAEConfig(**VISION, **decoder))
    return net, None, lambda step: {"pixel_values": images(step)}


def detection(name: str, **settings: Any):
    def loss(net, batch):
        return net(**batch).last_hidden_state.pow(2).mean()

    sizes = {k: v for k, v in SEQ2SEQ.items() if k.startswith(("encoder_", "decoder_")) and "token" not in k}
    config = getattr(hf(), name + "Config")(**sizes, num_queries=5, **settings)
    return getattr(hf(), name + "Model")(config), loss, lambda step: {"pixel_values": images(step, 32)}


@family
def detr():
    """Asks whether its activations are finite."""
    backbone = hf().ResNetConfig(**SMALL_RESNET, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    return detection("Detr", backbone_config=backbone, use_timm_backbone=False, d_model=16)


@family
def deformable_detr():
    backbone = hf().ResNetConfig(
        **SMALL_RESNET,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1] * 4,
        out_features=["stage2", "stage3", "stage4"],
    )
    settings = dict(backbone_config=backbone, use_timm_backbone=False, d_model=32, num_feature_levels=3)
    return detection("DeformableDetr", **settings)


# --- sound ----------------------------------------------------------------------------------------------------


@family
def whisper():
    config = hf().WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=20)

    def batch(step):
        return {"input_features": torch.randn(2, 8, 40, generator=generator(step)), "labels": tokens(step)}

    return hf().WhisperForConditionalGeneration(config), None, batch


def waveform(step):
    g = generator(step)
    return {
        "input_values": torch.randn(2, 100, generator=g),
        "labels": torch.randint(1, 3, (2,), generator=g),
    }


WAVES = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
    conv_stride=(2, 2), conv_kernel=(4, 4), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    layerdrop=0.0, mask_time_prob=0.0, num_labels=3, pad_token_id=0, vocab_size=16,
)  # fmt: skip
for n in ["Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "SEW"]:
    add(n, made(n, "ForSequenceClassification", WAVES), waveform)


@family
def connectionist_temporal_classification():
    """Labels of one length: the loss selects those that are not padding."""

    def batch(step):
        return waveform(step) | {"labels": torch.randint(1, 16, (2, 4), generator=generator(step))}

    return hf().Wav2Vec2ForCTC(hf().Wav2Vec2Config(**WAVES)), None, batch


# --- more than one kind of input ------------------------------------------------------------------------------

for n in ["CLIP", "Siglip", "Blip", "GroupViT", "OwlViT"]:
    pair = dict(text_config=TEXT, vision_config=VISION, projection_dim=16)
    add(
        n, made(n, "Model", pair),
        lambda step: {"input_ids": tokens(step), "pixel_values": images(step), "return_loss": True},
    )  # fmt: skip


@family
def llava():
    t = hf()
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**VISION), text_config=t.LlamaConfig(**TEXT, num_key_value_heads=2),
        image_token_index=60, vision_feature_layer=-1,
    )  # fmt: skip

    def batch(step):
        ids = tokens(step, 60)
        ids[:, 1:5] = 60
        return {"input_ids": ids, "pixel_values": images(step), "labels": ids}

    return t.LlavaForConditionalGeneration(config), None, batch


# --- time series ----------------------------------------------------------------------------------------------


@family
def time_series():
    config = hf().TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1,
        **{k: v for k, v in SEQ2SEQ.items() if not any(x in k for x in ("token", "vocab", "position"))},
    )  # fmt: skip

    def batch(step):
        g = generator(step)
        return {
            "past_values": torch.randn(2, 10, generator=g), "past_time_features": torch.randn(2, 10, 1, generator=g),
            "past_observed_mask": torch.ones(2, 10), "future_values": torch.randn(2, 4, generator=g),
            "future_time_features": torch.randn(2, 4, 1, generator=g),
        }  # fmt: skip

    return hf().TimeSeriesTransformerForPrediction(config), None, batch


@family
def patch_time_series():
    config = hf().PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=32, prediction_length=4,
    )  # fmt: skip

    def batch(step):
        g = generator(step)
        return {
            "past_values": torch.randn(2, 16, 2, generator=g),
            "future_values": torch.randn(2, 4, 2, generator=g),
        }

    return hf().PatchTSTForPrediction(config), None, batch
