"""What kind of head is it? Scores for every kind, against what the head would do whatever the tokens are (formulas §3).

A kind is claimed where two things hold: the mass on its targets exceeds the baseline in an interval that holds for all
heads and kinds together, and it is not trivial.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from ..arguments import option
from ..batch import Batch
from ..draw.chart import Chart
from ..draw.head_types import kinds_map
from ..draw.section import Section
from ..errors import InputError
from ..maths.focus import received_by_distance
from ..maths.head_types import CONTENT, KINDS, POSITIONAL, targets
from ..maths.intervals import LEAST_TEXTS, LEVEL, TextMeans, checked_level, difference
from ..maths.scores import ScoreParts
from ..maths.softmax import Top, softmax_of
from ..model.centring import centred
from ..model.hooked import HookedModel, require_model
from ..model.inputs import Inputs
from ..model.ledger import ledger_of_block
from ..model.observed import RowBlock
from ..results import by_layer
from ..runs.ablations import checked_seed
from ..runs.groups import by_group, joined
from ..runs.repeated import repeated_sequences
from ..runs.row_means import ROW_CLASSES, row_classes
from ..runs.stream import Reducer, Run, Source, State, stream
from ..runs.summed import Summed
from ..runs.token_types import TOKEN_TYPES, token_types

TRIVIAL_MASS: Final = 0.3
"""A kind is claimed only where the mean mass on its targets is at least this, …"""

TRIVIAL_TOP: Final = 0.5
"""… or where a target has the highest probability in at least this share of rows."""

RESTING: Final = ("first", "self")
"""The kinds of a head that looks at nothing in particular: an example is of one of these only if there is no other."""

SUFFICES: Final = 0.75
"""The position term alone explains a kind where it would put at least this share of the mass there."""


def head_types(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs] | None = None,
    *,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    bos: bool | None = None,
    seed: int = 0,
    **corpus: Any,
) -> "HeadTypes":
    """What kind of head each is: previous token, induction, duplicate token, first token, delimiters, fixed offsets.

    >>> import attnmech as am
    >>> types = am.head_types(am.load())
    >>> types.kinds_of(2, 6)
    ('induction',)

    The mass of a kind is Σ_j∈targets p_ij, averaged over the rows that have a target. Its baseline, for kinds that
    depend on tokens, is what the head's own mean attention by distance puts on the same keys; for kinds that depend on
    position alone, what uniform attention puts there. A kind is claimed where the simultaneous 95 % interval of
    mass − baseline over texts, for all heads and kinds together, is above 0, and the mass is at least 0.3 or a target
    is the highest key of at least half of the rows. Several may hold for one head.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus), of which only sums are kept; if left out, 24 sequences of
            random tokens, each twice, of different lengths, in which there is nothing but position and repetition.
        layers: by default all.
        stack: "encoder" or "decoder" in a model with several.
        bos: whether each text begins with the tokenizer's first token.
        seed: of the random tokens.
        corpus: `truncate`, `shard`, `journal` and `progress`, as in `am.stream`.

    Returns:
        Mass, baseline and claims of every head; `claims` as a table, `plot` as a map, `to_html` as a page.

    Raises:
        InputError: for cross-attention, whose queries and keys are different tokens; for a decoder beside an encoder
            without `inputs`.

    """
    require_model(model)
    label = model.stack(stack).label
    if label == "cross":
        raise InputError("in cross-attention queries and keys are different tokens, so a head has none of these kinds.")
    generated = inputs is None
    if generated and label == "decoder":
        raise InputError(
            "random tokens are generated for the encoder alone; give `inputs` with what the decoder reads: "
            'iter([{"input_ids": ..., "decoder_input_ids": ...}, ...]).'
        )
    seed = checked_seed(seed)
    given = repeated_sequences(model, seed=seed) if inputs is None else inputs
    result: HeadTypes
    reducer = HeadTypesReducer(generated)
    (result,) = stream(model, given, [reducer], layers=layers, stack=stack, bos=bos, **corpus)
    return result


@dataclass(frozen=True)
class HeadTypesReducer(Reducer):
    """Sums the mass on the targets of every kind, and what the baselines need."""

    generated: bool = False

    points = ("attn_in",)

    def start(self, run: Run) -> State:
        """Sums of mass and top by text; attention and targets by distance."""
        batch = run.batch.queries(run.stack.label)
        texts, length = batch.ids.shape
        layers, heads, distances = run.n_layers, run.n_heads, 2 * length - 1
        shapes = {
            "mass": (len(KINDS), layers, heads, texts),
            "top": (len(KINDS), layers, heads, texts),
            "alone": (len(POSITIONAL), layers, heads, texts),
            "rest_with": (len(CONTENT), layers, heads, texts),
            "rest_without": (len(CONTENT), layers, heads, texts),
            "count": (len(KINDS), layers, texts),
            "count_with": (len(CONTENT), layers, texts),
            "count_without": (len(CONTENT), layers, texts),
            "uniform": (len(POSITIONAL), layers, texts),
            "at_distance": (len(CONTENT), layers, distances, texts),
            "attended": (layers, heads, distances),
            "pairs": (layers, distances),
        }
        device = run.model.device
        state = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        return state | {"rows": row_classes(batch)[:, ROW_CLASSES.index("ordinary")]}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows."""
        batch, layer, length = block.batch.queries(block.stack), block.index, block.mask.queries
        rows = state["rows"][:, block.rows.start : block.rows.stop]
        found = block.mask.once(
            ("kinds", self.generated, block.rows),
            lambda: _Targets.of(batch, block, rows, run.stack.architecture.causal, delimiters=not self.generated),
        )
        on_target = found.by_kind.to(block.pattern)
        state["mass"][:, layer] += _summed(block.pattern, on_target)
        top = block.attention.top
        state["top"][:, layer] += _summed(_one_hot(top, block.pattern.shape[-1], block.pattern), on_target)
        at_first = _at_first(block.pattern, batch)
        # Behind a sliding window there is no first token to rest on.
        reach = rows & _at_first(block.visible, batch)[:, 0].bool()
        for name, chosen in (("with", reach & found.there), ("without", reach & ~found.there)):
            state[f"rest_{name}"][:, layer] += einsum(
                at_first, chosen.double(), "text head row, kind text row -> kind head text"
            )
            state[f"count_{name}"][:, layer] += chosen.sum(dim=-1)
        state["count"][:, layer] += found.count
        state["uniform"][:, layer] += found.uniform
        state["at_distance"][:, layer] += found.at_distance
        state["pairs"][layer] += found.pairs
        attended = received_by_distance(block.pattern, rows[:, None], block.rows, length)
        state["attended"][layer] += attended[:, :, 0].double().sum(dim=0)
        alone = _by_position_alone(block, run)
        state["alone"][:, layer] += _summed(alone, on_target[: len(POSITIONAL)])

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts."""
        here = {name: value.cpu() for name, value in state.items() if name != "rows"}
        return by_group(here, run.documents, _BY_TEXT)

    def merge(self, one: State, other: State) -> State:
        """The sums of both; distances extend to the longer text."""
        longest = max(each["pairs"].shape[-1] for each in (one, other))
        one, other = (_widened(each, longest) for each in (one, other))
        whole = {name: one[name] + other[name] for name in ("attended", "pairs")}
        return {**whole, **joined(one, other, _BY_TEXT)}

    def finish(self, state: State, source: Source) -> "HeadTypes":
        """The result."""
        return HeadTypes.of(state, source, generated=self.generated)


_BY_TEXT: Final = (
    "mass", "top", "alone", "count", "uniform", "at_distance", "rest_with", "rest_without", "count_with",
    "count_without",
)  # fmt: skip
"""The entries of a state whose last axis is texts, or groups of them."""


@dataclass(frozen=True)
class _Targets:
    """What the tokens and the mask say of a block's rows: the same for all heads and layers with that mask."""

    by_kind: Bool[Tensor, "kind batch row key"]
    there: Bool[Tensor, "content batch row"]
    """Whether a row has a target of each kind that depends on tokens."""
    count: Float[Tensor, "kind batch"]
    """How many rows have a target."""
    uniform: Float[Tensor, "positional batch"]
    """The mass that uniform attention puts on targets, summed over rows."""
    at_distance: Float[Tensor, "content distance batch"]
    """How many targets there are at each distance."""
    pairs: Float[Tensor, " distance"]
    """How many keys rows see at each distance."""

    @classmethod
    def of(
        cls, batch: Batch, block: RowBlock, rows: Bool[Tensor, "batch row"], causal: bool, *, delimiters: bool
    ) -> "_Targets":
        """Those of the rows that count; a full stop among random tokens ends no sentence."""
        keys, length = block.scores.shape[-1], block.mask.queries
        types = token_types(batch)
        marks = {name: delimiters & (types == TOKEN_TYPES.index(name)) for name in ("sentence end", "comma", "special")}
        found = targets(batch.ids, batch.first, marks, block.rows, keys, causal=causal)
        seen = block.visible[:, 0] & rows[..., None]
        by_kind = torch.stack([found[name].expand_as(seen) & seen for name in KINDS])
        share = 1 / seen.sum(dim=-1).clamp_min(1).double()
        everywhere = rows[:, None]
        # Kinds stand where heads do: what each "attends" is its targets.
        content = by_kind[len(POSITIONAL) :].transpose(0, 1).float()
        at_distance = received_by_distance(content, everywhere, block.rows, length)[:, :, 0].double()
        pairs = received_by_distance(seen[:, None].float(), everywhere, block.rows, length)
        return cls(
            by_kind,
            by_kind[len(POSITIONAL) :].any(dim=-1),
            by_kind.any(dim=-1).sum(dim=-1).double(),
            (by_kind[: len(POSITIONAL)].sum(dim=-1) * share).sum(dim=-1),
            at_distance.permute(1, 2, 0),
            pairs[:, 0, 0].double().sum(dim=0),
        )


