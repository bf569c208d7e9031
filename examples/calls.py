"""Writes what `tests/matrix.py` finds: the page of calls by family, and the docs' table of models."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import matrix
from matrix import Row

PAGE: Final = Path(__file__).with_suffix(".md")
MODELS: Final = Path(__file__).parents[1] / "docs" / "how" / "models.md"
BEGIN: Final = "<!-- made by `python examples/architectures.py --calls` -->"
END: Final = "<!-- end -->"

ABOUT: Final = """# Calls

Every public call, tried on a small random model of each family that the docs name. Made by
`python examples/architectures.py --calls`; `tests/test_matrix.py` makes every call again on some model of each row
and compares.

**{cells} cells: {works} work, {refused} are refused, by an error of attnmech that gives the reason (the notes below).**

A call that is not listed works. In a model with several stacks, calls about one stack are tried on each.
`by_wavelength` is for rotary models. The calls are {calls}.
"""

OWN_SUBJECT: Final = ("by_wavelength",)
"""Calls about a property that most families lack; the table does not list them."""

BEYOND: Final = {
    "decoders": "rotary `q_rot`, `k_rot`; soft caps and sinks; sliding windows; "
    "factors of what attention and MLP add to the stream",
    "… with a position term": "the term `position`, as in T5",
    "… with latents or gates": "`latent`; `gate`",
    "mixtures of experts": "as decoders",
    "hybrids": "layers with attention; `mixer_out` if another mixer runs in parallel",
    "attention alone": "all points of attention",
    "encoders": "a layer for each use of shared weights (ALBERT)",
    "disentangled attention": "the terms `content_to_position`, `position_to_content`",
    "encoder-decoders": "stacks `encoder`, `decoder`, `cross`; figures over two texts; `generate` step by step",
    "long texts": "windows by layer, global tokens with separate projections, hidden keys never computed; "
    "`global_mass` of `am.attention_focus`",
    "images": "patches by row and column, the picture under a row's attention",
    "sound": "frames by time, the spectrogram under a row's attention",
}
ABSENT: Final = {
    "decoders": "attention over an indexer's keys (DeepSeek-V3.2), differential attention",
    "mixtures of experts": "experts with a capacity (NLLB-MoE)",
    "hybrids": "layers without attention, which are named; models without any (Mamba, RWKV)",
    "attention alone": "the points of the stream",
    "encoders": "convolutions beside attention (ConvBERT), pooled positions (Funnel)",
    "encoder-decoders": "merged attention (T5Gemma 2), several streams (ProphetNet)",
    "long texts": "attention to random blocks (BigBird's `block_sparse`; with `original_full` it is read), to "
    "hashed keys (Reformer)",
    "images": "shifted windows (Swin), randomly dropped patches (ViT-MAE), stages of several sizes",
    "sound": "gated position bias (WavLM)",
}


def measured() -> dict[str, Row]:
    """Makes every call on every family, with one process per core; takes some minutes."""
    kinds = list(matrix.models_of_all())
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return dict(zip(kinds, pool.map(_row, kinds), strict=True))


def _row(kind: str) -> Row:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return matrix.row_of(matrix.models_of_all()[kind], Path(folder))


def page(rows: Mapping[str, Row]) -> str:
    """The page of all families, with each reason as a note below the table."""
    notes = list(dict.fromkeys(why for row in rows.values() for why in row.refused.values()))
    total, refused = sum(row.cells for row in rows.values()), sum(len(row.refused) for row in rows.values())
    calls = ", ".join(f"`{name}`" for name in matrix.CALLS)
    lines = [ABOUT.format(cells=total, works=total - refused, refused=refused, calls=calls)]
    lines += ["| family | model type | cells | refused |", "| --- | --- | --: | --- |"]
    for members in matrix.FAMILIES.values():
        for name, kinds in members.items():
            lines += [f"| {name} | {kind} | {rows[kind].cells} | {_refused(rows[kind], notes)} |" for kind in kinds]
    numbered = [f"{number}. {why}" for number, why in enumerate(notes, 1)]
    return "\n".join([*lines, "", *numbered, ""])


def _refused(row: Row, notes: list[str]) -> str:
    """The refused calls, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for call, why in row.refused.items():
        by_reason.setdefault(why, []).append(_code(call))
    return "; ".join(f"{', '.join(calls)} [{notes.index(why) + 1}]" for why, calls in by_reason.items()) or "–"


def _code(call: str) -> str:
    name, _, stack = call.partition(" (")
    return f"`{name}` ({stack}" if stack else f"`{name}`"


def stored() -> dict[str, Row]:
    """The rows of the current page."""
    text = PAGE.read_text("utf-8")
    notes = dict(re.findall(r"^(\d+)\. (.+)$", text, flags=re.MULTILINE))
    rows = {}
    for line in text.splitlines():
        parts = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if len(parts) == 4 and parts[2].isdigit():
            rows[parts[1]] = Row(int(parts[2]), dict(_calls(parts[3], notes)))
    return rows


def listed() -> set[str]:
    """The calls of the current page; later ones are not on it until it is made again."""
    (calls,) = re.findall(r"The calls are (.+)\.$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return set(re.findall(r"`(.+?)`", calls))


def _calls(cell: str, notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for calls, number in re.findall(r"(.+?) \[(\d+)\](?:; |$)", "" if cell == "–" else cell):
        for name, stack in re.findall(r"`(.+?)`( \(\w+\))?", calls):
            yield name + stack, notes[number]


# -- the table --------------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Row]) -> str:
    """The table of models: a row per group of families, with the calls that are refused."""
    lines = [
        "| models | for example | beyond the points and terms of all | calls refused | absent, or refused at load |"
    ]
    lines += ["|---|---|---|---|---|"]
    for title, members in matrix.FAMILIES.items():
        cells = (title, ", ".join(members), BEYOND[title], _of_group(members, rows), ABSENT.get(title, ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_group(members: Mapping[str, Mapping[str, object]], rows: Mapping[str, Row]) -> str:
    """The calls that every name of a group refuses, then those that some refuse, with their names."""
    refusing: dict[str, list[str]] = {}
    for name, kinds in members.items():
        for call in dict.fromkeys(call for kind in kinds for call in _summary(rows[kind])):
            refusing.setdefault(call, []).append(name)
    by_names: dict[tuple[str, ...], list[str]] = {}
    for call, names in refusing.items():
        if refusing.get(call.partition("(")[0] + "`") != names:  # no variant is listed for a refused call
            by_names.setdefault(tuple(names), []).append(call)
    whole = by_names.pop(tuple(members), None)
    parts = [] if whole is None else [", ".join(whole)]
    return "; ".join([*parts, *(f"{', '.join(names)}: {', '.join(calls)}" for names, calls in by_names.items())])


def _summary(row: Row) -> Iterator[str]:
    """The refused calls as the table lists them, without calls that another stack of the model accepts."""
    for call in matrix.CALLS:  # these have names without a stack
        if "without a head" in (why := row.refused.get(call, "")):
            yield "without a head: all that needs logits"
        elif why and call not in OWN_SUBJECT:
            yield f"`{call}`"


def with_table(rows: Mapping[str, Row], text: str) -> str:
    """A page with its table of models replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def write() -> None:
    """Writes the page and the docs' table."""
    rows = measured()
    PAGE.write_text(page(rows), encoding="utf-8")
    MODELS.write_text(with_table(rows, MODELS.read_text("utf-8")), encoding="utf-8")
