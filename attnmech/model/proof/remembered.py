"""Remembers certificates in the user's cache folder, so that a model is proven once and not at every load.

An entry is found by the SHA-256 of everything that the checks depend on: weights and buffers, config, classes and
settings of modules, device kind and precision, the versions of the libraries, and attnmech's own source. Models with
code, hooks or edits of their own are never remembered, and a remembered certificate holds only if attnmech still
returns what transformers returns.
"""

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...basics.files import cache_folder, writing
from ...errors import OutputError
from ..parts.certificate import Certificate, Check, LensHook
from ..parts.hashes import tensors_hash
from ..parts.packed import packed_projections
from ..run.hooked import HookedModel
from ..structure.copies import has_own_hooks

FOLDER: Final = "ATTNMECH_CERTIFICATES"
"""The environment variable that names another folder, or, if it is empty, switches the memory off."""

_LIBRARIES: Final = ("attnmech", "torch", "transformers", "transformer-lens")
_PACKAGES: Final = ("torch", "transformers", "attnmech")  # the packages whose modules compute what their versions say
_PLAIN: Final = (bool, int, float, str, tuple)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")  # what the name of a function says of this process alone


def remembered(model: HookedModel, part: str = "") -> tuple[Certificate, Any] | None:
    """The certificate that an earlier load made of this model, or of a part of its inputs, and what was stored beside
    it; None if there is none, or it is damaged.
    """
    path = _entry(model, part)
    if path is None:
        return None
    try:
        digest, body = path.read_text(encoding="utf-8").split("\n", 1)
        if digest != _digest(body):
            return None
        entry, beside = json.loads(body)
        checks = tuple(Check(**{**check, "points": tuple(check["points"])}) for check in entry.pop("checks"))
        lens = tuple(LensHook(**hook) for hook in entry.pop("lens"))
        edited = tuple(entry.pop("edited"))
        return Certificate(**{**entry, "model": model.name}, checks=checks, lens=lens, edited=edited), beside
    except (OSError, ValueError, LookupError, TypeError):
        return None


def remember(model: HookedModel, certificate: Certificate, part: str = "", beside: Any = None) -> None:
    """Stores a certificate, with numbers and names beside it, if all its checks hold and the folder can be written."""
    path = _entry(model, part)
    if path is None or not certificate.ok:
        return
    proven = replace(certificate, proven_on=datetime.now(UTC).date().isoformat())
    body = json.dumps([asdict(proven), beside])
    with suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path) as draft:
            draft.write_text(f"{_digest(body)}\n{body}", encoding="utf-8")


def _entry(model: HookedModel, part: str) -> Path | None:
    """The file of a model's certificate; None for a model that is not remembered."""
    folder = os.environ.get(FOLDER)
    original = model.original
    if folder == "" or model.is_own or not all(map(_is_library, original.modules())):
        return None
    if has_own_hooks(original) or next(packed_projections(original), None) is not None:
        return None
    known = [
        model.weights_hash,
        tensors_hash(dict(original.named_buffers())),
        *(f"{path} {_settings(part)}" for path, part in original.named_modules()),
        *(_ADDRESS.sub("", f"{stack.label} {stack.architecture!r}") for stack in model.stacks.values()),
        f"{model.device.type} {model.dtype} {original.config._attn_implementation} {type(model.encoder).__name__}",
        *(f"{name} {version(name)}" for name in _LIBRARIES),
        sys.version,
        _source(),
        part,
    ]
    return (cache_folder("certificates") if folder is None else Path(folder)) / f"{_digest(chr(10).join(known))}.json"


def _settings(part: nn.Module) -> str:
    """A module's class and its own settings, which may differ from the config's: numbers, names and functions."""
    own = {
        name: getattr(value, "__qualname__", value)
        for name, value in vars(part).items()
        if name != "name_or_path" and (value is None or isinstance(value, _PLAIN) or hasattr(value, "__qualname__"))
    }
    return f"{type(part).__module__}.{type(part).__qualname__} {sorted(own.items(), key=str)}"


def _is_library(part: nn.Module) -> bool:
    """Whether a module and its `forward` come from a library, and no attribute of the object replaces a method."""
    code = getattr(type(part).forward, "__code__", None)
    return (
        not any(callable(getattr(type(part), name, None)) for name in vars(part) if not name.startswith("_"))
        and type(part).__module__.partition(".")[0] in _PACKAGES
        and (code is None or any(Path(code.co_filename).is_relative_to(folder) for folder in _folders()))
    )


@cache
def _folders() -> tuple[Path, ...]:
    return tuple(Path(str(sys.modules[name].__file__)).parent for name in _PACKAGES)


@cache
def _source() -> str:
    """The SHA-256 of attnmech's own source, which may change without a new version."""
    root = Path(__file__).parents[2]
    files = sorted(path for part in ("model", "maths") for path in (root / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
