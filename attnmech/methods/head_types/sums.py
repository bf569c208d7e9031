"""Sums for head types, taken in one pass: attention on targets, what heads write from them, and examples.

Whether a head writes the tokens that it attends to: how highly its output from a key ranks the key's token.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from ...batch import Batch
from ...maths.float64 import as_float64, float64_device
from ...maths.groups import by_group, joined
from ...maths.received import received_by_distance
from ...maths.scores import ScoreParts, product_by_head
from ...maths.softmax import softmax_of
from ...model.attention.observed import LayerEnd, RowBlock
from ...model.reading.unembedding import Unembedding, unembedding_of, why_not_linear
from ...model.stack.block import attention_scale
from ...model.stack.centring import centred
from ...model.stack.ledger import ledger_of_block
from ...runs.reducer import Reducer, Run, State
from ...runs.token_types import ROW_CLASSES, TOKEN_TYPES, row_classes, token_types
from .formulas import ANSWERED, CONTENT, DISTANCES, POSITIONAL, TYPES, targets

_CHUNK = 64  # the number of keys that are compared with all tokens at a time


def rank_above(
    value: Float[Tensor, "*places 1"], others: Float[Tensor, "*places other"], counted: Bool[Tensor, "*#places other"]
) -> Float[Tensor, "*places"]:
    """Returns the share of the counted other values that `value` exceeds; equal values count half.

    >>> rank_above(torch.tensor([2.0]), torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([True, True, True, False]))
    tensor(0.5000)
    """
    sign = (others - value).sign_()  # −1 where the other value is smaller
    balance = einsum(sign, counted.expand_as(sign).to(sign), "... other, ... other -> ...")
    return (0.5 - 0.5 * balance / counted.sum(dim=-1).clamp_min(1)) * counted.any(dim=-1)


def copying(
    values: Float[Tensor, "batch head key d_value"],
    read: Float[Tensor, "batch head token d_value"],
    ids: Int[Tensor, "batch key"],
    counted: Bool[Tensor, "batch key"],
) -> tuple[Float[Tensor, "batch head key"], Bool[Tensor, "batch key"]]:
    """Ranks the token at each key among the text's other tokens, by the logit that the head would write from the key.

    For the token a at key j, (v_j W_O)·u_a is compared with (v_j W_O)·u_b of the text's other tokens b. The rank is 1
    if the head raises the logit of a most, 0 if it raises it least, and 0.5 by chance.

    Args:
        values: v_j.
        read: W_O u_b for the token b at each place.
        ids: the tokens.
        counted: the places that count.

    Returns:
        The ranks (0 at places that do not count), and the places that count, which have another token to compare with.

    Source: in the spirit of Olsson et al. 2022, "In-context Learning and Induction Heads", copying score.

    """
    again = torch.tril(ids[:, :, None] == ids[:, None], diagonal=-1)
    distinct = counted & ~(again & counted[:, None]).any(dim=-1)
    ranks = values.new_zeros(values.shape[:3])
    there = torch.zeros_like(counted)
    for start in range(0, ids.shape[1], _CHUNK):
        keys = slice(start, start + _CHUNK)
        logits = values[:, :, keys] @ read.to(values).transpose(-1, -2)
        own = (values[:, :, keys] * read[:, :, keys].to(values)).sum(dim=-1, keepdim=True)
        others = distinct[:, None] & (ids[:, keys, None] != ids[:, None]) & counted[:, keys, None]
        ranks[:, :, keys] = rank_above(own, logits, others[:, None])
        there[:, keys] = others.any(dim=-1)
    return ranks, there


AROUND_KEY: Final = range(-2, 3)  # the number of tokens stored around an example's key
AROUND_QUERY: Final = range(-3, 1)  # the number of tokens stored up to an example's query

BY_TEXT: Final = (
    "mass", "top", "alone", "count", "uniform", "at_distance", "rest_with", "rest_without", "count_with",
    "count_without", "written_there", "written_elsewhere", "written_count", "copying", "copying_count", "matching",
    "matching_count", "breadth", "breadth_count",
)  # fmt: skip
"""The entries of a state whose last axis is texts, or groups of texts."""

_EXAMPLE: Final = ("example", "example_at", "example_weight", "example_ids")


@dataclass(frozen=True)
class HeadTypeSums(Reducer):
    """Sums the attention on the targets of every type, what heads write from them, and the terms of the baselines."""

    generated: bool = False  # whether the tokens are random, so that a full stop does not end a sentence

    points = ("attn_in",)
    optional_points = ("attn_raw", "attn_out", "resid_post")

    def start(self, run: Run) -> State:
        """Empty sums by text, attention and targets by distance, and the clearest row of each type and head."""
        batch = run.batch.queries(run.stack.label)
        texts, length = batch.ids.shape
        layers, heads, distances = run.n_layers, run.n_heads, 2 * length - 1
        shapes = {
            "mass": (len(TYPES), layers, heads, texts),
            "top": (len(TYPES), layers, heads, texts),
            "alone": (len(POSITIONAL), layers, heads, texts),
            "rest_with": (len(CONTENT), layers, heads, texts),
            "rest_without": (len(CONTENT), layers, heads, texts),
            "count": (len(TYPES), layers, texts),
            "count_with": (len(CONTENT), layers, texts),
            "count_without": (len(CONTENT), layers, texts),
            "uniform": (len(POSITIONAL), layers, texts),
            "at_distance": (len(CONTENT), layers, distances, texts),
            "attended": (layers, heads, distances),
            "pairs": (layers, distances),
            "copying": (layers, heads, texts),
            "copying_count": (layers, texts),
            "matching": (layers, heads, texts),
            "matching_count": (layers, texts),
            "breadth": (layers, heads, texts),
            "breadth_count": (layers, texts),
        }
        device = run.model.device
        sums_on = float64_device(device)
        state = {name: torch.zeros(shape, dtype=torch.float64, device=sums_on) for name, shape in shapes.items()}
        model = run.model
        last = run.layers[-1] == model.last_stream[1] and run.stack is model.output_stack
        # Whether logits are one norm and one matrix of what these heads write, and the norm's scale is measured.
        linear = last and model.causal and why_not_linear(model) is None and "logits" not in model.refused
        writes = len(ANSWERED) if linear else 0
        by_row = torch.zeros(writes, layers, heads, texts, length, device=device)
        place = torch.full((len(TYPES), layers, heads), -1, device=device)
        around = torch.full((*place.shape, len(AROUND_KEY) + len(AROUND_QUERY)), -1, device=device)
        return state | {
            "rows": row_classes(batch)[:, ROW_CLASSES.index("ordinary")],
            "there_by_row": by_row,
            "all_by_row": by_row.clone(),
            "final_scale": torch.zeros(texts, length, device=device),
            "example": torch.full(place.shape, -torch.inf, device=device),
            "example_weight": torch.zeros(place.shape, device=device),
            "example_at": place[..., None].repeat(1, 1, 1, 3),
            "example_ids": around,
        }

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        batch, layer, length = block.batch.queries(block.stack), block.index, block.mask.queries
        rows = state["rows"][:, block.rows.start : block.rows.stop]
        block_targets = block.mask.once(
            ("kinds", self.generated, block.rows),
            lambda: _Targets.of(batch, block, rows, run.stack.architecture.causal, delimiters=not self.generated),
        )
        mass = torch.cat(
            (_at_positions(block.pattern, block_targets, block.rows, batch), _on_content(block.pattern, block_targets))
        )
        state["mass"][:, layer] += _over_rows(mass)
        # A row with a tie for the highest score counts for no key.
        top = rearrange(block.top.key, "batch head row -> batch row head").expand(len(TYPES), -1, -1, -1)
        clear = rearrange(block.top.first > block.top.second, "batch head row -> batch row head")
        hit = as_float64((block_targets.by_kind.gather(-1, top) & clear).sum(dim=2))
        state["top"][:, layer] += rearrange(hit, "kind batch head -> kind head batch")
        at_first = as_float64(_at_first(block.pattern, batch))
        # Rows beyond a sliding window do not see the first token.
        reach, there = rows & _at_first(block.visible, batch)[:, 0], block_targets.there[len(POSITIONAL) :]
        for name, counted in (("with", reach & there), ("without", reach & ~there)):
            by_text = "text head row, kind text row -> kind head text"
            state[f"rest_{name}"][:, layer] += einsum(at_first, as_float64(counted), by_text)
            state[f"count_{name}"][:, layer] += as_float64(counted.sum(dim=-1))
        state["count"][:, layer] += block_targets.count
        state["uniform"][:, layer] += block_targets.uniform[: len(POSITIONAL)].sum(dim=-1)
        state["at_distance"][:, layer] += block_targets.at_distance
        state["pairs"][layer] += block_targets.pairs
        attended = received_by_distance(block.pattern[..., :length], rows[:, None], block.rows, length)
        state["attended"][layer] += as_float64(attended[:, :, 0]).sum(dim=0)
        alone = _by_position_alone(block, run)
        state["alone"][:, layer] += _over_rows(_at_positions(alone, block_targets, block.rows, batch))
        _add_matching(state, block, block_targets)
        _add_breadth(state, block, rows)
        _keep_clearest(state, block, run, block_targets, mass)
        if len(state["there_by_row"]):
            _Layer.of(run, block).add(block, block_targets)

    def add_layer(self, state: State, end: LayerEnd, run: Run) -> None:
        """Adds what the layer's heads write from their targets, in logits before the final norm's scale."""
        if not len(state["there_by_row"]):
            return
        held, batch = _Layer.taken(run, end.layer), run.batch.queries(run.stack.label)
        key = HeadTypeSums, "directions"
        if key not in run.between:
            unembedding = unembedding_of(run.model)
            run.between[key] = unembedding, unembedding.above_mean(batch.ids)
        # The stream's directions that read the logit of each place's token, minus the mean logit of the vocabulary.
        unembedding, direction = cast(tuple[Unembedding, Tensor], run.between[key])
        scale = attention_scale(run.stack, end, unembedding.gamma.dtype)
        W_O = scale.folded(run.stack.weights(end.layer).W_O.detach().to(unembedding.gamma.dtype))
        # For each place, the direction of a value that the logit of the place's token reads.
        read = product_by_head(direction, W_O.mT)
        gate = None if end.notes.gate is None else end.notes.gate.transpose(1, 2).to(read)
        for place, answers in enumerate(held.answers):
            at = answers.clamp_min(0)[:, None, :, None].expand_as(read)
            answered = read.gather(2, at) if gate is None else read.gather(2, at) * gate
            by_token = scale.by_token * (answers >= 0)
            for name, summed in (("there_by_row", held.there[place]), ("all_by_row", held.whole)):
                written = (summed * answered).sum(dim=-1) * by_token[:, None]
                state[name][place, end.index] = written.transpose(0, 1)
        values = held.values if gate is None else held.values * gate
        ranks, counted = copying(values, read, batch.ids, state["rows"])
        state["copying"][end.index] += as_float64(ranks).sum(dim=-1).T
        state["copying_count"][end.index] += as_float64(counted.sum(dim=-1))
        if end.index == run.n_layers - 1:
            state["final_scale"][:] = unembedding.scale(end["resid_post"])

    def close(self, state: State, run: Run) -> State:
        """Sums by group of texts, on the CPU."""
        here = {name: value.cpu() for name, value in state.items()}
        there, whole = (as_float64(here[name]) * here["final_scale"] for name in ("there_by_row", "all_by_row"))
        here |= {"written_there": there.sum(dim=-1), "written_elsewhere": (whole - there).sum(dim=-1)}
        here["written_count"] = here["count"][[TYPES.index(name) for name in ANSWERED]][: len(there)]
        for name in ("rows", "there_by_row", "all_by_row", "final_scale"):
            del here[name]
        return by_group(here, run.batch.digests, BY_TEXT)

    def merge(self, one: State, other: State) -> State:
        """The sums of both states; distances extend to the longer text."""
        longest = max(state["pairs"].shape[-1] for state in (one, other))
        one, other = (_widened(state, longest) for state in (one, other))
        whole = {name: one[name] + other[name] for name in ("attended", "pairs")}
        # The clearer example of each type and head; of equal examples, that of the earlier document.
        earlier = other["example_at"][..., 0] < one["example_at"][..., 0]
        wins = (other["example"] > one["example"]) | ((other["example"] == one["example"]) & earlier)
        examples = {
            name: torch.where(wins if one[name].ndim == wins.ndim else wins[..., None], other[name], one[name])
            for name in _EXAMPLE
        }
        return {**whole, **examples, **joined(one, other, BY_TEXT)}


@dataclass(frozen=True)
class _Targets:
    """The targets of a block's rows. They depend only on tokens and mask, so all heads and layers share them."""

    by_kind: Bool[Tensor, "kind batch row key"]
    there: Bool[Tensor, "kind batch row"]  # whether a row has a target of each type
    last: Int[Tensor, "answered batch row"]  # the last target of types with an answer; −1 for rows without a target
    apart: Bool[Tensor, "kind batch row"]  # has a target; except for "first", also: the text's first token is no target
    count: Float[Tensor, "kind batch"]  # the number of rows with a target
    uniform: Float[Tensor, "kind batch row"]  # the mass that uniform attention puts on targets
    at_distance: Float[Tensor, "content distance batch"]  # the number of targets at each distance
    pairs: Float[Tensor, " distance"]  # the number of visible keys at each distance

    @classmethod
    def of(
        cls, batch: Batch, block: RowBlock, rows: Bool[Tensor, "batch row"], causal: bool, *, delimiters: bool
    ) -> "_Targets":
        """Finds the targets of the rows that count. A full stop among random tokens does not end a sentence."""
        keys, length = block.scores.shape[-1], block.mask.queries
        tokens = min(keys, length)
        of_type = targets_of(batch, block, causal, delimiters=delimiters)
        seen = block.visible[:, 0] & rows[..., None]
        by_kind = torch.stack([of_type[name].expand_as(seen) & seen for name in TYPES])
        share = 1 / as_float64(seen.sum(dim=-1).clamp_min(1))
        everywhere = rows[:, None]
        # Types take the place of heads: each type "attends" to its targets.
        content = by_kind[len(POSITIONAL) :, ..., :tokens].transpose(0, 1).float()
        at_distance = as_float64(received_by_distance(content, everywhere, block.rows, length)[:, :, 0])
        pairs = received_by_distance(seen[:, None, :, :tokens].float(), everywhere, block.rows, length)
        answered = by_kind[[TYPES.index(name) for name in ANSWERED]]
        place = torch.arange(keys, device=seen.device)
        begin = batch.begins[None, :, None, None].expand(*by_kind.shape[:3], 1)
        with_first = by_kind.gather(-1, begin.clamp_max(keys - 1))[..., 0]
        with_first[TYPES.index("first")] = False
        there = by_kind.any(dim=-1)
        return cls(
            by_kind,
            there,
            torch.where(answered, place, -1).amax(dim=-1),
            there & ~with_first,
            as_float64(there.sum(dim=-1)),
            as_float64(by_kind.sum(dim=-1)) * share,
            at_distance.permute(1, 2, 0),
            as_float64(pairs[:, 0, 0]).sum(dim=0),
        )


