"""Writes llms.txt and llms-full.txt beside the first page of the site: attnmech as text, for language models."""

import dataclasses
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from public_names import EVERY_RESULT, NOT_FOR_USERS, PAGES

import attnmech as am

START: Final = (Path(__file__).parent / "llms_start.md").read_text(encoding="utf-8")

TEXTS: Final = (
    "recipes/*.md", "command_line.md", "agents.md", "served.md", "head_types.md", "intervals.md", "claims.md",
    "how/*.md", "coming_from/*.md", "formulas.md", "truth.md", "published.md",
)  # fmt: skip
"""The pages of llms-full.txt, as they are written."""


def first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.:?](?= |$)", text)
    return (sentence[0] if sentence else text).rstrip(".:") + "."


def signature(name: str, thing: Any) -> str:
    """The names of the arguments, with their defaults."""
    parts, keyword_only = [], False
    for argument in inspect.signature(inspect.unwrap(thing)).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        if argument.kind is argument.VAR_KEYWORD:
            (options,) = get_args(argument.annotation) or (None,)
            parts += (
                [f"**{argument.name}"] if options is None else [f"{option}=…" for option in get_type_hints(options)]
            )
            continue
        star = "*" if argument.kind is argument.VAR_POSITIONAL else ""
        default = "" if argument.default is argument.empty else f"={argument.default!r}"
        parts.append(f"{star}{argument.name}{default}")
        keyword_only |= argument.kind is argument.VAR_POSITIONAL
    return f"am.{name}({', '.join(parts)})"


def members(kind: type) -> list[str]:
    """The fields, properties and methods of a class, with the axes of its tensors."""
    hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    own = [base for base in kind.__mro__ if re.match(r"attnmech\.(?!results\.result$)", base.__module__)]
    listed = []
    for name in dict.fromkeys((*hints, *(name for base in kind.__mro__ for name in vars(base)))):
        value = inspect.getattr_static(kind, name, None)
        from_us = any(name in vars(base) or name in getattr(base, "__annotations__", {}) for base in own)
        if name.startswith("_") or name.isupper() or name in NOT_FOR_USERS or not from_us:
            continue
        axes = getattr(hints.get(name), "dim_str", None)
        if isinstance(value, property):
            returned = str(inspect.signature(value.fget).return_annotation) if value.fget else ""
            found = re.search(r"""Tensor, ['"]([^'"]+)['"]""", returned)
            axes = found[1] if found else None
        if axes is not None:
            listed.append(f"{name} [{axes.strip()}]")
        elif inspect.isfunction(value):
            listed.append(f"{name}({', '.join(list(inspect.signature(value).parameters)[1:])})")
        elif isinstance(value, classmethod | staticmethod):
            listed.append(f"{kind.__name__}.{name}({', '.join(inspect.signature(getattr(kind, name)).parameters)})")
        else:
            listed.append(name)
    return listed


def result(name: str) -> str:
    """A class and its members in one line."""
    kind = attrgetter(name)(am)
    return f"- `{name}`: {first_sentence(kind)} Members: {', '.join(members(kind))}."


def short() -> str:
    """The calls, each with its arguments and what its result holds."""
    parts = [START.format(version=am.__version__, python="3.11 to 3.13"), "## What every result can do\n"]
    parts += [*(result(name) for name in EVERY_RESULT), ""]
    for question, pages in PAGES.items():
        parts.append(f"## {question}\n")
        for page, names in pages.items():
            for name in names:
                thing = attrgetter(name)(am)
                if inspect.isclass(thing) and issubclass(thing, Exception):
                    parts.append(f"- `am.{name}`: {first_sentence(thing)}")
                elif inspect.isclass(thing):
                    parts.append("  " + result(name))
                else:
                    link = f"[{name}](made/reference/{page}.html)"
                    parts.append(f"- {link}: `{signature(name, thing)}`: {first_sentence(thing)}")
        parts.append("")
    return "\n".join(parts)


def full(source: Path) -> str:
    """All pages and docstrings."""
    parts = [short()]
    for pattern in TEXTS:
        for path in sorted(source.glob(pattern)):
            parts.append(f"\n\n<!-- {path.relative_to(source)} -->\n{path.read_text(encoding='utf-8')}")
    parts.append("\n\n# Reference\n")
    for pages in PAGES.values():
        for names in pages.values():
            for name in names:
                thing = attrgetter(name)(am)
                heading = f"class am.{name}" if inspect.isclass(thing) else signature(name, thing)
                parts.append(f"\n## {heading}\n\n{inspect.getdoc(thing)}\n")
                if inspect.isclass(thing) and not issubclass(thing, Exception):
                    parts += [documented(thing, member) for member in vars(thing)]
    return "\n".join(filter(None, parts)) + "\n"


def documented(kind: type, name: str) -> str:
    """The docstring of a method or a property of a class."""
    value = inspect.getattr_static(kind, name)
    about = value.fget if isinstance(value, property) else value
    if name.startswith("_") or name in NOT_FOR_USERS or not inspect.isfunction(about) or not about.__doc__:
        return ""
    return f"### {kind.__name__}.{name}\n\n{inspect.getdoc(about)}\n"


def write(app: Any, failed: Exception | None) -> None:
    if failed is None and app.builder.format == "html":
        Path(app.outdir, "llms.txt").write_text(short(), encoding="utf-8")
        Path(app.outdir, "llms-full.txt").write_text(full(Path(app.srcdir)), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
