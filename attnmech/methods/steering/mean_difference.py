"""The direction between the means of two groups of texts, and how well it separates texts that it was not made from.

Formulas: docs/formulas.md#steering.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from scipy.stats import t as student_t  # type: ignore[import-untyped]
from torch import Tensor

from ...basics.arguments import flag, option
from ...basics.nouns import counted
from ...basics.public import public
from ...batch import every_bos
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...interventions import Values
from ...maths.float64 import as_float64
from ...maths.intervals import LEVEL, exact_interval
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...results.provenance import Provenance
from ...results.result import PagedResult
from ...results.sentences import interval_of
from ...results.table import framed, require_no_head, require_one_figure
from ...runs.ablations import reread
from ...runs.options import CommonOptions
from ...runs.progress import steps
from ...runs.sweep import batches_of
from .figures import separation

ROUNDING: Final = 1e-6  # places along a direction below this share of the largest activation are attributed to rounding
Interval = tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]


def held_out_scores(
    one: Float[Tensor, "one *place d"], other: Float[Tensor, "other *place d"]
) -> tuple[Float[Tensor, "*place one"], Float[Tensor, "*place other"]]:
    """Where each text lies along the direction that the texts of the other half give: (x − midpoint) · u.

    Texts with even and with odd numbers are the halves. u is the unit vector from the mean of `other` to that of `one`
    in the half without the text, and the midpoint lies between these means. A place that only rounding distinguishes
    from the midpoint is 0.

    >>> one, other = torch.tensor([[2.0], [4.0], [3.0], [3.0]]), torch.tensor([[0.0], [0.0], [1.0], [-1.0]])
    >>> [scores.tolist() for scores in held_out_scores(one, other)]
    [[0.5, 2.5, 1.5, 1.5], [-1.5, -1.5, -0.5, -2.5]]
    """
    scores = [torch.empty(group.shape[:-1], dtype=torch.float64) for group in (one, other)]
    for half in (0, 1):
        means = [group[1 - half :: 2].double().mean(dim=0) for group in (one, other)]
        direction = torch.nn.functional.normalize(means[0] - means[1], dim=-1)
        for group, of_group in zip((one, other), scores, strict=True):
            of_group[half::2] = ((group[half::2].double() - sum(means) / 2) * direction).sum(dim=-1)
    size = max(float(group.double().norm(dim=-1).max()) for group in (one, other))
    scores = [of_group.masked_fill(of_group.abs() <= ROUNDING * size, 0.0) for of_group in scores]
    return scores[0].movedim(0, -1), scores[1].movedim(0, -1)


def separated_share(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"]) -> Float[Tensor, "*place"]:
    """The mean of two shares: texts of `one` above 0, and texts of `other` below. 0 counts half; 0.5 is chance."""
    return (_above(one) + _above(-other)) / 2


def _above(scores: Float[Tensor, "*place text"]) -> Float[Tensor, "*place"]:
    """The share of texts above 0; those at 0 count half."""
    return (scores.sign() + 1).double().mean(dim=-1) / 2


def share_interval(one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float) -> Interval:
    """The interval of `separated_share`: the mean of the exact binomial intervals of both shares, each at
    (1 + level) / 2, so that together they hold at `level`.
    """
    error = (1 - level) / 2
    shares = _above(one), _above(-other)
    ends = [exact_interval(shares[0], one.shape[-1], error), exact_interval(shares[1], other.shape[-1], error)]
    return (ends[0][0] + ends[1][0]) / 2, (ends[0][1] + ends[1][1]) / 2


def difference_interval(
    one: Float[Tensor, "*place one"], other: Float[Tensor, "*place other"], level: float
) -> Interval:
    """Welch's t interval of mean(one) − mean(other), as of half as many texts.

    Each half is judged by the direction of the other, so both halves err to the same side: d₀ · d₁ / |d₁| and
    d₀ · d₁ / |d₀|, with d₀ and d₁ the mean differences of the halves, always have the same sign.
    """
    halves = one.shape[-1] / 2, other.shape[-1] / 2
    first, second = (group.var(dim=-1) / count for group, count in zip((one, other), halves, strict=True))
    error = first + second
    freedom = error**2 / (first**2 / (halves[0] - 1) + second**2 / (halves[1] - 1))
    freedom = torch.where(error > 0, freedom, 1.0)
    half = torch.as_tensor(student_t.ppf((1 + level) / 2, freedom.numpy())) * error.sqrt()
    difference = one.mean(dim=-1) - other.mean(dim=-1)
    return difference - half, difference + half


AT: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "q", "k", "v")
"""The points at which a direction can be added again."""
LEAST: Final = 4  # the fewest texts of a group: two in each half


@dataclass(frozen=True, repr=False)
class MeanDifference(PagedResult):
    """The mean of one group of texts minus that of another, at a point: `direction [layer d]` or `[layer head d]`.

    Every text is also judged by the direction that the other half of the texts gives. `separated` is the share of texts
    on the right side of the midpoint (0.5 is chance), `distance` the distance of the groups along that direction.
    """

    _TITLE = "Mean difference at {result.at}"
    _SUBTRACT: ClassVar[str] = "subtract their `direction`"
    _AXES: ClassVar = {"layer": "layers"}

    at: str
    layers: tuple[int, ...]
    pooling: str
    """ "last" or "mean"."""
    direction: Float[Tensor, "layer *head d"]
    """The mean difference in each of `layers`; copies of a text count once."""
    one: Float[Tensor, "*place one"]
    """The place of each text of the first group, along the direction of the other half; 0 is the midpoint."""
    other: Float[Tensor, "*place other"]
    """The same for the second group."""
    provenance: Provenance

    @property
    def values(self) -> Values:
        """The direction by layer, for `am.Intervention.add`."""
        by_layer = {layer: part[None, None] for layer, part in zip(self.layers, self.direction, strict=True)}
        return Values(by_layer, "a mean difference")

    @property
    def separated(self) -> Float[Tensor, "*place"]:
        """The share of held-out texts on the right side, as the mean of both groups; 0.5 is chance.

        Texts at the midpoint count half.
        """
        return separated_share(self.one, self.other)

    @property
    def distance(self) -> Float[Tensor, "*place"]:
        """The distance of the groups' held-out means along the direction."""
        return self.one.mean(dim=-1) - self.other.mean(dim=-1)

    def interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Low and high end of the t interval of `distance`: Welch's, as of half as many texts, since both halves of the
        texts are judged by each other's directions.
        """
        return difference_interval(self.one, self.other, level)

    def separated_interval(self, level: float = LEVEL) -> tuple[Float[Tensor, "*place"], Float[Tensor, "*place"]]:
        """Low and high end of the exact interval of `separated` over texts."""
        return share_interval(self.one, self.other, level)

    def to_frame(self) -> pd.DataFrame:
        """One row per layer (and head): layer, head, separated, separated_low, separated_high, distance, distance_low,
        distance_high, norm.
        """
        places = (self.separated == self.separated).nonzero()
        frame: dict[str, Any] = {"layer": [self.layers[place] for place in places[:, 0].tolist()]}
        if places.shape[1] > 1:
            frame["head"] = places[:, 1].tolist()
        low, high = self.separated_interval()
        near, far = self.interval()
        columns = {"separated": self.separated, "separated_low": low, "separated_high": high}
        columns |= {"distance": self.distance, "distance_low": near, "distance_high": far}
        columns["norm"] = self.direction.double().norm(dim=-1)
        return pd.DataFrame(frame | {name: value.flatten().numpy() for name, value in columns.items()})

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """The share of held-out texts that each layer separates, with intervals; for heads, layers × heads."""
        require_one_figure(figure)
        if self.separated.ndim == 1:
            require_no_head(layer, head)
            return separation(self.to_frame())
        low, high = self.separated_interval()
        numbers = (self.separated.numpy(), low.numpy(), high.numpy())
        drawn = effect_map(*numbers, layers=self.layers, label="held-out texts on the right side (share)")
        return framed(drawn, self.layers, layer, head)

    @property
    def lead(self) -> str:
        shares = self.separated.flatten()
        place, count = int(shares.argmax()), len(shares)
        low, high = (end.flatten()[place].item() for end in self.separated_interval(1 - (1 - LEVEL) / count))
        things = "heads" if self.separated.ndim > 1 else "layers"
        row = self.to_frame().iloc[place]
        name = f"L{int(row['layer'])}" + (f"H{int(row['head'])}" if "head" in row else "")
        kept = f"{self.one.shape[-1]} and {self.other.shape[-1]}"
        counts = self.provenance.options.get("texts")
        read = " and ".join(map(str, counts)) if isinstance(counts, list) else ""
        texts = f"{kept} texts" if read in ("", kept) else f"{read} texts ({kept} distinct)"
        return with_minus_signs(
            f"On {texts}, the mean difference at {self.at} of {name} separates {float(shares[place]):.2f} of held-out "
            f"texts{interval_of((low, high), '.2f', count, things)}; 0.5 is chance."
        )

    @property
    def _is_about_heads(self) -> bool:  # type: ignore[override]
        return self.separated.ndim > 1

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "The share of texts on the right side of the midpoint, along the direction of the other half of the texts; "
            "0.5 is chance. Bars are 95 % intervals over texts, for each layer alone."
        )
        return [Section("Separation", reading, {"separation": self.plot()}, "direction.plot()")]


@public
def mean_difference(
    model: HookedModel,
    one: Inputs | Iterable[Inputs],
    other: Inputs | Iterable[Inputs],
    *,
    at: str = "resid_post",
    pooling: str = "last",
    layers: Iterable[int] | None = None,
    **options: Unpack[CommonOptions],
) -> MeanDifference:
    """Computes the mean of one group of texts minus that of another, and how well it separates held-out texts.

    >>> import attnmech as am
    >>> model, names = am.load(), ("Anna", "Tom", "Mia", "Leo", "Nina", "Max")
    >>> met, lost = ([f"{name} {verb}" for name in names] for verb in ("met the", "lost an"))
    >>> direction = am.mean_difference(model, met, lost, layers=[2, 3])
    >>> direction.direction.shape, direction.separated.tolist()
    (torch.Size([2, 192]), [1.0, 1.0])
    >>> with model.intervene(am.Intervention.add("resid_post", direction.values, layers=[2], factor=4.0)):
    ...     logits = model.run("Anna lost an").logits

    Args:
        model: the model.
        one: at least four different texts; copies count once.
        other: at least four other texts. Texts of one half should not be near copies of those in the other: texts with
            even and odd numbers, in the order of their content, are the halves. A text of both groups is in the same
            half of both.
        at: the point: "resid_pre", "resid_mid", "resid_post", "attn_out" or "mlp_out" of each layer, or "z", "q", "k"
            or "v" of each head (kv heads at k and v).
        pooling: "last", the last token of each text, or "mean", over its tokens.
        layers: by default all.
        options: bos and progress.

    Returns:
        The direction in each layer, the share of held-out texts that it separates, and their distance along it, with
        intervals over texts.

    Raises:
        InputError: for fewer than four different texts in a group, invalid points, pooling or layers, and models with
            several stacks.
        MissingPointError: for a point that the model lacks.

    Source: Marks & Tegmark 2023 (mass-mean directions); Li et al. 2023 (ITI).
    """
    require_model(model)
    option("at", at, AT)
    option("pooling", pooling, ("last", "mean"))
    progress = flag("progress", options.get("progress", False))
    if len(model.stacks) > 1:
        raise InputError("a direction belongs to one stack, and this model has several.")
    stack = model.output_stack
    chosen = list(dict.fromkeys(model.points.check_layers(layers, stack.label)))
    by_content, texts, digests, begin = zip(
        *(
            _activations(model, reread(texts), stack.point(at), chosen, pooling, options.get("bos"), progress)
            for texts in (one, other)
        ),
        strict=True,
    )
    for name, group, count in zip(("one", "other"), by_content, texts, strict=True):
        if len(group) < LEAST:
            raise InputError(
                f"`{name}` must have at least {LEAST} different texts, two in each half; got "
                f"{counted(count, len(group))}. Give more texts."
            )
    groups = [_in_order(*by_content), _in_order(*by_content[::-1])]
    scores = held_out_scores(*groups)
    direction = groups[0].mean(dim=0) - groups[1].mean(dim=0)
    noted = {"at": at, "pooling": pooling, "layers": chosen, "bos": every_bos(begin), "other inputs": digests[1]}
    noted["texts"] = list(texts)
    return MeanDifference(
        at, tuple(chosen), pooling, direction.to(model.dtype), *scores, model.provenance(digests[0], (), noted)
    )


def _activations(
    model: HookedModel, inputs: Any, point: str, layers: Sequence[int], pooling: str, bos: bool | None, progress: bool
) -> tuple[dict[int, Float[Tensor, "layer *head d"]], int, str, bool | None]:
    """The activation of each distinct text by its digest, and the number, digest and `Batch.bos` of all texts."""
    keys = model.points.resolve([point], layers, model.refused)
    parts = batches_of(model, inputs, 2048, bos)
    by_content: dict[int, Tensor] = {}
    texts = sum(len(part.documents) for part in parts)
    with steps("texts", texts, show=progress) as bar:
        for part in parts:
            captured = model.forward(part.batch, captures=keys)
            values = as_float64(torch.stack([captured[key] for key in keys], dim=1)).cpu()
            real = part.batch.mask.cpu()
            for row, digest in enumerate(part.batch.digests.tolist()):
                tokens = values[row][:, real[row]]
                by_content.setdefault(digest, tokens[:, -1] if pooling == "last" else tokens.mean(dim=1))
            bar.advance(len(part.documents))
    begin = every_bos(part.batch.bos for part in parts)
    return by_content, texts, parts[-1].digest, begin


def _in_order(mine: dict[int, Tensor], yours: dict[int, Tensor]) -> Float[Tensor, "text layer *head d"]:
    """The activations of a group, sorted by content, after those of texts that are in both groups."""
    return torch.stack([mine[digest] for digest in sorted(mine, key=lambda digest: (digest not in yours, digest))])
