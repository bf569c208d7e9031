"""Defines a worker, which holds one model, reduces batches with a user's reducers, and measures changes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray
import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor

from ..batch import Batch
from ..model.inputs.encoder import Encoder
from ..model.run.hooked import HookedModel
from .shipping import received

STARTS: Final = 5  # a worker that ends while it loads the model is restarted up to this many times


@dataclass(frozen=True)
class Piece:
    """Some documents of a corpus, on their way to a worker."""

    batch: Batch
    documents: Int[Tensor, " document"]
    has_texts: bool  # whether the batch can give the texts of token ids

    @classmethod
    def of(cls, batch: Batch, documents: Int[Tensor, " document"]) -> "Piece":
        """A batch without the function that reads tokens, which every worker has."""
        return cls(_read_by(batch.on(torch.device("cpu")), None), documents, batch.texts_of is not None)

    def part(self, places: Int[Tensor, " some"]) -> "Piece":
        return Piece(self.batch.texts(places), self.documents[places], self.has_texts)

    def on(self, model: HookedModel) -> Batch:
        """The batch as this model's own encoder would have made it."""
        reads = model.encoder.token_texts if self.has_texts and isinstance(model.encoder, Encoder) else None
        return _read_by(self.batch.on(model.device), reads)


def _read_by(batch: Batch, reads: Any) -> Batch:
    target = None if batch.target is None else replace(batch.target, texts_of=reads)
    return replace(batch, target=target, texts_of=reads)


def _written(tensors: dict[str, Tensor]) -> bytes:
    """Tensors as safetensors, which refuses those that share memory."""
    return save(
        {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    )


class Worker:
    """One process of an engine. References come in lists, since Ray would fetch single ones for every call."""

    def __init__(self, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._model: tuple[str, HookedModel] | None = None
        self._work: tuple[str, Any] | None = None

    def process(self) -> int:
        return os.getpid()

    def prepare(self, key: str, blueprint: Sequence[Any], weights: Sequence[Any] | None) -> bool:
        """Loads a model, from the given weights or else from disk; False if it is not on disk."""
        if self._model is not None and self._model[0] == key:
            return True
        self._model = self._work = None
        plan = received(ray.get(blueprint[0]))
        if weights is None:
            model = plan.from_disk(self._device)
        else:
            model = plan.with_weights((ray.get(part) for part in weights), self._device)
        self._model = None if model is None else (key, model)
        return model is not None

    def do(self, key: str, work: Sequence[Any], pieces: Any) -> tuple[bool, bytes]:
        """The result of some work on pieces, as safetensors; False and no bytes if no model is loaded."""
        if self._model is None:  # the worker was restarted after it was prepared
            return False, b""
        if self._work is None or self._work[0] != key:
            self._work = key, received(ray.get(work[0]))
        return True, _written(self._work[1].on(self._model[1], pieces))
