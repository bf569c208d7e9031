"""Computes the embedding row of a token as it enters the stream.

row_v = N(c · (P (s · E_v) + further)): E the token embedding, s its factor (Gemma), P the projection of a factorised
embedding (OPT), `further` what else is embedded there (a position, a token type), c the factor of the stream (Granite),
and N the norm of the embedding (BERT, BLOOM). If positions and norm have the width of a factorised embedding (ALBERT,
ELECTRA, RemBERT), the projection comes last: row_v = c · P N(s · E_v + further).
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ...batch import Batch
from ...errors import InputError
from ...maths.float64 import as_float64, in_precision
from ...maths.precision import pass_tolerance
from ..inputs.transcripts import TranscriptEncoder
from ..parts.modules import submodule
from ..parts.norms import WideNorm, epsilon_of, gamma_of, is_centred
from ..parts.weights import bias_of, matrix_of
from ..run.hooked import HookedModel
from ..stack.stack import Stack
from .partial_pass import Blocks, can_begin_in_the_middle

_PROBE: Final = 5  # the number of tokens whose rows are compared with the model's


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token embedding of a model, row by row."""

    weight: Float[Tensor, "vocab d_embed"]
    factor: Float[Tensor, ""]
    projection: nn.Linear | None
    stream_scale: float
    norm: WideNorm | None
    narrow: bool  # whether positions and norm have a factorised embedding's width, so that the projection comes last

    def __len__(self) -> int:
        return len(self.weight)

    def rows(
        self,
        tokens: slice | Int[Tensor, " token"],
        precision: torch.dtype,
        further: Float[Tensor, "*#token width"] | None = None,
    ) -> Float[Tensor, "token d_model"]:
        """The rows of some tokens; `further` holds the other embeddings at their positions."""
        return self.entering(self.looked_up(tokens, precision), further)

    def looked_up(
        self, tokens: slice | Int[Tensor, "*places"], precision: torch.dtype
    ) -> Float[Tensor, "*places d_embed"]:
        """The embedding of some tokens, times its factor."""
        return in_precision(self.factor, precision) * in_precision(self.weight[tokens], precision)

    def entering(
        self, embedded: Float[Tensor, "*places d_embed"], further: Float[Tensor, "*#places width"] | None
    ) -> Float[Tensor, "*places d_model"]:
        """The start of the stream, from the output of the embedding."""
        x = embedded if self.narrow else self._projected(embedded)
        x = x if further is None else x + further.to(x)
        if self.narrow:
            return self.stream_scale * self._projected(self._normed(x))
        return self._normed(self.stream_scale * x)

    def _normed(self, x: Float[Tensor, "*places width"]) -> Float[Tensor, "*places width"]:
        return x if self.norm is None else self.norm(x)

    def _projected(self, x: Float[Tensor, "*places d_embed"]) -> Float[Tensor, "*places d_model"]:
        if self.projection is None:
            return x
        projected = x @ matrix_of(self.projection).detach().to(x)
        bias = bias_of(self.projection)
        return projected if bias is None else projected + bias.detach().to(x)


def vocabulary_of(model: HookedModel, stack: Stack) -> Vocabulary:
    """The rows that a model looks up for its tokens.

    Raises `InputError` for images and for cross-attention, and if the input of the first block does not follow from
    these rows by the formula above.
    """
    plan = stack.architecture
    if plan.reads in ("pixels", "sound"):
        what = "images, and their patches" if plan.reads == "pixels" else "sound, and its frames"
        raise InputError(
            f"{model.name} has no embedding of tokens: it reads {what} are projected ({plan.name}), so there is no "
            "vocabulary to compare with."
        )
    if stack.label == "cross":
        raise InputError(
            "cross-attention writes into the decoder's stream and has no other. Give "
            'stack="decoder" or stack="encoder".'
        )
    vocabulary = Vocabulary(
        model.embedding.detach(),
        torch.tensor(plan.embed_scale, dtype=torch.float32).to(model.embedding.dtype).to(model.device),
        _projection(model, stack),
        plan.stream_scale,
        _norm(model, stack),
        plan.narrow_norm is not None,
    )
    _check(model, stack, vocabulary)
    return vocabulary


