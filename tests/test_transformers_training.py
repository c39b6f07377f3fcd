"""transformers models on our attention under torch.compile, checkpointing, bfloat16, dropout."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import transformers

from attention_ext.integrations import transformers as integration
from hf_cases import CASES, LENGTH, VOCABULARY, Case, ExactSoftmax, Record, padding

pytestmark = pytest.mark.slow


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def step(model: Any, inputs: dict[str, Any], call: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of predicting the inputs by `call`, the model itself by default; its gradients.

    A row of padding predicts nothing, not even the first real token behind it: such a row sees no
    key, and eager attention makes up an average for it.
    """
    model.zero_grad()
    mask = inputs["attention_mask"]
    labels = inputs["input_ids"].masked_fill(mask * mask.roll(1, 1) == 0, -100)
    forward = model if call is None else call
    loss = forward(**inputs, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got: tuple[Tensor, dict[str, Tensor]], want: Any, tolerance: float) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        difference = (got[1][name] - gradient).abs().max().item()
        assert difference <= tolerance * gradient.abs().max().item(), name


# Inductor fuses the casts to float32 that the model makes in its norms and its loss.
@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 1e-9), ("inductor", 1e-5)])
def test_a_compiled_training_step_is_eagers(backend: str, tolerance: float) -> None:
    case = case_of("mistral")
    model, inputs = case.build("AutoModelForCausalLM"), case.inputs("left")
    del model.model.layers[1:]  # one layer says it, and compiles in half the time
    with ExactSoftmax():
        expected = step(model, inputs)
    integration.use(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_same_step(step(model, inputs, compiled), expected, tolerance)


def test_compiled_models_keep_their_masks_structured() -> None:
    case = case_of("mistral")
    model, inputs = case.build("AutoModelForCausalLM"), case.inputs("left")
    integration.use(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(**inputs, use_cache=False)
    op = torch.ops.attention_ext.attention.default
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target is op]
    assert len(calls) == case.layers
    for call in calls:
        mask, bias, key_mask = call.args[3:6]
        assert mask is None
        assert bias is None
        assert key_mask is not None
        assert (call.kwargs["window_left"], call.kwargs["window_right"]) == (3, 0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_compiled_decoding_gives_eagers_tokens_from_a_few_graphs(cache: str) -> None:
    case = case_of("mistral")
    model, inputs = case.build("AutoModelForCausalLM"), case.inputs("left")
    arguments = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    arguments |= {"cache_implementation": cache}
    with ExactSoftmax():
        expected = model.generate(**inputs, **arguments)
    integration.use(model)
    count = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=count)
    assert torch.equal(model.generate(**inputs, **arguments), expected)
    assert 0 < count.frame_count <= 4  # of the prompt and of decoding, not one per token


def test_one_compiled_graph_takes_every_length() -> None:
    case = case_of("mistral")
    model = case.build()
    integration.use(model)
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
    frames = set()
    for length in (9, 12, 7):
        ids = torch.randint(3, VOCABULARY, (3, length))
        inputs = {"input_ids": ids, "attention_mask": padding("left", length), "use_cache": False}
        with torch.no_grad():
            got, expected = (m(**inputs).last_hidden_state for m in (compiled, model))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        frames.add(count.frame_count)
    assert len(frames) == 1


@pytest.mark.parametrize("name", ["bert", "mistral"])
def test_an_exported_model_holds_the_operator(name: str) -> None:
    case = case_of(name)
    model, inputs = case.build(), case.inputs("left")
    inputs |= {"use_cache": False} if case.causal else {}
    integration.use(model)
    program = torch.export.export(model, (), inputs)
    op = torch.ops.attention_ext.attention.default
    assert [node.target for node in program.graph.nodes].count(op) == case.layers
    got = program.module()(**inputs).last_hidden_state
    torch.testing.assert_close(got, model(**inputs).last_hidden_state, rtol=1e-12, atol=1e-12)


def test_vmap_gives_every_samples_gradient() -> None:
    case = case_of("bert")
    model, inputs = case.build(), case.inputs("right")
    integration.use(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        one = {"input_ids": ids[None], "attention_mask": mask[None]}
        states = torch.func.functional_call(model, parameters, (), one).last_hidden_state
        return (states.square() * mask[None, :, None]).sum()

    gradient = torch.func.grad(loss)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    together = torch.func.vmap(gradient, (None, 0, 0))(parameters, ids, mask)
    for n in range(3):
        alone = gradient(parameters, ids[n], mask[n])
        for name in parameters:
            torch.testing.assert_close(together[name][n], alone[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_checkpointed_training_step_is_the_plain_one(name: str, reentrant: bool) -> None:
    case = case_of(name)
    model, inputs = case.build("AutoModelForCausalLM"), case.inputs("left")
    with ExactSoftmax():
        expected = step(model, inputs)
    integration.use(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with Record() as seen:
        got = step(model, inputs)
    assert seen.ours == 2 * case.layers  # once more in the backward pass
    assert set(seen.given("attn_mask")) == {None}
    assert_same_step(got, expected, 1e-9)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "t5", "bert"])
def test_bfloat16_is_as_near_to_float64_as_eager(name: str, autocast: bool) -> None:
    case = case_of(name)
    inputs = case.inputs("right")
    real = inputs["attention_mask"].bool()

    def hidden(model: Any, lower: bool) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=lower):
            states = model(**inputs).last_hidden_state
        return states[real] if states.size(1) == LENGTH else states

    with ExactSoftmax():
        exact = hidden(case.build(), False)
    dtype = torch.float32 if autocast else torch.bfloat16
    eager = hidden(case.build(dtype=dtype), autocast)
    model = case.build(dtype=dtype)
    integration.use(model)
    with Record() as seen:
        ours = hidden(model, autocast)
    assert {query.dtype for query in seen.given("query")} == {torch.bfloat16}
    error, allowed = ((x - exact).square().mean().sqrt() for x in (ours, eager))
    assert 0 < error <= 1.5 * allowed


def test_dropout_is_the_operators_and_only_in_training() -> None:
    config = case_of("llama").config()
    config.attention_dropout = 0.25
    model = transformers.AutoModel.from_config(config)
    integration.use(model)
    ids = torch.randint(3, 50, (2, LENGTH))
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        with Record() as seen:
            runs.append(model.train()(input_ids=ids).last_hidden_state)
        assert seen.given("dropout_p") == [0.25, 0.25]
    assert torch.equal(*runs)
    with Record() as seen:
        still = model.eval()(input_ids=ids).last_hidden_state
    assert seen.given("dropout_p") == [None, None]
    assert not torch.equal(still, runs[0])
