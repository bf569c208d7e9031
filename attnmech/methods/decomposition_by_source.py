"""Why does a head look there? Its query-key scores, split exactly over pairs of upstream writers.

The equations stand in `attnmech.maths.sources`; the term that is split is `query_key` of `am.decompose_scores`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..arguments import flag, member, pairs_of, shown
from ..batch import Batch
from ..draw.text import signed, visible_token, with_minus_signs
from ..errors import InputError, UnsupportedModelError, index_of
from ..fields import check_layers, check_rows
from ..maths.norms import FrozenNorm
from ..maths.precision import product_rounding, steps_rounding
from ..maths.scores import ScoreParts, product_error
from ..maths.sources import pair_terms
from ..model.architectures import submodule
from ..model.block import PostNormEnd
from ..model.hooked import HookedModel, require_model
from ..model.inputs import Inputs
from ..model.ledger import ScoreAudit, parts_of, require_exact
from ..model.norms import frozen_norm
from ..model.observed import RowBlock
from ..model.stack import Stack
from ..points import PointKey
from ..results import Provenance, Result, by_layer
from ..runs.layers import count_layers

Heads: TypeAlias = str | Iterable[tuple[int, int]]
"""Which heads: "all", or a list of (layer, head)."""

Values: TypeAlias = Mapping[PointKey, Tensor]

MAX_BYTES: Final = 2 * 2**30
"""A result larger than this is not made."""


def decompose_by_source(
    model: HookedModel,
    inputs: Inputs,
    *,
    cells: Iterable[tuple[int, int]] | None = None,
    layers: Iterable[int] | None = None,
    heads: Heads = "all",
    bos: bool | None = None,
) -> "SourceDecomposition":
    """Says which upstream writers make a head look where it looks: on the query's side, and on the key's.

    query_key_ij = Σ_s Σ_t scale · q_s(i)·k_t(j), over all pairs of writers s of the stream at the query and t of the
    stream at the key (equations in `attnmech.maths.sources`). Writers are the embeddings of token, position and token
    type, every head below, every b_O, every MLP, and the shift β of every norm on the way. Norms are frozen at the
    values that they had, those of queries and keys (qk-norm) too; in post-norm models each writer goes through every
    norm that came after it.

    `cells` are pairs (query, key), the same for all texts and heads; without them, the highest key of each row. For
    each cell the sum over all pairs is compared with the query_key of the ledger, and the ledger with the scores that
    the model used: where they differ by more than rounding explains of what is summed there, `ExactnessError` is
    raised.
    `UnsupportedModelError` is raised for a model whose stream has writers that no point holds.

    >>> import attnmech as am
    >>> why = am.decompose_by_source(am.load(), "Anna sang of shells.", layers=[2])
    >>> why.matrix(layer=2, head=6).shape          # [source_q source_k], named by why.sources
    torch.Size([23, 23])
    >>> print(why.explain(layer=2, head=6, query=4))     # doctest: +SKIP

    What is kept of a cell is what each writer puts into its query and key; the matrix of pairs is made when asked for.
    """
    require_model(model)
    stack = _stack_of(model)
    chosen = _chosen_heads(model, stack, layers, heads)
    captures = _captures(model, stack, chosen)
    batch = model.encode(inputs, bos=bos)
    texts, length = batch.ids.shape
    places = None if cells is None else _places(cells, length)
    _check_size(model, stack, texts, length if places is None else len(places), chosen)
    embeddings: dict[str, Tensor] = {}
    walk = _Walk(model, stack, batch, chosen, places, embeddings)
    watched = [(stack.label, layer) for layer in chosen]
    model.forward(batch, captures=captures, rows=[walk], layers=watched, embeddings=embeddings)
    _require_visible(places, walk.parts.values())
    residual = torch.full((len(chosen), stack.n_heads), torch.nan, dtype=torch.float64, device=model.device)
    for index, layer in enumerate(chosen):
        residual[index, list(chosen[layer])] = walk.residual[layer]
    options = {
        "cells": None if places is None else [list(cell) for cell in places],
        "heads": "all" if isinstance(heads, str) else [[layer, head] for layer in chosen for head in chosen[layer]],
        "layers": list(chosen),
        "bos": batch.bos,
    }
    return SourceDecomposition(
        parts=tuple(walk.parts[layer] for layer in chosen),
        residual=by_layer(residual, list(chosen), count_layers(model, stack)),
        tokens=batch.tokens,
        provenance=model.provenance(batch, batch.tokens, options),
    )


# -- what is asked for ---------------------------------------------------------------------------------------


def _stack_of(model: HookedModel) -> Stack:
    """The one stack of a model whose stream is a sum that points hold; `UnsupportedModelError` says why it is not."""
    plan = model.architecture
    if len(model.stacks) > 1:
        reason = "its stacks share one embedding, and attention to another stack writes into the decoder's stream"
    elif model.grid is not None:
        reason = "an image's patches, class token and positions enter the stream as one value"
    elif plan.hybrid:
        reason = "its layers without attention write into the stream, and no point holds what they write"
    elif model.embedding.shape[1] != model.d_model:
        reason = (
            f"its token embedding of {model.embedding.shape[1]} dimensions is projected to the {model.d_model} of the "
            "stream"
        )
    else:
        return model.stack()
    raise UnsupportedModelError(
        f"expected a model whose stream is a sum of embeddings, heads and MLPs; {model.name} ({plan.name}) is not "
        f"split over writers: {reason}. am.decompose_scores gives the terms of its scores."
    )


def _chosen_heads(
    model: HookedModel, stack: Stack, layers: Iterable[int] | None, heads: Heads
) -> dict[int, tuple[int, ...]]:
    """The heads of each layer."""
    allowed = model.points.check_layers(layers, stack.label)
    if isinstance(heads, str) and heads == "all":
        return dict.fromkeys(allowed, tuple(range(stack.n_heads)))
    named = _some_pairs("heads", heads, '"all" or a list of (layer, head)')
    model.require_heads(named, allowed, stack, f"this model has {stack.n_heads} heads in each layer")
    chosen: dict[int, tuple[int, ...]] = {}
    for layer, head in named:
        chosen[layer] = (*chosen.get(layer, ()), head)
    return chosen


def _places(cells: Iterable[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The cells in the order of their queries, each once."""
    found = {
        (index_of("query", query, length), index_of("key", key, length))
        for query, key in _some_pairs("cells", cells, "a list of (query, key)")
    }
    return sorted(found)


