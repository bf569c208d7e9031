"""The reference: a page for each group of public names, written from their docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from files import write_if_new
from papers import linked, section_of, sections

import attnmech as am
from attnmech import errors
from attnmech.maths.statistic import Statistic

QUESTIONS: Final = {
    "why": "Why does a head attend there?",
    "look": "Where do heads look?",
    "write": "What do heads write?",
    "matter": "Does it matter?",
    "heads": "Is it these heads?",
}
"""The questions of the reference, by the word after a call in `attnmech/__init__.pyi`."""

PAGES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Load and run": {
        "load": ("load", "untrained"),
        "HookedModel": ("HookedModel",),
        "Activations": ("results.Activations", "reducers.Batch"),
        "certify": ("certify", "results.Certificate"),
        "Intervention": ("Intervention", "results.Values", "mean_z"),
        "Circuit": ("Circuit",),
    },
    **{question: {} for question in QUESTIONS.values()},
    "Report, files, corpora, own statistics": {
        "report": ("report", "results.Report"),
        "explore": ("explore",),
        "atlas": ("atlas", "results.Atlas"),
        "load_result": ("load_result",),
        "Corpus": ("Corpus", "CorpusFiles"),
        "stream": (
            *("stream", "Reducer", "reducers.Run", "reducers.Source", "reducers.RowBlock", "reducers.LayerEnd"),
            "reducers.TextMeans",
        ),
        "Ray": ("Ray",),
    },
    "Models of your own": {
        "Architecture": (
            *(
                "Architecture",
                "architecture.Separate",
                "architecture.Fused",
                "architecture.Columns",
                "architecture.Rotary",
                "architecture.Alibi",
                "architecture.Gate",
                "architecture.NormGate",
            ),
            "architecture.PatchGrid",
        )
    },
    "Errors": {
        "errors": (
            "AttnmechError",
            *(f"errors.{name}" for name in vars(errors) if name.endswith("Error") and name not in am.__all__),
        )
    },
}
"""Each page with its names in `attnmech`, by question; `add_questions` adds those of `methods/`."""

EVERY_RESULT: Final = (
    "results.Result",
    "results.PagedResult",
    "results.Table",
    "results.Quantity",
    "results.TextResult",
)
"""What results share."""

CONSTRUCTED: Final = (
    "Architecture", "Case", "Columns", "Corpus", "CorpusFiles", "Fused", "Intervention", "PatchGrid", "Ray", "Rotary",
    "Separate", "Task", "Values",
)  # fmt: skip
"""Classes that a user makes; all others come out of a call, so their signatures are of no use."""

MODULES: Final = ("architecture", "errors", "reducers", "results")

NAMES: Final = {
    **{
        name: f"{module}.{name}"
        for module in MODULES
        for name in dir(getattr(am, module))
        if name[0].isupper() and not name.isupper()
    },
    **{name: name for name in am.__all__ if not inspect.ismodule(getattr(am, name))},
}
"""The module of `attnmech` that has each public name."""


def add_questions() -> None:
    """Adds a page for each call that has a question.

    A class is on the page of the first call that returns it, or that is in its file or folder; so is a further call
    that returns the class.
    """
    stub = Path(am.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    questions = dict(re.findall(r" as (\w+)  # (\w+)$", stub, flags=re.MULTILINE))
    calls = {name: getattr(am, name) for name in questions}
    listed = {name for pages in PAGES.values() for names in pages.values() for name in names}
    kinds = [name for name in NAMES.values() if name not in listed and inspect.isclass(attrgetter(name)(am))]
    kinds.sort(key=lambda name: not any(_returns(call, name) for call in calls.values()))
    homes = {name: home for name in kinds if (home := _home(attrgetter(name)(am), calls))}
    for name, call in calls.items():
        page = next((homes[kind] for kind in kinds if kind in homes and _returns(call, kind)), name)
        pages = PAGES[QUESTIONS[questions[name]]]
        pages[page] = (*pages.get(page, ()), name)
    for pages in PAGES.values():
        pages |= {page: (*names, *(kind for kind in kinds if homes.get(kind) == page)) for page, names in pages.items()}


def _returns(call: Any, name: str) -> bool:
    returned = str(inspect.signature(call).return_annotation)
    return bool(re.search(rf"\b{name.rpartition('.')[2]}\b", returned))


def _home(kind: type, calls: dict[str, Any]) -> str | None:
    """The first call that returns a class, or that is in its file or, otherwise, in its folder."""
    module, folder = kind.__module__, kind.__module__.rpartition(".")[0]
    near: tuple[Callable[[Any], bool], ...] = (
        lambda call: _returns(call, kind.__name__),
        lambda call: call.__module__ == module,
        lambda call: call.__module__.rpartition(".")[0] == folder,
    )
    return next((name for is_near in near for name, call in calls.items() if is_near(call)), None)


add_questions()

NOT_FOR_USERS: Final = frozenset(("numbers", "on_text", "lead", "by_head", "provenance", "parts"))
"""Members for pages and files, and those that all results share."""


def page_of(title: str, names: tuple[str, ...]) -> str:
    parts = [f"# {title}"]
    anchors = (section_of(inspect.getmodule(attrgetter(name)(am)).__doc__) for name in names)
    if anchor := next(filter(None, anchors), None):
        parts.append(f"The mathematics: [{sections()[anchor].lower()}](../../formulas.md#{anchor}).\n")
    for name in names:
        thing = attrgetter(name)(am)
        if not inspect.isclass(thing):
            directive = [f".. autofunction:: attnmech.{name}"]
        elif issubclass(thing, Exception):
            directive = [f".. autoexception:: attnmech.{name}"]
        else:
            directive = [f".. autoclass:: attnmech.{name}", "   :members:", "   :undoc-members:"]
            directive.append(
                "   :inherited-members: Result, PagedResult, WithQuantities, Table, TextResult, ABC, Mapping"
            )
        parts += ["```{eval-rst}", *directive, "```", ""]
        if inspect.isclass(thing) and hasattr(thing, "plot"):
            parts += ["```{figures} " + thing.__name__, "```", ""]
    return "\n".join(parts) + "\n"


def index() -> str:
    parts = [
        "# Reference",
        "",
        "Every public name, from its docstring: calls and what they are given in `attnmech`, what they return in",
        "`attnmech.results`. Most results also have `to_frame`, `plot`, `save`, `write_html` and a difference",
        "([results](results.md)).",
        "",
        "```{toctree}\n:hidden:\n\nresults",
        *(page for pages in PAGES.values() for page in pages),
        "```",
    ]
    for question, pages in PAGES.items():
        parts += ["", f"## {question}", "", "| | |", "|---|---|"]
        for page, names in pages.items():
            for name in names:
                parts.append(f"| [`{name}`]({page}.md) | {_first_sentence(attrgetter(name)(am))} |")
    return "\n".join(parts) + "\n"


RESULTS: Final = """# What every result can do

