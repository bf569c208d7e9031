"""Whisper: an encoder of sound, a decoder of tokens and cross-attention, against transformers and the raw weights."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import senses
import torch
import transformers
from caching import cached
from models import randomised
from scipy.io import wavfile  # type: ignore[import-untyped]
from senses import samples
from torch import Tensor

import attnmech as am
from attnmech.draw.page import render_page
from attnmech.errors import InputError, MissingPointError, UnsupportedModelError
from attnmech.model.files.load import UnprovenWarning
from attnmech.pages import limits

F32, F64 = torch.float32, torch.float64
STACKS = ("encoder", "decoder", "cross")
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>")


def raw(dtype: torch.dtype = F32, kind: str = "WhisperForConditionalGeneration", **options: Any) -> Any:
    model = randomised(senses.made(kind, "Whisper", senses.TRANSCRIBING | options), dtype=dtype)
    model.set_attn_implementation("eager")
    return model


@cached
def plain(dtype: torch.dtype = F32) -> Any:
    return raw(dtype)


@cached
def hooked(dtype: torch.dtype = F32) -> am.HookedModel:
    return am.load(plain(dtype))


def inputs(dtype: torch.dtype = F32) -> dict[str, Tensor]:
    """Three recordings of 18 columns (9 frames) and texts of 7 tokens, the second padded."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {
        "input_features": torch.randn(3, 7, 18, generator=generator, dtype=F64).to(dtype),
        "decoder_input_ids": torch.randint(3, 60, (3, 7), generator=generator),
        "decoder_attention_mask": mask,
    }


# -- against plain transformers ------------------------------------------------------------------------------


FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a token reads the next one": ("decoder.layers.1.fc1", lambda x: x + 0.5 * x.roll(-1, dims=1), "causal"),
    "a token reads the first one": ("decoder.layers.1.fc2", lambda x: x + 0.5 * x[:, :1], "padding"),
    "the encoder's heads write more": ("encoder.layers.1.self_attn.out_proj", lambda x: 1.01 * x, "encoder heads"),
    "cross-attention writes more": ("decoder.layers.0.encoder_attn.out_proj", lambda x: 1.01 * x, "cross heads"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str) -> None:
    path, change, check = FAULTS[fault]
    model = raw()
    model.model.get_submodule(path).register_forward_hook(lambda module, args, output: change(output))
    with pytest.warns(UnprovenWarning):
        certificate = am.load(model).certificate
    assert check in {failed.name for failed in certificate.failed}, repr(certificate)


def test_the_loss_is_that_of_the_decoder_s_tokens() -> None:
    given = inputs()
    with torch.no_grad():
        chances = plain()(**given).logits.log_softmax(dim=-1)
    for row, length in enumerate((7, 5, 7)):
        ids = given["decoder_input_ids"][row]
        naive = -sum(float(chances[row, place, ids[place + 1]]) for place in range(length - 1)) / (length - 1)
        assert float(hooked().loss(given)[row]) == pytest.approx(naive, rel=1e-5)
    assert float(am.ablate_heads(hooked(), given, heads=[(1, 2)]).effect[1, 2].abs()) > 0


# -- writing -------------------------------------------------------------------------------------------------


def test_generation_is_that_of_transformers() -> None:
    features = inputs()["input_features"]
    said = hooked().generate(features, 6, points=["cross.pattern"], stop_at_eos=False)
    assert said.target is not None
    model = raw()
    model.generation_config.eos_token_id = None
    expected = model.generate(features, max_new_tokens=6, do_sample=False, num_beams=1)
    assert said.target.ids[:, 1:].tolist() == expected.tolist()
    assert said.target.ids[:, 0].tolist() == [3, 3, 3]
    assert [step["cross.pattern", 2].shape for step in said.steps] == [(3, 4, 1, 9)] * 6
    again = hooked().run(said, points=["cross.pattern"])["cross.pattern", 2]
    rows = torch.cat([step["cross.pattern", 2] for step in said.steps], dim=2)
    torch.testing.assert_close(rows, again[:, :, :-1])


