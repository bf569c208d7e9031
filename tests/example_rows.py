"""Example rows of one head by a naive search over captured patterns."""

from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

import attnmech as am

WORD: Final = 2**64


class Row(NamedTuple):
    value: float
    text: int
    position: int
    bigram: tuple[int, int]
    hash: int
    keys: tuple[int, ...]


def texts_of(seed: int = 5, count: int = 60, longest: int = 18) -> list[Tensor]:
    """Texts of few different tokens, so that bigrams recur."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 8, (length,), generator=generator) for length in lengths]


TEXTS: Final = texts_of()


def mixed(value: int) -> int:
    """SplitMix64's finaliser, with Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % WORD
    return value ^ (value >> 31)


def hash_of(seed: int, layer: int, head: int, text: int, position: int) -> int:
    value = mixed(mixed(mixed((layer << 20) + head) ^ seed) ^ ((text << 32) + position))
    return value - WORD if value >= WORD // 2 else value


def largest(row: list[float], position: int) -> float | None:
    """The highest attention to another token, not the first, in float32."""
    others = [weight for key, weight in enumerate(row[: position + 1]) if key not in (0, position)]
    return float(torch.tensor(max(others), dtype=torch.float32)) if others else None


@cache
def patterns(model: am.HookedModel, texts: tuple[Tensor, ...], layer: int) -> list[Tensor]:
    """The pattern of each text alone in a layer, `[head query key]`; texts of the same tensors are run once."""
    return [model.run(ids[None], points=["pattern"], layers=[layer])["pattern", layer][0] for ids in texts]


def naive(
    model: am.HookedModel, texts: list[Tensor], layer: int, head: int, seed: int = 0, value: Any = largest
) -> list[Row]:
    """The rows of one head that count, text by text."""
    rows = []
    for number, (ids, pattern) in enumerate(zip(texts, patterns(model, tuple(texts), layer), strict=True)):
        # Weights are stored in float32; of equal ones, the first key comes first.
        rounded = pattern[head].float().tolist()
        for position, row in enumerate(pattern[head].tolist()):
            strength = value(row, position)
            if strength is None:
                continue
            before = int(ids[position - 1]) if position else -1
            keys = sorted(range(position + 1), key=lambda key: (-rounded[position][key], key))
            place = hash_of(seed, layer, head, number, position)
            bigram = before, int(ids[position])
            rows.append(Row(strength, number, position, bigram, place, tuple(keys[:8])))
    return rows


def strongest(rows: list[Row], k: int) -> list[Row]:
    """Four offers of a text, with different bigrams; the strongest of each bigram; the strongest of each text."""
    ordered = sorted(rows, key=lambda row: (-row.value, row.text, row.position))
    offers: list[Row] = []
    for row in ordered:
        mine = [other for other in offers if other.text == row.text]
        if len(mine) < 4 and row.bigram not in [other.bigram for other in mine]:
            offers.append(row)
    of_bigrams: list[Row] = []
    for row in offers:
        if row.bigram not in [other.bigram for other in of_bigrams]:
            of_bigrams.append(row)
    of_texts: list[Row] = []
    for row in of_bigrams:
        if row.text not in [other.text for other in of_texts]:
            of_texts.append(row)
    return of_texts[:k]


def places(examples: list[Any]) -> list[tuple[int, int]]:
    return [(example.text, example.position) for example in examples]


def places_of(rows: list[Row]) -> list[tuple[int, int]]:
    return [(row.text, row.position) for row in rows]
