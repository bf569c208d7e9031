"""What to change in a run: an intervention is a plain value that says where, which heads, and what.

>>> print(Intervention.zero([(3, 5)]))
z of L3H5 becomes 0
>>> print(Intervention.scale("position", 0, "all"))
position in the scores of all heads is dropped

It touches nothing by itself: `model.intervene(...)` puts it in force for a `with` block, and sweeps such as
`am.ablate_heads` run many of them at once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import InputError
from .results import writing

Head: TypeAlias = tuple[int, int]
"""(layer, head)."""

Heads: TypeAlias = str | Sequence[Head]
"""A list of (layer, head), or "all"."""

Keys: TypeAlias = str | Sequence[int] | Tensor
"""Which keys: the first token of each text, the tokenizer's special tokens, positions, or a mask `[batch key]`."""

Edit: TypeAlias = Literal["zero", "replace", "uniform", "self", "first", "remove", "scale"]

EDITS: Final[Mapping[str, tuple[Edit, ...]]] = {
    "z": ("zero", "replace"),
    "pattern": ("uniform", "self", "first", "replace", "remove"),
    "scores": ("scale",),
    "v": ("zero", "replace"),
    "resid_pre": ("replace",),
    "attn_out": ("zero", "replace"),
    "mlp_out": ("zero", "replace"),
}
"""What can be done at which point."""

HEAD_POINTS: Final = ("z", "pattern", "scores", "v")
"""The points that have a head axis; at the others an intervention touches whole layers."""


