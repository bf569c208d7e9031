"""Ray's workers: the same numbers as one process, whichever process dies; no document counts twice or is lost.

All tests share one Ray of three CPUs: two workers, and one CPU for reading.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from comparing import refuses
from counting import TEXTS, Lengths, Poisoned, Slow, State

import attnmech as am
from attnmech.distributed import cluster
from attnmech.errors import EngineError, ReducerError
from attnmech.runs import corpus as corpus_module
from attnmech.runs import stream as stream_module
from attnmech.runs.journal import Journal
from attnmech.runs.workers import LeftOutWarning

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install 'attnmech[ray]'"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = cluster.imported()
    found.init(
        address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )  # fmt: skip
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def engines(ray: Any) -> Iterator[Callable[[], am.Ray]]:
    """Two workers, started anew after a test that ended them."""
    held = [am.Ray(workers=2)]
    yield lambda: held[0]
    held[0].close()


@pytest.fixture
def two(engines: Callable[[], am.Ray]) -> am.Ray:
    return engines()


@pytest.fixture(scope="module")
def demo() -> am.HookedModel:
    return am.load()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few documents, so that a small corpus has many."""
    small = partial(corpus_module.batches, tokens_per_batch=300, window=16)
    monkeypatch.setattr(stream_module, "batches", small)


