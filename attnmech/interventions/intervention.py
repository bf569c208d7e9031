"""What to change in a run: an intervention is a plain value that says where, in which heads, and what.

>>> print(Intervention.zero([(3, 5)]))
z of L3H5 becomes 0
>>> print(Intervention.scale("position"))
position in the scores of all heads is dropped

On its own it changes nothing: `model.intervene(...)` applies it within a `with` block, and sweeps such as
`am.ablate_heads` run many interventions at once.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import torch
from torch import Tensor

from ..basics.arguments import dense, finite_number, option, pairs_of, shown, string
from ..basics.files import path_of
from ..errors import InputError, integer
from ..results.codec import packed, unpacked
from ..results.mean_qk import MeanQK
from ..results.provenance import Provenance
from ..results.tensor_file import read_tensors, write_tensors

Head: TypeAlias = tuple[int, int]
"""(layer, head)."""

Heads: TypeAlias = str | Sequence[Head]
"""A list of (layer, head), or "all"."""

Keys: TypeAlias = str | Sequence[int] | Tensor
"""Which keys: the first token of each text, the tokenizer's special tokens, positions, or a mask `[batch key]`."""

Edit: TypeAlias = Literal["zero", "replace", "uniform", "self", "first", "remove", "scale", "cut"]

Positions: TypeAlias = str | Sequence[int]
"""Which rows: a list of positions, where -1 is the last token of each text, -2 the one before; or "last"."""

Span: TypeAlias = tuple[int, int]
"""(start, end): positions from `start` to `end` − 1."""

TERMS: Final = (
    "query_key", "key_bias", "query_bias", "constant", "position", "content_to_position", "position_to_content",
)  # fmt: skip
"""The terms of the scores that can be scaled."""

EDITS: Final[Mapping[str, tuple[Edit, ...]]] = {
    "z": ("zero", "replace"),
    "pattern": ("uniform", "self", "first", "replace", "remove", "cut"),
    "scores": ("scale",),
    "v": ("zero", "replace"),
    "q": ("replace",),
    "k": ("replace",),
    "resid_pre": ("replace",),
    "resid_mid": ("replace",),
    "resid_post": ("replace",),
    "attn_out": ("zero", "replace"),
    "mlp_out": ("zero", "replace"),
}
"""The edits that each point allows."""

HEAD_POINTS: Final = ("z", "pattern", "scores", "v", "q", "k")
"""The points that have a head axis; at the others an intervention touches whole layers."""


