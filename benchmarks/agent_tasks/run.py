"""Answers the tasks over the Model Context Protocol by a fixed plan, and compares the answers with the truth.

    pip install 'attnmech[mcp]'
    python benchmarks/agent_tasks/run.py               # about half a minute
    python benchmarks/agent_tasks/run.py --make DIR    # only writes the model and the corpora, to try an agent

The plans use only the tools' answers, so they show that the tools suffice; they say nothing about how well a
language model uses them.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import planted
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

TASKS: Final = json.loads((Path(__file__).parent / "tasks.json").read_text(encoding="utf-8"))
Ask = Callable[..., Awaitable[dict[str, Any]]]


def rows_of(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a table by the names of their heads."""
    return {f"L{row['layer']}H{row['head']}": row for row in answer["table"]["rows"]}


async def size(ask: Ask) -> Any:
    """Reads the sizes in the line about the model."""
    answer = await ask("load_model")
    layers, heads = map(int, re.findall(r"(\d+) layers × (\d+) heads", answer["model"])[0])
    return {"layers": layers, "heads": heads, "certified": answer["certificate"]["ok"]}


async def of_type(ask: Ask, kind: str) -> list[str]:
    """The heads for which a type is claimed."""
    answer = await ask("head_types")
    return sorted(f"L{row['layer']}H{row['head']}" for row in answer["table"]["rows"] if row["type"] == kind)


async def looks(ask: Ask) -> Any:
    """Asks for induction heads."""
    return await of_type(ask, "induction")


async def previous(ask: Ask) -> Any:
    """Asks for previous-token heads."""
    return await of_type(ask, "previous")


async def needed(ask: Ask) -> Any:
    """Ablates the heads that look like induction heads."""
    heads = [{"layer": 1, "head": int(name[3:])} for name in await looks(ask)]
    answer = await ask("ablate_heads", file="repeats.txt", documents=20, heads=heads)
    return sorted(name for name, row in rows_of(answer).items() if row["clear"] and row["effect"] > 0)


async def verdict_on(ask: Ask, *heads: tuple[int, int]) -> bool:
    """Tests heads on lines of the corpus that `needed` did not read."""
    lines = [line.split() for line in planted.repeats(40)[20:]]
    cases = [
        {"prompt": " ".join(words[:14]), "answer": words[14], "against": words[1], "group": f"line {number}"}
        for number, words in enumerate(lines)
    ]
    named = [{"layer": layer, "head": head} for layer, head in heads]
    answer = await ask("confirm_heads", heads=named, cases=cases)
    return "Verdict: confirmed." in answer["findings"]


async def confirmed(ask: Ask) -> Any:
    """Tests the pair."""
    return await verdict_on(ask, (0, 1), (1, 2))


async def rejected(ask: Ask) -> Any:
    """Tests the head that writes nothing."""
    return await verdict_on(ask, (1, 0))


async def why(ask: Ask) -> Any:
    """Takes the first row, and its largest term."""
    answer = await ask("explain_score", text="apple pear plum apple", layer=1, head=2)
    row = answer["table"]["rows"][0]
    terms = {name: value for name, value in row.items() if name not in ("key", "token", "attention", "score")}
    return {"key": row["key"], "term": max(terms, key=lambda name: abs(terms[name]))}


async def patched(ask: Ask) -> Any:
    """Takes the head with the largest effect."""
    answer = await ask(
        "patch_heads", clean=["apple pear plum apple"], corrupted=["apple fig plum apple"], answers=["pear"],
        against=["fig"],
    )  # fmt: skip
    name, row = max(rows_of(answer).items(), key=lambda item: abs(item[1]["effect"]))
    share = row["recovered"]  # null without a gap between the clean and the corrupted run
    return {"head": name, "share": None if share is None else round(share, 1)}


async def rests(ask: Ask) -> Any:
    """Takes the head with most attention on the first token."""
    answer = await ask("null_attention", file="repeats.txt", documents=20)
    ((name, row),) = ((name, row) for name, row in rows_of(answer).items() if row["sink_mass"] > 0.5)
    return {"head": name, "verdict": row["verdict"]}


async def word(ask: Ask) -> Any:
    """Counts rows by head."""
    answer = await ask("search_examples", token="kiwi", file="words.txt", rows=200)
    heads = [f"L{row['layer']}H{row['head']}" for row in answer["table"]["rows"]]
    return [max(set(heads), key=heads.count)]


PLANS: Final = {
    plan.__name__: plan
    for plan in (size, looks, previous, needed, confirmed, rejected, why, patched, rests, word)
}  # fmt: skip


async def answered(folder: Path) -> list[dict[str, Any]]:
    """The answers to all tasks, with the number of calls and their time."""
    arguments = ["-m", "attnmech", "mcp", "--model", str(folder / "planted"), "--folder", str(folder)]
    rows = []
    server = StdioServerParameters(command=sys.executable, args=arguments, cwd=folder, env=dict(os.environ))
    async with Client(server) as client:
        for task in TASKS:
            calls = 0

            async def ask(tool: str, **options: Any) -> dict[str, Any]:
                nonlocal calls
                calls += 1
                result = await client.call_tool(tool, options)
                if result.is_error:
                    raise RuntimeError(result.content[0].text)
                return dict(result.structured_content)

            began = time.monotonic()
            try:
                given = await PLANS[task["name"]](ask)
            except (RuntimeError, LookupError, ValueError) as refusal:
                given = str(refusal)
            rows.append({**task, "given": given, "calls": calls, "seconds": time.monotonic() - began})
    return rows


def main() -> None:
    """Prints a row for every task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", type=Path, metavar="DIR", help="only write the model and the corpora")
    asked = parser.parse_args()
    if asked.make:
        asked.make.mkdir(parents=True, exist_ok=True)
        planted.make(asked.make)
        return
    with tempfile.TemporaryDirectory() as name:
        planted.make(Path(name))
        rows = anyio.run(answered, Path(name))
    print("| task | truth | answer | right | calls | seconds |\n|---|---|---|---|---:|---:|")
    for row in rows:
        right = "yes" if row["given"] == row["answer"] else "NO"
        truth, given = (json.dumps(row[key], ensure_ascii=False) for key in ("answer", "given"))
        print(f"| {row['name']} | {truth} | {given} | {right} | {row['calls']} | {row['seconds']:.1f} |")
    wrong = [row["name"] for row in rows if row["given"] != row["answer"]]
    print(f"\n{len(rows) - len(wrong)} of {len(rows)} right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