def require_same(one: Any, other: Any) -> None:
    """Equal counts, and sums to 1e-6 relative, in two states."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if value.is_floating_point():
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-9, equal_nan=True)
        else:
            assert torch.equal(other[name], value), name


PASSES: dict[str, Callable[..., Any]] = {
    "focus": am.attention_focus,
    "updates": am.residual_updates,
    "head types": am.head_types,
    "segments": am.segment_attention,
}


@pytest.mark.parametrize("name", PASSES)
def test_passes_over_a_corpus(demo: am.HookedModel, two: am.Ray, name: str) -> None:
    texts = TEXTS if name == "focus" else TEXTS[:40]
    here = PASSES[name](demo, iter(texts))
    there = PASSES[name](demo, iter(texts), engine=two)
    require_same(here.state, there.state)
    assert there.provenance == here.provenance and there.documents == here.documents == len(texts)
    frames = here.to_frame(), there.to_frame()
    intervals = [column for column in frames[0].columns if column.endswith(("_low", "_high"))]
    assert intervals
    for column in intervals:
        torch.testing.assert_close(
            torch.tensor(frames[1][column].to_numpy()), torch.tensor(frames[0][column].to_numpy()),
            rtol=1e-6, atol=1e-9, equal_nan=True,
        )  # fmt: skip


def test_one_worker_and_two_agree_bit_by_bit(demo: am.HookedModel, two: am.Ray) -> None:
    (first,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], engine=two)
    with am.Ray(workers=1) as one:
        (second,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], engine=one)
        one_process = one.processes()
    assert len(one_process) == 1
    for name in first:
        assert torch.equal(first[name], second[name])


def test_own_reducers_hooks_and_interventions(demo: am.HookedModel, two: am.Ray) -> None:
    factor = 0.5
    with demo.hooks({("z", 1): lambda z: z * factor}), demo.intervene(am.Intervention.zero([(0, 3)])):
        (here,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], layers=[1, 3])
        (there,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], layers=[1, 3], engine=two)
    (plain,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], layers=[1, 3], engine=two)
    require_same(here, there)
    assert bool((there["times"] == 1).all())
    assert not torch.allclose(plain["largest"], there["largest"])


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", torch.float32), ("llama", torch.float64), ("t5", torch.float32)])
def test_models_without_files_are_sent(two: am.Ray, name: str, dtype: torch.dtype) -> None:
    model = am.load(models.plain(name).to(dtype) if dtype != torch.float32 else models.plain(name))
    stack = "decoder" if "decoder" in model.stacks else None
    generator = torch.Generator().manual_seed(1)
    corpus = [torch.randint(3, model.n_vocab, (n,), generator=generator) for n in (5, 9, 2, 14, 7, 11, 3)]
    require_same(
        am.attention_focus(model, iter(corpus), stack=stack).state,
        am.attention_focus(model, iter(corpus), stack=stack, engine=two).state,
    )


def test_sweeps(demo: am.HookedModel, two: am.Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TEXTS[:7]
    monkeypatch.setattr("attnmech.distributed.sweeping.TASKS", 3)
    here, there = (am.ablate_heads(demo, texts, shifts=True, **where) for where in ({}, {"engine": two}))
    assert torch.equal(here.after, there.after) and torch.equal(here.before, there.before)
    assert here.shift is not None and there.shift is not None
    torch.testing.assert_close(here.shift, there.shift, rtol=1e-6, atol=1e-12, equal_nan=True)
    assert here.provenance == there.provenance

    changes = {
        "even": am.Intervention.attend([(1, head) for head in range(8)], "uniform"),
        "cut": am.Intervention.remove_keys("all", "first"),
        "two": [am.Intervention.zero([(0, 1)]), am.Intervention.zero([(2, 3)])],
    }
    answers = {"metric": lambda logits, batch: logits[range(len(logits)), batch.lengths - 1, 5].double()}
    ours, theirs = (am.sweep(demo, texts, changes, **answers, **where) for where in ({}, {"engine": two}))
    assert torch.equal(ours.after, theirs.after)
    assert torch.equal(ours.rows_without_keys, theirs.rows_without_keys)


def test_files_read_by_ray_data(demo: am.HookedModel, two: am.Ray, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[:50]) + "\n\n")
    (tmp_path / "b" / "c.txt").write_text("﻿" + "\n\n".join(TEXTS[50:]))
    corpus = am.CorpusFiles(f"file://{tmp_path}")
    here, there = am.attention_focus(demo, iter(TEXTS)), am.attention_focus(demo, corpus, engine=two)
    require_same(here.state, there.state)
    assert there.provenance == here.provenance
    counted = two.reading(corpus)
    assert list(counted) == TEXTS
    (tmp_path / "b" / "c.txt").write_text("shorter")
    refuses("120 documents were counted, and 51 read: a file has changed", list, counted)
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"words": 1}\n')
    refuses(r'a\.jsonl, line 2 has no "text"', am.attention_focus, demo, corpus, engine=two)


class Broken(Lengths):
    def close(self, state: State, run: am.reducers.Run) -> State:
        if 21 in run.documents.tolist():
            state["largest"][0, 0] = torch.nan
        return state


class Unsendable(Lengths):
    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.lock = threading.Lock()


def test_errors_of_workers_are_those_of_a_local_run(demo: am.HookedModel, two: am.Ray) -> None:
    with pytest.raises(ReducerError) as here:
        am.stream(demo, iter(TEXTS[:30]), [Broken(30)])
    with pytest.raises(ReducerError) as there:
        am.stream(demo, iter(TEXTS[:30]), [Broken(30)], engine=two)
    assert str(there.value) == str(here.value)
    with pytest.raises(EngineError, match=r"^a reducer or a hook cannot be sent to worker processes \(.*lock"):
        am.stream(demo, iter(TEXTS[:30]), [Unsendable(30)], engine=two)


def test_killed_workers_change_nothing(demo: am.HookedModel, two: am.Ray) -> None:
    corpus, chance = TEXTS * 3, random.Random(17)
    (here,) = am.stream(demo, iter(corpus), [Lengths(len(corpus))])
    processes = two.processes()
    # Past the first tasks, so that both workers have two each.
    moments = dict(zip(sorted(chance.sample(range(100, 300), 2)), processes, strict=True))

    def read() -> Iterator[str]:
        for number, text in enumerate(corpus):
            if number in moments:
                os.kill(moments[number], signal.SIGKILL)
            yield text

    (there,) = am.stream(demo, read(), [Slow(len(corpus))], engine=two)
    assert not set(two.processes()) & set(processes)
    require_same(here, there)
    assert bool((there["times"] == 1).all())


def test_a_poisoned_document_is_left_out_by_number(demo: am.HookedModel, two: am.Ray) -> None:
    (here,) = am.stream(demo, iter(TEXTS[:60]), [Lengths(60)])
    for value in here.values():
        value[..., 37] = 0
    with pytest.warns(LeftOutWarning, match="document 37 is left out: every worker that received it ended"):
        (there,) = am.stream(demo, iter(TEXTS[:60]), [Poisoned(60, 37)], engine=two)
    require_same(here, there)


DRIVER = """
import sys
from functools import partial
import attnmech as am
from attnmech.runs import corpus, stream
sys.path.insert(0, sys.argv[3])
from counting import Slow, TEXTS
stream.batches = partial(corpus.batches, tokens_per_batch=300, window=16)
with am.Ray(sys.argv[1], workers=1) as engine:
    print(engine.processes()[0], flush=True)
    am.stream(am.load(), iter(TEXTS), [Slow(len(TEXTS))], engine=engine, journal=sys.argv[2])
