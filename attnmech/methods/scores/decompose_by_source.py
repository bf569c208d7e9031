"""Query-key scores, split exactly over pairs of upstream writers or directions: what makes a head attend there.

The equations are those of docs/formulas.md#writers-of-a-score; they split the `query_key` of `am.decompose_scores`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...basics.arguments import flag, index_of, member, option, pairs_of, shown, whole_number
from ...basics.fields import check_layers, check_rows
from ...basics.public import public
from ...draw.figure_page import in_notebook_output
from ...draw.section import Section
from ...draw.text import percent, quoted, signed, with_minus_signs
from ...errors import InputError, UnsupportedModelError
from ...interventions import Heads
from ...model.attention.observed import RowBlock
from ...model.inputs.encoder import Inputs
from ...model.parts.hashes import batch_hash
from ...model.parts.norms import frozen_norm
from ...model.reading.writers import Writers, most_writers, points_of_writers, points_read, why_no_sum
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.ledger import Cells
from ...model.stack.points import require_heads
from ...model.stack.stack import Stack
from ...results.by_layer import by_layer
from ...results.provenance import Provenance
from ...results.result import Result
from ...runs.progress import steps
from .figures import pair_map
from .sources import Directions, SourceParts, SourceWalk, StreamSplit

MAX_BYTES: Final = 2 * 2**30


@public
def decompose_by_source(
    model: HookedModel,
    inputs: Inputs,
    *,
    heads: Heads = "all",
    cells: Iterable[tuple[int, int]] | None = None,
    directions: Directions | None = None,
    layers: Iterable[int] | None = None,
    bos: bool | None = None,
) -> "SourceDecomposition":
    """Splits each head's query-key scores over pairs of upstream writers, on the query side and on the key side.

    query_key_ij = Σ_s Σ_t scale · q_s(i)·k_t(j), over all pairs of a writer s of the stream at the query and a writer t
    of the stream at the key (equations in `attnmech.methods.scores.sources`). Writers are the embeddings of
    token, position and token type, every head in earlier layers, every b_O, every MLP, and the shift β of every norm on
    the way. Norms, including qk-norms, are frozen at the scales of this run; in post-norm models each writer passes
    through every norm after it.

    With `directions`, the stream x that enters the layer is split along them instead, x = Σ_f a_f d_f + b + rest, and
    the sources are the directions, the bias and the rest. The sum is exact whatever the directions; how little of the
    score involves the rest says how well they explain it.

    In each cell, the sum over all pairs is checked against the query_key of the ledger, and the ledger against the
    scores that the model used.

    >>> import attnmech as am
    >>> why = am.decompose_by_source(am.load(), "Anna sang of shells.", layers=[2])
    >>> why.matrix(layer=2, head=6).shape          # [source_q source_k], named by why.sources
    torch.Size([23, 23])
    >>> print(why.explain(layer=2, head=6, query=4))     # doctest: +SKIP

    >>> model = am.load()
    >>> names = {name: model.embedding[model.encode(name).ids[0, -1]] for name in (" Anna", " Tom")}
    >>> why = am.decompose_by_source(model, "Anna sang of Tom.", layers=[0], directions=names)
    >>> why.sources
    (' Anna', ' Tom', 'rest', 'norm shift')
    >>> why.pairs(layer=0, head=2, query=4, top=3)       # doctest: +SKIP

    Args:
        model: the model.
        inputs: one text or several.
        heads: a list of (layer, head), or "all".
        cells: pairs (query, key), the same for all texts and heads; by default, each row's key with the highest score.
        directions: vectors of the stream by name (probes, differences of means), onto whose span the stream is
            projected; or a dictionary with `encode` and `W_dec`, such as an SAE of SAELens, trained on the stream that
            enters the layer. Directions belong to one layer: `layers=[3]`.
        layers: all by default.
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        What each writer, or each direction, adds to each cell's query and key. The matrix of pairs, in units of the
        score, is computed on demand.

    Raises:
        ExactnessError: if the sum differs from the score by more than the rounding of that sum explains.
        UnsupportedModelError: for a model whose stream has writers that no point captures.
        InputError: for invalid cells, layers, heads or directions.

    Source: for pairs of features, Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions".

    """
    require_model(model)
    if reason := why_no_sum(model):
        raise UnsupportedModelError(
            f"expected a stream that is the sum of embeddings, heads and MLPs; {model.name} "
            f"({model.architecture.name}) cannot be split over writers: {reason}. Use am.decompose_scores for the "
            "terms of its scores."
        )
    stack = model.stack()
    chosen = _chosen_heads(model, stack, layers, heads)
    if directions is not None and len(chosen) != 1:
        raise InputError(
            f"`directions` belong to the stream of one layer; got layers {list(chosen)}. Choose one: "
            f"layers=[{next(iter(chosen))}]."
        )
    split = None if directions is None else StreamSplit.of(directions, stack.d_model)
    model.points.resolve(["scores"], list(chosen), model.refused)
    batch = model.encode(inputs, bos=bos)
    captures = points_of_writers(model, list(chosen), batch) if split is None else points_read(model, list(chosen))
    texts, length = batch.ids.shape
    if cells is not None and bool(batch.begins.any()):
        raise InputError(
            "`cells` are the same in all texts, so all must begin at position 0; a text of this batch has padding "
            "before it. Pass the texts as a list."
        )
    places = None
    if cells is not None:
        pairs = _some_pairs("cells", cells, "a list of (query, key)")
        places = sorted({(index_of("query", query, length), index_of("key", key, length)) for query, key in pairs})
    room = partial(_check_size, model, texts, length if places is None else len(places), chosen)
    if split is None:
        room({layer: most_writers(stack, layer) for layer in chosen})
        writers = Writers(model, batch)
        walk = SourceWalk(model, batch, chosen, places, lambda block, _: writers.parts_of(block.layer, block.values))
    else:
        path, wide = stack.architecture.attn_norm, torch.promote_types(model.dtype, torch.float32)

        def parts_along(block: RowBlock, cells: Cells) -> Iterator[tuple[str, Tensor]]:
            """The parts of a layer's `attn_in` along directions of the stream before its norm."""
            x = block.values["attn_in" if path is None else "resid_pre", block.layer]
            norm = None if path is None else frozen_norm(stack.module(block.layer, path), x, wide)
            return split.parts_of(x.to(wide), norm, cells.places(x.shape[1]), lambda count: room({block.layer: count}))

        walk = SourceWalk(model, batch, chosen, places, parts_along)
    watched = [(stack.label, layer) for layer in chosen]
    with steps("layers", len(chosen), show=False) as bar:

        def tell(_: RowBlock) -> None:
            bar.reach(len(walk.parts))

        model.forward(batch, captures=captures, rows=[walk, tell], layers=watched)
    if places is not None:
        seen = torch.stack([(part.key_at >= 0).any(dim=1).any(dim=0) for part in walk.parts.values()]).any(dim=0)
        for (query, key), visible in zip(places, seen.tolist(), strict=True):
            if not visible:
                raise InputError(f"token {query} cannot see key {key} in any text; choose a key it can see.")
    precision = torch.promote_types(model.dtype, torch.float32)
    residual = torch.full((len(chosen), stack.n_heads), torch.nan, dtype=precision, device=model.device)
    for index, layer in enumerate(chosen):
        residual[index, list(chosen[layer])] = walk.residual[layer]
    options = {
        "cells": None if places is None else [list(cell) for cell in places],
        "heads": "all" if isinstance(heads, str) else [[layer, head] for layer in chosen for head in chosen[layer]],
        "layers": list(chosen),
        "bos": batch.bos,
        "directions": None if split is None else f"{split.description} (SHA-256 {split.digest})",
    }
    return SourceDecomposition(
        parts=tuple(walk.parts[layer] for layer in chosen),
        residual=by_layer(residual, list(chosen), len(stack.places)),
        tokens=batch.tokens,
        provenance=model.provenance(batch_hash(batch), batch.tokens, options),
    )


