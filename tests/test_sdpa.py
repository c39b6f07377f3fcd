"""attention_ext.sdpa: torch's function runs our operator inside, and is torch's own again outside.

Whose kernel ran is seen from the kernels' own counter of visited blocks, and by watching the
dispatcher: a call that torch computes adds nothing to the one and shows in the other.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

# A name of torch's function as modules hold that imported it.
from torch.nn.functional import scaled_dot_product_attention as imported

import attention_ext as ae
from watch import Watch

B, H, L, S, E = 2, 4, 6, 9, 8
OPS: Any = torch.ops.attention_ext


@pytest.fixture(autouse=True)
def _nothing_left_active() -> Iterator[None]:
    torch._dynamo.reset()
    assert not ae.sdpa.is_enabled()
    yield
    assert not ae.sdpa.is_enabled()


def ran_ours(call: Callable[[], Any]) -> bool:
    """Whether our kernels computed what the call returns."""
    OPS._visited_block_pairs()
    call()
    return bool(OPS._visited_block_pairs() > 0)


def numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def qkv(heads: int = H, kv_heads: int = H, ev: int = E, lengths: tuple[int, int] = (L, S)) -> Any:
    return (
        numbers(B, heads, lengths[0], E),
        numbers(B, kv_heads, lengths[1], E),
        numbers(B, kv_heads, lengths[1], ev),
    )


def triangle() -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril()


CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "plain": lambda: (qkv(), {}),
    "causal, more keys": lambda: (qkv(), {"is_causal": True}),
    "causal, fewer keys": lambda: (qkv(lengths=(S, L)), {"is_causal": True}),
    "bool mask": lambda: ((*qkv(), triangle()), {}),
    "bool mask of sequences": lambda: ((*qkv(), torch.rand(B, 1, L, S) > 0.3), {}),
    "float mask": lambda: ((*qkv(), numbers(L, S, grad=False)), {}),
    "learned bias (L, S)": lambda: (qkv(), {"attn_mask": numbers(L, S)}),
    "learned bias (1, H, L, S)": lambda: (qkv(), {"attn_mask": numbers(1, H, L, S)}),
    "learned bias (B, 1, L, S)": lambda: (qkv(), {"attn_mask": numbers(B, 1, L, S)}),
    "only the bias learns": lambda: (
        tuple(x.detach() for x in qkv()),
        {"attn_mask": numbers(1, H, L, S)},
    ),
    "other size of values": lambda: (qkv(ev=5), {}),
    "grouped heads": lambda: (qkv(kv_heads=2), {"enable_gqa": True}),
    "one key head": lambda: (qkv(kv_heads=1), {"enable_gqa": True, "is_causal": True}),
    "one key head broadcasts": lambda: (qkv(kv_heads=1), {}),
    "scale": lambda: (qkv(), {"scale": -0.3}),
    "three dimensions": lambda: (tuple(x[:, 0] for x in qkv()), {"is_causal": True}),
    "two dimensions": lambda: (tuple(x[0, 0] for x in qkv()), {"attn_mask": numbers(L, S)}),
    "five dimensions": lambda: (
        tuple(x.view(1, B, H, -1, E) for x in qkv()),
        {"attn_mask": numbers(B, 1, L, S)},
    ),
    "batch broadcasts": lambda: ((numbers(1, H, L, E), *qkv()[1:]), {}),
    "heads are strided": lambda: (
        tuple(numbers(B, n, H, E).transpose(1, 2) for n in (L, S, S)),
        {},
    ),
}


def results(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradient of everything that requires one."""
    leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
    out = F.scaled_dot_product_attention(*args, **kwargs)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH], ids=["any backend", "MATH forced"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_ours_and_gives_torchs_numbers(name: str, backend: Any) -> None:
    args, kwargs = CALLS[name]()
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(args, kwargs)
    with sdpa_kernel(backend or list(SDPBackend.__members__.values())[1:]):
        with ae.sdpa(), Watch() as seen:
            ours = results(args, kwargs)
        with Watch() as after:
            results(args, kwargs)
    assert seen.ours == 1 and seen.calls["attention_ext::attention_backward"] == 1
    assert seen.other_ways == []
    assert after.ours == 0 and after.other_ways
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_own_bits_are_back_afterwards(dtype: torch.dtype) -> None:
    x = numbers(3, B, H, 40, E, dtype=dtype)
    for masked in (False, True):
        mask = numbers(40, 40, dtype=dtype) if masked else None
        args, kwargs = (*x.unbind(0),), {"attn_mask": mask}
        before = results(args, kwargs)
        with ae.sdpa():
            assert ran_ours(lambda a=args, k=kwargs: results(a, k))
        after = results(args, kwargs)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_every_name_of_the_function_is_served() -> None:
    q, k, v = qkv()
    ways: list[Callable[[], Tensor]] = [
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: imported(q, k, v),
        lambda: torch._C._nn.scaled_dot_product_attention(q, k, v),
        lambda: torch.ops.aten.scaled_dot_product_attention(q, k, v),
        lambda: torch.ops.aten.scaled_dot_product_attention.default(q, k, v),
        lambda: F.multi_head_attention_forward(
            *(q[:, 0].transpose(0, 1),) * 3, E, 2, torch.eye(E, dtype=q.dtype).repeat(3, 1), None,
            None, None, False, 0.0, torch.eye(E, dtype=q.dtype), None, need_weights=False,
        )[0],
    ]  # fmt: skip
    for way in ways:
        assert not ran_ours(way)
        with ae.sdpa():
            assert ran_ours(way)
        assert not ran_ours(way)


def test_dropout_is_ours_and_off_when_zero() -> None:
    q, k, _ = qkv()
    v = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    with ae.sdpa():
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(1)
        same = ae.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        whole = F.scaled_dot_product_attention(q, k, v)
        (gradient,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(out, same)
    kept = out != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(out[kept], 2 * whole[kept])
    torch.testing.assert_close(gradient, torch.autograd.grad(same.sum(), q)[0])


def test_what_torch_refuses_is_refused() -> None:
    q, k, v = qkv()
    wrong: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception]]] = {
        "same number of heads unless enable_gqa=True": (qkv(kv_heads=2), {}, RuntimeError),
        "multiple": (qkv(kv_heads=3), {"enable_gqa": True}, RuntimeError),
        "dtype": ((q, k.float(), v), {}, RuntimeError),
        "dropout": ((q, k, v), {"dropout_p": 1.5}, RuntimeError),
        "attn_mask|attn_bias": ((q, k, v, torch.ones(L, S + 1) > 0), {}, RuntimeError),
        "at least 2 dimensions": ((q[0, 0, 0], k, v), {}, RuntimeError),
        "CausalBias should not be used with causal=True": (
            (q, k, v, causal_lower_right(L, S)), {"is_causal": True}, ValueError),
    }  # fmt: skip
    for text, (args, kwargs, error) in wrong.items():
        with pytest.raises(error):
            F.scaled_dot_product_attention(*args, **kwargs)
        with ae.sdpa(), pytest.raises(error, match=text):
            F.scaled_dot_product_attention(*args, **kwargs)
    with ae.sdpa(), pytest.raises(TypeError):
        F.scaled_dot_product_attention(q, k)  # type: ignore[call-arg]
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("learned", [False, True])
def test_a_mask_beside_is_causal_means_both(learned: bool) -> None:
    """What torch's CPU kernel computes; its other backends refuse."""
    q, k, v = qkv()
    mask = numbers(L, S, grad=learned) if learned else torch.rand(L, S) > 0.3
    hidden = mask.masked_fill(~triangle(), -torch.inf) if learned else mask & triangle()
    expected = ae.reference.attention(q, k, v, hidden)
    if not learned:
        theirs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
        torch.testing.assert_close(theirs, expected)
    with ae.sdpa():
        ours = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    torch.testing.assert_close(ours, expected)


