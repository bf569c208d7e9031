"""Compares attention in models that learned addition modulo a prime with arXiv 2301.05217.

    python benchmarks/published/modular_addition.py

A one-layer model without norms reads a, b and = and predicts (a + b) mod p. `HookedModel.run` returns patterns and
logits on all pairs. Their Fourier transforms show on which frequencies they depend.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from rich.progress import track
from shared import options, over_seeds, show, spread
from torch import Tensor, nn

import attnmech as am

WIDTH, HEADS = 64, 4
RATE, DECAY, TRAINED_ON = 2e-3, 1.0, 0.5
KEY_SHARE: Final = 0.02
"""A key frequency has at least this share of the variance of the logits."""


class Adder(nn.Module):
    """One layer of attention and one MLP with ReLU; only = is read out."""

    def __init__(self, p: int) -> None:
        """The weights, untrained."""
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(p + 1, WIDTH) / math.sqrt(WIDTH))
        self.positions = nn.Parameter(torch.randn(3, WIDTH) / math.sqrt(WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.unembed = nn.Linear(WIDTH, p, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the sum, [pair p]."""
        stream = self.tokens[ids] + self.positions
        last = stream[:, -1:]
        last = last + self.attention(last, stream, stream, need_weights=False)[0]
        return self.unembed(last + self.mlp(last))[:, 0]


def all_pairs(p: int) -> Tensor:
    """The tokens a, b and = of every pair, [pair 3]."""
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    return torch.cat((pairs, torch.full((p * p, 1), p)), dim=1)


def trained(model: Adder, ids: Tensor, p: int, epochs: int) -> float:
    """Trains the model on half of the pairs; returns the accuracy on the others."""
    sums, order = ids[:, :2].sum(dim=1) % p, torch.randperm(p * p)
    own, others = order.tensor_split([int(TRAINED_ON * p * p)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=DECAY)
    for _ in track(range(epochs), "training", transient=True):
        nn.functional.cross_entropy(model(ids[own]), sums[own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model(ids[others]).argmax(dim=1) == sums[others]).double().mean())


def logit_shares(logits: Tensor) -> Tensor:
    """The share of the variance of logits [a b c] in cos(w (a + b − c)) and its sine, for each frequency from 1."""
    power = torch.fft.fftn(logits - logits.mean(dim=-1, keepdim=True)).abs() ** 2
    k = torch.arange(1, (len(logits) + 1) // 2)
    return 2 * power[k, k, -k] / power.sum()


def attention_share(attention: Tensor, frequencies: Sequence[int]) -> float:
    """The share of the variance of attention [head a b] in waves of a and b with these frequencies, or 0."""
    centred = attention - attention.mean(dim=(-2, -1), keepdim=True)
    power = torch.fft.fft2(centred).abs() ** 2
    p = attention.shape[-1]
    kept = torch.tensor([0, *frequencies, *(p - k for k in frequencies)])
    return float(power[:, kept][:, :, kept].sum() / power.sum())


def attention_to_first(model: Adder, ids: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Attention from = to a [head a b], and logits [a b c], as attnmech returns them."""
    acts = am.load(model, example=ids[:8]).run(ids, points=["cross.pattern", "logits"])
    pattern = acts["cross.pattern", 0][:, :, 0, 0]
    return pattern.T.unflatten(1, (p, p)).double(), acts.logits.unflatten(0, (p, p)).double()


def measured(p: int, epochs: int) -> dict[str, float]:
    """One model, before and after training."""
    ids, model = all_pairs(p), Adder(p)
    untrained, _ = attention_to_first(model, ids, p)
    accuracy = trained(model, ids, p, epochs)
    attention, logits = attention_to_first(model, ids, p)
    shares = logit_shares(logits)
    key = ((shares >= KEY_SHARE).nonzero()[:, 0] + 1).tolist()
    chosen = [(torch.randperm(len(shares))[: len(key)] + 1).tolist() for _ in range(100)]
    return {
        "accuracy on pairs left out": accuracy,
        "key frequencies": len(key),
        "variance of the logits in cos w(a + b − c) of these": float(shares[shares >= KEY_SHARE].sum()),
        "variance of attention to a in these": attention_share(attention, key),
        "the same, head with the least": min(attention_share(head[None], key) for head in attention),
        "as many random frequencies": sum(attention_share(attention, some) for some in chosen) / len(chosen),
        "key frequencies, before training": attention_share(untrained, key),
        "standard deviation of attention to a, mean of heads": float(attention.flatten(1).std(dim=1).mean()),
    }


def main() -> None:
    """Prints the table of `docs/published.md`."""
    chosen = options(__doc__, p=53, epochs=4000)
    numbers = over_seeds(chosen.seeds, partial(measured, chosen.p, chosen.epochs))
    show(["", "mean"], [[name, spread(values, int(name != "key frequencies") * 2)] for name, values in numbers.items()])


if __name__ == "__main__":
    main()
