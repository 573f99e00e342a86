"""Models and losses that further packages of the registry ship, each in the package's own small form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, trained
from compat_agents import generator
from torch import nn
from torch.nn import functional as F

TITLE = "Models of further packages"


def rows() -> Iterator[Row]:
    for name, (packages, build) in _ROWS.items():
        yield Row(name, tuple(packages.split(", ")), partial(trained, build))


def images(size: int = 32, count: int = 4, classes: int = 5, channels: int = 3) -> Callable[[int], Any]:
    def batch(k: int) -> Any:
        g = generator(k)
        return torch.randn(count, channels, size, size, generator=g), torch.randint(
            0, classes, (count,), generator=g
        )

    return batch


def tokens(length: int = 32, count: int = 2, vocabulary: int = 64) -> Callable[[int], Any]:
    return lambda k: torch.randint(1, vocabulary, (count, length), generator=generator(k))


def floats(*shape: int) -> Callable[[int], Any]:
    return lambda k: torch.randn(*shape, generator=generator(k))


def classified(model: nn.Module, batch: Any) -> Any:
    found = model(batch[0])
    return F.cross_entropy(found, batch[1])


def squared(model: nn.Module, batch: Any) -> Any:
    return model(batch).square().mean()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def itself(model: nn.Module, batch: Any) -> Any:
    return model(batch)


# --- vision ---------------------------------------------------------------------------------------------------


_VIT: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64,
}  # fmt: skip


def of_vit_pytorch(name: str, size: int = 32, **settings: Any) -> Callable[[], Training]:
    def build() -> Training:
        import importlib

        module, _, cls = name.partition(":")
        model = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**settings)
        return Training(model.train(), classified, images(size))

    return build


def segmentation(name: str, **more: Any) -> Callable[[], Training]:
    def build() -> Training:
        import segmentation_models_pytorch as smp

        model = getattr(smp, name)("resnet18", encoder_weights=None, classes=3, **more)
        dice = smp.losses.DiceLoss("multiclass")

        def batch(k: int) -> Any:
            g = generator(k)
            return torch.randn(2, 3, 64, 64, generator=g), torch.randint(0, 3, (2, 64, 64), generator=g)

        def loss(model: nn.Module, batch: Any) -> Any:
            found = model(batch[0])
            return dice(found, batch[1]) + F.cross_entropy(found, batch[1])

        return Training(model.train(), loss, batch)

    return build


def monai_unet() -> Training:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1, dropout=0.1)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)

    def batch(k: int) -> Any:
        g = generator(k)
        return torch.randn(1, 1, 16, 16, 16, generator=g), torch.randint(
            0, 2, (1, 1, 16, 16, 16), generator=g
        )

    return Training(model, lambda m, b: criterion(m(b[0]), b[1]), batch)


def monai_vnet() -> Training:
    from monai.losses import DiceFocalLoss
    from monai.networks.nets import SegResNet

    model = SegResNet(2, 8, 1, 2, dropout_prob=0.1, blocks_down=(1, 1, 1), blocks_up=(1, 1))
    criterion = DiceFocalLoss(to_onehot_y=True, softmax=True)

    def batch(k: int) -> Any:
        g = generator(k)
        return torch.randn(1, 1, 32, 32, generator=g), torch.randint(0, 2, (1, 1, 32, 32), generator=g)

    return Training(model.train(), lambda m, b: criterion(m(b[0]), b[1]), batch)


def monai_vae() -> Training:
    from monai.networks.nets import AutoencoderKL

    model = AutoencoderKL(
        2, 1, 1, channels=(8, 16), latent_channels=2, num_res_blocks=(1, 1), norm_num_groups=4,
        attention_levels=(False, True),
    )  # fmt: skip

    def loss(model: nn.Module, x: Any) -> Any:
        found, mean, sigma = model(x)
        kl = 0.5 * (mean.square() + sigma.square() - sigma.square().log() - 1).sum((1, 2, 3)).mean()
        return F.l1_loss(found, x) + 1e-6 * kl

    return Training(model.train(), loss, floats(2, 1, 32, 32))


def efficientnet() -> Training:
    from efficientnet_pytorch import EfficientNet

    return Training(EfficientNet.from_name("efficientnet-b0", num_classes=5).train(), classified, images(64))


def open_clip_model() -> Training:
    import open_clip
    from open_clip.loss import ClipLoss

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 16, "vocab_size": 64, "width": 64, "heads": 2, "layers": 2}
    model = open_clip.model.CLIP(32, vision, text)
    criterion = ClipLoss()

    def batch(k: int) -> Any:
        return floats(4, 3, 32, 32)(k), tokens(16, 4)(k)

    return Training(model.train(), lambda m, b: criterion(*m(*b)), batch)


def perceptual() -> Training:
    import lpips

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
            criterion = lpips.LPIPS(net="squeeze", pretrained=False, pnet_rand=True, verbose=False)
            self.criterion = criterion.eval().requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.criterion(self.net(x), x).mean()

    return Training(Model(), itself, floats(2, 3, 64, 64), parameters=trainable)


def kornia_losses() -> Training:
    import kornia

    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())
    augment = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.RandomHorizontalFlip(p=0.5), kornia.augmentation.RandomRotation(10.0, p=1.0)
    )

    def loss(model: nn.Module, x: Any) -> Any:
        x = augment(x)
        found = model(x)
        sharp = kornia.filters.sobel(found) - kornia.filters.sobel(x)
        return kornia.losses.ssim_loss(found, x, 5) + sharp.abs().mean()

    return Training(net, loss, lambda k: torch.rand(2, 3, 32, 32, generator=generator(k)))


# --- language -------------------------------------------------------------------------------------------------


def x_transformer(**more: Any) -> Callable[[], Training]:
    def build() -> Training:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        settings: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 2, "attn_dim_head": 16, **more}
        model = AutoregressiveWrapper(
            TransformerWrapper(num_tokens=64, max_seq_len=33, attn_layers=Decoder(**settings))
        )
        return Training(model.train(), itself, tokens(33))

    return build


def sentence_pairs() -> Training:
    import transformers
    from sentence_transformers import SentenceTransformer, models

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.BertModel(config)

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            found = self.model(features["input_ids"], attention_mask=features["attention_mask"])
            return {**features, "token_embeddings": found.last_hidden_state}

    model = SentenceTransformer(modules=[Words(), models.Pooling(32)], device="cpu")

    def batch(k: int) -> Any:
        sides = (tokens(16, 4)(2 * k), tokens(16, 4)(2 * k + 1))
        return [{"input_ids": ids, "attention_mask": (ids > 8).long()} for ids in sides]

    def loss(model: nn.Module, batch: Any) -> Any:
        first, second = (model(dict(x))["sentence_embedding"] for x in batch)
        scores = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T * 20
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return Training(model.train(), loss, batch)


def performer() -> Training:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=64, max_seq_len=32, dim=32, depth=2, heads=2, dim_head=16, causal=False)

    def loss(model: nn.Module, ids: Any) -> Any:
        return F.cross_entropy(model(ids).transpose(1, 2), ids)

    return Training(model.train(), loss, tokens())


def reformer() -> Training:
    from reformer_pytorch import ReformerLM

    model = ReformerLM(64, dim=32, depth=2, max_seq_len=32, heads=2, bucket_size=8, n_hashes=2, causal=True)

    def loss(model: nn.Module, ids: Any) -> Any:
        return F.cross_entropy(model(ids).transpose(1, 2), ids)

    return Training(model.train(), loss, tokens())


def linformer() -> Training:
    from linformer import LinformerLM

    model = LinformerLM(num_tokens=64, dim=32, seq_len=32, depth=2, heads=2, k=8)

    def loss(model: nn.Module, ids: Any) -> Any:
        return F.cross_entropy(model(ids).transpose(1, 2), ids)

    return Training(model.train(), loss, tokens())


def experts() -> Training:
    from st_moe_pytorch import MoE, SparseMoEBlock

    moe = MoE(dim=32, num_experts=4, gating_top_n=2, threshold_train=0.2, capacity_factor_train=1.25)
    model = SparseMoEBlock(moe, add_ff_before=True, add_ff_after=True)

    def loss(model: nn.Module, x: Any) -> Any:
        out, total, *_ = model(x)
        return out.square().mean() + total

    return Training(model.train(), loss, floats(2, 32, 32))


def soft_experts() -> Training:
    from soft_moe_pytorch import SoftMoE

    return Training(SoftMoE(dim=32, seq_len=32, num_experts=4), squared, floats(2, 32, 32))


def g_mlp() -> Training:
    from g_mlp_pytorch import gMLP

    model = gMLP(num_tokens=64, dim=32, depth=3, seq_len=32, prob_survival=0.9)
    return Training(model.train(), squared, tokens())


def perceiver() -> Training:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=4, max_freq=8.0, depth=2, num_latents=8, latent_dim=32,
        num_classes=5, cross_heads=1, latent_heads=2, attn_dropout=0.1, ff_dropout=0.1, self_per_cross_attn=1,
    )  # fmt: skip

    def batch(k: int) -> Any:
        x, y = images(16)(k)
        return x.movedim(1, -1), y

    return Training(model.train(), classified, batch)


# --- generative -----------------------------------------------------------------------------------------------


def denoising() -> Training:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20)
    return Training(model.train(), itself, lambda k: torch.rand(2, 3, 16, 16, generator=generator(k)))


def quantized() -> Training:
    from vector_quantize_pytorch import VectorQuantize

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 32), nn.Linear(32, 16)
            self.codes = VectorQuantize(dim=32, codebook_size=16, decay=0.8, commitment_weight=1.0)

        def forward(self, x: Any) -> Any:
            found, _, commit = self.codes(self.encode(x))
            return F.mse_loss(self.decode(found), x) + commit

    return Training(Model().train(), itself, floats(2, 32, 16))


def scalar_quantized() -> Training:
    from vector_quantize_pytorch import FSQ

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 3), nn.Linear(3, 16)
            self.codes = FSQ([8, 5, 5])

        def forward(self, x: Any) -> Any:
            found, _ = self.codes(self.encode(x))
            return F.mse_loss(self.decode(found), x)

    return Training(Model().train(), itself, floats(2, 32, 16))


def siren() -> Training:
    from siren_pytorch import SirenNet

    model = SirenNet(dim_in=2, dim_hidden=32, dim_out=3, num_layers=4, w0_initial=30.0)
    return Training(model, lambda m, b: F.mse_loss(m(b[:, :2]), b[:, 2:].sigmoid()), floats(256, 5))


def byol_wrapper() -> Training:
    from byol_pytorch import BYOL

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 16),
    )
    model = BYOL(
        net,
        image_size=32,
        hidden_layer=-1,
        projection_size=16,
        projection_hidden_size=32,
        augment_fn=nn.Identity(),
    )
    return Training(model.train(), itself, floats(4, 3, 32, 32), parameters=trainable)


# --- equations, graphs, tables, signals -----------------------------------------------------------------------


def ode() -> Training:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(y**3)

    times = torch.linspace(0.0, 1.0, 6)

    def loss(model: nn.Module, x: Any) -> Any:
        return odeint_adjoint(model, x, times, method="rk4").square().mean()

    return Training(Field(), loss, floats(64, 2))


def ode_through() -> Training:
    from torchdiffeq import odeint

    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    times = torch.linspace(0.0, 1.0, 6)

    def loss(model: nn.Module, x: Any) -> Any:
        return odeint(lambda t, y: model(y), x, times, method="midpoint").square().mean()

    return Training(net, loss, floats(64, 2))


def adaptive_ode() -> Training:
    from torchdiffeq import odeint

    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss(model: nn.Module, x: Any) -> Any:
        return odeint(lambda t, y: model(y), x, torch.tensor([0.0, 1.0]), method="dopri5").square().mean()

    return Training(net, loss, floats(16, 2))


def exact_process() -> Training:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    x = torch.linspace(0, 1, 32)
    y = torch.sin(6 * x)
    model = Model(x, y)
    total = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def loss(model: Any, batch: Any) -> Any:
        return -total(model(model.train_inputs[0]), model.train_targets + 0 * batch.sum())

    return Training(model.train(), loss, floats(1))


def equivariant() -> Training:
    from e3nn import nn as e3

    model = e3.FullyConnectedNet([8, 32, 32, 1], torch.nn.functional.silu)
    return Training(model, squared, floats(64, 8))


def spherical() -> Training:
    from e3nn import o3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o+1x2e", "4x0e+2x1o")
            self.read = o3.Linear("4x0e+2x1o", "1x0e")

        def forward(self, batch: Any) -> Any:
            x, r = batch
            y = o3.spherical_harmonics([0, 1, 2], r, True, "component")
            return self.read(self.mix(x, y)).square().mean()

    return Training(Model(), itself, lambda k: (floats(32, 10)(k), floats(32, 3)(k)))


def egnn() -> Training:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(num_tokens=16, num_positions=16, dim=16, depth=2, num_nearest_neighbors=4)

    def loss(model: nn.Module, batch: Any) -> Any:
        feats, coors = model(*batch)
        return feats.square().mean() + coors.square().mean()

    return Training(model.train(), loss, lambda k: (tokens(16, 2, 16)(k), floats(2, 16, 3)(k)))


def fourier_operator() -> Training:
    from neuralop.models import FNO

    model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)
    return Training(model, squared, floats(2, 1, 16, 16))


def spiking() -> Training:
    import snntorch as snn
    from snntorch import surrogate

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 128), nn.Linear(128, 5)
            self.spike = snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid())
            self.last = snn.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid())

        def forward(self, x: Any) -> Any:
            first, second, found = self.spike.init_leaky(), self.last.init_leaky(), []
            for _ in range(5):
                spikes, first = self.spike(self.one(x), first)
                _, second = self.last(self.two(spikes), second)
                found.append(second)
            return torch.stack(found).mean(0)

    def batch(k: int) -> Any:
        return floats(64, 16)(k), torch.randint(0, 5, (64,), generator=generator(k))

    model = Model()
    model(batch(0)[0])  # its state has the size of a batch from then on, and is part of the budget
    return Training(model, classified, batch)


def spiking_jelly() -> Training:
    from spikingjelly.activation_based import functional, layer, neuron

    net = nn.Sequential(
        layer.Conv2d(1, 4, 3, padding=1), layer.BatchNorm2d(4), neuron.LIFNode(), layer.Flatten(),
        layer.Linear(4 * 64, 5), neuron.LIFNode(),
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Any:
        found = torch.stack([model(batch[0]) for _ in range(4)]).mean(0)
        functional.reset_net(model)
        return F.mse_loss(found, F.one_hot(batch[1], 5).float())

    return Training(net.train(), loss, images(8, channels=1))


def tabnet() -> Training:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(16, 4, n_d=8, n_a=8, n_steps=3, group_attention_matrix=torch.eye(16))

    def batch(k: int) -> Any:
        return floats(32, 16)(k), torch.randint(0, 4, (32,), generator=generator(k))

    def loss(model: nn.Module, batch: Any) -> Any:
        found, sparse = model(batch[0])
        return F.cross_entropy(found, batch[1]) - 1e-3 * sparse

    return Training(model.train(), loss, batch)


def ft_transformer() -> Training:
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=6, cat_cardinalities=[4, 3], d_out=1, n_blocks=2, d_block=32, attention_n_heads=2,
        attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip

    def batch(k: int) -> Any:
        g = generator(k)
        return torch.randn(32, 6, generator=g), torch.randint(0, 3, (32, 2), generator=g)

    return Training(model.train(), lambda m, b: m(*b).square().mean(), batch)


def conformer() -> Training:
    from conformer import ConformerBlock

    model = nn.Sequential(
        *(
            ConformerBlock(dim=32, dim_head=16, heads=2, attn_dropout=0.1, ff_dropout=0.1, conv_dropout=0.1)
            for _ in range(2)
        )
    )
    return Training(model.train(), squared, floats(2, 32, 32))


def metric(name: str, miner: str = "") -> Callable[[], Training]:
    def build() -> Training:
        from pytorch_metric_learning import losses, miners

        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        more = {"num_classes": 3, "embedding_size": 8} if name in ("ArcFaceLoss", "ProxyAnchorLoss") else {}
        net.criterion = getattr(losses, name)(**more)
        mined = getattr(miners, miner)() if miner else None

        def batch(k: int) -> Any:
            return floats(24, 16)(k), torch.arange(24) % 3

        def loss(model: Any, batch: Any) -> Any:
            found = model[2](model[1](model[0](batch[0])))
            if mined is None:
                return model.criterion(found, batch[1])
            return model.criterion(found, batch[1], mined(found, batch[1]))

        return Training(net, loss, batch)

    return build


def counted() -> Training:
    import torchmetrics

    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    net.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=5)

    def batch(k: int) -> Any:
        return floats(24, 16)(k), torch.randint(0, 5, (24,), generator=generator(k))

    def loss(model: Any, batch: Any) -> Any:
        found = model[2](model[1](model[0](batch[0])))
        model.accuracy.update(found.detach(), batch[1])
        return F.cross_entropy(found, batch[1])

    return Training(net, loss, batch)


def variational() -> Training:
    import pyro.distributions as dist

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

        def forward(self, x: Any) -> Any:
            mean, scale = self.encode(x).chunk(2, -1)
            posterior = dist.Normal(mean, F.softplus(scale) + 1e-3).to_event(1)
            z = posterior.rsample()
            prior = dist.Normal(torch.zeros_like(z), torch.ones_like(z)).to_event(1)
            likelihood = dist.Normal(self.decode(z), 1.0).to_event(1)
            return -(likelihood.log_prob(x) + prior.log_prob(z) - posterior.log_prob(z)).mean()

    return Training(Model(), itself, floats(32, 16))


_ROWS: dict[str, tuple[str, Callable[[], Training]]] = {
    "ViT": ("vit_pytorch", of_vit_pytorch("vit:ViT", **_VIT, dropout=0.1, emb_dropout=0.1)),
    "SimpleViT": ("vit_pytorch", of_vit_pytorch("simple_vit:SimpleViT", **_VIT)),
    "DeepViT": ("vit_pytorch", of_vit_pytorch("deepvit:DeepViT", **_VIT, dropout=0.1)),
    "CaiT with layer dropout": (
        "vit_pytorch",
        of_vit_pytorch("cait:CaiT", **_VIT, cls_depth=1, layer_dropout=0.05, dropout=0.1),
    ),
    "CCT": (
        "vit_pytorch",
        of_vit_pytorch(
            "cct:CCT",
            img_size=(32, 32),
            embedding_dim=32,
            n_conv_layers=1,
            kernel_size=7,
            stride=2,
            padding=3,
            pooling_kernel_size=3,
            pooling_stride=2,
            pooling_padding=1,
            num_layers=2,
            num_heads=2,
            mlp_ratio=2.0,
            num_classes=5,
        ),
    ),
    "MaxViT": (
        "vit_pytorch",
        of_vit_pytorch(
            "max_vit:MaxViT",
            dim=32,
            dim_conv_stem=16,
            dim_head=16,
            depth=(1, 1),
            window_size=4,
            mbconv_expansion_rate=2,
            mbconv_shrinkage_rate=0.25,
            dropout=0.1,
            num_classes=5,
        ),
    ),
    "MobileViT": (
        "vit_pytorch",
        of_vit_pytorch(
            "mobile_vit:MobileViT",
            128,
            image_size=(128, 128),
            dims=[16, 24, 32],
            num_classes=5,
            channels=[8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 64],
        ),
    ),
    "U-Net": ("segmentation_models_pytorch", segmentation("Unet")),
    "FPN with dropout": ("segmentation_models_pytorch", segmentation("FPN")),
    "DeepLabV3+": ("segmentation_models_pytorch", segmentation("DeepLabV3Plus")),
    "SegFormer": ("segmentation_models_pytorch", segmentation("Segformer")),
    "3-D U-Net, dice and cross entropy": ("monai", monai_unet),
    "SegResNet, dice and focal loss": ("monai", monai_vnet),
    "AutoencoderKL": ("monai", monai_vae),
    "EfficientNet-B0": ("efficientnet_pytorch", efficientnet),
    "CLIP": ("open_clip", open_clip_model),
    "perceptual loss (LPIPS)": ("lpips", perceptual),
    "SSIM and Sobel edges of augmented images": ("kornia", kornia_losses),
    "decoder with rotary positions": ("x_transformers", x_transformer(rotary_pos_emb=True, attn_dropout=0.1)),
    "decoder: ALiBi, GLU, RMS norms": (
        "x_transformers",
        x_transformer(alibi_pos_bias=True, ff_glu=True, use_rmsnorm=True, ff_dropout=0.1),
    ),
    "decoder: talking heads, relative positions": (
        "x_transformers",
        x_transformer(rel_pos_bias=True, attn_pre_talking_heads=True, layer_dropout=0.1),
    ),
    "decoder: memory, sandwich, residual gates": (
        "x_transformers",
        x_transformer(attn_num_mem_kv=4, gate_residual=True, sandwich_norm=True),
    ),
    "SentenceTransformer, negatives of the batch": ("sentence_transformers, transformers", sentence_pairs),
    "Performer": ("performer_pytorch", performer),
    "Reformer": ("reformer_pytorch", reformer),
    "Linformer": ("linformer", linformer),
    "mixture of experts (ST-MoE)": ("st_moe_pytorch", experts),
    "mixture of experts (soft)": ("soft_moe_pytorch", soft_experts),
    "gMLP, layers left out at random": ("g_mlp_pytorch", g_mlp),
    "Perceiver": ("perceiver_pytorch", perceiver),
    "diffusion of images": ("denoising_diffusion_pytorch", denoising),
    "VQ with moving averages": ("vector_quantize_pytorch", quantized),
    "FSQ": ("vector_quantize_pytorch", scalar_quantized),
    "SIREN": ("siren_pytorch", siren),
    "BYOL": ("byol_pytorch", byol_wrapper),
    "neural ODE, adjoint": ("torchdiffeq", ode),
    "neural ODE, midpoint": ("torchdiffeq", ode_through),
    "neural ODE, adaptive": ("torchdiffeq", adaptive_ode),
    "Gaussian process, exact": ("gpytorch", exact_process),
    "perceptron with normalized activations": ("e3nn", equivariant),
    "tensor product of spherical harmonics": ("e3nn", spherical),
    "EGNN": ("egnn_pytorch", egnn),
    "Fourier neural operator": ("neuralop", fourier_operator),
    "spiking network": ("snntorch", spiking),
    "spiking network with state in modules": ("spikingjelly", spiking_jelly),
    "TabNet": ("pytorch_tabnet", tabnet),
    "FT-Transformer": ("rtdl_revisiting_models", ft_transformer),
    "Conformer": ("conformer", conformer),
    "triplets with a miner": ("pytorch_metric_learning", metric("TripletMarginLoss", "MultiSimilarityMiner")),
    "NT-Xent loss": ("pytorch_metric_learning", metric("NTXentLoss")),
    "ArcFace": ("pytorch_metric_learning", metric("ArcFaceLoss")),
    "proxy anchors": ("pytorch_metric_learning", metric("ProxyAnchorLoss")),
    "accuracy counted in the loss function": ("torchmetrics", counted),
    "variational autoencoder of distributions": ("pyro", variational),
}