def further_of(model: HookedModel, batch: Batch) -> Float[Tensor, "#batch position d_model"]:
    """The sum of the other embeddings at each position of a batch: positions and token types, if there are any."""
    ran = Blocks(model).run(batch, stop=0, captures=[(label, None) for label in model.further_embeddings])
    total = sum(ran.values[label, None] for label in model.further_embeddings)
    assert isinstance(total, Tensor)
    return total


def require_positions(model: HookedModel) -> None:
    """Raises `InputError` for a model that does not embed positions."""
    if not any("position" in label for label in model.further_embeddings):
        raise InputError(
            f"`position=True` adds the embedding of each token's position, and {model.name} "
            f"({model.architecture.name}) has none: its positions act inside attention. Leave it out."
        )


def _projection(model: HookedModel, stack: Stack) -> nn.Linear | None:
    """The matrix between a factorised embedding and the stream."""
    path = stack.architecture.embed_projection
    if path is not None:
        projection = submodule(model.base, path)
        assert isinstance(projection, nn.Linear)
        return projection
    width = model.embedding.shape[1]
    if width != stack.d_model:
        raise InputError(
            f"the embedding of {model.name} has {width} dimensions and its stream {stack.d_model}, and no projection "
            "between them was found."
        )
    return None


def _norm(model: HookedModel, stack: Stack) -> WideNorm | None:
    plan = stack.architecture
    path, width = plan.embed_norm, stack.d_model
    if plan.narrow_norm is not None:
        path, width = plan.narrow_norm, model.embedding.shape[1]
    if path is None:
        return None
    norm = submodule(model.base, path)
    like = torch.zeros(1, 1, width, dtype=model.dtype, device=model.device)
    beta = bias_of(norm)
    with torch.no_grad():
        gamma = gamma_of(norm, like)
    return WideNorm(gamma.detach(), None if beta is None else beta.detach(), epsilon_of(norm), is_centred(norm, like))


def _check(model: HookedModel, stack: Stack, vocabulary: Vocabulary) -> None:
    """Raises `InputError` unless the input of the first block follows from the rows of `Vocabulary`."""
    count = len(vocabulary)
    ids = torch.arange(_PROBE, device=model.device)[None] * max(1, (count - 1) // _PROBE) % count
    inputs: Any = ids
    if isinstance(model.encoder, TranscriptEncoder):
        inputs = {**model.encoder.signal.noise(1, 0, model.embedding), "decoder_input_ids": ids}
    batch = model.encode(inputs)
    if can_begin_in_the_middle(model):
        labels = list(model.further_embeddings)
        ran = Blocks(model).run(
            batch,
            stop=stack.running[0] + 1,
            streams=[0],
            captures=[("embed", None), *((name, None) for name in labels)],
        )
        values, entered, embedded = ran.values, ran.streams[0], as_float64(ran.values["embed", None])
    else:
        key = (stack.point("resid_pre"), stack.layers[0])
        labels = [label for label in model.further_embeddings if label.startswith(f"{stack.label} ")]
        values = model.forward(batch, captures=[key, *((label, None) for label in labels)])
        entered = values[key]
        embedded = vocabulary.looked_up(batch.queries(stack.label).ids, torch.float64)
    width = embedded.shape[-1] if vocabulary.narrow else stack.d_model
    parts = [as_float64(values[label, None]) for label in labels]
    fits = all(part.shape[-1] == width for part in parts)
    further = sum(parts, embedded.new_zeros(*embedded.shape[:-1], width)) if fits else None
    difference = vocabulary.entering(embedded, further) - as_float64(entered)
    if not fits or not bool(difference.norm() <= 10 * pass_tolerance(model.dtype) * as_float64(entered).norm()):
        raise InputError(
            f"the input of the first block of {model.name} is not a row of its embedding, scaled, projected and normed "
            f"as in the families that attnmech knows, so there are no rows with which to compare the stream."
        )