@dataclass(frozen=True, eq=False)
class Values:
    """Tensors that an intervention puts in, by layer, with a description such as "mean over 12 texts".

    At z and v a tensor is `[#batch #position head d_head]`, at pattern `[#batch head query key]`, at points of the
    stream `[#batch #position d_model]`; a `#` axis may be 1. v also takes a `kv_head` axis: heads that share keys then
    get the same values. Two `Values` are equal if their descriptions are, and their tensors bit for bit.
    """

    by_layer: Mapping[int, Tensor]
    about: str = "given values"

    def __post_init__(self) -> None:
        given = self.by_layer
        if (
            not isinstance(given, Mapping)
            or not given
            or not all(_is_layer(layer) and isinstance(value, torch.Tensor) for layer, value in given.items())
        ):
            raise InputError(f"values must be tensors by layer, such as {{3: acts['z', 3]}}; got {_kind(given)}.")
        for layer, value in given.items():
            if dense(f"the values of layer {layer}", value).is_complex() or not bool(torch.isfinite(value).all()):
                raise InputError(
                    f"the values of layer {layer} must be finite real numbers; got {shown(value)}"
                    f"{'' if value.is_complex() else ' with NaN or infinity in it'}."
                )
            if not value.numel():
                raise InputError(f"the values of layer {layer} must not be empty; got a tensor {list(value.shape)}.")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tensors."""
        found = hashlib.sha256()
        for layer, value in sorted(self.by_layer.items()):
            found.update(f"{layer} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and self.about == other.about and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.about


@dataclass(frozen=True)
class Intervention:
    """One change to a run: an edit at a point, in some heads. Make it with the class methods.

    Interventions compare, print and hash as values, and `save` and `load` as files; several given together act
    together: `model.intervene(one, other)`.
    """

    point: str
    edit: Edit
    heads: tuple[Head, ...] | Literal["all"] = "all"
    layers: tuple[int, ...] | None = None
    """At points without a head axis: which layers; None for all."""
    positions: tuple[int, ...] | None = None
    """Which rows (queries) of each text, None for all: 0 and up as a run counts them, left padding too; below 0 from
    each text's last token back, -1 for the last itself."""
    spans: tuple[Span, Span] | None = None
    """Of a cut: the span of the rows and that of the keys, counted from the first token of each text."""
    keys: tuple[int, ...] | Literal["first", "special"] | Values | None = None
    """For edits of single keys: which keys; `Values` hold a mask `[batch key]`."""
    term: str | None = None
    """At scores: the term of the ledger to scale."""
    factor: float = 0.0
    """At scores: the factor."""
    centre: MeanQK | None = None
    """At scores: the means at which queries and keys are split; None for the model's own terms."""
    values: Values | None = None
    stack: str = ""
    """Which stack, in a model with several."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.edit not in EDITS.get(self.point, ()):
            known = "; ".join(f"{point}: {', '.join(edits)}" for point, edits in EDITS.items())
            raise InputError(f"there is no edit {self.edit!r} at {self.point!r}; there are {known}.")
        if (self.edit == "replace") != (self.values is not None):
            raise InputError(f"`values` belong to an edit that replaces; got {self.edit!r} with {self.values!r}.")
        of_keys = self.edit == "remove" or (self.point == "v" and not self.by_kv_head)
        if of_keys != (self.keys is not None):
            raise InputError(f"`keys` belong to edits of single keys; got {self._point_and_edit} with {self.keys!r}.")
        if (self.edit == "cut") != (self.spans is not None) or (self.spans and self.positions is not None):
            raise InputError(
                f"`spans` belong to a cut, which has no `positions`; got {self._point_and_edit} with {self.spans!r} "
                f"and {self.positions!r}."
            )
        if (self.point == "scores") != (self.term is not None):
            raise InputError(f"`term` belongs to edits of scores; got {self._point_and_edit} with {self.term!r}.")
        if self.centre is not None and self.point != "scores":
            raise InputError(f"`centre` belongs to edits of scores; got {self._point_and_edit} with {self.centre!r}.")
        by_head = self.point in HEAD_POINTS
        if (by_head and (self.heads == () or self.layers is not None)) or (
            not by_head and self.heads not in ((), "all")
        ):
            raise InputError(
                f"heads are chosen at {', '.join(HEAD_POINTS)}, whole layers elsewhere; got {self._point_and_edit} "
                f"with heads {self.heads!r} and layers {self.layers!r}."
            )

    def _check_types(self) -> None:
        """Converts numbers to Python's types; raises `InputError` for what a field may not hold, whatever the edit."""
        for name in ("point", "edit", "stack"):
            string(name, getattr(self, name))
        found: dict[str, Any] = {"layers": _numbers("layers", self.layers), "positions": _positions(self.positions)}
        found["factor"] = finite_number("factor", self.factor)
        if not isinstance(self.heads, tuple) or self.heads:
            found["heads"] = checked_heads(self.heads)
        if self.spans is not None:
            found["spans"] = _spans(self.spans)
        if self.keys is not None and not isinstance(self.keys, Values):
            found["keys"] = _keys(self.keys)
        if self.values is not None and not isinstance(self.values, Values):
            raise InputError(f"`values` must be am.Values; got {shown(self.values)}.")
        if self.term is not None:
            option("term", self.term, TERMS)
        if self.centre is not None and not isinstance(self.centre, MeanQK):
            raise InputError(
                "`centre` must be fixed means, am.mean_qk(model, corpus): those of the text itself would let later "
                f"tokens change what earlier ones see; got {shown(self.centre)}."
            )
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def _point_and_edit(self) -> str:
        return f"{self.edit!r} at {self.point!r}"

    # -- the ways to make one ------------------------------------------------------------------------------

    @classmethod
    def zero(cls, heads: Heads, *, positions: Positions | None = None, stack: str = "") -> Self:
        """z of the heads becomes 0: they write nothing (b_O stays).

        Args:
            heads: a list of (layer, head), or "all".
            positions: the rows: 0 and up, or below 0 from the end of each text; "last"; by default all.
            stack: which stack, in a model with several.
        """
        return cls("z", "zero", checked_heads(heads), positions=_positions(positions), stack=_stack(stack))

    @classmethod
    def replace(
        cls,
        heads: Heads,
        values: Values | Mapping[int, Tensor],
        *,
        point: Literal["z", "pattern", "q", "k", "v"] = "z",
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """Replaces z, or another point, of the heads by given values: a mean, or that of another run.

        >>> acts = model.run(other, points=["z"])                                       # doctest: +SKIP
        >>> Intervention.replace([(3, 5)], {3: acts["z", 3]})                            # doctest: +SKIP

        Args:
            heads: a list of (layer, head), or "all"; at k and v kv heads, (layer, kv_head), which several query heads
                may share: all of these change.
            values: tensors by layer, as a run or `am.mean_z` returns them.
            point: "z", "pattern", "q", "k" or "v".
            positions: the rows: 0 and up, or below 0 from the end of each text; "last"; by default all.
            stack: which stack, in a model with several.
        """
        return cls(
            point, "replace", checked_heads(heads), positions=_positions(positions), values=_values(values),
            stack=_stack(stack),
        )  # fmt: skip

    @classmethod
    def attend(
        cls,
        heads: Heads,
        to: Literal["uniform", "self", "first"],
        *,
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """The pattern becomes uniform over the visible keys, or puts all mass on the token itself or the first token.

        Removed keys are not visible; the first token is attended to even where the mask hides it.

        Args:
            heads: a list of (layer, head), or "all".
            to: "uniform", "self" or "first".
            positions: the rows: 0 and up, or below 0 from the end of each text; "last"; by default all.
            stack: which stack, in a model with several.
        """
        return cls("pattern", to, checked_heads(heads), positions=_positions(positions), stack=_stack(stack))

    @classmethod
    def remove_keys(cls, heads: Heads, keys: Keys, *, positions: Positions | None = None, stack: str = "") -> Self:
        """Hides the keys from the heads: the softmax is recomputed without them.

        A row that sees no other key attends to nothing.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's tokens), a list of positions, or a mask `[batch key]`.
            positions: the rows: 0 and up, or below 0 from the end of each text; "last"; by default all.
            stack: which stack, in a model with several.
        """
        return cls(
            "pattern", "remove", checked_heads(heads), positions=_positions(positions), keys=_keys(keys),
            stack=_stack(stack),
        )  # fmt: skip

    @classmethod
    def cut(cls, query_span: Sequence[int], key_span: Sequence[int], heads: Heads = "all", *, stack: str = "") -> Self:
        """Removes attention from the rows of one span to the keys of another; the softmax is taken without them.

        A row left without a key attends to nothing: its z is 0 before W_O, and its row of the pattern is 0, by which
        such rows can be counted. A sink takes part as before. Spans must lie in every text.

        >>> print(Intervention.cut((6, 9), (0, 3), [(3, 5)]))
        attention of tokens 6 to 8 to tokens 0 to 2 cut in L3H5

        Args:
            query_span: the rows, (start, end), counted from the first token of each text.
            key_span: the keys, in the same way.
            heads: a list of (layer, head), or "all".
            stack: which stack, in a model with several.
        """
        return cls("pattern", "cut", checked_heads(heads), spans=_spans((query_span, key_span)), stack=_stack(stack))

    @classmethod
    def scale(
        cls, term: str, factor: float = 0.0, heads: Heads = "all", *, centre: MeanQK | None = None, stack: str = ""
    ) -> Self:
        """Multiplies a term of the score ledger by `factor`, before the softmax; 0 drops it.

        >>> print(Intervention.scale("key_bias", 0.5, [(0, 1)]))
        key_bias in the scores of L0H1 is multiplied by 0.5

        Args:
            term: a name in `am.decompose_scores(...).terms`: "query_key", "key_bias", "query_bias", "constant",
                "position" or, in DeBERTa, "content_to_position" or "position_to_content". A soft cap acts on the
                result.
            factor: what it is multiplied by.
            heads: a list of (layer, head), or "all".
            centre: means from `am.mean_qk`; `term` is then one of the scores split at these: `scale("position", 0,
                [(16, 0)], centre=means)` leaves a previous-token head of a model that rotates without its position.
            stack: which stack, in a model with several.
        """
        return cls(
            "scores", "scale", checked_heads(heads), term=option("term", term, TERMS), factor=factor, centre=centre,
            stack=_stack(stack),
        )  # fmt: skip

    @classmethod
    def zero_values(cls, heads: Heads, keys: Keys, *, stack: str = "") -> Self:
        """Sets the values of the keys to 0 for these heads alone: they attend as before and read nothing there.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's tokens), a list of positions, or a mask `[batch key]`.
            stack: which stack, in a model with several.
        """
        return cls("v", "zero", checked_heads(heads), keys=_keys(keys), stack=_stack(stack))

    @classmethod
    def replace_values(
        cls, heads: Heads, keys: Keys, values: Values | Mapping[int, Tensor], *, stack: str = ""
    ) -> Self:
        """Replaces the values of the keys for these heads alone.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's tokens), a list of positions, or a mask `[batch key]`.
            values: `[#batch #key head d_head]` by layer.
            stack: which stack, in a model with several.
        """
        return cls("v", "replace", checked_heads(heads), keys=_keys(keys), values=_values(values), stack=_stack(stack))

    @classmethod
    def stream(
        cls,
        point: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"],
        layers: Sequence[int],
        values: Values | Mapping[int, Tensor] | None = None,
        *,
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """Replaces the stream in the layers, or what their attention or MLP adds, by `values`, or the latter two by 0.

        Args:
            point: the stream as it enters a layer ("resid_pre"), between attention and MLP ("resid_mid"), or as it
                leaves ("resid_post"); or "attn_out" or "mlp_out".
            layers: which layers.
            values: `[#batch #position d_model]` by layer; None for 0.
            positions: the rows: 0 and up, or below 0 from the end of each text; "last"; by default all.
            stack: which stack, in a model with several.
        """
        return cls(
            point, "zero" if values is None else "replace", (), layers=_numbers("layers", layers),
            positions=_positions(positions), values=None if values is None else _values(values),
            stack=_stack(stack),
        )  # fmt: skip

    # -- how it describes itself ---------------------------------------------------------------------------

    @property
    def by_kv_head(self) -> bool:
        """Whether its heads are kv heads: at k, and at v as a whole."""
        return self.point == "k" or (self.point == "v" and self.edit == "replace" and self.keys is None)

    @property
    def touches(self) -> tuple[int, ...] | None:
        """The layers that it acts in; None for all of them."""
        if self.point not in HEAD_POINTS:
            return self.layers
        return None if self.heads == "all" else tuple(sorted({layer for layer, _ in self.heads}))

    def __str__(self) -> str:
        return f"{self._what}{self._where}"

    @property
    def _who(self) -> str:
        stack = f"{self.stack} " if self.stack else ""
        if self.point not in HEAD_POINTS:
            return stack + ("all layers" if self.layers is None else ", ".join(f"L{layer}" for layer in self.layers))
        kind = "kv heads" if self.by_kv_head else "heads"
        if self.heads == "all":
            return f"{stack}all {kind}"
        named = ", ".join(f"L{layer}H{head}" for layer, head in self.heads)
        return (
            f"{stack}{kind.removesuffix('s') if len(self.heads) == 1 else kind} {named}"
            if self.by_kv_head
            else (stack + named)
        )

    @property
    def _what(self) -> str:
        if self.edit == "scale":
            done = "dropped" if self.factor == 0 else f"multiplied by {self.factor:g}"
            split = "" if self.centre is None else f", split at {self.centre},"
            return f"{self.term} in the scores of {self._who}{split} is {done}"
        if self.edit == "remove":
            return f"{self._keys_shown} removed from the pattern of {self._who}"
        if self.edit == "cut":
            assert self.spans is not None
            query, key = (_shown_span(span) for span in self.spans)
            return f"attention of {query} to {key} cut in {self._who}"
        names = {"zero": "0", "first": "first token only", "replace": str(self.values)}
        point = self.point if self.keys is None else f"v at {self._keys_shown}"
        return f"{point} of {self._who} becomes {names.get(self.edit, self.edit)}"

    @property
    def _keys_shown(self) -> str:
        if isinstance(self.keys, tuple):
            return f"keys {_shown(self.keys)}"
        return {"first": "the first token", "special": "special tokens"}.get(str(self.keys), str(self.keys))

    @property
    def _where(self) -> str:
        if self.positions is None:
            return ""
        return " at the last position" if self.positions == (-1,) else f" at positions {_shown(self.positions)}"

    # -- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes it to a safetensors file."""
        tensors, rest = packed(self)
        header = {"kind": type(self).__name__, "facts": rest}
        if self.centre is not None:
            header["provenance"] = self.centre.provenance.to_dict()
        return write_tensors(path, tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote."""
        source = path_of(path)
        if not source.is_file():
            raise InputError(f"there is no file {source}.")
        try:
            tensors, header = read_tensors(source)
            if header["kind"] != cls.__name__:
                raise ValueError("it is another kind of file")
            origin = {"provenance": Provenance.from_dict(header["provenance"])} if "provenance" in header else {}
            rest = header["facts"]
            unknown = rest.keys() - {each.name for each in fields(cls)}
            if unknown:
                raise ValueError(f"it has unknown fields: {', '.join(sorted(unknown))}")
            found: Self = unpacked(cls, tensors, rest, **origin)
            if found.centre is not None:
                found.centre.check()
            return found
        except Exception as error:
            raise InputError(f"{source} does not hold an intervention ({error}).") from error

    @property
    def digest(self) -> str:
        """SHA-256 of everything, tensors included: the same change has the same digest."""
        tensors = [each.digest for each in (self.values, self.keys, self.centre) if isinstance(each, Values | MeanQK)]
        return hashlib.sha256(json.dumps([packed(self)[1], tensors], sort_keys=True).encode()).hexdigest()


def checked_heads(heads: Any) -> tuple[Head, ...] | Literal["all"]:
    """A selection of heads, sorted and without duplicates; `InputError` for anything else."""
    if isinstance(heads, str) and heads == "all":
        return "all"
    found = pairs_of("heads", heads, '"all" or a list of (layer, head)')
    if not found:
        raise InputError("`heads` must name at least one head; got an empty list.")
    return tuple(sorted(found))


def _numbers(name: str, numbers: Any) -> tuple[int, ...] | None:
    """Whole numbers of 0 or more, sorted and without duplicates."""
    if numbers is None:
        return None
    try:
        found = {integer(each) for each in numbers}
        if not found or min(found) < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(f"`{name}` must be a list of whole numbers, 0 or more; got {shown(numbers)}.") from None
    return tuple(sorted(found))


def _positions(positions: Any) -> tuple[int, ...] | None:
    """Positions, sorted and without duplicates, those counted from the end last; "last" is -1."""
    if positions is None:
        return None
    if isinstance(positions, str) and positions == "last":
        return (-1,)
    try:
        found = {integer(each) for each in positions}
        if not found:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            '`positions` must be "last" or a list of whole numbers, below 0 from the end of each text; got '
            f"{shown(positions)}."
        ) from None
    return tuple(sorted(found, key=lambda place: (place < 0, place)))


def _spans(spans: Any) -> tuple[Span, Span]:
    """The span of rows and that of keys of a cut."""
    try:
        (first, last), (start, end) = spans
        found = (integer(first), integer(last)), (integer(start), integer(end))
        if not all(0 <= start < end for start, end in found):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            "a cut needs two spans (start, end) of token positions with 0 ≤ start < end, the rows' and the keys'; got "
            f"{shown(spans)}."
        ) from None
    return found


def _keys(keys: Any) -> tuple[int, ...] | Literal["first", "special"] | Values:
    if isinstance(keys, torch.Tensor):
        if keys.dtype != torch.bool or keys.ndim != 2:
            raise InputError(f"a tensor of `keys` must be a mask [batch key]; got {keys.dtype} {list(keys.shape)}.")
        dense("a mask of keys", keys)
        return Values({0: keys}, f"a mask of {int(keys.sum())} keys in {len(keys)} texts")
    if isinstance(keys, str) and keys in ("first", "special"):
        return keys  # type: ignore[return-value]
    numbers = None if isinstance(keys, str) else _numbers("keys", keys)
    if numbers is None:
        raise InputError(f'`keys` must be "first", "special", positions, or a mask [batch key]; got {shown(keys)}.')
    return numbers


def _values(values: Any) -> Values:
    return values if isinstance(values, Values) else Values(dict(values) if isinstance(values, Mapping) else values)


def _stack(stack: Any) -> str:
    return "" if string("stack", stack) == "self" else stack


def _shown_span(span: Span) -> str:
    start, end = span
    return f"token {start}" if end == start + 1 else f"tokens {start} to {end - 1}"


def _shown(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _is_layer(given: object) -> bool:
    try:
        return integer(given) >= 0
    except TypeError:
        return False


def _kind(given: object) -> str:
    """What was given, briefly: tensors are long."""
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key!r}: {type(value).__name__}" for key, value in given.items()) + "}"
    return type(given).__name__
