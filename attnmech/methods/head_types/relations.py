"""Finds heads that attend from a word to a related word, such as from a verb to its subject.

A head's accuracy is compared with the best fixed offset on the same pairs (docs/formulas.md#head-types).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import flag, integer, listed, option, shown
from ...basics.nouns import counted
from ...basics.public import public
from ...batch import Batch, every_bos
from ...draw.section import Section
from ...draw.text import percent
from ...errors import InputError
from ...maths.float64 import as_float64
from ...maths.intervals import LEAST_TEXTS, TextMeans
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import table_of
from ...results.provenance import Provenance
from ...results.table import AgainstBaseline
from ...runs.words import words_of

LEAST_PAIRS: Final = 5  # a claim needs at least this number of labelled pairs of the relation
LEAST_ACCURACY: Final = 0.5  # a claim needs the labelled key to be the highest in at least this share of pairs


@public
def relations(
    model: HookedModel,
    inputs: Iterable[Any],
    *,
    before: bool = False,
    layers: Iterable[int] | None = None,
    bos: bool | None = None,
) -> "Relations":
    """Measures how often each head attends most to the labelled word, for each relation.

    The accuracy is the share of pairs in which the labelled key gets more of the query's attention than any other key;
    the query itself and special tokens do not compete. The baseline is the best fixed offset: the most frequent
    distance of the relation's labelled keys. A relation is claimed for a head if the simultaneous 95 % interval of
    accuracy − baseline over texts, for all heads and relations together, is above 0, and the accuracy is at least 0.5.

    >>> import attnmech as am
    >>> from attnmech.demo.text import labelled
    >>> relations = am.relations(am.load(), labelled(12))
    >>> relations.accuracy("bracket").shape
    torch.Size([4, 8])

    Args:
        model: the model.
        inputs: labelled texts, (text, query, key, relation). If the text is a string, query and key are token positions
            as the model sees them, including the first token. If the text is a list of words, each with its leading
            space, query and key are word positions. The attention of a word is the mean over its tokens; the attention
            that a word receives is the sum over its tokens.
        before: whether to measure from the word (or token) before the query, where a decoder predicts the query. Pairs
            whose key is that word or a later one are left out.
        layers: all by default.
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        Accuracies, baselines and claims, by relation, layer and head.

    Raises:
        InputError: for a label outside its text, at a key that the query cannot see, or at the query itself; for lists
            of words, if the tokenizer does not report where its tokens are; for a model with an encoder and a decoder;
            for `before` in a bidirectional model, or if `before` leaves no pair of a relation.

    Source: Clark et al. 2019, "What Does BERT Look At?"

    """
    require_model(model)
    if len(model.stacks) > 1:
        raise InputError("relations need a model with one stack; this model has an encoder and a decoder.")
    if flag("before", before) and not model.causal:
        raise InputError("`before` is for decoders: this model is bidirectional, so no word predicts the next one.")
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, "")))
    model.points.resolve(["pattern"], chosen, model.refused)
    texts = _by_text(listed("inputs", inputs, "a list of (text, query, key, relation)"))
    names = tuple(dict.fromkeys(name for pairs in texts.values() for _, _, name in pairs))
    shape = len(names), len(chosen), model.n_heads, len(texts)
    correct, mass = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    pairs = torch.zeros(len(names), len(texts), dtype=torch.float64)
    offsets: list[list[tuple[int, int]]] = [[] for _ in names]
    digest, labels = hashlib.sha256(), hashlib.sha256()
    begin: list[bool | None] = []
    distinct: dict[int, int] = {}
    seen: set[tuple[Any, ...]] = set()
    for text, labels_of_text in texts.items():
        read = _Read.of(model, text, chosen, bos)
        digest.update(read.batch.ids.cpu().numpy().tobytes())
        begin.append(read.batch.bos)
        number = distinct.setdefault(int(read.batch.digests), len(distinct))
        for labelled_query, key, name in labels_of_text:
            read.check(text, labelled_query, key)
            query = labelled_query - before
            if before and key >= query:
                continue
            seen.add((number, () if isinstance(text, str) else text, query, key, name))
            labels.update(f"{number} {query} {key} {name!r}\n".encode("utf-8", "surrogatepass"))
            place = names.index(name)
            others = read.pattern[:, :, query].masked_fill(~read.counted, -1.0)
            others[..., [query, key]] = -1.0
            correct[place, :, :, number] += read.pattern[:, :, query, key] > others.amax(dim=-1)
            mass[place, :, :, number] += as_float64(read.pattern[:, :, query, key])
            pairs[place, number] += 1
            offsets[place].append((number, query - key))
    for name, own in zip(names, offsets, strict=True):
        if not own:
            raise InputError(
                f"before=True leaves no pair of the relation {shown(name)}: in each, the key is the word right before "
                "the query. Leave its labels out, or give before=False."
            )
    best, by_offset = _best_offsets(offsets, len(distinct))
    options = {
        "layers": list(chosen), "bos": every_bos(begin), "before": before, "relations": list(names),
        "labels": labels.hexdigest(), "distinct": len(seen),
    }  # fmt: skip
    return Relations(
        names=names,
        layers=chosen,
        n_layers=len(model.stack(None).places),
        correct=correct[..., : len(distinct)],
        mass_sums=mass[..., : len(distinct)],
        pairs=pairs[:, : len(distinct)],
        offsets=best,
        by_offset=by_offset,
        provenance=model.provenance(digest.hexdigest(), (), options),
    )


def _by_text(labelled: Sequence[Any]) -> dict[str | tuple[str, ...], list[tuple[int, int, str]]]:
    by_text: dict[str | tuple[str, ...], list[tuple[int, int, str]]] = {}
    for number, label in enumerate(labelled):
        try:
            text, query, key, name = label
            places = integer(query), integer(key)
        except (TypeError, ValueError):
            raise InputError(f"label {number} must be (text, query, key, relation); got {shown(label)}.") from None
        words = isinstance(text, Sequence) and all(isinstance(word, str) for word in text)
        if not words:
            raise InputError(f"the text of label {number} must be a string or a list of words; got {shown(text)}.")
        if not isinstance(name, str):
            raise InputError(f"the relation of label {number} must be a name; got {shown(name)}.")
        by_text.setdefault(text if isinstance(text, str) else tuple(text), []).append((*places, name))
    if not by_text:
        raise InputError("`inputs` must hold at least one (text, query, key, relation); got none.")
    return by_text


@dataclass(frozen=True)
class _Read:
    """One text as the model read it, with attention between the units of its labels: tokens or words."""

    batch: Batch
    pattern: Float[Tensor, "layer head query key"]
    counted: Bool[Tensor, " key"]  # all keys except special tokens and words of special tokens
    causal: bool

    @classmethod
    def of(cls, model: HookedModel, text: str | tuple[str, ...], layers: Sequence[int], bos: bool | None) -> "_Read":
        whole = text if isinstance(text, str) else "".join(text)
        batch = model.encode(whole, bos=bos)
        ran = model.run(batch, ["pattern"], layers=layers)
        pattern = torch.stack([ran["pattern", layer][0].float().cpu() for layer in layers])
        if isinstance(text, str):
            return cls(batch, pattern, ~batch.is_special[0].cpu(), model.causal)
        member = words_of(model, batch, text)
        mean = member / member.sum(dim=-1, keepdim=True)
        ordinary = (member > 0) & ~batch.is_special[0].cpu()
        return cls(batch, mean @ pattern @ member.T, ordinary.any(dim=-1), model.causal)

    def check(self, text: str | tuple[str, ...], query: int, key: int) -> None:
        length = self.pattern.shape[-1]
        units, quoted = ("tokens" if isinstance(text, str) else "words"), shown(text)
        for name, place in (("query", query), ("key", key)):
            if not 0 <= place < length:
                raise InputError(f"{name} {place} is outside the {length} {units} of {quoted}.")
        if query == key:
            raise InputError(f"query and key of a label must differ; got {query} twice in {quoted}.")
        if self.causal and key > query:
            raise InputError(
                f"query {query} cannot see the later key {key} in {quoted}; give the later one as the query."
            )
        if not self.counted[key]:
            raise InputError(f"key {key} of {quoted} is a special token, which is left out.")


def _best_offsets(
    offsets: Sequence[Sequence[tuple[int, int]]], texts: int
) -> tuple[Int[Tensor, " relation"], Float[Tensor, "relation text"]]:
    """The most frequent offset of the keys of each relation, and the number of keys at it in each text."""
    best, hits = [], torch.zeros(len(offsets), texts, dtype=torch.float64)
    for place, pairs in enumerate(offsets):
        counts = pd.Series([offset for _, offset in pairs]).value_counts()
        best.append(int(min(counts.index[counts == counts.max()], key=abs)))
        for number, offset in pairs:
            hits[place, number] += offset == best[-1]
    return torch.tensor(best), hits


@dataclass(frozen=True, repr=False)
class Relations(AgainstBaseline):
    """How often each head attends most to the labelled key, for each relation."""

    _TITLE = "Relations found by the heads of {model}"
    _SUBTRACT = 'subtract what you compare: one.accuracy("bracket") - other.accuracy("bracket")'
    _MEASURE = "accuracy"
    _AXES: ClassVar = {"relation": "names", "measured": "layers"}

    names: tuple[str, ...]
    """The relations, in the order of the axis `relation`."""
    layers: tuple[int, ...]
    n_layers: int
    correct: Float[Tensor, "relation measured head text"]
    """The number of pairs in each text in which the labelled key has the highest attention."""
    mass_sums: Float[Tensor, "relation measured head text"]
    """The attention on labelled keys, summed over pairs."""
    pairs: Float[Tensor, "relation text"]
    offsets: Int[Tensor, " relation"]
    """The best fixed offset of each relation: query − key."""
    by_offset: Float[Tensor, "relation text"]
    """The number of pairs in each text whose labelled key is at the best fixed offset."""
    provenance: Provenance

    def accuracy(self, relation: str) -> Float[Tensor, "layer head"]:
        """The share of pairs in which the labelled key has the highest attention."""
        return self._by_layer(self._accuracy[self._place(relation)])

    @property
    def baselines(self) -> dict[str, float]:
        """For each relation, the share of pairs whose key is at the best fixed offset."""
        return dict(zip(self.names, self._baseline.flatten().tolist(), strict=True))

    @property
    def quantities(self) -> tuple[str, ...]:
        """The relations: each has accuracy − baseline, with intervals for all heads and relations together."""
        return self.names

    def _baseline_in_words(self, name: str) -> str:
        return percent(self.baselines[name], 0)

    @property
    def _n_texts(self) -> int:
        return self.pairs.shape[1]

    @cached_property
    def claims(self) -> pd.DataFrame:
        """One row per claim, the highest accuracy first: baseline, best offset, the interval of accuracy − baseline
        (`excess_low`, `excess_high`) for all heads and relations together, and pairs.
        """
        low, high = self._excess.simultaneous()
        frame = self._rows(
            accuracy=self._accuracy,
            baseline=self._baseline,
            offset=self.offsets[:, None, None],
            excess_low=low,
            excess_high=high,
            pairs=self._count.long(),
        )
        claimed = (low > 0) & (self._accuracy >= LEAST_ACCURACY) & (self._count >= LEAST_PAIRS)
        claims = frame.loc[claimed.flatten().numpy(), _COLUMNS]
        return claims.sort_values("accuracy", ascending=False, ignore_index=True)

    def to_frame(self) -> pd.DataFrame:
        """One row per relation and head: relation, layer, head, accuracy, baseline, mass, pairs."""
        mass = self.mass_sums.sum(dim=-1) / self._count
        return self._rows(accuracy=self._accuracy, baseline=self._baseline, mass=mass, pairs=self._count.long())

    def _rows(self, **columns: Tensor) -> pd.DataFrame:
        axes = {"relation": self.names, "layer": self.layers, "head": range(self.correct.shape[2])}
        return table_of(axes, columns)

    @property
    def _count(self) -> Float[Tensor, "relation 1 1"]:
        return self.pairs.sum(dim=-1)[:, None, None]

    @property
    def _accuracy(self) -> Float[Tensor, "relation measured head"]:
        return self.correct.sum(dim=-1) / self._count

    @property
    def _baseline(self) -> Float[Tensor, "relation 1 1"]:
        return self.by_offset.sum(dim=-1)[:, None, None] / self._count

    @property
    def lead(self) -> str:
        pairs, named, texts = int(self.pairs.sum()), len(self.names), self.pairs.shape[1]
        labelled = counted(pairs, self.provenance.options.get("distinct"), "labelled pair")
        data = f"{labelled} of {counted(named, noun='relation')} in {counted(texts)}"
        if texts < LEAST_TEXTS:
            return f"{data}: too few texts for a claim, which needs {LEAST_TEXTS} or more."
        best = self.claims.drop_duplicates("relation")
        heads = [
            f"L{row['layer']}H{row['head']} for {row['relation']} ({percent(row['accuracy'], 0)} of pairs; best fixed "
            f"offset: {percent(row['baseline'], 0)})"
            for row in best.to_dict("records")
        ]
        enough = (self.pairs.sum(dim=-1) >= LEAST_PAIRS) & ((self.pairs > 0).sum(dim=-1) >= LEAST_TEXTS)
        few = [name for name, sufficient in zip(self.names, enough.tolist(), strict=True) if not sufficient]
        short = f" Too few pairs or texts for a claim: {', '.join(few)}." if few else ""
        finding = ": no head clearly exceeds the best fixed offset."
        if heads:
            finding = f". Heads that find the labelled key: {', '.join(heads)}."
        return f"{data}{finding if heads or bool(enough.any()) else '.'}{short}"

    def _sections(self) -> "Sequence[Section]":
        return [
            Section(
                f"{name[:1].upper()}{name[1:]}",
                "Each cell is one head: the share of pairs in which the head attends most to the labelled key, minus "
                f"the share that the best fixed offset gets right (here {abs(offset)} "
                f"{'back' if offset > 0 else 'ahead'}). Pale values are not clear among all heads and relations.",
                {f"relation-{place}": self.plot(name)},
                f'relations.plot("{name}")',
            )
            for place, (name, offset) in enumerate(zip(self.names, self.offsets.tolist(), strict=True))
        ]

    @cached_property
    def _excess(self) -> TextMeans:
        return TextMeans.of_ratio(self.correct - self.by_offset[:, None, None], self.pairs[:, None, None])

    def _place(self, relation: str) -> int:
        return self.names.index(option("relation", relation, self.names))


_COLUMNS: Final = ["layer", "head", "relation", "accuracy", "baseline", "offset", "excess_low", "excess_high", "pairs"]
