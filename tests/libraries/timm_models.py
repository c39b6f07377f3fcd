"""timm: attention_ext.sdpa under its vision models, learned position biases included.

Its own attention, the oracle, is what it does with its fused attention switched off.
"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from compare import compare, make
from torch import nn

import attention_ext as ae

SMALL: dict[str, Any] = {"num_classes": 5, "in_chans": 1}
VIT: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, **SMALL}

# name: (arguments, calls of attention in one forward, name of the learned biases of the scores)
MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "vit_tiny_patch16_224": ({**VIT, "patch_size": 8}, 2, ""),
    "vit_small_patch16_18x2_224": ({**VIT, "patch_size": 8}, 4, ""),
    "vit_relpos_small_patch16_224": ({**VIT, "patch_size": 8}, 2, "rel_pos.mlp.fc2.weight"),
    "vit_srelpos_small_patch16_224": ({**VIT, "patch_size": 8}, 2, "rel_pos.mlp.fc2.weight"),
    "beit_base_patch16_224": ({**VIT, "patch_size": 8}, 2, "relative_position_bias_table"),
    "eva02_tiny_patch14_224": ({**VIT, "img_size": 28, "patch_size": 7}, 2, ""),
    "swin_tiny_patch4_window7_224": (
        {
            "img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 1),
            "num_heads": (2, 4), **SMALL,
        },
        3,
        "relative_position_bias_table",
    ),
    "pvt_v2_b0": (
        {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2), **SMALL},
        4,
        "",
    ),
    "hiera_tiny_224": (
        {"img_size": 32, "embed_dim": 16, "stages": (1, 1, 1, 1), **SMALL},
        4,
        "",
    ),
}  # fmt: skip


def build(name: str, fused: bool) -> nn.Module:
    arguments, _, _ = MODELS[name]
    timm.layers.set_fused_attn(fused, experimental=fused)  # Swin asks for the experimental ones
    model = make(lambda: timm.create_model(name, **arguments))
    timm.layers.set_fused_attn(True)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    arguments, calls, learned = MODELS[name]
    size = arguments.get("img_size", 32)
    x = torch.randn(2, 1, size, size, dtype=torch.float64)
    compare(
        build(name, fused=False), build(name, fused=True), lambda m: m(x), calls, ae.sdpa, learned
    )