def test_what_ours_cannot_honour_says_so() -> None:
    parts = [torch.randn(n, H, E) for n in (3, 5)]
    strided = torch.nested.nested_tensor(parts, layout=torch.strided).transpose(1, 2)
    with ae.sdpa():
        with pytest.raises(RuntimeError, match="jagged layout"):
            F.scaled_dot_product_attention(strided, strided, strided)
        fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
        with fake, pytest.raises(RuntimeError, match="must be on a CPU or CUDA device, got mps"):
            x = torch.empty(B, H, L, E, device="mps")
            F.scaled_dot_product_attention(x, x, x)


def test_causal_bias_masks_keep_their_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()

    def never(*_: Any) -> Tensor:
        raise AssertionError("the triangle was made into a matrix")

    for mask, diagonal in ((causal_lower_right(L, S), S - L), (causal_upper_left(L, S), 0)):
        dense = torch.ones(L, S, dtype=torch.bool).tril(diagonal)
        expected = ae.reference.attention(q, k, v, dense)
        for function in (F.scaled_dot_product_attention, imported):
            with ae.sdpa(), monkeypatch.context() as patch:
                patch.setattr(CausalBias, "_materialize", never)
                out = function(q, k, v, mask)
                assert ran_ours(lambda f=function, m=mask: f(q, k, v, attn_mask=m, dropout_p=0.1))
            torch.testing.assert_close(out, expected)
        assert not ran_ours(lambda m=mask: F.scaled_dot_product_attention(q, k, v, m))


