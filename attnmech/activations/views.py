"""Chooses the view of `Activations.show` for each point, and the numbers that it draws."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..basics.arguments import index_of, option
from ..batch import Batch
from ..draw.attention_views import never_seen, view_of_attention, where
from ..draw.circuitsvis import text_neuron_activations, token_log_probs
from ..draw.embed import View
from ..draw.patterns import PROBABILITY, VALUE_WEIGHTED, value_weighted
from ..errors import InputError, MissingPointError
from ..points import PointKey, PointName, full_name, parse, point_of, split_stack
from .pictures import picture_view

WEIGHTS: Final = ("value",)  # the values of `weighted`


@runtime_checkable
class Captured(Protocol):
    """The parts of a run's result (`Activations`) that views need."""

    @property
    def batch(self) -> Batch: ...
    @property
    def values(self) -> Mapping[PointKey, Tensor]: ...
    @property
    def value_norms(self) -> Mapping[PointKey, Tensor]: ...
    def __getitem__(self, name: PointName) -> Tensor: ...


def show(
    activations: Captured,
    name: PointName,
    *,
    layer: int | None,
    head: int | None,
    query: int | None,
    text: int,
    view: str | None,
    weighted: str | None = None,
) -> View:
    """The view of one captured point; see `Activations.show`."""
    full, own_layer = parse(name)
    if weighted is not None:
        option("weighted", weighted, WEIGHTS)
        if split_stack(full)[1] != "pattern":
            raise InputError(f'`weighted` is for the point "pattern"; got {full!r}.')
    layer = own_layer if own_layer is not None else layer
    captured = sorted(at for point, at in activations.values if point == full and at is not None)
    if not captured and point_of(full).per_layer:
        activations[name]  # raises, if the point is missing, the error that lists what the run holds
    if layer is not None and layer not in captured and point_of(full).per_layer:
        held = ", ".join(map(str, captured)) or "none"
        raise MissingPointError(f"this run captured {full!r} in layers: {held}; `layer` is {layer!r}.")
    index_of("text", text, len(activations.batch.ids))
    axes = point_of(full).axes
    if axes[-2:] == ("query", "key"):
        layers = captured if layer is None else [layer]
        view_of_point = _attention(activations, full, layers, head, query, text, view, layer, weighted)
        if weighted and view_of_point.kind == "circuitsvis":
            view_of_point = replace(view_of_point, reading=f"{view_of_point.reading} {VALUE_WEIGHTED.reading}")
        return view_of_point
    if view is not None or query is not None:
        raise InputError(f"`view` and `query` are for attention; {full!r} has axes [{' '.join(axes)}].")
    if axes[-1] == "vocab":
        return _predictions(activations, text)
    return _by_token(activations, full, captured if layer is None else [layer], head, text)


def _attention(
    activations: Captured,
    name: str,
    layers: list[int],
    head: int | None,
    query: int | None,
    text: int,
    view: str | None,
    layer: int | None,
    weighted: str | None,
) -> View:
    stack, base = split_stack(name)
    of_queries, of_keys = activations.batch.queries(stack), activations.batch.keys(stack)
    queries = _Rows(of_queries, text)
    keys = queries if of_keys is of_queries else _Rows(of_keys, text)
    patterns = [_numbers(activations[name, at][text]) for at in layers]
    numbers = values = np.stack([pattern[:, queries.real][:, :, keys.real] for pattern in patterns])
    if view == "picture":
        if base != "pattern" or weighted is not None:
            raise InputError('view="picture" shows the probabilities of "pattern"; leave `weighted` out.')
        heads = range(values.shape[1]) if head is None else [index_of("head", head, values.shape[1])]
        row = len(queries.tokens) - 1 if query is None else index_of("query", query, len(queries.tokens))
        return picture_view(activations.batch, values, text=text, layers=layers, heads=heads, query=row)
    if weighted is not None:
        values = value_weighted(values, _norms(activations, name, layers, keys))
    return view_of_attention(
        values,
        queries.tokens,
        layers=layers,
        layer=layer,
        head=head,
        query=query,
        view=view,
        # The mask gives hidden cells the lowest finite number in scores, and 0 in patterns.
        hidden=numbers[0] <= np.finfo(np.float16).min if base == "scores" else never_seen(numbers[0]),
        keys=None if keys is queries else keys.tokens,
        special=[token in keys.batch.special for token in keys.ids],
        point=name,
        name="value-weighted attention" if weighted else name,
        probabilities=base == "pattern",
        measure=VALUE_WEIGHTED if weighted else PROBABILITY,
    )


