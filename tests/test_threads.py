"""Threads and processes: two cores busy on one head, fork after parallel work, concurrent calls."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

import attention_ext as ae
from cases import Case, case_named, evaluate
from tiers import run_python

_BUSY = """
import time
import torch
import attention_ext as ae
torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 2048, 64, requires_grad=True) for _ in range(3))
grad = torch.randn(1, 1, 2048, 64)
def ratio(call):
    call()
    best = 0.0
    for _ in range(12):
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(3):
            call()
        best = max(best, (time.process_time() - cpu) / (time.perf_counter() - wall))
    return best
def forward():
    with torch.no_grad():
        ae.attention(q, k, v)
out = ae.attention(q, k, v)
def backward():
    torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
def arithmetic():
    torch.ops.attention_ext._fma_peak(2, False)
print(ratio(forward), ratio(backward), ratio(arithmetic))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor cannot show two busy ones")
def test_one_head_keeps_two_threads_busy() -> None:
    """CPU time over wall time, forward and backward, is 1.6 at least. Waiting threads sleep and
    don't count. Where other work takes the processors away, two threads of bare arithmetic,
    measured beside, say what can be had: 1.6 is asked for of their 2.0.
    """
    passive = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    measured = []
    for _ in range(4):
        *ratios, possible = map(float, run_python(_BUSY, env=passive).stdout.split())
        measured.append((*ratios, possible))
        if min(ratios) >= 0.8 * min(possible, 2.0):
            return
    raise AssertionError(f"(forward, backward, arithmetic): {measured}")


_FORK = """
import os, sys, torch
import attention_ext as ae
torch.set_num_threads(2)
x = torch.randn(2, 4, 300, 32, requires_grad=True)
def both():
    out = ae.attention(x, x, x, is_causal=True)
    return out.detach(), torch.autograd.grad(out.sum(), x)[0]
before = both()
child = os.fork()
if child == 0:
    {child}
    out = ae.attention(x.detach(), x.detach(), x.detach(), is_causal=True)
    os._exit(0 if out.numpy().tobytes() == before[0].numpy().tobytes() else 3)
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
assert all(torch.equal(a, b) for a, b in zip(both(), before))
print("done")
"""


@pytest.mark.parametrize("child", ["pass", "torch.set_num_threads(1)"], ids=["as_is", "one_thread"])
def test_forked_child_of_a_parallel_parent_works(child: str) -> None:
    """The child compares bytes: torch's own operations on large tensors may hang there."""
    assert "done" in run_python(_FORK.format(child=child), timeout=60).stdout


def test_forked_child_may_go_backward() -> None:
    """The raw backward op: autograd's own threads do not survive a fork."""
    code = """
import os, torch
import attention_ext as ae
torch.set_num_threads(2)
x = torch.randn(2, 4, 300, 32)
forward, backward = torch.ops.attention_ext.attention, torch.ops.attention_ext.attention_backward
def both():
    out, *rest = forward(x, x, x, is_causal=True)
    found = backward(x, None, x, x, x, *[None] * 9, out, *rest, [True] * 3 + [False] * 2,
                     is_causal=True)
    return out, *found[:3]
before = both()
child = os.fork()
if child == 0:
    same = [a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(both(), before)]
    os._exit(0 if all(same) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""
    assert "done" in run_python(code, timeout=60).stdout


class _Dataset(torch.utils.data.Dataset[Tensor]):
    """Calls the op in whichever process loads the item."""

    def __init__(self) -> None:
        self.x = torch.randn(1, 2, 200, 16)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return ae.attention(self.x + index, self.x, self.x)[0]  # type: ignore[index,return-value]


def test_data_loader_workers_may_call() -> None:
    """Forked workers, after the parent ran a parallel region."""
    torch.set_num_threads(2)
    data = _Dataset()
    want = torch.stack([data[n] for n in range(4)])
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.equal(torch.cat(list(loader)), want)


def test_four_python_threads_at_once() -> None:
    """Each with its own sizes, forward and backward, many times over."""
    names = ["everything", "two_tiles_odd", "decode_group", "bias_grouped"]
    calls = [case_named(name).make(torch.float32, requires_grad=True) for name in names]
    want = [evaluate(ae.attention, *call, return_lse=True) for call in calls]
    wrong: list[str] = []

    def work(n: int) -> None:
        try:
            for _ in range(8):
                got = evaluate(ae.attention, *calls[n], return_lse=True)
                wrong.extend(
                    f"{names[n]} {name}"
                    for name in want[n]
                    if not torch.equal(got[name], want[n][name])
                )
        except BaseException as error:
            wrong.append(f"{names[n]} {error!r}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_recomputed_in_the_backward_pass() -> None:
    """Called from autograd's thread, in a checkpoint's recomputation, the op gives the same."""
    args, _ = Case("nested", 200, 300, 16).make(torch.float32, requires_grad=True)
    want = evaluate(ae.attention, args, {})
    got = evaluate(
        lambda *x: torch.utils.checkpoint.checkpoint(ae.attention, *x, use_reentrant=False),
        args,
        {},
    )
    for name, x in want.items():
        assert torch.equal(got[name], x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{"OMP_DYNAMIC": "true"}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}],
    ids=lambda env: "-".join(env) + "-" + "-".join(env.values()),
)
def test_fewer_threads_than_asked_for_lose_no_work(environment: dict[str, str]) -> None:
    code = """
import torch
import attention_ext as ae
torch.manual_seed(0)
x = torch.randn(2, 3, 400, 16, requires_grad=True)
def both():
    out = ae.attention(x, x, x, is_causal=True)
    return out, *torch.autograd.grad(out.sin().sum(), x)
torch.set_num_threads(1)
want = both()
torch.set_num_threads(8)
assert all(torch.equal(a, b) for a, b in zip(both(), want))
print("done")
"""
    assert "done" in run_python(code, env=environment, timeout=120).stdout
