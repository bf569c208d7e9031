"""Keeps example rows of every head over a corpus: the strongest, and a sample by hash; memory does not grow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ...basics.arguments import shown
from ...errors import InputError
from ...maths.flow import value_norms
from ...maths.groups import by_group, joined
from ...maths.scores import product_by_head
from ...maths.updates import Writer
from ...model.attention.observed import LayerEnd, RowBlock
from ...model.reading.unembedding import unembedding_of
from ...model.stack.block import attention_scale
from ...model.stack.carried import output_weights
from ...runs.identity import digest_of
from ...runs.reducer import Reducer, Run, State
from .formulas import NO_HASH, highest_keys, row_hashes, strongest_of_groups, strongest_of_halves

Statistic: TypeAlias = "str | Callable[[RowBlock], Tensor]"  # the name of a statistic of rows, or its function

BY: Final[Mapping[str, str]] = {
    "attention": "highest attention to another token, not the first",
    "value_weighted": "highest p‖v W_O‖ of a key",
    "update": "size of the head's update, ‖u‖ / ‖x‖",
    "next_token": "the head's direct addition to the next token's logit",
}
"""The statistics of a row, with their meanings."""

POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "update": ("resid_pre", "z", "attn_raw", "attn_out"),
    "next_token": ("z", "attn_raw", "attn_out", "resid_post"),
}
"""The points from which the statistics of what a head writes are computed."""

SAMPLE: Final = 2000  # the size of the sample of rows from which the quantiles of a head are estimated
OFFERS: Final = 4  # the number of rows with different bigrams that a text offers for the strongest rows of a head
HIGHEST: Final = 8
WINDOW: Final = range(-24, 9)  # the tokens stored around the query of a row, as distances from it

_EMPTY: Final[Mapping[str, float | int]] = {
    "value": -torch.inf, "text": -1, "content": 0, "position": -1, "keys": -1, "key_ids": -1, "weights": 0.0,
    "window": -1, "hash": NO_HASH,
}  # fmt: skip
"""The fields of a row, with their values where there is no row."""

_OF_ALL: Final = ("rows", "groups", "modulus")  # the entries of a state that do not hold rows

Rows: TypeAlias = dict[str, Tensor]
"""Rows with the fields of `_EMPTY`, `[*places row]`; "keys", "key_ids", "weights" and "window" have a further axis."""


def detailed(k: int) -> int:
    """The number of sampled rows that are stored with their keys: enough for k of each fifth, except in one of 10⁵."""
    return 10 * k + 50


@dataclass(frozen=True)
class ExampleSums(Reducer):
    """Keeps the strongest rows of each head, a sample of rows, and the sample's values.

    A state holds `rows`, the number of rows that count; `hash` and `value` of the `SAMPLE` rows with the smallest
    hashes; and, under "strongest_…" and "sampled_…", the fields of the strongest rows and of the first sampled rows.
    """

    by: Statistic = "attention"
    k: int = 10
    seed: int = 0
    points: tuple[str, ...] = ()  # those of `POINTS`, if the statistic is there

    @property
    def options(self) -> dict[str, str]:
        """The statistic, k and seed; a function is identified by its code and the values it uses."""
        digest = "" if isinstance(self.by, str) else f" {digest_of(self.by)}"
        return {"by": f"{name_of(self.by)}{digest}", "k": str(self.k), "seed": str(self.seed)}

    def start(self, run: Run) -> State:
        """No rows; raises `InputError` where the statistic is undefined."""
        if self.by == "value_weighted" and run.stack.architecture.gate is not None:
            raise InputError(
                'by="value_weighted" needs values that reach W_O unchanged; in this model a gate or a norm between '
                'attention and W_O makes ‖v W_O‖ depend on the query. Use by="attention" or by="update".'
            )
        if self.by == "next_token":
            _check_next_token(run)
        texts, length = run.batch.queries(run.stack.label).ids.shape
        places, device = (run.n_layers, run.n_heads), run.model.device

        def empty(name: str, count: int) -> Tensor:
            further = {"keys": (HIGHEST,), "key_ids": (HIGHEST,), "weights": (HIGHEST,), "window": (len(WINDOW),)}
            dtype = _DTYPES.get(name, torch.int32)
            shape = *places, min(count, texts * length), *further.get(name, ())
            return torch.full(shape, _EMPTY[name], dtype=dtype, device=device)

        strongest = {f"strongest_{name}": empty(name, 2 * OFFERS * self.k) for name in _EMPTY if name != "hash"}
        sampled = {f"sampled_{name}": empty(name, detailed(self.k)) for name in _EMPTY}
        rows = torch.zeros(places, dtype=torch.int64, device=device)
        return {"rows": rows, "hash": empty("hash", SAMPLE), "value": empty("value", SAMPLE), **strongest, **sampled}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        """Adds a block of rows; rows by what is written wait for the end of the layer, with their highest keys."""
        several_keys = (block.real & (block.visible[:, 0].sum(dim=-1) > 1))[:, None]
        if self.points:
            keys, weights = highest_keys(block.pattern, HIGHEST)
            held = keys.int(), weights, several_keys
            run.between.setdefault((id(state["rows"]), "keys", block.index), []).append(held)
            return
        value, counts = self._values(block, several_keys, run)

        def keys_of(text: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return highest_keys(block.pattern[text, head, row], HIGHEST)

        counted = value.float().masked_fill(~counts, -torch.inf)
        scored = _ScoredRows(block.layer, block.index, block.rows, counted, keys_of)
        self._add_rows(state, scored, run, ended=block.rows.stop == block.mask.queries)

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds all rows of a layer by what its heads write. Rows by the next token's logit wait for the end of the last
        layer, whose stream determines the factor of the final norm.
        """
        if not self.points:
            return
        blocks = run.between.pop((id(state["rows"]), "keys", end.index))
        keys, weights, several_keys = (torch.cat(parts, dim=2) for parts in zip(*blocks, strict=True))
        value, counts = _updates(end, run) if self.by == "update" else _next_token_products(end, run)
        waiting = run.between.setdefault((id(state["rows"]), "written"), [])
        waiting.append(_Written(end.layer, end.index, value, several_keys & counts, keys, weights))
        factor = torch.ones_like(value[:, 0])
        if self.by == "next_token":
            if end.layer != run.model.last_stream[1]:
                return
            factor = unembedding_of(run.model).scale(end["resid_post"])
        for written in waiting:
            self._add_rows(state, written.scored(factor), run, ended=True)
        waiting.clear()

    def close(self, state: State, run: Run) -> State:
        """The state without empty places, so that it does not depend on padding, and the texts, so that copies are
        counted.
        """
        return by_group(_without_empty_places(state), run.batch.digests, ())

    def merge(self, one: State, other: State) -> State:
        """The strongest rows, and the smallest hashes, of both parts; the parts may come in any order."""
        both = _joined(one, other, dim=2)
        return _without_empty_places({
            "rows": one["rows"] + other["rows"],
            **joined(one, other, ()),
            **_of_smallest_hash({name: both[name] for name in ("hash", "value")}, SAMPLE),
            **_named("strongest", _strongest(fields_of("strongest", both), self.k, 2 * OFFERS * self.k)),
            **_named("sampled", _of_smallest_hash(fields_of("sampled", both), detailed(self.k))),
        })  # fmt: skip

    def _values(
        self, block: RowBlock, several_keys: Bool[Tensor, "batch 1 row"], run: Run
    ) -> tuple[Float[Tensor, "batch head row"], Bool[Tensor, "batch 1 row"]]:
        if callable(self.by):
            return _by_function(self.by, block, several_keys), several_keys
        if self.by == "value_weighted":
            key = ExampleSums, "value norms", block.layer
            if key not in run.between:
                W_O = output_weights(run.stack, block.layer, block.v.dtype)
                run.between[key] = value_norms(block.v.transpose(1, 2), W_O).transpose(1, 2)
            norms = run.between[key][:, :, None, : block.pattern.shape[-1]]
            if block.rows.stop == block.mask.queries:
                del run.between[key]
            return (block.pattern * norms).amax(dim=-1), several_keys
        others = block.mask.once(("other tokens", block.rows), lambda: other_tokens(block))
        return torch.where(others, block.pattern, -torch.inf).amax(dim=-1), block.real[:, None] & others.any(dim=-1)

    def _add_rows(self, state: State, scored: "_ScoredRows", run: Run, *, ended: bool) -> None:
        index, value = scored.index, scored.value.transpose(0, 1)
        state["rows"][index] += (value > -torch.inf).sum(dim=(1, 2))
        self._add_sampled(state, scored, run)
        offers = run.between.setdefault((id(state["rows"]), "offers", index), [])
        offers.append(_offers(scored, run))
        if not ended:
            return
        del run.between[id(state["rows"]), "offers", index]
        of_texts = _joined(*offers, dim=2)
        best = _taken(of_texts, strongest_of_groups(of_texts["value"], bigrams(of_texts), OFFERS))
        together = {name: value.flatten(1, 2) for name, value in best.items()}
        both = _joined(_of_layer("strongest", state, index), together)
        _replace(state, index, _named("strongest", _strongest(both, self.k, state["strongest_value"].shape[-1])))

    def _add_sampled(self, state: State, scored: "_ScoredRows", run: Run) -> None:
        index, value = scored.index, scored.value.transpose(0, 1)
        places = run.batch.queries(run.stack.label).places[:, scored.rows.start : scored.rows.stop]
        hashes = row_hashes(self.seed, scored.layer, len(value), run.documents, places).transpose(0, 1)
        rows = {"hash": hashes.masked_fill(value == -torch.inf, NO_HASH).flatten(1), "value": value.flatten(1)}
        both = _joined({name: state[name][index] for name in rows}, rows)
        _replace(state, index, _of_smallest_hash(both, state["hash"].shape[-1]))
        few = rows["hash"].topk(min(detailed(self.k), rows["hash"].shape[-1]), largest=False)
        sampled = scored.fields(torch.where(few.values < NO_HASH, few.indices, -1), run) | {"hash": few.values}
        both = _joined(_of_layer("sampled", state, index), sampled)
        _replace(state, index, _named("sampled", _of_smallest_hash(both, state["sampled_hash"].shape[-1])))


