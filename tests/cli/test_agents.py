"""The server for agents, driven by the SDK's client: answers, bounds, folders, progress, cancellation, HTTP."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import httpx2
import models
import pandas as pd
import pytest
import torch
from comparing import refuses
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult
from schemas import are_sentences, schema, strict
from transformers import AutoModelForCausalLM, AutoTokenizer

import attnmech as am
from attnmech.cli.agents import arguments
from attnmech.cli.agents.allowed import Folders, Models
from attnmech.cli.agents.server import server_of
from attnmech.cli.agents.tools import MAX_ANSWER, Tools
from attnmech.demo import model_folder
from attnmech.demo.text import documents

from .conftest import Command

TEXT = "Anna gave an old anchor to Tom."
TEXTS = documents(6)
AGREEMENT = {
    "clean": ["The keys to the chest"],
    "corrupted": ["The key to the chest"],
    "answers": [" are"],
    "against": [" is"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, and beside it a secret."""
    parent = tmp_path_factory.mktemp("agents")
    (parent / "secret.txt").write_text("the secret")
    made = parent / "allowed"
    made.mkdir()
    (made / "corpus.txt").write_text("\n".join(documents(30)))
    (made / "link.txt").symlink_to(parent / "secret.txt")
    (made / "up").symlink_to(parent)
    return made


def in_a_loop(function: Callable[[], Any]) -> Any:
    """The result of an asynchronous function, run in a thread of its own: the fixture with a browser keeps a loop in
    this one.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(anyio.run, function).result()


@cache
def tools_of(folder: Path) -> Tools:
    return Tools(Models((), None, None), Folders([folder]))


def ask(tools: Tools, *calls: tuple[str, Mapping[str, Any]]) -> list[CallToolResult]:
    """The results of calls, made in one session."""

    async def asked() -> list[CallToolResult]:
        async with Client(server_of(tools)) as client:
            return [await client.call_tool(name, dict(arguments)) for name, arguments in calls]

    return in_a_loop(asked)


def answer_of(tools: Tools, name: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a call, which fits the schema and is also the text that the agent reads."""
    (result,) = ask(tools, (name, arguments))
    assert not result.is_error, result.content
    answer: dict[str, Any] = strict(result.content[0].text)
    assert answer == result.structured_content
    assert len(result.content[0].text) <= MAX_ANSWER
    schema("answer").validate(answer)
    assert are_sentences(answer["findings"])
    assert answer["certificate"]["ok"] and "certified" in answer["certificate"]["verdict"]
    return answer


def refusal_of(tools: Tools, name: str, **arguments: Any) -> str:
    (result,) = ask(tools, (name, arguments))
    assert result.is_error and result.structured_content is None
    return str(result.content[0].text)


# -- the numbers are those of Python ---------------------------------------------------------------------------


def test_load_model_lists_checks_and_points(folder: Path) -> None:
    answer = answer_of(tools_of(folder), "load_model")
    assert "4 layers × 8 heads" in answer["model"] and answer["ok"]
    assert {point["point"] for point in answer["points"]} == set(models.demo().points)
    assert answer["table"]["rows_in_all"] == len(models.demo().certificate.checks)


def test_a_model_that_is_not_certified_is_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tools_of(folder)
    monkeypatch.setattr(am.results.Certificate, "ok", False)
    monkeypatch.setattr(am.results.Certificate, "verdict", "NOT certified")
    (result,) = ask(tools, ("attention_focus", {"texts": [TEXT]}))
    assert result.structured_content["certificate"] == {"ok": False, "verdict": "NOT certified"}


HEADS = [{"layer": 1, "head": 0}, {"layer": 2, "head": 6}]
PAIRS = [(1, 0), (2, 6)]


