"""Figures of results: any statistic as a map, and the title of a saved figure."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import models
import numpy as np
import pytest
from comparing import refuses

import attnmech as am
from attnmech.errors import OutputError
from attnmech.maths.focus import STATISTICS


@pytest.fixture(scope="module")
def focus() -> am.results.AttentionFocus:
    return am.attention_focus(models.hooked("bloom"), models.token_ids("bloom"), last=2)


@pytest.fixture(scope="module")
def updates() -> am.results.ResidualUpdates:
    return am.residual_updates(models.hooked("bloom"), models.token_ids("bloom"))


def test_any_statistic_of_where_heads_look_is_a_map(focus: am.results.AttentionFocus) -> None:
    for statistic in STATISTICS.keys() - {"concentration"}:
        figure = focus.plot(statistic)
        np.testing.assert_array_equal(np.array(figure.data[0].z), focus[statistic].mean.numpy())
        assert figure.layout.coloraxis.cmin == 0 and figure.layout.coloraxis.colorbar.title.text
        assert "shapes" not in figure.to_plotly_json()["layout"]


def test_a_chosen_head_has_a_frame(focus: am.results.AttentionFocus) -> None:
    (frame,) = focus.plot("previous_top", layer=1, head=2).layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (1.5, 2.5, 0.5, 1.5)
    refuses("`head` must be from 0 to", focus.plot, "previous_top", layer=1, head=99)
    refuses(r"`figure` must be one of self_focus, first_focus, .*previous_top.*; got 'x'", focus.plot, "x")


def test_any_statistic_of_what_heads_write_is_a_map(updates: am.results.ResidualUpdates) -> None:
    for name in ("along", "target_magnitude", "magnitude_at_first"):
        np.testing.assert_array_equal(np.array(updates.plot(name).data[0].z), updates[name].mean.numpy())
    assert updates.plot("along").layout.coloraxis.cmin < 0  # it may be below 0
    assert updates.plot("target_magnitude").layout.coloraxis.cmin == 0


def test_the_title_says_model_figure_layer_and_head(
    focus: am.results.AttentionFocus, updates: am.results.ResidualUpdates
) -> None:
    model = focus.provenance.model
    assert focus._figure_title("first_focus") == f"Attention focus of {model} · first focus"
    named = focus._figure_title("previous_top", layer=1, head=2)
    assert named == f"Attention focus of {model} · previous top · layer 1, head 2"
    assert updates._figure_title("magnitude", head=2) == f"Residual updates of {model} · magnitude · layer 0, head 2"
    assert updates._figure_title("along") == f"Residual updates of {model} · along"
    split = am.decompose_scores(models.hooked("bloom"), models.token_ids("bloom"), layers=[1])
    assert split._figure_title("key_terms") == f"Score decomposition · {model} · key terms · layer 1, head 0"
    kernel = am.decompose_scores(models.hooked("llama"), models.token_ids("llama"), centre="mean").position_kernel()
    assert kernel._figure_title(layer=1, head=0) == "Position kernel · layer 1, head 0"


def test_a_view_knows_its_model() -> None:
    ran = models.hooked("bloom").run(models.token_ids("bloom"), points=["pattern"])
    name = models.hooked("bloom").name
    assert ran.show("pattern", layer=1, head=2, view="sentence")._full_title.endswith(f"layer 1, head 2 · {name}")


def test_what_has_no_figure_or_no_such_file(focus: am.results.AttentionFocus, tmp_path: Path) -> None:
    means = am.mean_qk(models.hooked("bloom"), iter([models.token_ids("bloom")]))
    refuses("MeanQK has no figure", means.save_figure, tmp_path / "a.pdf")
    with pytest.raises(OutputError, match=r"saved as \.pdf, \.png, \.svg; got a\.gif"):
        focus.save_figure(tmp_path / "a.gif", "no such figure")


@pytest.mark.browser
def test_a_saved_figure_carries_its_title(chromium: Any, focus: am.results.AttentionFocus, tmp_path: Path) -> None:
    path = focus.save_figure(tmp_path / "focus.svg", "previous_top", layer=1, head=2)
    said = " ".join(" ".join(ElementTree.parse(path).getroot().itertext()).split())
    assert focus._figure_title("previous_top", layer=1, head=2) in said
    assert not re.search("Attention focus", focus.save_figure(path, "entropy", title="").read_text())
