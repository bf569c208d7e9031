"""Which heads of the demo model carry verb agreement, copying, and the recipient's name? A hypothesis, tested.

    python examples/ablation.py

For each task: every head is replaced by its mean, alone, on 200 texts, and the heads that lower the logit of the right
word against the wrong one are kept if the effect is more than chance (one-sided t-test, Holm's correction for all heads
of all tasks). On 200 fresh texts these heads are then taken out together, beside as many heads drawn at random; and the
grammar says whether they look where the answer stands.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import ttest_1samp
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import attnmech as am
from attnmech.demo.evaluate import CHOICES
from attnmech.demo.grammar import TRAINING, document
from attnmech.demo.sequences import repeated_tokens
from attnmech.demo.text import documents

Head = tuple[int, int]
LEVEL = 0.01
"""Of all heads of all tasks together."""
DRAWS = 20
"""Random sets of heads, for the control."""


@dataclass(frozen=True)
class Case:
    """A text that one of two words must follow, and the position of the word that says which."""

    ids: Tensor
    right: int
    wrong: int
    key: int


def sentences(model: am.HookedModel, relation: str, sort: str) -> Callable[[Random], Iterator[Case]]:
    """Cases in which the grammar's relation of the last word to an earlier one decides."""

    def cases(rng: Random) -> Iterator[Case]:
        while True:
            text = document(rng, sentences=3, side=TRAINING)
            for each in text.relations:
                choice = CHOICES[sort](text, each)
                if choice is None or each.relation != relation:
                    continue
                ids = model.encode("".join(choice.before)).ids[0]
                right, wrong = (model.tokenizer.convert_tokens_to_ids(word) for word in (choice.right, choice.wrong))
                # <s> stands before the words.
                yield Case(ids, right, wrong, each.key + 1)

    return cases


def copying(model: am.HookedModel) -> Callable[[Random], Iterator[Case]]:
    """Random words that repeat: what followed this word the last time, against another word of the span."""

    def cases(rng: Random) -> Iterator[Case]:
        while True:
            ids = repeated_tokens(model.tokenizer, rng, period=12, length=40)
            end = rng.randint(16, 22)
            yield Case(torch.tensor(ids[:end]), ids[end], ids[end - 5], end - 12)

    return cases


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for how many there are (Holm 1979): the k-th smallest times (n − k), never falling."""
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, values[place] * (len(values) - rank)))
        corrected[place] = largest
    return corrected


def sweep(model: am.HookedModel, cases: Sequence[Case], means: am.Values) -> am.HeadEffects:
    """The effect of each head's mean on the logit difference."""
    right, wrong = (torch.tensor([getattr(case, name) for case in cases]) for name in ("right", "wrong"))
    texts = (case.ids for case in cases)
    return am.ablate_heads(
        model, texts, method="mean", reference=means, metric="logit_difference", answers=right, against=wrong
    )


def accuracy(model: am.HookedModel, cases: Sequence[Case], heads: Sequence[Head], means: am.Values) -> float:
    """How often the right word is above the wrong one without some heads."""
    changes = [am.Intervention.replace(heads, means)] if heads else []
    right = 0
    with model.intervene(*changes):
        for case in cases:
            last = model.run(case.ids[None]).logits[0, -1]
            right += int(last[case.right] > last[case.wrong])
    return right / len(cases)


def looks_at_the_answer(model: am.HookedModel, cases: Sequence[Case]) -> Tensor:
    """How often each head's top key, from the last word, is the word that decides `[layer head]`."""
    hits = torch.zeros(model.n_layers, model.n_heads)
    for case in cases:
        patterns = model.run(case.ids[None], points=["pattern"])["pattern"][:, 0, :, -1]
        hits += patterns.argmax(dim=-1) == case.key
    return hits / len(cases)


def main() -> None:
    """Prints, for each task, the heads that carry it, the control, and where they look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="texts per task (default %(default)s)")
    count = parser.parse_args().cases
    disable_progress_bar()
    model = am.load()
    means = am.mean_z(model, documents(100, seed=1))
    tasks = {
        "verb agrees across a noun": sentences(model, "subject-verb", "verb across 1 attractor"),
        "next word of a repeated span": copying(model),
        "the recipient's name": sentences(model, "recipient", "recipient's name"),
    }
    found = {
        name: sweep(model, list(islice(cases(Random(0)), count)), means)
        for name, cases in track(tasks.items(), "sweeping", transient=True)
    }
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    tests = [
        float(ttest_1samp(effects.per_text[layer, head].numpy(), 0, alternative="less").pvalue)
        for effects in found.values()
        for layer, head in heads
    ]
    corrected = torch.tensor(holm(tests)).view(len(tasks), -1)
    table = Table(
        "task", "heads that carry it", "accuracy", "without them", "without random heads", "look at the answer"
    )
    rng = Random(1)
    for place, (name, cases) in enumerate(track(tasks.items(), "controlling", transient=True)):
        effect = found[name].effect.flatten()
        carrying = [heads[i] for i in effect.argsort().tolist() if corrected[place, i] < LEVEL and effect[i] < -0.5]
        fresh = list(islice(cases(Random(2)), count))
        others = [head for head in heads if head not in carrying]
        draws = [
            accuracy(model, fresh, rng.sample(others, min(len(carrying), len(others))), means) for _ in range(DRAWS)
        ]
        looks = looks_at_the_answer(model, fresh)
        shown = sorted(carrying, key=lambda head: -looks[head])[:3]
        table.add_row(
            name,
            " ".join(f"L{layer}H{head}" for layer, head in carrying) or "none",
            f"{accuracy(model, fresh, [], means):.2f}",
            f"{accuracy(model, fresh, carrying, means):.2f}",
            f"{sum(draws) / DRAWS:.2f} ({min(draws):.2f} to {max(draws):.2f})",
            ", ".join(f"L{layer}H{head} {looks[layer, head]:.2f}" for layer, head in shown) or "",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
