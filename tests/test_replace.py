"""replace_attention: torch's own models keep their results, and nothing goes around the new module.

What ran is seen by watching the dispatcher, not by counting calls of our own.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from attention_ext import MultiheadAttention, replace_attention
from watch import Watch

N, L, T, E = 3, 7, 5, 16

PADDING = torch.arange(L) >= torch.tensor([[4], [L - 1], [2]])  # the last column is all padding


def encoder(**options: Any) -> nn.Module:
    norm_first = options.pop("norm_first", False)
    layer = nn.TransformerEncoderLayer(
        E, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains why it will not use nested tensors
        return nn.TransformerEncoder(layer, 2)


def calls() -> list[Any]:
    """(model, number of attention modules in it, the call): what torch builds from attention."""
    causal = nn.Transformer.generate_square_subsequent_mask
    src, tgt = torch.randn(N, L, E), torch.randn(N, T, E)
    bool_causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    transformer = nn.Transformer(E, 4, 2, 2, 32, dropout=0.0, batch_first=True)
    sequence_first = nn.Transformer(E, 4, 1, 1, 32, dropout=0.0)
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(E, 4, 32, dropout=0.0, batch_first=True), 2
    )
    table: dict[str, tuple[nn.Module, int, Callable[[nn.Module], Tensor]]] = {
        "encoder": (encoder(), 2, lambda m: m(src)),
        "encoder, padding": (encoder(), 2, lambda m: m(src, src_key_padding_mask=PADDING)),
        "encoder, norm first, padding": (
            encoder(norm_first=True),
            2,
            lambda m: m(src, src_key_padding_mask=PADDING),
        ),
        "encoder, causal": (encoder(), 2, lambda m: m(src, mask=causal(L))),
        "encoder, causal hint": (encoder(), 2, lambda m: m(src, mask=causal(L), is_causal=True)),
        "encoder, bool mask and padding": (
            encoder(),
            2,
            lambda m: m(src, mask=bool_causal, src_key_padding_mask=PADDING),
        ),
        "encoder, gelu, no bias": (encoder(activation="gelu", bias=False), 2, lambda m: m(src)),
        "encoder layer alone": (encoder().layers[0], 1, lambda m: m(src)),
        "transformer": (
            transformer,
            6,
            lambda m: m(
                src,
                tgt,
                tgt_mask=causal(T),
                src_key_padding_mask=PADDING.float().masked_fill(PADDING, -torch.inf),
                memory_key_padding_mask=PADDING,
            ),
        ),
        "transformer, sequence first": (
            sequence_first,
            3,
            lambda m: m(src.transpose(0, 1), tgt.transpose(0, 1), tgt_mask=causal(T)),
        ),
        "transformer, unbatched": (transformer, 6, lambda m: m(src[0], tgt[0])),
        "decoder": (
            decoder,
            4,
            lambda m: m(tgt, src, tgt_mask=causal(T), memory_key_padding_mask=PADDING),
        ),
    }
    return [pytest.param(*row, id=name) for name, row in table.items()]


def valid(out: Tensor, like: Tensor) -> Tensor:
    """The rows that are no padding, where torch's fast paths may give other numbers.

    torch's encoder may also cut padding off that all sequences share; ours keeps the length.
    """
    if like.size(0) != N or out.size(1) != L:
        return out
    return out[:, : like.size(1)][~PADDING[:, : like.size(1)]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("mode", ["train", "eval", "eval and no_grad", "inference_mode"])
@pytest.mark.parametrize(("model", "attentions", "call"), calls())
def test_results_stay_and_every_attention_is_ours(
    model: nn.Module, attentions: int, call: Callable[[nn.Module], Tensor], mode: str
) -> None:
    model = model.train(mode == "train")
    replaced = copy.deepcopy(model)
    assert replace_attention(replaced) == attentions
    assert replaced.training == (mode == "train")
    contexts: dict[str, Any] = {
        "eval and no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }
    with contexts.get(mode, torch.enable_grad)():
        expected = call(model)
        out = call(replaced)
        with Watch() as seen:
            call(replaced)
    assert seen.ours == attentions
    assert seen.other_ways == []
    torch.testing.assert_close(valid(out, expected), valid(expected, expected))
    assert L in out.shape or T in out.shape


def test_the_same_model_without_replacement_would_not_be_ours() -> None:
    # That the watcher sees torch's own paths: without it the test above would prove nothing.
    src = torch.randn(N, L, E)
    model = encoder().eval()
    with torch.no_grad(), Watch() as seen:
        model(src)
    assert seen.ours == 0
    assert "aten::_transformer_encoder_layer_fwd" in seen.other_ways
    with Watch() as seen:
        model.train()(src)
    assert seen.ours == 0
    assert any("scaled_dot_product" in name for name in seen.other_ways)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_input_stays_padded_and_keeps_its_length() -> None:
    model = encoder().eval()
    replace_attention(model)
    src = torch.randn(N, L, E)
    with torch.no_grad(), Watch() as seen:
        out = model(src, src_key_padding_mask=PADDING)
    assert out.shape == src.shape
    assert not [name for name in seen.calls if "nested" in name]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input_that_arrives_all_the_same_is_handled() -> None:
    # Modules put in by hand leave the encoder's use of nested tensors on.
    model = encoder().eval()
    by_hand = copy.deepcopy(model)
    for layer in by_hand.layers:
        ours = MultiheadAttention(E, 4, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours.eval()
    src = torch.randn(N, L, E)
    with torch.no_grad():
        expected = model(src, src_key_padding_mask=PADDING)
        with Watch() as seen:
            out = by_hand(src, src_key_padding_mask=PADDING)
    assert seen.ours == 2
    torch.testing.assert_close(valid(out, expected), valid(expected, expected))


def test_a_causal_encoder_with_dead_rows_stays_finite_in_every_mode() -> None:
    model = encoder()
    replace_attention(model)
    src = torch.randn(N, L, E)
    left = torch.arange(L) < 2  # queries 0 and 1 see no key under the causal mask
    masks = {
        "mask": torch.ones(L, L, dtype=torch.bool).triu(1),
        "src_key_padding_mask": left.expand(N, L),
    }
    train = model.train()(src, **masks)
    train.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model.eval()(src, **masks), train)


def test_gradients_of_a_whole_transformer_equal_torchs() -> None:
    model = nn.Transformer(E, 4, 1, 1, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    replaced = copy.deepcopy(model)
    replace_attention(replaced)
    src = torch.randn(N, L, E, dtype=torch.float64)
    tgt = torch.randn(N, T, E, dtype=torch.float64)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)
    for m in (model, replaced):
        m(src, tgt, tgt_mask=mask, memory_key_padding_mask=PADDING).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), replaced.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_parameters_are_shared_and_an_optimizer_keeps_working() -> None:
    model = nn.Transformer(E, 4, 1, 1, 32)
    model.encoder.requires_grad_(False)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model.decoder.layers[0].self_attn
    replace_attention(model)
    new = model.decoder.layers[0].self_attn
    assert type(new) is MultiheadAttention
    assert new.in_proj_weight is old.in_proj_weight
    assert new.out_proj is old.out_proj
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert not any(p.requires_grad for p in model.encoder.parameters())
    before = new.in_proj_weight.detach().clone()
    model(torch.randn(L, N, E), torch.randn(T, N, E)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(new.in_proj_weight, before)


def test_every_constructor_option_of_torchs_module_survives() -> None:
    options: list[dict[str, Any]] = [
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"kdim": 8, "vdim": 10},
        {"batch_first": True, "dtype": torch.float64},
        {"dropout": 0.25},
    ]
    for option in options:
        module = nn.MultiheadAttention(E, 4, **option)
        holder = nn.ModuleList([module])
        assert replace_attention(holder) == 1
        made = MultiheadAttention(E, 4, **option)
        for name in vars(made):
            if not name.startswith("_"):
                assert getattr(holder[0], name) == getattr(made, name), name
        assert list(holder[0].state_dict()) == list(module.state_dict())
        holder[0].eval()
        dtype = option.get("dtype")
        q = torch.randn(L, N, E, dtype=dtype)
        k = torch.randn(L, N, option.get("kdim", E), dtype=dtype)
        v = torch.randn(L, N, option.get("vdim", E), dtype=dtype)
        torch.testing.assert_close(holder[0](q, k, v), module.eval()(q, k, v))


def test_shared_modules_stay_shared_and_count_once() -> None:
    shared = nn.MultiheadAttention(E, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.ModuleList([shared])})
    assert replace_attention(model) == 1
    assert model["a"] is model["b"] is model["c"][0]
    assert isinstance(model["a"], MultiheadAttention)
    assert replace_attention(model) == 0


def test_layers_that_share_weights_keep_sharing_them() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, 4) for _ in range(2)])
    model[1].in_proj_weight = model[0].in_proj_weight
    assert replace_attention(model) == 2
    assert model[0].in_proj_weight is model[1].in_proj_weight


def test_hooks_and_their_handles_keep_working() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, 4)])
    fired: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: fired.append("attention"))
    model[0].out_proj.register_forward_hook(lambda *_: fired.append("out_proj"))
    model[0].register_forward_pre_hook(lambda *_: fired.append("before"))
    replace_attention(model)
    x = torch.randn(L, N, E)
    model[0](x, x, x)
    assert fired == ["before", "out_proj", "attention"]
    handle.remove()
    fired.clear()
    model[0](x, x, x)
    assert fired == ["before", "out_proj"]


def test_parametrized_and_pruned_modules_keep_their_weights() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, 4, dtype=torch.float64) for _ in range(3)])
    parametrizations.orthogonal(model[0], "in_proj_weight")
    parametrizations.weight_norm(model[0].out_proj, "weight")
    prune.random_unstructured(model[1], "in_proj_weight", 0.3)
    prune.random_unstructured(model[1].out_proj, "weight", 0.3)
    parametrizations.weight_norm(model[2].out_proj, "weight")
    x = torch.randn(L, N, E, dtype=torch.float64)
    expected = [module(x, x, x) for module in model]
    parameters = list(model.parameters())
    assert replace_attention(model) == 3
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(isinstance(module, MultiheadAttention) for module in model)
    assert parametrize.is_parametrized(model[0], "in_proj_weight")
    for module, right in zip(model, expected, strict=True):
        torch.testing.assert_close(module(x, x, x), right)
    torch.testing.assert_close(copy.deepcopy(model[0])(x, x, x), expected[0])
    parametrize.remove_parametrizations(model[0], "in_proj_weight")
    assert type(model[0]) is MultiheadAttention
    prune.remove(model[1], "in_proj_weight")
    for module, right in zip(model, expected, strict=True):
        torch.testing.assert_close(module(x, x, x), right)


def test_subclasses_and_models_without_attention_are_left_alone() -> None:
    class Special(nn.MultiheadAttention):
        pass

    model = nn.ModuleList([Special(E, 4), nn.Linear(E, E), MultiheadAttention(E, 4)])
    before = list(model)
    assert replace_attention(model) == 0
    assert all(a is b for a, b in zip(before, model, strict=True))


def test_a_bare_attention_module_is_refused_with_the_way_out() -> None:
    module = nn.MultiheadAttention(E, 4)
    with pytest.raises(ValueError, match=r"itself a torch\.nn\.MultiheadAttention\. Wrap it"):
        replace_attention(module)
    wrapped = nn.ModuleList([module])
    replace_attention(wrapped)
    assert isinstance(wrapped[0], MultiheadAttention)


def test_a_replaced_model_survives_copying_saving_and_compiling(tmp_path: Any) -> None:
    model = encoder().eval()
    replace_attention(model)
    src = torch.randn(N, L, E)
    expected = model(src, src_key_padding_mask=PADDING)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        with torch.no_grad(), Watch() as seen:
            out = other(src, src_key_padding_mask=PADDING)
        assert seen.ours == 2
        torch.testing.assert_close(out, expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(src, src_key_padding_mask=PADDING), expected)


def test_bool_masks_inside_a_layer_give_no_warning() -> None:
    layer = encoder().layers[0]
    replace_attention(layer)
    src = torch.randn(N, L, E)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(src, src_mask=torch.zeros(L, L, dtype=torch.bool), src_key_padding_mask=PADDING)
