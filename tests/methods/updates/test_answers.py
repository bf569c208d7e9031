"""What each head writes towards an answer's logit, against a written-out final norm and unembedding."""

import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import reference
import torch
from comparing import refuses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import attnmech as am
from attnmech.draw.text import signed
from attnmech.errors import CertificateError, InputError, MissingPointError
from attnmech.model.reading import unembedding
from attnmech.model.reading.unembedding import unembedding_of
from attnmech.runs.answers import AnswerWarning, answer_ids

FINAL_NORMS = {
    "bloom": "transformer.ln_f", "gpt2": "transformer.ln_f", "llama": "model.norm", "gemma2": "model.norm",
    "mpt3": "transformer.norm_f", "gpt_neox": "gpt_neox.final_layer_norm", "opt": "model.decoder.final_layer_norm",
    "falcon_new": "transformer.ln_f", "gptj": "transformer.ln_f", "mistral": "model.norm", "qwen3": "model.norm",
}  # fmt: skip


def by_hand(model: Any, norm_path: str, stream: Tensor, part: Tensor, token: int) -> tuple[float, float]:
    """A token's logit at one position, before a soft cap, and what a part of the final stream adds to it."""
    state, config = model.state_dict(), model.config
    gamma = state[f"{norm_path}.weight"]
    beta = state.get(f"{norm_path}.bias", torch.zeros_like(gamma))
    head = model.get_output_embeddings()
    row = head.weight[token].detach()
    bias = 0.0 if getattr(head, "bias", None) is None else float(head.bias[token])
    if reference.family(model) in ("llama", "gemma2", "mistral", "qwen3"):
        gamma = 1 + gamma if reference.family(model) == "gemma2" else gamma
        size = (stream.pow(2).mean() + config.rms_norm_eps).sqrt()
        return float(((stream / size * gamma) * row).sum()) + bias, float(((part / size * gamma) * row).sum())
    eps = {"gpt_neox": "layer_norm_eps"}.get(reference.family(model), "layer_norm_epsilon")
    eps = getattr(config, eps, 1e-5)
    size = (stream - stream.mean()).pow(2).mean().add(eps).sqrt()
    logit = ((stream - stream.mean()) / size * gamma + beta) @ row
    return float(logit) + bias, float(((part - part.mean()) / size * gamma) @ row)


@pytest.mark.parametrize("name", FINAL_NORMS)
def test_each_heads_part_of_a_logit(name: str) -> None:
    inputs, model, hooked = models.padded(name), models.plain(name), models.hooked(name)
    answers, against = torch.tensor([5, 7, 11]), [6, 9, 4]
    updates = am.residual_updates(hooked, inputs, answers=answers)
    compared = am.residual_updates(hooked, inputs, answers=answers.tolist(), against=against)
    acts = hooked.run(inputs, points=["result", "attn_raw", "attn_out", "resid_post", "logits"])
    for text, length in enumerate(inputs["attention_mask"].sum(dim=1).tolist()):
        last = length - 1
        stream = acts["resid_post", hooked.n_layers - 1][text, last]
        cap = getattr(model.config, "final_logit_softcapping", None)
        for layer in range(hooked.n_layers):
            for head in range(hooked.n_heads):
                part = acts["result", layer][text, last, head]
                if hooked.architecture.attn_out:
                    part = part * acts["attn_out", layer][text, last] / acts["attn_raw", layer][text, last]
                logit, share = by_hand(model, FINAL_NORMS[name], stream, part, int(answers[text]))
                _, other = by_hand(model, FINAL_NORMS[name], stream, part, against[text])
                assert float(updates.logits[layer, head, text]) == pytest.approx(share, abs=2e-5)
                assert float(compared.logits[layer, head, text]) == pytest.approx(share - other, abs=4e-5)
        told = float(acts["logits"][text, last, answers[text]])
        written = logit if cap is None else cap * float(torch.tensor(logit / cap).tanh())
        assert told == pytest.approx(written, rel=1e-4, abs=1e-4)


