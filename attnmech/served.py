"""Reads what was measured in a serving engine: sums that its workers took, or queries and keys that a hook saved."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal, overload

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from .basics.files import path_of
from .basics.messages import first_line
from .basics.public import public
from .engines.file import KIND
from .engines.saved import sums_of_saved
from .errors import InputError
from .maths.groups import by_group, text_digest
from .methods.focus.attention_focus import AttentionFocus
from .methods.head_types.formulas import ANSWERED, CONTENT, DISTANCES, POSITIONAL, TYPES
from .methods.head_types.head_types import HeadTypes
from .methods.head_types.sums import AROUND_KEY, AROUND_QUERY, BY_TEXT, HeadTypeSums
from .methods.segments.segment_attention import SegmentAttention
from .methods.segments.sums import SegmentSums, grouped_texts
from .results.provenance import Provenance
from .results.tensor_file import check_whole, read_tensors


@overload
def engine_statistics(path: str | Path, of: Literal["focus"] = "focus") -> AttentionFocus: ...
@overload
def engine_statistics(path: str | Path, of: Literal["segments"]) -> SegmentAttention: ...
@overload
def engine_statistics(path: str | Path, of: Literal["head_types"]) -> HeadTypes: ...
@public
def engine_statistics(
    path: str | Path, of: Literal["focus", "segments", "head_types"] = "focus"
) -> AttentionFocus | SegmentAttention | HeadTypes:
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
        of: "focus": attention focus of all requests. "segments": attention between the spans of requests that name
            them, as in `SamplingParams(extra_args={"attnmech_spans": [0, 12, 40]})`, the positions at which spans
            begin. "head_types": the types of heads, from the requests that
            `attnmech.engines.vllm.repeated_sequences` makes.

    Returns:
        The result of `am.attention_focus`, with intervals over requests; without `distance_histogram` and
        `received_by_type`, and with `received` and `sink_rate` at the first 128 positions. Or the result of
        `am.segment_attention`, or of `am.head_types` without what heads write.

    Raises:
        InputError: if there is no such file, if it is damaged or not of this kind, or if pattern times values is not
            the output that another hook saved; if no request named spans.
    """
    source = path_of(path)
    if not source.is_file():
        raise InputError(f"there is no file {source}.")
    try:
        with safe_open(source, framework="pt") as file:
            by_another = "attention" in (file.metadata() or {})
        if by_another:
            tensors, header = sums_of_saved(source)
        else:
            check_whole(source)
            tensors, header = read_tensors(source)
            if header["kind"] != KIND:
                raise ValueError(f"it holds {header['kind']!r}")
        result: Any = _READERS[of](tensors, header)
        result._check()
    except InputError:
        raise
    except Exception as error:  # the file may hold anything
        raise InputError(f"{source} has no statistics of an engine ({first_line(error)}).") from error
    return result  # type: ignore[no-any-return]


