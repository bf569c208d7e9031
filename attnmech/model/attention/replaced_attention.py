"""Replaces those attention modules of transformers that have their own attention code.

Each replacement uses the projections of the original module and the tensors that the model passes to it, and leaves
scores, softmax and weighted sum to `attend`.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..parts.mask import MaskRule
from ..parts.position import rotate_pairs
from ..parts.weights import Columns, Layout, Separate
from .attend import Site, attend

_BY_HEAD = "batch position head d_head -> batch head position d_head"


class StandIn(nn.Module):
    """The base of all replacements: the projections, the site, and merging the heads."""

    attnmech_site: Site
    layout: Layout
    out_name: str

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, module in original.named_children():
            self.add_module(name, module)
        self.heads = int(getattr(original, "num_heads", 0) or getattr(original, "n_heads", 0) or 0)
        self.layer = getattr(original, "layer_idx", getattr(original, "layer_id", None))
        """The number under which a cache holds its keys and values."""

    def project(self, hidden_states: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        """q, k, v `[batch head position d_head]`."""
        outputs = [self.get_submodule(path)(hidden_states) for path in self.layout.paths]
        parts = self.layout.split(outputs, heads, kv_heads, rest="batch position")
        return tuple(rearrange(part, _BY_HEAD) for part in parts)

    def cached(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """k and v, after those of earlier tokens in a cache, if the model uses one."""
        return (k, v) if cache is None else cache.update(k, v, self.layer)

    def merge(self, z: Float[Tensor, "batch position head d_head"]) -> Tensor:
        """Computes attn_raw from z."""
        merged: Tensor = self.get_submodule(self.out_name)(
            rearrange(z, "batch position head d_head -> batch position (head d_head)")
        )
        return merged


class GPTJAttention(StandIn):
    """GPT-J: rotary on pairs of neighbouring dimensions, in the first `rotary_dim` dimensions of each head."""

    layout: Layout = Separate("q_proj", "k_proj", "v_proj")
    out_name = "out_proj"

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.heads = int(original.num_attention_heads)  # type: ignore[arg-type]
        self.scale = float(original.head_dim) ** -0.5  # type: ignore[arg-type]
        # Up to transformers 5.23, each layer has the tables; later, the model passes their rows.
        self.register_buffer("embed_positions", getattr(original, "embed_positions", None), persistent=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskRule,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """transformers' signature: returns attn_raw, and no weights."""
        q, k, v = self.project(hidden_states, self.heads, self.heads)
        if position_embeddings is None:
            assert isinstance(self.embed_positions, Tensor)
            sin, cos = self.embed_positions[position_ids].to(q).chunk(2, dim=-1)
        else:
            sin, cos = position_embeddings
        tables = tuple(table.repeat_interleave(2, dim=-1) for table in (cos, sin))
        self.attnmech_site.in_force.note(rotary=tables)
        cos, sin = (table[:, None] for table in tables)
        q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        k, v = self.cached(k, v, layer_past)
        z = attend(q, k, v, scale=self.scale, position=None, mask=attention_mask, site=self.attnmech_site)
        return self.merge(z), None


def codegen_layout(heads: int, d_head: int) -> Columns:
    """CodeGen's layout: four parts, each with the queries, values and keys of a quarter of the heads."""
    parts = torch.arange(3 * heads * d_head).view(4, 3, -1)
    q, v, k = (tuple(parts[:, kind].flatten().tolist()) for kind in range(3))
    return Columns(("qkv_proj",) * 3, (q, k, v))


class CodeGenAttention(GPTJAttention):
    """CodeGen: GPT-J's attention, with one projection for q, k and v."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self.layout = codegen_layout(self.heads, int(original.head_dim))  # type: ignore[arg-type]


class GPTNeoAttention(StandIn):
    """GPT-Neo: unscaled products; local layers see only the last tokens."""

    layout = Separate("q_proj", "k_proj", "v_proj")
    out_name = "out_proj"

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        assert isinstance(original.bias, torch.Tensor)
        seen = original.bias[0, 0]
        window = int(seen[-1].sum())  # the number of keys, up to and including its own, that each query sees
        if not torch.equal(seen, torch.ones_like(seen).tril().triu(1 - window)):
            raise UnsupportedModelError(
                f"expected an attention mask of the last {window} tokens of each query, as GPT-Neo builds it; this "
                "model keeps another one in `attention.bias`, which attnmech cannot read."
            )
        self.window = window if window < len(seen) else None

    def forward(
        self, hidden_states: Tensor, attention_mask: MaskRule, layer_past: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """transformers' signature: returns attn_raw, and no weights."""
        q, k, v = self.project(hidden_states, self.heads, self.heads)
        k, v = self.cached(k, v, layer_past)
        mask = attention_mask if self.window is None else attention_mask.within(self.window)
        return self.merge(attend(q, k, v, scale=1.0, position=None, mask=mask, site=self.attnmech_site)), None
