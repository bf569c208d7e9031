"""A real decoder read from GGUF: statistics against transformers' eager attention, and known heads.

SmolLM2-135M-Instruct; its stream holds numbers up to 28,000, which float16 barely holds.
"""

from collections.abc import Callable
from copy import deepcopy

import packaged
import pytest
import torch
from eager import Trained
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents

TEXTS = [
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889.",
    "The keys to the old wooden cabinet in the kitchen are still on the table.",
]


# The slowest first; each in one process, where processes are given groups (`--dist loadgroup`).
PRECISIONS = {
    name: pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("float16", "float32", "bfloat16")
}


def in_precision(*names: str) -> pytest.MarkDecorator:
    """A test in some of the precisions; the other tests of its statistic cover the others."""
    return pytest.mark.parametrize("decoder", [PRECISIONS[name] for name in names], indirect=True)


@pytest.fixture(scope="session", params=PRECISIONS.values())
def decoder(request: pytest.FixtureRequest) -> Trained:
    return Trained.of(packaged.smollm2(), request.param, TEXTS)


def test_the_certificate_holds(decoder: Trained) -> None:
    assert decoder.hooked.certificate.ok, repr(decoder.hooked.certificate)
    assert decoder.hooked.name.endswith("(dequantised from Q4_1, Q8_0)")


def test_logits_are_as_exact_as_transformers_own(decoder: Trained) -> None:
    own = deepcopy(decoder.plain).to(decoder.hooked.dtype)
    ours, theirs = [], []
    for text, raw in zip(TEXTS, decoder.raw, strict=True):
        ours.append(decoder.hooked.run(text).logits[0].float() - raw.logits)
        with torch.no_grad():
            theirs.append(own(raw.ids).logits[0].float() - raw.logits)
    error, allowed = (float(torch.cat(each).square().mean().sqrt()) for each in (ours, theirs))
    spread = float(torch.cat([raw.logits for raw in decoder.raw]).std())
    assert error <= 2 * allowed + 1e-5 * spread
    assert error <= decoder.within(1e-5, 0.06, 0.006) * spread


def test_the_terms_of_scores_add_up_to_transformers_attention(decoder: Trained) -> None:
    for text, raw in zip(TEXTS, decoder.raw, strict=True):
        split = am.decompose_scores(decoder.hooked, text)
        assert float((split.residual / split.largest).max()) <= decoder.within(1e-6, 3e-2, 4e-3)
        scores = sum(split.terms[name].float() for name in split.terms)[0]
        # A row's probabilities determine its scores up to a constant.
        seen = (raw.pattern > 1e-20) & (raw.pattern[..., :1] > 1e-20)
        expected = raw.pattern.log() - raw.pattern[..., :1].log()
        apart = ((scores - scores[..., :1]) - expected)[seen].abs()
        assert float(apart.mean()) <= decoder.within(5e-6, 6e-2, 1e-2)


def test_focus(decoder: Trained) -> None:
    focus = am.attention_focus(decoder.hooked, TEXTS)
    of_rows: dict[str, Callable[[Tensor], Tensor]] = {
        "first_mass": lambda pattern: pattern[..., 1:, 0],
        "previous_mass": lambda pattern: pattern.diagonal(-1, -2, -1),
        "self_mass": lambda pattern: pattern.diagonal(0, -2, -1)[..., 1:],
        "entropy": lambda pattern: torch.special.entr(pattern).sum(dim=-1)[..., 1:],
    }
    for name, rows in of_rows.items():
        expected = torch.cat([rows(raw.pattern) for raw in decoder.raw], dim=-1).mean(dim=-1)
        apart = float((getattr(focus, name) - expected).abs().max())
        assert apart <= decoder.within(1e-6, 2e-2, 3e-3) * (3 if name == "entropy" else 1), name
    assert int(focus.previous_mass.argmax()) == 16 * 9 + 0
    assert float(focus.previous_mass[16, 0]) == pytest.approx(0.735, abs=5e-3)
    by_layer = focus.first_mass.mean(dim=1)
    assert by_layer[[0, 20, 24]].tolist() == pytest.approx([0.103, 0.861, 0.879], abs=5e-3)


