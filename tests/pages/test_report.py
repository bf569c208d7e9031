"""The report: its contents, what it leaves out, and its file, which is either whole or absent."""

import json
from base64 import b64decode
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from gzip import decompress
from itertools import product
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from browser import opening
from torch import Tensor
from unpacking import page_data, unpacked

import attnmech as am
from attnmech.demo.text import ABOUT, PARAGRAPH
from attnmech.draw.section import TABS
from attnmech.draw.text import bound, percent
from attnmech.errors import ExactnessError, InputError
from attnmech.pages import limits
from attnmech.pages.report import reports
from attnmech.pages.result import AWAITED, first_page
from attnmech.pages.start import TellingRows
from attnmech.runs.progress import watched


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return models.demo()


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without ablations and types of heads, which take most of their time."""
    monkeypatch.setattr(limits, "MAX_WORK", 0)


@cache
def reported(text: str) -> am.results.Report:
    """The report of a text on the demo model, with its sweeps, computed once."""
    return am.report(models.demo(), text)


def test_the_page_holds_the_text_the_residual_and_the_checks(demo: am.HookedModel) -> None:
    report = reported(PARAGRAPH)
    page = report.to_html()
    assert "harbour" in page
    assert f"{bound(float(report.scores.residual.max()), 2)}</td>" in page
    for check in demo.certificate.checks:
        assert check.name in page
    assert demo.weights_hash in page
    assert "http-equiv" in page
    assert 'src="http' not in page


def test_the_lead_says_what_the_numbers_support(demo: am.HookedModel) -> None:
    report = reported(PARAGRAPH)
    shares = report.scores.shares_at(0)
    means = {name: float(share[0].nanmean(dim=-1).mean()) for name, share in shares.items()}
    first = max(means, key=lambda name: means[name])
    page = report.to_html()
    assert (
        f"{first.replace('_', '-')} term supplies {100 * means[first]:.0f}\u00a0% of a row&#39;s highest score" in page
    )
    worst, largest = float(report.scores.residual.max()), float(report.scores.largest.max())
    assert report.lead == (
        f"32 heads on one text: the terms of each score add up to it to within {bound(worst, 2)} (the largest score "
        f"is {largest:.3g})."
    )
    assert report.focus.finding() in page and report.effects is not None and report.effects.lead in page


def test_a_sum_without_residual_is_exact(demo: am.HookedModel) -> None:
    report = reported("Anna sang.")
    exact = replace(report.scores, residual=torch.zeros_like(report.scores.residual))
    report = replace(report, scores=exact)
    assert report.lead == "32 heads on one text: the terms of each score add up to it exactly."
    assert "e+00" not in report.to_html().split("<script")[0]


def test_a_frame_gives_the_largest_residual_of_a_layer_and_the_mean_share(demo: am.HookedModel) -> None:
    report = reported(PARAGRAPH)
    frame, heads = report.to_frame(), report.scores.to_frame()
    assert frame.layer.tolist() == [0, 1, 2, 3]
    assert frame.filter(like="_share").sum(axis=1).round(4).tolist() == [1, 1, 1, 1]
    for layer in range(4):
        of_layer = heads[heads.layer == layer]
        assert frame.residual[layer] == float(report.scores.residual[layer].max()) == of_layer.residual.max()
        assert frame.largest_score[layer] == of_layer.largest_score.max()
        assert frame.query_key_share[layer] == pytest.approx(of_layer.query_key_share.mean())


@pytest.mark.usefixtures("no_sweeps")
def test_a_page_of_one_token_and_of_an_encoder(demo: am.HookedModel) -> None:
    report = am.report(demo, torch.tensor([[400]]))  # without shares
    assert report.lead.startswith("32 heads on one text") and report.to_html()
    report = am.report(models.hooked("bert"), models.token_ids("bert")[:1])
    assert report.effects is None and report.null is None
    assert "Figure 10" in report.to_html()


def test_ablations_and_reasons_are_those_of_the_methods(demo: am.HookedModel) -> None:
    text = "Anna sang of shells, of shells."
    report = am.report(demo, text)
    assert report.effects is not None and report.null is not None and report.sources is not None
    alone = am.ablate_heads(demo, text)
    torch.testing.assert_close(report.effects.after[..., :1], alone.after, rtol=1e-4, atol=1e-5)
    assert len(report.effects.before) == 3
    page = report.to_html()
    shown = [section for section in report._page().sections if section.heading.startswith("Figure ")]
    assert [section.heading.partition(".")[0] for section in shown] == [f"Figure {place}" for place in range(1, 13)]
    assert [section.tab for section in shown] == sorted((section.tab for section in shown), key=list(TABS).index)
    assert all(section.contents.startswith(f"{place} ") for place, section in enumerate(shown, start=1))
    assert "this text and 2 built-in texts" in page
    reason = am.decompose_by_source(demo, text).explain(layer=2, head=6, query=4)
    assert text_at(page_data(page), "reason", layer=2, head=6, query=4) == reason


def test_what_would_take_minutes_is_left_out_and_told(demo: am.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_WORK", 0)
    monkeypatch.setattr(limits, "MAX_REASONS", 0)
    report = am.report(demo, "Anna sang of shells.")
    assert report.effects is None and report.null is None and report.sources is None
    page = report.to_html()
    assert "attnmech ablate" in page and "am.decompose_by_source" in page
    assert "Figure 11" not in page and "nan to nan" not in page


def test_the_page_of_a_model_whose_logits_are_refused_leaves_them_out() -> None:
    plain = models.fresh("llama")
    plain.lm_head.register_forward_hook(lambda module, args, output: 1.5 * output)
    with pytest.warns(UserWarning, match="1 of 26 checks fail, first 'logits'"):
        model = am.load(plain)
    report = am.report(model, models.token_ids("llama", 1))
    assert report.expected is None
    assert any(
        "The model's predictions are omitted: logits = N(resid_post) W_U does not" in note for note in report.notes
    )
    assert "The model's predictions</h" not in report.to_html()


def attention_of(data: Any) -> np.ndarray:
    tokens, heads = len(data["tokens"]), len(data["choices"]["head"])
    return unpacked(data["arrays"][data["pattern"]], (-1, heads, tokens, tokens))


def text_at(data: Any, name: str, **chosen: int) -> str:
    column = data["texts"][name]
    sizes = [len(data["choices"][each]) for each in column["over"]]
    place = int(np.ravel_multi_index([chosen[each] for each in column["over"]], sizes))
    texts = json.loads(decompress(b64decode(data["arrays"][column["array"]]["texts"])))
    assert len(texts) == np.prod(sizes)
    return str(texts[place])


def turned(pattern: Tensor) -> Tensor:
    """Reverses every row, from its first key to itself, so that it is not the softmax of the scores."""
    rows = [pattern[:, :, i, : i + 1].flip(-1) for i in range(pattern.shape[2])]
    return torch.stack([torch.nn.functional.pad(row, (0, pattern.shape[3] - row.shape[-1])) for row in rows], dim=2)


EDITS: dict[str, Callable[[am.HookedModel], AbstractContextManager[Any]]] = {
    "pattern": lambda model: model.hooks({("pattern", 1): turned}),
    "pattern of all layers": lambda model: model.hooks({"pattern": turned}),
    "z": lambda model: model.hooks({("z", 0): lambda z: z.roll(1, dims=2)}),
    "half of the pattern": lambda model: model.hooks({("pattern", 0): lambda pattern: pattern / 2}),
    "an intervention": lambda model: model.intervene(am.Intervention.attend([(1, 2)], "self")),
}


# Rows of an encoder also see later keys, which `turned` would hide.
@pytest.mark.usefixtures("no_sweeps")
@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("bloom", "pattern"), ("bloom", "half of the pattern"), ("gpt2", "pattern of all layers"), ("gpt2", "z"),
        ("gpt2", "an intervention"), ("bert", "z"),
    ],
)  # fmt: skip
def test_the_page_shows_the_attention_that_the_model_used(name: str, edit: str) -> None:
    model, ids = models.hooked(name), models.token_ids(name)[:1]
    with EDITS[edit](model):
        report = am.report(model, ids)
        used = model.run(ids, points=["pattern"])["pattern"][:, 0].numpy()
    data = page_data(report.to_html())
    assert bool(data["rest"]) == (edit == "half of the pattern")  # as if a sink took the rest
    np.testing.assert_allclose(attention_of(data), used, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(report.pattern.numpy(), used, rtol=1e-5, atol=1e-7)
    softmax = report.scores.numbers().pattern
    if edit == "z":
        np.testing.assert_allclose(softmax, used, rtol=1e-3, atol=1e-5)
        assert not np.allclose(used, model.run(ids, points=["pattern"])["pattern"][:, 0].numpy(), atol=1e-3)
    else:
        assert not np.allclose(softmax, used, atol=1e-2)
    key = int(used[1, 0, -1].argmax())
    told = text_at(data, "row-finding", weight=0, layer=1, head=0, query=used.shape[2] - 1)
    assert f": {percent(float(used[1, 0, -1, key]))} to {key} “" in told
    with EDITS[edit](model):
        carried = am.attention_flow(model, ids, "norm").shares[1, 0, -1]
    told = text_at(data, "row-finding", weight=1, layer=1, head=0, query=used.shape[2] - 1)
    assert f": {percent(float(carried.max()))} from {int(carried.argmax())} “" in told
    (note,) = [each for each in report.scores.numbers().notes if "softmax of these scores" in each]
    assert note not in report.to_html() and "Hooks were active" in report.to_html()


def test_the_attention_of_a_padded_text_in_some_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CELLS", 2 * 5 * 6**2)
    monkeypatch.setattr(limits, "MAX_REASONS", 0)
    model = models.hooked("gpt2")
    given = {"input_ids": torch.tensor([[0, 5, 9, 11, 3, 8]]), "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}
    report = am.report(model, given)
    used = model.run(given, points=["pattern"])["pattern"][:, 0, :, 1:, 1:]
    assert report.scores.layers == (0, 2)
    assert "The model has 3 layers; 2 of them are shown." in report.notes
    np.testing.assert_allclose(report.pattern, used[[0, 2]], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(attention_of(page_data(report.to_html())), report.pattern, rtol=1e-3, atol=1e-6)


def test_of_a_large_model_the_heads_of_the_clearest_types_are_ablated(
    demo: am.HookedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, most = "Anna sang of shells and waves.", 5
    weights = sum(parameter.numel() for parameter in demo.base.parameters()) - demo.embedding.numel()
    tokens = (1 + limits.OTHER_TEXTS) * demo.encode(text).ids.numel()
    monkeypatch.setattr(limits, "MAX_WORK", most * weights * tokens)
    monkeypatch.setattr("attnmech.pages.report.types_of", lambda *arguments: am.head_types(demo))
    report = am.report(demo, text)
    assert report.types is not None and report.effects is not None and report.null is None
    clearest = [place for place, kind in report.types.main_types.items() if kind not in ("first", "self")][:most]
    assert {tuple(place) for place in report.effects.swept.nonzero().tolist()} == set(clearest)
    assert "5 of 32 heads were ablated, those of the clearest types" in " ".join(report.notes)
    space: dict[str, Any] = {}
    exec(report.calls["setup"], space)
    again = eval(report.measured[0].call, space)
    torch.testing.assert_close(again.effect, report.effects.effect, rtol=0, atol=1e-6, equal_nan=True)
    assert "this text and" in report.to_html()


def test_there_is_no_page_under_what_changes_the_scores() -> None:
    model, ids = models.hooked("bloom"), models.token_ids("bloom")[:1]
    for edit in (
        model.hooks({("scores", 1): lambda scores: scores * 0.5}),
        model.intervene(am.Intervention.remove_keys([(1, 2)], "first")),
    ):
        said = r"layer 1, head \d: the terms of its scores differ .* Does an active hook .* q, k or the scores"
        with edit, pytest.raises(ExactnessError, match=said):
            am.report(model, ids)


def test_the_certificate_on_the_page_is_that_of_the_weights_as_they_are() -> None:
    source = models.fresh("gpt2")
    model = am.load(source)
    assert am.report(model, torch.arange(5)).certificate is model.certificate
    with torch.no_grad():
        source.transformer.h[1].mlp.c_fc.bias.data += 0.5
    old = model.certificate
    renewed = am.report(model, torch.arange(5)).certificate
    assert renewed is not old
    assert renewed.weights == model.weights_hash != old.weights


@pytest.mark.usefixtures("no_sweeps")
def test_a_long_text_is_cut_and_the_page_says_so(demo: am.HookedModel) -> None:
    report = am.report(demo, " ".join(["Anna sang of shells and waves."] * 60))
    assert len(report.scores.tokens[0]) == limits.MAX_TOKENS
    assert report.notes[:2] == (ABOUT, "The text has 421 tokens; only the first 192 were run and are shown.")
    assert report.sources is None and "omitted to save space" in " ".join(report.notes)
    assert report.notes[1] in report.to_html()


@pytest.mark.usefixtures("no_sweeps")
def test_another_part_of_a_long_text_can_be_chosen(demo: am.HookedModel) -> None:
    text = " ".join(f"Anna sang of shells and waves {number}." for number in range(40))
    whole = demo.encode(text)
    report = am.report(demo, text, start=100)
    assert report.scores.tokens[0] == (whole.tokens[0][0], *whole.tokens[0][100:291])
    count = len(whole.tokens[0])
    said = (
        f"The text has {count} tokens; tokens 100 to 290 were run as a separate text after the first token and "
        "are shown"
    )
    assert any(note.startswith(said) for note in report.notes)
    assert f"text = model.encode({text!r}).part(100, 192)" in report.calls["setup"]
    torch.testing.assert_close(
        report.focus.first_top, am.attention_focus(demo, whole.part(100, 192)).first_top, equal_nan=True
    )
    with pytest.raises(InputError, match=rf"`start` must be from 0 to {count - 1}"):
        am.report(demo, text, start=count)
    assert not any("tokens" in note for note in am.report(demo, "Anna sang.", start=1).notes)  # nothing is left out


@pytest.mark.usefixtures("no_sweeps")
def test_the_page_says_what_the_demo_model_is_and_what_it_cannot_read(demo: am.HookedModel) -> None:
    report = am.report(demo, "The wug is new.")
    assert report.notes[0] == ABOUT
    assert report.notes[1].startswith("4 of the 9 tokens are single bytes")
    assert all(note in report.to_html() for note in report.notes)
    assert ABOUT not in am.report(models.hooked("bloom"), torch.arange(6)).notes


def test_hostile_names_and_tokens_are_text() -> None:
    hostile = "</script><script>window.owned=1</script>"
    model = am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(words=("[PAD]", "[UNK]", "[BOS]", hostile, "b")))
    model.name = hostile
    page = am.report(model, torch.tensor([[3, 4, 3]])).to_html()
    assert hostile not in page


@pytest.mark.parametrize("half", [0.5, 1.1])
def test_the_page_begins_in_the_most_telling_row(half: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of words at a distance; keys that are or follow an earlier copy come first if they receive half of the row."""
    monkeypatch.setattr("attnmech.pages.start.HALF", half)
    view = reported("Anna sang of shells, of shells.").scores.numbers()
    tokens = view.tokens
    words = {at for at, token in enumerate(tokens) if any(map(str.isalnum, token))} - {0}
    rows = [
        (float(view.pattern[layer, head, query, key]), query, key, layer, head)
        for layer, head in product(range(4), range(8))
        for query, key in product(words, words)
        if abs(query - key) > 1
    ]
    copied = [row for row in rows if tokens[row[1]] in (tokens[row[2]], tokens[row[2] - 1]) and row[2] < row[1]]
    share, query, key, *place = max(copied if half < 1 else rows)
    assert (half > 1 or share > half) and tokens[query] != tokens[key]
    first = TellingRows(view).first
    assert first is not None and [*first[:2]] == place
    row = first[2]
    assert (row.query, row.key, row.share) == (query, key, pytest.approx(share))
    if half < 1:
        told = f"from the second “of” to the first “shells”, the token after the first “of”: {100 * share:.0f}\u00a0%"
        assert row.sentence == told


