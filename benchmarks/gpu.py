"""Measures attnmech, transformers and TransformerLens on an accelerator, and compares numbers with the CPU's.

    pip install -c constraints.txt . -r benchmarks/requirements.txt
    python benchmarks/gpu.py --json gpu.json

Prints the largest difference from the CPU for five families, then a table for each shape, precision and length: time
(the median of the rounds) and peak memory over the loaded model. After `--minutes` it begins no further case, and says
which cases it left out.
`--tiny --device cpu` tries it out in a minute, without measuring memory.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import torch
from contenders import CACHE, FUSED, PLAIN, fused, plain, run_with_cache
from measure import difference, machine, write
from rich.console import Console
from rich.table import Table
from shapes import WHOLE, Shape, build, token_ids
from torch import Tensor
from transformers import PreTrainedModel

import attnmech as am

RUN, STATISTICS, SWEEP, REPORT = (
    "attnmech, run",
    "attnmech, focus and updates",
    "attnmech, ablate 8 heads",
    "attnmech, report",
)
TARGETS: Final = ((RUN, FUSED, "time", 1.15), (STATISTICS, FUSED, "time", 2.0), (STATISTICS, CACHE, "memory", 0.1))
"""A contender, its reference, the compared quantity, and the largest acceptable ratio at the middle length."""


SHAPES: Final = (WHOLE["gpt2"], WHOLE["1b"], WHOLE["8b"])
TINY: Final = (
    Shape("tiny", "tiny GPT-2", "GPT2LMHeadModel", {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 96}),
)
FAMILIES: Final = tuple(
    Shape(model, model, model, {"vocab_size": 90, **options})
    for model, options in {
        "GPT2LMHeadModel": {"n_layer": 2, "n_head": 4, "n_embd": 48},
        "BloomForCausalLM": {"n_layer": 2, "n_head": 4, "hidden_size": 48},
        "LlamaForCausalLM": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48,
            "intermediate_size": 80,
        },
        "Gemma3ForCausalLM": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48,
            "intermediate_size": 80, "head_dim": 16, "sliding_window": 8,
        },
        "BertForMaskedLM": {
            "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48, "intermediate_size": 80,
        },
    }.items()
)  # fmt: skip


# -- the CPU's numbers -------------------------------------------------------------------------------------------------


def results_of(model: am.HookedModel, ids: Tensor) -> dict[str, Tensor]:
    """Numbers from every layer of the package."""
    focus, updates = am.attention_focus(model, ids), am.residual_updates(model, ids)
    terms = am.decompose_scores(model, ids).terms
    return {
        "logits": model.run(ids, points=["logits"]).logits,
        **{f"focus {name}": focus.mean(name) for name in focus.STATISTICS},
        **{f"updates {name}": updates.mean(name) for name in updates.STATISTICS},
        **{f"term {name}": value for name, value in terms.items()},
        "ablation": am.ablate_heads(model, ids, [(0, 1), (1, 2)], metric="kl").effect,
    }


def table_of_differences(device: torch.device) -> Table:
    """The largest difference from the CPU of each family, in float32."""
    table = Table("model", "largest difference", "of", title=f"{device} against the CPU, float32", title_justify="left")
    for shape in FAMILIES:
        raw = build(shape)
        with torch.no_grad():
            for parameter in raw.parameters():  # biases and norms begin at 0 and 1, where an error might not show
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        ids = token_ids(23, raw.config.vocab_size, texts=2)
        expected = results_of(am.load(raw), ids)
        found = results_of(am.load(raw, device=device), ids)
        worst = max(expected, key=lambda name: difference(found[name], expected[name]))
        table.add_row(shape.title, f"{difference(found[worst], expected[worst]):.1e}", worst)
    return table


# -- costs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The cost of one contender's step."""

    seconds: float | None
    growth: int | None
    """Bytes of peak memory over the loaded model."""
    failure: str = ""


