"""Sphinx's configuration of the site that `make docs` builds into build/docs/html.

Called by sphinx-build. The source folder is the repository's root, so that links between pages,
and from pages to files, are the same on the site and on a code host. Pages are plain Markdown; two
things are made while building: the tree of pages, from the lists of docs/index.md, and the
operators' schemas, from the loaded library. Nothing is fetched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math import latex2mathml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import attention_ext  # noqa: E402

project = "attention_ext"
author = "The authors of attention_ext"
project_copyright = author
release = version = attention_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/*.md", "csrc/README.md", "benchmarks/README.md"]
exclude_patterns = [".*", "build", "dist", "out", "attention_ext", "tests", "tools"]

# A name that leads nowhere is an error (-W). Those of other projects are text: nothing is fetched.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|matplotlib|collections|typing|types)\..*"),
    ("py:.*", r"(Tensor|Figure|Sequence|Any|Literal|optional|nn\.Module|TracebackType)"),
]

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "returns_style"), ("Shapes", "returns_style")]
python_maximum_signature_line_length = 80
highlight_language = "none"

html_theme = "furo"
html_title = "attention_ext"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
# The site's own address leads to the index, which lies in docs/ like its source.
html_extra_path = ["site"]


class OperatorSchema(Directive):
    """`.. operator-schema:: NAME`: what torch.ops.attention_ext.NAME was registered with."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        overload = getattr(torch.ops.attention_ext, self.arguments[0]).default
        text = re.sub(r"([,(]) ?(?=\w[\w\[\]]*\?? \w|\*)", r"\1\n    ", str(overload._schema))
        return [nodes.literal_block(text, text)]


def list_pages(app: Any, docname: str, source: list[str]) -> None:
    """Give docs/index.md the site's tree: each heading and the pages in the list below it."""
    if docname != root_doc:
        return
    text = source[0]
    trees = []
    listed = {root_doc}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        caption, _, rest = part.partition("\n")
        pages = {
            (ROOT / "docs" / link).resolve().relative_to(ROOT).with_suffix("").as_posix(): title
            for title, link in re.findall(r"^- \[([^\]]*)\]\(([\w./]+\.md)\)", rest, re.M)
        }
        listed.update(pages)
        trees.append((caption, [f"{title} </{page}>" for page, title in pages.items()]))
    unlisted = sorted(set(app.env.found_docs) - listed)
    if unlisted:
        trees.append(("More", [f"/{page}" for page in unlisted]))
    for caption, entries in trees:
        lines = "\n".join(entries)
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
    source[0] = text


def write_math(self: Any, node: nodes.Node) -> None:
    """Formulas as MathML, which browsers draw themselves: no script, nothing to fetch."""
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=node.tagname == "math_block"))
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("operator-schema", OperatorSchema)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("source-read", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
