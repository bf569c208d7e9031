"""Records the origin of a result: model, weights, inputs, hooks, options and versions."""

import hashlib
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from typing import Any, Self

from ..draw.text import short_name
from ..errors import InputError
from ..maths.copies import copies_of, distinct_of
from .codec import packed, unpacked

_PACKAGES = ("attnmech", "torch", "transformers", "transformer-lens")

_OF_CORPUS = ("corpus", "shard")  # the options that say which documents a result covers

_OF_SELECTION = ("heads", "layers", "reducers", "proof")
"""The options that say what was measured, which other statistics were measured with it, and how it was proved."""


@cache
def _versions() -> Mapping[str, str]:
    return {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()}


@dataclass(frozen=True)
class Provenance:
    """The origin of a result, in enough detail to decide whether two results may be compared."""

    model: str
    weights: str
    """SHA-256 of the model's config and parameters."""
    inputs: str
    """SHA-256 of all inputs of the model."""
    edits: tuple[str, ...]
    """The points at which hooks were active, such as "pattern 3"; a result with hooks is not the plain model's."""
    tokens: tuple[tuple[str, ...], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: dict(_versions()))
    copies: tuple[int, ...] = ()
    """For each text, the number of the first text that is the same; empty if all differ, or for a corpus."""

    @property
    def short_name(self) -> str:
        """The model's name as headings show it."""
        return short_name(self.model)

    def distinct(self, texts: int) -> int:
        """The number of texts if copies count once."""
        return distinct_of(self.copies, texts)

    def to_dict(self) -> dict[str, Any]:
        """The provenance as plain JSON values."""
        return packed(self)[1]

    @property
    def entries(self) -> dict[str, str]:
        """The entries that a page shows, by name."""
        return {
            "model": self.model,
            "config and weights (SHA-256)": self.weights,
            "inputs (SHA-256)": self.inputs,
            "hooks in force": ", ".join(self.edits) or "none",
            **{name: _in_words(value) for name, value in self.options.items()},
            **self.versions,
        }

    def same_texts(self, other: "Provenance") -> bool:
        """Whether both results are on the same texts: the same token ids, or the same shards of one corpus."""
        if self.inputs == other.inputs:
            return True
        corpora = [origin.options.get("corpus") for origin in (self, other)]
        return corpora[0] is not None and corpora[0] == corpora[1] and self._documents == other._documents

    @property
    def _documents(self) -> list[tuple[int, int]]:
        """The shards (k, n) of its corpus; (0, 1) if together they are the whole corpus."""
        shards = sorted(self.shards)
        return [(0, 1)] if sum(Fraction(1, n) for _, n in shards) == 1 else shards

    @property
    def shards(self) -> list[tuple[int, int]]:
        """The disjoint shards (k, n) of a corpus that a result covers."""
        shards = self.options["shard"]
        return [(int(k), int(n)) for k, n in (shards if isinstance(shards[0], list | tuple) else [shards])]

    @classmethod
    def of_shards(cls, parts: "Sequence[Provenance]") -> "Provenance":
        """The provenance of a result over several shards of one corpus; `InputError` if documents would count twice."""
        shards: list[tuple[int, int]] = []
        for part in parts:
            corpus, ours = (str(one.options.get("corpus", "")) for one in (part, parts[0]))
            if not corpus:
                raise InputError(
                    f"results can be merged only if their corpus is known; the result on {part.model!r} was measured "
                    f"on texts run together, or saved by a version that did not record the corpus. Measure it again."
                )
            if corpus != ours:
                raise InputError(
                    f"only shards of the same corpus can be merged; got two, with the SHA-256 {ours[:12]}… and "
                    f"{corpus[:12]}…. Give the same corpus to every call, each with its shard=(k, n)."
                )
            for k, n in part.shards:
                for other_k, other_n in shards:
                    if (k - other_k) % math.gcd(n, other_n) == 0:
                        raise InputError(
                            f"only disjoint shards can be merged; {(other_k, other_n)} and {(k, n)} share documents."
                        )
                shards.append((k, n))
        hashes = "".join(sorted(part.inputs for part in parts))
        options = {**parts[0].options, "shard": [list(shard) for shard in shards]}
        return replace(parts[0], inputs=hashlib.sha256(hashes.encode()).hexdigest(), options=options)

    def minus(self, other: "Provenance") -> "Provenance":
        """The provenance of a difference: the shared entries, and "one − other" where the two differ."""

        def both(one: Any, two: Any) -> Any:
            return one if one == two else f"{_in_words(one)} − {_in_words(two)}"

        edits, others = (", ".join(origin.edits) or "none" for origin in (self, other))
        names = dict.fromkeys((*self.options, *other.options))
        texts = range(max(len(self.copies), len(other.copies)))
        mine, yours = self.copies or texts, other.copies or texts
        return Provenance(
            both(self.model, other.model),
            both(self.weights, other.weights),
            both(self.inputs, other.inputs),
            self.edits if edits == others else (both(edits, others),),
            self.tokens if self.tokens == other.tokens else (),
            {name: both(self.options.get(name), other.options.get(name)) for name in names},
            # In a copy of a pair, both texts are copies.
            copies=copies_of(zip(mine, yours, strict=True)) if self.same_texts(other) else (),
        )

    def versus(self, other: "Provenance") -> str:
        """How two results differ, in a few words: "model demo − gpt2, inputs 1f3a… − 77b0…"."""
        one, two = self.short_name, other.short_name
        differing: dict[str, tuple[Any, Any]] = {
            "model": (one, two) if one != two else (self.model, other.model),
            "weights": (self.weights, other.weights),
            "inputs": (self.inputs, other.inputs),
            "hooks": (", ".join(self.edits) or "none", ", ".join(other.edits) or "none"),
        }
        if self.model != other.model:
            del differing["weights"]
        if self.same_texts(other):
            del differing["inputs"]
        names = [name for name in (*self.options, *other.options) if name not in (*_OF_CORPUS, *_OF_SELECTION)]
        differing |= {name: (self.options.get(name), other.options.get(name)) for name in names}
        words = [f"{name} {_short(one)} − {_short(two)}" for name, (one, two) in differing.items() if one != two]
        return ", ".join(words) or "same model and inputs"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The provenance from the values that `to_dict` returned."""
        origin: Self = unpacked(cls, {}, values)
        return origin


def _in_words(value: Any) -> str:
    """An option as a reader's text.

    >>> _in_words([["FocusReducer", {"last": "8"}]]), _in_words({"a": [1, 2], "b": None}), _in_words(True)
    ('FocusReducer, last: 8', 'a: 1, 2; b: none', 'yes')
    """
    if value is None or isinstance(value, bool):
        return "none" if value is None else "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_in_words(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        nested = any(isinstance(entry, list | tuple) for entry in value)
        return ("; " if nested else ", ").join(map(_in_words, value)) or "none"
    return str(value)


def _short(value: Any) -> str:
    text = _in_words(value)
    return f"{text[:8]}…" if re.fullmatch("[0-9a-f]{64}", text) else text
