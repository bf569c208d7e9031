"""Which part of a picture or sound each token holds, against lists written by hand and squares painted at its box."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import merged
import models
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnmech.model.inputs import held
from attnmech.model.inputs.merged import Merged
from attnmech.model.inputs.places import Place, PlaceFinder, Places
from attnmech.model.inputs.processors import Pictures
from attnmech.model.structure.copies import copy_of, use_attention
from attnmech.model.structure.text_part import placeholders_of


def blocks_of(plain: Any) -> str:
    paths = [path for path, _ in plain.base_model.named_modules()]
    return next(path for path in ("language_model.layers", "text_model.layers") if path in paths)


def placed(plain: Any, inputs: Mapping[str, Tensor], **options: Any) -> tuple[PlaceFinder, Places]:
    """The finder of a model, and the places of a text."""
    finder = PlaceFinder(plain, blocks_of(plain))
    return finder, again(finder, plain, inputs, **options)


def again(finder: PlaceFinder, plain: Any, inputs: Mapping[str, Tensor], **options: Any) -> Places:
    return finder(Merged.of(inputs, set(inputs), torch.float32), placeholders_of(plain.config, None), **options)


def grid(rows: int, columns: int, whole: str = "img 1") -> list[str]:
    return [f"<{whole}: row {row}, col {column}>" for row in range(1, rows + 1) for column in range(1, columns + 1)]


def in_rows(down: int, across: int, whole: str = "img 1") -> list[str]:
    """The names of LLaVA-NeXT's tokens: those of the whole picture, then each row of its tiles, and the row's end."""
    names = grid(4, 4, f"{whole}, tile 1")
    for row in range(4 * down):
        tiles = range(2 + across * (row // 4), 2 + across * (row // 4 + 1))
        names += [
            f"<{whole}, tile {tile}: row {row % 4 + 1}, col {column}>" for tile in tiles for column in range(1, 5)
        ]
        names.append(f"<{whole}: token {len(names) + 1}>")
    return names


def wide(number: int) -> dict[str, Tensor]:
    """Two pictures of different sizes for Pixtral, the second one padded."""
    return {"pixel_values": merged._noise(number, 2, 3, 32, 48), "image_sizes": torch.tensor([[32, 48], [16, 32]])}


LATENTS: Final = merged.Kind(
    merged.KINDS["idefics3"].senses, 16, {**merged._VISION, "perceiver_config.resampler_n_latents": 16}
)
EXPECTED: Final = {
    "llava": grid(4, 4), "gemma3": grid(2, 2), "internvl": grid(2, 2), "idefics3": grid(2, 2),
    "aya_vision": grid(2, 2), "paligemma": grid(4, 4), "llava_next": in_rows(2, 2),
    "mistral3": [*grid(2, 3), *grid(1, 2, "img 2")],
    "qwen2_vl": [f"<img 1: token {number}>" for number in range(1, 7)],
    "qwen2_5_vl": [f"<img 1: token {number}>" for number in range(1, 7)],
    "idefics2": [f"<img 1: token {number}>" for number in range(1, 17)],
    # Token t averages two steps of a convolution with stride 2, each over three outputs of one with stride 1.
    "qwen2_audio": [f"<sound 1: frames {max(4 * t - 1, 1)} to {min(4 * t + 5, 20)}>" for t in range(5)],
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_names_of_tokens(kind: str) -> None:
    made = LATENTS if kind == "idefics2" else merged.KINDS[kind]
    if kind == "mistral3":
        made = replace(made, senses=wide, tokens=8)
    plain, text = merged.model_of(kind, made), merged.inputs_of(made, 0, 9)
    _, named = placed(plain, text)
    assert [label for label in named.labels if label] == EXPECTED[kind]
    assert [label is not None for label in named.labels] == (text["input_ids"][0] == merged.IMAGE).tolist()
    assert [place is None for place in named.places] == [label is None or "token" in label for label in named.labels]


TILED: Final = [[32, 64], [64, 32]]
"""The heights and widths of a picture in tiles."""


def tokenizer(*special: str, **names: str) -> Any:
    """A tokenizer of words and special tokens; the first stands for pictures. `names` are attributes."""
    words = [f"w{number}" for number in range(97)]
    words[:2], words[merged.IMAGE], words[40 : 39 + len(special)] = ["[UNK]", "[PAD]"], special[0], special[1:]
    tokens = models.tokenizer(words=tuple(words))
    tokens.add_special_tokens({"additional_special_tokens": list(special)})
    for name, text in names.items():
        setattr(tokens, name, text)
        setattr(tokens, f"{name}_id", tokens.convert_tokens_to_ids(text))
    return tokens


class Qwen(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Without videos, whose processor needs torchvision."""

    def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, value)


