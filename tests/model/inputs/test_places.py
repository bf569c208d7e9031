"""Which part of a picture or sound each token holds, against lists written by hand and squares painted at its box."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import merged
import pytest
import torch
from torch import Tensor

from attnmech.model.inputs.merged import Merged
from attnmech.model.inputs.places import PlaceFinder, Places
from attnmech.model.structure.text_part import placeholders_of

BLOCKS: Final = "language_model.layers"


def blocks_of(plain: Any) -> str:
    """The path of the blocks of the text part."""
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


def unpadded() -> list[str]:
    """The names of LLaVA-NeXT's tokens: the picture as a whole, then each row of 2 x 2 tiles, and its end."""
    names = grid(4, 4, "img 1, tile 1")
    for row in range(8):
        tiles = (2 + 2 * (row // 4), 3 + 2 * (row // 4))
        names += [f"<img 1, tile {tile}: row {row % 4 + 1}, col {column}>" for tile in tiles for column in (1, 2, 3, 4)]
        names.append(f"<img 1: token {len(names) + 1}>")
    return names


def wide(number: int) -> dict[str, Tensor]:
    """Two pictures of different sizes for Pixtral, the second one padded."""
    return {"pixel_values": merged._noise(number, 2, 3, 32, 48), "image_sizes": torch.tensor([[32, 48], [16, 32]])}


LATENTS: Final = merged.Kind(
    merged.KINDS["idefics3"].senses, 16, {**merged._VISION, "perceiver_config.resampler_n_latents": 16}
)
EXPECTED: Final = {
    "llava": grid(4, 4), "gemma3": grid(2, 2), "internvl": grid(2, 2), "idefics3": grid(2, 2),
    "aya_vision": grid(2, 2), "paligemma": grid(4, 4), "llava_next": unpadded(),
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
    held = (text["input_ids"][0] == merged.IMAGE).tolist()
    assert [label is not None for label in named.labels] == held
    assert [place is None for place in named.places] == [label is None or "token" in label for label in named.labels]
