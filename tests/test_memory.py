"""Peak resident memory: nothing of size L x S is held beyond what the caller gave or asked for.

Each measurement is a process of its own. With 8 heads and 8,192 x 8,192 pairs one (H, L, S) buffer
of float32 would be 2,048 MiB.
"""

from __future__ import annotations

import pytest

from tiers import run_python

MIB = 1024 * 1024
BUFFER = 8 * 8192 * 8192 * 4 // MIB

_CODE = """
import resource
import torch
import attention_ext as ae
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
q, k, v = (torch.randn(1, 8, {n}, 8, requires_grad={grad}) for _ in range(3))
{given}
small = [x.detach()[:, :, :200].requires_grad_({grad}) for x in (q, k, v)]
out = ae.attention(*small, is_causal=True)  # threads, arenas and code are there from here on
if {grad}:
    out.sum().backward()
before = peak()
{call}
print(peak() - before)
"""


def _growth(call: str, given: str = "", grad: bool = False, n: int = 8192) -> int:
    """MiB by which the peak grows during the call."""
    code = _CODE.format(given=given, call=call, grad=grad, n=n)
    return int(run_python(code, timeout=300).stdout.split()[-1])


MASK = "mask = torch.ones(8192, 8192, dtype=torch.bool).tril_(100)"
BIAS = "bias = torch.zeros(8192, 8192, requires_grad=True)"


@pytest.mark.slow
def test_bool_mask() -> None:
    growth = _growth("ae.attention(q, k, v, mask, return_lse=True)", MASK)
    assert growth < 64, f"{growth} MiB; a buffer of scores would be {BUFFER}"


@pytest.mark.slow
def test_bool_mask_backward() -> None:
    growth = _growth("ae.attention(q, k, v, mask).sum().backward()", MASK, grad=True)
    assert growth < 128, f"{growth} MiB; a buffer of scores would be {BUFFER}"


@pytest.mark.slow
def test_learned_bias_with_its_gradient() -> None:
    """The gradient itself is (L, S): 256 MiB."""
    growth = _growth("ae.attention(q, k, v, bias).sum().backward()", BIAS, grad=True)
    assert growth < 256 + 128, f"{growth} MiB; a buffer of scores would be {BUFFER}"


@pytest.mark.slow
def test_mean_weights() -> None:
    """The result itself is (L, S): 256 MiB."""
    growth = _growth("out, w = ae.attention(q, k, v, return_weights='mean')")
    assert growth < 256 + 64, f"{growth} MiB; the weights of all heads would be {BUFFER}"


@pytest.mark.slow
def test_mean_weights_backward() -> None:
    call = "out, w = ae.attention(q, k, v, return_weights='mean')\nw.sum().backward()"
    growth = _growth(call, grad=True)
    assert growth < 256 + 128, f"{growth} MiB; the weights of all heads would be {BUFFER}"


@pytest.mark.slow
def test_key_mask_adds_nothing() -> None:
    """(B, S) stays (B, S): no copy per head or row."""
    given = "seen = torch.rand(1, 2048) > 0.2"
    growth = _growth("ae.attention(q, k, v, key_mask=seen).sum().backward()", given, True, 2048)
    assert growth < 32, f"{growth} MiB"


@pytest.mark.slow
def test_expanded_mask_is_read_where_it_is() -> None:
    given = "mask = (torch.rand(2048, 1) > 0.2).expand(1, 8, 2048, 2048)"
    growth = _growth("ae.attention(q, k, v, mask).sum().backward()", given, True, 2048)
    assert growth < 32, f"{growth} MiB; a copy of the mask would be 32 and more"


@pytest.mark.slow
def test_grouped_heads_are_not_copied() -> None:
    """One key/value head of 32 MiB serves eight query heads."""
    given = """
k, v = (torch.randn(1, 1, 2 ** 20, 8) for _ in range(2))
q = torch.randn(1, 8, 2, 8)"""
    growth = _growth("ae.attention(q, k, v)", given)
    assert growth < 64, f"{growth} MiB; copies for every head would be 512"
