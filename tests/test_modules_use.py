"""MultiheadAttention as a module: its state, what people do to it, masks of all kinds, compilers,
and the answers to wrong calls."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import attention_ext as ae
from attention_ext.modules import MultiheadAttention
from module_cases import (
    CONFIGS,
    E,
    H,
    L,
    N,
    S,
    gradients,
    make_inputs,
    make_masks,
    pair,
    slow,
)
from tiers import run_python
from watch import Watch

# -- parameters, state, copies --


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_equal_seeds_give_torchs_parameters(config: dict[str, Any]) -> None:
    torch.manual_seed(11)
    theirs = nn.MultiheadAttention(E, H, **config)
    after = torch.rand(1)
    torch.manual_seed(11)
    ours = MultiheadAttention(E, H, **config)
    assert torch.equal(torch.rand(1), after)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x), name
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_is_torchs_module_to_the_outside() -> None:
    for config in CONFIGS.values():
        theirs, ours = pair(**config)
        assert isinstance(ours, nn.MultiheadAttention)
        for name in vars(theirs):
            if name.startswith("_") and name != "_qkv_same_embed_dim":
                continue
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("in_proj_weight", "q_proj_weight", "bias_k", "in_proj_bias"):
            assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
        assert type(ours.out_proj) is type(theirs.out_proj)
    theirs_init = list(inspect.signature(nn.MultiheadAttention.__init__).parameters.values())
    ours_init = list(inspect.signature(MultiheadAttention.__init__).parameters.values())
    for a, b in zip(theirs_init, ours_init, strict=False):
        assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)
    assert all(p.kind is p.KEYWORD_ONLY for p in ours_init[len(theirs_init) :])
    for a, b in zip(
        inspect.signature(nn.MultiheadAttention.forward).parameters.values(),
        inspect.signature(MultiheadAttention.forward).parameters.values(),
        strict=True,
    ):
        assert (a.name, a.default, a.kind) == (b.name, b.default, b.kind)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, "pickle", "replicate"])
def test_copies_compute_the_same(duplicate: Any) -> None:
    module = MultiheadAttention(
        E, 6, window=(2, 1), softcap=3.0, sinks=True, alibi=True, num_kv_heads=2
    )
    nn.init.normal_(module.sinks)
    x = torch.randn(L, N, E)
    if duplicate == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif duplicate == "replicate":  # what DataParallel does on every device
        other = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(other, name, parameter)
        other.out_proj = module.out_proj
    else:
        other = duplicate(module)
    assert type(other) is MultiheadAttention
    torch.testing.assert_close(other(x, x, x), module(x, x, x), rtol=0, atol=0)
    assert len(other._forward_hooks) == len(module._forward_hooks)
    assert repr(other) == repr(module)


@pytest.mark.slow
def test_pickle_loads_in_a_process_that_imports_nothing_by_hand(tmp_path: Path) -> None:
    module = MultiheadAttention(E, 4, batch_first=True).eval()
    x = torch.randn(N, L, E)
    torch.save((module, x, module(x, x, x)), tmp_path / "module.pt")
    code = f"""
import torch
module, x, expected = torch.load({str(tmp_path / "module.pt")!r}, weights_only=False)
print(type(module).__module__, all(torch.equal(a, b) for a, b in zip(module(x, x, x), expected)))
handle = module.register_forward_hook(lambda *_: None)
handle.remove()
layer = torch.nn.TransformerEncoderLayer({E}, 4, batch_first=True).eval()
layer.self_attn = module
module.out_proj.register_forward_pre_hook(lambda *_: print("called"))
module.out_proj._forward_pre_hooks.clear()
seen = []
forward = type(module).forward
type(module).forward = lambda *a, **k: seen.append(1) or forward(*a, **k)
with torch.no_grad():
    layer(x)
