"""Commands about a text with pictures."""

from pathlib import Path
from typing import Any

import merged
import pandas as pd
import pytest

import attnmech as am
from attnmech.cli.agents.allowed import Folders, Models
from attnmech.cli.agents.tools import Tools

from .test_agents import ask


@pytest.mark.parametrize("text", ["the <image> keys are here", "keys are here"])
def test_a_command_reads_pictures_where_the_text_says_or_before_it(attnmech: Any, tmp_path: Path, text: str) -> None:
    plain, processor, _ = merged.with_processor("llava")
    for made in (plain, processor):
        made.save_pretrained(tmp_path / "model")
    merged.picture(1).save(tmp_path / "a.png")
    image = tmp_path / "a.png"
    options = ("--model", tmp_path / "model", "--image", image)
    ended = attnmech("focus", *options, "--text", text, "--out", tmp_path / "o.csv")
    assert ended.status == 0, ended.said
    chat = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
    given = {"text": text, "images": [image]} if "<image>" in text else chat
    focus = am.attention_focus(am.load(tmp_path / "model"), given)
    assert pd.read_csv(tmp_path / "o.csv")["entropy"].to_numpy() == pytest.approx(focus.entropy.flatten().numpy())
    assert "needs --text" in attnmech("focus", *options, "--out", tmp_path / "p.csv").said
    alone = attnmech("focus", "--image", image, "--text", text, "--out", tmp_path / "p.csv")
    assert alone.status != 0 and "demo has none" in alone.said
    asked, *wrong = ask(
        Tools(Models([str(tmp_path / "model")], None, None), Folders([tmp_path])),
        ("attention_focus", {"texts": [text], "images": ["a.png"]}),
        ("attention_focus", {"texts": [text] * 2, "images": ["a.png"]}),
        ("report", {"texts": [text], "images": ["../a.png"], "out": ["page.html"]}),
    )
    row = asked.structured_content["table"]["rows"][0]
    assert row["entropy"] == pytest.approx(float(focus.entropy[row["layer"], row["head"]]), abs=1e-6)
    assert all(one.is_error for one in wrong)
