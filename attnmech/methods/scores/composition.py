"""How strongly later heads read what earlier heads write: composition of weights (docs/formulas.md#composition)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import option
from ...basics.public import public
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...errors import InputError
from ...model.parts.gates import NormGate
from ...model.parts.norms import weight_of
from ...model.run.hooked import HookedModel, require_model
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...runs.layers import count_layers

KINDS: Final = ("q", "k", "v")


@public
def composition(model: HookedModel, *, fold_norm: bool = True) -> "Composition":
    """Q-, K- and V-composition between any two heads of different layers, from the weights alone.

    ‖W_A W_B‖_F / (‖W_A‖_F ‖W_B‖_F), with W_A = W_V W_O of the earlier head and W_B = W_Q W_Kᵀ (q), W_K W_Qᵀ (k) or
    W_V W_O (v) of the later one. For matrices with the same singular values but unrelated directions, the mean square
    is 1 / d_model at any rank; the baseline is therefore 1 / √d_model.

    With rotary positions the score between two tokens is x_i W_Q R_{j−i} W_Kᵀ x_j, which has no single W_QK. q and k
    are then NaN, as they are where queries and keys are normed; v is always defined.

    >>> import attnmech as am
    >>> scores = am.composition(am.load())
    >>> scores.v.shape, round(scores.baseline, 4)
    (torch.Size([4, 8, 4, 8]), 0.0722)

    Args:
        model: the model.
        fold_norm: whether W_Q, W_K and W_V of the later head include the weight γ of the norm before attention. They
            never include the norm's scale, which differs from token to token.

    Returns:
        Scores `[layer head layer head]`, the earlier head first, between 0 and 1, with their baseline.

    Raises:
        InputError: for models with several stacks, and models that expand keys or values from latents.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".

    """
    require_model(model)
    if len(model.stacks) > 1:
        raise InputError("composition is defined between heads of one stack; this model has several stacks.")
    stack = model.output_stack
    layers, heads, wide = tuple(stack.layers), stack.n_heads, torch.float64
    plan = stack.architecture
    if plan.no_stream:
        raise InputError(f"composition needs heads that write into a stream that later heads read; {plan.no_stream}.")
    if plan.v_norm or isinstance(plan.gate, NormGate):
        raise InputError("composition needs heads that write x W_V W_O; this model applies a norm between W_V and W_O.")
    if plan.windows:
        raise InputError(
            f"the heads of {plan.name} have a local and a global set of W_Q, W_K and W_V; the token decides which set "
            "reads what another head wrote, so the weights alone do not define a score."
        )
    rotary = plan.rotary is not None
    kinds = {name: torch.full((count_layers(model, stack), heads) * 2, torch.nan, dtype=wide) for name in KINDS}
    read: list[dict[str, tuple[Tensor, Tensor]]] = []
    for layer in layers:
        weights = stack.weights(layer)
        stored = (weights.W_Q, weights.W_K, weights.W_V, weights.W_O)
        W_Q, W_K, W_V, W_O = (matrix.detach().to("cpu", wide) for matrix in stored)
        if not W_Q.shape[1] == W_K.shape[1] == W_V.shape[1] == model.d_model:
            raise InputError(
                f"composition needs queries, keys and values that are made of the stream alone; layer {layer} makes "
                "some of them from latents."
            )
        W_K, W_V = (matrix.repeat_interleave(heads // len(matrix), dim=0) for matrix in (W_K, W_V))
        gamma = torch.ones(model.d_model, dtype=wide)
        if fold_norm and plan.attn_norm is not None:
            norm = stack.module(layer, plan.attn_norm)
            gamma = weight_of(norm, weights.W_Q[0, :, 0]).detach().to("cpu", wide) + plan.norm_offset
        W_Q, W_K, read_V = (gamma[:, None] * matrix for matrix in (W_Q, W_K, W_V))
        out = W_O.transpose(-1, -2)
        read.append({"out": (W_V * gamma[:, None], out), "q": (W_Q, W_K), "k": (W_K, W_Q), "v": (read_V, out)})
    for one, first in enumerate(layers):
        for other, second in enumerate(layers[one + 1 :], start=one + 1):
            for name in KINDS:
                if name != "v" and ((rotary and second not in plan.unrotated) or plan.qk_norm is not None):
                    continue
                kinds[name][first, :, second, :] = composed(read[one]["out"], read[other][name])
    return Composition(
        **kinds,
        layers=layers,
        baseline=model.d_model**-0.5,
        provenance=model.provenance("", (), {"fold_norm": fold_norm}),
    )


def composed(
    one: tuple[Float[Tensor, "head d_in rank"], Float[Tensor, "head d_model rank"]],
    other: tuple[Float[Tensor, "head d_model other_rank"], Float[Tensor, "head d_out other_rank"]],
) -> Float[Tensor, "head head"]:
    """‖A B‖_F / (‖A‖_F ‖B‖_F) for A = a_1 a_2ᵀ and B = b_1 b_2ᵀ of every pair of heads, without forming A or B.

    With the triangular factors of a_1 = Q R and b_2 = Q' R', ‖A B‖ = ‖R (a_2ᵀ b_1) R'ᵀ‖.
    """
    left, right = (torch.linalg.qr(factor, mode="r").R for factor in (one[0], other[1]))
    between = torch.einsum("adr,bds->abrs", one[1], other[0])
    product = left[:, None] @ between @ right[None].transpose(-1, -2)

    def norm(first: Tensor, second: Tensor) -> Tensor:
        size: Tensor = torch.linalg.matrix_norm(torch.linalg.qr(first, mode="r").R @ second.transpose(-1, -2))
        return size

    size: Tensor = torch.linalg.matrix_norm(product)
    return size / (norm(*one)[:, None] * norm(*other)[None])


@dataclass(frozen=True, repr=False)
class Composition(PagedResult):
    """How strongly later heads read what earlier heads write: scores from 0 to 1, without unit.

    Scores are NaN within a layer, from later to earlier heads, and where a kind is undefined (q and k under rotary
    positions).
    """

    SUBTRACT = "subtract the scores: one.v - other.v"

    q: Float[Tensor, "layer head later_layer later_head"]
    k: Float[Tensor, "layer head later_layer later_head"]
    v: Float[Tensor, "layer head later_layer later_head"]
    layers: tuple[int, ...]
    baseline: float
    """1 / √d_model: the root mean square for unrelated directions."""
    provenance: Provenance

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The number of layers."""
        return {"layer": len(self.q), "later_layer": len(self.q)}

    def to_frame(self) -> pd.DataFrame:
        """One row per kind and pair of heads, the highest score first: kind, layer, head, later_layer, later_head,
        score, ratio (to the baseline).
        """
        parts = []
        for kind in KINDS:
            scores = getattr(self, kind)
            places = (~scores.isnan()).nonzero()
            frame = pd.DataFrame(places.tolist(), columns=["layer", "head", "later_layer", "later_head"])
            frame.insert(0, "kind", kind)
            frame["score"] = scores[tuple(places.T)].tolist()
            parts.append(frame)
        whole = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
        whole["ratio"] = whole["score"] / self.baseline
        return whole.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def plot(self, kind: str = "v") -> "go.Figure":
        """A map of later layers × heads: each later head's highest score with an earlier head, minus the baseline."""
        scores = getattr(self, option("kind", kind, KINDS))
        best = scores.nan_to_num(-torch.inf).flatten(0, 1).amax(dim=0)
        best = best.masked_fill(best.isinf(), torch.nan)[list(self.layers)]
        none = torch.full_like(best, torch.nan).numpy()
        return effect_map(
            (best - self.baseline).numpy(), none, none, layers=self.layers, label=f"highest {kind} score above baseline"
        )

    @property
    def lead(self) -> str:
        frame = self.to_frame()
        if not len(frame):
            return "The model has one layer of heads, so no heads compose."
        top = frame.iloc[0]
        return (
            f"L{top['later_layer']}H{top['later_head']} reads L{top['layer']}H{top['head']} most strongly "
            f"({top['kind'].upper()}-composition {top['score']:.2f}; {self.baseline:.2f} for unrelated directions)."
        )

    @property
    def _title(self) -> str:
        return f"Composition of the heads of {self.provenance.model}"

    def _sections(self) -> list[Section]:
        reading = (
            "Each cell is one head: its highest score with an earlier head, minus the score of unrelated directions."
        )
        kinds = [kind for kind in KINDS if not bool(getattr(self, kind).isnan().all())]
        figures = {kind: self.plot(kind) for kind in kinds}
        return [Section("Heads that read earlier heads", reading, figures, "composition.plot()")]