def test_cuda_tensors_are_ours_as_far_as_a_machine_without_a_gpu_can_tell() -> None:
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    triangle = causal_lower_right(L, S)
    with ae.sdpa(), mode, Watch() as seen:
        q, k, v = (torch.empty(B, H, n, E, device="cuda", dtype=torch.bfloat16) for n in (L, S, S))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        assert (out.device.type, out.dtype) == ("cuda", torch.bfloat16)
        F.scaled_dot_product_attention(q, k, v, triangle)  # torch's calls its flash operator
    assert seen.ours == 2 and seen.other_ways == []


def test_jagged_tensors_are_ours() -> None:
    lengths = (3, 5, 1)
    values = [torch.randn(n, H, E, dtype=torch.float64) for n in lengths]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged, requires_grad=True)

    def call() -> Tensor:
        x = nested.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).values()

    leaves = [x.requires_grad_() for x in values]
    heads_first = [x.transpose(0, 1) for x in leaves]
    dense = [F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in heads_first]
    expected = torch.cat([x.transpose(0, 1) for x in dense])
    right = torch.cat(torch.autograd.grad(expected.sin().sum(), leaves))
    with pytest.raises(RuntimeError, match="No viable backend"):  # torch's needs a GPU for causal
        call()
    with ae.sdpa():
        assert ran_ours(call)
        out = call()
        (gradient,) = torch.autograd.grad(out.sin().sum(), nested)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = nested.detach().float().transpose(1, 2)
            assert F.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
        # Ragged batches of dense sequences reach torch's function with their values.
        planes = torch.nested.nested_tensor(
            [torch.randn(n, H, L, E) for n in lengths], layout=torch.jagged
        )
        assert ran_ours(lambda: F.scaled_dot_product_attention(planes, planes, planes))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient.values(), right)
    with pytest.raises(RuntimeError, match="No viable backend"):
        call()


def test_autocast_casts_as_torch_does_and_keeps_the_mask() -> None:
    q, k, v = (x.float() for x in qkv())
    mask = torch.zeros(L, S)
    mask[0] = torch.finfo(torch.float32).min  # -inf in bfloat16: the row would see nothing
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = F.scaled_dot_product_attention(q, k, v)
        with ae.sdpa():
            ours = F.scaled_dot_product_attention(q, k, v)
            masked = F.scaled_dot_product_attention(q, k, v, mask)
            assert ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(masked[:, :, 0].float(), v.mean(2), rtol=2e-2, atol=2e-2)


