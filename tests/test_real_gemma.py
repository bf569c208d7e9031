"""Gemma 3 270M read from GGUF: statistics against transformers' eager attention, and the functions of its heads.

Norms of queries and keys, a norm after each attention, windows in five of six layers, two bases of rotation, one kv
head.
"""

from collections.abc import Callable

import packaged
import pytest
import torch
from eager import Trained
from torch import Tensor

import attnmech as am
from attnmech.runs.retrieval import repeated_sequences

TEXTS = ["The keys to the old wooden cabinet in the kitchen are still on the table.", "Anna lost the keys again."]
HEADS = [(0, 3), (5, 1), (11, 2), (17, 2)]
"""Heads from the first layer to the last; layers 5, 11 and 17 see the whole text."""


PRECISIONS = {
    name: pytest.param(name, marks=pytest.mark.xdist_group(f"gemma {name}")) for name in ("float32", "bfloat16")
}
IN_FLOAT32 = pytest.mark.parametrize("gemma", [PRECISIONS["float32"]], indirect=True)
IN_BFLOAT16 = pytest.mark.parametrize("gemma", [PRECISIONS["bfloat16"]], indirect=True)


@pytest.fixture(scope="session", params=PRECISIONS.values())
def gemma(request: pytest.FixtureRequest) -> Trained:
    return Trained.of(packaged.gemma(), request.param, TEXTS)


def test_the_certificate_holds(gemma: Trained) -> None:
    assert gemma.hooked.certificate.ok, repr(gemma.hooked.certificate)
    assert gemma.hooked.name.endswith("(dequantised from Q5_0, Q4_K, Q8_0, Q6_K)")


def test_logits_are_those_of_transformers(gemma: Trained) -> None:
    for text, raw in zip(TEXTS, gemma.raw, strict=True):
        error = gemma.hooked.run(text).logits[0].float() - raw.logits
        assert float(error.square().mean().sqrt()) <= gemma.within(1e-5, 0.06) * float(raw.logits.std())


@IN_BFLOAT16
def test_ablations(gemma: Trained) -> None:
    effects = am.ablate_heads(gemma.hooked, TEXTS, HEADS)
    close = gemma.within(5e-5, 6e-2)
    assert effects.before.tolist() == pytest.approx([raw.loss for raw in gemma.raw], abs=close)
    for layer, head in HEADS:
        expected = [raw.without(layer, head) for raw in gemma.raw]
        assert effects.per_text[layer, head].tolist() == pytest.approx(expected, abs=close)


@IN_FLOAT32
def test_the_known_heads_are_named(gemma: Trained) -> None:
    """The numbers on the default sequences, for three heads against transformers' attention."""
    types = am.head_types(gemma.hooked)
    known = {
        "induction": {(5, 1): 0.859, (11, 2): 0.633, (5, 2): 0.533},
        "previous": {(2, 3): 0.690, (4, 1): 0.591},
        "duplicate": {(3, 3): 0.696},
        "first": {(1, 1): 0.983},
    }
    claims = types.to_frame().set_index(["layer", "head", "type"])
    for kind, heads in known.items():
        for (layer, head), score in heads.items():
            assert kind in types.types_of(layer, head)
            assert float(types.scores[kind][layer, head]) == pytest.approx(score, abs=2e-3)
        best = divmod(int(types.scores[kind].nan_to_num(-1).argmax()), 4)
        assert best == next(iter(heads))
    assert all(bool(claims.by_position_alone[layer, head, "previous"]) for layer, head in known["previous"])
    count = int((claims.index.get_level_values("type") == "first").sum())
    assert count == 60

    offsets: dict[str, tuple[tuple[int, int], Callable[[int], int]]] = {
        "induction": ((5, 1), lambda half: half - 1),
        "previous": ((2, 3), lambda half: 1),
        "duplicate": ((3, 3), lambda half: half),
    }
    masses: dict[str, list[Tensor]] = {kind: [] for kind in offsets}
    for ids in repeated_sequences(gemma.hooked):
        half = ids.shape[1] // 2
        with torch.no_grad():
            pattern = torch.cat(gemma.plain.model(ids, output_attentions=True).attentions)
        for kind, (place, back) in offsets.items():
            first_row = 1 if kind == "previous" else half + 1  # of the second copy
            masses[kind].append(pattern[place].diagonal(-back(half))[first_row - back(half) :])
    for kind, (place, _) in offsets.items():
        expected = float(torch.cat(masses[kind]).mean())
        assert float(types.scores[kind][place]) == pytest.approx(expected, abs=1e-4), kind


@pytest.mark.slow
@IN_FLOAT32
def test_the_report(gemma: Trained) -> None:
    report = am.report(gemma.hooked, TEXTS[1])
    assert float((report.pattern.float() - gemma.raw[1].pattern).abs().max()) <= gemma.within(1e-5, 0.15)
    assert len(report.measured) == 2 and report.expected is not None
    page = report.to_html()
    assert "(dequantised from Q5_0, Q4_K, Q8_0, Q6_K)" in page
    assert (
        '<h1 id="headline">On this text, ' in page
        and "L5H1 gives 86\u00a0% of its attention to the token after" in page
    )
    assert 500_000 < len(page) < 8_000_000
