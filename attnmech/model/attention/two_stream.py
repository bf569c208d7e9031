"""XLNet's attention, with its tables of relative positions.

score_ij = ((q_i + u)·k_j + (q_i + v)·r_{i−j}) / √d_head, where u and v are one vector for each head (`r_w_bias`,
`r_r_bias`) and r is the projected sinusoid of the distance. Only the content stream is read; the query stream and
segments, which XLNet has in pretraining and for pairs of texts, are refused.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...maths.relative import Relative
from ..parts.mask import rule_of
from ..parts.weights import Separate
from .attend import Site, attend

_BY_HEAD = "batch position (head d_head) -> batch head position d_head"


class XLNetAttention(nn.Module):
    """XLNet's attention module: positions come first, and it adds to the stream and norms the sum itself."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.core = XLNetCore(original)
        self.layer_norm: nn.Module = original.layer_norm

    def forward(
        self,
        h: Tensor,
        g: Tensor | None,
        attn_mask_h: Tensor | None,
        attn_mask_g: Tensor | None,
        r: Tensor,
        seg_mat: Tensor | None,
        mems: Tensor | None = None,
        target_mapping: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """transformers' signature: returns the stream after the norm, and no query stream."""
        unsupported = {"target_mapping": g, "token_type_ids": seg_mat, "mems": mems}
        named = [name for name, value in unsupported.items() if value is not None]
        if named:
            raise UnsupportedModelError(
                f"XLNet with {named[0]} is not supported; attnmech runs it on token ids and a mask only."
            )
        attn_raw = self.core(h.transpose(0, 1), attn_mask_h, r)
        normed: Tensor = self.layer_norm(attn_raw.transpose(0, 1) + h)
        return normed, None


class XLNetCore(nn.Module):
    """Computes `attn_raw` from `attn_in`, with texts first."""

    layout = Separate("query", "key", "value")
    attnmech_site: Site

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.heads, self.scale = int(original.n_head), float(original.scale)
        self.query = _ByHead(original.q, original.r_w_bias)
        self.key, self.value = _ByHead(original.k), _ByHead(original.v)
        self.out = _ByHead(original.o, inward=True)
        self.of_positions = _ByHead(original.r)
        self.position_bias = original.r_r_bias

    def forward(self, hidden_states: Tensor, hidden: Tensor | None, positions: Tensor) -> Tensor:
        """`attn_raw`; `hidden` is 1 where a key is, `[query key batch 1]`, `positions` [distance batch d_model]."""
        q, k, v = (
            rearrange(project(hidden_states), _BY_HEAD, head=self.heads)
            for project in (self.query, self.key, self.value)
        )
        length = q.shape[2]
        batch = self.attnmech_site.in_force.under_way.batch.keys(self.attnmech_site.stack)
        seen = None if hidden is None else rearrange(hidden[..., 0] <= 0, "query key batch -> batch 1 query key")
        z = attend(
            q, k, v, scale=self.scale, position=None, mask=rule_of(seen, length, length, batch),
            site=self.attnmech_site, relative=self._relative(positions[:, 0], length),
        )  # fmt: skip
        raw: Tensor = self.out(rearrange(z, "batch position head d_head -> batch position (head d_head)"))
        return raw

    def _relative(self, positions: Float[Tensor, "distance d_model"], length: int) -> Relative:
        """The tables of relative positions; the model lists distances from the largest down."""
        rows = length - torch.arange(1 - length, length, device=positions.device)
        made = self.of_positions(positions.to(self.of_positions.weight.dtype))
        table = rearrange(made, "place (head d_head) -> head place d_head", head=self.heads)
        bias = self.position_bias - rearrange(self.query.bias, "(head d_head) -> head d_head", head=self.heads)
        alone = (table @ bias[:, :, None])[..., 0]
        here = torch.arange(length, device=positions.device)
        return Relative(table, None, rows, length - 1, here, here, alone, by_input=True)


class _ByHead(nn.Module):
    """A projection between the stream and the heads, whose matrix has an axis for heads: `[d_model head d_head]`."""

    def __init__(self, matrix: nn.Parameter, bias: nn.Parameter | None = None, *, inward: bool = False) -> None:
        super().__init__()
        self.matrix, self.by_head, self.inward = matrix, bias, inward

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """As nn.Linear stores it."""
        whole = self.matrix.flatten(1)
        return whole if self.inward else whole.T

    @property
    def bias(self) -> Float[Tensor, " d_out"] | None:
        """As nn.Linear stores it."""
        return None if self.by_head is None else self.by_head.flatten()

    def forward(self, x: Tensor) -> Tensor:
        """x W + b."""
        return nn.functional.linear(x, self.weight, self.bias)
