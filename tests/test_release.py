"""What a release says about itself agrees in all its files."""

import ast
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = SETTINGS["project"]


def read(path: str) -> Any:
    text = (ROOT / path).read_text("utf-8")
    return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)


CITATION = read("CITATION.cff")


def test_the_version_and_the_date_agree() -> None:
    version, date = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[0]
    assert version == PROJECT["version"] == CITATION["version"] == read(".zenodo.json")["version"]
    assert date == str(CITATION["date-released"])


def test_the_citation_and_the_archive_agree_with_the_package() -> None:
    archive = read(".zenodo.json")
    assert CITATION["title"] == archive["title"] and CITATION["title"].startswith(f"{PROJECT['name']}: ")
    assert PROJECT["license"] == CITATION["license"] == archive["license"]
    assert PROJECT["authors"] == CITATION["authors"] == archive["creators"]
    assert PROJECT["keywords"] == CITATION["keywords"] == archive["keywords"]
    assert PROJECT["urls"]["Homepage"] == CITATION["repository-code"]
    assert [linked["identifier"] for linked in archive["related_identifiers"]] == [CITATION["repository-code"]]


def test_the_readmes_links_lead_somewhere_in_a_checkout_and_on_pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    link, repository = re.compile(r"\]\(([^)]+)\)"), PROJECT["urls"]["Homepage"]
    here = [target for target in link.findall((ROOT / "README.md").read_text("utf-8")) if "https:" not in target]
    assert len(here) > 20 and [target for target in here if not (ROOT / target).exists()] == []
    package: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", package.update)
    runpy.run_path(str(ROOT / "setup.py"))
    there = link.findall(package["long_description"])
    assert {f"{repository}/blob/main/{target}" for target in here if not target.endswith(".png")} <= set(there)
    assert f"{repository}/raw/main/examples/report.png" in there and all("https:" in target for target in there)


RUNS_CODE = {"eval", "exec", "torch.load", "joblib.load", "yaml.load", "pandas.read_pickle", "cloudpickle.loads"}
"""Functions that run code of what they read. A worker of Ray reads what `am.Ray` has sent it."""


def test_the_package_runs_no_code_from_files() -> None:
    """As SECURITY.md says."""
    package = ROOT / "attnmech"
    trees = {path.relative_to(package).as_posix(): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    called = [(name, node) for name, node in nodes if isinstance(node, ast.Call)]
    written = [(name, ast.unparse(call.func)) for name, call in called]
    assert [(name, function) for name, function in written if function in RUNS_CODE] == [
        ("distributed/shipping.py", "cloudpickle.loads")
    ]
    trust = ("trust_remote_code", "allow_pickle", "weights_only")
    options = [word for _, call in called for word in call.keywords if word.arg in trust]
    assert {(word.arg, ast.unparse(word.value)) for word in options} == {("trust_remote_code", "False")}
    imports = [(name, node) for name, node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {(name, alias.name) for name, node in imports for alias in node.names}
    imported |= {(name, node.module or "") for name, node in imports if isinstance(node, ast.ImportFrom)}
    refused = {"pickle", "marshal", "shelve", "dill", "joblib", "requests", "httpx", "urllib.request"}
    assert {one for one in imported if one[1] in refused} == {("engines/http.py", "urllib.request")}


def test_the_recipe_for_conda_is_that_of_the_package() -> None:
    recipe = read("conda/recipe.yaml")
    context, build, about = recipe["context"], recipe["build"], recipe["about"]
    names = {"torch": "pytorch", "xxhash": "python-xxhash"}  # conda-forge's, by grayskull's mapping
    parts = [re.fullmatch(r"([\w-]+)(.*)", wanted) for wanted in PROJECT["dependencies"]]
    wanted = [f"{names.get(part[1], part[1])} {part[2]}" for part in parts if part]
    python, *packages = recipe["requirements"]["run"]
    assert packages == wanted and len(wanted) == len(PROJECT["dependencies"])
    assert python == "python >=${{ python_min }}" and f">={context['python_min']}" == PROJECT["requires-python"]
    assert context["version"] == PROJECT["version"]
    [(command, function)] = PROJECT["scripts"].items()
    assert build["python"]["entry_points"] == [f"{command} = {function}"]
    assert about["license_file"] == PROJECT["license-files"] and about["license"] == PROJECT["license"]
    assert about["summary"] == PROJECT["description"]
    backend = SETTINGS["build-system"]["requires"]
    assert [package.replace(" ", "") for package in recipe["requirements"]["host"][2:]] == backend
