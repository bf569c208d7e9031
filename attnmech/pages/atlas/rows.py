"""Orders the example rows of the atlas by what each head's type attends to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from jaxtyping import Float
from torch import Tensor

from ...methods.examples.sums import other_tokens
from ...methods.head_types.formulas import TYPES
from ...methods.head_types.head_types import RESTING, HeadTypes
from ...methods.head_types.sums import targets_of
from ...model.attention.observed import RowBlock

BY_TYPE: Final = "attention to the targets of a head's type (without a type: to a token other than the first)"


@dataclass(frozen=True)
class OnTargets:
    """The attention of a row to the targets of its head's type (Σ_j∈targets p_ij); of a head without a type, or that
    rests on one token, its highest attention to a token other than the first and its own.
    """

    __name__: ClassVar[str] = BY_TYPE

    kinds: Mapping[tuple[int, int], str]
    """The type of each head that has one, by layer and head."""
    causal: bool

    @classmethod
    def of(cls, types: HeadTypes, causal: bool) -> "OnTargets":
        """The first type of each head that does not rest on one token."""
        kinds = {place: kind for place, kind in types.main_types.items() if kind in TYPES and kind not in RESTING}
        return cls(kinds, causal)

    def __call__(self, block: RowBlock) -> Float[Tensor, "batch head row"]:
        pattern = block.pattern
        others = block.mask.once(("other tokens", block.rows), lambda: other_tokens(block))
        value = pattern.masked_fill(~others, 0.0).amax(dim=-1)
        here = {head: kind for (layer, head), kind in self.kinds.items() if layer == block.layer}
        if here:
            targets = block.mask.once(
                ("targets", block.rows), lambda: targets_of(block.batch.queries(block.stack), block, self.causal)
            )
            for head, kind in here.items():
                value[:, head] = (pattern[:, head] * (targets[kind] & block.visible[:, 0])).sum(dim=-1)
        return value
