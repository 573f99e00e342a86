"""Vision: classifiers, segmentation, detection, and images with text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compat import Row, Training, hugging_face, trained
from torch import nn
from torch.nn import functional as F

TITLE = "Vision"
SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
)


def rows() -> Iterator[Row]:
    yield from torchvision_rows()
    yield from timm_rows()
    yield from transformers_rows()


def images(
    size: int, classes: int = 5, number: int = 4
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(step)
        return torch.randn(number, 3, size, size, generator=g), torch.randint(classes, (number,), generator=g)

    return batch


def classifier(name: str, package: str, make: Callable[[], nn.Module], size: int) -> Row:
    def build() -> Training:
        return Training(make(), nn.CrossEntropyLoss(label_smoothing=0.1), images(size))

    return Row(name, (package,), partial(trained, build))


# --- torchvision ----------------------------------------------------------------------------------------------


def torchvision_rows() -> Iterator[Row]:
    named: dict[str, tuple[int, dict[str, Any]]] = {
        "resnet18": (32, {}),
        "shufflenet_v2_x0_5": (64, {}), "mobilenet_v3_small": (64, {}),
        "efficientnet_b0": (32, {}), "regnet_y_400mf": (32, {}),
    }  # fmt: skip
    for name, (size, options) in named.items():
        yield classifier(name, "torchvision", partial(_torchvision, name, options), size)
    yield classifier("VGG", "torchvision", _vgg, 32)
    yield classifier("DenseNet", "torchvision", _densenet, 32)
    yield classifier("VisionTransformer", "torchvision", _vit, 32)
    yield classifier("SwinTransformer", "torchvision", _swin, 32)
    yield classifier("ConvNeXt", "torchvision", _convnext, 32)
    yield Row("GoogLeNet with auxiliary heads", ("torchvision",), partial(trained, _googlenet))
    yield Row("LR-ASPP segmentation", ("torchvision",), partial(trained, partial(_segmentation, "lraspp")))
    yield Row("DeepLabV3 segmentation", ("torchvision",), partial(trained, partial(_segmentation, "deeplab")))
    yield Row("FCOS detection", ("torchvision",), partial(trained, partial(_detection, "fcos")))
    yield Row("RetinaNet detection", ("torchvision",), partial(trained, partial(_detection, "retinanet")))


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=5, **options)


def _vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    model = VGG(make_layers([8, "M", 16, "M"], batch_norm=True))
    model.classifier = nn.Sequential(nn.Linear(784, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 5))
    return model


def _densenet() -> nn.Module:
    from torchvision.models.densenet import DenseNet

    return DenseNet(8, (2, 2, 2), num_init_features=8, drop_rate=0.1, num_classes=5, memory_efficient=False)


def _vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=5)


def _swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 2], [4, 4], stochastic_depth_prob=0.2, dropout=0.1, num_classes=5
    )


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=5)


def _googlenet() -> Training:
    from torchvision.models import googlenet

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        entropies = [F.cross_entropy(x, batch[1]) for x in (out.logits, out.aux_logits1, out.aux_logits2)]
        return entropies[0] + 0.3 * (entropies[1] + entropies[2])

    model = googlenet(weights=None, num_classes=5, aux_logits=True, init_weights=False)
    return Training(model, loss, images(64, number=2))


def _segmentation(kind: str) -> Training:
    from torchvision.models import segmentation
    from torchvision.models.resnet import BasicBlock, ResNet
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    if kind == "lraspp":
        model: nn.Module = segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=5
        )
    else:
        backbone = nn.Sequential(*list(ResNet(BasicBlock, [1, 1, 1, 1]).children())[:6])
        model = DeepLabV3(_Named(backbone), DeepLabHead(128, 5, (2, 4)))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0])["out"], batch[1], ignore_index=4)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(step)
        return torch.randn(2, 3, 64, 64, generator=g), torch.randint(5, (2, 64, 64), generator=g)

    return Training(model, loss, batch)


class _Named(nn.Module):
    """A backbone that gives its result a name, as torchvision's heads want it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.body(x)}