def steps_of(model: PreTrainedModel, ids: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each contender's step on these tokens."""
    there = ids.to(model.device)
    for name, make in ((PLAIN, plain), (FUSED, fused), (CACHE, run_with_cache)):
        yield name, partial(make(model), there)
    hooked = am.load(model)
    yield RUN, lambda: hooked.run(ids, points=["logits"])
    reducers = am.results.AttentionFocus.reducer, am.results.ResidualUpdates.reducer
    yield STATISTICS, lambda: am.stream(hooked, ids, [make() for make in reducers])
    if ids.shape[1] <= 512:
        heads = [(layer, head) for layer in range(2) for head in range(4)]
        yield SWEEP, lambda: am.ablate_heads(hooked, ids, heads, metric="loss")
        yield REPORT, lambda: am.report(hooked, ids[:, :192]).to_html()


def cost_of(step: Callable[[], object], device: torch.device, repeats: int) -> Cost:
    """The median time of a step after one that warms up, and its peak memory."""
    on_gpu = device.type == "cuda"
    try:
        step()
        seconds, growth, before = [], None, 0
        for _ in range(repeats):
            gc.collect()
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = perf_counter()
            result = step()
            if on_gpu:
                torch.cuda.synchronize()
                growth = torch.cuda.max_memory_allocated() - before
            seconds.append(perf_counter() - start)
            del result
    except (torch.OutOfMemoryError, am.errors.DeviceMemoryError):
        return Cost(None, None, "out of memory")
    finally:
        if on_gpu:
            torch.cuda.empty_cache()
    return Cost(median(seconds), growth)


def table_of_costs(title: str, costs: Mapping[str, Cost]) -> Table:
    """One shape at one precision and length; ratios are to the fused forward."""
    table = Table("", title=title, title_justify="left")
    for heading in ("ms", "× fused", "memory, GB", "× run_with_cache"):
        table.add_column(heading, justify="right")
    for name, cost in costs.items():
        table.add_row(
            name,
            cost.failure if cost.seconds is None else f"{1e3 * cost.seconds:.1f}",
            _ratio(cost.seconds, costs[FUSED].seconds),
            "" if cost.growth is None else f"{cost.growth / 1e9:.3f}",
            _ratio(cost.growth, costs[CACHE].growth),
        )
    return table


def _ratio(one: float | None, other: float | None) -> str:
    return "" if one is None or not other else f"{one / other:.3f}"


def rows_of_targets(title: str, costs: Mapping[str, Cost]) -> Iterator[tuple[str, str, str, str]]:
    """Each target next to the measured ratio."""
    for name, yardstick, what, limit in TARGETS:
        one, other = (costs[key].seconds if what == "time" else costs[key].growth for key in (name, yardstick))
        if one is not None and other:
            yield (
                f"{title}: {what} of {name} / {yardstick}", f"{limit:.2f}", f"{one / other:.3f}",
                "reached" if one / other <= limit else "MISSED",
            )  # fmt: skip


# -- the command -------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="a torch device; the accelerator that torch finds if left out")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case is begun after that (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the times (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers in bfloat16, to try the script out")
    parser.add_argument("--json", type=Path, help="file for every figure")
    return parser.parse_args()


def main() -> None:
    """Measures, prints, writes."""
    start, chosen = perf_counter(), arguments()
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator if chosen.device is None else torch.device(chosen.device)
    if device is None:
        raise SystemExit("torch finds no accelerator here; --device cpu --tiny tries the script out.")
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(("attnmech", "torch", "transformers", "transformer-lens"))
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    tables, raw = [table_of_differences(device)], []
    console.print(tables[0])
    targets = Table("target", "at most", "measured", "", title="Targets", title_justify="left")
    lengths = (32,) if chosen.tiny else (2048, 512, 8192)
    middle = lengths[0]
    left_out: list[str] = []
    shapes = TINY if chosen.tiny else SHAPES
    dtypes = (torch.bfloat16,) if chosen.tiny else (torch.bfloat16, torch.float32)
    for dtype, shape in product(dtypes, shapes):
        titles = {length: f"{shape.title}, {str(dtype).removeprefix('torch.')}, {length} tokens" for length in lengths}
        if perf_counter() - start > 60 * chosen.minutes:
            left_out += titles.values()
            continue
        model = build(shape, max(lengths), device=device, dtype=dtype)
        for length, title in titles.items():
            if perf_counter() - start > 60 * chosen.minutes:
                left_out.append(title)
                continue
            ids = token_ids(length, model.config.vocab_size)
            costs = {name: cost_of(step, device, chosen.repeats) for name, step in steps_of(model, ids)}
            raw += [{"case": title, "contender": name, **vars(cost)} for name, cost in costs.items()]
            tables.append(table_of_costs(title, costs))
            console.print(tables[-1])
            if length == middle:
                for row in rows_of_targets(title, costs):
                    targets.add_row(*row)
        del model
        gc.collect()
    tables.append(targets)
    console.print(targets)
    if left_out:
        console.print(f"Left out for want of time: {'; '.join(left_out)}.")
    write(chosen.json, about, chosen, tables, rows=raw)


if __name__ == "__main__":
    main()
