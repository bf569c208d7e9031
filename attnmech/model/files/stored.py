"""Checks, from the headers of a folder's files, whether its weights can belong to its config, before any is read.

A config that asks for a million layers would take hours to build before transformers noticed that a weight is missing,
and weights stored as integers would be read as real numbers.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ...basics.messages import first_line, warn_user
from ...errors import WeightsError
from ..structure.families import ARCHITECTURES

READING: Final = RLock()
"""Held while transformers reads weights. During that time, transformers keeps every model of the process from tying its
weights; if two readings overlapped, the second would make this permanent.
"""

WHOLE: Final = "model.safetensors"
SHARDED: Final = "model.safetensors.index.json"

_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "num_decoder_layers")  # common names in configs

_MOST_SHARED: Final = 100  # a stored layer may serve as up to this many layers of a config (ALBERT's layers share one)

_REAL: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # stored as plain numbers

_PRECISIONS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_MOST: Final = 2  # a config may ask for this multiple of the stored numbers; then missing weights are named one by one


_TABLES: Final = 2**26  # a config may ask for this many numbers that are not stored, such as sinusoids and masks


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, as described in its header."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name for the type of its numbers, such as "F32"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's weights, by name; their values are not read.

    Raises `WeightsError` for files that are not safetensors or are cut short, and for an index that names missing files
    or tensors.
    """
    if (folder / WHOLE).is_file():
        return tensors_in_file(folder / WHOLE)
    try:
        places = json.loads((folder / SHARDED).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(places.values()))
        outside = [name for name in files if Path(name).name != name]
    except Exception as error:  # an index can be wrong in many ways
        raise WeightsError(f"folder {folder}: its {SHARDED} cannot be read: {first_line(error)}") from error
    if outside:
        raise WeightsError(f"folder {folder}: its {SHARDED} names {outside[0]!r}, which is not a file of the folder.")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise WeightsError(
            f"folder {folder}: {len(absent)} of the {len(files)} files of its weights are missing, including "
            f"{absent[0]}. Copy the folder again, whole."
        )
    held = {name: tensors_in_file(folder / name) for name in files}
    lost = sorted(name for name, file in places.items() if name not in held[file])
    if lost:
        raise WeightsError(
            f"folder {folder}: its {SHARDED} says that {lost[0]} is in {places[lost[0]]}, which does not hold it "
            f"({len(lost)} such tensors); the files do not belong together."
        )
    return {name: held[file][name] for name, file in places.items()}


def tensors_in_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, by name; their values are not read."""
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no dict
                part = file.get_slice(key)
                tensors[key] = StoredTensor(tuple(part.get_shape()), part.get_dtype())
    except Exception as error:  # a file can be wrong in many ways
        hint = " It is cut short: copy it again." if "incomplete" in str(error).lower() else ""
        raise WeightsError(
            f"folder {path.parent}: its weights cannot be read: {path.name}: {first_line(error)}.{hint}"
        ) from error
    return tensors


def precision_of(folder: Path) -> torch.dtype | None:
    """The precision in which all of a folder's weights are stored; None if torch has no such precision.

    Warns if the weights have several precisions; the model is then loaded in the precision of its config.
    """
    counts = Counter(tensor.dtype for tensor in stored_tensors(folder).values() if tensor.dtype in _PRECISIONS)
    if len(counts) > 1:
        listed = ", ".join(
            f"{count} in {str(_PRECISIONS[kind]).removeprefix('torch.')}" for kind, count in counts.items()
        )
        warn_user(
            f"folder {folder} stores its weights in several precisions ({listed}); all are loaded in the config's "
            f"precision. `dtype` selects another."
        )
    return _PRECISIONS[next(iter(counts))] if len(counts) == 1 else None


def check_labels(folder: Path) -> None:
    """Raises `WeightsError`, before a config is read, if it asks for more labels than any stored tensor has rows.

    Reading a config makes transformers build a name for every label.
    """
    try:
        labels = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("num_labels")
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # transformers' own error says what is wrong with the config
    longest = max((size for tensor in stored_tensors(folder).values() for size in tensor.shape), default=0)
    if isinstance(labels, int) and labels > longest:
        raise WeightsError(
            f"folder {folder}: its config asks for {labels:,} labels, but no tensor of its weights has more than "
            f"{longest:,} rows or columns; the two do not belong together."
        )


def check_stored(folder: Path, kind: type[PreTrainedModel], config: Any) -> None:
    """Raises `WeightsError` if a folder's weights cannot belong to the model in its config.

    That is the case if `check_sizes` raises, or if a weight is stored as something other than real numbers.
    """
    stored = stored_tensors(folder)
    asked = check_sizes(f"folder {folder}", kind, config, {name: prod(tensor.shape) for name, tensor in stored.items()})
    # A headless model's file omits the prefix that the same module has in a model with a head.
    prefix = f"{kind.base_model_prefix}."
    for name, tensor in stored.items():
        if tensor.dtype not in _REAL and not {name, f"{prefix}{name}", name.removeprefix(prefix)}.isdisjoint(asked):
            raise WeightsError(
                f"folder {folder}: weights must be floating-point numbers, but {name} is stored as {tensor.dtype}. "
                "Save the model in its own precision, without quantisation."
            )


def check_sizes(source: str, kind: type[PreTrainedModel], config: Any, stored: Mapping[str, int]) -> Collection[str]:
    """The names of a model's weights; raises `WeightsError` if its config does not fit the stored tensors.

    It does not fit if it asks for a different number of layers, or for far more numbers than are stored. `stored` gives
    the number of entries of each tensor.
    """
    held = sum(stored.values())
    _check_layers(source, stored, config)
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception as error:
        raise WeightsError(f"{source}: no {kind.__name__} can be built from its config: {first_line(error)}") from error
    asked = {name: weight.numel() for name, weight in model.named_parameters()}
    tables = max(0, sum(buffer.numel() for buffer in model.buffers()) - _TABLES)
    numbers = sum(asked.values()) + tables
    if numbers > _MOST * held:
        raise WeightsError(
            f"{source}: its config asks for {numbers:,} parameters{' and entries of tables' * bool(tables)}, but its "
            f"weights hold {held:,}; the two do not belong together."
        )
    return asked.keys()


def _check_layers(source: str, stored: Collection[str], config: Any) -> None:
    counts = [getattr(config, name, None) for name in _LAYER_COUNTS]
    asked = max((count for count in counts if isinstance(count, int)), default=0)
    held: dict[str, int] = {}
    for name in stored:
        numbered = re.match(r"(\D*)\.(\d+)\.", f".{name}")
        if numbered:
            held[numbered[1]] = max(held.get(numbered[1], 0), int(numbered[2]) + 1)
    layers = max(held.values(), default=0)
    # In families outside the table, blocks may be shared, or stored and not used.
    known = config.model_type in ARCHITECTURES
    if asked != layers if known else asked > _MOST_SHARED * max(layers, 1):
        raise WeightsError(
            f"{source}: its config asks for {asked} layers, but its weights hold {layers}; the two do not belong "
            "together."
        )


def check_complete(source: str, kind: str, missing: Collection[str]) -> None:
    """Raises `WeightsError` if a source lacks weights of its model class, which transformers would fill at random."""
    if missing:
        raise WeightsError(
            f"{source} lacks {len(missing)} of the weights of {kind}, including {min(missing)}: transformers would "
            "fill them with random numbers."
        )
