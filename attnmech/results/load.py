"""Reads the file of a result."""

from pathlib import Path

from .. import results
from ..basics.arguments import shown, string
from ..basics.files import path_of
from ..basics.messages import first_line
from ..basics.public import public
from ..errors import InputError
from .result import FILE_VERSION, Result
from .tensor_file import check_whole, read_tensors


@public
def load_result(path: str | Path) -> Result:
    """Reads a result that its `save` wrote; needs no model.

    >>> effects = am.load_result("effects.safetensors")      # doctest: +SKIP
    >>> effects.to_frame()                                   # doctest: +SKIP

    Args:
        path: the file.

    Returns:
        the result, of the class that was saved (`am.results`).

    Raises:
        InputError: if there is no such file, if it holds no result, if it is damaged, or if its numbers and labels do
            not fit together.
    """
    source = path_of(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}.")
    check_whole(source)
    try:
        tensors, header = read_tensors(source)
        name = string("kind", header["kind"])
    except Exception as error:
        raise InputError(f"{source} is not a result that attnmech saved ({first_line(error)}).") from error
    if name in (others := {"Intervention": "am.Intervention.load", "Activations": "safetensors.torch.load_file"}):
        raise InputError(
            f"{source} holds an {name}, not a result; read it with {others[name]}.".replace("an Act", "Act")
        )
    kind = getattr(results, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Result)):
        raise InputError(
            f"{source} holds {name!r}, which is not in am.results; read it with the version of attnmech that saved it."
        )
    version = header.get("version", FILE_VERSION)
    if version != FILE_VERSION:
        raise InputError(
            f"{source} has the file version {shown(version)}; this attnmech reads version {FILE_VERSION}. Read it with "
            "the version of attnmech that saved it."
        )
    try:
        return kind._from_file(tensors, header)
    except Exception as error:  # the file may hold anything
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError(f"{source} does not hold a valid {name}: {reason}. Save the result again.") from error
