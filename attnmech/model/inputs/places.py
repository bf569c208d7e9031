"""Names the part of a picture or sound that each token holds: tile, row and column, box, or seconds."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...basics.messages import first_line, warn_user
from ...batch import Batch, bytes_of
from ..structure.text_part import sense_of
from .boxes import Box, box_of, coordinates, grid_of
from .held import Held, Part, by_entry, held_by, shown_tiles
from .merged import Merged
from .processors import Pictures

_REMEMBERED: Final = 32  # the number of proofs that a model keeps

Kind: TypeAlias = Literal["image", "video", "sound"]

_WORDS: Final[Mapping[Kind, str]] = {"image": "img", "video": "video", "sound": "sound"}


@dataclass(frozen=True)
class Place:
    """The part of a picture or sound that one token holds. All numbers count from 1."""

    kind: Kind
    number: int  # which of the text's pictures, or of its sounds
    tile: int | None = None  # which tile of the picture, or frame of the video; None for a picture in one piece
    row: int | None = None
    column: int | None = None  # within the tile, or within the picture; None if its tokens form no grid
    box: Box | None = None  # fractions of the user's picture; None without its processor, and for padding
    frames: tuple[int, int] | None = None  # the first and the last frame of the sound
    seconds: float | None = None  # the middle of these frames; None without the sound's processor

    @property
    def label(self) -> str | None:
        """The token's name; None without row, column and frames.

        >>> Place("image", 2, tile=4, row=1, column=2).label, Place("sound", 1, seconds=1.239).label
        ('<img 2, tile 4: row 1, col 2>', '<sound 1: 1.24 s>')
        """
        whole = f"{_WORDS[self.kind]} {self.number}"
        if self.seconds is not None:
            return f"<{whole}: {self.seconds:.2f} s>"
        if self.frames is not None:
            return f"<{whole}: frames {self.frames[0]} to {self.frames[1]}>"
        piece = "" if self.tile is None else f", {'frame' if self.kind == 'video' else 'tile'} {self.tile}"
        return None if self.row is None else f"<{whole}{piece}: row {self.row}, col {self.column}>"


@dataclass(frozen=True)
class Places:
    """The places and names of a text's tokens, one entry per token."""

    places: tuple[Place | None, ...]  # None for text, and for a token of a picture or sound without one place
    labels: tuple[str | None, ...]  # None for text, and for placeholders embedded as text (the marks around a picture)


class PlaceFinder:
    """Finds the places of the tokens in a model's texts. Texts of the same shapes share one proof."""

    def __init__(self, model: PreTrainedModel, blocks: str) -> None:
        """`blocks` is the path, within the base model, of the blocks of its text part."""
        self._model, self._blocks = model, blocks
        self._proven: dict[str, Held] = {}
        self._lock = Lock()

    def __call__(
        self,
        text: Merged,
        placeholders: Mapping[int, str],
        pictures: Pictures | None = None,
        seconds_per_frame: float | None = None,
    ) -> Places:
        """The places of a text's tokens; `placeholders` are those of pictures and sounds ("an image"), by their ids.

        Without `pictures`, every `[channel height width]` that the model takes counts as a picture, or as a tile in
        `[picture tile channel height width]`; flattened patches then have no places.
        """
        positions = torch.isin(text.ids, torch.tensor(sorted(placeholders), dtype=torch.long)).nonzero().flatten()
        senses = [placeholders[token] for token in text.ids[positions].tolist()]
        kinds = list(map(_kind, senses))
        held = self._held(text, positions, senses)
        runs = _runs(positions.tolist(), kinds, held.replaced)
        fields = coordinates(pictures, text.senses) if pictures is not None and "image" in kinds else {}
        places: dict[int, Place] = {}
        for name, value in text.senses.items():
            parts = {token: part for token in runs if (part := held.parts[token]) is not None and part.name == name}
            kind = _kind(sense_of(name) or "an image")
            if kind == "sound":
                places |= _in_sounds(parts, runs, seconds_per_frame)
            elif parts:
                field = fields.get(name) if kind == "image" else None
                several = len({runs[token] for token in parts}) > 1
                numbers = _numbers(kind, value, apart=several) if field is None else _painted(field)
                places |= _in_pictures(kind, parts, value, numbers, field)
        labels = _labels(kinds, runs, places, None if pictures is None else len(pictures.sizes))
        tokens = dict(zip(positions.tolist(), range(len(kinds)), strict=True))
        at = [tokens.get(position, -1) for position in range(len(text.ids))]
        return Places(tuple(map(places.get, at)), tuple(map(labels.get, at)))

    def _held(self, text: Merged, positions: Int[Tensor, " token"], senses: Sequence[str]) -> Held:
        key = _shape_of(text, positions)
        with self._lock:
            held = self._proven.pop(key, None)
        if held is None and senses:
            try:
                held = held_by(self._model, self._blocks, text, positions, senses)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a tower that does not run with another attention
                warn_user(
                    f"what the tokens of a picture or sound hold is not known, so they are named by their numbers: "
                    f"{first_line(error)}"
                )
                held = Held((None,) * len(senses), (True,) * len(senses))
        held = held or Held((), ())
        with self._lock:
            self._proven[key] = held
            for oldest in list(self._proven)[:-_REMEMBERED]:
                del self._proven[oldest]
        return held


