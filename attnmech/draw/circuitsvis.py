"""CircuitsVis's views of attnmech's arrays, with correct axes, escaped text and rounded numbers.

CircuitsVis's own functions write every number in full, load their script from a network by default, and put tokens
into the page as HTML. This module passes rounded numbers to CircuitsVis's components, embeds its bundle like attnmech's
scripts, and adds a word joiner after each `<` or `&` of a token; the joiner is invisible and prevents HTML from reading
a tag.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from ..basics.arguments import index_of, listed, shown, string, strings, whole_number
from ..basics.public import public
from ..errors import InputError
from . import scripts
from .embed import View
from .head_maps import SIGNED_COLOURS, reach_of
from .patterns import Array, as_array
from .text import isolated, quoted, shorten, visible_token

MOST_CELLS: Final = 200_000
"""The largest number of cells; CircuitsVis draws each separately, and these take 9 seconds (benchmarks/views.py)."""

MOST_NUMBERS: Final = 600_000  # the largest number of activations; CircuitsVis draws only some of them at a time

DIGITS: Final = 4  # significant digits of a number in a page

_WORD_JOINER: Final = "\u2060"

_COLOURS: Final = {"negativeColor": SIGNED_COLOURS[0], "positiveColor": SIGNED_COLOURS[-1]}


@public
def attention_heads(
    values: Array,
    tokens: Sequence[str],
    *,
    heads: Sequence[str] = (),
    hidden: Bool[np.ndarray, "head query key"] | None = None,
    title: str = "Attention heads",
) -> View:
    """Shows one small map per head, and a full-size map of the head under the pointer.

    >>> attention_heads(np.tril(np.full((3, 2, 2), 0.5)), ["What", " does"])
    View('Attention heads', 0.00 MB; shows itself in a notebook, or .write_html(path))

    Args:
        values: probabilities or scores, [head query key], in self-attention.
        tokens: the text's tokens.
        heads: a name for each head; by default their numbers.
        hidden: the cells that the model cannot see; if all of them lie above the diagonal of a causal model,
            CircuitsVis paints them grey. By default, the cells that are 0 in every head.
        title: the view's heading.

    Raises:
        InputError: the shape does not fit the tokens, nothing is selected, or a browser could not draw that much.

    """
    array = as_array(values)
    props = _map_props(array, hidden, tokens, "head query key", title)
    names = strings("heads", heads)
    if names and len(names) != len(array):
        raise InputError(f"`heads` must name each of the {len(array)} heads; got {len(names)} names.")
    props["attentionHeadNames"] = [_text(name) for name in names] or [f"Head {head}" for head in range(len(array))]
    reading = f"Hover over a head to enlarge it; click to keep it enlarged. {_MAP}"
    return _view("AttentionHeads", props, title, reading, _deepest(props))


@public
def attention_pattern(
    values: Array,
    tokens: Sequence[str],
    *,
    hidden: Bool[np.ndarray, "query key"] | None = None,
    title: str = "Attention pattern",
) -> View:
    """Shows one head's map, [query key]; otherwise like `attention_heads`."""
    props = _map_props(as_array(values), hidden, tokens, "query key", title)
    return _view("AttentionPattern", props, title, _MAP, _deepest(props))


@public
def colored_tokens(values: Array, tokens: Sequence[str], *, title: str = "Tokens by value") -> View:
    """Shows the text with each token coloured by one number, [position]: blue above zero, brown below."""
    array = as_array(values)
    _require_positions(array, tokens, "position")
    props = {"tokens": _texts(tokens), "values": _numbers(array), **_reach(array), **_COLOURS}
    if not np.isfinite(array).any():
        raise InputError("`values` must hold at least one finite number; got none.")
    finite = np.where(np.isfinite(array), array, -np.inf)
    finding = f"Highest: token {finite.argmax()} {quoted(tokens[int(finite.argmax())])}, {finite.max():.4g}."
    reading = "Blue is above zero, brown below, white at zero. Hover over a token for its value."
    return _view("ColoredTokens", props, title, reading, finding)


@public
def colored_tokens_multi(
    values: Array, tokens: Sequence[str], *, labels: Sequence[str], title: str = "Tokens by several values"
) -> View:
    """Shows the text coloured by one of several numbers per token, [position series]; the reader chooses the series."""
    array = as_array(values)
    _require_positions(array, tokens, "position series")
    _require_few(array.size, title)
    series = strings("labels", labels)
    if len(series) != array.shape[1]:
        raise InputError(f"`labels` must name each of the {array.shape[1]} series; got {len(series)} names.")
    props = {"tokens": _texts(tokens), "values": _numbers(array), "labels": [_text(label) for label in series]}
    return _view(
        "ColoredTokensMulti",
        props,
        title,
        "Select a series above. Blue is above zero, red below. Hover over a token for all its values.",
    )


