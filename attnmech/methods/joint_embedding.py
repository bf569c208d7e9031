"""Where would queries and keys lie, if near meant attended to? AttentionViz's joint embedding, measured (formulas §2)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ..arguments import finite_number, flag, member, option, optional_flag, shown, string, whole_number
from ..batch import Batch
from ..draw.joint_embedding import criterion_curve, joint_scatter
from ..draw.section import Section
from ..errors import InputError, UnsupportedModelError
from ..fields import check_layers
from ..interventions import Heads
from ..maths.joint_embedding import ScaleAndShift, spread_ratio
from ..maths.projections import CANNOT_PLACE, PROJECTIONS, Projection, check_enough, require_installed
from ..model.hooked import HookedModel, require_model
from ..model.inputs import Ids, Inputs
from ..results import PagedResult, Provenance
from ..runs.chosen_texts import TOKENS, ChosenTexts, choose_texts
from ..runs.embedded_head import NUMBERS, EmbeddedHead, Plan
from ..runs.joint_embedding import Embedder
from ..runs.layers import count_layers
from ..runs.projected import AFTER, Projecting, after_projection
from ..runs.token_pairs import Tokens, sampled
from ..runs.token_types import TOKEN_TYPES, token_types

KEPT_BYTES: Final = 2**30
"""The most memory that the sampled vectors of all heads may take."""

CARRIED_BYTES: Final = 2**25
"""The most memory that the whole patterns of a few texts may take."""

_CARRIED: Final = 8

_RANDOM_POINTS: Final = 1_000
"""Among how many points of a head at most `search` takes the mean distance of two."""

_ANOMALIES: Final[Mapping[str, float]] = {
    "norm disparity": math.log(2),
    "separated clusters": 2.0,
    "attends to first": 0.5,
}
"""From which number on a head is listed: |ln(key norm / query norm)|, centroid distance in spreads, mean attention."""


class Anomaly(NamedTuple):
    """A head that stands out, and by how much."""

    layer: int
    head: int
    what: str
    """"norm disparity", "separated clusters" or "attends to first"."""
    number: float
    """Median key norm / median query norm; distance between centroids / spread; mean attention to the first token."""


def joint_embedding(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Iterable[int] | None = None,
    heads: Heads = "all",
    projection: str | Sequence[str] = "pca",
    dims: Literal[2, 3] = 2,
    shift: bool = True,
    scale: float | Literal["auto", "norm"] = "auto",
    geometry: Literal["scaled", "exact"] = "scaled",
    sample: int = 2_000,
    perplexity: float = 50.0,
    seed: int = 0,
    stack: str | None = None,
    bos: bool | None = None,
    truncate: bool = False,
) -> "JointEmbedding":
    """Queries and keys of every head as points of one space, in which near means attended to.

    q ← c q, k ← k / c, which leaves every dot product as it was; then, with `shift`, all keys move so that their mean is
    the queries', which adds a constant to each row of scores. q and k are those that enter the scores, after rotation; a
    key that several query heads share becomes a point of each.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> found = am.joint_embedding(am.load(), documents(3), layers=[2])
    >>> found.points["pca"].shape                                   # [chosen point dims]: queries, then keys
    torch.Size([8, 156, 2])
    >>> found.correlation[2].round(decimals=1).tolist()             # before projection
    [-0.3, -0.4, -0.8, -0.8, -0.6, -0.5, -0.6, -0.7]

    `scale="auto"` takes the c of a grid around the closed form at which the weighted correlation of distance and dot
    product is lowest: over the pairs nearer than τ, the 20th percentile of all distances, with weights (τ − distance)².
    `scale="norm"` is the closed form, c = √(median ‖k‖ / median ‖q‖).

    `geometry="exact"` appends two coordinates instead: q̃ = [scale · q, slope, 0], k̃ = [k, p, √(M² − ‖k‖² − p²)], in
    float64, so that for each query the squared distance is a constant minus twice the score, ALiBi included (slope · p is
    the position term). A soft cap keeps the order of the scores, and a sink is no key, so this holds with both; a position
    term that depends on query and key together (T5's) is refused. `scale` and `shift` then do nothing.

    Args:
        model: the model; hooks in force change what is embedded.
        inputs: texts, or an iterator of texts (a corpus), of which whole texts drawn at random are run, with 16,384
            tokens in all, or `sample` if that is more.
        layers: by default all.
        heads: "all", or a list of (layer, head).
        projection: "pca", "tsne", "umap", "pacmap" or "opentsne", or several. PCA and t-SNE are scikit-learn's; the
            others are extras of that name. t-SNE and UMAP measure by cosine, after AttentionViz.
        dims: dimensions of the picture.
        shift: whether keys are moved.
        scale: "auto", "norm", or c itself.
        geometry: "scaled" or "exact".
        sample: how many tokens become points, at most; measures before projection are over all tokens.
        perplexity: of t-SNE.
        seed: of all that is drawn: tokens, texts, pairs, and starts of projections.
        stack: "encoder" or "decoder" in a model with several.
        bos: whether each text begins with the tokenizer's first token.
        truncate: whether texts of a corpus are cut to the model's length.

    Returns:
        Points, and by layer and head how well distance stands for the dot product before and after projection, norms,
        what the shift changes, and heads that stand out.

    Raises:
        InputError: for a library that is not installed, too few tokens for a projection, vectors beyond 1 GB, or a
            projection that takes fewer points.
        UnsupportedModelError: for cross-attention, and for `geometry="exact"` with a position term that does not fit.

    Source: Yeh et al. 2023, "AttentionViz", arXiv 2305.03210; c by norms and the exact geometry are ours.
    """
    require_model(model)
    names = _projections(projection)
    dims = cast(Literal[2, 3], member("dims", dims, (2, 3), "the dimensions of a picture"))
    option("geometry", geometry, ("scaled", "exact"))
    perplexity, seed = finite_number("perplexity", perplexity, above=0.0), whole_number("seed", seed, most=2**32 - 1)
    sample = whole_number("sample", sample, least=2)
    settings = _Settings(names, dims, perplexity, sample, optional_flag("bos", bos), flag("truncate", truncate))
    plan = Plan(
        tuple(model.check_heads(heads, layers, stack)), geometry, _checked_scale(scale), flag("shift", shift), seed
    )
    return _embedded(model, inputs, plan, settings, stack)


@dataclass(frozen=True)
class _Settings:
    """What is not the plan of a pass."""

    projections: tuple[str, ...]
    dims: int
    perplexity: float
    sample: int
    bos: bool | None
    truncate: bool


def _projections(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not names:
        raise InputError(
            f"`projection` must be one of {', '.join(PROJECTIONS)}, or a list of them; got {shown(given)}."
        )
    for name in names:
        option("projection", name, PROJECTIONS)
        require_installed(name)
    return tuple(dict.fromkeys(names))


def _checked_scale(given: Any) -> float | Literal["auto", "norm"]:
    if isinstance(given, str):
        option("scale", given, ("auto", "norm"))
        return cast(Literal["auto", "norm"], given)
    return finite_number("scale", given, above=0.0)


def _embedded(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    plan: Plan,
    settings: _Settings,
    stack: str | None,
    fitted: "JointEmbedding | None" = None,
) -> "JointEmbedding":
    """The result; with `fitted`, of points placed in its pictures."""
    of_stack = model.output_stack if stack is None else model.stack(stack)
    if of_stack.label == "cross":
        raise UnsupportedModelError(
            "in cross-attention queries and keys are tokens of two texts, and a point here is a token of one; use "
            'stack="encoder" or stack="decoder".'
        )
    layers = tuple(dict.fromkeys(layer for layer, _ in plan.heads))
    model.points.resolve([of_stack.point(name) for name in ("scores", "pattern")], layers, model.refused)
    chosen = _texts(model, inputs, plan, settings)
    batch = chosen.batch.queries(of_stack.label)
    tokens = Tokens.of(batch)
    places = sampled(tokens, torch.tensor(chosen.documents), settings.sample, plan.seed)
    _check(plan, settings, len(places), of_stack.d_head, model.dtype)
    embedder = Embedder(plan, batch, places, _carried(batch, len(plan.heads)), of_stack.label)
    model.forward(chosen.batch, rows=[embedder], layers=[(of_stack.label, layer) for layer in layers])
    found = [embedder.found[each] for each in plan.heads]
    points, after = _pictures(plan, settings, embedder, found, fitted)
    options = {
        "heads": [list(each) for each in plan.heads], "projection": list(settings.projections), "dims": settings.dims,
        "shift": plan.shift, "scale": plan.scale, "geometry": plan.geometry, "sample": settings.sample,
        "perplexity": settings.perplexity, "seed": plan.seed, "bos": settings.bos, "stack": of_stack.label or "self",
    }  # fmt: skip
    return JointEmbedding(
        heads=plan.heads,
        n_layers=count_layers(model, of_stack),
        n_heads=of_stack.n_heads,
        stack=of_stack.label,
        geometry=plan.geometry,
        shift=plan.shift and plan.geometry == "scaled",
        chosen_by=plan.scale if isinstance(plan.scale, str) else "given",
        dims=settings.dims,
        perplexity=settings.perplexity,
        seed=plan.seed,
        labels=tuple(batch.tokens[row][place] for row, place in _cells(embedder.sample)),
        text=embedder.sample.text,
        position=batch.places.cpu()[embedder.sample.text, embedder.sample.position],
        lengths=batch.lengths.cpu(),
        special=embedder.sample.of_each(batch.is_special).cpu(),
        types=embedder.sample.of_each(token_types(batch)).cpu(),
        documents=chosen.documents,
        texts_seen=chosen.seen,
        pairs=tuple(len(embedder.all_pairs[layer]) for layer in layers),
        all_pairs=all(each.whole for each in embedder.all_pairs.values()),
        vectors=torch.stack([each.vectors for each in found]),
        offsets=torch.stack([each.offset for each in found]),
        norms=torch.stack([each.norms for each in found]),
        highest=_in_sample(embedder),
        weights=embedder.weights,
        numbers={name: torch.tensor([each.numbers[name] for each in found], dtype=torch.float64) for name in NUMBERS},
        after=after,
        flags=tuple(each.flag for each in found),
        grid=torch.stack([each.grid for each in found]),
        curve=torch.stack([each.curve for each in found]),
        points=points,
        patterns={str(number): value for number, value in embedder.patterns.items()},
        text_labels={
            str(number): tuple(
                token for token, real in zip(batch.tokens[number], batch.mask[number].tolist(), strict=True) if real
            )
            for number in embedder.patterns
        },
        text_special={str(number): batch.is_special[number][batch.mask[number]].cpu() for number in embedder.patterns},
        provenance=model.provenance(chosen.batch, chosen.batch.queries(of_stack.label).tokens, options),
    )


def _texts(model: HookedModel, inputs: Inputs | Iterable[Inputs], plan: Plan, settings: _Settings) -> ChosenTexts:
    """One batch: the inputs, or texts of a corpus."""
    known = isinstance(inputs, (str, Ids, Mapping, Batch, Sequence)) or hasattr(inputs, "__array__")
    if isinstance(inputs, Iterable) and not known:
        return choose_texts(
            model, inputs, tokens=max(TOKENS, settings.sample), seed=plan.seed, bos=settings.bos,
            truncate=settings.truncate,
        )  # fmt: skip
    if settings.truncate:
        raise InputError("`truncate` is for a corpus: give an iterator of texts, such as iter(texts).")
    batch = model.encode(cast(Inputs, inputs), bos=settings.bos)
    return ChosenTexts(batch, tuple(range(len(batch.ids))), len(batch.ids), 0)


def _check(plan: Plan, settings: _Settings, tokens: int, d_head: int, dtype: torch.dtype) -> None:
    """Raises `InputError` for too few tokens, and for too many points."""
    if tokens < 2:
        raise InputError("a joint embedding needs two tokens at least; give a longer text.")
    for name in settings.projections:
        count = 2 * tokens
        Projecting(name, settings.dims, settings.perplexity, plan.seed).check_room(count)
        check_enough(name, count, dims=settings.dims, perplexity=settings.perplexity)
    size = 8 * (d_head + 2) if plan.geometry == "exact" else torch.promote_types(dtype, torch.float32).itemsize * d_head
    each = 2 * len(plan.heads) * size
    if tokens * each > KEPT_BYTES:
        raise InputError(
            f"the queries and keys of {tokens:,} tokens in {len(plan.heads)} heads would take "
            f"{tokens * each / 1e9:.1f} GB, and at most {KEPT_BYTES / 1e9:.1f} GB are kept. Use "
            f"sample={KEPT_BYTES // each} or less, or fewer `heads`."
        )


def _carried(batch: Batch, heads: int) -> list[int]:
    """The first texts, as long as their patterns in all heads are small enough to be carried."""
    found, total = [], 0
    for number, length in enumerate(batch.lengths.tolist()[:_CARRIED]):
        total += 2 * heads * length**2
        if total <= CARRIED_BYTES:
            found.append(number)
        else:
            total -= 2 * heads * length**2
    return found


def _pictures(
    plan: Plan, settings: _Settings, embedder: Embedder, found: Sequence[EmbeddedHead], fitted: "JointEmbedding | None"
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The points of every head by projection, and what was measured on them."""
    points, after = {}, {}
    for name in settings.projections:
        projecting = Projecting(name, settings.dims, settings.perplexity, plan.seed)
        shown_points, measured = [], []
        for place, (layer, head) in enumerate(plan.heads):
            vectors = found[place].vectors
            here = (
                projecting.points(vectors)
                if fitted is None
                else torch.from_numpy(fitted._placer(name, place)(vectors.numpy())).float()
            )
            pairs = embedder.pairs[layer]
            measured.append(after_projection(name, vectors, here, found[place].offset, pairs, plan.seed))
            shown_points.append(here)
        points[name] = torch.stack(shown_points)
        after[name] = {
            number: torch.tensor([each[number] for each in measured], dtype=torch.float64) for number in AFTER
        }
    return points, after


def _cells(tokens: Tokens) -> list[tuple[int, int]]:
    return list(zip(tokens.text.tolist(), tokens.position.tolist(), strict=True))


def _in_sample(embedder: Embedder) -> Int[Tensor, "chosen token 2"]:
    """The most attended keys as places in the sample, −1 for keys that are not in it."""
    places = torch.full(embedder.batch.ids.shape, -1)
    places[embedder.sample.text, embedder.sample.position] = torch.arange(len(embedder.sample))
    found = places[embedder.sample.text[None, :, None], embedder.highest.clamp_min(0)]
    return found.masked_fill(embedder.highest < 0, -1)


@dataclass(frozen=True, repr=False)
class JointEmbedding(PagedResult):
    """Queries and keys of every head as points of one space, with what was measured on them."""

    SUBTRACT = "subtract what you compare: one.correlation - other.correlation"

    heads: tuple[tuple[int, int], ...]
    """The (layer, head) embedded; the axis `chosen` of tensors counts these."""
    n_layers: int
    n_heads: int
    stack: str
    geometry: Literal["scaled", "exact"]
    shift: bool
    """Whether keys were moved."""
    chosen_by: str
    """How c was chosen: "auto", "norm" or "given"."""
    dims: int
    perplexity: float
    seed: int
    labels: tuple[str, ...]
    """The sampled tokens as text."""
    text: Int[Tensor, " token"]
    """Which text each is of, counted among those that were run."""
    position: Int[Tensor, " token"]
    """Its place among the real tokens of its text."""
    lengths: Int[Tensor, " text"]
    """The number of tokens in each text."""
    special: Bool[Tensor, " token"]
    types: Int[Tensor, " token"]
    """Indices into `attnmech.runs.token_types.TOKEN_TYPES`."""
    documents: tuple[int, ...]
    """The numbers of the texts in the inputs."""
    texts_seen: int
    """How many texts the inputs have; of a corpus, not all may have been run."""
    pairs: tuple[int, ...]
    """On how many query-key pairs of each layer the measures before projection are."""
    all_pairs: bool
    """Whether these are all that attention sees, or a sample drawn at random."""
    vectors: Float[Tensor, "chosen point d"]
    """The points before projection: the queries of all sampled tokens, then their keys."""
    offsets: Float[Tensor, "chosen d"]
    """What the shift has added to the keys."""
    norms: Float[Tensor, "chosen point"]
    """The norms of queries and keys before scale and shift."""
    highest: Int[Tensor, "chosen token 2"]
    """The two most attended keys of each query, as indices of sampled tokens; −1 where that key was not sampled."""
    weights: Float[Tensor, "chosen token 2"]
    """Their attention, from 0 to 1."""
    numbers: Mapping[str, Float64[Tensor, " chosen"]]
    after: Mapping[str, Mapping[str, Float64[Tensor, " chosen"]]]
    """What was measured in each picture."""
    flags: tuple[str, ...]
    """"edge" for a head whose best c is at an end of the grid, "flat" where the criterion does not depend on c, or ""."""
    grid: Float64[Tensor, "chosen c"]
    """The values of c that were tried."""
    curve: Float64[Tensor, "chosen c"]
    """The weighted correlation at each; NaN unless c was chosen by it."""
    points: Mapping[str, Float[Tensor, "chosen point dims"]]
    """By projection: the queries of all sampled tokens, then their keys."""
    patterns: Mapping[str, Float[Tensor, "chosen query key"]]
    """The whole attention of a few short texts, by their number."""
    text_labels: Mapping[str, tuple[str, ...]]
    text_special: Mapping[str, Bool[Tensor, " position"]]
    provenance: Provenance
    _placers: dict[tuple[str, int], Projection] = field(default_factory=dict, compare=False, metadata={"saved": False})

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of axes that labels give."""
        tokens = len(self.labels)
        return {"chosen": len(self.heads), "token": tokens, "point": 2 * tokens, "text": len(self.documents)}

    def _check(self) -> None:
        # The axes of patterns differ from text to text.
        for field_name in ("patterns", "text_special"):
            if set(getattr(self, field_name)) != set(self.text_labels):
                raise ValueError(f"`{field_name}` must be of the texts of `text_labels`")
        replace(self, patterns={}, text_special={})._check_fields()
        check_layers(tuple(dict.fromkeys(layer for layer, _ in self.heads)), self.n_layers)

    def _check_fields(self) -> None:
        super()._check()

    # -- by layer and head ------------------------------------------------------------------------------------

    def _by_head(self, values: Float[Tensor, " chosen"]) -> Float[Tensor, "layer head"]:
        found = torch.full((self.n_layers, self.n_heads), torch.nan, dtype=values.dtype)
        layer, head = torch.tensor(self.heads).T
        found[layer, head] = values
        return found

    @property
    def correlation(self) -> Float[Tensor, "layer head"]:
        """The weighted correlation of distance and dot product (with `geometry="exact"`, score), before projection.

        Pearson's, over the pairs of a query and a key it sees that are nearer than τ, each with weight (τ − distance)²;
        τ is the 20th percentile of the distances of all pairs. −1 where distance says all about near pairs.
        """
        return self._by_head(self.numbers["correlation"])

    @property
    def spearman(self) -> Float[Tensor, "layer head"]:
        """The rank correlation over all pairs, before projection."""
        return self._by_head(self.numbers["spearman"])

    @property
    def row_spearman(self) -> Float[Tensor, "layer head"]:
        """With `geometry="exact"`: the rank correlation of distance and score furthest from −1 among all queries."""
        return self._by_head(self.numbers["row_spearman"])

    @property
    def scale(self) -> Float[Tensor, "layer head"]:
        """c of each head; NaN with `geometry="exact"`."""
        return self._by_head(self.numbers["scale"])

    @property
    def at_edge(self) -> Bool[Tensor, "layer head"]:
        """Where the best c is at an end of the grid, so that a better one may lie beyond."""
        return self._by_head(torch.tensor([float(each == "edge") for each in self.flags])) == 1

    @property
    def query_norm(self) -> Float[Tensor, "layer head"]:
        """The median norm of queries, before scale and shift."""
        return self._by_head(self.numbers["query_norm"])

    @property
    def key_norm(self) -> Float[Tensor, "layer head"]:
        """The median norm of keys, before scale and shift."""
        return self._by_head(self.numbers["key_norm"])

    @property
    def disparity(self) -> Float[Tensor, "layer head"]:
        """`key_norm` / `query_norm`."""
        return self.key_norm / self.query_norm

    @property
    def centroid_distance(self) -> Float[Tensor, "layer head"]:
        """The distance between the means of queries and keys after scaling, before the shift: ‖c q̄ − k̄ / c‖."""
        return self._by_head(self.numbers["centroid_distance"])

    @property
    def separation(self) -> Float[Tensor, "layer head"]:
        """`centroid_distance`, in spreads: the root mean square distance of a point from the mean of its kind."""
        return self._by_head(self.numbers["separation"])

    @property
    def shift_share(self) -> Float[Tensor, "layer head"]:
        """The share of q̄·k in what distinguishes the keys of a row: what distances lose by the shift (formulas §6).

        Σ_rows Σ_j (t_ij − t̄_i)(s_ij − s̄_i) / Σ_rows Σ_j (s_ij − s̄_i)² of t = q̄·k and s = q·k, q̄ the mean query.
        """
        return self._by_head(self.numbers["shift_share"])

    @property
    def attention_change(self) -> Float[Tensor, "layer head"]:
        """The largest change of an attention probability, if scores were made from the points: 0 but for rounding.

        A shift adds a constant to each row of scores. Under a soft cap, or beside a sink, that does change attention.
        """
        return self._by_head(self.numbers["attention_change"])

    @property
    def first_attention(self) -> Float[Tensor, "layer head"]:
        """The mean attention to a text's first token, over all other rows."""
        return self._by_head(self.numbers["first_attention"])

    @property
    def projected_correlation(self) -> dict[str, Float[Tensor, "layer head"]]:
        """`correlation` in each picture, over the pairs of sampled tokens."""
        return {name: self._by_head(found["correlation"]) for name, found in self.after.items()}

    @property
    def projected_spearman(self) -> dict[str, Float[Tensor, "layer head"]]:
        """`spearman` in each picture, over the pairs of sampled tokens."""
        return {name: self._by_head(found["spearman"]) for name, found in self.after.items()}

    @property
    def trustworthiness(self) -> dict[str, Float[Tensor, "layer head"]]:
        """By projection, from 0 to 1: whether neighbours in the picture were neighbours before (Venna & Kaski 2001).

        scikit-learn's, with 5 neighbours and the projection's metric, on at most 1,000 points drawn at random.
        """
        return {name: self._by_head(found["trustworthiness"]) for name, found in self.after.items()}

    @cached_property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """Heads that stand out, the strongest first.

        "norm disparity": median norms differ by a factor of 2 or more. "separated clusters": before the shift, the
        centroids of queries and keys are 2 spreads or more apart. "attends to first": half or more of the attention of
        all later rows. Ranked by how many times they pass that.
        """
        found = []
        columns = zip(self.heads, *(self.numbers[name].tolist() for name in _OF_ANOMALIES), strict=True)
        for (layer, head), query, key, apart, first in columns:
            ratio = key / query if query > 0 else math.inf
            strength = {
                "norm disparity": (ratio, abs(math.log(ratio)) if ratio > 0 else math.inf),
                "separated clusters": (apart, apart),
                "attends to first": (first, first),
            }
            found += [
                (size / _ANOMALIES[what], Anomaly(layer, head, what, number))
                for what, (number, size) in strength.items()
                if size >= _ANOMALIES[what]
            ]
        return tuple(anomaly for _, anomaly in sorted(found, key=lambda each: (-each[0], each[1][:3])))

    # -- one head ---------------------------------------------------------------------------------------------

    def _place(self, layer: int, head: int) -> int:
        try:
            return self.heads.index((layer, head))
        except ValueError:
            raise InputError(
                f"layer {layer}, head {head} was not embedded; got {len(self.heads)} heads, from "
                f"L{self.heads[0][0]}H{self.heads[0][1]} to L{self.heads[-1][0]}H{self.heads[-1][1]}."
            ) from None

    def _projection(self, projection: str | None) -> str:
        return next(iter(self.points)) if projection is None else option("projection", projection, self.points)

    def embedded(self, layer: int, head: int) -> tuple[Float[Tensor, "token d"], Float[Tensor, "token d"]]:
        """The queries and keys of a head as points before projection."""
        tokens = len(self.labels)
        found = self.vectors[self._place(layer, head)]
        return found[:tokens], found[tokens:]

    def _placer(self, name: str, place: int) -> Any:
        """The function that puts further vectors into a head's picture."""
        if name in CANNOT_PLACE:
            raise InputError(f'projection="{name}" cannot place further points: {CANNOT_PLACE[name]}.')
        if (name, place) not in self._placers:
            projecting = Projecting(name, self.dims, self.perplexity, self.seed)
            self._placers[name, place] = projecting.fit(self.vectors[place])
        return self._placers[name, place].place

    def place(
        self,
        layer: int,
        head: int,
        *,
        queries: Float[Tensor, "query d_head"] | None = None,
        keys: Float[Tensor, "key d_head"] | None = None,
        projection: str | None = None,
    ) -> Float[Tensor, "point dims"]:
        """Further queries, then further keys, in the picture of a head, with its scale and shift.

        By PCA, UMAP or openTSNE; scikit-learn's t-SNE and PaCMAP cannot. UMAP and openTSNE are fitted again when first
        asked, with the same seed. Queries and keys are those that enter the scores, after rotation.
        """
        if self.geometry == "exact":
            raise InputError(
                'with geometry="exact", the last coordinate of a key depends on the longest key of the run; embed all '
                "texts at once."
            )
        place, name = self._place(layer, head), self._projection(projection)
        placer = self._placer(name, place)
        embedding = self._embedding(place)
        given = [] if queries is None else [embedding.queries(queries.double())]
        given += [] if keys is None else [embedding.keys(keys.double())]
        width = self.vectors.shape[-1]
        if not given or any(each.ndim != 2 or each.shape[1] != width for each in given):
            raise InputError(f"give `queries`, `keys` or both, each [point, {width}].")
        return torch.from_numpy(np.asarray(placer(torch.cat(given).cpu().numpy()))).float()

    def _embedding(self, place: int) -> ScaleAndShift:
        return ScaleAndShift(float(self.numbers["scale"][place]), self.offsets[place].double())

    def place_texts(
        self,
        model: HookedModel,
        inputs: Inputs | Iterable[Inputs],
        *,
        sample: int = 2_000,
        bos: bool | None = None,
        truncate: bool = False,
    ) -> "JointEmbedding":
        """The joint embedding of further texts, in the pictures, scales and shifts of this one.

        Raises `InputError` for another model, and for projections that cannot place further points.
        """
        require_model(model)
        if model.weights_hash != self.provenance.weights:
            raise InputError("further texts must be run on the model that this was measured on; its weights differ.")
        if self.geometry == "exact":
            self.place(*self.heads[0])
        for name in self.points:
            self._placer(name, 0)
        fixed = {each: self._embedding(place) for place, each in enumerate(self.heads)}
        plan = Plan(self.heads, "scaled", "auto", self.shift, self.seed, fixed)
        sample = whole_number("sample", sample, least=2)
        settings = _Settings(tuple(self.points), self.dims, self.perplexity, sample, bos, truncate)
        return _embedded(model, inputs, plan, settings, self.stack or None, self)

    # -- search -----------------------------------------------------------------------------------------------

    def search(self, query: str, *, projection: str | None = None) -> pd.DataFrame:
        """How close together the tokens that hold a string lie, head by head, the most clustered first.

        `queries` and `keys`: the mean distance between two of the hits, divided by that between two tokens at random (of
        the same kind; of more than 1,000, 1,000 drawn at random). Near 0, the head has one cluster of them: it goes by
        what the token is. Near 1, they are dispersed: it goes by something else, such as position. `ratio` is the mean
        of both. Measured before projection, or in one of the pictures. Case does not matter.

        Raises `InputError` unless two sampled tokens hold the string.
        """
        wanted = string("query", query).casefold()
        hits = [place for place, label in enumerate(self.labels) if wanted and wanted in label.casefold()]
        if len(hits) < 2:
            raise InputError(
                f"two of the {len(self.labels)} sampled tokens must hold {shown(query)} to say how close they lie; "
                f"{len(hits)} {'does' if len(hits) == 1 else 'do'}."
            )
        places, tokens = self.vectors, len(self.labels)
        if projection is not None:
            places = self.points[self._projection(projection)]
        drawn = np.random.default_rng([self.seed, 4])
        some = torch.arange(tokens)
        if tokens > _RANDOM_POINTS:
            some = torch.from_numpy(drawn.choice(tokens, _RANDOM_POINTS, replace=False))
        chosen = torch.tensor(hits)
        if len(hits) > _RANDOM_POINTS:
            chosen = chosen[torch.from_numpy(drawn.choice(len(hits), _RANDOM_POINTS, replace=False))]
        rows = []
        for (layer, head), found in zip(self.heads, places, strict=True):
            of_queries, of_keys = (spread_ratio(found[start + chosen], found[start + some]) for start in (0, tokens))
            rows.append({
                "layer": layer, "head": head, "hits": len(hits), "ratio": (of_queries + of_keys) / 2,
                "queries": of_queries, "keys": of_keys,
            })  # fmt: skip
        return pd.DataFrame(rows).sort_values("ratio", kind="stable", ignore_index=True)

    # -- tables and figures -----------------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """One row per head: its scale and flag, and everything measured before and after projection."""
        layer, head = zip(*self.heads, strict=True)
        frame: dict[str, Any] = {"layer": layer, "head": head}
        for name in NUMBERS:
            frame[name] = self.numbers[name].numpy()
            if name == "scale":
                frame["flag"] = self.flags
            if name == "key_norm":
                frame["disparity"] = (self.numbers["key_norm"] / self.numbers["query_norm"]).numpy()
        for projection, found in self.after.items():
            frame |= {f"{name}_{projection}": found[name].numpy() for name in AFTER}
        return pd.DataFrame(frame)

    def plot(
        self,
        figure: str = "points",
        *,
        layer: int | None = None,
        head: int | None = None,
        projection: str | None = None,
    ) -> "go.Figure":
        """`"points"`, a head's queries and keys, or `"criterion"`, the weighted correlation at each c; returned, not shown.

        Without `layer` and `head`, of the head whose correlation is closest to −1.
        """
        option("figure", figure, ("points", "criterion"))
        if (layer is None) != (head is None):
            raise InputError("give both `layer` and `head`, or neither.")
        place = self._best if layer is None or head is None else self._place(layer, head)
        if figure == "criterion":
            if bool(self.curve[place].isnan().all()):
                raise InputError('there is a curve only where c was chosen by it: scale="auto", geometry="scaled".')
            return criterion_curve(
                self.grid[place].numpy(), self.curve[place].numpy(), float(self.numbers["scale"][place])
            )
        name = self._projection(projection)
        where = [
            f"text {text}, token {at}" for text, at in zip(self.text.tolist(), self.position.tolist(), strict=True)
        ]
        return joint_scatter(self.points[name][place].numpy(), self.labels, where, projection=_WRITTEN[name])

    @property
    def _best(self) -> int:
        return int(self.numbers["correlation"].nan_to_num(torch.inf).argmin())

    @property
    def _title(self) -> str:
        return f"Joint embedding of the queries and keys of {self.provenance.model}"

    @property
    def lead(self) -> str:
        known = self.numbers["correlation"][~self.numbers["correlation"].isnan()]
        tokens = (
            f"{len(self.labels):,} tokens of {len(self.documents)} {'text' if len(self.documents) == 1 else 'texts'}"
        )
        if not len(known):
            return f"{tokens}: too few query-key pairs for a correlation of distance and dot product."
        layer, head = self.heads[self._best]
        several = f"{float(known.mean()):.2f} on average over {len(known)} heads, " if len(known) > 1 else ""
        what = "score" if self.geometry == "exact" else "dot product"
        return (
            f"{tokens}: the weighted correlation of distance and {what} is {several}{float(known.min()):.2f} for "
            f"L{layer}H{head}{' , the closest to −1' if len(known) > 1 else ''}".replace(" ,", ",")
            + "."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of these numbers: what was sampled, where the shift changes attention, which c to doubt."""
        found = []
        if len(self.labels) < int(self.lengths.sum()):
            found.append(f"{len(self.labels):,} of {int(self.lengths.sum()):,} tokens were drawn at random as points.")
        if len(self.documents) < self.texts_seen:
            found.append(f"{len(self.documents):,} of {self.texts_seen:,} texts were drawn at random and run.")
        if not self.all_pairs:
            found.append(f"Correlations are over {max(self.pairs):,} query-key pairs drawn at random.")
        change = self.numbers["attention_change"]
        moved = change > _CHANGED
        if bool(moved.any()):
            found.append(
                f"The shift changes attention in {int(moved.sum())} heads (soft cap or sink), by up to "
                f"{float(change[moved].max()):.2g}."
            )
        for flagged, words in (("edge", "at an end of the grid"), ("flat", "undetermined: any does equally well")):
            names = [
                f"L{layer}H{head}"
                for (layer, head), each in zip(self.heads, self.flags, strict=True)
                if each == flagged
            ]
            if names:
                more = "" if len(names) <= 8 else f" and {len(names) - 8} more"
                found.append(f"The best c is {words} in {', '.join(names[:8])}{more}.")
        return tuple(found)

    def _sections(self) -> Sequence[Section]:
        layer, head = self.heads[self._best]
        found = [
            Section(
                f"Layer {layer}, head {head}",
                "Each token is two points, its query and its key; the nearer a key is to a query, the higher their "
                f"score. {' '.join(self.notes)}".strip(),
                {f"points-{name}": self.plot(projection=name) for name in self.points},
                f"joint.plot(layer={layer}, head={head})",
                name="points",
            )
        ]
        if not bool(self.curve[self._best].isnan().all()):
            found.append(
                Section(
                    "The choice of c",
                    "Queries times c and keys over c leave every dot product as it was, but not distances. c is where "
                    "distance and dot product of near pairs are correlated most negatively.",
                    {"criterion": self.plot("criterion")},
                    f'joint.plot("criterion", layer={layer}, head={head})',
                )
            )
        return found


_OF_ANOMALIES: Final = ("query_norm", "key_norm", "separation", "first_attention")

_CHANGED: Final = 1e-5
"""Below this, a change of attention is rounding."""

_WRITTEN: Final = {"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP", "pacmap": "PaCMAP", "opentsne": "openTSNE"}
