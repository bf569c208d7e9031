"""Batches from files and iterators: every document appears once, and the batches depend only on the documents."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import models
import pyarrow
import pytest
import torch
from comparing import message_of as refused
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

import attnmech as am
from attnmech.runs.corpus import Corpus, CorpusBatch, batches

TEXTS = [
    "the keys to the cabinet are here .",
    "a dog",
    "the\x0bdog\x0c and\u2028 the\x85 keys",
    "  keys ",
    "ein Käse 🧀",
]


# -- files ---------------------------------------------------------------------------------------------------


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".parquet":
        table = pyarrow.table({"number": range(len(texts)), "text": texts})
        parquet.write_table(table, path, row_group_size=2)
        return path
    objects = [{"text": text, "n": 1} if number % 2 else text for number, text in enumerate(texts)]
    table = io.StringIO()
    rows = [("n", "text"), *enumerate(texts)]
    csv.writer(table, delimiter="\t" if ".tsv" in path.suffixes else ",").writerows(rows)
    content = {
        ".jsonl": "\n\n".join(map(json.dumps, objects)), ".ndjson": "\n\n".join(map(json.dumps, objects)),
        ".json": json.dumps(objects, indent=1), ".csv": table.getvalue(), ".tsv": table.getvalue(),
    }.get(path.suffixes[0] if path.suffixes else "", "\n".join(texts))  # fmt: skip
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content.encode()))
    return path


NAMES = ["a.txt", "a", "a.md", "a.jsonl", "A.NDJSON", "a.JsonL", "a.parquet", "a.json", "a.csv", "a.TSV", "a.txt.gz",
         "a.jsonl.xz", "a.json.bz2", "a.csv.gz"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_documents_each_time(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.lower()
    write(path, [TEXTS[0], "", *TEXTS[1:], "\t \u3000"])
    path = path.rename(tmp_path / name)
    corpus = Corpus(path)
    for _ in range(2):
        assert list(corpus) == TEXTS
    assert corpus.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    assert corpus == Corpus(path)


CONTENTS: dict[str, tuple[str, str | None]] = {
    "a.jsonl": ('\ufeff"the keys"\r\n\r\n{"text": "a, \\"dog\\"\\r\\nhere"}\r\n', None),
    "a.csv": ('\ufeffid,review\r\n1,the keys\r\n\r\n2,"a, ""dog""\r\nhere"\r\n3,\r\n', None),
    "b.csv": ('label;text\r\n1;the keys\r\n2;"a, ""dog""\r\nhere"\r\n', None),
    "c.csv": ('\n"any header"\nthe keys\n"a, ""dog""\r\nhere"\n', None),
    "d.csv": ('title,body\nx,the keys\ny,"a, ""dog""\r\nhere"\n', "body"),
    "pandas.csv": (',0\n0,the keys\n1,"a, ""dog""\r\nhere"\n', None),
    "pipes.csv": ('id|body\n1|the keys\n2|"a, ""dog""\r\nhere"\n', None),
    "e.tsv": ('id\tbody\n1\tthe keys\n2\t"a, ""dog""\r\nhere"\n', None),
    "f.json": ('\ufeff[\n "the keys",\n "a, \\"dog\\"\\r\\nhere"]\n', None),
    "g.json": ('[{"id": 1, "body": "the keys"},\r\n {"id": 2, "body": "a, \\"dog\\"\\r\\nhere"}]', None),
    "h.json": ('{"body": "the keys"}\n{"body": "a, \\"dog\\"\\r\\nhere"}\n', None),
    "i.jsonl": ('{"a": "x", "b": "the keys"}\n{"a": "y", "b": "a, \\"dog\\"\\r\\nhere"}\n', "b"),
    "j.json": ('[{"text": "x", "b": "the keys"}, {"text": "y", "b": "a, \\"dog\\"\\r\\nhere"}]', "b"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_the_column_is_the_named_one_or_text_or_the_only_one_of_strings(tmp_path: Path, name: str) -> None:
    content, column = CONTENTS[name]
    (tmp_path / name).write_bytes(content.encode())
    texts = ["the keys", 'a, "dog"\r\nhere']
    assert list(Corpus(tmp_path / name, column=column)) == texts
    assert list(am.CorpusFiles(tmp_path, column=column)) == texts
    whole = hashlib.sha256(content.encode()).hexdigest()
    assert (Corpus(tmp_path / name, column=column).fingerprint == whole) is (column is None)


def test_a_cell_may_be_long_and_the_process_keeps_its_limit(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text\n" + "a" * 10**6 + "\nb\n")
    reading = iter(Corpus(tmp_path / "a.csv"))
    assert len(next(reading)) == 10**6 and csv.field_size_limit() == limit
    assert next(reading) == "b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "title,body\na,b\n", "has no \"text\", and 2 other columns of texts; its columns are 'title', "
         "'body'. Give the option column the name of one"),
        ("a.csv", "text,text\na,b\n", "has 2 columns \"text\"; its columns are 'text', 'text'."),
        ("a.csv", "id,n\n1,2.5\n", "has no \"text\", and no other column of texts; its columns are 'id', 'n'."),
        ("a.csv", "0,the keys\n1,a dog\n", "seems to have no header: its first row holds the number '0'."),
        ("a.csv", "id,text\n1,a, dog\n", "the header has 2 columns, but the row that ends on line 2 has 3. Put texts"),
        ("a.csv", 'text\n"a" dog\n', "a.csv, line 2, is not a row of a table ("),
        ("a.csv", 'text\n"a dog\n', "is not a row of a table (unexpected end of data)"),
        ("a.csv", "text\rb\r", "a.csv, line 1, is not a row of a table ("),
        ("a.csv", "text\n", "has no documents"),
        ("a.csv", "text\nK\xe4se\n", "is not UTF-8: line 2"),
        ("a.json", '[{"text": 5}]', "entry 0: a document must be a string; got int."),
        ("a.json", '["a", {"id": 5}]', "entry 1 has no \"text\", and no other column of texts; its columns are 'id'."),
        ("a.json", '[["a"]]', "entry 0: a document must be a string; got list."),
        ("a.json", '{"data": []}', "must hold a JSON list of texts or of objects; got an object."),
        ("a.json", '["a"', "is not JSON ("),
        ("a.json", "[]", "has no documents"),
        ("a.txt.gz", "no gzip", "cannot be decompressed (Not a gzipped file"),
        ("a.tar.gz", "", "a.tar.gz ends in .tar.gz, which attnmech does not read. Save its texts as .jsonl, .ndjson"),
        *((f"a{suffix}", "", f"a{suffix} ends in {suffix}, which attnmech does not read. Save its texts as")
          for suffix in (".xlsx", ".pdf", ".docx", ".zip", ".html", ".xml", ".yaml", ".pkl", ".safetensors", ".zst")),
    ],
)  # fmt: skip
def test_files_without_a_column_of_texts(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    said = refused(lambda: list(Corpus(tmp_path / name)))
    assert said.startswith(str(tmp_path / name)) and message in said


def test_files_that_cannot_be_a_corpus(tmp_path: Path) -> None:
    assert refused(lambda: Corpus(tmp_path / "no.txt")) == f"there is no file {tmp_path / 'no.txt'}."
    assert refused(lambda: Corpus(tmp_path)) == f"{tmp_path} is a folder; name a file in it."
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe cannot be read twice" in refused(lambda: Corpus(tmp_path / "pipe"))
    for name, content in (
        ("a.txt", b""),
        ("b.txt", b"\n \r\n\n"),
        ("a.jsonl", b""),
        ("b.jsonl", b'\n""\n{"text":" "}'),
    ):
        (tmp_path / name).write_bytes(content)
        assert f"{name} has no documents" in refused(lambda name=name: Corpus(tmp_path / name))
    assert "has no documents" in refused(lambda: Corpus(write(tmp_path / "a.parquet", [])))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_not_utf8_names_line_and_byte_where_it_is_reached(tmp_path: Path, name: str) -> None:
    first, second = '"Käse"'.encode(), b"\r\n\n"
    (tmp_path / name).write_bytes(first + second + '"Käse"'.encode("latin-1") + b"\n")
    reading = iter(Corpus(tmp_path / name))
    next(reading)
    said = refused(lambda: next(reading))
    at = len(first) + len(second) + 2
    assert f"{name} is not UTF-8: line 3 has the byte 0xe4 at offset {at} of the file." in said
    (tmp_path / name).write_bytes("Käse".encode("utf-16"))
    assert "line 1 has the byte 0xff at offset 0" in refused(lambda: Corpus(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3 is not JSON ("),
        ("the keys", "line 3 is not JSON ("),
        ('"a" "b"', "line 3 is not JSON (Extra data"),
        ("[" * 10**5, "line 3 is not JSON ("),
        ("9" * 5000, "line 3 is not JSON ("),
        ('{"body": 5, "id\\n": 1}', "line 3 has no \"text\", and no other column of texts; its columns are 'body', "
         "'id\\n'."),
        ("{}", "its columns are none."),
        (json.dumps({str(n): 1 for n in range(99)}), "'7', ...."),
        ('{"text": null}', "line 3: a document must be a string; got null."),
        ('{"text": ["a"]}', "line 3: a document must be a string; got list."),
        ("5", "line 3: a document must be a string; got int."),
    ],
)  # fmt: skip
def test_lines_that_hold_no_document(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"the keys"\n\n' + line + "\n")
    reading = iter(Corpus(path))
    assert next(reading) == "the keys"
    said = refused(lambda: next(reading))
    assert said.startswith(f"{path}, line 3") and message in said


def test_parquet_files_that_hold_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), path)
    assert list(Corpus(path)) == ["a"]
    two = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    for table, count in ((two, '2 columns "text"'), (two.rename_columns(["a", "b"]), 'no "text", and 2 other columns')):
        parquet.write_table(table, path)
        assert f"{path} has {count}" in refused(lambda: Corpus(path))
    assert list(Corpus(path, column="b")) == ["b"]
    assert f"{path} has no column \"c\"; its columns are 'a', 'b'." == refused(lambda: Corpus(path, column="c"))
    parquet.write_table(pyarrow.table({"text": [5, 7]}), path)
    assert refused(lambda: Corpus(path)) == f"{path}, row 0: a document must be a string; got int."
    parquet.write_table(pyarrow.table({"text": ["a"] * 300 + [None]}), path)
    assert refused(lambda: list(Corpus(path))) == f"{path}, row 300: a document must be a string; got null."
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["a", "b", "a"]).dictionary_encode()}), path)
    assert list(Corpus(path)) == ["a", "b", "a"]
    for content in (b"", b"text", path.read_bytes()[:-3]):
        path.write_bytes(content)
        assert f"{path} cannot be read as Parquet (" in refused(lambda: Corpus(path))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(lambda: Corpus(path)).endswith('pip install "attnmech[parquet]".')


# -- batches -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words() -> am.HookedModel:
    return am.load(models.fresh("gpt2"), tokenizer=models.tokenizer(has_bos=True))


def documents_of(lengths: list[int]) -> list[torch.Tensor]:
    """Documents of these lengths; the ids of each contain its number."""
    return [torch.full((length,), 3 + number % 50).index_fill(0, torch.tensor(0), 3 + number // 50)
            for number, length in enumerate(lengths)]  # fmt: skip


def rows_of(found: Iterable[CorpusBatch]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for each in found:
        for number, ids, mask in zip(each.documents.tolist(), each.batch.ids, each.batch.mask, strict=True):
            assert number not in rows
            rows[number] = ids[mask].tolist()
    return rows


def signature(each: CorpusBatch) -> tuple[Any, ...]:
    return each.documents.tolist(), each.batch.ids.tolist(), each.batch.mask.tolist(), each.truncated, each.digest


LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 40), st.integers(1, 12))
def test_every_document_once_by_length_in_batches_that_fit(lengths: list[int], tokens: int, window: int) -> None:
    documents = documents_of(lengths)
    found = list(batches(iter(documents), models.hooked("bloom"), tokens_per_batch=tokens, window=window))
    assert rows_of(found) == {number: ids.tolist() for number, ids in enumerate(documents)}
    windows: list[list[CorpusBatch]] = [[] for _ in range(-(-len(lengths) // window))]
    for each in found:
        assert not bool((~each.batch.mask[:, :-1] & each.batch.mask[:, 1:]).any())
        assert each.batch.ids.shape[1] == int(each.batch.lengths.max())
        assert each.batch.ids.numel() <= tokens or len(each.documents) == 1
        (of,) = {number // window for number in each.documents.tolist()}
        assert all(not later for later in windows[of + 1 :])
        windows[of].append(each)
    for parts in windows:
        order = [(lengths[number], number) for each in parts for number in each.documents.tolist()]
        assert order == sorted(order)
        assert len({each.digest for each in parts}) == 1


@given(st.lists(st.integers(1, 14), min_size=1, max_size=9), st.integers(1, 40), st.integers(0, 30))
def test_no_other_batches_cost_less(lengths: list[int], tokens: int, a_batch: int) -> None:
    def cost_of(parts: Iterable[list[int]]) -> int:
        return sum(len(part) * max(part) + a_batch for part in parts)

    def ways(left: list[int]) -> Iterator[list[list[int]]]:
        """All ways to cut a list into parts that fit or hold a single document."""
        if not left:
            yield []
        for count in range(1, len(left) + 1):
            if count == 1 or count * max(left[:count]) <= tokens:
                yield from ([left[:count], *rest] for rest in ways(left[count:]))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("attnmech.runs.corpus.A_BATCH", a_batch)
        found = list(batches(iter(documents_of(lengths)), models.hooked("bloom"), tokens_per_batch=tokens))
    assert cost_of(each.batch.lengths.tolist() for each in found) == min(map(cost_of, ways(sorted(lengths))))


@given(LENGTHS, st.integers(1, 40), st.integers(1, 12), st.data())
def test_a_second_reading_is_the_first_and_what_follows_changes_nothing(
    lengths: list[int], tokens: int, window: int, data: st.DataObject
) -> None:
    documents = documents_of(lengths)

    def read(given: list[torch.Tensor]) -> Iterator[CorpusBatch]:
        return batches(iter(given), models.hooked("bloom"), tokens_per_batch=tokens, window=window)

    first = [signature(each) for each in read(documents)]
    done = data.draw(st.integers(0, len(first)))
    assert [signature(each) for each in islice(read(documents), done, None)] == first[done:]
    whole = len(lengths) // window * window
    if whole:
        beginning = [signature(each) for each in read(documents[:whole])]
        assert beginning == first[: len(beginning)]
    changed = data.draw(st.integers(0, len(lengths) - 1))
    other = [*documents[:changed], documents[changed] + 1, *documents[changed + 1 :]]
    for mine, theirs in zip(first, read(other), strict=True):
        before = min(mine[0]) // window < changed // window
        assert (mine[-1] == theirs.digest) is before


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5))
def test_shards_hold_every_nth_document_under_its_own_number(lengths: list[int], count: int, at_once: int) -> None:
    documents = documents_of(lengths)
    items: list[Any] = []
    for start in range(0, len(documents), at_once):
        together = documents[start : start + at_once]
        same = len({len(each) for each in together}) == 1
        items += [torch.stack(together)] if same else together
    found: dict[int, list[int]] = {}
    for index in range(count):
        shard = rows_of(batches(iter(items), models.hooked("bloom"), tokens_per_batch=20, shard=(index, count)))
        assert all(number % count == index for number in shard)
        found |= shard
    assert found == {number: ids.tolist() for number, ids in enumerate(documents)}


def test_texts_become_what_the_model_makes_of_each_alone(words: am.HookedModel) -> None:
    texts = ["the keys to the cabinet are here", "a dog", "keys and the dog .", "the dog", "there"]
    for bos in (None, True):
        found = list(batches(iter(texts), words, tokens_per_batch=15, window=4, bos=bos))
        assert rows_of(found) == {n: words.encode(text, bos=bos).ids[0].tolist() for n, text in enumerate(texts)}
        assert all(each.batch.bos is bool(bos) for each in found)
    assert [each.documents.tolist() for each in found] == [[1, 3], [2], [0], [4]]
    assert found[0].batch.tokens == (("[BOS]", "a", "dog"), ("[BOS]", "the", "dog"))
    (padded,) = (each for each in batches(iter(texts), words) if each.batch.padded)
    for row, number in enumerate(padded.documents.tolist()):
        alone = words.run(texts[number]).logits[0]
        torch.testing.assert_close(words.run(padded.batch).logits[row, : len(alone)], alone, rtol=0, atol=1e-5)


def test_every_form_of_a_document_is_the_same_document(words: am.HookedModel) -> None:
    texts = ["the keys are here", "a dog", "the dog and the keys"]
    expected = rows_of(batches(texts, words))
    batch = words.encode(texts)
    forms: list[Any] = [
        [texts], [tuple(texts[:2]), texts[2]], [batch], batch, [words.encode(texts[0]), *texts[1:]],
        [{"input_ids": batch.ids, "attention_mask": batch.mask.long()}],
        {"input_ids": batch.ids, "attention_mask": batch.mask}, (words.encode(text).ids[0] for text in texts),
    ]  # fmt: skip
    for form in forms:
        assert rows_of(batches(form, words)) == expected
    assert rows_of(batches(texts[0], words)) == {0: expected[0]}
    assert rows_of(batches(batch.ids[:1, :2], words)) == {0: expected[0][:2]}


def test_documents_that_are_more_than_their_tokens_stay_as_they_are() -> None:
    bert = models.hooked("bert")
    ids = models.token_ids("bert")
    types = {"input_ids": ids, "token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3)}
    left = models.padded("bert", "left")
    hole = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 3)}
    items: list[Any] = [ids[0, :5], ids[1, :2], types, ids[2], left, hole, models.padded("bert")]
    found = list(batches(iter(items), bert))
    assert [each.documents.tolist() for each in found] == [[1, 0], [2, 3, 4], [5], [6, 7, 8], [9, 10, 11], [14, 13, 12]]
    for each, item in ((found[1], types), (found[3], left), (found[4], hole)):
        given = bert.encode(item)
        assert torch.equal(each.batch.ids, given.ids) and torch.equal(each.batch.mask, given.mask)
        assert list(each.batch.extra) == list(given.extra)
    assert found[5].batch.lengths.tolist() == [3, 5, 7]
    other = {**types, "token_type_ids": 1 - types["token_type_ids"]}
    changed = list(batches(iter([*items[:2], other, *items[3:]]), bert))
    assert [a.digest == b.digest for a, b in zip(found, changed, strict=True)] == [True] + [False] * 5
    for item in (types, {"input_ids": ids, "position_ids": torch.arange(7)}):
        for index in range(2):
            (shard,) = batches(iter([item]), bert, shard=(index, 2))
            given = bert.encode(item)
            assert shard.documents.tolist() == list(range(3))[index::2]
            assert torch.equal(shard.batch.ids, ids[index::2]) and len(shard.batch.tokens) == len(shard.documents)
            expected = bert.run(given).logits[index::2]
            torch.testing.assert_close(bert.run(shard.batch).logits, expected, rtol=0, atol=1e-5)
    assert [each.documents.tolist() for each in batches(iter([types]), bert, shard=(3, 4))] == []


def test_a_decoders_own_tokens_are_kept_and_the_usual_one_is_no_hindrance() -> None:
    t5 = models.hooked("t5")
    ids = models.token_ids("t5")
    given = {"input_ids": ids, "decoder_input_ids": models.token_ids("t5", length=4, seed=2)}
    found = list(batches(iter([ids[0], ids[1, :3], given, t5.encode(ids)]), t5))
    assert [each.documents.tolist() for each in found] == [[1, 0], [2, 3, 4], [5, 6, 7]]
    assert found[0].batch.target is not None and found[0].batch.target.ids.tolist() == [[0], [0]]
    assert found[1].batch.target is not None and torch.equal(found[1].batch.target.ids, given["decoder_input_ids"])
    (shard,) = batches(iter([given]), t5, shard=(1, 3))
    assert shard.batch.target is not None and torch.equal(shard.batch.target.ids, given["decoder_input_ids"][1:2])


def test_images_go_through_in_their_batches() -> None:
    vit = models.hooked("vit")
    pixels = models.inputs_of("vit")["pixel_values"]
    found = list(batches(iter([pixels, pixels[0], {"pixel_values": pixels[1:]}]), vit, tokens_per_batch=1))
    assert [each.documents.tolist() for each in found] == [[0, 1, 2], [3], [4, 5]]
    assert torch.equal(found[2].batch.extra["pixel_values"], pixels[1:])
    assert len({each.digest for each in found}) == 3
    assert "document 1: this model reads images" in refused(lambda: list(batches(iter([pixels[0], "a dog"]), vit)))


def test_documents_longer_than_the_models_positions(words: am.HookedModel) -> None:
    texts = ["a dog", "the " * 25, "the keys " * 11, "here " * 19]
    said = refused(lambda: list(batches(iter(texts), words)))
    assert said == (
        "document 1 has 25 tokens, but this model has 19 positions; split it, or give truncate=True to cut it after 19."
    )
    found = list(batches(iter(texts), words, truncate=True, tokens_per_batch=38))
    assert rows_of(found) == {0: [11, 12], 1: [3] * 19, 2: [3, 4] * 9 + [3], 3: [8] * 19}
    assert [(each.documents.tolist(), each.truncated) for each in found] == [([0, 1], 1), ([2, 3], 1)]
    assert next(batches(iter(texts), words, truncate=True, bos=True)).batch.ids[-1, :2].tolist() == [2, 8]
    together = torch.full((3, 21), 7)
    said = refused(lambda: list(batches(iter(["a dog", together]), words, shard=(1, 2))))
    assert said.startswith("document 1 has 21 tokens, but this model has 19 positions")
    mask = torch.ones_like(together)
    mask[:, 17:] = 0
    assert len(rows_of(batches(iter([{"input_ids": together, "attention_mask": mask}]), words))[0]) == 17
    further = {"input_ids": together, "attention_mask": mask.flip(1)}
    said = refused(lambda: list(batches(iter(["a dog", further]), words, truncate=True)))
    assert said == "document 1: this model has 19 positions; the text has 21 tokens. Shorten or split it."


def test_a_text_of_too_many_characters_is_refused_or_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attnmech.model.inputs.encoder", "attnmech.runs.corpus"):
        monkeypatch.setattr(f"{module}.MOST_CHARACTERS", 12)
    bloom = am.load(models.fresh("bloom"), tokenizer=models.tokenizer())
    texts = ["a dog", "the keys to the cabinet"]
    said = refused(lambda: list(batches(iter(texts), bloom)))
    assert said == "document 1: the text has 23 characters; at most 12 are tokenized. Split it; in a corpus, " \
        "truncate=True cuts it."  # fmt: skip
    found = list(batches(iter(texts), bloom, truncate=True))
    assert rows_of(found) == {0: [11, 12], 1: [3, 4, 5]}
    assert sum(each.truncated for each in found) == 1


@pytest.mark.usefixtures("unchecked")
def test_documents_that_cannot_be(words: am.HookedModel) -> None:
    empty = "the text is empty; give at least one word."
    bad: list[tuple[Any, str]] = [
        ("", empty), (" \n", empty), (None, "inputs must be a text"), (5, "inputs must be a text"),
        ([5, 7], "For a list of ids: torch.tensor(ids)."), ([], "the list of texts is empty"), (b"the", "got bytes"),
        (["the", ""], empty), (torch.tensor([1.0]), "token ids must be whole numbers"),
        (torch.tensor([5, 99]), "token ids must be from 0 to 52"), ({"ids": torch.ones(2)}, '"input_ids"'),
        ("the \ud800", "a lone surrogate"),
    ]  # fmt: skip
    for item, message in bad:
        reading = batches(iter(["the dog", ["the", "keys"], torch.tensor([[4, 5], [6, 7]]), item]), words, window=2)
        assert [next(reading).documents.tolist() for _ in range(2)] == [[1, 0], [2, 3]]
        said = refused(lambda reading=reading: list(reading))
        number = 6 if isinstance(item, list) and item[-1:] == [""] else 5
        assert said.startswith(f"document {number}: ") and message in said
    for nothing in ([], iter([]), ()):
        assert refused(lambda nothing=nothing: list(batches(nothing, words))) == "inputs have no documents; pass at " \
            "least one."  # fmt: skip
    for thing in (None, 5, words):
        assert "an iterable of them; got" in refused(lambda thing=thing: batches(thing, words))
    nobody = refused(lambda: list(batches(iter(["a dog"]), models.hooked("gpt2"))))
    assert nobody.startswith("document 0: this model was loaded without a tokenizer")


def test_no_more_is_read_ahead_than_a_window() -> None:
    taken = 0

    def endless() -> Iterator[torch.Tensor]:
        nonlocal taken
        while True:
            taken += 1
            yield torch.full((1 + taken % 7,), 5)

    reading = batches(endless(), models.hooked("bloom"), window=10, tokens_per_batch=12)
    assert taken == 0
    next(reading)
    assert taken == 10
