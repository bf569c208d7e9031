"""Whisper tiny.en, read from CTranslate2's file: against plain transformers, and which heads follow the sound.

Its publishers align words to sound by eight heads of cross-attention, its `alignment_heads`. The speech is espeak-ng's,
word by word, so that the times of all words are known.
"""

import copy
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import packaged
import pytest
import torch
from scipy.signal import resample_poly  # type: ignore[import-untyped]
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from torch import Tensor

import attnmech as am

pytestmark = pytest.mark.xdist_group("speech")

TEXT = (
    "Yesterday morning seven small ships left the harbor for the northern islands, because the weather was finally "
    "calm enough."
)
RATE, FRAMES, LAYERS, HEADS, D_HEAD = 16_000, 50, 4, 6, 64
"""Samples and frames per second."""


@pytest.fixture(scope="module")
def plain() -> Any:
    model, _ = packaged.whisper()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def processor() -> Any:
    return packaged.whisper()[1]


@pytest.fixture(scope="module")
def hooked(plain: Any, processor: Any) -> am.HookedModel:
    return am.load(plain, processor=processor)


@pytest.fixture(scope="module")
def speech() -> tuple[np.ndarray, list[tuple[float, float]]]:
    """The text, spoken word by word with pauses of 60 ms, and the time at which each word begins and ends."""
    if shutil.which("espeak-ng") is None:
        assert "ATTNMECH_NEEDS_MODELS" not in os.environ, "not installed: espeak-ng"
        pytest.skip("not installed: apt-get install espeak-ng")
    parts, times, end = [], [], 0
    for word in TEXT.split():
        said = subprocess.run(
            ["espeak-ng", "-v", "en-us", "-s", "150", "--stdout", word], check=True, capture_output=True
        )
        # A WAV file with 22,050 samples per second and a header of 44 bytes.
        sound = resample_poly(np.frombuffer(said.stdout[44:], np.int16) / 32768, 320, 441).astype(np.float32)
        loud = np.nonzero(np.abs(sound) > 0.01)[0]
        gap, sound = np.zeros(RATE * 6 // 100, np.float32), sound[loud[0] : loud[-1] + 1]
        begin = end + len(gap)
        end = begin + len(sound)
        parts += [gap, sound]
        times.append((begin / RATE, end / RATE))
    return np.concatenate(parts), times


def test_the_certificate_holds(hooked: am.HookedModel) -> None:
    assert hooked.certificate.ok, repr(hooked.certificate)


@pytest.fixture(scope="module")
def heard(hooked: am.HookedModel, speech: tuple[np.ndarray, list[tuple[float, float]]]) -> Any:
    """The batch of the speech with its text."""
    return hooked.encode((RATE, speech[0]), target=f" {TEXT}")


@dataclass(frozen=True)
class Words:
    """The text's tokens: the position of each, and the frames in which its word is heard."""

    places: list[int]
    begins: Tensor
    ends: Tensor

    def mass(self, pattern: Tensor, *, shift: int) -> Tensor:
        """The attention to a word's time, 60 ms more on either side, in the row that reads it or an earlier one."""
        by_token = [
            pattern[:, :, place - shift, max(0, int(begin) - 3) : int(end) + 4].sum(dim=-1)
            for place, begin, end in zip(self.places, self.begins, self.ends, strict=True)
        ]
        return torch.stack(by_token).mean(dim=0)


@pytest.fixture(scope="module")
def words(heard: Any, speech: tuple[np.ndarray, list[tuple[float, float]]]) -> Words:
    places, spans, number = [], [], -1
    for place, token in enumerate(heard.target.tokens[0][2:-1], start=2):
        number += token.startswith(" ")
        if any(letter.isalpha() for letter in token):
            places.append(place)
            spans.append(speech[1][number])
    assert number == len(TEXT.split()) - 1
    times = FRAMES * torch.tensor(spans)
    return Words(places, times[:, 0], times[:, 1])


def places(those: Tensor) -> set[tuple[int, int]]:
    """The layers and heads at which a mask is True."""
    return {(layer, head) for layer, head in those.nonzero().tolist()}


def test_alignment_heads_follow_the_sound_and_so_do_others(hooked: am.HookedModel, heard: Any, words: Words) -> None:
    """Thirteen of 24 heads of cross-attention advance in the sound from word to word, including the eight published
    ones (of eight heads chosen at random, all would be in one of 570 cases). They are not the heads with the most
    attention on a word's time.
    """
    acts = hooked.run(heard, points=["cross.pattern"])
    pattern = torch.stack([acts["cross.pattern", layer][0] for layer in range(LAYERS)])
    published = set(packaged.alignment_heads())
    assert len(published) == 8

    frames = pattern[:, :, [place - 1 for place in words.places]].argmax(dim=-1)
    order = range(len(words.places))
    monotony = torch.tensor(
        [[spearmanr(order, frames[layer, head]).statistic for head in range(HEADS)] for layer in range(LAYERS)]
    ).nan_to_num(0)  # a head may always attend to one frame
    following = places(monotony > 0.98)
    assert following == places(monotony > 0.85)
    assert published < following and len(following) == 13

    # Two other heads have the most attention on the predicted word's time, and three others on the word that is read.
    predicted, read = words.mass(pattern, shift=1), words.mass(pattern, shift=0)
    assert places(predicted > 0.77) == {(1, 5), (2, 1)}
    best = predicted.flatten().topk(8).values.min()
    assert len(places(predicted >= best) & published) == 4
    assert all(0.15 < float(predicted[place]) < 0.77 for place in published)
    assert places(read > 0.8) == {(0, 4), (1, 2), (2, 4)}
    assert all(float(read[place]) < 0.2 for place in published)


def without(plain: Any, module: str, heads: Iterable[tuple[int, int]]) -> Any:
    """Plain transformers with the columns of W_O set to zero that read these heads of the decoder."""
    changed = copy.deepcopy(plain)
    with torch.no_grad():
        for layer, head in heads:
            out = getattr(changed.model.decoder.layers[layer], module).out_proj
            out.weight[:, D_HEAD * head : D_HEAD * (head + 1)] = 0
    return changed


def loss(model: Any, heard: Any) -> float:
    with torch.no_grad():
        logits = model(heard.extra["input_features"], decoder_input_ids=heard.target.ids).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1], heard.target.ids[0, 1:]))


def test_without_the_alignment_heads_the_text_is_not_heard(hooked: am.HookedModel, plain: Any, heard: Any) -> None:
    """Removing eight other heads of layers 0 and 1 hurts more: the loss does not single out the published ones."""
    published = packaged.alignment_heads()
    others = [(0, head) for head in range(HEADS)] + [(1, 1), (1, 2)]
    losses = {}
    for name, heads in (("published", published), ("others", others)):
        with hooked.intervene(am.Intervention.zero(heads, stack="cross")):
            losses[name] = float(hooked.loss(heard)[0])
        assert losses[name] == pytest.approx(loss(without(plain, "encoder_attn", heads), heard), abs=1e-3)
    before = float(hooked.loss(heard)[0])
    assert before == pytest.approx(loss(plain, heard), abs=1e-3)
    assert before < 1.2 and losses["published"] > before + 2 and losses["others"] > losses["published"]