def processor_of(kind: str) -> Any:
    side, clip = {"height": 32, "width": 32}, {"patch_size": 8, "num_additional_image_tokens": 1}
    cropped: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": side}
    clip |= {"vision_feature_select_strategy": "default"}
    if kind == "llava":
        return transformers.LlavaProcessor(transformers.CLIPImageProcessorPil(**cropped), tokenizer("<image>"), **clip)
    if kind == "llava_next":
        images = transformers.LlavaNextImageProcessorPil(image_grid_pinpoints=TILED, **cropped)
        return transformers.LlavaNextProcessor(images, tokenizer("<image>"), **clip)
    if kind == "gemma3":
        names = {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
        return transformers.Gemma3Processor(
            transformers.Gemma3ImageProcessorPil(size=side), tokenizer(*names.values(), **names), image_seq_length=4
        )
    if kind == "idefics3":
        around = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
        images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
        return transformers.Idefics3Processor(images, tokenizer("<image>", *around, *rows), image_seq_len=4)
    images = transformers.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=6400)
    return Qwen(images, tokenizer("<|image_pad|>", "<|video_pad|>"), None)


PROCESSED: Final = {
    "llava": ("<image>", [(192, 160), (128, 240)], [*grid(4, 4), *grid(4, 4, "img 2")]),
    "gemma3": ("<boi>", [(192, 160), (128, 240)], [*grid(2, 2), *grid(2, 2, "img 2")]),
    "qwen2_vl": ("<|image_pad|>", [(64, 48), (48, 96)], [*grid(3, 4), *grid(6, 3, "img 2")]),
    "idefics3": ("<image>", [(192, 160), (128, 240)],
                 [name for tile in range(10) for name in grid(2, 2, f"img {tile // 5 + 1}, tile {tile % 5 + 1}")]),
    "llava_next": ("<image>", [(256, 128), (128, 256)], [*in_rows(1, 2), *in_rows(2, 1, "img 2")]),
}  # fmt: skip
"""The mark of a picture in a text, the width and height of two pictures, and the names of their tokens."""


@pytest.mark.parametrize("kind", PROCESSED)
def test_a_square_at_the_box_of_a_token_changes_it_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    mark, sizes, names = PROCESSED[kind]
    made = merged.KINDS[kind]
    if kind == "llava_next":
        made = replace(made, sizes={**made.sizes, "image_grid_pinpoints": TILED})
    processor, plain = processor_of(kind), merged.model_of(kind, made)

    def processed(pictures: Sequence[Any]) -> dict[str, Tensor]:
        nested = [list(pictures)] if kind in ("gemma3", "idefics3") else list(pictures)
        return dict(processor(text=[f"w5 {mark} w6 w7 {mark} w8"], images=nested, return_tensors="pt"))

    def painted(place: Place | None) -> dict[str, Tensor]:
        pictures = [np.zeros((height, width, 3), dtype=np.uint8) for width, height in sizes]
        if place is not None:
            assert place.box is not None
            (width, height), (left, top, right, bottom) = sizes[place.number - 1], place.box
            rows, columns = (
                slice(round(size * (2 * start + end) / 3), round(size * (start + 2 * end) / 3))
                for size, start, end in ((height, top, bottom), (width, left, right))
            )
            pictures[place.number - 1][rows, columns] = 255
        return processed([Image.fromarray(picture) for picture in pictures])

    monkeypatch.setattr(held, "_LARGE", 0 if kind == "gemma3" else held._LARGE)
    black = painted(None)
    _, named = placed(plain, black, pictures=Pictures(sizes, processed))
    assert [label for label in named.labels if label] == names
    before = alone(plain, black)
    for token, place in list(enumerate(named.places))[::3]:
        if place is None:
            continue
        changed = (alone(plain, painted(place)) != before).any(dim=-1).nonzero().flatten().tolist()
        # Tiles, and the picture as a whole, show the same part of a picture.
        same = [other for other in changed if (seen := named.places[other]) is None or seen.tile == place.tile]
        assert same == [token]
        assert place.tile or changed == [token]
        if kind in ("gemma3", "qwen2_vl"):  # whose processors cut nothing off
            own = [other for other in named.places if other is not None and other.number == place.number]
            down, across = max(other.row for other in own), max(other.column for other in own)
            row, column = place.row, place.column
            box = ((column - 1) / across, (row - 1) / down, column / across, row / down)
            assert place.box == pytest.approx(box, abs=1 / 255)