def _summed(
    pattern: Float[Tensor, "batch head row key"], on_target: Float[Tensor, "kind batch row key"]
) -> Float[Tensor, "kind head batch"]:
    """Σ p_ij over the targets of each kind, by head and text."""
    found = einsum(pattern, on_target, "batch head row key, kind batch row key -> kind head batch")
    return found.double()


def _at_first(of_keys: Shaped[Tensor, "batch head row key"], batch: Batch) -> Float[Tensor, "batch head row"]:
    """What each row gives the first token of its text, or whether it sees it."""
    place = batch.begins[:, None, None, None].expand(*of_keys.shape[:3], 1)
    return of_keys.gather(-1, place)[..., 0].double()


def _one_hot(top: Top, keys: int, like: Tensor) -> Float[Tensor, "batch head row key"]:
    """1 at the highest key of each row; none where two are equal."""
    found = like.new_zeros(*top.key.shape, keys)
    return found.scatter_(-1, top.key[..., None], (top.first > top.second).to(like)[..., None])


def _by_position_alone(block: RowBlock, run: Run) -> Float[Tensor, "batch head row key"]:
    """The pattern that the position term alone would give, with queries and keys split at each text's means."""
    parts: dict[int, ScoreParts] = run.between.setdefault(HeadTypesReducer, {})
    if block.layer not in parts:
        stacks, attn_in = run.model.stacks, block["attn_in"]
        everywhere = block.visible.new_ones(1).expand(len(block.q), 1, block.mask.queries, block.k.shape[2])
        native = ledger_of_block(stacks, block, attn_in, everywhere)
        parts[block.layer] = centred(native, run.stack, block, block.batch, "mean", empty=True)
    width = block.scores.shape[-1]
    term = parts[block.layer].term("position", slice(block.rows.start, block.rows.stop))
    term = term[..., :width].expand(*block.scores.shape[:3], -1)
    if block.rows.stop == block.mask.queries:
        del parts[block.layer]
    return softmax_of(term.masked_fill(~block.visible, torch.finfo(term.dtype).min), block.sink)


