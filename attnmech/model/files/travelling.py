"""Sends a model to another process: as a blueprint and its weights, or from that process's own disk.

A blueprint is everything but the weights; it includes the certificate, so that nothing is proven twice. The weights
must have the same hash; they are read from where the model was loaded, or sent as safetensors.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ...errors import AttnmechError, UnsupportedModelError
from ..inputs.encoder import Encoder
from ..own.module import OwnModule
from ..parts.certificate import Certificate
from ..parts.packed import packed_projections
from ..proof.merged import MergedProof
from ..run.hooked import HookedModel
from ..structure.architecture import Architecture
from ..structure.copies import has_own_hooks
from ..structure.rewritten import rewritten
from .load import from_files

PART_BYTES: Final = 2**28  # weights are sent in parts of roughly this many bytes


@dataclass(frozen=True)
class Blueprint:
    """A model without its weights."""

    kind: type[PreTrainedModel]
    config: Any
    plans: tuple[Architecture, ...]
    tokenizer: Any
    certificate: Certificate
    name: str
    source: str
    files: str | None
    bos: bool | None
    dtype: torch.dtype
    weights: str  # the SHA-256 of the model's config and weights

    @classmethod
    def of(cls, model: HookedModel) -> "Blueprint":
        """The blueprint of a model; raises `UnsupportedModelError` if only this process has its code."""
        original = model.original
        if isinstance(original, OwnModule):
            raise UnsupportedModelError(
                f'{model.name} is a module of your own, which worker processes cannot build; use engine="local".'
            )
        if next(packed_projections(original), None) is not None:
            raise UnsupportedModelError(
                f"{model.name} is quantised, and its packed weights are not sent to worker processes; use "
                'engine="local".'
            )
        if has_own_hooks(original):
            raise UnsupportedModelError(
                f"{model.name} has forward hooks, which are not sent to worker processes; remove them before am.load, "
                f"or set them by model.hooks(...)."
            )
        return cls(
            kind=type(original),
            config=original.config,
            plans=tuple(stack.architecture for stack in model.stacks.values()),
            tokenizer=model.tokenizer,
            certificate=model.certificate,
            name=model.name,
            source=model.source,
            files=model.files,
            bos=model.encoder.bos if isinstance(model.encoder, Encoder) else None,
            dtype=model.dtype,
            weights=model.weights_hash,
        )

    def from_disk(self, device: torch.device) -> HookedModel | None:
        """The model, with weights from this machine's disk; None if the weights are missing or have another hash."""
        if self.files is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                original, _, _, _ = from_files(self.files or None, self.tokenizer, device, self.dtype)
            model = self._hooked(rewritten(original))
        except AttnmechError:
            return None
        return model if model.weights_hash == self.weights else None

    def with_weights(self, parts: Iterable[bytes], device: torch.device) -> HookedModel:
        """The model, with the weights of `weights_of`; raises `UnsupportedModelError` if it is another model."""
        with no_init_weights():
            original = self.kind._from_config(copy.deepcopy(self.config), dtype=self.dtype)  # type: ignore[no-untyped-call]
        original.tie_weights()
        here = stored(original)
        for part in parts:
            for name, value in load(part).items():
                if name not in here:
                    raise self._cannot_be_built(f"it holds {name!r}, a weight that its config does not imply")
                here.pop(name).data = value
        if here:
            raise self._cannot_be_built(f"its config implies {next(iter(here))!r}, which it lacks")
        model = self._hooked(original.to(device=device))
        if model.weights_hash != self.weights:
            raise self._cannot_be_built("the copy made from its config is another model")
        return model

    def _hooked(self, original: PreTrainedModel) -> HookedModel:
        model = HookedModel(
            original, self.plans, self.tokenizer, name=self.name, source=self.source, is_demo=self.files == "",
            bos=self.bos,
        )  # fmt: skip
        model.files, model.certificate, model.prove_merged = self.files, self.certificate, MergedProof()
        return model

    def _cannot_be_built(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"worker processes cannot build {self.name} ({why}). Save it to a folder that they can read, and give "
            "am.load that folder."
        )


def stored(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, and the buffers that a checkpoint holds, each listed once."""
    kept = model.state_dict(keep_vars=True)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    return parameters | {name: value for name, value in model.named_buffers() if name in kept}


def weights_of(model: HookedModel) -> Iterator[bytes]:
    """The weights of a model as safetensors, in parts of roughly `PART_BYTES`."""
    part: dict[str, Tensor] = {}
    for name, value in stored(model.original).items():
        part[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        if sum(tensor.nbytes for tensor in part.values()) >= PART_BYTES:
            yield save(part)
            part = {}
    if part:
        yield save(part)
