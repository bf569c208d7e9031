"""Methods on a user's modules, against the module with weights removed, and by hand."""

from typing import Any

import pytest
import torch
from comparing import refuses
from own import HEADS, LENGTH, TEXTS, Classifier, D, WithFurtherKeys, noise, randomised
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError, UnsupportedModelError

IMAGES, CLASSES = noise(6, 1, 6, 8), torch.tensor([0, 3, 6, 2, 2, 5])
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 3], [LENGTH - 1]])
SERIES = {"x": noise(TEXTS, LENGTH, 3), "padding": PADDING}


def output(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return module(*args, **kwargs)


@pytest.fixture(scope="module")
def classifier() -> tuple[nn.Module, am.HookedModel]:
    module = randomised(Classifier())
    return module, am.load(module, example=IMAGES, labels=am.architecture.PatchGrid(1, (6, 8), (2, 2)))


def test_ablation_is_the_module_without_the_head() -> None:
    module, answers = randomised(Classifier()), noise(6, 7, seed=4)
    effects = am.ablate_heads(am.load(module, example=IMAGES), IMAGES, heads=[(1, 3)], metric="mse", answers=answers)
    before = (output(module, IMAGES) - answers).square().mean(dim=1)
    with torch.no_grad():
        module.blocks[1].attn.out_proj.weight[:, 3 * D // HEADS :] = 0
    after = (output(module, IMAGES) - answers).square().mean(dim=1)
    assert effects.effect[1, 3].item() == pytest.approx((after - before).double().mean().item(), abs=1e-6)


def test_metrics_by_name_are_those_of_the_output(classifier: tuple[nn.Module, am.HookedModel]) -> None:
    module, model = classifier
    effects = am.ablate_heads(model, IMAGES, heads=[(0, 0)], metric="accuracy", answers=CLASSES)
    assert torch.equal(effects.before, (output(module, IMAGES).argmax(dim=-1) == CLASSES).double())
    for options, message in (
        ({}, "`metric` of a module of your own must be one of 'accuracy'"),
        ({"metric": "mse"}, "metric='mse' needs `answers`"),
        ({"metric": "mse", "answers": torch.zeros(6, 2)}, r"`answers` must have the shape of the output, \[6, 7\]"),
    ):
        refuses(message, am.ablate_heads, model, IMAGES, **options)
    assert am.prune_heads(model, IMAGES, metric="accuracy", answers=CLASSES).higher_is_better


def test_reports_of_images_and_without_a_stream(classifier: tuple[nn.Module, am.HookedModel]) -> None:
    model = classifier[1]
    report, pattern = am.report(model, IMAGES), model.run(IMAGES, points=["pattern"])["pattern", 0]
    page = report.to_html()
    assert "2,3" in page and "Classifier" in page and len(report.texts) == 6
    for number, one in enumerate(report.texts):
        torch.testing.assert_close(one.pattern[0], pattern[number], rtol=0, atol=1e-6)
    assert am.joint_embedding(model, IMAGES, heads=[(0, 1)]).provenance.tokens[0][1] == "0,0"
    x = noise(1, LENGTH, D)
    bare = am.load(randomised(nn.MultiheadAttention(D, HEADS, batch_first=True)), example=(x, x, x))
    told = "What heads write is omitted: its attention is not inside a module that takes and returns a stream."
    assert told in am.report(bare, (x, x, x)).to_html()


def test_focus_never_takes_a_further_key_for_a_token() -> None:
    model = am.load(randomised(WithFurtherKeys()), example=SERIES)
    focus = am.attention_focus(model, SERIES)
    pattern = model.run(SERIES, points=["pattern"])["pattern", 1].double()
    assert pattern.shape == (TEXTS, 5, LENGTH, LENGTH + 2)
    distances, firsts = [], []
    for text in range(TEXTS):
        # The first row is a separate class.
        for row in range(1, int((~PADDING[text]).sum())):
            weights = pattern[text, 2, row]
            distances.append(sum(float(weights[key]) * abs(row - key) for key in range(LENGTH)))
            firsts.append(float(weights.argmax() == 0))
    assert len(distances) == 20
    assert focus.distance[1, 2].item() == pytest.approx(sum(distances) / 20, abs=1e-6)
    assert focus.first_top[1, 2].item() == pytest.approx(sum(firsts) / 20, abs=1e-6)
    # A corpus of calls.
    calls = ({name: value[[row]] for name, value in SERIES.items()} for row in range(TEXTS))
    streamed = am.attention_focus(model, calls)
    torch.testing.assert_close(focus.entropy, streamed.entropy)
    assert streamed.documents == TEXTS


def test_the_ledger_of_further_keys_is_exact() -> None:
    module = randomised(WithFurtherKeys())
    model = am.load(module, example=SERIES)
    ran = model.run(SERIES, points=["q", "scores"])
    for centre in (None, "mean"):
        split = am.decompose_scores(model, SERIES, centre=centre)
        total = sum(term for name, term in split.terms.items() if name != "mask")[:, 1]
        assert split.key_tokens[0][-2:] == ("bias_kv", "zero")
        # The learned key is scored as it is, and zeros give 0.
        expected = torch.einsum("bqhd,hd->bhq", ran["q", 1], module.two.bias_k.detach().view(5, 4)) / 2
        torch.testing.assert_close(total[..., -2], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(total[..., -1], torch.zeros_like(expected), atol=1e-5, rtol=0)


def test_a_key_that_is_no_token_has_no_stream_to_be_compared_with() -> None:
    module = Classifier()
    for block in module.blocks:
        block.attn = nn.MultiheadAttention(D, HEADS, batch_first=True, add_bias_kv=True)
    module = randomised(module)
    with torch.no_grad():
        module.blocks[1].attn.bias_k.mul_(6)
    model = am.load(module, example=IMAGES)
    updates = am.residual_updates(model, IMAGES)
    ran = model.run(IMAGES, points=["pattern", "v", "resid_pre"])
    top, values, stream = ran["pattern", 1].argmax(dim=-1), ran["v", 1], ran["resid_pre", 1]
    W_O = module.blocks[1].attn.out_proj.weight.detach().T.reshape(HEADS, D // HEADS, D)
    beyond = 0
    for head in range(HEADS):
        found = []
        for text in range(len(IMAGES)):
            for key in top[text, head, 1:].tolist():
                beyond += key == 13
                if key < 13:
                    found.append(float((values[text, key, head] @ W_O[head]).norm() / stream[text, key].norm()))
        assert updates["target_magnitude"].mean[1, head].item() == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert 0 < beyond < len(IMAGES) * HEADS * 12


def test_types_of_heads_on_tensors() -> None:
    """A head that attends to the previous position is claimed, although labels are not words."""
    module = randomised(nn.MultiheadAttention(LENGTH, 1, batch_first=True, bias=False))
    with torch.no_grad():
        eye = torch.eye(LENGTH)
        module.in_proj_weight[:LENGTH], module.in_proj_weight[LENGTH : 2 * LENGTH] = 12 * eye.roll(-1, dims=0), eye
    x = eye.expand(1, -1, -1).contiguous()
    model = am.load(module, example=(x, x, x), labels=[f"t{number}" for number in range(LENGTH)])
    noisy = [x + 0.1 * noise(1, LENGTH, LENGTH, seed=seed) for seed in range(8)]
    types = am.head_types(model, iter((each, each, each) for each in noisy))
    assert types.types_of(0, 0) == ("previous",)
    refuses("repeated tokens are for models of text", am.head_types, model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: am.residual_drift(model, IMAGES), "needs the tokens of a language model"),
        (lambda model: am.decompose_by_source(model, IMAGES), "reads tensors instead of tokens"),
        (lambda model: model.generate(IMAGES), "reads tensors instead of tokens"),
        (lambda model: am.untrained(model), "make a new instance of your module"),
    ],
)
def test_what_needs_tokens_says_so(classifier: tuple[nn.Module, am.HookedModel], call: Any, message: str) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        call(classifier[1])