def test_the_mean_logit_is_a_statistic() -> None:
    model, prompts = models.hooked("llama"), models.padded("llama")
    updates = am.residual_updates(model, prompts, answers=[5, 7, 11], against=[6, 9, 4])
    mean = updates.logits.double().mean(dim=-1)
    torch.testing.assert_close(updates.logit, mean)
    assert updates.to_frame()["logit"].to_list() == pytest.approx(mean.flatten().tolist())
    assert abs(updates.strongest(1, by="logit").iloc[0]["logit"]) == pytest.approx(float(mean.abs().max()))
    later = am.residual_updates(model, prompts, layers=[1], answers=[5, 7, 11], against=[6, 9, 4])
    assert later["logit"].mean[1].tolist() == pytest.approx(mean[1].tolist())
    assert f" L1H{int(later.logit[1].abs().argmax())}: " in later.lead
    change = updates - am.residual_updates(model, prompts, answers=[6, 9, 4])
    torch.testing.assert_close(change.logit, (change.parts[0].logits - change.parts[1].logits).double().mean(dim=-1))  # type: ignore[index]
    plain = am.residual_updates(model, prompts)
    assert "logit" not in plain.quantities and "logit" not in plain.to_frame()
    refuses("measure it with", lambda: plain["logit"], error=MissingPointError)
    refuses("measure it with", plain.strongest, by="logit", error=MissingPointError)


def test_answers_by_their_text() -> None:
    model = models.demo()
    prompt = "When Anna and Tom went to the harbour, Tom gave a shell to"
    by_text = am.residual_updates(model, prompt, answers=" Anna", against=" Tom").logits
    ids = [model.tokenizer.convert_tokens_to_ids(each) for each in (" Anna", " Tom")]
    assert torch.equal(by_text, am.residual_updates(model, prompt, answers=ids[:1], against=ids[1:]).logits)


def test_a_word_without_its_leading_space_is_taken_as_given_with_a_warning() -> None:
    model = models.demo()
    prompt = "When Anna and Tom went to the harbour, Tom gave a shell to"
    bare, spaced = (model.tokenizer.get_vocab()[each] for each in ("Anna", " Anna"))
    said = rf"`answers`: both 'Anna' \(id {bare}\) and ' Anna' \(id {spaced}\) are single .*; 'Anna' is used, as given"
    with pytest.warns(AnswerWarning, match=said):
        given = am.residual_updates(model, prompt, answers="Anna")
    assert torch.equal(given.logits, am.residual_updates(model, prompt, answers=bare).logits)
    with pytest.warns(AnswerWarning, match=r"`against`: both 'Tom' .* give that instead, or the id \d+ to keep"):
        am.residual_updates(model, prompt, answers=" Anna", against="Tom")
    with pytest.warns(AnswerWarning, match="`answers`: both 'Anna'"):
        am.ablate_heads(model, prompt, [(0, 1)], metric="accuracy", answers="Anna")


def test_other_answers_are_taken_without_a_warning() -> None:
    model, spaces_kept = models.demo(), Tokenizer(WordLevel({"[UNK]": 0, "Anna": 1}, unk_token="[UNK]"))
    assert all(each in model.tokenizer.get_vocab() for each in ("(", " (", "Anna", " Anna"))
    of_words = PreTrainedTokenizerFast(tokenizer_object=spaces_kept, unk_token="[UNK]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for answer in (" Anna", model.tokenizer.get_vocab()["Anna"], "("):
            answer_ids(model, "answers", answer, 1)
        hooked = am.load(models.fresh("gpt2"), tokenizer=of_words)
        assert answer_ids(hooked, "answers", "Anna", 1).tolist() == [1]
        assert answer_ids(am.load(models.fresh("gpt2"), tokenizer=models.tokenizer()), "answers", "the", 1) == 3


def test_what_cannot_be_asked() -> None:
    model, text = models.demo(), "Anna sang of shells."
    with pytest.raises(InputError, match=r"must be single tokens; 'zebra crossing' becomes .* Check the leading"):
        am.residual_updates(model, text, answers="zebra crossing")
    refuses(r"becomes 2: \['é\[1/2\]', 'é\[2/2\]'\]", am.residual_updates, model, text, answers="é")
    refuses("or one for all, ' Tom'; got 2 for 1 text", am.residual_updates, model, text, answers=[4, 5])
    refuses("`against` needs `answers`", am.residual_updates, model, text, against=" Tom")
    refuses("the model's last layer", am.residual_updates, model, text, answers=" Tom", layers=[0, 1])
    refuses("`answers` must be from 0 to", am.residual_updates, model, text, answers=99999)
    refuses("measure it with", lambda: am.residual_updates(model, text).logits, error=MissingPointError)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("bert_headless", "it was loaded without a head"), ("opt_post", "its stream is projected before the unembedding")],
)
def test_where_the_head_is_not_linear_answers_alone_are_refused(name: str, reason: str) -> None:
    hooked = models.hooked(name)
    inputs = models.inputs_of(name)
    with pytest.raises(InputError, match=rf"compute logits with one norm and one matrix \({reason}\), so a head's"):
        am.residual_updates(hooked, inputs, answers=[5, 5, 5])
    assert am.residual_updates(hooked, inputs).magnitude.isfinite().any()


