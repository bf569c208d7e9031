"""Connects to the Ray cluster that runs the workers: one that this process joined, one at an address, or a new one."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ..basics.arguments import shown
from ..basics.messages import first_line
from ..errors import EngineError, InputError

ANSWER_WITHIN: Final = 5.0  # seconds for a cluster to answer; Ray itself would try for minutes, then end the process

_NOISE: Final = r"A worker died or was killed|Task Worker\.\w+ failed"
"""Matches what Ray prints when a worker ends; the engine itself reports what becomes of the worker's documents."""


def imported() -> Any:
    """The package Ray; raises `EngineError` if it is not installed."""
    # Ray reads both variables when it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _NOISE)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise EngineError("am.Ray needs Ray: pip install 'attnmech[ray]'.") from error
    return ray


def connect(address: str | None, cpus: int) -> bool:
    """Connects this process to Ray, unless it is connected; returns whether it started a cluster, which it must then
    stop.

    Raises `EngineError` if there is no cluster at the address.
    """
    ray = imported()
    if ray.is_initialized():
        return False
    if address is not None:
        _require_answer(address)
    started = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **started)
    except (Exception, SystemExit) as error:  # which one depends on what is missing
        where = "on this machine" if address is None else f"at {address}"
        raise EngineError(f"Ray cannot be started or reached {where}: {first_line(error)}") from error
    return address is None


def checked_address(address: object) -> str | None:
    """An address or None; raises `InputError` for anything else."""
    if address is None:
        return None
    if not isinstance(address, str) or (address != "auto" and _place(address) is None):
        raise InputError(
            '`address` must be "auto", "host:port", "ray://host:port", or left out for a Ray on this machine; got '
            f"{shown(address)}."
        )
    return address


def _place(address: str) -> tuple[str, int] | None:
    """The host and the port of an address; None if it has none."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port else None
    except ValueError:
        return None


def _require_answer(address: str) -> None:
    start = "Start one with `ray start --head`, or leave out `address` to run on this machine."
    known = address
    if address == "auto":
        running = Path(tempfile.gettempdir(), "ray", "ray_current_cluster")
        known = os.environ.get("RAY_ADDRESS") or (running.read_text().strip() if running.exists() else "")
        if not known or known == "auto":
            raise EngineError(f"no Ray cluster is running here. {start}")
    place = _place(known)
    if place is None:
        return
    try:
        socket.create_connection(place, timeout=ANSWER_WITHIN).close()
    except OSError as error:
        raise EngineError(f"no Ray cluster answers at {known} ({error.strerror or error}). {start}") from error
