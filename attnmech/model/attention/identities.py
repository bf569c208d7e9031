"""Lists the identities between the quantities of a pass, which the running certificate checks in every pass.

| identity | holds between |
|---|---|
| `heads` | attn_raw = Σ_h z_h W_O^h + b_O |
| `block` | resid_post = resid_pre + attn_out (+ mixer_out) + mlp_out; post-norm: resid_mid = resid_pre + attn_out |
| `mlp` | post-norm models: input of the last norm = N(resid_mid) + mlp_out |
| `chain` | resid_pre of a layer = resid_post of the one before |
| `rows` | Σ_j pattern_ij = 1, with a sink's mass |
| `values` | the v that attention weights = the v that the projection made, number by number |

They hold between values after hooks and interventions. An edit of `result` separates the two sides of `heads`; this
identity is then skipped, and the run says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...batch import Batch
from ...errors import ExactnessError
from ...points import full_name

Kind: TypeAlias = Literal[
    "pre_in", "pre", "raw", "out", "mid_in", "mid", "mid_normed", "mixer", "mlp", "end_in", "post_in", "post"
]
"""A place where the stream, or an addition to it, is observed; names with "_in" mean the value before edits there."""

POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "heads": ("z", "attn_raw"),
    "block": ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"),
    "mlp": ("resid_mid", "mlp_out", "resid_post"),
    "chain": ("resid_pre", "resid_post"),
    "rows": ("pattern",),
    "values": ("v", "z"),
}
"""The points in each identity; if the certificate refuses one of the points, the identity is not tried."""

STATEMENTS: Final = {
    "heads": "attn_raw = Σ_h z W_O + b_O",
    "block": "the stream after a block = the stream before it + the additions of attention and MLP",
    "mlp": "input of the last norm = N(resid_mid) + mlp_out",
    "chain": "resid_pre = resid_post of the layer before",
    "rows": "a row of the pattern sums to 1",
    "values": "z = pattern v, with v as the projection returned it",
}


@dataclass(frozen=True)
class StackTraits:
    """The traits of a stack that decide which identities hold."""

    label: str
    post_norm: bool
    has_mlp: bool
    interposed: str
    chained: bool  # whether a layer continues from where the previous layer ended
    has_mixer: bool = False  # whether a mixer writes into the stream in the same step as attention


@dataclass(frozen=True)
class Unbalanced:
    """An identity that does not hold at a token."""

    identity: str
    stack: str
    layer: int
    text: int
    position: int
    difference: float
    allowed: float

    def error(self, batch: Batch, past: int = 0) -> ExactnessError:
        """The error that reports it, after `past` tokens of a cache."""
        where = f"layer {self.layer}" + (f" of the {self.stack} stack" if self.stack else "")
        tokens = (batch.key_tokens if self.identity == "values" else batch.queries)(self.stack).tokens
        token = tokens[self.text][self.position] if self.text < len(tokens) else ""
        text = f" of text {self.text}" if len(batch.ids) > 1 else ""
        place = f"{where}, token {self.position + past} ({token!r}){text}"
        if not self.difference < float("inf"):
            return ExactnessError(
                f"{place}: the model computes NaN or infinity there (found at: {STATEMENTS[self.identity]}). 16-bit "
                "streams may overflow: try dtype=torch.float32."
            )
        multiplied = "" if self.identity in ("rows", "values") else "multiplied by random vectors, "
        return ExactnessError(
            f"{place}: {STATEMENTS[self.identity]} does not hold; {multiplied}the two sides differ by "
            f"{self.difference:.2e}; rounding explains at most {self.allowed:.2e}. A module of this model was changed "
            f"or hooked after loading, or behaves differently on this text than on the certificate's. "
            f"Run am.certify(model)."
        )


@dataclass(frozen=True)
class Equations:
    """Identities, as rows of signs over the quantities of a pass: each signed sum must be 0."""

    identities: tuple[tuple[str, str, int], ...]
    signs: Float[Tensor, "identity quantity"]
    streams: int  # the number of quantities of the stream; the remaining quantities are z
    _placed: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def on(self, device: torch.device, dtype: torch.dtype, *, rounding: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """The signs, and their absolute values times the `rounding` of each quantity: (stream, z)."""
        key = device, dtype, rounding
        if key not in self._placed:
            signs = self.signs.to(device, dtype)
            of_stream, of_z = rounding
            roundings = [of_stream] * self.streams + [of_z] * (signs.shape[1] - self.streams)
            self._placed[key] = signs, signs.abs() * signs.new_tensor(roundings)
        return self._placed[key]


@lru_cache(maxsize=64)
def equations(
    names: tuple[tuple[tuple[Kind, str, int], int], ...],
    streams: int,
    z_keys: tuple[tuple[str, int], ...],
    columns: tuple[StackTraits, ...],
    refused: frozenset[str],
) -> Equations:
    """The identities whose quantities were all recorded."""
    place = dict(names)
    by_label = {column.label: column for column in columns}
    rows: list[tuple[tuple[str, str, int], dict[int, float]]] = []

    def add(identity: str, stack: str, layer: int, plus: Sequence[int | None], minus: Sequence[int | None]) -> None:
        if None in plus or None in minus:
            return
        if any(full_name(stack, point) in refused for point in POINTS[identity]):
            return
        signs: dict[int, float] = {}
        for sign, places in ((1.0, plus), (-1.0, minus)):
            for quantity in places:
                assert quantity is not None
                signs[quantity] = signs.get(quantity, 0.0) + sign
        if any(signs.values()):
            rows.append(((identity, stack, layer), signs))

    layers = dict.fromkeys((stack, layer) for (_, stack, layer), _ in names)
    for stack, layer in layers:
        column = by_label[stack]

        def at(kind: Kind, stack: str = stack, layer: int = layer) -> int | None:
            return place.get((kind, stack, layer))

        if (stack, layer) in z_keys:
            add("heads", stack, layer, [streams + z_keys.index((stack, layer))], [at("raw")])
        written = at("raw") if at("out") is None else at("out")
        if column.post_norm:
            add("block", stack, layer, [at("pre"), written], [at("mid_in")])
            add("mlp", stack, layer, [at("mid_normed"), at("mlp")], [at("end_in")])
        else:
            added = [at("pre"), written]
            added += [at("mlp")] if column.has_mlp else []
            added += [at("mixer")] if column.has_mixer else []
            if column.interposed:
                other = at("out", column.interposed)
                added.append(at("raw", column.interposed) if other is None else other)
            edited = at("mid") is not None
            ended = at("post") if at("post_in") is None else at("post_in")
            add(
                "block", stack, layer, [*added, *([at("mid")] if edited else [])],
                [ended, *([at("mid_in")] if edited else [])],
            )  # fmt: skip
        before = place.get(("post", stack, layer - 1))
        entered = at("pre") if at("pre_in") is None else at("pre_in")
        if column.chained and before is not None and before != entered:
            add("chain", stack, layer, [before], [entered])
    signs = torch.zeros(len(rows), streams + len(z_keys))
    for number, (_, row) in enumerate(rows):
        for quantity, sign in row.items():
            signs[number, quantity] = sign
    return Equations(tuple(identity for identity, _ in rows), signs, streams)