def test_transforms_of_torch_func() -> None:
    from torch.func import grad, jvp, vjp, vmap

    q, k, v = (x.detach() for x in qkv())
    bias = torch.randn(3, 1, H, L, S, dtype=torch.float64)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias).sin().sum()

    transforms: dict[str, Callable[[], Any]] = {
        "vmap": lambda: vmap(loss, in_dims=(None, 0))(q, bias),
        "grad": lambda: grad(loss, argnums=(0, 1))(q, bias[0]),
        "vmap(grad)": lambda: vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(q, bias),
        "vjp": lambda: vjp(loss, q, bias[0])[1](torch.ones((), dtype=torch.float64)),
        "jvp": lambda: jvp(loss, (q, bias[0]), (k[:, :, :L], bias[1])),
        "grad(grad)": lambda: grad(lambda x: grad(loss)(x, bias[0]).sin().sum())(q),
    }
    for name, transform in transforms.items():
        with sdpa_kernel(SDPBackend.MATH):
            expected = transform()
            assert not ran_ours(transform), name
        with ae.sdpa():
            torch.testing.assert_close(transform(), expected, msg=name)
            if name != "jvp":  # the tangents take the dense formula
                assert ran_ours(transform), name


def test_vmap_is_served_where_its_randomness_check_is_switched_off() -> None:
    """As inside decompositions of torch's own, which leave only its rule for batched tensors."""
    x = torch.randn(3, B, H, L, E)
    check = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)

    def function(x: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(check):
            return F.scaled_dot_product_attention(x, x, x)

    expected = F.scaled_dot_product_attention(x, x, x)
    with ae.sdpa():
        assert ran_ours(lambda: torch.func.vmap(function)(x))
        torch.testing.assert_close(torch.func.vmap(function)(x), expected)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_dropout_under_vmap_obeys_its_randomness(randomness: str) -> None:
    q = torch.randn(1, B, H, L, E).expand(3, B, H, L, E)

    def call() -> Tensor:
        return torch.func.vmap(
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), randomness=randomness
        )(q)

    with ae.sdpa():
        if randomness == "error":
            with pytest.raises(RuntimeError, match="randomness"):
                call()
            return
        out = call()
    assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_contexts_nest_and_restore_after_exceptions() -> None:
    q, k, v = qkv()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    before = call()
    with ae.sdpa():
        with ae.sdpa() as inner:
            assert isinstance(inner, ae.sdpa)
            assert ran_ours(call)
        assert ran_ours(call)
        with pytest.raises(ZeroDivisionError), ae.sdpa():
            raise ZeroDivisionError
        assert ran_ours(call)
    assert torch.equal(call(), before)
    with pytest.raises(RuntimeError, match="number of heads"), ae.sdpa():
        F.scaled_dot_product_attention(q, k[:, :2], v)
    assert torch.equal(call(), before) and not ran_ours(call)
    again = ae.sdpa()
    for _ in range(2):  # one object may be entered again, also while entered
        with again, again:
            assert ran_ours(call)
    assert not ran_ours(call)


def test_enable_and_disable_count_with_the_contexts() -> None:
    q, k, v = qkv()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    ae.sdpa.enable()
    with ae.sdpa():
        ae.sdpa().enable()
        ae.sdpa.disable()
    assert ae.sdpa.is_enabled() and ran_ours(call)
    ae.sdpa.disable()
    assert not ae.sdpa.is_enabled() and not ran_ours(call)
    with pytest.raises(RuntimeError, match="disable\\(\\) must follow an enable\\(\\)"):
        ae.sdpa.disable()


def test_a_failing_start_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention_ext import override

    q, k, v = qkv()
    monkeypatch.setattr(override, "_KEYS", (*override._KEYS, "NoSuchKey"))
    with pytest.raises(RuntimeError, match="NoSuchKey"):
        ae.sdpa.enable()
    assert not ae.sdpa.is_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))


def test_what_users_set_inside_stays() -> None:
    with ae.sdpa():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ae.sdpa():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_importing_activates_nothing_and_loads_no_compiler() -> None:
    from tiers import run_python

    run_python(
        "import sys, torch, attention_ext as ae\n"
        "assert not ae.sdpa.is_enabled()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "x = torch.ones(1, 1, 2, 2)\n"
        "torch.ops.attention_ext._visited_block_pairs()\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "assert torch.ops.attention_ext._visited_block_pairs() == 0\n"
        "assert torch.nn.attention.list_flash_attention_impls().count('attention_ext') == 0\n"
    )


