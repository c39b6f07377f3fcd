"""Adapters that put the fused operator inside other libraries; each imports its library itself."""