# -- recordings and texts ------------------------------------------------------------------------------------


@cache
def processor() -> Any:
    """Recordings of one second: 100 columns, 50 frames."""
    words = (*"abcdefgh", "Ġ", *SPECIAL)
    tokenizer = transformers.WhisperTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=[])
    extractor = transformers.WhisperFeatureExtractor(feature_size=7, chunk_length=1)
    return transformers.WhisperProcessor(extractor, tokenizer)


@cache
def speaking() -> Any:
    return raw(max_source_positions=50, decoder_start_token_id=10, eos_token_id=9)


def test_a_recording_with_its_text(tmp_path: Path) -> None:
    model, sound = am.load(speaking(), processor=processor()), (16_000, samples(9_000))
    wavfile.write(tmp_path / "sound.wav", *sound)
    batch = model.encode(tmp_path / "sound.wav", target="bad cab")
    assert batch.tokens[0][:3] == ("0.00 s", "0.02 s", "0.04 s") and len(batch.tokens[0]) == 50
    assert batch.target is not None
    ids = processor().tokenizer(text_target="bad cab").input_ids
    assert batch.target.ids.tolist() == [ids] and ids[:2] == [10, 14] and ids[-1] == 9  # its own start, once
    assert batch.target.tokens[0][2:6] == ("b", "a", "d", " ")
    assert batch.queries("cross").tokens == batch.target.tokens and batch.keys("cross").tokens == batch.tokens
    given = processor()(sound[1], sampling_rate=16_000, return_tensors="pt").input_features
    with torch.no_grad():
        theirs = speaking()(given, decoder_input_ids=torch.tensor([ids])).logits
    torch.testing.assert_close(model.run(batch).logits, theirs, rtol=1e-4, atol=1e-4)
    without = model.encode(sound).target
    assert without is not None and without.ids.tolist() == [[10]]
    assert model.position_texts([0, 10], "decoder") == ("a", "<|startoftranscript|>")
    assert model.position_texts([0, 10], "cross") == ("0.00 s", "0.20 s")


def test_a_folder_brings_both(tmp_path: Path) -> None:
    speaking().save_pretrained(tmp_path)
    processor().save_pretrained(tmp_path)
    target = am.load(tmp_path).encode((16_000, samples(700)), target="a").target
    assert target is not None and target.tokens[0][2] == "a"


def test_special_tokens_are_no_frames() -> None:
    """The id of a special token is also the number of a frame."""
    model = am.load(speaking(), processor=processor())
    batch = model.encode((16_000, samples(900)), target="bad")
    ran = model.run(batch, points=["decoder.pattern"])["decoder.pattern", 0]
    assert batch.target is not None
    chosen = batch.target.is_special[0]
    assert chosen.tolist() == [False] * (len(chosen) - 1) + [True] and not batch.is_special.any()
    with model.intervene(am.Intervention.remove_keys([(0, 1)], "special", stack="decoder")):
        cut = model.run(batch, points=["decoder.pattern"])["decoder.pattern", 0]
    expected = ran[0, 1].masked_fill(chosen, 0)
    torch.testing.assert_close(cut[0, 1], expected / expected.sum(dim=-1, keepdim=True))
    assert float((cut - ran)[0, 1, -1].abs().max()) > 1e-3
    for stack in ("encoder", "cross"):
        act = am.Intervention.remove_keys([(0, 1)], "special", stack=stack)
        with pytest.raises(InputError, match="frames are not special tokens"), model.intervene(act):
            pass


