"""The flow of information between tokens: attention rollout, and attention weighted by what it carries.

Formulas: docs/formulas.md#information-flow.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from .float64 import as_float64


def rolled_out(means: Float[Tensor, "layer query key"]) -> Float[Tensor, "layer query key"]:
    """Computes R_l = A_l R_{l−1}, R_0 = A_0, with A = ½ (mean_h p + I), each row divided by its sum.

    Rows sum to 1 even if a sink takes part of the attention. Source: Abnar & Zuidema 2020, "Quantifying Attention
    Flow in Transformers", equation 1.

    >>> rolled_out(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]] * 2))[1]
    tensor([[1.0000, 0.0000],
            [0.4375, 0.5625]])
    """
    mixed = 0.5 * (means + torch.eye(means.shape[-1], dtype=means.dtype, device=means.device))
    mixed = mixed / mixed.sum(dim=-1, keepdim=True)
    rolled = [mixed[0]]
    for layer in mixed[1:]:
        rolled.append(layer @ rolled[-1])
    return torch.stack(rolled)


def summed_norms(
    pattern: Float[Tensor, "head query key"],
    written: Float[Tensor, "key head d_model"],
    residual: Float[Tensor, "query d_model"] | None = None,
) -> Float[Tensor, "query key"]:
    """Computes ‖Σ_h p_ij^h f^h(x_j) + δ_ij x_i‖ with f(x_j) as `written`; without δ_ij x_i if there is no `residual`.

    It uses the products of the heads' vectors at each key, so that no [query, key, d_model] array is made.
    Source: Kobayashi et al. 2020, "Attention is Not Only a Weight", and 2021 for the residual.

    >>> f = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    >>> summed_norms(torch.ones(2, 1, 1), f), summed_norms(torch.ones(2, 1, 1), f, torch.tensor([[-3.0, 0.0]]))
    (tensor([[5.]]), tensor([[4.]]))
    """
    wide = as_float64(written)
    products = einsum(wide, wide, "key one d_model, key other d_model -> key one other")
    weights = as_float64(pattern).permute(2, 1, 0)
    norms = ((weights @ products) * weights).sum(dim=-1).T.clamp_min(0.0).sqrt()
    if residual is not None:
        itself = einsum(as_float64(pattern).diagonal(dim1=1, dim2=2), wide, "head key, key head d_model -> key d_model")
        norms.diagonal().copy_(torch.linalg.vector_norm(itself + as_float64(residual), dim=-1))
    return norms.to(pattern)


def value_norms(
    v: Float[Tensor, "*places kv_head d_value"], W_O: Float[Tensor, "head d_value d_model"]
) -> Float[Tensor, "*places head"]:
    """Computes ‖f^h(x_j)‖ of each head and key, with f(x_j) = v_j W_O. It is the weight of p_ij, since ‖p f‖ = p ‖f‖.

    It works head by head, so that no [key, head, d_model] array is made. Source: Kobayashi et al. 2020, equation 4.

    >>> value_norms(torch.tensor([[[3.0, 4.0]]]), torch.stack([torch.eye(2), 2 * torch.eye(2)]))
    tensor([[ 5., 10.]])
    """
    shared = len(W_O) // v.shape[-2]
    norms = [torch.linalg.vector_norm(v[..., head // shared, :] @ part, dim=-1) for head, part in enumerate(W_O)]
    return torch.stack(norms, dim=-1)


def positive_part(by_head: Float[Tensor, "*layer head query key"]) -> Float[Tensor, "*layer query key"]:
    """Computes E_h[(p ⊙ ∂m/∂p)⁺] of a layer: the mean over heads of the positive parts of p ⊙ ∂m/∂p.

    The sum of p ⊙ ∂m/∂p over a head is dm/dε if the head's pattern is multiplied by 1 + ε. Source: Chefer et al. 2021,
    "Generic Attention-model Explainability", equation 5; Barkan et al. 2021, "Grad-SAM", who also average over layers.

    >>> positive_part(torch.tensor([[[0.5, 0.5]]]) * torch.tensor([[[4.0, -2.0]]]))
    tensor([[2., 0.]])
    """
    return by_head.clamp_min(0).mean(dim=-3)
