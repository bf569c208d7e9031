"""Models of images and sound, read from a traced pass, against plain transformers and their raw weights."""

import copy
from itertools import cycle
from typing import Any

import pytest
import senses
import torch
from caching import cached
from comparing import close
from senses import IMAGES, WAVE, hooked, inputs_of, plain, raw
from torch import Tensor

import attnmech as am
from attnmech.errors import InputError, MissingPointError, UnsupportedModelError
from attnmech.model.parts.mask import MaskRule

F32, F64 = torch.float32, torch.float64


@cached
def acts_of(name: str, dtype: torch.dtype = F32) -> am.results.Activations:
    model = hooked(name, dtype)
    points = ["q", "k", "v", "scores", "pattern", "z", "attn_raw", "attn_out", "resid_pre", "resid_post"]
    if model.points["logits"].absent is None:
        points.append("logits")
    return model.run(inputs_of(name, dtype=dtype), points=points)


# -- certificate, logits, patterns ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dinov2_registers", "dinov3", "siglip_vision", "wav2vec2", "ast", "whisper_encoder"])
def test_in_float64(name: str) -> None:
    assert hooked(name, F64).certificate.ok, repr(hooked(name, F64).certificate)
    split = am.decompose_scores(hooked(name, F64), inputs_of(name, dtype=F64))
    assert float((split.residual / split.largest).max()) <= 1e-12


# -- what enters the stream, position by position ------------------------------------------------------------