def targets_of(
    batch: Batch, block: RowBlock, causal: bool, *, delimiters: bool = True
) -> dict[str, Bool[Tensor, "#batch row key"]]:
    """The targets of every type in a block's rows, also at keys that rows do not see."""
    keys = block.scores.shape[-1]
    tokens, types = min(keys, block.mask.queries), token_types(batch)
    marks: dict[str, Tensor] = {
        name: delimiters & (types == TOKEN_TYPES.index(name)) for name in TOKEN_TYPES if name in CONTENT
    }
    of_type = targets(batch.distinct, batch.first, marks, block.rows, tokens, causal=causal)
    # Keys that are not tokens are not targets.
    return {name: pad(on_target, (0, keys - tokens)) for name, on_target in of_type.items()}


@dataclass(frozen=True)
class _Layer:
    """What a layer's rows read from their targets, stored until the layer ends and its norms are known."""

    there: Float[Tensor, "answered batch head row d_value"]  # Σ_j∈targets p_ij v_j
    whole: Float[Tensor, "batch head row d_value"]  # Σ_j p_ij v_j
    values: Float[Tensor, "batch head key d_value"]
    answers: Int[Tensor, "answered batch row"]  # the position of the token that a row's targets predict; −1 without any

    @classmethod
    def of(cls, run: Run, block: RowBlock) -> "_Layer":
        """The entry of a block's layer, created at the layer's first block."""
        key = HeadTypeSums, "values", block.layer
        if key not in run.between:
            group = block.q.shape[1] // block.v.shape[1]
            values = repeat(block.v, "batch kv key d_value -> batch (kv group) key d_value", group=group)
            rows = block.mask.queries
            whole = values.new_zeros(*values.shape[:2], rows, values.shape[-1])
            there = whole.new_zeros(len(ANSWERED), *whole.shape)
            answers = torch.full((len(ANSWERED), len(whole), rows), -1, device=whole.device)
            run.between[key] = cls(there, whole, values.clone(), answers)
        return cast(_Layer, run.between[key])

    @classmethod
    def taken(cls, run: Run, layer: int) -> "_Layer":
        return cast(_Layer, run.between.pop((HeadTypeSums, "values", layer)))

    def add(self, block: RowBlock, block_targets: _Targets) -> None:
        rows = slice(block.rows.start, block.rows.stop)
        values = self.values[:, :, : block.pattern.shape[-1]]
        self.whole[:, :, rows] = block.pattern @ values
        self.answers[:, :, rows] = block_targets.last
        for place, name in enumerate(ANSWERED):
            on_target = block_targets.by_kind[TYPES.index(name)][:, None]
            self.there[place, :, :, rows] = (block.pattern * on_target) @ values