def _widened(state: State, distances: int) -> State:
    """The same state with room for more distances on either side."""
    beside = (distances - state["pairs"].shape[-1]) // 2
    pad = torch.nn.functional.pad
    return {
        **state,
        **{name: pad(state[name], (beside, beside)) for name in ("attended", "pairs")},
        "at_distance": pad(state["at_distance"], (0, 0, beside, beside)),
    }


@dataclass(frozen=True, repr=False)
class HeadTypes(Summed):
    """How much of each head's attention goes to the targets of every kind, and which kinds are claimed.

    Masses are from 0 to 1; NaN where no row has a target of that kind.
    """

    SUBTRACT = 'subtract what you compare: one.mass("induction") - other.mass("induction")'

    STATE: ClassVar[Mapping[str, Any]] = {
        "mass": Float[Tensor, "kind layer head group"],
        "top": Float[Tensor, "kind layer head group"],
        "alone": Float[Tensor, "positional layer head group"],
        "rest_with": Float[Tensor, "content layer head group"],
        "rest_without": Float[Tensor, "content layer head group"],
        "count": Float[Tensor, "kind layer group"],
        "count_with": Float[Tensor, "content layer group"],
        "count_without": Float[Tensor, "content layer group"],
        "uniform": Float[Tensor, "positional layer group"],
        "at_distance": Float[Tensor, "content layer distance group"],
        "attended": Float[Tensor, "layer head distance"],
        "pairs": Float[Tensor, "layer distance"],
        "groups": Int[Tensor, " group"],
        "modulus": Int[Tensor, " 1"],
    }
    """The types of the entries of `state`."""

    generated: bool
    """Whether the texts are repeated random tokens."""

    @property
    def axis_lengths(self) -> Mapping[str, int]:
        """The lengths of the axes of `state` that are known from elsewhere."""
        kinds = {"kind": len(KINDS), "positional": len(POSITIONAL), "content": len(CONTENT)}
        return {**super().axis_lengths, **kinds}

    @property
    def _reducer(self) -> Reducer:
        return HeadTypesReducer(self.generated)

    def mass(self, kind: str) -> Float[Tensor, "layer head"]:
        """The mean mass on the targets of a kind, over the rows that have one."""
        return self._of_kind(self._sums["mass"] / self._rows, kind)

    def baseline(self, kind: str) -> Float[Tensor, "layer head"]:
        """What uniform attention puts on targets given by position, and mean attention by distance on others."""
        return self._of_kind(self._sums["baseline"] / self._rows, kind)

    def top(self, kind: str) -> Float[Tensor, "layer head"]:
        """The share of rows with a target in which one has the highest probability."""
        return self._of_kind(self._sums["top"] / self._rows, kind)

    def position_alone(self, kind: str) -> Float[Tensor, "layer head"]:
        """The mean mass that the position term alone would put on targets given by position; NaN for other kinds."""
        return self._of_kind(self._sums["alone"] / self._rows, kind)

    def excess(self, kind: str) -> Float[Tensor, "layer head"]:
        """mass − baseline."""
        return self._of_kind(self._excess.mean, kind)

    def simultaneous(
        self, kind: str, level: float = LEVEL
    ) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer head"]]:
        """Intervals of the excess that hold for all heads and kinds together; NaN under five texts."""
        low, high = self._excess.simultaneous(checked_level(level))
        return self._of_kind(low, kind), self._of_kind(high, kind)

    @cached_property
    def claimed(self) -> Bool[Tensor, "kind layer head"]:
        """Which kinds are claimed of which of the measured layers' heads."""
        low, _ = self._excess.simultaneous()
        mass, top = (self._sums[name] / self._rows for name in ("mass", "top"))
        return (low > 0) & ((mass >= TRIVIAL_MASS) | (top >= TRIVIAL_TOP))

    @cached_property
    def claims(self) -> pd.DataFrame:
        """One row per claim, the largest mass first: its mass and baseline, the excess's interval, top, rows.

        `position_alone` is the mass that the position term alone would put there; `by_position_alone` says that it is
        at least three quarters of the mass, so that the head needs nothing else.
        """
        low, high = self._excess.simultaneous()
        rows = self._rows.expand_as(low)
        sums = {name: value / self._rows for name, value in self._sums.items()}
        found = [
            {
                "layer": self.layers[layer],
                "head": head,
                "kind": KINDS[kind],
                "mass": float(sums["mass"][place]),
                "baseline": float(sums["baseline"][place]),
                "low": float(low[place]),
                "high": float(high[place]),
                "top": float(sums["top"][place]),
                "position_alone": float(sums["alone"][place]),
                "by_position_alone": bool(sums["alone"][place] >= SUFFICES * sums["mass"][place]),
                "rows": int(rows[place]),
            }
            for place in map(tuple, self.claimed.nonzero().tolist())
            for kind, layer, head in [place]
        ]
        frame = pd.DataFrame(found, columns=_COLUMNS)
        return frame.sort_values("mass", ascending=False, ignore_index=True)

    @cached_property
    def resting(self) -> pd.DataFrame:
        """For each claimed kind that depends on tokens: does the head rest on the first token where it finds no target?

        Its mean mass on the first token on rows with and without a target, of those that see the first token, and the
        difference, without − with, paired by text, with an interval that holds for all claims together; NaN where every
        row has one.
        """
        here = self.claims[self.claims.kind.isin(CONTENT)][["layer", "head", "kind"]].reset_index(drop=True)
        places = [
            (CONTENT.index(kind), self.layers.index(layer), head)
            for kind, layer, head in zip(here.kind, here.layer, here["head"], strict=True)
        ]
        if not places:
            return here.assign(with_target=[], without_target=[], difference=[], low=[], high=[])
        kinds, layers, heads = (list(each) for each in zip(*places, strict=True))
        by_text = {
            name: TextMeans.of_ratio(
                self.state[f"rest_{name}"][kinds, layers, heads], self.state[f"count_{name}"][kinds, layers]
            )
            for name in ("with", "without")
        }
        change = difference(by_text["without"], by_text["with"])
        low, high = change.simultaneous()
        return here.assign(
            with_target=by_text["with"].mean.tolist(),
            without_target=by_text["without"].mean.tolist(),
            difference=change.mean.tolist(),
            low=low.tolist(),
            high=high.tolist(),
        )

    def kinds_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The kinds claimed of a head, the largest mass first."""
        here = self.claims[(self.claims.layer == layer) & (self.claims["head"] == head)]
        return tuple(here.kind)

    def to_frame(self) -> pd.DataFrame:
        """One row per head: layer, head, the kinds claimed, and for every kind mass, baseline and top."""
        columns: dict[str, Any] = {}
        for kind in KINDS:
            if bool(self.mass(kind).isnan().all()):
                continue
            for name, value in (("", self.mass(kind)), ("_baseline", self.baseline(kind)), ("_top", self.top(kind))):
                columns[f"{kind.replace(' ', '_')}{name}"] = value[list(self.layers)].flatten().tolist()
        places = [(layer, head) for layer in self.layers for head in range(self.state["mass"].shape[2])]
        of_head = {"layer": [layer for layer, _ in places], "head": [head for _, head in places]}
        return pd.DataFrame(of_head | {"kinds": [", ".join(self.kinds_of(*place)) for place in places]} | columns)

    def plot(self) -> "go.Figure":
        """The atlas: every head with the kind of its largest claim, as a map of layers × heads; returned, not shown."""
        frame = self.to_frame()
        masses = {kind: self.mass(kind)[list(self.layers)].numpy() for kind in KINDS}
        kinds = [str(each).split(", ")[0] for each in frame.kinds]
        shape = (len(self.layers), len(kinds) // len(self.layers))
        return kinds_map([kinds[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])], masses, self.layers)

    @property
    def _title(self) -> str:
        return f"Kinds of heads of {self.provenance.model}"

    @property
    def _texts(self) -> str:
        what = "sequences of random tokens, each twice" if self.generated else "texts"
        return f"{self.documents} {what if self.documents != 1 or self.generated else 'text'}"

    @property
    def lead(self) -> str:
        heads = len(self.layers) * self.state["mass"].shape[2]
        if len(self.state["groups"]) < LEAST_TEXTS:
            return (
                f"On {self._texts} no kind is claimed of any of {heads} heads: that needs {LEAST_TEXTS} texts or more."
            )
        count = self.claims.kind.value_counts()
        told = [
            f"{number} {_IN_WORDS[str(kind)] if number > 1 else _OF_ONE[str(kind)]}" for kind, number in count.items()
        ]
        several = "" if told else "none is of a kind that is claimed"
        return f"On {self._texts}, of {heads} heads {', '.join(told)}{several}."

    @property
    def example(self) -> tuple[int, int] | None:
        """The layer and head of the largest claim, if there is one of a kind other than "self" and "first"."""
        found = self.claims
        moving = found[~found.kind.isin(RESTING)]
        chosen = moving if len(moving) else found
        return (int(chosen.layer.iloc[0]), int(chosen["head"].iloc[0])) if len(chosen) else None

    def section(self, call: str) -> Section:
        """The atlas, for a page whose reader chooses a head."""
        (made,) = self._sections()
        chart = Chart(self.plot(), (), clicks={"layer": "customdata.0", "head": "customdata.1"})
        return replace(
            made, figures={"kinds": chart}, finding=self.lead, call=f"{call}.plot()", contents="Kinds of heads"
        )

    def _sections(self) -> "Sequence[Section]":
        return [
            Section(
                "All heads by kind",
                "Each cell is one head, with the letter of the claimed kind on which it spends most; empty where "
                "nothing is claimed. The hover box has the mass on every kind's targets. A kind is claimed where an "
                "interval for all heads and kinds together clears the baseline, and the mass is at least 0.3 or a "
                "target is on top in half of the rows.",
                {"kinds": self.plot()},
                "types.plot()",
            )
        ]

    @cached_property
    def _sums(self) -> dict[str, Float[Tensor, "kind layer head"]]:
        """Each measure summed over texts."""
        return {name: value.sum(dim=-1) for name, value in self._by_group.items()}

    @cached_property
    def _rows(self) -> Float[Tensor, "kind layer 1"]:
        return self.state["count"].sum(dim=-1)[:, :, None]

    @cached_property
    def _by_group(self) -> dict[str, Float[Tensor, "kind layer head group"]]:
        """Sums over the rows of each group of texts."""
        state = self.state
        by_distance = state["attended"] / state["pairs"][:, None].clamp_min(1)
        content = einsum(
            by_distance,
            state["at_distance"],
            "layer head distance, content layer distance group -> content layer head group",
        )
        positional = state["uniform"][:, :, None].expand(-1, -1, content.shape[2], -1)
        no_content = torch.full_like(content, torch.nan)
        return {
            "mass": state["mass"],
            "top": state["top"],
            "baseline": torch.cat((positional, content)),
            "alone": torch.cat((state["alone"], no_content)),
        }

    @cached_property
    def _excess(self) -> TextMeans:
        """mass − baseline of all kinds and heads, over texts."""
        above = self._by_group["mass"] - self._by_group["baseline"]
        return TextMeans.of_ratio(above, self.state["count"][:, :, None])

    def _of_kind(self, values: Float[Tensor, "kind layer #head"], kind: str) -> Float[Tensor, "layer head"]:
        place = KINDS.index(option("kind", kind, KINDS))
        return by_layer(values[place], self.layers, self.n_layers)


_COLUMNS: Final = [
    "layer", "head", "kind", "mass", "baseline", "low", "high", "top", "position_alone", "by_position_alone", "rows",
]  # fmt: skip

_IN_WORDS: Final = {
    "previous": "look back one token",
    "next": "look ahead one token",
    "self": "look at the token itself",
    **{kind: f"look {kind.split()[0]} tokens back" for kind in POSITIONAL if kind.endswith("back")},
    "first": "rest on the first token",
    "sentence end": "look at ends of sentences",
    "comma": "look at commas",
    "special": "look at special tokens",
    "duplicate": "look at copies of the token",
    "induction": "continue what was said before",
}

_OF_ONE: Final = {kind: words.replace("look", "looks").replace("rest ", "rests ").replace("continue ", "continues ")
                  for kind, words in _IN_WORDS.items()}  # fmt: skip