@pytest.mark.parametrize(
    ("name", "arguments", "method"),
    [
        ("head_types", {}, lambda model: am.head_types(model)),
        (
            "attention_focus",
            {"file": "corpus.txt", "documents": 5},
            lambda model: am.attention_focus(model, iter(documents(30)[:5])),
        ),
        (
            "ablate_heads",
            {"texts": TEXTS, "heads": HEADS, "method": "mean"},
            lambda model: am.ablate_heads(model, TEXTS, heads=PAIRS, method="mean", reference=TEXTS),
        ),
        ("patch_heads", AGREEMENT, lambda model: am.patch(model, **AGREEMENT)),
        ("null_attention", {"texts": TEXTS}, lambda model: am.null_attention(model, TEXTS)),
        ("residual_drift", {"texts": TEXTS, "k": 12}, lambda model: am.residual_drift(model, iter(TEXTS), k=12)),
    ],
)
def test_numbers_are_those_of_the_method(
    folder: Path, name: str, arguments: dict[str, Any], method: Callable[[am.HookedModel], am.results.Result]
) -> None:
    answer, expected = answer_of(tools_of(folder), name, **arguments, rows=200), method(models.demo())
    places = [each for each in ("layer", "head", "type") if each in answer["table"]["rows"][0]]
    found, frame = pd.DataFrame(answer["table"]["rows"]).set_index(places), expected.to_frame().set_index(places)
    assert answer["findings"][0] == expected.lead
    frame = frame[list(found)].dropna(how="all")
    found = found.astype(frame.dtypes)  # one pair of texts has no interval, which JSON writes as null
    pd.testing.assert_frame_equal(found.sort_index(), frame.sort_index(), check_dtype=False, atol=1e-5, rtol=1e-4)


def test_a_metric_has_its_unit(folder: Path) -> None:
    words = {"texts": AGREEMENT["clean"], "answers": [" are"], "against": [" is"], "heads": HEADS, "rows": 1}
    for metric, unit in (("loss", "nats of loss"), ("logit_difference", "logit difference")):
        answer = answer_of(tools_of(folder), "ablate_heads", **words, metric=metric)
        assert answer["table"]["units"]["effect"] == unit
        assert len(answer["table"]["rows"]) == 1 and answer["table"]["rows_in_all"] == 2


def test_the_terms_of_every_key_add_up_to_its_score(folder: Path) -> None:
    answer = answer_of(tools_of(folder), "explain_score", text=TEXT, layer=2, head=6, query=5)
    rows, run = answer["table"]["rows"], models.demo().run(TEXT, points=["pattern", "scores"])
    assert len(rows) == 6 and sum(row["attention"] for row in rows) == pytest.approx(1, abs=1e-5)
    for row in rows:
        terms = [value for name, value in row.items() if name not in ("key", "token", "attention", "score")]
        assert sum(terms) == pytest.approx(row["score"], abs=1e-4)
        cell = (0, 6, 5, row["key"])
        assert row["score"] == pytest.approx(float(run["scores", 2][cell]), abs=1e-4)
        assert row["attention"] == pytest.approx(float(run["pattern", 2][cell]), abs=1e-5)
    assert f"attends to {rows[0]['token']!r} ({rows[0]['key']})" in answer["findings"][0]
    other = answer_of(tools_of(folder), "explain_score", text=TEXT, layer=2, head=6, query=5, key=1)
    assert "(1) with weight" in other["findings"][0]


def test_confirm_heads_gives_the_verdict(folder: Path) -> None:
    tools, heads = tools_of(folder), [{"layer": 1, "head": 0}]
    answer = answer_of(tools, "confirm_heads", heads=heads, task="copying")
    assert answer["findings"][1] == "Verdict: confirmed."
    (row,) = answer["table"]["rows"]
    assert row["adds_low"] > 0 and row["adds_low"] <= row["adds"] <= row["adds_high"]
    cases = [
        {"prompt": case.prompt, "answer": case.answer, "against": case.against, "group": case.group}
        for case in am.Task.of_demo("copying").cases
    ]
    again = answer_of(tools, "confirm_heads", heads=heads, cases=cases)
    assert again["table"]["rows"][0]["adds"] == pytest.approx(row["adds"], abs=1e-5)


