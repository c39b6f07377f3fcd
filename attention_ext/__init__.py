"""Fused masked attention for PyTorch: importing it registers torch.ops.attention_ext.*."""

from attention_ext import _loader

_loader.load()

__version__ = "0.1.0"
