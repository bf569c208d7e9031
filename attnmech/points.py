"""Names each activation point and defines its shape and its meaning, which are the same on every model.

`parse` accepts these names and those of TransformerLens.

>>> parse("blocks.3.attn.hook_pattern")
('pattern', 3)
>>> parse("pattern"), parse(("pattern", 3))
(('pattern', None), ('pattern', 3))

In models with several stacks (encoder, decoder, cross-attention), a name begins with its stack:

>>> parse("cross.pattern")
('cross.pattern', None)
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeAlias

from .basics.arguments import integer
from .errors import InputError

PointName: TypeAlias = str | tuple[str, int]
"""How a user names a point: "pattern" (every layer), ("pattern", 3), or "blocks.3.attn.hook_pattern"."""

PointKey: TypeAlias = tuple[str, int | None]
"""How attnmech names a point: the name and the layer; None for points outside the layers."""


@dataclass(frozen=True)
class Point:
    """One activation point: name, axes, meaning, and TransformerLens's name for it."""

    name: str
    axes: tuple[str, ...]
    meaning: str
    lens_name: str

    @property
    def per_layer(self) -> bool:
        """Whether every layer has this point, as is true of all points but `embed` and `logits`."""
        return "{layer}" in self.lens_name


_STREAM = ("batch", "position", "d_model")
_QUERIES = ("batch", "position", "head", "d_head")
_KEYS = ("batch", "position", "kv_head", "d_head")
_PAIRS = ("batch", "head", "query", "key")
_BLOCK = "blocks.{layer}."

POINTS: Final = {
    point.name: point
    for point in (
        Point("embed", _STREAM, "row of the token embedding, before positions and norms", "hook_embed"),
        Point("resid_pre", _STREAM, "residual stream as it enters the block", _BLOCK + "hook_resid_pre"),
        Point("attn_in", _STREAM, "input of W_Q, W_K and W_V", _BLOCK + "attn.hook_in"),
        Point(
            "latent",
            ("batch", "position", "d_latent"),
            "latent from which keys and values are expanded, after its norm",
            _BLOCK + "attn.hook_kv_latent",
        ),
        Point("q", _QUERIES, "attn_in W_Q + b_Q, before rotary", _BLOCK + "attn.hook_q"),
        Point("k", _KEYS, "attn_in W_K + b_K, before rotary", _BLOCK + "attn.hook_k"),
        Point("v", _KEYS, "attn_in W_V + b_V", _BLOCK + "attn.hook_v"),
        Point("q_rot", _QUERIES, "q after rotary, as the score uses it", _BLOCK + "attn.hook_rot_q"),
        Point("k_rot", _KEYS, "k after rotary, as the score uses it", _BLOCK + "attn.hook_rot_k"),
        Point(
            "scores",
            _PAIRS,
            "scaled q·k + position, before softmax; the lowest finite number where the mask hides a key",
            _BLOCK + "attn.hook_attn_scores",
        ),
        Point("pattern", _PAIRS, "softmax of scores over the keys", _BLOCK + "attn.hook_pattern"),
        Point("gate", _QUERIES, "factor of the pattern-weighted sum of v", _BLOCK + "attn.hook_gate"),
        Point("z", _QUERIES, "pattern-weighted sum of v (times the gate), which W_O reads", _BLOCK + "attn.hook_z"),
        Point("result", ("batch", "position", "head", "d_model"), "z W_O of each head", _BLOCK + "attn.hook_result"),
        Point("attn_raw", _STREAM, "sum of result over heads + b_O", _BLOCK + "attn.o.hook_out"),
        Point("attn_out", _STREAM, "what attention adds to the stream", _BLOCK + "hook_attn_out"),
        Point("mixer_out", _STREAM, "what a mixer beside attention adds to the stream", _BLOCK + "hook_mixer_out"),
        Point("resid_mid", _STREAM, "resid_pre + attn_out (+ mixer_out)", _BLOCK + "hook_resid_mid"),
        Point("mlp_out", _STREAM, "what the MLP adds to the stream", _BLOCK + "hook_mlp_out"),
        Point("resid_post", _STREAM, "residual stream as it leaves the block", _BLOCK + "hook_resid_post"),
        Point("logits", ("batch", "position", "vocab"), "the model's output for every token", "unembed.hook_out"),
    )
}

