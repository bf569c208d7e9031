"""Defines the intervention: an edit, with the heads, layers and rows on which it acts.

>>> print(Intervention.zero([(3, 5)]))
z of L3H5 becomes 0
>>> print(Intervention.scale("position"))
position in the scores of all heads is dropped

An intervention is only a description: `model.intervene(...)` applies it within a `with` block, and sweeps such as
`am.ablate_heads` run many interventions at once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from torch import Tensor

from ..basics.arguments import string
from ..basics.files import path_ending, path_of
from ..basics.lens_names import missing_name
from ..basics.public import public
from ..errors import InputError
from ..results.codec import packed, unpacked
from ..results.mean_qk import MeanQK
from ..results.provenance import Provenance
from ..results.tensor_file import check_whole, read_tensors, write_tensors
from .edits import (
    EDITS,
    Add,
    Attend,
    Cut,
    Edit,
    PointEdit,
    RemoveKeys,
    Replace,
    ReplacePattern,
    ReplaceValues,
    Reweight,
    Scale,
    StreamOnly,
    Zero,
    ZeroValues,
)
from .selection import (
    Head,
    Heads,
    Keys,
    Positions,
    checked_heads,
    checked_keys,
    checked_numbers,
    checked_positions,
    checked_span,
    listed_numbers,
)
from .values import Values, checked_values


class _Named(type):
    """Says, for a name that `Intervention` does not have, which line does the same."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            raise AttributeError(missing_name("Intervention", name, {}), name=name, obj=cls)


HEAD_POINTS: Final = ("z", "pattern", "scores", "v", "q", "k")  # with a head axis; at others, whole layers change


