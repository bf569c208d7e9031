"""Scores split into terms: the terms of every cell, their shares and contrasts, by layer and head."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from ...basics.arguments import index_of, integer, listed, member, whole_number
from ...basics.fields import check_fields, check_layers, check_rows
from ...basics.nouns import TEXT, Nouns
from ...draw.numbers import ScoreNumbers
from ...errors import InputError
from ...maths.scores import ScoreParts, names_along_row, ranked_shares
from ...maths.softmax import softmax_of
from ...results.by_layer import by_layer, table_of
from ...results.provenance import Provenance
from ...results.result import Result
from ...results.score_terms import Contrast, Reference, Shares, Terms, TermsByHead
from .wavelengths import EDGES, PositionKernel, Wavelengths, shares_within_rows


def _stacked(values: Sequence[Tensor]) -> Float32[np.ndarray, "layer head *rest"]:
    """Stacks values of several layers; an axis along which they vary in no layer has length 1."""
    return torch.stack(torch.broadcast_tensors(*values)).float().cpu().numpy()  # type: ignore[no-untyped-call]


def _by_name(layers: Sequence[Mapping[str, Tensor]]) -> dict[str, Float32[np.ndarray, "layer head *rest"]]:
    return {name: _stacked([values[name] for values in layers]) for name in layers[0]}


@dataclass(frozen=True, repr=False)
class SplitScores(Result):
    """Attention scores as a sum of terms, in the units of the softmax's input."""

    _SUBTRACT = 'subtract a term of texts of one length: one.terms["query_key"] - other.terms["query_key"]'

    layers: tuple[int, ...]
    """The decomposed layers, in the order of the axis `layer` in tensors that have a query or key axis.

    Tensors without a query or key axis have one row per layer of the model, NaN for layers that were not decomposed.
    """
    parts: tuple[ScoreParts, ...]
    """Queries, keys and positions from which the terms are computed, layer by layer."""
    residual: Float[Tensor, "layer head"]
    """Largest |Σ terms − score| over visible pairs of real tokens, in units of the score."""
    largest: Float[Tensor, "layer head"]
    """Largest |score| over the same pairs."""
    real: Bool[Tensor, "batch position"]
    """True at real tokens, False at padding."""
    tokens: tuple[tuple[str, ...], ...]
    """The query tokens as strings."""
    key_tokens: tuple[tuple[str, ...], ...]
    """The key tokens as strings; the same as `tokens` except in cross-attention."""
    provenance: Provenance
    reference: Reference | None = None
    """The means at which queries and keys are split; None if they are split at the model's own biases."""

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        queries, keys = len(self.tokens[0]), len(self.key_tokens[0])
        return {"batch": len(self.tokens), "position": queries, "query": queries, "key": keys}

    def _check(self) -> None:
        lengths = self._axis_lengths
        check_rows("tokens", self.tokens, lengths["batch"], lengths["position"])
        check_rows("key_tokens", self.key_tokens, lengths["batch"], lengths["key"])
        if len(self.parts) != len(self.layers):
            raise ValueError(
                f"`parts` must have one entry for each of {len(self.layers)} layers; got {len(self.parts)}"
            )
        check_layers(self.layers, len(self.residual))
        check_fields(self, {**lengths, "head": self.residual.shape[-1]})
        if len({parts.names() for parts in self.parts}) != 1:
            raise ValueError("all layers must have the same terms")

    @property
    def terms(self) -> "Terms":
        """The terms by name, computed on demand, without those that the model lacks."""
        return Terms(self.parts)

    @property
    def sink(self) -> Float[Tensor, "layer head"] | None:
        """Each head's sink logit, an extra term in every row's softmax denominator (gpt-oss); None without sinks."""
        sinks = [parts.sink for parts in self.parts if parts.sink is not None]
        return by_layer(torch.stack(sinks), self.layers, len(self.residual)) if sinks else None

    @property
    def visible(self) -> Bool[Tensor, "batch layer 1 query key"]:
        """True where a real token can see a key; False at padding."""
        return torch.stack([_seen(parts, self.real) for parts in self.parts], dim=1)

    @property
    def variance_shares(self) -> "TermsByHead":
        """Each term's share of the variance of scores along a row, as a mapping from terms to `[layer head]`. Computed
        over all texts and all rows that see at least two keys. `am.variance_shares` also gives intervals.
        """

        def terms_of(parts: ScoreParts, rows: slice) -> tuple[dict[str, Tensor], Tensor]:
            return {name: parts.term(name, rows) for name in parts.names() if name != "mask"}, parts.total(rows)

        return shares_within_rows(self.layers, len(self.residual), self.parts, self.real, terms_of)

    def by_wavelength(self, edges: Sequence[float] = EDGES) -> "Wavelengths":
        """Splits scores into a sum over bands of rotary wavelengths: a mapping from bands to `[batch layer head query
        key]`.

        >>> bands = am.decompose_scores(model, text).by_wavelength([8, 64])                # doctest: +SKIP
        >>> list(bands), bands.variance_shares["under 8 tokens"]                           # doctest: +SKIP

        `edges` are the wavelengths, in tokens, at which bands end. Raises `UnsupportedModelError` for a model without
        rotary positions.
        """
        return Wavelengths.of(self.parts, self.real, self.layers, len(self.residual), edges)

    def position_kernel(self, text: int = 0, edges: Sequence[float] = EDGES) -> "PositionKernel":
        """Returns each head's position term as a function of distance, and the part of it in each band of wavelengths.

        Raises `InputError` for means by position, whose position term is not a function of distance.
        """
        text = index_of("text", text, len(self.real), f"{len(self.real)} texts were run")
        if self._crosses:
            raise InputError("cross-attention has no distance between queries and keys, so it has no position kernel.")
        return PositionKernel.of(
            [parts.of_text(text, self.real[text].nonzero()[:, 0]) for parts in self.parts],
            self.layers,
            edges,
            by_position=self.reference is not None and self.reference.by_position,
        )

    def dimensions(self, layer: int, head: int, query: int, key: int, text: int = 0) -> pd.DataFrame:
        """Splits one score into a sum over the dimensions of a head: dimension, query, key, product, wavelength.

        product = scale · q_d k_d, for query and key as they enter the score. The products add up to the score before
        the model's position bias and soft cap. `wavelength` is in tokens per turn, infinite without rotation.
        """
        parts = self.parts[self._index(layer)]
        text = index_of("text", text, len(self.real), f"{len(self.real)} texts were run")
        head = index_of("head", head, self.residual.shape[1])
        query = index_of("query", query, self.real.shape[1])
        key = index_of("key", key, len(self.key_tokens[0]))
        q, k = parts.query[text, head, query], parts.key[text, head, key]
        turns = q.new_full(q.shape, torch.inf) if parts.wavelengths is None else parts.wavelengths
        columns = {"query": q, "key": k, "product": parts.scale * q * k, "wavelength": turns}
        rows = {name: value.cpu().double().tolist() for name, value in columns.items()}
        return pd.DataFrame(rows).rename_axis("dimension")

    def select(self, layers: int | Iterable[int]) -> Self:
        """Returns the decomposition of some of the layers."""
        try:
            numbers: list[Any] = [integer(layers)]
        except TypeError:
            numbers = listed("layers", layers, "a list of ints")
        wanted = [self._index(layer) for layer in numbers]
        if not wanted:
            raise InputError("`layers` must name at least one layer; got an empty list.")
        kept, count = [self.layers[i] for i in wanted], len(self.residual)
        return replace(
            self,
            layers=tuple(kept),
            parts=tuple(self.parts[i] for i in wanted),
            residual=by_layer(self.residual[kept], kept, count),
            largest=by_layer(self.largest[kept], kept, count),
        )

    def shares_at(self, rank: int = 0) -> "Shares":
        """Returns each term's share in the `rank`-th highest score of each row (0 is the highest), as in figure 2.

        share = (t_ij − min_j t_ij) / Σ_terms (t_ij − min_j t_ij), over the terms that vary along a row.
        NaN where the row has too few keys, or sees only one key (row 0 of a causal model).
        """
        length = len(self.key_tokens[0])
        rank = index_of("rank", rank, length, "0 is the highest score")
        names = names_along_row(self.parts)
        ranked = [ranked_shares(parts, names, rank + 1, _seen(parts, self.real)) for parts in self.parts]
        return Shares(
            rank,
            self.layers,
            {name: torch.stack([share[name][..., rank] for _, share in ranked], dim=1) for name in names},
            torch.stack([keys[..., rank] for keys, _ in ranked], dim=1),
        )

    def contrast(self, query: int, key_a: int, key_b: int) -> "Contrast":
        """Returns each head's preference for one key over another: score(query, key_a) − score(query, key_b), term by
        term.

        The exponential of the terms' sum is the ratio of the attention to `key_a` to the attention to `key_b`.
        """
        queries, keys = self.real.shape[1], len(self.key_tokens[0])
        query = index_of("query", query, queries)
        key_a, key_b = index_of("key_a", key_a, keys), index_of("key_b", key_b, keys)
        both = self.visible[:, :, 0, query, [key_a, key_b]].all(dim=-1)
        if not both.any():
            raise InputError(f"token {query} cannot see both key {key_a} and key {key_b}; choose keys that it can see.")
        rows = slice(query, query + 1)
        batch = self.real.shape[0]
        differences: dict[str, list[Tensor]] = {}
        for parts in self.parts:
            for name in parts.names():
                if name != "mask":
                    term = parts.term(name, rows)
                    term = term.expand(batch, self.residual.shape[1], 1, keys)[:, :, 0]
                    differences.setdefault(name, []).append(term[..., key_a] - term[..., key_b])
        values = {
            name: by_layer(
                torch.stack(parts, dim=1).masked_fill(~both[..., None], torch.nan),
                self.layers,
                len(self.residual),
                axis=1,
            )
            for name, parts in differences.items()
        }
        places = tuple(
            (row[query], others[key_a], others[key_b]) for row, others in zip(self.tokens, self.key_tokens, strict=True)
        )
        return Contrast(query, key_a, key_b, self.layers, values, places)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, residual, largest_score, and each term's mean share in the rows' highest
        scores (without row 0).
        """
        shares = self.shares_at(0)
        measured = list(self.layers)
        columns = {"residual": self.residual[measured], "largest_score": self.largest[measured]}
        columns |= {f"{name}_share": share.nanmean(dim=(0, 3)) for name, share in shares.items()}
        return table_of({"layer": self.layers, "head": range(self.residual.shape[1])}, columns)

    def numbers(
        self,
        text: int = 0,
        ranks: int = 10,
        *,
        pattern: Float[Tensor, "layer head query key"] | None = None,
        nouns: Nouns = TEXT,
        first: int = 0,
    ) -> "ScoreNumbers":
        """Returns the numbers of figures 1 to 3 for one text, as arrays for drawing; its queries are the real tokens
        from `first` on. `pattern` is the attention that the run used, in the decomposed layers; if it is None, figures
        show the softmax of the scores, which is the pattern that the model used unless a hook changed it. `nouns` are
        the words for the input and its positions in notes and figures.
        """
        ranks = whole_number("ranks", ranks, least=1)
        text = index_of("text", text, len(self.real), f"{len(self.real)} texts were run")
        if self.tokens != self.key_tokens and not self._crosses:
            raise InputError(
                "figures 1 to 3 show attention among tokens; here some keys are not tokens. Use .to_frame(), or "
                'model.run(..., points=["pattern"]).show("pattern").'
            )
        real = self.real[text].nonzero()[:, 0]
        at_keys = self.keys_seen(text).nonzero()[:, 0] if self._crosses else real
        here = real[first:]
        tokens = tuple(self.tokens[text][place] for place in here.tolist())
        keys = tuple(self.key_tokens[text][place] for place in at_keys.tolist())
        of_layers = [parts.of_text(text, here, at_keys) for parts in self.parts]
        heads, last, names = self.residual.shape[1], slice(len(tokens) - 1, len(tokens)), names_along_row(of_layers)
        by_key = [
            name for name in names
            if all(name in parts.names_along_row() and not parts.differs_by_query(name) for parts in of_layers)
        ]  # fmt: skip
        # Under rotation no term depends on the key alone; centred terms are shown for the last query.
        by_last = [] if by_key or not of_layers[0].centred else [
            name for name in names if name in ("position", "key_bias")
        ]  # fmt: skip
        scores, patterns, ranked_keys, shares, key_terms, terms = [], [], [], [], [], []
        for parts in of_layers:
            total = parts.total()
            hidden = ~parts.visible.expand_as(total)
            scores.append(total.masked_fill(hidden, torch.nan)[0])
            if pattern is None:
                attention = softmax_of(total.masked_fill(hidden, torch.finfo(total.dtype).min), parts.sink)
                patterns.append(attention.masked_fill(hidden, 0.0)[0])
            ranked, share = ranked_shares(parts, names, min(ranks, len(keys)), parts.visible)
            ranked_keys.append(ranked[0])
            shares.append({name: value[0] for name, value in share.items()})
            unseen = hidden[0, :, -1] if by_last else torch.zeros_like(hidden[0, :, -1])
            of_key = {name: parts.term(name, last)[0, :, 0].expand(heads, len(keys)) for name in by_key or by_last}
            key_terms.append({name: term.masked_fill(unseen, torch.nan) for name, term in of_key.items()})
            own = {name: parts.term(name)[0] for name in parts.names() if name != "mask"}
            terms.append({name: term.expand(heads, *term.shape[1:]) for name, term in own.items()})
        return ScoreNumbers(
            tokens=tokens,
            keys=keys if self._crosses or first else (),
            layers=self.layers,
            scores=_stacked(scores),
            pattern=_stacked(patterns) if pattern is None else pattern.float().cpu().numpy(),
            ranked_key=torch.stack(ranked_keys).int().cpu().numpy(),
            ranked_share=_by_name(shares),
            key_terms=_by_name(key_terms),
            key_terms_of_last=bool(by_last),
            notes=(*self._notes(text, nouns), *(self._softmax_note if pattern is None else ())),
            nouns=nouns,
            terms=_by_name(terms),
        )

    @property
    def _crosses(self) -> bool:
        return self.provenance.options.get("stack") == "cross"

    def keys_seen(self, text: int) -> Bool[Tensor, " key"]:
        """The keys of a text that at least one of its tokens can see: all except padding."""
        return _seen(self.parts[0], self.real)[text].any(dim=0).any(dim=0)

    def _notes(self, text: int, nouns: Nouns) -> tuple[str, ...]:
        if self.reference is None:
            return _notes(self.parts[0], nouns, crosses=self._crosses)
        note = self.reference.note(text, nouns)
        if "position" in names_along_row(self.parts):
            return (note,)
        return (
            note,
            "Without rotation or a position term, position is in the stream; means by position separate it there.",
        )

    @property
    def _softmax_note(self) -> tuple[str, ...]:
        if not self.provenance.edits:
            return ()
        edits = ", ".join(self.provenance.edits)
        return (
            f"Hooks were active ({edits}). The attention shown is the softmax of these scores; where a hook changed "
            "the pattern, the model used a different pattern.",
        )

    def __repr__(self) -> str:
        batch, length = self.real.shape
        return (
            f"ScoreDecomposition({self.provenance.model!r}, layers {list(self.layers)}, {batch} × {length} tokens: "
            f"{', '.join(self.terms)}; residual {float(self.residual[list(self.layers)].max()):.1e})"
        )

    def _index(self, layer: int) -> int:
        return self.layers.index(member("layer", layer, self.layers, "the layers decomposed"))


def _seen(parts: ScoreParts, real: Tensor) -> Bool[Tensor, "batch 1 query key"]:
    return parts.visible & real[:, None, :, None]


def _notes(parts: ScoreParts, nouns: Nouns, *, crosses: bool = False) -> tuple[str, ...]:
    notes = []
    if crosses and parts.position is None and parts.wavelengths is None:
        notes.append(
            f"Cross-attention has no position term here: the two streams hold the position of each {nouns.any_token}."
        )
    elif parts.relative is not None and parts.relative.by_input:
        notes.append(
            "content_to_position is the part of a distance's score that depends on the query; position is the part "
            "that is the same for every query."
        )
    elif parts.relative is not None and parts.relative.names:
        notes.append(
            "Position enters these scores through products with the content: content_to_position (the distances "
            "that a query prefers) and position_to_content (the distances that a key prefers). Both include "
            "the biases of queries and keys."
        )
    elif parts.position is None and parts.wavelengths is None:
        notes.append("This model's scores have no position term: position information is in the stream.")
    elif parts.position is None:
        notes.append(
            "This model's scores have no separate position term: position rotates queries and keys, so it is part "
            'of query_key. decompose_scores(..., centre="mean") separates it.'
        )
    if parts.query_from_bias is None:
        notes.append("This model's queries have no bias, so its scores have no key_bias term.")
    elif parts.query_from_bias.ndim == 4:
        notes.append("Rotary: key_bias also depends on the distance between query and key, so figure 3 leaves it out.")
    return tuple(notes)