@public
def token_log_probs(
    logits: Array,
    ids: Sequence[int],
    tokens: Sequence[str],
    *,
    text_of: Callable[[int], str],
    top: int = 10,
    title: str = "The model's predictions",
) -> View:
    """Shows the text coloured by each token's log probability, with the most probable continuations in a hover box.

    Args:
        logits: the model's output at each position, [position vocab]; log probabilities are also accepted.
        ids: the text's token ids.
        tokens: the text's tokens. The first is not shown: nothing predicts it.
        text_of: the text of any token id.
        top: the number of continuations to list.
        title: the view's heading.

    """
    array = as_array(logits)
    _require_positions(array, tokens, "position vocab")
    token_ids = listed("ids", ids, "a list of token ids")
    if len(token_ids) != len(tokens):
        raise InputError(f"`ids` must hold one id for each of the {len(tokens)} tokens; got {len(token_ids)}.")
    token_ids = [index_of("ids", token, array.shape[1], "the vocabulary") for token in token_ids]
    if np.isnan(array).any() or np.isposinf(array).any():
        raise InputError("`logits` must hold numbers, or minus infinity for impossible tokens; got NaN or infinity.")
    if not callable(text_of):
        raise InputError(f"`text_of` must be a function of a token id; got {shown(text_of)}.")
    if len(tokens) < 2:
        raise InputError("a text of one token has nothing to predict; pass at least two tokens.")
    top = whole_number("top", top, least=1, most=array.shape[1], most_is="the vocabulary")
    shifted = array[:-1].astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    answers = np.asarray(token_ids[1:])
    own = log_probs[np.arange(len(answers)), answers]
    best = np.stack([_highest(row, top) for row in log_probs])
    props = {
        "prompt": _texts(tokens),
        "topKLogProbs": _numbers(np.take_along_axis(log_probs, best, axis=1)),
        "topKTokens": [
            _texts([string("text_of", text_of(int(token)), "return strings") for token in row]) for row in best
        ],
        "correctTokenRank": (log_probs > own[:, None]).sum(axis=1).tolist(),
        "correctTokenLogProb": _numbers(own),
    }
    reading = (
        "The redder a token, the more probable the model considered it; white tokens have a probability below e⁻⁵ = "
        f"0.7 %. Hover over a token for its probability, its rank (0 is the most probable) and the {top} most probable "
        "tokens at its position."
    )
    least = int(own.argmin())
    finding = (
        f"The loss on this text is {-own.mean():.2f} nats per token (perplexity {np.exp(-own.mean()):.1f}); the "
        f"least expected token is {least + 1} {quoted(tokens[least + 1])}, at {-own[least]:.1f} nats."
    )
    return _view("TokenLogProbs", props, title, reading, finding)


def _highest(values: Float[np.ndarray, " token"], count: int) -> Int[np.ndarray, " place"]:
    """The indices of the highest values, in falling order; equal values in order of position."""
    least = np.partition(values, -count)[-count]
    (places,) = np.nonzero(values >= least)
    highest: np.ndarray = places[np.argsort(-values[places], kind="stable")[:count]]
    return highest


@public
def text_neuron_activations(
    values: Sequence[Array],
    tokens: Sequence[Sequence[str]],
    *,
    names: tuple[str, str],
    labels: tuple[Sequence[str], Sequence[str]],
    title: str = "Activations",
) -> View:
    """Shows texts coloured by one activation at a time, which the reader chooses from two lists.

    Args:
        values: for each text, [position first second].
        tokens: for each text, its tokens.
        names: the names of the two lists, such as ("layer", "head").
        labels: the entries of each list.
        title: the view's heading.

    """
    arrays = [as_array(member) for member in listed("values", values, "a list of arrays, one per text")]
    rows = [strings("tokens", row) for row in listed("tokens", tokens, "a list of texts' tokens")]
    if not arrays or len(arrays) != len(rows):
        raise InputError(
            f"`values` and `tokens` must hold the same number of texts, at least one; got {len(arrays)} and "
            f"{len(rows)}."
        )
    first, second = _two("names", names)
    string("names", first), string("names", second)
    firsts, seconds = (strings("labels", entries) for entries in _two("labels", labels))
    for array, row in zip(arrays, rows, strict=True):
        _require_positions(array, row, "position first second")
        if array.shape[1:] != (len(firsts), len(seconds)):
            raise InputError(
                f"`labels` must name each of the {array.shape[1]} × {array.shape[2]} entries; "
                f"got {len(firsts)} × {len(seconds)} names."
            )
    _require_few(sum(array.size for array in arrays), title)
    props = {
        "tokens": [_texts(row) for row in rows],
        "activations": [_numbers(array) for array in arrays],
        "firstDimensionName": _text(first),
        "secondDimensionName": _text(second),
        "firstDimensionLabels": [_text(label) for label in firsts],
        "secondDimensionLabels": [_text(label) for label in seconds],
    }
    reading = (
        f"Select {first} and {second}. Blue is above zero, red below, white at zero. Hover over a token for its value."
    )
    return _view("TextNeuronActivations", props, title, reading)