@dataclass(frozen=True)
class _ScoredRows:
    """Rows of a layer with their statistic, and a function that returns the highest keys of some of them."""

    layer: int
    index: int
    rows: range
    value: Float[Tensor, "batch head row"]  # in float32; −∞ at rows that do not count
    keys_of: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    def fields(self, chosen: Int[Tensor, "head some"], run: Run) -> Rows:
        """The fields of some rows, which are numbered through all texts; −1 is no row."""
        label, at = run.stack.label, chosen.clamp_min(0)
        text, row = at.div(len(self.rows), rounding_mode="floor"), at % len(self.rows)
        head = torch.arange(len(chosen), device=chosen.device)[:, None]
        queries, tokens, keys = run.batch.queries(label), run.batch.key_tokens(label), run.batch.keys(label)
        key, weights = self.keys_of(text, head, row)
        at_key, at_query = (text[..., None], key.clamp_min(0)), row + self.rows.start
        is_token = (key >= 0) & (key < tokens.ids.shape[1])
        ids = tokens.ids[text[..., None], key.clamp(0, tokens.ids.shape[1] - 1)]
        window = at_query[..., None] + torch.tensor(WINDOW, device=chosen.device)
        inside = (window >= 0) & (window < queries.ids.shape[1])
        window = window.clamp(0, queries.ids.shape[1] - 1)
        inside &= queries.mask[text[..., None], window]
        fields = {
            "value": self.value[text, head, row],
            "text": run.documents.to(text.device)[text],
            "content": run.batch.digests.to(text.device)[text],
            "position": queries.places[text, at_query],
            "keys": torch.where(key >= 0, keys.places[at_key], -1),
            "key_ids": torch.where(is_token, ids, -1),
            "weights": weights,
            "window": torch.where(inside, queries.ids[text[..., None], window], -1),
        }
        return _without({name: x.to(_DTYPES.get(name, torch.int32)) for name, x in fields.items()}, chosen < 0)


