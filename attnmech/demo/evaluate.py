"""Try the demo model on freshly generated text: `python -m attnmech.demo.evaluate`."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BloomForCausalLM, PreTrainedTokenizerFast

from attnmech.demo import model_folder, words
from attnmech.demo.grammar import Document, Kind, Relation, document
from attnmech.demo.sequences import document_tokens, repeated_tokens
from attnmech.demo.tokenizer import token_ids
from attnmech.errors import ModelNotFoundError

HELD_OUT_SEED = 1_000_003
"""Far from the seeds that training uses."""


@dataclass(frozen=True)
class Figure:
    """What one trial measured."""

    name: str
    value: float
    chance: float | None
    """What guessing among the choices would reach; None where there are no choices."""
    cases: int


@dataclass(frozen=True)
class Choice:
    """A place in a text where one of a few words must come next."""

    before: tuple[str, ...]
    """The words that the model sees."""
    right: str
    wrong: str


def load(folder: Path | None = None) -> tuple[BloomForCausalLM, PreTrainedTokenizerFast]:
    """The shipped model, or the one in a folder, with its tokenizer; never asks a network."""
    source = folder or model_folder()
    if not (source / "config.json").is_file():
        raise ModelNotFoundError(
            f"expected a folder with a config.json; got {source}. "
            f"`python -m attnmech.demo.train --out {source}` makes one."
        )
    model = BloomForCausalLM.from_pretrained(source, local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True)
    model.train(False)
    return model, tokenizer


def evaluate(
    model: BloomForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    cases: int = 200,
    seed: int = HELD_OUT_SEED,
) -> list[Figure]:
    """Every figure of the model card.

    The choices count as right where the right word scores above the wrong one.
    """
    rng = Random(seed)
    figures = [_loss(model, tokenizer, rng, cases), _repetition(model, tokenizer, rng, cases)]
    for name, choice_at in CHOICES.items():
        choices = list(islice(_choices(rng, choice_at), cases))
        figures.append(Figure(name, _accuracy(model, tokenizer, choices), 0.5, cases))
    return figures


def _loss(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int) -> Figure:
    tokens = torch.tensor([document_tokens(tokenizer, rng) for _ in range(cases)])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    return Figure("loss on documents (nats a word)", loss.item(), None, cases)


def _repetition(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, cases: int) -> Figure:
    """From the second word of the second copy on: until then nothing says that a copy has begun."""
    period = 20
    tokens = torch.tensor([repeated_tokens(tokenizer, rng, period=period) for _ in range(cases)])
    with torch.no_grad():
        guess = model(input_ids=tokens).logits.argmax(-1)
    right: Tensor = guess[:, period + 1 : -1] == tokens[:, period + 2 :]
    return Figure("next word of a repeated random span", right.float().mean().item(), 1 / len(tokenizer), cases)


def _accuracy(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, choices: list[Choice]) -> float:
    texts = ["".join(choice.before) for choice in choices]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    last = inputs["attention_mask"].sum(-1) - 1
    scores = logits[torch.arange(len(choices)), last]
    right = scores.gather(1, _column(tokenizer, [choice.right for choice in choices]))
    wrong = scores.gather(1, _column(tokenizer, [choice.wrong for choice in choices]))
    return (right > wrong).float().mean().item()


def _column(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> Tensor:
    return torch.tensor(token_ids(tokenizer, tokens))[:, None]


def _choices(rng: Random, choice_at: Callable[[Document, Relation], Choice | None]) -> Iterator[Choice]:
    while True:
        text = document(rng, sentences=3)
        for relation in text.relations:
            choice = choice_at(text, relation)
            if choice is not None:
                yield choice


def _recipient(text: Document, relation: Relation) -> Choice | None:
    """When Anna and Tom went to the harbour, Anna gave a shell to ... Tom or Anna?"""
    if relation.relation != "recipient":
        return None
    right = text.words[relation.query + 1]
    pair = (text.words[relation.key - 2], text.words[relation.key + 2])
    wrong = next(word for word in pair if word.strip() in words.GIRLS + words.BOYS)
    return Choice(text.words[: relation.query + 1], right, " " + wrong.strip())


def _number(attractors: int) -> Callable[[Document, Relation], Choice | None]:
    """The keys beside the cabinet ... are or is? All nouns in between, so many, have the other number."""

    def choice_at(text: Document, relation: Relation) -> Choice | None:
        if relation.relation != "subject-verb":
            return None
        plural = text.words[relation.key] in PLURALS
        between = text.words[relation.key + 1 : relation.query]
        numbers = [word in PLURALS for word in between if word in PLURALS | SINGULARS]
        if numbers != [not plural] * attractors:
            return None
        right = text.words[relation.query]
        return Choice(text.words[: relation.query], right, OTHER_NUMBER[right])

    return choice_at


def _gender(text: Document, relation: Relation) -> Choice | None:
    """Anna lost her book, so ... she or he?"""
    return _one_of(text, relation, "pronoun-antecedent", (" she", " he"))


def _closing(text: Document, relation: Relation) -> Choice | None:
    """The keys (a gift from Tom ... ) or ]?"""
    return _one_of(text, relation, "bracket", tuple(words.BRACKETS.values()))


def _one_of(text: Document, relation: Relation, kind: Kind, pair: tuple[str, ...]) -> Choice | None:
    right = text.words[relation.query]
    if relation.relation != kind or right not in pair:
        return None
    return Choice(text.words[: relation.query], right, next(word for word in pair if word != right))


NOUNS = tuple(noun for theme in words.THEMES for noun in theme.nouns)
SINGULARS = {" " + noun.singular for noun in NOUNS}
PLURALS = {" " + noun.plural for noun in NOUNS}
OTHER_NUMBER = {f" {verb.singular}": f" {verb.plural}" for verb in words.AGREEING}
OTHER_NUMBER |= {plural: singular for singular, plural in OTHER_NUMBER.items()}

CHOICES: dict[str, Callable[[Document, Relation], Choice | None]] = {
    "recipient's name": _recipient,
    "verb's number": _number(0),
    "verb's number across 1 attractor": _number(1),
    "verb's number across 2 attractors": _number(2),
    "pronoun's gender": _gender,
    "kind of closing bracket": _closing,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m attnmech.demo.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the shipped one)")
    parser.add_argument("--cases", type=int, default=200, help="texts per figure (default %(default)s)")
    chosen = parser.parse_args(arguments)
    model, tokenizer = load(chosen.model)
    table = Table("figure", "value", "chance", "cases")
    for figure in evaluate(model, tokenizer, cases=chosen.cases):
        chance = "" if figure.chance is None else f"{figure.chance:.3f}"
        table.add_row(figure.name, f"{figure.value:.3f}", chance, str(figure.cases))
    Console().print(table)


if __name__ == "__main__":
    main()
