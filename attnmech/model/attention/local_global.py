"""Attention within a window, with a few global tokens that have separate projections (Longformer, LED's encoder).

A global token attends to every token through separate W_Q, W_K and W_V, and every token attends to it. The heads of
these layers have two halves, so d_head doubles: queries, keys and values hold first the output of the local
projections, then the output of the global ones. A row's query is 0 in the half that the row does not use, and so is its
z:

    score_ij = scale · (m_i ⊙ q_i)·k_j,   z_i = m_i ⊙ Σ_j pattern_ij v_j,   m_i = (1, 0), or (0, 1) for a global token

One softmax, one ledger and one W_O, applied to the sum of the halves, are thus exact for both kinds of rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

from ...batch import Batch
from ...errors import InputError
from ...maths.norms import FrozenNorm
from ..parts.mask import MaskRule, everything
from ..parts.weights import Separate, as_stored
from .attend import attend
from .replaced_attention import StandIn

GLOBAL_MASK = "global_attention_mask"  # transformers' name for the input that is 1 at global tokens, else 0


@dataclass(frozen=True)
class WindowRule(MaskRule):
    """Queries see the keys up to `reach` tokens before and after them, and global tokens; these see all keys."""

    reach: int = 0
    is_global: Bool[Tensor, "batch position"] | None = None

    @classmethod
    def of(cls, ids: Tensor, attention_mask: Tensor | None, global_attention_mask: Tensor | None) -> "WindowRule":
        """The rule of a batch, from the masks that transformers' models take; a layer sets how far its rows reach."""
        texts, length = ids.shape
        real = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        chosen = None if global_attention_mask is None else global_attention_mask.bool() & real
        chosen = None if chosen is None or not bool(chosen.any()) else chosen
        return cls(texts, length, length, 0, 0, everything, real, real.device, is_global=chosen)

    def reaching(self, reach: int) -> "WindowRule":
        """The rule of a layer, shared by all layers with the same reach."""

        def allows(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            near = (query - key).abs() <= reach
            return near if self.is_global is None else near | self.is_global[text, query] | self.is_global[text, key]

        return self.once(("reaching", reach), lambda: replace(self, allows=allows, reach=reach, _known={}))

    def row_blocks(self, cells: int, *, gathered: bool) -> Iterator[range]:
        """Blocks of local rows, sized by how many keys they reach, and of rows that are global in some text."""
        if not gathered:
            yield from super().row_blocks(cells, gathered=False)
            return
        for run in self._runs():
            if run.start in self._global_rows:
                step = cells // self.keys
            else:
                # A block of n rows has n + width keys.
                width = 2 * self.reach + len(self._global_rows)
                step = int(((width / 2) ** 2 + cells) ** 0.5 - width / 2)
            for start in range(run.start, run.stop, max(16, step)):
                yield range(start, min(run.stop, start + max(16, step)))

    def gathered(self, rows: range) -> Int[Tensor, " key"] | None:
        """The keys that the rows of a block reach, with the global keys; None if they are most of all keys."""
        return self.once(("gathered", rows), lambda: self._reached(rows))

    def _reached(self, rows: range) -> Int[Tensor, " key"] | None:
        if rows.start in self._global_rows:
            return None
        reached = range(max(0, rows.start - self.reach), min(self.keys, rows.stop + self.reach))
        keys = sorted({*reached, *self._global_rows})
        return torch.tensor(keys, device=self.device) if 2 * len(keys) <= self.keys else None

    def visible_at(self, rows: range, keys: Int[Tensor, " key"] | None) -> Bool[Tensor, "batch 1 row key"]:
        """`visible` for some of the keys; for all keys if `keys` is None."""
        if keys is None:
            return self.visible(rows)
        assert self.padding is not None
        row = torch.arange(rows.start, rows.stop, device=self.device)[:, None]
        seen = ((row - keys).abs() <= self.reach).expand(self.batch, -1, -1)
        if self.is_global is not None:
            seen = seen | self.is_global[:, row] | self.is_global[:, None, keys]
        return (seen & self.padding[:, None, keys])[:, None]

    @cached_property
    def _global_rows(self) -> frozenset[int]:
        return frozenset() if self.is_global is None else frozenset(self.is_global.any(dim=0).nonzero()[:, 0].tolist())

    def _runs(self) -> Iterator[range]:
        """Runs of consecutive rows of one kind, local or global."""
        for _, run in groupby(range(self.queries), self._global_rows.__contains__):
            places = list(run)
            yield range(places[0], places[-1] + 1)


class Halves(nn.Module):
    """Joins two projections of the same input: for each head, the output of the first, then that of the second."""

    def __init__(self, first: nn.Module, second: nn.Module, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = first, second, heads

    def forward(self, x: Float[Tensor, "*places d_model"]) -> Float[Tensor, "*places features"]:
        """Both outputs, head by head."""
        return self._by_head(self.first(x), self.second(x))

    def as_used(self, name: str) -> Tensor | None:
        """The weight or the bias of both projections together."""
        parts = [as_stored(part, name) for part in (self.first, self.second)]
        if any(part is None for part in parts):
            return None
        return rearrange(parts, "half (head d) ... -> (head half d) ...", head=self.heads)

    def _by_head(self, *parts: Tensor) -> Tensor:
        return rearrange(list(parts), "half ... (head d) -> ... (head half d)", head=self.heads)


def sum_of_halves(z: Float[Tensor, "*places features"], heads: int) -> Float[Tensor, "*places half_features"]:
    """The input of the model's own W_O: the sum of the two halves of each head's z, one of them 0."""
    halves: Tensor = rearrange(z, "... (head half d) -> half ... (head d)", head=heads, half=2)
    return halves[0] + halves[1]


def local_half(value: Float[Tensor, "*places d_head"], mask: MaskRule) -> Float[Tensor, "*places some_d_head"]:
    """The half of queries or keys that local tokens use; all dimensions in a model without global tokens.

    Raises `InputError` for texts with global tokens, which use the other half.
    """
    if not isinstance(mask, WindowRule):
        return value
    if mask.is_global is not None:
        raise InputError(
            "one space of queries and keys needs one set of projections, but global tokens have their own; give texts "
            f'without global tokens: {{"input_ids": ..., "{GLOBAL_MASK}": zeros}}.'
        )
    return value[..., : value.shape[-1] // 2]


class LongformerAttention(StandIn):
    """The attention of Longformer and of LED's encoder: a window, and global tokens."""

    layout = Separate("both_query", "both_key", "both_value")

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.d_half = int(original.head_dim)  # type: ignore[arg-type]
        self.reach = int(original.one_sided_attn_window_size)  # type: ignore[arg-type]

    def forward(self, hidden_states: Tensor, attention_mask: WindowRule, **_: Any) -> tuple[Tensor]:
        """transformers' signature: returns the z of all heads."""
        q, k, v = self.project(hidden_states, self.heads, self.heads)
        used = _halves_used(attention_mask, self.d_half).to(q.dtype)
        by_head = used[:, :, None].expand(-1, -1, self.heads, -1)
        whole, in_force = by_head.new_ones(1).expand_as(by_head), self.attnmech_site.in_force
        # The gate is a constant, but a user may ask for the gradient at it.
        gate = by_head.clone().requires_grad_() if in_force.under_way.gradients else by_head
        norms = FrozenNorm(by_head, centred=False), FrozenNorm(whole, centred=False)
        in_force.note(make_query_norm=lambda: norms[0], make_key_norm=lambda: norms[1], gate=gate)
        z = attend(
            q * used[:, None], k, v, scale=self.d_half**-0.5, position=None,
            mask=attention_mask.reaching(self.reach), site=self.attnmech_site,
        )  # fmt: skip
        return (rearrange(z * by_head, "batch position head d_head -> batch position (head d_head)"),)


def _halves_used(rule: WindowRule, d_half: int) -> Float[Tensor, "batch position d_head"]:
    """m: 1 in the half that a row uses, 0 in the other; 0 in both at padding."""
    assert rule.padding is not None
    chosen = torch.zeros_like(rule.padding) if rule.is_global is None else rule.is_global
    both = torch.stack((rule.padding & ~chosen, rule.padding & chosen), dim=-1)
    return repeat(both.float(), "batch position half -> batch position (half d)", d=d_half)


def halves_of(batch: Batch, like: Float[Tensor, "batch position head d_head"]) -> Tensor:
    """m of a batch, from its global tokens, with the axes of q and z."""
    used = like.new_zeros(*batch.mask.shape, 2, like.shape[-1] // 2)
    for text, row in enumerate(global_tokens(batch)):
        for position in batch.mask[text].nonzero()[:, 0].tolist():
            used[text, position, int(row[position])] = 1
    return used.flatten(2)[:, :, None].expand_as(like)


def global_tokens(batch: Batch) -> Bool[Tensor, "batch position"]:
    mask = batch.extra.get(GLOBAL_MASK)
    return torch.zeros_like(batch.mask) if mask is None else mask.bool().expand_as(batch.mask) & batch.mask


def globals_by_default(model: nn.Module) -> Callable[[Batch], Bool[Tensor, "batch position"]]:
    """The tokens that transformers makes global in a model of this class: the first of a text to classify, or none."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return lambda batch: torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids) == 0
    return lambda batch: torch.zeros_like(batch.mask)


def with_halves(base: Any) -> None:
    """Gives each attention of a Longformer the projections of both halves, and stops the model's padding.

    transformers pads each text to a multiple of the window, which our attention does not need, and builds a mask
    [query, key] only to keep one of its rows.
    """
    layers = base.encoder.layer
    for layer in layers:
        _halve(layer.attention.self, layer.attention.output.dense)
    base.forward = partial(_through, layers, base.embeddings, base.pooler)


def with_halves_in_encoder(base: Any) -> None:
    """Gives each attention of LED's encoder the projections of both halves, and stops the encoder's padding."""
    encoder = base.encoder

    def embed(input_ids: Tensor, **_: Any) -> Tensor:
        embedded = encoder.embed_tokens(input_ids) + encoder.embed_positions(input_ids.shape)
        return encoder.layernorm_embedding(embedded)  # type: ignore[no-any-return]

    for layer in encoder.layers:
        _halve(layer.self_attn.longformer_self_attn, layer.self_attn.output)
    encoder.forward = partial(_through, encoder.layers, embed, None)


def _halve(attention: Any, out: nn.Module) -> None:
    """Gives one attention the projections of both halves; W_O, with its weight twice, reads their sum (one is 0)."""
    heads, of_sum = attention.num_heads, out.forward
    for name in ("query", "key", "value"):
        pair = attention.get_submodule(name), attention.get_submodule(f"{name}_global")
        attention.add_module(f"both_{name}", Halves(*pair, heads))

    def as_used(name: str) -> Tensor | None:
        value = as_stored(out, name)
        if name == "bias" or value is None:
            return value
        return repeat(value, "d_model (head d) -> d_model (head half d)", head=heads, half=2)

    out.as_used = as_used  # type: ignore[assignment]
    out.forward = lambda z: of_sum(sum_of_halves(z, heads))


def _through(
    layers: Iterable[nn.Module],
    embed: Callable[..., Tensor],
    pooler: Callable[[Tensor], Tensor] | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    global_attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> LongformerBaseModelOutputWithPooling:
    """The forward pass of a Longformer, or of LED's encoder, which has no pooler."""
    rule = WindowRule.of(input_ids, attention_mask, global_attention_mask)
    x = embed(input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids)
    for layer in layers:
        x = layer(x, attention_mask=rule)[0]
    pooled = None if pooler is None else pooler(x)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)


def patterns_of(
    bands: Sequence[Tensor], global_rows: Sequence[Tensor] | None, batch: Batch, windows: Sequence[int]
) -> list[Float[Tensor, "batch head query key"]]:
    """Assembles transformers' patterns over all keys from its bands, columns of global keys and rows of global tokens.

    In transformers' band, a local row has first the global tokens of its text, then the window from left to right.
    """
    chosen = global_tokens(batch)
    most = int(chosen.sum(dim=1).max())
    patterns = []
    for layer, (band, window) in enumerate(zip(bands, windows, strict=True)):
        rows = band.shape[2]
        whole = band.new_zeros(*band.shape[:2], rows, rows + window)
        at = torch.arange(rows, device=band.device)
        for offset in range(window + 1):
            whole[:, :, at, at + offset] = band[..., most + offset]
        whole = whole[..., window // 2 : window // 2 + rows]
        for text, places in enumerate(chosen):
            keys = places.nonzero()[:, 0]
            # A global key inside the window counts only as a global key.
            whole[text][..., keys] = band[text, :, :, : len(keys)]
            if len(keys) and global_rows is not None:
                whole[text][:, keys] = global_rows[layer][text][:, :rows, : len(keys)].transpose(1, 2)
        patterns.append(whole)
    return patterns