def test_under_a_soft_cap_they_are_pre_cap_logits(tmp_path: Path) -> None:
    for name, unit in (("gemma2", "pre-cap logits"), ("llama", "logits")):
        updates = am.residual_updates(models.hooked(name), models.padded(name), answers=[4, 5, 6])
        assert updates["logit"].statistic.unit == unit
        assert f" {unit} on average." in updates.lead
        assert am.load_result(updates.save(tmp_path / f"{name}.safetensors"))["logit"].statistic.unit == unit
        mean = updates.logits.mean(dim=-1)
        layer, head = divmod(int(mean.abs().argmax()), mean.shape[1])
        written = signed(float(mean[layer, head]), ".2f")
        assert f"The largest contribution to the answers is that of L{layer}H{head}: {written} {unit}" in updates.lead
    plain = am.residual_updates(models.hooked("gemma2"), models.padded("gemma2"))
    assert "to the answers" not in plain.lead
    refuses("measure it with", lambda: plain.logits, error=MissingPointError)


def test_a_head_that_somebody_has_changed_is_refused() -> None:
    model = models.fresh("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: 1.5 * output)
    with pytest.warns(UserWarning, match="NOT certified: 1 of 26 checks fail, first 'logits'"):
        hooked = am.load(model)
    with pytest.raises(CertificateError, match=r"'logits' is refused on this model: logits = N\(resid_post\) W_U "):
        am.residual_updates(hooked, models.token_ids("llama", 1), answers=5)
    assert am.residual_updates(hooked, models.token_ids("llama", 1)).magnitude.isfinite().all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gemma2", torch.float32), ("bloom", torch.float64), ("llama", torch.bfloat16), ("gemma2", torch.float16)],
)
def test_the_head_written_out_is_the_models(name: str, dtype: torch.dtype) -> None:
    """Logits computed from the weights agree within rounding; an error of a small share of some logits would not."""
    share = {torch.bfloat16: 0.3, torch.float16: 0.03}.get(dtype, 1e-4)
    hooked = am.load(models.fresh(name), dtype=dtype)
    acts = hooked.run(models.token_ids(name), points=["resid_post", "logits"])
    head = unembedding_of(hooked)
    stream = acts["resid_post", hooked.n_layers - 1]
    expected = head.logits(stream)
    difference = (expected - acts["logits"].to(head.gamma)).abs()
    allowed = head.rounding(stream, expected)
    assert float((difference / allowed).max()) < 0.5
    assert bool((share * expected.abs() > allowed).any())


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_the_head_of_a_16_bit_model_is_read_by_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = am.load(models.fresh("llama"), dtype="bfloat16")
    head = unembedding_of(hooked)
    monkeypatch.setattr(unembedding, "_BLOCK", rows * hooked.d_model)
    stream = hooked.run(models.token_ids("llama"), points=["resid_post"])["resid_post", hooked.n_layers - 1]
    rows_of_head = head.W_U.float()
    logits = torch.stack([head._normed(stream) @ row for row in rows_of_head], dim=-1)
    torch.testing.assert_close(head.logits(stream), logits)
    above = (rows_of_head[7] - rows_of_head.mean(dim=0)) * head.gamma
    torch.testing.assert_close(head.above_mean(torch.tensor(7)), above)
    rounding = head.rounding(stream, logits)
    assert rounding.shape == logits.shape and rounding.dtype == torch.float32
    monkeypatch.undo()
    torch.testing.assert_close(unembedding_of(hooked).rounding(stream, logits), rounding)
