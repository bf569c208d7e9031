"""Splits a corpus into batches of texts of similar length; every reading gives the same batches.

A corpus is an iterable of inputs that `HookedModel.encode` accepts, or of records with a string "text", or a file
(`Corpus`). Its documents are numbered from 0 in order, and a document keeps its number in every batch and shard.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..basics.arguments import flag, integer, optional_flag, shown, string
from ..basics.files import path_of
from ..basics.messages import takes
from ..basics.public import public
from ..batch import Batch
from ..errors import InputError
from ..model.inputs.encoder import MOST_CHARACTERS, Encoder, Ids, Inputs
from ..model.inputs.encoders import tokenized
from ..model.inputs.lengths import warn_of_batch, warn_of_length
from ..model.inputs.merged import Besides, is_chat, is_list_of
from ..model.inputs.processors import Picture
from ..model.parts.hashes import batch_hash, tensors_hash
from ..model.parts.pieces import Tokenized
from ..model.run.hooked import HookedModel
from .text_files import opened, text_of, texts_of_file

Value = TypeVar("Value")


class Documents(ABC):
    """A corpus that knows its number of documents; each iteration starts from the beginning."""

    @abstractmethod
    def __iter__(self) -> Iterator[str]:
        """The documents, in order."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of documents."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A SHA-256 of the documents' content."""


@public
@dataclass(frozen=True)
class Corpus(Documents):
    """The documents of a file, read one by one; each iteration starts from the beginning.

    The suffix gives the format: `.jsonl` and `.ndjson` hold one JSON value per line, a string or an object; `.json`
    holds a list of these; `.csv` and `.tsv` have a header; `.parquet` is a table; `.txt`, `.md` and files without a
    suffix are UTF-8 with one document per line. All but Parquet may be compressed (`.jsonl.gz`, `.csv.xz`, `.txt.bz2`).
    Other suffixes are refused. Blank documents are skipped.

    >>> for text in Corpus("corpus.txt"):      # doctest: +SKIP
    ...     print(text)

    Args:
        path: the file.
        column: the column of a table, or the key of JSON objects, that holds the documents; by default "text" or,
            without it, the only column of strings.

    Raises `InputError` for a file that is missing, has no documents, or has several columns of texts; while reading,
    for a line that is not UTF-8, not JSON or not a text.
    """

    path: Path
    column: str | None = None

    def __init__(self, path: str | Path, *, column: str | None = None) -> None:
        object.__setattr__(self, "path", path_of(path))
        object.__setattr__(self, "column", column if column is None else string("column", column))
        if self.path.is_dir():
            raise InputError(f"{self.path} is a folder; name a file in it.")
        if not self.path.exists():
            raise InputError(f"there is no file {self.path}.")
        if not self.path.is_file():
            raise InputError(f"{self.path} is not a regular file, and a pipe cannot be read twice; save it to a file.")
        if next(iter(self), None) is None:
            raise InputError(f"{self.path} has no documents; give a file with at least one word.")

    def __iter__(self) -> Iterator[str]:
        return texts_of_file(self.path, self.column)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file, and of the column if one was named; computed once."""
        with opened(self.path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest if self.column is None else hashlib.sha256(f"{digest} {self.column}".encode()).hexdigest()

    @cached_property
    def count(self) -> int:
        """The number of documents; reads the file once."""
        return sum(1 for _ in self)


A_BATCH: Final = 128  # the fixed cost of a batch, in tokens


@dataclass(frozen=True)
class CorpusBatch:
    """Some documents of a corpus, ready for the model."""

    batch: Batch
    documents: Int[Tensor, " batch"]  # the number of the document in each row
    truncated: int  # the number of these documents that were cut to the model's number of positions
    digest: str
    """SHA-256 over all tokens up to the end of the window of documents to which this batch belongs: readings with the
    same digest have had the same batches so far."""

    def pieces(self, tokens: int) -> Iterator["CorpusBatch"]:
        """Splits the batch into pieces of up to `tokens` tokens; a longer text is a piece by itself."""
        count = max(1, tokens // self.batch.ids.shape[1])
        if len(self.batch.ids) <= count:
            yield self
            return
        for chosen in torch.split(torch.arange(len(self.batch.ids)), count):
            yield CorpusBatch(self.batch.texts(chosen), self.documents[chosen], 0, self.digest)


def batches(
    inputs: Inputs | Iterable[Inputs],
    model: HookedModel,
    *,
    tokens_per_batch: int = 4096,
    window: int = 256,
    truncate: bool = False,
    bos: bool | None = None,
    shard: tuple[int, int] = (0, 1),
    whole: "CorpusHash | None" = None,
) -> Iterator[CorpusBatch]:
    """Splits a corpus into batches, reading no further ahead than one window of documents.

    The documents of a window are sorted by length and cut into batches of up to `tokens_per_batch` tokens, padding
    included, such that the total cost of batches (`A_BATCH`) and padding is smallest; a longer document is a batch by
    itself. The batches therefore depend only on the documents and these settings. Some inputs cannot be split and
    padded again without changing numbers: images, texts with extra inputs or decoder tokens, and texts with padding on
    the left or inside. Each of these stays one batch, and ends the window before it.

    `truncate` cuts documents to the model's number of positions and to the length on which it was trained, and texts to
    `MOST_CHARACTERS`. Without it, the first document that is longer than those of the training brings a
    `LongTextWarning`. `shard` (k, n) takes only the documents k, k + n, ... `bos` is as in `HookedModel.encode`.
    `whole` hashes every document, including those of other shards.

    Raises `InputError`, naming the document's number, if a document is empty, has the wrong type, or is longer than the
    model's number of positions.
    """
    flag("truncate", truncate)
    optional_flag("bos", bos)
    one_batch = is_one_batch(model, inputs)
    if one_batch:
        inputs = cast(Iterable[Inputs], [inputs])
    if not isinstance(inputs, Iterable) or hasattr(inputs, "__array__"):
        raise InputError(
            f"inputs must be a text, token ids, model inputs, or an iterable of them; got {shown(inputs)}. For an "
            "array of ids: torch.tensor(ids)."
        )
    if model.reads_tokens and not one_batch:
        inputs = _texts_of_records(inputs, getattr(model.encoder, "besides", None))
    reading = _Reading(model, truncate, bos, shard, CorpusHash() if whole is None else whole)
    return reading.batches(inputs, tokens_per_batch, window)


def contents_of(parts: Sequence[CorpusBatch]) -> list[int]:
    """The digest of each text, by its number; the same for copies."""
    return by_text(parts, lambda part: part.batch.digests.tolist())


def by_text(parts: Sequence[CorpusBatch], values: Callable[[CorpusBatch], Iterable[Value]]) -> list[Value]:
    """The value of each text, by its number, from those of each batch."""
    pairs = (zip(part.documents.tolist(), values(part), strict=True) for part in parts)
    of_text = dict(chain.from_iterable(pairs))
    return [of_text[number] for number in sorted(of_text)]


def is_one_batch(model: HookedModel, inputs: Any) -> bool:
    """Whether inputs are those of a single run; a tuple holds the arguments of one call of a user's own module."""
    one = isinstance(inputs, str | Ids | Mapping | Batch | Path | Picture) or is_chat(inputs)
    return one or (not model.reads_tokens and isinstance(inputs, tuple))