print(len(seen))
"""
    assert run_python(code).stdout.split() == ["attention_ext.modules", "True", "1"]


def test_pickles_of_earlier_versions_load() -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    state = copy.deepcopy(module.__dict__)
    for name in (
        "num_kv_heads",
        "window",
        "softcap",
        "alibi",
        "batch_first",
        "_qkv_same_embed_dim",
    ):
        del state[name]
    del state["_parameters"]["sinks"]
    del state["_buffers"]["alibi_slopes"]
    state["_forward_hooks"].clear()
    old = MultiheadAttention.__new__(MultiheadAttention)
    old.__setstate__(state)
    torch.testing.assert_close(old(x, x, x), module(x, x, x), rtol=0, atol=0)
    assert list(old.state_dict()) == list(module.state_dict())
    assert len(old._forward_hooks) == 1


# -- things people do to the module --


def test_out_proj_is_called_as_a_module_and_its_weight_read_at_call_time() -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    fired: list[Tensor] = []
    module.out_proj.register_forward_hook(lambda m, args, out: fired.append(args[0]))
    out, _ = module(x, x, x)
    assert len(fired) == 1
    module.out_proj.weight = nn.Parameter(2 * module.out_proj.weight.detach())
    doubled, _ = module(x, x, x)
    torch.testing.assert_close(doubled, 2 * out)
    module.out_proj = nn.Sequential(module.out_proj, nn.Flatten(2), nn.ReLU())
    torch.testing.assert_close(module(x, x, x)[0], doubled.relu())


def test_parametrizations_and_pruning_on_weights_are_obeyed() -> None:
    x = torch.randn(L, N, E, dtype=torch.float64)

    def change(module: nn.Module) -> None:
        torch.manual_seed(2)
        parametrizations.weight_norm(module, "in_proj_weight")
        module.parametrizations.in_proj_weight.original0.data.mul_(1.5)
        parametrizations.spectral_norm(module.out_proj, "weight")
        prune.random_unstructured(module, "in_proj_bias", 0.5)

    theirs, ours = pair()
    before, _ = ours(x, x, x)
    change(theirs.eval())
    change(ours.eval())
    out, _ = ours(x, x, x)
    torch.testing.assert_close(out, theirs(x, x, x)[0], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(out, before)


def test_per_sample_gradients_equal_a_loop() -> None:
    module = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    x = torch.randn(3, L, E, dtype=torch.float64)
    padding = torch.rand(3, L) < 0.3
    padding[:, 0] = False

    def loss(parameters: Any, x: Tensor, padding: Tensor) -> Tensor:
        arguments = (x[None],) * 3
        call = torch.func.functional_call
        out, weights = call(module, parameters, arguments, {"key_padding_mask": padding[None]})
        return out.square().sum() + weights.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, padding)
    for n in range(3):
        alone = torch.func.grad(loss)(parameters, x[n], padding[n])
        for name, grad in alone.items():
            torch.testing.assert_close(grads[name][n], grad, rtol=1e-9, atol=1e-11)


def test_torch_jit_script_says_it_is_not_supported() -> None:
    for module in (MultiheadAttention(E, H), nn.Sequential(MultiheadAttention(E, H))):
        with pytest.raises(NotImplementedError, match=r"does not support torch\.jit\.script"):
            torch.jit.script(module)


# -- masks: types, sizes, memory --


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("config", ["batch first", "bias_kv and zero_attn"])
def test_masks_keep_their_precision_under_autocast(
    dtype: torch.dtype, mask_type: torch.dtype, config: str
) -> None:
    exact, _ = pair(**CONFIGS[config])
    ours = MultiheadAttention(E, H, **CONFIGS[config])
    ours.load_state_dict(exact.state_dict())
    x = torch.randn(N, L, E) if CONFIGS[config].get("batch_first") else torch.randn(L, N, E)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * L, [True] + [False] * (L - 1)])
    lowest = torch.finfo(mask_type).min if mask_type.is_floating_point else 0
    if mask_type != torch.bool:
        hidden = torch.zeros(L, L, dtype=mask_type).masked_fill(hidden, lowest)
        padding = torch.zeros(N, L, dtype=mask_type).masked_fill(padding, lowest)
    with torch.autocast("cpu", dtype):
        out, _ = ours(x, x, x, attn_mask=hidden, key_padding_mask=padding)
        alone, _ = ours(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)
    assert out.dtype == dtype
    assert torch.equal(out, alone)
    assert out.isfinite().all()
    wide = x.double()
    if mask_type == torch.bool:
        hidden = torch.zeros(L, L).masked_fill(hidden, -1e30)
        padding = torch.zeros(N, L).masked_fill(padding, -1e30)
    masks = {"attn_mask": hidden.double(), "key_padding_mask": padding.double()}
    right, _ = exact(wide, wide, wide, **masks)
    rows = slice(1, None)  # row 0 of sequence 1 sees only hidden keys
    mine, truth = (t if config != "batch first" else t.transpose(0, 1) for t in (out, right))
    torch.testing.assert_close(mine[rows].double(), truth[rows], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mask_type", [torch.float32, torch.float64])
def test_a_row_of_lowest_numbers_is_an_average_not_nan(mask_type: torch.dtype) -> None:
    lowest = torch.finfo(mask_type).min  # float64's must not become float32's -inf
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    mask = torch.full((L, L), lowest, dtype=mask_type)
    for learned in (False, True):
        padding = torch.full((N, L), lowest, dtype=mask_type, requires_grad=learned)
        out, weights = module(x, x, x, attn_mask=mask, key_padding_mask=padding)
        torch.testing.assert_close(weights, torch.full((N, L, L), 1 / L))
        out.sum().backward()
        assert module.in_proj_weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_costs_no_work_forward_or_backward(kind: str) -> None:
    # TransformerEncoderLayer turns bool padding into float -inf before it calls its attention.
    length, real = 512, 100
    module = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(1, length, E)
    padding = torch.arange(length)[None] >= real
    if kind == "float":
        padding = torch.zeros(1, length).masked_fill(padding, -math.inf)
    rows, columns = torch.ops.attention_ext._block_sizes(length, length)
    visible = H * math.ceil(length / rows) * math.ceil(real / columns)
    assert visible < H * math.ceil(length / rows) * math.ceil(length / columns)
    torch.ops.attention_ext._visited_block_pairs()  # reading it sets it to zero
    out, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.ops.attention_ext._visited_block_pairs() == visible
    out.sum().backward()
    assert torch.ops.attention_ext._visited_block_pairs() == visible


@pytest.mark.parametrize("mask_type", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_float_masks_of_any_precision_are_taken(mask_type: torch.dtype) -> None:
    module = MultiheadAttention(E, H)
    x = torch.randn(L, N, E)
    mask = torch.randn(L, L).to(mask_type)
    padding = torch.randn(N, L).to(mask_type)
    out, _ = module(x, x, x, attn_mask=mask, key_padding_mask=padding)
    expected, _ = module(x, x, x, attn_mask=mask.float(), key_padding_mask=padding.float())
    torch.testing.assert_close(out, expected)


def test_masks_of_strides_zero_and_more_are_read_right() -> None:
    module = MultiheadAttention(E, H, dtype=torch.float64)
    x = torch.randn(L, N, E, dtype=torch.float64)
    per_head = torch.rand(N * H, L, L) < 0.4
    per_head[..., 0] = False
    rows = torch.rand(N * H, 1, L) < 0.4
    rows[..., 0] = False
    odd = torch.zeros(N * H, 2 * L, L, dtype=torch.bool)
    odd[:, ::2] = per_head
    for mask in (
        per_head[:1].expand(N * H, L, L),
        rows.expand(N * H, L, L),
        per_head[0],
        odd[:, ::2],
        per_head.transpose(0, 2).contiguous().transpose(0, 2),
        torch.zeros(1, 1, dtype=torch.bool).expand(L, L),
    ):
        expected = module(x, x, x, attn_mask=mask.contiguous())
        torch.testing.assert_close(
            module(x, x, x, attn_mask=mask), expected, rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "kind", ["none", "padding", "float padding", "bool", "float", "expanded", "causal appended"]
)
def test_nothing_as_large_as_all_scores_is_made(kind: str, need_weights: bool) -> None:
    heads, length = 8, 96
    appended = kind == "causal appended"
    module = MultiheadAttention(16, heads, batch_first=True, add_zero_attn=appended)
    x = torch.randn(N, length, 16)
    masks: dict[str, Any] = {
        "none": {},
        "padding": {"key_padding_mask": torch.zeros(N, length, dtype=torch.bool)},
        "float padding": {"key_padding_mask": torch.zeros(N, length)},
        "bool": {"attn_mask": torch.zeros(length, length, dtype=torch.bool)},
        "float": {"attn_mask": torch.zeros(length, length, requires_grad=True)},
        "expanded": {
            "attn_mask": torch.zeros(1, length, length, dtype=torch.bool).expand(N * heads, -1, -1)
        },
        "causal appended": {"is_causal": True},
    }[kind]
    with Watch() as seen:
        out, weights = module(x, x, x, need_weights=need_weights, **masks)
        loss = out.square().sum()
        if weights is not None:
            loss = loss + weights.square().sum()
        loss.backward()
    # Averaged weights and 2-D masks are allowed, in float32; all scores in bytes are not.
    one_matrix = length * (length + 1)
    assert seen.largest <= (4 * N * one_matrix if need_weights else 4 * one_matrix)
    assert seen.largest < N * heads * length * length


@pytest.mark.slow
def test_peak_memory_with_padding_and_mean_weights_is_far_below_all_scores() -> None:
    # 16 heads of 2048 x 2048 scores are 256 MiB in float32; the mean is 16 MiB.
    code = """
