"""Measures statistics of long texts in a model with windows and global tokens, by window and length.

    pip install -c constraints.txt .
    python benchmarks/windows.py --json windows.json

Reports peak memory in excess of the loaded model, and CPU seconds, with a separate process for each pass. glibc returns
freed blocks at once (`MALLOC_MMAP_THRESHOLD_`); otherwise it keeps about the same amount again, whatever the window.
Needs 2 GB of free memory and about 15 minutes on two cores.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Final

from measure import in_own_process, machine, memory_growth, write
from rich.console import Console
from rich.table import Table

LENGTHS: Final = (4096, 8192, 16_384)
WINDOWS: Final = (32, 128, 512, 2048)
GLOBAL: Final = 8
METHODS: Final = ("attention_focus", "residual_updates")


def on_text(method: str, length: int, window: int) -> Callable[[], object]:
    """A statistic of one text with a few global tokens, in a Longformer of 4 layers × 8 heads."""
    import torch
    import transformers as hf

    import attnmech as am

    torch.manual_seed(0)
    config = hf.LongformerConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, intermediate_size=256,
        max_position_embeddings=LENGTHS[-1] + 2, attention_window=window,
    )  # fmt: skip
    model = am.load(hf.LongformerForMaskedLM(config).eval())
    ids = torch.randint(3, 900, (1, length))
    chosen = torch.zeros_like(ids)
    chosen[:, :GLOBAL] = 1
    measure = getattr(am, method)
    measure(model, ids[:, :64])
    return partial(measure, model, {"input_ids": ids, "global_attention_mask": chosen})


def cost(*case: object) -> tuple[int, float]:
    """The growth of a pass and its CPU seconds."""
    step = on_text(*case)  # type: ignore[arg-type]
    start = process_time()
    growth = memory_growth(step)
    return growth, process_time() - start


def main() -> None:
    """Prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--json", type=Path)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    table = Table(title=f"4 layers × 8 heads of Longformer, {GLOBAL} global tokens")
    for column in ("method", "window", "tokens", "MB", "kB per token", "CPU seconds"):
        table.add_column(column)
    given = parser.parse_args()
    for method in METHODS:
        for window in WINDOWS:
            for length in given.lengths:
                growth, seconds = in_own_process(cost, method, length, window)
                table.add_row(
                    method, str(window), f"{length:,}", f"{growth / 1e6:.0f}", f"{growth / length / 1e3:.1f}",
                    f"{seconds:.1f}",
                )  # fmt: skip
    Console().print(table)
    write(given.json, machine(("attnmech", "torch", "transformers")), given, [table])


if __name__ == "__main__":
    main()