@dataclass(frozen=True, eq=False)
class Values:
    """Tensors that an intervention puts in, by layer, with what they are: "mean over 12 texts".

    At z and v a tensor is `[#batch #position head d_head]`, at pattern `[#batch head query key]`, at points of the
    stream `[#batch #position d_model]`; a `#` axis may be 1. Two are equal where their tensors are, to the bit.
    """

    by_layer: Mapping[int, Tensor]
    about: str = "given values"

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
    """One change of a run: at a point, in some heads, an edit. Make it with the class methods.

    Interventions compare, print and hash as values, `save` and `load` them as files, and several act together where
    they are given together: `model.intervene(one, other)`.
    """

    point: str
    edit: Edit
    heads: tuple[Head, ...] | Literal["all"] = "all"
    layers: tuple[int, ...] | None = None
    """At points without a head axis: which layers; None is all."""
    positions: tuple[int, ...] | None = None
    """Which rows (queries) of each text; None is all."""
    keys: tuple[int, ...] | Literal["first", "special"] | Values | None = None
    """At edits of single keys: which; `Values` hold a mask `[batch key]`."""
    term: str | None = None
    """At scores: the term of the ledger that is scaled."""
    factor: float = 0.0
    """At scores: by what it is multiplied."""
    values: Values | None = None
    stack: str = ""
    """The stack that is meant, of a model with several."""

    def __post_init__(self) -> None:
        if self.edit not in EDITS.get(self.point, ()):
            known = "; ".join(f"{point}: {', '.join(edits)}" for point, edits in EDITS.items())
            raise InputError(f"there is no edit {self.edit!r} at {self.point!r}; there are {known}.")
        if (self.edit == "replace") != (self.values is not None):
            raise InputError(f"`values` belong to an edit that replaces; got {self.edit!r} with {self.values!r}.")

    # -- the ways to make one ------------------------------------------------------------------------------

    @classmethod
    def zero(cls, heads: Heads, *, positions: Sequence[int] | None = None, stack: str = "") -> Self:
        """z of the heads becomes 0: they write nothing (b_O stays)."""
        return cls("z", "zero", checked_heads(heads), positions=_numbers("positions", positions), stack=_stack(stack))

    @classmethod
    def replace(
        cls,
        heads: Heads,
        values: Values | Mapping[int, Tensor],
        *,
        point: Literal["z", "pattern"] = "z",
        positions: Sequence[int] | None = None,
        stack: str = "",
    ) -> Self:
        """z, or the pattern, of the heads becomes what is given: a mean, or that of another run.

        >>> acts = model.run(other, points=["z"])                                       # doctest: +SKIP
        >>> Intervention.replace([(3, 5)], {3: acts["z", 3]})                            # doctest: +SKIP
        """
        return cls(
            point, "replace", checked_heads(heads), positions=_numbers("positions", positions), values=_values(values),
            stack=_stack(stack),
        )  # fmt: skip

    @classmethod
    def attend(
        cls,
        heads: Heads,
        to: Literal["uniform", "self", "first"],
        *,
        positions: Sequence[int] | None = None,
        stack: str = "",
    ) -> Self:
        """The pattern becomes uniform over the visible keys, or puts all on the token itself or on the first token."""
        return cls("pattern", to, checked_heads(heads), positions=_numbers("positions", positions), stack=_stack(stack))

    @classmethod
    def remove_keys(cls, heads: Heads, keys: Keys, *, positions: Sequence[int] | None = None, stack: str = "") -> Self:
        """The keys are hidden from the heads: the softmax is taken again without them.

        A row that sees no other key attends to nothing.
        """
        return cls(
            "pattern", "remove", checked_heads(heads), positions=_numbers("positions", positions), keys=_keys(keys),
            stack=_stack(stack),
        )  # fmt: skip

    @classmethod
    def scale(cls, term: str, factor: float = 0.0, heads: Heads = "all", *, stack: str = "") -> Self:
        """A term of the score ledger is multiplied inside the softmax, by 0 if it is to be dropped.

        `term` is a name of `am.decompose_scores(...).terms`: "query_key", "key_bias", "query_bias", "constant" or
        "position". A soft cap acts on what comes out.
        """
        return cls("scores", "scale", checked_heads(heads), term=term, factor=float(factor), stack=_stack(stack))

    @classmethod
    def zero_values(cls, heads: Heads, keys: Keys, *, stack: str = "") -> Self:
        """The values of the keys become 0, for these heads alone: they attend as before and read nothing there."""
        return cls("v", "zero", checked_heads(heads), keys=_keys(keys), stack=_stack(stack))

    @classmethod
    def replace_values(
        cls, heads: Heads, keys: Keys, values: Values | Mapping[int, Tensor], *, stack: str = ""
    ) -> Self:
        """The values of the keys become what is given, `[#batch #key head d_head]`, for these heads alone."""
        return cls("v", "replace", checked_heads(heads), keys=_keys(keys), values=_values(values), stack=_stack(stack))

    @classmethod
    def stream(
        cls,
        point: Literal["resid_pre", "attn_out", "mlp_out"],
        layers: Sequence[int],
        values: Values | Mapping[int, Tensor] | None = None,
        *,
        positions: Sequence[int] | None = None,
        stack: str = "",
    ) -> Self:
        """The stream as it enters the layers, or what their attention or MLP adds, becomes what is given, or 0."""
        return cls(
            point, "zero" if values is None else "replace", (), layers=_numbers("layers", layers),
            positions=_numbers("positions", positions), values=None if values is None else _values(values),
            stack=_stack(stack),
        )  # fmt: skip

    # -- what it says of itself ----------------------------------------------------------------------------

    @property
    def touches(self) -> tuple[int, ...] | None:
        """The layers that it acts in; None is all of them."""
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
        return stack + (
            "all heads" if self.heads == "all" else ", ".join(f"L{layer}H{head}" for layer, head in self.heads)
        )

    @property
    def _what(self) -> str:
        keys = (
            ""
            if self.keys is None
            else f"key {self.keys}"
            if isinstance(self.keys, str)
            else f"keys {_shown(self.keys)}"
        )
        if self.edit == "scale":
            done = "dropped" if self.factor == 0 else f"multiplied by {self.factor:g}"
            return f"{self.term} in the scores of {self._who} is {done}"
        if self.edit == "remove":
            return f"{keys} removed from the pattern of {self._who}"
        becomes = {"zero": "0", "uniform": "uniform", "self": "self", "first": "first token only"}.get(
            self.edit, str(self.values)
        )
        point = f"v at {keys}" if self.point == "v" else self.point
        return f"{point} of {self._who} becomes {becomes}"

    @property
    def _where(self) -> str:
        return "" if self.positions is None else f" at positions {_shown(self.positions)}"

    # -- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Writes it to a safetensors file."""
        target = Path(path)
        tensors = {f"values {layer}": x for layer, x in (self.values.by_layer if self.values else {}).items()}
        if isinstance(self.keys, Values):
            tensors["keys 0"] = self.keys.by_layer[0]
        with writing(target) as draft:
            save_file(
                {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
                draft,
                metadata={"attnmech": json.dumps({"kind": type(self).__name__, **self.facts()})},
            )
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote."""
        source = Path(path)
        if not source.is_file():
            raise InputError(f"there is no file {source}.")
        try:
            with safe_open(source, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["attnmech"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
            if facts["kind"] != cls.__name__:
                raise ValueError(f"it holds a {facts['kind']}")
        except Exception as error:
            raise InputError(f"{source} holds no intervention ({error}).") from error
        values = {int(name.split()[1]): x for name, x in tensors.items() if name.startswith("values")}
        keys = facts["keys"]
        if "keys 0" in tensors:
            keys = Values({0: tensors["keys 0"]}, facts["keys"])
        heads = facts["heads"]
        return cls(
            point=facts["point"],
            edit=facts["edit"],
            heads="all" if heads == "all" else tuple((layer, head) for layer, head in heads),
            layers=None if facts["layers"] is None else tuple(facts["layers"]),
            positions=None if facts["positions"] is None else tuple(facts["positions"]),
            keys=tuple(keys) if isinstance(keys, list) else keys,
            term=facts["term"],
            factor=facts["factor"],
            values=Values(values, facts["values"]) if values else None,
            stack=facts["stack"],
        )

    def facts(self) -> dict[str, Any]:
        """All of it but its tensors, as JSON values."""
        return {
            "point": self.point,
            "edit": self.edit,
            "heads": self.heads if self.heads == "all" else [list(head) for head in self.heads],
            "layers": None if self.layers is None else list(self.layers),
            "positions": None if self.positions is None else list(self.positions),
            "keys": list(self.keys) if isinstance(self.keys, tuple) else None if self.keys is None else str(self.keys),
            "term": self.term,
            "factor": self.factor,
            "values": None if self.values is None else self.values.about,
            "stack": self.stack,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, tensors included: the same change, the same digest."""
        tensors = [each.digest for each in (self.values, self.keys) if isinstance(each, Values)]
        return hashlib.sha256(json.dumps([self.facts(), tensors], sort_keys=True).encode()).hexdigest()


def checked_heads(heads: Any) -> tuple[Head, ...] | Literal["all"]:
    """A selection of heads as a value; `InputError` for what is none."""
    if isinstance(heads, str):
        if heads == "all":
            return "all"
        raise InputError(f'`heads` must be "all" or a list of (layer, head); got {heads!r}.')
    try:
        pairs = tuple((layer, head) for layer, head in heads)
        if not all(isinstance(number, int) and not isinstance(number, bool) for pair in pairs for number in pair):
            raise TypeError
    except (TypeError, ValueError):
        raise InputError(f'`heads` must be "all" or a list of (layer, head); got {heads!r}.') from None
    if not pairs:
        raise InputError("`heads` must name at least one head; got an empty list.")
    return tuple(dict.fromkeys(pairs))


def _numbers(name: str, numbers: Iterable[Any] | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    found = tuple(numbers)
    if not found or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
        raise InputError(f"`{name}` must be a list of numbers from 0 on; got {list(found)!r}.")
    return tuple(dict.fromkeys(found))


def _keys(keys: Any) -> tuple[int, ...] | Literal["first", "special"] | Values:
    if keys == "first" if isinstance(keys, str) else False:
        return "first"
    if isinstance(keys, str):
        if keys == "special":
            return "special"
        raise InputError(f'`keys` must be "first", "special", positions, or a mask [batch key]; got {keys!r}.')
    if isinstance(keys, torch.Tensor):
        if keys.dtype != torch.bool or keys.ndim != 2:
            raise InputError(f"a tensor of `keys` must be a mask [batch key]; got {keys.dtype} {list(keys.shape)}.")
        return Values({0: keys}, f"mask of {int(keys.sum())} keys in {len(keys)} texts")
    numbers = _numbers("keys", keys)
    assert numbers is not None
    return numbers


def _values(values: Values | Mapping[int, Tensor]) -> Values:
    return values if isinstance(values, Values) else Values(dict(values))


def _stack(stack: str) -> str:
    return "" if stack == "self" else stack


def _shown(numbers: tuple[int, ...] | Values) -> str:
    return str(numbers) if isinstance(numbers, Values) else ", ".join(map(str, numbers))
