"""Measures `am.load`, both the reading of a model's structure and the certificate, in plain passes of 512 tokens.

    python benchmarks/loading.py --models gpt2 1b --json loading.json

Models have random weights. Seconds are of the CPU, with one thread; memory is the growth of the process's peak over the
loaded model. `1b` has the shape of Llama 3.2 1B in float32 and needs 8 GB. See benchmarks/README.md.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Final

from measure import StepError, in_own_process, machine, memory_growth, write
from rich.console import Console
from rich.table import Table
from shapes import WHOLE, build

if TYPE_CHECKING:
    from torch import Tensor

PACKAGES: Final = ("attnmech", "torch", "transformers", "transformer-lens")
TOKENS: Final = 512
MODELS: Final = [name for name in WHOLE if name != "8b"]


@dataclass(frozen=True)
class Cost:
    """The cost of loading a model."""

    weights_gb: float
    plain: float
    """CPU seconds of one plain pass of 512 tokens, of 3 images, or of a recording and 448 tokens."""
    load: float
    certificate: float
    memory_gb: float
    """The growth of the peak while loading."""


def inputs_of(name: str) -> "dict[str, Tensor]":
    """The input of the plain pass."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 224, 224, generator=generator)}
    if name == "whisper":
        ids = torch.randint(5, 1000, (1, 448), generator=generator)
        return {"input_features": torch.randn(1, 80, 3000, generator=generator), "decoder_input_ids": ids}
    ids = torch.randint(5, 1000, (1, TOKENS), generator=generator)
    return {"input_ids": ids, **({"decoder_input_ids": ids} if name == "t5" else {})}


def seconds(step: Callable[[], object]) -> float:
    """CPU seconds of a step."""
    start = process_time()
    step()
    return process_time() - start


def cost(name: str) -> Cost:
    """Measures one model, in this process."""
    import torch

    import attnmech as am

    torch.set_num_threads(1)
    am.load()  # imports
    model = build(WHOLE[name])
    inputs = inputs_of(name)

    def plain() -> None:
        with torch.no_grad():
            model(**inputs)

    plain()
    each = min(seconds(plain) for _ in range(3))
    loaded: list[am.HookedModel] = []
    times: list[float] = []
    grown = memory_growth(lambda: times.append(seconds(lambda: loaded.append(am.load(model)))))
    certificate = seconds(lambda: am.certify(loaded[0]))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return Cost(weights / 1e9, each, times[0], certificate, grown / 1e9)


def table_of(costs: Mapping[str, Cost]) -> Table:
    """Each model's figures."""
    header = ("", "weights, GB", "plain pass, s", "load, passes", "certificate, passes", "memory, GB", "of the weights")
    table = Table(*header, title="Loading", title_justify="left")
    for name, measured in costs.items():
        passes = (f"{value / measured.plain:.1f}" for value in (measured.load, measured.certificate))
        share = f"{measured.memory_gb / measured.weights_gb:.0%}"
        sizes = f"{measured.weights_gb:.2f}", f"{measured.plain:.2f}"
        table.add_row(WHOLE[name].title, *sizes, *passes, f"{measured.memory_gb:.2f}", share)
    return table


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--json", type=Path, help="file for every figure")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 120)
    about, costs = machine(PACKAGES), {}
    for name in chosen.models:
        try:
            costs[name] = in_own_process(cost, name)
        except StepError as error:
            console.print(f"{name}: {error}")
    table = table_of(costs)
    console.print(table)
    write(chosen.json, about, chosen, [table], costs={name: asdict(measured) for name, measured in costs.items()})


if __name__ == "__main__":
    main()
