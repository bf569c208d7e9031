"""Counts the tokens of texts, and sums the factors of the norms behind attention and before the logits.

Reads the OV circuits of a model on tokens: E_t as layer 0 reads it, N_ℓ, W_V, W_O and the unembedding.
"""

from dataclasses import dataclass
from typing import Final

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ...errors import InputError
from ...maths.float64 import as_float64, float64_device
from ...model.attention.observed import LayerEnd
from ...model.parts.gates import NormGate
from ...model.reading.unembedding import Unembedding, unembedding_of
from ...model.reading.vocabulary import Vocabulary, vocabulary_of
from ...model.run.hooked import HookedModel
from ...model.stack.block import attention_scale
from ...model.stack.carried import input_norm
from ...model.stack.stack import Stack
from ...runs.reducer import Reducer, Run, State
from ...runs.token_types import ROW_CLASSES, row_classes

_PROBE: Final = 5  # the number of tokens on which the formula of a layer's norm is compared with the norm


@dataclass(frozen=True)
class Circuits:
    """The OV circuits of a stack, in float32 at least."""

    stack: Stack
    vocabulary: Vocabulary
    unembedding: Unembedding

    @classmethod
    def of(cls, model: HookedModel, stack: Stack) -> "Circuits":
        """The circuits of a model; raises `InputError` if what a head writes for a token does not follow from them."""
        plan = stack.architecture
        if stack is not model.output_stack:
            raise InputError(
                "ov_tokens needs heads that read tokens and write into the stream that the logits read; heads of the "
                f'stack "{stack.label}" do not. Give stack="decoder".'
            )
        if plan.no_stream:
            raise InputError(f"ov_tokens needs heads that read and write one stream; {plan.no_stream}.")
        unembedding = unembedding_of(model)
        model.points.resolve(["logits"], None, model.refused)
        if plan.v_norm or isinstance(plan.gate, NormGate):
            raise InputError(
                "ov_tokens needs heads that write x W_V W_O; this model applies a norm between W_V and W_O."
            )
        if plan.gate is not None:
            raise InputError(
                "ov_tokens needs values that reach W_O unchanged; in this model a gate between attention and W_O makes "
                'what a head writes depend on the query. Use am.examples(model, texts, by="update").'
            )
        if plan.expanded is not None:
            raise InputError(
                "ov_tokens needs values that are computed from the stream alone; this model expands them from latents."
            )
        return cls(stack, vocabulary_of(model, stack), unembedding)

    @property
    def precision(self) -> torch.dtype:
        """The precision of all numbers."""
        return self.unembedding.gamma.dtype

    def values(self, layer: int, embedded: Float[Tensor, "token d_model"]) -> Float[Tensor, "kv token d_value"]:
        """v = N(E_t) W_V of a layer, without the constants β W_V and b_V."""
        norm = input_norm(self.stack, layer, embedded[None, :_PROBE].to(self.unembedding.dtype), self.precision)
        W_V = self.stack.weights(layer).W_V.detach().to(self.precision)
        return einsum(
            embedded if norm is None else norm(embedded), W_V, "token d_model, kv d_model d_value -> kv token d_value"
        )


@dataclass(frozen=True)
class ScaleSums(Reducer):
    """Counts the ordinary tokens of texts (neither special nor first) by id, and sums two factors over their rows."""

    normed: bool  # whether there is a norm between attention and stream

    @property
    def points(self) -> tuple[str, ...]:  # type: ignore[override]
        """The points from which the factors are computed."""
        return ("resid_post", "attn_raw", "attn_out") if self.normed else ("resid_post",)

    def start(self, run: Run) -> State:
        """No rows yet."""
        device = run.model.device
        sums_on = float64_device(device)
        return {
            "counts": torch.zeros(run.model.n_vocab, dtype=torch.long, device=device),
            "rows": torch.zeros(1, dtype=torch.long, device=device),
            "final": torch.zeros(1, dtype=torch.float64, device=sums_on),
            "attention": torch.zeros(run.n_layers, dtype=torch.float64, device=sums_on),
        }

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds a layer's factor and, at the last layer, the tokens and the factor of the final norm."""
        batch = run.batch.queries(run.stack.label)
        ordinary = row_classes(batch)[:, ROW_CLASSES.index("ordinary")]
        if self.normed:
            precision = torch.promote_types(run.model.dtype, torch.float32)
            factor = attention_scale(run.stack, end, precision).by_token
            state["attention"][end.index] += as_float64(factor[ordinary]).sum()
        if end.index < run.n_layers - 1:
            return
        state["counts"] += torch.bincount(batch.ids[ordinary], minlength=len(state["counts"]))
        state["rows"] += ordinary.sum()
        state["final"] += as_float64(unembedding_of(run.model).scale(end["resid_post"])[ordinary]).sum()

    def merge(self, one: State, other: State) -> State:
        return {name: one[name] + other[name] for name in one}
