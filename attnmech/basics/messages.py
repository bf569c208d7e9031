"""Forms messages: quotes other libraries' errors, begins sentences, and points warnings at the user's line."""

import inspect
import re
import warnings


def first_line(error: BaseException) -> str:
    """An error's message in one line: its first line, joined to the second if the first ends in a colon; long ones are
    cut.

    Of an input or output error of a library in Rust, only the system's reason.

    >>> first_line(ValueError("Bad field:\\n  too small"))
    'Bad field: too small'
    >>> first_line(ValueError("Error while serializing: I/O error: No space left on device (os error 28)"))
    'No space left on device'
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    of_system = re.search(r"([^:]+) \(os error \d+\)$", line)
    return of_system[1].strip() if of_system else line


def capitalised(sentence: str) -> str:
    """Begins a sentence with a capital letter; other letters stay.

    >>> capitalised("zero ablation of L0H1.")
    'Zero ablation of L0H1.'
    """
    return sentence[:1].upper() + sentence[1:]


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the nearest caller outside this package."""
    frame, depth = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "attnmech":
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)