def _predictions(activations: Captured, text: int) -> View:
    batch = activations.batch if activations.batch.target is None else activations.batch.target
    rows = _Rows(batch, text)
    texts_of = batch.texts_of
    if texts_of is None:
        raise InputError("the logits of this run are not over a vocabulary, so there is no text to show.")
    logits = activations["logits"]
    if logits.ndim != 3 or logits.shape[1] != len(batch.tokens[text]):
        raise InputError(
            f"to be shown, logits must have one row per token; this model's have the shape {tuple(logits.shape)}."
        )
    return token_log_probs(
        logits[text][rows.real],
        rows.ids,
        rows.tokens,
        text_of=lambda token: texts_of([token])[0],
        top=min(10, logits.shape[2]),
    )


def _by_token(activations: Captured, name: str, layers: list[int], head: int | None, text: int) -> View:
    """Views of points with one vector per token, or per head and token."""
    rows = _Rows(activations.batch.queries(split_stack(name)[0]), text)
    axes = point_of(name).axes
    if not layers:
        values = _numbers(activations[name])[text][rows.real][:, None]
        first, labels = "point", [name]
    elif len(axes) == 4 and len(layers) == 1:
        values = _numbers(activations[name, layers[0]])[text][rows.real]
        first, labels = axes[2], [str(number) for number in range(values.shape[1])]
        if head is not None:
            index_of("head", head, values.shape[1])
            values, labels = values[:, [head]], [str(head)]
    elif len(axes) == 4:
        raise InputError(f"{name!r} has one vector per {axes[2]}: give `layer`, one of {', '.join(map(str, layers))}.")
    else:
        values = np.stack([_numbers(activations[name, at])[text][rows.real] for at in layers], axis=1)
        first, labels = "layer", [str(at) for at in layers]
    if head is not None and len(axes) != 4:
        raise InputError(f"`head` is for points with a head axis; {name!r} has axes [{' '.join(axes)}].")
    return text_neuron_activations(
        [values],
        [rows.tokens],
        names=(first, axes[-1]),
        labels=(labels, [str(number) for number in range(values.shape[2])]),
        title=where(name, layers[0] if len(layers) == 1 else None, head),
    )


class _Rows:
    def __init__(self, batch: Batch, text: int) -> None:
        self.batch = batch
        self.real = batch.mask[text].cpu().numpy()
        self.tokens = [token for token, real in zip(batch.tokens[text], self.real, strict=True) if real]
        self.ids = batch.ids[text].cpu()[torch.from_numpy(self.real)].tolist()
        self.text = text


def _norms(activations: Captured, name: str, layers: list[int], keys: _Rows) -> np.ndarray:
    """‖f(x_j)‖ `[layer head key]` without padding."""
    v = full_name(split_stack(name)[0], "v")
    for layer in layers:
        if (name, layer) in activations.value_norms:
            continue
        if (v, layer) in activations.values:
            raise MissingPointError(
                f"layer {layer} has no value-weighted attention: either a gate or a norm between attention and "
                "W_O makes what a key writes depend on the query, or the run recorded gradients."
            )
        raise MissingPointError(
            f'weighted="value" needs {v!r} of layer {layer} beside {name!r}: capture both with '
            f"model.run(..., points=[{name!r}, {v!r}])."
        )
    return np.stack([_numbers(activations.value_norms[name, layer][keys.text])[:, keys.real] for layer in layers])


def _numbers(values: Tensor) -> np.ndarray:
    return np.asarray(values.detach().float().cpu().numpy())
