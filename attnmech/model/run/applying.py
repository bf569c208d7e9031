"""Checks a user's hooks and interventions against a model, and finds the points, layers and heads that they concern."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ...basics.arguments import index_of, shown
from ...errors import InputError
from ...interventions import Head, Intervention
from ...interventions.edits import Scale
from ...interventions.values import BatchPart, Place
from ...points import PointKey, PointName
from ..attention.applied import Applied
from ..attention.in_force import Hook
from ..inputs.encoders import AnyEncoder, special_keys
from ..inputs.transcripts import TranscriptEncoder
from ..stack.centring import require_fitting, require_weights
from ..stack.ledger import ledger_split_at
from ..stack.points import ModelPoints, selected_heads
from ..stack.stack import Stack, stack_labelled


def placed_hooks(
    edits: Mapping[PointName, Hook], points: ModelPoints, refused: Mapping[str, str]
) -> list[tuple[PointKey, Hook]]:
    """A user's hooks, each at every point that its name refers to.

    Raises `InputError` for anything but a mapping from points to functions of one value, and the errors of
    `ModelPoints.resolve`.
    """
    if not isinstance(edits, Mapping):
        raise InputError(f'hooks must map points to functions, as in {{("pattern", 3): f}}; got {shown(edits)}.')
    placed: list[tuple[PointKey, Hook]] = []
    for name, edit in edits.items():
        if not callable(edit):
            raise InputError(f"the hook at {name!r} must be a function of the value; got {edit!r}.")
        if not _takes_one(edit):
            raise InputError(
                f"the hook at {name!r} must take one argument, f(value) -> value; got {edit!r} with the "
                f"signature {inspect.signature(edit)}. TransformerLens's hooks take (value, hook): drop `hook`."
            )
        placed += [(key, edit) for key in points.resolve([name], None, refused)]
    return placed


def placed_intervention(
    intervention: Intervention,
    part: BatchPart,
    stacks: Mapping[str, Stack],
    points: ModelPoints,
    refused: Mapping[str, str],
    encoder: AnyEncoder,
) -> Applied:
    """An intervention, applied to the layers and heads of a model in a part of a batch.

    Raises the errors that `HookedModel.intervene` raises before a run, but does not check that its means belong to
    these weights.
    """
    if not isinstance(intervention, Intervention):
        raise InputError(f"expected an am.Intervention, such as am.Intervention.zero([(0, 1)]); got {intervention!r}.")
    stack, edit = stack_labelled(stacks, intervention.stack or None), intervention.edit
    by_layer: dict[int, tuple[int, ...]] = {}
    if not intervention.by_head:
        by_layer = dict.fromkeys(points.check_layers(intervention.layers, stack.label), ())
    for layer, head in _heads_of(intervention, points, stack) if intervention.by_head else ():
        by_layer[layer] = (*by_layer.get(layer, ()), head)
    points.resolve([stack.point(edit.point)], by_layer, refused)
    if isinstance(edit, Scale):
        points.resolve([stack.point("attn_in")], by_layer, refused)
        if edit.centre is not None:
            require_fitting(edit.centre, stack, by_layer)
    applied = Applied(intervention, by_layer, part, partial(ledger_split_at, stacks))
    with applied.named():
        edit.check(Place(stack.label, tuple(by_layer), stack.sizes(edit.point), _no_special_keys(encoder, stack)))
    return applied


def require_means(interventions: Iterable[Intervention], weights_hash: Callable[[], str]) -> None:
    """Raises `InputError` for an intervention with means of other weights; hashes the model's weights at most once."""
    edits = [intervention.edit for intervention in interventions]
    means = {edit.centre for edit in edits if isinstance(edit, Scale) and edit.centre is not None}
    weights = weights_hash() if means else ""
    for centre in means:
        require_weights(centre, weights)


def _heads_of(intervention: Intervention, points: ModelPoints, stack: Stack) -> list[Head]:
    """The heads that an intervention changes; kv heads, if it changes k or v themselves."""
    if not intervention.by_kv_head:
        return selected_heads(points, stack, intervention.heads)
    if intervention.heads == "all":
        return [(layer, head) for layer in stack.layers for head in range(stack.n_kv_heads)]
    points.check_layers([layer for layer, _ in intervention.heads], stack.label)
    for _, head in intervention.heads:
        index_of(
            "kv_head", head, stack.n_kv_heads, f"{intervention}: in each layer, k and v have one entry per kv head"
        )
    return list(intervention.heads)


def _no_special_keys(encoder: AnyEncoder, stack: Stack) -> str:
    """Why no key of a stack can be a special token; empty if some can."""
    if special_keys(encoder, stack.label):
        return ""
    frames = isinstance(encoder, TranscriptEncoder) and stack.label != "decoder"
    return "frames are not special tokens" if frames else "special tokens need a model loaded with a tokenizer"


def _takes_one(function: Hook) -> bool:
    """Whether a function can be called with one argument; True if Python cannot tell."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin
        return True
    return True