@public
@dataclass(frozen=True)
class Intervention(metaclass=_Named):
    """One change to a run: an edit, in some heads or layers and rows. Make it with the class methods.

    Interventions compare, print and hash as values; `save` and `load` store them in files. Several can act together:
    `model.intervene(one, other)`.
    """

    edit: Edit
    heads: tuple[Head, ...] | Literal["all"] = "all"
    layers: tuple[int, ...] | None = None
    """The layers, at points without a head axis; None for all."""
    positions: tuple[int, ...] | None = None
    """The rows (queries) of each text, padding excluded: 0 is its first, -1 its last; None for all."""
    stack: str = ""
    """The label of the stack, in a model with several."""

    def __post_init__(self) -> None:
        if not isinstance(self.edit, Edit):
            raise InputError(f"`edit` must be an edit, as am.Intervention.zero(...) makes it; got {self.edit!r}.")
        checked = {
            "heads": () if self.heads == () else checked_heads(self.heads),
            "layers": None if self.layers is None else checked_numbers("layers", self.layers),
            "positions": checked_positions(self.positions),
            "stack": "" if string("stack", self.stack) == "self" else self.stack,
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.positions is not None and not self.edit.BY_POSITION:
            raise InputError(f"{type(self.edit).__name__} acts on all rows, so it takes no `positions`.")
        wrong = self.layers is not None if self.by_head else self.heads not in ((), "all")
        if wrong or (self.by_head and self.heads == ()):
            raise InputError(
                f"heads can be selected at {', '.join(HEAD_POINTS)}, only whole layers elsewhere; got heads "
                f"{self.heads!r} and layers {self.layers!r} at {self.point!r}."
            )

    @classmethod
    def zero(cls, heads: Heads, *, positions: Positions | None = None, stack: str = "") -> Self:
        """z of the heads becomes 0: they write nothing (b_O stays).

        Args:
            heads: a list of (layer, head), or "all".
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        return cls(Zero(), checked_heads(heads), positions=checked_positions(positions), stack=stack)

    @classmethod
    def replace(
        cls,
        heads: Heads,
        values: Values | Mapping[int, Tensor] | Tensor,
        *,
        point: Literal["z", "pattern", "q", "k", "v"] = "z",
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """Replaces z (or another point) of the heads by values, such as a mean, or the same point in another run.

        >>> acts = model.run(other, points=["z"])                                       # doctest: +SKIP
        >>> Intervention.replace([(3, 5)], acts["z", 3])                                 # doctest: +SKIP

        Args:
            heads: a list of (layer, head), or "all"; at k and v, kv heads (layer, kv_head), so a change reaches every
                query head that shares the kv head.
            values: tensors by layer, such as those of `am.mean_z(model, texts)`; or one tensor, for the layers of the
                heads.
            point: "z", "pattern", "q", "k" or "v".
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        chosen = checked_heads(heads)
        new = checked_values(values, _layers_of(chosen))
        edit = ReplacePattern(new) if point == "pattern" else Replace(new, point)
        return cls(edit, chosen, positions=checked_positions(positions), stack=stack)

    @classmethod
    def add(
        cls,
        point: Literal["z", "q", "k", "v", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"],
        values: Values | Mapping[int, Tensor] | Tensor,
        *,
        heads: Heads | None = None,
        factor: float = 1.0,
        layers: Iterable[int] | None = None,
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """Adds `factor` times `values` to a point, in some heads or, at points of the stream, in whole layers.

        >>> import torch
        >>> print(Intervention.add("resid_post", torch.ones(8), layers=[2], factor=4.0))
        4 × given values added to resid_post of L2

        Args:
            point: the point to which they are added.
            values: a vector or a tensor with the axes of the point, for each layer of `layers` or `heads`; or tensors
                by layer.
            heads: at points with a head axis: a list of (layer, head), or "all"; at k and v kv heads.
            factor: multiplies the values.
            layers: the layers, at points of the stream.
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        chosen = () if heads is None else checked_heads(heads)
        places = None if layers is None else checked_numbers("layers", layers)
        new = checked_values(values, _layers_of(chosen) if heads is not None else places)
        return cls(Add(new, point, factor), chosen, places, checked_positions(positions), stack)

    @classmethod
    def attend(
        cls,
        heads: Heads,
        to: Literal["uniform", "self", "first"],
        *,
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """The pattern becomes uniform over the visible keys, or puts all attention on the token itself or the first
        token.

        Removed keys do not count as visible; with to="first", rows attend to the first token even if the mask hides it.

        Args:
            heads: a list of (layer, head), or "all".
            to: "uniform", "self" or "first".
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        return cls(Attend(to), checked_heads(heads), positions=checked_positions(positions), stack=stack)

    @classmethod
    def reweight(
        cls, heads: Heads, keys: Keys, factor: float, *, positions: Positions | None = None, stack: str = ""
    ) -> Self:
        """Multiplies the weights of some keys in the pattern by `factor`; each row is then divided by its new sum.

        The same as adding ln(`factor`) to the scores of these keys before the softmax. A factor of 0 is
        `remove_keys`. What a sink takes of a row counts as a further key.

        >>> print(Intervention.reweight([(3, 5)], [2, 3], 10.0))
        attention of L3H5 to keys 2, 3 is multiplied by 10

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's special tokens), a list of positions of each text, padding
                excluded (0 is its first, -1 its last), or a mask `[batch key]` over the columns of a run.
            factor: 0 or more; above 1, the heads attend more to these keys.
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.

        Source: Zhang et al. 2023 (PASTA, which multiplies the weights of all other keys by 1 / `factor`).
        """
        return cls(
            Reweight(checked_keys(keys), factor), checked_heads(heads), positions=checked_positions(positions),
            stack=stack,
        )  # fmt: skip

    @classmethod
    def remove_keys(cls, heads: Heads, keys: Keys, *, positions: Positions | None = None, stack: str = "") -> Self:
        """Hides the keys from the heads: the softmax is recomputed without them.

        A row that is left without keys attends to nothing.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's special tokens), a list of positions of each text, padding
                excluded (0 is its first, -1 its last), or a mask `[batch key]` over the columns of a run.
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        return cls(
            RemoveKeys(checked_keys(keys)), checked_heads(heads), positions=checked_positions(positions), stack=stack
        )

    @classmethod
    def stream_only(cls, heads: Heads, *, first: int = 4, last: int = 256, stack: str = "") -> Self:
        """The heads see the first keys of a text and the last keys up to the row's own, as from a cache that keeps no
        others.

        >>> print(Intervention.stream_only([(3, 5)], last=64))
        keys between the first 4 and the last 64 removed from the pattern of L3H5

        The softmax is recomputed without the keys between. Keys after the row, where a model sees any, stay.

        Args:
            heads: a list of (layer, head), or "all".
            first: the number of keys kept at the beginning of each text.
            last: the number of keys kept up to the row's own, which counts.
            stack: the stack, if the model has several.

        Source: StreamingLLM (Xiao et al. 2024); the streaming heads of DuoAttention (Xiao et al. 2025).
        """
        return cls(StreamOnly(first, last), checked_heads(heads), stack=stack)

    @classmethod
    def cut(cls, query_span: Sequence[int], key_span: Sequence[int], heads: Heads = "all", *, stack: str = "") -> Self:
        """Removes attention from the rows of one span to the keys of another; the softmax is taken without them.

        A row left without keys attends to nothing: its row of the pattern and its z are 0, which makes such rows easy
        to count. A sink keeps its part in the softmax. The spans must lie within every text.

        >>> print(Intervention.cut((6, 9), (0, 3), [(3, 5)]))
        attention of tokens 6 to 8 to tokens 0 to 2 cut in L3H5

        Args:
            query_span: the rows, (start, end), counted from the first token of each text.
            key_span: the keys, (start, end), counted in the same way.
            heads: a list of (layer, head), or "all".
            stack: the stack, if the model has several.
        """
        spans = checked_span("query_span", query_span), checked_span("key_span", key_span)
        return cls(Cut(*spans), checked_heads(heads), stack=stack)

    @classmethod
    def scale(
        cls, term: str, factor: float = 0.0, heads: Heads = "all", *, centre: MeanQK | None = None, stack: str = ""
    ) -> Self:
        """Multiplies a term of the score ledger by `factor`, before the softmax; 0 drops it.

        >>> print(Intervention.scale("key_bias", 0.5, [(0, 1)]))
        key_bias in the scores of L0H1 is multiplied by 0.5

        Args:
            term: a name in `am.decompose_scores(...).terms`: "query_key", "key_bias", "query_bias", "constant",
                "position" or, in DeBERTa, "content_to_position" or "position_to_content". A soft cap applies after
                scaling.
            factor: multiplies the term.
            heads: a list of (layer, head), or "all".
            centre: means from `am.mean_qk`; `term` is then a term of the scores split at them. In a model with rotary
                positions, `scale("position", 0, [(16, 0)], centre=means)` removes position from a previous-token head.
            stack: the stack, if the model has several.
        """
        return cls(Scale(term, factor, centre), checked_heads(heads), stack=stack)

    @classmethod
    def zero_values(cls, heads: Heads, keys: Keys, *, stack: str = "") -> Self:
        """Sets the values of the keys to 0 for these heads only: they attend as before, but read nothing from these
        keys.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's special tokens), a list of positions of each text, padding
                excluded (0 is its first, -1 its last), or a mask `[batch key]` over the columns of a run.
            stack: the stack, if the model has several.
        """
        return cls(ZeroValues(checked_keys(keys)), checked_heads(heads), stack=stack)

    @classmethod
    def replace_values(
        cls, heads: Heads, keys: Keys, values: Values | Mapping[int, Tensor] | Tensor, *, stack: str = ""
    ) -> Self:
        """Replaces the values of the keys for these heads only.

        Args:
            heads: a list of (layer, head), or "all".
            keys: "first", "special" (the tokenizer's special tokens), a list of positions of each text, padding
                excluded (0 is its first, -1 its last), or a mask `[batch key]` over the columns of a run.
            values: `[#batch #key head d_head]` or `[d_head]`, for each layer of the heads or by layer.
            stack: the stack, if the model has several.
        """
        chosen = checked_heads(heads)
        return cls(ReplaceValues(checked_keys(keys), checked_values(values, _layers_of(chosen))), chosen, stack=stack)

    @classmethod
    def stream(
        cls,
        point: Literal["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"],
        layers: Iterable[int],
        values: Values | Mapping[int, Tensor] | Tensor | None = None,
        *,
        positions: Positions | None = None,
        stack: str = "",
    ) -> Self:
        """Replaces the stream, or the output of attention or MLP, in some layers by `values`; the two outputs also by
        0.

        Args:
            point: the stream as it enters a layer ("resid_pre"), between attention and MLP ("resid_mid"), or as it
                leaves ("resid_post"); or "attn_out" or "mlp_out".
            layers: the layers.
            values: `[#batch #position d_model]` or `[d_model]`, for each layer or by layer; None for 0.
            positions: the rows of each text, padding excluded: 0 is its first, -1 its last; "last"; by default all.
            stack: the stack, if the model has several.
        """
        places = checked_numbers("layers", layers)
        edit = Zero(point) if values is None else Replace(checked_values(values, places), point)
        return cls(edit, (), places, checked_positions(positions), stack)

    @property
    def point(self) -> str:
        """The point at which it acts."""
        return self.edit.point

    @property
    def by_head(self) -> bool:
        """Whether it acts on heads rather than on whole layers."""
        return self.point in HEAD_POINTS

    @property
    def by_kv_head(self) -> bool:
        """Whether its heads are kv heads: edits at k and of v itself, not of the values that single heads read."""
        return self.point in ("k", "v") and isinstance(self.edit, PointEdit)

    @property
    def touches(self) -> tuple[int, ...] | None:
        """The layers in which it acts; None for all."""
        return _layers_of(self.heads) if self.by_head else self.layers

    def __str__(self) -> str:
        return f"{self.edit.sentence(self._heads_shown)}{self._positions_shown}"

    @property
    def _heads_shown(self) -> str:
        stack = f"{self.stack} " if self.stack else ""
        if not self.by_head:
            return stack + ("all layers" if self.layers is None else ", ".join(f"L{layer}" for layer in self.layers))
        kind = "kv heads" if self.by_kv_head else "heads"
        if self.heads == "all":
            return f"{stack}all {kind}"
        names = ", ".join(f"L{layer}H{head}" for layer, head in self.heads)
        if not self.by_kv_head:
            return f"{stack}{names}"
        return f"{stack}{'kv head' if len(self.heads) == 1 else 'kv heads'} {names}"

    @property
    def _positions_shown(self) -> str:
        if self.positions is None:
            return ""
        last = self.positions == (-1,)
        return " at the last position" if last else f" at positions {listed_numbers(self.positions)}"

    def save(self, path: str | Path) -> Path:
        """Writes the intervention to a .safetensors file."""
        tensors, edit = packed(self.edit)
        header = {"kind": type(self).__name__, "edit": type(self.edit).__name__, "facts": edit, "where": self._where}
        centre: MeanQK | None = getattr(self.edit, "centre", None)
        if centre is not None:
            header["provenance"] = centre.provenance.to_dict()
        return write_tensors(path_ending(path, ".safetensors"), tensors, header)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads an intervention that `save` wrote."""
        source = path_of(path)
        if not source.is_file():
            raise InputError(f"there is no file {source}.")
        check_whole(source)
        try:
            tensors, header = read_tensors(source)
            if header["kind"] != cls.__name__:
                raise ValueError("it is another kind of file")
            kind, facts = EDITS[header["edit"]], header["facts"]
            unknown = facts.keys() - {field.name for field in fields(kind)}  # type: ignore[arg-type]
            if unknown:
                raise ValueError(f"it has unknown fields: {', '.join(sorted(unknown))}")
            origin = {"provenance": Provenance.from_dict(header["provenance"])} if "provenance" in header else {}
            edit = unpacked(kind, tensors, facts, **origin)
            if "provenance" in header:
                edit.centre.check()
            loaded: Self = unpacked(cls, {}, header["where"], edit=edit)
            return loaded
        except Exception as error:
            raise InputError(f"{source} does not hold an intervention ({error}).") from error

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, tensors included; equal interventions have equal digests."""
        return hashlib.sha256(json.dumps([self._where, self.edit.digest], sort_keys=True).encode()).hexdigest()

    @property
    def _where(self) -> dict[str, Any]:
        """The fields other than the edit."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "edit"}


def _layers_of(heads: tuple[Head, ...] | Literal["all"]) -> tuple[int, ...] | None:
    """The layers of some heads; None if all heads are meant."""
    return None if heads == "all" else tuple(sorted({layer for layer, _ in heads}))
