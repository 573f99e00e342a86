"""Diffusion: networks that take noise away, and autoencoders, as diffusers has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Diffusion"


def rows() -> Iterator[Row]:
    makers: dict[str, Callable[[], Training]] = {
        "UNet2DModel": _unet,
        "UNet2DConditionModel": _conditional,
        "DiTTransformer2DModel": _dit,
        "SD3Transformer2DModel": _sd3,
        "FluxTransformer2DModel": _flux,
        "ControlNetModel": _controlnet,
        "AutoencoderKL": _autoencoder,
        "VQModel": _quantized,
    }
    for name, build in makers.items():
        yield Row(name, ("diffusers",), partial(trained, build))


def drawn(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def noised(call: Callable[[nn.Module, torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> Any:
    """The usual loss: noise is added for a random time in each image, and the model says which."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"]
        noise, times = torch.randn_like(x), torch.randint(0, 100, (x.shape[0],), device=x.device)
        noisy = scheduler.add_noise(x, noise, times)
        return F.mse_loss(call(model, noisy, times, batch), noise)

    return loss


def flowed(call: Callable[[nn.Module, torch.Tensor, torch.Tensor, Any], torch.Tensor]) -> Any:
    """Flow matching: the model says where the straight line from the image to noise leads."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"]
        noise, times = torch.randn_like(x), torch.sigmoid(torch.randn(x.shape[0]))
        share = times.view(-1, *(1 for _ in x.shape[1:]))
        return F.mse_loss(call(model, (1 - share) * x + share * noise, 1000 * times, batch), noise - x)

    return loss


def _unet() -> Training:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )  # fmt: skip
    loss = noised(lambda model, x, times, _: model(x, times).sample)
    return Training(model, loss, lambda k: {"x": drawn(k, 2, 3, 16, 16)})


CONDITIONAL = dict(
    sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, attention_head_dim=8,
    cross_attention_dim=16, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
)  # fmt: skip


def _conditional() -> Training:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(**CONDITIONAL, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    loss = noised(lambda model, x, times, batch: model(x, times, batch["text"]).sample)
    return Training(model, loss, lambda k: {"x": drawn(k, 2, 4, 16, 16), "text": drawn(k + 50, 2, 5, 16)})


def _dit() -> Training:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=8, dropout=0.1,
    )  # fmt: skip
    loss = noised(lambda model, x, times, batch: model(x, times, class_labels=batch["label"]).sample)

    def batch(step: int) -> Any:
        return {"x": drawn(step, 2, 4, 8, 8), "label": torch.tensor([step % 10, 3])}

    return Training(model, loss, batch)


def _sd3() -> Training:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip

    def call(model: nn.Module, x: torch.Tensor, times: torch.Tensor, batch: Any) -> torch.Tensor:
        return model(x, batch["text"], batch["pooled"], times).sample

    def batch(step: int) -> Any:
        return {
            "x": drawn(step, 2, 4, 8, 8),
            "text": drawn(step + 50, 2, 5, 16),
            "pooled": drawn(step + 90, 2, 16),
        }

    return Training(model, flowed(call), batch)


def _flux() -> Training:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip

    def call(model: nn.Module, x: torch.Tensor, times: torch.Tensor, batch: Any) -> torch.Tensor:
        places, words = torch.zeros(16, 3), torch.zeros(5, 3)
        places[:, 1], places[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
        return model(
            x, batch["text"], batch["pooled"], times / 1000, img_ids=places, txt_ids=words
        ).sample  # fmt: skip

    def batch(step: int) -> Any:
        return {
            "x": drawn(step, 2, 16, 4),
            "text": drawn(step + 50, 2, 5, 16),
            "pooled": drawn(step + 90, 2, 16),
        }

    return Training(model, flowed(call), batch)


class Controlled(nn.Module):
    """A control network beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import ControlNetModel, UNet2DConditionModel

        self.unet = UNet2DConditionModel(**CONDITIONAL, up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
        self.control = ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=(8, 16))
        self.unet.requires_grad_(False)

    def forward(
        self, x: torch.Tensor, times: torch.Tensor, text: torch.Tensor, hint: torch.Tensor
    ) -> torch.Tensor:
        down, mid = self.control(x, times, text, controlnet_cond=hint, return_dict=False)
        out = self.unet(
            x, times, text, down_block_additional_residuals=down, mid_block_additional_residual=mid
        )
        return out.sample


def _controlnet() -> Training:
    loss = noised(lambda model, x, times, batch: model(x, times, batch["text"], batch["hint"]))

    def batch(step: int) -> Any:
        more = {"text": drawn(step + 50, 2, 5, 16), "hint": drawn(step + 90, 2, 3, 32, 32)}
        return {"x": drawn(step, 2, 4, 16, 16)} | more

    return Training(Controlled(), loss, batch, parameters=lambda model: model.control.parameters())


def _autoencoder() -> Training:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), norm_num_groups=8, sample_size=16,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Any:
        hidden = model.encode(batch["x"]).latent_dist
        image = model.decode(hidden.sample()).sample
        error, divergence = F.mse_loss(image, batch["x"]), hidden.kl().mean()
        return error + 1e-6 * divergence, {"error": error, "divergence": divergence}

    return Training(model, loss, lambda k: {"x": drawn(k, 2, 3, 16, 16)})


def _quantized() -> Training:
    from diffusers import VQModel

    model = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), norm_num_groups=8, sample_size=16, num_vq_embeddings=16,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model.quant_conv(model.encoder(batch["x"]))
        nearest, error, _ = model.quantize(hidden)
        image = model.decoder(model.post_quant_conv(nearest))
        return F.l1_loss(image, batch["x"]) + error

    return Training(model, loss, lambda k: {"x": drawn(k, 2, 3, 16, 16)})
