"""Draws attention patterns of some layers and heads, in the view that suits the selection or that the user names."""

import re
from collections.abc import Callable, ItemsView, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from ..basics.arguments import index_of, shown, strings, whole_number
from ..basics.public import public
from ..errors import InputError
from ..points import POINTS
from .all_heads import model_view
from .circuitsvis import MOST_CELLS, attention_heads, attention_pattern, colored_tokens, colored_tokens_multi
from .embed import View
from .graph import token_graph
from .patterns import PROBABILITY, Measure, as_array
from .sentence import sentence_view
from .text import quoted

_OWN_VIEWS: Final[Mapping[str, Callable[..., View]]] = {
    "model": model_view,
    "sentence": sentence_view,
    "token_graph": token_graph,
}
"""attnmech's own views of attention, which take the patterns of several layers and heads."""

_NAMES: Final = {"model": "All heads", "sentence": "Sentence view", "token_graph": "Token graph"}

VIEWS: Final = (*_OWN_VIEWS, "attention_heads", "attention_pattern", "colored_tokens", "colored_tokens_multi")
"""The views of attention."""

_HOOK: Final = POINTS["pattern"].lens_name
_LAYER: Final = re.compile(re.escape(_HOOK.format(layer="LAYER")).replace("LAYER", r"(\d+)"))


@runtime_checkable
class Named(Protocol):
    """Values by name: a mapping, or TransformerLens's `ActivationCache`."""

    def items(self) -> ItemsView[str, Any]: ...


@runtime_checkable
class Captured(Protocol):
    """A run's points with their tokens (`Activations`)."""

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]: ...
    def show(self, name: str, **selection: Any) -> View: ...


@public
def attention(
    cache: Named | Captured | Sequence[Any],
    tokens: Sequence[str] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    query: int | None = None,
    text: int = 0,
    view: str | None = None,
) -> View:
    """Shows the attention patterns in a cache as a view, for a notebook or a separate page.

    >>> cache = {"blocks.2.attn.hook_pattern": np.array([[[[1.0, 0.0], [0.25, 0.75]]]])}
    >>> attention(cache, ["Hi", " there"], layer=2).title
    'Heads: pattern, layer 2'

    With TransformerLens:

    >>> _, cache = bridge.run_with_cache(text)                                # doctest: +SKIP
    >>> am.draw.attention(cache, bridge.to_str_tokens(text), layer=2)         # doctest: +SKIP

    With transformers (`attn_implementation="eager"`), or with what a trace of nnsight saved:

    >>> out = hf_model(**encoded, output_attentions=True)                     # doctest: +SKIP
    >>> am.draw.attention(out.attentions, tokens)                             # doctest: +SKIP
    >>> am.draw.attention({3: saved}, tokens, head=5)                         # doctest: +SKIP

    The selection chooses the view as in `acts.show("pattern", ...)`: all layers are shown as "model", one layer as
    "attention_heads", one head as "attention_pattern", one query as "colored_tokens_multi" or "colored_tokens".

    Args:
        cache: TransformerLens's `ActivationCache`; a mapping whose keys are its names ("blocks.2.attn.hook_pattern") or
            layers; a list or tuple with the patterns of each layer; or the result of `model.run`. Patterns are
            `[batch head query key]` or `[head query key]`.
        tokens: the tokens of the text; the result of `model.run` has its own.
        layer: one layer; by default all layers in the cache.
        head: one head; by default all heads.
        query: the token whose row is shown.
        text: which text of the batch.
        view: another view: "model", "sentence", "token_graph", "attention_heads", "attention_pattern",
            "colored_tokens" or "colored_tokens_multi".

    Raises:
        InputError: a cache without patterns, tokens of another text, an invalid selection, or more numbers than a page
            can hold.

    """
    selection: dict[str, Any] = {"layer": layer, "head": head, "query": query, "view": view}
    if isinstance(cache, Captured):
        if tokens is not None:
            raise InputError("the result of model.run already holds its tokens; omit `tokens`.")
        return cache.show("pattern", text=text, **selection)
    if not isinstance(cache, Named | list | tuple):
        raise InputError(
            "`cache` must be a TransformerLens ActivationCache, a mapping from its names or from layers to tensors, a "
            f"list with a tensor for each layer ([pattern] for one), or a result of model.run; got {shown(cache)}."
        )
    if tokens is None:
        raise InputError("`tokens` must be the tokens of the text, such as bridge.to_str_tokens(text); got None.")
    patterns = _patterns(cache)
    if layer is not None and whole_number("layer", layer) not in patterns:
        raise InputError(f"`layer` must be one of those in the cache ({', '.join(map(str, patterns))}); got {layer}.")
    layers = list(patterns) if layer is None else [layer]
    values = np.stack([_of_text(patterns[number], text, number) for number in layers])
    tokens = strings("tokens", tokens)
    if values.shape[2:] != (len(tokens), len(tokens)):
        raise InputError(
            f"`tokens` must have one token for each query and key; got {len(tokens)} tokens and a pattern of "
            f"{values.shape[2]} queries × {values.shape[3]} keys."
        )
    return view_of_attention(values, tokens, layers=layers, hidden=never_seen(values[0]), **selection)


