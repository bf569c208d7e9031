"""Links from docstrings to the papers that they cite and to sections of `docs/formulas.md`."""

import re
from functools import cache
from pathlib import Path
from typing import Final

FORMULAS: Final = Path(__file__).parents[1] / "formulas.md"

_ENTRY: Final = re.compile(r"^- (?P<names>[^:]+): .*?(?:\[[^]]+\]\((?P<url>[^)]+)\).*)?$", flags=re.M)

_SECTION: Final = re.compile(r"docs/formulas\.md#([\w-]+)")


@cache
def papers() -> dict[str, str]:
    """Each citation of the section "Papers" with its address, "" for a paper that is not online."""
    section = FORMULAS.read_text("utf-8").partition("\n## Papers\n")[2]
    return {name: entry["url"] or "" for entry in _ENTRY.finditer(section) for name in entry["names"].split(", ")}


@cache
def sections() -> dict[str, str]:
    """The anchor of each section with its title."""
    titles = re.findall(r"^## (.+)$", FORMULAS.read_text("utf-8"), flags=re.M)
    return {title.lower().replace(" ", "-"): title for title in titles}


def cited(text: str) -> set[str]:
    """The papers that a text names: "Michel et al. 2019", "Gower 1966", "Vig & Belinkov (2019)"."""
    name = r"[A-Z][\wø-]+(?: et al\.| & [A-Z][\wø]+)?"
    return {f"{authors} {year}" for authors, year in re.findall(rf"\b({name}),? \(?((?:19|20)\d\d)\b", text)}


def linked(text: str) -> str:
    """reStructuredText with a link at every paper and at every section of the formulas."""
    text = _SECTION.sub(lambda match: f"`{sections()[match[1]]} <../../formulas.html#{match[1]}>`__", text)
    return _citations().sub(_link, text)


def section_of(docstring: str | None) -> str | None:
    """The anchor that a module's docstring names first."""
    match = _SECTION.search(docstring or "")
    return match[1] if match else None


@cache
def _citations() -> re.Pattern[str]:
    names = [re.escape(name).replace(r"\ ", r"\s+") for name in papers() if papers()[name]]
    return re.compile(rf"(?<![\w`<])(?:{'|'.join(sorted(names, key=len, reverse=True))})\b")


def _link(match: re.Match[str]) -> str:
    name = " ".join(match[0].split())
    return f"`{name} <{papers()[name]}>`__"
