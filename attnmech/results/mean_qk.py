"""Holds the mean query and key of every head on a corpus, at which scores can be split.

Formulas: docs/formulas.md#centred-terms.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import pandas as pd
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ..basics.arguments import member, shown
from ..basics.fields import check_fields, check_layers
from ..basics.nouns import counted
from ..errors import InputError
from .by_layer import table_of
from .provenance import Provenance
from .result import Result


@dataclass(frozen=True, repr=False, eq=False)
class MeanQK(Result):
    """Sums of queries and keys over the texts of a corpus, rotated back: q_i = R_i⁻¹ q_rot,i.

    With `per_position`, a place is a position, counted from the first token of a text; otherwise the only place is 0.
    """

    _SUBTRACT = "subtract two results that were split at these means, such as two shares of variance"

    per_position: bool
    """Whether there is one mean for each head and position, or one for each head."""
    layers: tuple[int, ...]
    """The layers measured, in the order of the axis `layer`."""
    n_layers: int
    """The model's number of layers."""
    stack: str
    """The stack of the model; empty if the model has only one."""
    query_sums: Float64[Tensor, "layer place head d_head"]
    key_sums: Float64[Tensor, "layer place kv_head d_head"]
    query_counts: Int[Tensor, " place"]
    """The number of queries summed."""
    key_counts: Int[Tensor, " place"]
    texts: Int[Tensor, " document"]
    """The digest of each text (`Batch.digests`), sorted, so that a text among them can be taken out before it is
    split."""
    provenance: Provenance

    def check(self) -> None:
        """Raises an exception of any kind if the numbers are not those that `save` wrote."""
        self._check()

    def _check(self) -> None:
        check_fields(self, {"layer": len(self.layers)})
        check_layers(self.layers, self.n_layers)

    @property
    def mean_query(self) -> Float64[Tensor, "layer place head d_head"]:
        """q̄; NaN where nothing was summed."""
        return self.query_sums / self.query_counts[:, None, None]

    @property
    def mean_key(self) -> Float64[Tensor, "layer place kv_head d_head"]:
        """k̄; NaN where nothing was summed."""
        return self.key_sums / self.key_counts[:, None, None]

    def sums(self, role: str, layer: int) -> tuple[Float64[Tensor, "place head d_head"], Int[Tensor, " place"]]:
        """The sums of the queries ("query") or keys ("key") of a layer, and the number of vectors in each sum."""
        every, counts = (self.query_sums, self.query_counts) if role == "query" else (self.key_sums, self.key_counts)
        return every[self.layers.index(member("layer", layer, self.layers, "the layers of the means"))], counts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the provenance's text."""
        digest = hashlib.sha256(f"{self.per_position} {self.layers} {self.stack} {self.provenance.weights}".encode())
        for value in (self.query_sums, self.key_sums, self.query_counts, self.key_counts, self.texts):
            digest.update(f"{tuple(value.shape)}".encode() + value.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeanQK) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def times(self, digests: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The number of times each text is part of the reference."""
        low, high = (torch.searchsorted(self.texts, digests, right=right) for right in (False, True))
        return high - low

    def merged(self, *others: Self) -> Self:
        """The means over several shards of a corpus, as if they had been one run.

        Raises `InputError` for shards that share documents or come from two corpora, and for means of another model,
        other layers, options or hooks.
        """
        parts = (self, *others)
        for part in parts:
            if not isinstance(part, MeanQK):
                raise InputError(f"means can only be merged with means; got {shown(part)}.")
            if part._kind != self._kind:
                raise InputError(
                    f"merged means must have the same model, layers, options and hooks; got {self!r} and {part!r}."
                )
        places = max(len(part.query_counts) for part in parts)
        sums: dict[str, Any] = {
            name: torch.stack([padded(getattr(part, name), places, axis) for part in parts]).sum(dim=0)
            for name, axis in {"query_sums": 1, "key_sums": 1, "query_counts": 0, "key_counts": 0}.items()
        }
        return replace(
            self,
            **sums,
            texts=torch.cat([part.texts for part in parts]).sort().values,
            provenance=Provenance.of_shards([part.provenance for part in parts]),
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        origin = self.provenance
        run = origin.weights, origin.edits, origin.options.get("bos"), origin.options.get("truncate", False)
        return self.per_position, self.layers, self.stack, self.query_sums.shape[2:], run

    def to_frame(self) -> pd.DataFrame:
        """One row per head and place: the norms of the mean query and key, and the number of vectors in each mean."""
        group = self.query_sums.shape[2] // self.key_sums.shape[2]
        query, key = self.mean_query.norm(dim=-1), self.mean_key.norm(dim=-1).repeat_interleave(group, dim=2)
        columns = {"mean_query_norm": query.transpose(1, 2), "mean_key_norm": key.transpose(1, 2)}
        columns |= {"queries": self.query_counts.long(), "keys": self.key_counts.long()}
        axes = {"layer": self.layers, "head": range(query.shape[2]), "position": range(query.shape[1])}
        frame = table_of(axes, columns)
        return frame if self.per_position else frame.drop(columns="position")

    def __repr__(self) -> str:
        over = f"{int(self.query_counts.sum())} queries of {counted(len(self.texts))}"
        by = "position" if self.per_position else "head"
        return f"MeanQK({self.provenance.model!r}, by {by}, {len(self.layers)} layers: {over}, {self.digest[:8]})"

    def __str__(self) -> str:
        where = " at each position" if self.per_position else ""
        return f"the means of {counted(len(self.texts))}{where} ({self.digest[:8]})"


def padded(value: Tensor, length: int, axis: int) -> Tensor:
    """The value with zeros at the end of an axis, up to a length."""
    shape = list(value.shape)
    shape[axis] = length - shape[axis]
    return torch.cat((value, value.new_zeros(shape)), dim=axis)
