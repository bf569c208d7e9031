"""Updates the measured tables of README.md and docs/truth.md from the results that the benchmarks wrote.

    python benchmarks/tables.py

The `--json` file of a benchmark holds all figures and the printed tables. In these pages, the tables of
`benchmarks/results/NAME.json` replace the text between `<!-- results/NAME.json -->` and `<!-- end -->`; all other text
is written by hand. A test fails if the two differ.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PAGES: Final = (HERE / "README.md", HERE.parent / "docs" / "truth.md")
_MARKED: Final = re.compile(r"<!-- results/([\w.-]+) -->\n.*?<!-- end -->\n", re.DOTALL)
_NUMBER: Final = re.compile(r"[\d.,<> –-]*")
_ABOUT: Final = ("cpu", "cores", "load_average", "python")


def updated(pages: Sequence[str], results: Path = HERE / "results") -> list[str]:
    """The pages with their tables replaced.

    Raises `ValueError` for results that none of them shows.
    """
    named = {match[1] for text in pages for match in _MARKED.finditer(text)}
    unused = {path.name for path in results.glob("*.json") if _tables(path)} - named
    if unused:
        raise ValueError(f"no page has a place for {', '.join(sorted(unused))}; add <!-- results/NAME.json -->.")
    return [_MARKED.sub(lambda match: _section(match[1], results), text) for text in pages]


def _tables(path: Path) -> Sequence[Mapping[str, Any]]:
    return json.loads(path.read_text("utf-8")).get("tables", ())  # type: ignore[no-any-return]


def _section(name: str, results: Path) -> str:
    data = json.loads((results / name).read_text("utf-8"))
    parts = [_in_words(data), *map(markdown, data["tables"])]
    return f"<!-- results/{name} -->\n" + "\n\n".join(parts) + "\n<!-- end -->\n"


def _in_words(data: Mapping[str, Any]) -> str:
    """The machine and the packages, in one line."""
    if "note" in data:
        return str(data["note"])
    about, settings = data["machine"], data.get("settings", {})
    packages = [f"{name} {value}" for name, value in about.items() if name not in (*_ABOUT, "memory_gb")]
    shown = [f"{about['cores']} cores of {about['cpu']}", f"load average at the start {about['load_average']:.1f}"]
    shown += [f"{settings[name]} {name}" for name in ("threads", "repeats") if name in settings]
    return f"On {', '.join(shown)}; {', '.join(packages)}."


def markdown(table: Mapping[str, Any]) -> str:
    """A table with its title above and its caption below.

    >>> print(markdown({"title": "Steps", "columns": ["", "s"], "rows": [["attnmech", "1.5"]], "caption": ""}))
    **Steps**
    <BLANKLINE>
    |  | s |
    |---|---:|
    | **attnmech** | 1.5 |
    """
    columns, rows = table["columns"], table["rows"]
    right = [bool(rows) and all(_NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(columns))]
    lines = [_line(columns), "|" + "|".join("---:" if each else "---" for each in right) + "|"]
    lines += [_line([_bold(row[0]), *row[1:]]) for row in rows]
    above = [f"**{table['title']}**"] if table["title"] else []
    below = [table["caption"].replace("\n", "  \n")] if table["caption"] else []
    return "\n\n".join([*above, "\n".join(lines), *below])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bold(name: str) -> str:
    return f"**{name}**" if name.startswith("attnmech") else name


def main() -> None:
    """Writes the pages."""
    for path, text in zip(PAGES, updated([path.read_text("utf-8") for path in PAGES]), strict=True):
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
