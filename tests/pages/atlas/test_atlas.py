"""The atlas: its parts are those of their own calls, overlaps those of loops; its page shows the rows of each head."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import models
import numpy as np
import planted
import pytest
import torch
from browser import opening
from comparing import refuses
from schemas import schema, strict
from typer.testing import CliRunner

import attnmech as am
from attnmech.cli.main import app
from attnmech.demo.text import documents
from attnmech.draw.text import percent
from attnmech.errors import InputError, OutputError
from attnmech.methods.likeness import divergences
from attnmech.pages.atlas import atlas as calls
from attnmech.pages.atlas.heads import OnTargets
from attnmech.pages.atlas.result import among_heads, by_distance
from attnmech.runs import stream

TEXTS = documents(24, seed=3)
HOSTILE = "</script><script>window.owned=1</script>"


@cache
def made() -> am.results.Atlas:
    return am.atlas(models.demo(), iter(TEXTS), k=4, ablate=6)


def test_each_part_is_that_of_its_own_call() -> None:
    model, atlas = models.demo(), made()
    assert atlas.types is not None
    alone = am.examples(model, iter(TEXTS), k=4, by=OnTargets.of(atlas.types, causal=True))
    for name, value in alone.state.items():
        torch.testing.assert_close(atlas.examples.state[name], value, rtol=0, atol=1e-6, msg=name)
    focus, updates = am.attention_focus(model, iter(TEXTS)), am.residual_updates(model, iter(TEXTS))
    shares = am.variance_shares(model, iter(TEXTS))
    assert atlas.updates is not None and atlas.shares is not None and atlas.types is not None
    torch.testing.assert_close(atlas.focus.first_mass, focus.first_mass)
    torch.testing.assert_close(atlas.updates.magnitude, updates.magnitude)
    torch.testing.assert_close(atlas.shares.shares, shares.shares, equal_nan=True)
    assert torch.equal(atlas.types.scores["induction"], am.head_types(model).scores["induction"])
    assert atlas.composition is not None and atlas.effects is not None and atlas.null is not None
    torch.testing.assert_close(atlas.composition.v, am.composition(model).v, equal_nan=True)
    torch.testing.assert_close(atlas.effects.effect, am.ablate_heads(model, TEXTS[:6]).effect)
    assert atlas.null.verdict == am.null_attention(model, TEXTS[:6], heads="attending").verdict


@pytest.mark.parametrize("name", ["bloom", "bert"])
def test_rows_are_ordered_by_attention_to_the_targets_of_the_type(name: str) -> None:
    """Against a loop over rows; of heads without a type, by the highest attention to another token but the first."""
    model, ids = models.hooked(name), models.token_ids(name, batch=1)[:1]
    ids[0, 4], ids[0, 6] = ids[0, 1], ids[0, 2]
    causal = model.causal
    kinds = {(0, 0): "duplicate", (1, 1): "induction", (1, 0): "previous"} if causal else {(0, 0): "duplicate"}
    found = am.examples(model, ids, k=20, by=OnTargets(kinds, causal))
    pattern, tokens = model.run(ids, points=["pattern"])["pattern"][:, 0], ids[0].tolist()
    targets = {
        "duplicate": lambda i, j: tokens[j] == tokens[i] and (j < i if causal else j != i),
        "induction": lambda i, j: j + 1 > 1 and j > 1 and tokens[j - 1] == tokens[i] and j < i,
        "previous": lambda i, j: j == i - 1,
    }
    for layer, head in ((0, 0), (1, 1), (1, 0), (0, 1)):
        kind = kinds.get((layer, head))
        for row in found.examples_of(layer, head):
            i = row.position
            p = [float(pattern[layer, head, i, j]) for j in range(len(tokens))]
            expected = (
                max(p[j] for j in range(len(tokens)) if j not in (0, i))
                if kind is None
                else sum(p[j] for j in range(len(tokens)) if targets[kind](i, j))
            )
            assert row.value == pytest.approx(expected, abs=1e-6), (layer, head, i)
        values = [row.value for row in found.examples_of(layer, head)]
        assert values == sorted(values, reverse=True)


def test_heads_with_a_clear_effect_and_no_type_are_listed() -> None:
    heads = made().heads
    assert heads.effects is not None
    one = torch.zeros_like(heads.effects.clear)
    typed = next((layer, head) for layer in range(4) for head in range(8) if heads.types_of(layer, head))
    plain = next((layer, head) for layer in range(4) for head in range(8) if not heads.types_of(layer, head))

    class Clear:
        def __init__(self, of: Any) -> None:
            self.effect, self.metric, self.clear, self.simultaneous = of.effect, of.metric, one, of.simultaneous

    changed = replace(heads, effects=Clear(heads.effects))
    assert changed.untyped == {}
    one[typed] = one[plain] = True
    value = f"{float(heads.effects.effect[plain]):+.3f}".replace("-", "−")
    said = f"1 of 2 heads with a clear effect: L{plain[0]}H{plain[1]} ({value}), in nats of loss."
    assert changed.untyped == {"Effect without a type": said}


def test_save_names_what_can_be_saved(tmp_path: Path) -> None:
    atlas = made()
    with pytest.raises(AttributeError, match=r"an atlas has no `save`: .* as in `atlas\.focus\.save\(path\)`$"):
        atlas.save(tmp_path / "atlas")
    saved = [part for part in vars(atlas).values() if hasattr(part, "provenance")]
    assert len(saved) > 5
    for part in saved:
        assert am.load_result(part.save(tmp_path / "part.safetensors")).lead == part.lead


@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_overlaps_are_those_of_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergences, "ROWS", 1000)
    model, ids = models.hooked(name, torch.float64), models.token_ids(name, batch=5, length=9)
    texts = [text[:length] for text, length in zip(ids, (9, 7, 4, 6, 2), strict=True)]
    (overlap,) = am.stream(model, iter(texts), [divergences.OverlapReducer()])
    heads = model.n_layers * model.n_heads
    sums, rows = np.zeros((heads, heads)), 0
    for text in texts:
        acts = model.run(text, points=["pattern"])
        pattern = np.concatenate([acts["pattern", layer][0].numpy() for layer in range(model.n_layers)])
        special = model.encode(text).is_special[0].numpy()
        for row in range(1, pattern.shape[1]):
            if special[row]:
                continue
            rows += 1
            for one in range(heads):
                for other in range(heads):
                    pairs = zip(pattern[one, row], pattern[other, row], strict=True)
                    sums[one, other] += sum(math.sqrt(p * q) for p, q in pairs)
    np.fill_diagonal(sums, np.nan)
    assert rows > 3
    np.testing.assert_allclose(overlap.numpy(), sums / rows, atol=1e-6)


def test_the_map_has_the_numbers_of_the_results() -> None:
    atlas = made()
    numbers = {number.name: number for number in atlas.heads.numbers}
    assert atlas.updates is not None and atlas.shares is not None and atlas.effects is not None
    expected = {
        "first_mass": atlas.focus.first_mass,
        "magnitude": atlas.updates.magnitude,
        "variance_position": atlas.shares["position"].mean,
        "effect": atlas.effects.effect,
        "rows_like": atlas.examples.share,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(numbers[name].values, values.double().numpy(), err_msg=name)
    ends = atlas.focus["first_mass"].interval()
    assert ends is not None and numbers["first_mass"].ends is not None
    np.testing.assert_allclose(numbers["first_mass"].ends[1], ends[1].numpy())
    frame = atlas.to_frame()
    assert len(frame) == 32 and frame.types[2 * 8 + 6] == "induction"
    assert atlas.ov is not None
    (claim, *_) = atlas.ov.claims.itertuples()
    assert claim.type == "copy suppression"
    assert frame.types[claim.layer * 8 + claim.head].endswith("copy suppression")
    card = atlas.heads.page.card["Type"][claim.layer][claim.head]
    sentence = f"has the token that it reads among the 10 that it lowers most, for {percent(claim.score, 0)} of tokens"
    assert f"copy suppression: {sentence}" in card
    assert frame.effect[9] == pytest.approx(float(atlas.effects.effect[1, 1]))


def test_a_figure_places_a_head_among_all_heads() -> None:
    numbers = [number for number in made().heads.compared if number.name in ("first_mass", "entropy")]
    figure = among_heads(numbers).figure(layer=2, head=6)
    for place, number in enumerate(numbers):
        low, high = number.values.min(), number.values.max()
        assert figure.data[2].x[place] == pytest.approx((number.values[2, 6] - low) / (high - low))
        assert figure.data[2].text[place] == f"{number.values[2, 6]:.3g}"
        assert number.ends is not None
        reach = (number.ends[1][2, 6] - number.values[2, 6]) / (high - low)
        assert figure.data[2].error_x.array[place] == pytest.approx(reach)
        assert figure.data[0].base[place] == pytest.approx((np.quantile(number.values, 0.25) - low) / (high - low))
    shares = made().focus.distance_histogram.numpy()
    drawn = by_distance(shares).figure(layer=1, head=3)
    np.testing.assert_allclose(drawn.data[1].y, shares[1, 3])
    np.testing.assert_allclose(drawn.data[0].y, shares.mean(axis=(0, 1)))


def test_a_card_says_what_the_strongest_rows_attend_to() -> None:
    atlas = made()
    card = atlas.heads.page.card["In its strongest rows"][0][1]
    halves = atlas.examples.halves().set_index(["layer", "head"]).loc[0, 1]
    rows = f"{halves.even_relation} ({halves.even_count} of {halves.even_rows})"
    assert card.startswith(f"Highest key in even-numbered texts: {rows}\n")
    counts: dict[str, int] = {}
    for example in atlas.examples.examples_of(0, 1):
        weights = {
            (weight, -key): text
            for key, text, weight in zip(example.keys, example.key_tokens, example.key_weights, strict=True)
            if key not in (0, example.position)
        }
        text = weights[max(weights)].strip().lower() if weights else ""
        counts[text] = counts.get(text, 0) + 1
    attended = atlas.heads.attended[0][1]
    marks = sum(count for text, count in counts.items() if text and not any(map(str.isalnum, text)))
    assert marks == attended.get("punctuation", 0) and counts.pop("", 0) >= 0
    assert {text: count for text, count in attended.items() if text in counts} == counts
    earlier = atlas.heads.page.card["Reads most from"]
    assert "L" in earlier[2][6] and not earlier[0][1]


def test_a_planted_head_is_found_by_its_card_alone() -> None:
    """A head attends to one token, wherever that token is."""
    model, random = planted.with_decoys(planted.blank(planted.MAKERS["gpt2"]), []), Random(5)
    weights = model.weights(1)
    with torch.no_grad():
        weights.W_Q[3, planted.FIRST : planted.LAST, 1] = 2.0
        weights.W_K[3, planted.CUES[0], 1] = 2.0
        weights.W_K[3, planted.BOS, 1] = 1.0  # for rows before that token
    texts = []
    for _ in range(24):
        ids = [random.randrange(planted.FIRST, planted.LAST) for _ in range(14)]
        ids[random.randrange(4, 12)] = planted.CUES[0]
        texts.append(torch.tensor([planted.BOS, *ids]))
    atlas = am.atlas(model, texts, k=5)
    (cue,) = model.position_texts([planted.CUES[0]], "")
    name = cue.strip().lower()
    clear = {place: counts.get(name, 0) for place, counts in np.ndenumerate(np.array(atlas.heads.attended))}
    assert max(clear, key=lambda place: clear[place]) == (1, 3) and clear[1, 3] == 5
    assert sorted(clear.values())[-2] < 5
    assert f"Tokens: “{name}” (5)" in atlas.heads.page.card["In its strongest rows"][1][3]


@pytest.mark.browser
def test_the_page_shows_the_rows_of_the_chosen_head(chromium: Any, tmp_path: Path) -> None:
    atlas = made()
    with opening(chromium, atlas.to_html(), tmp_path / "a.html", ready="html[data-ready]") as page:
        assert page.inner_text("#head-name") == "L2H6"
        page.click(".heads-row:nth-child(2) .heads-cell:nth-child(3)")
        page.wait_for_selector("#examples .attnmech-finding:has-text('L0H1')")
        rows = page.locator("#examples li")
        for place, example in enumerate(atlas.examples.examples_of(0, 1)):
            shown = rows.nth(place).inner_text()
            assert "".join(example.tokens).strip() in " ".join(shown.split("\n"))
            assert f"text {example.text}, token {example.position}" in shown and f"{example.value:#.3g}" in shown
        boxed = rows.first.locator(".attnmech-examples-top").inner_text()
        assert boxed == atlas.examples.examples_of(0, 1)[0].key_tokens[0].strip()
        for sheet, which in ((6, "random"), (1, "band")):
            page.click(f"#examples [role=tab] >> nth={sheet}")
            wanted = [row for row in atlas.examples.examples_of(0, 1, which) if row.band in ("", "80–100 %")]
            assert rows.count() == len(wanted)
            assert f"text {wanted[0].text}, token {wanted[0].position}" in rows.first.inner_text()
        token = next(iter(atlas.heads.attended[0][1]))
        page.fill("#heads input[type=search]", token)
        found = {}
        for layer, of_layer in enumerate(atlas.heads.attended):
            for head, counts in enumerate(of_layer):
                rows_with = [count for text, count in counts.items() if text.startswith(token)]
                found[f"L{layer}H{head}"] = max(rows_with, default=0)
        expected = sorted((name for name, count in found.items() if count), key=lambda name: -found[name])[:8]
        assert page.locator(".heads-found button").all_inner_texts() == expected
        page.click("#tab-write")
        assert "layer=0&head=1" in page.url and "tab=write" in page.url


@pytest.mark.browser
def test_a_folder_opens_from_disk_and_reads_a_layer_when_it_is_chosen(chromium: Any, tmp_path: Path) -> None:
    index = made().write(tmp_path / "atlas")
    files = sorted(path.name for path in index.parent.rglob("*") if path.is_file())
    assert files == ["index.html", *(f"layer-{layer}.js" for layer in range(4))]
    (tmp_path / "atlas/layers/layer-3.js").unlink()
    with chromium.tab() as tab:
        tab.address = index.parent.as_uri()
        tab.page.goto(f"{index.as_uri()}#layer=1&head=5")
        tab.page.wait_for_selector("#examples .attnmech-finding:has-text('L1H5')")
        first = made().examples.examples_of(1, 5)[0]
        assert f"text {first.text}, token {first.position}" in tab.page.inner_text("#examples li >> nth=0")
        assert tab.complaints == []
        tab.page.click(".heads-row:nth-child(5) .heads-cell:nth-child(2)")
        tab.page.wait_for_selector("#examples .attnmech-finding:has-text('layer-3.js is missing')")
        assert tab.page.locator("#examples li").count() == 0
        tab.complaints.clear()


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "atlas"
    made().write(place)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    full = iter(range(100))

    def packed(examples: am.results.HeadExamples, layer: int) -> str:
        if next(full) == 2:
            raise OSError(28, "No space left on device")
        return "other"

    monkeypatch.setattr("attnmech.pages.atlas.result.packed_rows", packed)
    with pytest.raises(OSError, match="No space"):
        made().write(place)
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    (tmp_path / "file").write_text("")
    refuses("cannot make the folder", made().write, tmp_path / "file", error=OutputError)


@pytest.mark.usefixtures("many_batches")
def test_an_interrupted_atlas_resumes_with_nothing_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, journal, measured = models.demo(), tmp_path / "j", list[int]()

    def stopped(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(calls, "null_attention", stopped)
        with pytest.raises(KeyboardInterrupt):
            am.atlas(model, iter(TEXTS), k=4, ablate=6, journal=journal)
    assert {path.name for path in tmp_path.iterdir()} == {"j", "j.ablation"}
    of_part = stream.Streaming.of_part

    def counted(self: stream.Streaming, batch: Any, documents: Any) -> Any:
        measured.append(len(self.reducers))
        return of_part(self, batch, documents)

    monkeypatch.setattr(stream.Streaming, "of_part", counted)
    again = am.atlas(model, iter(TEXTS), k=4, ablate=6, journal=journal)
    assert not list(tmp_path.iterdir()) and max(measured, default=0) <= 1  # no batch of the corpus ran again
    assert again.effects is not None and made().effects is not None
    torch.testing.assert_close(again.effects.effect, made().effects.effect, rtol=0, atol=1e-5)
    for name, value in made().examples.state.items():
        torch.testing.assert_close(again.examples.state[name], value, rtol=0, atol=1e-6, msg=name)


def test_small_corpora_and_models_without_parts() -> None:
    one = am.atlas(models.demo(), ["Anna sang."], k=3)
    assert one.examples.documents == 1 and one.effects is None and "Head types" in one.findings
    assert one.to_html()
    for name in ("gpt2", "bert"):
        atlas = am.atlas(models.hooked(name), list(models.token_ids(name, batch=6)), k=2, ablate=2)
        assert atlas.to_html().count("<section") > 5
        assert all(note.endswith(".") for note in atlas.notes)


def test_records_and_long_texts_are_read_as_the_corpus_reads_them() -> None:
    model = models.demo()
    long = " ".join(TEXTS[:3])
    records = [{"text": text} for text in (TEXTS[0], " ", long, TEXTS[1])]
    atlas = am.atlas(model, iter(records), by="attention", k=2, ablate=2, truncate=True)
    alone = am.examples(model, iter([TEXTS[0], long, TEXTS[1]]), k=2, truncate=True)
    assert atlas.examples.documents == 3 and atlas.examples.truncated == alone.truncated
    for name, value in alone.state.items():
        torch.testing.assert_close(atlas.examples.state[name], value, rtol=0, atol=1e-6, msg=name)
    assert atlas.effects is not None and len(atlas.effects.before) == 2 and not atlas.notes


def test_hostile_tokens_are_text() -> None:
    model = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(words=("[PAD]", "[UNK]", "[BOS]", HOSTILE, "b")))
    model.name = HOSTILE
    assert HOSTILE not in am.atlas(model, [f"b {HOSTILE} b b", "b b b"], k=2).to_html()


def test_bad_input_is_refused() -> None:
    model = models.demo()
    refuses("`inputs` must be texts", am.atlas, model, "Anna sang.")
    refuses("documents", am.atlas, model, [])
    refuses("`by` must be", am.atlas, model, TEXTS, by="size")
    refuses("`k`", am.atlas, model, TEXTS, k=0)
    refuses("one stack that reads tokens", am.atlas, models.hooked("t5"), TEXTS)


def test_the_command_writes_a_folder_a_page_and_a_table(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXTS), "utf-8")
    outs = [tmp_path / name for name in ("atlas", "atlas.html", "atlas.csv")]
    command = ["atlas", "--file", str(corpus), "-k", "2", *(part for out in outs for part in ("--out", str(out)))]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    schema("answer").validate(strict(result.stdout))
    assert (outs[0] / "index.html").exists() and outs[1].exists() and outs[2].read_text().count("\n") == 33
    again = CliRunner().invoke(app, command)
    assert again.exit_code and isinstance(again.exception, InputError) and "exists" in str(again.exception)
