"""Defines the engine `am.Ray(...)`, which starts workers, sends them the model, and gives them the batches of a run."""

import atexit
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from ..basics.arguments import shown, whole_number
from ..basics.public import public
from ..errors import AttnmechError, EngineError, InputError
from ..model.run.hooked import HookedModel
from ..runs.corpus import CorpusBatch
from ..runs.corpus_files import CorpusFiles
from ..runs.journal import Journal
from ..runs.progress import Meter, Steps
from ..runs.workers import Workers
from .cluster import checked_address, connect, imported

if TYPE_CHECKING:
    from .pool import Pool


@public
class Ray(Workers):
    """Worker processes of Ray, on this machine or a cluster, that carry out the batches of a run.

    >>> with am.Ray(workers=2) as engine:                                                # doctest: +SKIP
    ...     focus = am.attention_focus(model, am.Corpus("corpus.jsonl"), engine=engine)
    ...     effects = am.ablate_heads(model, texts, engine=engine)

    Every call returns the same result with and without an engine: the same batches go through the same code, counts
    are equal, and sums differ by rounding. Each worker loads the model once: from its own disk if the same weights are
    there, else from Ray's object store; the certificate is shared.

    Args:
        address: None starts Ray on this machine, or uses the one that this process is connected to. "auto" is the
            cluster that runs here, "host:port" one elsewhere, "ray://host:port" one reached by Ray's client.
        workers: the number of workers; by default, the number that fits the GPUs (with `gpus_per_worker`) or the cores,
            except one core for Ray.
        gpus_per_worker: the GPUs of each worker. With 1, a worker has a GPU to itself; with 0.5, two workers share one.
        cpus_per_worker: the CPUs of each worker, and its number of threads.

    Workers start at the first call, and serve later calls with this or another model. They end with the `with` block,
    with `close()`, with the process, or when a call is interrupted.

    Raises `InputError` for arguments out of range. Calls raise `EngineError` if Ray is not installed, no cluster
    answers, the cluster is too small, or a worker cannot load the model. A document on which three workers have ended
    is left out with a `LeftOutWarning` that names its number.

    """

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        gpus_per_worker: float = 0,
        cpus_per_worker: int = 1,
    ) -> None:
        self.address = checked_address(address)
        self.workers = None if workers is None else whole_number("workers", workers, least=1)
        if isinstance(gpus_per_worker, bool) or not isinstance(gpus_per_worker, int | float) or gpus_per_worker < 0:
            raise InputError(f"`gpus_per_worker` must be a number of GPUs, 0 or more; got {shown(gpus_per_worker)}.")
        self.gpus_per_worker = float(gpus_per_worker)
        self.cpus_per_worker = whole_number("cpus_per_worker", cpus_per_worker, least=1)
        self._actors: list[Any] = []
        self._started = False
        self._sent: dict[str, Any] = {}

    def __repr__(self) -> str:
        count = "as many workers as fit" if self.workers is None else f"{self.workers} workers"
        gpus = f", {self.gpus_per_worker:g} GPUs" if self.gpus_per_worker else ""
        return f"Ray({self.address or 'this machine'}: {count}, each with {self.cpus_per_worker} CPUs{gpus})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and Ray if this engine started it."""
        atexit.unregister(self.close)
        actors, self._actors, self._sent = self._actors, [], {}
        if not actors and not self._started:
            return
        ray = imported()
        if ray.is_initialized():
            for actor in actors:
                ray.kill(actor)
            if self._started:
                ray.shutdown()
        self._started = False

    def processes(self) -> list[int]:
        """The process id of each worker, on the worker's own machine; starts the workers if there are none."""
        self._start()
        return [int(number) for number in imported().get([actor.process.remote() for actor in self._actors])]

    def reading(self, inputs: Any) -> Any:
        """The corpus; if it consists of files that every machine can read, Ray Data reads it."""
        if not isinstance(inputs, CorpusFiles):
            return inputs
        self._start()
        from .reading import RayDocuments

        return RayDocuments(inputs)

    def stream(self, work: Any, parts: Iterator[CorpusBatch], total: Any, journal: Journal | None, bar: Meter) -> None:
        imported()
        from .shipping import shipped
        from .streaming import CallerChanges, Reducing, Summing

        described = Reducing(work.reducers, work.stack.label, work.layers, work.generate, CallerChanges.of(work.model))
        plan = shipped(described, "a reducer or a hook")
        with self._serving(work.model) as pool:
            Summing(pool, *_put(plan), parts, total, journal, bar).run()

    def sweep(self, work: Any, parts: Sequence[CorpusBatch], bar: Steps) -> None:
        imported()
        from .shipping import shipped
        from .streaming import CallerChanges
        from .sweeping import Changing, divide

        described = Changing(work.engine.on(None), work.changes, work.judge, CallerChanges.of(work.model))
        plan = shipped(described, "a metric, an intervention or a hook")
        with self._serving(work.model) as pool:
            divide(pool, *_put(plan), work, parts, bar)

    @contextmanager
    def _serving(self, model: HookedModel) -> "Iterator[Pool]":
        """The workers, with this model; they end if the block raises, unless the error is about the user's input."""
        try:
            self._start()
            from .pool import Pool

            yield Pool(self._actors, self._preparing(model))
        except BaseException as error:
            if isinstance(error, EngineError) or not isinstance(error, AttnmechError):
                self.close()
            raise

    def _start(self) -> None:
        if self._actors:
            return
        wanted = (self.workers or 1) * self.cpus_per_worker
        here = max(wanted, os.cpu_count() or 1) if self.workers is None else wanted
        self._started = connect(self.address, here + 1)
        atexit.register(self.close)
        ray = imported()
        from .worker import STARTS, Worker

        kind = ray.remote(Worker).options(
            num_cpus=self.cpus_per_worker, num_gpus=self.gpus_per_worker, max_restarts=-1, max_task_retries=STARTS
        )
        device = "cuda" if self.gpus_per_worker else "cpu"
        self._actors = [kind.remote(self.cpus_per_worker, device) for _ in range(self._count(ray.cluster_resources()))]

    def _count(self, there: "dict[str, float]") -> int:
        """The number of workers to start; raises `EngineError` if the cluster has no room for them."""
        cpus, gpus = there.get("CPU", 0.0), there.get("GPU", 0.0)
        fit = int(cpus // self.cpus_per_worker)
        if self.gpus_per_worker:
            fit = min(fit, int(gpus / self.gpus_per_worker))
        if fit < (self.workers or 1):
            raise EngineError(
                f"this Ray has {cpus:g} CPUs and {gpus:g} GPUs, which is room for {fit} workers with "
                f"{self.cpus_per_worker} CPUs and {self.gpus_per_worker:g} GPUs each; requested: {self.workers or 1}."
            )
        if self.workers is not None:
            return self.workers
        return fit if self.gpus_per_worker else max(1, int((cpus - 1) // self.cpus_per_worker))

    def _preparing(self, model: HookedModel) -> Any:
        """The call that makes a worker load the model; sends the weights if some worker does not have them on disk."""
        from ..model.files.travelling import Blueprint, weights_of
        from .shipping import shipped

        ray = imported()
        plan = Blueprint.of(model)
        device = "cuda" if self.gpus_per_worker else "cpu"
        key = hashlib.sha256(f"{plan.weights} {plan.name} {plan.dtype} {device}".encode()).hexdigest()
        if key not in self._sent:
            blueprint = [ray.put(shipped(plan, f"the model {model.name}"))]
            self._sent = {key: (blueprint, None)}
            if not all(_answered([actor.prepare.remote(key, blueprint, None) for actor in self._actors])):
                weights = [ray.put(part) for part in weights_of(model)]
                self._sent = {key: (blueprint, weights)}
        blueprint, weights = self._sent[key]
        return lambda actor: actor.prepare.remote(key, blueprint, weights)


def _put(sent: bytes) -> tuple[str, Any]:
    """Stores what all workers need for one call; returns its key and a reference to it."""
    return hashlib.sha256(sent).hexdigest(), imported().put(sent)


def _answered(calls: Sequence[Any]) -> list[bool]:
    """Whether each worker has the model on its disk; False for one that has ended, to which the weights are sent."""
    from ray.exceptions import RayActorError

    from .pool import got

    answers = []
    for call in calls:
        try:
            answers.append(bool(got(call)))
        except RayActorError:
            answers.append(False)
    return answers
