"""How the demo model's heads form while it learns.

    python -m attnmech.demo.train --out scratch/model --checkpoints scratch/kept --until 2048
    python examples/heads_form.py scratch/kept

The first command makes the first steps of the shipped model's training again and keeps a model at each power of two;
the second measures each of them, and the shipped model as the last.
"""

import argparse
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from attnmech.demo.evaluate import FRESH_SEED, Figure, head_figures, load, loss_figures, repetition_figure

disable_progress_bar()
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoints", type=Path, help="folder of checkpoints")
parser.add_argument("--cases", type=int, default=64, help="texts per figure (default %(default)s)")
chosen = parser.parse_args()
folders = sorted(chosen.checkpoints.glob("step-*"))
if not folders:
    parser.error(f"{chosen.checkpoints} holds no folder step-*; the training command above makes them.")


def measured(folder: Path | None) -> list[Figure]:
    """Loss, copying and head patterns of one checkpoint; each on the same texts."""
    model, tokenizer = load(folder)
    loss, _, excess = loss_figures(model, tokenizer, Random(FRESH_SEED), chosen.cases)
    copying = repetition_figure(model, tokenizer, Random(FRESH_SEED), chosen.cases)
    return [loss, excess, copying, *head_figures(model, tokenizer, Random(FRESH_SEED), chosen.cases)]


rows = {
    **{folder.name.removeprefix("step-").lstrip("0") or "0": folder for folder in folders},
    "shipped": None,
}
table = Table("step", title="how heads form")
for place, (step, folder) in enumerate(track(rows.items(), "measuring", transient=True)):
    figures = measured(folder)
    if place == 0:
        for figure in figures:
            table.add_column(figure.name, justify="right")
    heads = [" L{}H{}".format(*figure.head) if figure.head else "" for figure in figures]
    table.add_row(step, *(f"{figure.value:.3f}{head}" for figure, head in zip(figures, heads, strict=True)))
Console(width=120).print(table)
