"""python -m attention_ext: what was built, for which torch, which kernels this machine runs."""

from __future__ import annotations

import torch

import attention_ext
from attention_ext import _build_info, _loader


def report() -> str:
    """The build in a few lines, one fact a line."""
    capability = getattr(torch.ops.attention_ext, "_cpu_capability", None)
    rows = {
        "attention_ext": attention_ext.__version__,
        "library": str(_loader.LIBRARY),
        "built for torch": f"{_build_info.TORCH_VERSION} (cxx11 ABI {_build_info.CXX11_ABI})",
        "running torch": str(torch.__version__),
        "CUDA": _build_info.CUDA or f"not built: {_build_info.CUDA_REASON}",
        "compiler": _build_info.COMPILER,
        "CPU tiers built": ", ".join(_build_info.TIERS),
        "CPU tier in use": capability() if capability is not None else "unknown",
        "threads": str(torch.get_num_threads()),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


if __name__ == "__main__":
    print(report())
