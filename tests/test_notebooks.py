"""The notebooks run from top to bottom, are stored with their outputs, and an exported one opens without a network."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser import opening
from nbconvert import HTMLExporter
from notebooks import NOTEBOOKS, digest, executed, stored

NAMES = [path.stem for path in NOTEBOOKS]
OFTEN = ("quickstart", "attention_focus", "own_module")
"""The notebooks that run in every run of the tests."""

WITH_AN_AMD_LOADER = "<head><script>window.define = Object.assign(() => {}, { amd: {} });</script>"
"""Imitates RequireJS on nbconvert's pages: scripts that detect this loader define no global names."""


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_all_of_them_are_tested() -> None:
    assert NAMES == [
        "ablation", "attention_encodings", "attention_focus", "attentionviz", "attentionviz_images", "head_types",
        "own_module", "quickstart", "shapes", "translation",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_stored_with_the_outputs_of_its_cells(name: str) -> None:
    """Hosts do not run scripts: views and figures are stored as pictures."""
    notebook = stored(name)
    nbformat.validate(notebook)
    made = f"python examples/notebook_outputs.py {name}"
    assert notebook.metadata.attnmech == {"code": digest(notebook)}, f"its code changed; run {made}"
    assert "<script" not in str(found := outputs(notebook)) and len(nbformat.writes(notebook)) < 400_000
    assert sum("image/png" in output.get("data", {}) for output in found) >= 5
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(not cell.metadata for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "Something to change" in notebook.cells[-2].source
    assert notebook.cells[-1].cell_type == "code"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_in_colab_and_installs_attnmech_there(name: str) -> None:
    title, install, *others = stored(name).cells
    repository = "github.com/attnmech/attnmech"
    colab = f"https://colab.research.google.com/{repository.replace('.com', '')}/blob/main/examples/{name}.ipynb"
    assert title.source.endswith(f"\n\n[Open in Colab]({colab})")
    assert install.id == "install" and "install" not in [cell.id for cell in others]
    assert install.source == (
        'from importlib.util import find_spec\n\nif find_spec("attnmech") is None:\n'
        f"    %pip install -q attnmech || pip install -q git+https://{repository}"
    )


@pytest.mark.parametrize("name", NAMES)
def test_its_figures_are_numbered_in_order(name: str) -> None:
    captions = re.findall(
        r"^\*\*Figures? ([\d to and]+)\.\*\*", "\n".join(each.source for each in stored(name).cells), re.M
    )
    ends = [[int(number) for number in re.findall(r"\d+", each)] for each in captions]
    assert [first for first, *_ in ends] == [1, *(last + 1 for *_, last in ends[:-1])]


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_notebook_runs_without_complaint(name: str) -> None:
    found = outputs(executed(name))
    assert [output.text for output in found if output.get("name") == "stderr"] == []
    assert {output.output_type for output in found} <= {"stream", "display_data", "execute_result"}
    shown = [output for output in found if "text/html" in output.get("data", {})]
    assert len(shown) >= 5


@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "libraries", "least", "head"),
    [
        ("quickstart", ["circuitsvis", "plotly"], 7, "<head>"),
        ("quickstart", ["circuitsvis", "plotly"], 7, WITH_AN_AMD_LOADER),
        ("attention_focus", ["circuitsvis", "plotly"], 13, "<head>"),
        pytest.param("ablation", ["plotly"], 4, "<head>", marks=pytest.mark.slow),
        pytest.param("attention_encodings", ["plotly"], 9, "<head>", marks=pytest.mark.slow),
        pytest.param("attentionviz_images", ["joint_embedding", "plotly"], 5, "<head>", marks=pytest.mark.slow),
    ],
)
def test_an_exported_notebook_opens_without_a_network(
    chromium: Any, tmp_path: Path, name: str, libraries: list[str], least: int, head: str
) -> None:
    notebook = executed(name)
    html, _ = HTMLExporter(template_name="lab", mathjax_url="", require_js_url="").from_notebook_node(notebook)
    written = "".join(output.data["text/html"] for output in outputs(notebook) if "text/html" in output.get("data", {}))
    count = written.count('class="attnmech" id="')
    assert count >= least
    with opening(chromium, html.replace("<head>", head, 1), tmp_path / "notebook.html") as page:
        stages = page.locator("div.attnmech[id]")
        assert stages.count() == count
        page.wait_for_function("[...document.querySelectorAll('div.attnmech[id]')].every(each => 'control' in each)")
        for stage in stages.all():
            assert "could not be drawn" not in stage.inner_text()
            assert stage.locator("svg, canvas, div > div").count() > 0
            assert stage.bounding_box()["height"] > 30
        carried = page.locator("script[data-attnmech]").evaluate_all("all => all.map(each => each.dataset.attnmech)")
        assert sorted(each.split("-")[0] for each in carried) == ["attnmech", *libraries]
        assert len(html) < 5_000_000
