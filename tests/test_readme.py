"""What the README and docs/ show: every Python block runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tiers import run_python

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "csrc" / "README.md"]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.S)


def test_the_first_block_runs_as_it_stands() -> None:
    printed = run_python(BLOCKS[0]).stdout
    assert "torch.Size([2, 8, 100, 64]) torch.Size([2, 100, 100])" in printed


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="one block needs transformers"
)
def test_all_blocks_run_one_after_the_other() -> None:
    assert len(BLOCKS) >= 6
    printed = run_python("\n".join(BLOCKS)).stdout
    assert "6 attention modules replaced" in printed
    difference = float(re.findall(r"tensor\(([\d.e-]+)", printed)[-1])
    assert difference < 1e-5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_pictures_are_small(page: Path) -> None:
    links = [x for x in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in x]
    for link in links:
        target = (page.parent / link).resolve()
        assert target.is_file(), link
        if target.suffix == ".png":
            assert target.stat().st_size < 150_000
    named = re.findall(r"`((?:csrc|tests|docs|examples|attention_ext)/[\w./]+)`", page.read_text())
    for name in named:
        assert (ROOT / name).exists(), name
