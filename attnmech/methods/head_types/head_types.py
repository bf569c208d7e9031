"""Scores every head for every type, against a baseline that does not depend on the tokens.

Formulas: docs/formulas.md#head-types.

A type is claimed if the attention on its targets exceeds the baseline, by an interval that holds for all heads and
types together, and is not trivially small.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import Any, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ...basics.arguments import index_of, whole_number
from ...basics.nouns import bracketed, counted
from ...basics.public import public
from ...draw.chart import Chart
from ...draw.embed import View
from ...draw.scripts import of_question
from ...draw.section import Section
from ...draw.text import percent, signed, visible_token
from ...errors import InputError
from ...maths.intervals import LEAST_TEXTS
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.table import framed, require_one_figure
from ...runs.ablations import checked_seed
from ...runs.haystacks import Haystacks
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.retrieval import NeedleRows, Retrieval, repeated_sequences
from ...runs.stream import stream
from ...runs.words import texts_by_id
from .figures import letter_of, types_map
from .formulas import ANSWERED, POSITIONAL, TYPES
from .sums import AROUND_KEY, HeadTypeSums
from .type_scores import TRIVIAL_MASS, ByType, TypeScores

SCRIPT: Final = of_question("head_types", tuple(files(__package__) / name for name in ("atlas.js", "atlas.css")))
"""The script that draws the table."""

COLUMNS = ("head", "type", "score", "baseline", "above baseline", "writes", "copying", "example")
"""The columns of the table. The section's text gives the units."""


BROAD: Final = 0.8  # an unclaimed head is broad if its rows' entropy is at least this share of uniform attention's

RESTING: Final = ("first", "self")
"""The types of heads that attend to nothing in particular. Examples show one of these only if there is no other type.
"""


@public
def head_types(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs] | None = None,
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    seed: int = 0,
    context: int = 0,
    **options: Unpack[StreamOptions],
) -> "HeadTypes":
    """Finds the type of each head: previous token, induction, duplicate token, first token, delimiters, fixed offsets.

    >>> import attnmech as am
    >>> types = am.head_types(am.load())
    >>> types.types_of(2, 6)
    ('induction',)

    The score of a type is Σ_j∈targets p_ij, averaged over the rows that have a target. For types that depend on tokens,
    the baseline is the share that the head's mean attention by distance would put on the same keys; for types that
    depend on position alone, it is the share that uniform attention would put there. A type is claimed if the
    simultaneous 95 % interval of score − baseline over texts, for all heads and types together, is above 0, and either
    the score is at least 0.3 or a target is the highest key in at least half of the rows. A head can have several
    types. The result also measures what a head writes from its targets (`writes`, `copying`) and how well QK matches
    them (`matching`).

    With `context`, heads may also have the type "retrieval" (Wu et al. 2024): the share of the needles' tokens that
    they retrieve is above that of their highest keys with the needle elsewhere, and is at least 0.1.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus); only sums are stored. By default 24 repeated sequences of
            random tokens, of different lengths, with no structure except position and repetition.
        layers: all by default; `writes` needs the last layer.
        stack: "encoder" or "decoder" in a model with several stacks.
        seed: seed of the random tokens.
        context: the length in tokens of 24 further texts, on which the type "retrieval" is measured; 0 for none. Each
            has random tokens around a needle of 12 tokens, and repeats the needle's first 4 at its end. A head
            retrieves one of the other 8 if the model produces it while the head attends most to it in the needle.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Scores, baselines and claims of every head: `to_frame` lists the claims, `by_head` lists the heads, and `plot`
        maps the types.

    Raises:
        InputError: for cross-attention, where queries and keys are different tokens; for the decoder of an
            encoder-decoder model without `inputs`; for `context` in a model that is not a decoder alone.

    """
    require_model(model)
    label = model.stack(stack).label
    if label == "cross":
        raise InputError("head types need self-attention: in cross-attention, queries and keys are different tokens.")
    generated = inputs is None
    if generated and label == "decoder":
        raise InputError(
            "random tokens are generated for the encoder only; give `inputs` with what the decoder reads: "
            'iter([{"input_ids": ..., "decoder_input_ids": ...}, ...]).'
        )
    seed, context = checked_seed(seed), whole_number("context", context)
    haystacks = Haystacks.of(model, context, seed) if context else None
    texts = repeated_sequences(model, seed=seed) if inputs is None else inputs
    result: HeadTypes
    reducer = HeadTypesReducer(generated)
    (result,) = stream(model, texts, [reducer], layers=layers, stack=stack, **options)
    if haystacks is None:
        return result
    rows: State
    reducers = [NeedleRows(haystacks.rows, haystacks.keys)]
    (rows,) = stream(model, iter(haystacks), reducers, layers=layers, stack=stack)
    return replace(result, retrieval=Retrieval.of(context, haystacks.produced(model), rows["highest"], haystacks.keys))


