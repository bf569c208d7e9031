"""Reads what was measured in a serving engine: sums that its workers took, or queries and keys that a hook saved."""

import hashlib
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from .basics.files import path_of
from .basics.messages import first_line
from .basics.public import public
from .engines.file import KIND
from .engines.saved import sums_of_saved
from .errors import InputError
from .methods.focus.attention_focus import AttentionFocus
from .results.provenance import Provenance
from .results.tensor_file import check_whole, read_tensors


@public
def engine_statistics(path: str | Path) -> AttentionFocus:
    """Reads the statistics of a model in service from the file that `watching` saved.

    >>> focus = am.engine_statistics("seen.safetensors")                    # doctest: +SKIP
    >>> focus.first_mass, focus["first_mass"].interval()                    # doctest: +SKIP

    The file may also come from another hook. Then it holds, for each request `r` and layer `l`, the tensors `r.ids`
    `[token]`, `r.l.q` `[token head d]`, `r.l.k` `[token kv_head d]`, `r.l.v` `[token kv_head d_value]` and `r.l.output`
    `[token head d_value]`, as the attention kernel has them, and in its metadata `attention`, JSON: `{"model": "…",
    "layers": {"0": {"scale": 0.125, "window": 4096, "softcap": 50.0, "sink": […], "slopes": […]}}}`, where only `scale`
    is needed; `special` may list the ids of special tokens, and queries may be those of the last tokens alone.

    The texts are the requests, prompts with answers. Rows that were not computed, because the prefix cache held them,
    are left out; `provenance` has their number, the engine with its backend and precision, and the largest error of a
    proof by layer: the difference of pattern times values from the kernel's own output, relative to its largest entry.

    Args:
        path: the file.

    Returns:
        The result of `am.attention_focus`, with intervals over requests; without `distance_histogram` and
        `received_by_type`, and with `received` and `sink_rate` at the first 128 positions.

    Raises:
        InputError: if there is no such file, if it is damaged or not of this kind, or if pattern times values is not
            the output that another hook saved.
    """
    source = path_of(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}.")
    try:
        with safe_open(source, framework="pt") as file:
            by_another = "attention" in (file.metadata() or {})
        if by_another:
            result = _focus(*sums_of_saved(source))
        else:
            check_whole(source)
            tensors, header = read_tensors(source)
            if header["kind"] != KIND:
                raise ValueError(f"it holds {header['kind']!r}")
            result = _focus(tensors, header)
        result._check()
    except InputError:
        raise
    except Exception as error:  # the file may hold anything
        raise InputError(f"{source} has no statistics of an engine ({first_line(error)}).") from error
    return result


def _focus(tensors: dict[str, Tensor], header: dict[str, Any]) -> AttentionFocus:
    inputs = hashlib.sha256(tensors["groups"].numpy().tobytes()).hexdigest()
    origin = Provenance(
        model=header["model"],
        weights="not hashed: those of the engine",
        inputs=inputs,
        edits=tuple(header.get("edits", ())),
        tokens=(),
        options={**header["options"], "shard": [0, 1], "corpus": inputs},
        versions=header["versions"],
    )
    return AttentionFocus(
        layers=tuple(header["layers"]),
        n_layers=header["n_layers"],
        documents=header["documents"],
        truncated=0,
        state=tensors,
        provenance=origin,
        chosen=("ordinary", "special"),
        tokens=(),
        last=header["last"],
    )
