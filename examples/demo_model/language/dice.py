"""Random choices, and the sum of their surprisal: how improbable the outcome of all choices together was."""

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

Option = TypeVar("Option")


class Dice:
    """Makes choices, and sums −ln p of each in `surprisal` (nats).

    >>> dice = Dice(Random(0))
    >>> dice.choose(("boat", "shell", "gull", "net"))
    'net'
    >>> dice.chance(0.5)
    False
    >>> round(dice.surprisal / math.log(2), 3)
    3.0
    """

    def __init__(self, rng: Random) -> None:
        self.surprisal = 0.0
        self._rng = rng

    def choose(self, options: Sequence[Option], weights: Sequence[float] | None = None) -> Option:
        """Returns one of the options, all equally likely unless weights are given."""
        weights = weights or [1.0] * len(options)
        place = self.roll(weights)
        self.surprisal -= math.log(weights[place] / sum(weights))
        return options[place]

    def chance(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return self.choose((True, False), (probability, 1 - probability))

    def roll(self, weights: Sequence[float]) -> int:
        """Returns the index of the chosen option; every choice is made here."""
        return self._rng.choices(range(len(weights)), weights)[0]
