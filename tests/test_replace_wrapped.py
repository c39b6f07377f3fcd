"""replace_attention on models that are compiled, distributed, adapted, moved, or still training."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, weight_norm

import attention_ext as ae
from attention_ext import MultiheadAttention, replace_attention
from watch import Watch

N, L, E = 3, 7, 16
OPS: Any = torch.ops.attention_ext


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def batch() -> Tensor:
    return torch.randn(N, L, E, dtype=torch.float64)


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of a training step, by the names of the bare model's parameters."""
    model.zero_grad()
    out = model(x)
    out.sin().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for wrapper in ("module.", "_orig_mod."):
        grads = {name.replace(wrapper, ""): grad for name, grad in grads.items()}
    return {"output": out.detach(), **grads}


def blocks_visited(call: Callable[[], Any]) -> int:
    OPS._visited_block_pairs()
    call()
    return int(OPS._visited_block_pairs())


def compile_in_place(*modules: nn.Module) -> None:
    for module in modules:
        module.compile(backend="aot_eager")


def compiled_in_place(model: nn.Module) -> nn.Module:
    compile_in_place(model)
    return model


def layers_compiled(model: nn.Module) -> nn.Module:
    compile_in_place(*model.layers)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled in place": compiled_in_place,
    "layers compiled": layers_compiled,
    "distributed": DistributedDataParallel,
    "distributed, compiled": lambda model: torch.compile(
        DistributedDataParallel(model), backend="aot_eager"
    ),
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("replace_first", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_train_with_ours_and_torchs_numbers(
    wrapper: str, replace_first: bool
) -> None:
    bare, x = encoder(), batch()
    expected = step(bare, x)
    if replace_first:
        assert replace_attention(bare) == 2
        model = WRAPPERS[wrapper](bare)
    else:
        model = WRAPPERS[wrapper](bare)
        assert list(step(model, x)) == list(expected)  # what is compiled is compiled by now
        assert replace_attention(model) == 2
    assert blocks_visited(lambda: step(model, x)) > 0
    results = step(model, x)
    assert list(results) == list(expected)
    for name, right in expected.items():
        torch.testing.assert_close(results[name], right, msg=name)
    model.eval()
    with torch.no_grad():
        assert blocks_visited(lambda: model(x)) == 2 * N * 4  # layers, sequences, heads
        torch.testing.assert_close(model(x), expected["output"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", ["compiled", "distributed", "distributed, compiled"])
def test_a_wrapped_attention_module_is_replaced_inside_its_wrapper(wrapper: str) -> None:
    attention = nn.MultiheadAttention(E, 4, batch_first=True, dtype=torch.float64)
    x = batch()
    expected = attention(x, x, x)
    model = WRAPPERS[wrapper](attention)
    model(x, x, x)
    assert replace_attention(model) == 1
    assert blocks_visited(lambda: model(x, x, x)) > 0
    torch.testing.assert_close(model(x, x, x), expected)


def test_a_forward_of_a_modules_own_is_refused_before_anything_changes() -> None:
    for change, text in (
        (compile_in_place, "layers.1.self_attn was compiled by itself"),
        (lambda m: setattr(m, "forward", m.forward), "layers.1.self_attn was given a forward"),
    ):
        model = encoder()
        change(model.layers[1].self_attn)
        with pytest.raises(ValueError, match=text):
            replace_attention(model)
        assert type(model.layers[0].self_attn) is nn.MultiheadAttention


class LoRALinear(nn.Module):
    """A linear with a low-rank update, as adapters wrap them: weight is what it multiplies by."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, rank, dtype=base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        return self.base.weight + self.up @ self.down

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class LoRAInput(nn.Module):
    """A parametrization: the low-rank update of a packed input projection."""

    def __init__(self, weight: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, weight.size(1), dtype=weight.dtype))
        self.up = nn.Parameter(torch.randn(weight.size(0), rank, dtype=weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@pytest.mark.parametrize("replace_first", [True, False])
def test_low_rank_adapters_learn_alone(replace_first: bool) -> None:
    model, x = encoder(), batch()
    model.requires_grad_(False)
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    adapt(model)
    expected = step(model, x)
    assert len(expected) == 1 + 2 * 4
    torch.manual_seed(5)
    if replace_first:
        replace_attention(other)
    adapt(other)
    if not replace_first:
        assert replace_attention(other) == 2
    with Watch() as seen:
        results = step(other, x)
    assert seen.ours == 2 and seen.other_ways == []
    assert list(results) == list(expected)
    for name, right in expected.items():
        torch.testing.assert_close(results[name], right, msg=name)


def adapt(model: nn.Module) -> None:
    for layer in model.layers:
        attention = layer.self_attn
        attention.out_proj = LoRALinear(attention.out_proj)
        nn.utils.parametrize.register_parametrization(
            attention, "in_proj_weight", LoRAInput(attention.in_proj_weight)
        )
        attention.parametrizations.in_proj_weight.original.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("replace_first", [True, False])
def test_pefts_own_adapters(replace_first: bool) -> None:
    import peft

    model, x = encoder(), batch()
    config = peft.LoraConfig(target_modules=["self_attn", "linear1"], r=2, init_lora_weights=False)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    expected = step(adapted, x)
    torch.manual_seed(5)
    if replace_first:
        assert replace_attention(model) == 2
    ours = peft.get_peft_model(model, config)
    if not replace_first:
        assert replace_attention(ours) == 2
    with Watch() as seen:
        results = step(ours, x)
    assert seen.ours == 2 and seen.other_ways == []
    assert len(results) > 1
    for name, right in expected.items():
        torch.testing.assert_close(results[name], right, msg=name)
    merged = ours.eval().merge_and_unload()
    with torch.no_grad(), Watch() as seen:
        torch.testing.assert_close(merged(x), expected["output"])
    assert seen.ours == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_computed_by_hooks_are_computed_before_every_call() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, 4, dtype=torch.float64)])
    weight_norm(model[0], "in_proj_weight")
    x = batch()
    expected = model[0](x, x, x)[0]
    assert replace_attention(model) == 1
    torch.testing.assert_close(model[0](x, x, x)[0], expected)
    with torch.no_grad():
        model[0].in_proj_weight_g.mul_(2.0)
    assert not torch.allclose(model[0](x, x, x)[0], expected)


def test_parametrizations_can_be_added_after_replacing() -> None:
    model, x = encoder(), batch()
    replace_attention(model)
    attention = model.layers[0].self_attn
    parametrizations.orthogonal(attention, "in_proj_weight")
    with Watch() as seen:
        model(x).sum().backward()
    assert seen.ours == 2 and isinstance(attention, MultiheadAttention)
    assert attention.parametrizations.in_proj_weight.original.grad is not None


def test_moves_after_replacing_keep_optimizers_and_sharing() -> None:
    model = encoder()
    model.layers[1].self_attn.in_proj_weight = model.layers[0].self_attn.in_proj_weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    replace_attention(model)
    parameters = set(model.parameters())
    model.float().to("cpu")
    attentions = [layer.self_attn for layer in model.layers]
    assert attentions[0].in_proj_weight is attentions[1].in_proj_weight
    assert set(model.parameters()) == parameters
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = attentions[0].in_proj_weight.detach().clone()
    model(batch().float()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(attentions[1].in_proj_weight, before)
    empty = copy.deepcopy(model).to("meta")
    assert empty(torch.empty(N, L, E, device="meta")).shape == (N, L, E)
    there = empty.to_empty(device="cpu")
    there.load_state_dict(model.state_dict())
    x = batch().float()
    torch.testing.assert_close(there(x), model(x))


def test_backward_and_state_dict_hooks_keep_firing() -> None:
    model = encoder()
    attention = model.layers[0].self_attn
    fired: list[str] = []
    attention.register_full_backward_hook(lambda *_: fired.append("backward"))
    attention.register_full_backward_pre_hook(lambda *_: fired.append("before backward"))
    attention.register_load_state_dict_post_hook(lambda *_: fired.append("loaded"))
    attention.register_state_dict_post_hook(lambda *_: fired.append("saved"))
    replace_attention(model)
    model(batch()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert fired == ["before backward", "backward", "saved", "loaded"]


def test_checkpointed_layers_recompute_ours() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = encoder(), batch().requires_grad_()
    expected = torch.autograd.grad(model(x).sin().sum(), x)
    replace_attention(model)
    with Watch() as seen:
        out = checkpoint(model, x, use_reentrant=False)
        gradients = torch.autograd.grad(out.sin().sum(), x)
    assert seen.ours == 4
    torch.testing.assert_close(gradients, expected)


def test_functional_calls_and_per_sample_gradients_of_a_replaced_model() -> None:
    model, x = encoder(), batch()
    replace_attention(model)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x.unsqueeze(0),)).sin().sum()

    with Watch() as seen:
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert seen.ours == 2  # one call a layer for the whole batch
    for n in range(N):
        alone = step(model, x[n : n + 1])
        for name in parameters:
            torch.testing.assert_close(each[name][n], alone[name], msg=name)


def test_replacing_and_the_context_go_together() -> None:
    model, x = encoder(), batch()
    expected = step(model, x)
    replace_attention(model)
    with ae.sdpa(), Watch() as seen:
        results = step(model, x)
    assert seen.ours == 2
    for name, right in expected.items():
        torch.testing.assert_close(results[name], right, msg=name)