def _chosen_heads(
    model: HookedModel, stack: Stack, layers: Iterable[int] | None, heads: Heads
) -> dict[int, tuple[int, ...]]:
    allowed = model.points.check_layers(layers, stack.label)
    if isinstance(heads, str) and heads == "all":
        return dict.fromkeys(allowed, tuple(range(stack.n_heads)))
    named = _some_pairs("heads", heads, '"all" or a list of (layer, head)')
    require_heads(model.points, stack, named, allowed, f"this model has {stack.n_heads} heads in each layer")
    chosen: dict[int, tuple[int, ...]] = {}
    for layer, head in named:
        chosen[layer] = (*chosen.get(layer, ()), head)
    return chosen


def _some_pairs(name: str, values: object, wanted: str) -> list[tuple[int, int]]:
    pairs = pairs_of(name, values, wanted)
    if not pairs:
        raise InputError(f"`{name}` must be {wanted}; got an empty list.")
    return pairs


def _check_size(
    model: HookedModel, texts: int, cells: int, chosen: Mapping[int, tuple[int, ...]], sources: Mapping[int, int]
) -> None:
    entry = 3 * texts * cells * model.stack().d_head * torch.promote_types(model.dtype, torch.float32).itemsize
    size = entry * sum(len(heads) * sources[layer] for layer, heads in chosen.items())
    if size > MAX_BYTES:
        raise InputError(
            f"the parts of every source in {cells} cells of {sum(map(len, chosen.values()))} heads take about "
            f"{size / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**30:.0f} GiB. Choose fewer layers (layers=[3]), "
            "heads (heads=[(3, 1)]), cells (cells=[(7, 2)]) or texts."
        )


