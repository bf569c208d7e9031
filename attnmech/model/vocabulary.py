"""Which row is looked up for a token, as it enters the stream?

row_v = N(c · (P (s · E_v) + further)): E the token embedding, s its factor (Gemma), P the projection of a factorised
embedding (OPT), `further` what else is embedded there (a position, a token type), c the factor of the stream (Granite),
and N the norm of the embedding (BERT, BLOOM).
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..batch import Batch
from ..errors import InputError
from ..maths.norms import reciprocal_rms
from ..maths.precision import pass_tolerance
from .architectures import submodule
from .hooked import HookedModel
from .norms import epsilon_of, gamma_of, is_centred
from .partial_pass import Blocks, can_begin_in_the_middle
from .stack import Stack
from .transcripts import TranscriptEncoder
from .weights import bias_of

_PROBE: Final = 5
"""How many tokens are embedded to see that rows are what the model makes of them."""


@dataclass(frozen=True, eq=False)
class EmbedNorm:
    """A norm of the embedding: γ ⊙ (x − mean x) · r + β, or γ ⊙ x · r."""

    gamma: Float[Tensor, " d_model"]
    beta: Float[Tensor, " d_model"] | None
    epsilon: float
    centred: bool

    def __call__(self, x: Float[Tensor, "*places d_model"]) -> Float[Tensor, "*places d_model"]:
        x = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        normed: Tensor = self.gamma.to(x) * x * reciprocal_rms(x, self.epsilon)[..., None]
        return normed if self.beta is None else normed + self.beta.to(x)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token embedding of a model, row by row."""

    weight: Float[Tensor, "vocab d_embed"]
    factor: Float[Tensor, ""]
    projection: nn.Linear | None
    stream_scale: float
    norm: EmbedNorm | None

    def __len__(self) -> int:
        return len(self.weight)

    def rows(
        self,
        tokens: slice | Int[Tensor, " token"],
        precision: torch.dtype,
        further: Float[Tensor, "*#token d_model"] | None = None,
    ) -> Float[Tensor, "token d_model"]:
        """The rows of some tokens; with `further`, what else is embedded at their place."""
        return self.entering(self.factor.to(precision) * self.weight[tokens].to(precision), further)

    def entering(
        self, embedded: Float[Tensor, "*places d_embed"], further: Float[Tensor, "*#places d_model"] | None
    ) -> Float[Tensor, "*places d_model"]:
        """What enters the stream of what the embedding gives."""
        if self.projection is not None:
            embedded = embedded @ self.projection.weight.detach().to(embedded).T
            bias = bias_of(self.projection)
            embedded = embedded if bias is None else embedded + bias.detach().to(embedded)
        embedded = embedded if further is None else embedded + further.to(embedded)
        scaled: Tensor = embedded if self.stream_scale == 1 else self.stream_scale * embedded
        return scaled if self.norm is None else self.norm(scaled)

    def without_norm(self) -> "Vocabulary":
        """The same rows before the norm of the embedding."""
        return replace(self, norm=None)


def vocabulary_of(model: HookedModel, stack: Stack) -> Vocabulary:
    """The rows that a model looks its tokens up in.

    Raises `InputError` for images and for cross-attention, and if what enters the first block is not made of these
    rows in the way above.
    """
    plan = stack.architecture
    if plan.reads in ("pixels", "sound"):
        what = "images, whose patches" if plan.reads == "pixels" else "sound, whose frames"
        raise InputError(
            f"{model.name} has no embedding of tokens: it reads {what} are projected ({plan.name}), so there is no "
            "vocabulary to compare with."
        )
    if stack.label == "cross":
        raise InputError(
            "cross-attention has no stream of its own: what it writes goes into the decoder's. Give "
            'stack="decoder" or stack="encoder".'
        )
    found = Vocabulary(
        model.embedding.detach(),
        torch.tensor(plan.embed_scale, dtype=torch.float32).to(model.embedding.dtype).to(model.device),
        _projection(model, stack),
        plan.stream_scale,
        _norm(model, stack),
    )
    _check(model, stack, found)
    return found


