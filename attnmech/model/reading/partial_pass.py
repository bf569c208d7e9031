"""Runs part of a model: from a block on, with a stored stream; up to a block; or only the head.

Blocks that are left out pass the stream on unchanged, so that everything else in the model (masks, rotary tables,
what it passes to its blocks) stays transformers' own code.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...batch import Batch
from ...errors import InputError
from ...points import PointKey
from ..attention.in_force import Part
from ..attention.observed import RowObserver
from ..parts.modules import submodule
from ..run.hooked import HookedModel

MIDDLE: Final = "middle"  # the name of the certificate's check that a pass may begin at any block


@dataclass(frozen=True)
class Ran:
    """The values of a partial pass."""

    streams: Mapping[int, Float[Tensor, "batch position d_model"]]
    """The stream that enters each requested block, before hooks; at the number of blocks, the last one's output."""
    values: Mapping[PointKey, Tensor]  # the requested points


def can_begin_in_the_middle(model: HookedModel) -> bool:
    """Whether blocks need only the stream, so that a pass can begin at any block, as tested by the certificate."""
    certificate = model.__dict__.get("certificate")
    differs = certificate is not None and any(check.name == MIDDLE for check in certificate.remarks)
    return len(model.stacks) == 1 and not model.output_stack.architecture.hands_on and not differs


class Blocks:
    """The blocks of a model with one stack; a pass can skip any block."""

    def __init__(self, model: HookedModel) -> None:
        if not can_begin_in_the_middle(model):
            raise InputError(
                f"passes of {model.name} cannot begin in the middle: its blocks need more than the stream."
            )
        blocks = submodule(model.base, model.output_stack.architecture.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self._model = model
        self._blocks = blocks

    @property
    def first(self) -> nn.Module:
        """The first block."""
        return self._blocks[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def run(
        self,
        batch: Batch,
        *,
        start: int = 0,
        stream: Float[Tensor, "batch position d_model"] | None = None,
        stop: int | None = None,
        streams: Iterable[int] = (),
        captures: Iterable[PointKey] = (),
        rows: Sequence[RowObserver] = (),
        layers: Iterable[tuple[str, int]] | None = None,
    ) -> Ran:
        """One pass without gradients through the blocks from `start` up to but not including `stop`.

        Block `start` receives `stream`; block 0 needs none. Skipped blocks have no points.
        """
        end = len(self) if stop is None else stop
        part = Part(start, end, stream, frozenset(streams))
        return Ran(part.kept, self._model.forward(batch, captures=captures, rows=rows, layers=layers, part=part))

    def logits(self, batch: Batch, stream: Float[Tensor, "batch position d_model"]) -> Tensor:
        """The head's output for the stream that leaves the last block."""
        part = Part(len(self), len(self), stream)
        return self._model.forward(batch, captures=[("logits", None)], part=part)["logits", None]

    def logits_of_rows(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        """The logits of single tokens, if the head treats every token alike (`by_row`)."""
        ids = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        return self.logits(Batch(ids, torch.ones_like(ids, dtype=torch.bool), (), None), rows[:, None])[:, 0]

    @property
    def by_row(self) -> bool:
        """Whether a token's logits depend only on the stream of that token, and no hook acts after the last block."""
        return self._model.unembedding is not None and not any(name.startswith("logits") for name in self._model.edited)
