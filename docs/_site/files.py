"""Files written when the site is built; an unchanged file keeps its time, and is not rebuilt."""

from pathlib import Path


def write_if_new(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
