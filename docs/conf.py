"""Configuration of the documentation: `sphinx-build -W -n docs docs/_build`."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

project = "graphattn"
author = "The graphattn authors"
copyright = author
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_parser"]
exclude_patterns = ["_build", "generated"]

html_theme = "furo"
html_title = "graphattn"
html_static_path = ["_static"]
html_css_files = ["side_by_side.css"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# Shapes stand in the descriptions of the arguments; the annotations repeat them in a longer form.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Returns"]  # is prose: nothing before a colon is a type

# A name in single backticks is a link where it is one of ours, and code where it is not. Python's exceptions and
# what other libraries document are not linked: the build needs no network.
default_role = "py:obj"
nitpick_ignore_regex = [("py:obj", r"(?s).*"), ("py:exc", r"\w+Error")]


def _as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    # Some docstrings set formulas between dollars, as PyG's do, write plurals of code, and code with a dot before it,
    # which a role would drop.
    text = re.sub(
        r"^\$\$(.+?)\$\$",
        lambda formula: ".. math::\n\n   " + " ".join(formula[1].split()) + "\n\n",
        "\n".join(lines),
        flags=re.MULTILINE | re.DOTALL,
    )
    text = re.sub(r"\$([^$]+)\$", lambda formula: ":math:`" + " ".join(formula[1].split()) + "`", text)
    text = re.sub(r"(?<=[\s(])`(\.\w+)`", r"``\1``", text)
    text = re.sub(r"(?<=\w)`s\b", r"`\\ s", text)
    lines[:] = text.split("\n")


def _generate(app) -> None:
    from benchmarks.run import RESULTS, STRUCTURED_RESULTS, read_rows
    from benchmarks.tables import structured_tables, tables
    from docs.figures import draw_all

    folder = HERE / "generated"
    draw_all(folder)
    (folder / "sparse.md").write_text(tables(read_rows(RESULTS)))
    (folder / "structured.md").write_text(structured_tables(read_rows(STRUCTURED_RESULTS)))


def setup(app) -> None:
    app.connect("builder-inited", _generate)
    app.connect("autodoc-process-docstring", _as_rst)
