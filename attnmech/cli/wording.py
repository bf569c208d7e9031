"""Names the options of a command in messages that name the arguments of Python."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_OTHER_NAMES: Final = {"inputs": "file", "target": "target_text"}
"""Python's arguments that a command has under another name."""

_CALL: Final = re.compile(r"([\w.]+\([^()]*\))")
"""A call in a message, which stays as it is."""


def as_options(message: str, parameters: Iterable[Any]) -> str:
    """A message in which the arguments that a command has are its options; `parameters` are the command's.

    >>> from types import SimpleNamespace
    >>> as_options("give truncate=True", [SimpleNamespace(name="truncate", opts=["--truncate"])])
    'give --truncate'
    """
    options = {parameter.name: max(parameter.opts, key=len) for parameter in parameters if parameter.opts}
    options |= {python: options[name] for python, name in _OTHER_NAMES.items() if name in options}
    if not options:
        return message
    names = "|".join(map(re.escape, options))
    patterns = (
        rf"`?\b(?P<name>{names})=(?P<value>True|\"[^\"]*\"|'[^']*'|[\w.]*\w)`?",
        rf"`(?P<name>{names})`",
        rf"^(?P<name>{names})(?= must )",
    )
    parts = _CALL.split(message)
    for pattern in patterns:
        parts[::2] = [re.sub(pattern, lambda match: _option(match, options), part) for part in parts[::2]]
    return "".join(parts)


def _option(match: re.Match[str], options: Mapping[str, str]) -> str:
    option, value = options[match["name"]], match.groupdict().get("value")
    if value in (None, "True"):
        return option
    return f"{option} {str(value).strip(chr(34) + chr(39)).removeprefix('torch.')}"
