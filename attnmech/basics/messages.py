"""Quotes other libraries' errors in attnmech's messages."""


def first_line(error: BaseException) -> str:
    """An error's message in one line: its first line, joined to the second if the first ends in a colon.

    >>> first_line(ValueError("Bad field:\\n  too small"))
    'Bad field: too small'
    """
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