@dataclass(frozen=True)
class HeadTypesReducer(HeadTypeSums):
    """Collects the sums from which `HeadTypes` is computed."""

    def finish(self, state: State, source: Source) -> "HeadTypes":
        """The result, with its examples' tokens as strings."""
        tokens = texts_by_id(source.model, state["example_ids"], source.stack.label)
        return HeadTypes.of(state, source, generated=self.generated, tokens=tokens)


@dataclass(frozen=True)
class Example:
    """The row of a head's attention that shows a type most clearly."""

    type: str
    document: int  # the number of the text that contains the row
    query: int
    key: int  # the position of the target that receives most of the row's attention
    weight: float  # the attention that this key receives
    above: float  # the attention that the row's targets receive, minus what uniform attention would give them
    before: tuple[str, ...]  # the tokens up to and including the query
    around: tuple[str, ...]  # the tokens around the key
    key_at: int  # the index of the key in `around`

    def __str__(self) -> str:
        return f"{''.join(self.before)} → {''.join(self.around[: self.key_at])}[{self.around[self.key_at]}]"


@dataclass(frozen=True, repr=False)
class HeadTypes(TypeScores):
    """The share of each head's attention on the targets of every type, and the types that are claimed.

    Scores are shares from 0 to 1, by type and then `[layer head]`; NaN if no row has a target of that type.
    """

    _TITLE = "Types of heads in {model}"
    _SUBTRACT = 'subtract what you compare: one.scores["induction"] - other.scores["induction"]'
    _STRINGS = ("tokens",)

    generated: bool
    """Whether the texts are repeated random tokens."""
    tokens: Mapping[int, str]
    """The strings of the examples' tokens, by id."""
    retrieval: Retrieval | None = None
    """Retrieval from long texts; None without `context`."""

    def _merge(self, one: State, other: State) -> State:
        return HeadTypesReducer(self.generated).merge(one, other)

    @cached_property
    def scores(self) -> ByType:
        """The mean attention on the targets of each type, over the rows with a target; `"broad"` is `breadth`, and
        `"retrieval"` the share of the needles' tokens that a head retrieves, if `context` was given.
        """
        if self.retrieval is None:
            return super().scores
        return ByType({**super().scores, "retrieval": self._of_all(self.retrieval.share)})

    @cached_property
    def _claims(self) -> pd.DataFrame:
        if self.retrieval is None:
            return super()._claims
        both = [super()._claims, self.retrieval.claims(self.layers)]
        frame = pd.concat([claims for claims in both if len(claims)] or both[:1])
        return frame.sort_values("score", ascending=False, ignore_index=True)

    def example_of(self, layer: int, head: int) -> Example | None:
        """Returns the row that shows a head's type most clearly. The type is the head's first claimed type, or the one
        nearest to a claim; the row is the one whose targets receive most attention above what uniform attention would
        give them.
        """
        measured = self._place_of(layer)
        head = index_of("head", head, self._heads, f"this model has {self._heads} heads per layer")
        types = [kind for kind in self.types_of(layer, head) if kind in TYPES]
        claimed = [kind for kind in types if kind not in RESTING] or types
        above = self.state["example"][:, measured, head]
        means = self._excess.mean[:, measured, head].nan_to_num(-torch.inf)
        place = TYPES.index(claimed[0]) if claimed else int(means.argmax())
        if not torch.isfinite(above[place]):
            return None
        document, query, key = self.state["example_at"][place, measured, head].tolist()
        ids = self.state["example_ids"][place, measured, head].tolist()
        around, before = ids[: len(AROUND_KEY)], ids[len(AROUND_KEY) :]
        shown = [token for token in around[: -AROUND_KEY.start] if token >= 0]
        return Example(
            type=TYPES[place],
            document=document,
            query=query,
            key=key,
            weight=float(self.state["example_weight"][place, measured, head]),
            above=float(above[place]),
            before=tuple(self.tokens[token] for token in before if token >= 0),
            around=tuple(self.tokens[token] for token in around if token >= 0),
            key_at=len(shown),
        )

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws the atlas: layers × heads, with each head's highest-scoring claimed type; returned, not shown."""
        require_one_figure(figure)
        return framed(self._map({}), self.layers, layer, head)

    def _map(self, effects: Mapping[tuple[int, int], float]) -> "go.Figure":
        masses = {name: score[list(self.layers)].numpy() for name, score in self.scores.items()}
        types = [[(*self.types_of(layer, head), "")[0] for head in range(self._heads)] for layer in self.layers]
        return types_map(types, masses, self.layers, effects)

    @property
    def _texts(self) -> str:
        if self.generated:
            return f"{self.documents} repeated sequences of random tokens"
        return super()._texts

    @property
    def lead(self) -> str:
        heads = len(self.layers) * self._heads
        if len(self.state["groups"]) < LEAST_TEXTS:
            return (
                f"No type is claimed for any of {counted(heads, noun='head')} {bracketed(self._texts)}: a claim needs "
                f"{LEAST_TEXTS} texts or more."
            )
        count = self._claims.type.value_counts()
        if count.empty:
            return f"No type is claimed for any of {counted(heads, noun='head')} {bracketed(self._texts)}."
        (first, most), *others = (
            (_IN_WORDS[str(kind)] if number > 1 else _OF_ONE[str(kind)], number) for kind, number in count.items()
        )
        sentence = ", ".join(
            (f"{most} of {counted(heads, noun='head')} {first}", *(f"{number} {words}" for words, number in others))
        )
        needles = ""
        if self.retrieval is not None and "retrieval" in count:
            needles = f"; retrieval on {len(self.retrieval.produced)} texts of {self.retrieval.context} tokens"
        return f"{sentence} {bracketed(f'{self._texts}{needles}')}."

    @property
    def example(self) -> tuple[int, int] | None:
        """The layer and head of the largest claim, preferably of a type other than "self" and "first"."""
        claims = self._claims
        moving = claims[~claims.type.isin(RESTING)]
        chosen = moving if len(moving) else claims
        return (int(chosen.layer.iloc[0]), int(chosen["head"].iloc[0])) if len(chosen) else None

    def on_text(self) -> str:
        """Describes how heads attend to the delimiters, images and sounds of a single text, without a claim; empty
        without them.
        """
        if self.documents != 1:
            return ""
        sentences = []
        for name in _PLURAL:
            score = self.scores[name]
            if bool(score.isnan().all()):
                continue
            layer, head = divmod(int(self.excess[name].nan_to_num(-1).argmax()), score.shape[1])
            mass, baseline = float(score[layer, head]), float(self.baselines[name][layer, head])
            share = f"{percent(mass, 0)} of its attention (distance alone: {percent(baseline, 0)})"
            sentences.append(f"L{layer}H{head} gives {_PLURAL[name]} {share}")
        return f"In this text, {'; '.join(sentences)}. One text supports no claim." if sentences else ""

    @property
    def _letters(self) -> Mapping[str, tuple[str, str]]:
        return {name: letter_of(name) for name in self.scores}

    def _sections(self, effects: Mapping[tuple[int, int], float] | None = None) -> "Sequence[Section]":
        # The table of all heads, which the reader can sort by a click on a column and filter by type.
        intervals = {name: self[name].simultaneous() for name in TYPES if name in self.scores}
        rows = [self._row(layer, head, intervals) for layer in self.layers for head in range(self._heads)]
        types = list(dict.fromkeys(name for row in rows for name in row["types"]))
        named = sorted({*types, *(row["nearest"] for row in rows)} - {""})
        data = {"columns": COLUMNS, "rows": rows, "types": types, "letters": {name: letter_of(name) for name in named}}
        return [
            Section(
                "All heads by type",
                "Each cell is one head, with the letter of its highest-scoring claimed type. Cells without a claim "
                "are empty. The hover box shows the scores of all types. A type is claimed if its score is above the "
                "baseline by an interval that holds for all heads and types together, and either the score is at "
                "least 0.3 or a target is the highest key in half of the rows."
                + ("" if self.retrieval is None else _RETRIEVAL.format(self.retrieval.context)),
                {"types": self._map(effects or {})},
                "types.plot()",
            ),
            Section(
                "Every head, with its clearest example",
                "Sort by a column, or show a single type. A pale type is not claimed; it is the type nearest to a "
                "claim. The example is the row whose targets receive most attention above uniform attention; its "
                "query is underlined and its key is boxed. Above baseline: the interval of score − baseline, for all "
                "heads and types together. Writes: what the head adds to the answer's logit through its targets, for "
                "duplicates and induction. Copying: how highly what the head writes from a key ranks that key's own "
                "token among the tokens of the text, from 0 to 1 (0.5 by chance).",
                {"atlas": View("atlas", "All heads", "", data, (SCRIPT,))},
                "types.by_head()",
            ),
        ]

    def _page_sections(self, effects: Mapping[tuple[int, int], float] | None = None) -> "Sequence[Section]":
        types, *rest = self._sections(effects)
        chart = Chart(self._map(effects or {}), (), clicks={"layer": "customdata.0", "head": "customdata.1"})
        return [replace(types, figures={"types": chart}), *rest]

    def _row(self, layer: int, head: int, intervals: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """A head's row of the table: the numbers of its first claimed type, or of the one nearest to a claim."""
        example, types, name = self.example_of(layer, head), self.types_of(layer, head), f"L{layer}H{head}"
        kind = example.type if example is not None else next(filter(TYPES.__contains__, types), "")
        of_kind = (self.scores[kind], self.baselines[kind], *intervals[kind]) if kind else ()
        score, baseline, low, high = (float(values[layer, head]) for values in of_kind) if kind else [math.nan] * 4
        writes = float(self.writes[kind][layer, head]) if kind in ANSWERED else math.nan
        copying = float(self.copying[layer, head])
        broad = not types and float(self.breadth[layer, head]) >= BROAD
        return {
            "name": name,
            "types": ["broad"] if broad else list(types),
            "nearest": kind,
            "cells": [
                name,
                "",
                _number(score, ".3f"),
                _number(baseline, ".3f"),
                "" if math.isnan(low) else f"{signed(low, '.2f')} to {signed(high, '.2f')}",
                "" if math.isnan(writes) else signed(writes, ".1f"),
                _number(copying, ".2f"),
            ],
            "values": [
                layer * 100_000 + head,
                None,
                *(None if math.isnan(value) else value for value in (score, baseline, low, writes, copying)),
            ],
            "example": None
            if example is None
            else {
                "before": [visible_token(token) for token in example.before],
                "around": [visible_token(token) for token in example.around],
                "key_at": example.key_at,
                "weight": percent(example.weight, 0),
                "distance": example.query - example.key,
            },
        }


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


_IN_WORDS: Final = {
    "previous": "attend to the previous token",
    "next": "attend to the next token",
    "self": "attend to the token itself",
    **{kind: f"attend {kind.split()[0]} tokens back" for kind in POSITIONAL if kind.endswith("back")},
    "first": "attend to the first token",
    "sentence end": "attend to ends of sentences",
    "comma": "attend to commas",
    "special": "attend to special tokens",
    "media": "attend to images or sounds",
    "duplicate": "attend to copies of the token",
    "induction": "continue repeated text",
    "retrieval": "retrieve needles from long texts",
}

_OF_ONE: Final = {
    kind: words.replace("attend ", "attends ").replace("continue ", "continues ").replace("retrieve ", "retrieves ")
    for kind, words in _IN_WORDS.items()
}

_RETRIEVAL: Final = (
    " Retrieval is measured on other texts, of {} tokens: the share of a needle's tokens that the model produces while "
    "the head attends most to them."
)

_PLURAL: Final = {
    "sentence end": "ends of sentences",
    "comma": "commas",
    "special": "special tokens",
    "media": "images and sounds",
}


def types_section(
    types: HeadTypes, call: str, *, effects: Mapping[tuple[int, int], float] | None = None, sentence: str = ""
) -> Section:
    """The atlas, for a page where the reader chooses a head; with the effects of ablating heads, if known."""
    made = types._page_sections(effects)[0]
    return replace(
        made, finding=" ".join(filter(None, (types.lead, sentence))), call=f"{call}.plot()", contents="Types of heads"
    )


def top_scores(types: HeadTypes, layer: int, head: int) -> str:
    """Lists a head's three highest scores in words: "induction 0.93, previous 0.04".

    >>> import attnmech as am
    >>> top_scores(am.head_types(am.load()), 2, 6).split(",")[0]
    'induction 0.96'
    """
    scores = {name: float(types.scores[name][layer, head]) for name in types.scores if name != "broad"}
    known = [name for name in scores if scores[name] == scores[name]]
    best = sorted(known, key=lambda name: -scores[name])[:3]
    return ", ".join(f"{name} {scores[name]:.2f}" for name in best)


def why_unclaimed(types: HeadTypes, layer: int, head: int) -> str:
    """Says why a head without a claim has none: what its highest score lacks.

    >>> import attnmech as am
    >>> why_unclaimed(am.head_types(am.load()), 0, 2).split(",")[0]
    'No type is claimed: previous (0.13) is above its baseline'
    """
    known = {name: float(types.scores[name][layer, head]) for name in TYPES}
    name = max(known, key=lambda name: known[name] if known[name] == known[name] else -1.0)
    low, high = (float(end[layer, head]) for end in types[name].simultaneous())
    if math.isnan(low):
        return f"No type is claimed: a claim needs {LEAST_TEXTS} texts with targets."
    score, baseline, top = (float(of[name][layer, head]) for of in (types.scores, types.baselines, types.tops))
    if low <= 0:
        ends = " to ".join(signed(end, ".2f") for end in (low, high))
        return (
            f"No type is claimed: {name} ({score:.2f}) is not clearly above its baseline ({baseline:.2f}); the 95 "
            f"% interval of the difference, for all heads and types together, is {ends}."
        )
    return (
        f"No type is claimed: {name} ({score:.2f}) is above its baseline, but below {TRIVIAL_MASS}, and its "
        f"targets are the highest key in {percent(top, 0)} of rows, less than half."
    )