def _at_positions(
    pattern: Float[Tensor, "batch head row key"], block_targets: _Targets, rows: range, batch: Batch
) -> Float[Tensor, "kind head batch row"]:
    """Returns p_ij at the target of each type that depends on positions alone. A row has at most one target."""
    mass = pattern.new_zeros(len(POSITIONAL), *pattern.shape[:3])
    for at_target, name in zip(mass, POSITIONAL, strict=True):
        if name in DISTANCES:
            first = rows.start - DISTANCES[name]
            diagonal = pattern.diagonal(first, dim1=-2, dim2=-1)
            at_target[..., max(0, -first) : max(0, -first) + diagonal.shape[-1]] = diagonal
        else:
            at_target[:] = _at_first(pattern, batch)
    mass = mass.masked_fill_(~block_targets.there[: len(POSITIONAL), :, None], 0.0)
    return rearrange(mass, "kind batch head row -> kind head batch row")


def _on_content(
    pattern: Float[Tensor, "batch head row key"], block_targets: _Targets
) -> Float[Tensor, "kind head batch row"]:
    """Returns Σ p_ij over the targets of each type that depends on tokens, for each row."""
    mass = pattern.new_zeros(len(CONTENT), pattern.shape[1], pattern.shape[0], pattern.shape[2])
    there = block_targets.there[len(POSITIONAL) :].flatten(start_dim=1).any(dim=1)
    on_target = block_targets.by_kind[len(POSITIONAL) :][there].to(pattern)
    mass[there] = einsum(pattern, on_target, "batch head row key, kind batch row key -> kind head batch row")
    return mass


