"""Pictures and sounds among the tokens of a text, against plain transformers."""

import inspect
from typing import Any

import merged
import models
import numpy as np
import pytest
import tiny
import torch
import transformers
from PIL import Image
from torch import Tensor

import attnmech as am
from attnmech.errors import CertificateError, InputError, UnsupportedModelError
from attnmech.pages import limits
from attnmech.pages.report import sense_section

WORDS = (9, 12)
NAMES = {
    "llava": ["<img 1: row 1, col 1>", "<img 1: row 1, col 2>"],
    "gemma3": ["<img 1: row 1, col 1>", "<img 1: row 1, col 2>"],
    "idefics3": ["<img 1, tile 1: row 1, col 1>", "<img 1, tile 1: row 1, col 2>"],
    "qwen2_audio": ["<sound 1: 0.12 s>", "<sound 1: 0.28 s>"],
}
"""The names of the first two tokens of a picture or sound."""


@pytest.fixture(scope="module", params=merged.KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Any, am.HookedModel, list[dict[str, Tensor]]]:
    """The plain model of a kind, the loaded one, and two texts, each with a picture."""
    made = merged.KINDS[request.param]
    plain = merged.model_of(request.param)
    return plain, am.load(plain), [merged.inputs_of(made, number, words) for number, words in enumerate(WORDS)]


