"""Compares the cost of a sweep over all heads with the usual loop, which runs one forward pass with a hook per head.

    pip install -c constraints.txt . -r benchmarks/requirements.txt
    python benchmarks/ablation.py --json ablation.json

Heads are set to zero, and the loss of 8 prompts is measured. attnmech sweeps all heads of some layers with the mean
depth of all layers; the loops are timed on two heads of up to four of these layers; both times are scaled to all heads
of the model. All contenders must give the same effects, or nothing is printed. Needs an idle machine, and about an hour
on two cores. See benchmarks/README.md.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from cost_model import Model, ablation, plain
from measure import alternating_times, in_own_process, installed, machine, memory_growth, write
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape, build, sharing_copy

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PACKAGES = ("attnmech", "torch", "transformers", "transformer-lens", "nnsight")
PROMPTS: Final = 8
OURS: Final = "attnmech, ablate_heads"
CEILING: Final = "batching × prefix, the ceiling"
"""The time of transformers' own passes of `STEP` tokens, times the share of their multiplications that comes after
z."""
STEP: Final = 512
PER_LAYER: Final = 2
"""The loops are timed on this many heads per layer, in at most `LOOPED` layers."""
LOOPED: Final = 4
BUDGET: Final = 0.5
"""The memory that attnmech may take, in GB."""

Head = tuple[int, int]
Sweep = Callable[["Tensor", Sequence[Head]], "Tensor"]
"""Effects on the loss `[head prompt]` of setting each head to zero, for token ids `[prompt position]`."""


@dataclass(frozen=True)
class Contender:
    """A way to sweep, and the number of prompts that it runs at once."""

    make: Callable[["PreTrainedModel"], Sweep]
    prompts: int


def losses(logits: "Tensor", ids: "Tensor") -> "Tensor":
    """Mean cross-entropy of the next token, prompt by prompt."""
    import torch

    flat = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.view(len(ids), -1).mean(dim=1)


def transformer_lens(model: "PreTrainedModel") -> Sweep:
    """TransformerLens: `run_with_hooks` with z of the head set to zero."""
    import torch
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    eager = sharing_copy(model)
    eager.set_attn_implementation("eager")
    bridge = build_bridge_from_module(eager, type(model).__name__, hf_config=eager.config, tokenizer=None)

    def zeroed(z: "Tensor", hook: object, head: int) -> "Tensor":
        z[:, :, head] = 0
        return z

    @torch.no_grad()
    def sweep(ids: "Tensor", heads: Sequence[Head]) -> "Tensor":
        before = losses(bridge(ids), ids)
        found = []
        for layer, head in heads:
            hook = (f"blocks.{layer}.attn.hook_z", partial(zeroed, head=head))
            found.append(losses(bridge.run_with_hooks(ids, fwd_hooks=[hook]), ids) - before)
        return torch.stack(found)

    return sweep


def nnsight(model: "PreTrainedModel") -> Sweep:
    """nnsight: a trace in which the head's part of the output projection's input is set to zero."""
    import torch
    from nnsight import NNsight  # type: ignore[import-untyped]

    wrapped: Any = NNsight(sharing_copy(model))
    blocks = wrapped.transformer.h
    outs = [block.self_attention.dense if hasattr(block, "self_attention") else block.attn.c_proj for block in blocks]
    width = model.config.hidden_size // model.config.num_attention_heads

    @torch.no_grad()
    def sweep(ids: "Tensor", heads: Sequence[Head]) -> "Tensor":
        before = losses(model(ids, use_cache=False).logits, ids)
        found = []
        for layer, head in heads:
            with wrapped.trace(ids, use_cache=False):
                outs[layer].input[:, :, head * width : (head + 1) * width] = 0
                logits = wrapped.lm_head.output.save()
            found.append(losses(logits, ids) - before)
        return torch.stack(found)

    return sweep


def attnmech(model: "PreTrainedModel") -> Sweep:
    """attnmech: all heads in one call."""
    import attnmech as am

    hooked = am.load(model)

    def sweep(ids: "Tensor", heads: Sequence[Head]) -> "Tensor":
        import torch

        effects = am.ablate_heads(hooked, ids, heads, memory=BUDGET)
        layers, places = torch.tensor(heads).T
        return effects.per_text[layers, places]

    return sweep


ALONE, BATCHED = "TransformerLens, one prompt at a time", "TransformerLens, all prompts in a batch"

CONTENDERS: Final = {
    ALONE: Contender(transformer_lens, 1),
    BATCHED: Contender(transformer_lens, PROMPTS),
    "nnsight, one prompt at a time": Contender(nnsight, 1),
    "nnsight, all prompts in a batch": Contender(nnsight, PROMPTS),
    OURS: Contender(attnmech, PROMPTS),
}
NEEDS: Final = dict.fromkeys((name for name in CONTENDERS if name.startswith("nnsight")), "nnsight")

TARGETS: Final = {
    (ALONE, 16): 4.0,
    (ALONE, 32): 3.0,
    (ALONE, 128): 1.5,
    (BATCHED, 16): 2.6,
    (BATCHED, 32): 2.25,
    (CEILING, 16): 0.9,
    (CEILING, 32): 0.9,
    (CEILING, 128): 0.9,
}
"""The speed relative to the loop, by contender and number of tokens."""


@dataclass(frozen=True)
class Row:
    """One way to sweep one model at one length."""

    shape: str
    tokens: int
    contender: str
    layers: int
    """The number of layers whose heads were timed."""
    seconds: Sequence[float]
    """The time for all heads of the model, round by round."""
    target: float | None

    @property
    def time(self) -> float:
        """The median of the rounds."""
        return median(self.seconds)


def sampled_layers(layers: int, count: int) -> list[int]:
    """Evenly spaced layers, rounded down and up in turn, so that their mean depth is that of all layers.

    >>> sampled_layers(24, 6)
    [1, 6, 9, 14, 17, 22]
    """
    width = layers / count
    middles = [(place + 0.5) * width - 0.5 for place in range(count)]
    return [int(middle) if place % 2 == 0 else int(middle + 0.5) for place, middle in enumerate(middles)]


def heads_of(model: "PreTrainedModel", layers: Sequence[int], per_layer: int | None = None) -> list[Head]:
    """All heads of some layers, or `per_layer` evenly spaced heads of each, beginning with the first."""
    count = model.config.num_attention_heads
    return [(layer, head) for layer in layers for head in range(0, count, count // (per_layer or count))]


def prompts(tokens: int) -> "Tensor":
    """Random token ids [prompt position]."""
    import torch

    return torch.randint(3, 8000, (PROMPTS, tokens), generator=torch.Generator().manual_seed(tokens))


def run(sweep: Sweep, at_once: int, ids: "Tensor", heads: Sequence[Head]) -> "Tensor":
    """The effects `[head prompt]`, measured `at_once` prompts at a time."""
    import torch

    return torch.cat([sweep(some, heads) for some in ids.split(at_once)], dim=1)


def plain_pass(model: "PreTrainedModel", ids: "Tensor") -> object:
    """A pass of transformers, with the loss."""
    import torch

    with torch.no_grad():
        return losses(model(ids, use_cache=False).logits, ids)


def times_of(shape: Shape, tokens: int, layers: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every contender's sweep, scaled to all heads; contenders take turns, in a separate process."""
    import torch

    model = build(shape, tokens)
    ids, config = prompts(tokens), model.config
    sampled = sampled_layers(config.num_hidden_layers, layers)
    looped = sampled_layers(config.num_hidden_layers, min(layers, LOOPED))
    few, many = heads_of(model, looped, PER_LAYER), heads_of(model, sampled)
    everything = config.num_hidden_layers * config.num_attention_heads
    steps, scale = {}, {}
    reference: Tensor | None = None
    for name in installed(CONTENDERS, NEEDS):
        each = CONTENDERS[name]
        sweep = each.make(model)
        found = run(sweep, each.prompts, ids, few)
        if reference is not None and not torch.allclose(found.double(), reference.double(), atol=2e-4):
            raise ValueError(f"{name} finds other effects, by up to {float((found - reference).abs().max()):.1e}")
        reference = found
        heads = many if name == OURS else few
        scale[name] = everything / len(heads)
        steps[name] = partial(run, sweep, each.prompts, ids, heads)
    whole = ids.repeat(STEP // ids.numel() + 1, 1)[: max(1, STEP // tokens)]
    steps[CEILING] = partial(plain_pass, model, whole)
    shape_of = Model.of_config(config)
    share = ablation(shape_of, tokens).multiplications / plain(shape_of, tokens).multiplications
    scale[CEILING] = everything * ids.numel() / whole.numel() * share
    times = alternating_times(steps, repeats)
    return {name: [seconds * scale[name] for seconds in found] for name, found in times.items()}


def growth_of(shape: Shape, tokens: int) -> int:
    """Peak memory of attnmech's sweep of two layers, in excess of the loaded model, in a separate process."""
    model = build(shape, tokens)
    sweep, ids = attnmech(model), prompts(tokens)
    heads = heads_of(model, sampled_layers(model.config.num_hidden_layers, 2))
    sweep(ids[:1, :4], heads[:1])
    return memory_growth(partial(sweep, ids, heads))


def table_of(shape: Shape, tokens: int, rows: Sequence[Row], growth: int) -> Table:
    """One shape at one length."""
    title = f"{shape.title}, {PROMPTS} prompts of {tokens} tokens, every head"
    table = Table("", title=title, title_justify="left", caption_justify="left")
    for heading in ("seconds", "(from - to)", "× attnmech", "target"):
        table.add_column(heading, justify="right")
    ours = next(row.time for row in rows if row.contender == OURS)
    for row in rows:
        factor = row.time / ours
        verdict = "" if row.target is None else f"{row.target:g}: {'reached' if factor >= row.target else 'missed'}"
        spread = f"{min(row.seconds):.2f} - {max(row.seconds):.2f}"
        table.add_row(row.contender, f"{row.time:.2f}", spread, f"{factor:.2f}", verdict)
    table.caption = f"attnmech's peak memory {growth / 1e9:.3f} GB over the loaded model, of {BUDGET:g} GB allowed"
    return table


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--shapes", nargs="+", choices=["bloom", "gpt2"], default=["bloom", "gpt2"])
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads (default %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=6, help="layers swept; the fewer, the more of the clean pass is counted"
    )
    parser.add_argument("--json", type=Path, help="file for every figure")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes the results."""
    chosen = arguments()
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), "HF_HUB_OFFLINE": "1"}
    console = Console(width=None if Console().is_terminal else 150)
    about = machine(PACKAGES)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)
    rows: list[Row] = []
    tables: list[Table] = []
    memory: dict[str, int] = {}
    for name in chosen.shapes:
        for tokens in chosen.tokens:
            shape = SHAPES[name]
            growth = in_own_process(growth_of, shape, tokens)
            times = in_own_process(times_of, shape, tokens, chosen.layers, chosen.repeats)
            found = [
                Row(name, tokens, contender, chosen.layers, seconds, TARGETS.get((contender, tokens)))
                for contender, seconds in times.items()
            ]
            tables.append(table_of(shape, tokens, found, growth))
            console.print(tables[-1])
            memory[f"{name} {tokens}"] = growth
            rows += found
    write(chosen.json, about, chosen, tables, rows=[asdict(row) for row in rows], memory=memory)


if __name__ == "__main__":
    main()
