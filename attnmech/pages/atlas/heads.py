"""What the atlas says about each head, besides what every page says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ...draw.heads import HeadNumber
from ...draw.style import term_style
from ...draw.text import percent, visible_token
from ...methods.examples.result import HeadExamples
from ...methods.examples.sums import SAMPLE, other_tokens
from ...methods.head_types.formulas import TYPES
from ...methods.head_types.head_types import RESTING, HeadTypes
from ...methods.head_types.sums import targets_of
from ...methods.ov_tokens.formulas import TOP
from ...methods.ov_tokens.result import OVTokens
from ...methods.scores.composition import Composition
from ...methods.scores.variance_shares import VarianceShares
from ...model.attention.observed import RowBlock
from ...results.by_layer import by_layer
from ...runs.token_types import TOKEN_TYPES, type_of
from ..heads import LOOKS, WHY, WRITES, HeadFacts, furthest

BY_TYPE: Final = "attention to the targets of a head's type (without a type: to a token other than the first)"


@dataclass(frozen=True)
class OnTargets:
    """The attention of a row to the targets of its head's type (Σ_j∈targets p_ij); of a head without a type, or that
    rests on one token, its highest attention to a token other than the first and its own.
    """

    __name__: ClassVar[str] = BY_TYPE

    kinds: Mapping[tuple[int, int], str]  # the type of each head that has one, by layer and head
    causal: bool

    @classmethod
    def of(cls, types: HeadTypes, causal: bool) -> "OnTargets":
        """The first type of each head that does not rest on one token."""
        kinds = {place: kind for place, kind in types.main_types.items() if kind in TYPES and kind not in RESTING}
        return cls(kinds, causal)

    def __call__(self, block: RowBlock) -> Float[Tensor, "batch head row"]:
        pattern = block.pattern
        others = block.mask.once(("other tokens", block.rows), lambda: other_tokens(block))
        value = pattern.masked_fill(~others, 0.0).amax(dim=-1)
        here = {head: kind for (layer, head), kind in self.kinds.items() if layer == block.layer}
        if here:
            targets = block.mask.once(
                ("targets", block.rows), lambda: targets_of(block.batch.queries(block.stack), block, self.causal)
            )
            for head, kind in here.items():
                value[:, head] = (pattern[:, head] * (targets[kind] & block.visible[:, 0])).sum(dim=-1)
        return value


EARLIER: Final = 3  # the number of earlier heads on a card

_WRITES: Final = {
    "copy suppression": f"has the token that it reads among the {TOP} that it lowers most,",
    "successor": "raises the successor most if it reads an ordered token, such as a weekday,",
}

PUNCTUATION, NUMBERS, NAMES, FIRST = "punctuation", "numbers", "names (capitalised words)", "first of a sentence"
"""The classes of tokens for which the reader can search."""

ERROR: Final = 0.05  # the error rate, over all heads, at which the halves of the corpus are said to differ


@dataclass(frozen=True, kw_only=True)
class CorpusHeads(HeadFacts):
    """The results from which the atlas describes its heads."""

    examples: HeadExamples
    overlap: Float[Tensor, "head_of_all head_of_all"]
    shares: VarianceShares | None
    ov: OVTokens | None
    composition: Composition | None

    def types_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The claimed types of a head, by where it attends and then by what it writes."""
        return super().types_of(layer, head) + tuple(self._written.get((layer, head), {}))

    def _does(self, layer: int, head: int, kind: str) -> str:
        sentence = self._written.get((layer, head), {}).get(kind)
        return super()._does(layer, head, kind) if sentence is None else sentence

    def _share(self, layer: int, head: int, kind: str) -> str:
        sentence = self._written.get((layer, head), {}).get(kind)
        return super()._share(layer, head, kind) if sentence is None else sentence

    @cached_property
    def _written(self) -> dict[tuple[int, int], dict[str, str]]:
        sentences: dict[tuple[int, int], dict[str, str]] = {}
        claims: Any = () if self.ov is None else self.ov.claims.itertuples()
        for claim in claims:
            share, chance, low, high = (
                percent(share, 0) for share in (claim.score, claim.baseline, claim.score_low, claim.score_high)
            )
            of_type = sentences.setdefault((claim.layer, claim.head), {})
            interval = f"(95 % interval {low} to {high}; by chance: {chance})"
            of_type[claim.type] = f"{_WRITES[claim.type]} for {share} of tokens {interval}"
        return sentences

    def _card(self) -> Mapping[str, Sequence[Sequence[str]]]:
        return {
            "Type": self.each(self._type),
            "In its strongest rows": self.each(self._strongest),
            "Furthest from the median head": furthest(self.compared),
            "Heads that attend alike": self._named_alike(self.overlap.numpy()),
            "Reads most from": self.each(self._earlier),
            "Without it": self.each(self._effect),
        }

    @property
    def further_numbers(self) -> list[HeadNumber]:
        """The share of rows like the strongest, and the terms' shares of the variance of scores."""
        share = self._rows_like[list(self.layers)].numpy()
        numbers = [HeadNumber("rows_like", "share of rows like the strongest", LOOKS, share)]
        if self.shares is not None:
            numbers += [
                self._mean(self.shares, name, f"variance_{name}", f"{term_style(name).label}, share of variance", WHY)
                for name in self.shares.terms
            ]
        if self.ov is not None:
            numbers += [
                HeadNumber(name, statistic.axis, WRITES, self._array(getattr(self.ov, name)))
                for name, statistic in self.ov.STATISTICS.items()
            ]
        return numbers

    @cached_property
    def _rows_like(self) -> Float[Tensor, "layer head"]:
        """The share of rows as strong as the strongest, by the model's layer."""
        return by_layer(self.examples.share.double(), self.layers, self.focus.n_layers)

    @cached_property
    def attended(self) -> list[list[dict[str, int]]]:
        """In how many of its strongest rows each head gives each token, and each class, its highest attention; of rows
        ordered by attention, the first token and the query itself do not count.
        """
        return self.each(self._attended)

    def _attended(self, layer: int, head: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in self.examples.examples_of(layer, head):
            left_out = (0, row.position) if self.examples.by in ("attention", BY_TYPE) else ()
            keys = ((key, text) for key, text in zip(row.keys, row.key_tokens, strict=True) if key not in left_out)
            key, text = next(keys, (0, ""))
            if highest := visible_token(text).strip("·").lower():
                for name in (highest, *_classes(text, row.before(key))):
                    counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))

    def _strongest(self, layer: int, head: int) -> str:
        row = self._halves[layer, head]
        if not row.even_rows + row.odd_rows:
            return ""
        halves = {
            "even": (row.even_relation, row.even_count, row.even_rows),
            "odd": (row.odd_relation, row.odd_count, row.odd_rows),
        }
        lines = [
            f"Highest key in {half}-numbered texts: {relation} ({count} of {rows})"
            for half, (relation, count, rows) in halves.items()
            if rows
        ]
        if row.p * len(self._halves) < ERROR:
            lines.append("The halves differ.")
        attended = self.attended[self.layers.index(layer)][head].items()
        counts = [(text, count) for text, count in attended if text not in (PUNCTUATION, NUMBERS, NAMES, FIRST)][:3]
        tokens = ", ".join(f"“{text}” ({count})" for text, count in counts if count > 1)
        lines += [f"Tokens: {tokens}"] if tokens else []
        share = percent(float(self._rows_like[layer, head]))
        rows = int(self.examples.rows[self.layers.index(layer), head])
        estimated = f", estimated from {SAMPLE:,} of them" if rows > SAMPLE else ""
        return "\n".join([*lines, f"Rows as strong are {share} of its {rows:,} rows{estimated}."])

    @cached_property
    def _halves(self) -> dict[tuple[int, int], Any]:
        rows: Any = self.examples.halves().itertuples()
        return {(row.layer, row.head): row for row in rows}

    def _earlier(self, layer: int, head: int) -> str:
        """The earlier heads whose output the head reads most, by the composition of weights."""
        if self.composition is None:
            return ""
        lines = []
        for name in ("q", "k", "v"):
            scores = getattr(self.composition, name)[:, :, layer, head].numpy() / self.composition.baseline
            if not np.isfinite(scores).any():
                continue
            order = np.argsort(-np.nan_to_num(scores, nan=-1.0).ravel(), kind="stable")[:EARLIER]
            places = [divmod(int(place), scores.shape[1]) for place in order if np.isfinite(scores.ravel()[place])]
            heads = ", ".join(f"L{one}H{other} ({scores[one, other]:.1f})" for one, other in places)
            lines.append(f"{name.upper()}: {heads}")
        return "\n".join([*lines, "Composition of weights; 1 is chance."]) if lines else ""


def _classes(token: str, before: str) -> list[str]:
    """The classes of a token, from its text and the token before it.

    >>> _classes(" Anna", "."), _classes(" 12", " in"), _classes(",", " sea")
    (['names (capitalised words)', 'first of a sentence'], ['numbers'], ['punctuation'])
    """
    kind, preceding = (TOKEN_TYPES[type_of(text)] for text in (token, before))
    classes = {
        PUNCTUATION: kind in ("sentence end", "comma", "other mark"),
        NUMBERS: kind == "number",
        NAMES: kind == "word" and token.strip()[:1].isupper(),
        FIRST: kind == "word" and preceding == "sentence end",
    }
    return [name for name, belongs in classes.items() if belongs]
