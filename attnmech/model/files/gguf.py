"""Reads GGUF files: the first time by transformers, which dequantises the weights; later from a cached copy.

Before anything else is read, the counts in a file's header must fit the file's size. The reader in the package gguf
trusts them: it would step through an array of 10⁸ numbers one by one, even if the file ends before them.
"""

import hashlib
import json
import mmap
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import transformers
import xxhash
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ...basics.files import cache_folder
from ...basics.messages import first_line
from ...errors import InputError, ModelNotFoundError, OutputError, UnsupportedModelError, WeightsError
from ..structure.plan import architectures_of
from .stored import READING, check_complete, check_sizes

_SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes per value of each of GGUF's number types."""
_STRING: Final = 8
_ARRAY: Final = 9
_LEAST_TENSOR: Final = 24  # the bytes that describe a tensor, at least: lengths of name and shape, type, offset

_MOST_VALUES: Final = 2**24  # in the arrays of a header; large vocabularies have some hundred thousand entries


def check_header(path: Path) -> None:
    """Raises `ValueError` if a header announces more than the file can hold, or far more than any model needs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        if data[:4] != b"GGUF":  # the reader's own error says so
            return
        # Versions are small, so the low two bytes are 0 only if the file has the opposite byte order.
        order = ">" if data[4:6] == b"\0\0" else "<"
        header.word, header.long = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")
        header.place = 8
        tensors, entries = header.count(), header.count()
        header.require(tensors * _LEAST_TENSOR, f"{tensors:,} tensors")
        for _ in range(entries):
            header.skip(header.count(), "a name")
            header.skip_value(header.kind())


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 0
        self.values = 0
        self.word, self.long = struct.Struct("<I"), struct.Struct("<Q")

    def require(self, length: int, what: str) -> None:
        left = len(self.data) - self.place
        if length > left:
            raise ValueError(f"its header says that {what} follow, {length:,} bytes; the file has only {left:,}")

    def skip(self, length: int, what: str) -> None:
        self.require(length, what)
        self.place += length

    def kind(self) -> int:
        return self._number(self.word, "a type")

    def count(self) -> int:
        return self._number(self.long, "a count")

    def _number(self, form: struct.Struct, what: str) -> int:
        start = self.place
        self.skip(form.size, what)
        return int(form.unpack_from(self.data, start)[0])

    def skip_value(self, kind: int) -> None:
        if kind in _SCALARS:
            self.skip(_SCALARS[kind], "a number")
        elif kind == _STRING:
            self.skip(self.count(), "a text")
        elif kind == _ARRAY:
            inner, count = self.kind(), self.count()
            self.values += count
            self.require(count * _SCALARS.get(inner, self.long.size), f"{count:,} values")
            if self.values > _MOST_VALUES:
                raise ValueError(f"its header has arrays of {self.values:,} values; at most {_MOST_VALUES:,} are read")
            if inner in _SCALARS:
                self.skip(count * _SCALARS[inner], f"{count:,} values")
            else:
                for _ in range(count):
                    self.skip_value(inner)
        else:
            raise ValueError(f"its header has a value of type {kind}, which does not exist in GGUF")


_FORMAT: Final = 1  # the version of the format of copies, increased whenever their files change

_CONTENTS: Final = "contents.json"
"""The file of a copy that holds the SHA-256 of its other files, and the types in which the GGUF file stores weights."""

_FLOATS: Final = ("F64", "F32", "F16", "BF16")  # the tensor types of GGUF that are not quantised


@dataclass(frozen=True)
class Dequantised:
    """The model of a GGUF file, as a folder of safetensors."""

    folder: Path
    types: tuple[str, ...]  # the quantised types of the file's weights, such as ("Q4_1", "Q8_0"), most frequent first

    @property
    def remark(self) -> str:
        """The suffix of a model's name: " (dequantised from Q4_1, Q8_0)"; empty if the file is not quantised."""
        return f" (dequantised from {', '.join(self.types)})" if self.types else ""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file: it ends in .gguf and is not a folder."""
    return path.suffix == ".gguf" and not path.is_dir()


def dequantised(path: Path) -> Dequantised:
    """The cached copy of a GGUF file's model, made anew if it is missing or its files have changed.

    The copy holds the weights in float32, the precision in which transformers dequantises them: float16 and bfloat16
    would round them. A tokenizer that transformers cannot convert is left out. A copy is found by the SHA-256 of the
    file and the version of transformers. If several processes need the same copy, only one makes it; an interrupted
    process leaves nothing that could be taken for a copy.

    >>> dequantised(Path("SmolLM2-135M-Instruct.Q4_1.gguf")).types        # doctest: +SKIP
    ('Q4_1', 'Q8_0')

    Raises `ModelNotFoundError` (no such file), `InputError` (the package gguf is missing), `WeightsError` (a damaged
    or incomplete file), `UnsupportedModelError` (an architecture that cannot be read from GGUF, or not be expressed)
    and `OutputError` (the cache is not writable).
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {path}.")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {first_line(error)}") from error
    copy = cache_folder("gguf") / f"{digest}-transformers-{transformers.__version__}-{_FORMAT}"
    return _whole(copy) or _made(path, copy)


