"""Many files as one corpus, and records, as Hugging Face's `datasets` yields them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pyarrow as pa
import pytest
import torch
from comparing import refuses
from pyarrow import parquet

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError
from attnmech.runs.corpus import batches

TEXTS = documents(20, seed=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "more").mkdir()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:7]) + "\n\n")
    (tmp_path / "b.txt").write_text("﻿" + "\r\n\r\n".join(TEXTS[7:11]))
    parquet.write_table(pa.table({"text": TEXTS[11:]}), tmp_path / "more" / "c.parquet")
    for name in ("_done", ".hidden", "more/_part"):
        (tmp_path / name).write_text("not a document")
    return tmp_path


def test_folders_lists_and_uris_are_read_alike(folder: Path) -> None:
    files = [folder / "a.jsonl", folder / "b.txt", folder / "more" / "c.parquet"]
    for paths in (folder, str(folder), files, f"file://{folder}", [f"file://{each}" for each in files]):
        corpus = am.CorpusFiles(paths)
        assert list(corpus) == list(corpus) == TEXTS
        assert corpus.count == 20 and [count for count, _ in corpus.counts] == [7, 4, 9]
    assert am.CorpusFiles(folder).fingerprint == am.CorpusFiles(f"file://{folder}").fingerprint
    assert am.CorpusFiles(files[::-1]).fingerprint != am.CorpusFiles(files).fingerprint


def test_results_are_those_of_the_texts(folder: Path) -> None:
    model = am.load()
    here, there = (am.attention_focus(model, each) for each in (iter(TEXTS), am.CorpusFiles(folder)))
    assert here.provenance == there.provenance
    assert bool((here.first_top == there.first_top).all())


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", f"file://{tmp_path}/none"):
        refuses(r"there is no file .*none", am.CorpusFiles, path)
    refuses("with at least one file", am.CorpusFiles, tmp_path)
    refuses("foo://bucket/x cannot be reached", am.CorpusFiles, "foo://bucket/x")
    (tmp_path / "a.jsonl").write_text('{"words": 1}')
    refuses(r'a\.jsonl, line 1 has no "text"', list, am.CorpusFiles(f"file://{tmp_path}"))


SENTENCES = ["Anna sang of shells.", "Tom gave the old key to Anna.", "Tom sang."]


class Dataset:
    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: values[key] for name, values in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


class IterableDataset:
    """A split that streams: it has no length, and its columns are unknown."""

    column_names = None

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)


class DatasetDict(dict[str, Any]):
    @property
    def column_names(self) -> dict[str, Any]:
        return {name: split.column_names for name, split in self.items()}


def split(texts: list[Any], name: str = "text") -> Dataset:
    return Dataset({"label": list(range(len(texts))), name: texts})


def refused(model: am.HookedModel, inputs: Any) -> str:
    with pytest.raises(InputError) as caught:
        am.stream(model, inputs, [am.results.AttentionFocus.reducer()])
    return str(caught.value)


@pytest.mark.core
@pytest.mark.parametrize("streams", [False, True])
def test_records_are_read_as_their_texts(streams: bool) -> None:
    """Blank texts are skipped, as in files, and documents are numbered without them."""
    model, records = models.demo(), split([SENTENCES[0], "", SENTENCES[1], " \n\u3000", SENTENCES[2]])
    corpus = IterableDataset(list(records)) if streams else records
    read, expected = list(batches(corpus, model)), list(batches(iter(SENTENCES), model))
    assert [part.documents.tolist() for part in read] == [part.documents.tolist() for part in expected]
    assert all(torch.equal(a.batch.ids, b.batch.ids) for a, b in zip(read, expected, strict=True))
    assert [part.digest for part in read] == [part.digest for part in expected]
    focus, plain = (am.attention_focus(model, texts, progress=True) for texts in (corpus, iter(SENTENCES)))
    assert focus.provenance == plain.provenance and focus.documents == 3
    assert torch.equal(focus.first_mass, plain.first_mass)


def test_calls_that_read_the_texts_more_than_once() -> None:
    model, records = models.demo(), split(SENTENCES)
    heads = [(0, 1), (2, 3)]
    ablated, plain = (am.ablate_heads(model, texts, heads, metric="loss") for texts in (records, SENTENCES))
    once = am.ablate_heads(model, iter(records), heads, metric="loss")
    assert ablated.to_frame().equals(plain.to_frame()) and once.to_frame().equals(plain.to_frame())
    shards = [am.attention_focus(model, records, shard=(number, 2)) for number in range(2)]
    assert shards[0].merged(shards[1]).documents == 3


def test_records_without_a_text(unchecked: None) -> None:
    model = models.demo()
    message = refused(model, split(SENTENCES, "sentence"))
    assert message.startswith("document 0: ") and "got ['label', 'sentence']. A record of a corpus must" in message
    assert message.endswith("""must hold a string "text": dataset.rename_column('sentence', "text").""")
    assert refused(model, Dataset({"label": [1, 2]})).endswith("must hold \"input_ids\"; got ['label'].")
    assert refused(model, split([SENTENCES[0], None])) == "record 1: a document must be a string; got null."
    assert refused(model, split([["Anna", "sang"]])) == "record 0: a document must be a string; got list."
    assert refused(model, split(["", " "])) == "inputs have no documents; pass at least one."


def test_splits_and_slices_are_refused_with_what_to_pass(unchecked: None) -> None:
    model = models.demo()
    splits = DatasetDict(train=split(SENTENCES), test=split(SENTENCES))
    message = "inputs are the splits of a dataset ('train', 'test'); choose one, such as dataset['train']."
    assert refused(model, splits) == message
    with pytest.raises(InputError) as caught:
        am.ablate_heads(model, splits, [(0, 1)], metric="loss")  # type: ignore[arg-type]
    assert str(caught.value).endswith(message)
    assert refused(model, split(SENTENCES)[:2]).endswith("got ['label', 'text']. To pass texts: inputs[\"text\"].")
    assert am.attention_focus(model, split(SENTENCES)[:2]["text"]).documents == 2


def test_mappings_of_model_inputs_stay_model_inputs(unchecked: None) -> None:
    """Also in a corpus, and also beside a text, which this model does not accept."""
    model, ids = models.demo(), models.demo().encode(SENTENCES[0]).ids
    focus = am.attention_focus(model, iter([{"input_ids": ids}, {"text": SENTENCES[1]}]))
    assert torch.equal(focus.first_mass, am.attention_focus(model, iter([ids, SENTENCES[1]])).first_mass)
    assert "got text as well" in refused(model, iter([{"input_ids": ids, "text": SENTENCES[0]}]))