def logits_of(plain: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return plain(**inputs).logits


def test_each_text_is_read_as_by_transformers(kind: tuple[Any, am.HookedModel, list[dict[str, Tensor]]]) -> None:
    plain, model, texts = kind
    near = models.in_attention(plain, "eager")
    expected = [logits_of(plain, text) for text in texts]
    within = 5e-6 * float(expected[0].abs().max())
    other = texts[0] | {name: -value for name, value in texts[0].items() if value.is_floating_point()}
    assert float((logits_of(plain, other) - expected[0]).abs().max()) > 0.1
    both = model.run(texts, points=["pattern", "embed", "logits"])
    assert model.prove_merged.certificates[-1].ok and both.batch.padded  # type: ignore[attr-defined]
    for number, text in enumerate(texts):
        length = text["input_ids"].shape[1]
        alone = model.run(text, points=["pattern", "embed", "logits"])
        torch.testing.assert_close(alone.logits, expected[number], atol=within, rtol=0)
        torch.testing.assert_close(both.logits[number, :length], expected[number][0], atol=within, rtol=0)
        with torch.no_grad():
            patterns = near(**text, output_attentions=True).attentions
        for layer, pattern in enumerate(patterns):
            torch.testing.assert_close(alone["pattern", layer], pattern, atol=1e-5, rtol=0)
            torch.testing.assert_close(
                both["pattern", layer][number, :, :length, :length], pattern[0], atol=1e-5, rtol=0
            )
        held = text["input_ids"][0] == merged.IMAGE
        rows = plain.get_input_embeddings()(text["input_ids"])[0]
        torch.testing.assert_close(alone["embed"][0, ~held], rows[~held], atol=1e-5, rtol=0)
        assert not torch.allclose(alone["embed"][0, held], rows[held], atol=1e-2)
        if not model.causal:
            continue
        targets = text["input_ids"][0, 1:]
        losses = torch.nn.functional.cross_entropy(expected[number][0, :-1], targets, reduction="none")
        assert float(model.loss(text)) == pytest.approx(float(losses[targets != merged.IMAGE].mean()), abs=1e-4)


def test_edits_and_generation(kind: tuple[Any, am.HookedModel, list[dict[str, Tensor]]]) -> None:
    plain, model, (text, _) = kind
    if model.causal:
        with torch.no_grad():
            theirs = plain.generate(**text, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=[96])
        continued = model.generate(text, 4, stop_at_eos=False)
        assert continued.ids.tolist() == theirs.tolist() and continued.senses
        with model.intervene(am.Intervention.zero([(1, 0)], positions=[2])):
            cached, whole = (
                model.generate(text, 4, stop_at_eos=False, points=["logits"], cache=cache) for cache in (True, False)
            )
        assert torch.equal(cached.ids, whole.ids) and cached.steps[-1].logits.shape[1] == 1
        ends = [made.steps[-1].logits[:, -1] for made in (cached, whole)]
        torch.testing.assert_close(*ends, atol=5e-6 * float(ends[0].abs().max()), rtol=0)
    stack = model.stacks[""]
    width, head = stack.d_head, stack.n_heads - 1
    out = plain.base_model.get_submodule(f"{stack.architecture.blocks}.1.{stack.architecture.out}")

    def without(module: Any, args: Any) -> Any:
        z = args[0].clone()
        z[..., width * head : width * (head + 1)] = 0
        return (z,)

    with out.register_forward_pre_hook(without):
        expected = logits_of(plain, text)
    with model.intervene(am.Intervention.zero([(1, head)])):
        ablated = model.run(text).logits
    torch.testing.assert_close(ablated, expected, atol=5e-6 * float(expected.abs().max()), rtol=0)
    assert not torch.allclose(ablated, model.run(text).logits, atol=1e-3)


def test_questions_about_a_batch_with_pictures() -> None:
    plain = merged.model_of("llava")
    texts = [merged.inputs_of(merged.KINDS["llava"], number, words) for number, words in enumerate(WORDS)]
    model = am.load(plain)
    focus = am.attention_focus(model, texts)
    patterns = [model.run(text, points=["pattern"])["pattern", 2][0] for text in texts]
    received = torch.cat([pattern[:, 1:, 0] for pattern in patterns], dim=1).mean(dim=1)
    torch.testing.assert_close(focus.first_mass[2].float(), received, atol=1e-5, rtol=0)
    effects = am.ablate_heads(model, texts, metric="loss")
    with model.intervene(am.Intervention.zero([(1, 2)])):
        changed = model.loss(texts)
    torch.testing.assert_close(effects.per_text[1, 2], changed - model.loss(texts), atol=1e-5, rtol=0)
    between = am.segment_attention(model, texts, segments="kind")
    for number, pattern in enumerate(patterns):
        parts = [range(2), range(2, 18), range(18, len(texts[number]["input_ids"][0]))]
        mass = torch.stack([torch.stack([pattern[:, s][..., t].sum(-1).mean(-1) for t in parts], -1) for s in parts], 1)
        torch.testing.assert_close(between.mass(number)[2].float(), mass, atol=1e-5, rtol=0)
    assert "embedding of tokens and pictures" in am.decompose_by_source(model, texts[0]).sources
    assert (
        model.encode(texts[0]).digests.tolist()
        != model.encode(texts[0] | {"pixel_values": texts[1]["pixel_values"]}).digests.tolist()
    )
    with pytest.raises(InputError, match="texts with pixel_values cannot be"):
        am.joint_embedding(model, texts[0])
    by_type = am.head_types(model, texts)
    on_picture = torch.cat([pattern[:, 18:, 2:18].sum(dim=-1) for pattern in patterns], dim=1)
    torch.testing.assert_close(by_type.scores["media"][2].float(), on_picture.mean(dim=1), atol=1e-5, rtol=0)
    batch = model.encode(texts)
    assert len(batch.distinct[0, 2:18].unique()) == 16 and torch.equal(batch.distinct[:, 18:], batch.ids[:, 18:])
    crowd = {name: torch.cat((texts[0][name],) * 2) for name in texts[0]}
    with pytest.raises(InputError, match="give a list"):
        model.run(crowd)
    with pytest.raises(InputError, match="got pixel_mask as well"):
        model.run(texts[0] | {"pixel_mask": torch.ones(1, 4)})


def test_the_position_term_of_a_picture_is_no_function_of_distance() -> None:
    """M-RoPE gives a picture's tokens their row and column."""
    text = merged.inputs_of(merged.KINDS["qwen2_vl"], 0, 9)
    model = am.load(merged.model_of("qwen2_vl"))
    with pytest.raises(InputError, match="not a function of distance"):
        am.decompose_scores(model, text, centre="mean").position_kernel()
    alone = am.decompose_scores(model, torch.arange(50, 70)[None], centre="mean")
    assert alone.position_kernel().values.abs().amax() > 0.01


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_missing_token_types_are_refused(name: str) -> None:
    made = merged.KINDS[name]
    text = merged.inputs_of(made, 0, 9)
    model = am.load(merged.model_of(name))
    types = text.pop(made.types)
    with pytest.raises(InputError, match=str(made.types)):
        model.run(text)
    model.run(text | {made.types: types})
    with pytest.raises(InputError, match=str(made.types)):
        model.run(text)


@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3", "qwen2_audio"])
def test_what_the_models_processor_makes_of_a_text_with_pictures(name: str) -> None:
    plain, processor, mark = merged.with_processor(name)
    model = am.load(plain, processor=processor)
    kind, argument = ("sound", "audio") if name == "qwen2_audio" else ("image", "images")
    own = merged.recording(3) if kind == "sound" else merged.picture(3)
    made = processor(
        text=[f"the {mark} keys"], **{argument: [own[1] if kind == "sound" else own]}, return_tensors="pt",
        return_mm_token_type_ids=True,
    )  # fmt: skip
    taken = inspect.signature(plain.forward).parameters
    expected = logits_of(plain, {key: value for key, value in made.items() if key in taken})
    content = [{"type": "text", "text": "the"}, {"type": argument.rstrip("s"), argument.rstrip("s"): own}]
    chat = [{"role": "user", "content": [*content, {"type": "text", "text": "keys"}]}]
    for entry in ({"text": f"the {mark} keys", f"{kind}s": [own]}, chat):
        batch = model.encode(entry)
        held = batch.is_sensed[0]
        assert batch.ids.tolist() == made["input_ids"].tolist() and int(held.sum()) >= 4
        assert batch.kinds(0).count(kind) == int(held.sum()) and batch.kinds(0)[:2] == ("special", "text")
        named = [text for text, is_held in zip(batch.tokens[0], held, strict=True) if is_held]
        assert named[:2] == NAMES[name] and batch.held[0][int(held.int().argmax())] is not None
        torch.testing.assert_close(model.run(batch).logits, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    several = [{"text": f"the {mark} keys", f"{kind}s": own}, {"text": "the keys"}, chat]
    both = model.run(several).logits
    torch.testing.assert_close(both[2:], both[:1])
    in_turn = am.attention_focus(model, iter(several))
    torch.testing.assert_close(in_turn.entropy, am.attention_focus(model, several).entropy)
    with pytest.raises(InputError, match="processor cannot read this"):
        model.run({"text": "the keys", f"{kind}s": [own]})
    with pytest.raises(InputError, match="was loaded without its processor"):
        am.load(plain, tokenizer=processor.tokenizer).run(chat)


def test_pictures_added_between_blocks_are_writers_of_their_own() -> None:
    """Qwen3-VL adds what its tower reads in two layers to the stream after blocks 0 and 1."""
    plain = merged.model_of("qwen3_vl", merged.DEEP)
    model = am.load(plain)
    texts = [merged.inputs_of(merged.DEEP, number, words) for number, words in enumerate(WORDS)]
    added = dict[str, Tensor]()

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        added.update(enumerate(kwargs["deepstack_visual_embeds"]))

    plain.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    acts = model.run(texts[0], points=["resid_pre", "resid_post", "logits"])
    torch.testing.assert_close(acts.logits, logits_of(plain, texts[0]), atol=2e-5, rtol=0)
    held = acts.batch.is_sensed[0]
    for block in (0, 1, 2):
        between = (acts["resid_pre", block + 1] - acts["resid_post", block])[0]
        assert not between[~held].any() and bool(between[held].any()) == (block in added)
        torch.testing.assert_close(between[held], added.get(block, 0 * between[held]), atol=1e-5, rtol=0)
    sources = am.decompose_by_source(model, texts[0])
    assert sources.sources.index("pictures after L0") < sources.sources.index("L1H0")
    assert "pictures after L1" in sources.sources and float(sources.residual.nan_to_num().max()) < 1e-4
    effects = am.ablate_heads(model, texts, metric="loss")
    for head in ((0, 1), (1, 2), (2, 3), (3, 0)):  # passes that begin below, at and above the sums
        with model.intervene(am.Intervention.zero([head])):
            changed = model.loss(texts)
        torch.testing.assert_close(effects.per_text[head], changed - model.loss(texts), atol=1e-5, rtol=0)
    other = texts[0] | {"pixel_values": texts[0]["pixel_values"] + 1}
    with pytest.raises(InputError, match="adds pictures to the stream between its blocks"):
        am.attribute(model, texts[0], other, metric="loss", edges=True)


def test_edits_in_force_are_not_taken_for_the_models_own() -> None:
    text, model = merged.inputs_of(merged.KINDS["llava"], 0, 9), am.load(merged.model_of("llava"))
    with model.intervene(am.Intervention.zero([(0, 1)])):
        sources = am.decompose_by_source(model, text)
    assert float(sources.residual.nan_to_num().max()) < 1e-4
    both = model.encode([{"input_ids": torch.arange(50, 60)[None]}, text])
    torch.testing.assert_close(model.run(both.alone(0)).logits, model.run(both).logits[:1, :10], atol=2e-5, rtol=0)
    assert model.certificate.checks[-1].name == "merged"
    am.certify(model)
    assert model.certificate.checks[-1].name != "merged"
    model.run(text)
    assert [check.name for check in model.certificate.checks].count("merged") == 1
    deep, other = am.load(merged.model_of("qwen3_vl", merged.DEEP)), merged.inputs_of(merged.DEEP, 0, 9)
    edit = am.Intervention.add("resid_pre", torch.ones(deep.d_model), layers=[1])
    with deep.intervene(edit), pytest.raises(InputError, match="cannot be told from edits"):
        am.decompose_by_source(deep, other)


@pytest.mark.parametrize("fault", ["at a text token", "by the stream"])
def test_what_else_is_added_between_blocks_is_refused(fault: str) -> None:
    text, model = merged.inputs_of(merged.DEEP, 0, 9), am.load(merged.model_of("qwen3_vl", merged.DEEP))
    inner = model.base.language_model
    whole = inner._deepstack_process

    def wrong(stream: Tensor, places: Tensor, pictures: Tensor) -> Tensor:
        if fault == "by the stream":
            return torch.where(places[..., None], 1.01 * stream, stream)
        return whole(stream, places, pictures) + 0.01

    inner._deepstack_process = wrong
    for _ in range(2):
        with pytest.raises(CertificateError, match=r"is not proven.* Its text alone is certified"):
            model.run(text)
    assert model.run(torch.arange(50, 60)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in ("llava", "gemma3", "qwen2_vl") for fault in ("blind", "turned")),
        ("gemma3", "typeless"),
    ],
)
def test_a_wrong_pass_is_refused(name: str, fault: str) -> None:
    """Pixels zeroed, pictures of a batch in another order, and token types dropped, in attnmech's pass alone."""
    text, model = merged.inputs_of(merged.KINDS[name], 0, 9), am.load(merged.model_of(name))

    def wrong(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if fault == "typeless":
            kwargs["token_type_ids"] = torch.zeros_like(kwargs["token_type_ids"])
        elif (pixels := kwargs.get("pixel_values")) is not None:
            kwargs["pixel_values"] = pixels * 0 if fault == "blind" else pixels.flip(0)
        return args, kwargs

    model.base.register_forward_pre_hook(wrong, with_kwargs=True)
    with pytest.raises(CertificateError, match="is not proven"):
        model.run(text)


def test_the_page_shows_attention_on_the_users_pictures() -> None:
    plain, processor, mark = merged.with_processor("llava")
    model = am.load(plain, processor=processor)
    pictures = [merged.picture(1), merged.picture(2, width=50, height=60)]
    acts = model.run({"text": f"the {mark} keys {mark} here", "images": pictures}, points=["pattern"])  # type: ignore[dict-item]
    batch = acts.batch
    pattern = torch.stack([acts["pattern", layer][0] for layer in range(model.n_layers)]).numpy()
    section = sense_section(model, batch, pattern, "call")
    assert section is not None
    held = batch.is_sensed[0].nonzero()[:, 0].tolist()
    own = held[:16], held[16:]
    for query in (len(batch.tokens[0]) - 1, held[20], held[3]):
        figure = section.figures["picture-attention"].figure(layer=1, head=2, query=query)  # type: ignore[union-attr]
        for number, places in enumerate(own):
            values, hidden = figure.data[2 * number].z, figure.data[2 * number + 1].z
            assert np.nan_to_num(values) == pytest.approx(pattern[1, 2, query, places], abs=1e-6)
            assert list(hidden) == [int(place > query) for place in places]
        frame = figure.layout.shapes[0]
        left, top, right, bottom = (0.0, 0.0, 40.0, 30.0)
        inside = left <= frame.x0 < frame.x1 <= right and top <= frame.y0 < frame.y1 <= bottom
        assert inside == (query == held[3])
    view = acts.show("pattern", layer=1, view="picture", query=held[3])
    assert view.data["choices"] == {"layer": [1], "head": list(range(6))}
    assert np.nan_to_num(np.array(view.data["data"][0]["z"], float)) == pytest.approx(
        pattern[1, 0, held[3], own[0]], abs=1e-6
    )
    with pytest.raises(InputError, match="this text has none"):
        model.run("the keys", points=["pattern"]).show("pattern", view="picture")
    page = am.report(model, batch)
    assert page.certificate.checks[-1].name == "merged" and page.certificate.checks[-1].passed
    assert page.sense is not None and "image 2" in page.to_html()
    with pytest.raises(InputError, match="shows a text with pictures or sounds whole"):
        am.report(model, batch, start=3)


def test_a_page_of_many_patches_shows_the_rows_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, processor, mark = merged.with_processor("llava")
    model = am.load(plain, processor=processor)
    entry = {"text": f"the {mark} keys {mark} are here", "images": [merged.picture(1), merged.picture(2)]}
    batch = model.encode(entry)
    length, first = batch.ids.shape[1], int(batch.is_sensed[0].nonzero()[-1]) + 1
    heads, rows = model.n_layers * model.n_heads, length - first
    monkeypatch.setattr(limits, "MAX_CELLS", heads * rows * length)
    page = am.report(model, batch)
    assert (page.first, page.scores.layers, rows) == (first, tuple(range(model.n_layers)), 2)
    acts = model.run(batch, points=["pattern", "scores"])
    patterns, scores = (torch.stack([acts[name, layer][0] for layer in range(4)]) for name in ("pattern", "scores"))
    assert torch.equal(page.pattern, patterns[:, :, first:])
    numbers = page.scores.numbers(pattern=page.pattern, first=first)
    seen = ~np.isnan(numbers.scores)
    assert seen.sum() == heads * (2 * length - 1)
    assert numbers.scores[seen] == pytest.approx(scores[:, :, first:].numpy()[seen], abs=1e-4)
    figure = page.sense.figures["picture-attention"].figure(layer=2, head=1, query=1)  # type: ignore[union-attr]
    held = batch.is_sensed[0].nonzero()[:, 0].tolist()
    assert np.nan_to_num(figure.data[2].z) == pytest.approx(patterns[2, 1, first + 1, held[16:]].numpy(), abs=1e-6)
    assert all(shape.x0 < 0 for shape in figure.layout.shapes)  # a query of the text has no patch to frame
    several = am.report(model, [entry, "the keys are here"])
    assert [text.first for text in several.texts] == [first, 0] and "the keys are here" in several.to_html()
    with pytest.raises(InputError, match=r'shows the probabilities of "pattern"'):
        acts.show("scores", view="picture")
    html = page.to_html()
    assert "Queries: the tokens after the last picture or sound" in html and f"Only the rows of {rows} tokens" in html
    assert f'"{length - 1} here"' in html and f'"{rows - 1} here"' not in html


def test_a_planted_head_follows_a_white_square() -> None:
    """The last token attends to the patch where the square is, by its name and by its box on the page."""
    plain, processor, mark = merged.with_processor("llava")
    squares = [(row, column) for row in range(4) for column in range(4)]

    def text_with(row: int, column: int) -> Any:
        pixels = np.zeros((32, 32, 3), dtype=np.uint8)
        pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 255
        return {"text": f"the {mark} keys", "images": [Image.fromarray(pixels)]}

    texts = [text_with(*square) for square in squares]
    fresh = am.load(plain, processor=processor)
    batch, read = fresh.encode(texts), fresh.run(texts, points=["attn_in"])["attn_in", 1]
    patches = read[batch.is_sensed].view(16, 16, -1)[::2]  # the other half is held out
    key = (patches[torch.arange(8), 2 * torch.arange(8)] - patches.mean(dim=1)).mean(dim=0)
    query, width, head = read[::2, -1].mean(dim=0), fresh.d_head, 4
    dimension, kv_head = width // 2 - 1, head // 3  # which rotates least
    attention = plain.model.language_model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight[head * width : (head + 1) * width] = 0
        attention.k_proj.weight[kv_head * width : (kv_head + 1) * width] = 0
        attention.q_proj.weight[head * width + dimension] = 40 * query / query.norm() ** 2
        attention.k_proj.weight[kv_head * width + dimension] = 10 * key / key.norm() ** 2
    model = am.load(plain, processor=processor)
    pattern = model.run(texts, points=["pattern"])["pattern", 1][:, head, -1]
    for number, (row, column) in list(enumerate(squares))[1::2]:
        most = int(pattern[number].argmax())
        assert batch.tokens[number][most] == f"<img 1: row {row + 1}, col {column + 1}>"
        assert float(pattern[number, most]) > 0.9
    page = am.report(model, texts[6]).sense
    drawn = page.figures["picture-attention"].figure(layer=1, head=head, query=18)  # type: ignore[union-attr]
    brightest = int(np.nanargmax(np.array(drawn.data[0].z, float)))
    assert (drawn.data[0].x[brightest], drawn.data[0].y[brightest]) == pytest.approx((20, 12), abs=0.1)


# -- towers, and models of other kinds -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", ["llava", "idefics3", "internvl", "llama4", "qwen2_audio"])
def test_a_tower_is_a_model_of_its_own(name: str) -> None:
    plain = merged.model_of(name, merged.LLAMA4 if name == "llama4" else None)
    if name == "llama4":  # whose complex buffer the cast to float32 has made real
        turned = plain.vision_model.rotary_embedding
        turned.freqs_ci = turned._compute_freqs_ci(turned.config)
    model, sense = am.load(plain), "sound" if name == "qwen2_audio" else "vision"
    tower = getattr(model, sense)
    assert tower is getattr(model, sense) and tower.certificate.ok
    assert tower.name == f"{model.name} ({sense} tower)" and tower.source == f"model.{sense}"
    path = next(path for path in ("vision_tower", "vision_model", "audio_tower") if hasattr(plain.base_model, path))
    part = models.in_attention(getattr(plain.base_model, path), "eager")
    inputs = torch.randn(2, *((16, 20) if sense == "sound" else (3, 32, 32)))
    patterns = part(inputs, output_attentions=True, output_hidden_states=True).attentions
    acts = tower.run(inputs, points=["pattern"])
    for layer, pattern in enumerate(patterns):
        torch.testing.assert_close(acts["pattern", layer], pattern, atol=1e-5, rtol=0)
    other = "vision" if sense == "sound" else "sound"
    with pytest.raises(InputError, match=f"has no {other} tower"):
        getattr(model, other)


@pytest.mark.parametrize("name", ["llava", "idefics3", "qwen2_audio"])
def test_a_tower_takes_what_the_processor_reads(name: str) -> None:
    plain, processor, _ = merged.with_processor(name)
    model = am.load(plain, processor=processor)
    if name == "qwen2_audio":
        made = processor.feature_extractor(merged.recording(3)[1], sampling_rate=16000, return_tensors="pt")
        acts = model.sound.run(merged.recording(3), points=["pattern"])
        made, part = made["input_features"], plain.base_model.audio_tower
    else:
        acts = model.vision.run(merged.picture(3), points=["pattern"])
        made = processor.image_processor(merged.picture(3), return_tensors="pt")["pixel_values"].flatten(0, -4)
        part = getattr(plain.base_model, "vision_tower", None) or plain.base_model.vision_model
    theirs = models.in_attention(part, "eager")(made, output_attentions=True).attentions
    torch.testing.assert_close(acts["pattern", 3], theirs[3], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "argument"), [("qwen2_vl", "grid_thw"), ("mistral3", "image_sizes"), ("mllama", "aspect_ratio_ids")]
)
def test_a_tower_whose_pictures_differ_in_size_is_refused(name: str, argument: str) -> None:
    model = am.load(merged.model_of(name, merged.MLLAMA if name == "mllama" else None))
    with pytest.raises(UnsupportedModelError, match=f"of different sizes, which {argument} tells apart"):
        _ = model.vision
    if name == "mllama":
        with pytest.raises(InputError, match="its blocks 1, 3 read pictures by cross-attention"):
            model.run(merged.inputs_of(merged.MLLAMA, 0, 9))
        with pytest.raises(InputError, match=r"only the text of this model\. Leave it out"):
            model.run(torch.tensor([[50, merged.IMAGE, 60]]))


