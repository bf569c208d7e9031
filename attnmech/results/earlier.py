"""How are files of attnmech 0.1.0 read? Their tensors are moved to where today's codec would have put them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from .by_layer import by_layer

_OF_LAYERS: Final = ("after", "swept", "shift", "per_text", "exact", "residual", "largest")
_BY_LAYER: Final = dict.fromkeys(_OF_LAYERS, 0) | {"facts": 1}
"""The tensors that held only the measured layers, with the index of the axis `layer`."""
_BY_REPLICATE: Final = ("sums", "counts", "block_sums", "block_counts")

Saved = tuple[dict[str, Tensor], dict[str, Any]]


def renewed(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Saved:
    """Tensors and JSON values under today's paths, with a row for every layer of the model up to the last one measured.

    Those of today's files as they are.
    """
    if "format" in header:
        return dict(tensors), dict(header["facts"])
    return _RENEWED.get(header["kind"], _as_they_are)(dict(tensors), dict(header.get("facts", header)))


def _as_they_are(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    return tensors, rest


def _every_layer(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    """Results by layer and head."""
    layers = rest["layers"]
    for name, value in tensors.items():
        axis = _BY_LAYER.get(name)
        if axis is not None:
            tensors[name] = by_layer(value, layers, max(layers) + 1, axis)
    if "swept" in tensors:
        tensors["swept"] = tensors["swept"].nan_to_num(0.0)
    return tensors, rest


def _row_means(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    """Means of rows: column 0 of the replicates is the measurement; without sums by text there are no intervals."""
    for name in set(tensors) & {*_BY_REPLICATE, "rows"}:
        tensors[name] = tensors[name][:, 0] if name == "rows" else tensors[name][..., :1]
    tensors |= {"groups": torch.zeros(1, dtype=torch.long), "modulus": torch.ones(1, dtype=torch.long)}
    rest |= {"n_layers": max(rest["layers"]) + 1, "state": dict.fromkeys(tensors)}
    return {f"state.{name}": value for name, value in tensors.items()}, rest


def _null_attention(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    """The effects of four interventions, each with its tensors under "zero_value after"."""
    found: dict[str, Tensor] = {}
    effects = {}
    for name, about in rest["effects"].items():
        own = {full.partition(" ")[2]: value for full, value in tensors.items() if full.startswith(f"{name} ")}
        own, effects[name] = _every_layer(own, dict(about))
        found |= {f"effects.{name}.{part}": value for part, value in own.items()}
    layers = next(iter(effects.values()))["layers"]
    whole = by_layer(tensors["facts"], layers, max(layers) + 1, _BY_LAYER["facts"])
    return {**found, "facts": whole, "sinks": tensors["sinks"]}, {**rest, "effects": effects}


def _decomposition(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    """Decompositions: the tensors of each layer's part under "0.visible"."""
    if "parts" not in rest:
        scales = zip(rest.pop("scales"), rest.pop("softcaps"), strict=True)
        rest["parts"] = [{"scale": scale, "softcap": softcap} for scale, softcap in scales]
    rest.setdefault("layers", [part.get("layer") for part in rest["parts"]])
    moved = {f"parts.{name}" if name[0].isdigit() else name: value for name, value in tensors.items()}
    return _every_layer(moved, rest)


def _intervention(tensors: dict[str, Tensor], rest: dict[str, Any]) -> Saved:
    """Interventions: the tensors of layer 3 under "values 3", the mask of keys under "keys 0"."""
    del rest["kind"]
    for field in {name.split()[0] for name in tensors}:
        layers = [name.split()[1] for name in tensors if name.startswith(field)]
        rest[field] = {"by_layer": dict.fromkeys(layers), "about": rest[field]}
    return {name.replace(" ", ".by_layer."): value for name, value in tensors.items()}, rest


_RENEWED: Final[Mapping[str, Callable[[dict[str, Tensor], dict[str, Any]], Saved]]] = {
    "AttentionFocus": _row_means,
    "ResidualUpdates": _row_means,
    "BlockUpdates": _row_means,
    "HeadEffects": _every_layer,
    "PatchEffects": _every_layer,
    "HeadImportance": _every_layer,
    "NullAttention": _null_attention,
    "ScoreDecomposition": _decomposition,
    "SourceDecomposition": _decomposition,
    "Intervention": _intervention,
}