@pytest.mark.parametrize("by", ["attention", "value_weighted"])
def test_search_finds_the_rows_whose_key_is_the_token(folder: Path, by: str) -> None:
    """By hand, from the plain pattern: the most attended key, without the first token and the query itself."""
    tools, texts, model = tools_of(folder), documents(30), models.demo()
    answer = answer_of(tools, "search_examples", token="to", file="corpus.txt", rows=200, by=by)
    rows = answer["table"]["rows"]
    assert rows and answer["findings"][1].startswith(f"{len(rows)} of the 320 strongest rows attend most, apart from")
    for row in rows:
        run = model.run(texts[row["text"]], points=["pattern"])
        weights = run["pattern", row["layer"]][0, row["head"], row["position"]].clone()
        weights[[0, row["position"]]] = 0
        assert run.tokens[0][int(weights.argmax())].strip() == row["key"].strip() == "to"
        assert row["key_weight"] == pytest.approx(float(weights.max()), abs=1e-5)
        if by == "attention":
            assert row["value"] == pytest.approx(row["key_weight"], abs=1e-5)
    asking = answer_of(tools, "search_examples", token="to", at="query", file="corpus.txt", rows=200)
    assert {row["query"].strip() for row in asking["table"]["rows"]} == {"to"}
    nothing = answer_of(tools, "search_examples", token="unheard", file="corpus.txt")
    assert nothing["table"]["rows"] == [] and nothing["findings"][1].startswith("0 of the 320")


def test_search_in_texts_without_rows(folder: Path) -> None:
    (folder / "words.txt").write_text("a\nb\n")
    answer = answer_of(tools_of(folder), "search_examples", token="a", file="words.txt", by="next_token")
    assert answer["table"]["rows_in_all"] == len(answer["table"]["rows"])


def test_texts_that_no_call_named_are_named(folder: Path) -> None:
    tools = tools_of(folder)
    assert "No texts were named: a built-in paragraph was read." in answer_of(tools, "attention_focus")["notes"]
    assert not any("No texts" in note for note in answer_of(tools, "attention_focus", texts=[TEXT])["notes"])


