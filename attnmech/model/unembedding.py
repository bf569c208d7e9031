"""From the last stream to a logit: which direction of the stream an answer token reads, with the final norm frozen.

logit_a = N(x) W_U[a] with N(x) = γ ⊙ (x − mean x) · r + β (a LayerNorm) or γ ⊙ x · r (an RMSNorm). With r frozen at its
value, a part u of x adds r · u·d to the logit, d = γ ⊙ W_U[a], less its mean where the norm takes the mean away.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import InputError
from ..maths.norms import norm_multiplier
from .architectures import submodule
from .hooked import HookedModel


@dataclass(frozen=True)
class Unembedding:
    """The final norm and the unembedding of one model, in float32 at least."""

    gamma: Float[Tensor, " d_model"]
    beta: Float[Tensor, " d_model"] | None
    centred: bool
    W_U: Float[Tensor, "vocab d_model"]
    norm: nn.Module

    def direction(
        self, answers: Int[Tensor, " batch"], against: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch d_model"]:
        """What a part of the stream is multiplied with: d of the answer, less that of the token it stands against."""
        rows = self.W_U[answers] if against is None else self.W_U[answers] - self.W_U[against]
        scaled = rows.to(self.gamma.dtype) * self.gamma
        return scaled - scaled.mean(dim=-1, keepdim=True) if self.centred else scaled

    def scale(self, stream: Float[Tensor, "batch d_model"]) -> Float[Tensor, " batch"]:
        """r, by which the final norm multiplies, read off what it makes of the stream."""
        normed: Tensor = self.norm.forward(stream).to(self.gamma.dtype)
        return norm_multiplier(stream.to(normed), normed, self.gamma, self.beta, centred=self.centred)


def unembedding_of(model: HookedModel) -> Unembedding:
    """The unembedding of a model; `InputError` where logits are made in another way."""
    path = model.output_stack.architecture.final_norm
    head = model.unembedding
    if path is None or head is None:
        raise InputError(
            f"{model.name} does not make logits by one norm and one matrix, so no head's part in them is exact; "
            "use an ablation."
        )
    norm = submodule(model.base, path)
    centred = isinstance(norm, nn.LayerNorm)
    precision = torch.promote_types(model.dtype, torch.float32)
    bias = getattr(norm, "bias", None)
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    # What an RMS norm makes of ones is its weight, up to a factor that `scale` takes back.
    gamma = weight.detach() if centred else norm.forward(torch.ones_like(weight)).detach()
    beta = None if bias is None else bias.detach().to(precision)
    return Unembedding(gamma.to(precision), beta, centred, head.detach(), norm)
