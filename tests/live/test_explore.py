"""The page in a notebook's cell: traits follow the page, the page follows traits, and the kernel answers."""

from typing import Any

import pytest
import torch
from comparing import refuses

import attnmech as am
from attnmech.live.edits import Edits, compared
from attnmech.live.session import Session

TEXT = "Anna gave an old anchor to Tom."


def test_python_reads_sets_and_answers(demo: am.HookedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    view, sent = am.explore(demo, TEXT), list[Any]()
    monkeypatch.setattr(view, "send", sent.append)
    view.set_state({"selected": [[2, 6]], "query": 3, "edit": [[2, 6, "zero"]], "_address": "layer=2&head=6&tab=why"})
    assert (view.selected, view.query, view.edit, view.text) == ([(2, 6)], 3, [(2, 6, "zero")], TEXT)
    assert view.interventions == [am.Intervention.zero([(2, 6)])]
    head = {"heads": [[2, 6, "zero"]]}
    asked = {"edit": head, "text": {"text": "The keys"}, "save": {"start": "layer=1", "edit": head}, "whole": {}}
    for number, (kind, body) in enumerate([*asked.items(), ("text", {"text": ""}), ("more", {})]):
        view._asked({"number": number, "kind": kind, "body": body})
    assert [answer["number"] for answer in sent] == list(range(6))
    edited, _, saved, _, empty, unknown = (answer["content"] for answer in sent)
    assert edited == compared(demo, TEXT, Edits.of(head))
    assert "1 to 4,000 characters" in empty["error"] and "'more'" in unknown["error"]
    assert edited["sentences"][0].split(",")[0] in saved["html"] and '"start": "layer=1"' in saved["html"]
    assert view.text == "The keys" and "not measured yet" not in view._page
    start = view._page.split('"start": "layer=2')[1].split('"')[0]
    assert start.endswith("edit=L2H6-zero") and "tab=why" in start
    bundle, _ = view._repr_mimebundle_()
    assert "srcdoc=" in bundle["text/html"] and "application/vnd.jupyter.widget-view+json" in bundle


def test_what_a_trait_cannot_be_is_refused(demo: am.HookedModel) -> None:
    view = am.explore(demo, TEXT)
    refuses("heads are edited by zero", setattr, view, "edit", [(2, 6, "drop")])
    refuses("1 to 4,000 characters", setattr, view, "text", " ")
    assert view.text == TEXT and view.edit == []


def test_what_was_read_under_an_edit_stays_with_it(demo: am.HookedModel) -> None:
    session = Session(demo, TEXT)
    plain = session.page(TEXT, "notebook")
    edited = list[str]()
    for values in (am.mean_z(demo, [TEXT]), am.mean_z(demo, [TEXT, "The keys"])):
        with demo.intervene(am.Intervention.replace([(1, 6)], values)):
            edited.append(session.page(TEXT, "notebook"))
    assert len({plain, *edited}) == 3 and session.page(TEXT, "notebook") == plain
    with torch.no_grad():
        next(iter(demo.original.parameters())).mul_(2)
    doubled = session.page(TEXT, "notebook")
    with torch.no_grad():
        next(iter(demo.original.parameters())).div_(2)
    assert doubled != plain
