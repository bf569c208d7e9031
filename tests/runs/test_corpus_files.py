"""Many files as one corpus: in order, in any store, with the same numbers as a single list."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import attnmech as am
from attnmech.demo.text import documents
from attnmech.errors import InputError

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
        with pytest.raises(InputError, match=r"there is no file .*none"):
            am.CorpusFiles(path)
    with pytest.raises(InputError, match="with at least one file"):
        am.CorpusFiles(tmp_path)
    with pytest.raises(InputError, match="foo://bucket/x cannot be reached"):
        am.CorpusFiles("foo://bucket/x")
    (tmp_path / "a.jsonl").write_text('{"words": 1}')
    with pytest.raises(InputError, match=r'a\.jsonl, line 1 has no "text"'):
        list(am.CorpusFiles(f"file://{tmp_path}"))
