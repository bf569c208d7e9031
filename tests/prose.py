"""Finds patterns of English that the project avoids.

Run on files or folders, it prints each place: `python tests/prose.py attnmech docs README.md`.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PATTERNS = {
    r"\bof which\b": "make two sentences, or say `whose`",
    r", whose [\w' -]{1,40} (is|are) (?!not|no )": "say who does what",
    r"\b[Ss]uch an? \w": "say which one",
    r"\bas many as\b": "the same number of",
    r"\beach twice\b": "repeated",
    r"\bstands? in for\b|\bstands? in (it|them)\b": "replaces; is listed in",
    r"\b(is|are) none of (these|them|the)\b|, which is none\b": "say what it is",
    r"\bat hand\b": "this, the current",
    r"\bof one's own\b": "your own; a separate",
    r"\bwhat cannot be\b": "say what fails",
    r"\bbear(s)? it\b": "accept it",
    r"\bthe (given|chosen|asked|named|found) (?=(of|in|at|are|is|and|to)\b)": "name the thing",
    r"\bwhat (\w+ ){1,3}(is|are) of\b": "name the thing",
    r"\bby the way of\b|\bsay it so\b": "say it plainly",
    r"\bone after the other\b": "in turn",
    r"\bthat of which\b|\bthose of which\b": "make two sentences",
    r"\bnothing but\b": "only",
    r"\bother than (this|these) ones?\b": "other",
    r"\bas (it|they) (is|are|was|were) at\b": "the state at",
    r"\b(refused|given|named|asked for) by name\b": "explicitly",
    r", less (a|an|the|its|their) \w": "minus",
    r"\bof like \w": "similar",
    r"\bof so many\b": "of that many",
    r"\bstands? (beside|above|below|apart|there)\b": "is beside; name the place",
    r"\bin (its|their) stead\b": "instead",
    r"\b(it|they|that) (is|are) of (its|their|them)\b": "make two sentences",
    r"\bdoes not have this\b|\bwhat lifts\b": "name the thing",
    r"\bwhere (it|they) bears?\b": "if it accepts",
    r"\bthan this (not|none)\b|\bnone but\b": "only",
    r"\b(otherwise|other) than words at such places\b": "say what differs",
    r"\b(that|which|who) (is|are) no (?!longer|more|less|better)\w": "is not a; are not",
    r"\AHow many\b": "The number of",
    r"\b(bits|bytes|ms|nats|seconds|µs) an? (document|head|layer|row|second|text|token|word)\b": "per",
    r"\blikeliest\b": "most probable",
    r"\bPoint at\b": "Hover over",
    r"\bwhat (\w+ ){0,2}looks? at\b": "attends to",
    r"\b(heads?|quer(y|ies)|rows?) looks? (at|back|there)\b": "attends to",
    r"\blast stream\b": "final stream",
    r"\bgives? what (it|they) gives?\b": "gives the same as",
    r"\bsomething else than\b": "does not do what",
    r"\bother \w+ than\b": "different from",
    r"\b(is|are) to be (seen|changed)\b|\bnot to be changed\b": "visible; must not change",
    r"\btakes? (\w+ ){1,3}in float32\b": "computes",
    r"\basked for\b": "requested",
    r"\bless (bytes|heads|keys|layers|rows|texts|tokens|words)\b": "fewer",
    r"\b(the|of|in|to|is|are|for|with|by|and|or) \1\b|\b([A-Z][a-z]+) \2\b": "a word stands twice",
    r'[a-z] " "[a-z]': "a joint of two strings within a string",
}
"""Regular expressions, each with what to write instead."""

EMPTY_NAMES = {"each", "found", "given", "told", "said", "about"}
"""Names of variables that do not say what they hold."""


class Place(NamedTuple):
    path: Path
    line: int
    words: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.advice}"


def places_in(path: Path) -> Iterator[Place]:
    """The places in a Python file (docstrings, comments, strings, names), a Markdown page or a notebook."""
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8")
        yield from _empty_names(path, source)
        yield from _questions(path, source)
        for line, text in _sentences(source):
            yield from _matches(path, line, text)
    elif path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        yield from _matches(path, 1, text)
    else:
        fenced = re.sub(
            r"```.*?```", lambda code: "\n" * code[0].count("\n"), path.read_text(encoding="utf-8"), flags=re.S
        )
        yield from _matches(path, 1, fenced)


def places_under(*roots: Path) -> list[Place]:
    """The places in files and folders, in the order of their paths."""
    paths = sorted(
        path
        for root in roots
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.suffix in (".py", ".md", ".ipynb")
    )
    return [place for path in paths for place in places_in(path)]


def _matches(path: Path, line: int, text: str) -> Iterator[Place]:
    for pattern, advice in PATTERNS.items():
        for match in re.finditer(pattern, text):
            words = " ".join(text[max(match.start() - 25, 0) : match.end() + 25].split())
            yield Place(path, line + text.count("\n", 0, match.start()), words, advice)


def _sentences(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings with their first line; of an f-string its literal parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _empty_names(path: Path, source: str) -> Iterator[Place]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield Place(path, node.lineno, node.id, "name what it holds")
        if isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield Place(path, node.lineno, node.arg, "name what it holds")


def _questions(path: Path, source: str) -> Iterator[Place]:
    """Docstrings that begin with a question: a docstring states."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        first = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
        if re.match(r"[^.:]*\?( |\)|$)", first):
            yield Place(path, node.body[0].lineno, first, "state it")


if __name__ == "__main__":
    sys.exit("\n".join(map(str, places_under(*map(Path, sys.argv[1:])))))