@dataclass(frozen=True)
class _Written:
    """All rows of a layer with what its heads write, stored until the factor of each row is known."""

    layer: int
    index: int
    value: Float[Tensor, "batch head row"]
    counts: Bool[Tensor, "batch 1 row"]
    keys: Int[Tensor, "batch head row highest"]
    weights: Float[Tensor, "batch head row highest"]

    def scored(self, factor: Float[Tensor, "batch row"]) -> _ScoredRows:
        """The rows, each value times the factor of its row."""

        def keys_of(text: Tensor, head: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return self.keys[text, head, row].long(), self.weights[text, head, row]

        value = (self.value * factor[:, None]).float().masked_fill(~self.counts, -torch.inf)
        return _ScoredRows(self.layer, self.index, range(value.shape[-1]), value, keys_of)


def _updates(end: LayerEnd, run: Run) -> tuple[Float[Tensor, "batch head row"], Bool[Tensor, "batch 1 row"]]:
    precision = torch.promote_types(run.model.dtype, torch.float32)
    scale = attention_scale(run.stack, end, precision)
    W_O = scale.folded(run.stack.weights(end.layer).W_O.detach().to(precision))
    norm = Writer(W_O).norm(end["z"].to(precision)) * scale.by_token[:, None]
    stream = torch.linalg.vector_norm(end["resid_pre"].to(precision), dim=-1)
    return norm / stream.clamp_min(torch.finfo(precision).tiny)[:, None], (stream > 0)[:, None]


def _next_token_products(
    end: LayerEnd, run: Run
) -> tuple[Float[Tensor, "batch head row"], Bool[Tensor, "batch 1 row"]]:
    """What each head adds to the next token's logit above the mean over the vocabulary, before the final norm's factor.

    The directions of the stream that read these logits are the same in all layers.
    """
    queries, key = run.batch.queries(run.stack.label), (ExampleSums, "next tokens")
    if key not in run.between:
        run.between[key] = unembedding_of(run.model).above_mean(queries.ids.roll(-1, dims=1))
    direction, mask = cast(Tensor, run.between[key]), queries.mask
    precision = direction.dtype
    scale = attention_scale(run.stack, end, precision)
    W_O = scale.folded(run.stack.weights(end.layer).W_O.detach().to(precision))
    read = product_by_head(direction, W_O.mT)
    product = torch.linalg.vecdot(end["z"].to(precision).transpose(1, 2), read)
    return product * scale.by_token[:, None], (mask & pad(mask[:, 1:], (0, 1)))[:, None]


def _check_next_token(run: Run) -> None:
    model, last = run.model, run.model.last_stream[1]
    if not model.causal or run.stack is not model.output_stack:
        name = f"the {run.stack.label} stack of {model.name}" if run.stack.label else model.name
        raise InputError(
            f'by="next_token" needs self-attention in a stack that predicts the next token; {name} does not. '
            'Use by="update".'
        )
    unembedding_of(model)
    model.points.resolve(["logits"], None, model.refused)
    if last not in run.layers:
        raise InputError(
            f'by="next_token" needs the last layer, {last}, among `layers`, since the factor of the final norm is '
            f"measured there; got {list(run.layers)}."
        )


def _offers(scored: _ScoredRows, run: Run) -> Rows:
    """The strongest rows of each text with different bigrams, `[head text offer]`."""
    queries, value = run.batch.queries(run.stack.label), scored.value.transpose(0, 1)
    ids = queries.ids.masked_fill(~queries.mask, -1)
    bigrams = _bigram(pad(ids[:, :-1], (1, 0), value=-1), ids)[:, scored.rows.start : scored.rows.stop]
    row = strongest_of_groups(value, bigrams.expand_as(value), OFFERS)
    text = torch.arange(value.shape[1], device=row.device)[:, None]
    fields = scored.fields(torch.where(row >= 0, row + text * value.shape[2], -1).flatten(1), run)
    return {name: x.view(*row.shape, *x.shape[2:]) for name, x in fields.items()}


_DTYPES: Final = {"value": torch.float32, "weights": torch.float32, "text": torch.int64, "content": torch.int64,
                  "hash": torch.int64}  # fmt: skip
"""The dtypes of fields; the others are int32."""


def name_of(by: Statistic) -> str:
    """The name of a statistic."""
    return by if isinstance(by, str) else getattr(by, "__name__", type(by).__name__)


def other_tokens(block: RowBlock) -> Bool[Tensor, "batch 1 row key"]:
    """True at the visible keys that are tokens, but neither the first token of the text nor the query itself."""
    width, batch = block.visible.shape[-1], block.batch.key_tokens(block.stack)
    key = torch.arange(width, device=block.visible.device)
    others = block.visible & (key < batch.ids.shape[1]) & (key != batch.begins[:, None, None, None])
    if block.stack != "cross":
        others &= key != torch.arange(block.rows.start, block.rows.stop, device=key.device)[:, None]
    return others


def _by_function(
    by: Callable[[RowBlock], Any], block: RowBlock, counts: Bool[Tensor, "batch 1 row"]
) -> Float[Tensor, "batch head row"]:
    value, shape = by(block), tuple(block.q.shape[:3])
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.is_complex():
        raise InputError(
            f"`by` must return a real tensor [batch head row], here [{', '.join(map(str, shape))}]; got {shown(value)}."
        )
    value = value.detach()
    if not bool((value.isfinite() | ~counts).all()):
        raise InputError(
            f"`by` must return finite numbers at real rows that see several keys; layer {block.layer} has others. "
            "Replace them, for example with torch.nan_to_num."
        )
    return value


def _bigram(before: Int[Tensor, "*places"], query: Int[Tensor, "*places"]) -> Int[Tensor, "*places"]:
    return (before.long() << 32) + query


def bigrams(rows: Mapping[str, Tensor]) -> Int[Tensor, "*places row"]:
    """The bigram of each row, as one number."""
    return _bigram(rows["window"][..., WINDOW.index(-1)], rows["window"][..., WINDOW.index(0)])


def _strongest(rows: Rows, k: int, places: int) -> Rows:
    """The strongest row of each bigram among the texts of each half, highest first, in this number of places; of equal
    rows, that of the earlier text and position.
    """
    place = (rows["text"] << 32) + rows["position"]
    rows = _taken(rows, place.argsort(dim=-1))
    kept = strongest_of_halves(rows["value"], bigrams(rows), rows["text"], OFFERS * k)
    return _taken(rows, kept[..., :places])


def _of_smallest_hash(rows: Rows, count: int) -> Rows:
    return _taken(rows, rows["hash"].topk(min(count, rows["hash"].shape[-1]), largest=False).indices)


def _taken(rows: Rows, order: Int[Tensor, "*places kept"]) -> Rows:
    """The rows with these indices; −1 is no row."""
    there, taken = order.clamp_min(0), {}
    for name, value in rows.items():
        index = there if value.ndim == there.ndim else there[..., None].expand(*there.shape, value.shape[-1])
        taken[name] = value.gather(order.ndim - 1, index)
    return _without(taken, order < 0)


def _without(rows: Rows, missing: Bool[Tensor, "*places row"]) -> Rows:
    return {
        name: value.masked_fill(missing if value.ndim == missing.ndim else missing[..., None], _EMPTY[name])
        for name, value in rows.items()
    }


def _without_empty_places(state: State) -> State:
    """The state without the places that no head uses, which are the last; at least one place is left."""
    used = {
        "strongest": (state["strongest_text"] >= 0).sum(dim=-1).max(),
        "sampled": (state["sampled_hash"] < NO_HASH).sum(dim=-1).max(),
        "": (state["hash"] < NO_HASH).sum(dim=-1).max(),
    }
    places = {kind: max(1, int(count)) for kind, count in used.items()}
    return {
        name: value if name in _OF_ALL else value[:, :, : places[name.rpartition("_")[0].partition("_")[0]]].clone()
        for name, value in state.items()
    }


def fields_of(kind: str, state: Mapping[str, Tensor]) -> Rows:
    """The fields of the rows of one kind in a state."""
    return {name.removeprefix(f"{kind}_"): x for name, x in state.items() if name.startswith(f"{kind}_")}


def _named(kind: str, rows: Rows) -> State:
    return {f"{kind}_{name}": value for name, value in rows.items()}


def _of_layer(kind: str, state: State, index: int) -> Rows:
    return {name: value[index] for name, value in fields_of(kind, state).items()}


def _joined(*parts: Rows, dim: int = 1) -> Rows:
    return {name: torch.cat([part[name] for part in parts], dim=dim) for name in parts[0] if name not in _OF_ALL}


def _replace(state: State, index: int, rows: State) -> None:
    for name, value in rows.items():
        state[name][index] = value
