"""Rows by what a head adds to the next token's logit: against a loop over captured z, and `am.residual_updates`."""

from typing import Any

import models
import pytest
import torch
from example_rows import TEXTS, Row, places, places_of, strongest
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError
from attnmech.model.reading.unembedding import unembedding_of

FINAL_NORMS = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gemma2": "model.norm"}


def parts_of_logits(model: am.HookedModel, plain: Any, name: str, ids: Tensor, layer: int, head: int) -> list[float]:
    """For each token but the last, what a head adds to the next token's logit above the mean over the vocabulary."""
    acts = model.run(ids[None], points=["z", "attn_raw", "resid_post"])
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
        parts.append(float((logits[ids[row + 1]] - logits.mean()).float()))
    return parts


@pytest.mark.core
@pytest.mark.usefixtures("many_batches")
@pytest.mark.parametrize("name", FINAL_NORMS)
def test_next_token_is_the_heads_part_of_the_next_tokens_logit(name: str) -> None:
    """Gemma 2 has a norm between attention and stream, and soft-caps its logits, which are read before the cap."""
    model, plain = models.hooked(name, torch.float64), models.plain(name, torch.float64)
    texts = TEXTS[:24]
    examples = am.examples(model, iter(texts), by="next_token", k=5)
    for layer, head in ((0, 1), (1, 2)):
        rows = []
        for number, ids in enumerate(texts):
            parts = parts_of_logits(model, plain, name, ids, layer, head)
            rows += [Row(parts[i], number, i, (int(ids[i - 1]), int(ids[i])), 0, ()) for i in range(1, len(ids) - 1)]
        expected = strongest(rows, 5)
        chosen = examples.examples_of(layer, head)
        assert places(chosen) == places_of(expected) and int(examples.rows[layer, head]) == len(rows)
        assert [example.value for example in chosen] == pytest.approx([row.value for row in expected], rel=1e-5)
        values = {(row.text, row.position): row.value for row in rows}
        for example in examples.examples_of(layer, head, "random"):
            assert example.value == pytest.approx(values[example.text, example.position], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["bloom", "gemma2", "qwen3"])
def test_it_is_the_part_of_the_logit_in_residual_updates(name: str) -> None:
    """At the last token but one, above the mean over all tokens of the vocabulary."""
    model, ids = models.hooked(name, torch.float64), TEXTS[4][:6]
    vocabulary = torch.arange(int(model.unembedding.shape[0]))  # type: ignore[union-attr]
    logits = am.residual_updates(model, ids[:-1].expand(len(vocabulary), -1), answers=vocabulary).logits
    expected = logits[..., ids[-1]] - logits.mean(dim=-1)
    parts = torch.full_like(expected, torch.nan)
    for example in am.examples(model, ids[None], by="next_token", k=10).to_frame("random").itertuples():
        if example.position == len(ids) - 2:
            parts[example.layer, example.head] = example.value
    torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-7)


def test_the_last_token_has_no_next_one() -> None:
    """Neither in a list of texts nor beside longer texts, nor with padding on the left."""
    model = models.hooked("llama")
    batch = models.padded("llama", "left", length=9)
    examples = am.examples(model, batch, by="next_token", k=50)
    lengths = batch["attention_mask"].sum(dim=1)
    assert examples.rows.eq(int((lengths - 2).sum())).all()
    frame = examples.to_frame("random")
    assert all(row.position < lengths[row.text] - 1 for row in frame.itertuples())


def test_some_layers_with_the_last() -> None:
    model = models.hooked("gpt2", torch.float64)
    whole = am.examples(model, iter(TEXTS), by="next_token", k=3)
    some = am.examples(model, iter(TEXTS), by="next_token", k=3, layers=[2, 0])
    for layer in (0, 2):
        for which in ("strongest", "band"):
            assert some.examples_of(layer, 3, which) == whole.examples_of(layer, 3, which)
    with pytest.raises(
        InputError,
        match=r'^by="next_token" needs the last layer, 2, among `layers`, since the factor of the final norm is '
        r"measured there; got \[0, 1\]\.$",
    ):
        am.examples(model, iter(TEXTS), by="next_token", layers=[0, 1])


def refusal(model: am.HookedModel, inputs: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        am.examples(model, inputs, by="next_token", **options)
    return str(caught.value)


def test_stacks_that_do_not_predict_the_next_token() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 4]]), "decoder_input_ids": torch.tensor([[2, 11, 12, 13]])}
    t5, bert = models.hooked("t5"), models.hooked("bert")
    needs = 'by="next_token" needs self-attention in a stack that predicts the next token; '
    for stack in ("encoder", "cross"):
        expected = f'{needs}the {stack} stack of {t5.name} does not. Use by="update".'
        assert refusal(t5, iter([batch]), stack=stack) == expected
    assert refusal(bert, models.token_ids("bert")) == f'{needs}{bert.name} does not. Use by="update".'


def test_logits_must_be_one_norm_and_one_matrix() -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 11, 12, 13]])}
    t5 = models.hooked("t5")
    with pytest.raises(InputError) as expected:
        unembedding_of(t5)
    assert refusal(t5, iter([batch]), stack="decoder") == str(expected.value)
    assert "with one norm and one matrix" in str(expected.value)


def test_the_lead_names_the_statistic() -> None:
    examples = am.examples(models.hooked("gpt2"), iter(TEXTS), by="next_token")
    assert "heads by the head's direct addition to the next token's logit (60 texts)" in examples.lead