@dataclass(frozen=True, repr=False)
class SourceDecomposition(Result):
    """The query_key term of attention scores as a sum over pairs of sources, with the proof that it adds up.

    Sources are the writers of the stream, or directions of it. Of a dictionary's directions, those active at a query or
    a key of some cell are sources of their own; "other features" are all others, 0 there, but not in the mean over keys
    that a contrast subtracts.

    A pair's contribution to a score says little by itself, because the softmax ignores terms that all keys of a row
    share. The result therefore also gives the contrast, the pair's contribution minus its mean over the keys that the
    row sees: c_st = scale · q_s(i)·(k_t(j) − mean_j' k_t(j')). Together with the contrasts of the score's other terms,
    these add up to ln(p_ij / the geometric mean of the row's p). Contrasts are signed: sources may work against each
    other.
    """

    _SUBTRACT = "subtract the matrices of a head: one.matrix(layer, head) - other.matrix(layer, head)"
    _AXES: ClassVar = {"batch": "tokens"}

    parts: tuple[SourceParts, ...]
    """The contributions from which the matrices are computed, layer by layer."""
    residual: Float[Tensor, "layer head"]
    """Largest |Σ pairs − query_key| over the cells, in units of the score; NaN for heads that were not decomposed."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    def _check(self) -> None:
        super()._check()
        check_layers(self.layers, len(self.residual))
        check_rows("tokens", self.tokens, len(self.tokens), len(self.tokens[0]))
        cells = self.provenance.options["cells"]
        if cells is not None and not isinstance(cells, list):
            raise ValueError(f"`cells` must be a list, or null; got {shown(cells)}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers decomposed; `residual` is NaN at the others."""
        return tuple(part.layer for part in self.parts)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the deepest layer decomposed; `labels_of` gives those of another layer."""
        return max(self.parts, key=lambda part: part.layer).sources

    def labels_of(self, layer: int) -> tuple[str, ...]:
        """The writers upstream of one layer, or the directions: the labels of both axes of its matrices.

        "L1H4" is a head, "L1 b_O" the output bias of its layer, "L1 MLP" an MLP, "norm shift" the β of the norm that
        makes the layer's `attn_in`; the labels of other norms' shifts say where the norm is ("L1 MLP norm shift").
        Directions have their names, features their numbers ("feature 17"); "rest" is what they leave of the stream.
        """
        return self._part(layer).sources

    def matrix(
        self,
        layer: int,
        head: int,
        query: int | None = None,
        key: int | None = None,
        *,
        text: int = 0,
        contrast: bool = False,
    ) -> Float[Tensor, "source_q source_k"]:
        """What each pair of sources adds to the score of one cell, or to the mean over cells.

        With `query`, the matrix is that of one cell: this query (and `key`) in one text. Without `query`, it is the
        mean over all cells of all texts in rows that see more than one key. The matrix sums to `query_key` of the
        ledger or, with `contrast`, to query_key minus its mean over the keys that the row sees.
        """
        part, place = self._head(layer, head)
        flag("contrast", contrast)
        cells = part.with_choice(place) if query is None else self._cell(part, place, query, key, text)
        return part.pairs(place, cells, contrast=contrast)

    def pairs(
        self,
        layer: int,
        head: int,
        query: int | None = None,
        key: int | None = None,
        *,
        top: int = 10,
        text: int = 0,
        contrast: bool = False,
    ) -> pd.DataFrame:
        """The pairs of sources that add or subtract most, strongest first: source_q, source_k, contribution.

        Contributions are those of `matrix`, of one cell or, without `query`, of the mean over cells.
        """
        values = self.matrix(layer, head, query, key, text=text, contrast=contrast)
        names = self.labels_of(layer)
        numbers = _largest(values.flatten().abs(), whole_number("top", top, least=1))
        return pd.DataFrame(
            [
                (names[number // len(names)], names[number % len(names)], float(values.flatten()[number]))
                for number in numbers
            ],
            columns=["source_q", "source_k", "contribution"],
        )

    FIGURES = ("query_key", "contrast")

    def plot(
        self,
        figure: str | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        key: int | None = None,
        text: int = 0,
    ) -> "go.Figure":
        """Draws `matrix` ("query_key", the default, or "contrast") for the 12 sources with the largest pairs at the
        query, and as many at the key.

        By default, that of the first head decomposed. All other sources are added up in one row and one column, so that
        the map sums to the score.
        """
        name = "query_key" if figure is None else option("figure", figure, self.FIGURES)
        layer = self.layers[0] if layer is None else layer
        head = self._part(layer).heads[0] if head is None else head
        values = self.matrix(layer, head, query, key, text=text, contrast=name == "contrast")
        return pair_map(values.cpu(), self.labels_of(layer), top=_DRAWN, label=name)

    def explain(self, layer: int, head: int, query: int, key: int | None = None, *, text: int = 0) -> str:
        """Says in one line how far the key's score exceeds the row's mean, and which pairs of sources contribute most.

        All numbers are relative to the mean over the keys that the row sees. A share is a pair's contribution divided
        by the total query_key; because contributions are signed, it may exceed 100 %. Shares are left out if the total
        query_key is not positive.
        """
        part, place = self._head(layer, head)
        here = self._cell(part, place, query, key, text)
        words, seen = self.tokens[text], int(part.keys_seen[here])
        where = f"L{layer}H{head} at {query} {quoted(words[query])}"
        if seen == 1:
            return f"{where} sees only one key, so its attention is fixed"
        key_at = int(part.key_at[:, place][here])
        looks = "looks most at" if self.provenance.options["cells"] is None else "and"
        pairs = part.pairs(place, here, contrast=True)
        total, count = float(pairs.sum()), len(part.sources)
        named, rest = [], total
        for number in _largest(pairs.flatten().abs(), _NAMED):
            source_q, source_k = divmod(number, count)
            value = float(pairs[source_q, source_k])
            share = with_minus_signs(f" ({percent(value / total, 0)})") if total > 0 else ""
            size = signed(value, ".2f") + share
            named.append(f"{part.sources[source_k]} (key) × {part.sources[source_q]} (query) {size}")
            rest -= value
        if pairs.numel() > len(named):
            named.append(f"{pairs.numel() - len(named)} other pairs {signed(rest, '.2f')}")
        preference = float(part.preference[:, place][here])
        others = {name: float(value[:, place][here]) for name, value in part.others.items()}
        largest = max(others, key=lambda name: abs(others[name]), default=None)
        more = ""
        if largest is not None and abs(others[largest]) > abs(total):
            share = f" ({percent(others[largest] / preference, 0)} of the score)" if preference > 0 else ""
            more = with_minus_signs(f"; the largest term is {largest}: {signed(others[largest], '.2f')}{share}")
        return (
            f"{where} {looks} {key_at} {quoted(words[key_at])}: score {signed(preference, '.2f')} relative to the "
            f"mean of the {seen} keys it sees; query_key gives {signed(total, '.2f')}: {', '.join(named)}{more}"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head and pair of sources: layer, head, source_q, source_k, query_key, contrast; means over the
        cells in rows that see more than one key.
        """
        frames = []
        for part in self.parts:
            count = len(part.sources)
            for place, head in enumerate(part.heads):
                cells = part.with_choice(place)
                frames.append(
                    pd.DataFrame(
                        {
                            "layer": part.layer,
                            "head": head,
                            "source_q": [source for source in part.sources for _ in range(count)],
                            "source_k": part.sources * count,
                            "query_key": part.pairs(place, cells, contrast=False).flatten().cpu().numpy(),
                            "contrast": part.pairs(place, cells, contrast=True).flatten().cpu().numpy(),
                        }
                    )
                )
        return pd.concat(frames, ignore_index=True)

    def _repr_html_(self) -> str:
        """The figure of one head, and each head's strongest pair: all pairs may be millions of rows."""
        strongest = pd.concat(
            [
                self.pairs(part.layer, head, top=1, contrast=True).assign(layer=part.layer, head=head)
                for part in self.parts
                for head in part.heads
            ],
            ignore_index=True,
        ).rename(columns={"contribution": "contrast"})
        order = strongest["contrast"].abs().sort_values(ascending=False, kind="stable").index
        layer, head = strongest.loc[order[0], ["layer", "head"]]
        reading = (
            "Each cell is a pair of sources: what it adds to the score, minus its mean over the keys of the row, "
            "averaged over cells."
        )
        figures = {"pairs": self.plot("contrast", layer=layer, head=head)}
        return in_notebook_output(
            title=f"Sources of the scores of {self.provenance.short_name}",
            lead=repr(self),
            sections=[Section(f"L{layer}H{head}, the head with the largest pair", reading, figures)],
            frame=strongest[["layer", "head", "source_q", "source_k", "contrast"]],
        )

    def __repr__(self) -> str:
        heads = sum(len(part.heads) for part in self.parts)
        cells = self.provenance.options["cells"]
        where = "the highest key of each row" if cells is None else f"{len(cells)} cells"
        directions = self.provenance.options.get("directions")
        kind = "writers" if directions is None else f"sources from {str(directions).partition(' (SHA-256')[0]}"
        return (
            f"SourceDecomposition({self.provenance.model!r}, {heads} heads of layers {list(self.layers)}, {where} in "
            f"{len(self.tokens)} × {len(self.tokens[0])} tokens: {len(self.sources)} {kind}; residual "
            f"{float(self.residual.nan_to_num(0.0).max()):.1e})"
        )

    def _part(self, layer: int) -> SourceParts:
        return self.parts[self.layers.index(member("layer", layer, self.layers, "the layers decomposed"))]

    def _head(self, layer: int, head: int) -> tuple[SourceParts, int]:
        part = self._part(layer)
        return part, part.heads.index(member("head", head, part.heads, f"those decomposed in layer {layer}"))

    def _cell(
        self, part: SourceParts, place: int, query: int, key: int | None, text: int
    ) -> Bool[Tensor, "batch cell"]:
        length = len(self.tokens[0])
        query = index_of("query", query, length)
        text = index_of("text", text, len(self.tokens), f"{len(self.tokens)} texts were run")
        key_at = part.key_at[text, place]
        at_cell = (part.query_at == query) & (key_at >= 0)
        if key is not None:
            at_cell &= key_at == index_of("key", key, length)
        there = int(at_cell.sum())
        if there > 1:
            keys = ", ".join(str(position) for position in key_at[at_cell].tolist())
            raise InputError(f"query {query} has several cells; `key` must be one of {keys}.")
        if there == 0:
            wanted = f"({query}, {key})" if key is not None else f"({query}, ...)"
            raise InputError(
                f"this result has no cell {wanted} in text {text}. Choose a key that the query can see: "
                f"am.decompose_by_source(..., cells=[{wanted}])."
            )
        here = torch.zeros_like(part.keys_seen, dtype=torch.bool)
        here[text] = at_cell
        return here


_DRAWN: Final = 12  # the number of sources at the query, and at the key, in a map of pairs
_NAMED: Final = 3  # the number of pairs of sources that `explain` names


def _largest(values: Float[Tensor, " pair"], count: int) -> list[int]:
    """The indices of the largest values, in descending order of value; the first of equal values comes first.

    >>> _largest(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3)
    [1, 3, 2]
    """
    least = values.topk(min(count, len(values))).values[-1]
    places = (~(values < least)).nonzero()[:, 0]
    return places[values[places].argsort(descending=True, stable=True)[:count]].tolist()
