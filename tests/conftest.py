"""Set-up of every test: no network, one thread; in core tests, annotated tensors are checked at every call."""

import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import checking
import pytest
import schemas
import torch
from browser import chromium  # noqa: F401 - a fixture, one for all tests of a process
from hypothesis import settings
from jaxtyping import config

checking.check("attnmech")
EVERY_CALL = "SLOW" in os.environ
"""Whether annotations are checked in all tests, or only in those marked `core`."""
torch.set_num_threads(1)

# No deadlines, since the machine may be busy; derandomised, so that a failing check fails again.
settings.register_profile("attnmech", deadline=None, derandomize=True)
settings.load_profile("attnmech")


CERTIFICATES = "ATTNMECH_CERTIFICATES"
PROVING = {"model", "families", "device"}
"""The folders whose tests prove every model; the others take the certificates of earlier tests."""


def pytest_configure(config: pytest.Config) -> None:
    """Makes a folder for the certificates of this run, which workers and programs share."""
    if not hasattr(config, "workerinput"):
        folder = TemporaryDirectory(ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ[CERTIFICATES] = folder.name


@pytest.fixture(autouse=True)
def proofs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves every model in the tests of `PROVING`."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in PROVING:
        monkeypatch.setenv(CERTIFICATES, "")


def pytest_xdist_auto_num_workers() -> int:
    """One worker for every core that this process may use, at most eight, since a worker takes a gigabyte."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


LONGEST = {"test_matrix_on_device.py", "test_notebooks.py", "test_jupyter.py", "test_matrix.py"}
"""Files of tests that take the longest; they come first, so that no worker is left alone with them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest tests first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Unseeded weights are the same in every run, whatever ran before; says whether annotations are checked."""
    torch.manual_seed(0)
    config.update("jaxtyping_disable", not EVERY_CALL and item.get_closest_marker("core") is None)


@pytest.fixture
def unchecked() -> None:
    """Switches off the checks of annotations, so that arguments of a wrong type raise what a user would see."""
    config.update("jaxtyping_disable", True)


@pytest.fixture
def many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few documents, so that a small corpus has many."""
    from attnmech.runs import corpus, stream

    monkeypatch.setattr(stream, "batches", partial(corpus.batches, tokens_per_batch=40, window=4))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks of rows small, so that a short text has several."""
    monkeypatch.setattr("attnmech.model.parts.mask._LEAST_ROWS", 16)


@pytest.fixture(autouse=True)
def files_fit_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validates the header of every result that a test saves."""
    result = sys.modules.get("attnmech.results.result")
    if result is not None:
        monkeypatch.setattr(result, "write_tensors", schemas.checked(result.write_tensors))


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports in tests measure ablations on fewer texts than a user's; other tests check the numbers."""
    limits = sys.modules.get("attnmech.pages.limits")
    if limits is not None:
        monkeypatch.setattr(limits, "OTHER_TEXTS", 2)
