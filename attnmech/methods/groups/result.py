"""Measures whether heads attend from words of one group to words of another more than to matched words.

Matched words are words of the same text that match the key word in frequency, distance and number of tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, Final, TypeAlias

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ...basics.arguments import finite_number, listed, shown, whole_number
from ...basics.public import public
from ...batch import Batch, every_bos
from ...draw.section import Section
from ...draw.text import with_minus_signs
from ...errors import InputError
from ...maths.copies import copies_of
from ...maths.float64 import as_float64, float64_device
from ...maths.groups import by_group, joined
from ...maths.intervals import LEAST_TEXTS, TextMeans
from ...model.attention.observed import RowBlock
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import table_of
from ...results.provenance import Provenance
from ...results.sentences import PALE, interval_note, interval_of
from ...results.table import AgainstBaseline
from ...runs.reducer import Reducer, Run, State
from ...runs.stream import stream
from ...runs.words import bare, members_of, split_words

LEAST_PAIRS: Final = 5  # a claim needs at least this many matched pairs
LEAST_DIFFERENCE: Final = 0.01  # the smallest claimed difference from the baseline, as a share of a word's attention


@public
def group_attention(
    model: HookedModel,
    inputs: str | Iterable[str],
    groups: Mapping[str, Iterable[str]],
    *,
    within: int = 2,
    factor: float = 2.0,
    layers: Iterable[int] | None = None,
    bos: bool | None = None,
) -> "GroupAttention":
    """Measures how much more each head attends from words of one group to words of another than to matched words.

    The difference is the mean of A(q, k) − mean_c A(q, c) over pairs of a query word q and a key word k. A(q, k) sums
    the attention to all tokens of k and averages it over the tokens of q. The matched words c are words of the same
    text that belong to no group and

    - are on the same side of q as k, at a distance that differs from that of k by at most `within` tokens, counted
      between the words' first tokens;
    - occur at most `factor` times as often in the texts as k does, and at least 1 / `factor` times as often;
    - have the same number of tokens as k.

    Pairs without a matched word are left out and counted. Case is ignored. A word that contains the text's first token
    does not count, because the first token draws attention whatever word it is. Part of speech and meaning are not
    matched: a difference says that these words receive different attention from matched words, not why.

    A difference is claimed for a head if its size is at least 0.01, its simultaneous 95 % interval over texts (for all
    heads and all ordered pairs of groups together) excludes 0, and there are at least five matched pairs in at least
    five texts. Words recur from text to text, so a head that prefers one word of a group would pass these tests. If at
    least five words of a group occur in these pairs, the interval over its words must therefore exclude 0 as well; with
    fewer, the claim holds for these words alone (`holds_for`).

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> found = am.group_attention(am.load(), documents(30), {"verbs": ["is", "are"], "articles": ["the", "a"]})
    >>> found["articles → verbs"].mean.shape, int(found.to_frame().matched.max()) > 5
    (torch.Size([4, 8]), True)

    Args:
        model: the model.
        inputs: texts as strings; an iterator becomes a list, because word frequencies are counted first.
        groups: maps the name of each group to its words; at least two groups, and no word in two of them.
        within: the largest difference, in tokens, between a matched word's distance and the key word's distance.
        factor: how many times as frequent as the key word, or as rare, a matched word may be.
        layers: all by default.
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        Attention, baselines, differences and claims, by ordered pair of groups, layer and head.

    Raises:
        InputError: for groups that are empty or share a word; for a group with no word in any text; if no text has a
            word of one group that can see a word of another; for a model without a fast tokenizer; and for a model with
            an encoder and a decoder.

    """
    require_model(model)
    if len(model.stacks) > 1:
        raise InputError("groups of words need a model with one stack; this model has an encoder and a decoder.")
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError("groups of words need a fast tokenizer, which maps tokens to characters.")
    within, factor = whole_number("within", within), finite_number("factor", factor, above=0.0)
    if factor < 1:
        raise InputError(f"`factor` must be at least 1; got {factor:g}.")
    chosen = tuple(dict.fromkeys(model.points.check_layers(layers, "")))
    of_group = _checked(groups)
    texts = [_text(text) for text in ([inputs] if isinstance(inputs, str) else listed("inputs", inputs, "texts"))]
    counts = Counter(bare(word) for text in texts for word in split_words(text))
    missing = _missing(of_group, counts)
    group_of = {word: name for name, words in of_group.items() for word in words}
    directions = tuple(permutations(of_group, 2))
    vocabulary = tuple(group_of)
    shape = len(directions), len(chosen), model.n_heads, len(vocabulary)
    by_word = {name: torch.zeros(shape, dtype=torch.float64) for name in SIDES}
    word_pairs = {name: torch.zeros(len(directions), len(vocabulary), dtype=torch.float64) for name in SIDES}
    match = Matching(within, factor, counts, group_of, model.causal)
    digest, total = hashlib.sha256(), None
    begin: list[bool | None] = []
    contents: list[int] = []
    for text in texts:
        batch = model.encode(text, bos=bos)
        digest.update(batch.ids.cpu().numpy().tobytes())
        begin.append(batch.bos)
        sums, pairs = sums_of_text(model, batch, text, match, directions, chosen)
        for direction, names, difference in pairs:
            for side, word in zip(SIDES, map(vocabulary.index, names), strict=True):
                by_word[side][direction, ..., word] += difference
                word_pairs[side][direction, word] += 1
        contents += batch.digests.tolist()
        state = by_group(sums, batch.digests, _BY_TEXT)
        total = state if total is None else joined(total, state, _BY_TEXT)
    if total is None:
        raise InputError("`inputs` must hold at least one text; got none.")
    if not bool(total["found"].any()):
        raise InputError(
            f"no text has words of two groups that can attend to each other; the groups are {', '.join(of_group)}."
        )
    options = {
        "layers": list(chosen), "bos": every_bos(begin), "within": within, "factor": factor,
        "groups": {name: list(words) for name, words in of_group.items()},
    }  # fmt: skip
    return GroupAttention(
        names=tuple(of_group),
        words=tuple(of_group.values()),
        missing=missing,
        layers=chosen,
        n_layers=len(model.stack(None).places),
        documents=len(texts),
        attention_sums=total["attention"],
        baseline_sums=total["baseline"],
        matched_pairs=total["matched"],
        all_pairs=total["found"],
        by_query=by_word["query"],
        by_key=by_word["key"],
        query_pairs=word_pairs["query"],
        key_pairs=word_pairs["key"],
        provenance=model.provenance(digest.hexdigest(), (), options, copies_of(contents)),
    )


SIDES: Final = ("query", "key")
_BY_TEXT: Final = ("attention", "baseline", "matched", "found")


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise InputError(f"every text must be a string; got {shown(text)}.")
    return text


def _checked(groups: Any) -> dict[str, tuple[str, ...]]:
    wanted = "a dictionary from names to lists of words, with at least two groups"
    if not isinstance(groups, Mapping) or len(groups) < 2:
        raise InputError(f"`groups` must be {wanted}; got {shown(groups)}.")
    words_of_group: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for name, words in groups.items():
        if not isinstance(name, str) or not name.strip():
            raise InputError(f"a group's name must be a string; got {shown(name)}.")
        for word in (members := listed(f"groups[{name!r}]", words, "a list of words")):
            if not isinstance(word, str) or not bare(word) or len(split_words(word)) != 1:
                raise InputError(f"groups[{name!r}] must hold single words; got {shown(word)}.")
            if bare(word) in owner:
                where = f"both {owner[bare(word)]!r} and {name!r}" if owner[bare(word)] != name else f"{name!r} twice"
                raise InputError(
                    f"a word must occur once, in one group; {bare(word)!r} is in {where} (case is ignored)."
                )
            owner[bare(word)] = name
        if not members:
            raise InputError(f"group {name!r} has no words; pass at least one.")
        words_of_group[name] = tuple(map(bare, members))
    return words_of_group


def _missing(groups: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> tuple[str, ...]:
    """The words that occur in no text; raises `InputError` for a group whose words all occur in none."""
    for name, words in groups.items():
        if not any(word in counts for word in words):
            raise InputError(f"no text has a word of group {name!r}: {', '.join(words[:8])}.")
    return tuple(word for words in groups.values() for word in words if word not in counts)


@dataclass(frozen=True, repr=False)
class GroupAttention(AgainstBaseline):
    """How much more each head attends from words of one group to words of another than to matched words.

    Attention is a share of the query word's attention, from 0 to 1. The axis `direction` numbers the ordered pairs of
    groups.
    """

    _TITLE = "Attention between groups of words in {model}"
    _SUBTRACT = 'subtract what you compare: one["a → b"].mean - other["a → b"].mean'
    _MEASURE = "attention"

    names: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    """The words of each group, in lower case."""
    missing: tuple[str, ...]
    """The words of the groups that occur in no text."""
    layers: tuple[int, ...]
    n_layers: int
    documents: int
    attention_sums: Float[Tensor, "direction measured head group"]
    """Attention to the key words of matched pairs, summed by text; with more than 256 texts, by group of texts."""
    baseline_sums: Float[Tensor, "direction measured head group"]
    """Mean attention to the words that match each key word, summed in the same way."""
    matched_pairs: Float[Tensor, "direction group"]
    all_pairs: Float[Tensor, "direction group"]
    """The number of pairs of words of two groups, with or without a matched word."""
    by_query: Float[Tensor, "direction measured head word"]
    """Attention − baseline of matched pairs, summed by query word, in the order of `words`."""
    by_key: Float[Tensor, "direction measured head word"]
    """Attention − baseline of matched pairs, summed by key word."""
    query_pairs: Float[Tensor, "direction word"]
    """The number of matched pairs with each query word."""
    key_pairs: Float[Tensor, "direction word"]
    provenance: Provenance

    @property
    def _directions(self) -> tuple[tuple[str, str], ...]:
        return tuple(permutations(self.names, 2))

    @property
    def _axis_lengths(self) -> Mapping[str, int]:
        words = sum(map(len, self.words))
        return {"direction": len(self._directions), "measured": len(self.layers), "word": words}

    def attention(self, query: str, key: str) -> Float[Tensor, "layer head"]:
        """The mean attention from words of one group to words of another, over matched pairs."""
        return self._by_layer(self._mean(self.attention_sums)[self._place(query, key)])

    def baseline(self, query: str, key: str) -> Float[Tensor, "layer head"]:
        """The mean attention from the same query words to the words that match the key words."""
        return self._by_layer(self._mean(self.baseline_sums)[self._place(query, key)])

    @property
    def quantities(self) -> tuple[str, ...]:
        """The differences by direction, as "query → key": intervals and tests hold for all heads and directions."""
        return tuple(" → ".join(names) for names in self._directions)

    @property
    def _n_texts(self) -> int:
        return self.documents

    @cached_property
    def claims(self) -> pd.DataFrame:
        """The claimed rows of `to_frame`, largest difference first, with simultaneous intervals."""
        pairs = self.matched_pairs.sum(dim=-1)
        away = self._excess.clear_size & (self._excess.mean.abs() >= LEAST_DIFFERENCE)
        claimed = away & (pairs >= LEAST_PAIRS)[:, None, None]
        for sums, count in ((self.by_query, self.query_pairs), (self.by_key, self.key_pairs)):
            over_words = TextMeans.of_ratio(sums, count[:, None, None])
            claimed &= over_words.clear_size | (over_words.texts < LEAST_TEXTS)
        frame = self._rows(self._excess.simultaneous())[claimed.flatten().numpy()]
        return frame.sort_values("difference", ascending=False, key=abs, ignore_index=True)

    def _rows(self, interval: tuple[Tensor, Tensor]) -> pd.DataFrame:
        low, high = interval
        columns = {
            "attention": self._mean(self.attention_sums),
            "baseline": self._mean(self.baseline_sums),
            "difference": self._excess.mean,
            "difference_low": low,
            "difference_high": high,
            "clear": self._excess.clear,
            "clear_size": self._excess.clear_size,
            "matched": self.matched_pairs.sum(dim=-1)[:, None, None].long(),
            "pairs": self.all_pairs.sum(dim=-1)[:, None, None].long(),
        }
        directions, heads = range(len(self._directions)), range(self.attention_sums.shape[2])
        frame = table_of({"direction": directions, "layer": self.layers, "head": heads}, columns)
        for side, name in enumerate(("query", "key")):
            frame[name] = [self._directions[direction][side] for direction in frame["direction"]]
        few = torch.minimum(*((pairs > 0).sum(dim=1) for pairs in (self.query_pairs, self.key_pairs)))
        holds_for = ["words like these" if count >= LEAST_TEXTS else "these words" for count in few.tolist()]
        frame["holds_for"] = [holds_for[direction] for direction in frame["direction"]]
        return frame[_COLUMNS]

    def to_frame(self) -> pd.DataFrame:
        """One row per ordered pair of groups and head.

        Columns: query, key, layer, head, attention, baseline, difference with its pointwise interval, clear,
        clear_size, holds_for (the words for which a claim would hold), matched (the number of matched pairs) and pairs
        (the number of all pairs).
        """
        frame = self._rows(self._excess.interval())
        frame.attrs["intervals"] = interval_note(
            int(self._excess.texts.max()), self.documents - self.provenance.distinct(self.documents)
        )
        return frame

    @property
    def lead(self) -> str:
        claims = self.claims.drop_duplicates(["query", "key"]).to_dict("records")
        best = {(claim["query"], claim["key"]): claim for claim in claims}
        clauses = []
        for direction, names in enumerate(self._directions):
            total, matched = (int(pairs[direction].sum()) for pairs in (self.all_pairs, self.matched_pairs))
            if not total:
                continue
            left_out = f", {total - matched} without a match" if total > matched else ""
            what = (
                f"from “{names[0]}” to “{names[1]}” ({matched} matched {'pair' if matched == 1 else 'pairs'}{left_out})"
            )
            clauses.append(f"{what}: {self._finding(direction, best.get(names))}")
        several = self._texts
        none = f" No text contains {', '.join(self.missing[:8])}." if self.missing else ""
        return with_minus_signs(f"On {several}, {'; '.join(clauses)}.{none}")

    def _finding(self, direction: int, best: Mapping[Any, Any] | None) -> str:
        texts = int((self.matched_pairs[direction] > 0).sum())
        if texts < LEAST_TEXTS or float(self.matched_pairs[direction].sum()) < LEAST_PAIRS:
            return f"too few pairs for a claim (at least {LEAST_PAIRS} in {LEAST_TEXTS} texts are needed)"
        if best is None:
            return "no head differs clearly from matched words"
        more = "more" if best["difference"] > 0 else "less"
        ends = best["difference_low"], best["difference_high"]
        span = interval_of(ends, "+.2g", self._excess.mean.numel(), "differences")
        return (
            f"L{best['layer']}H{best['head']} attends {more} to “{self._directions[direction][1]}” than to matched "
            f"words ({best['attention']:.3f} against {best['baseline']:.3f}; this holds for {best['holds_for']}){span}"
        )

    def _sections(self) -> "Sequence[Section]":
        return [
            Section(
                f"From {query} to {key}",
                f"Each cell is one head: its attention from words of “{query}” to words of “{key}”, minus its "
                "attention to matched words, which are words of the same text with similar frequency and distance "
                f"and the same number of tokens{PALE}.",
                {f"direction-{place}": self.plot(f"{query} → {key}")},
                f'found.plot("{query} → {key}")',
            )
            for place, (query, key) in enumerate(self._directions)
            if float(self.matched_pairs[place].sum()) >= LEAST_PAIRS
        ]

    @cached_property
    def _excess(self) -> TextMeans:
        above = self.attention_sums - self.baseline_sums
        return TextMeans.of_ratio(above, self.matched_pairs[:, None, None])

    def _mean(self, sums: Tensor) -> Float[Tensor, "direction measured head"]:
        return sums.sum(dim=-1) / self.matched_pairs.sum(dim=-1)[:, None, None]

    def _place(self, query: str, key: str) -> int:
        if (query, key) not in self._directions:
            known = ", ".join(self.names)
            raise InputError(
                f"`query` and `key` must be two of the groups {known}; got {shown(query)} and {shown(key)}."
            )
        return self._directions.index((query, key))


_COLUMNS: Final = [
    "query", "key", "layer", "head", "attention", "baseline", "difference", "difference_low", "difference_high",
    "clear", "clear_size", "holds_for", "matched", "pairs",
]  # fmt: skip


@dataclass(frozen=True)
class Word:
    """A word of a text: its name, its first token, its number of tokens, and whether it counts."""

    name: str
    start: int
    tokens: int
    counts: bool


@dataclass(frozen=True)
class Matching:
    """Decides which words match a key word."""

    within: int
    factor: float
    counts: Mapping[str, int]
    group_of: Mapping[str, str]
    causal: bool

    def others(self, words: Sequence[Word], query: int, key: int) -> list[int]:
        """Returns the indices of the words that match a key word, for a query word."""
        q, k = words[query], words[key]
        far, frequent = q.start - k.start, self.counts[k.name]
        return [
            place
            for place, c in enumerate(words)
            if c.counts and c.name and c.name not in self.group_of and place != query and c.tokens == k.tokens
            and (q.start - c.start > 0) == (far > 0) and abs(q.start - c.start - far) <= self.within
            and frequent <= self.factor * self.counts[c.name] and self.counts[c.name] <= self.factor * frequent
        ]  # fmt: skip


Difference: TypeAlias = tuple[int, tuple[str, str], Tensor]
"""A matched pair: its direction, its words, and attention − baseline `[layer head]`."""


def sums_of_text(
    model: HookedModel,
    batch: Batch,
    text: str,
    match: Matching,
    directions: Sequence[tuple[str, str]],
    layers: Sequence[int],
) -> tuple[State, list[Difference]]:
    """Returns the sums of one text, `[direction layer head 1]`, its numbers of pairs and each matched pair's
    difference.
    """
    shape = len(directions), len(layers), model.n_heads, 1
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("attention", "baseline")}
    sums |= {name: torch.zeros(len(directions), 1, dtype=torch.float64) for name in ("matched", "found")}
    pieces = split_words(text)
    if len({match.group_of.get(bare(piece)) for piece in pieces} - {None}) < 2:
        return sums, []
    member = members_of(model, batch, pieces)
    ordinary = ~(batch.is_special | batch.first)[0].cpu()
    words = [
        Word(
            bare(piece), int(own.argmax()), int(own.sum()), bool(bare(piece) and own.any() and ordinary[own > 0].all())
        )
        for piece, own in zip(pieces, member, strict=True)
    ]
    pairs = []
    in_group = [place for place, word in enumerate(words) if word.counts and word.name in match.group_of]
    for query, key in permutations(in_group, 2):
        names = match.group_of[words[query].name], match.group_of[words[key].name]
        if names[0] == names[1] or (match.causal and key > query):
            continue
        direction = directions.index(names)
        sums["found"][direction] += 1
        if others := match.others(words, query, key):
            pairs.append((direction, query, key, others))
    if not pairs:
        return sums, []
    queries = sorted({query for _, query, _, _ in pairs})
    (state,) = stream(model, batch, [AttentionToWords(member, tuple(queries))], layers=layers)
    differences: list[Difference] = []
    for direction, query, key, others in pairs:
        row = state["mass"][:, :, queries.index(query)]
        attention, baseline = row[..., key], row[..., others].mean(dim=-1)
        sums["matched"][direction] += 1
        sums["attention"][direction, ..., 0] += attention
        sums["baseline"][direction, ..., 0] += baseline
        differences.append((direction, (words[query].name, words[key].name), attention - baseline))
    return sums, differences


class AttentionToWords(Reducer):
    """Attention from some words of a text to all its words: a sum over key tokens, a mean over query tokens."""

    points = ()

    def __init__(self, member: Float[Tensor, "word position"], queries: tuple[int, ...]) -> None:
        self.member, self.queries = member, queries

    @property
    def options(self) -> dict[str, str]:
        """The query words."""
        return {"queries": str(self.queries)}

    def start(self, run: Run) -> State:
        """Sums of 0."""
        shape = run.n_layers, run.n_heads, len(self.queries), len(self.member)
        return {"mass": torch.zeros(shape, dtype=torch.float64, device=float64_device(run.model.device))}

    def add(self, state: State, block: RowBlock, run: Run) -> None:
        member = self.member.to(block.pattern)
        asks = member[list(self.queries)]
        asks = (asks / asks.sum(dim=-1, keepdim=True))[:, block.rows.start : block.rows.stop]
        got = asks @ block.pattern[0] @ member[:, : block.pattern.shape[-1]].T
        state["mass"][block.index] += as_float64(got)

    def merge(self, one: State, other: State) -> State:
        return {"mass": one["mass"] + other["mass"]}
