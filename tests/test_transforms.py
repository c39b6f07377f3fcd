"""torch.func over the raw ops: every transform against a loop or against plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import attention_ext as ae
from attention_ext import reference

# torch warns where it loops for want of a rule of ours.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")

ops: Any = torch.ops.attention_ext
N, B, H, KV, L, S, E, EV = 3, 2, 4, 2, 5, 6, 3, 7
NAMES = ("query", "key", "value", "attn_bias", "sinks")
STATE = torch.tensor([5, 6, 0, 0, 0, 0])


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


SHAPES = {
    "query": (B, H, L, E), "key": (B, KV, S, E), "value": (B, KV, S, EV),
    "attn_bias": (B, 1, L, S), "sinks": (H,),
}  # fmt: skip


def _stacked(results: list[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(_stacked(list(column)) for column in zip(*results, strict=True))


def _assert_equals_loop(
    function: Callable[..., Any], batched: dict[str, bool], tensors: dict[str, Tensor]
) -> None:
    """vmap over the batched tensors gives what a Python loop over them gives."""
    names = list(tensors)
    in_dims = tuple(0 if batched[name] else None for name in names)
    ours = vmap(function, in_dims=in_dims)(*tensors.values())
    loop = [
        function(*(x[n] if batched[name] else x for name, x in tensors.items())) for n in range(N)
    ]
    torch.testing.assert_close(ours, _stacked(loop))


def _tensors(batched: dict[str, bool], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {n: _random(*((N,) if batched[n] else ()), *shape) for n, shape in shapes.items()}


def _finite(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.masked_fill(x.isinf(), 0.0) for x in results)


SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(NAMES, n)]


def _ids(subset: tuple[str, ...]) -> str:
    return "-".join(name[:4] for name in subset)


@pytest.mark.parametrize("subset", SUBSETS, ids=_ids)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_vmap_of_any_subset_equals_a_loop(subset: tuple[str, ...], dropout_p: float) -> None:
    batched = {name: name in subset for name in NAMES}
    tensors = _tensors(batched, SHAPES)
    mask = torch.rand(L, S) > 0.2

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(NAMES, values, strict=True))
        results: tuple[Tensor, ...] = ops.attention(
            **named, attn_mask=mask, is_causal=True, dropout_p=dropout_p, rng_state=STATE
        )
        return results[:2]

    _assert_equals_loop(function, batched, tensors)


@pytest.mark.parametrize("subset", SUBSETS, ids=_ids)
def test_per_sample_gradients_equal_a_loop(subset: tuple[str, ...]) -> None:
    batched = {name: name in subset for name in NAMES}
    tensors = _tensors(batched, SHAPES)

    def loss(*values: Tensor) -> Tensor:
        output, logsumexp, _, _ = ops.attention(**dict(zip(NAMES, values, strict=True)))
        return output.square().sum() + logsumexp.sin().sum()

    _assert_equals_loop(grad(loss, argnums=(0, 1, 2, 3, 4)), batched, tensors)


OTHER_SHAPES: dict[str, tuple[int, ...]] = {
    "attn_mask": (L, S), "key_mask": (B, S), "alibi_slopes": (H,), "query_offsets": (B,),
    "rng_state": (6,),
}  # fmt: skip


def _other(name: str, leading: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    if name in ("attn_mask", "key_mask"):
        return torch.rand(*leading, *shape) > 0.2
    if name in ("query_offsets", "rng_state"):
        return torch.randint(0, 4, (*leading, *shape))
    return torch.rand(*leading, *shape, dtype=torch.float64)


@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *OTHER_SHAPES.items(),
        ("attn_mask", (B, H, L, S)),
        ("attn_mask", (1, 1, L, S)),
        ("attn_bias", (L, S)),
        ("attn_bias", (B, H, 1, S)),
        ("alibi_slopes", (B, H)),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_vmap_of_an_option_equals_a_loop(
    name: str, shape: tuple[int, ...], with_query: bool, sinks: bool
) -> None:
    options = {n: _other(n, (), s) for n, s in OTHER_SHAPES.items() if n != "rng_state"}
    options[name] = _other(name, (N,), shape)
    query = _random(N, B, H, L, E) if with_query else _random(B, H, L, E)
    key, value = _random(B, KV, S, E), _random(B, KV, S, EV)
    dropout_p = 0.4 if name == "rng_state" else 0.0

    def loss(query: Tensor, option: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        output, logsumexp, _, _ = ops.attention(
            query, key, value, **{**options, name: option}, sinks=sink, is_causal=True,
            dropout_p=dropout_p,
        )  # fmt: skip
        return output.square().sum() + logsumexp.masked_fill(logsumexp.isinf(), 0).sum(), output

    function = grad(loss, argnums=0, has_aux=True)
    sink = _random(N, H) if sinks else _random(H)
    tensors = {"query": query, "option": options[name], "sinks": sink}
    batched = {"query": with_query, "option": True, "sinks": sinks}
    _assert_equals_loop(function, batched, tensors)


def test_vmap_of_packed_sequences_equals_a_loop() -> None:
    borders = torch.tensor([0, 2, 5]), torch.tensor([0, 5, 6])
    slopes = torch.rand(2, H, dtype=torch.float64)

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = ops.attention(
            query, key, value, cu_seqlens_q=borders[0], cu_seqlens_k=borders[1],
            alibi_slopes=slopes, query_offsets=torch.tensor([3, 0]), is_causal=True,
        )  # fmt: skip
        return results[:2]

    shapes = {"query": (1, H, L, E), "key": (1, KV, S, E), "value": (1, KV, S, EV)}
    for subset in ({"query"}, {"query", "key", "value"}, {"value"}):
        batched = {name: name in subset for name in shapes}
        _assert_equals_loop(function, batched, _tensors(batched, shapes))


@pytest.mark.parametrize("average_heads", [False, True])
@pytest.mark.parametrize("subset", [("query",), ("key", "attn_bias"), ("sinks",), NAMES])
def test_vmap_of_weights_and_their_gradients_equals_a_loop(
    subset: tuple[str, ...], average_heads: bool
) -> None:
    batched = {name: name in subset for name in NAMES}

    def loss(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(NAMES, values, strict=True))
        _, logsumexp, residual, _ = ops.attention(**named, softcap=2.0)
        weights = ops.attention_weights(
            *(named["query"], named["key"], None, named["attn_bias"], None, named["sinks"]),
            *(*(None,) * 5, logsumexp, residual),
            softcap=2.0,
            average_heads=average_heads,
        )
        return weights.square().sum(), weights

    function = grad(loss, argnums=(0, 1, 3, 4), has_aux=True)
    _assert_equals_loop(function, batched, _tensors(batched, SHAPES))


def test_vmap_over_other_dimensions_and_nested() -> None:
    query, key, value = _random(B, H, L, N, E), _random(2, B, KV, S, E), _random(B, KV, S, EV)

    def function(query: Tensor, key: Tensor) -> Tensor:
        output: Tensor = ops.attention(query, key, value)[0]
        return output

    ours = vmap(vmap(function, in_dims=(3, None), out_dims=1), in_dims=(None, 0))(query, key)
    for m, n in itertools.product(range(2), range(N)):
        torch.testing.assert_close(ours[m, :, n], function(query[:, :, :, n], key[m]))


def test_vmap_moves_an_unbatched_bias_nowhere() -> None:
    """The folded call keeps the bias's own memory: no copy for each element."""
    from test_autograd import Recorder

    bias = _random(1, H, L, S)
    query, key, value = _random(N, B, H, L, E), _random(B, KV, S, E), _random(B, KV, S, EV)
    with Recorder() as recorder:
        vmap(lambda q: ops.attention(q, key, value, attn_bias=bias)[0])(query)
    ((name, args),) = recorder.calls
    assert name == "attention" and args[0].shape == (N, B, H, L, E)
    assert args[4].data_ptr() == bias.data_ptr() and args[1].data_ptr() == key.data_ptr()


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_randomness_of_dropout_under_vmap(randomness: str) -> None:
    query = _random(H, L, E).expand(N, H, L, E).clone()

    def function(query: Tensor) -> Tensor:
        output = ae.attention(query, query, query, dropout_p=0.5)
        assert isinstance(output, Tensor)
        return output

    mapped = vmap(function, randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            mapped(query)
        return
    torch.manual_seed(7)
    first = mapped(query)
    torch.manual_seed(7)
    assert torch.equal(first, mapped(query))
    assert all(torch.equal(first[0], x) == (randomness == "same") for x in first[1:])


def test_gradient_and_output_use_the_same_dropout_under_vmap() -> None:
    query, key = _random(N, H, L, E), _random(N, H, S, E)
    value = torch.eye(S, dtype=torch.float64).expand(N, H, S, S)

    def function(value: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        output = ae.attention(query, key, value, dropout_p=0.5)
        assert isinstance(output, Tensor)
        return output.sum(), output

    gradient, output = vmap(grad(function, has_aux=True), randomness="different")(value, query, key)
    # value is the identity, so the output is the matrix of weights; its gradient their column sums.
    torch.testing.assert_close(gradient, output.sum(-2).unsqueeze(-1).expand(N, H, S, S))


def _curved(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output, logsumexp, _, _ = ops.attention(query, key, value, is_causal=True, softcap=2.0)
    return (output**3).sum() + logsumexp.sin().sum()


def _curved_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    results = reference.attention(
        query, key, value, is_causal=True, softcap=2.0, return_lse=True, pairwise=False
    )
    return (results[0] ** 3).sum() + results[1].sin().sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f: grad(f, argnums=(0, 1, 2)),
    "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2)),
    "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2)),
    "hessian": lambda f: hessian(f, argnums=(0, 1)),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f, argnums=(0, 2)), argnums=(1, 2)),
    "jacfwd(jacfwd)": lambda f: jacfwd(jacfwd(f), argnums=(0, 1)),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(f, argnums=2)),
    "jacrev(hessian)": lambda f: jacrev(hessian(f)),
    "jacfwd(jacrev(jacfwd))": lambda f: jacfwd(jacrev(jacfwd(f), argnums=1)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_any_order_equal_those_of_the_reference(name: str) -> None:
    tensors = _random(2, 3, 2), _random(1, 3, 2), _random(1, 3, 2)
    ours = TRANSFORMS[name](_curved)(*tensors)
    torch.testing.assert_close(ours, TRANSFORMS[name](_curved_reference)(*tensors))


def test_vjp_and_jvp_agree_with_the_reference_and_each_other() -> None:
    tensors = _random(2, 3, 2), _random(1, 3, 2), _random(1, 3, 2)
    tangents = tuple(torch.randn_like(x) for x in tensors)

    def function(*tensors: Tensor) -> Tensor:
        output: Tensor = ops.attention(*tensors, is_causal=True)[0]
        return output

    output, derivative = jvp(function, tensors, tangents)
    same, pull = vjp(function, *tensors)
    torch.testing.assert_close(output, same)
    incoming = torch.randn_like(output)
    forward = (incoming * derivative).sum()
    reverse = sum((x * t).sum() for x, t in zip(pull(incoming), tangents, strict=True))
    torch.testing.assert_close(forward, reverse)


def test_vjp_of_grad_and_hessian_vector_products() -> None:
    tensors = _random(2, 3, 2), _random(1, 3, 2), _random(1, 3, 2)
    direction = torch.randn_like(tensors[0])
    results = []
    for function in (_curved, _curved_reference):
        gradient = grad(function)
        _, pull = vjp(lambda q, g=gradient: g(q, *tensors[1:]), tensors[0])
        forward = jvp(lambda q, g=gradient: g(q, *tensors[1:]), (tensors[0],), (direction,))[1]
        results.append((*pull(direction), forward))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0][0], results[0][1])


