"""The command `attnmech`, also as `python -m attnmech`. Ctrl-C ends it with one line, even during its imports."""

import codecs
import io
import sys
from typing import Final

_IN_ASCII: Final = {
    "−": "-",
    "×": "x",
    "…": "...",
    "·": ".",
    "→": "->",
    "≤": "<=",
    "≠": "!=",
    "±": "+-",
    "“": '"',
    "”": '"',
}


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """What is printed for characters that the terminal or the pipe does not have."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_IN_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


def main() -> None:
    """The entry point."""
    codecs.register_error("attnmech", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="attnmech")
    try:
        from .cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