def test_it_holds_on_every_thread_until_the_last_one_leaves() -> None:
    q, k, v = qkv()
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def other() -> None:
        with ae.sdpa():
            entered.set()
            leave.wait(30)
        left.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    assert ran_ours(call)
    with ae.sdpa():
        leave.set()
        assert left.wait(30)
        assert ran_ours(call)
    assert not ran_ours(call)
    thread.join()


def test_many_threads_enter_and_leave_at_once() -> None:
    q, k, v = (x.detach() for x in qkv())
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v)
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def work() -> None:
        try:
            start.wait(30)
            for _ in range(20):
                with ae.sdpa(), Watch() as seen:
                    out = F.scaled_dot_product_attention(q, k, v)
                assert seen.ours == 1
                torch.testing.assert_close(out, expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))


def _forked(check: Callable[[], bool]) -> bool:
    """What `check` says in a forked child; a child that hangs says no."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            torch.set_num_threads(1)
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_keeps_it_and_can_end_it() -> None:
    q, k, v = (x.detach() for x in qkv())

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    before = call()

    def check() -> bool:
        active = ran_ours(call)
        ae.sdpa.disable()
        return active and not ran_ours(call) and torch.equal(call(), before)

    ae.sdpa.enable()
    assert _forked(check)
    assert ran_ours(call)
    ae.sdpa.disable()


@pytest.mark.slow
def test_children_forked_in_the_middle_of_changes_are_whole() -> None:
    q, k, v = (x.detach() for x in qkv())
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            with ae.sdpa():
                pass

    def check() -> bool:
        if ran_ours(lambda: F.scaled_dot_product_attention(q, k, v)) != ae.sdpa.is_enabled():
            return False
        with ae.sdpa():
            return ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert all(_forked(check) for _ in range(20))
    finally:
        stop.set()
        thread.join()


# torch.compile


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return imported(q * 1.0, k, v, bias)


def test_compiled_code_changes_its_attention_with_the_context() -> None:
    q, k, v = qkv()
    bias = numbers(1, H, L, S)
    compiled = _compiled(_attend)
    before = compiled(q, k, v, bias)
    assert not ran_ours(lambda: compiled(q, k, v, bias))
    for _ in range(2):
        with ae.sdpa():
            assert ran_ours(lambda: compiled(q, k, v, bias))
            out = compiled(q, k, v, bias)
            gradients = torch.autograd.grad(out.sin().sum(), (q, k, v, bias))
            assert not ran_ours(lambda: None)
        assert not ran_ours(lambda: compiled(q, k, v, bias))
        assert torch.equal(compiled(q, k, v, bias), before)
    torch.testing.assert_close(out, before)
    expected = torch.autograd.grad(_attend(q, k, v, bias).sin().sum(), (q, k, v, bias))
    torch.testing.assert_close(gradients, expected)


def test_compiled_code_follows_on_threads_that_did_not_enter() -> None:
    q, k, v = (x.detach() for x in qkv())
    compiled = _compiled(_attend)
    seen: list[bool] = []

    def other() -> None:
        seen.append(ran_ours(lambda: compiled(q, k, v)))

    for active in (False, True, False):
        if active:
            ae.sdpa.enable()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert ran_ours(lambda: compiled(q, k, v)) == active
        if active:
            ae.sdpa.disable()
    assert seen == [False, True, False]


def test_code_compiled_inside_compiles_once() -> None:
    q, k, v = (x.detach() for x in qkv())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attend, fullgraph=True, backend=counter)
    with ae.sdpa():
        for _ in range(3):
            with ae.sdpa():
                compiled(q, k, v)
    assert counter.frame_count == 1


def test_a_context_inside_a_compiled_function_holds_for_its_block() -> None:
    q, k, v = qkv()
    bias = numbers(1, H, L, S)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = imported(q, k, v, bias)
        with ae.sdpa():
            second = imported(q, k, v, bias)
            with ae.sdpa():
                third = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return first, second, third + 0.0 * imported(q, k, v)

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    results = compiled(q, k, v, bias)
    assert not ae.sdpa.is_enabled()
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("attention_ext.attention" in name for name in names) == 2
    assert sum("scaled_dot_product_attention" in name for name in names) == 2
    assert ran_ours(lambda: compiled(q, k, v, bias))
    torch.testing.assert_close(results[1], results[0])
    theirs, ours = (
        torch.autograd.grad(r.sin().sum(), (q, k, v, bias), retain_graph=True) for r in results[:2]
    )
    torch.testing.assert_close(ours, theirs)
    assert not ran_ours(lambda: F.scaled_dot_product_attention(q, k, v))


def test_graph_breaks_and_exceptions_inside_a_compiled_block() -> None:
    q, k, v = (x.detach() for x in qkv())
    inside: list[bool] = []

    def function(q: Tensor, k: Tensor, v: Tensor, fail: bool) -> Tensor:
        with ae.sdpa():
            out = imported(q, k, v)
            torch._dynamo.graph_break()
            inside.append(ae.sdpa.is_enabled())
            if fail:
                raise ZeroDivisionError
            out = out + imported(q, k, v)
        return out + imported(q, k, v)

    expected = 3 * imported(q, k, v)
    compiled = torch.compile(function, backend="aot_eager")
    OPS._visited_block_pairs()
    torch.testing.assert_close(compiled(q, k, v, False), expected)
    assert OPS._visited_block_pairs() == 2 * B * H
    with pytest.raises(ZeroDivisionError):
        compiled(q, k, v, True)
    assert not ran_ours(lambda: imported(q, k, v))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_eager_context_below_a_compiled_frame() -> None:
    """Entering drops compiled code, while compiled code is running."""
    q, k, v = (x.detach() for x in qkv())

    @torch._dynamo.disable
    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with ae.sdpa():
            assert ran_ours(lambda: imported(q, k, v))
            return imported(q, k, v)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = imported(q + 0.0, k, v)
        second = eager(q, k, v)
        return first + second + imported(q, k, v)

    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(q, k, v), 3 * imported(q, k, v))


@pytest.mark.slow
def test_inductors_caches_keep_the_two_apart(tmp_path: Any) -> None:
    """The graph of dynamo is the same in both states: what is on disk must not be taken for it."""
    from tiers import run_python

    code = """
