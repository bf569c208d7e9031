"""Attention between segments: against loops over captured patterns, heads planted by hand, and any way of running."""

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import models
import pytest
import torch
from scipy.stats import kurtosis
from tokenizing import LACKING, WHOLE, batch_of, wordpiece
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError, MissingPointError
from attnmech.maths.intervals import TextMeans
from attnmech.methods.segments import sums as segment_sums
from attnmech.methods.segments.formulas import ByDistance, peakedness, receivers
from attnmech.methods.segments.segmentation import Segmented
from attnmech.model.parts.pieces import text_of

NAMES = ("bloom", "llama", "gpt2", "bert", "mistral", "gpt_oss", "gemma2")
SPANS = [[(0, 1), (1, 4), (4, 7)], [(0, 3), (3, 5)], [(0, 2), (2, 3)]]
"""Segments of the three texts of `models.padded`, of 7, 5 and 3 tokens."""


def by_hand(pattern: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    found = torch.zeros(len(spans), len(spans), dtype=torch.float64)
    for s, (first, last) in enumerate(spans):
        for t, (start, end) in enumerate(spans):
            for i in range(first, last):
                for j in range(start, end):
                    found[s, t] += float(pattern[i, j]) / (last - first)
    return found


def patterns_of(model: am.HookedModel, given: Any, text: int) -> Tensor:
    """[layer head query key] of one text, without padding."""
    acts = model.run(given, points=["pattern"])
    real = acts.batch.mask[text]
    return torch.stack([acts["pattern", layer][text][:, real][..., real] for layer in range(model.n_layers)])


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "side", "dtype"),
    [
        *((name, ("left", "right")[place % 2], torch.float32) for place, name in enumerate(NAMES)),
        ("llama", "right", torch.float64),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_cells_are_those_of_a_loop(name: str, side: str, dtype: torch.dtype, first: bool) -> None:
    """With the first token as a key, or without it."""
    model, given = models.hooked(name, dtype), models.padded(name, side)
    found = am.segment_attention(model, given, SPANS, first=first)
    for text, spans in enumerate(SPANS):
        pattern = patterns_of(model, given, text).clone()
        if not first:
            pattern[..., 0] = 0
        mass, expected = found.mass(text), found.expected(text)
        assert mass.shape == (model.n_layers, model.n_heads, len(spans), len(spans)) and mass.dtype == dtype
        for layer, head in itertools.product(range(model.n_layers), range(model.n_heads)):
            cells, close = by_hand(pattern[layer, head], spans), 1e-6 if dtype == torch.float32 else 1e-14
            torch.testing.assert_close(mass[layer, head].double(), cells, atol=close, rtol=close)
            # The baseline has the rows' totals.
            torch.testing.assert_close(expected[layer, head].double().sum(-1), cells.sum(-1), atol=1e-4, rtol=1e-3)
            if name != "gpt_oss" and first:
                torch.testing.assert_close(cells.sum(-1), torch.ones(len(spans)).double(), atol=1e-5, rtol=1e-5)


def banded(weights: Tensor, length: int, both_ways: bool, first_key: int = 0) -> Tensor:
    """The pattern of a head that attends by distance alone."""
    place = torch.arange(length)
    distance = place[:, None] - place
    seen = (place >= first_key) & ((distance >= 0) | torch.tensor(both_ways))
    chosen = torch.where(seen, weights[distance + length - 1], 0.0)
    return chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("first_key", [0, 1])
@pytest.mark.parametrize("window", [4, 50])
def test_a_head_that_attends_by_distance_alone_is_its_own_baseline(
    both_ways: bool, first_key: int, window: int
) -> None:
    length, starts = 23, [0, 4, 5, 16, 23]
    weights = torch.rand(2 * length - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[(torch.arange(2 * length - 1) - length + 1).abs() >= window] = 0
    pattern = banded(weights, length, both_ways, first_key)
    distances = range(1 - length if both_ways else 0, length)
    sums = torch.stack([pattern.diagonal(-d).sum() for d in distances])
    fit = ByDistance.fitted(sums, pattern.sum(-1), first_key)
    cells = by_hand(pattern, list(pairwise(starts)))
    torch.testing.assert_close(fit.cells(starts), cells, atol=2e-4, rtol=0)


def test_each_head_is_fitted_as_if_it_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head is fitted as if alone, also if other heads converge sooner."""
    scores = 6 * torch.randn(2, 3, 31, 31, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores *= torch.tensor([[0.0, 0.2, 1.0], [0.5, 0.0, 2.0]], dtype=torch.float64)[..., None, None]
    pattern = scores.masked_fill(~torch.ones(31, 31).tril().bool(), -torch.inf).softmax(dim=-1)
    sums = torch.stack([pattern.diagonal(-d, dim1=-2, dim2=-1).sum(dim=-1) for d in range(31)], dim=-1)
    together = ByDistance.fitted(sums, pattern.sum(-1))
    for layer in range(2):
        for head in range(3):
            alone = ByDistance.fitted(sums[layer, head], pattern[layer, head].sum(-1))
            assert torch.equal(together.weights[layer, head], alone.weights)
            assert torch.equal(together.at(layer).factors[head], alone.factors)
            p = alone.factors[:, None] * alone.weights[(torch.arange(31)[:, None] - torch.arange(31)).clamp_min(0)]
            of_fit = torch.stack([p.tril().diagonal(-d).sum() for d in range(31)])
            assert float((of_fit - sums[layer, head]).abs().sum()) < 2e-5 * 31
    model, ids = models.hooked("bloom"), models.token_ids("bloom", 1)
    whole = am.segment_attention(model, ids, SPANS[0]).state
    monkeypatch.setattr(segment_sums, "_FITTED", 1)
    layer_by_layer = am.segment_attention(model, ids, SPANS[0]).state
    assert all(torch.equal(whole[name], layer_by_layer[name]) for name in whole)


def test_baseline_by_distance_in_segments() -> None:
    found = am.segment_attention(models.hooked("llama"), models.token_ids("llama", 1), SPANS[0])
    mass, alike = found.mass()[0, 1], found.expected(by="segments")[0, 1]
    assert float(alike[1, 0]) == pytest.approx(float(mass[1, 0] + mass[2, 1]) / 2, abs=1e-6)
    assert float(alike[2, 0]) == pytest.approx(float(mass[2, 0]))
    assert float(alike[1, 1]) == pytest.approx(float(mass.diagonal().mean()), abs=1e-6)


def test_receivers_and_kurtosis_as_published() -> None:
    """Thought Anchors: column means of the mean per pair of tokens, from `gap` on; scipy kurtosis."""
    spans = [(2 * i, 2 * i + 2) for i in range(9)] + [(18, 19)]
    ids = models.token_ids("bloom", 1, 19)
    model = models.hooked("bloom")
    found = am.segment_attention(model, ids, spans, gap=2)
    pattern = patterns_of(model, ids, 0)[1, 2].double()
    per_token = by_hand(pattern, spans) / torch.tensor([b - a for a, b in spans])
    for gap in (1, 2):
        scores = found.receivers(gap=gap)[1, 2]
        for t in range(10 - gap):
            assert float(scores[t]) == pytest.approx(float(per_token[t + gap :, t].mean()), rel=1e-4)
        assert bool(scores[10 - gap :].isnan().all())
    expected = kurtosis(found.receivers(gap=2)[1, 2, :8].double().numpy())
    assert float(found.kurtosis[1, 2]) == pytest.approx(float(expected), rel=1e-4)
    frame = found.receiver_heads
    assert frame["kurtosis"].is_monotonic_decreasing
    assert bool(peakedness(torch.full((2, 5), 0.1)).isnan().all())
    assert bool(peakedness(receivers(torch.rand(4, 4), 1)[None]).isnan().all())
    assert float(frame["kurtosis"].max()) == pytest.approx(float(found.kurtosis.max()))


TRIPLES = [(start, start + 3) for start in range(0, 36, 3)]


def random_texts(count: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randint(3, 40, (count, 36), generator=torch.Generator().manual_seed(seed)))


def test_a_planted_receiver_is_named() -> None:
    """From every later token, L1H1 gives half of its attention to one segment of each text."""
    model, texts = models.hooked("llama"), random_texts(8)
    chosen = [int(text[0]) % 6 for text in texts]

    def planted(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        for text, segment in enumerate(chosen):
            pattern[text, 1, 3 * segment + 3 :] *= 0.5
            pattern[text, 1, 3 * segment + 3 :, 3 * segment + 1] += 0.5
        return pattern

    with model.hooks({("pattern", 1): planted}):
        found = am.segment_attention(model, torch.stack(texts), [TRIPLES] * 8, gap=1)
    frame = found.receiver_heads
    assert frame.loc[frame.receiver, ["layer", "head"]].to_numpy().tolist() == [[1, 1]]
    assert [int(scores[:11].argmax()) for scores in (found.receivers(text)[1, 1] for text in range(8))] == chosen
    scores = [
        [cells[layer, head].double() for cells in (found.per_token(text), found.expected(text) / 3)]
        for layer, head in zip(frame.layer, frame["head"], strict=True)
        for text in range(8)
    ]
    peaks = [
        [float(kurtosis([float(cells[later:, place].mean()) for later, place in [(t + 1, t) for t in range(11)]]))
         for cells in pair]
        for pair in scores
    ]  # fmt: skip
    by_head = torch.tensor(peaks, dtype=torch.float64).view(len(frame), 8, 2)
    expected = by_head[..., 1].clamp_min(0.0)
    assert frame["kurtosis"].tolist() == pytest.approx(by_head[..., 0].mean(dim=1).tolist(), rel=1e-3, abs=1e-3)
    assert frame.kurtosis_expected.tolist() == pytest.approx(expected.mean(dim=1).tolist(), rel=1e-3, abs=1e-3)
    low, _ = TextMeans.of_values(by_head[..., 0] - expected).simultaneous()
    assert frame.receiver.tolist() == (low > 0).tolist()


def test_random_weights_have_no_receivers() -> None:
    """18 models; a false claim in more than 5 % of them would be one."""
    for name in ("llama", "bloom", "gpt_neox"):
        weights = models.fresh(name)
        model = am.load(weights)
        for seed in range(6):
            models.randomised(weights, seed=seed)
            found = am.segment_attention(model, random_texts(10, seed), [TRIPLES] * 10, gap=1)
            assert not found.receiver_heads.receiver.any()
    few = am.segment_attention(model, random_texts(6), [[(0, 12), (12, 24), (24, 36)]] * 6, gap=1)
    assert few.receiver_heads["kurtosis"].isna().all() and not few.receiver_heads.receiver.any()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_parts_by_distance_in_segments(name: str) -> None:
    model, given = models.hooked(name), models.padded(name)
    found = am.segment_attention(model, given, SPANS)
    sums = dict.fromkeys(("own", "previous", "further"), 0.0)
    rows = dict.fromkeys(sums, 0)
    for text, spans in enumerate(SPANS):
        cells = by_hand(patterns_of(model, given, text)[1, 2], spans)
        for s, (a, b) in enumerate(spans):
            for part, columns in (("own", [s]), ("previous", [s - 1]), ("further", range(s - 1))):
                there = [t for t in columns if t >= 0]
                if there:
                    sums[part] += (b - a) * float(cells[s, there].sum())
                    rows[part] += b - a
    for part in sums:
        assert float(found[part].mean[1, 2]) == pytest.approx(sums[part] / rows[part], rel=1e-4)


def test_a_corpus_keeps_no_cells() -> None:
    with pytest.raises(MissingPointError, match="not for an iterator"):
        am.segment_attention(models.demo(), iter(documents(2))).mass()


@pytest.mark.parametrize(
    ("tokens", "kind", "expected"),
    [
        (["Hi", ".", '"', " He", " ran", " 3", ".", "14", "!", "?", " So"], "sentence", [0, 3, 10]),
        (["你好", "。", "再见", "。"], "sentence", [0, 2]),
        (["a", "\n", "\n", "b", ".\n", " c"], "line", [0, 3, 5]),
        (["a", " b"], "document", [0]),
        (["a", ".", " ", "b"], "sentence", [0, 3]),
    ],
)
def test_where_segments_begin(tokens: list[str], kind: str, expected: list[int]) -> None:
    ids = torch.arange(len(tokens))[None]
    batch = am.reducers.Batch(
        ids, torch.ones_like(ids, dtype=torch.bool), (tuple(tokens),), None, texts_of=lambda _: ()
    )
    assert Segmented.of(batch, kind).starts[0] == (*expected, len(tokens))


def test_figures_and_page() -> None:
    found = am.segment_attention(models.demo(), documents(6))
    assert found.plot("mass", layer=1, head=2).data[0].z[1][0] == pytest.approx(float(found.mass()[1, 2, 1, 0]))
    for figure in ("earlier_excess", "excess", "per_token", "receivers"):
        assert found.plot(figure).data
    assert "Which heads attend to earlier sentences" in found.to_html()
    assert found.show("model", layer=2).data["layers"] == [2]


ONE = torch.tensor([[5, 7, 9, 4]])
BAD: list[tuple[Callable[[am.HookedModel], Any], str]] = [
    (lambda m: am.segment_attention(m, ONE, [(0, 2), (1, 4)]), "segment 1 of text 0, (1, 4), overlaps"),
    (lambda m: am.segment_attention(m, ONE, [(0, 1), (3, 4)]), "tokens 1 to 2 of text 0 belong to no segment"),
    (lambda m: am.segment_attention(m, ONE, [(0, 2)]), "tokens 2 to 3 of text 0 belong to no segment"),
    (lambda m: am.segment_attention(m, ONE, [(0, 9)]), "≤ 4, the number of tokens"),
    (lambda m: am.segment_attention(m, ONE, [(0, 0), (0, 4)]), "must satisfy 0 ≤ start < end"),
    (lambda m: am.segment_attention(m, ONE, []), "got an empty list"),
    (lambda m: am.segment_attention(m, ONE, "word"), "must be one of sentence, line, document"),
    (lambda m: am.segment_attention(m, iter([ONE]), [(0, 4)]), "spans need a list of texts"),
    (lambda m: am.segment_attention(m, ONE, "document", gap=0), "`gap` must be a whole number"),
    (lambda m: am.segment_attention(m, ONE.repeat(2, 1), [(0, 4)]), "for each of the 2 texts"),
    (lambda m: am.segment_effects(m, ONE.repeat(2, 1)), "takes one text; got 2"),
    (lambda m: am.segment_effects(m, ONE, [(0, 4)]), "at least two segments"),
    (
        lambda m: am.segment_attention(models.hooked("t5"), models.inputs_of("t5"), "document", stack="cross"),
        "not in cross-attention",
    ),
    (
        lambda m: am.segment_effects(models.hooked("bert_headless"), ONE, [(0, 2), (2, 4)]),
        "a metric needs logits, but this model was loaded without a head",
    ),
    (lambda m: am.segment_effects(m, ONE, [(0, 2), (2, 4)], answers=3), "has no argument `answers`"),
    (lambda m: am.segment_effects(m, ONE, [(0, 2), (2, 4)], partial=True), "has no argument `partial`"),
]


@pytest.mark.parametrize(("call", "words"), BAD)
def test_bad_input(call: Callable[[am.HookedModel], Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call(models.hooked("llama"))
    assert words in str(caught.value)


def test_too_many_cells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_sums, "KEPT_BYTES", 100)
    with pytest.raises(InputError, match="Use longer segments"):
        am.segment_attention(models.hooked("llama"), ONE, [(0, 2), (2, 4)])


# -- where sentences and lines end -----------------------------------------------------------------------------


SENTENCES = [
    ["The keys are old.", " They cost 3.14!", " Is attnmech.py here?"],
    ["“It rains.”", " He said: «Go!»", " (Then he left.)", " So."],
    ["« Il part. »", " Elle boit…", " Peut-être."],
    ["Er sagt: „Ja.“", " Dann geht er."],
    ["今天下雨。", "他说：“好。”", "“行！”", "３．１４是数！", "对吗?", "对"],
    ["本です．", "次「はい。」", "終"],
    ["यह सच है।", " वह गया॥", "वह आया।"],
    ["هل أنت هنا؟", " نعم۔", "لا."],
    ["Այո։", " Ոչ։"],
    ["ጥሩ።", "ነው።"],
    ["Τι\u037e", " Ναι."],
    ["Hm...", " Yes?!", " 😀!", " No"],
]


def segments(tokenizer: object, text: str, kind: str) -> list[str]:
    batch = batch_of(tokenizer, text)
    (starts,) = Segmented.of(batch, kind).starts
    (special,) = batch.is_special.tolist()
    own = ["" if no_text else token for token, no_text in zip(text_of(batch)[0], special, strict=True)]
    return ["".join(own[start:end]) for start, end in pairwise(starts)]


@pytest.mark.parametrize("name", WHOLE)
def test_sentences_end_where_their_marks_do(name: str) -> None:
    for sentences in SENTENCES:
        found = segments(WHOLE[name](), "".join(sentences), "sentence")
        # A token of its own for the space before a sentence stands at the end of the sentence before.
        assert [segment.strip() for segment in found] == [sentence.strip() for sentence in sentences]
        assert "".join(found).strip() == "".join(sentences)


@pytest.mark.parametrize("name", LACKING)
def test_marks_that_the_vocabulary_lacks_end_sentences(name: str) -> None:
    for sentences in (SENTENCES[5], *SENTENCES[7:10], ["यह सच।", "वह गया॥", "वह"]):
        own = segments(LACKING[name]("x", "।"), " ".join(sentences), "sentence")
        assert ["".join(segment.split()) for segment in own] == ["".join(sentence.split()) for sentence in sentences]


@pytest.mark.parametrize("name", WHOLE)
def test_lines_end_at_every_line_break(name: str) -> None:
    lines = ["\nOne. Two", "\r\n\r\n你好", "\u2028 three\n"]
    found = [segment.strip() for segment in segments(WHOLE[name](), "".join(lines), "line")]
    assert found == [line.strip() for line in lines]


def test_without_spaces_every_mark_ends_a_sentence_but_one_in_a_number() -> None:
    tokenizer = wordpiece("it", "is", "3", ".", "14", "yes", "!", '"')
    assert segments(tokenizer, 'It is 3.14. "Yes!" It is', "sentence") == ['itis3.14."', 'yes!"', "itis"]