LABELS = {
    "vit": ("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"),
    "deit": ("[CLS]", "[DIST]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"),
    "dinov2_registers": ("[CLS]", "register 1", "register 2", "register 3", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2",
                         "2,0", "2,1", "2,2"),
    "yolos": ("[CLS]", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2", *(f"detection {n}" for n in range(1, 6))),
    "ast": ("[CLS]", "[DIST]", *(f"{t / 50:.2f} s, mel {m}" for m in (0, 3, 6) for t in range(5))),
    "whisper_encoder": tuple(f"{t / 50:.2f} s" for t in range(9)),
    "sew": tuple(f"{t * 20 / 16000:.4f} s" for t in range(6)),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_positions_are_labelled(name: str) -> None:
    assert hooked(name).encode(inputs_of(name)).tokens[0] == LABELS[name]


@pytest.mark.parametrize("name", IMAGES)
def test_a_patch_s_pixels_change_its_own_position_and_no_other(name: str) -> None:
    model, pixels = hooked(name), inputs_of(name, 1)["pixel_values"]
    labels = model.encode(pixels).tokens[0]
    before = model.run(pixels, points=[("resid_pre", 0)])["resid_pre", 0]
    for place, label in enumerate(labels):
        if "," in label:
            row, column = map(int, label.split(","))
            changed = pixels.clone()
            changed[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
            after = model.run(changed, points=[("resid_pre", 0)])["resid_pre", 0]
            moved = (after - before).abs().amax(dim=-1)[0] > 1e-4
            assert moved.nonzero().flatten().tolist() == [place]


def test_registers_elsewhere_are_labelled_where_they_are() -> None:
    """If registers come after the patches, so do their labels."""
    model = raw("dinov2_registers")
    inner = model.embeddings.forward

    def last(*args: Any, **kwargs: Any) -> Tensor:
        made = inner(*args, **kwargs)
        return torch.cat((made[:, :1], made[:, 4:], made[:, 1:4]), dim=1)

    model.embeddings.forward = last
    labels = am.load(model).encode(inputs_of("dinov2_registers")).tokens[0]
    assert labels == ("[CLS]", *LABELS["dinov2_registers"][4:], "register 1", "register 2", "register 3")


# -- LayerScale ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dinov2", "dinov2_registers", "dinov3"])
def test_attn_out_is_what_layer_scale_makes_of_attn_raw(name: str) -> None:
    base, acts = plain(name).base_model, acts_of(name)
    scale = base.get_submodule(hooked(name).architecture.blocks)[1].layer_scale1.lambda1
    torch.testing.assert_close(acts["attn_out", 1], acts["attn_raw", 1] * scale)
    written = torch.einsum("bphd,hdm->bphm", acts["z", 1], hooked(name).weights(1).W_O) * scale
    updates = am.residual_updates(hooked(name), inputs_of(name))
    relative = written.norm(dim=-1) / acts["resid_pre", 1].norm(dim=-1)[:, :, None]
    ours = updates.to_frame().set_index(["layer", "head"]).loc[1]
    assert relative[:, 1:].mean(dim=(0, 1)).tolist() == pytest.approx(ours["magnitude"].tolist(), rel=1e-4)


def test_a_forgotten_layer_scale_fails() -> None:
    model = raw("dinov2")
    wrong = copy.copy(am.load(model).architecture)
    object.__setattr__(wrong, "attn_out", "")
    with pytest.warns(UserWarning, match="stream"):
        certificate = am.load(model, architecture=wrong).certificate
    assert {"stream", "chain"} & {check.name for check in certificate.failed}


def test_a_dropped_position_bias_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    position = am.decompose_scores(hooked("beit"), inputs_of("beit")).terms["position"]
    assert position.shape[-2:] == (10, 10) and float(position.std()) > 0.1
    monkeypatch.setattr(MaskRule, "__radd__", lambda rule, bias: rule)
    with pytest.warns(UserWarning, match="transformers"):
        certificate = am.load(raw("beit")).certificate
    assert {"transformers", "attentions"} <= {check.name for check in certificate.failed}


# -- other sizes, padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), [*zip(("dinov2", "dinov3", "clip_vision", "siglip_vision", "ijepa"), cycle([(8, 16), (21, 14)]))]
)
def test_images_of_other_sizes(name: str, size: tuple[int, int]) -> None:
    pixels = torch.randn(2, 2, *size, generator=torch.Generator().manual_seed(3))
    model, options = plain(name), {}
    if name not in ("dinov2", "dinov3"):
        options = {"interpolate_pos_encoding": True}
        with pytest.raises(InputError, match="interpolate_pos_encoding"):
            hooked(name).run(pixels)
    acts = hooked(name).run({"pixel_values": pixels, **options}, points=["pattern"])
    with torch.no_grad():
        theirs = model(pixels, **options, output_attentions=True).attentions
    for layer in range(2):
        close(acts["pattern", layer], theirs[layer], 1e-5)
    labels = acts.batch.tokens[0]
    patches = [f"{row},{column}" for row in range(size[0] // 4) for column in range(size[1] // 4)]
    assert [label for label in labels if "," in label] == patches
    assert hooked(name).position_texts(acts.batch.ids[0].tolist()) == labels


@pytest.mark.parametrize("name", WAVE)
def test_padding_counts_frames(name: str) -> None:
    batch = acts_of(name).batch
    frames = (27 - 3) // 2 + 1, ((81 - 6) // 5 + 1 - 3) // 2 + 1
    # SEW pools frames by two: a pair with one real frame is real, a last frame without a partner is dropped.
    lengths = [6, 4, 6] if name == "sew" else [frames[0], frames[1], frames[0]]
    assert batch.lengths.tolist() == lengths
    for layer in range(2):
        assert float(acts_of(name)["pattern", layer][1, :, :, int(batch.lengths[1]) :].abs().max()) == 0


def test_what_cannot_be_read_is_refused_by_name() -> None:
    from models import randomised

    for kind in ("CLIP", "Siglip"):
        with pytest.raises(UnsupportedModelError, match=r"am.load\(model.text_model\) or am.load\(model.vision_m"):
            am.load(randomised(senses.two_towers(kind)))
    mid = randomised(senses.made("YolosModel", "Yolos", senses.SIZES | senses.OBLONG | {"image_size": [8, 12]}))
    with pytest.raises(UnsupportedModelError, match="something is added to the stream between"):
        am.load(mid)
    masked = randomised(senses.made("ViTMAEModel", "ViTMAE", senses.SIZES | senses.SQUARE))
    with pytest.raises(UnsupportedModelError, match=r"ViTModel\.from_pretrained"):
        am.load(masked)
    lm = randomised(senses.made("WavLMModel", "WavLM", senses.WAVES))
    with pytest.raises(UnsupportedModelError, match="WavLM"):
        am.load(lm)


@pytest.mark.parametrize(("name", "said"), [("wav2vec2", "sound has no tokens"), ("vit", "an image has no tokens")])
def test_sound_and_images_are_no_tokens(name: str, said: str) -> None:
    with pytest.raises(MissingPointError, match=said):
        hooked(name).run(inputs_of(name), points=["embed"])
    with pytest.raises(InputError, match="bos is only for texts"):
        hooked(name).run(inputs_of(name), bos=True)
