"""What focus takes on long texts of a model with windows and global tokens, beside rows that hold hidden keys, too.

    pip install -c constraints.txt .
    python benchmarks/windows.py --json benchmarks/results/windows.json

Peak memory over what the process held before, each figure in a process of its own; times in turns, on an idle machine.
Needs 4 GB of free memory and about 10 minutes on two cores.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from measure import alternating_times, in_own_process, machine, memory_growth, write
from rich.console import Console
from rich.table import Table

LENGTHS: Final = (4096, 8192, 16_384)
WINDOWS: Final = (128, 512)
GLOBAL: Final = 8


def on_text(length: int, window: int, gathered: bool) -> Callable[[], object]:
    """Focus of one text with a few global tokens, in a Longformer of 4 layers × 8 heads."""
    import torch
    import transformers as hf

    import attnmech as am

    am.AttentionFocus.reducer().__class__.gathered = gathered
    torch.manual_seed(0)
    config = hf.LongformerConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
        max_position_embeddings=LENGTHS[-1] + 2, attention_window=window,
    )  # fmt: skip
    model = am.load(hf.LongformerForMaskedLM(config).eval())
    ids = torch.randint(3, 900, (1, length))
    chosen = torch.zeros_like(ids)
    chosen[:, :GLOBAL] = 1
    am.attention_focus(model, ids[:, :64])
    return partial(am.attention_focus, model, {"input_ids": ids, "global_attention_mask": chosen})


def growth_of(length: int, window: int, gathered: bool) -> int:
    """The growth of a step, in a process of its own."""
    return memory_growth(on_text(length, window, gathered))


def seconds_of(length: int, window: int, gathered: bool, rounds: int) -> float:
    """The median time of a step."""
    return median(alternating_times({"focus": on_text(length, window, gathered)}, rounds)["focus"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the table")
    chosen = parser.parse_args()
    rounds, about = chosen.rounds, machine(("attnmech", "torch", "numba", "transformers"))
    table = Table(title=f"Focus, 4 layers × 8 heads of Longformer, {GLOBAL} global tokens")
    for column in ("tokens", "window", "rows hold", "MB", "seconds"):
        table.add_column(column)
    for length in LENGTHS:
        for window, gathered in [*((window, True) for window in WINDOWS), (WINDOWS[-1], False)]:
            growth = in_own_process(growth_of, length, window, gathered)
            time = in_own_process(seconds_of, length, window, gathered, rounds)
            held = "visible keys" if gathered else "all keys"
            table.add_row(f"{length:,}", str(window), held, f"{growth / 1e6:.0f}", f"{time:.1f}")
    Console().print(table)
    write(chosen.json, about, chosen, [table])


if __name__ == "__main__":
    main()
