"""`model.loss` is the mean cross-entropy of the raw model, text by text, and what sweeps measure as "loss"."""

import models
import pytest
import torch
from by_hand import losses, z_changed, zeroed
from comparing import refuses

import attnmech as am
from attnmech.errors import InputError


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neox", "gemma2"])
def test_each_text_equals_the_raw_model(family: str) -> None:
    hooked, plain = models.hooked(family), models.plain(family)
    given = models.padded(family)
    with torch.no_grad():
        expected = losses(plain(**given).logits, given["input_ids"], [7, 5, 3])
        torch.testing.assert_close(hooked.loss(given), expected, rtol=1e-5, atol=1e-6)
        with z_changed(plain, 1, zeroed(2)), hooked.intervene(am.Intervention.zero([(1, 2)])):
            changed = losses(plain(**given).logits, given["input_ids"], [7, 5, 3])
            torch.testing.assert_close(hooked.loss(given), changed, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(changed, expected, atol=1e-4)


def test_left_padding_many_texts_and_a_sweep() -> None:
    hooked = models.hooked("bloom")
    ids = models.token_ids("bloom", batch=90, length=11)
    found = hooked.loss(ids)
    assert found.shape == (90,) and found.dtype == torch.float64
    torch.testing.assert_close(found[[0, 47, 89]], torch.cat([hooked.loss(ids[row : row + 1]) for row in (0, 47, 89)]))
    swept = am.sweep(hooked, ids, [am.Intervention.zero([(0, 0)])])
    torch.testing.assert_close(found, swept.before, rtol=1e-5, atol=1e-6)
    padded = models.padded("bloom", side="left")
    for row, length in enumerate((7, 5, 3)):
        alone = hooked.loss(padded["input_ids"][row : row + 1, 7 - length :])
        torch.testing.assert_close(hooked.loss(padded)[row : row + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", *models.CROSSED])
def test_the_loss_of_a_decoder_is_of_its_own_tokens(name: str) -> None:
    hooked, plain = models.hooked(name), models.plain(name)
    given = {"input_ids": models.token_ids(name), "decoder_input_ids": models.token_ids(name, length=5, seed=2)}
    with torch.no_grad():
        expected = losses(plain(**given).logits, given["decoder_input_ids"], [5] * 3)
    torch.testing.assert_close(hooked.loss(given), expected, rtol=1e-5, atol=1e-6)


def test_what_has_no_loss_is_refused() -> None:
    refuses("has no head that predicts either", models.hooked("bert_headless").loss, torch.tensor([[5, 7]]))
    with pytest.raises(InputError, match="needs its mask token, but BertForMaskedLM was loaded without a tokenizer"):
        models.hooked("bert").loss(torch.tensor([[5, 7]]))
    refuses("two tokens or more; text 1 has one", models.hooked("gpt2").loss, [torch.tensor([5, 7]), torch.tensor([5])])


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_token_without_a_logit_has_no_loss(family: str) -> None:
    plain = models.fresh(family)
    width, rows = plain.get_output_embeddings().in_features, 40
    plain.set_output_embeddings(torch.nn.Linear(width, rows))
    plain.config.tie_word_embeddings, plain.config.mask_token_id = False, 4
    hooked, ids = am.load(plain), torch.tensor([[5, 7, 9, 8], [5, rows, 9, 8]])
    refused = f"token {rows} has no logit; the head has logits of tokens 0 to {rows - 1}"
    for call in (
        hooked.loss,
        lambda texts: am.ablate_heads(hooked, texts),
        lambda texts: am.null_attention(hooked, texts),
    ):
        call(ids[:1])
        refuses(refused, call, ids)
    if family == "llama":
        assert hooked.loss(ids[1:, 1:]).isfinite()  # nothing predicts a first token
        refuses(refused, am.examples, hooked, ids, by="next_token")
