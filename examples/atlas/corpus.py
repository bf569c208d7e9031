"""Writes a corpus of English that every machine with Python has: the paragraphs of Python's own documentation.

python examples/atlas/corpus.py corpus.txt
attnmech atlas --model MODEL --file corpus.txt --truncate --out atlas
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

LEAST = 200
"""The least length of a paragraph, in characters."""

MOST = 2000
"""The number of paragraphs."""


def docstrings() -> Iterator[str]:
    """The docstrings of the standard library's modules, without its tests, in the order of their paths."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "lib2to3"}.isdisjoint(path.relative_to(library).parts):
            try:
                tree = ast.parse(path.read_text("utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            for node in ast.walk(tree):
                if isinstance(node, documented):
                    yield ast.get_docstring(node) or ""


def paragraphs(count: int = MOST) -> list[str]:
    """Different paragraphs of running text, without those that contain code of a console."""
    texts = chain(topics.values(), docstrings())
    parts = (" ".join(part.split()) for text in texts for part in text.split("\n\n"))
    running: dict[str, None] = {}
    for text in parts:
        if len(running) == count:
            break
        if len(text) >= LEAST and ">>>" not in text:
            running[text] = None
    return list(running)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(paragraphs()) + "\n", encoding="utf-8")
