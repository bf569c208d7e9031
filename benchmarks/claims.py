"""Measures how often claims about sets of heads are false, on the effects of the demo model: docs/claims.md.

    python benchmarks/claims.py --out docs/claims.md

Removes every single head and every pair of heads of the demo model once, on 64 cases of copying from 16 templates. Each
claim then draws half of the templates for confirmation. *Random* claims test a random set. For *rule* claims, answers
are shuffled (the sign of each case's effects is drawn), so that no head has an effect on average; the strongest
heads on the other half are tested. Takes about five minutes on two cores.
"""

import argparse
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import attnmech as am
from attnmech.methods.claims.p_values import added_by_each, least_p, rank_p, strength
from attnmech.methods.claims.set_effects import Measuring, Removal
from attnmech.methods.claims.tasks import group_means

ALPHAS = (0.01, 0.05, 0.1)
GROUPS = 16
Pair = tuple[tuple[int, int], ...]


def effects() -> dict[Pair, Tensor]:
    """The harm to the demo model in each case, `[group case]`, when a head or a pair is removed."""
    model = am.load()
    task = am.Task.of_demo("copying", templates=GROUPS, per_template=4)
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    sets: list[Pair] = [*((head,) for head in heads), *combinations(heads, 2)]
    swept = Measuring(Removal.of(model, "zero", None, 0, None), progress=True).swept(task, sets)
    assert group_means(swept.before, task.group_of).shape == (GROUPS,)
    harm = (swept.before - swept.after).unflatten(-1, (GROUPS, -1))
    return dict(zip(sets, harm, strict=True))


def tested(harm: dict[Pair, Tensor], chosen: Pair) -> dict[str, float]:
    """The p-values of one set, given the harm in each group."""
    layers = [layer for layer, _ in chosen]
    wide = len(chosen) == 1 or layers[0] == layers[1]
    null = [each for each in harm if len(each) == len(chosen) and (wide or [layer for layer, _ in each] == layers)]
    if wide and len(chosen) == 2:
        null = [each for each in null if each[0][0] == each[1][0] == layers[0]]
    null.remove(chosen)
    null.insert(0, chosen)
    together = torch.stack([harm[each] for each in null])
    size = together.mean(dim=-1)
    found = {"raw": float((size >= size[0]).double().mean()), "p": rank_p(strength(together))}
    without = [each for each in range(len(null)) if not {*null[each]} & {*chosen}]
    strong = strength(together)
    # The p-value if the tested heads were left out of the controls.
    found["left out"] = (1 + int((strong[without] >= strong[0]).sum())) / (1 + len(without))
    if len(chosen) == 2:
        alone = torch.stack([torch.stack([harm[(head,)] for head in each]) for each in null])
        adds = added_by_each(together, alone, alone.flip(1))
        share = rank_p(strength(adds).amin(dim=1))
        found["p_each"] = max(share, least_p(adds[0]))
    return found


def rows(harm: dict[Pair, Tensor], runs: int) -> list[str]:
    """The table."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2):
        sets = [each for each in harm if len(each) == size]
        for how in ("random", "rule"):
            values: dict[str, list[float]] = {}
            for _ in track(range(runs), f"{how}, {size}", transient=True):
                order = torch.randperm(GROUPS, generator=generator)
                sign = torch.randint(0, 2, (GROUPS, 4), generator=generator) * 2 - 1 if how == "rule" else 1
                of_group = {each: (value * sign).mean(dim=-1) for each, value in harm.items()}
                if how == "rule":
                    alone = {each: float(of_group[each][order[8:]].mean()) for each in of_group if len(each) == 1}
                    strongest = sorted(alone, key=lambda each: -alone[each])[:size]
                    chosen: Pair = tuple(sorted(each[0] for each in strongest))
                else:
                    chosen = sets[int(torch.randint(len(sets), (1,), generator=generator))]
                for name, p in tested({each: value[order[:8]] for each, value in of_group.items()}, chosen).items():
                    values.setdefault(name, []).append(p)
            for name in ("p", "p_each", "raw", "left out"):
                if name in values:
                    shares = [sum(p <= alpha + 1e-9 for p in values[name]) / runs for alpha in ALPHAS]
                    told = f"{how} {'head' if size == 1 else 'pair'}"
                    found.append(f"| {told} | {name} | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    return found


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/claims.md"))
    parser.add_argument("--runs", type=int, default=400, help="claims per row (default %(default)s)")
    arguments = parser.parse_args()
    template = (Path(__file__).parent / "claims.md").read_text(encoding="utf-8")
    page = template.format(runs=arguments.runs, rows="\n".join(rows(effects(), arguments.runs)))
    arguments.out.write_text(page, encoding="utf-8")
    Console().print(page, markup=False, highlight=False)


if __name__ == "__main__":
    main()
