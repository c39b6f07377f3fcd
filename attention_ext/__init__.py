"""Fused masked attention for PyTorch: importing it registers torch.ops.attention_ext.*.

The functional API, the module and the tool that swaps torch's modules are here; ``reference`` is
the dense oracle, and ``visualize`` draws weights (it imports matplotlib at its first call).
"""

# functional loads the op library, by way of _ops and _loader.
from attention_ext import _loader, reference, visualize
from attention_ext import flops as _flops  # noqa: F401  (registers formulas)
from attention_ext.functional import (
    attention,
    make_rng_state,
    scaled_dot_product_attention,
    varlen_attention,
)
from attention_ext.modules import MultiheadAttention
from attention_ext.override import sdpa
from attention_ext.replace import replace_attention

__version__ = "0.1.0"

#: Where CMake's ``find_package(attention_ext)`` looks.
cmake_prefix_path = str(_loader.PACKAGE_DIR)

__all__ = [
    "MultiheadAttention",
    "attention",
    "cmake_prefix_path",
    "make_rng_state",
    "reference",
    "replace_attention",
    "scaled_dot_product_attention",
    "sdpa",
    "varlen_attention",
    "visualize",
]