@in_precision("float32")
def test_a_head_attends_to_ends_of_sentences(decoder: Trained) -> None:
    types = am.head_types(decoder.hooked, documents(12))
    above = types.excess["sentence end"]
    assert divmod(int(above.nan_to_num(-1).argmax()), above.shape[1]) == (1, 1)
    assert float(types.scores["sentence end"][1, 1]) > 0.4 > 3 * float(types.baselines["sentence end"][1, 1])


@pytest.fixture(scope="module")
def repeated() -> Tensor:
    """Four texts: <|endoftext|>, then 40 random tokens twice."""
    half = torch.randint(1000, 40_000, (4, 40), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.zeros(4, 1, dtype=torch.long), half, half], dim=1)


@in_precision("float16", "bfloat16")
def test_induction_heads_on_repeated_random_tokens(decoder: Trained, repeated: Tensor) -> None:
    """The numbers equal those from transformers' attention."""
    acts = decoder.hooked.run(repeated, points=["pattern", "logits"])
    # From each token of the second half to the one after its first occurrence.
    induction = torch.stack(
        [acts["pattern", layer].float().diagonal(-39, -2, -1)[..., 2:].mean(dim=(0, 2)) for layer in range(30)]
    )
    close = decoder.within(1e-3, 1e-2, 2e-3)
    found = [float(induction[layer, head]) for layer, head in ((18, 6), (17, 4), (17, 3))]
    assert found == pytest.approx([0.926, 0.795, 0.772], abs=close)
    assert int(induction.argmax()) == 18 * 9 + 6
    assert int((induction > 0.3).sum()) == 12
    surprisal = torch.nn.functional.cross_entropy(
        acts.logits[:, :-1].float().transpose(1, 2), repeated[:, 1:], reduction="none"
    )
    halves = [float(surprisal[:, :40].mean()), float(surprisal[:, 40:].mean())]
    assert halves == pytest.approx([13.93, 2.13], abs=decoder.within(5e-3, 6e-2, 1e-2))


@in_precision("float32")
def test_what_known_heads_score_by(decoder: Trained, repeated: Tensor) -> None:
    """A previous-token head scores by position, induction heads by content: with each text's own means."""
    found = am.variance_shares(decoder.hooked, repeated, first_key=False, layers=[16, 17, 18])
    known = {
        (16, 0): {"position": 0.974, "key_bias": 0.005, "query_key": 0.003, "query_bias": 0.019},
        (18, 6): {"position": 0.012, "key_bias": 0.246, "query_key": 0.738, "query_bias": 0.004},
        (17, 4): {"position": -0.018, "key_bias": 0.336, "query_key": 0.676, "query_bias": 0.005},
        (17, 3): {"position": 0.009, "key_bias": 0.318, "query_key": 0.670, "query_bias": 0.003},
    }
    for place, shares in known.items():
        assert {name: float(found[name].mean[place]) for name in shares} == pytest.approx(shares, abs=3e-3)


@in_precision("bfloat16")
def test_the_previous_token_head_looks_there_because_of_its_position(decoder: Trained, repeated: Tensor) -> None:
    means = am.mean_qk(decoder.hooked, repeated, layers=[16])

    def previous() -> float:
        pattern = decoder.hooked.run(repeated, points=["pattern"], layers=[16])["pattern", 16][:, 0].float()
        return float(pattern.diagonal(-1, -2, -1)[:, 1:].mean())

    found = {"": previous()}
    for term in ("position", "query_key"):
        with decoder.hooked.intervene(am.Intervention.scale(term, 0.0, [(16, 0)], centre=means)):
            found[term] = previous()
    expected = {"": 0.915, "position": 0.0024, "query_key": 0.905}
    assert found == pytest.approx(expected, abs=decoder.within(2e-3, 8e-3, 2e-3))


@in_precision("float32")
def test_the_known_heads_are_named(decoder: Trained) -> None:
    types = am.head_types(decoder.hooked)
    assert all("induction" in types.types_of(*head) for head in ((18, 6), (17, 4), (17, 3)))
    claims = types.to_frame().set_index(["layer", "head", "type"])
    assert bool(claims.by_position_alone[16, 0, "previous"])
    assert 10 <= int((claims.index.get_level_values("type") == "induction").sum()) <= 13
    example = types.example_of(18, 6)
    assert example is not None and example.before[-1] == example.around[example.key_at - 1]
    # The direct path misses these heads, which act through later layers; layer 23 writes the answer.
    assert int(types.writes["induction"].argmax()) == 23 * 9 + 2
