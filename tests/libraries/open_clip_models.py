"""open_clip: towers of torch.nn.MultiheadAttention, attentional pooling, and its own attention."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import torch
from compare import compare, make
from torch import Tensor, nn

import attention_ext as ae

VISION: dict[str, Any] = {
    "layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 16,
}  # fmt: skip
TEXT: dict[str, Any] = {"context_length": 9, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}

# name: (settings of the vision tower, of the text tower, torch's modules inside, attention calls)
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "clip": ({}, {}, 4, 4),
    "attentional pooling": ({"attentional_pool": True, "attn_pooler_heads": 4}, {}, 5, 5),
    "its own attention": (
        {"block_type": "custom", "qk_norm": True, "scaled_cosine_attn": False},
        {"block_type": "custom", "scale_heads": True},
        0,
        4,
    ),
}


def build(name: str) -> nn.Module:
    vision, text, _, _ = MODELS[name]
    return open_clip.CLIP(embed_dim=16, vision_cfg={**VISION, **vision}, text_cfg={**TEXT, **text})


def call(model: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    words = torch.randint(1, 50, (3, 9))
    return model.encode_image(images), model.encode_text(words)


@pytest.mark.parametrize("way", ["replaced", "context"])
@pytest.mark.parametrize("name", MODELS)
def test_clip(name: str, way: str) -> None:
    *_, modules, calls = MODELS[name]
    ours = make(lambda: build(name))
    if way == "replaced":
        assert ae.replace_attention(ours) == modules
        if modules == 0:
            return
        compare(make(lambda: build(name)), ours, call, calls)
    else:
        compare(make(lambda: build(name)), ours, call, calls, ae.sdpa)
