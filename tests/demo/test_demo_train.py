"""Training is reproducible by its seed, its sequences are correct, and its folder loads."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from language import words
from language.sequences import altered_tokens, batch
from language.tokenizer import build_tokenizer
from safetensors.torch import load_file
from train import Settings, main, new_model, next_word_loss, train
from transformers import BloomForCausalLM

from attnmech.demo.text import FIRST_WORD

TOKENIZER = build_tokenizer()
TINY = Settings(steps=3, layers=1, heads=2, width=16, batch_size=2, length=12, warm_up=1)


def weights(settings: Settings) -> torch.Tensor:
    model = train(settings, TOKENIZER, lambda step, model, loss: None)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_altered_documents_have_bytes_or_other_words_for_names() -> None:
    spelt = renamed = 0
    for seed in range(60):
        tokens = altered_tokens(TOKENIZER, Random(seed), length=96)
        assert len(tokens) == 96
        said = {TOKENIZER.convert_ids_to_tokens(token).strip() for token in tokens[1:]}
        if any(2 < token < FIRST_WORD for token in tokens):
            spelt += 1
        elif not said & set(words.names()):
            renamed += 1
        assert not said & set(words.UNSEEN)
    assert 5 <= spelt <= 25
    assert renamed >= 20


def test_the_loss_is_that_of_transformers() -> None:
    model = new_model(TINY, TOKENIZER)
    tokens = batch(TOKENIZER, Random(0), size=3, length=20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    ours = next_word_loss(model, tokens)
    ours.backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    theirs = model(input_ids=tokens, labels=tokens).loss
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-2)
    for mine, parameter in zip(found, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert (mine - parameter.grad).norm() <= 0.03 * parameter.grad.norm() + 1e-6


class Cut(Exception):
    """The power fails."""


def test_a_run_that_was_cut_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    longer, file, seen = replace(TINY, steps=9), tmp_path / "run" / "unfinished.safetensors", []

    def fail(step: int, model: BloomForCausalLM, loss: float) -> None:
        if step == 7:
            raise Cut

    with pytest.raises(Cut):
        train(longer, TOKENIZER, fail, journal=file, every=3)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    resumed = train(longer, TOKENIZER, lambda step, model, loss: seen.append(step), journal=file, every=3)
    assert seen == [7, 8, 9]
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in resumed.parameters()]), weights(longer))
    assert not file.exists()


def test_the_command_writes_folders_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "model"), "--steps", "2", "--threads", "1", "--checkpoints", "3"])
    assert "2 of 2 steps, seed 0" in capsys.readouterr().out
    assert sorted(folder.name for folder in (tmp_path / "model" / "checkpoints").iterdir()) == [
        "step-000000",
        "step-000001",
        "step-000002",
    ]
    model = BloomForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(TOKENIZER)
    assert model.dtype == torch.float32
    stored = load_file(tmp_path / "model" / "model.safetensors")
    last = load_file(tmp_path / "model" / "checkpoints" / "step-000002" / "model.safetensors")
    assert {tensor.dtype for tensor in last.values()} == {torch.float32}
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert stored.keys() == last.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(stored[name], last[name].bfloat16()) for name in stored)
    for file in (tmp_path / "model").glob("*.json"):
        assert str(tmp_path) not in file.read_text()
