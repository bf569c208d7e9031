"""What does a command run on? A model, texts, and where the work is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .outputs import Outputs
from .stages import stages

if TYPE_CHECKING:
    from ..model.run.hooked import HookedModel


def streamed(
    model: str | None, text: str | None, file: Path | None, outputs: Outputs, truncate: bool, where: dict[str, Any]
) -> tuple["HookedModel", Any, dict[str, Any]]:
    """The model, a text or a corpus, and how a corpus is run: with a journal and a bar."""
    if file is None:
        outputs.require_no_journal()
    with stages("importing torch and transformers", total=2) as step:
        from ..model.files.load import load
        from ..runs.corpus import Corpus

        step("loading and certifying the model")
        corpus = None if file is None else Corpus(file)
        hooked = load(model)
    if corpus is None:
        return hooked, text if text is not None else own_paragraph(), {}
    return hooked, corpus, {"truncate": truncate, "journal": outputs.journal, "progress": True, **where}


def sweep_inputs(model: str | None, text: str | None, file: Path | None) -> tuple["HookedModel", list[str]]:
    """The model and the texts of a sweep."""
    with stages("importing torch and transformers", total=2) as step:
        from ..demo.text import documents
        from ..model.files.load import load
        from ..runs.corpus import Corpus

        texts = list(Corpus(file)) if file is not None else [text] if text is not None else documents(64)
        step("loading and certifying the model")
        return load(model), texts


def text_of(text: str | None, file: Path | None) -> str | None:
    if text is not None and file is not None:
        raise InputError("give either --text or --file, not both.")
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: it is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}.") from error


def numbers_of(option: str, given: str | None) -> list[int] | None:
    """Whole numbers between commas."""
    if given is None:
        return None
    try:
        return [int(each) for each in given.split(",")]
    except ValueError:
        raise InputError(f"{option} takes whole numbers between commas, such as 0,5,11; got {given}.") from None


def own_paragraph() -> str:
    from ..demo.text import PARAGRAPH

    return PARAGRAPH


@contextmanager
def engine_of(engine: str, address: str | None, workers: int | None) -> Iterator[dict[str, Any]]:
    """How a command's method is told where to run; Ray's workers end with the block."""
    if engine == "local":
        if address is not None or workers is not None:
            raise InputError("--address and --workers are for --engine ray.")
        yield {}
        return
    from ..distributed.engine import Ray

    with Ray(address, workers=workers) as found:
        yield {"engine": found}
