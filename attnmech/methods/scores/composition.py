"""Composition of weights: how strongly later heads read what earlier heads write (docs/formulas.md#composition)."""

from dataclasses import dataclass, field
from typing import ClassVar, Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import option
from ...basics.public import public
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...errors import InputError
from ...model.parts.gates import NormGate
from ...model.parts.norms import weight_of
from ...model.parts.weights import AttentionWeights
from ...model.run.hooked import HookedModel, require_model
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...results.table import framed

KINDS: Final = ("q", "k", "v")


@public
def composition(model: HookedModel, *, fold_norm: bool = True) -> "Composition":
    """Computes Q-, K- and V-composition between any two heads of different layers, from the weights alone.

    ‖W_A W_B‖_F / (‖W_A‖_F ‖W_B‖_F), with W_A = W_V W_O of the earlier head and W_B = W_Q W_Kᵀ (q), W_K W_Qᵀ (k) or
    W_V W_O (v) of the later one. For matrices with the same singular values but unrelated directions, the mean square
    is 1 / d_model at any rank; the baseline is therefore 1 / √d_model.

    With rotary positions the score between two tokens is x_i W_Q R_{j−i} W_Kᵀ x_j, which has no single W_QK. q and k
    are NaN in such models, and in models that norm queries and keys; v is always defined.

    >>> import attnmech as am
    >>> scores = am.composition(am.load())
    >>> scores.v.shape, round(scores.baseline, 4)
    (torch.Size([4, 8, 4, 8]), 0.0722)

    Args:
        model: the model.
        fold_norm: whether to fold the weight γ of the norm before attention into W_Q, W_K and W_V of the later head.
            The norm's scale differs from token to token and is never folded in.

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
    layers = tuple(stack.layers)
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
    factors = {layer: _factors_of(model, layer, fold_norm=fold_norm) for layer in layers}
    axes = (len(stack.places), stack.n_heads) * 2
    kinds = {name: torch.full(axes, torch.nan, dtype=torch.float64) for name in KINDS}
    for place, first in enumerate(layers):
        written = factors[first].written()
        for second in layers[place + 1 :]:
            rotated = plan.rotary is not None and second not in plan.unrotated
            for name in ("v",) if rotated or plan.qk_norm is not None else KINDS:
                kinds[name][first, :, second, :] = factors[second].composed(name, written)
    return Composition(
        **kinds,
        layers=layers,
        baseline=model.d_model**-0.5,
        provenance=model.provenance("", (), {"fold_norm": fold_norm}),
    )


_READ: Final = {"q": ("W_Q", "W_K"), "k": ("W_K", "W_Q"), "v": ("W_V", "W_O")}  # b_1 and b_2 of W_B = b_1 b_2ᵀ


@dataclass(frozen=True)
class Factors:
    """The factors of one layer's heads; with a = Q R, ‖a b‖_F = ‖R b‖_F.

    The triangular factors R are stored; the matrices are built again for each pair of layers, one pair at a time.
    """

    weights: AttentionWeights
    gamma: Float[Tensor, " d_model"]  # the weight of the norm before attention
    _triangles: dict[str, Float[Tensor, "head rank d_head"]] = field(default_factory=dict)

    def matrix(self, name: str) -> Float[Tensor, "head d_model d_head"]:
        """Returns γ ⊙ W_Q, γ ⊙ W_K, γ ⊙ W_V, or W_Oᵀ."""
        matrix: Tensor = getattr(self.weights, name).detach().cpu().to(self.gamma.dtype)
        return matrix.mT if name == "W_O" else self.gamma[:, None] * matrix

    def triangle(self, name: str) -> Float[Tensor, "head rank d_head"]:
        """Returns the factor R of one of these matrices."""
        if name not in self._triangles:
            self._triangles[name] = torch.linalg.qr(self.matrix(name), mode="r").R
        return self._triangles[name]

    def written(self) -> Float[Tensor, "head d_model rank"]:
        """Returns a for each head's W_A, such that ‖W_A b‖_F / ‖W_A‖_F = ‖aᵀ b‖_F for any b."""
        out, values = self.matrix("W_O"), self.triangle("W_V")
        a = out @ values.repeat_interleave(len(out) // len(values), dim=0).mT
        written: Tensor = a / torch.linalg.matrix_norm(a)[:, None, None]
        return written

    def composed(self, kind: str, written: Float[Tensor, "head d_model rank"]) -> Float[Tensor, "head later_head"]:
        """Returns ‖aᵀ W_B‖_F / ‖W_B‖_F for each a that earlier heads have `written`, without forming W_B."""
        first, second = _READ[kind]
        read, right = self.matrix(first), self.triangle(second)
        # Heads that share b_1 share its product with what is written.
        by_head = right.repeat_interleave(len(self.weights.W_Q) // len(right), dim=0)
        grouped = rearrange(by_head, "(kv group) row d_head -> kv group row d_head", kv=len(read))
        between = einsum(written, read, "head d_model rank, kv d_model d_head -> kv head rank d_head")
        product = einsum(between, grouped, "kv head rank d_head, kv group row d_head -> kv head rank group row")
        whole = torch.linalg.matrix_norm(self.triangle(first)[:, None] @ grouped.mT)
        scores: Tensor = product.square().sum(dim=(2, 4)).sqrt() / whole[:, None]
        return rearrange(scores, "kv head group -> head (kv group)")


def _factors_of(model: HookedModel, layer: int, *, fold_norm: bool) -> Factors:
    stack = model.output_stack
    weights, norm = stack.weights(layer), stack.architecture.attn_norm
    if not weights.W_Q.shape[1] == weights.W_K.shape[1] == weights.W_V.shape[1] == model.d_model:
        raise InputError(
            f"composition needs queries, keys and values that are computed from the stream alone; layer {layer} "
            "computes some of them from latents."
        )
    gamma = torch.ones(model.d_model, dtype=torch.float64)
    if fold_norm and norm is not None:
        gamma = weight_of(stack.module(layer, norm), weights.W_Q[0, :, 0]).detach().cpu().to(gamma.dtype)
        gamma = gamma + stack.architecture.norm_offset
    return Factors(weights, gamma)


@dataclass(frozen=True, repr=False)
class Composition(PagedResult):
    """How strongly later heads read what earlier heads write: scores from 0 to 1, without unit.

    Scores are NaN within a layer, from later to earlier heads, and where a kind is undefined (q and k under rotary
    positions).
    """

    _TITLE = "Composition of the heads of {model}"
    _SUBTRACT = "subtract the scores: one.v - other.v"
    FIGURES = KINDS
    _AXES: ClassVar = {"layer": "q", "later_layer": "q"}

    q: Float[Tensor, "layer head later_layer later_head"]
    k: Float[Tensor, "layer head later_layer later_head"]
    v: Float[Tensor, "layer head later_layer later_head"]
    layers: tuple[int, ...]
    baseline: float
    """1 / √d_model: the root mean square for unrelated directions."""
    provenance: Provenance

    def to_frame(self) -> pd.DataFrame:
        """One row per kind and pair of heads, the highest score first: kind, layer, head, later_layer, later_head,
        score, ratio (to the baseline).
        """
        scores = torch.stack([getattr(self, kind) for kind in KINDS])
        places = (~scores.isnan()).nonzero()
        frame = pd.DataFrame(places.numpy(), columns=["kind", "layer", "head", "later_layer", "later_head"])
        frame["kind"] = [KINDS[number] for number in frame["kind"]]
        frame["score"] = scores[tuple(places.T)].numpy()
        frame["ratio"] = frame["score"] / self.baseline
        return frame.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads: each head's highest score of a kind (by default "v") with an earlier head, minus the
        baseline.
        """
        kind = "v" if figure is None else option("figure", figure, self.FIGURES)
        scores = getattr(self, kind)
        best = scores.nan_to_num(-torch.inf).flatten(0, 1).amax(dim=0)
        best = best.masked_fill(best.isinf(), torch.nan)[list(self.layers)]
        label = f"highest {kind} score above baseline"
        drawn = effect_map((best - self.baseline).numpy(), layers=self.layers, label=label)
        return framed(drawn, self.layers, layer, head)

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

    def _sections(self) -> list[Section]:
        reading = (
            "Each cell is one head. Its colour is the head's highest score with an earlier head, minus the score of "
            "unrelated directions."
        )
        kinds = [kind for kind in KINDS if not bool(getattr(self, kind).isnan().all())]
        figures = {kind: self.plot(kind) for kind in kinds}
        return [Section("Heads that read earlier heads", reading, figures, "composition.plot()")]
