"""Example rows: against a search over captured patterns; shards, blocks and journals change nothing; planted heads."""

import math
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final

import models
import planted
import pytest
import torch
from comparing import refuses
from example_rows import TEXTS, Row, naive, places, places_of, strongest, texts_of
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.examples import result, sums
from attnmech.methods.examples.formulas import RELATIONS, difference_of_halves, relations


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize(
    ("name", "layer", "head", "count"), [("gpt2", 0, 3, 60), ("gpt2", 2, 1, 12), ("llama", 1, 4, 60)]
)
def test_the_strongest_rows_are_those_of_a_search(name: str, layer: int, head: int, count: int) -> None:
    """Among twelve texts, bigrams recur so often that the offers of a text matter."""
    model, texts = models.hooked(name, torch.float64), TEXTS[:count]
    rows = naive(model, texts, layer, head)
    expected = strongest(rows, 10)
    examples = am.examples(model, iter(texts), k=10)
    chosen = examples.examples_of(layer, head)
    assert places(chosen) == places_of(expected) and len(chosen) > 4
    for example, row in zip(chosen, expected, strict=True):
        assert example.value == pytest.approx(row.value, abs=1e-6)
        assert example.keys == row.keys[: len(example.keys)] and len(example.keys) == min(8, row.position + 1)
    assert len({example.text for example in chosen}) == len(chosen)
    assert max(Counter(example.tokens[example.query_at - 1 : example.query_at + 1] for example in chosen).values()) == 1
    assert int(examples.rows[layer, head]) == len(rows)
    share = sum(row.value >= expected[-1].value for row in rows) / len(rows)
    assert float(examples.share[layer, head]) == pytest.approx(share, abs=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("seed", [0, 2**40 + 7])
def test_random_rows_have_the_smallest_hashes(seed: int) -> None:
    model = models.hooked("llama", torch.float64)
    examples = am.examples(model, iter(TEXTS), k=5, seed=seed)
    for layer, head in ((0, 0), (1, 5)):
        rows = sorted(naive(model, TEXTS, layer, head, seed), key=lambda row: row.hash)
        assert places(examples.examples_of(layer, head, "random")) == places_of(rows[:5])


@pytest.mark.parametrize("sample", [2000, 100])
def test_bands_hold_the_fifths_of_the_sample(sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sums, result):
        monkeypatch.setattr(module, "SAMPLE", sample)
    model = models.hooked("gpt2", torch.float64)
    examples = am.examples(model, iter(TEXTS), k=2)
    for layer, head in ((0, 3), (2, 0)):
        rows = naive(model, TEXTS, layer, head)
        kept = sorted(rows, key=lambda row: row.hash)[:sample]
        by_value = sorted(kept, key=lambda row: (row.value, row.hash))
        fifth = {row: 5 * rank // len(kept) for rank, row in enumerate(by_value)}
        expected = [row for band in range(5) for row in [row for row in kept if fifth[row] == band][:2]]
        chosen = examples.examples_of(layer, head, "band")
        assert places(chosen) == places_of(expected) and len(chosen) == 10
        assert [example.band for example in chosen[::2]] == list(result.BANDS)
        lowest = [min(row.value for row in kept if fifth[row] == band) for band in range(1, 5)]
        assert examples.quantiles[layer, head].tolist() == pytest.approx(lowest, abs=1e-6)
        error = 0.0 if len(rows) <= sample else math.sqrt(math.log(40) / (2 * sample))
        assert float(examples.quantile_error[layer, head]) == pytest.approx(error)
        assert (error > 0) == (sample == 100)


# -- other statistics ------------------------------------------------------------------------------------------


def first_key(block: am.reducers.RowBlock) -> Tensor:
    return block.pattern[..., 0]


def first_weights(model: am.HookedModel, name: str, ids: Tensor, layer: int, head: int) -> Tensor:
    return model.run(ids[None], points=["pattern"])["pattern", layer][0, head, :, 0]


def largest_products(model: am.HookedModel, name: str, ids: Tensor, layer: int, head: int) -> Tensor:
    """The largest of each row's weights times the norms of what the values write."""
    acts = model.run(ids[None], points=["pattern", "v"])
    v = acts["v", layer][0]
    written = v[:, head * v.shape[1] // model.n_heads] @ model.weights(layer).W_O[head].detach()
    return (acts["pattern", layer][0, head] * written.norm(dim=-1)).amax(dim=-1)


def magnitudes(model: am.HookedModel, name: str, ids: Tensor, layer: int, head: int) -> Tensor:
    return am.residual_updates(model, ids).by_row("magnitude")[layer, head, 0]


FINAL_NORMS = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gemma2": "model.norm"}


def parts_of_logits(model: am.HookedModel, name: str, ids: Tensor, layer: int, head: int) -> Tensor:
    """For each token but the last, what a head adds to the next token's logit above the mean over the vocabulary."""
    acts, plain = model.run(ids[None], points=["z", "attn_raw", "resid_post"]), models.plain(name, torch.float64)
    stream, final = acts["resid_post", model.n_layers - 1][0], plain.get_submodule(FINAL_NORMS[name])
    written = acts["z", layer][0, :, head] @ model.weights(layer).W_O[head].detach()
    if name == "gemma2":
        norm = plain.get_submodule(f"model.layers.{layer}.post_attention_layernorm")
        raw = acts["attn_raw", layer][0]
        written = written / (raw.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * (1 + norm.weight.detach())
    gamma = final.weight.detach() + (name == "gemma2")
    parts = []
    for row in range(len(ids) - 1):
        if name == "gpt2":
            factor = (stream[row].var(correction=0) + final.eps).rsqrt()
            part = written[row] - written[row].mean()
        else:
            factor = (stream[row].square().mean() + plain.config.rms_norm_eps).rsqrt()
            part = written[row]
        logits = plain.get_output_embeddings().weight.detach() @ (gamma * part * factor)
        parts.append(float(logits[ids[row + 1]] - logits.mean()))
    return torch.tensor(parts, dtype=torch.float64)


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize(
    ("name", "by", "values"),
    [
        ("gpt2", first_key, first_weights), ("llama", "value_weighted", largest_products),
        ("gpt2", "update", magnitudes), ("gemma2", "update", magnitudes),
        *((name, "next_token", parts_of_logits) for name in FINAL_NORMS),
    ],
)  # fmt: skip
def test_other_statistics_are_those_of_each_text_alone(name: str, by: Any, values: Callable[..., Tensor]) -> None:
    """Gemma 2 has a norm between attention and stream, and soft-caps its logits, which are read before the cap."""
    model, texts = models.hooked(name, torch.float64), TEXTS[:24]
    examples, close = am.examples(model, iter(texts), by=by, k=5), 1e-5 if by == "next_token" else 1e-6
    assert examples.by == (by if isinstance(by, str) else "first_key")
    for layer, head in ((0, 1), (1, 2)):
        of_texts = [values(model, name, ids, layer, head).float().tolist() for ids in texts]
        rows = [
            Row(value, number, at, (int(texts[number][at - 1]), int(texts[number][at])), 0, ())
            for number, of_text in enumerate(of_texts)
            for at, value in enumerate(of_text)
            if at
        ]
        expected = strongest(rows, 5)
        chosen = examples.examples_of(layer, head)
        assert places(chosen) == places_of(expected) and int(examples.rows[layer, head]) == len(rows)
        assert [example.value for example in chosen] == pytest.approx([row.value for row in expected], rel=close)
        for example in (*chosen, *examples.examples_of(layer, head, "random")):
            pattern = model.run(texts[example.text][None], points=["pattern"])["pattern", layer][0, head]
            of_keys = pattern[example.position, list(example.keys)].tolist()
            assert example.key_weights == pytest.approx(of_keys, abs=1e-6)
            value = of_texts[example.text][example.position]
            assert example.value == pytest.approx(value, rel=close, abs=1e-8)


# -- what a row holds ------------------------------------------------------------------------------------------


def test_the_window_of_a_row() -> None:
    """Texts shorter than the window, and texts that reach beyond it on both sides."""
    model, texts = models.hooked("llama"), texts_of(count=8, longest=60)
    examples = am.examples(model, iter(texts), k=4)
    seen = set()
    for which in result.KINDS:
        for example in examples.examples_of(1, 2, which):
            ids, at = texts[example.text].tolist(), example.position
            assert list(map(int, example.tokens)) == ids[max(0, at - 24) : at + 9]
            assert example.query_at == min(at, 24)
            assert list(map(int, example.key_tokens)) == [ids[key] for key in example.keys]
            start = at - example.query_at
            known = {key - start: weight for key, weight in zip(example.keys, example.key_weights, strict=True)}
            for place, weight in enumerate(example.weights):
                assert weight == known[place] if place in known else math.isnan(weight)
            row = model.run(texts[example.text][None], points=["pattern"])["pattern", 1][0, 2, at]
            assert example.key_weights == pytest.approx(row[list(example.keys)].tolist(), abs=1e-5)
            seen.add((at > 24, at + 9 <= len(ids)))
    assert len(seen) == 4


@pytest.mark.core
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_planted_head_shows_only_its_rows(name: str) -> None:
    """A head that attends from one token to an earlier one, and uniformly from all others."""
    model, rng = planted.blank(planted.MAKERS[name]), Random(3)
    planted.look(model, (1, 3), {planted.ASK: planted.CUES[0]})
    texts = []
    for number in range(60):
        text = [planted.BOS, *(rng.randrange(planted.FIRST, planted.LAST) for _ in range(10))]
        if number % 3 == 0:
            text[rng.randrange(2, 5)], text[rng.randrange(6, 11)] = planted.CUES[0], planted.ASK
        texts.append(torch.tensor(text))
    examples = am.examples(model, iter(texts), k=10)
    chosen = examples.examples_of(1, 3)
    assert len(chosen) == 10 and len({example.text for example in chosen}) == 10
    for example in chosen:
        ids = texts[example.text].tolist()
        assert ids[example.position] == planted.ASK and ids[example.keys[0]] == planted.CUES[0]
        assert example.value == example.key_weights[0] > 0.9
    random = [example for which in ("random", "band") for example in examples.examples_of(1, 3, which)]
    assert sum(example.value > 0.9 for example in random) < len(random) / 5
    assert float(examples.share[1, 3]) == pytest.approx(20 / int(examples.rows[1, 3]))


def test_cross_attention_has_keys_of_another_text() -> None:
    source, target = torch.tensor([[5, 6, 7, 8, 9, 4]] * 2), torch.tensor([[2, 11, 12, 13]] * 2)
    batch = {"input_ids": source, "decoder_input_ids": target}
    examples = am.examples(models.hooked("bart"), iter([batch]), k=2, stack="cross")
    example = examples.examples_of(0, 1)[0]
    assert all(math.isnan(weight) for weight in example.weights) and len(example.keys) == 6
    assert [int(token) for token in example.key_tokens] == [[5, 6, 7, 8, 9, 4][key] for key in example.keys]
    assert [int(token) for token in example.tokens] == [2, 11, 12, 13]
    frame = examples.halves()
    assert frame["even_rows"].eq(1).all() and frame["even_relation"].eq("").all()
    assert frame[["even_count", "odd_count", "distance", "p"]].isna().all(axis=None)
    assert examples.to_frame()["relation"].eq("").all()


def test_the_result_as_table_text_and_page() -> None:
    model = models.demo()
    texts = ["Anna sang of shells. Tom gave the old key to Anna.", "Tom gave a shell to Anna."]
    examples = am.examples(model, texts, k=2)
    frame = examples.to_frame()
    assert len(frame) == 64 and set(frame["kind"]) == {"strongest"} and frame["rank"].tolist()[:2] == [0, 1]
    assert len(examples._table_of("random")) == 64 and set(examples._table_of("band")["band"]) == set(result.BANDS)
    example = examples.examples_of(2, 6)[0]
    query = example.tokens[example.query_at].strip()
    assert f"[{query}]" in example.window
    assert example.window.replace("[", "").replace("]", "") == "".join(example.tokens)
    assert str(example).startswith(f"{example.value:.2f}: ") and f"{example.key_tokens[0].strip()!r} " in str(example)
    by_head = examples.by_head()
    assert len(by_head) == 32 and (by_head["highest"] >= by_head["weakest"]).all()
    assert (by_head["q20"] <= by_head["q80"]).all() and by_head["share"].between(0, 1).all()
    assert examples.lead.startswith("The 2 strongest rows of 32 heads by highest attention to another token, not the "
                                    "first (2 texts): in the median head, ")  # fmt: skip
    assert "Anna" in examples.to_html()


def test_texts_without_a_row_that_counts() -> None:
    examples = am.examples(models.hooked("gpt2"), iter([torch.tensor([5, 6]), torch.tensor([7])]))
    assert examples.lead == "No row counts in any of 15 heads (2 texts)."
    copies = am.examples(models.hooked("gpt2"), [torch.tensor([5, 6, 7])] * 3)
    assert "(3 texts, 1 distinct): in the median head" in copies.lead
    assert examples.to_frame().empty and examples._table_of("band").empty and examples.by_head()["rows"].eq(0).all()
    assert examples.share.isnan().all() and examples.quantiles.isnan().all()


# -- invalid arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"^`k` must be a whole number, 1 to 50; got 0\.$"),
        ({"seed": -1}, r"^`seed` must be a whole number, 0 to \d+; got -1\.$"),
        (
            {"by": "loudness"},
            r'^`by` must be "attention", "value_weighted", "update", "next_token", or a function of an am\.reducers\.'
            r"RowBlock; got 'loudness'\.$",
        ),
        ({"by": 3}, r"got 3\.$"),
        (
            {"by": lambda block: block.pattern},
            r"^`by` must return a real tensor \[batch head row\], here \[3, 5, 7\]; got a Tensor of torch\.float32 "
            r"\[3, 5, 7, 7\]\.$",
        ),
        (
            {"by": lambda block: block.pattern[..., 0].log() * torch.nan},
            r"^`by` must return finite numbers at real rows that see several keys; layer 0 has others\. ",
        ),
    ],
)
def test_invalid_arguments(options: dict[str, Any], message: str, unchecked: None) -> None:
    refuses(message, am.examples, models.hooked("gpt2"), models.token_ids("gpt2"), **options)


# -- parts of the next token's logit ---------------------------------------------------------------------------


def test_the_last_token_has_no_next_one() -> None:
    """Neither in a list of texts nor beside longer texts, nor with padding on the left."""
    model = models.hooked("llama")
    batch = models.padded("llama", "left", length=9)
    examples = am.examples(model, batch, by="next_token", k=50)
    lengths = batch["attention_mask"].sum(dim=1)
    assert examples.rows.eq(int((lengths - 2).sum())).all()
    assert all(row.position < lengths[row.text] - 1 for row in examples._table_of("random").itertuples())


def test_some_layers_with_the_last() -> None:
    model = models.hooked("gpt2", torch.float64)
    whole = am.examples(model, iter(TEXTS), by="next_token", k=3)
    some = am.examples(model, iter(TEXTS), by="next_token", k=3, layers=[2, 0])
    for layer in (0, 2):
        for which in ("strongest", "band"):
            assert some.examples_of(layer, 3, which) == whole.examples_of(layer, 3, which)
    refuses("`layer` must be one of the layers measured", some.examples_of, 1, 3)
    with pytest.raises(InputError, match="`which` must be one of strongest, even, odd, random, band; got 'weakest'"):
        some.examples_of(0, 3, "weakest")
    with pytest.raises(
        InputError,
        match=r'^by="next_token" needs the last layer, 2, among `layers`, since the factor of the final norm is '
        r"measured there; got \[0, 1\]\.$",
    ):
        am.examples(model, iter(TEXTS), by="next_token", layers=[0, 1])


# -- halves of texts -------------------------------------------------------------------------------------------


HALVES: Final = (("even", 0), ("odd", 1))


def relation(query: int, key: int | None, ids: list[int]) -> str:
    """What a key is to a query, in words."""
    if key is None:
        return "no key"
    if key == query:
        return "itself"
    if key == 0:
        return "first token"
    if key == query - 1:
        return "previous token"
    if key == query + 1:
        return "next token"
    if key > query:
        return "later"
    if ids[key] == ids[query]:
        return "same token"
    return "2–8 back" if query - key <= 8 else "farther back"


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize(("name", "layer", "head", "count"), [("gpt2", 0, 3, 60), ("llama", 1, 4, 12)])
def test_the_strongest_rows_of_each_half_are_those_of_a_search(name: str, layer: int, head: int, count: int) -> None:
    model, texts = models.hooked(name, torch.float64), TEXTS[:count]
    rows = naive(model, texts, layer, head)
    examples = am.examples(model, iter(texts), k=10)
    frame = examples.halves().set_index(["layer", "head"]).loc[(layer, head)]
    for half, number in HALVES:
        chosen = examples.examples_of(layer, head, half)
        assert places(chosen) == places_of(strongest([row for row in rows if row.text % 2 == number], 10))
        assert {example.kind for example in chosen} == {half}
        common = Counter(example.relation for example in chosen)
        assert frame[f"{half}_rows"] == len(chosen) and frame[f"{half}_count"] == max(common.values())
        assert common[frame[f"{half}_relation"]] == max(common.values())


@pytest.mark.parametrize(
    ("name", "by"), [("gpt2", "value_weighted"), ("bert", "attention"), ("bert", "value_weighted")]
)
def test_the_relation_of_a_row_is_that_of_its_highest_key(name: str, by: str) -> None:
    """BERT's rows also see later tokens."""
    model, texts = models.hooked(name), texts_of(count=30, longest=19)
    examples = am.examples(model, iter(texts), by=by, k=50)
    patterns = [model.run(ids[None], points=["pattern"]) for ids in texts]
    seen = set()
    for layer, head in ((layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)):
        for example in examples.examples_of(layer, head, "random") + examples.examples_of(layer, head):
            ids, at = texts[example.text].tolist(), example.position
            row = patterns[example.text]["pattern", layer][0, head, at, : at + 1 if model.causal else None].tolist()
            counted = [key for key in range(len(row)) if by != "attention" or key not in (0, at)]
            assert example.relation == relation(at, max(counted, key=row.__getitem__), ids)
            seen.add(example.relation)
    expected = {"previous token", "2–8 back", "farther back", "same token"}
    expected |= {"itself", "first token"} if by != "attention" else set()
    assert seen >= expected | ({"next token", "later"} if name == "bert" else set())


@pytest.mark.core
def test_halves_that_differ() -> None:
    """The head looks for a cue: in texts with even numbers it is eleven tokens back, in the others two."""
    model, rng = planted.blank(planted.MAKERS["llama"]), Random(3)
    planted.look(model, (1, 3), {planted.ASK: planted.CUES[0]})
    texts = []
    for number in range(40):
        text = [rng.randrange(planted.FIRST, planted.LAST) for _ in range(14)]
        text[11 if number % 2 else 2] = planted.CUES[0]
        text[12:] = planted.FIRST + number // 2, planted.ASK
        texts.append(torch.tensor([planted.BOS, *text]))
    row = am.examples(model, iter(texts), k=10).halves().set_index(["layer", "head"]).loc[(1, 3)]
    for half, expected in (("even", "farther back"), ("odd", "2–8 back")):
        assert row[f"{half}_relation"] == expected and row[f"{half}_count"] == row[f"{half}_rows"] == 10
    assert row["distance"] == 1 and row["p"] < 0.01


def drawn(relations: list[str], texts: list[int], k: int, divisions: int = 4000) -> tuple[float, float]:
    """The distance of the halves, and its p-value, with divisions drawn by Python."""

    def distance(odd: list[bool]) -> float:
        halves = [[r for r, is_odd in zip(relations, odd, strict=True) if is_odd == half][:k] for half in (False, True)]
        if not all(halves):
            return math.nan
        shares = [{name: Counter(half)[name] / len(half) for name in relations} for half in halves]
        return sum(abs(shares[0][name] - shares[1][name]) for name in set(relations)) / 2

    rng, real = Random(1), distance([text % 2 == 1 for text in texts])
    random = [distance([rng.random() < 0.5 for _ in texts]) for _ in range(divisions)]
    return real, sum(not value < real - 1e-9 for value in random) / divisions


@pytest.mark.parametrize("k", [1, 10])
def test_p_is_the_share_of_divisions_that_differ_as_much(k: int) -> None:
    rng = Random(k)
    rows = [[rng.choice(RELATIONS[2:5]) for _ in range(24)] for _ in range(6)]
    rows[0] = [RELATIONS[2 + text % 2] for text in range(24)]
    texts = [rng.sample(range(100), 24) for _ in rows]
    texts[0] = list(range(24))
    _, distance, p_value = difference_of_halves(
        torch.tensor([[RELATIONS.index(name) for name in row] for row in rows]), torch.tensor(texts), k
    )
    for number, row in enumerate(rows):
        real, p = drawn(row, texts[number], k)
        assert float(distance[number]) == pytest.approx(real)
        assert float(p_value[number]) == pytest.approx(p, abs=0.03)


def test_p_holds_where_the_relation_depends_on_the_value() -> None:
    """In corpora without halves, p is below 0.05 in at most one of twenty, although the first 15 rows differ from the
    others, so that the halves' first ten rows are not independent draws.
    """
    heads, generator = 400, torch.Generator().manual_seed(0)
    text = torch.stack([torch.randperm(200, generator=generator)[:60] for _ in range(heads)])
    relation = torch.full((heads, 60), 4)
    relation[:, 15:] = 3
    _, _, p = difference_of_halves(relation, text, 10)
    assert 0.0 < float((p < 0.05).double().mean()) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / heads)


def test_p_is_nan_without_rows_in_a_half() -> None:
    frame = am.examples(models.hooked("gpt2"), TEXTS[1][None]).halves()
    assert frame["odd_rows"].eq(0).all() and frame["odd_relation"].eq("").all() and frame["even_rows"].gt(0).all()
    assert frame["p"].isna().all() and frame["distance"].isna().all()


def test_rows_that_attend_to_nothing_else() -> None:
    model = models.hooked("gpt2")
    with model.hooks({("pattern", 1): lambda pattern: torch.eye(pattern.shape[-1]).expand_as(pattern)}):
        examples = am.examples(model, iter(TEXTS), k=3)
    assert {example.relation for example in examples.examples_of(1, 0)} == {"no key"}


def test_keys_that_are_not_tokens() -> None:
    index = relations(*torch.tensor([[3, 3, 0], [9, -1, 0], [5, 5, 5], [-1, -1, 5]]))
    assert [RELATIONS[number] for number in index.tolist()] == ["not a token", "no key", "itself"]