def test_a_place_that_changes_during_a_call_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, or a link that leads outside, which appears while the model is measured."""
    tools, outside = Tools(Models((), None, None), Folders([folder])), folder.parent / "outside.csv"
    load = tools.models.load

    def meanwhile(name: str | None) -> Any:
        (folder / "linked.csv").symlink_to(outside)
        (folder / "taken.csv").write_text("mine")
        return load(name)

    monkeypatch.setattr(tools.models, "load", meanwhile)
    said = refusal_of(tools, "attention_focus", texts=[TEXT], out=["linked.csv"])
    assert "files must be in" in said and not outside.exists()
    for name in ("linked.csv", "taken.csv"):
        (folder / name).unlink()
    said = refusal_of(tools, "attention_focus", texts=[TEXT], out=["taken.csv"])
    assert "has changed since the call began" in said and (folder / "taken.csv").read_text() == "mine"


def test_a_picture_that_cannot_be_drawn_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise am.errors.OutputError("there is no browser.")

    monkeypatch.setattr(am.results.AttentionFocus, "save_figure", fail)
    answer = answer_of(tools_of(folder), "attention_focus", texts=[TEXT], picture=True, out=["drawn.csv"])
    assert "No picture: there is no browser." in answer["notes"] and (folder / "drawn.csv").exists()


def test_files_are_written_in_the_folder(folder: Path) -> None:
    tools = tools_of(folder)
    written = answer_of(tools, "report", texts=[TEXT], out=["page.html", str(folder / "terms.csv")])
    assert written["files"] == [str(folder / "page.html"), str(folder / "terms.csv")]
    assert "anchor" in (folder / "page.html").read_text(encoding="utf-8")
    answer_of(tools, "attention_focus", texts=[TEXT], out=["focus.safetensors"])
    assert am.load_result(folder / "focus.safetensors").layers == (0, 1, 2, 3)
    assert "exists; name another file" in refusal_of(tools, "report", texts=[TEXT], out=["page.html"])
    assert "must end in" in refusal_of(tools, "attention_focus", texts=[TEXT], out=["focus.pkl"])


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("ablate_heads", {"texts": TEXTS}), ("explain_score", {"text": TEXT, "layer": 1, "head": 3})],
)
def test_pictures_are_png(folder: Path, chromium: Any, name: str, arguments: dict[str, Any]) -> None:
    (result,) = ask(tools_of(folder), (name, {**arguments, "picture": True}))
    picture = result.content[1]
    assert picture.mime_type == "image/png"
    assert base64.b64decode(picture.data).startswith(b"\x89PNG")


def raw_run(text: str, *zeroed: tuple[int, int]) -> tuple[list[int], torch.Tensor, Any, str]:
    """Token ids, ln p and patterns of plain transformers, and its greedy answer; these heads write 0."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32, attn_implementation="eager")
    for layer, head in zeroed:
        model.transformer.h[layer].self_attention.dense.weight.data[:, 24 * head : 24 * head + 24] = 0
    ids = models.demo().encode(text).ids
    with torch.no_grad():
        out = model(ids, output_attentions=True)
        answer = model.generate(ids, attention_mask=ids**0, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    written = AutoTokenizer.from_pretrained(model_folder()).decode(answer, skip_special_tokens=True)
    return ids[0].tolist(), out.logits[0].double().log_softmax(dim=-1), out.attentions, written


@pytest.mark.parametrize("zeroed", [[], PAIRS])
def test_predictions_and_answers_are_those_of_plain_transformers(folder: Path, zeroed: list[Any]) -> None:
    edits = {"edits": {"heads": [{**head, "way": "zero"} for head in HEADS]}} if zeroed else {}
    runs = [raw_run(TEXT), *([raw_run(TEXT, *zeroed)] if zeroed else [])]
    answer = answer_of(tools_of(folder), "predict", text=TEXT, **edits)
    rows = sorted(answer["table"]["rows"], key=lambda row: row["position"])
    for (ids, log_probs, *_), name, loss in zip(runs, ("probability", "other"), ("loss", "loss_edited"), strict=False):
        losses = -log_probs[range(len(ids) - 1), ids[1:]]
        assert rows[0][loss] is None and [row[loss] for row in rows[1:]] == pytest.approx(losses.tolist(), abs=1e-4)
        assert f" {losses.mean():.3f} " in answer["findings"][1]
        tokens = models.demo().position_texts(range(log_probs.shape[1]))
        after = [float(log_probs[-1, tokens.index(entry["token"])].exp()) for entry in answer["next"]]
        assert [entry[name] for entry in answer["next"]] == pytest.approx(after, abs=1e-6)
    (row,) = answer_of(tools_of(folder), "generate", prompt=TEXT, **edits)["table"]["rows"]
    assert [row[name] for name in ("plain", "edited") if name in row] == [written for *_, written in runs]


def test_two_prompts_are_compared(folder: Path) -> None:
    prompts = {"prompt": AGREEMENT["clean"][0], "other": AGREEMENT["corrupted"][0]}
    (*_, one, _), (*_, two, _) = runs = [*map(raw_run, prompts.values())]
    answer = answer_of(tools_of(folder), "compare_prompts", **prompts)
    shifts = torch.cat([(b - a)[0, :, -1].abs().sum(-1) / 2 for a, b in zip(one, two, strict=True)])
    row = answer["table"]["rows"][0]
    assert row["shift"] == pytest.approx(float(shifts.max()), abs=1e-5)
    assert row["layer"] * 8 + row["head"] == int(shifts.argmax())
    assert row["key"] == int(one[row["layer"]][0, row["head"], -1].argmax())
    best = [max(entry[name] for entry in answer["next"]) for name in ("probability", "other")]
    assert best == pytest.approx([float(run[1][-1].exp().max()) for run in runs], abs=1e-6)
    shorter = answer_of(tools_of(folder), "compare_prompts", prompt="The keys", other="The keys to the chest")
    assert not shorter["table"]["rows"] and "Attention is not compared" in shorter["notes"][0]


def test_models_and_files_are_resources(folder: Path) -> None:
    async def asked(*uris: str) -> list[str]:
        async with Client(server_of(Tools(Models((), None, None), Folders([folder])))) as client:
            assert len((await client.list_resources()).resources) == 2
            return [(await client.read_resource(f"attnmech://{uri}")).contents[0].text for uri in uris]

    offered, listed, text = map(json.loads, in_a_loop(lambda: asked("models", "files", "file/corpus.txt")))
    assert offered == [{"name": "demo", "loaded": None}] and text == [line[:1000] for line in documents(20)]
    sizes = {entry["name"]: entry["bytes"] for entry in listed["files"]}
    assert sizes["corpus.txt"] == (folder / "corpus.txt").stat().st_size and not {"link.txt", "up"} & set(sizes)
    for name in ("link.txt", "../secret.txt", "up/secret.txt", "%2Fetc/passwd"):
        with pytest.raises(ExceptionGroup) as refused:
            in_a_loop(lambda name=name: asked(f"file/{name}"))
        assert refused.group_contains(MCPError, match="files must be in")


# -- bounds ----------------------------------------------------------------------------------------------------


def test_a_long_answer_has_fewer_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmech.cli.agents.tools.MAX_ANSWER", 2500)
    answer = answer_of(tools_of(folder), "attention_focus", texts=[TEXT], rows=32)
    assert len(json.dumps(answer, ensure_ascii=False)) <= 2500
    assert 0 < len(answer["table"]["rows"]) < 32 == answer["table"]["rows_in_all"]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("load_model", {"rows": 10**9}, "less than or equal to 200"),
        ("load_model", {"rows": 0}, "greater than or equal to 1"),
        ("load_model", {"modle": "demo"}, "Extra inputs are not permitted"),
        ("load_model", {"model": "gpt2"}, "`model` must be one of demo; got 'gpt2'."),
        ("load_model", {"model": "/etc"}, "`model` must be one of demo; got '/etc'."),
        ("attention_focus", {"texts": ["a"] * 65}, "at most 64 items"),
        ("attention_focus", {"texts": ["a" * 20_001]}, "at most 20000 characters"),
        ("attention_focus", {"texts": ["a"], "file": "corpus.txt"}, "expected `texts` or `file`; got both"),
        ("attention_focus", {"texts": []}, "at least 1 item"),
        ("explain_score", {"text": "zq" * 600, "layer": 0, "head": 0}, "at most 1,000 tokens; this has 1,2"),
        ("attention_focus", {"file": "corpus.txt", "documents": 10**12}, "less than or equal to 10000"),
        ("explain_score", {"text": TEXT, "layer": 4, "head": 0}, "`layer` must be from 0 to 3"),
        ("explain_score", {"text": TEXT, "layer": 10**30, "head": 0}, "less than or equal to 1000000"),
        ("explain_score", {"text": TEXT, "layer": -1, "head": 0}, "greater than or equal to 0"),
        ("explain_score", {"text": TEXT, "layer": 0, "head": 8}, "`head` must be from 0 to 7"),
        ("explain_score", {"text": TEXT, "layer": 0, "head": 0, "query": 99}, "`query` must be from 0 to 8"),
        ("explain_score", {"text": TEXT, "layer": 0, "head": 0, "query": 2, "key": 5}, "cannot see key 5"),
        ("ablate_heads", {"heads": [[0, 1]]}, "valid dictionary"),
        ("ablate_heads", {"metric": "__import__('os')"}, "Input should be 'loss', 'kl'"),
        ("null_attention", {"delta": -1}, "greater than 0"),
        ("confirm_heads", {"heads": [{"layer": 0, "head": 0}]}, "expected `cases` or `task`"),
        ("patch_heads", {**AGREEMENT, "corrupted": ["The key"]}, "must have the same number of tokens"),
        ("report", {"texts": [TEXT] * 13, "out": ["a.html"]}, "at most 12 items"),
        ("predict", {"text": TEXT, "edits": {"heads": [{**HEADS[0], "way": "patch"}]}}, "takes z from another prompt"),
        ("generate", {"prompt": TEXT, "max_new_tokens": 201}, "less than or equal to 200"),
        ("nothing", {}, "Unknown tool"),
    ],
)
def test_hostile_and_mistaken_arguments_are_refused(
    folder: Path, name: str, arguments: dict[str, Any], words: str
) -> None:
    assert words in refusal_of(tools_of(folder), name, **arguments)


