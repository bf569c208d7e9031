"""Each choice costs −ln of its probability, and every text has one derivation, so the total cost is −ln p of the
text."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from language.dice import Dice
from language.draft import Draft
from language.grammar import SENTENCES, Document, document, tell


def test_surprisal_is_minus_the_logarithm_of_the_probability() -> None:
    dice = Dice(Random(0))
    chosen = dice.choose(("a", "b", "c"), (1.0, 2.0, 5.0))
    assert dice.surprisal == pytest.approx(-math.log({"a": 1, "b": 2, "c": 5}[chosen] / 8))
    before = dice.surprisal
    came_true = dice.chance(0.2)
    assert dice.surprisal - before == pytest.approx(-math.log(0.2 if came_true else 0.8))


class Unplanned(Exception):
    """Raised for a choice beyond the prescribed ones."""

    def __init__(self, options: int) -> None:
        self.options = options


class Differs(Exception):
    """Raised if the text has another word here."""


class Planned(Dice):
    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(Random(0))
        self.places = list(places)[::-1]

    def roll(self, weights: Sequence[float]) -> int:
        if not self.places:
            raise Unplanned(len(weights))
        return self.places.pop()


class Following(Draft):
    """Accepts words as long as at least one of several texts begins with them."""

    def __init__(self, texts: Sequence[Document]) -> None:
        super().__init__()
        self.texts = list(texts)

    def write(self, word: str) -> None:
        place = len(self._words)
        forms = (word, word + "n") if word.strip() in ("a", "A") else (word,)
        self.texts = [text for text in self.texts if len(text.words) > place and text.words[place] in forms]
        if not self.texts:
            raise Differs
        super().write(word)


def derivations(texts: Sequence[Document]) -> list[Document]:
    """Every derivation of these one-sentence texts, found by trying every choice at every place."""
    wanted = {text.words for text in texts}
    found: list[Document] = []
    begun: list[tuple[int, ...]] = [()]
    while begun:
        places = begun.pop()
        try:
            told = tell(Following(texts), Planned(places), sentences=1)
        except Unplanned as choice:
            begun += [(*places, place) for place in range(choice.options)]
        except Differs:
            continue
        else:
            found += [told] * (told.words in wanted)
    return found


def test_a_text_has_one_derivation() -> None:
    texts = [document(Random(7), sentences=1, kinds=[kind]) for kind in SENTENCES]
    found = derivations(texts)
    assert sorted(told.words for told in found) == sorted(text.words for text in texts)
    cost = {text.words: text.surprisal for text in texts}
    for told in found:
        assert told.surprisal == pytest.approx(cost[told.words] + math.log(len(SENTENCES)))
        assert told == next(replace(text, surprisal=told.surprisal) for text in texts if text.words == told.words)
