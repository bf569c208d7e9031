"""The base of attention modules that replace those of transformers, and attention of GPT-J and CodeGen.

Each replacement uses the projections of the original module and the tensors that the model passes to it, and leaves
scores, softmax and weighted sum to `attend`.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..parts.modules import stream_of
from ..parts.position import PAIRS
from ..parts.weights import Columns, Layout
from .attend import Site
from .postponed import through_attend

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

    def project(self, hidden_states: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        """q, k, v `[batch head position d_head]`."""
        outputs = [self.get_submodule(path)(hidden_states) for path in self.layout.paths]
        parts = self.layout.split(outputs, heads, kv_heads, rest="batch position")
        return tuple(rearrange(part, _BY_HEAD) for part in parts)

    def merge(self, z: Float[Tensor, "batch position head d_head"]) -> Tensor:
        """Computes attn_raw from z."""
        merged: Tensor = self.get_submodule(self.out_name)(
            rearrange(z, "batch position head d_head -> batch position (head d_head)")
        )
        return merged


def with_tables(module: nn.Module) -> nn.Module:
    """Makes an attention of GPT-J or CodeGen use `attend`, and notes its rotary tables in each pass; returns it."""
    through_attend(module)
    forward = module.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        # Up to transformers 5.23, each layer has the tables; later, the model passes their rows.
        tables = kwargs.get("position_embeddings")
        if tables is None:
            assert isinstance(module.embed_positions, Tensor)
            tables = module.embed_positions[kwargs["position_ids"]].to(stream_of(args, kwargs)).chunk(2, dim=-1)
        sin, cos = map(PAIRS.spread, tables)
        site: Any = module.attnmech_site
        site.in_force.note(rotary=(cos, sin))
        return forward(*args, **kwargs)

    module.forward = noting
    return module


def codegen_layout(heads: int, d_head: int) -> Columns:
    """CodeGen's layout: four parts, each with the queries, values and keys of a quarter of the heads."""
    parts = torch.arange(3 * heads * d_head).view(4, 3, -1)
    q, v, k = (tuple(parts[:, kind].flatten().tolist()) for kind in range(3))
    return Columns(("qkv_proj",) * 3, (q, k, v))
