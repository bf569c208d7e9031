"""The command `attnmech mcp`."""

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from ...errors import InputError
from ..options import DeviceOption, DtypeOption
from ..stages import importing
from ..terminal import console
from .allowed import Folders, Models

TOKEN: Final = "ATTNMECH_MCP_TOKEN"
"""The environment variable with the token of the HTTP server."""


def mcp(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            help="A model that agents may load: hub name, folder or GGUF file; may be repeated. The demo model (demo) "
            "if left out.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="A folder in which agents may read and write files; may be repeated."),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(
            "--http", min=1, max=65535, help="Serve HTTP on this port of 127.0.0.1 instead of stdin and stdout."
        ),
    ] = None,
) -> None:
    r"""Serves attnmech to agents over the Model Context Protocol (pip install "attnmech\[mcp]").

    Agents can load the models that you name, and read and write files in the folders that you name; no code of theirs
    is run. Over HTTP, they must send a token: that of the environment variable ATTNMECH_MCP_TOKEN, or one that is
    printed at the start.
    """
    models, folders = Models(model or (), device, dtype), Folders(folder or ())
    try:
        with importing():
            from .server import HOST, serve_http, serve_stdio
            from .tools import Tools
    except ImportError as error:
        raise InputError('to serve agents: pip install "attnmech[mcp]".') from error
    tools = Tools(models, folders)
    if http is None:
        serve_stdio(tools)
        return
    token = os.environ.get(TOKEN)
    if not token:
        token = secrets.token_urlsafe(24)
        console(stderr=True).print(f"token: {token}", soft_wrap=True)
    console(stderr=True).print(f"serving http://{HOST}:{http}/mcp", soft_wrap=True)
    serve_http(tools, http, token)
