"""The scripts in a page or a notebook: each is stored once, compressed, under a name that depends on its text.

A carrier is an element that no browser runs; boot.js finds a carrier by its name, unpacks its script and runs it. A
page that a server answers has links to the scripts instead: the browser keeps them, compiled, from text to text.
The content security policy of a page has the hash of the text, so nothing else can run.
"""

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from gzip import compress
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

from .text import json_for_script

VIEWS = (
    *("shared.js", "numbers.js", "plotly_drawing.js", "attention_weights.js", "token_words.js", "token_picker.js"),
    *("plotly_figure.js", "circuitsvis.js", "sentence.js", "graph.js"),
    *("map_pixels.js", "all_heads_words.js", "small_maps.js", "large_map.js", "all_heads.js"),
)
PAGE = (
    *("page_data.js", "page_numbers.js", "page_figures.js", "page_views.js", "page_tokens.js", "page_choices.js"),
    "page.js",
)
LIVE = ("live_address.js", "live.js")
"""The files of attnmech's own script, of the module of a page, and of that of a live page, in the order in which they
are joined."""

SHARED = (
    "MOST_ASPECT", "NO_VALUE", "announce", "checkbox", "codesOf", "colourOf", "contextOf", "counting", "drawPlotly",
    "headSelectors", "heaviestFirst", "inNextFrame", "isolated", "joined", "make", "makeSvg", "numbersIn", "onChange",
    "patternsIn", "patternsOf", "percent", "pointerBox", "range", "selector", "signed", "sizeCanvas", "slider",
    "suitBackground", "unpack", "unpackTexts",
)  # fmt: skip
"""The names in attnmech's own script that pages and the scripts of methods use."""


@dataclass(frozen=True)
class Script:
    """A script with the name under which it is stored."""

    label: str
    text: str

    @cached_property
    def name(self) -> str:
        """The label, and the first digits of the text's SHA-256: a changed text changes the name."""
        return f"{self.label}-{sha256(self.text.encode()).hexdigest()[:8]}"

    @cached_property
    def carrier(self) -> str:
        """The HTML element that carries the script."""
        packed = b64encode(compress(self.text.encode(), compresslevel=9, mtime=0)).decode("ascii")
        return f'<script type="text/plain" data-attnmech="{self.name}">{packed}</script>'

    @property
    def link(self) -> str:
        """The HTML element that has the browser fetch the script from the page's server."""
        source = f'href="scripts/{self.name}" integrity="{_digest(self.text)}"'
        return f'<link rel="preload" as="script" data-attnmech="{self.name}" {source}>'


CARTESIAN = frozenset(("bar", "box", "contour", "heatmap", "histogram", "histogram2d", "histogram2dcontour", "image"))
CARTESIAN |= {"pie", "scatter", "scatterternary", "violin"}
"""The types of traces that plotly.js's cartesian build draws."""


def plotly_for(types: Iterable[str]) -> Script:
    """Returns plotly.js for traces of these types: the cartesian build, a third of the size, if it draws them all."""
    return plotly() if CARTESIAN.issuperset(types) else whole_plotly()


@cache
def plotly() -> Script:
    """plotly.js's cartesian build, in the version that `.ci/plotly` fetched."""
    return Script("plotly", package_text("vendored/plotly-cartesian.min.js"))


@cache
def whole_plotly() -> Script:
    """The whole of plotly.js, in the version of plotly's Python package."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return Script("plotly", get_plotlyjs())


@cache
def circuitsvis() -> Script:
    """CircuitsVis's bundle."""
    bundle = files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text("utf-8")
    # A classic script's first `var` makes the bundle's name global; strict mode does not change that.
    return Script("circuitsvis", bundle)


@cache
def views() -> Script:
    """attnmech's own views."""
    style = f"const STYLE = {json_for_script(package_text('view.css'))};"
    shared = f"window.attnmech.shared = {{ {', '.join(SHARED)} }};"
    return Script("attnmech", _in_a_function(style, *map(package_text, VIEWS), shared))


@cache
def heads() -> Script:
    """The map of a page's heads."""
    return of_question("heads", (files(__package__).joinpath("heads.js"),))


@cache
def of_question(label: str, files: tuple[Traversable, ...]) -> Script:
    """The views that a method draws with its own scripts and styles; the scripts see `views` and SHARED."""
    seen = f"const {{ views, shared: {{ {', '.join(SHARED)} }} }} = window.attnmech;"
    return Script(label, _in_a_function(seen, *map(_added, files)))


def _in_a_function(*texts: str) -> str:
    """A script with names that no other script sees."""
    return "\n".join(("(() => {", '"use strict";', *texts, "})();", ""))


def _added(file: Traversable) -> str:
    """Returns a script unchanged, and a style as the line of script that adds it."""
    text = file.read_text("utf-8")
    is_style = file.name.endswith(".css")
    return f'document.head.append(make("style", {{ text: {json_for_script(text)} }}));' if is_style else text


@cache
def boot() -> str:
    """The few lines of script that unpack the other scripts."""
    return package_text("boot.js")


def content_policy(*scripts: str, reads_files: bool = False, reads_itself: bool = False, asks: bool = False) -> str:
    """Returns a content security policy under which only these scripts run and nothing is fetched.

    With `reads_files`, scripts that these load run too; with `reads_itself`, the page may open its own file in a frame;
    with `asks`, it may ask the server that it came from.
    """
    hashes = " ".join(f"'{_digest(script)}'" for script in scripts)
    loaded = " 'strict-dynamic'" if reads_files else ""
    framed = "frame-src 'self' file:; " if reads_itself else ""
    asked = "connect-src 'self'; form-action 'self'" if asks else "form-action 'none'"
    return (
        f"default-src 'none'; script-src {hashes}{loaded}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"{framed}base-uri 'none'; {asked}"
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def carriers(scripts: Iterable[Script]) -> str:
    """The HTML elements that carry these scripts."""
    return "".join(script.carrier for script in scripts)


def joined(names: Iterable[str]) -> str:
    """The texts of some files in this package, as one."""
    return "\n".join(map(package_text, names))


def package_text(name: str) -> str:
    """The text of a file in this package."""
    return files(__package__).joinpath(name).read_text("utf-8")
