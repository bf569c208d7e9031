"""Measures the cost of drift with a large vocabulary, and of attention between segments compared with focus.

    pip install -c constraints.txt .
    python benchmarks/drift_and_segments.py --json benchmarks/results/drift_and_segments.json

Peak memory is the growth during the step, with a separate process for each figure; times are measured
in turns, on an idle machine. Needs 8 GB of free memory and about 20 minutes on two cores.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from measure import alternating_times, in_own_process, machine, memory_growth, write
from rich.console import Console
from rich.table import Table

VOCABULARY: Final = (250_000, 1024)
LONG: Final = 8192
SEGMENT: Final = 16
"""The number of tokens in a segment; the long text has 512 segments."""


def with_large_vocabulary(family: str, length: int, position: bool) -> Callable[[], object]:
    """Drift of a text against every row of a large embedding matrix."""
    import torch
    import transformers as hf

    import attnmech as am

    size, width = VOCABULARY
    if family == "bloom":
        bare: Any = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=size, hidden_size=width, n_layer=2, n_head=16))
    else:
        config = hf.BertConfig(
            vocab_size=size, hidden_size=width, num_hidden_layers=2, num_attention_heads=16, intermediate_size=width
        )
        bare = hf.BertModel(config)
    model = am.load(bare.eval())
    ids = torch.randint(3, size, (1, length), generator=torch.Generator().manual_seed(0))
    am.residual_drift(model, ids[:, :4], layers=[0], position=position)
    return partial(am.residual_drift, model, ids, position=position)


def on_long_text(what: str, length: int = LONG) -> Callable[[], object]:
    """Focus of a long text, or attention between its segments, on the same model."""
    import torch
    import transformers as hf

    import attnmech as am

    torch.manual_seed(0)
    model = am.load(hf.BloomForCausalLM(hf.BloomConfig(vocab_size=1000, hidden_size=512, n_layer=4, n_head=8)).eval())
    ids = torch.randint(3, 900, (1, length))
    spans = [(start, min(start + SEGMENT, length)) for start in range(0, length, SEGMENT)]
    am.attention_focus(model, ids[:, :64])
    if what == "focus":
        return partial(am.attention_focus, model, ids)
    return partial(am.segment_attention, model, ids, spans)


def growth_of(make: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """The growth of memory during a step, in a separate process."""
    return memory_growth(make(*arguments))


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for both tables")
    chosen = parser.parse_args()
    rounds, about = chosen.rounds, machine(("attnmech", "torch", "transformers"))
    console = Console()

    drift = Table(title=f"Drift, a vocabulary of {VOCABULARY[0]:,} × {VOCABULARY[1]}, target 300 MB")
    for column in ("model", "tokens", "with the position's embedding", "MB"):
        drift.add_column(column)
    for family, length, position in [
        ("bloom", 64, False), ("bloom", 512, False), ("bert", 64, False), ("bert", 64, True)
    ]:  # fmt: skip
        growth = in_own_process(growth_of, with_large_vocabulary, family, length, position)
        drift.add_row(family, str(length), "yes" if position else "no", f"{growth / 1e6:.0f}")
    console.print(drift)

    names = ("focus", "segments")
    memory = {name: in_own_process(growth_of, on_long_text, name) for name in names}
    times = in_own_process(_times, names, rounds)
    segments = Table(title=f"{LONG:,} tokens, {LONG // SEGMENT} segments, 4 layers × 8 heads of BLOOM")
    for column in ("", "MB", "×", "seconds", "× (target 1.5)"):
        segments.add_column(column)
    for name in names:
        ratios = (memory[name] / memory["focus"], median(times[name]) / median(times["focus"]))
        cells = f"{memory[name] / 1e6:.0f}", f"{ratios[0]:.2f}", f"{median(times[name]):.1f}", f"{ratios[1]:.2f}"
        segments.add_row(name, *cells)
    console.print(segments)
    write(chosen.json, about, chosen, [drift, segments], memory=memory, times=times)


def _times(names: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    return alternating_times({name: on_long_text(name) for name in names}, rounds)


if __name__ == "__main__":
    main()
