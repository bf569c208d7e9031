"""Methods on a user's modules, against the module with weights removed, and by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from own import HEADS, LENGTH, TEXTS, Classifier, D, WithFurtherKeys, layer, noise, randomised
from torch import Tensor, nn

import attnmech as am
from attnmech.errors import InputError, UnsupportedModelError

IMAGES, CLASSES = noise(6, 1, 6, 8), torch.tensor([0, 3, 6, 2, 2, 5])
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 3], [LENGTH - 1]])
SERIES = {"x": noise(TEXTS, LENGTH, 3), "padding": PADDING}


def without_head(weight: Tensor, head: int, d_head: int) -> None:
    """Removes a head from the input of W_O in a user's module."""
    with torch.no_grad():
        weight[:, head * d_head : (head + 1) * d_head] = 0


def output(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return module(*args, **kwargs)


@pytest.mark.parametrize("head", [0, 3])
def test_ablation_is_the_module_without_the_head(head: int) -> None:
    module = randomised(Classifier())
    answers = noise(6, 7, seed=4)
    model = am.load(module, example=IMAGES)
    effects = am.ablate_heads(model, IMAGES, heads=[(1, head)], metric="mse", answers=answers)
    before = (output(module, IMAGES) - answers).square().mean(dim=1)
    without_head(module.blocks[1].attn.out_proj.weight, head, D // HEADS)
    after = (output(module, IMAGES) - answers).square().mean(dim=1)
    assert effects.effect[1, head].item() == pytest.approx((after - before).double().mean().item(), abs=1e-6)


def test_metrics_by_name_are_those_of_the_output() -> None:
    module = randomised(Classifier())
    model = am.load(module, example=IMAGES)
    effects = am.ablate_heads(model, IMAGES, heads=[(0, 0)], metric="accuracy", answers=CLASSES)
    right = (output(module, IMAGES).argmax(dim=-1) == CLASSES).double()
    assert torch.equal(effects.before, right)
    with pytest.raises(InputError, match="`metric` of a module of your own must be one of 'accuracy'"):
        am.ablate_heads(model, IMAGES)
    with pytest.raises(InputError, match="metric='mse' needs `answers`"):
        am.ablate_heads(model, IMAGES, metric="mse")
    with pytest.raises(InputError, match=r"`answers` must have the shape of the output, \[6, 7\]"):
        am.ablate_heads(model, IMAGES, metric="mse", answers=torch.zeros(6, 2))
    curve = am.prune_heads(model, IMAGES, metric="accuracy", answers=CLASSES)
    assert curve.higher_is_better


def test_patching_all_heads_of_the_only_attention_gives_the_clean_output() -> None:
    """In a single layer whose output is read at every position, patching all of z gives the clean run."""
    module = randomised(nn.TransformerEncoder(layer(), 1))
    model = am.load(module, example=noise(2, LENGTH, D))
    clean, corrupted = noise(2, LENGTH, D), noise(2, LENGTH, D, seed=9)
    acts = model.run(clean, points=["z"])
    heads = [(0, head) for head in range(HEADS)]
    with model.intervene(am.Intervention.replace(heads, {0: acts["z", 0]})):
        raw = model.run(corrupted, points=["attn_raw"])["attn_raw", 0]
    torch.testing.assert_close(raw, model.run(clean, points=["attn_raw"])["attn_raw", 0], atol=2e-6, rtol=0)


def test_focus_never_takes_a_further_key_for_a_token() -> None:
    module = randomised(WithFurtherKeys())
    model = am.load(module, example=SERIES)
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


def test_the_ledger_of_further_keys_is_exact() -> None:
    module = randomised(WithFurtherKeys())
    model = am.load(module, example=SERIES)
    ran = model.run(SERIES, points=["q", "scores"])
    for centre in (None, "mean"):
        split = am.decompose_scores(model, SERIES, centre=centre)
        total = sum(term for name, term in split.terms.items() if name != "mask")[:, 1]
        assert split.key_tokens[0][-2:] == ("bias_kv", "zero")
        # The learned key is scored as it is, and zeros give 0.
        learned = module.two.bias_k.detach().view(5, 4)
        expected = torch.einsum("bqhd,hd->bhq", ran["q", 1], learned) / 2
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
        assert updates.mean("target_magnitude")[1, head].item() == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert 0 < beyond < len(IMAGES) * HEADS * 12


def test_updates_in_a_post_norm_decoder() -> None:
    module = randomised(nn.Transformer(D, HEADS, 1, 2, 30, batch_first=True))
    given = (noise(TEXTS, LENGTH, D), noise(TEXTS, 6, D, seed=2))
    model = am.load(module, example=given)
    updates = am.residual_updates(model, given, stack="decoder")
    ran = model.run(given, points=["decoder.resid_pre", "decoder.result"])
    stream, written = (ran[f"decoder.{name}", 1].double() for name in ("resid_pre", "result"))
    expected = (written.norm(dim=-1) / stream.norm(dim=-1)[..., None])[:, 1:].mean(dim=(0, 1))
    torch.testing.assert_close(updates.magnitude[1], expected, atol=1e-6, rtol=1e-5)


def test_a_report_of_images(tmp_path: Path) -> None:
    model = am.load(randomised(Classifier()), example=IMAGES, labels=am.PatchGrid(1, (6, 8), (2, 2)))
    page = am.report(model, IMAGES[:1]).write_html(tmp_path / "page.html").read_text()
    assert "2,3" in page and "Classifier" in page
    embedded = am.joint_embedding(model, IMAGES, heads=[(0, 1)])
    assert embedded.provenance.tokens[0][1] == "0,0"


def test_a_report_without_a_stream_says_so(tmp_path: Path) -> None:
    module = randomised(nn.MultiheadAttention(D, HEADS, batch_first=True))
    x = noise(1, LENGTH, D)
    page = am.report(am.load(module, example=(x, x, x)), (x, x, x)).write_html(tmp_path / "page.html").read_text()
    assert "What heads write is omitted: its attention is not inside a module that takes and returns a stream." in page


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
    with pytest.raises(InputError, match="repeated tokens are for models of text"):
        am.head_types(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: am.residual_drift(model, IMAGES), "needs the tokens of a language model"),
        (lambda model: am.decompose_by_source(model, IMAGES), "reads tensors instead of tokens"),
        (lambda model: model.generate(IMAGES), "reads tensors instead of tokens"),
        (lambda model: am.untrained(model), "make a new instance of your module"),
    ],
)
def test_what_needs_tokens_says_so(call: Any, message: str) -> None:
    model = am.load(randomised(Classifier()), example=IMAGES)
    with pytest.raises((InputError, UnsupportedModelError), match=message):
        call(model)


def test_a_report_has_a_page_for_each_input() -> None:
    model = am.load(randomised(Classifier()), example=IMAGES)
    report = am.report(model, IMAGES)
    pattern = model.run(IMAGES, points=["pattern"])
    assert len(report.texts) == len(pattern["pattern", 0]) == 6
    for number, one in enumerate(report.texts):
        torch.testing.assert_close(one.pattern[0], pattern["pattern", 0][number], rtol=0, atol=1e-6)


def test_a_corpus_of_calls() -> None:
    model = am.load(randomised(WithFurtherKeys()), example=SERIES)
    parts = [{name: value[[row]] for name, value in SERIES.items()} for row in range(TEXTS)]
    whole, streamed = am.attention_focus(model, SERIES), am.attention_focus(model, iter(parts))
    torch.testing.assert_close(whole.entropy, streamed.entropy)
    assert streamed.documents == TEXTS
