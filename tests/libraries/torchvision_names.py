"""Lets torchvision be imported beside a torch for the CPU.

Its wheel on the package index holds operators linked to CUDA, which cannot be loaded there, and its
Python then fails for want of the names of two of them. No model here uses these; timm and open_clip
need torchvision's Python to be imported at all. A pytest plugin, for the sake of coming first.
"""

from __future__ import annotations

import torch

if not torch.version.cuda:
    NAMES = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        NAMES.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
