"""The same sums from queries, keys, values and outputs that another hook saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import InputError
from .focus import FocusTotals
from .groups import Kernel, Piece, attention_of, error_of, groups_of

LIMITS: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""The largest error of a proof that rounding explains, by the precision of the kernel's output."""


def sums_of_saved(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The sums over the requests of a file, and their origin, as a worker gives them.

    Raises `InputError` if Σ_j p_ij v_j is not the output that the file gives.
    """
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["attention"])
        layers = sorted(map(int, facts["layers"]))
        requests = sorted({name.split(".")[0] for name in file.keys() if name.endswith(".q")})  # noqa: SIM118
        heads = file.get_slice(f"{requests[0]}.{layers[0]}.q").get_shape()[1]
        totals = FocusTotals(len(layers), heads, torch.device("cpu"), last=facts.get("last", 8))
        special = torch.tensor(facts.get("special", []), dtype=torch.long)
        errors = [0.0] * len(layers)
        for request in requests:
            ids = file.get_tensor(f"{request}.ids")
            for place, layer in enumerate(layers):
                q, k, v, output = (file.get_tensor(f"{request}.{layer}.{name}") for name in ("q", "k", "v", "output"))
                kernel = _kernel(facts["layers"][str(layer)])
                before = len(k) - len(q)
                if len(ids) != len(k) or before < 0:
                    raise InputError(
                        f"request {request} has {len(ids)} ids, {len(k)} keys and {len(q)} queries in layer {layer}; "
                        "ids and keys must be as many, and queries are those of the last tokens."
                    )
                for group in groups_of([Piece(0, range(before, len(k)))], heads, q.device):
                    rows, keys = torch.tensor([*group.pieces[0].rows]), slice(group.rows.stop)
                    attention = attention_of(group, q[rows - before][None], k[keys].transpose(0, 1)[:, None], kernel)
                    error = error_of(group, attention, v[keys].transpose(0, 1)[:, None], output[rows - before][None])
                    if not error <= LIMITS[output.dtype]:
                        raise InputError(
                            f"layer {layer} of request {request} cannot be proved: pattern times values differs from "
                            f"the saved output by {float(error):.1e} of its largest entry. Check scale, window, "
                            "softcap, sink and slopes, and that queries and keys were saved after their rotation."
                        )
                    errors[place] = max(errors[place], float(error))
                    known = torch.isin(ids[rows], special)[None]
                    totals.add(place, group, attention, kernel.window, known, totals.slots([request]))
            totals.end(request, ids.tolist())
    engine = facts.get("engine", "saved queries and keys")
    options = {"engine": engine, "proof": {"largest error by layer": [float(f"{error:.1e}") for error in errors]}}
    header = {
        "model": facts["model"], "layers": layers, "n_layers": facts.get("n_layers", layers[-1] + 1),
        "documents": totals.documents, "last": totals.last, "options": options,
        "versions": {"torch": torch.__version__},
    }  # fmt: skip
    return totals.state(), header


def _kernel(facts: Mapping[str, Any]) -> Kernel:
    """The kernel of a layer: scale, and where it has them window, softcap, and by head sink and slopes."""
    by_head = {name: torch.tensor(facts[name]) for name in ("sink", "slopes") if facts.get(name) is not None}
    return Kernel(facts["scale"], facts.get("window"), facts.get("softcap") or 0.0, **by_head)
