"""Every check sentence in the C++ sources answers a wrong call, and the next right call works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import attention_ext  # noqa: F401
from tiers import ROOT, run_python
from wrong_calls import WRONG_CALLS

ops: Any = torch.ops.attention_ext
CSRC = ROOT / "csrc"
CHECKS = {"CHECK_ARGUMENT": 2, "TORCH_CHECK": 1}  # the message begins at this argument


def _top_level_arguments(text: str) -> list[str]:
    """The arguments of a call, given the text behind its opening bracket."""
    arguments, start, depth, position = [], 0, 0, 0
    while True:
        if text[position] == '"':
            position = re.compile(r'"(?:\\.|[^"\\])*"').match(text, position).end()  # type: ignore[union-attr]
            continue
        if text[position] in ",)" and depth == 0:
            arguments.append(text[start:position].strip())
            if text[position] == ")":
                return arguments
            start = position + 1
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[position], 0)
        position += 1


def _literal(argument: str) -> str | None:
    pieces = re.findall(r'"((?:\\.|[^"\\])*)"', argument)
    return "".join(pieces) if argument.startswith('"') else None


def check_sentences(source: str) -> list[list[str]]:
    """The literal parts of each check's message, in order."""
    code = re.sub(r"^\s*#(.*\\\n)*.*", "", source, flags=re.MULTILINE)  # the macros themselves
    code = re.sub(r"//.*", "", code)
    sentences = []
    for found in re.finditer(r"\b(CHECK_ARGUMENT|TORCH_CHECK)\(", code):
        arguments = _top_level_arguments(code[found.end() :])
        literals = [_literal(argument) for argument in arguments[CHECKS[found.group(1)] :]]
        sentences.append([text for text in literals if text is not None])
    return sentences


def _sentences() -> dict[str, list[str]]:
    """First words -> all literal parts, over all C++ sources.

    But for csrc/cuda, which not every build has (test_cuda_glue.py makes its errors), and csrc/api,
    which only C++ programs call (test_cpp_library.py).
    """
    found: dict[str, list[str]] = {}
    for path in sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")]):
        if path.parent in (CSRC / "cuda", CSRC / "api"):
            continue
        for literals in check_sentences(path.read_text()):
            assert literals, f"{path.relative_to(ROOT)}: a check without a sentence"
            assert literals[0] not in found, f"two checks say {literals[0]!r}"
            found[literals[0]] = literals
    return found


SENTENCES = _sentences()


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """What each wrong call was answered, from a process of its own."""
    done = run_python("import wrong_calls; wrong_calls.main()", check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"crashed at {lines[-1:]}: {done.stderr[-2000:]}"
    return {line["sentence"]: line for line in lines if "sentence" in line}


def test_scanner_finds_a_new_sentence() -> None:
    source = 'CHECK_ARGUMENT(op, f(a, ")") == 1, "x must be " "one, got ", x, " here");'
    assert check_sentences(source) == [["x must be one, got ", " here"]]


def test_there_are_enough_distinct_sentences() -> None:
    assert len(SENTENCES) >= 60


def test_every_sentence_has_a_wrong_call_and_the_other_way_round() -> None:
    assert sorted(SENTENCES) == sorted(WRONG_CALLS)


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda text: re.sub(r"\W+", "_", text)[:60])
def test_wrong_call_is_answered_by_its_sentence(
    sentence: str, answers: dict[str, dict[str, Any]]
) -> None:
    answer = answers[sentence]
    parts = ".*".join(map(re.escape, SENTENCES[sentence]))
    # The family's checks begin with the op's name; others are whole sentences of their own.
    op = "" if sentence.startswith("attention_ext:") else r"attention(_weights)?(_backward)?: "
    wanted = op + parts
    assert re.match(wanted, answer["message"], re.DOTALL), answer["message"]
    assert not re.search(r"\b(\w+) or \1\b", answer["message"]), "a type is named twice"
    assert answer["kind"] == "RuntimeError"
    assert answer["right after"], "the next right call went wrong"


@pytest.mark.parametrize("sentence", [s for s in SENTENCES if "attention_ext:" not in s[:14]])
def test_sentences_say_what_was_expected_and_what_came(sentence: str) -> None:
    whole = "".join(SENTENCES[sentence])
    assert re.search(r"must|does not go|do not go|could mean|has no|wanted asks", whole)
    assert "got" in whole or "beside" in whole


def test_meta_tensors_are_checked_alike(answers: dict[str, dict[str, Any]]) -> None:
    query = torch.empty(2, 4, 3, 8, device="meta")
    with pytest.raises(RuntimeError, match="attention: key must have the query's size E"):
        ops.attention(query, query[..., :7], query)


def test_nested_tensor_is_refused_in_our_words() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 3, 4)])
    with pytest.raises(RuntimeError, match="attention: query must be a dense strided tensor"):
        ops.attention(nested, nested, nested)


def test_quantized_and_mkldnn_tensors_are_refused_in_our_words() -> None:
    query = torch.ones(1, 2, 3, 4)
    for odd in (query.to_mkldnn(), torch.quantize_per_tensor(query, 0.1, 0, torch.qint8)):
        with pytest.raises(RuntimeError, match="attention: query must be a dense strided tensor"):
            ops.attention(odd, odd, odd)


def test_huge_windows_mean_no_window() -> None:
    query = torch.randn(1, 2, 5, 4)
    far = 2**63 - 1
    ours = ops.attention(query, query, query, window_left=far, window_right=far, query_offset=2**60)
    expected = ops.attention(query, query, query)
    torch.testing.assert_close(ours[0], expected[0])


def test_far_offsets_hide_every_key() -> None:
    query = torch.randn(1, 2, 5, 4)
    for offset in (2**61, -(2**61)):
        output, logsumexp, _, _ = ops.attention(
            query, query, query, window_left=3, window_right=3, query_offset=offset
        )
        assert not output.any() and (logsumexp == -torch.inf).all()
