"""torchvision: its vision transformer holds torch.nn.MultiheadAttention."""

from __future__ import annotations

import pytest
import torch
from compare import compare, make
from torch import nn
from torchvision.models import VisionTransformer

import attention_ext as ae


def build() -> nn.Module:
    return VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32,
        num_classes=5,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["replaced", "context"])
def test_vision_transformer(way: str) -> None:
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    ours = make(build)
    if way == "replaced":
        assert ae.replace_attention(ours) == 2
        compare(make(build), ours, lambda m: m(x), 2)
    else:
        compare(make(build), ours, lambda m: m(x), 2, ae.sdpa)
