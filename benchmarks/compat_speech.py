"""Speech: from waves and spectrograms to letters, words and classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, hugging_face, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Speech"
LETTERS = 20
WAVES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16),
    conv_stride=(4, 4), conv_kernel=(8, 8), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    vocab_size=LETTERS, pad_token_id=0, num_labels=4,
)  # fmt: skip
"""Dropout, dropped layers and masked time steps are those of the classes' own configurations."""


def rows() -> Iterator[Row]:
    steady = {"layerdrop": 0.0}
    yield hugging_face("Wav2Vec2", "ForCTC", WAVES | {"ctc_loss_reduction": "mean"}, spoken)
    yield hugging_face("Wav2Vec2", "ForCTC", WAVES | steady, spoken, title="Wav2Vec2ForCTC, layerdrop=0")
    for name in ("Hubert", "WavLM", "SEW", "UniSpeech"):
        yield hugging_face(name, "ForSequenceClassification", WAVES | steady, sorts)
    wave = WAVES | steady | {"num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16}
    yield hugging_face("Wav2Vec2", "ForPreTraining", wave, contrasted)
    whisper = dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=LETTERS, num_mel_bins=16, max_source_positions=40,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        dropout=0.1,
    )  # fmt: skip
    yield hugging_face("Whisper", "ForConditionalGeneration", whisper, heard)
    speech = dict(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=LETTERS, input_feat_per_channel=16, conv_channels=32,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    yield hugging_face("Speech2Text", "ForConditionalGeneration", speech, spectrogram)
    picture = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_length=64,
        num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8, num_labels=4,
    )  # fmt: skip
    yield hugging_face("AST", "ForAudioClassification", picture, tagged)
    yield Row("LSTM with CTC, lengths in the batch", (), partial(trained, _ctc))
    yield Row("Conformer block with batch norm", (), partial(trained, _conformer))


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def spoken(step: int) -> dict[str, Any]:
    g = generator(step)
    return {
        "input_values": torch.randn(2, 800, generator=g),
        "labels": torch.randint(1, LETTERS, (2, 6), generator=g),
    }


def sorts(step: int) -> dict[str, Any]:
    return spoken(step) | {"labels": torch.randint(0, 4, (2,), generator=generator(step))}


def contrasted(step: int) -> dict[str, Any]:
    """Which steps are masked, and what they are told from."""
    g, length = generator(step), 48
    masked = torch.rand(2, length, generator=g) < 0.3
    return {
        "input_values": torch.randn(2, 800, generator=g),
        "mask_time_indices": masked,
        "sampled_negative_indices": torch.randint(2 * length, (2, length, 5), generator=g),
    }


def heard(step: int) -> dict[str, Any]:
    g = generator(step)
    labels = torch.randint(3, LETTERS, (2, 8), generator=g)
    return {"input_features": torch.randn(2, 16, 80, generator=g), "labels": labels}


def spectrogram(step: int) -> dict[str, Any]:
    g = generator(step)
    labels = torch.randint(3, LETTERS, (2, 8), generator=g)
    return {"input_features": torch.randn(2, 80, 16, generator=g), "labels": labels}


def tagged(step: int) -> dict[str, Any]:
    g = generator(step)
    labels = torch.randint(0, 4, (2,), generator=g)
    return {"input_values": torch.randn(2, 64, 16, generator=g), "labels": labels}


# --- of torch alone -------------------------------------------------------------------------------------------


class Acoustic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(16, 32, 3, 2, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.lstm = nn.LSTM(32, 24, 2, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(48, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.conv(x).permute(2, 0, 1))
        return F.log_softmax(self.head(out), -1)


def _ctc() -> Training:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        frames, letters, lengths, targets = batch
        return F.ctc_loss(model(frames), letters, lengths, targets, zero_infinity=True)

    def batch(step: int) -> Any:
        g = generator(step)
        letters = torch.randint(1, LETTERS, (3, 8), generator=g)
        lengths = (torch.randint(20, 31, (3,), generator=g), torch.randint(3, 9, (3,), generator=g))
        return torch.randn(3, 16, 60, generator=g), letters, *lengths

    return Training(Acoustic(), loss, batch)


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 32)
        )
        self.conv = nn.Sequential(
            nn.Conv1d(32, 64, 1), nn.GLU(1), nn.Conv1d(32, 32, 7, padding=3, groups=32), nn.BatchNorm1d(32),
            nn.SiLU(), nn.Conv1d(32, 32, 1), nn.Dropout(0.1),
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.feed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.conv(x.mT).mT
        return self.head(self.norm(x).mean(1))


def _conformer() -> Training:
    def batch(step: int) -> Any:
        g = generator(step)
        return torch.randn(3, 30, 32, generator=g), torch.randint(0, 4, (3,), generator=g)

    return Training(Conformer(), nn.CrossEntropyLoss(), batch)
