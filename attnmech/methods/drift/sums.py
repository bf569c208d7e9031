"""Measures drift during a pass: streams are collected until there are enough for a scan of the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import optional_flag
from ...errors import InputError
from ...maths.float64 import as_float64, float64_device
from ...maths.groups import by_group, joined
from ...maths.statistic import POSITIVE, UNBOUNDED, Statistic, Statistics
from ...model.attention.observed import LayerEnd
from ...model.reading.vocabulary import Vocabulary, further_of, require_positions, vocabulary_of
from ...model.run.hooked import HookedModel
from ...model.stack.stack import Stack
from ...runs.reducer import Reducer, Run, State
from .formulas import SIMILARITIES, Scan, churn, directions, sum_over_pairs
from .word_types import FUNCTION_WORDS, ORDINARY, WORD_TYPES, word_types


class DriftStatistics:
    """How far the stream at each token is from its own embedding."""

    cosine = Statistic(
        meaning="Mean cosine between the stream and its token's own row.",
        label="cosine to the token's own embedding",
        bounds=(-1.0, 1.0),
    )
    centred_cosine = Statistic(
        meaning="`cosine` after subtracting means: that of the text's ordinary tokens, and that of all rows.",
        bounds=(-1.0, 1.0),
    )
    dot = Statistic(meaning="Mean dot product between the stream and its token's own row.", bounds=UNBOUNDED)
    rank = Statistic(
        meaning="Mean number of rows more similar than the token's own; a few tokens may dominate this mean, but not "
        "`log_rank`.",
        short="rank of the token's own row",
        printed=True,
        bounds=POSITIVE,
    )
    log_rank = Statistic(meaning="Mean of log10(1 + rank).", bounds=POSITIVE)
    churn = Statistic(
        meaning="Mean share of the k nearest rows that were not among the k nearest in the layer below; NaN in the "
        "first layer.",
        unit="share",
        printed=True,
    )
    cosine_step = Statistic(meaning="Mean absolute change of the cosine since the layer below.", bounds=POSITIVE)
    rank_step = Statistic(meaning="Mean absolute change of log10(1 + rank) since the layer below.", bounds=POSITIVE)
    vocabulary_cosine = Statistic(meaning="Mean cosine between the stream and all rows.", bounds=(-1.0, 1.0))


STATISTICS: Final = Statistics(DriftStatistics, Statistic)  # in the order of the axis `statistic`
PLACES: Final = ("resid_mid", "resid_post")  # the stream after attention + residual, or as it leaves the block
OWN_LIST: Final = "attnmech's list"  # the value of the option `function_words` for the built-in list
_STREAMS_AT_ONCE: Final = 2048  # the largest number of streams compared with the vocabulary in one scan
_PRECISE_AT_ONCE: Final = 256  # the largest number of streams compared with their own rows in float64 at once
_SIMILARITIES_AT_ONCE: Final = 2**22  # the largest number of similarities from one block of the vocabulary
_ROWS_AT_ONCE: Final = 1024  # the largest number of rows in a block of the vocabulary
_KEPT: Final = 2**23  # the most products of streams stored for `pair`; ids of nearest rows may be four times as many
_BY_TEXT: Final = ("sums", "counts", "pairs", "pair_counts", "unit_counts", "squares")  # by text or group


@dataclass(frozen=True)
class Moments:
    """Means over the rows of a vocabulary."""

    row: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    """The mean of the rows' unit vectors; its product with a unit vector is the mean cosine to all rows."""
    pair_cosine: float


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """The rows of a vocabulary with which streams are compared by one similarity."""

    vocabulary: Vocabulary
    similarity: str
    k: int
    positioned: bool
    normed: bool
    precision: torch.dtype
    _moments: dict[bytes, Moments] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: HookedModel, stack: Stack, similarity: str, k: int, position: bool, embed_norm: bool | None
    ) -> "ComparedRows":
        """Takes the rows of a model's vocabulary; raises `InputError` for an option that the model does not support."""
        vocabulary = vocabulary_of(model, stack)
        if position:
            require_positions(model)
        if optional_flag("embed_norm", embed_norm) and vocabulary.norm is None:
            raise InputError(
                f"`embed_norm=True` needs a norm after the embedding, which {model.name} ({stack.architecture.name}) "
                "lacks."
            )
        normed = vocabulary.norm is not None and embed_norm is not False
        if k > len(vocabulary):
            raise InputError(f"`k` must be at most {len(vocabulary)}, the number of rows of this vocabulary; got {k}.")
        vocabulary = vocabulary if normed else replace(vocabulary, norm=None)
        return cls(vocabulary, similarity, k, position, normed, torch.promote_types(model.dtype, torch.float32))

    def blocks(self, size: int, further: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows in blocks, each with the id of its first row."""
        for start in range(0, len(self.vocabulary), size):
            yield start, self.vocabulary.rows(slice(start, start + size), self.precision, further)

    def moments(self, further: Float[Tensor, " d_model"] | None) -> Moments:
        """Returns means over the rows, computed once for each `further`."""
        key = b"" if further is None else further.cpu().double().numpy().tobytes()
        if key not in self._moments:
            total = unit = torch.zeros((), dtype=torch.float64)
            nonzero = 0
            for _, rows in self.blocks(_ROWS_AT_ONCE, further):
                unit_rows = directions(rows, "cosine")
                total = total + as_float64(rows.sum(dim=0))
                unit = unit + as_float64(unit_rows.sum(dim=0))
                nonzero += int(unit_rows.any(dim=-1).sum())
            count = len(self.vocabulary)
            pairs = (float(unit.square().sum()) - nonzero) / max(1, count * (count - 1))
            self._moments[key] = Moments(total / count, unit / count, pairs)
        return self._moments[key]

    def directions_of(self, tokens: Int[Tensor, " token"], further: Tensor | None, similarity: str) -> Tensor:
        """Returns the `directions` of some rows in float64."""
        rows = self.vocabulary.rows(tokens, torch.float64, further)
        return directions(rows, similarity, self.moments(further).row if similarity == SIMILARITIES[1] else None)


@dataclass
class _Held:
    """Streams of one layer that wait for a scan."""

    index: int
    follows: bool  # whether the previously added layer is the layer below
    streams: Float[Tensor, "stream d_model"]
    means: Float[Tensor, "batch d_model"]  # the mean of each text's ordinary tokens


@dataclass
class _Batch:
    """The progress of one batch while it runs."""

    real: tuple[Tensor, ...]  # text and position of each stream
    own: Int[Tensor, " stream"]
    centred: Tensor  # whether the text of each stream has two ordinary tokens, so that a mean can be subtracted
    places: Int[Tensor, " stream"]  # the index in `further` of each stream
    further: list[Tensor | None]
    held: list[_Held] = field(default_factory=list)
    seen: int = 0
    layer: int | None = None  # the layer added last
    nearest: Tensor | None = None  # the nearest rows of the streams in the layer measured last
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DriftSums(Reducer):
    """Sums the distances of streams from their tokens' embeddings, by text, layer and type of token."""

    reference: ComparedRows
    at: str
    points: tuple[str, ...]  # the points that make up the stream: one, or two whose sum it is
    function_words: frozenset[str] = FUNCTION_WORDS

    @property
    def options(self) -> dict[str, str]:
        """The options of the measurement."""
        words = "" if self.function_words == FUNCTION_WORDS else " ".join(sorted(self.function_words))
        reference = self.reference
        return {
            "at": self.at,
            "similarity": reference.similarity,
            "k": str(reference.k),
            "position": str(reference.positioned),
            "embed_norm": str(reference.normed),
            "function_words": words or OWN_LIST,
        }

    def start(self, run: Run) -> State:
        """Undefined values for every token, and sums of 0 by text for the mean cosine of pairs."""
        batch = run.batch.queries(run.stack.label)
        texts, length = batch.ids.shape
        layers, width = run.n_layers, run.stack.d_model
        types = word_types(batch, self.function_words).masked_fill(~batch.mask, -1)
        run.between[self] = self._batch(run, types)
        state = {
            "values": torch.full((len(STATISTICS), layers, texts, length), torch.nan, dtype=torch.float64),
            "types": types,
            **{name: torch.zeros(layers, texts, dtype=torch.float64) for name in _BY_TEXT[2:]},
            "units": torch.zeros(layers, width, dtype=torch.float64),
        }
        if not run.corpus:
            k = self.reference.k
            if layers * texts * length * k > 4 * _KEPT:
                raise InputError(
                    f"the {k} nearest rows of {texts} × {length} tokens in {layers} layers are too many to store. Pass "
                    "an iterator, iter(texts), to store only sums, or use fewer `layers` or a smaller `k`."
                )
            state["nearest"] = torch.full((layers, texts, length, k), -1, dtype=torch.int32)
            if layers * texts * length**2 <= _KEPT:
                state["products"] = torch.zeros(layers, texts, length, length, dtype=torch.float64)
        # NaN means undefined until `close`; a finished state must not hold NaN.
        return {name: value.to(float64_device(run.model.device)) for name, value in state.items()}

    def _batch(self, run: Run, types: Tensor) -> _Batch:
        batch = run.batch.queries(run.stack.label)
        device = float64_device(batch.ids.device)
        real = batch.mask.to(device).nonzero(as_tuple=True)
        ordinary = _ordinary(types.to(device)).sum(dim=-1)
        further: list[Tensor | None] = [None]
        places = torch.zeros_like(real[0])
        if self.reference.positioned:
            added = further_of(run.model, run.batch).expand(*batch.ids.shape, -1)[real]
            distinct, places = torch.unique(added, dim=0, return_inverse=True)
            further, places = list(distinct), places.to(device)
        return _Batch(real, batch.ids.to(device)[real], (ordinary >= 2)[real[0]], places, further)

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Collects the layer's streams, and measures all collected streams once there are enough."""
        whole = sum(end[name].to(self.reference.precision) for name in self.points)
        assert isinstance(whole, Tensor)
        now: _Batch = run.between[self]
        members = _ordinary(state["types"])
        precise = as_float64(whole)
        means = _means(precise, members)
        self._add_pairs(state, end.index, precise, members)
        if "products" in state:
            state["products"][end.index] = precise @ precise.transpose(1, 2)
        layers = run.stack.layers
        follows = now.layer is not None and layers.index(end.layer) == layers.index(now.layer) + 1
        now.held.append(_Held(end.index, follows, whole[now.real], means))
        now.layer, now.seen = end.layer, now.seen + 1
        if now.seen == run.n_layers or len(now.held) * len(now.own) >= _STREAMS_AT_ONCE:
            self._measure(state, now)

    def _add_pairs(self, state: State, index: int, whole: Tensor, members: Tensor) -> None:
        unit = directions(whole, "cosine")
        for text, chosen in enumerate(members):
            some = unit[text][chosen]
            count = int((some != 0).any(dim=-1).sum())
            state["pairs"][index, text] = sum_over_pairs(some)
            state["pair_counts"][index, text] = count * (count - 1)
            state["unit_counts"][index, text] = count
            state["squares"][index, text] = count**2
            state["units"][index] += some.sum(dim=0)

    def _measure(self, state: State, now: _Batch) -> None:
        held, now.held = now.held, []
        streams, means = (torch.cat([getattr(entry, name) for entry in held]) for name in ("streams", "means"))
        repeats = len(held)
        own, places = now.own.repeat(repeats), now.places.repeat(repeats)
        texts = torch.cat([number * len(entry.means) + now.real[0] for number, entry in enumerate(held)])
        measured = torch.full((len(STATISTICS), len(own)), torch.nan, dtype=torch.float64, device=own.device)
        nearest = own.new_zeros(len(own), self.reference.k)
        for place, further in enumerate(now.further):
            chosen = (places == place).nonzero()[:, 0]
            for some in torch.split(chosen, _STREAMS_AT_ONCE):
                mean = means[texts[some]]
                measured[:, some], nearest[some] = self._compared(streams[some], mean, own[some], further)
        ranked = ("rank", "log_rank") if self.reference.similarity == SIMILARITIES[1] else ()
        for name in ("centred_cosine", *ranked):
            measured[STATISTICS.place(name)].masked_fill_(~now.centred.repeat(repeats), torch.nan)
        for entry, values, ids in zip(held, measured.chunk(repeats, dim=1), nearest.chunk(repeats), strict=True):
            if entry.follows and now.nearest is not None and now.values is not None:
                _add_steps(values, ids, now.values, now.nearest)
            now.values, now.nearest = values, ids
            state["values"][:, entry.index][:, now.real[0], now.real[1]] = values
            if "nearest" in state:
                state["nearest"][entry.index][now.real[0], now.real[1]] = ids.int()

    def _compared(
        self, streams: Tensor, means: Tensor, own: Int[Tensor, " stream"], further: Tensor | None
    ) -> tuple[Float[Tensor, "statistic stream"], Int[Tensor, "stream k"]]:
        reference, similarity = self.reference, self.reference.similarity
        moments = reference.moments(further)
        values = self._to_own_rows(streams, means, own, further)
        query = directions(as_float64(streams), similarity, means)
        scan = Scan(
            query.to(streams), query, own, reference.k, lambda ids: reference.directions_of(ids, further, similarity)
        )
        size = min(_ROWS_AT_ONCE, max(256, _SIMILARITIES_AT_ONCE // len(own)))
        mean = moments.row.to(streams)
        for start, rows in reference.blocks(size, further):
            scan.add(start, directions(rows, similarity, mean))
        own_rank, nearest = scan.finish()
        there = (query != 0).any(dim=-1)
        rank = torch.where(there, own_rank.double(), torch.nan)
        values |= {"rank": rank, "log_rank": (1 + rank).log10()}
        undefined = torch.full_like(rank, torch.nan)
        return torch.stack([values.get(name, undefined) for name in STATISTICS]), nearest

    def _to_own_rows(
        self, streams: Tensor, means: Tensor, own: Int[Tensor, " stream"], further: Tensor | None
    ) -> dict[str, Tensor]:
        """Computes the similarities of streams to their own rows in float64, and the mean cosine to all rows."""
        direction = self.reference.moments(further).direction
        similarities: dict[str, list[Tensor]] = {"vocabulary_cosine": []}
        for some in torch.split(torch.arange(len(own), device=own.device), _PRECISE_AT_ONCE):
            precise = as_float64(streams[some])
            for similarity in SIMILARITIES:
                rows = self.reference.directions_of(own[some], further, similarity)
                similar = (directions(precise, similarity, means[some]) * rows).sum(dim=-1)
                bounded = similar if similarity == "dot" else similar.clamp(-1, 1)
                similarities.setdefault(similarity.replace(" ", "_"), []).append(bounded)
            similarities["vocabulary_cosine"].append(directions(precise, "cosine") @ direction)
        return {name: torch.cat(parts) for name, parts in similarities.items()}

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts; for a single batch, with every value of every token."""
        here = {name: value.cpu() for name, value in state.items()}
        valid = ~here["values"].isnan()
        kept = here["values"].masked_fill(~valid, 0.0)
        members = torch.stack([here["types"] == number for number in range(len(WORD_TYPES))])[:, None, None]
        sums = [(kept * of_type).sum(dim=-1) for of_type in members]
        counts = [(valid & of_type).sum(dim=-1).double() for of_type in members]
        by_text: State = {name: here[name] for name in _BY_TEXT if name in here}
        by_text |= {"sums": torch.stack(sums, dim=1), "counts": torch.stack(counts, dim=1)}
        closed = by_group(by_text, run.batch.digests, _BY_TEXT) | {"units": here["units"]}
        if run.corpus:
            return closed
        rows = {name: here[name] for name in ("types", "nearest", "products") if name in here}
        return closed | rows | {"values": kept, "valid": valid}

    def merge(self, one: State, other: State) -> State:
        return merged_sums(one, other)


def merged_sums(one: State, other: State) -> State:
    """The sums of two states."""
    return joined(one, other, _BY_TEXT) | {"units": one["units"] + other["units"]}


def _add_steps(values: Tensor, ids: Tensor, before: Tensor, ids_before: Tensor) -> None:
    """Adds churn and the absolute changes of cosine and log rank since the layer below."""
    rank = STATISTICS.place("log_rank")
    cosine = STATISTICS.place("cosine")
    undefined = (values[rank] + before[rank]).isnan()
    values[STATISTICS.place("churn")] = churn(ids, ids_before).masked_fill(undefined, torch.nan)
    values[STATISTICS.place("cosine_step")] = (values[cosine] - before[cosine]).abs()
    values[STATISTICS.place("rank_step")] = (values[rank] - before[rank]).abs()


def _ordinary(types: Int[Tensor, "batch position"]) -> Tensor:
    chosen = torch.tensor([WORD_TYPES.index(name) for name in ORDINARY], device=types.device)
    return torch.isin(types, chosen)


def _means(whole: Float[Tensor, "batch position d_model"], members: Tensor) -> Float[Tensor, "batch d_model"]:
    count = members.sum(dim=-1, keepdim=True).clamp_min(1)
    return (whole * members[..., None]).sum(dim=1) / count


def stream_points(model: HookedModel, stack: Stack, at: str) -> tuple[str, ...]:
    """The points that add up to the stream; in parallel blocks, attention + residual is the sum of two points."""
    if (reason := model.points[stack.point("resid_pre")].absent) is not None:
        raise InputError(f"residual_drift needs a residual stream; {model.name} has none: {reason}.")
    if at == "resid_mid" and model.points[stack.point("resid_mid")].absent is not None:
        return "resid_pre", "attn_out"
    return (at,)