def _over_rows(by_row: Float[Tensor, "kind head batch row"]) -> Float[Tensor, "kind head batch"]:
    return as_float64(by_row).sum(dim=-1)


def _at_first(of_keys: Shaped[Tensor, "batch head row key"], batch: Batch) -> Shaped[Tensor, "batch head row"]:
    """Returns the attention of each row to its text's first token, or whether the row sees that token."""
    place = batch.begins[:, None, None, None].expand(*of_keys.shape[:3], 1)
    return of_keys.gather(-1, place)[..., 0]


def _add_matching(state: State, block: RowBlock, block_targets: _Targets) -> None:
    """Adds the rank of the last induction target's score among the scores of the other keys."""
    last = block_targets.last[ANSWERED.index("induction")]
    on_target = block_targets.by_kind[TYPES.index("induction")]
    others = block.visible & ~on_target[:, None]
    counted = (last >= 0) & (others[:, 0].sum(dim=-1) > 0)
    place = last.clamp_min(0)[:, None, :, None].expand(*block.scores.shape[:3], 1)
    rank = rank_above(block.scores.gather(-1, place), block.scores, others)
    state["matching"][block.index] += as_float64(rank * counted[:, None]).sum(dim=-1).T
    state["matching_count"][block.index] += as_float64(counted.sum(dim=-1))


