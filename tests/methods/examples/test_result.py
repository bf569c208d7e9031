"""Example rows: against a search over captured patterns; shards, blocks and journals change nothing; planted heads."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import models
import planted
import pytest
import torch
from example_rows import TEXTS, Row, naive, places, places_of, strongest, texts_of
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.methods.examples import result, sums
from attnmech.model.attention import attend
from attnmech.runs import total


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


def test_value_weighted_is_the_largest_product() -> None:
    model = models.hooked("llama", torch.float64)
    layer, head = 1, 5
    examples = am.examples(model, iter(TEXTS), by="value_weighted", k=4)
    rows = []
    for number, ids in enumerate(TEXTS):
        acts = model.run(ids[None], points=["pattern", "v"])
        written = acts["v", layer][0, :, head // 3] @ model.weights(layer).W_O[head].detach()
        products = acts["pattern", layer][0, head] * written.norm(dim=-1)
        rows += [
            Row(float(products[i].max().float()), number, i, (int(ids[i - 1]), int(ids[i])), 0, ())
            for i in range(1, len(ids))
        ]
    assert places(examples.examples_of(layer, head)) == places_of(strongest(rows, 4))
    found = [example.value for example in examples.examples_of(layer, head)]
    assert found == pytest.approx([row.value for row in strongest(rows, 4)], rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_update_is_the_magnitude_of_the_head(name: str) -> None:
    """Gemma 2 has a norm between attention and stream, whose factor differs from row to row."""
    model, texts = models.hooked(name, torch.float64), TEXTS[:24]
    layer, head = 1, 2
    examples = am.examples(model, iter(texts), by="update", k=4)
    rows = []
    for number, ids in enumerate(texts):
        value = am.residual_updates(model, ids).by_row("magnitude")[layer, head, 0]
        rows += [
            Row(float(value[i].float()), number, i, (int(ids[i - 1]), int(ids[i])), 0, ()) for i in range(1, len(ids))
        ]
    expected = strongest(rows, 4)
    chosen = examples.examples_of(layer, head)
    assert places(chosen) == places_of(expected)
    assert [example.value for example in chosen] == pytest.approx([row.value for row in expected], rel=1e-6)
    patterns = am.examples(model, iter(texts), k=4).examples_of(layer, head, "random")
    again = examples.examples_of(layer, head, "random")
    shared = {(row.text, row.position): row.keys for row in patterns}
    assert any((row.text, row.position) in shared for row in again)
    assert all(shared.get((row.text, row.position), row.keys) == row.keys for row in again)


def first_key(block: am.reducers.RowBlock) -> Tensor:
    """The attention to the first token."""
    return block.pattern[..., 0]


def test_a_function_of_a_block_of_rows() -> None:
    model = models.hooked("gpt2", torch.float64)

    def first(row: list[float], position: int) -> float | None:
        return float(torch.tensor(row[0]).float()) if position else None

    examples = am.examples(model, iter(TEXTS), by=first_key, k=5)
    rows = naive(model, TEXTS, 1, 2, value=first)
    assert places(examples.examples_of(1, 2)) == places_of(strongest(rows, 5))
    assert examples.by == "first_key" and "heads by first_key (60 texts, 59 distinct)" in examples.lead


# -- runs ------------------------------------------------------------------------------------------------------


def same(one: am.results.HeadExamples, other: am.results.HeadExamples) -> bool:
    """Whether two results hold the same rows, with the same numbers up to rounding."""
    alike = [
        torch.allclose(value, other.state[name], rtol=1e-6, atol=1e-7)
        if value.is_floating_point()
        else torch.equal(value, other.state[name])
        for name, value in one.state.items()
    ]
    columns = ["text", "position", "window"]
    frames = [one.to_frame(which)[columns].equals(other.to_frame(which)[columns]) for which in result.KINDS]
    return all(alike) and all(frames) and one.halves().equals(other.halves())


STATISTICS: Final[list[Any]] = ["attention", "value_weighted", "update", "next_token", first_key]


@pytest.mark.core
@pytest.mark.parametrize("by", STATISTICS)
def test_merged_shards_are_the_whole(by: Any) -> None:
    model = models.hooked("gpt2", torch.float64)
    whole = am.examples(model, iter(TEXTS), by=by, k=3)
    shards = [am.examples(model, iter(TEXTS), by=by, k=3, shard=(number, 3)) for number in range(3)]
    assert same(shards[0].merged(*shards[1:]), whole) and same(shards[2].merged(*shards[:2]), whole)
    with pytest.raises(InputError, match="merged only with others of the same"):
        shards[0].merged(am.examples(model, iter(TEXTS), by=by, k=4, shard=(1, 3)))


@pytest.mark.parametrize("by", STATISTICS)
def test_blocks_of_rows_change_nothing(by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = models.hooked("llama", torch.float64), texts_of(count=6, longest=60)
    assert max(map(len, texts)) > 32
    whole = am.examples(model, iter(texts), by=by, k=4)
    monkeypatch.setattr(attend, "block_bytes", lambda device: 1)
    assert same(am.examples(model, iter(texts), by=by, k=4), whole)


@pytest.mark.usefixtures("many_batches")
def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(total, "_JOURNAL_SHARE", 0.0)
    model, path = models.hooked("gpt2"), tmp_path / "journal"

    def interrupted() -> Iterator[Tensor]:
        yield from TEXTS[:37]
        raise KeyboardInterrupt

    whole = am.examples(model, iter(TEXTS), by="next_token", k=3)
    with pytest.raises(KeyboardInterrupt):
        am.examples(model, interrupted(), by="next_token", k=3, journal=path)
    assert path.exists()
    resumed = am.examples(model, iter(TEXTS), by="next_token", k=3, journal=path)
    assert all(torch.equal(value, whole.state[name]) for name, value in resumed.state.items())


def test_a_list_of_texts_and_a_corpus_are_the_same() -> None:
    model, ids = models.hooked("gpt2", torch.float64), models.token_ids("gpt2", batch=4, length=11)
    assert same(am.examples(model, ids, k=2), am.examples(model, iter(list(ids)), k=2))


@pytest.mark.parametrize("by", STATISTICS[:4])
def test_padding_is_left_out(by: Any) -> None:
    model = models.hooked("llama", torch.float64)
    batch = models.padded("llama", "left", length=9)
    alone = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    padded, plain = am.examples(model, batch, by=by, k=3), am.examples(model, iter(alone), by=by, k=3)
    for which in result.KINDS:
        columns = ["layer", "head", "text", "position", "window", "keys"]
        assert padded.to_frame(which)[columns].equals(plain.to_frame(which)[columns])
    assert torch.equal(padded.rows, plain.rows)


def test_layers_keep_their_own_rows() -> None:
    model = models.hooked("gpt2", torch.float64)
    whole, last = am.examples(model, iter(TEXTS), k=2), am.examples(model, iter(TEXTS), k=2, layers=[2])
    for which in result.KINDS:
        assert places(last.examples_of(2, 4, which)) == places(whole.examples_of(2, 4, which))
    with pytest.raises(InputError, match="`layer` must be one of the layers measured"):
        last.examples_of(0, 4)


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
    assert len(examples.to_frame("random")) == 64 and set(examples.to_frame("band")["band"]) == set(result.BANDS)
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
    assert examples.to_frame().empty and examples.to_frame("band").empty and examples.by_head()["rows"].eq(0).all()
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
    with pytest.raises(InputError, match=message):
        am.examples(models.hooked("gpt2"), models.token_ids("gpt2"), **options)


def test_value_weighted_needs_values_that_reach_the_output() -> None:
    model, ids = models.hooked("longformer"), torch.arange(3, 15)[None]
    with pytest.raises(InputError, match='by="value_weighted" needs values that reach W_O unchanged; in this model'):
        am.examples(model, ids, by="value_weighted")
    assert len(am.examples(model, ids, by="update", k=1).to_frame()) == model.n_layers * model.n_heads


def test_which_is_a_kind() -> None:
    examples = am.examples(models.hooked("gpt2"), models.token_ids("gpt2"))
    with pytest.raises(InputError, match="`which` must be one of strongest, even, odd, random, band; got 'weakest'"):
        examples.to_frame("weakest")
