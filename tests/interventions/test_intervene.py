"""Interventions against the same change, made by hand in attention written out on the raw transformers model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import models
import pytest
import reference
import torch
from by_hand import point_changed
from comparing import require_gradient
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError, MissingPointError
from attnmech.interventions import Intervention

F32, F64 = torch.float32, torch.float64
FAMILIES = (
    "bloom", "gpt2", "llama", "llama_bias", "bert", "roberta", "gemma2", "gpt_oss", "qwen3_bias", "mistral",
    "falcon_new", "falcon_alibi_serial", "mpt3", "opt", "opt_post", "gpt_neox", "gptj",
)  # fmt: skip
HEADS = [(0, 1), (1, 2), (1, 0)]
"""Heads that all of these models have: two that share keys, and one in another layer."""
BY_LAYER = {0: [1], 1: [2, 0]}


def same(x: Any, *_: Any) -> Any:
    return x


@dataclass(frozen=True)
class ByHand:
    """The changes inside the attention of one layer; all tensors have the axes batch, head, query, key or d_head."""

    terms: Callable[[dict[str, Tensor]], dict[str, Tensor]] = same
    removed: Tensor | None = None
    """True where a key is taken from a row's softmax."""
    pattern: Callable[[Tensor, Tensor], Tensor] = same
    """Maps the pattern and the visible keys to the new pattern."""
    values: Callable[[Tensor], Tensor] = same
    z: Callable[[Tensor], Tensor] = same