class CorpusHash:
    """SHA-256 over every document of a corpus, in order: texts in UTF-8, or token ids."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def note(self, kind: str, content: str) -> None:
        """Adds a document, or a batch of documents, by the hash of its content."""
        self._digest.update(f"{kind} {content}\n".encode())

    @property
    def value(self) -> str:
        """The hash of the documents read so far; after the last batch, the hash of the whole corpus."""
        return self._digest.hexdigest()


def checked_shard(shard: Any) -> tuple[int, int]:
    """A shard (k, n) as two ints; raises `InputError` for anything else."""
    try:
        index, count = (integer(number) for number in shard)
    except (TypeError, ValueError):
        index, count = 0, 0
    if not 0 <= index < count:
        raise InputError(f"`shard` must be two whole numbers (k, n) with k from 0 to n - 1; got {shown(shard)}.")
    return index, count


@dataclass(frozen=True)
class _Document:
    number: int
    text: Tokenized
    truncated: bool


@dataclass(frozen=True)
class _AsGiven:
    """Documents that go to the model in the batch in which they came."""

    numbers: list[int]
    batch: Batch


class _Reading:
    """One pass through a corpus, which counts its documents and digests those of the shard."""

    def __init__(
        self, model: HookedModel, truncate: bool, bos: bool | None, shard: tuple[int, int], whole: CorpusHash
    ) -> None:
        self._model, self._truncate, self._bos, self._whole = model, truncate, bos, whole
        self._encoder = model.encoder
        self._index, self._shards = shard
        self._seen = 0
        self._digest = hashlib.sha256()

    def batches(self, inputs: Iterable[Any], tokens_per_batch: int, window: int) -> Iterator[CorpusBatch]:
        waiting: list[_Document] = []
        for item in self._documents(inputs):
            if isinstance(item, _Document):
                waiting.append(item)
            if isinstance(item, _AsGiven) or len(waiting) == window:
                yield from self._packed(waiting, tokens_per_batch)
                waiting = []
            if isinstance(item, _AsGiven):
                self._digest.update(batch_hash(item.batch).encode())
                yield CorpusBatch(item.batch, torch.tensor(item.numbers), 0, self._digest.hexdigest())
        yield from self._packed(waiting, tokens_per_batch)
        if self._seen == 0:
            raise InputError("inputs have no documents; pass at least one.")

    def _documents(self, inputs: Iterable[Any]) -> Iterator[_Document | _AsGiven]:
        for item in _one_by_one(inputs, splits=not self._model.is_own):
            first = self._seen
            if isinstance(item, str):
                # A lone surrogate is refused by the shard that tokenizes the text.
                self._whole.note("text", hashlib.sha256(item.encode("utf-8", "surrogatepass")).hexdigest())
                if not self._takes(first):
                    self._seen += 1
                    continue
            try:
                read = self._read(item)
            except InputError as error:
                raise InputError(f"document {first}: {error}") from error
            if isinstance(read, Batch):
                self._whole.note("batch", batch_hash(read))
            elif not isinstance(item, str):
                for row in read:
                    self._whole.note("ids", tensors_hash({"ids": row.ids}))
            self._seen += len(read.ids) if isinstance(read, Batch) else len(read)
            long = isinstance(item, str) and len(item) > MOST_CHARACTERS
            numbers = [number for number in range(first, self._seen) if self._takes(number)]
            if not isinstance(read, Batch):
                for number in numbers:
                    yield self._document(number, read[number - first], cut=long)
            elif numbers:
                yield _AsGiven(numbers, read.texts(torch.tensor([number - first for number in numbers])))

    def _takes(self, number: int) -> bool:
        return number % self._shards == self._index

    def _read(self, item: Any) -> list[Tokenized] | Batch:
        """The tokens of each document in an item; an item that holds more than tokens stays a batch."""
        if not isinstance(self._encoder, Encoder):
            return self._model.encode(item, bos=self._bos)
        if isinstance(item, str):
            return self._encoder.tokenize([item[:MOST_CHARACTERS] if self._truncate else item], self._bos)
        batch = item if isinstance(item, Batch) else self._encoder.read(item, self._bos)
        padding_first = bool((~batch.mask[:, :-1] & batch.mask[:, 1:]).any())
        start, target = torch.full_like(batch.ids[:, :1], self._encoder.decoder_start or 0), batch.target
        usual = target is None or torch.equal(target.ids, start)
        if usual and not padding_first and not batch.extra and not batch.senses:
            # Real tokens, padded on the right again, give the same results.
            return tokenized(self._encoder, batch)
        self._encoder.check_length(batch)
        if batch is not item:
            warn_of_batch(batch, self._model.trained_length)
        return batch

    def _document(self, number: int, text: Tokenized, *, cut: bool) -> _Document:
        """A document; `cut` says whether its text was cut before it was tokenized."""
        longest, limit = self._model.longest_text, self._model.architecture.position_limit
        if longest is None or len(text.ids) <= longest:
            return _Document(number, text, cut)
        if self._truncate:
            return _Document(number, replace(text, ids=text.ids[:longest]), True)
        remedy = f"split it, or give truncate=True to cut it after {longest}" if takes("truncate") else "split it"
        tokens = len(text.ids)
        if limit is not None and tokens > limit:
            raise InputError(f"document {number} has {tokens} tokens, but this model has {limit} positions; {remedy}.")
        warn_of_length(f"document {number}", tokens, longest, remedy)
        return _Document(number, text, cut)

    def _packed(self, window: Sequence[_Document], tokens_per_batch: int) -> Iterator[CorpusBatch]:
        for document in window:
            self._digest.update(tensors_hash({"ids": document.text.ids}).encode())
        digest = self._digest.hexdigest()
        for group in _groups(window, tokens_per_batch):
            assert isinstance(self._encoder, Encoder)
            batch = self._encoder.padded([document.text for document in group])
            numbers = torch.tensor([document.number for document in group])
            yield CorpusBatch(batch, numbers, sum(document.truncated for document in group), digest)


def _texts_of_records(inputs: Iterable[Any], besides: Besides | None) -> Iterator[Any]:
    """The items of a corpus; records become their texts, unless blank or the model reads what they hold `besides`."""
    for number, item in enumerate(inputs):
        is_record = isinstance(item, Mapping) and "text" in item and "input_ids" not in item
        if is_record and not (besides is not None and besides.reads(item)):
            text = text_of(item["text"], f"record {number}")
            if text.strip():
                yield text
        else:
            yield item


def _one_by_one(inputs: Iterable[Any], *, splits: bool) -> Iterator[Any]:
    """The items of a corpus; from a list of texts or token ids, one text at a time.

    For a user's own module, each item is one call: a tensor, or a tuple of arguments.
    """
    for item in inputs:
        if splits and not isinstance(item, str) and (is_list_of(item, str) or is_list_of(item, Ids)) and len(item):
            yield from item
        else:
            yield item


def _groups(window: Sequence[_Document], tokens_per_batch: int) -> list[list[_Document]]:
    """Groups the documents of a window, sorted by length, into batches of up to `tokens_per_batch` tokens at the least
    cost.

    The cost is Σ over groups (documents · tokens of the longest + `A_BATCH`); its minimum is over all ways to cut the
    sorted documents. A longer document is a group by itself.
    """
    documents = sorted(window, key=lambda document: len(document.text.ids))
    costs, begins = np.zeros(len(documents) + 1, np.int64), [0]
    for end, longest in enumerate((len(document.text.ids) for document in documents), start=1):
        least = max(0, end - max(1, tokens_per_batch // longest))
        padded = np.arange(end - least, 0, -1) * longest + A_BATCH
        before = costs[least:end] + padded
        best = int(before.argmin())
        costs[end] = before[best]
        begins.append(least + best)
    groups: list[list[_Document]] = []
    end = len(documents)
    while end:
        groups.append(documents[begins[end] : end])
        end = begins[end]
    return groups[::-1]
