"""Splits the queries and keys of a layer at reference means (docs/formulas.md#centred-terms).

The means are those of q_i = R_i⁻¹ q_rot,i (the query that enters the score, rotated back), and likewise of k_j. The
terms therefore add up exactly, in whatever order the model norms, scales and rotates.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ...basics.arguments import shown
from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.scores import ScoreParts
from ...results.mean_qk import MeanQK, padded
from ...results.score_terms import Reference
from ..attention.observed import LayerAttention, RowBlock
from ..parts.position import Rotation
from .stack import Stack

Centre: TypeAlias = Literal["mean", "position"] | MeanQK
"""The reference: each text's own means, those of the other texts at each position, or fixed ones."""

_KINDS: Final = ("mean", "position")

LEAST_TEXTS: Final = 50  # a mean at a position needs at least this many texts


def checked_centre(centre: object) -> Centre | None:
    """The reference; raises `InputError` for anything else."""
    if centre is None or isinstance(centre, MeanQK) or (isinstance(centre, str) and centre in _KINDS):
        return centre  # type: ignore[return-value]
    raise InputError(f'`centre` must be None, "mean", "position" or what am.mean_qk returns; got {shown(centre)}.')


def require_means_of(means: MeanQK, weights: str, stack: Stack, layers: Iterable[int]) -> None:
    """Raises `InputError` if the means are of other weights or another stack, lack one of the layers, or hold NaN."""
    require_fitting(means, stack, layers)
    require_weights(means, weights)


def require_weights(means: MeanQK, weights: str) -> None:
    """Raises `InputError` if the means are of other weights, or hold NaN."""
    if means.provenance.weights != weights:
        raise InputError(
            f"the means were taken on {means.provenance.model!r}, weights {means.provenance.weights[:12]}…, not on "
            f"this model, weights {weights[:12]}…; take them again: am.mean_qk(model, corpus)."
        )
    for name in ("query_sums", "key_sums"):
        if not bool(torch.isfinite(getattr(means, name)).all()):
            raise InputError(f"the means must be finite; `{name}` holds NaN or infinity.")


def require_fitting(means: MeanQK, stack: Stack, layers: Iterable[int]) -> None:
    """Raises `InputError` if the means are of another stack or other sizes, or lack one of the layers."""
    sizes = means.stack, means.query_sums.shape[2:], means.key_sums.shape[2:]
    if sizes != (stack.label, (stack.n_heads, stack.d_head), (stack.n_kv_heads, stack.d_head)):
        raise InputError(
            f"the means are of {means.query_sums.shape[2]} heads of the stack {means.stack!r}, d_head "
            f"{means.query_sums.shape[3]}; here there are {stack.n_heads} of {stack.label!r}, d_head {stack.d_head}. "
            "Take them again: am.mean_qk(model, corpus)."
        )
    missing = sorted(set(layers) - set(means.layers))
    if missing:
        raise InputError(f"the means are of layers {list(means.layers)}; there are none for {missing}.")


def reference_of(centre: Centre, batch: Batch, stack: Stack) -> Reference:
    """Describes, for a result, the means at which its scores are split."""
    by_position = is_by_position(centre)
    if isinstance(centre, MeanQK):
        return Reference("fixed", by_position, (), str(centre))
    if centre == "position":
        return Reference("position", True, (), f"the means of the other {len(batch.ids) - 1} texts at each position")
    counts = _counted(batch.queries(stack.label), by_position=False).sum(dim=1).tolist()
    return Reference("mean", False, tuple(counts), "the text's own means")


def is_by_position(centre: Centre) -> bool:
    return centre.per_position if isinstance(centre, MeanQK) else centre == "position"


