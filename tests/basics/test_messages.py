"""Warnings point at the user's line; messages have no unfilled braces."""

import ast
import builtins
import io
import re
import tokenize
from pathlib import Path
from typing import Any, Final

import models
import pytest
import transformers

import attnmech as am
from attnmech.basics.messages import warn_user


def test_a_warning_points_at_the_line_outside_the_package() -> None:
    within: dict[str, Any] = {"__name__": "attnmech.runs.deep", "warn": warn_user.__wrapped__}  # type: ignore[attr-defined]
    exec("def inner(): warn('Mind the gap.', FutureWarning)\ndef call(): inner()", within)
    with pytest.warns(FutureWarning, match="Mind the gap") as record:
        within["call"]()
    assert record[0].filename == __file__


def test_a_warning_at_top_level_of_the_package_does_not_fail() -> None:
    with pytest.warns(UserWarning, match="Mind"):
        warn_user("Mind the gap.")


SLOTS: Final = {"figure", "head", "layer", "measure", "split", "weight", "y"}
"""The names that pages, or the users' templates, fill in plain strings."""


def bound_in(tree: ast.AST) -> set[str]:
    """The names that a function or a module binds anywhere."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def unfilled(source: str) -> list[str]:
    """The braces in parts of strings without an f that name something of the function around them."""
    if "{" not in source:
        return []
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    imported = {
        alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    known = {
        *dir(builtins),
        *bound_in(tree),
        *imported,
        "shown",
        "percent",
    }  # forgotten imports of these are faults too
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    docstrings = {node.lineno for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        plain = token.type == tokenize.STRING and "f" not in token.string.partition(token.string[-1])[0].lower()
        if not plain or "{" not in token.string or token.start[0] in docstrings:
            continue
        for braces in re.finditer(r"(?<!%)\{([^{}]+)\}", token.string):  # %{…} is plotly's
            try:
                names = {node.id for node in ast.walk(ast.parse(f'f"""{braces[0]}"""')) if isinstance(node, ast.Name)}
            except SyntaxError:
                continue
            around = [node for node in functions if node.lineno <= token.start[0] <= (node.end_lineno or 0)]
            local = set().union(*map(bound_in, around))
            if names & local and names <= known | local and names - SLOTS:
                found.append(f"line {token.start[0]}: {braces[0]}")
    return found


def test_no_plain_string_has_braces_that_an_f_string_would_fill() -> None:
    example = '''def f(top, head):
    """{top}"""
    return f"{{top}} {top} {head}" "{top} {head} {other} %{top}" "{shown(top)} {top:.2f} {'layer': top}"
'''
    assert unfilled(example) == ["line 3: {top}", "line 3: {shown(top)}", "line 3: {top:.2f}"]
    package = Path(am.__file__).parent
    found = {str(path): unfilled(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    assert len(found) > 300 and {path: braces for path, braces in found.items() if braces} == {}


def test_one_thing_is_singular() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=32, vocab_size=40)
    model, ids = (
        am.load(transformers.GPT2LMHeadModel(config)),
        models.token_ids("gpt2", batch=1, length=7).clamp(max=39),
    )
    results = (
        am.attention_focus(model, ids), am.residual_updates(model, ids), am.null_attention(model, ids),
        am.ablate_heads(model, ids), am.head_importance(model, ids), am.examples(model, ids), am.head_types(model, ids),
        am.odd_heads(model, ids), am.prune_heads(model, ids), am.joint_embedding(model, ids),
        am.trajectory([model, model], lambda model: am.attention_focus(model, ids)),
        am.compare(model, model, ids, am.attention_focus),
    )  # fmt: skip
    sentences = [repr(model), *map(repr, results), *(result.lead for result in results)]
    assert [text for text in sentences if re.search(r"\b1 (heads|layers|texts|tokens|measurements)\b", text)] == []
