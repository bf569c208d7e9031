"""The figures of each kind of result, drawn from the example of its call when the site is built."""

from pathlib import Path
from typing import Any, Final
from zlib import crc32

from docstring_examples import made
from docutils import nodes
from docutils.parsers.rst import Directive

from attnmech.draw import scripts
from attnmech.draw.embed import plotly_view


class Figures(Directive):
    """`{figures} HeadEffects`: each of its figures, under the call that draws it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = self.arguments[0]
        if kind not in made():
            return []
        code, name, result = made()[kind]
        shown: list[nodes.Node] = [nodes.rubric(text="Figures"), nodes.literal_block(text=code, language="python")]
        for figure in getattr(result, "FIGURES", ()) or ("",):
            call = f'"{figure}"' * bool(figure)
            shown.append(nodes.literal_block(text=f"{name}.plot({call})", language="python"))
            drawn = result.plot(*[figure] * bool(figure))
            shown.append(nodes.raw("", element(drawn, f"{kind}-{figure or 'figure'}"), format="html"))
        return shown


def element(figure: Any, name: str) -> str:
    """A figure's element in a page, and the line that draws it; the scripts are in `_static/views.js`."""
    view = plotly_view(figure)
    _needed.update({script.name: script for script in view.scripts})
    start = f"<script>addEventListener('DOMContentLoaded', () => {{ {view.start(name)} }});</script>"
    return f'<div class="output">{view.element(name)}{start}</div>'


_needed: Final[dict[str, scripts.Script]] = {}


def write_scripts(app: Any, error: Exception | None) -> None:
    """The scripts that figures need, once for all pages."""
    if error is None and _needed:
        carriers = scripts.carriers(_needed.values())
        text = f"document.head.insertAdjacentHTML('beforeend', {carriers!r});\n{scripts.boot()}"
        (Path(app.outdir) / "_static" / "views.js").write_text(text, "utf-8")


def add_scripts(app: Any, page: str, _: str, __: Any, tree: Any) -> None:
    if tree is not None and any("attnmech.show(" in node.astext() for node in tree.findall(nodes.raw)):
        app.add_js_file("views.js")


def setup(app: Any) -> dict[str, int]:
    app.add_directive("figures", Figures)
    app.connect("html-page-context", add_scripts)
    app.connect("build-finished", write_scripts)
    # Pages that were read with another version of this file are read again.
    version = crc32(Path(__file__).read_bytes())
    return {"env_version": version, "parallel_read_safe": False, "parallel_write_safe": False}
