"""The forward passes of a model, each checked by the running certificate."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...batch import Batch
from ...errors import UnsupportedModelError
from ..attention.in_force import InForce, Pass
from ..attention.running import Balance, Directions
from ..own.module import OwnModule
from ..parts.packed import packed_projections
from ..parts.settings import require_own_settings
from ..stack.stack import Stack
from ..structure.passes_apart import reading
from ..structure.signals import KINDS, below_head, size_options

ENCODED: Final = "encoder's final stream"
"""The entry of a batch that replaces its recordings: what their encoder returns, which a pass then leaves out."""


def _set_up_vector_functions() -> None:
    """Makes the first call of each of torch's vector functions in a single thread.

    That call sets up Intel's MKL. If two threads make that call at the same time, one of them occasionally gets less
    exact results, and the certificate then refuses the model.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.tanh, torch.exp, torch.erf, torch.log, torch.sin, torch.cos):
            function(one)


_set_up_vector_functions()


class CheckedPasses:
    """The forward passes of one model, each checked by the running certificate."""

    def __init__(
        self,
        model: PreTrainedModel,
        stacks: Mapping[str, Stack],
        in_force: InForce,
        device: torch.device,
        weight: Callable[[], Tensor],
        refused: Callable[[], Mapping[str, str]],
        prove: Callable[[Batch], None],
    ) -> None:
        self._model, self._stacks, self._in_force = model, stacks, in_force
        self._weight, self._refused, self._prove = weight, refused, prove
        packed = next(packed_projections(model), None) is not None
        self._directions = Directions(next(iter(stacks.values())).d_model, device, packed=packed)
        self._columns = [stack.column for stack in stacks.values()]

    def run(self, wanted: Pass) -> Tensor | None:
        """Runs a pass, which stores the captured values in `wanted`; returns the logits if they were computed.

        Raises `UnsupportedModelError` if a point was never reached, and `ExactnessError` as `checked` does.
        """
        with self.checked(wanted):
            # With a large vocabulary, the logits may take longer than all layers together.
            needs_head = wanted.gradients or self._in_force.wants("logits", None)
            output = call(self._model if needs_head else below_head(self._model), wanted.batch)
            logits = getattr(output, "logits", None)
            if logits is not None:
                logits = self._in_force.visit("logits", None, logits)
        missed = (wanted.captures | wanted.watch.points) - set(wanted.values) - wanted.reached
        if missed:
            name, layer = sorted(missed, key=str)[0]
            raise UnsupportedModelError(
                f"point {name!r} of layer {layer} was never reached: this model's attention or block does not use the "
                f"modules of its family, so attnmech cannot read it."
            )
        return logits

    @contextmanager
    def checked(self, wanted: Pass) -> Iterator[None]:
        """Makes `wanted` the current pass; raises `ExactnessError` if its values do not add up.

        Raises `InputError` inside `torch.autocast`.
        """
        require_own_settings(self._weight().device)
        if self._in_force.checks:
            if wanted.batch.senses:
                Context().run(self._prove, wanted.batch)  # without the edits in force
            wanted.balance = Balance(self._directions, self._columns, self._weight().dtype, self._refused())
        with self._in_force.recording(wanted):
            yield
        balance = wanted.balance
        if balance is None or (failure := balance.unbalanced(wanted.batch)) is None:
            return
        if failure.identity == "heads":
            stack = self._stacks[failure.stack]
            out = stack.module(failure.layer, stack.architecture.out)
            if self._directions.forget_changed((failure.stack, failure.layer), out):
                balance.skip("heads", failure.stack, failure.layer, "the weights were just changed")
                return
        raise failure.error(wanted.batch)


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """One forward pass of a model on a batch, without a cache."""
    if isinstance(model, OwnModule):
        return model(batch.extra, **options)
    inputs: dict[str, Any] = {**batch.extra, **options}
    if (states := inputs.pop(ENCODED, None)) is not None:
        inputs["encoder_outputs"] = (states,)
    elif KINDS.keys() & batch.extra.keys():
        inputs |= size_options(model, batch.extra)
        if batch.target is None:
            with reading(batch):
                return model(**inputs, return_dict=True)
    else:
        inputs |= {"input_ids": batch.ids, **batch.sensed}
        # Some models place pictures by the mask (Qwen2.5-Omni).
        if batch.padded or batch.senses:
            inputs["attention_mask"] = batch.mask.long()
    if batch.target is not None:
        inputs["decoder_input_ids"] = batch.target.ids
        if batch.target.padded:
            inputs["decoder_attention_mask"] = batch.target.mask.long()
    with reading(batch):
        return model(**inputs, use_cache=False, return_dict=True)