@pytest.mark.parametrize("name", ["../secret.txt", "link.txt", "up/secret.txt", "/etc/passwd", "a/../../secret.txt"])
def test_files_outside_the_folders_are_neither_read_nor_written(folder: Path, name: str) -> None:
    tools = tools_of(folder)
    for said in (
        refusal_of(tools, "attention_focus", file=name),
        refusal_of(tools, "search_examples", token="a", file=name),
        refusal_of(tools, "report", texts=[TEXT], out=[f"{name}.html" if "link" not in name else name]),
    ):
        assert "secret" not in said.replace(repr(name), "").replace(name, "")
    assert (folder.parent / "secret.txt").read_text() == "the secret"
    assert [path.name for path in folder.parent.iterdir() if path != folder] == ["secret.txt"]


def test_folders_decide_by_where_links_lead(folder: Path) -> None:
    folders = Folders([folder])
    (folder / "round").symlink_to(folder / "round")
    assert folders.file("corpus.txt") == folders.file(str(folder / "corpus.txt")) == folder / "corpus.txt"
    for name in ("..", "up", "link.txt", "~/x", "//etc", "\0", "x" * 300, f"{folder}2/x", "corpus.txt/x", "round"):
        if name == "~/x":
            assert folders.file(name) == folder / "~" / "x"  # no shell expands it
            continue
        refuses(r"files must be in|null character|is not a path|cannot be used", folders.file, name)
    refuses("start the server with --folder", Folders([]).file, "corpus.txt")
    refuses("--folder must name a folder", Folders, [folder / "corpus.txt"])


