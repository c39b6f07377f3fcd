"""Vision, image-text and sentence libraries on the operator, compared with their own attention.

They live in a folder of their own, which `make test` fills: torchvision's wheel is only half usable
beside a CPU torch (libraries/torchvision_names.py), and transformers would import it wherever it is
found. So each library's tests, in libraries/, run in a process with that folder on its path.
"""

from __future__ import annotations

import os
import re

import pytest

from tiers import ROOT, run_pytest

pytestmark = pytest.mark.slow

FOLDER = ROOT / "build" / "libraries"
TESTS = {"timm": 9, "torchvision": 2, "open_clip": 6, "sentence_transformers": 1}


@pytest.mark.parametrize("library", TESTS)
def test_models_of_a_library_are_ours_and_keep_their_numbers(library: str) -> None:
    if not (FOLDER / library).is_dir():
        pytest.skip(f"{library} is not in build/libraries: make test installs it")
    paths = [str(FOLDER), str(ROOT / "tests" / "libraries"), os.environ.get("PYTHONPATH", "")]
    done = run_pytest(
        "-p", "torchvision_names", f"tests/libraries/{library}_models.py",
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert re.search(rf"^{TESTS[library]} passed", done.stdout, re.MULTILINE), done.stdout
