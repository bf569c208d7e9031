"""Training is seeded, its sequences are what they claim to be, and its folder loads."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import BloomForCausalLM

from attnmech.demo.sequences import batch, document_tokens, repeated_tokens
from attnmech.demo.tokenizer import FIRST_WORD, build_tokenizer
from attnmech.demo.train import Settings, checkpoint_steps, learning_rate_share, main, steps_in, train

TOKENIZER = build_tokenizer()
TINY = Settings(steps=3, layers=1, heads=2, width=16, batch_size=2, length=12, warm_up=1)


def weights(settings: Settings) -> torch.Tensor:
    model = train(settings, TOKENIZER, lambda step, model, loss: None)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_seed_decides_the_weights() -> None:
    assert torch.equal(weights(TINY), weights(TINY))
    assert not torch.equal(weights(TINY), weights(replace(TINY, seed=1)))


def test_after_step_sees_each_step_and_the_untrained_model_first() -> None:
    seen: list[tuple[int, float]] = []
    train(TINY, TOKENIZER, lambda step, model, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert math.isnan(seen[0][1])
    assert seen[1][1] == pytest.approx(math.log(len(TOKENIZER)), abs=0.2)


def test_repeated_tokens_repeat_words() -> None:
    tokens = repeated_tokens(TOKENIZER, Random(0), length=50, period=7)
    assert len(tokens) == 50
    assert tokens[0] == TOKENIZER.bos_token_id
    assert tokens[8:] == tokens[1:-7]
    assert min(tokens[1:]) >= FIRST_WORD


def test_document_tokens_fill_any_length() -> None:
    tokens = document_tokens(TOKENIZER, Random(0), length=200)
    assert len(tokens) == 200
    assert tokens.count(TOKENIZER.bos_token_id) == 1


def test_a_batch_mixes_both_kinds() -> None:
    repeats = [
        any(torch.equal(row[1 + period :], row[1:-period]) for period in range(10, 31))
        for row in batch(TOKENIZER, Random(0), size=100)
    ]
    assert 15 <= sum(repeats) <= 45


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    settings = Settings(steps=400, warm_up=100)
    shares = [learning_rate_share(step, settings) for step in range(401)]
    assert max(shares) == shares[100] == 1
    assert shares[:101] == sorted(shares[:101])
    assert shares[100:] == sorted(shares[100:], reverse=True)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(0)


def test_checkpoints_are_spaced_logarithmically() -> None:
    steps = checkpoint_steps(5000)
    assert len(steps) >= 10
    assert (steps[0], steps[1], steps[-1]) == (0, 1, 5000)
    assert list(steps) == sorted(set(steps))


def test_more_minutes_fit_more_steps() -> None:
    assert 1 <= steps_in(0.001, TINY, TOKENIZER) < steps_in(1.0, TINY, TOKENIZER)


def test_the_command_writes_folders_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "model"), "--steps", "2", "--checkpoints", str(tmp_path / "kept")])
    assert "2 steps, seed 0" in capsys.readouterr().out
    assert sorted(folder.name for folder in (tmp_path / "kept").iterdir()) == [
        "step-000000",
        "step-000001",
        "step-000002",
    ]
    model = BloomForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(TOKENIZER)
    for file in (tmp_path / "model").glob("*.json"):
        assert str(tmp_path) not in file.read_text()
