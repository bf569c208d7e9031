"""Small modules of the kinds that users have: encoders, classifiers of images, forecasters, shared layers."""

from typing import Any

import torch
from torch import Tensor, nn

D, HEADS, LENGTH, TEXTS = 24, 4, 9, 3


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """In eval mode, with random biases and norms too: at their initial values they would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.copy_(parameter + 0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(D, HEADS, 2 * D, **{"batch_first": True, **options})


class TwoAttentions(nn.Module):
    """Two self-attentions with residuals and any options; also returns torch's weights."""

    def __init__(self, *, heads: int = 5, **options: Any) -> None:
        super().__init__()
        self.one, self.two = (nn.MultiheadAttention(20, heads, **options) for _ in range(2))

    def forward(self, x: Tensor, **masks: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        first, weights = self.one(x, x, x, **masks)
        y = x + first
        second, others = self.two(y, y, y, **masks)
        return y + second, weights, others


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 30), nn.GELU(), nn.Linear(30, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha, self.drop = nn.MultiheadAttention(D, HEADS, batch_first=True), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.mha(x, x, x)[0])


class PostBlock(nn.Module):
    """A post-norm block whose attention is in a separate module."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.attention = nn.LayerNorm(D), nn.LayerNorm(D), Wrapped()
        self.up, self.down = nn.Linear(D, 30), nn.Linear(30, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.attention(x))
        return self.n2(x + self.down(torch.relu(self.up(x))))


class Classifier(nn.Module):
    """A vision transformer on images of 6 × 8 pixels: a class token, and 3 × 4 patches."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, D, 2, 2)
        self.token = nn.Parameter(noise(1, 1, D, seed=5))
        self.places = nn.Parameter(noise(1, 13, D, seed=6))
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 7)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).mT
        x = torch.cat((self.token.expand(len(patches), -1, -1), patches), dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Recurring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()
        self.times = 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


class Pooling(nn.Module):
    """Self-attention with positions only in queries and keys, and learned queries that pool (as in DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.pool = nn.MultiheadAttention(D, HEADS), nn.MultiheadAttention(D, HEADS)
        self.places = nn.Parameter(noise(LENGTH, 1, D, seed=7))
        self.queries = nn.Parameter(noise(5, 1, D, seed=8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.transpose(0, 1)
        placed = x + self.places
        x = x + self.attention(placed, placed, x)[0]
        pooled, weights = self.pool(self.queries.expand(-1, x.shape[1], -1), x + self.places, x)
        return {"pooled": pooled.transpose(0, 1), "weights": weights}


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, weights = self.attention(x, x, x)
        return weights @ x


class WithFurtherKeys(nn.Module):
    """Two layers with a learned key and zeros besides the tokens, for sequences with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 20)
        options = {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True}
        self.one, self.two = (nn.MultiheadAttention(20, 5, **options) for _ in range(2))
        self.leave = nn.Linear(20, 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for attention in (self.one, self.two):
            x = x + attention(x, x, x, key_padding_mask=padding)[0]
        return self.leave(x)
