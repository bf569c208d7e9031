"""Compares induction in attention-only models of one and two layers with Olsson et al. 2022.

    python benchmarks/published/induction.py

Models are trained on the repeated random tokens of `examples/trajectory.py`, and `am.trajectory` measures
`am.head_types` during training. The drop of the loss is measured from the loss of a model that only knows which tokens
the text contains.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from shared import attention_only, options, over_seeds, show, spread
from torch import Tensor
from transformers import LlamaForCausalLM

import attnmech as am

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from trajectory import VOCABULARY, repeated, second_copy_loss, trained

EVERY = 10
"""Training steps between two measurements of the loss."""
TYPES_EVERY = 50
"""Training steps between two measurements of head types."""
LENGTHS = (8, 16, 24, 32)
"""The lengths of the first copy in the texts held out."""
SET_KNOWN = mean(math.log(length) for length in LENGTHS)
"""The loss of a model that predicts every token of the text with the same probability."""


def measured(layers: int, steps: int) -> dict[str, float]:
    """Losses and head types of one training run."""
    held_out = [repeated(length) for length in LENGTHS]
    losses: dict[int, float] = {}

    def checkpoints() -> Iterator[tuple[str, LlamaForCausalLM]]:
        for name, model in trained(attention_only(VOCABULARY, layers), range(0, steps + 1, EVERY), steps):
            losses[int(name)] = loss(model, held_out)
            if int(name) % TYPES_EVERY == 0:
                yield name, model

    run = am.trajectory(checkpoints(), am.head_types)
    induction = dict(zip(map(int, run.steps), run["induction"].amax(dim=1).tolist(), strict=True))
    end = mean(list(losses.values())[-5:])
    first, last = (below(losses, SET_KNOWN, end, share) for share in (0.1, 0.9))
    return {
        "loss": end,
        "induction": induction[max(induction)],
        "previous": float(run["previous"][-1].max()),
        "begin": first,
        "steps": last - first,
        "rise": nearest(induction, last) - nearest(induction, first),
    }


@torch.no_grad()
def loss(model: LlamaForCausalLM, texts: list[Tensor]) -> float:
    """The loss of second copies, averaged over texts of several lengths."""
    return mean(float(second_copy_loss(model, ids)) for ids in texts)


def below(losses: Mapping[int, float], high: float, low: float, share: float) -> float:
    """The first step at which the loss has fallen by a share of the way from high to low; NaN if there is none.

    >>> below({0: 3.0, 10: 2.0, 20: 1.0}, high=3.0, low=1.0, share=0.5)
    10
    """
    return next((step for step, value in losses.items() if value <= high - share * (high - low)), math.nan)


def nearest(values: Mapping[int, float], step: float) -> float:
    """The value measured nearest to a step; NaN for step NaN."""
    return math.nan if math.isnan(step) else values[min(values, key=lambda other: abs(other - step))]


def main() -> None:
    """Prints the table of `docs/published.md`."""
    chosen = options(__doc__, steps=1000)
    one, two = (over_seeds(chosen.seeds, partial(measured, layers, chosen.steps)) for layers in (1, 2))
    show(
        ["", "one layer", "two layers"],
        [
            ["loss of second copies, nats", spread(one["loss"]), spread(two["loss"])],
            ["highest induction score", spread(one["induction"]), spread(two["induction"])],
            ["highest previous-token score", spread(one["previous"]), spread(two["previous"])],
            ["step at 10 % of the drop", "", spread(two["begin"], 0)],
            ["steps from 10 % to 90 % of the drop", "", spread(two["steps"], 0)],
            ["rise of the induction score in these steps", "", spread(two["rise"])],
        ],
    )
    print(f"uniform over all tokens {math.log(VOCABULARY - 3):.2f}, over tokens of the text {SET_KNOWN:.2f} nats")


if __name__ == "__main__":
    main()