def view_of_attention(
    values: Float[np.ndarray, "layer head query key"],
    tokens: list[str],
    *,
    layers: list[int],
    layer: int | None,
    head: int | None,
    query: int | None,
    view: str | None,
    hidden: Bool[np.ndarray, "head query key"],
    keys: list[str] | None = None,
    special: Sequence[bool] | None = None,
    point: str = "pattern",
    name: str = "pattern",
    probabilities: bool = True,
    measure: Measure = PROBABILITY,
) -> View:
    """Returns the view of patterns or scores of one text, without padding: the one that the user chose, or the one that
    suits the selection.

    The user chose `layer`, `head` and `query`; None stands for all. `hidden` are the cells that the mask hides in the
    first layer, `special` says whether each key is a special token, `point` is where the values come from, `name` what
    they are, for titles, and `probabilities` whether each row sums to at most 1.
    """
    heads = list(range(values.shape[1])) if head is None else [index_of("head", head, values.shape[1])]
    suits_circuitsvis = keys is None and len(heads) * values[0, 0].size <= MOST_CELLS
    kind = view or _usual(layer, head, query, ours=probabilities and not suits_circuitsvis)
    if kind not in VIEWS:
        raise InputError(f"`view` must be one of {', '.join((*VIEWS, 'picture'))}; got {view!r}.")
    if kind in _OWN_VIEWS:
        if not probabilities:
            raise InputError(
                'the views "model", "sentence" and "token_graph" show probabilities: use "pattern", or select a '
                f"layer of {point!r}."
            )
        of_text: dict[str, Any] = {} if keys is None else {"keys": keys}
        of_text |= {"special": special} if kind == "sentence" else {}
        return _OWN_VIEWS[kind](
            values,
            tokens,
            layers=layers,
            head=heads[0],
            sums_to_one=False,
            measure=measure,
            title=f"{_NAMES[kind]} of {where(name, layer, None)}",
            **of_text,
        )
    if layer is None:
        raise InputError(f"view={kind!r} shows one layer: pass `layer`, one of {', '.join(map(str, layers))}.")
    place = where(name, layer, head)
    drawn = values[0][heads]
    if kind == "attention_heads":
        labels = [f"L{layer}H{number}" for number in heads]
        return attention_heads(drawn, tokens, heads=labels, hidden=hidden[heads], title=f"Heads: {place}")
    if kind == "attention_pattern":
        if head is None:
            raise InputError(f'view="attention_pattern" shows one head: pass `head`, from 0 to {values.shape[1] - 1}.')
        return attention_pattern(drawn[0], tokens, hidden=hidden[head], title=f"Map: {place}")
    if query is None:
        raise InputError(f"view={kind!r} shows one row: pass `query`, from 0 to {len(tokens) - 1}.")
    index_of("query", query, len(tokens))
    row = np.where(hidden[heads], 0, drawn)[:, query]
    title = f"{place}, from query {query} {quoted(tokens[query])}"
    key_tokens = tokens if keys is None else keys
    if kind == "colored_tokens":
        return colored_tokens(row.mean(axis=0), key_tokens, title=title if head is not None else f"mean of {title}")
    return colored_tokens_multi(row.T, key_tokens, labels=[f"head {number}" for number in heads], title=title)


def never_seen(pattern: Float[np.ndarray, "head query key"]) -> Bool[np.ndarray, "head query key"]:
    """The cells that are 0 in every head."""
    return np.broadcast_to((pattern == 0).all(axis=0), pattern.shape)


def where(name: str, layer: int | None, head: int | None) -> str:
    """A point with its layer and head, for titles: "pattern, layer 2, head 6"."""
    place = "" if layer is None else f", layer {layer}"
    return f"{name}{place}" + ("" if head is None else f", head {head}")


def _usual(layer: int | None, head: int | None, query: int | None, *, ours: bool) -> str:
    """The view that suits a selection; `ours` if CircuitsVis cannot draw it."""
    if query is not None:
        return "colored_tokens_multi" if head is None else "colored_tokens"
    if layer is None or ours:
        return "model"
    return "attention_heads" if head is None else "attention_pattern"


def _patterns(cache: Named | Sequence[Any]) -> dict[int, Any]:
    values: dict[Any, Any] = dict(cache.items() if isinstance(cache, Named) else enumerate(cache))
    layers = {}
    for name, pattern in values.items():
        if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
            layers[name] = pattern
        elif match := _LAYER.fullmatch(str(name)):
            layers[int(match[1])] = pattern
    if not layers:
        held = ", ".join(map(str, list(values)[:4])) + (", …" if len(values) > 4 else "")
        raise InputError(
            f"`cache` must hold attention patterns by layer, or under TransformerLens's names, such as "
            f"{_HOOK.format(layer=0)!r}; it holds {held or 'nothing'}."
        )
    if missing := [layer for layer, pattern in layers.items() if pattern is None]:
        raise InputError(
            f"layer {missing[0]} has no pattern: its attention does not return one. Load the model with "
            'attn_implementation="eager", or leave the layer out, as in {3: pattern}.'
        )
    return dict(sorted(layers.items()))


def _of_text(pattern: Any, text: int, layer: int) -> Float[np.ndarray, "head query key"]:
    values: np.ndarray = as_array(pattern)
    if values.ndim == 4:
        values = values[index_of("text", text, len(values))]
        return values
    if values.ndim != 3 or text != 0:
        axes = (
            "[batch head query key]" if values.ndim != 3 else "[batch head query key] to have a text besides the first"
        )
        raise InputError(f"the pattern of layer {layer} must have the axes {axes}; got the shape {values.shape}.")
    return values