def test_bad_inputs_say_what_was_expected() -> None:
    given = inputs()
    features, ids = given["input_features"], given["decoder_input_ids"]
    bad: list[tuple[Any, str]] = [
        ({"decoder_input_ids": ids}, r'must hold "input_features" and may hold "decoder_input_ids"; got'),
        ({"input_features": features, "decoder_attention_mask": ids}, "needs decoder_input_ids, which are missing"),
        ({"input_features": features, "decoder_input_ids": ids[:2]}, "one row per text; got 2 rows for 3 texts"),
        ({"input_features": features, "decoder_input_ids": ids + 60}, "token ids must be from 0 to 59"),
        ({"input_features": features, "decoder_input_ids": ids.repeat(1, 5)}, "31 positions; the text has 35 tokens"),
        ({"input_features": features[:, :, :8], "decoder_input_ids": ids}, r"shape \[batch, 7, 18\]"),
        (ids, "floating-point tensor of input_features"),
    ]
    for each, message in bad:
        with pytest.raises(InputError, match=message):
            hooked().run(each)
    with pytest.raises(InputError, match="without a tokenizer"):
        hooked().encode(features[:1], target="one two three")
    with pytest.raises(MissingPointError, match="its encoder projects frames"):
        hooked().run(features, points=["embed"])
    with pytest.raises(InputError, match="one stack"):
        am.attention_flow(hooked(), given)
    with pytest.raises(InputError, match="it reads sound, and its frames are projected"):
        am.residual_drift(hooked(), given, stack="encoder")


# -- what must not pass --------------------------------------------------------------------------------------


def test_as_many_frames_as_the_probe_has_tokens() -> None:
    """Lengths identify an attention, so the probe's text and its recording have different lengths."""
    for frames in (13, 14, 22):
        assert am.load(raw(max_source_positions=frames)).certificate.ok


def test_an_encoder_of_images_is_refused() -> None:
    vision = transformers.ViTConfig(**senses.SIZES, image_size=12, patch_size=4)
    text = transformers.GPT2Config(vocab_size=30, n_embd=24, n_layer=2, n_head=3)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    with pytest.raises(UnsupportedModelError, match="its encoder reads images"):
        am.load(randomised(transformers.VisionEncoderDecoderModel(config)))


# -- the report ----------------------------------------------------------------------------------------------


def one() -> dict[str, Tensor]:
    return {name: value[:1] for name, value in inputs().items()}


def prose(report: am.results.Report) -> str:
    html = re.sub(r"<(script|style|pre|table)\b.*?</\1>", " ", render_page(report._page()), flags=re.DOTALL)
    return re.sub(r"<[^>]+>", " ", html)


def test_a_report_speaks_of_frames_and_tokens() -> None:
    report = am.report(hooked(), one())
    whole = report.to_html()
    assert all(words in whole for words in ("encoder: frames to frames", "cross: tokens to frames"))
    said = {name: prose(each) for name, each in {"encoder": report, **report.others}.items()}
    assert not re.search(r"\b(text|token)s?\b", said["encoder"])
    assert not re.search(r"\b(recording|frames)\b", said["decoder"])
    assert "encoder's text" not in said["cross"] and "key token" not in said["cross"]
    assert "one column for each key frame" in said["cross"] and "One row for each query token" in said["cross"]
    assert report.others["cross"].pattern.shape == (3, 4, 7, 9)
    assert report.others["decoder"].sense is None


def test_of_a_long_recording_the_report_leaves_the_encoder_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whisper's 1,500 frames are too many for a map of the encoder, but not for a map of cross-attention."""
    monkeypatch.setattr(limits, "MAX_POSITIONS", 8)
    report = am.report(hooked(), one())
    assert report.stack == "decoder" and list(report.others) == ["cross"]
    assert report.others["cross"].pattern.shape == (3, 4, 7, 9)
    for each in (report, report.others["cross"]):
        assert any("at most 8 patches or frames, and this input has 9" in note for note in each.notes)
    page = report.to_html()
    assert "cross: tokens to frames" in page and "encoder: frames to frames" not in page
