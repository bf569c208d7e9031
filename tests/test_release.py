"""What a release says about itself agrees in all its files."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


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
