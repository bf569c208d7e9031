"""Compares attention sinks of small models on the Bigram-Backcopy task with arXiv 2410.13835.

    python benchmarks/published/backcopy.py

Tokens follow a Markov chain, but after a trigger comes the token before the trigger. `am.null_attention` and
`HookedModel.run` measure models with softmax. attnmech does not certify attention through ReLU, so plain torch measures
those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import torch
from rich.progress import track
from shared import options, over_seeds, show, spread
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

import attnmech as am

BOS: Final = 64
"""The first token of every text; the chain has the 64 tokens before it."""
TRIGGERS: Final = 3
LENGTH, BATCH, RATE = 64, 32, 3e-3


def relu_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Attention max(0, score) / number of visible keys."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    weights = scores.relu().tril() / torch.arange(1, query.shape[2] + 1)[:, None]
    return (weights @ value).transpose(1, 2), weights


@dataclass(frozen=True)
class Chain:
    """The task: a chain whose most frequent tokens are triggers."""

    transitions: Tensor
    """[token next]"""

    @cached_property
    def triggers(self) -> Tensor:
        """The tokens that are triggers: [token], with BOS."""
        frequency = torch.linalg.matrix_power(self.transitions, 64)[0]
        return torch.zeros(BOS + 1, dtype=torch.bool).scatter(0, frequency.topk(TRIGGERS).indices, True)

    def texts(self, count: int, length: int = LENGTH) -> Tensor:
        """Texts of the task, [text position]."""
        cumulative, drawn = self.transitions.cumsum(dim=-1)[:, :-1].contiguous(), torch.rand(length, count, 1)
        ids = torch.full((count, length), BOS)
        ids[:, 1] = torch.randint(BOS, (count,))
        for place in range(2, length):
            last, before = ids[:, place - 1], ids[:, place - 2]
            following = torch.searchsorted(cumulative[last], drawn[place])[:, 0]
            ids[:, place] = torch.where(self.triggers[last] & (before != BOS), before, following)
        return ids


def small_model(layers: int, attention: str) -> GPT2LMHeadModel:
    """An untrained model with one head per layer."""
    config = GPT2Config(
        vocab_size=BOS + 1, n_positions=LENGTH, n_embd=64, n_layer=layers, n_head=1, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=BOS, eos_token_id=BOS, activation_function="relu", tie_word_embeddings=False,
        attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trained(model: GPT2LMHeadModel, chain: Chain, steps: int) -> GPT2LMHeadModel:
    """The model, trained on the task."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in track(range(steps), "training", transient=True):
        ids = chain.texts(BATCH)
        cross_entropy(model(ids).logits[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def by_attnmech(model: GPT2LMHeadModel, ids: Tensor) -> dict[str, Tensor]:
    """What attnmech measures: patterns and streams, value ratios, and two interventions on the first token."""
    hooked = am.load(model)
    acts = hooked.run({"input_ids": ids}, points=["pattern", "resid_post", "logits"])
    null = am.null_attention(hooked, {"input_ids": ids})
    layers = range(hooked.n_layers)
    return {
        "logits": acts.logits,
        "patterns": torch.stack([acts["pattern", layer][:, 0] for layer in layers]),
        "streams": torch.stack([acts["resid_post", layer] for layer in layers]),
        "value ratio": null.value_ratio[:, 0],
        "value = 0": null.effects["zero_value"].effect[:, 0],
        "hidden": null.effects["remove"].effect[:, 0],
    }


@torch.no_grad()
def by_hand(model: GPT2LMHeadModel, ids: Tensor) -> dict[str, Tensor]:
    """The same in plain torch, without interventions."""
    streams, ratios = [], []

    def keep(block: Any, _: Any, output: Any) -> None:
        streams.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in model.transformer.h]
    outputs = model(ids, output_attentions=True, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    for block, stream in zip(model.transformer.h, outputs.hidden_states, strict=False):
        value = block.attn.c_attn(block.ln_1(stream)).chunk(3, dim=-1)[2]
        ratios.append(first_over_others((value @ block.attn.c_proj.weight).norm(dim=-1)))
    nothing = torch.full((len(ratios),), torch.nan)
    return {
        "logits": outputs.logits,
        "patterns": torch.stack([weights[:, 0] for weights in outputs.attentions]),
        "streams": torch.stack(streams),
        "value ratio": torch.stack(ratios),
        "value = 0": nothing,
        "hidden": nothing,
    }


def first_over_others(norms: Tensor) -> Tensor:
    """The norm at the first token over the median of the others, averaged over texts."""
    return (norms[..., 0] / norms[..., 1:].quantile(0.5, dim=-1)).mean(dim=-1)


def numbers(seen: Mapping[str, Tensor], chain: Chain, ids: Tensor) -> dict[str, float]:
    """Losses, and the sink in the layer that attends most to the first token."""
    active = chain.triggers[ids[:, 2:-1]]
    losses = cross_entropy(seen["logits"][:, 2:-1].mT, ids[:, 3:], reduction="none")
    own = -chain.transitions[ids[:, 2:-1][~active], ids[:, 3:][~active]].log()
    weights = seen["patterns"][..., 2:-1, :]
    shares = weights[..., 0] / weights.sum(dim=-1).clamp_min(1e-9)
    layer = int(shares[:, ~active].mean(dim=-1).argmax())
    return {
        "loss after triggers, nats": float(losses[active].mean()),
        "loss elsewhere, above the chain's own, nats": float((losses[~active] - own).mean()),
        "attention to the first token, rows of triggers": float(shares[layer][active].mean()),
        "attention to the first token, other rows": float(shares[layer][~active].mean()),
        "value norm, first token / others": float(seen["value ratio"][layer]),
        "stream norm after a block, first token / others, highest": float(
            first_over_others(seen["streams"].norm(dim=-1)).max()
        ),
        "effect of value 0 at the first token, nats": float(seen["value = 0"][layer]),
        "effect of hiding the first token, nats": float(seen["hidden"][layer]),
    }


def measured(layers: int, attention: str, steps: int) -> dict[str, float]:
    """One model, trained and measured."""
    chain = Chain((2 * torch.randn(BOS, BOS)).softmax(dim=-1))
    model = trained(small_model(layers, attention), chain, steps)
    ids = chain.texts(100)
    return numbers((by_attnmech if attention == "eager" else by_hand)(model, ids), chain, ids)


def main() -> None:
    """Prints the table of `docs/published.md`, and what attnmech says about a model with ReLU."""
    AttentionInterface.register("relu", relu_attention)
    chosen = options(__doc__, steps=1000)
    columns = {"softmax, 1 layer": (1, "eager"), "ReLU, 1 layer": (1, "relu"), "softmax, 3 layers": (3, "eager")}
    seeds = [over_seeds(chosen.seeds, partial(measured, *shape, chosen.steps)) for shape in columns.values()]
    show(["", *columns], [[name, *(spread(column[name]) for column in seeds)] for name in seeds[0]])
    print(am.load(small_model(1, "relu")))


if __name__ == "__main__":
    main()
