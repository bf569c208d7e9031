"""Times generation with a cache, with and without an edit, beside transformers' own and full passes.

    python benchmarks/generation.py --json generation.json

GPT-2-small's shape with random weights; the prompt has 16 tokens. Steps take turns, and the median of the rounds
counts; full passes, which take minutes, run once. See benchmarks/README.md.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from measure import Step, machine, write
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, build, token_ids

import attnmech as am

TRANSFORMERS, PLAIN, EDITED, HOOKED, MEASURED, FULL = (
    "transformers", "attnmech", "attnmech, a head zeroed", "attnmech, a hook at z of every layer",
    "attnmech, focus measured", "full passes, a head zeroed",
)  # fmt: skip
BASE = {PLAIN: (TRANSFORMERS, 1.3), MEASURED: (TRANSFORMERS, 1.6), FULL: (EDITED, 10.0)}
"""The figure with which a figure is compared, and the target: at most for the first two, at least for full passes."""


def seconds(step: Step) -> float:
    """Seconds of one step."""
    start = perf_counter()
    step()
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    raw = build(SHAPES["gpt2"]).eval()
    raw.config.eos_token_id = raw.generation_config.eos_token_id = None
    model, ids = am.load(raw), token_ids(16)
    zeroed = am.Intervention.zero([(5, 3)])

    def edited(*, cache: bool) -> object:
        with model.intervene(zeroed):
            return model.generate(ids, chosen.tokens, cache=cache)

    def hooked() -> object:
        with model.hooks({"z": lambda z: 1.1 * z}):
            return model.generate(ids, chosen.tokens)

    def plain() -> object:
        return raw.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=chosen.tokens, do_sample=False)

    steps: dict[str, Step] = {
        TRANSFORMERS: plain,
        PLAIN: lambda: model.generate(ids, chosen.tokens),
        EDITED: lambda: edited(cache=True),
        HOOKED: hooked,
        MEASURED: lambda: am.attention_focus(model, model.generate(ids, chosen.tokens)),
    }
    model.generate(ids, 2), model.generate(ids, 2, points=["q"])  # so that no round includes the proof of the cache
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.rounds):
        for name, step in steps.items():
            rounds[name].append(seconds(step))
    rounds[FULL] = [seconds(lambda: edited(cache=False))]
    medians = {name: median(times) for name, times in rounds.items()}
    table = Table("contender", "seconds", "ratio", "to", title=f"GPT-2-small, {chosen.tokens} new tokens")
    for name, value in medians.items():
        base, target = BASE.get(name, (TRANSFORMERS, None))
        wanted = "" if target is None else f" (target {target})"
        table.add_row(name, f"{value:.2f}", f"{value / medians[base]:.2f}", f"{base}{wanted}")
    Console(width=120).print(table)
    write(chosen.json, machine(("attnmech", "torch", "transformers")), chosen, [table], rounds=rounds)


if __name__ == "__main__":
    main()
