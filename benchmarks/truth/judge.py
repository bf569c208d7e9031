"""Metrics of a compiled program's output, which need no vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

import attnmech as am
from attnmech.reducers import Batch


@dataclass(frozen=True)
class Judge:
    """Pairs of inputs with different outputs, and the outputs of the model on both, at all positions after BOS."""

    clean: Tensor
    corrupted: Tensor
    outputs: dict[tuple[int, ...], Tensor]
    """The output of the unchanged model on each input."""
    pairs: dict[tuple[int, ...], tuple[Tensor, Tensor]]
    """For each input, the outputs of its pair."""

    @classmethod
    def of(cls, model: am.HookedModel, clean: Tensor, corrupted: Tensor) -> "Judge":
        """Runs the model on pairs of inputs, `[pair position]`; no input may occur twice."""
        logits = model.run(torch.cat((clean, corrupted)), points=["logits"]).logits
        assert logits is not None
        keys = [tuple(row) for row in (*clean.tolist(), *corrupted.tolist())]
        outputs = {key: output[1:].double() for key, output in zip(keys, logits, strict=True)}
        both = [(keys[number], keys[len(clean) + number]) for number in range(len(clean))]
        pairs = {key: (outputs[one], outputs[other]) for one, other in both for key in (one, other)}
        return cls(clean, corrupted, outputs, pairs)

    @property
    def inputs(self) -> Tensor:
        """All inputs."""
        return torch.cat((self.clean, self.corrupted))

    def error(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean absolute difference from the output of the unchanged model."""
        rows = zip(logits.double(), batch.ids.tolist(), strict=True)
        return torch.stack([(output[1:] - self.outputs[tuple(ids)]).abs().mean() for output, ids in rows])

    def restored(self, logits: Tensor, batch: Batch) -> Tensor:
        """How far the output lies from that of the corrupted input, 0, towards that of the clean input, 1."""
        shares = []
        for output, ids in zip(logits.double(), batch.ids.tolist(), strict=True):
            clean, corrupted = self.pairs[tuple(ids)]
            way = clean - corrupted
            shares.append(((output[1:] - corrupted) * way).sum() / way.square().sum())
        return torch.stack(shares)
