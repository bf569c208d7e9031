"""Requests to a vLLM server that has attnmech's routes (`engines/vllm/plugin.py`)."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..errors import InputError
from .file import from_bytes, write


def post(url: str, route: str, *, key: str | None = None, **body: Any) -> bytes:
    """Calls a route of a server; `key` is its --api-key.

    Raises `InputError` with the server's words if it refuses, or cannot be reached.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    address = f"{url.rstrip('/')}/v1/attnmech/{route}"
    if not address.startswith(("http://", "https://")):
        raise InputError(f"the address of a server begins with http:// or https://; got {url!r}.")
    try:
        with urlopen(Request(address, json.dumps(body).encode(), headers, method="POST")) as response:
            content: bytes = response.read()
            return content
    except HTTPError as error:
        if error.code == 404:
            raise InputError(
                f"the server at {url} has no routes of attnmech; start it with VLLM_PLUGINS=attnmech and "
                "--worker-extension-cls attnmech.engines.vllm.Heads."
            ) from error
        message = error.read().decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            answer = json.loads(message)
            message = answer["detail"] if "detail" in answer else answer["error"]
        raise InputError(f"the server at {url} refused: {message}") from error
    except (URLError, OSError) as error:
        raise InputError(f"no server answers at {url}: {error}.") from error


def take(url: str, path: str | Path, *, key: str | None = None) -> Path:
    """Writes the sums so far to a file for `am.engine_statistics`."""
    return write(path, *from_bytes(post(url, "take", key=key)))