def test_every_argument_is_described_and_bounded(folder: Path) -> None:
    async def listed() -> Any:
        async with Client(server_of(tools_of(folder))) as client:
            return (await client.list_tools()).tools

    tools = in_a_loop(listed)
    assert next(tool.name for tool in tools) == "load_model" and len(tools) == 14
    for tool in tools:
        assert tool.description and not tool.description.startswith(" ") and "\n        " not in tool.description
        assert tool.input_schema["additionalProperties"] is False
        assert tool.output_schema["properties"].keys() == arguments.Answer.model_fields.keys()
        for name, about in tool.input_schema["properties"].items():
            defined = re.findall(r"#/\$defs/(\w+)", json.dumps(about))
            written = json.dumps([about, *(tool.input_schema["$defs"][part] for part in defined)])
            if name not in ("model", "picture"):
                assert any(bound in written for bound in ("maximum", "maxLength", "maxItems", "enum")), (
                    tool.name,
                    name,
                )


# -- long work -------------------------------------------------------------------------------------------------


def test_progress_is_reported_and_work_can_be_cancelled(folder: Path) -> None:
    tools = tools_of(folder)

    async def cancelled() -> tuple[list[tuple[float, str]], int, CallToolResult]:
        seen: list[tuple[float, str]] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            seen.append((progress, message or ""))

        async with Client(server_of(tools)) as client:
            async with anyio.create_task_group() as group:

                async def call() -> None:
                    await client.call_tool("ablate_heads", {}, progress_callback=note)

                group.start_soon(call)
                with anyio.fail_after(60):
                    while len(seen) < 4:
                        await anyio.sleep(0.01)
                group.cancel_scope.cancel()
            count = len(seen)
            with anyio.fail_after(60):
                after = await client.call_tool("load_model", {})
            return seen, count, after

    seen, count, after = in_a_loop(cancelled)
    assert not after.is_error and len(seen) <= count + 1
    steps, messages = zip(*seen, strict=True)
    assert list(steps) == sorted(set(steps))
    assert messages[0] == "loading and certifying the model" and messages[3].startswith("ablations: ")
    assert messages[3].endswith(" of 2,048")


