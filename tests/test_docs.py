"""Every snippet of the documentation and of the README runs; recipes are short."""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import merged
import pytest
from browser import CHROMIUM
from comparing import module_of

importlib.import_module("attnmech.pages.limits")  # before the fixture `few_texts`, which shortens reports
DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)


def sections(path: Path) -> list[tuple[str, str]]:
    """The headings of a page with the code under each."""
    parts = re.split(r"^## (.+)$", path.read_text("utf-8"), flags=re.M)
    return [(heading, "\n".join(BLOCK.findall(body))) for heading, body in zip(parts[1::2], parts[2::2], strict=True)]


RECIPES = [
    pytest.param(code, id=f"{path.stem}: {heading}")
    for path in sorted((DOCS / "recipes").glob("*.md"))
    for heading, code in sections(path)
]
PAGES = [
    pytest.param(code, id=path.stem, marks=[pytest.mark.ray] if "am.Ray(" in code else [])
    for folder in ("coming_from", "how")
    for path in sorted((DOCS / folder).glob("*.md"))
    if (code := "\n".join(BLOCK.findall(path.read_text("utf-8"))))
]


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """The names defined by the lines with which every recipe begins."""
    names: dict[str, Any] = {}
    (code,) = BLOCK.findall((DOCS / "recipes" / "index.md").read_text("utf-8"))
    exec(code, names)
    return names


@pytest.mark.parametrize("code", [*RECIPES, *PAGES])
def test_a_recipe_or_page_runs(
    code: str,
    setup: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if ".save_figure(" in code and not CHROMIUM.exists():
        pytest.skip("figures are saved by Chromium")
    if '"mine.gguf"' in code:
        if find_spec("gguf") is None:
            pytest.skip("gguf is not installed")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        _tiny_gguf(tmp_path / "mine.gguf")
    (tmp_path / "corpus.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in setup["texts"]))
    exec(compile(code, "recipe", "exec"), _with_pictures(setup, code))
    _prints(code, capsys.readouterr().out)


def test_the_pictures_of_recipes_are_drawn_by_their_lines() -> None:
    """`examples/recipe_pictures.py` draws the call in a picture's title."""
    recipes = [part for path in (DOCS / "recipes").glob("*.md") for part in path.read_text("utf-8").split("\n## ")]
    pictures = [(call, part) for part in recipes for call in re.findall(r"^!\[.+\]\(\S+ '(.+)'\)$", part, flags=re.M)]
    assert len(pictures) == 10 and all(call in "\n".join(BLOCK.findall(part)) for call, part in pictures)


def test_the_readmes_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = BLOCK.findall((DOCS.parent / "README.md").read_text("utf-8"))
    assert len(code.splitlines()) <= 30
    exec(compile(code, "README", "exec"), {})
    assert (tmp_path / "report.html").exists()


def test_the_code_for_language_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (code,) = BLOCK.findall((DOCS / "_site" / "llms_start.md").read_text("utf-8"))
    exec(compile(code, "llms.txt", "exec"), names)
    assert names["model"].certificate.ok and names["claim"].verdict == "confirmed"
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("code", RECIPES)
def test_a_recipe_is_short(code: str) -> None:
    assert 2 <= len([line for line in code.splitlines() if line.strip()]) <= 13


@pytest.fixture(scope="module")
def papers() -> ModuleType:
    """The links of the site: `docs/_site/papers.py`."""
    return module_of(DOCS / "_site" / "papers.py", "papers")


def package_files() -> list[Path]:
    return sorted((DOCS.parent / "attnmech").rglob("*.py"))


def test_every_paper_that_the_package_cites_is_listed(papers: ModuleType) -> None:
    unlisted = {cited for path in package_files() for cited in papers.cited(path.read_text("utf-8"))}
    assert unlisted - set(papers.papers()) == set()


def test_every_section_of_the_formulas_that_the_package_names_exists(papers: ModuleType) -> None:
    texts = "".join(path.read_text("utf-8") for path in package_files())
    named = set(re.findall(r"docs/formulas\.md#([\w-]+)", texts))
    assert len(named) > 10
    assert named <= set(papers.sections())


def _with_pictures(setup: dict[str, Any], code: str) -> dict[str, Any]:
    """The names of the setup, with a model that reads pictures if the code loads one."""
    names = dict(setup)
    if "hf_model, processor=processor" in code:
        names["hf_model"], names["processor"], _ = merged.with_processor("llava")
        names["picture"] = merged.picture(1)
    return names


def _prints(code: str, out: str) -> None:
    """Asserts that the lines `# → …` are printed in this order; runs of spaces count as one."""
    printed = iter([" ".join(line.split()) for line in out.splitlines()])
    for stated in re.findall(r"^# → (.+)$", code, flags=re.M):
        assert stated in printed, f"not printed: {stated!r}\n{out}"


def _tiny_gguf(path: Path) -> None:
    from model.files.test_gguf import llama, tensors, write

    write(path, tensors(llama()))


CELLS = [
    pytest.param(code, id=f"{path.stem}: {code}")
    for path in sorted((DOCS / "coming_from").glob("*.md"))
    for line in path.read_text("utf-8").splitlines()
    if line.startswith("| ") and line.count("|") == 3
    for code in re.findall(r"`([^`]+)`", line.split("|")[2])
    if re.match(r"(acts|am|cache|model|pair|view|with|x)\b.*[(.\[]", code)
    and "gpt2" not in code
    and "module" not in code
]


@pytest.mark.parametrize("code", CELLS)
def test_what_a_table_says_to_write_runs(
    code: str, setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "cross" in code or "target" in code:
        pytest.skip("the demo model has one stack")
    model, text = setup["model"], setup["text"]
    points = ["pattern", "scores", "logits", "resid_post", "z"]
    acts = model.run(text, points=points, gradients_of=lambda logits: logits[:, -1].logsumexp(-1))
    names = {
        "acts": acts, "view": acts.show("pattern"), "pattern": acts["pattern", 2].numpy(), "tokens": acts.tokens[0],
        "ids": [100, 101], "id": 100, "head": 1, "f": lambda value: value * 1,
        "clean": text, "corrupted": "When Anna and Tom came to the harbour, Anna gave a shell to",
        "bridge": model.bridge,
        "saved": acts["pattern", 3], "attentions": tuple(acts["pattern", layer] for layer in range(model.n_layers)),
        "cache": acts.to_cache(), "circuit": setup["am"].Circuit(nodes=["L2H3", "L3 MLP"]),
    }  # fmt: skip
    if "[picture]" in code:
        plain, processor, _ = merged.with_processor("llava")
        names |= {"model": setup["am"].load(plain, processor=processor), "picture": merged.picture(1)}
    code = code.replace("answers=..., against=...", '"answers", "against"').replace(", ...)", ', "answers", "against")')
    code = code.replace('"answers", "against"', 'answers=" Anna", against=" Tom"')
    code = re.sub(r"\(\.\.\., (at|nodes)=", r'(model, clean, corrupted, answers=" Anna", against=" Tom", \1=', code)
    code = code.replace("model.intervene(...)", "model.intervene(am.Intervention.zero([(0, 1)]))")
    code = code.replace("gradients_of=f", "gradients_of=lambda logits: logits[:, -1].logsumexp(-1)")
    exec(code.removesuffix(": ...") + (": pass" if code.endswith(": ...") else ""), {**setup, **names})