import sys, torch, attention_ext as ae
from torch._dynamo.utils import counters
x = torch.randn(2, 4, 6, 8, requires_grad=True)
def step(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)
def run(active):
    torch.ops.attention_ext._visited_block_pairs()
    torch.compile(step, fullgraph=True)(x).sum().backward()
    assert (torch.ops.attention_ext._visited_block_pairs() > 0) == active
if sys.argv[1] == "inside":
    with ae.sdpa():
        run(True)
run(False)
with ae.sdpa():
    run(True)
assert counters["aot_autograd"]["autograd_cache_hit"] >= int(sys.argv[2]), counters
"""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for arguments in (["outside", "0"], ["inside", "2"]):
        run_python(f"import sys; sys.argv[1:] = {arguments}\n{code}", env=env)


@pytest.mark.slow
def test_inductor_compiles_it(tmp_path: Any) -> None:
    q, k, v = qkv()
    bias = numbers(1, H, L, S)
    expected = torch.autograd.grad(_attend(q, k, v, bias).sin().sum(), (q, k, v, bias))
    with ae.sdpa():
        compiled = torch.compile(_attend, fullgraph=True, dynamic=True)
        assert ran_ours(lambda: compiled(q, k, v, bias))
        ours = torch.autograd.grad(compiled(q, k, v, bias).sin().sum(), (q, k, v, bias))
    torch.testing.assert_close(ours, expected)


class _Layer(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        if not self.inside:
            return F.scaled_dot_product_attention(x, x, x)
        with ae.sdpa():
            return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("strict", [False, True])
def test_export_outside_and_inside(strict: bool) -> None:
    x = torch.randn(B, H, L, E)
    with ae.sdpa():
        program = torch.export.export(_Layer(False), (x,), strict=strict)
        assert ran_ours(lambda: program.module()(x))
        assert "attention_ext.attention" in str(program.run_decompositions().graph)
    assert "aten.scaled_dot_product_attention" in str(program.graph)
    assert not ran_ours(lambda: program.module()(x))
    program = torch.export.export(_Layer(True), (x,), strict=strict)
    assert not ae.sdpa.is_enabled()
    assert "attention_ext.attention" in str(program.graph)
    assert ran_ours(lambda: program.module()(x))
    torch.testing.assert_close(program.module()(x), F.scaled_dot_product_attention(x, x, x))


# torch's modules


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_transformer_layers_of_torch(mode: str) -> None:
    model = nn.Transformer(E, 2, 1, 1, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    model.train(mode == "train")
    src, tgt = (torch.randn(3, n, E, dtype=torch.float64) for n in (L, 5))
    padding = torch.arange(L) >= torch.tensor([[L], [4], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)

    def call() -> Tensor:
        return model(
            src, tgt, tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip

    def gradients() -> list[Tensor]:
        model.zero_grad()
        call().sin().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with torch.set_grad_enabled(mode != "no_grad"):
        expected = call()
        with ae.sdpa(), Watch() as seen:
            out = call()
    assert seen.ours == 3
    assert seen.other_ways == []
    torch.testing.assert_close(out, expected)
    if mode == "train":
        right = gradients()
        with ae.sdpa():
            torch.testing.assert_close(gradients(), right)


# The second front door


def test_torchs_registry_of_flash_implementations_is_a_second_front_door() -> None:
    from torch.nn import attention

    from attention_ext.integrations import flash_impl

    q, k, v = qkv()

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    before = call()
    assert flash_impl.register() == "attention_ext"
    assert "attention_ext" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None and not ran_ours(call)
    attention.activate_flash_attention_impl("attention_ext")
    assert attention.current_flash_attention_impl() == "attention_ext" and ran_ours(call)
    attention.activate_flash_attention_impl("attention_ext")  # torch restores before it activates
    with ae.sdpa():
        pass
    assert ran_ours(call)
    torch.testing.assert_close(call(), before)
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None and not ran_ours(call)
    assert torch.equal(call(), before)


@pytest.mark.parametrize("masked", [None, "float", "finfo.min", "bool"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_second_door_serves_torchs_flash_operator_called_directly(
    masked: str | None, dtype: torch.dtype
) -> None:
    from torch.nn import attention

    from attention_ext.integrations import flash_impl

    q, k, v = (numbers(B, n, H, E, dtype=dtype) for n in (L, S, S))
    mask = None
    if masked is not None:
        mask = torch.randn(L, S, dtype=dtype)
        if masked == "bool":
            mask = mask > 0
            mask[1] = False
        elif masked == "finfo.min":
            mask[0] = torch.finfo(dtype).min
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def call() -> list[Tensor]:
        # As torch's own formula calls it: heads first, keys and queries in their own layout.
        out, lse = flash(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
        assert lse.shape == (B, H, L) and lse.transpose(1, 2).is_contiguous()
        return [out, lse, *torch.autograd.grad(out.sin().sum(), (q, k, v))]

    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    right = ae.reference.attention(*(x.transpose(1, 2) for x in leaves), wide)
    expected = [right, *torch.autograd.grad(right.sin().sum(), leaves)]
    flash_impl.register()
    attention.activate_flash_attention_impl("attention_ext")
    try:
        assert ran_ours(call)
        out, lse, *gradients = call()
        with torch.no_grad(), pytest.raises(RuntimeError, match="dropout"):
            flash(*(x.transpose(1, 2) for x in (q, k, v)), 0.5)
    finally:
        attention.restore_flash_attention_impl()
    if masked != "bool":  # torch's takes none
        assert not ran_ours(call)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}[dtype]
    for ours, exact in zip([out, *gradients], expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
