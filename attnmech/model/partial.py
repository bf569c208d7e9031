"""Runs a part of a model: from a block on with a stored stream, up to a block, or the head alone.

Blocks that are left out are stood in for by modules that hand on the stream as it comes, so that everything else of the
model (masks, rotary tables, what it hands to its blocks) stays transformers' own code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..activations import Batch
from ..errors import InputError
from ..points import PointKey
from .architectures import first_tensor, submodule
from .hooked import HookedModel
from .tap import RowObserver


@dataclass(frozen=True)
class Ran:
    """What a part of a pass brought."""

    streams: Mapping[int, Float[Tensor, "batch position d_model"]]
    """The stream as it enters each block asked for, before hooks there; at the number of blocks, what the last gave."""
    values: Mapping[PointKey, Tensor]
    """The points asked for."""


class Blocks:
    """The blocks of a model of one stack, any of which can be left out of a pass."""

    def __init__(self, model: HookedModel) -> None:
        if len(model.stacks) > 1 or model.output_stack.architecture.hands_on:
            raise InputError(
                f"the passes of {model.name} cannot begin in the middle: its blocks need more than the stream."
            )
        found = submodule(model.base, model.output_stack.architecture.blocks)
        assert isinstance(found, nn.ModuleList)
        self._model = model
        self._blocks = found
        self._returns = model.output_stack.returns

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
        """One pass without gradients through the blocks from `start` to `stop`, which is left out.

        Block `start` is given `stream`; block 0 needs none. Blocks that are left out have no points.
        """
        last = len(self) if stop is None else stop
        kept: dict[int, Tensor] = {}
        with ExitStack() as until:
            until.enter_context(self._watched(set(streams), last, kept))
            until.enter_context(self._without(start, stream, last))
            values = self._model.forward(batch, captures=captures, rows=rows, layers=layers)
        return Ran(kept, values)

    def logits(self, batch: Batch, stream: Float[Tensor, "batch position d_model"]) -> Tensor:
        """What the head makes of the stream that leaves the last block."""
        with self._without(len(self), stream, len(self)):
            return self._model.forward(batch, captures=[("logits", None)])["logits", None]

    def logits_of_rows(self, rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        """The logits of single tokens, where the head is the same at every token (`by_row`)."""
        ids = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), (), None)
        return self.logits(batch, rows[:, None])[:, 0]

    @property
    def by_row(self) -> bool:
        """Whether the logits of a token depend on that token's stream alone, and nobody looks at them on the way."""
        return self._model.unembedding is not None and not any(name.startswith("logits") for name in self._model.edited)

    @contextmanager
    def _without(self, start: int, stream: Tensor | None, stop: int) -> Iterator[None]:
        passed = [*range(start), *range(stop, len(self))]
        originals = {place: self._blocks[place] for place in passed}
        try:
            for place, block in originals.items():
                given = stream if place == start - 1 else None
                self._blocks[place] = _PassedBy(block, given, self._returns[place])
            yield
        finally:
            for place, block in originals.items():
                self._blocks[place] = block

    @contextmanager
    def _watched(self, wanted: set[int], last: int, kept: dict[int, Tensor]) -> Iterator[None]:
        def at_start(place: int) -> Any:
            def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
                kept[place] = (args[0] if args else kwargs["hidden_states"]).detach().clone()

            return keep

        def at_end(module: nn.Module, args: Any, output: Any) -> None:
            kept[len(self)] = first_tensor(output).detach().clone()

        with ExitStack() as until:
            for place in wanted - {len(self)}:
                hook = self._blocks[place].register_forward_pre_hook(at_start(place), with_kwargs=True, prepend=True)
                until.callback(hook.remove)
            if len(self) in wanted:
                until.callback(self._blocks[last - 1].register_forward_hook(at_end).remove)
            yield


class _PassedBy(nn.Module):
    """Stands where a block stood and hands on the stream, or another in its place."""

    def __init__(self, block: nn.Module, stream: Tensor | None, returns: int | None) -> None:
        super().__init__()
        # Beside torch's registry, so that this module has no parts; models ask blocks for their kind of attention.
        self.__dict__["block"] = block
        self.__dict__["stream"] = stream
        self.__dict__["returns"] = returns

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stream, in the form in which the block would return it."""
        stream = self.__dict__["stream"]
        if stream is None:
            stream = args[0] if args else kwargs["hidden_states"]
        returns = self.__dict__["returns"]
        return stream if returns is None else (stream, *(None for _ in range(returns - 1)))