STACKS: Final = ("encoder", "decoder", "cross")
"""The labels of stacks in a model with several; where there is only one, "self" names it."""

_OUTSIDE_LAYERS = {point.lens_name: point.name for point in POINTS.values() if not point.per_layer}
_OTHERS = {"query": "q", "key": "k", "value": "v", **dict.fromkeys(("attention", "attentions", "attn"), "pattern")}
"""Names that other libraries use."""
_IN_LAYER = {point.lens_name.removeprefix(_BLOCK): point.name for point in POINTS.values() if point.per_layer}
_LENS_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def split_stack(name: str) -> tuple[str, str]:
    """Splits a name into the stack and the name of the point.

    >>> split_stack("cross.pattern"), split_stack("pattern"), split_stack("self.pattern")
    (('cross', 'pattern'), ('', 'pattern'), ('', 'pattern'))
    """
    stack, _, base = name.rpartition(".")
    if stack == "self":
        return "", base
    return (stack, base) if stack in STACKS else ("", name)


def full_name(stack: str, base: str) -> str:
    """A point's name with its stack; names of points outside the layers have no stack.

    >>> full_name("cross", "pattern"), full_name("", "pattern"), full_name("cross", "logits")
    ('cross.pattern', 'pattern', 'logits')
    """
    return f"{stack}.{base}" if stack and POINTS[base].per_layer else base


def point_of(name: str) -> Point:
    """The table's entry for a name with or without its stack."""
    return POINTS[split_stack(name)[1]]


def lens_name(key: PointKey) -> str:
    """TransformerLens's name of a point.

    >>> lens_name(("pattern", 3))
    'blocks.3.attn.hook_pattern'
    """
    name, layer = key
    return POINTS[name].lens_name.format(layer=layer)


def parse(name: PointName) -> PointKey:
    """A user's name for a point as (name, layer); the layer is None for every layer, or for a point outside them.

    Raises `InputError`, suggesting the closest name, for a name that is not in the table.
    """
    if isinstance(name, tuple):
        if len(name) != 2 or not isinstance(name[0], str) or isinstance(name[1], bool):
            raise InputError(
                f'a point is a name or a pair (name, layer), such as ("pattern", 3); got {name!r}. '
                'A head is an index of the tensor: acts["pattern", 3][:, 5].'
            )
        full, layer = name
        stack, base = split_stack(full)
        point = POINTS.get(base)
        if point is None:
            raise InputError(_unknown(full))
        try:
            layer = integer(layer)
        except TypeError:
            raise InputError(f"the layer of point {base!r} must be an int; got {layer!r}.") from None
        if not point.per_layer:
            raise InputError(f"point {base!r} has no layer: ask for {base!r} alone; got {name!r}.")
        return full_name(stack, base), layer
    if not isinstance(name, str):
        raise InputError(f'a point is a name or a pair (name, layer), such as ("pattern", 3); got {name!r}.')
    stack, base = split_stack(name)
    if base in POINTS:
        return full_name(stack, base), None
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name], None
    block = _LENS_BLOCK.fullmatch(name)
    if block and block[2] in _IN_LAYER:
        return _IN_LAYER[block[2]], int(block[1])
    raise InputError(_unknown(name))


def _unknown(name: str) -> str:
    bare = name.rsplit("hook_", 1)[-1]
    near = [_OTHERS[bare]] if bare in _OTHERS else get_close_matches(bare, POINTS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"there is no point {name!r}{hint} The points are: {', '.join(POINTS)}."