def _detection(kind: str) -> Training:
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    body = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    body.out_channels = 32
    if kind == "fcos":
        anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,),))
        model: nn.Module = FCOS(body, 5, min_size=64, max_size=64, anchor_generator=anchors)
    else:
        anchors = AnchorGenerator(sizes=((8, 16),), aspect_ratios=((0.5, 1.0, 2.0),))
        model = RetinaNet(body, 5, min_size=64, max_size=64, anchor_generator=anchors)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        pictures, targets = batch
        return sum(model(list(pictures), list(targets)).values())

    def batch(step: int) -> Any:
        g = torch.Generator().manual_seed(step)
        corners = torch.rand(2, 3, 2, generator=g) * 30
        boxes = torch.cat([corners, corners + 8 + 20 * torch.rand(2, 3, 2, generator=g)], -1)
        targets = [{"boxes": b, "labels": torch.randint(1, 5, (3,), generator=g)} for b in boxes]
        return [torch.rand(3, 64, 64, generator=g) for _ in range(2)], targets

    return Training(model, loss, batch)


# --- timm -----------------------------------------------------------------------------------------------------


def timm_rows() -> Iterator[Row]:
    small_vit = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    named: dict[str, tuple[int, dict[str, Any]]] = {
        "resnet18": (32, {"drop_rate": 0.1, "drop_path_rate": 0.1}),
        "vit_tiny_patch16_224": (32, small_vit | {"drop_path_rate": 0.1, "proj_drop_rate": 0.1}),
        "beit_base_patch16_224": (32, small_vit | {"drop_path_rate": 0.1}),
        "eva02_tiny_patch14_224": (32, small_vit),
        "swin_tiny_patch4_window7_224": (
            32, {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)},
        ),
        "convnext_atto": (32, {"dims": (8, 16, 16, 32), "depths": (1, 1, 2, 1), "drop_path_rate": 0.1}),
        "efficientnet_b0": (32, {"drop_rate": 0.2, "drop_path_rate": 0.2}),
        "mixer_s16_224": (32, {"img_size": 32}),
        "poolformer_s12": (32, {"drop_path_rate": 0.1}),
        "ghostnet_050": (32, {}),
        "nf_resnet26": (32, {}),
        "xcit_nano_12_p16_224": (32, small_vit | {"patch_size": 8, "cls_attn_layers": 1}),
        "coatnet_0_rw_224": (64, {"img_size": 64, "drop_path_rate": 0.1}),
        "levit_128s": (64, {"img_size": 64}),
        "repvgg_a0": (32, {}),
    }  # fmt: skip
    for name, (size, options) in named.items():
        yield classifier(f"{name} (timm)", "timm", partial(_timm, name, options), size)


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **options)


# --- transformers ---------------------------------------------------------------------------------------------


def pictures(step: int, size: int = 32, **labels: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(step)
    found: dict[str, Any] = {"pixel_values": torch.randn(2, 3, size, size, generator=g)}
    return found | {k: make(g) for k, make in labels.items()}


def labeled(step: int) -> dict[str, Any]:
    return pictures(step, labels=lambda g: torch.randint(5, (2,), generator=g))


def segmented(step: int) -> dict[str, Any]:
    return pictures(step, 64, labels=lambda g: torch.randint(5, (2, 64, 64), generator=g))


def transformers_rows() -> Iterator[Row]:
    yield hugging_face("ViT", "ForImageClassification", SMALL | {"num_labels": 5}, labeled)
    yield hugging_face(
        "Dinov2", "ForImageClassification", SMALL | {"drop_path_rate": 0.1, "num_labels": 5}, labeled
    )
    segformer = dict(
        hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16,
        num_labels=5,
    )  # fmt: skip
    yield hugging_face("Segformer", "ForSemanticSegmentation", segformer, segmented)
    decoder = dict(
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )  # fmt: skip
    yield hugging_face("ViTMAE", "ForPreTraining", SMALL | decoder, pictures)
    yield Row("Detr, object detection", ("transformers", "scipy"), partial(trained, _detr))
    text = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99,
        eos_token_id=2,
    )  # fmt: skip
    both = dict(text_config=text, vision_config=SMALL, projection_dim=16)
    yield hugging_face("CLIP", "Model", both, _captioned)
    yield hugging_face("Siglip", "Model", both, _captioned)


def _captioned(step: int) -> dict[str, Any]:
    ids = partial(torch.randint, 3, 99, (2, 12))
    return pictures(step, input_ids=lambda g: ids(generator=g)) | {"return_loss": True}


def _detr() -> Training:
    import transformers as t

    backbone = t.ResNetConfig(
        layer_type="basic", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = t.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=6,
        num_labels=5,
    )  # fmt: skip

    def batch(step: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(step)
        boxes = [0.3 + 0.3 * torch.rand(2, 4, generator=g) for _ in range(2)]
        labels = [{"class_labels": torch.randint(5, (2,), generator=g), "boxes": b} for b in boxes]
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=g), "labels": labels}

    return Training(t.DetrForObjectDetection(config), None, batch)