def test_without_a_telling_row_the_page_begins_at_the_clearest_head(demo: am.HookedModel) -> None:
    report = reported("Anna sang.")
    assert report.types is not None and TellingRows(report.scores.numbers()).first is None
    assert report._page().start == (*report.types.example, 3)


def test_the_first_page_waits_for_types_and_ablations(demo: am.HookedModel) -> None:
    steps = list[str]()
    made = reports(demo, "Anna sang of shells, of shells.", step=steps.append)
    first = next(made)
    assert steps == [] and first.sources is first.types is None and first.measured == ()
    done = list[Any]()
    with watched(lambda *step: done.append(step)):
        (whole,) = made
    assert ("layers", 4, 4) in done and steps == [
        "tracing scores to their writers",
        "measuring the types of heads",
        "ablating 32 heads",
        "testing attention to the first token",
    ]
    assert whole.types is not None and whole.effects is not None and whole.null is not None
    assert first._page().start == whole._page().start and first._page().headline == whole._page().headline
    assert AWAITED in first_page(first) and AWAITED not in whole.to_html()
    types = {stack.label: whole.types for stack in demo.stacks.values()}
    *_, again = reports(demo, "Anna sang of shells, of shells.", types=types, first=first)
    assert again.to_html() == whole.to_html()


@pytest.mark.browser
def test_the_first_page_reloads_once_when_the_whole_one_is_there(chromium: Any, tmp_path: Path) -> None:
    report = reported(PARAGRAPH)
    path = tmp_path / "report.html"
    path.write_text(first_page(replace(report, types=None, measured=())), encoding="utf-8")
    with opening(chromium, path.read_text("utf-8"), path, ready="html[data-ready]") as page:
        page.click("[data-control=head][data-step='-1']")
        chosen = page.url
        assert page.inner_text("#awaited") == AWAITED
        page.wait_for_timeout(7000)
        assert page.inner_text("#awaited") == AWAITED and page.url == chosen
        report.write_html(path)
        page.wait_for_selector("#awaited", state="detached")
        page.wait_for_selector("html[data-ready]")
        assert page.url == chosen
        page.wait_for_timeout(4000)
        assert len(page.frames) == 1