def placed(batch: Batch, finder: PlaceFinder, processor: Any) -> Batch:
    """The batch with the places of its tokens, which are named by them."""
    senses_of = {token: f"a {kind}" for token, kind in batch.kind_of.items()}
    heard: Any = getattr(processor, "feature_extractor", None)
    step = heard.hop_length / heard.sampling_rate if hasattr(heard, "hop_length") else None
    of_texts = []
    for row, (senses, pictures) in enumerate(zip(batch.senses, batch.pictures, strict=True)):
        real = batch.mask[row]
        by_token = {name: value[row, real].cpu() for name, value in batch.extra.items()}
        of_texts.append(finder(Merged(batch.ids[row, real].cpu(), by_token, senses), senses_of, pictures, step))
    tokens = tuple(
        (*(label or token for label, token in zip(places.labels, own, strict=False)), *own[len(places.labels) :])
        for places, own in zip(of_texts, batch.tokens, strict=True)
    )
    return replace(batch, tokens=tokens, held=tuple(places.places for places in of_texts))


def _kind(sense: str) -> Kind:
    return cast(Kind, sense.rsplit(maxsplit=1)[-1])


def _shape_of(text: Merged, positions: Int[Tensor, " token"]) -> str:
    """A digest of what a proof depends on: all but the words, their number, and the colours."""
    ids = torch.full_like(text.ids, -1)
    ids[positions] = text.ids[positions]
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[1:] = (ids[1:] != -1) | (ids[:-1] != -1)
    digest = hashlib.sha256(bytes_of(ids[kept]))
    for name, value in sorted(text.by_token.items()):
        digest.update(name.encode() + bytes_of(value[positions]))
    for name, value in sorted(text.senses.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if not value.is_floating_point():
            digest.update(bytes_of(value.cpu()))
        elif value.ndim == 5:
            digest.update(bytes_of(shown_tiles(value).cpu()))
    return digest.hexdigest()


def _runs(positions: Sequence[int], kinds: Sequence[Kind], replaced: Sequence[bool]) -> dict[int, int]:
    """For each token of a picture or sound, the number of its unbroken run of such tokens, from 1 for each kind."""
    runs: dict[int, int] = {}
    last: dict[Kind, int] = {}
    for token, (position, kind) in enumerate(zip(positions, kinds, strict=True)):
        if replaced[token]:
            goes_on = token - 1 in runs and kinds[token - 1] == kind and positions[token - 1] == position - 1
            runs[token] = last[kind] = last.get(kind, 0) + (not goes_on)
    return runs


def _labels(
    kinds: Sequence[Kind], runs: Mapping[int, int], places: Mapping[int, Place], pictures: int | None
) -> dict[int, str]:
    """The name of each token of a picture or sound; without row, column and frames, its number within its run.

    Its picture is that of the last token with a place. In a run without places, it is the run, if there are as many
    runs as pictures.
    """
    n_runs = len({run for token, run in runs.items() if kinds[token] == "image"})
    labels: dict[int, str] = {}
    order, number = 0, None
    for token, run in runs.items():
        kind, place = kinds[token], places.get(token)
        if runs.get(token - 1) != run or kinds[token - 1] != kind:
            order, number = 0, None if kind == "image" and pictures not in (None, n_runs) else run
        order, number = order + 1, number if place is None else place.number
        whole = _WORDS[kind] if number is None else f"{_WORDS[kind]} {number}"
        labels[token] = (place and place.label) or f"<{whole}: token {order}>"
    return labels


def _numbers(kind: Kind, value: Tensor, *, apart: bool) -> list[int | None]:
    """The picture of each entry of an input, by its shape; None if unknown. `apart`: several runs of tokens hold it."""
    first, count = value.shape[:-3], len(by_entry(value))
    # All pictures or tiles of a text may follow each other in one row (Idefics 3).
    if len(first) == 2 and not (apart and first[0] == 1 and kind == "image"):
        return [1 + entry // first[1] for entry in range(count)]
    return [1 + entry if kind == "image" and len(first) in (1, 2) else None for entry in range(count)]


def _painted(field: Float[Tensor, "coordinate ..."]) -> list[int | None]:
    """The picture of each entry of an input, by its colour; None for an entry of padding alone."""
    numbers = by_entry(field[2]).flatten(1)
    low, high = numbers.nan_to_num(torch.inf).amin(dim=1).round(), numbers.nan_to_num(-torch.inf).amax(dim=1).round()
    return [int(one) if one == other else None for one, other in zip(low.tolist(), high.tolist(), strict=True)]


def _in_pictures(
    kind: Kind,
    parts: Mapping[int, Part],
    value: Tensor,
    numbers: Sequence[int | None],
    field: Float[Tensor, "coordinate ..."] | None,
) -> dict[int, Place]:
    """The places of tokens in pictures; `numbers` are the pictures of the entries of an input."""
    cells = _cells(parts, value)
    places: dict[int, Place] = {}
    for token, part in parts.items():
        number, *others = {numbers[entry] for entry in part.entries}
        if number is None or others:
            continue
        place = Place(kind, number, box=None if field is None else box_of(part, field))
        if token in cells:
            tile = 1 + numbers[: part.entries[0]].count(number) if numbers.count(number) > 1 else None
            place = replace(place, tile=tile, row=cells[token][0], column=cells[token][1])
        places[token] = place
    # Flattened patches say nothing of their row and column; their boxes do.
    for number in {place.number for token, place in places.items() if token not in cells}:
        flat = [token for token, place in places.items() if token not in cells and place.number == number]
        for token, cell in zip(flat, grid_of([places[token].box for token in flat]) or (), strict=False):
            places[token] = replace(places[token], row=cell[0], column=cell[1])
    return {token: place for token, place in places.items() if place.row is not None or place.box is not None}


def _cells(parts: Mapping[int, Part], value: Tensor) -> dict[int, tuple[int, int]]:
    """The row and column of each token that holds one of equal rectangles of a `[channel height width]`."""
    height, width = by_entry(value).shape[2:]
    inside = {
        token: (part.rows, part.columns)
        for token, part in parts.items()
        if len(part.entries) == 1 and (part.rows, part.columns) != ((0, height), (0, width))
    }
    tall = max((end - start for (start, end), _ in inside.values()), default=1)
    wide = max((end - start for _, (start, end) in inside.values()), default=1)
    return {
        token: (1 + rows[0] // tall, 1 + columns[0] // wide)
        for token, (rows, columns) in inside.items()
        if rows[0] % tall == columns[0] % wide == 0
    }


def _in_sounds(parts: Mapping[int, Part], runs: Mapping[int, int], step: float | None) -> dict[int, Place]:
    """The places of tokens in sounds, if each recording that the model takes is one run of tokens."""
    pairs = {(part.entries[0], runs[token]) for token, part in parts.items()}
    if any(len(set(side)) != len(pairs) for side in zip(*pairs, strict=True)):
        return {}
    places = {}
    for token, part in parts.items():
        begin, end = part.columns
        seconds = None if step is None else step * (begin + end) / 2
        places[token] = Place("sound", runs[token], frames=(begin + 1, end), seconds=seconds)
    return places
