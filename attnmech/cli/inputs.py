"""Reads what a command runs on, a model, texts and an engine, and frames its work."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import Options
from .outputs import RESULT, Outputs, outputs_of
from .stages import stages
from .summaries import summary_of
from .terminal import Rows, Summary, print_summary

if TYPE_CHECKING:
    from ..model.run.hooked import HookedModel
    from ..results.result import PagedResult
    from ..runs.corpus import Corpus


class Job:
    """The work of a command: its files, where it runs, and what it prints at the end."""

    summary: Summary

    def __init__(self, options: Options, outputs: Outputs, engine: dict[str, Any]) -> None:
        self.options, self.outputs, self.engine = options, outputs, engine
        self.run: dict[str, Any] = {"journal": outputs.journal, "progress": True, **engine}
        """The options of a sweep or a run over a corpus: its journal, its bar and its engine."""

    def load(self, **how: Any) -> "HookedModel":
        """Loads the model."""
        from ..model.files.load import load

        return load(self.options.model, device=self.options.device, dtype=self.options.dtype, **how)

    def corpus(self) -> "Corpus | None":
        """Returns the corpus of the file, or None without a file."""
        file, column = self.options.file, self.options.column
        if file is None:
            if column is not None:
                raise InputError(f"--column {column} names a column of --file; give --file too.")
            return None
        from ..runs.corpus import Corpus

        return Corpus(file, column=column)

    def texts(self, most: int) -> list[str]:
        """Returns the texts of a file that holds at most `most`, the text, or the built-in paragraph."""
        texts = list(islice(self.corpus() or (), most + 1))
        if len(texts) > most:
            raise InputError(
                f"a page shows at most {most} texts; {self.options.file} has more. Name a file with some of them."
            )
        return texts or [built_in_paragraph() if self.options.text is None else self.options.text]

    def text_or_documents(self) -> list[str]:
        """Returns the text or, without one, documents in the demo model's language."""
        from ..demo.text import documents

        return documents(64) if self.options.text is None else [self.options.text]

    def streamed(self) -> tuple["HookedModel", Any, dict[str, Any]]:
        """Returns the model, a text or a corpus, and the options of a run over it."""
        text, truncate = self.options.text, self.options.truncate
        with stages("loading and certifying the model", total=1):
            corpus = self.corpus()
            hooked = self.load()
        if corpus is not None:
            return hooked, corpus, {"truncate": truncate, **self.run}
        if truncate and text is not None:
            return hooked, iter([text]), {"truncate": True}
        return hooked, with_images(hooked, built_in_paragraph() if text is None else text, self.options.image), {}

    def swept(self) -> tuple["HookedModel", list[str], dict[str, Any]]:
        """Returns the model, the texts and the options of a sweep."""
        with stages("loading and certifying the model", total=1):
            texts = list(self.corpus() or self.text_or_documents())
            return self.load(), texts, {"memory": self.options.memory, **self.run}

    def finish(self, command: str, model: "HookedModel", result: "PagedResult", shown: Rows, *further: str) -> None:
        """Writes the files of a result, and summarises it."""
        files = {".html": result.write_html, ".safetensors": result.save, "": getattr(result, "write", result.save)}
        self.outputs.write(result.by_head(), files)
        self.summary = summary_of(command, model, result, self.outputs, shown, *further)


@contextmanager
def job_of(options: Options, suffixes: Sequence[str] = RESULT, *, resumable: bool = False) -> Iterator[Job]:
    """Checks the options, yields the command's work, and prints its summary; Ray's workers end with the block."""
    if options.text is not None and options.file is not None:
        raise InputError("expected --text or --file; got both. Leave one out.")
    if options.image and (options.text is None or options.truncate):
        raise InputError("--image needs --text, and takes no --truncate.")
    with (
        outputs_of(
            options.out, suffixes, overwrite=options.overwrite, source=options.file, resumable=resumable
        ) as outputs,
        _engine_of(options) as engine,
    ):
        job = Job(options, outputs, engine)
        yield job
    print_summary(job.summary, rows=options.rows, as_json=options.as_json)


@contextmanager
def _engine_of(options: Options) -> Iterator[dict[str, Any]]:
    if options.engine == "local":
        if options.address is not None or options.workers is not None:
            raise InputError("--address and --workers need --engine ray; got --engine local.")
        yield {}
        return
    from ..distributed.engine import Ray

    with Ray(options.address, workers=options.workers) as ray:
        yield {"engine": ray}


def numbers_of(option: str, argument: str | None) -> list[int] | None:
    """Returns the whole numbers of a comma-separated option.

    >>> numbers_of("--layers", "0,5,11")
    [0, 5, 11]
    """
    if argument is None:
        return None
    try:
        return [int(number) for number in argument.split(",")]
    except ValueError:
        raise InputError(
            f"{option} must be whole numbers separated by commas, such as 0,5,11; got {argument!r}."
        ) from None


def with_images(model: "HookedModel", text: str, images: Sequence[Path] | None) -> Any:
    """Returns the text with pictures, if there are any: where it says, or before it in a chat's message."""
    if not images:
        return text
    processor = getattr(getattr(model.encoder, "besides", None), "processor", None)
    if processor is None:
        raise InputError(f"images are for a model of text and images, with its processor; {model.name} has none.")
    marks = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
    if any(mark in text for mark in marks if mark):
        return {"text": text, "images": list(images)}
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def built_in_paragraph() -> str:
    """The paragraph that commands read by default."""
    from ..demo.text import PARAGRAPH

    return PARAGRAPH
