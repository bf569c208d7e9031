"""Which of the named points a model has, in which sizes, and why the others are missing."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from ..errors import CertificateError, InputError, MissingPointError
from ..points import POINTS, PointKey, PointName, parse
from .architectures import Architecture


@dataclass(frozen=True)
class ModelPoint:
    """One point on one model: its axes with their sizes, its meaning, and why it is missing if it is."""

    name: str
    shape: str
    """Axes, with sizes where the model fixes them: "batch position head=8 d_head=16"."""
    meaning: str
    absent: str | None
    """Why this model does not have the point; None where it has."""


class ModelPoints(Mapping[str, ModelPoint]):
    """The points of one model; shows itself as a table."""

    def __init__(self, entries: Iterable[ModelPoint], n_layers: int) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._n_layers = n_layers

    def __getitem__(self, name: str) -> ModelPoint:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def resolve(
        self,
        names: Iterable[PointName],
        layers: Iterable[int] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> list[PointKey]:
        """The (name, layer) keys that a user's names stand for; a name alone means every layer of `layers`.

        Raises `InputError` for an unknown point or a layer out of range, `MissingPointError` for a point that
        this model lacks, `CertificateError` for one in `refused`, each with the reason.
        """
        chosen = self.check_layers(layers)
        keys: dict[PointKey, None] = {}
        for name in [names] if isinstance(names, str) else names:
            base, layer = parse(name)
            if (reason := self._entries[base].absent) is not None:
                raise MissingPointError(f"this model has no point {base!r}: {reason}.")
            if refused and base in refused:
                raise CertificateError(f"point {base!r} is refused on this model: {refused[base]}.")
            if not POINTS[base].per_layer:
                keys[base, None] = None
            elif layer is None:
                keys.update(dict.fromkeys((base, each) for each in chosen))
            else:
                keys[base, self.check_layers([layer])[0]] = None
        return list(keys)

    def check_layers(self, layers: Iterable[int] | None) -> list[int]:
        """The layers chosen, all of them for None; `InputError` where one is out of range."""
        if layers is None:
            return list(range(self._n_layers))
        chosen: list[int] = [layers] if isinstance(layers, int) else list(layers)
        for layer in chosen:
            if isinstance(layer, bool) or not isinstance(layer, int):
                raise InputError(f"`layers` must be a list of ints; got {layer!r}.")
            if not 0 <= layer < self._n_layers:
                raise InputError(
                    f"`layer` must be from 0 to {self._n_layers - 1} (this model has {self._n_layers} layers); "
                    f"got {layer}."
                )
        if not chosen:
            raise InputError("`layers` must name at least one layer; got an empty list.")
        return chosen

    def to_frame(self) -> pd.DataFrame:
        """A row a point: point, shape, meaning, absent."""
        return pd.DataFrame(
            [(p.name, p.shape, p.meaning, p.absent or "") for p in self.values()],
            columns=["point", "shape", "meaning", "absent"],
        )

    def __repr__(self) -> str:
        width = max(len(name) for name in self)
        lines = []
        for point in self.values():
            about = f"{point.shape}  {point.meaning}" if point.absent is None else f"absent: {point.absent}"
            lines.append(f"{point.name:<{width}}  {about}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, escape=True)


def points_of(architecture: Architecture, sizes: Mapping[str, int], n_layers: int, has_logits: bool) -> ModelPoints:
    """The points of a model of this architecture, with its sizes by axis name."""
    absent: dict[str, str] = {}
    if architecture.rotary is None:
        reason = f"{architecture.name} does not rotate queries and keys, so the scores use q and k themselves"
        absent |= {"q_rot": reason, "k_rot": reason}
    if architecture.mid_norm is None:
        absent["resid_mid"] = f"{architecture.name} adds attention and MLP to the stream in one step"
    if architecture.reads == "pixels":
        absent["embed"] = (
            "an image has no tokens to embed; its patches are projected, and resid_pre of layer 0 holds them"
        )
    if not has_logits:
        absent["logits"] = "this model was loaded without a head on top; its last stream is resid_post"
    return ModelPoints(
        (
            ModelPoint(
                point.name,
                " ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in point.axes),
                point.meaning,
                absent.get(point.name),
            )
            for point in POINTS.values()
        ),
        n_layers,
    )
