"""Frequencies and overlaps equal those over all halves; stable nodes are the planted ones, and noise has none."""

from dataclasses import replace
from itertools import combinations
from math import sqrt
from statistics import fmean

import planted
import pytest
import torch
from comparing import refuses
from scipy.stats import t as student_t
from torch import Tensor

import attnmech as am
from attnmech.maths.intervals import TextMeans
from attnmech.methods.attribution.stability import frequency_and_overlap


def top(values: list[float], size: int) -> set[int]:
    return {
        place for place in sorted(range(len(values)), key=lambda place: -abs(values[place]))[:size] if values[place]
    }


def over_all_halves(values: list[list[float]], without: int | None) -> tuple[list[float], float]:
    """The frequency of each node and the mean overlap, over all ways to split the texts, with one text left out."""
    texts, sets, overlaps = range(len(values[0])), [], []
    for one in combinations(texts, len(texts) // 2):
        other = [text for text in texts if text not in one]
        both = []
        for half in (one, other):
            kept = [text for text in half if text != without]
            both.append(top([fmean(row[text] for text in kept) for row in values], 2))
        sets += both
        overlaps.append(len(both[0] & both[1]) / len(both[0] | both[1]))
    return [fmean(place in chosen for chosen in sets) for place in range(len(values))], fmean(overlaps)


def test_frequencies_and_overlaps_are_those_of_all_halves() -> None:
    values = (
        torch.randn(5, 6, generator=torch.Generator().manual_seed(4)).double()
        + torch.tensor([2, 1, 0.5, 0, 0])[:, None]
    )
    values[4] = 0
    frequency, jaccard, (low, high) = frequency_and_overlap(
        TextMeans.of_values(values), lambda means: means.abs().argsort(descending=True)[:2].tolist(), draws=2000, seed=0
    )
    expected, overlap = over_all_halves(values.tolist(), None)
    assert frequency.tolist() == pytest.approx(expected, abs=0.02) and frequency[4] == 0 < min(expected[:2])
    left_out = [over_all_halves(values.tolist(), text)[1] for text in range(6)]
    deviation = sqrt(5 / 6 * sum((value - fmean(left_out)) ** 2 for value in left_out))
    half = student_t.ppf(0.975, 5) * deviation
    assert 0.3 < overlap < 0.9
    assert (jaccard, low, high) == pytest.approx(
        (overlap, max(0.0, overlap - half), min(1.0, overlap + half)), abs=0.02
    )


def test_pairs_that_are_copies_count_once() -> None:
    clean, corrupted, judged = planted.cued_pairs(6)
    twice = {name: answers * 2 for name, answers in judged.items()}
    model = planted.and_pair("gpt2")
    one = am.attribute(model, clean, corrupted, **judged).stability(4, draws=20)
    other = am.attribute(model, clean * 2, corrupted * 2, **twice).stability(4, draws=20)
    assert other.pairs == 6 and other.frequency.tolist() == one.frequency.tolist()
    assert other.jaccard == pytest.approx(one.jaccard) and repr(other) == repr(one)


def test_the_planted_heads_are_stable_and_flipped_signs_are_not() -> None:
    clean, corrupted, judged = planted.cued_pairs(16)
    model = planted.and_pair("gpt2")
    heads = am.attribute(model, clean, corrupted, method="integrated", **judged)
    stability = heads.stability(2)
    assert stability.circuit.heads == [(0, 2), (2, 5)] and (stability.jaccard, *stability.jaccard_interval) == (1, 1, 1)
    frame = stability.to_frame()
    assert set(frame["node"][:2]) == {"L0H2", "L2H5"} and frame["stable"].tolist() == [True] * 2 + [False] * 22
    edges = am.attribute(model, clean, corrupted, nodes="heads+mlps", edges=True, **judged)
    assert ("L2H5", "logits") in (edges.stability(3, draws=20).circuit.edges or ())
    generator = torch.Generator().manual_seed(0)
    # The sign of each pair is arbitrary: the same for all edges, so that they stay as dependent as they are.
    signs = 2 * torch.randint(2, (100, 16), generator=generator).double() - 1
    flipped = [replace(edges, per_pair=edges.per_pair * sign).stability(5, draws=3) for sign in signs]
    assert sum(bool(one.stable.any()) for one in flipped) <= 5
    assert sum(bool((one.frequency >= one.threshold).any()) for one in flipped) > 90


def test_what_a_result_says_and_refuses() -> None:
    clean, corrupted, judged = planted.cued_pairs(6)
    heads = am.attribute(planted.and_pair("gpt2"), clean, corrupted, **judged)
    few = heads.stability(2, draws=10)
    assert few.lead.startswith(
        "On 6 pairs, 2 of 24 nodes are in the circuits, of size 2, of at least 90 % of halves; no"
    )
    assert (
        "no sign can be clear on fewer than 10 pairs; the circuits of two halves share 1.00 of their nodes" in few.lead
    )
    silent = heads.per_pair.where(heads.effect[..., None].abs() > 0.1, 0.0)
    everything = replace(heads, per_pair=silent).stability(24, draws=5)
    assert everything.frequency.equal((everything.estimate != 0).double()) and 0 in everything.frequency
    assert len(few.circuit) == 0 and heads.stability(2, draws=10).frequency.equal(few.frequency)
    refuses("`threshold` must be a finite number above 0.5 and below 1", heads.stability, 2, threshold=0.5)
    refuses("`size` must be a whole number, 1 to 24", heads.stability, 25)
    short: dict[str, Tensor] = {name: answers[:4] for name, answers in judged.items()}
    four = am.attribute(planted.and_pair("gpt2"), clean[:4], corrupted[:4], **short)
    refuses("halves need at least 5 different pairs of prompts; got 4", four.stability, 2)
