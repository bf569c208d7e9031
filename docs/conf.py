"""How the documentation is built: `sphinx-build -M html docs docs/_build -W --keep-going` (pip install '.[docs]')."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_site"), str(ROOT / "tests")]

project = "attnmech"
copyright = "the attnmech authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "executed_notebooks",
    "public_names",
    "figures",
    "llms",
]
exclude_patterns = ["_build", "_site", "made/notebooks", "schema"]

myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them as written: `attnmech/basics/lazy_names.py`
default_role = "literal"
smartquotes_action = "D"  # dashes only: values such as "zero" keep the quotes that code has
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 70
add_module_names = False

html_theme = "furo"
html_title = "attnmech"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a page opened from a folder cannot
html_math_renderer = "mathml"
html_theme_options = {"light_css_variables": {"color-code-background": "#f5f7f9"}}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