def test_dual_numbers_of_autograd_forward_ad() -> None:
    tensors = _random(2, 3, 2), _random(1, 3, 2), _random(1, 3, 2)
    tangent = torch.randn_like(tensors[1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[1], tangent)
        output = ops.attention(tensors[0], dual, tensors[2])[0]
        ours = torch.autograd.forward_ad.unpack_dual(output).tangent
    expected = jvp(
        lambda k: reference.attention(tensors[0], k, tensors[2]), (tensors[1],), (tangent,)
    )
    torch.testing.assert_close(ours, expected[1])


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian_of_autograd(strategy: str) -> None:
    query, key = _random(1, 3, 2), _random(1, 3, 2)

    def function(query: Tensor) -> Tensor:
        output: Tensor = ops.attention(query, key, key, is_causal=True)[0]
        return output

    ours = torch.autograd.functional.jacobian(function, query, vectorize=True, strategy=strategy)
    torch.testing.assert_close(ours, torch.autograd.functional.jacobian(function, query))


def test_constants_refuse_tangents() -> None:
    query, slopes = _random(H, L, E), torch.rand(H, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="alibi_slopes are constants"):
        jvp(
            lambda s: ops.attention(query, query, query, alibi_slopes=s)[0],
            (slopes,),
            (torch.ones_like(slopes),),
        )
    with pytest.raises(RuntimeError, match="alibi_slopes are constants"):
        grad(lambda s: ops.attention(query, query, query, alibi_slopes=s)[0].sum())(slopes)


def test_ensembles_of_modules() -> None:
    """vmap over stacked parameters of a module, per-sample gradients inside."""
    models = [ae.MultiheadAttention(8, 2, batch_first=True).double() for _ in range(N)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x = _random(4, 5, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        one = x.unsqueeze(0)
        output = functional_call(models[0], (parameters, {}), (one, one, one), {})[0]
        result: Tensor = output.square().sum()
        return result

    per_sample = vmap(vmap(grad(loss), in_dims=(None, 0)), in_dims=(0, None))(parameters, x)
    assert not buffers
    for n, model in enumerate(models):
        for m in range(4):
            model.zero_grad()
            loss(dict(model.named_parameters()), x[m]).backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(per_sample[name][n, m], parameter.grad)
