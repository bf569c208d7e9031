"""The shipped model loads without a network and has learnt its language."""

import json
from collections import defaultdict
from random import Random

import pytest
import torch
from evaluate_model import evaluate, head_figures, held_out_tokens, load, loss_figures
from language.grammar import document
from language.sequences import repeated_tokens
from safetensors.torch import load_file
from transformers import BloomForCausalLM, PreTrainedTokenizerFast

import attnmech as am
from attnmech.demo import model_folder


@pytest.fixture(scope="module")
def shipped() -> tuple[BloomForCausalLM, PreTrainedTokenizerFast]:
    return load()


def test_learnt_its_language(shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast]) -> None:
    figures = {figure.name: figure for figure in evaluate(*shipped, cases=40)}
    assert figures["loss above entropy (share)"].value < 0.1
    assert figures["next word of a repeated span"].value > 0.95
    choices = {name: figure.value for name, figure in figures.items() if figure.chance == 0.5}
    assert len(choices) == 12
    # The model is weakest on names that no training text had: the card says by how much.
    assert choices.pop("recipient's name, held out") > 0.8
    assert {name for name, value in choices.items() if value < 0.9} == set()
    assert figures["induction mass, random"].value > 0.5
    assert figures["previous token on top, random"].value > 0.5
    assert figures["first token on top, random"].value > 0.9


def test_the_figures_are_what_they_say(shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast]) -> None:
    """Loss and head figures against a loop over texts and rows, on attnmech's own activations."""
    model, tokenizer = shipped
    loss, entropy, excess = loss_figures(model, tokenizer, Random(5), 3)
    rng, paid, cost, count = Random(5), 0.0, 0.0, 0
    for _ in range(3):
        text = document(rng)
        ids = tokenizer(text.text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            paid += model(input_ids=ids, labels=ids).loss.item() * len(text.words)
        cost, count = cost + text.surprisal, count + len(text.words)
    assert loss.value == pytest.approx(paid / count, rel=1e-5)
    assert entropy.value == pytest.approx(cost / count)
    assert excess.value == pytest.approx(paid / cost - 1, rel=1e-3)

    rng, measured = Random(6), defaultdict[str, torch.Tensor](lambda: torch.zeros(ours.n_layers, ours.n_heads))
    ours = am.load()
    texts = {"documents": [held_out_tokens(tokenizer, rng) for _ in range(32)]}
    texts["random"] = [repeated_tokens(tokenizer, rng) for _ in range(32)]
    for told, rows in texts.items():
        for tokens in rows:
            acts = ours.run(torch.tensor([tokens]), points=["pattern"])
            for layer in range(ours.n_layers):
                pattern = acts["pattern", layer][0]
                for row in range(2, 64):
                    top = pattern[:, row].argmax(-1)
                    measured[f"first token on top, {told}"][layer] += (top == 0) / (32 * 62)
                    measured[f"previous token on top, {told}"][layer] += (top == row - 1) / (32 * 62)
                    if told == "random" and row >= 21:
                        measured["induction mass, random"][layer] += pattern[:, row, row - 19] / (32 * 43)
    figures = head_figures(model, tokenizer, Random(6), 32)
    assert {figure.name for figure in figures} == set(measured)
    for figure in figures:
        mine = measured[figure.name]
        assert figure.value == pytest.approx(mine.max().item(), rel=1e-4)
        assert figure.head == divmod(int(mine.argmax()), model.config.n_head)


def test_folder_is_small_and_complete() -> None:
    files = {file.name: file.stat().st_size for file in model_folder().iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= files.keys()
    assert files["model.safetensors"] <= 6_000_000
    for file in model_folder().glob("*.json"):
        assert "_name_or_path" not in json.loads(file.read_text())


def test_weights_are_stored_in_bfloat16_and_run_in_float32(
    shipped: tuple[BloomForCausalLM, PreTrainedTokenizerFast],
) -> None:
    stored = load_file(model_folder() / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for model in (shipped[0], am.load(), am.load(dtype="float64"), am.load(dtype="bfloat16")):
        weights = dict(model.named_parameters())
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[name], stored[name].to(model.dtype)) for name in stored)
    assert shipped[0].dtype == am.load().dtype == am.untrained(am.load()).dtype == torch.float32
    assert am.load(model_folder()).dtype == torch.bfloat16  # a folder's own precision
