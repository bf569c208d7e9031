"""AttentionViz's joint embedding of queries and keys, with measures of how well distance fits attention.

Formulas: docs/formulas.md#joint-embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.random import Philox
from torch import Tensor

from ...basics.arguments import finite_number, flag, member, option, optional_flag, shown, whole_number
from ...basics.public import public
from ...batch import Batch
from ...draw.figure_page import table_html
from ...draw.section import Section
from ...errors import InputError, UnsupportedModelError
from ...interventions import Heads
from ...model.inputs.encoder import Encoder, Ids, Inputs
from ...model.inputs.encoders import tokenized
from ...model.inputs.images import ImageEncoder
from ...model.parts.hashes import batch_hash
from ...model.parts.pieces import Tokenized
from ...model.run.hooked import HookedModel, require_model
from ...runs.corpus import CorpusBatch, batches
from ...runs.progress import steps
from ...runs.token_types import token_types
from .embedded_points import EmbeddedPoints
from .formulas import ScaleAndShift
from .numbers import NUMBERS
from .page import embedding_section, embedding_view
from .patch_images import patch_images
from .pictures import AFTER, after_projection
from .projections import CANNOT_PLACE, PROJECTIONS, Place, Projecting, require_installed
from .sums import Embedder, Plan, in_threads
from .token_pairs import Tokens, sampled

KEPT_BYTES: Final = 2**30  # the most memory that the sampled vectors of all heads may take, in bytes
CARRIED_BYTES: Final = 2**25  # the most memory that the whole patterns of a few texts may take, in bytes
_CARRIED: Final = 8
TOKENS: Final = 2**14  # the smallest number of tokens of a corpus that are run, if it has that many


@public
def joint_embedding(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    heads: Heads = "all",
    projection: str | Sequence[str] = "pca",
    dims: Literal[2, 3] = 2,
    shift: bool = True,
    scale: float | Literal["auto", "norm"] = "auto",
    geometry: Literal["scaled", "exact"] = "scaled",
    sample: int = 2_000,
    perplexity: float = 50.0,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    seed: int = 0,
    bos: bool | None = None,
    truncate: bool = False,
    progress: bool = False,
) -> "JointEmbedding":
    """Embeds each head's queries and keys in one space, where queries lie near the keys that they attend to.

    q ← c q, k ← k / c leaves every dot product unchanged. With `shift`, all keys then move so that their mean equals
    the queries' mean, which adds a constant to each row of scores. q and k are the vectors that enter the scores, after
    rotation; a key that several query heads share becomes a point in each of these heads.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> joint = am.joint_embedding(am.load(), documents(3), layers=[2])
    >>> joint.points["pca"].shape                                   # [chosen point dims]: queries, then keys
    torch.Size([8, 252, 2])
    >>> joint.correlation[2].round(decimals=1).tolist()             # before projection
    [-0.5, -0.7, -0.8, -0.4, -0.4, -0.2, -0.3, -0.2]

    `scale="auto"` takes the c with the lowest weighted correlation of distance and dot product, from a grid around the
    closed form. The correlation is over the pairs nearer than τ, the 20th percentile of all distances, with weights
    (τ − distance)². `scale="norm"` takes the closed form c = √(median ‖k‖ / median ‖q‖).

    `geometry="exact"` instead appends two coordinates: q̃ = [scale · q, slope, 0], k̃ = [k, p, √(M² − ‖k‖² − p²)], in
    float64. For each query the squared distance is then a constant minus twice the score, including ALiBi (slope · p is
    the position term). This also holds with a soft cap, which preserves the order of the scores, and with a sink, which
    is not a key. Models whose position term depends on query and key together (T5) are refused. `scale` and `shift`
    have no effect here.

    Args:
        model: the model; active hooks change what is embedded.
        inputs: texts, or an iterator of texts (a corpus). From a corpus, texts are drawn at random until they have
            16,384 tokens, or `sample` tokens if that is more.
        heads: "all", or a list of (layer, head).
        projection: "pca", "tsne", "umap", "pacmap" or "opentsne", or several of these. PCA and t-SNE come from
            scikit-learn; the others need the extra of the same name. t-SNE and UMAP use the cosine, as AttentionViz
            does.
        dims: the number of dimensions of the picture.
        shift: whether keys are shifted.
        scale: "auto", "norm", or a value of c.
        geometry: "scaled" or "exact".
        sample: the largest number of tokens that become points; measures before projection use all tokens.
        perplexity: the perplexity of t-SNE.
        layers: all by default.
        stack: "encoder" or "decoder" in a model with several stacks.
        seed: the seed for everything drawn at random: tokens, texts, pairs, and starts of projections.
        bos: whether each text begins with the tokenizer's BOS or CLS token.
        truncate: whether texts of a corpus are cut to the model's length.
        progress: shows a bar of heads projected on stderr.

    Returns:
        Points; by layer and head, how well distance fits the dot product before and after projection, norms, and the
        effects of the shift; and heads that stand out.

    Raises:
        InputError: for a library that is not installed, too few tokens for a projection, vectors of more than 1 GB, or
            more points than a projection takes.
        UnsupportedModelError: for cross-attention, and for `geometry="exact"` with a position term that depends on
            query and key together.

    Source: Yeh et al. 2023, "AttentionViz", arXiv 2305.03210; c by norms and the exact geometry are ours.

    """
    require_model(model)
    names = _projections(projection)
    dims = cast(Literal[2, 3], member("dims", dims, (2, 3), "the dimensions of a picture"))
    option("geometry", geometry, ("scaled", "exact"))
    perplexity, seed = finite_number("perplexity", perplexity, above=0.0), whole_number("seed", seed, most=2**32 - 1)
    sample = whole_number("sample", sample, least=2)
    bos, truncate = optional_flag("bos", bos), flag("truncate", truncate)
    checked = (
        option("scale", scale, ("auto", "norm")) if isinstance(scale, str) else finite_number("scale", scale, above=0)
    )
    plan = Plan(
        tuple(model.check_heads(heads, layers, stack)), geometry, checked, flag("shift", shift), seed,
        names, dims, perplexity, sample, bos, truncate, flag("progress", progress),
    )  # fmt: skip
    return _embedded(model, inputs, plan, stack)


def _projections(projection: Any) -> tuple[str, ...]:
    names = (projection,) if isinstance(projection, str) else projection
    if not names or not isinstance(names, Sequence):
        raise InputError(
            f"`projection` must be one of {', '.join(PROJECTIONS)}, or a list of them; got {shown(projection)}."
        )
    for name in names:
        option("projection", name, PROJECTIONS)
        require_installed(name)
    return tuple(dict.fromkeys(names))


def _embedded(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    plan: Plan,
    stack: str | None,
    fitted: "JointEmbedding | None" = None,
) -> "JointEmbedding":
    """Builds the result; with `fitted`, points are placed in the pictures of that embedding."""
    of_stack = model.output_stack if stack is None else model.stack(stack)
    if of_stack.label == "cross":
        raise UnsupportedModelError(
            "a joint embedding needs queries and keys of the same tokens, unlike cross-attention; use "
            'stack="encoder" or stack="decoder".'
        )
    layers = tuple(dict.fromkeys(layer for layer, _ in plan.heads))
    model.points.resolve([of_stack.point(name) for name in ("scores", "pattern")], layers, model.refused)
    whole, documents, texts_seen = _texts(model, inputs, plan)
    batch = whole.queries(of_stack.label)
    tokens = Tokens.of(batch)
    places = sampled(tokens, torch.tensor(documents), plan.sample, plan.seed)
    _check(plan, len(places), of_stack.d_head, model.dtype)
    embedder = Embedder(plan, batch, places, _carried(batch, len(plan.heads)), of_stack.label)
    model.forward(whole, rows=[embedder], layers=[(of_stack.label, layer) for layer in layers])
    pictures = {name: _picture(name, plan, embedder, fitted) for name in plan.projections}

    def of_heads(field_name: str) -> Tensor:
        return torch.stack([getattr(head, field_name) for head in embedder.embedded])

    # The most attended keys as indices into the sample, −1 for keys outside it.
    in_sample = torch.full(batch.ids.shape, -1)
    in_sample[embedder.sample.text, embedder.sample.position] = torch.arange(len(embedder.sample))
    highest = in_sample[embedder.sample.text[None, :, None], embedder.highest.clamp_min(0)]
    text, position = embedder.sample.text, embedder.sample.position
    options = {
        "heads": [list(place) for place in plan.heads], "projection": list(plan.projections), "dims": plan.dims,
        "shift": plan.shift, "scale": plan.scale, "geometry": plan.geometry, "sample": plan.sample,
        "perplexity": plan.perplexity, "seed": plan.seed, "bos": whole.bos,
        "stack": of_stack.label or "self",
    }  # fmt: skip
    return JointEmbedding(
        heads=plan.heads,
        n_layers=len(of_stack.places),
        n_heads=of_stack.n_heads,
        stack=of_stack.label,
        geometry=plan.geometry,
        shift=plan.shift and plan.geometry == "scaled",
        chosen_by=plan.scale if isinstance(plan.scale, str) else "given",
        dims=plan.dims,
        perplexity=plan.perplexity,
        seed=plan.seed,
        labels=tuple(batch.tokens[row][place] for row, place in zip(text.tolist(), position.tolist(), strict=True)),
        text=text,
        position=batch.places.cpu()[text, position],
        lengths=batch.lengths.cpu(),
        special=embedder.sample.of_each(batch.is_special).cpu(),
        types=embedder.sample.of_each(token_types(batch)).cpu(),
        documents=documents,
        texts_seen=texts_seen,
        pairs=tuple(len(embedder.all_pairs[layer]) for layer in layers),
        all_pairs=all(layer_pairs.whole for layer_pairs in embedder.all_pairs.values()),
        vectors=of_heads("vectors"),
        offsets=of_heads("offset"),
        norms=of_heads("norms"),
        highest=highest.masked_fill(embedder.highest < 0, -1),
        weights=embedder.weights,
        numbers={
            name: torch.tensor([head.numbers[name] for head in embedder.embedded], dtype=torch.float64)
            for name in NUMBERS
        },
        after={name: measures for name, (_, measures) in pictures.items()},
        flags=tuple(head.flag for head in embedder.embedded),
        grid=of_heads("grid"),
        curve=of_heads("curve"),
        points={name: points for name, (points, _) in pictures.items()},
        patterns={str(number): value for number, value in embedder.patterns.items()},
        text_labels={str(number): batch.real_tokens[number] for number in embedder.patterns},
        text_special={str(number): batch.is_special[number][batch.mask[number]].cpu() for number in embedder.patterns},
        sink=embedder.sink,
        images=patch_images(model, batch, embedder.sample),
        types_of_heads=(),
        provenance=model.provenance(batch_hash(whole), batch.tokens, options),
    )


def _texts(model: HookedModel, inputs: Inputs | Iterable[Inputs], plan: Plan) -> tuple[Batch, tuple[int, ...], int]:
    known = isinstance(inputs, (str, Ids, Mapping, Batch, Sequence)) or hasattr(inputs, "__array__")
    if isinstance(inputs, Iterable) and not known:
        return choose_texts(
            model, cast(Iterable[Inputs], inputs), tokens=max(TOKENS, plan.sample), seed=plan.seed,
            bos=plan.bos, truncate=plan.truncate,
        )  # fmt: skip
    if plan.truncate:
        raise InputError("`truncate` needs an iterator of texts, such as iter(texts).")
    batch = model.encode(cast(Inputs, inputs), bos=plan.bos)
    batch.require_text_alone("embedded")
    return batch, tuple(range(len(batch.ids))), len(batch.ids)


def _check(plan: Plan, tokens: int, d_head: int, dtype: torch.dtype) -> None:
    if tokens < 2:
        raise InputError("a joint embedding needs at least two tokens; pass a longer text.")
    for name in plan.projections:
        Projecting(name, plan.dims, plan.perplexity, plan.seed).check(2 * tokens)
    size = 8 * (d_head + 2) if plan.geometry == "exact" else torch.promote_types(dtype, torch.float32).itemsize * d_head
    bytes_per_token = 2 * len(plan.heads) * size
    if tokens * bytes_per_token > KEPT_BYTES:
        raise InputError(
            f"the queries and keys of {tokens:,} tokens in {len(plan.heads)} heads would take "
            f"{tokens * bytes_per_token / 1e9:.1f} GB; the limit is {KEPT_BYTES / 1e9:.1f} GB. Use "
            f"sample={KEPT_BYTES // bytes_per_token} or less, or fewer `heads`."
        )


def _carried(batch: Batch, heads: int) -> list[int]:
    """The first texts whose patterns, in all heads, take at most `CARRIED_BYTES` together; returns their numbers."""
    texts, total = [], 0
    for number, length in enumerate(batch.lengths.tolist()[:_CARRIED]):
        size = 2 * heads * length**2
        if total + size <= CARRIED_BYTES:
            texts.append(number)
            total += size
    return texts


def _picture(
    name: str, plan: Plan, embedder: Embedder, fitted: "JointEmbedding | None"
) -> tuple[Float[Tensor, "chosen point dims"], dict[str, Tensor]]:
    """The points of every head in one projection, and the measures after it."""
    projecting = Projecting(name, plan.dims, plan.perplexity, plan.seed)
    points = []
    with steps(f"projecting by {name}", len(plan.heads), show=plan.progress) as bar:
        # One at a time: several of the libraries are not thread-safe, and start their own threads.
        for place, head in enumerate(embedder.embedded):
            if fitted is None:
                points.append(projecting.points(head.vectors, bar.within(place)))
            else:
                points.append(torch.from_numpy(fitted._placer(name, place)(head.vectors.numpy())).float())
            bar.reach(place + 1)

    def measured(place: int) -> dict[str, float]:
        head, pairs = embedder.embedded[place], embedder.pairs[plan.heads[place][0]]
        return after_projection(name, head.vectors, points[place], head.offset, pairs, plan.seed)

    measures = in_threads(measured, len(points))
    after = {number: torch.tensor([of_head[number] for of_head in measures], dtype=torch.float64) for number in AFTER}
    return torch.stack(points), after


@dataclass(frozen=True, repr=False)
class JointEmbedding(EmbeddedPoints):
    """Queries and keys of every head as points in one space, with their measurements."""

    _placers: dict[tuple[str, int], Place] = field(default_factory=dict, compare=False, metadata={"saved": False})

    def _placer(self, name: str, place: int) -> Place:
        if name in CANNOT_PLACE:
            raise InputError(f'projection="{name}" cannot place further points: {CANNOT_PLACE[name]}.')
        if (name, place) not in self._placers:
            _, placer = Projecting(name, self.dims, self.perplexity, self.seed).fit(self.vectors[place])
            assert placer is not None
            self._placers[name, place] = placer
        return self._placers[name, place]

    def place(
        self,
        layer: int,
        head: int,
        *,
        queries: Float[Tensor, "query d_head"] | None = None,
        keys: Float[Tensor, "key d_head"] | None = None,
        projection: str | None = None,
    ) -> Float[Tensor, "point dims"]:
        """Places further queries, then further keys, in a head's picture, with its scale and shift.

        PCA, UMAP and openTSNE can do this; scikit-learn's t-SNE and PaCMAP cannot. UMAP and openTSNE are fitted again
        at the first call, with the same seed. Queries and keys are the vectors that enter the scores, after rotation.
        """
        if self.geometry == "exact":
            raise InputError(
                'with geometry="exact", the last coordinate of a key depends on the longest key of the run, so all '
                "texts must be embedded at once."
            )
        place, name = self._place(layer, head), self._projection(projection)
        placer, embedding = self._placer(name, place), self._embedding(place)
        vectors = [] if queries is None else [embedding.queries(queries.double())]
        vectors += [] if keys is None else [embedding.keys(keys.double())]
        width = self.vectors.shape[-1]
        if not vectors or any(kind.ndim != 2 or kind.shape[1] != width for kind in vectors):
            raise InputError(f"pass `queries`, `keys` or both, each [point, {width}].")
        return torch.from_numpy(np.asarray(placer(torch.cat(vectors).cpu().numpy()))).float()

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
        """Embeds further texts with the pictures, scales and shifts of this embedding.

        Raises `InputError` for another model, and for projections that cannot place further points.
        """
        require_model(model)
        if model.weights_hash != self.provenance.weights:
            raise InputError(
                "further texts must be run on the model of this result; the weights of the model passed differ."
            )
        if self.geometry == "exact":
            self.place(*self.heads[0])
        for name in self.points:
            self._placer(name, 0)
        fixed = {head: self._embedding(place) for place, head in enumerate(self.heads)}
        sample = whole_number("sample", sample, least=2)
        plan = Plan(
            self.heads, "scaled", "auto", self.shift, self.seed, tuple(self.points), self.dims, self.perplexity,
            sample, bos, truncate, progress=False, fixed=fixed,
        )  # fmt: skip
        return _embedded(model, inputs, plan, self.stack or None, self)

    def _page_sections(self) -> Sequence[Section]:
        return [embedding_section(self)]

    def _repr_html_(self) -> str:
        try:
            shown = embedding_view(self)._repr_html_()
        except InputError:  # the figures of one head, because the view is too large
            return super()._repr_html_()
        return f"{shown}<details><summary>The numbers</summary>{table_html(self.to_frame())}</details>"


def choose_texts(
    model: HookedModel, inputs: Iterable[Inputs], *, tokens: int, seed: int, bos: bool | None, truncate: bool
) -> tuple[Batch, tuple[int, ...], int]:
    """Takes the first texts of a corpus in a random order, up to `tokens` tokens and at least one text: the batch,
    their numbers in the corpus, and the number of texts in it.

    The order depends only on the seed and on each text's content. Only the token ids of texts that may still be chosen
    are stored, so memory does not grow with the corpus.
    """
    kept: list[tuple[int, int, int, Tensor | Tokenized]] = []
    """The rank, number, length and content of each text."""
    total = seen = 0
    for part in batches(inputs, model, truncate=truncate, bos=bos):
        seen += len(part.documents)
        numbers = (numbers.tolist() for numbers in (part.batch.digests, part.documents, part.batch.lengths))
        for digest, number, length, content in zip(*numbers, _contents(part, model), strict=True):
            kept.append((int(Philox(key=[seed, digest % 2**64]).random_raw()), number, length, content))
            total += length
        kept.sort(key=lambda entry: entry[:2])
        while total > tokens and len(kept) > 1:
            total -= kept.pop()[2]
    kept.sort(key=lambda entry: entry[1])
    contents: list[Any] = [entry[-1] for entry in kept]
    encoder = model.encoder
    batch = encoder.padded(contents) if isinstance(encoder, Encoder) else model.encode(torch.stack(contents))
    return batch, tuple(entry[1] for entry in kept), seen


def _contents(part: CorpusBatch, model: HookedModel) -> Sequence[Tensor | Tokenized]:
    batch = part.batch
    batch.require_text_alone("embedded")
    images = isinstance(model.encoder, ImageEncoder)
    own_target = batch.target is not None and batch.target.ids.shape[1] > 1
    if not images and (batch.extra or own_target):
        raise InputError(
            "an iterator for a joint embedding must yield only texts or token ids; pass inputs with further "
            "tensors, such as token types or a decoder's tokens, as one mapping."
        )
    return list(batch.extra["pixel_values"].cpu()) if images else tokenized(model.encoder, batch)