def _add_breadth(state: State, block: RowBlock, rows: Bool[Tensor, "batch row"]) -> None:
    """Adds each row's entropy divided by the entropy of uniform attention, for rows that see several keys."""
    seen = block.visible[:, 0].sum(dim=-1)
    counted = rows & (seen > 1)
    share = block.attention.entropy / seen.clamp_min(2)[:, None].to(block.pattern).log()
    state["breadth"][block.index] += as_float64(share * counted[:, None]).sum(dim=-1).T
    state["breadth_count"][block.index] += as_float64(counted.sum(dim=-1))


def _keep_clearest(
    state: State, block: RowBlock, run: Run, block_targets: _Targets, mass: Float[Tensor, "kind head batch row"]
) -> None:
    """Stores, for each type and head, the row with the most attention on targets above that of uniform attention."""
    layer, batch = block.index, block.batch.queries(block.stack)
    above = mass - block_targets.uniform[:, None].to(mass)
    above = above.masked_fill(~block_targets.apart[:, None], -torch.inf).flatten(start_dim=2)
    best = above.max(dim=-1)
    better = best.values > state["example"][:, layer]
    if not bool(better.any()):
        return
    kind, head = better.nonzero(as_tuple=True)
    text, row = best.indices[kind, head] // len(block.rows), best.indices[kind, head] % len(block.rows)
    weights = block.pattern[text, head, row] * block_targets.by_kind[kind, text, row]
    highest = weights.max(dim=-1)
    query = row + block.rows.start
    around = (highest.indices, AROUND_KEY), (query, AROUND_QUERY)
    places = torch.cat([at[:, None] + torch.tensor(steps, device=at.device) for at, steps in around], dim=1)
    length = batch.ids.shape[1]
    inside = (places >= 0) & (places < length)
    places = places.clamp(0, length - 1)
    inside &= batch.mask[text[:, None], places]
    state["example"][kind, layer, head] = best.values[kind, head].to(state["example"])
    state["example_weight"][kind, layer, head] = highest.values.to(state["example"])
    documents = run.documents.to(text)[text]
    state["example_at"][kind, layer, head] = torch.stack((documents, query, highest.indices), dim=-1)
    state["example_ids"][kind, layer, head] = torch.where(inside, batch.ids[text[:, None], places], -1)