def _origin(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> dict[str, Any]:
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
    layers = tuple(header["layers"])
    return {"layers": layers, "n_layers": header["n_layers"], "truncated": 0, "provenance": origin}


def _focus(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> AttentionFocus:
    state = {name: value for name, value in tensors.items() if " " not in name}
    return AttentionFocus(
        **_origin(tensors, header),
        documents=header["documents"],
        state=state,
        chosen=("ordinary", "special"),
        tokens=(),
        last=header["last"],
    )


def _spans(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    count = sum(name.startswith("starts ") for name in tensors)
    if not count:
        refused = header.get("refused spans")
        raise InputError(f"no request named spans{f' that could be measured: {refused}' if refused else ''}.")
    names = ("starts", "ids", "mass", "top", "distance", "top_distance", "row")
    return [{name: tensors[f"{name} {number}"] for name in names} for number in range(count)]


def _segments(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> SegmentAttention:
    requests, sums = _spans(tensors, header), SegmentSums()
    of_texts, longest = [], max(len(request["ids"]) for request in requests)
    most = max(len(request["starts"]) for request in requests)
    cells: dict[str, list[Tensor]] = {"mass": [], "distance": [], "row": []}
    for request in requests:
        at = torch.arange(len(request["ids"]))
        segment = torch.searchsorted(request["starts"], at, right=True) - 1
        state = {"segment": segment[None], "mass": request["mass"][:, None].clone()}
        state |= {"distance": request["distance"].sum(dim=2)[:, None].double(), "row": request["row"][:, None].double()}
        of_texts.append(sums.closed_text(state, 0, 0, both_ways=False))
        for name, kept in cells.items():
            size = most if name == "mass" else longest
            own = state[name][:, 0]
            kept.append(pad(own, [0, size - own.shape[-1]] * (2 if name == "mass" else 1)))
    grouped = grouped_texts(of_texts, torch.cat([text_digest(request["ids"].tolist()) for request in requests]))
    return SegmentAttention(
        **_origin(tensors, header),
        documents=len(requests),
        state=grouped | {name: torch.stack(kept, dim=2) for name, kept in cells.items()},
        kind="span",
        first=True,
        gap=sums.gap,
        both_ways=False,
        starts=tuple((*request["starts"].tolist(), len(request["ids"])) for request in requests),
        begins=(0,) * len(requests),
        tokens=tuple(tuple(f"<{token}>" for token in request["ids"].tolist()) for request in requests),
    )


def _head_types(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> HeadTypes:
    requests = _spans(tensors, header)
    merge: Callable[[Any, Any], Any] = HeadTypeSums(generated=True).merge
    return HeadTypes(
        **_origin(tensors, header),
        documents=len(requests),
        state=reduce(merge, [_types_of(request, header["windows"]) for request in requests]),
        generated=True,
        tokens={},
    )


def _types_of(request: Mapping[str, Tensor], windows: Sequence[int | None]) -> dict[str, Tensor]:
    """The state of head types for one repeated sequence, from its sums by distance.

    Only the second copy has targets of "duplicate" and "induction": one in each row, a copy's length and one less back.
    """
    ids, starts = request["ids"], request["starts"].tolist()
    length, n = len(ids), (len(ids) - 1) // 2
    if starts != [0, 1, 1 + n] or length != 1 + 2 * n or not torch.equal(ids[1 : 1 + n], ids[1 + n :]):
        raise InputError(
            "head types need repeated sequences: a first token, a sequence of tokens, and the sequence again."
        )
    layers, heads = request["mass"].shape[:2]
    shown = torch.tensor([length if window is None else min(window, length) for window in windows])
    row = torch.arange(1, length)
    seen = torch.minimum(row + 1, shown[:, None]).double()  # [layer row]
    back = DISTANCES | {"duplicate": n, "induction": n - 1}
    state = {name: torch.zeros(len(TYPES), layers, heads, 1, dtype=torch.float64) for name in ("mass", "top")} | {
        "count": torch.zeros(len(TYPES), layers, 1, dtype=torch.float64)
    }
    uniform = torch.zeros(len(POSITIONAL), layers, 1, dtype=torch.float64)
    at_distance = torch.zeros(len(CONTENT), layers, 2 * length - 1, 1, dtype=torch.float64)
    for place, name in enumerate(TYPES):
        if name == "next" or name not in (*back, "first"):
            continue
        far, spans = back.get(name, 0), slice(2, 3) if name in ANSWERED else slice(1, 3)
        if name == "first":
            there = row < shown[:, None]
            sums = {entry: request[entry][:, :, 1:, 0].sum(dim=2) for entry in ("mass", "top")}
        else:
            there = (row >= (far if name in POSITIONAL else n + 1)) & (far < shown[:, None])
            by_distance = {"mass": request["distance"], "top": request["top_distance"]}
            sums = {entry: value[:, :, spans, far].sum(dim=2) for entry, value in by_distance.items()}
        for entry, value in sums.items():
            state[entry][place, ..., 0] = value
        state["count"][place, :, 0] = there.sum(dim=1)
        if name in POSITIONAL:
            uniform[place, :, 0] = (there / seen).sum(dim=1)
        else:
            at_distance[CONTENT.index(name), :, length - 1 + far, 0] = there.sum(dim=1).double()
    attended = torch.zeros(layers, heads, 2 * length - 1, dtype=torch.float64)
    attended[..., length - 1 :] = request["distance"][:, :, 1:].sum(dim=2)
    pairs = torch.zeros(layers, 2 * length - 1, dtype=torch.float64)
    distance = torch.arange(length)
    pairs[:, length - 1 :] = (length - distance.clamp_min(1)) * (distance < shown[:, None])
    state |= _not_measured(layers, heads) | {"uniform": uniform, "at_distance": at_distance}
    return by_group(state, text_digest(ids.tolist()), BY_TEXT) | {"attended": attended, "pairs": pairs}


def _not_measured(layers: int, heads: int) -> dict[str, Tensor]:
    """The entries of the state that need more than the attention of an engine; what follows from them is NaN."""
    none, content = torch.zeros(layers, heads, 1, dtype=torch.float64), len(CONTENT)
    by_head = {"rest_with": content, "rest_without": content, "written_there": 0, "written_elsewhere": 0}
    by_layer = {"count_with": content, "count_without": content, "written_count": 0}
    place = len(TYPES), layers, heads
    return {
        "alone": torch.full((len(POSITIONAL), layers, heads, 1), torch.nan, dtype=torch.float64),
        **{name: none.expand(count, -1, -1, -1).clone() for name, count in by_head.items()},
        **{name: none[:, 0].expand(count, -1, -1).clone() for name, count in by_layer.items()},
        **{name: none.clone() for name in ("copying", "matching", "breadth")},
        **{f"{name}_count": none[:, 0].clone() for name in ("copying", "matching", "breadth")},
        "example": torch.full(place, -torch.inf),
        "example_weight": torch.zeros(place),
        "example_at": torch.full((*place, 3), -1),
        "example_ids": torch.full((*place, len(AROUND_KEY) + len(AROUND_QUERY)), -1),
    }


_READERS: Final = {"focus": _focus, "segments": _segments, "head_types": _head_types}
