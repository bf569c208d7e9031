"""Which heads of the demo model carry verb agreement, copying, and the recipient's name? A hypothesis, tested.

    python examples/ablation.py

For each task: every head is replaced by its mean, alone, on 200 texts, and the heads that clearly lower the logit of
the right word against the wrong one are found (simultaneous 95 % intervals over all heads). On 200 fresh texts the four
strongest of them are then removed together. Beside the damage stand that of control sets, whose heads are drawn from
those that the first texts showed to be harmless to the task (the interval lies within ±0.5 logits), each in the layer
of the head that it stands for and near it in its effect on other text; the damage to the other tasks; and that to the
loss of other text. The grammar says whether the heads look where the answer stands.
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
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.utils.logging import disable_progress_bar

import attnmech as am
from attnmech.demo.evaluate import CHOICES
from attnmech.demo.grammar import TRAINING, document
from attnmech.demo.sequences import repeated_tokens
from attnmech.demo.text import documents

Head = tuple[int, int]
MOST = 4
"""So many of the heads found are removed together."""
LEAST = 0.5
"""Heads that change the logit difference by less are harmless."""
DRAWS = 20
"""Sets of control heads."""
NEAREST = 3
"""A control head is one of so many that are nearest in their effect on other text."""


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


def sweep(model: am.HookedModel, cases: Sequence[Case], means: am.Values) -> am.HeadEffects:
    """The effect of each head's mean on the logit difference."""
    right, wrong = (torch.tensor([getattr(case, name) for case in cases]) for name in ("right", "wrong"))
    texts = (case.ids for case in cases)
    return am.ablate_heads(
        model, texts, method="mean", reference=means, metric="logit_difference", answers=right, against=wrong
    )


def right_without(model: am.HookedModel, cases: Sequence[Case], heads: Sequence[Head], means: am.Values) -> int:
    """In how many cases the right word is above the wrong one without some heads."""
    right = 0
    with model.intervene(*([am.Intervention.replace(heads, means)] if heads else [])):
        for case in cases:
            last = model.run(case.ids[None]).logits[0, -1]
            right += int(last[case.right] > last[case.wrong])
    return right


def loss_without(model: am.HookedModel, texts: Sequence[str], heads: Sequence[Head], means: am.Values) -> float:
    """The loss of the next token, nats, without some heads: mean over texts."""
    losses = []
    with model.intervene(*([am.Intervention.replace(heads, means)] if heads else [])):
        for text in texts:
            ran = model.run(text)
            losses.append(float(cross_entropy(ran.logits[0, :-1], ran.batch.ids[0, 1:])))
    return sum(losses) / len(losses)


def controls(carrying: Sequence[Head], effects: am.HeadEffects, general: Tensor, rng: Random) -> list[Head]:
    """A set of heads that do not clearly matter to the task, one for each that does.

    In its layer, or where that has none left in the nearest one, and near it in its effect on other text; empty where
    too few heads are harmless.
    """
    low, high = effects.simultaneous()
    harmless = ((low > -LEAST) & (high < LEAST)).nonzero().tolist()
    if len(harmless) < len(carrying):
        return []
    drawn: list[Head] = []
    for layer, head in carrying:
        left = [(row, column) for row, column in harmless if (row, column) not in drawn]
        near = min(abs(row - layer) for row, _ in left)
        alike = sorted(
            (each for each in left if abs(each[0] - layer) == near),
            key=lambda each: abs(float(general[each] - general[layer, head])),
        )
        drawn.append(rng.choice(alike[:NEAREST]))
    return drawn


def spread(values: Sequence[float], form: str) -> str:
    """The mean and the range of what control sets give."""
    if not values:
        return "too few harmless heads"
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def share(right: int, cases: int) -> str:
    """An accuracy with its 95 % interval (Wilson 1927)."""
    ends = binomtest(right, cases).proportion_ci(method="wilson")
    return f"{right / cases:.2f} ({ends.low:.2f} to {ends.high:.2f})"


def looks_at_the_answer(model: am.HookedModel, cases: Sequence[Case]) -> Tensor:
    """How often each head's top key, from the last word, is the word that decides `[layer head]`."""
    hits = torch.zeros(model.n_layers, model.n_heads)
    for case in cases:
        patterns = model.run(case.ids[None], points=["pattern"])["pattern"][:, 0, :, -1]
        hits += patterns.argmax(dim=-1) == case.key
    return hits / len(cases)


def main() -> None:
    """Prints, for each task, the heads that carry it, what else their removal does, controls, and where they look."""
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
    others = documents(max(8, count // 4), seed=3)
    general = am.ablate_heads(model, others, method="mean", reference=means).effect
    fresh = {name: list(islice(cases(Random(2)), count)) for name, cases in tasks.items()}
    intact = {name: right_without(model, cases, [], means) for name, cases in fresh.items()}
    loss = loss_without(model, others, [], means)
    console = Console(width=150)
    for name, effects in track(found.items(), "controlling", transient=True, console=console):
        _, high = effects.simultaneous()
        all_found = [(row, column) for row, column in (high < 0).nonzero().tolist()]
        carrying = sorted(sorted(all_found, key=lambda head: float(effects.effect[head]))[:MOST])
        if not carrying:
            console.print(f"[bold]{name}[/bold]: no head clearly carries it on {count} texts.\n")
            continue
        rng = Random(1)
        sets = [drawn for _ in range(DRAWS) if (drawn := controls(carrying, effects, general, rng))]
        table = Table(
            title=f"{name}: without {' '.join(map(named, carrying))}, of {len(all_found)} heads found",
            title_justify="left",
        )
        for column in ("right answers", "with all heads", "without these", f"without control sets, mean of {DRAWS}"):
            table.add_column(column)
        for task, cases in fresh.items():
            drawn = [right_without(model, cases, each, means) / count for each in sets]
            table.add_row(
                task if task != name else f"[bold]{task}[/bold]",
                share(intact[task], count),
                share(right_without(model, cases, carrying, means), count),
                spread(drawn, ".2f"),
            )
        more = [loss_without(model, others, each, means) - loss for each in sets]
        table.add_row(
            "loss of other text, nats",
            f"{loss:.2f}",
            f"{loss_without(model, others, carrying, means) - loss:+.2f}",
            spread(more, "+.2f"),
        )
        console.print(table)
        looks = looks_at_the_answer(model, fresh[name])
        most = sorted(carrying, key=lambda head: -looks[head])[:3]
        told = ", ".join(f"{named(head)} in {looks[head]:.0%}" for head in most)
        console.print(f"Their highest key, from the last word, is the word that decides: {told} of cases.\n")


def named(head: Head) -> str:
    """A head as people write it."""
    return f"L{head[0]}H{head[1]}"


if __name__ == "__main__":
    main()
