"""Rows by what a head adds to the next token's logit: against a loop over captured z, and `am.residual_updates`."""

from typing import Any

import models
import pytest
import torch
from example_rows import TEXTS, Row, places, places_of, strongest
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError

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


def test_stacks_whose_logits_cannot_be_split() -> None:
    t5, bert, batch = models.hooked("t5"), models.hooked("bert"), models.inputs_of("t5")
    for model, inputs, stack, words in (
        (t5, batch, "encoder", f'predicts the next token; the encoder stack of {t5.name} does not. Use by="update".'),
        (t5, batch, "cross", f"the cross stack of {t5.name} does not"),
        (bert, models.token_ids("bert"), None, f"{bert.name} does not"),
        (t5, batch, "decoder", "with one norm and one matrix"),
    ):
        with pytest.raises(InputError, match=words):
            am.examples(model, inputs, by="next_token", stack=stack)
