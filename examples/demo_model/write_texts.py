"""Write the texts that attnmech comes with: `python examples/demo_model/write_texts.py`."""

import json
from dataclasses import astuple
from pathlib import Path
from random import Random
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from language.cases import TASKS, cases
from language.grammar import Document, document

from attnmech.demo import text
from attnmech.demo.tasks import DemoCase

FILE = Path(__file__).parents[2] / "attnmech" / "demo" / "texts.zip"


def documents(count: int, seed: int) -> list[Document]:
    """The first documents of a seed."""
    rng = Random(seed)
    return [document(rng, sentences=4) for _ in range(count)]


def relations_line(document: Document) -> str:
    """A document's relations as one line: [[query, key, relation], ...]."""
    return json.dumps([astuple(relation) for relation in document.relations], separators=(",", ":"))


def case_line(case: DemoCase) -> str:
    """A case as one line: [text, right, wrong, template]."""
    return json.dumps(astuple(case), ensure_ascii=False)


def main() -> None:
    """Writes the file; the same grammar gives the same bytes."""
    files = {}
    for seed, count in enumerate(text.STORED):
        made = documents(count, seed)
        files[f"texts/{seed}"] = [document.text for document in made]
        files[f"relations/{seed}"] = list(map(relations_line, made))
        files |= {f"cases/{task}/{seed}": list(map(case_line, cases(task, seed))) for task in TASKS}
    with ZipFile(FILE, "w") as out:
        for name, lines in files.items():
            out.writestr(ZipInfo(name), "\n".join(lines), ZIP_DEFLATED, compresslevel=9)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