def test_a_module_beside_the_blocks_may_merge() -> None:
    texts = [merged.inputs_of(merged.PHI4, number, words) for number, words in enumerate(WORDS)]
    model = am.load(merged.model_of("phi4_multimodal", merged.PHI4))
    acts = model.run(texts, points=["embed", "logits"])
    assert model.prove_merged.certificates[-1].ok  # type: ignore[attr-defined]
    plain = merged.model_of("phi4_multimodal", merged.PHI4)
    for number, text in enumerate(texts):
        expected, length = logits_of(plain, text)[0], text["input_ids"].shape[1]
        torch.testing.assert_close(acts.logits[number, :length], expected, atol=2e-5, rtol=0)
        held = text["input_ids"][0] == merged.IMAGE
        rows = plain.get_input_embeddings()(text["input_ids"])[0]
        same = (acts["embed"][number, :length] == rows).all(dim=-1)
        assert bool(same[~held].all()) and not bool(same[held].any())


def test_a_model_that_reads_no_text_alone_names_its_parts() -> None:
    plain = tiny.merging("blip-2", {"vision_config.image_size": 32, "vision_config.patch_size": 8})
    with pytest.raises(UnsupportedModelError, match=r"load one: am\.load\(model\.vision_model\) or am\.load\(model\.l"):
        am.load(plain)
    assert am.load(plain.vision_model).certificate.ok


def test_positions_that_leave_out_padding_are_proven() -> None:
    config = tiny.config_of("qwen2_5_omni_thinker")
    config.vision_start_token_id, config.vision_config.depth = 90, 1
    made = transformers.Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, dtype=torch.float32)
    assert am.load(models.randomised(made)).certificate.ok