import torch
from attention_ext.modules import MultiheadAttention
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
module = MultiheadAttention(128, 16, batch_first=True)
x = torch.randn(1, 2048, 128)
small = x[:, :64]
module(small, small, small)[0].sum().backward()
start = peak()
module(x, x, x, key_padding_mask=torch.arange(2048)[None] > 1500)[0].sum().backward()
print((peak() - start) / 1024)
"""
    assert float(run_python(code).stdout) < 96


# -- compile, export, nested tensors --


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["batch first", slow("bias_kv and zero_attn"), slow("kdim and vdim")]
)
def test_compiles_without_a_graph_break(config: str) -> None:
    torch._dynamo.reset()
    module = MultiheadAttention(E, H, dropout=0.3, window=(3, 3), **CONFIGS[config])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves, qkv = make_inputs("three", CONFIGS[config], torch.float32)
    for attn in ("bool 2-D", "float 3-D"):
        masks = make_masks(attn, "bool", S, "three", torch.float32)
        results = []
        for call in (module, compiled):
            torch.manual_seed(4)
            out, weights = call(*qkv, **masks)
            wanted = [*module.parameters(), *leaves]
            results.append((out, weights, gradients(out, weights, wanted)))
        torch.testing.assert_close(results[1], results[0])


def test_exports() -> None:
    module = MultiheadAttention(E, H, batch_first=True).eval()
    x = torch.randn(N, L, E)
    padding = torch.tensor([[False] * L, [False] * (L - 1) + [True]])
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        module,
        (x, x, x, padding),
        dynamic_shapes=({1: length}, {1: length}, {1: length}, {1: length}, *[None] * 0),
    )
    longer = torch.randn(N, 9, E)
    padding = torch.zeros(N, 9, dtype=torch.bool)
    result = program.module()(longer, longer, longer, padding)
    torch.testing.assert_close(result, module(longer, longer, longer, padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_input_gives_what_each_sequence_gives_alone(layout: torch.layout) -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    sequences = [torch.randn(n, E) for n in (2, 5, 1, 4)]
    nested = torch.nested.nested_tensor(sequences, layout=layout, requires_grad=True)
    out, weights = module(nested, nested, nested, average_attn_weights=False)
    assert out.is_nested
    assert out.layout == layout
    total = nested + out  # a residual connection: torch must see the same shape
    grads = torch.autograd.grad(total.to_padded_tensor(0.0).sum(), list(module.parameters()))
    expected_grads = [torch.zeros_like(p) for p in module.parameters()]
    for n, sequence in enumerate(sequences):
        alone, alone_weights = module(sequence, sequence, sequence, average_attn_weights=False)
        torch.testing.assert_close(out.unbind()[n], alone)
        size = len(sequence)
        torch.testing.assert_close(weights[n, :, :size, :size], alone_weights)
        assert weights[n, :, size:].eq(0).all()
        assert weights[n, :, :, size:].eq(0).all()
        for into, grad in zip(
            expected_grads, torch.autograd.grad(alone.sum(), list(module.parameters())), strict=True
        ):
            into += grad
    torch.testing.assert_close(list(grads), expected_grads)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_batches_and_sequences(sizes: tuple[int, int, int]) -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    n, rows, keys = sizes
    q = torch.randn(n, rows, E, requires_grad=True)
    kv = torch.randn(n, keys, E)
    padding = torch.zeros(n, keys, dtype=torch.bool)
    out, weights = module(q, kv, kv, key_padding_mask=padding)
    assert out.shape == (n, rows, E)
    assert weights.shape == (n, rows, keys)
    if keys == 0:
        assert torch.equal(out, module.out_proj.bias.expand(n, rows, E))
    out.sum().backward()
    assert q.grad.eq(0).all()


# -- errors --


def shapes(*sizes: tuple[int, ...], **masks: Tensor) -> dict[str, Any]:
    inputs = [torch.randn(size) for size in sizes]
    return dict(zip(("query", "key", "value"), inputs, strict=True)) | masks


QKV = ((L, N, E), (S, N, E), (S, N, E))
FLAT = ((L, E), (S, E), (S, E))

WRONG_CALLS: dict[str, dict[str, Any]] = {
    "embedding": shapes((L, N, E + 1), (S, N, E), (S, N, E)),
    "key and value differ": shapes((L, N, E), (S, N, E), (S + 1, N, E)),
    "1-D query": shapes((E,), (S, E), (S, E)),
    "4-D query": shapes((1, L, N, E), (S, N, E), (S, N, E)),
    "batched query, unbatched key": shapes((L, N, E), (S, E), (S, E)),
    "unbatched query, batched key": shapes((L, E), (S, N, E), (S, N, E)),
    "2-D mask": shapes(*QKV, attn_mask=torch.zeros(L, S + 1)),
    "2-D mask transposed": shapes(*QKV, attn_mask=torch.zeros(S, L)),
    "mask per sequence": shapes(*QKV, attn_mask=torch.zeros(N, L, S)),
    "3-D mask": shapes(*QKV, attn_mask=torch.zeros(N * H, S, L)),
    "4-D mask": shapes(*QKV, attn_mask=torch.zeros(N, H, L, S)),
    "1-D mask": shapes(*QKV, attn_mask=torch.zeros(S)),
    "unbatched mask": shapes(*FLAT, attn_mask=torch.zeros(H + 1, L, S)),
    "padding batch": shapes(*QKV, key_padding_mask=torch.zeros(N + 1, S)),
    "padding length": shapes(*QKV, key_padding_mask=torch.zeros(N, S + 1)),
    "padding 3-D": shapes(*QKV, key_padding_mask=torch.zeros(N, 1, S)),
    "padding 2-D unbatched": shapes(*FLAT, key_padding_mask=torch.zeros(1, S)),
    "integer mask": shapes(*QKV, attn_mask=torch.ones(L, S, dtype=torch.int64)),
    "byte mask": shapes(*QKV, attn_mask=torch.ones(L, S, dtype=torch.uint8)),
    "integer padding": shapes(*QKV, key_padding_mask=torch.ones(N, S, dtype=torch.int64)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_wrong_calls_raise_torchs_error(call: dict[str, Any], training: bool) -> None:
    theirs, ours = (module.train(training) for module in pair(torch.float32))
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        theirs(**call)
    with pytest.raises(type(expected.value)) as raised:
        ours(**call)
    assert str(raised.value) == str(expected.value)
    x = torch.randn(L, N, E)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))  # and the next call works


@pytest.mark.parametrize("sizes", [(0, 1), (4, 0), (-4, 2), (5, 2)])
def test_wrong_sizes_raise_torchs_error_at_construction(sizes: tuple[int, int]) -> None:
    with pytest.raises((AssertionError, ValueError)) as expected:
        nn.MultiheadAttention(*sizes)
    with pytest.raises(type(expected.value)) as raised:
        MultiheadAttention(*sizes)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads must be positive and divide num_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive and divide num_heads"),
        ({"window": 3}, "window must be"),
        ({"window": (1, 2, 3)}, "window must be"),
        ({"window": (-1, 0)}, "window must be"),
        ({"window": (1.5, 0)}, "window must be"),
        ({"softcap": -1.0}, "softcap must be finite and not negative"),
        ({"softcap": math.inf}, "softcap must be finite and not negative"),
        ({"alibi": True, "add_zero_attn": True}, "alibi cannot be combined"),
        ({"alibi": True, "add_bias_kv": True}, "alibi cannot be combined"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(E, H, **options)


def test_different_batch_sizes_are_refused_with_both_shapes() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    for q, k in ((1, 4), (4, 1), (2, 3)):
        call = shapes((q, L, E), (k, S, E), (k, S, E))
        with pytest.raises(RuntimeError, match=rf"same batch size.*\[{q}, .*\[{k}, "):
            module(**call)


def test_half_of_bias_kv_is_refused() -> None:
    x = torch.randn(L, N, E)
    for name, message in (("bias_k", "bias_v is set but bias_k"), ("bias_v", "bias_k is set but")):
        module = MultiheadAttention(E, H, add_bias_kv=True)
        setattr(module, name, None)
        with pytest.raises(AssertionError, match=message):
            module(x, x, x)


def test_wrong_nested_calls_are_refused() -> None:
    module = MultiheadAttention(E, H, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(2, E)], layout=torch.jagged)
    padded = torch.randn(1, 2, E)
    with pytest.raises(AssertionError, match="all nested or none"):
        module(nested, padded, padded)
    with pytest.raises(AssertionError, match="lengths say what is padding"):
        module(nested, nested, nested, attn_mask=torch.zeros(2, 2))
    module.batch_first = False
    with pytest.raises(AssertionError, match="needs batch_first=True"):
        module(nested, nested, nested)


def test_is_part_of_the_package() -> None:
    assert ae.MultiheadAttention is MultiheadAttention
