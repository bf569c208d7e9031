"""Keeps example rows of every head: the strongest, some at random, and some of each fifth of its rows.

Formulas: docs/formulas.md#example-rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import index_of, option, shown, whole_number
from ...basics.nouns import bracketed, counted
from ...basics.public import public
from ...draw.embed import View
from ...draw.section import Section
from ...draw.text import percent
from ...errors import InputError
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import table_of
from ...runs.ablations import checked_seed
from ...runs.options import StreamOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from ...runs.summed import Summed
from ...runs.words import texts_by_id
from .example import Example
from .figures import READING, SCRIPT, packed_layer
from .formulas import RELATIONS, difference_of_halves, fifths, first_places, relations, strongest_of_groups
from .sums import BY, HIGHEST, OFFERS, POINTS, SAMPLE, WINDOW, ExampleSums, Statistic, bigrams, fields_of, name_of

MOST: Final = 50  # the largest k: the state of 1,024 heads then takes 266 MB (83 MB for k = 10)

KINDS: Final = ("strongest", "even", "odd", "random", "band")
"""The kinds of examples: the strongest of all texts, and of texts with even and with odd numbers; rows at random; and
rows of each fifth."""

HALVES: Final = ("even", "odd")  # the halves of a corpus: texts with even and with odd numbers
BANDS: Final = ("0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %")  # fifths of rows, lowest values first


@public
def examples(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    by: Statistic = "attention",
    k: int = 10,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    seed: int = 0,
    **options: Unpack[StreamOptions],
) -> "HeadExamples":
    """Keeps example rows of every head: the k strongest, k at random, and k of each fifth of its rows.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> rows = am.examples(am.load(), documents(12), k=3)
    >>> rows.examples_of(0, 2)[0].window, rows.examples_of(0, 2)[0].key_tokens[0]
    ('<s>Ella lost [her] pupil, because she was cross. Mrs', ' lost')

    The strongest rows alone mislead: they show what a head does at its most extreme. `HeadExamples.share` is the share
    of all rows that are at least as strong as the weakest of them, and the random rows and fifths show the others.
    `HeadExamples.halves` compares the strongest rows of two halves of the texts.

    A row counts if its token is real and it sees two keys or more; for "attention", if it sees a token besides itself
    and the first.

    - Strongest (exact): each text offers its four strongest rows with different bigrams (the token before the query,
      and the query). Of the offers with the same bigram the strongest stays, then the strongest of each text, and the k
      highest of these are kept. Equal rows are ordered by text and position. The same is done for the texts with even
      numbers alone, and for those with odd numbers.
    - Random (exact): the rows with the k smallest hashes of seed, text, position, layer and head.
    - Fifths (exact up to 2,000 rows of a head): the 2,000 rows with the smallest hashes, in the order of their values,
      are divided into five equal bands; k rows of each are kept, by their hashes. With more rows, the bands are
      estimates (`HeadExamples.quantile_error`).

    Batches, shards and workers do not change the examples, except through rounding errors of the statistic, which
    depend on how texts are batched. Another order of the texts renumbers them, and changes the random rows.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus). Memory does not grow with their number.
        by: the statistic of a row. "attention": its highest attention to another token, except the first token of the
            text, where many heads rest. "value_weighted": the highest p‖v W_O‖ of a key (Kobayashi et al. 2020),
            without the factor of a norm behind W_O. "update": ‖u‖ / ‖x‖, the size of what the head adds to the stream
            at that row. "next_token": the head's direct addition to the logit of the token that follows, above the mean
            over the vocabulary (before a soft cap): r u·d with d from the final norm and W_U, and r the factor of the
            final norm, frozen. It may be negative, and the last row of a text does not count; until the last layer of a
            batch ends, 68 bytes are held for each token, layer and head. Or a function from an `am.reducers.RowBlock`
            to a tensor [batch head row].
        k: the number of rows of each kind, 1 to 50.
        layers: all by default.
        stack: "encoder", "decoder" or "cross" in a model with several stacks.
        seed: seed of the random rows.
        options: `bos`, `keep_rows`, `truncate`, `shard`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        Rows with their value, text, position, surrounding tokens, and eight highest keys.

    Raises:
        InputError: for an unknown statistic; for a function that does not return finite numbers [batch head row]; for
            "value_weighted" if a gate or a norm lies between attention and W_O; for "next_token" if the stack does not
            predict the next token, logits are not computed with one norm and one matrix, or `layers` lacks the last
            layer; and in the cases of `am.stream`.
        MissingPointError: for "update" and "next_token" in a model whose attention does not add to a stream that
            attnmech reads.
        CertificateError: for "next_token" if the certificate disproves that computation of logits.

    """
    require_model(model)
    reducer = HeadExamples.reducer(by=by, k=k, seed=seed)
    result: HeadExamples
    (result,) = stream(model, inputs, [reducer], layers=layers, stack=stack, **options)
    return result


@dataclass(frozen=True)
class ExampleReducer(ExampleSums):
    """Keeps the rows of `HeadExamples`."""

    def finish(self, state: State, source: Source) -> "HeadExamples":
        """The result, with its tokens as strings."""
        label = source.stack.label
        queries = torch.cat([state[f"{kind}_window"].flatten() for kind in ("strongest", "sampled")])
        keys = torch.cat([state[f"{kind}_key_ids"].flatten() for kind in ("strongest", "sampled")])
        return HeadExamples.of(
            state,
            source,
            by=name_of(self.by),
            k=self.k,
            seed=self.seed,
            tokens=texts_by_id(source.model, queries, label),
            # The keys of cross-attention are the encoder's.
            key_texts=texts_by_id(source.model, keys, "encoder" if label == "cross" else label),
        )


@dataclass(frozen=True, repr=False)
class HeadExamples(Summed):
    """Example rows of every head: the strongest, some at random, and some of each fifth of its rows."""

    _TITLE = "Example rows of heads in {model}"
    _SUBTRACT = "read the examples of both"
    _STRINGS = ("tokens", "key_texts")
    _AXES: ClassVar = {"layer": "layers", "key": range(HIGHEST), "window": WINDOW}

    _STATE: ClassVar[Mapping[str, Any]] = {
        "rows": Int[Tensor, "layer head"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
        "hash": Int[Tensor, "layer head sample"],
        "value": Float[Tensor, "layer head sample"],
        "sampled_hash": Int[Tensor, "layer head sampled"],
        **{
            f"{kind}_{name}": hint[Tensor, f"layer head {kind} {further}"]
            for kind in ("strongest", "sampled")
            for name, hint, further in (
                ("value", Float, ""), ("text", Int, ""), ("content", Int, ""), ("position", Int, ""),
                ("keys", Int, "key"), ("key_ids", Int, "key"), ("weights", Float, "key"), ("window", Int, "window"),
            )
        },
    }  # fmt: skip

    by: str
    """The name of the statistic."""
    k: int
    """The number of rows of each kind."""
    seed: int
    tokens: Mapping[int, str]
    """The texts of the tokens around queries, by id."""
    key_texts: Mapping[int, str]
    """The texts of the keys' tokens, by id."""

    @classmethod
    def reducer(cls, *, by: Statistic = "attention", k: int = 10, seed: int = 0) -> ExampleReducer:
        """The reducer that computes `HeadExamples` in `am.stream`; the arguments are those of `am.examples`."""
        if not callable(by) and by not in BY:
            known = ", ".join(f'"{name}"' for name in BY)
            raise InputError(f"`by` must be {known}, or a function of an am.reducers.RowBlock; got {shown(by)}.")
        k, seed = whole_number("k", k, least=1, most=MOST), checked_seed(seed)
        return ExampleReducer(by, k, seed, POINTS.get(by, ()) if isinstance(by, str) else ())

    def _check(self) -> None:
        super()._check()
        windows = (fields_of(prefix, self.state)["window"] for prefix in ("strongest", "sampled"))
        if not {token for window in windows for token in window.flatten().tolist() if token >= 0} <= set(self.tokens):
            raise ValueError("`tokens` must have every token of a window")

    def _merge(self, one: State, other: State) -> State:
        return ExampleReducer(self.by, self.k, self.seed).merge(one, other)

    @property
    def rows(self) -> Int[Tensor, "measured head"]:
        """The number of rows of each head that count, of the measured layers."""
        return self.state["rows"]

    @property
    def share(self) -> Float[Tensor, "measured head"]:
        """The share of a head's rows whose value is at least that of the weakest of its strongest rows.

        It is exact up to 2,000 rows, else estimated from a sample of 2,000 rows, but at least the share of the
        strongest rows themselves.
        """
        there = torch.arange(self.state["value"].shape[-1]) < self._sampled[..., None]
        above = (there & (self.state["value"] >= self._ends[1][..., None])).sum(dim=-1) / self._sampled
        return torch.maximum(above, (self._chosen["strongest"] >= 0).sum(dim=-1) / self.rows)

    @property
    def quantiles(self) -> Float[Tensor, "measured head 4"]:
        """The lowest values of the upper four fifths of a head's rows: its 20, 40, 60 and 80 % quantiles."""
        return self._fifths[1]

    @property
    def quantile_error(self) -> Float[Tensor, "measured head"]:
        """The largest error of the share of rows below any value, with probability 95 %: 0 up to 2,000 rows.

        Beyond, √(ln(2 / 0.05) / (2 · 2000)) = 0.030 by the inequality of Dvoretzky, Kiefer and Wolfowitz
        (Massart 1990).
        """
        bound = math.sqrt(math.log(2 / 0.05) / (2 * SAMPLE))
        return torch.where(self.rows > SAMPLE, bound, 0.0)

    @cached_property
    def _ends(self) -> tuple[Float[Tensor, "measured head"], Float[Tensor, "measured head"]]:
        """The values of the first and the last of the strongest rows; NaN in heads without a row."""
        chosen = self._chosen["strongest"]
        values = self.state["strongest_value"].gather(-1, chosen.clamp_min(0)).masked_fill(chosen < 0, torch.nan)
        last = (chosen >= 0).sum(dim=-1, keepdim=True).sub(1).clamp_min(0)
        return values[..., 0], values.gather(-1, last)[..., 0]

    @cached_property
    def _sampled(self) -> Int[Tensor, "measured head"]:
        return self.rows.clamp_max(SAMPLE)

    @cached_property
    def _fifths(self) -> tuple[Int[Tensor, "measured head sample"], Float[Tensor, "measured head 4"]]:
        return fifths(self.state["value"], self._sampled)

    @cached_property
    def _chosen(self) -> dict[str, Int[Tensor, "measured head row"]]:
        """The indices of the examples of each kind, and of each band; −1 where there are too few."""
        rows = fields_of("strongest", self.state)
        distinct = strongest_of_groups(rows["value"], bigrams(rows), OFFERS * self.k)
        value = rows["value"].gather(-1, distinct.clamp_min(0)).masked_fill(distinct < 0, -torch.inf)
        of_texts = strongest_of_groups(value, _taken(rows["content"], distinct), self.k)
        chosen = {"strongest": _taken(distinct, of_texts)}
        for number, half in enumerate(HALVES):
            text = _taken(rows["text"], self._of_texts)
            mine = (text >= 0) & (text % 2 == number)
            chosen[half] = _taken(self._of_texts, first_places(mine, self.k))
        stored = self.state["sampled_text"].shape[-1]
        place = torch.arange(stored)
        chosen["random"] = torch.where(place < self._sampled[..., None], place, -1)[..., : self.k]
        for number, band in enumerate(BANDS):
            chosen[band] = first_places(self._fifths[0][..., :stored] == number, self.k)
        return chosen

    @cached_property
    def _of_texts(self) -> Int[Tensor, "measured head row"]:
        """The indices of the strongest row of each distinct text of both halves, highest first."""
        value, content = self.state["strongest_value"], self.state["strongest_content"]
        return strongest_of_groups(value, content, value.shape[-1])

    @cached_property
    def _relations(self) -> dict[str, Int[Tensor, "measured head row"]]:
        by_kind = {}
        for prefix in ("strongest", "sampled"):
            rows = fields_of(prefix, self.state)
            position, keys, counts = rows["position"], rows["keys"], rows["keys"] >= 0
            if self.by == "attention":
                counts &= (rows["key_ids"] >= 0) & (keys != 0) & (keys != position[..., None])
            at = counts.byte().argmax(dim=-1, keepdim=True)
            key, key_id = (x.gather(-1, at)[..., 0] for x in (keys.masked_fill(~counts, -1), rows["key_ids"]))
            by_kind[prefix] = relations(position, key, rows["window"][..., WINDOW.index(0)], key_id)
        return by_kind

    def examples_of(self, layer: int, head: int, which: str = "strongest") -> list[Example]:
        """Returns the examples of one head: "strongest", "even" or "odd" (highest first), "random", or "band" (all
        five).
        """
        row = self._place_of(layer)
        head = index_of("head", head, self.rows.shape[1], f"this model has {self.rows.shape[1]} heads per layer")
        groups = BANDS if option("which", which, KINDS) == "band" else (which,)
        return [
            self._example((row, head, place), which, group if which == "band" else "", rank)
            for group in groups
            for rank, place in enumerate(self._chosen[group][row, head].tolist())
            if place >= 0
        ]

    def _example(self, at: tuple[int, int, int], kind: str, band: str, rank: int) -> Example:
        prefix = "sampled" if kind in ("random", "band") else "strongest"
        fields: dict[str, Any] = {name: x[at].tolist() for name, x in fields_of(prefix, self.state).items()}
        window = {distance: token for distance, token in zip(WINDOW, fields["window"], strict=True) if token >= 0}
        kept = [place for place, key in enumerate(fields["keys"]) if key >= 0]
        keys = [fields["keys"][place] for place in kept]
        weights = dict(zip(keys, fields["weights"], strict=False)) if not self._crosses else {}
        return Example(
            layer=self.layers[at[0]],
            head=at[1],
            kind=kind,
            band=band,
            rank=rank,
            value=fields["value"],
            text=fields["text"],
            position=fields["position"],
            relation="" if self._crosses else RELATIONS[int(self._relations[prefix][at])],
            tokens=tuple(self.tokens[token] for token in window.values()),
            query_at=list(window).index(0),
            weights=tuple(weights.get(fields["position"] + distance, math.nan) for distance in window),
            keys=tuple(keys),
            # Keys that are not tokens have no text.
            key_tokens=tuple(self.key_texts.get(fields["key_ids"][place], "") for place in kept),
            key_weights=tuple(fields["weights"][place] for place in kept),
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per example of the strongest: layer, head, kind, band, rank, value, query, window (the tokens around
        the query, which is in brackets), text, position, relation, and keys, key_tokens and weights of up to eight
        keys. `examples_of` gives the others.
        """
        return self._table_of("strongest")

    def _table_of(self, which: str) -> pd.DataFrame:
        listed = [
            example
            for layer in self.layers
            for head in range(self.rows.shape[1])
            for example in self.examples_of(layer, head, which)
        ]
        rows = [
            {name: getattr(example, name) for name in _COLUMNS if name not in ("query", "weights")}
            | {"query": example.tokens[example.query_at], "weights": example.key_weights}
            for example in listed
        ]
        return pd.DataFrame(rows, columns=_COLUMNS)

    def by_head(self) -> pd.DataFrame:
        """One row per head: the number of rows that count, the highest value, that of the weakest of the strongest
        rows, the `share` of rows at least as strong, and the quantiles.
        """
        highest, weakest = self._ends
        columns = {"rows": self.rows, "highest": highest, "weakest": weakest, "share": self.share}
        columns |= {f"q{20 * number + 20}": self.quantiles[..., number] for number in range(4)}
        return table_of({"layer": self.layers, "head": range(self.rows.shape[1])}, columns)

    def halves(self) -> pd.DataFrame:
        """Whether the strongest rows of texts with even numbers and of those with odd numbers attend to keys of the
        same relation (`Example.relation`): one row per head. Copies of a text are one text, that of the first.

        `even_rows`, the number of rows; `even_relation`, their most common relation (of equally common ones, the first
        in the order of `Example.relation`); `even_count`, how many have it; the same for "odd"; `distance`, the total
        variation distance of the two distributions of relations, 0 (equal) to 1; and `p`, its p-value.

        p is the share of 10,000 random divisions of the texts into halves (drawn with a fixed seed) that differ at
        least as much. A small p says that the order of the texts matters: for example, that two sources alternate. A
        large p says little if k is small. With many heads, some p are small by chance. Each division keeps the
        strongest stored row of every text; the selection by bigrams is not repeated.

        In cross-attention, relations are empty, and counts, distance and p are NaN.
        """
        text = _taken(self.state["strongest_text"], self._of_texts)
        relation = _taken(self._relations["strongest"], self._of_texts)
        table = []
        for row, layer in enumerate(self.layers):
            counts, distances, p = difference_of_halves(relation[row], text[row], self.k)
            for head in range(self.rows.shape[1]):
                of_head: dict[str, Any] = {"layer": layer, "head": head}
                for half, of_half in zip(HALVES, counts[:, head], strict=True):
                    rows, most = int(of_half.sum()), int(of_half.argmax())
                    named = rows > 0 and not self._crosses
                    of_head[f"{half}_rows"] = rows
                    of_head[f"{half}_relation"] = RELATIONS[most] if named else ""
                    of_head[f"{half}_count"] = math.nan if self._crosses else int(of_half[most])
                compared = (distances[head], p[head])
                of_head["distance"], of_head["p"] = (math.nan if self._crosses else float(x) for x in compared)
                table.append(of_head)
        return pd.DataFrame(table)

    @property
    def lead(self) -> str:
        """The share of rows like the strongest."""
        share, heads = self.share[self.rows > 0], self.rows.numel()
        if not len(share):
            return f"No row counts in any of {counted(heads, noun='head')} {bracketed(self._texts)}."
        return (
            f"The {self.k} strongest rows of {counted(heads, noun='head')} "
            f"by {self._meaning} {bracketed(self._texts)}: in the median head, "
            f"{percent(float(share.median()), 1)} of all rows are at least as strong as the weakest of them."
        )

    @property
    def _meaning(self) -> str:
        return BY.get(self.by, self.by)

    @property
    def _crosses(self) -> bool:
        return self.provenance.options.get("stack") == "cross"

    def _sections(self) -> "Sequence[Section]":
        return [Section("The rows of each head", READING, {"examples": view_of(self)}, "rows.examples_of(layer, head)")]

    def _page_sections(self) -> "Sequence[Section]":
        return [replace(section, figures={"examples": view_of(self, embedded=True)}) for section in self._sections()]


_COLUMNS: Final = [
    "layer", "head", "kind", "band", "rank", "value", "query", "window", "text", "position", "relation", "keys",
    "key_tokens", "weights",
]  # fmt: skip


def _taken(
    values: Int[Tensor, "measured head row"], index: Int[Tensor, "measured head kept"]
) -> Int[Tensor, "measured head kept"]:
    """The values at these indices; −1 at index −1."""
    return values.gather(-1, index.clamp_min(0)).masked_fill(index < 0, -1)


def view_of(examples: HeadExamples, *, files: Sequence[str] = (), embedded: bool = False) -> View:
    """The rows of every head, for a page.

    Args:
        examples: the rows.
        files: the file of each layer, relative to the page, which the page reads when it needs it; by default, the page
            holds the rows.
        embedded: whether the page around the view chooses the head.

    """
    data = {
        "layers": list(examples.layers),
        "heads": examples.rows.shape[1],
        "chosen": {"layer": 0, "head": 0},
        "meaning": examples._meaning,
        "sample": SAMPLE,
        "packed": [] if files else [packed_rows(examples, layer) for layer in examples.layers],
        "files": list(files),
        "embedded": embedded,
    }
    return View("examples", "Example rows of a head", READING, data, (SCRIPT,))


def packed_rows(examples: HeadExamples, layer: int) -> str:
    """The rows of a layer's heads, as a page holds them."""
    at = examples.layers.index(layer)
    numbers = (of[at].tolist() for of in (examples.rows, examples.share, examples.quantiles))
    heads = []
    for head, of_head in enumerate(zip(*numbers, strict=True)):
        bands = examples.examples_of(layer, head, "band")
        sheets = [[row for row in bands if row.band == band] for band in reversed(BANDS)]
        strongest, drawn = (examples.examples_of(layer, head, which) for which in ("strongest", "random"))
        heads.append((*of_head, [strongest, *sheets, drawn]))
    return packed_layer(heads)
