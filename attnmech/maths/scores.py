"""The terms that add up exactly to an attention score (docs/formulas.md#attention-scores).

score_ij = scale · (R_i q_i)·(R_j k_j) + position_ij + mask_ij,   q_i = x_i W_Q + b_Q,   k_j = x_j W_K + b_K

with R the rotation in rotary models (none elsewhere). If the model normalises queries and keys (qk-norm), the norm's
multipliers are frozen at their values and included in R; the bias terms then depend on query and key. If it soft-caps
scores at c, the change made by the cap is a separate term. Multiplied out:

| term         | formula                           | depends on            |
|--------------|-----------------------------------|-----------------------|
| `query_key`  | scale · (x_i W_Q) R_{j−i} (x_j W_K) | query and key       |
| `key_bias`   | scale · b_Q R_{j−i} (x_j W_K)       | key; with rotary also distance |
| `query_bias` | scale · (x_i W_Q) R_{j−i} b_K       | query; with rotary also distance |
| `constant`   | scale · b_Q R_{j−i} b_K             | nothing; with rotary distance |
| `position`   | the model's own position term     | distance              |
| `content_to_position` | scale · q_i · K_p (DeBERTa, XLNet: `attnmech.maths.relative`) | query and distance |
| `position_to_content` | scale · k_j · Q_p (DeBERTa)      | key and distance      |
| `softcap`    | c · tanh(Σ/c) − Σ, Σ the sum of the terms above | query and key |
| `mask`       | 0 where j is visible, else the lowest finite number | query and key |

In `content_to_position` and `position_to_content`, q_i and k_j include b_Q and b_K, as in DeBERTa's paper, and K_p and
Q_p include the biases of their projections. XLNet's q_i is x_i W_Q alone; the products of its biases with a distance
are part of `position`.

Centred terms (docs/formulas.md#centred-terms) split q and k at reference means, q̄ of a query head and k̄ of a kv head,
instead of at their biases. With q_i = q̄ + q̃_i and k_j = k̄ + k̃_j, rotated back, and R_i the rotation at i,

| term         | formula                           | depends on            |
|--------------|-----------------------------------|-----------------------|
| `query_key`  | scale · (R_i q̃_i)·(R_j k̃_j)       | query and key         |
| `key_bias`   | scale · (R_i q̄)·(R_j k̃_j)         | key; with rotary also distance |
| `query_bias` | scale · (R_i q̃_i)·(R_j k̄)         | query; with rotary also distance |
| `position`   | the model's own + scale · (R_i q̄)·(R_j k̄) | distance; nothing without either |
| `content_to_position` | scale · q̃_i · K_p; scale · q̄ · K_p is in `position` | query and distance |
| `position_to_content` | scale · k̃_j · Q_p; scale · k̄ · Q_p is in `position` | key and distance |

These add up to the same scores whatever the means are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear

from .norms import FrozenNorm
from .precision import least_rounding, product_rounding, steps_rounding
from .relative import RELATIVE_TERMS, Relative

Rotate = Callable[[Tensor], Tensor]  # rotates `[batch head position d_head]` by the angles of each position


@dataclass(frozen=True)
class ScoreParts:
    """One layer's queries and keys, each split into a part from the input and a part from a bias.

    It stores everything that the terms need. Parts are rotated if the model rotates queries and keys. Without rotation,
    a bias part is the same at every position: `[head d_head]`, or `[batch head d_head]` if it differs between texts.
    """

    query_from_input: Float[Tensor, "batch head query d_head"]
    key_from_input: Float[Tensor, "batch head key d_head"]
    query_from_bias: Float[Tensor, "*places d_head"] | None
    key_from_bias: Float[Tensor, "*places d_head"] | None
    scale: float
    position: Float[Tensor, "#batch #head #query key"] | None
    visible: Bool[Tensor, "batch 1 query key"]
    softcap: float | None = None
    sink: Float[Tensor, " head"] | None = None  # an extra logit in the softmax denominator of each row, if there is one
    wavelengths: Float[Tensor, " d_head"] | None = None
    """The number of tokens in which each dimension turns once, infinite if it does not turn; None without rotation."""
    centred: bool = False
    """Whether queries and keys are split at reference means. If so, the bias parts are the rotated means, `position`
    includes their product, and there is no `constant`.
    """
    relative: Relative | None = None  # tables of relative positions that multiply queries and keys, if there are any

    def centred_at(
        self, query_mean: Float[Tensor, "*places d_head"], key_mean: Float[Tensor, "*places d_head"]
    ) -> "ScoreParts":
        """Splits queries and keys at means, which are rotated as they enter the score; the scores stay the same."""
        query, key = self.query, self.key
        return replace(
            self,
            query_from_input=query - by_position(query_mean),
            key_from_input=key - by_position(key_mean),
            query_from_bias=query_mean,
            key_from_bias=key_mean,
            centred=True,
        )

    def followed_by(
        self,
        keys: Float[Tensor, "batch head more d_head"],
        position: Float[Tensor, "#batch #head #query all_keys"] | None,
        visible: Bool[Tensor, "batch 1 query all_keys"],
    ) -> "ScoreParts":
        """Appends the scores of keys that belong to no token (`nn.MultiheadAttention`'s learned key).

        These keys have no bias, so b_K, which is in the terms of every key, is subtracted from them.
        """
        bias = self.key_from_bias
        content = keys if bias is None else keys - by_position(bias)
        return replace(
            self, key_from_input=torch.cat((self.key_from_input, content), dim=2), position=position, visible=visible
        )

    @property
    def query(self) -> Float[Tensor, "batch head query d_head"]:
        """The queries as they enter the score."""
        return _whole(self.query_from_input, self.query_from_bias)

    @property
    def key(self) -> Float[Tensor, "batch head key d_head"]:
        """The keys as they enter the score."""
        return _whole(self.key_from_input, self.key_from_bias)

    def names(self) -> tuple[str, ...]:
        """The terms of these scores, in the order of the table."""
        by_distance = self.relative is not None and (self.relative.by_input or self.relative.alone is not None)
        has = {
            "query_key": True,
            "key_bias": self.query_from_bias is not None,
            "query_bias": self.key_from_bias is not None,
            "constant": self.query_from_bias is not None and self.key_from_bias is not None and not self.centred,
            "position": self.position is not None or self.centred or by_distance,
            **{name: self.relative is not None and name in self.relative.names for name in RELATIVE_TERMS},
            "softcap": self.softcap is not None,
            "mask": True,
        }
        return tuple(name for name, present in has.items() if present)

    def names_along_row(self) -> tuple[str, ...]:
        """The terms that differ between the keys of a row, and therefore survive the softmax.

        Without rotation `query_bias` and `constant` are the same for every key.
        """
        rotated = self.key_from_bias is not None and self.key_from_bias.ndim == 4
        fixed = {"mask"} if rotated else {"mask", "query_bias", "constant"}
        if not rotated and self.position is None and self.relative is None:
            fixed.add("position")
        return tuple(name for name in self.names() if name not in fixed)

    def differs_by_query(self, name: str) -> bool:
        """Whether a term differs between queries for the same key."""
        by_query = self.query_from_bias is not None and self.query_from_bias.ndim == 4
        if name == "position":
            native = self.position is not None and self.position.shape[2] > 1
            return native or self.relative is not None or (self.centred and by_query)
        return by_query if name in ("key_bias", "constant") else True

    def of_text(
        self, number: int, here: Int[Tensor, " place"], at_keys: Int[Tensor, " key_place"] | None = None
    ) -> "ScoreParts":
        """Returns the parts of one text of the batch at some of its positions, as a batch of one.

        `at_keys` are the positions of the keys if the keys belong to another text; by default they are the same.
        """
        at_keys = here if at_keys is None else at_keys

        def cut(part: Tensor | None, places: Tensor) -> Tensor | None:
            if part is None or part.ndim == 2:
                return part
            return part[number][None] if part.ndim == 3 else part[number][None, :, places]

        position = self.position
        if position is not None:
            position = position[number if position.shape[0] > 1 else 0][None, ..., at_keys]
            position = position if position.shape[2] == 1 else position[:, :, here]
        return replace(
            self,
            query_from_input=self.query_from_input[number][None, :, here],
            key_from_input=self.key_from_input[number][None, :, at_keys],
            query_from_bias=cut(self.query_from_bias, here),
            key_from_bias=cut(self.key_from_bias, at_keys),
            position=position,
            visible=self.visible[number][None, :, here][..., at_keys],
            relative=None if self.relative is None else self.relative.of_places(here),
        )

    def term(self, name: str, rows: slice = slice(None)) -> Float[Tensor, "#batch #head #row #key"]:
        """Computes one term for a block of query rows; axes along which it does not change have length 1."""
        if name == "mask":
            dtype = self.query_from_input.dtype
            seen = self.visible[:, :, rows]
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
        if name == "position":
            return self._by_distance(rows)
        if name in RELATIVE_TERMS:
            return self._relative(name, rows)
        if name == "softcap":
            assert self.softcap is not None
            uncapped = self._sum(rows)
            return self.softcap * torch.tanh(uncapped / self.softcap) - uncapped
        return self._product(name, rows)

    @property
    def _splits_relative(self) -> bool:
        """Whether the products of biases (or means) with a distance count as `position`."""
        return self.relative is not None and (self.centred or self.relative.by_input)

    def _by_distance(self, rows: slice) -> Float[Tensor, "#batch #head #row #key"]:
        """The term `position`: the model's own, and the products of means or biases with a distance."""
        parts = []
        if self.position is not None:
            parts.append(self.position[:, :, rows] if self.position.shape[2] > 1 else self.position)
        if self.centred:
            parts.append(self._product("constant", rows))
        if self.relative is not None:
            parts += [self.scale * self.relative.by_distance(rows)] if self.relative.alone is not None else []
            parts += self._relative_biases(self.relative, rows) if self._splits_relative else []
        return reduce(torch.add, parts)

    def _relative_biases(self, relative: Relative, rows: slice) -> list[Tensor]:
        query, key, products = self.query_from_bias, self.key_from_bias, []
        if relative.keys is not None and query is not None:
            bias = by_position(query[:, :, rows] if query.ndim == 4 else query)
            products.append(self.scale * relative.content_to_position(bias, rows))
        if relative.queries is not None and key is not None:
            products.append(self.scale * relative.position_to_content(by_position(key), rows))
        return products

    def _relative(self, name: str, rows: slice) -> Float[Tensor, "batch head row key"]:
        assert self.relative is not None
        if name == "content_to_position":
            query = self.query_from_input if self._splits_relative else self.query
            return self.scale * self.relative.content_to_position(query[:, :, rows], rows)
        key = self.key_from_input if self._splits_relative else self.key
        return self.scale * self.relative.position_to_content(key, rows)

    def _product(self, name: str, rows: slice) -> Float[Tensor, "#batch head #row #key"]:
        """Returns scale · the product of the parts of queries and keys that form a term."""
        query = self.query_from_bias if name in ("key_bias", "constant") else self.query_from_input
        key = self.key_from_bias if name in ("query_bias", "constant") else self.key_from_input
        assert query is not None and key is not None
        return self.scale * (by_position(query[:, :, rows] if query.ndim == 4 else query) @ by_position(key).mT)

    def over(
        self, dimensions: Bool[Tensor, " d_head"], rows: slice = slice(None)
    ) -> Float[Tensor, "batch head row key"]:
        """Returns scale · Σ_d q_d k_d over some dimensions of queries and keys as they enter the score."""
        return self.scale * (self.query[:, :, rows, dimensions] @ self.key[..., dimensions].mT)

    def total(self, rows: slice = slice(None)) -> Float[Tensor, "batch head row key"]:
        """Returns Σ terms without the mask: what the score would be if every key were visible."""
        total = self._sum(rows)
        return total if self.softcap is None else self.softcap * torch.tanh(total / self.softcap)

    def _sum(self, rows: slice) -> Float[Tensor, "batch head row key"]:
        return reduce(torch.add, (self.term(name, rows) for name in self.names() if name not in ("softcap", "mask")))


def score_parts(
    x: Float[Tensor, "batch position d_query_in"],
    W_Q: Float[Tensor, "head d_query_in d_head"],
    b_Q: Float[Tensor, "head d_head"] | None,
    W_K: Float[Tensor, "kv_head d_key_in d_head"],
    b_K: Float[Tensor, "kv_head d_head"] | None,
    *,
    scale: float,
    position: Float[Tensor, "#batch #head #query key"] | None,
    visible: Bool[Tensor, "batch 1 query key"],
    rotate: Rotate | None = None,
    query_norm: FrozenNorm | None = None,
    key_norm: FrozenNorm | None = None,
    norm_last: bool = False,
    softcap: float | None = None,
    sink: Float[Tensor, " head"] | None = None,
    key_x: Float[Tensor, "batch key d_key_in"] | None = None,
    shift: Float[Tensor, " d_query_in"] | None = None,
) -> ScoreParts:
    """Splits q and k of one layer into input and bias parts.

    With `shift` (β of the norm before x), the part of x that is the same everywhere counts as bias:
    q = (x − β) W_Q + (β W_Q + b_Q), and likewise k. `key_x` is the input of the keys if it differs from x. With
    `norm_last`, queries and keys are normalised after the rotation.
    """
    group = W_Q.shape[0] // W_K.shape[0]
    query, query_bias = _split(x, W_Q, b_Q, shift)
    key, key_bias = _split(x, W_K, b_K, shift) if key_x is None else _split(key_x, W_K, b_K, None)
    query, query_bias = _as_scored(query, query_bias, rotate, query_norm, norm_last)
    key, key_bias = _as_scored(key, key_bias, rotate, key_norm, norm_last)
    key = repeat(key, "batch kv key d_head -> batch (kv group) key d_head", group=group)
    if key_bias is not None:
        kv = "kv" if key_bias.ndim == 2 else "batch kv key"
        key_bias = repeat(key_bias, f"{kv} d_head -> {kv.replace('kv', '(kv group)')} d_head", group=group)
    return ScoreParts(query, key, query_bias, key_bias, scale, position, visible, softcap, sink)


def of_part(
    x: Float[Tensor, "*batch position d_in"],
    W: Float[Tensor, "head d_in d_head"],
    *,
    rotate: Rotate | None = None,
    norm: FrozenNorm | None = None,
    norm_last: bool = False,
) -> Float[Tensor, "*batch head position d_head"]:
    """What a part of the input adds to the queries or keys in the score; linear in x, since `norm` is frozen."""
    return _as_scored(product_by_head(x, W), None, rotate, norm, norm_last)[0]


def _as_scored(
    from_input: Tensor, from_bias: Tensor | None, rotate: Rotate | None, norm: FrozenNorm | None, norm_last: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns input and bias parts after the frozen norm and the rotation; the norm's shift counts as bias."""
    if from_bias is not None and (rotate is not None or norm is not None):
        batch, _, positions, _ = from_input.shape
        from_bias = repeat(from_bias, "head d_head -> batch head position d_head", batch=batch, position=positions)
    if rotate is not None and norm_last:
        from_input, from_bias = rotate(from_input), None if from_bias is None else rotate(from_bias)
    if norm is not None:
        from_input, from_bias = norm(from_input), None if from_bias is None else norm(from_bias)
        if norm.shift is not None:
            from_bias = norm.shift.expand_as(from_input) if from_bias is None else from_bias + norm.shift
    if rotate is not None and not norm_last:
        from_input, from_bias = rotate(from_input), None if from_bias is None else rotate(from_bias)
    return from_input, from_bias


def _split(
    x: Tensor, W: Tensor, b: Tensor | None, shift: Tensor | None
) -> tuple[Float[Tensor, "batch head position d_head"], Float[Tensor, "head d_head"] | None]:
    if shift is not None:
        from_shift = einsum(shift, W, "d_model, head d_model d_head -> head d_head")
        x, b = x - shift, from_shift if b is None else from_shift + b
    return product_by_head(x, W), b


def by_position(part: Tensor) -> Float[Tensor, "#batch head #position d_head"]:
    """Returns a part with all four axes, of length 1 along the axes on which it does not depend."""
    if part.ndim == 4:
        return part
    return part[:, :, None] if part.ndim == 3 else part[None, :, None]


def _whole(from_input: Tensor, from_bias: Tensor | None) -> Float[Tensor, "batch head position d_head"]:
    return from_input if from_bias is None else from_input + by_position(from_bias)


@dataclass(frozen=True)
class Rounded:
    """The norms of a layer's queries or keys, and how far rounding may move each entry."""

    norm: Float[Tensor, "*places"]  # ‖|part from the input| + |part from the bias|‖, as they enter the score
    error: Float[Tensor, "*places"]  # δ, the rounding of one entry

    def at(self, place: Callable[[Tensor], Tensor]) -> "Rounded":
        """Returns the same numbers at other indices, such as some rows or cells."""
        return Rounded(place(self.norm), place(self.error))


def product_error(query: Rounded, key: Rounded, scale: float, d_head: int) -> Float[Tensor, "*places"]:
    """Returns the largest distance that rounding explains between two computations of scale · q·k.

    scale · (δq ‖k‖ + ‖q‖ δk + (2 + √d) ε ‖q‖ ‖k‖): the errors of a head's d entries are nearly independent, so that
    Σ_d δq_d k_d is about δq ‖k‖. No other head or row enters it.
    """
    by_product = product_rounding(key.norm.dtype, d_head) * query.norm
    return abs(scale) * ((query.error + by_product) * key.norm + query.norm * key.error)


def score_rounding(
    query: Rounded,
    key: Rounded,
    scale: float,
    *,
    d_head: int,
    score: Float[Tensor, "batch head query key"],
    position: Float[Tensor, "#batch #head #query key"] | None = None,
) -> Float[Tensor, "batch head query key"]:
    """Returns the largest distance that rounding explains between a score and the sum of its terms.

    `product_error` + 4ε (|position| + |score|); the score is the model's, so this ε, with its smallest step, is
    that of the model's precision.
    """
    products = product_error(
        query.at(lambda value: value[..., None]), key.at(lambda value: value[..., None, :]), scale, d_head
    )
    size = score.abs().to(products.dtype)
    size = size if position is None else size + position.abs()
    return products + steps_rounding(score.dtype) * size + least_rounding(score.dtype)


def relative_rounding(
    relative: Relative, query: Rounded, key: Rounded, scale: float, rows: slice
) -> Float[Tensor, "batch head row #key"]:
    """Returns the `product_error` of the products with tables of relative positions; `query` covers these rows.

    The longest row of a table bounds every row of it.
    """
    allowed: list[Tensor] = []
    sides = query.at(lambda value: value[..., None]), key.at(lambda value: value[..., None, :])
    for table, side in zip((relative.keys, relative.queries), sides, strict=True):
        if table is None:
            continue
        longest = torch.linalg.vector_norm(table.to(side.norm), dim=-1).amax(dim=-1)[:, None, None]
        allowed.append(product_error(side, Rounded(longest, torch.zeros_like(longest)), scale, table.shape[-1]))
    if relative.alone is not None:
        allowed.append(steps_rounding(relative.alone.dtype) * abs(scale) * relative.by_distance(rows).abs())
    return reduce(torch.add, allowed)


def rank_keys(
    scores: Float[Tensor, "*axes query key"], visible: Bool[Tensor, "*axes query key"], ranks: int
) -> Int[Tensor, "*axes query rank"]:
    """Returns the keys of each row from the highest score down; −1 where the row sees fewer keys.

    Among equal scores, the earlier key comes first.
    """
    order = scores.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[..., :ranks]
    seen = visible.sum(dim=-1, keepdim=True)
    return order.masked_fill(torch.arange(order.shape[-1], device=order.device) >= seen, -1)


def term_shares(
    terms: Mapping[str, Float[Tensor, "*axes query key"]],
    visible: Bool[Tensor, "*axes query key"],
    keys: Int[Tensor, "*axes query rank"],
) -> dict[str, Float[Tensor, "*axes query rank"]]:
    """Computes the share of each term in the score of a key, above the term's minimum in the row (figure 2).

    share = (t_ij − min_j t_ij) / Σ_terms (t_ij − min_j t_ij), the minimum over the visible keys of the row: a
    constant per row does not change the softmax, so it must not change the share. NaN where the row sees
    only one key, or no term exceeds its minimum, or `keys` is −1.
    """
    shifted = {}
    for name, term in terms.items():
        cells = term.expand(*keys.shape[:-1], visible.shape[-1])
        least = cells.masked_fill(~visible, torch.inf).amin(dim=-1, keepdim=True)
        shifted[name] = cells.gather(-1, keys.clamp(min=0)) - least
    total = torch.stack(list(shifted.values())).sum(dim=0)
    valid = (keys >= 0) & (visible.sum(dim=-1, keepdim=True) > 1) & (total > 0)
    return {name: (value / total).masked_fill(~valid, torch.nan) for name, value in shifted.items()}


def names_along_row(layers: Iterable[ScoreParts]) -> tuple[str, ...]:
    """The terms that differ between the keys of a row in any layer; a layer that does not rotate may lack some."""
    return tuple(dict.fromkeys(name for parts in layers for name in parts.names_along_row()))


def ranked_shares(
    parts: ScoreParts, names: Iterable[str], ranks: int, visible: Bool[Tensor, "batch 1 query key"]
) -> tuple[Int[Tensor, "batch head query rank"], dict[str, Float[Tensor, "batch head query rank"]]]:
    """Returns the keys of each row from the highest score down, and the `term_shares` of some terms in their scores."""
    total = parts.total()
    seen = visible.expand_as(total)
    keys = rank_keys(total, seen, ranks)
    return keys, term_shares({name: parts.term(name) for name in names}, seen, keys)


def product_by_head(
    x: Float[Tensor, "*batch position d_in"], W: Float[Tensor, "head d_in d_head"]
) -> Float[Tensor, "*batch head position d_head"]:
    """Computes x W for every head as one matrix product.

    >>> import torch
    >>> x, W = torch.randn(2, 3, 4), torch.randn(5, 4, 6)
    >>> torch.allclose(product_by_head(x, W)[1, 4], x[1] @ W[4], atol=1e-5)
    True
    """
    made = linear(x, rearrange(W, "head d_in d_head -> (head d_head) d_in"))
    return rearrange(made, "... position (head d_head) -> ... head position d_head", head=len(W))
