"""Reads a model's final norm and head, and the direction of the stream that a logit reads.

logit_a = s · N(x) W_U[a] + b[a], soft-capped to c · tanh(logit / c) if the model has a cap, with N(x) = γ ⊙ (x − mean
x) · r + β, r = 1 / √(var x + ε) (a LayerNorm) or γ ⊙ x · r, r = 1 / √(mean x² + ε) (an RMSNorm). With r frozen at its
value, a part u of x adds r · u·d to the logit before the cap; d = s γ ⊙ W_U[a], minus its mean if the norm subtracts
the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...errors import InputError
from ...maths.metrics import require_logits
from ...maths.norms import reciprocal_rms
from ...maths.precision import product_rounding, steps_rounding
from ..parts.modules import submodule
from ..parts.norms import epsilon_of, is_centred, weight_of
from ..parts.weights import bias_of
from ..run.hooked import HookedModel

_BLOCK: Final = 2**23  # the largest number of weights of W_U that are copied at a time


@dataclass(frozen=True)
class Unembedding:
    """The final norm and the head of one model, read from its weights; in float32 at least."""

    gamma: Float[Tensor, " d_model"]
    beta: Float[Tensor, " d_model"] | None
    epsilon: float
    centred: bool
    W_U: Float[Tensor, "vocab d_model"]
    bias: Float[Tensor, " vocab"] | None
    logit_scale: float
    softcap: float | None
    dtype: torch.dtype  # the precision of the model
    in_float32: bool = True  # whether the final norm computes in float32 in a float64 model: all but torch's LayerNorm
    has_norm: bool = True

    @property
    def unit(self) -> str:
        """The unit of a head's contribution to a logit; with a soft cap, logits before the cap."""
        return "logits" if self.softcap is None else "pre-cap logits"

    def direction(
        self, answers: Int[Tensor, " batch"], against: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch d_model"]:
        """The direction that reads the stream: d of the answer, minus d of the token with which it is compared."""
        rows = self._rows_of(answers)
        rows = rows if against is None else rows - self._rows_of(against)
        scaled = self.logit_scale * rows * self.gamma
        return scaled - scaled.mean(dim=-1, keepdim=True) if self.centred else scaled

    def above_mean(self, answers: Int[Tensor, "*places"]) -> Float[Tensor, "*places d_model"]:
        """The direction that reads how far a token's logit is above the mean over the vocabulary."""
        scaled: Tensor = self.logit_scale * (self._rows_of(answers) - self._mean_row) * self.gamma
        return scaled - scaled.mean(dim=-1, keepdim=True) if self.centred else scaled

    def _rows_of(self, tokens: Int[Tensor, "*places"]) -> Float[Tensor, "*places d_model"]:
        """The rows of W_U; raises `InputError` for a token without one."""
        require_logits(tokens, len(self.W_U))
        return self.W_U[tokens].to(self.gamma.dtype)

    @cached_property
    def _mean_row(self) -> Float[Tensor, " d_model"]:
        return torch.stack([rows.sum(dim=0) for _, rows in self._rows()]).sum(dim=0) / len(self.W_U)

    @cached_property
    def _row_norms(self) -> Float[Tensor, " vocab"]:
        return torch.cat([torch.linalg.vector_norm(rows, dim=-1) for _, rows in self._rows()])

    def scale(self, stream: Float[Tensor, "*places d_model"]) -> Float[Tensor, "*places"]:
        """r, the factor of the final norm; 1 in a model without one."""
        centred = self._centred(stream)
        return reciprocal_rms(centred, self.epsilon) if self.has_norm else torch.ones_like(centred[..., 0])

    def logits(self, stream: Float[Tensor, "*places d_model"]) -> Float[Tensor, "*places vocab"]:
        normed = self._normed(stream)
        uncapped = normed.new_empty(*normed.shape[:-1], len(self.W_U))
        for place, rows in self._rows():
            uncapped[..., place] = self.logit_scale * (normed @ rows.T)
        uncapped = uncapped if self.bias is None else uncapped + self.bias.to(uncapped)
        return uncapped if self.softcap is None else self.softcap * torch.tanh(uncapped / self.softcap)

    def rounding(
        self, stream: Float[Tensor, "*places d_model"], logits: Float[Tensor, "*places vocab"]
    ) -> Float[Tensor, "*places vocab"]:
        """The largest error of each logit of the final stream that rounding can explain.

        s ((2 + √d) ε ‖n‖ + 4ε max_d |n_d|) ‖W_U[a]‖ + 4ε (|b| + |logit|) with n = |N(x)| + r |γ ⊙ mean x|: the rounding
        of a product of d terms, and of what the model rounds to its own precision. Even in float64 models,
        transformers' own norms count as float32.
        """
        removed = self.gamma * self.scale(stream)[..., None] * (stream.to(self.gamma) - self._centred(stream))
        size = self._normed(stream).abs() + removed.abs()
        in_norm = torch.float32 if self.in_float32 and self.dtype == torch.float64 else self.dtype
        by_product = product_rounding(self.dtype, len(self.gamma)) * torch.linalg.vector_norm(size, dim=-1)
        by_steps = steps_rounding(in_norm) * size.amax(dim=-1)
        values = logits.abs()
        values = values if self.bias is None else values + self.bias.abs().to(values)
        products: Tensor = abs(self.logit_scale) * (by_product + by_steps)[..., None] * self._row_norms
        return products + steps_rounding(self.dtype) * values

    def _rows(self) -> Iterator[tuple[slice, Float[Tensor, "row d_model"]]]:
        """W_U in float32 at least; if that takes a copy, a block of rows at a time."""
        vocab, width = self.W_U.shape
        size = vocab if self.W_U.dtype == self.gamma.dtype else max(1, _BLOCK // width)
        for start in range(0, vocab, size):
            place = slice(start, min(start + size, vocab))
            yield place, self.W_U[place].to(self.gamma.dtype)

    def _centred(self, stream: Tensor) -> Tensor:
        x: Tensor = stream.to(self.gamma)
        return x if not self.centred else x - x.mean(dim=-1, keepdim=True)

    def _normed(self, stream: Tensor) -> Tensor:
        normed: Tensor = self.gamma * self._centred(stream) * self.scale(stream)[..., None]
        return normed if self.beta is None else normed + self.beta


def unembedding_of(model: HookedModel) -> Unembedding:
    """A model's final norm and head; raises `InputError`, with the reason, if logits are not one norm and matrix."""
    plan = model.output_stack.architecture
    reason = why_not_linear(model)
    if reason is not None:
        raise InputError(
            f"{model.name} does not compute logits with one norm and one matrix ({reason}), so a head's contribution "
            f"to them is not exact; use an ablation."
        )
    assert model.unembedding is not None
    norm = nn.Identity() if plan.final_norm is None else submodule(model.base, plan.final_norm)
    head: nn.Module = model.plain.get_output_embeddings()  # type: ignore[no-untyped-call]
    precision = torch.promote_types(model.dtype, torch.float32)
    beta, bias = bias_of(norm), bias_of(head)
    if plan.logit_bias:
        added = model.plain.get_buffer(plan.logit_bias).flatten()
        bias = added if bias is None else bias + added
    return Unembedding(
        weight_of(norm, model.unembedding).detach().to(precision) + plan.norm_offset,
        None if beta is None else beta.detach().to(precision),
        epsilon_of(norm),
        is_centred(norm, model.unembedding),
        model.unembedding.detach(),
        None if bias is None else bias.detach(),
        plan.logit_scale,
        plan.logit_softcap,
        model.dtype,
        not isinstance(norm, nn.LayerNorm | nn.Identity),
        not isinstance(norm, nn.Identity),
    )


def tokens_with_logits(model: HookedModel) -> int:
    """The number of tokens that have a logit; a head may have fewer rows than the embedding."""
    W_U = model.unembedding
    return model.n_vocab if W_U is None else min(len(W_U), model.n_vocab)


def why_not_linear(model: HookedModel) -> str | None:
    """Why the logits are not a final norm's output times a matrix; None if they are."""
    plan = model.output_stack.architecture
    if model.points["logits"].absent is not None:
        return "it was loaded without a head"
    if plan.head_refused:
        return plan.head_refused
    return "its head is not an unembedding of tokens" if model.unembedding is None else None
