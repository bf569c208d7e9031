"""Computes values for interventions: the mean z of heads on a reference set, or z from other texts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ..basics.arguments import flag, whole_number
from ..basics.public import public
from ..errors import InputError
from ..interventions import Values
from ..maths.float64 import as_float64, put
from ..model.attention.observed import LayerEnd
from ..model.inputs.encoder import Inputs
from ..model.run.hooked import HookedModel
from ..model.stack.points import MAX_BYTES
from ..points import PointKey, split_stack
from .corpus import CorpusBatch, batches, contents_of
from .reducer import Reducer, Run, Source, State
from .states import summed_to_longer
from .stream import stream


@public
def mean_z(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    per_position: bool = False,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
) -> Values:
    """The mean of z over the real tokens of a reference set, or over the tokens at each position.

    >>> means = am.mean_z(model, texts)                                                 # doctest: +SKIP
    >>> with model.intervene(am.Intervention.replace([(2, 6)], means)): ...               # doctest: +SKIP

    Args:
        model: the model.
        inputs: the texts of the reference set, or an iterator of them.
        per_position: whether to take a mean at each position.
        layers: the layers; by default all.
        stack: "encoder", "decoder" or "cross" in a model with several.
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        `[1 1 head d_head]` by layer, or `[1 position head d_head]`, in the model's precision.

    Raises:
        InputError: for invalid inputs, layers or stacks.
    """
    flag("per_position", per_position)
    means: Values
    (means,) = stream(model, inputs, [_MeanZ(per_position)], layers=layers, stack=stack, bos=bos)
    return means


class _MeanZ(Reducer):
    points = ("z",)

    def __init__(self, per_position: bool) -> None:
        self.per_position = per_position

    def start(self, run: Run) -> State:
        positions = run.batch.queries(run.stack.label).ids.shape[1] if self.per_position else 1
        shape = run.n_layers, run.n_heads, run.stack.d_value, positions
        state = {
            "sums": torch.zeros(shape, dtype=torch.float64),
            "counts": torch.zeros(run.n_layers, positions, dtype=torch.float64),
        }
        return {name: put(value, run.model.device) for name, value in state.items()}

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        z, places = end["z"].masked_fill(~end.real[:, :, None, None], 0.0), end.real
        if self.per_position and run.batch.padded:
            columns = run.batch.queries(run.stack.label).columns
            z, places = z[torch.arange(len(z))[:, None], columns], end.real.gather(1, columns)
        sums = as_float64(z).sum(dim=0).permute(1, 2, 0)
        counts = as_float64(places.sum(dim=0))
        if not self.per_position:
            sums, counts = sums.sum(dim=-1, keepdim=True), counts.sum(dim=-1, keepdim=True)
        state["sums"][end.index] += sums
        state["counts"][end.index] += counts

    def merge(self, one: State, other: State) -> State:
        return {name: summed_to_longer(one[name], other[name]) for name in one}

    def finish(self, state: State, source: Source) -> Values:
        longest = int((state["counts"] > 0).sum(dim=-1).max())
        means = (state["sums"] / state["counts"][:, None, None])[..., :longest]
        texts = "1 text" if source.documents == 1 else f"{source.documents} texts"
        description = f"mean over {texts}, {'position by position' if self.per_position else 'pooled'}"
        model = source.model
        by_layer = {
            layer: mean.permute(2, 0, 1)[None].to(model.device, model.dtype)
            for layer, mean in zip(source.layers, means, strict=True)
        }
        return Values(by_layer, description, of_tokens=self.per_position)


def resampled_z(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    layers: Sequence[int],
    reference: Inputs | Iterable[Inputs] | None = None,
    stack: str | None = None,
    draws: int = 1,
    seed: int = 0,
    bos: bool | None = None,
) -> list[Values]:
    """For each text, the z of another text, drawn by the seed: `[text position head d_head]` by layer.

    Donors are the other texts or, if given, those of `reference`. Each draw gives every text one donor; over several
    draws, a text's donors differ. Position i takes z from position i of the donor; past the end of the donor, from one
    of its positions at random, except the first.
    """
    label = model.stack(stack).label
    point = model.stack(stack).point("z")
    parts: list[CorpusBatch] = list(batches(inputs, model, bos=bos))
    texts = sum(len(part.documents) for part in parts)
    if reference is None and texts < 2:
        raise InputError(
            'method="resample" takes z from another text; give at least two texts, or the donors as `reference`.'
        )
    donating = parts if reference is None else list(batches(reference, model, bos=bos))
    count = sum(len(part.documents) for part in donating)
    available = f"the other texts, of {texts}" if reference is None else f"the {count} texts of `reference`"
    draws = whole_number("draws", draws, least=1, most=count - (reference is None), most_is=available)
    longest = max(int(part.batch.queries(label).lengths.max()) for part in parts)
    # Donors are drawn in the order of the texts' digests, so that the order of the inputs does not matter.
    taking = torch.tensor(contents_of(parts)).argsort(stable=True)
    giving = torch.tensor(contents_of(donating)).argsort(stable=True)
    lengths = torch.zeros(count, dtype=torch.long)
    columns = torch.zeros(count, max(part.batch.queries(label).ids.shape[1] for part in donating), dtype=torch.long)
    for part in donating:
        tokens = part.batch.queries(label)
        lengths[part.documents] = tokens.lengths.cpu()
        columns[part.documents, : tokens.ids.shape[1]] = tokens.columns.cpu()
    known = captured(model, donating, {point: layers})[point]
    origin = f"another of {texts} texts" if reference is None else f"one of {count} reference texts"
    values = []
    back = taking.argsort()
    for ranks, ranked in _drawn(lengths[giving], texts, longest, draws, seed, others=reference is None):
        donors, places = giving[ranks][back], ranked[back]
        places = columns[donors[:, None], places]
        taken = {layer: value[donors[:, None], places] for layer, value in known.items()}
        values.append(Values(taken, f"that of {origin} (seed {seed})", of_tokens=True))
    return values


def captured(
    model: HookedModel, parts: Sequence[CorpusBatch], points: Mapping[str, Iterable[int]]
) -> dict[str, dict[int, Shaped[Tensor, "text position ..."]]]:
    """The values of points, of heads or of the stream, on every text, by point and layer; 0 past a text's end.

    `points` has the layers of each point. Raises `InputError` for patterns that would take more than `MAX_BYTES`.
    """
    keys = [key for point, layers in points.items() for key in model.points.resolve([point], layers, model.refused)]
    texts = sum(len(part.documents) for part in parts)
    by_point: dict[str, dict[int, Tensor]] = {point: {} for point in points}
    longest = {point: _longest(parts, point) for point in points}
    _require_room(model, texts, longest, keys)
    for part in parts:
        for (point, layer), value in model.forward(part.batch, captures=keys).items():
            assert layer is not None
            # A pattern is [text head query key], everything else [text position ...].
            size, of_pairs = longest[point], split_stack(point)[1] == "pattern"
            shape = (value.shape[1], size, size) if of_pairs else (size, *value.shape[2:])
            whole = by_point[point].setdefault(layer, value.new_zeros(texts, *shape))
            if of_pairs:
                whole[part.documents, :, : value.shape[2], : value.shape[3]] = value
            else:
                whole[part.documents, : value.shape[1]] = value
    return by_point


def _longest(parts: Sequence[CorpusBatch], point: str) -> int:
    return max(part.batch.queries(split_stack(point)[0]).ids.shape[1] for part in parts)


def _require_room(model: HookedModel, texts: int, longest: Mapping[str, int], keys: Sequence[PointKey]) -> None:
    patterns = [point for point, _ in keys if split_stack(point)[1] == "pattern"]
    size = sum(model.stack(split_stack(point)[0] or None).n_heads * longest[point] ** 2 for point in patterns)
    size *= texts * max(4, model.dtype.itemsize)
    if size > MAX_BYTES:
        raise InputError(
            f"the patterns of {texts} texts of up to {longest[patterns[0]]} tokens in {len(patterns)} layers would "
            f"take {size / 2**30:.1f} GiB; the limit is {MAX_BYTES / 2**30:.0f} GiB. Choose fewer layers or texts."
        )


def _drawn(
    lengths: Int[Tensor, " donor"], texts: int, longest: int, draws: int, seed: int, *, others: bool
) -> Iterator[tuple[Int[Tensor, " text"], Int[Tensor, "text position"]]]:
    """For each draw, each text's donor, and for each position the place in it; `others`: donors are the texts."""
    generator = torch.Generator().manual_seed(seed)
    # Skips the text itself, which is never its own donor.
    choices = len(lengths) - 1 if others else len(lengths)
    first = torch.randint(0, choices, (texts,), generator=generator)
    here = torch.arange(longest).expand(texts, -1)
    for draw in range(draws):
        donors = (first + draw) % choices
        if others:
            donors = (torch.arange(texts) + 1 + donors) % texts
        ends = lengths[donors][:, None]
        elsewhere = 1 + (torch.rand(texts, longest, generator=generator) * (ends - 1)).long()
        yield donors, torch.where(here < ends, here, elsewhere.clamp(max=ends - 1))