def _whole(copy: Path) -> Dequantised | None:
    """The copy; None if any of its files is missing or has changed."""
    try:
        contents = json.loads((copy / _CONTENTS).read_text(encoding="utf-8"))
        return None if contents["files"] != _digests(copy) else Dequantised(copy, tuple(contents["types"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in folder.iterdir():
        if path.name != _CONTENTS:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return digests


def _made(path: Path, copy: Path) -> Dequantised:
    with _writing(copy.parent):
        copy.parent.mkdir(parents=True, exist_ok=True)
        # One process at a time, since each needs the memory of the whole model.
        lock = FileLock(copy.parent / "lock")
        lock.acquire()
    try:
        if (already := _whole(copy)) is not None:
            return already
        with _writing(copy.parent):
            for abandoned in copy.parent.glob("*.part"):
                shutil.rmtree(abandoned)
            draft = TemporaryDirectory(dir=copy.parent, suffix=".part", ignore_cleanup_errors=True)
        with draft as name:
            # From an empty folder: transformers would also read a config or a tokenizer found next to the file.
            types, model, tokenizer = _read(path, nothing=Path(name))
            with _writing(copy.parent):
                made = Path(name) / "copy"
                for part in (model, tokenizer) if tokenizer is not None else (model,):
                    part.save_pretrained(made)
                contents = {"files": _digests(made), "types": types}
                (made / _CONTENTS).write_text(json.dumps(contents, indent=1), encoding="utf-8")
                if copy.exists():
                    shutil.rmtree(copy)
                made.rename(copy)
        return Dequantised(copy, tuple(types))
    finally:
        lock.release()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise OutputError(
            f"cannot write the dequantised weights to {folder}: {reason}. Make room there, or let XDG_CACHE_HOME name "
            "another folder."
        ) from error


def _read(path: Path, *, nothing: Path) -> tuple[list[str], PreTrainedModel, Any]:
    """The types in which the file stores weights, the model in float32, and its tokenizer if it can be converted."""
    stored = _stored(path)
    file: dict[str, Any] = {"gguf_file": str(path.absolute()), "local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(str(nothing), **file)
    except Exception as error:  # metadata can hold anything, and fail in many ways
        raise _unsupported(path, first_line(error)) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unsupported(path, f"a {type(config).__name__} is not a decoder's")
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    check_sizes(str(path), kind, config, {name: count for name, (_, count) in stored.items()})
    model = _model(path, config, {"pretrained_model_name_or_path": str(nothing), **file})
    architectures_of(model)
    _check_all_read(path, stored, model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(nothing), **file)
    except Exception:  # vocabularies are as varied as metadata
        tokenizer = None
    types = Counter(name for name, _ in stored.values() if name not in _FLOATS)
    return [name for name, _ in types.most_common()], model, tokenizer


def _stored(path: Path) -> dict[str, tuple[str, int]]:
    """The type and the number of entries of each tensor."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(f"to read {path}: pip install 'attnmech[gguf]'.") from error
    try:
        check_header(path)
        return {tensor.name: (tensor.tensor_type.name, int(tensor.n_elements)) for tensor in GGUFReader(path).tensors}
    except Exception as error:  # a file can be wrong in many ways
        raise WeightsError(
            f"{path} cannot be read as GGUF ({first_line(error)}); it may be damaged or incomplete. Compare its size "
            "with the original's, or download it again."
        ) from error


def _unsupported(path: Path, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} holds a model that transformers {transformers.__version__} does not read from GGUF: {reason}. Load "
        "the original weights, in safetensors."
    )


def _model(path: Path, config: PreTrainedConfig, file: dict[str, Any]) -> PreTrainedModel:
    reader: Any = AutoModelForCausalLM
    try:
        with READING:
            model, report = reader.from_pretrained(
                **file,
                config=config,
                dtype=torch.float32,
                # Otherwise weights would stay packed wherever kernels for packed weights are installed.
                quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except Exception as error:
        raise WeightsError(f"{path}: its weights cannot be read: {first_line(error)}") from error
    check_complete(str(path), type(model).__name__, report["missing_keys"])
    assert isinstance(model, PreTrainedModel)
    return model


def _check_all_read(path: Path, stored: dict[str, tuple[str, int]], model: PreTrainedModel) -> None:
    """Raises `WeightsError` if transformers read only some of the numbers: it skips tensors that it does not know."""
    held, taken = sum(count for _, count in stored.values()), sum(parameter.numel() for parameter in model.parameters())
    # Some families store a tied head a second time.
    head = stored.get("output.weight", ("", 0))[1] if model.config.tie_word_embeddings else 0
    if held not in (taken, taken + head):
        raise WeightsError(
            f"{path} holds {held:,} numbers, but transformers {transformers.__version__} puts only {taken:,} into a "
            f"{type(model).__name__}, which would be a different model. Load the original weights, in safetensors."
        )