def centred(
    parts: ScoreParts,
    stack: Stack,
    block: RowBlock | LayerAttention,
    batch: Batch,
    centre: Centre,
    *,
    own_out: bool = True,
    empty: bool = False,
) -> ScoreParts:
    """The terms of a layer's scores, with its queries and keys split at reference means.

    With `own_out`, a text that is part of fixed means is first taken out of them. With `empty`, a text without any
    token that counts for its own mean is split at 0, for callers that use none of its rows.
    """
    rotation = stack.rotation(block.layer, block.notes)
    queries = _Role("query", block.layer, batch.queries(stack.label), batch, own_out, empty)
    keys = replace(queries, name="key", batch=batch.keys(stack.label))
    return parts.centred_at(
        _split_at(queries, parts.query, rotation, 1, centre),
        _split_at(keys, parts.key, rotation, stack.n_heads // stack.n_kv_heads, centre),
    )


def sums_of(
    value: Float[Tensor, "batch head position d_head"], batch: Batch, *, by_position: bool
) -> tuple[Float64[Tensor, "batch place head d_head"], Int[Tensor, "batch place"]]:
    """For each text, the sum and the count of its queries or keys: at each position, or over all positions.

    Special tokens are excluded and, unless each position has its own mean, the first token too: the key of a sink would
    distort the mean.
    """
    chosen = _counted(batch, by_position)
    kept = rearrange(value, "batch head position d_head -> batch position head d_head")
    kept = as_float64(kept.masked_fill(~chosen[:, :, None, None], 0.0))
    chosen, places = chosen.to(kept.device), batch.places.to(kept.device)
    if not by_position:
        return kept.sum(dim=1, keepdim=True), chosen.sum(dim=1, keepdim=True)
    sums = kept.new_zeros(kept.shape).scatter_add(1, places[:, :, None, None].expand_as(kept), kept)
    return sums, places.new_zeros(places.shape).scatter_add(1, places, chosen.long())


def _counted(batch: Batch, by_position: bool) -> Bool[Tensor, "batch position"]:
    ordinary = ~batch.is_special & ~batch.first
    return batch.mask & (ordinary | batch.first if by_position else ordinary)


@dataclass(frozen=True)
class _Role:
    name: Literal["query", "key"]
    layer: int
    batch: Batch  # the tokens from which they are made: in an encoder-decoder model, the source or the target
    inputs: Batch  # all inputs of the model, which identify a text
    own_out: bool
    empty: bool  # whether a text may lack tokens that count


def _split_at(
    role: _Role,
    value: Float[Tensor, "batch head position d_head"],
    rotation: Rotation | None,
    group: int,
    centre: Centre,
) -> Float[Tensor, "*places d_head"]:
    """The means of queries or keys, rotated as they enter the score."""
    unrotated = value[:, ::group] if rotation is None else rotation.back(value[:, ::group])
    by_position = is_by_position(centre)
    sums, counts = sums_of(unrotated, role.batch, by_position=by_position)
    mean = _reference(role, sums, counts, centre).to(value)
    mean = repeat(mean, "batch place head d_head -> batch (head group) place d_head", group=group)
    if by_position:
        place = role.batch.places[:, None, :, None].expand(-1, mean.shape[1], -1, mean.shape[3])
        mean = mean.gather(2, place)
    elif rotation is None:
        return mean[:, :, 0]
    mean = mean.expand(-1, -1, value.shape[2], -1)
    return mean if rotation is None else rotation(mean)


def _reference(
    role: _Role, sums: Float64[Tensor, "batch place head d_head"], counts: Int[Tensor, "batch place"], centre: Centre
) -> Float64[Tensor, "batch place head d_head"]:
    """The mean for each text, at each of its places."""
    if isinstance(centre, MeanQK):
        return _without(centre, role, sums, counts)
    if centre == "position":
        others = counts.sum(dim=0) - counts
        _require_texts(others, role.batch)
        return (sums.sum(dim=0) - sums) / others.clamp_min(1)[:, :, None, None]
    for text, count in enumerate(counts[:, 0].tolist()):
        if not count and not role.empty:
            raise InputError(
                f'text {text} has only its first and special tokens, so centre="mean" has nothing to take a '
                "mean over. Leave it out, or give fixed means: centre=am.mean_qk(model, corpus)."
            )
    return sums / counts.clamp_min(1)[:, :, None, None]


def _without(
    means: MeanQK, role: _Role, sums: Float64[Tensor, "batch place head d_head"], counts: Int[Tensor, "batch place"]
) -> Float64[Tensor, "batch place head d_head"]:
    """Fixed means minus each text's own part in them: (S − m · own) / (N − m · n_own) if it is in them m times."""
    batch, places = role.batch, counts.shape[1]
    every, numbers = (value.to(sums.device) for value in means.sums(role.name, role.layer))
    if means.per_position and (longest := int(batch.lengths.max())) > len(numbers):
        raise InputError(
            f"the means are for texts of up to {len(numbers)} tokens; got one of {longest}. Take them from longer "
            "texts, or cut this one."
        )
    every, numbers = (padded(value[:places], places, 0) for value in (every, numbers))
    own = means.times(role.inputs.digests) if role.own_out else torch.zeros(len(batch.ids), dtype=torch.long)
    times = own.to(sums.device)[:, None]
    left = numbers - times * counts
    if means.per_position:
        _require_texts(left, batch)
    elif bool((left <= 0).any()):
        raise InputError("the means are only over tokens of the text that is split; give am.mean_qk more texts.")
    return (every - times[..., None, None] * sums) / left.clamp_min(1)[:, :, None, None]


def _require_texts(others: Int[Tensor, "batch place"], batch: Batch) -> None:
    """Raises `InputError` if too few other texts have a token at some position of the batch."""
    count = others.gather(1, batch.places).masked_fill(~batch.mask, LEAST_TEXTS)
    if bool((count >= LEAST_TEXTS).all()):
        return
    text, at = divmod(int(count.argmin()), count.shape[1])
    raise InputError(
        f"a mean for each position needs {LEAST_TEXTS} other texts that reach it; position "
        f"{int(batch.places[text, at])} of "
        f"text {text} has {int(count[text, at])}. Give more texts of that length, or cut the texts."
    )