def test_calls_wait_for_each_other(folder: Path) -> None:
    tools, together, most = Tools(Models((), None, None), Folders([folder])), [], []
    load = tools.models.load

    def slow(name: str | None) -> Any:
        together.append(threading.get_ident())
        most.append(len(together))
        time.sleep(0.05)
        together.pop()
        return load(name)

    tools.models.load = slow  # type: ignore[method-assign]

    async def both() -> list[bool]:
        ended: list[bool] = []
        async with Client(server_of(tools)) as client, anyio.create_task_group() as group:

            async def call() -> None:
                ended.append((await client.call_tool("attention_focus", {"texts": [TEXT]})).is_error)

            for _ in range(4):
                group.start_soon(call)
        return ended

    assert in_a_loop(both) == [False] * 4
    assert max(most) == 1


def test_one_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr("attnmech.model.files.load.load", lambda source, **_: loaded.append(source) or object())
    offered = Models(("demo", "mine"), None, None)
    assert offered.load(None) is offered.load("demo") is not offered.load("mine")
    offered.load("demo")
    assert loaded == [None, "mine", None]


# -- the ways to the server ------------------------------------------------------------------------------------


def test_stdio(folder: Path) -> None:
    async def asked() -> list[Any]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "attnmech", "mcp", "--folder", str(folder)], cwd=Path.cwd()
        )
        async with Client(server) as client:
            return [
                await client.call_tool("head_types", {"file": "corpus.txt", "documents": 4}),
                await client.call_tool("attention_focus", {"file": "../secret.txt"}),
            ]

    answered, refused = in_a_loop(asked)
    assert not answered.is_error and schema("answer").is_valid(answered.structured_content)
    assert refused.is_error and "files must be in" in refused.content[0].text


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """`attnmech mcp --http`: its address, and what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "attnmech", "mcp", "--http", str(port), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)

        def printed() -> str:
            process.terminate()
            return process.communicate(timeout=30)[1]

        yield f"http://127.0.0.1:{port}/mcp", printed
    finally:
        process.kill()
        process.wait()


def test_http_needs_the_token_and_refuses_other_hosts_and_origins(folder: Path) -> None:
    with served("--folder", str(folder), ATTNMECH_MCP_TOKEN="the token") as (url, printed):
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        plain = {"accept": "application/json, text/event-stream", "content-type": "application/json"}

        def status(**headers: str) -> int:
            return httpx2.post(url, json=body, headers=plain | headers).status_code

        token = {"authorization": "Bearer the token"}
        assert status() == status(authorization="Bearer other") == status(authorization="the token") == 401
        assert status(**token, origin="https://evil.example") == 403
        assert status(**token, host="evil.example") == 421

        async def asked() -> CallToolResult:
            async with (
                httpx2.AsyncClient(headers=token, timeout=60) as http,
                Client(streamable_http_client(url, http_client=http)) as client,
            ):
                return await client.call_tool("attention_focus", {"file": "corpus.txt", "documents": 2})

        result = in_a_loop(asked)
        assert not result.is_error and schema("answer").is_valid(result.structured_content)
        said = printed()
    assert f"serving {url}" in said and "the token" not in said


def test_http_makes_a_token_of_its_own(attnmech: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    served_with: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "attnmech.cli.agents.server.serve_http", lambda tools, port, token: served_with.append((port, token))
    )
    monkeypatch.delenv("ATTNMECH_MCP_TOKEN", raising=False)
    said = attnmech("mcp", "--http", 8123).err
    ((port, token),) = served_with
    assert port == 8123 and len(token) >= 32 and f"token: {token}" in said


def test_without_the_package_the_command_says_what_to_install(
    attnmech: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("attnmech.cli.agents.")]:
        if name.endswith((".server", ".tools", ".answers", ".arguments")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "attnmech[mcp]"' in attnmech("mcp").err