def alone(plain: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """What enters the text part if no position of a tower sees another."""
    copied = use_attention(copy_of(plain), "test_alone")
    merged_at: list[Tensor] = []
    text = copied.base_model.get_submodule(blocks_of(plain).removesuffix(".layers"))
    text.register_forward_pre_hook(lambda _, args, kwargs: merged_at.append(kwargs["inputs_embeds"]), with_kwargs=True)
    with torch.no_grad():
        copied(**inputs)
    return merged_at[0][0]


def only_itself(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention in which every position sees only itself."""
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register("test_alone", only_itself)
AttentionMaskInterface.register("test_alone", lambda *args, **options: None)


def test_a_proof_is_short_shared_and_leaves_no_trace() -> None:
    """Only the first of several texts of the same shapes is proven; the user's model and transformers stay as they are.

    Seven bits, three of them 1, number 35 tokens, and eight bits 70.
    """
    made = replace(merged.KINDS["llava"], sizes={**merged._VISION, "vision_config.patch_size": 4}, tokens=64)
    plain, registered = merged.model_of("llava", made), dict(ALL_ATTENTION_FUNCTIONS.items())
    passes: list[str] = []
    tower = plain.base_model.vision_tower
    patches = tower.get_submodule("embeddings.patch_embedding")
    tower.register_forward_hook(lambda *_: passes.append("forward"))
    patches.register_full_backward_hook(lambda *_: passes.append("backward"))
    before = [len(part._forward_pre_hooks) for part in plain.modules()], str(plain.config)
    with torch.inference_mode():
        finder, named = placed(plain, merged.inputs_of(made, 0, 9))
        assert [label for label in named.labels if label] == grid(8, 8)
        assert sorted(passes) == ["backward"] * 8 + ["forward"] * 3
        assert again(finder, plain, merged.inputs_of(made, 1, 14)).labels[:66] == named.labels[:66]
    assert len(passes) == 11
    assert before == ([len(part._forward_pre_hooks) for part in plain.modules()], str(plain.config))
    assert dict(ALL_ATTENTION_FUNCTIONS.items()) == registered
    assert all(weight.requires_grad and weight.grad is None for weight in plain.parameters())


def test_other_sizes_are_proven_anew() -> None:
    made = replace(merged.KINDS["mistral3"], senses=wide, tokens=8)
    plain, text = merged.model_of("mistral3", made), merged.inputs_of(made, 0, 9)
    finder, _ = placed(plain, text)
    named = again(finder, plain, text | {"image_sizes": text["image_sizes"].flip(0)})
    assert [label for label in named.labels if label] == [*grid(1, 2), *grid(2, 3, "img 2")]


def test_a_tile_of_zeros_is_padding() -> None:
    plain, text = merged.model_of("idefics3"), merged.inputs_of(merged.KINDS["idefics3"], 0, 9)
    tiles = torch.cat((text["pixel_values"], torch.zeros_like(text["pixel_values"])), dim=1)
    _, named = placed(plain, text | {"pixel_values": tiles})
    assert [label for label in named.labels if label] == grid(2, 2, "img 1, tile 1")


@pytest.mark.parametrize("seen", ["by gradients", "by changes alone", "in one line of each patch"])
def test_tokens_that_share_pixels_have_no_place(seen: str) -> None:
    plain = merged.model_of("llava")

    def mixing(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        if seen == "in one line of each patch":
            line = torch.arange(32)[:, None] % 8 == 7
            return (args[0] + (args[0] * line).roll(8, dims=-1),)
        before = args[0].roll(1, dims=1)
        return (args[0] + (before if seen == "by gradients" else before.detach()),)

    base = plain.base_model
    in_pixels = base.vision_tower.get_submodule("embeddings.patch_embedding")
    (in_pixels if seen.startswith("in") else base.multi_modal_projector).register_forward_pre_hook(mixing)
    _, named = placed(plain, merged.inputs_of(merged.KINDS["llava"], 0, 9))
    assert set(named.places) == {None}
    assert [label for label in named.labels if label] == [f"<img 1: token {number}>" for number in range(1, 17)]


def test_queries_without_pixels_see_all_keys() -> None:
    """As many learned queries as patches, in a resampler."""
    q, k, v = (torch.randn(1, heads, 5, 3) for heads in (4, 2, 2))
    from_queries, _ = ALL_ATTENTION_FUNCTIONS[held.LOCAL](torch.nn.Module(), q, k.requires_grad_(), v)
    (gradient,) = torch.autograd.grad(from_queries[0, 2].sum(), k)
    assert bool((gradient != 0).all())
    from_pixels, _ = ALL_ATTENTION_FUNCTIONS[held.LOCAL](torch.nn.Module(), q.requires_grad_(), k, v)
    (gradient,) = torch.autograd.grad(from_pixels[0, 2].sum(), k)
    assert (gradient != 0).any(dim=(0, 1, 3)).tolist() == [False, False, True, False, False]


def test_seconds_of_two_sounds() -> None:
    made = merged.KINDS["qwen2_audio"]
    plain = merged.model_of("qwen2_audio")
    sounds = {name: torch.cat((value, made.senses(1)[name])) for name, value in made.senses(0).items()}
    run = [merged.IMAGE] * made.tokens

    def times(ids: list[int]) -> list[tuple[int, float]]:
        _, named = placed(plain, {"input_ids": torch.tensor([ids]), **sounds}, seconds_per_frame=0.1)
        return [(place.number, place.seconds) for place in named.places if place is not None]

    middles = [0.25, 0.55, 0.95, 1.35, 1.7]
    assert times([50, *run, 51, *run, 52]) == [(number, pytest.approx(at)) for number in (1, 2) for at in middles]
    # One run of two spectrograms may be one recording in pieces, whose times do not begin anew.
    assert times([50, *run, *run, 52]) == []