_MAP: Final = (
    "Rows are queries (“destination”), columns are keys (“source”). Blue is above zero, brown below, deepest at the "
    "largest absolute value shown; hidden cells are grey or white."
)


def _deepest(props: Mapping[str, Any]) -> str:
    """The meaning of the deepest colour, in a sentence: each map has its own scale."""
    return f"The deepest colour is an absolute value of {props['maxValue']:.3g}; white is 0."


def _map_props(
    values: Float[np.ndarray, "..."], hidden: Any, tokens: Sequence[str], axes: str, title: str
) -> dict[str, Any]:
    """The properties that both kinds of map take; cells above the diagonal are masked if no head sees them."""
    strings("tokens", tokens)
    _require_axes(values, axes)
    if values.shape[-2:] != (len(tokens), len(tokens)):
        raise InputError(
            f"`values` must have one query and one key for each of the {len(tokens)} tokens; got {values.shape[-2]} "
            f"× {values.shape[-1]}. CircuitsVis draws only self-attention; for cross-attention use "
            "attnmech.draw.sentence_view, token_graph or model_view."
        )
    _require_few(values.size, title, MOST_CELLS)
    boolean = isinstance(hidden, np.ndarray) and hidden.dtype == bool
    if hidden is not None and not (boolean and hidden.shape == values.shape):
        got = hidden.shape if boolean else shown(hidden)
        raise InputError(f"`hidden` must be a boolean array with the shape {values.shape} of `values`; got {got}.")
    never = (values == 0) if hidden is None else hidden
    above = np.triu_indices(len(tokens), k=1)
    visible = values if hidden is None else values[~hidden]
    return {
        "attention": _numbers(values if hidden is None else np.where(hidden, np.nan, values)),
        "tokens": _texts(tokens),
        "maskUpperTri": bool(len(tokens) > 1 and never[..., above[0], above[1]].all()),
        **_reach(visible),
        **_COLOURS,
    }


def _reach(values: Float[np.ndarray, "..."]) -> dict[str, float]:
    """A scale from minus to plus the largest absolute value, so that no colour saturates."""
    reach = reach_of(values)
    return {"maxValue": reach, "minValue": -reach}


def _numbers(values: Float[np.ndarray, "..."]) -> Any:
    """Nested lists of numbers with few digits; None for NaN and infinities."""
    if values.ndim > 1:
        return [_numbers(part) for part in values]
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


def _texts(tokens: Sequence[str]) -> list[str]:
    return [_text(shorten(visible_token(token))) for token in tokens]


def _text(text: str) -> str:
    """Text that HTML does not read as tags or entities."""
    return isolated(text.replace("<", f"<{_WORD_JOINER}").replace("&", f"&{_WORD_JOINER}"))


def _view(element: str, props: dict[str, Any], title: str, reading: str, finding: str = "") -> View:
    return View("circuitsvis", title, reading, {"element": element, "props": props}, (scripts.circuitsvis(),), finding)


def _two(name: str, pair: Any) -> tuple[Any, Any]:
    members = listed(name, pair, "a pair")
    if len(members) != 2:
        raise InputError(f"`{name}` must be a pair; got {shown(pair)}.")
    return members[0], members[1]


def _require_positions(values: Float[np.ndarray, "..."], tokens: Sequence[str], axes: str) -> None:
    strings("tokens", tokens)
    _require_axes(values, axes)
    if len(values) != len(tokens):
        raise InputError(f"`values` must have one entry for each of the {len(tokens)} tokens; got {len(values)}.")


def _require_axes(values: Float[np.ndarray, "..."], axes: str) -> None:
    if values.ndim != len(axes.split()):
        raise InputError(f"`values` must have the axes [{axes}]; got the shape {values.shape}.")
    if not values.size:
        raise InputError(f"the selection is empty: `values` has the shape {values.shape}.")


def _require_few(count: int, title: str, most: int = MOST_NUMBERS) -> None:
    if count > most:
        raise InputError(
            f"{title}: {count:,} numbers exceed the {most:,} that CircuitsVis can draw (about {count * 7 / 1e6:.0f} "
            "MB). Select fewer heads, layers or tokens, or use attnmech's own views, which hold more: "
            'acts.show("pattern", layer=2, view="model"), or "sentence", or "token_graph".'
        )
