"""Sums, row by row, the covariance of the scores with the part of each direction.

With g_i = scale · Σ_j (s_ij − s̄_i) k_j, the key part of all directions at once, the covariance of direction r in row i
is (q_i·a_r)(c_r·g_i), both rotated back: no direction needs scores of its own.

The directions are the singular directions of W_Q R W_Kᵀ of a head: docs/formulas.md#query-key-directions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ...errors import InputError
from ...maths.float64 import as_float64, put
from ...maths.variance_shares import deviations_along_rows
from ...model.attention.observed import Notes, RowBlock
from ...model.parts.norms import WideNorm
from ...model.reading.vocabulary import Vocabulary, vocabulary_of
from ...model.run.hooked import HookedModel
from ...model.stack.carried import input_norm
from ...model.stack.centring import Centre
from ...model.stack.ledger import made_of_parts
from ...model.stack.stack import Stack
from ...runs.haystacks import ordinary_tokens
from ...runs.reducer import Reducer, Run, State
from ...runs.row_means import closed, sum_of_states
from ...runs.score_audits import ScoreAudits, require_whole
from ...runs.token_types import ROW_CLASSES, row_classes

_RANK: Final = 1e-6  # singular values below this share of the largest are rounding


@dataclass(frozen=True)
class Directions:
    """The singular directions of W_Q R W_Kᵀ = Σ_r σ_r u_r v_rᵀ of some heads, and how they split queries.

    A query q is a sum of parts: q = Σ_r (q·a_r) c_r, where q·a_r = √σ_r (x·u_r) for q = x W_Q. A direction beyond the
    rank of W_Q R W_Kᵀ has a_r = c_r = 0.
    """

    singular: Float[Tensor, "*heads direction"]
    query: Float[Tensor, "*heads direction d_model"]  # u_r, of length 1: what queries read
    key: Float[Tensor, "*heads direction d_model"]  # v_r, of length 1: what keys read at the distance of R
    a: Float[Tensor, "*heads d_head direction"]
    c: Float[Tensor, "*heads d_head direction"]


def directions_of(
    W_Q: Float[Tensor, "*heads d_model d_head"], W_K: Float[Tensor, "*heads d_model d_head"]
) -> Directions:
    """Computes the singular directions of W_Q W_Kᵀ, the largest first; the largest entry of each u_r is positive.

    With W_Q = Q_1 T_1, W_K = Q_2 T_2 and T_1 T_2ᵀ = U Σ Vᵀ: u = Q_1 U, v = Q_2 V, a = T_2ᵀ V Σ^(−1/2) and
    c = T_1ᵀ U Σ^(−1/2).

    >>> W_Q, W_K = torch.randn(2, 5, 3, dtype=torch.float64)
    >>> split = directions_of(W_Q, W_K)
    >>> torch.allclose((split.query.mT * split.singular) @ split.key, W_Q @ W_K.T)
    True
    >>> torch.allclose(split.a @ split.c.T, torch.eye(3, dtype=torch.float64))
    True
    """
    first, second = torch.linalg.qr(W_Q), torch.linalg.qr(W_K)
    split = torch.linalg.svd(first.R @ second.R.mT)
    u, v = first.Q @ split.U, second.Q @ split.Vh.mT
    sign = u.gather(-2, u.abs().argmax(dim=-2, keepdim=True)).sign()
    root = split.S.rsqrt().where(_RANK * split.S[..., :1] < split.S, 0.0)[..., None, :]
    return Directions(
        singular=split.S,
        query=(u * sign).mT,
        key=(v * sign).mT,
        a=second.R.mT @ (split.Vh.mT * sign) * root,
        c=first.R.mT @ (split.U * sign) * root,
    )


_PROBE: Final = 5  # the number of tokens on which the formula of a layer's norm is compared with the norm
_BASIS: Final = 64  # the number of basis vectors of the stream that are mapped at a time


@dataclass(frozen=True, eq=False)
class CovarianceSums(Reducer):
    """Sums each direction's covariance with the scores, and the scores' variance, by text; counts ordinary tokens."""

    a: Float[Tensor, "layer head d_head direction"]
    c: Float[Tensor, "layer head d_head direction"]
    centre: Centre | None
    first_key: bool

    points = ("attn_in",)

    def start(self, run: Run) -> State:
        """Sums of 0 for each text."""
        require_whole(run, self.centre)
        texts, directions = len(run.batch.ids), self.a.shape[-1]
        state = {
            "classes": row_classes(run.batch),
            "sums": torch.zeros(directions, run.n_layers, run.n_heads, texts, dtype=torch.float64),
            "counts": torch.zeros(1, run.n_layers, run.n_heads, texts, dtype=torch.float64),
            "tokens": torch.zeros(run.model.n_vocab, dtype=torch.long),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows, and checks the sum of the terms against the scores."""
        rows, width = slice(block.rows.start, block.rows.stop), block.scores.shape[-1]
        audits = ScoreAudits.of(run, self)
        parts = audits.parts(run, block, self.centre)
        total = parts.total(rows)[..., :width]
        audits.add(block, total)
        seen = block.visible & block.real[:, None, :, None]
        if not self.first_key:
            seen = seen & ~block.batch.keys(block.stack).first[:, None, None, :width]
        deviations = deviations_along_rows(total, seen)
        query, read = parts.query_from_input[:, :, rows], parts.scale * deviations @ parts.key_from_input[:, :, :width]
        rotation = run.stack.rotation(block.layer, block.notes)
        if rotation is not None:
            here = rotation.at(rows)
            query, read = here.back(query), here.transposed(read)
        a, c = (matrix[block.index].to(query) for matrix in (self.a, self.c))
        covariance, variance = (query @ a) * (read @ c), torch.linalg.vecdot(deviations, deviations)
        chosen = state["classes"][:, [ROW_CLASSES.index(name) for name in ("ordinary", "special")], rows].any(dim=1)
        for name, value in (("sums", covariance), ("counts", variance[..., None])):
            kept = as_float64(value.masked_fill(~chosen[:, None, :, None], 0.0)).sum(dim=2)
            state[name][:, block.index] += rearrange(kept, "batch head direction -> direction head batch")
        if block.rows.start == block.index == 0:
            ordinary = state["classes"][:, ROW_CLASSES.index("ordinary")]
            state["tokens"] += torch.bincount(block.batch.ids[ordinary], minlength=len(state["tokens"]))

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts."""
        return closed({name: value for name, value in state.items() if name != "classes"}, run)

    def merge(self, one: State, other: State) -> State:
        return sum_of_states(one, other)


@dataclass(frozen=True, eq=False)
class Reader:
    """What the heads of a stack read: the norm before attention, W_Q and W_K, as they act at two positions."""

    model: HookedModel
    stack: Stack
    vocabulary: Vocabulary
    distance: int

    @classmethod
    def of(cls, model: HookedModel, distance: int) -> "Reader":
        """Raises `InputError` if what a head reads does not follow from W_Q and W_K alone."""
        if len(model.stacks) > 1:
            raise InputError("qk_directions is for heads of one stack; this model has several stacks.")
        stack = model.output_stack
        plan = stack.architecture
        if not model.reads_tokens:
            raise InputError("qk_directions lists the tokens that a direction reads, and this model reads no tokens.")
        if plan.windows:
            raise InputError(
                f"the heads of {plan.name} have a local and a global set of W_Q and W_K; the token decides which of "
                "them reads it."
            )
        if any(
            weights.W_Q.shape[1] != model.d_model or weights.W_K.shape[1] != model.d_model
            for weights in map(stack.weights, stack.layers)
        ):
            raise InputError(
                "qk_directions needs queries and keys that are computed from the stream alone; this model computes "
                "some of them from latents."
            )
        limit = plan.position_limit
        if limit is not None and distance >= limit:
            raise InputError(f"`distance` must be below {limit}, the number of positions; got {distance}.")
        return cls(model, stack, vocabulary_of(model, stack), distance)

    @property
    def precision(self) -> torch.dtype:
        """The precision of what is read."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def normed(self, layer: int, tokens: Tensor) -> Float[Tensor, "token d_model"]:
        """x̂ of tokens alone: their embeddings through the norm before attention, without its γ and β."""
        embedded = self.vocabulary.rows(tokens, self.precision)
        norm = self._norm(layer)
        if norm is None:
            return embedded
        return WideNorm(torch.ones_like(norm.gamma), None, norm.epsilon, norm.centred)(embedded)

    def directions(self, layers: Sequence[int]) -> Iterator[Directions]:
        """The directions of each layer's heads, in float64 on the CPU."""
        blocks: dict[int, RowBlock] = {}
        token = int(ordinary_tokens(self.model)[0])
        self.model.forward(
            self.model.encode(torch.full((1, self.distance + 1), token)),
            rows=[lambda block: blocks.update({block.layer: block})],
            layers=[(self.stack.label, layer) for layer in layers],
        )
        for layer in layers:
            notes = blocks[layer].notes
            made = [self._made(layer, notes, basis) for basis in torch.split(self._basis(layer), _BASIS)]
            W_Q, W_K = (torch.cat(of_basis, dim=1) for of_basis in zip(*made, strict=True))
            split, rotation = directions_of(W_Q, W_K), self.stack.rotation(layer, notes)
            if rotation is not None:
                here = rotation.at(slice(self.distance, None)).on(W_Q.device)
                split = replace(split, a=here.transposed(split.a.mT[None])[0].mT, c=here.back(split.c.mT[None])[0].mT)
            yield split

    def _made(self, layer: int, notes: Notes, basis: Float[Tensor, "some d_model"]) -> tuple[Tensor, Tensor]:
        """The queries at the last position and the keys at the first that some of x̂ makes, `[head some d_head]`."""
        parts = basis[:, None, None].expand(-1, 1, self.distance + 1, -1)
        query, key = made_of_parts(self.stack, layer, notes, parts)
        return query[:, 0, :, -1].transpose(0, 1).cpu().double(), key[:, 0, :, 0].transpose(0, 1).cpu().double()

    def _basis(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """What each dimension of x̂ adds to `attn_in`."""
        norm = self._norm(layer)
        eye = torch.eye(self.model.d_model, dtype=self.precision, device=self.model.device)
        if norm is None:
            return eye
        eye = eye - 1 / len(eye) if norm.centred else eye
        return eye * norm.gamma

    def _norm(self, layer: int) -> WideNorm | None:
        like = self.vocabulary.rows(slice(_PROBE), self.model.dtype)
        return input_norm(self.stack, layer, like[None], self.precision)