"""


def test_a_killed_driver_resumes_here_or_on_ray(
    demo: am.HookedModel, ray: Any, two: am.Ray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    arguments = [ray.get_runtime_context().gcs_address, str(journal), str(ROOT / "tests")]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        worker = int(driver.stdout.readline())
        wait_until(journal.exists)
        time.sleep(0.5)
    finally:
        driver.kill()
        driver.communicate()
    wait_until(lambda: not Path(f"/proc/{worker}").exists())
    kept = journal.read_bytes()
    done = Journal.resume
    entries: list[Any] = []

    def noting(self: Journal) -> Any:
        entries.append(done(self))
        return entries[-1]

    monkeypatch.setattr(Journal, "resume", noting)
    (whole,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))])
    for where in ({}, {"engine": two}):
        journal.write_bytes(kept)
        (found,) = am.stream(demo, iter(TEXTS), [Slow(len(TEXTS))], journal=journal, **where)
        require_same(whole, found)
        assert 0 < entries[-1].counters["documents"] < len(TEXTS)
        assert not journal.exists()


def wait_until(true: Callable[[], bool], within: float = 120.0) -> None:
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_interrupted_run_ends_its_workers_and_resumes(demo: am.HookedModel, two: am.Ray, tmp_path: Path) -> None:
    processes, journal = two.processes(), tmp_path / "journal"

    def interrupted() -> Iterator[str]:
        yield from TEXTS[:80]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        am.stream(demo, interrupted(), [Lengths(len(TEXTS))], engine=two, journal=journal)
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in processes))
    (found,) = am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))], journal=journal)
    require_same(am.stream(demo, iter(TEXTS), [Lengths(len(TEXTS))])[0], found)


def test_clusters_that_are_not_there(monkeypatch: pytest.MonkeyPatch, demo: am.HookedModel) -> None:
    refuses(r'`engine` must be "local" or an am\.Ray', am.attention_focus, demo, iter(TEXTS), engine="ray")
    refuses('`address` must be "auto", "host:port"', am.Ray, "nowhere")
    refuses("`workers` must be", am.Ray, workers=0)
    monkeypatch.setattr(cluster.imported(), "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: "/nowhere")
    with pytest.raises(EngineError, match=r"no Ray cluster is running here\. Start one with `ray start --head`"):
        am.attention_focus(demo, iter(TEXTS), engine=am.Ray("auto"))
    with pytest.raises(EngineError, match=r"no Ray cluster answers at 127.0.0.1:9 \(Connection refused\)"):
        am.attention_focus(demo, iter(TEXTS), engine=am.Ray("127.0.0.1:9"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="pip install 'attnmech\\[ray\\]'"):
        am.attention_focus(demo, iter(TEXTS), engine=am.Ray())


def test_a_cluster_that_is_too_small(demo: am.HookedModel, ray: Any) -> None:
    with pytest.raises(EngineError, match=r"3 CPUs and 0 GPUs, which is room for 1 workers with 2 CPUs"):
        am.attention_focus(demo, iter(TEXTS), engine=am.Ray(workers=2, cpus_per_worker=2))