def _some_pairs(name: str, given: object, wanted: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers, at least one."""
    found = pairs_of(name, given, wanted)
    if not found:
        raise InputError(f"`{name}` must be {wanted}; got an empty list.")
    return found


def _check_size(
    model: HookedModel, stack: Stack, texts: int, cells: int, chosen: Mapping[int, tuple[int, ...]]
) -> None:
    entry = 3 * texts * cells * stack.d_head * torch.promote_types(model.dtype, torch.float32).itemsize
    # At most so many writers: five at the ends of the stream, and four of a layer that are no heads.
    size = entry * sum(len(heads) * (5 + layer * (stack.n_heads + 4)) for layer, heads in chosen.items())
    if size > MAX_BYTES:
        raise InputError(
            f"what every writer puts into {cells} cells of {sum(map(len, chosen.values()))} heads takes about "
            f"{size / 2**30:.1f} GiB; at most {MAX_BYTES / 2**30:.0f} GiB is made. Ask for fewer: layers=[3], "
            "heads=[(3, 1)], cells=[(7, 2)], or fewer texts."
        )


def _captures(model: HookedModel, stack: Stack, chosen: Iterable[int]) -> list[PointKey]:
    """The points that hold what is written below the chosen layers, and what goes through the norms there."""
    plan, layers = stack.architecture, list(chosen)
    below = [layer for layer in stack.layers if layer < max(layers)]
    written = [
        "z",
        "mlp_out",
        *(["attn_raw"] if plan.attn_out else []),
        *(["resid_mid"] if plan.norm == "post" else []),
    ]
    read = ["attn_in", *(["resid_pre"] if plan.attn_norm else [])]
    keys = model.points.resolve(["embed"], None, model.refused) + model.points.resolve(read, layers, model.refused)
    if below:
        keys += model.points.resolve(written, below, model.refused)
    model.points.resolve(["scores"], layers, model.refused)
    return keys


def _require_visible(places: list[tuple[int, int]] | None, layers: Iterable["SourceParts"]) -> None:
    if places is None:
        return
    seen = torch.stack([(part.key_at >= 0).any(dim=1).any(dim=0) for part in layers]).any(dim=0)
    for (query, key), visible in zip(places, seen.tolist(), strict=True):
        if not visible:
            raise InputError(f"token {query} cannot see key {key} in any text; choose a key it may look at.")


# -- who has written into the stream -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A step in the making of the stream: all that is there goes through `norm`, then `write` is added."""

    label: str
    write: Callable[[], Tensor] | None
    norm: FrozenNorm | None = None


class _Stream:
    """The stream as a list of steps, which grows with the layers that the model has gone through."""

    def __init__(self, model: HookedModel, stack: Stack, embeddings: Mapping[str, Tensor], batch: Batch) -> None:
        self._model, self._stack, self._embeddings = model, stack, embeddings
        self._shape = (*batch.ids.shape, model.d_model)
        self._wide = torch.promote_types(model.dtype, torch.float32)
        self._steps: list[_Step] = []
        self._depth = 0
        """The layers below this one have their steps in the list."""

    def contributions(
        self, layer: int, values: Values
    ) -> Iterator[tuple[str, Float[Tensor, "batch position d_model"]]]:
        """Each writer's label and its part in `attn_in` of a layer; the parts add up to it."""
        if not self._steps:
            self._add_embeddings(values)
        for below in range(self._depth, layer):
            self._add_layer(below, values)
        self._depth = max(self._depth, layer)
        steps = list(self._steps)
        norm = self._stack.architecture.attn_norm
        if norm is not None:
            steps.append(self._normed("norm shift", self._stack.module(layer, norm), values["resid_pre", layer]))
        for place, step in enumerate(steps):
            if step.write is None:
                continue
            part = step.write()
            for later in steps[place + 1 :]:
                part = part if later.norm is None else later.norm(part)
            yield step.label, part

    def _add_embeddings(self, values: Values) -> None:
        by_label = {"token embedding": values["embed", None], **dict(sorted(self._embeddings.items()))}
        self._steps += [_Step(label, partial(self._everywhere, value)) for label, value in by_label.items()]
        norm = self._stack.architecture.embed_norm
        if norm is not None:
            total = torch.stack([value.expand(self._shape) for value in by_label.values()]).sum(dim=0)
            self._steps.append(self._normed("embedding norm shift", submodule(self._model.base, norm), total))

    def _add_layer(self, layer: int, values: Values) -> None:
        plan, stack = self._stack.architecture, self._stack
        weights, label = stack.weights(layer), f"L{layer}"
        branch: FrozenNorm | None = None
        shift: Tensor | None = None
        if plan.attn_out:
            branch, shift = frozen_norm(stack.module(layer, plan.attn_out), values["attn_raw", layer], self._wide)
        for head in range(stack.n_heads):
            z, W_O = values["z", layer][:, :, head], weights.W_O[head].detach()
            self._steps.append(_Step(f"{label}H{head}", partial(self._written, z, W_O, branch)))
        if weights.b_O is not None:
            b_O = weights.b_O.detach()[None]
            self._steps.append(_Step(f"{label} b_O", partial(self._written, b_O.new_ones(1), b_O, branch)))
        if shift is not None:
            self._steps.append(_Step(f"{label} attention norm shift", partial(self._everywhere, shift)))
        mlp_out = values["mlp_out", layer]
        mlp = _Step(f"{label} MLP", partial(self._everywhere, mlp_out))
        if plan.norm == "pre":
            self._steps.append(mlp)
            return
        assert plan.mid_norm is not None and plan.post_norm is not None
        mid_norm, middle = stack.module(layer, plan.mid_norm), values["resid_mid", layer]
        end = PostNormEnd.of(stack, layer).before_norm(middle, mlp_out)
        self._steps += [
            self._normed(f"{label} attention norm shift", mid_norm, middle),
            mlp,
            self._normed(f"{label} MLP norm shift", stack.module(layer, plan.post_norm), end),
        ]

    def _everywhere(self, value: Tensor) -> Float[Tensor, "batch position d_model"]:
        return value.to(self._wide).expand(self._shape)

    def _written(self, z: Tensor, W_O: Tensor, branch: FrozenNorm | None) -> Float[Tensor, "batch position d_model"]:
        """z W_O, through the norm between attention and stream where there is one."""
        write = self._everywhere(z.to(self._wide) @ W_O.to(self._wide))
        return write if branch is None else branch(write)

    def _normed(self, label: str, norm: nn.Module, x: Tensor) -> _Step:
        frozen, shift = frozen_norm(norm, x, self._wide)
        return _Step(label, None if shift is None else partial(self._everywhere, shift), frozen)


# -- from the writers to the cells ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """What is read off a block of rows for its cells."""

    key_at: Int[Tensor, "batch head cell"]
    preference: Float[Tensor, "batch head cell"]


class _Walk:
    """Takes every chosen layer apart as the model goes through it: its rows as they come, its writers at the end."""

    def __init__(
        self,
        model: HookedModel,
        stack: Stack,
        batch: Batch,
        chosen: Mapping[int, tuple[int, ...]],
        places: list[tuple[int, int]] | None,
        embeddings: Mapping[str, Tensor],
    ) -> None:
        self._model, self._batch, self._chosen = model, batch, chosen
        length, device = batch.ids.shape[1], model.device
        cells = [(row, -1) for row in range(length)] if places is None else places
        self._query_at, keys = torch.tensor(cells, device=device).unbind(dim=1)
        self._key_at = None if places is None else keys
        self._stream = _Stream(model, stack, embeddings, batch)
        self._audit: ScoreAudit | None = None
        self._rows: list[_Rows] = []
        self.parts: dict[int, SourceParts] = {}
        self.residual: dict[int, Float[Tensor, " head"]] = {}

    def __call__(self, block: RowBlock) -> None:
        if block.rows.start == 0:
            visible = block.mask.visible(range(block.mask.queries))
            self._audit, self._rows = ScoreAudit(self._model.stacks, block, block["attn_in"], visible), []
        assert self._audit is not None
        self._audit.add(block)
        self._rows.append(self._read(block, self._audit.parts))
        if block.rows.stop == block.mask.queries:
            self._audit.require_exact(self._chosen[block.layer])
            self._finish(block, self._audit)

    def _read(self, block: RowBlock, ledger: ScoreParts) -> _Rows:
        start, stop = block.rows.start, block.rows.stop
        scores = block.scores.to(ledger.query_from_input.dtype)
        keep, width = block.visible & block.real[:, None, :, None], scores.shape[-1]
        here = (self._query_at >= start) & (self._query_at < stop)
        rows = self._query_at[here] - start
        row, seen = scores[:, list(self._chosen[block.layer])][:, :, rows], keep[:, :, rows]
        if self._key_at is None:
            key = row.masked_fill(~seen, -torch.inf).argmax(dim=-1)
        else:
            key = self._key_at[here].expand(*row.shape[:3])
        # Beyond the block's width no row sees a key.
        inside = key.clamp(max=width - 1)
        valid = (key < width) & seen.expand_as(row).gather(-1, inside[..., None])[..., 0]
        mean = row.masked_fill(~seen, 0.0).sum(dim=-1) / seen.sum(dim=-1).clamp_min(1)
        return _Rows(
            key.masked_fill(~valid, -1),
            row.gather(-1, inside[..., None])[..., 0].sub(mean).masked_fill(~valid, torch.nan),
        )

    def _finish(self, block: RowBlock, audit: ScoreAudit) -> None:
        heads, query_at, ledger = list(self._chosen[block.layer]), self._query_at, audit.parts
        key_at = torch.cat([rows.key_at for rows in self._rows], dim=-1)
        seen = (ledger.visible & self._batch.mask[:, None, :, None])[:, :, query_at]
        keys_seen = seen.sum(dim=-1)
        average = seen.to(ledger.query_from_input.dtype) / keys_seen.clamp_min(1)[..., None]

        def at_cells(made: ScoreParts) -> tuple[Tensor, Tensor, Tensor]:
            key = made.key_from_input[:, heads]
            place = key_at.clamp(min=0)[..., None].expand(-1, -1, -1, key.shape[-1])
            return made.query_from_input[:, heads][:, :, query_at], key.gather(2, place), average @ key

        labels, found = [], []
        written = torch.zeros_like(block.values["attn_in", block.layer][..., 0], dtype=average.dtype)
        for label, part in self._stream.contributions(block.layer, block.values):
            labels.append(label)
            written += torch.linalg.vector_norm(part, dim=-1)
            found.append(at_cells(parts_of(self._model.stacks, block, part, ledger.visible)))
        query, key, mean_key = (torch.stack(parts, dim=3) for parts in zip(*found, strict=True))
        whole_query, whole_key, _ = at_cells(ledger)
        expected = (whole_query * whole_key).sum(dim=-1)
        total = (query.sum(dim=3) * key.sum(dim=3)).sum(dim=-1)
        valid = key_at >= 0
        difference = ((total - expected) * ledger.scale).masked_fill(~valid, 0.0)
        # Every writer was rounded as it was added to the stream.
        rounding = product_rounding(self._model.dtype, self._model.d_model) + steps_rounding(self._model.dtype)
        by_query, by_key = audit.rounded(written, written, rounding)
        allowed = product_error(
            by_query.at(lambda value: value[:, heads][..., query_at]),
            by_key.at(lambda value: value[:, heads].gather(-1, key_at.clamp(min=0))),
            ledger.scale,
            query.shape[-1],
        )
        excess = torch.where(difference == 0, 0.0, difference / allowed)
        residual, excess = (value.abs().amax(dim=(0, 2)).double() for value in (difference, excess))
        require_exact(block.layer, heads, "the writers of its query_key", residual, excess)
        self.residual[block.layer] = residual
        self.parts[block.layer] = SourceParts(
            layer=block.layer,
            heads=self._chosen[block.layer],
            sources=tuple(labels),
            scale=ledger.scale,
            query=query,
            key=key,
            mean_key=mean_key,
            query_at=query_at,
            key_at=key_at,
            keys_seen=keys_seen[:, 0],
            preference=torch.cat([rows.preference for rows in self._rows], dim=-1),
        )


# -- the result ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceParts:
    """What every writer puts into the queries and keys of the cells of one layer.

    Queries and keys are those of the score: with the multipliers of a qk-norm, and rotated where the model rotates.
    """

    layer: int
    heads: tuple[int, ...]
    """The heads chosen, in the order of the axis `head`."""
    sources: tuple[str, ...]
    """The writers, in the order of the axis `source`, which is the order in which they write."""
    scale: float
    query: Float[Tensor, "batch head cell source d_head"]
    key: Float[Tensor, "batch head cell source d_head"]
    mean_key: Float[Tensor, "batch head cell source d_head"]
    """The mean of the keys that the cell's row sees."""
    query_at: Int[Tensor, " cell"]
    key_at: Int[Tensor, "batch head cell"]
    """−1 where the text has no such cell: at padding, or where the row does not see the key."""
    keys_seen: Int[Tensor, "batch cell"]
    """How many keys the cell's row sees."""
    preference: Float[Tensor, "batch head cell"]
    """The model's whole score of the cell, above the mean score of the keys that its row sees."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes that heads and writers label."""
        return {"head": len(self.heads), "source": len(self.sources)}

    def pairs(
        self, place: int, cells: Bool[Tensor, "batch cell"], *, contrast: bool
    ) -> Float[Tensor, "source_q source_k"]:
        """The mean over cells of what each pair of writers puts into the score of the head at `place`."""
        query, key = self.query[:, place][cells], self.key[:, place][cells]
        return pair_terms(query, key - self.mean_key[:, place][cells] if contrast else key, self.scale)

    def with_choice(self, place: int) -> Bool[Tensor, "batch cell"]:
        """The cells of a head whose row sees more than one key."""
        return (self.key_at[:, place] >= 0) & (self.keys_seen > 1)


@dataclass(frozen=True, repr=False)
class SourceDecomposition(Result):
    """The query_key part of attention scores as a sum over pairs of writers, with the proof that it adds up.

    What a pair puts into a score says little by itself: the softmax takes no notice of what all keys of a row have in
    common. So what it puts in beyond its mean over the keys that the row sees is given as well, the contrast
    c_st = scale · q_s(i)·(k_t(j) − mean_j' k_t(j')). Together with the contrasts of the score's other terms they add up
    to ln(p_ij / the geometric mean of the row's p). They are signed: writers may work against each other.
    """

    SUBTRACT = "subtract the matrices of a head: one.matrix(layer, head) - other.matrix(layer, head)"

    parts: tuple[SourceParts, ...]
    """What the matrices are made of, layer by layer."""
    residual: Float[Tensor, "layer head"]
    """Largest |Σ pairs − query_key| over the cells, in units of the score; NaN for heads that were not chosen."""
    tokens: tuple[tuple[str, ...], ...]
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axis that texts label."""
        return {"batch": len(self.tokens)}

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
        """The writers below the deepest of the layers; `sources_of` says which are below another."""
        return max(self.parts, key=lambda part: part.layer).sources

    def sources_of(self, layer: int) -> tuple[str, ...]:
        """The writers below one layer: the names of both axes of its matrices.

        "L1H4" is a head, "L1 b_O" the bias of its layer's W_O, "L1 MLP" an MLP, "norm shift" the β of the norm that
        makes the layer's `attn_in`, and other norms have their place in the name.
        """
        return self._part(layer).sources

    def matrix(
        self,
        layer: int,
        head: int,
        query: int | None = None,
        key: int | None = None,
        *,
        sequence: int = 0,
        contrast: bool = False,
    ) -> Float[Tensor, "source_q source_k"]:
        """What each pair of writers puts into the score of a cell, or on average over the cells.

        With `query`, the cell of that query (and `key`) in one text; without, the mean over all cells of all texts
        whose row sees more than one key. It adds up to `query_key` of the ledger or, with `contrast`, to what that is
        beyond its mean over the keys that the row sees.
        """
        part, place = self._head(layer, head)
        flag("contrast", contrast)
        if query is None:
            return part.pairs(place, part.with_choice(place), contrast=contrast)
        return part.pairs(place, self._cell(part, place, query, key, sequence), contrast=contrast)

    def explain(self, layer: int, head: int, query: int, key: int | None = None, *, sequence: int = 0) -> str:
        """One line: how far the key stands out from the others, and which pairs of writers make it so.

        All numbers are against the mean over the keys that the row sees. A share is a pair's part in the whole of
        query_key there; as contributions are signed, it may exceed 100 %. No shares are given where query_key as a
        whole speaks against the key.
        """
        part, place = self._head(layer, head)
        here = self._cell(part, place, query, key, sequence)
        words, seen = self.tokens[sequence], int(part.keys_seen[here])
        where = f"L{layer}H{head} at {query} “{visible_token(words[query])}”"
        if seen == 1:
            return f"{where} sees one key only, so it has no choice"
        found = int(part.key_at[:, place][here])
        looks = "looks most at" if self.provenance.options["cells"] is None else "and"
        pairs = part.pairs(place, here, contrast=True)
        total, count = float(pairs.sum()), len(part.sources)
        named, rest = [], total
        for number in pairs.flatten().abs().argsort(descending=True, stable=True)[:_NAMED].tolist():
            source_q, source_k = divmod(number, count)
            value = float(pairs[source_q, source_k])
            share = with_minus_signs(f" ({value / total:.0%})") if total > 0 else ""
            size = signed(value, ".2f") + share
            named.append(f"{part.sources[source_k]} (key) × {part.sources[source_q]} (query) {size}")
            rest -= value
        if pairs.numel() > len(named):
            named.append(f"{pairs.numel() - len(named)} other pairs {signed(rest, '.2f')}")
        preference = float(part.preference[:, place][here])
        others = "; most of the score is of the other terms" if abs(preference) > 2 * abs(total) else ""
        return (
            f"{where} {looks} {found} “{visible_token(words[found])}”: score {signed(preference, '.2f')} against the "
            f"mean of the {seen} keys it sees, of which query_key {signed(total, '.2f')}: {', '.join(named)}{others}"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row a head and pair of writers: layer, head, source_q, source_k, query_key, contrast; means over the cells
        whose row sees more than one key.
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

    def __repr__(self) -> str:
        heads = sum(len(part.heads) for part in self.parts)
        cells = self.provenance.options["cells"]
        where = "the highest key of each row" if cells is None else f"{len(cells)} cells"
        return (
            f"SourceDecomposition({self.provenance.model!r}, {heads} heads of layers {list(self.layers)}, {where} in "
            f"{len(self.tokens)} × {len(self.tokens[0])} tokens: {len(self.sources)} writers; residual "
            f"{float(self.residual.nan_to_num(0.0).max()):.1e})"
        )

    def _part(self, layer: int) -> SourceParts:
        return self.parts[self.layers.index(member("layer", layer, self.layers, "the layers decomposed"))]

    def _head(self, layer: int, head: int) -> tuple[SourceParts, int]:
        part = self._part(layer)
        return part, part.heads.index(member("head", head, part.heads, f"those decomposed in layer {layer}"))

    def _cell(
        self, part: SourceParts, place: int, query: int, key: int | None, sequence: int
    ) -> Bool[Tensor, "batch cell"]:
        """True at the one cell meant."""
        length = len(self.tokens[0])
        query = index_of("query", query, length)
        sequence = index_of("sequence", sequence, len(self.tokens), f"{len(self.tokens)} texts were run")
        key_at = part.key_at[sequence, place]
        found = (part.query_at == query) & (key_at >= 0)
        if key is not None:
            found &= key_at == index_of("key", key, length)
        there = int(found.sum())
        if there > 1:
            keys = ", ".join(str(each) for each in key_at[found].tolist())
            raise InputError(f"`key` must say which cell of query {query} is meant: one of {keys}.")
        if there == 0:
            wanted = f"({query}, {key})" if key is not None else f"({query}, ...)"
            raise InputError(
                f"this result holds no cell {wanted} in text {sequence}. Ask for one that the head may look at: "
                f"am.decompose_by_source(..., cells=[{wanted}])."
            )
        here = torch.zeros_like(part.keys_seen, dtype=torch.bool)
        here[sequence] = found
        return here


_NAMED: Final = 3
"""How many pairs of writers a line of explanation names."""

_TENSORS: Final = ("query", "key", "mean_key", "query_at", "key_at", "keys_seen", "preference")
