"""Evaluate the demo model on freshly generated text: `python examples/demo_model/evaluate_model.py`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from language.choices import CHOICES, Choice, choices
from language.grammar import HELD_OUT, TRAINING, document
from language.sequences import repeated_tokens
from language.tokenizer import BOS, token_ids
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BloomForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from attnmech.demo import model_folder
from attnmech.errors import AttnmechError, ModelNotFoundError

FRESH_SEED = 1_000_003
"""Far from the seeds that training uses."""

PERIOD, LENGTH, AT_ONCE = 20, 64, 32


@dataclass(frozen=True)
class Figure:
    """What one trial measured."""

    name: str
    value: float
    cases: int
    chance: float | None = None
    """The accuracy of guessing among the choices; None if there are no choices."""
    head: tuple[int, int] | None = None
    """The layer and head, for figures of the best head."""


def load(folder: Path | None = None) -> tuple[BloomForCausalLM, PreTrainedTokenizerFast]:
    """The shipped model, or the one in a folder, with its tokenizer; never uses the network."""
    source = folder or model_folder()
    if not (source / "config.json").is_file():
        raise ModelNotFoundError(
            f"expected a folder with a config.json; got {source}. "
            f"`python examples/demo_model/train.py --out {source}` makes one."
        )
    model = BloomForCausalLM.from_pretrained(source, local_files_only=True, attn_implementation="eager")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True)
    model.train(False)
    return model, tokenizer


def evaluate(
    model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, *, cases: int = 200, seed: int = FRESH_SEED
) -> list[Figure]:
    """Every figure of the model card.

    Each figure is measured on `cases` documents, spans or choices.
    """
    rng = Random(seed)
    return [
        *loss_figures(model, tokenizer, rng, cases),
        repetition_figure(model, tokenizer, rng, cases),
        *choice_figures(model, tokenizer, rng, cases),
        *head_figures(model, tokenizer, rng, cases),
    ]


def loss_figures(
    model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int
) -> tuple[Figure, Figure, Figure]:
    """Measures, on fresh documents of the training side, the model's loss, the grammar's entropy, and the excess of the
    loss.

    The texts come from the training side, because the entropy is that of the training distribution.
    """
    texts = [document(rng) for _ in range(cases)]
    total = 0.0
    for first in range(0, cases, AT_ONCE):
        inputs = tokenizer([text.text for text in texts[first : first + AT_ONCE]], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits: Tensor = model(**inputs).logits[:, :-1]
        labels = inputs["input_ids"][:, 1:].masked_fill(inputs["attention_mask"][:, 1:] == 0, -100)
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    length = sum(len(text.words) for text in texts)
    entropy = sum(text.surprisal for text in texts)
    return (
        Figure("loss on documents (nats per word)", total / length, cases),
        Figure("grammar's entropy (nats per word)", entropy / length, cases),
        Figure("loss above entropy (share)", total / entropy - 1, cases),
    )


def repetition_figure(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int) -> Figure:
    """Measures accuracy from the second word of the second copy on; before it, nothing shows that a copy has begun."""
    right = []
    for _ in range(0, cases, AT_ONCE):
        tokens = torch.tensor([repeated_tokens(tokenizer, rng, period=PERIOD, length=LENGTH) for _ in range(AT_ONCE)])
        with torch.no_grad():
            guess = model(input_ids=tokens).logits.argmax(-1)
        right.append((guess[:, PERIOD + 1 : -1] == tokens[:, PERIOD + 2 :]).float())
    return Figure(
        "next word of a repeated span", torch.cat(right).mean().item(), len(right) * AT_ONCE, 1 / len(tokenizer)
    )


def choice_figures(
    model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int
) -> list[Figure]:
    """Measures how often the right word scores above the wrong one.

    Tested on the held-out side of the split, with names and pairs of nouns that do not occur in training, and on the
    training side.
    """
    figures = []
    for side, label in ((HELD_OUT, "held out"), (TRAINING, "seen")):
        for name, choice_at in CHOICES.items():
            made = list(islice(choices(rng, choice_at, side), cases))
            figures.append(Figure(f"{name}, {label}", _accuracy(model, tokenizer, made), cases, 0.5))
    return figures


def head_figures(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int) -> list[Figure]:
    """The heads that attend most to the first token, to the previous one, and to what followed a word's last copy.

    The first two are the share of rows that have that token as their top key, on held-out documents and on random
    words that repeat; the third is the mean attention that the second copy of a random word gives to what followed
    the first. Only rows from the third on count: earlier ones have few other keys.
    """
    before = torch.arange(1, LENGTH - 1)
    measured: dict[str, list[Tensor]] = {}
    for _ in range(0, cases, AT_ONCE):
        texts = {
            "documents": [held_out_tokens(tokenizer, rng) for _ in range(AT_ONCE)],
            "random": [repeated_tokens(tokenizer, rng, length=LENGTH, period=PERIOD) for _ in range(AT_ONCE)],
        }
        for kind, rows in texts.items():
            patterns = _patterns(model, rows)
            top = patterns.argmax(-1)[..., 2:]
            for name, hit in (("first token", top == 0), ("previous token", top == before)):
                measured.setdefault(f"{name} on top, {kind}", []).append(hit.float().mean((1, 3)))
        copied = patterns.diagonal(1 - PERIOD, 3, 4)[..., 2:]
        measured.setdefault("induction mass, random", []).append(copied.mean((1, 3)))
    return [_best(name, means) for name, means in measured.items()]


def held_out_tokens(tokenizer: PreTrainedTokenizerFast, rng: Random) -> list[int]:
    """`<s>`, then the first words of a held-out document."""
    text = document(rng, sentences=LENGTH // 4, side=HELD_OUT).words[: LENGTH - 1]
    return [*token_ids(tokenizer, [BOS]), *token_ids(tokenizer, text)]


def _best(name: str, means: list[Tensor]) -> Figure:
    """The largest of the mean figures [layer head]."""
    mean = torch.stack(means).mean(0)
    layer, head = divmod(int(mean.argmax()), mean.shape[1])
    return Figure(name, mean.max().item(), len(means) * AT_ONCE, head=(layer, head))


def _patterns(model: BloomForCausalLM, rows: list[list[int]]) -> Tensor:
    """Attention probabilities [layer batch head query key]."""
    with torch.no_grad():
        return torch.stack(model(input_ids=torch.tensor(rows), output_attentions=True).attentions)


def _accuracy(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, choices: list[Choice]) -> float:
    right = 0
    for first in range(0, len(choices), AT_ONCE):
        some = choices[first : first + AT_ONCE]
        inputs = tokenizer(["".join(choice.before) for choice in some], padding=True, return_tensors="pt")
        with torch.no_grad():
            logits: Tensor = model(**inputs).logits
        scores = logits[torch.arange(len(some)), inputs["attention_mask"].sum(-1) - 1]
        better = scores.gather(1, torch.tensor(token_ids(tokenizer, [choice.right for choice in some]))[:, None])
        worse = scores.gather(1, torch.tensor(token_ids(tokenizer, [choice.wrong for choice in some]))[:, None])
        right += int((better > worse).sum())
    return right / len(choices)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the shipped one)")
    parser.add_argument("--cases", type=int, default=200, help="texts per figure (default %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.cases < 1:
        parser.error(f"--cases must be at least 1; got {chosen.cases}")
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, tokenizer = load(chosen.model)
    except AttnmechError as error:
        parser.exit(2, f"{error}\n")
    table = Table("figure", "value", "chance", "head", "cases")
    for figure in evaluate(model, tokenizer, cases=chosen.cases):
        chance = "" if figure.chance is None else f"{figure.chance:.4f}"
        head = "" if figure.head is None else "layer {} head {}".format(*figure.head)
        table.add_row(figure.name, f"{figure.value:.3f}", chance, head, str(figure.cases))
    Console().print(table)


if __name__ == "__main__":
    main()
