"""Reads what a command runs on: a model, texts, and an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .outputs import Outputs
from .stages import stages

if TYPE_CHECKING:
    from ..model.run.hooked import HookedModel
    from ..runs.corpus import Corpus


def streamed(
    model: str | None,
    device: str | None,
    dtype: str | None,
    text: str | None,
    file: Path | None,
    column: str | None,
    outputs: Outputs,
    truncate: bool,
    engine: dict[str, Any],
) -> tuple["HookedModel", Any, dict[str, Any]]:
    """Returns the model, a text or a corpus, and the options of a run on a corpus, with a journal and a bar."""
    with stages("importing torch and transformers", total=2) as step:
        from ..model.files.load import load

        step("loading and certifying the model")
        corpus = corpus_of(file, column)
        hooked = load(model, device=device, dtype=dtype)
    if corpus is None and truncate and text is not None:
        return hooked, iter([text]), {"truncate": True}
    if corpus is None:
        return hooked, text if text is not None else built_in_paragraph(), {}
    return hooked, corpus, {"truncate": truncate, "journal": outputs.journal, "progress": True, **engine}


def sweep_inputs(
    model: str | None,
    device: str | None,
    dtype: str | None,
    text: str | None,
    file: Path | None,
    column: str | None,
) -> tuple["HookedModel", list[str]]:
    """Returns the model and the texts of a sweep."""
    with stages("importing torch and transformers", total=2) as step:
        from ..demo.text import documents
        from ..model.files.load import load

        corpus = corpus_of(file, column)
        texts = list(corpus) if corpus is not None else [text] if text is not None else documents(64)
        step("loading and certifying the model")
        return load(model, device=device, dtype=dtype), texts


def corpus_of(file: Path | None, column: str | None) -> "Corpus | None":
    """Returns the corpus of a file, or None without a file."""
    if file is None:
        if column is not None:
            raise InputError(f"--column {column} names a column of --file; give --file too.")
        return None
    from ..runs.corpus import Corpus

    return Corpus(file, column=column)


def require_one_source(text: str | None, file: Path | None) -> None:
    """Raises `InputError` if both a text and a file are passed."""
    if text is not None and file is not None:
        raise InputError("expected --text or --file; got both. Leave one out.")


def texts_of(file: Path | None, column: str | None, most: int) -> list[str]:
    """Returns the texts of a file that holds at most `most`; none without a file."""
    texts = list(islice(corpus_of(file, column) or (), most + 1))
    if len(texts) > most:
        raise InputError(f"a page shows at most {most} texts; {file} has more. Name a file with some of them.")
    return texts


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


def built_in_paragraph() -> str:
    """The paragraph that commands read by default."""
    from ..demo.text import PARAGRAPH

    return PARAGRAPH


@contextmanager
def engine_of(engine: str, address: str | None, workers: int | None) -> Iterator[dict[str, Any]]:
    """Yields the arguments that tell a method where to run; Ray's workers end with the block."""
    if engine == "local":
        if address is not None or workers is not None:
            raise InputError("--address and --workers need --engine ray; got --engine local.")
        yield {}
        return
    from ..distributed.engine import Ray

    with Ray(address, workers=workers) as ray:
        yield {"engine": ray}