def _by_position_alone(block: RowBlock, run: Run) -> Float[Tensor, "batch head row key"]:
    """The pattern that the position term alone would give, with queries and keys split at each text's means."""
    parts: dict[Any, ScoreParts] = run.between
    key = HeadTypeSums, "position", block.layer
    if key not in parts:
        stacks, attn_in = run.model.stacks, block["attn_in"]
        everywhere = block.visible.new_ones(1).expand(len(block.q), 1, block.mask.queries, block.k.shape[2])
        native = ledger_of_block(stacks, block, attn_in, everywhere)
        parts[key] = centred(native, run.stack, block, block.batch, "mean", empty=True)
    width = block.scores.shape[-1]
    term = parts[key].term("position", slice(block.rows.start, block.rows.stop))
    term = term[..., :width].expand(*block.scores.shape[:3], -1)
    if block.rows.stop == block.mask.queries:
        del parts[key]
    return softmax_of(term.masked_fill(~block.visible, torch.finfo(term.dtype).min), block.sink)


def _widened(state: State, distances: int) -> State:
    beside = (distances - state["pairs"].shape[-1]) // 2
    pad = torch.nn.functional.pad
    return {
        **state,
        **{name: pad(state[name], (beside, beside)) for name in ("attended", "pairs")},
        "at_distance": pad(state["at_distance"], (0, 0, beside, beside)),
    }