```{eval-rst}
.. autoclass:: attnmech.results.Result
   :members: by_head, save

.. autoclass:: attnmech.results.PagedResult
   :members: lead, to_html, write_html

.. autoclass:: attnmech.results.Table
   :members: __getitem__, quantities, to_frame, strongest, plot, interval, simultaneous,
      clear, clear_size, one_text, agreeing, note

.. autoclass:: attnmech.results.Quantity
   :members:

.. autoclass:: attnmech.results.TextResult
   :members: __sub__, parts, paired
```
"""


def write_pages(app: Any) -> None:
    folder = Path(app.srcdir) / "made" / "reference"
    write_if_new(folder / "index.md", index())
    write_if_new(folder / "results.md", RESULTS)
    for pages in PAGES.values():
        for page, names in pages.items():
            write_if_new(folder / f"{page}.md", page_of(page if page != "errors" else "Errors", names))


def _first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.:?](?= |$)", text)
    return (sentence[0].removesuffix(":") if sentence else text).replace("|", "\\|")


# -- what autodoc shows of them -----------------------------------------------------------------------------


def signature(_: Any, what: str, name: str, thing: Any, __: Any, text: Any, ___: Any) -> Any:
    """Signatures as in the source; none for classes that only a call makes."""
    if what == "class":
        shown = name.rpartition(".")[2] in CONSTRUCTED
        return (text if shown else "", None)
    if what in ("function", "method") and callable(thing):
        written, _, returned = str(inspect.signature(thing)).replace("' ", "'").rpartition(" -> ")
        text = re.sub(r",? \)$", ")", " ".join((written or returned).split()).replace("( ", "("))
        text = re.sub(r"^\((self|cls)(, )?", "(", text)
        return (text, " ".join(returned.split()) if written else None)
    return None


def docstring(_: Any, what: str, name: str, thing: Any, __: Any, lines: list[str]) -> None:
    """Docstrings as reStructuredText; a field or a property begins with its type and shape."""
    lines[:] = _as_rst(lines)
    if what in ("attribute", "property"):
        owner, _, field = name.rpartition(".")
        written = type_of(attrgetter(owner.removeprefix("attnmech."))(am), field)
        if isinstance(thing, Statistic):
            written = f"Float[Tensor, '{thing.axes}']" if thing.axes else "Tensor"
        if written:
            lines[:0] = [f"``{written}``", ""]


def type_of(kind: type, field: str) -> str:
    """A field's or a property's type as its class has it."""
    for base in kind.__mro__:
        if not base.__module__.startswith("attnmech"):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and ast.unparse(member.target) == field:
                return _bare(member.annotation)
            if isinstance(member, ast.FunctionDef) and member.name == field and member.returns is not None:
                return _bare(member.returns)
    return ""


def _bare(annotation: ast.expr) -> str:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return str(text).replace("' ", "'")


def _as_rst(lines: list[str]) -> list[str]:
    """Converts markup of docstrings that has another meaning in reStructuredText: code, bars, stars, tables."""
    text = "\n".join(line if _is_verbatim(line) else _escaped(line) for line in lines)
    return _without_tables(linked(re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", _code, text)).split("\n"))


def _is_verbatim(line: str) -> bool:
    return bool(re.match(r"\s*(>>>|\.\.\. |\|)", line))


def _escaped(line: str) -> str:
    pieces = re.split(r"(`[^`]*`)", line)
    return "".join(
        piece if number % 2 else re.sub(r"([|*])", r"\\\1", re.sub(r"(\w)_(?=\W|$)", r"\1\\_", piece))
        for number, piece in enumerate(pieces)
    )


def _code(quoted: re.Match[str]) -> str:
    """Code in backticks, as a link where it is one public name, with or without its module."""
    code, after = " ".join(quoted[1].split()), f"\\ {quoted[2]}" if quoted[2] else ""
    first, _, member = re.sub(rf"^(am\.)?(({'|'.join(MODULES)})\.)?", "", code).partition(".")
    name = NAMES.get(first)
    if name is not None and (not member or hasattr(attrgetter(name)(am), member)):
        return f":py:obj:`{code} <{'.'.join(filter(None, ('attnmech', name, member)))}>`{after}"
    return f"``{code}``{after}"


def _without_tables(lines: list[str]) -> list[str]:
    """Markdown's tables as literal blocks."""
    literal: list[str] = []
    inside = False
    for line in lines:
        table = bool(re.match(r"^\s*\|", line))
        if table and not inside:
            literal += ["::", ""]
        if table and re.fullmatch(r"\s*[|\-]+", line):
            continue
        literal.append(f"   {line}" if table else line)
        inside = table
    return literal


def skip(_: Any, what: str, name: str, thing: Any, skipped: bool, __: Any) -> bool | None:
    return True if what == "class" and (name in NOT_FOR_USERS or name.isupper()) else None


def setup(app: Any) -> dict[str, int]:
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip)
    # Pages that were read with another version of this file are read again.
    version = crc32(Path(__file__).read_bytes())
    return {"env_version": version, "parallel_read_safe": True, "parallel_write_safe": True}
