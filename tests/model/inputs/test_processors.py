"""Pictures and recordings through a model's own processor, against transformers called by hand."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import senses
import torch
import transformers
from comparing import refuses
from models import randomised
from scipy.io import wavfile  # type: ignore[import-untyped]
from senses import samples

import attnmech as am
from attnmech.model.inputs.sounds import SoundEncoder
from attnmech.pages.report import spectrogram_of

Image = pytest.importorskip("PIL.Image", reason="pip install 'attnmech[images]'")


@cache
def vit() -> Any:
    return randomised(
        senses.made("ViTForImageClassification", "ViT", senses.SIZES | {"image_size": 12, "patch_size": 4})
    )


def image_processor() -> Any:
    return transformers.ViTImageProcessorPil(size={"height": 12, "width": 12})


def picture() -> Any:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 41, 3), dtype=np.uint8))


def sound_processor() -> Any:
    return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)


def test_a_folder_brings_its_processor(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    image_processor().save_pretrained(tmp_path)
    model, shown = am.load(tmp_path), picture()
    shown.save(tmp_path / "shown.png")
    with torch.no_grad():
        theirs = vit()(**image_processor()(shown, return_tensors="pt")).logits
    for given in (shown, np.asarray(shown), tmp_path / "shown.png"):
        assert torch.allclose(model.run(given).logits, theirs, atol=1e-5)
    assert torch.allclose(model.run([shown, np.asarray(shown)]).logits, theirs.expand(2, -1), atol=1e-5)
    assert am.attention_focus(model, iter([shown, shown])).to_frame().shape[0] == 6


def test_bad_pictures_say_what_was_expected(tmp_path: Path) -> None:
    model = am.load(vit(), processor=image_processor())
    bad: list[tuple[Any, str]] = [
        ("shown.png", "pathlib.Path"),
        (tmp_path / "none.png", "cannot be read as an image"),
        (np.zeros((4, 4)), r"uint8 \[height width 3\]; got float64 \(4, 4\)"),
        ([], "list of inputs is empty"),
        ("a text", "this model reads images"),
        (torch.arange(5), "floating-point tensor of pixel values"),
        (torch.randn(2, 2, 12, 12), r"\[batch, 3, 12, 12\].*got \(2, 2, 12, 12\)"),
        (torch.randn(0, 3, 12, 12), r"got \(0, 3, 12, 12\)"),
        ({"input_ids": torch.arange(5)}, 'must hold only "pixel_values"'),
    ]
    for given, message in bad:
        refuses(message, model.run, given)
    refuses(r"without its processor.*attnmech\[images\]", am.load(vit()).run, picture())
    refuses(r"must be a transformers processor that makes pixel_values", am.load, vit(), processor=sound_processor())


@pytest.mark.parametrize("name", ["wav2vec2", "hubert", "sew"])
def test_recordings_of_different_lengths(name: str) -> None:
    model = am.load(senses.plain(name), processor=sound_processor())
    long, short = samples(190), (samples(97) * 32767).astype(np.int16)
    acts = model.run([(16_000, long), (16_000, short)], points=["pattern", ("resid_post", 1)])
    given = sound_processor()([long, short / 32768], sampling_rate=16_000, return_tensors="pt", padding=True)
    with torch.no_grad():
        theirs = senses.plain(name)(**given, output_attentions=True).attentions
    real = acts.batch.mask[:, None, :, None]
    for layer in range(2):
        assert torch.allclose(acts["pattern", layer] * real, theirs[layer] * real, atol=1e-5)
    assert acts.batch.lengths[0] > acts.batch.lengths[1]


def test_a_wav_file_is_what_it_holds(tmp_path: Path) -> None:
    model = am.load(senses.plain("wav2vec2"), processor=sound_processor())
    wavfile.write(tmp_path / "a.wav", 16_000, samples(150))
    from_file, given = model.run(tmp_path / "a.wav"), model.run((16_000, samples(150)))
    assert from_file.logits is not None and torch.equal(from_file.logits, given.logits)


def test_bad_recordings_say_what_was_expected() -> None:
    model = am.load(senses.plain("wav2vec2"), processor=sound_processor())
    bad: list[tuple[Any, str]] = [
        ((8_000, samples(150)), r"takes 16000 samples per second; the recording has 8000.*resample_poly\("),
        ((16_000, samples(150).reshape(75, 2)), r"one channel.*75x2.*samples.mean\(axis=1\)"),
        ((16_000, samples(3)), "A recording of one frame has 16 samples"),
        ("a.wav", "pathlib.Path of a WAV file"),
        ({"audio": torch.zeros(9)}, 'must hold "input_values"'),
        (torch.zeros(2, 3, 5), r"\[batch, samples\]; got \(2, 3, 5\)"),
    ]  # fmt: skip
    for given, message in bad:
        refuses(message, model.run, given)
    refuses("without its processor", am.load(senses.plain("wav2vec2")).run, (16_000, samples(150)))


def test_the_times_of_frames_are_those_of_the_convolutions() -> None:
    """Changing the samples of one frame changes no frame that begins later or ends earlier."""
    model, count = senses.plain("wav2vec2_stable"), 137
    found = model.wav2vec2.feature_extractor(torch.zeros(1, count))
    labels = am.load(model).encode(torch.zeros(1, count)).tokens[0]
    assert len(labels) == found.shape[-1]
    steps = [round(float(label.removesuffix(" s")) * 16_000) for label in labels]
    assert np.abs(np.diff(steps) - 10).max() <= 2  # labels have four digits
    step, wide = 10, 6 + 5 * 2
    for frame in (0, 3, len(labels) - 1):
        changed = torch.zeros(1, count)
        changed[0, step * frame] = 1.0
        moved = (model.wav2vec2.feature_extractor(changed) - found).abs().amax(dim=1)[0] > 1e-6
        touching = [n for n in range(len(labels)) if step * n <= step * frame < step * n + wide]
        assert set(moved.nonzero().flatten().tolist()) <= set(touching) and moved[frame]


def test_a_spectrogram_peaks_at_the_tone() -> None:
    model = am.load(senses.plain("wav2vec2"), processor=sound_processor())
    time = np.arange(8_000) / 16_000
    tone = np.sin(2 * np.pi * np.where(time < 0.25, 1_000, 3_000) * time).astype(np.float32)
    assert isinstance(model.encoder, SoundEncoder)
    found = spectrogram_of(model.encoder, model.encode((16_000, tone)), 0)
    highest = found.bands[found.levels.argmax(axis=0)]
    assert np.abs(highest[found.times < 0.22] - 1_000).max() <= 40
    assert np.abs(highest[found.times > 0.28] - 3_000).max() <= 40
    assert found.levels.shape == (len(found.bands), len(found.times))
    ast = senses.hooked("ast")
    assert isinstance(ast.encoder, SoundEncoder)
    given = senses.inputs_of("ast")["input_values"]
    assert np.allclose(spectrogram_of(ast.encoder, ast.encode(given), 1).levels, given[1].T)
