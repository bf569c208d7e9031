"""Trains ordinary GPT-2s to compute compiled programs head by head, by strict interchange intervention training.

    pip install -c constraints.txt .
    python benchmarks/truth/interchange.py  # writes trained/NAME.safetensors; about two minutes each on one idle core

As in InterpBench (Gupta et al. 2024, arXiv 2407.14494), three losses are added: the outputs on inputs (behaviour); the
outputs when the output of one head or MLP of the program is swapped for that on another input, as in the program itself
(interchange); and the outputs on inputs when the output of an unused head or MLP is swapped (strictness). The weights
look natural, and the truth about heads is known.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel
from truth.model import TRAINED, Program, gpt2_of, module_of

STEPS: Final = 800
BATCH: Final = 64
HELD_OUT: Final = 2000
NAMES: Final = ("after_comma", "induction", "two_back")

Node = tuple[int, int | None]
"""A head of a layer, or with None the layer's MLP."""
Swap = tuple[Node, Tensor]
"""A node, and the output that it gets."""


def nodes_of(program: Program) -> tuple[list[Node], list[Node]]:
    """The nodes of the program, and those that it does not use."""
    writers = {edge["writer"] for edge in program.edges}
    used: list[Node] = sorted(program.circuit)
    used += [(layer, None) for layer in range(program.n_layers) if f"L{layer} MLP" in writers]
    heads = [(layer, head) for layer in range(program.n_layers) for head in range(program.n_heads)]
    every: list[Node] = [*heads, *((layer, None) for layer in range(program.n_layers))]
    return used, [node for node in every if node not in used]


def parts_of(model: nn.Module, node: Node) -> tuple[nn.Module, int]:
    """The module whose input holds the heads, or whose output is the MLP's; and the width of a head."""
    layer, head = node
    if isinstance(model, GPT2LMHeadModel):
        block = model.transformer.h[layer]
        return (block.mlp, 0) if head is None else (block.attn.c_proj, block.attn.head_dim)
    block = model.layers[layer]
    return (block.mlp, 0) if head is None else (block.attention.out, block.attention.d_head)


@contextmanager
def swapped(model: nn.Module, node: Node, value: Tensor) -> Iterator[None]:
    """Gives a node another output during the block."""
    module, width = parts_of(model, node)
    if node[1] is None:
        handle = module.register_forward_hook(lambda *_: value)
    else:
        first = node[1] * width

        def swap(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (z,) = args
            return (torch.cat((z[..., :first], value, z[..., first + width :]), dim=-1),)

        handle = module.register_forward_pre_hook(swap)
    try:
        yield
    finally:
        handle.remove()


def output_of(model: nn.Module, node: Node, ids: Tensor) -> Tensor:
    """A node's own output on some inputs."""
    module, width = parts_of(model, node)
    kept: list[Tensor] = []
    if node[1] is None:
        handle = module.register_forward_hook(lambda _, args, out: kept.append(out))
    else:
        first = node[1] * width
        handle = module.register_forward_pre_hook(lambda _, args: kept.append(args[0][..., first : first + width]))
    model(ids)
    handle.remove()
    return kept[0]


def interchanged(model: nn.Module, node: Node, base: Tensor, source: Tensor) -> Tensor:
    """The logits on `base` with the node's output on `source`."""
    with swapped(model, node, output_of(model, node, source)):
        logits: Tensor = model(base).logits
    return logits


def answers(logits: Tensor) -> Tensor:
    """The program's answer at each position; −100 where it has none."""
    size, answer = logits.max(dim=-1)
    # An answer is one of the outputs at 1; without one, all are 0, or several share 1.
    return answer.masked_fill(size < 0.9, -100)


def inputs_of(program: Program, count: int, generator: torch.Generator) -> Tensor:
    """Random inputs after BOS, on which the program is defined."""
    special = (program.vocabulary[program.bos], program.vocabulary[program.pad])
    tokens = torch.tensor([number for number in program.vocabulary.values() if number not in special])
    if program.name == "induction":  # no token occurs more than twice
        order = torch.rand(count, 2 * len(tokens), generator=generator).argsort(dim=1)[:, : program.length]
        texts = tokens.repeat(2)[order]
    else:
        texts = tokens[torch.randint(len(tokens), (count, program.length), generator=generator)]
    if program.name == "after_comma":  # no comma follows another
        comma = program.vocabulary[","]
        letters = tokens[tokens != comma]
        for place in range(1, program.length):
            again = (texts[:, place] == comma) & (texts[:, place - 1] == comma)
            texts[again, place] = letters[torch.randint(len(letters), (int(again.sum()),), generator=generator)]
    return torch.cat((torch.full((count, 1), program.vocabulary[program.bos]), texts), dim=1)


def loss_of(logits: Tensor, right: Tensor) -> Tensor:
    """Cross-entropy at the positions that have an answer."""
    return cross_entropy(logits[:, 1:].flatten(0, 1), right[:, 1:].flatten(), ignore_index=-100)


def trained(program: Program, steps: int = STEPS, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 trained to compute the program, node by node."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    truth, model = module_of(program.compiled), gpt2_of(program)
    used, unused = nodes_of(program)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    for step in range(steps):
        base, source = (inputs_of(program, BATCH, generator) for _ in range(2))
        one, other = used[step % len(used)], unused[step % len(unused)]
        with torch.no_grad():
            right, changed = answers(truth(base).logits), answers(interchanged(truth, one, base, source))
        loss = loss_of(model(base).logits, right) + loss_of(interchanged(model, one, base, source), changed)
        loss = loss + loss_of(interchanged(model, other, base, source), right)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{program.name} {step}: {loss.item():.4f}", flush=True)
    return model.eval()


@torch.no_grad()
def shares(program: Program, model: GPT2LMHeadModel, seed: int = 1) -> dict[str, float]:
    """The share of right answers on new inputs: unchanged, and with each node swapped (the least of its kind).

    For nodes of the program, only answers that the swap changes count.
    """
    generator = torch.Generator().manual_seed(seed)
    base, source = (inputs_of(program, HELD_OUT, generator) for _ in range(2))
    truth = module_of(program.compiled)
    used, unused = nodes_of(program)
    right = answers(truth(base).logits)

    def share(logits: Tensor, wanted: Tensor, there: Tensor) -> float:
        return float((logits.argmax(dim=-1) == wanted)[there].double().mean())

    changed = {node: answers(interchanged(truth, node, base, source)) for node in used}
    counts = {node: (wanted != right) & (wanted != -100) for node, wanted in changed.items()}
    return {
        "accuracy": share(model(base).logits, right, right != -100),
        "interchange": min(
            share(interchanged(model, node, base, source), changed[node], counts[node])
            for node in used
            if bool(counts[node].any())
        ),
        "strict": min(share(interchanged(model, node, base, source), right, right != -100) for node in unused),
    }


def main(names: Sequence[str] = ()) -> None:
    """Trains and stores the models."""
    TRAINED.mkdir(exist_ok=True)
    for name in names or NAMES:
        program = Program.read(name).trained
        model = trained(program)
        model.half().float()  # as stored
        measured = shares(program, model)
        weights: dict[str, Any] = {
            key: value.half().contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"
        }
        path = TRAINED / f"{name}.safetensors"
        save_file(weights, path, metadata={"shares": json.dumps(measured)})
        print(name, measured, f"{path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
