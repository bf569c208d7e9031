"""Lets a pass skip blocks, store the stream that enters a block, and begin at a block with a stored stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..parts.modules import first_tensor, stream_of, with_stream
from .stack import Stack


def wire_part(stack: Stack, place: int, block: nn.Module) -> None:
    """Lets a pass skip the block, or store the stream that enters it (`Part`)."""
    in_force, forward = stack.in_force, block.forward
    # Blocks before it that do not run have the same input.
    entered, ends = range(stack.before(place) + 1, place + 1), _ends(stack)

    def at_start(module: nn.Module, args: Any, kwargs: Any) -> Any:
        part = in_force.under_way.part
        if part is None or place < part.start or part.stop < entered.start:
            return None
        if part.stream is not None and part.start in entered:
            # The block before passed it on, but the model may have added pictures since (DeepStack).
            stored = stack.turned(part.stream)
            args, kwargs = with_stream(args, kwargs, lambda _: stored)
        # What enters the first block after those that run is their output.
        for kept in part.keep.intersection([*entered, *(ends if part.stop in entered else ())]):
            part.kept[kept] = stack.turned(stream_of(args, kwargs)).detach().clone()
        return args, kwargs

    @wraps(forward)
    def through_or_past(*args: Any, **kwargs: Any) -> Any:
        part = in_force.under_way.part
        if part is None or part.runs(place):
            output = forward(*args, **kwargs)
            stack.returns.setdefault(place, None if isinstance(output, torch.Tensor) else len(output))
            return output
        stored = part.stream if place == stack.before(part.start) else None
        return _passed_on(stack, place, stream_of(args, kwargs) if stored is None else stack.turned(stored))

    block.register_forward_pre_hook(at_start, with_kwargs=True)
    block.forward = through_or_past


def wire_end(stack: Stack) -> None:
    """Stores the output of the model's last block, after hooks there."""
    in_force, last, ends = stack.in_force, stack.running[-1], _ends(stack)

    def at_end(module: nn.Module, args: Any, output: Any) -> None:
        part = in_force.under_way.part
        if part is not None and part.runs(last):
            for kept in part.keep.intersection(ends):
                part.kept[kept] = stack.turned(first_tensor(output)).detach().clone()

    stack.places[last].register_forward_hook(at_end)


def _ends(stack: Stack) -> range:
    """The numbers under which a pass stores its output: last blocks that do not run have it as input."""
    return range(stack.running[-1] + 1, len(stack.places) + 1)


@contextmanager
def alone(stack: Stack, layer: int, blocks: nn.ModuleList) -> Iterator[None]:
    """Makes all blocks of a plain copy but one pass the stream on unchanged; attnmech's blocks must have run before."""

    def past(place: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: _passed_on(stack, place, stream_of(args, kwargs))

    others = [(place, block) for place, block in enumerate(blocks) if place != layer]
    kept = [block.__dict__.get("forward") for _, block in others]
    try:
        for place, block in others:
            block.forward = past(place)
        yield
    finally:
        for (_, block), forward in zip(others, kept, strict=True):
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward


def _passed_on(stack: Stack, place: int, stream: Tensor) -> Any:
    """The stream, in the form in which the block returns its output."""
    returns = stack.returns[place]
    return stream if returns is None else (stream, *(None for _ in range(returns - 1)))