def further_of(model: HookedModel, batch: Batch) -> Float[Tensor, "#batch position d_model"]:
    """What is embedded besides tokens at each position of a batch: positions, and token types where there are any."""
    ran = Blocks(model).run(batch, stop=0, captures=[(label, None) for label in model.further_embeddings])
    total = sum(ran.values[label, None] for label in model.further_embeddings)
    assert isinstance(total, Tensor)
    return total


def require_positions(model: HookedModel) -> None:
    """Raises `InputError` for a model that does not embed positions."""
    if not any("position" in label for label in model.further_embeddings):
        raise InputError(
            f"`position=True` adds the embedding of each token's position, and {model.name} "
            f"({model.architecture.name}) has none: it marks positions inside attention. Use position=False."
        )


def _projection(model: HookedModel, stack: Stack) -> nn.Linear | None:
    """The matrix between a factorised embedding and the stream."""
    width = model.embedding.shape[1]
    if width == stack.d_model:
        return None
    blocks = f"{stack.architecture.blocks}."
    for path, module in model.base.named_modules():
        fits = isinstance(module, nn.Linear) and module.weight.shape == (stack.d_model, width)
        if fits and not path.startswith(blocks):
            assert isinstance(module, nn.Linear)
            return module
    raise InputError(
        f"the embedding of {model.name} has {width} dimensions and its stream {stack.d_model}, and no projection "
        "between them was found."
    )


def _norm(model: HookedModel, stack: Stack) -> EmbedNorm | None:
    path = stack.architecture.embed_norm
    if path is None:
        return None
    norm = submodule(model.base, path)
    like = torch.zeros(1, 1, stack.d_model, dtype=model.dtype, device=model.device)
    beta = bias_of(norm)
    with torch.no_grad():
        gamma = gamma_of(norm, like)
    return EmbedNorm(gamma.detach(), None if beta is None else beta.detach(), epsilon_of(norm), is_centred(norm, like))


def _with_noise(model: HookedModel, ids: Int[Tensor, "1 position"]) -> Batch:
    """Tokens for the decoder of a model that is given sound."""
    assert isinstance(model.encoder, TranscriptEncoder)
    return model.encode({**model.encoder.signal.noise(1, 0, model.embedding), "decoder_input_ids": ids})


def _check(model: HookedModel, stack: Stack, found: Vocabulary) -> None:
    """Raises `InputError` unless what enters the first block is made of the rows as `Vocabulary` says."""
    count = len(found)
    ids = torch.arange(_PROBE, device=model.device)[None] * max(1, (count - 1) // _PROBE) % count
    batch = model.encode(ids) if model.reads_tokens else _with_noise(model, ids)
    wide = torch.promote_types(model.dtype, torch.float64)
    if can_begin_in_the_middle(model):
        labels = [(label, None) for label in model.further_embeddings]
        ran = Blocks(model).run(batch, stop=1, streams=[0], captures=[("embed", None), *labels])
        further = sum((ran.values[label].to(wide) for label in labels), torch.zeros((), dtype=wide))
        made = found.entering(ran.values["embed", None].to(wide), further.expand(*ids.shape, stack.d_model))
        entered = ran.streams[0].to(wide)
    else:
        key = (stack.point("resid_pre"), stack.layers[0])
        labels = [(label, None) for label in model.further_embeddings if label.startswith(f"{stack.label} ")]
        values = model.forward(batch, captures=[key, *labels])
        entered = values[key].to(wide)
        further = sum((values[label].to(wide) for label in labels), torch.zeros((), dtype=wide, device=model.device))
        own = batch.queries(stack.label).ids
        made = found.entering(found.factor.to(wide) * found.weight[own].to(wide), further.expand_as(entered))
    if not bool((made - entered).norm() <= 10 * pass_tolerance(model.dtype) * entered.norm()):
        raise InputError(
            f"what enters the first block of {model.name} is not its embedding's row, scaled, projected and normed as "
            "in the families that attnmech knows, so there are no rows to compare the stream with."
        )