def attention_by_hand(model: Any, layer: int, stream: Tensor, mask: Tensor, change: ByHand) -> Tensor:
    """z of one layer with its heads side by side, from the stream and the state dict."""
    x = reference.attention_input(model, layer, stream)
    terms = change.terms({**reference.terms(model, layer, x, mask)})
    scores = sum(value for name, value in terms.items() if name not in ("mask", "softcap"))
    assert isinstance(scores, Tensor)
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    allowed = seen = reference.visible(model, mask, layer).expand_as(scores)
    if change.removed is not None:
        allowed = seen & ~change.removed
    weights = torch.where(allowed, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    sinks = model.state_dict().get(f"model.layers.{layer}.self_attn.sinks")
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    pattern = change.pattern(torch.where(total > 0, weights / total, 0.0), seen)
    w = reference.layer_weights(model, layer)
    v = reference.project(x, w.W_V, w.b_V).transpose(1, 2)
    v = change.values(v.repeat_interleave(len(w.W_Q) // len(w.W_K), dim=1))
    return change.z(pattern @ v).transpose(1, 2).flatten(2)


@contextmanager
def attending_by_hand(model: Any, mask: Tensor, changes: dict[int, ByHand]) -> Iterator[None]:
    """The raw model, with z of some layers computed by hand and passed to the output projection."""
    streams: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            streams[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    def put(layer: int, change: ByHand) -> Any:
        def hook(module: nn.Module, args: Any) -> Any:
            return (attention_by_hand(model, layer, streams[layer], mask, change).reshape(args[0].shape),)

        return hook

    with ExitStack() as until:
        for layer, change in changes.items():
            block = models.blocks_of(model)[layer]
            out = block.get_submodule(reference._place(model).out)
            until.callback(block.register_forward_pre_hook(keep(layer), with_kwargs=True).remove)
            until.callback(out.register_forward_pre_hook(put(layer, change)).remove)
        yield


def inputs_of(name: str, side: str = "none") -> dict[str, Tensor]:
    if side == "none":
        ids = models.token_ids(name)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return models.padded(name, side)


def side_of(name: str, shift: int) -> str:
    """The side on which a family's texts are padded: each test covers all sides, and each family alternates."""
    return ("none", "right", "left")[(FAMILIES.index(name) + shift) % 3]


def as_inputs(inputs: dict[str, Tensor]) -> Any:
    return inputs if not bool(inputs["attention_mask"].all()) else inputs["input_ids"]


def check(
    name: str,
    interventions: Sequence[Intervention],
    changes: dict[int, ByHand],
    side: str = "none",
    dtype: torch.dtype = F32,
    moves: bool = True,
) -> Tensor:
    """The logits of all real tokens equal those computed by hand, and differ from those without a change."""
    hooked, plain = models.hooked(name, dtype), models.plain(name, dtype)
    inputs = inputs_of(name, side)
    real = inputs["attention_mask"].bool()
    with hooked.intervene(*interventions):
        found = hooked.run(as_inputs(inputs)).logits
    with torch.no_grad(), attending_by_hand(plain, inputs["attention_mask"], changes):
        expected = plain(**inputs).logits
    tolerance = 2e-4 if dtype == F32 else 2e-6
    torch.testing.assert_close(found[real], expected[real], rtol=tolerance, atol=tolerance)
    if moves:
        assert float((found - clean_logits(name, side, dtype))[real].abs().max()) > 20 * tolerance
    return found


@cache
def clean_logits(name: str, side: str, dtype: torch.dtype) -> Tensor:
    return models.hooked(name, dtype).run(as_inputs(inputs_of(name, side))).logits


def in_heads(heads: Sequence[int], change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def some(x: Tensor, *more: Tensor) -> Tensor:
        x = x.clone()
        x[:, heads] = change(x, *more)[:, heads].to(x)
        return x

    return some


def in_rows(rows: Sequence[int] | Tensor | None, change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Restricts a change to some rows: the same of all texts, or True where `rows [batch position]` is."""

    def some(x: Tensor, *more: Tensor) -> Tensor:
        new = change(x, *more).to(x)
        if isinstance(rows, Tensor):
            return torch.where(rows[:, None, :, None], new, x)
        chosen = slice(None) if rows is None else list(rows)
        x = x.clone()
        x[:, :, chosen] = new[:, :, chosen]
        return x

    return some


def own(mask: Tensor, positions: Sequence[int] | None) -> Tensor:
    """True at these positions of each text, counted in its real tokens: `[batch position]`."""
    chosen = torch.zeros_like(mask, dtype=torch.bool)
    for row, real in enumerate(mask):
        chosen[row, real.nonzero()[:, 0][slice(None) if positions is None else list(positions)]] = True
    return chosen


def first_keys(mask: Tensor) -> Tensor:
    """True at the first real token: `[batch 1 1 key]`."""
    first = torch.zeros_like(mask, dtype=torch.bool)
    for row, given in enumerate(mask.tolist()):
        first[row, given.index(1)] = True
    return first[:, None, None]


def test_the_hand_made_attention_is_that_of_transformers() -> None:
    for name in FAMILIES:
        for side in ("none", "right", "left"):
            plain, inputs = models.plain(name), inputs_of(name, side)
            real = inputs["attention_mask"].bool()
            with torch.no_grad():
                expected = plain(**inputs).logits[real]
                with attending_by_hand(plain, inputs["attention_mask"], {0: ByHand(), 1: ByHand()}):
                    torch.testing.assert_close(plain(**inputs).logits[real], expected, rtol=1e-4, atol=1e-4)


# -- the pattern ---------------------------------------------------------------------------------------------


def uniform(pattern: Tensor, seen: Tensor) -> Tensor:
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


def itself(pattern: Tensor, seen: Tensor) -> Tensor:
    return torch.eye(pattern.shape[-1]).expand_as(pattern)


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_set_to_uniform_self_and_first(name: str) -> None:
    side = side_of(name, 0)
    mask = inputs_of(name, side)["attention_mask"]
    first = first_keys(mask)
    for to, made in (("uniform", uniform), ("self", itself), ("first", lambda p, seen: first.expand_as(p).float())):
        for rows in (None, (1, 2, -1)) if to == "uniform" else (None,):
            changes = {
                layer: ByHand(pattern=in_heads(heads, in_rows(own(mask, rows), made)))
                for layer, heads in BY_LAYER.items()
            }
            check(name, [Intervention.attend(HEADS, to, positions=rows)], changes, side)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_reweighted(name: str) -> None:
    """By hand: ln(factor) is added to the scores of the keys before the softmax, beside sinks and soft caps."""
    side = side_of(name, 2)
    mask = inputs_of(name, side)["attention_mask"]
    for keys, where in (("first", first_keys(mask)), ([1, -1], own(mask, [1, -1])[:, None, None])):
        for factor, rows in ((6.0, None), (0.25, (2, -1)), (0.0, (0, -1))):

            def made(pattern: Tensor, seen: Tensor, where: Tensor = where, factor: float = factor) -> Tensor:
                # Odds against all other keys, and against the sink, are multiplied by the factor.
                mine = torch.where(where, pattern, 0.0).sum(-1, keepdim=True)
                rest = torch.where(where, 0.0, pattern).sum(-1, keepdim=True)
                sunk = 1 - mine - rest if name == "gpt_oss" else 0.0
                shares = factor * mine + rest + sunk
                return pattern * torch.where(where, factor, 1.0) / torch.where(shares > 0, shares, 1.0)

            changes = {
                layer: ByHand(pattern=in_heads(heads, in_rows(own(mask, rows), made)))
                for layer, heads in BY_LAYER.items()
            }
            check(name, [Intervention.reweight(HEADS, keys, factor, positions=rows)], changes, side)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gpt_oss"])
@pytest.mark.parametrize("raised", [-16.0, 10.0, 14.0, 20.0, 40.0])
def test_reweighted_rows_beside_a_key_with_nearly_all_or_none(name: str, raised: float) -> None:
    """By hand: ln(factor) is added to the scores in float64, where 1 - p loses nothing, beside the sink's logit."""
    hooked, ids = models.hooked(name), models.token_ids(name)
    one, both = [(1, 2)], ["scores", "pattern"]

    def higher(scores: Tensor) -> Tensor:
        return torch.cat((scores[..., :1] + raised, scores[..., 1:]), dim=-1)

    def exact(scores: Tensor, added: Tensor) -> Tensor:
        scores = scores[:, 2].double() + added
        if name != "gpt_oss":
            return scores.softmax(dim=-1)
        sink = models.plain(name).model.layers[1].self_attn.sinks[2].detach().double().expand(*scores.shape[:2], 1)
        return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]

    for factors in ([0.25], [1e-7], [3e4], [1e-5, 1e3]):
        changes = [Intervention.reweight(one, "first", factor) for factor in factors]
        with hooked.hooks({("scores", 1): higher}), hooked.intervene(*changes):
            acts = hooked.run(ids, both, layers=[1])
        added = torch.zeros(ids.shape[1], dtype=torch.float64)
        added[0] = sum(torch.tensor(factor, dtype=torch.float64).log() for factor in factors)
        expected = exact(acts["scores", 1], added)[:, 1:]
        torch.testing.assert_close(acts["pattern", 1][:, 2, 1:].double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.core
@pytest.mark.parametrize("name", FAMILIES)
def test_keys_removed_and_spans_cut(name: str) -> None:
    side = side_of(name, 1)
    mask = inputs_of(name, side)["attention_mask"]
    batch, length = mask.shape
    random = torch.rand(batch, length, generator=torch.Generator().manual_seed(4)) < 0.4
    heads = len(reference.layer_weights(models.plain(name), 0).W_Q)
    first, chosen = first_keys(mask), own(mask, [1, -2])[:, None, None]
    spans = own(mask, [1, 2])[:, None, :, None] & own(mask, [0, 1])[:, None, None]  # row 1 keeps no key
    for change, cells in (
        (Intervention.remove_keys(HEADS, "first"), first),
        (Intervention.remove_keys(HEADS, [1, -2]), chosen),
        (Intervention.remove_keys(HEADS, [1, -2], positions=(2, -1)), chosen & own(mask, (2, -1))[:, None, :, None]),
        (Intervention.remove_keys(HEADS, random), random[:, None, None]),
        (Intervention.cut((1, 3), (0, 2), HEADS), spans),
    ):
        removed = {}
        for layer, some in BY_LAYER.items():
            gone = torch.zeros(batch, heads, length, length, dtype=torch.bool)
            gone[:, some] = cells
            removed[layer] = ByHand(removed=gone)
        check(name, [change], removed, side, moves=cells is not first)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gpt_oss"])
def test_a_row_without_a_key_attends_to_nothing(name: str) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    with hooked.intervene(Intervention.remove_keys([(1, 2)], torch.ones_like(ids, dtype=torch.bool))):
        acts = hooked.run(ids, points=["pattern", "z"])
    assert not bool(acts["pattern", 1][:, 2].any())
    assert not bool(acts["z", 1][:, :, 2].any())
    assert bool(acts["pattern", 1][:, 1].any(dim=-1).all())
    clean = hooked.run(ids, points=["pattern"])
    assert torch.equal(clean["pattern", 1][:, :2], acts["pattern", 1][:, :2])
    with hooked.intervene(Intervention.remove_keys([(1, 2)], "first")):
        pattern = hooked.run(ids, points=["pattern"])["pattern", 1][:, 2]
    if hooked.causal:
        assert not bool(pattern[:, 0].any())
    sums = pattern[:, 1:].sum(-1)
    if name == "gpt_oss":
        # The sink stays in the denominator, and shares the first key's weight with the other keys.
        was = clean["pattern", 1][:, 2, 1:]
        torch.testing.assert_close(pattern[:, 1:, 1:], was[..., 1:] / (1 - was[..., :1]))
        assert bool((sums < 1).all())
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama_bias", "bert", "gemma2", "gpt_oss", "opt"])
def test_the_pattern_of_another_run(name: str) -> None:
    hooked, other = models.hooked(name), models.token_ids(name, seed=8)
    with torch.no_grad():
        theirs = models.plain(name)(other, output_attentions=True).attentions
    acts = hooked.run(other, points=["pattern"])
    values = {layer: acts["pattern", layer] for layer in (0, 1)}
    changes = {
        layer: ByHand(pattern=in_heads(heads, lambda p, seen, layer=layer: theirs[layer]))
        for layer, heads in BY_LAYER.items()
    }
    check(name, [Intervention.replace(HEADS, values, point="pattern")], changes)
    changes = {
        layer: ByHand(pattern=in_heads(heads, in_rows((4, 6), lambda p, seen, layer=layer: theirs[layer][:1])))
        for layer, heads in BY_LAYER.items()
    }
    one = {layer: acts["pattern", layer][:1] for layer in (0, 1)}
    check(name, [Intervention.replace(HEADS, one, point="pattern", positions=[6, 4])], changes)


# -- the terms of the scores -----------------------------------------------------------------------------------


def scaled(name: str, factor: float, heads: Sequence[int]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(terms: dict[str, Tensor]) -> dict[str, Tensor]:
        by = torch.ones(terms["query_key"].shape[1], dtype=terms["query_key"].dtype)
        by[list(heads)] = factor
        return {**terms, name: terms[name] * by[:, None, None]}

    return change


@pytest.mark.parametrize("name", FAMILIES)
def test_terms_of_the_scores_scaled(name: str) -> None:
    plain, ids = models.plain(name), models.token_ids(name)
    stream = torch.zeros(*ids.shape, reference.layer_weights(plain, 0).W_Q[0].shape[0])
    there = set(reference.terms(plain, 0, stream, torch.ones_like(ids))) - {"mask", "softcap"}
    rotary_or_capped = reference.turns(plain, 7, F32) is not None or name in ("gemma2", "gpt_oss")
    for term in sorted(there):
        inert = term in ("query_bias", "constant") and not rotary_or_capped
        for factor, side in ((0.0, side_of(name, 0)), (-1.5, side_of(name, 1))):
            changes = {layer: ByHand(terms=scaled(term, factor, heads)) for layer, heads in BY_LAYER.items()}
            check(name, [Intervention.scale(term, factor, HEADS)], changes, side, moves=not inert)
    missing = {"query_key", "key_bias", "query_bias", "constant", "position"} - there
    for term in missing:
        hooked = models.hooked(name)
        shown = ", ".join(
            each for each in ("query_key", "key_bias", "query_bias", "constant", "position") if each in there
        )
        said = f"{term} in the scores of all heads is dropped: .* have no such term; they have {shown}"
        with pytest.raises(InputError, match=said), hooked.intervene(Intervention.scale(term)):
            hooked.run(ids)


# -- single values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_single_heads_at_keys(name: str) -> None:
    side = side_of(name, 2)
    mask = inputs_of(name, side)["attention_mask"]
    batch, length = mask.shape
    w = reference.layer_weights(models.plain(name), 0)
    generator = torch.Generator().manual_seed(4)
    random = torch.rand(batch, length, generator=generator) < 0.4
    new = {layer: torch.randn(batch, length, len(w.W_Q), w.d_head, generator=generator) for layer in (0, 1)}
    pooled = {layer: value[:1, :1] for layer, value in new.items()}
    for keys, where in (("first", first_keys(mask)[:, 0, 0]), ([0, 2], own(mask, [0, 2])), (random, random)):
        at = where[:, None, :, None]

        def zeroed(v: Tensor, at: Tensor = at) -> Tensor:
            return torch.where(at, 0.0, v)

        moves = keys != "first" or side != "left"
        changes = {layer: ByHand(values=in_heads(heads, zeroed)) for layer, heads in BY_LAYER.items()}
        check(name, [Intervention.zero_values(HEADS, keys)], changes, side, moves=moves)  # type: ignore[arg-type]
        given = pooled if keys is random else new

        def replaced(v: Tensor, layer: int, at: Tensor = at, given: dict[int, Tensor] = given) -> Tensor:
            return torch.where(at, given[layer].transpose(1, 2), v)

        changes = {
            layer: ByHand(values=in_heads(heads, lambda v, layer=layer, replaced=replaced: replaced(v, layer)))
            for layer, heads in BY_LAYER.items()
        }
        check(name, [Intervention.replace_values(HEADS, keys, given)], changes, side, moves=moves)  # type: ignore[arg-type]


def test_values_as_a_run_gives_them_are_those_of_the_shared_heads() -> None:
    """acts["v", l] has one entry for each group of heads."""
    name = "llama"
    hooked, other = models.hooked(name), models.token_ids(name, seed=8)
    acts = hooked.run(other, points=["v"])
    w = reference.layer_weights(models.plain(name), 1)
    with torch.no_grad():
        stream = models.plain(name)(other, output_hidden_states=True).hidden_states[1]
    v = reference.project(reference.attention_input(models.plain(name), 1, stream), w.W_V, None)
    theirs = v.transpose(1, 2).repeat_interleave(3, dim=1)
    change = ByHand(values=in_heads([4, 1], lambda x: torch.cat([theirs[:, :, :3], x[:, :, 3:]], dim=2)))
    check(name, [Intervention.replace_values([(1, 4), (1, 1)], [0, 1, 2], {1: acts["v", 1]})], {1: change})


# -- z, and the stream -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "gemma2", "opt", "opt_post", "falcon_new", "gptj", "bloom", "mpt3", "gpt_oss"]
)
def test_the_stream_and_what_layers_add_to_it(name: str) -> None:
    hooked, plain, inputs = models.hooked(name), models.plain(name), inputs_of(name, side_of(name, 1))
    real = inputs["attention_mask"].bool()
    generator = torch.Generator().manual_seed(0)
    values = {layer: torch.randn(3, 7, hooked.d_model, generator=generator) for layer in (0, 1)}
    clean = hooked.run(inputs).logits
    for point in ("resid_pre", "attn_out", "mlp_out"):
        for layers in ((1,), (1, 0)):
            for rows in (None, (2, -2)):
                for new in (values, {layer: x[:1, :1] for layer, x in values.items()}, None):
                    if new is None and point == "resid_pre":
                        continue

                    def changed(value: Tensor, layer: int, rows: Any = rows, new: Any = new) -> Tensor:
                        flat = value.reshape(3, 7, -1).clone()
                        put = torch.zeros_like(flat) if new is None else new[layer].expand_as(flat)
                        return torch.where(own(real, rows)[..., None], put, flat).reshape(value.shape)

                    with ExitStack() as until, torch.no_grad():
                        for layer in layers:
                            by_hand = partial(changed, layer=layer)
                            until.enter_context(point_changed(plain, point, layer, by_hand))
                        expected = plain(**inputs).logits
                    with hooked.intervene(Intervention.stream(point, layers, new, positions=rows)):  # type: ignore[arg-type]
                        found = hooked.run(inputs).logits
                    torch.testing.assert_close(found[real], expected[real], rtol=2e-4, atol=2e-4)
                    assert float((found - clean)[real].abs().max()) > 1e-2


# -- several together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", F32), ("bloom", F64), ("bert", F64), ("llama_bias", F32)])
def test_several_in_several_layers(name: str, dtype: torch.dtype) -> None:
    mask = inputs_of(name, "right")["attention_mask"]
    heads = len(reference.layer_weights(models.plain(name), 0).W_Q)
    removed = torch.zeros(3, heads, 7, 7, dtype=torch.bool)
    removed[:, 1, :, 2] = True
    changes = {
        0: ByHand(
            terms=scaled("key_bias", 0.0, [0, 2]),
            removed=removed,
            pattern=in_heads([0], uniform),
            values=in_heads([2, 1], lambda v: torch.where(first_keys(mask).mT, 0.0, v)),
        ),
        1: ByHand(terms=scaled("query_key", 0.5, range(heads)), z=in_heads([1], in_rows([2], torch.zeros_like))),
    }
    together = [
        Intervention.zero([(1, 1)], positions=[2]),
        Intervention.zero_values([(0, 2), (0, 1)], "first"),
        Intervention.remove_keys([(0, 1)], [2]),
        Intervention.attend([(0, 0)], "uniform"),
        Intervention.scale("query_key", 0.5, [(1, head) for head in range(heads)]),
        Intervention.scale("key_bias", 0.0, [(0, 2), (0, 0)]),
    ]
    check(name, together, changes, "right", dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama_bias"])
def test_what_is_done_twice_is_done_in_turn(name: str) -> None:
    """Dropping a term or a value twice drops it once; factors multiply; the last of two values counts."""
    hooked, ids = models.hooked(name), models.token_ids(name)

    def under(*interventions: Intervention) -> Tensor:
        with hooked.intervene(*interventions):
            return hooked.run(ids).logits

    dropped, everywhere = Intervention.scale("key_bias", 0.0, [(0, 1)]), Intervention.scale("key_bias")
    torch.testing.assert_close(under(everywhere, dropped), under(everywhere), rtol=1e-6, atol=1e-6)
    halves = Intervention.scale("query_key", 0.5), Intervention.scale("query_key", 0.5, [(1, 2)])
    halved = scaled("query_key", 0.5, range(_heads(name)))
    twice = ByHand(terms=lambda terms: scaled("query_key", 0.5, [2])(halved(terms)))
    check(name, halves, {0: ByHand(terms=halved), 1: twice, 2: ByHand(terms=halved)})
    zeroed, gone = Intervention.zero_values([(0, 1), (0, 2)], "first"), Intervention.remove_keys([(1, 1)], [0])
    ones = Intervention.stream("mlp_out", [1], {1: torch.ones(1, 1, hooked.d_model)})
    values = {0: torch.ones(1, 1, _heads(name), hooked.d_head)}
    replaced = Intervention.replace_values([(0, 1), (0, 2)], [0, 3], values)
    apart = Intervention.zero([(1, 1)]), Intervention.zero([(1, 2)], positions=[0, 3]), Intervention.zero([(1, 2)])
    for several, one in (
        ((dropped, dropped), dropped),
        ((zeroed, Intervention.zero_values([(0, 1)], [0])), zeroed),
        ([Intervention.zero_values([(0, 1)], [key]) for key in (0, 2)], Intervention.zero_values([(0, 1)], [0, 2])),
        (apart, Intervention.zero([(1, 2), (1, 1)])),
        ((Intervention.stream("mlp_out", [1]), ones), ones),
        ((zeroed, replaced), replaced),
        ((gone, gone), gone),
        ((gone, Intervention.remove_keys([(1, 1)], [2])), Intervention.remove_keys([(1, 1)], [2, 0])),
    ):
        assert torch.equal(under(*several), under(one)), one
    assert not torch.equal(under(replaced, zeroed), under(replaced))
    with hooked.intervene(dropped), hooked.intervene(dropped):
        assert torch.equal(hooked.run(ids).logits, under(dropped))


def _heads(name: str) -> int:
    return len(reference.layer_weights(models.plain(name), 0).W_Q)


def test_uniform_is_uniform_over_the_keys_that_are_left() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    for order in (1, -1):
        given = [Intervention.remove_keys([(1, 2)], [0]), Intervention.attend([(1, 2)], "uniform")][::order]
        with hooked.intervene(*given):
            pattern = hooked.run(ids, points=["pattern"])["pattern", 1][:, 2]
        for row in range(7):
            expected = [0.0] + [1 / row if row else 0.0] * row + [0.0] * (6 - row)
            torch.testing.assert_close(pattern[0, row], torch.tensor(expected))


# -- nothing -----------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("name", FAMILIES)
def test_what_changes_nothing_changes_no_bit(name: str) -> None:
    hooked = models.hooked(name)
    inputs = as_inputs(inputs_of(name, side_of(name, 0)))
    clean = hooked.run(inputs, points=["z", "pattern", "v", "resid_pre", "attn_out", "mlp_out", "logits"])

    def of(point: str) -> dict[int, Tensor]:
        return {layer: clean[point, layer] for layer in range(hooked.n_layers)}

    for nothing in (
        [],
        [Intervention.scale("query_key", 1.0)],
        [Intervention.replace("all", of("z"))],
        [Intervention.replace("all", of("pattern"), point="pattern")],
        [Intervention.replace_values("all", [0, 1, 2], of("v"))],
        *(
            [Intervention.stream(each, range(hooked.n_layers), of(each))]
            for each in ("resid_pre", "attn_out", "mlp_out")
        ),  # type: ignore[arg-type]
        [Intervention.remove_keys("all", torch.zeros(1, 7, dtype=torch.bool))],
        [Intervention.zero_values("all", torch.zeros(1, 7, dtype=torch.bool))],
    ):
        with hooked.intervene(*nothing):
            assert torch.equal(hooked.run(inputs).logits, clean.logits), nothing


# -- rows in blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "gemma2", "t5"])
def test_rows_in_blocks_are_rows_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.model.attention import attend as attention

    hooked = models.hooked(name)
    ids = models.token_ids(name, length=40)
    inputs: Any = {"input_ids": ids[:, :18], "decoder_input_ids": ids} if name == "t5" else ids
    stack = "cross" if name == "t5" else ""
    pattern = torch.rand(3, hooked.n_heads, 40, 18 if stack else 40)
    cases = [
        Intervention.attend([(0, 1)], "uniform", positions=[3, 17, 39], stack=stack),
        Intervention.attend([(1, 1)], "first", stack=stack),
        Intervention.reweight([(1, 1), (0, 0)], [1, 16], 4.0, positions=[20, 39], stack=stack),
        Intervention.remove_keys([(0, 1), (1, 0)], [0, 17, 3], positions=[20, 39], stack=stack),
        Intervention.zero_values([(0, 2)], [1, 16], stack=stack),
        Intervention.scale("query_key", 0.3, [(1, 1)], stack=stack),
        Intervention.replace([(0, 1)], {0: pattern}, point="pattern", positions=[5, 33], stack=stack),
    ]
    if not stack:
        cases.append(Intervention.attend([(1, 1)], "self"))
    if name == "bloom":
        cases.append(Intervention.scale("position", 0.0, [(1, 1)]))
    for each in cases:
        with hooked.intervene(each):
            whole = hooked.run(inputs).logits
            with monkeypatch.context() as patch:
                patch.setattr(attention, "block_bytes", lambda device: 1)
                blocks = hooked.run(inputs).logits
        torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "block_bytes", lambda device: 1)
        beyond = Intervention.attend("all", "uniform", positions=[40], stack=stack)
        with pytest.raises(InputError, match="position 40 is not in every text"), hooked.intervene(beyond):
            hooked.run(inputs)


# -- several stacks --------------------------------------------------------------------------------------------------


def t5_by_hand(layer: int, stack: str, inputs: dict[str, Tensor], change: Callable[..., Tensor]) -> Tensor:
    """Logits of the raw T5, with z of one attention computed by `change` from its query_key, position and v."""
    plain = models.plain("t5")
    block = (plain.encoder if stack == "encoder" else plain.decoder).block[layer]
    attention = block.layer[1].EncDecAttention if stack == "cross" else block.layer[0].SelfAttention
    bias = plain.encoder.block[0].layer[0].SelfAttention.compute_bias
    seen: dict[str, Tensor] = {}

    def heads(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight.T).unflatten(-1, (4, 5)).transpose(1, 2)

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["y"] = kwargs.get("key_value_states", seen["x"])

    def put(module: nn.Module, args: Any) -> Any:
        q, k, v = (
            heads(seen[of], getattr(attention, name).weight) for of, name in (("x", "q"), ("y", "k"), ("y", "v"))
        )
        position = bias(q.shape[2], k.shape[2]) if stack == "encoder" else torch.zeros(1, 1, 1, 1)
        return (change(q @ k.mT, position, v).transpose(1, 2).flatten(2),)

    with ExitStack() as until, torch.no_grad():
        until.callback(attention.register_forward_pre_hook(keep, with_kwargs=True).remove)
        until.callback(attention.o.register_forward_pre_hook(put).remove)
        return plain(**inputs).logits


def test_encoder_and_cross_attention_of_t5() -> None:
    hooked, inputs = models.hooked("t5"), models.inputs_of("t5")
    mask = inputs["attention_mask"].bool()[:, None, None]
    clean = hooked.run(inputs).logits

    def attended(scores: Tensor, hidden: Tensor | None = None) -> Tensor:
        seen = mask if hidden is None else mask & ~hidden
        return torch.where(seen, scores, -torch.inf).softmax(-1)

    def some(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The change in head 2 only."""

        def z(products: Tensor, position: Tensor, v: Tensor) -> Tensor:
            usual = attended(products + position) @ v
            usual[:, 2] = change(products, position, v)[:, 2]
            return usual

        return z

    first = torch.arange(7) == 0
    rows = mask / mask.sum(-1, keepdim=True)
    for stack in ("encoder", "cross"):
        at: Any = {"stack": stack}
        cases = [
            (Intervention.attend([(1, 2)], "uniform", **at), lambda p, b, v: rows @ v + 0 * p[..., :1]),
            (Intervention.attend([(1, 2)], "first", **at), lambda p, b, v: v[:, :, :1] + 0 * p[..., :1]),
            (Intervention.remove_keys([(1, 2)], "first", **at), lambda p, b, v: attended(p + b, first) @ v),
            (Intervention.scale("query_key", 0.0, [(1, 2)], **at), lambda p, b, v: attended(0 * p + b) @ v),
            (
                Intervention.zero_values([(1, 2)], "first", **at),
                lambda p, b, v: attended(p + b) @ torch.where(first[:, None], 0.0, v),
            ),
        ]
        if stack == "encoder":
            cases.append((Intervention.scale("position", 0.0, [(1, 2)], **at), lambda p, b, v: attended(p) @ v))
        for intervention, change in cases:
            with hooked.intervene(intervention):
                found = hooked.run(inputs).logits
            assert hooked.edited == ()
            torch.testing.assert_close(found, t5_by_hand(1, stack, inputs, some(change)), rtol=1e-4, atol=1e-4)
            assert float((found - clean).abs().max()) > 1e-3, intervention


# -- what others see -------------------------------------------------------------------------------------------------


def test_captured_points_and_observers_see_what_is_changed() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    blocks: dict[int, Any] = {}
    given = [
        Intervention.attend([(1, 2)], "self"),
        Intervention.replace([(1, 3)], {1: torch.full((1, 1, 5, 4), 0.25)}),
        Intervention.stream("mlp_out", [0]),
        Intervention.remove_keys([(2, 0)], [0]),
    ]
    with hooked.intervene(*given):
        acts = hooked.run(ids, points=["pattern", "z", "mlp_out", "v"])
        hooked.forward(hooked.encode(ids), rows=[lambda block: blocks.__setitem__(block.layer, block)])
        focus = am.attention_focus(hooked, ids)
    assert torch.equal(acts["pattern", 1][:, 2], torch.eye(7).expand(3, -1, -1))
    assert bool((acts["z", 1][:, :, 3] == 0.25).all())
    torch.testing.assert_close(acts["z", 1][:, :, 2], acts["v", 1][:, :, 2])
    assert not bool(acts["mlp_out", 0].any())
    assert bool((acts["pattern", 2][:, 0, :, 0] == 0).all())
    assert not bool(acts["pattern", 2][:, 0, 0].any())
    torch.testing.assert_close(blocks[1].pattern, acts["pattern", 1])
    torch.testing.assert_close(blocks[2].pattern, acts["pattern", 2])
    assert focus.provenance.edits == tuple(map(str, given))
    assert float(focus.to_frame().query("layer == 1 and head == 2")["self_mass"].iloc[0]) == 1
    assert am.attention_focus(hooked, ids).provenance.edits == ()


def test_hooks_come_after_interventions_at_the_same_point() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    seen: dict[str, Tensor] = {}

    def look(name: str) -> Callable[[Tensor], Tensor]:
        def hook(value: Tensor) -> Tensor:
            seen[name] = value.clone()
            return value + 1

        return hook

    given = [Intervention.zero([(1, 2)]), Intervention.attend([(1, 0)], "uniform"), Intervention.stream("mlp_out", [1])]
    hooks = {(name, 1): look(name) for name in ("z", "pattern", "mlp_out")}
    with hooked.hooks(hooks), hooked.intervene(*given):
        assert hooked.edited == ("mlp_out 1", "pattern 1", "z 1", *map(str, given))
        acts = hooked.run(ids, points=["z", "pattern", "mlp_out"])
    assert not bool(seen["z"][:, :, 2].any()) and bool(seen["z"][:, :, 1].any())
    torch.testing.assert_close(seen["pattern"][0, 0, 3], torch.tensor([0.25] * 4 + [0.0] * 3))
    assert not bool(seen["mlp_out"].any())
    for name, value in seen.items():
        assert torch.equal(acts[name, 1], value + 1)
    # The values that single heads read are changed after v, which heads may share.
    with hooked.hooks({("v", 1): lambda v: v * 0 + 1}), hooked.intervene(Intervention.zero_values([(1, 2)], [0])):
        acts = hooked.run(ids, points=["v", "z", "pattern"])
    assert bool((acts["v", 1] == 1).all())
    torch.testing.assert_close(acts["z", 1][:, :, 2, 0], 1 - acts["pattern", 1][:, 2, :, 0])
    torch.testing.assert_close(acts["z", 1][:, :, 3], torch.ones(3, 7, 4))


def test_a_hook_keeps_what_it_returned() -> None:
    """Removed keys are hidden in a copy: a tensor that a hook returns remains the caller's."""
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    scores = hooked.run(ids, points=["scores"])["scores", 1]
    before = scores.clone()
    with hooked.hooks({("scores", 1): lambda _: scores}), hooked.intervene(Intervention.remove_keys([(1, 0)], [1])):
        acts = hooked.run(ids, points=["scores", "pattern"])
    assert torch.equal(scores, before)
    assert torch.equal(acts["scores", 1], before)
    assert not bool(acts["pattern", 1][:, 0, :, 1].any())


def test_nothing_stays_behind() -> None:
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    clean = hooked.run(ids).logits
    one, other = Intervention.zero([(0, 1)]), Intervention.attend([(1, 2)], "self")
    with hooked.intervene(one) as same_model:
        assert same_model is hooked
        only = hooked.run(ids).logits
        with hooked.intervene(other):
            both = hooked.run(ids).logits
            assert hooked.edited == (str(one), str(other))
        assert hooked.edited == (str(one),)
        assert torch.equal(hooked.run(ids).logits, only)
    assert torch.equal(hooked.run(ids).logits, clean)
    with hooked.intervene(one, other):
        assert torch.equal(hooked.run(ids).logits, both)
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), hooked.intervene(one), hooked.intervene(other):
            raise error
        assert hooked.edited == ()
        assert torch.equal(hooked.run(ids).logits, clean)
    with pytest.raises(InputError), hooked.intervene(one, Intervention.zero([(0, 9)])):
        pass
    with pytest.raises(InputError), hooked.intervene(one, Intervention.attend("all", "self", positions=[7])):
        hooked.run(ids)
    assert torch.equal(hooked.run(ids).logits, clean)
    first, second = hooked.intervene(one), hooked.intervene(other)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert hooked.edited == (str(other),)
    second.__exit__(None, None, None)
    assert torch.equal(hooked.run(ids).logits, clean)


@pytest.mark.parametrize("name", ["gpt2", "llama_bias"])
def test_gradients_under_interventions_against_finite_differences(name: str) -> None:
    hooked, ids = models.hooked(name, F64), models.token_ids(name, 2, 5)
    given = [
        Intervention.scale("key_bias", 0.3, [(1, 1)]),
        Intervention.remove_keys([(1, 2)], [1]),
        Intervention.zero_values([(1, 3)], "first"),
        Intervention.zero([(1, 0)]),
    ]
    weight = torch.randn(hooked.run(ids).logits.shape, generator=torch.Generator().manual_seed(5), dtype=F64)

    def measure(logits: Tensor) -> Tensor:
        return (torch.tanh(logits / 3) * weight).sum(dim=(1, 2))

    step, tolerance = (1e-3, 2e-3) if "llama" in name else (1e-6, 1e-6)
    with hooked.intervene(*given):
        points: list[Any] = [("attn_in", 1), ("resid_pre", 1), ("v", 1), ("scores", 1), ("pattern", 1), ("z", 1)]
        for key in points:
            require_gradient(hooked, ids, key, measure, step=step, relative=tolerance)
        for point in ("q", "k"):
            with pytest.raises(InputError, match=f"gradients at '{point}' 1 would miss them"):
                hooked.run(ids, points=[(point, 1)], gradients_of=measure)
            said = f"a hook at '{point}' 1 changes the terms of the scores"
            with hooked.hooks({(point, 1): lambda x: x * 2}), pytest.raises(InputError, match=said):
                hooked.run(ids)
    assert hooked.run(ids, points=[("q", 1)], gradients_of=measure).gradients is not None


def test_special_tokens() -> None:
    hooked = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(has_bos=True))
    ids = torch.tensor([[2, 5, 1, 6, 7], [5, 2, 6, 9, 0]])
    inputs = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])}
    # Token 1 stands for words that the vocabulary lacks, so it is not special.
    places = torch.tensor([[True, False, False, False, False], [False, True, False, False, False]])
    for make in (Intervention.remove_keys, Intervention.zero_values):
        with hooked.intervene(make([(1, 2)], "special")):
            special = hooked.run(inputs).logits
        with hooked.intervene(make([(1, 2)], places)):
            assert torch.equal(hooked.run(inputs).logits, special)
        assert not torch.equal(hooked.run(inputs).logits, special)


# -- what is refused -------------------------------------------------------------------------------------------------


def stated(*shape: int) -> dict[int, Tensor]:
    return {1: torch.zeros(shape)}


BEFORE_A_RUN: Any = [
    ("gpt2", Intervention.zero([(3, 0)]), r"`layer` must be from 0 to 2 \(this model has 3 layers\); got 3"),
    ("gpt2", Intervention.zero([(0, 5)]), r"`head` must be from 0 to 4 .*; got 5"),
    ("gpt2", Intervention.stream("mlp_out", [3]), r"`layer` must be from 0 to 2"),
    ("jamba", Intervention.zero([(0, 0)]), r"one of 1, 3 \(the layers of this model with attention\); got 0"),
    ("gpt2", Intervention.zero([(0, 0)], stack="encoder"), r"`stack` must be one of 'self' .*; got 'encoder'"),
    ("t5", Intervention.zero([(0, 0)]), r"`stack` must be one of 'encoder', 'decoder', 'cross' on this model"),
    ("t5", Intervention.attend("all", "self", stack="cross"), "in cross-attention, no key is the query token itself"),
    ("t5", Intervention.stream("mlp_out", [0], stack="cross"), "the cross stack has no MLP"),
    ("gpt2", Intervention.remove_keys("all", "special"), "loaded with a tokenizer"),
    ("gpt2", Intervention.replace([(2, 0)], stated(1, 1, 5, 4)), "there are values for layers \\[1\\], but none for 2"),
    ("gpt2", Intervention.replace([(1, 0)], stated(1, 1, 4, 4)),
     r"its values must be \[batch position head=5 d_head=4\]; those for layer 1 are \[1, 1, 4, 4\]"),
    ("gpt2", Intervention.replace([(1, 0)], stated(5, 4)), r"must be \[batch position head=5 d_head=4\]"),
    ("gpt2", Intervention.replace([(1, 0)], stated(1, 1, 7, 7), point="pattern"),
     r"its values must be \[batch head=5 query key\]; those for layer 1 are \[1, 1, 7, 7\]"),
    ("llama", Intervention.replace_values([(1, 0)], "first", stated(1, 1, 3, 8)), r"kv_head=2 d_head=8\]"),
    ("llama", Intervention.replace([(1, 3)], stated(1, 1, 2, 8), point="k"), "`kv_head` must be from 0 to 1"),
    ("llama", Intervention.replace([(1, 1)], stated(1, 1, 6, 8), point="k"),
     r"its values must be \[batch position kv_head=2 d_head=8\]"),
    ("gpt2", Intervention.stream("resid_pre", [1], stated(1, 1, 19)), r"must be \[batch position d_model=20\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "intervention", "said"), BEFORE_A_RUN)
def test_refused_before_a_run(name: str, intervention: Intervention, said: str) -> None:
    hooked = models.hooked(name)
    with pytest.raises((InputError, MissingPointError), match=said), hooked.intervene(intervention):
        raise AssertionError
    assert hooked.edited == ()


IN_A_RUN: Any = [
    (Intervention.scale("position"), "no such term; they have query_key, key_bias, query_bias, constant"),
    (Intervention.zero([(1, 0)], positions=[2, 3]),
     "z of L1H0 becomes 0 at positions 2, 3: position 3 is not in every text: the shortest has 3 tokens, -3 to 2. "
     "Positions count a text's own tokens, padding excluded."),
    (Intervention.attend([(1, 0)], "first", positions=[-4]),
     "goes to the first token at positions -4: position -4 is not in every text"),
    (Intervention.remove_keys([(1, 0)], [1], positions=[6]), "position 6 is not in every text"),
    (Intervention.remove_keys([(1, 0)], [1, 3]), "keys 1, 3 removed .*: position 3 is not in every text"),
    (Intervention.reweight("all", [1, -4], 2.0), "position -4 is not in every text"),
    (Intervention.zero_values([(1, 0)], [6]), "position 6 is not in every text"),
    (Intervention.cut((1, 5), (0, 1)), "position 3 is not in every text: the shortest has 3 tokens"),
    (Intervention.zero_values([(1, 0)], torch.ones(3, 6, dtype=torch.bool)), "mask is for 6 keys, but the text has 7"),
    (Intervention.zero_values([(1, 0)], torch.ones(2, 7, dtype=torch.bool)),
     "its values are for 2 texts, but the run has 3"),
    (Intervention.replace([(1, 0)], stated(1, 6, 5, 4)), "its values are for 6 positions, but the text has 7"),
    (Intervention.replace([(1, 0)], stated(2, 7, 5, 4)),
     "its values are for 2 texts, but the run has 3; give values for each text, or for a single one"),
    (Intervention.replace([(1, 0)], stated(3, 5, 7, 6), point="pattern"), "values are for 6 positions, but .* 7"),
    (Intervention.replace([(1, 0)], stated(3, 5, 1, 7), point="pattern"), "values are for 1 positions, but .* 7"),
    (Intervention.replace_values([(1, 0)], "first", stated(1, 2, 5, 4)), "values are for 2 positions, but .* 7"),
    (Intervention.stream("resid_pre", [1], stated(1, 5, 20)), "values are for 5 positions, but the text has 7"),
    (Intervention.stream("attn_out", [1], stated(4, 1, 20)), "its values are for 4 texts, but the run has 3"),
    (Intervention.stream("attn_out", [1], positions=[3]), "position 3 is not in every text"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(IN_A_RUN)))
def test_refused_in_a_run(number: int) -> None:
    """In a batch of texts of 7, 5 and 3 tokens."""
    hooked, (intervention, said) = models.hooked("gpt2"), IN_A_RUN[number]
    with hooked.intervene(intervention), pytest.raises(InputError, match=said):
        hooked.run(models.padded("gpt2", ("right", "left")[number % 2]))
    assert hooked.edited == ()


def test_values_for_longer_texts_are_those_of_their_beginning() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    values = torch.randn(1, 9, 5, 4, generator=torch.Generator().manual_seed(0))
    with hooked.intervene(Intervention.replace([(1, 2)], {1: values})):
        z = hooked.run(ids, points=["z"])["z", 1]
    assert torch.equal(z[:, :, 2], values[:, :7, 2].expand(3, -1, -1))


def test_the_last_position_of_a_decoder_is_that_of_its_own_tokens() -> None:
    hooked = models.hooked("t5")
    given = {"input_ids": models.token_ids("t5"), "decoder_input_ids": models.token_ids("t5", length=4, seed=2)}
    for stack, wanted in (("decoder", 3), ("cross", 3), ("encoder", 6)):
        with hooked.intervene(am.Intervention.zero([(1, 2)], positions="last", stack=stack)):
            z = hooked.run(given, points=[f"{stack}.z"])[f"{stack}.z", 1]
        assert (z[:, :, 2] == 0).all(dim=-1).nonzero()[:, 1].tolist() == [wanted] * 3


def test_k_and_v_change_by_kv_head() -> None:
    hooked, ids = models.hooked("llama"), models.token_ids("llama")
    values = torch.full((1, 1, 2, 8), 0.5)
    for point in ("k", "v"):
        change = am.Intervention.replace([(1, 1)], {1: values}, point=point, positions=[2, -1])  # type: ignore[arg-type]
        with hooked.intervene(change):
            acts = hooked.run(ids, points=[point, "z"])
        clean = hooked.run(ids, points=[point, "z"])
        moved = (acts[point, 1] != clean[point, 1]).any(dim=-1)
        assert moved[:, [2, 6], 1].all() and int(moved.sum()) == 6 and (acts[point, 1][moved] == 0.5).all()
        assert (acts["z", 1] != clean["z", 1]).any(dim=-1).any(dim=1)[0].tolist() == [False] * 3 + [True] * 3
