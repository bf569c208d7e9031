"""Why does a head look there? Its attention scores as an exact sum of terms.

The equations stand in `attnmech.maths.scores`; the figures are 1 to 3 of "Attention Focus Plots" (R. Claus).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from ..errors import ExactnessError, InputError, index_of
from ..files import writing
from ..maths.precision import step_tolerance
from ..maths.scores import ScoreParts, rank_keys, rounding_floor, term_shares
from ..maths.softmax import softmax_of
from ..model.attention import MaskRule, RowBlock
from ..model.hooked import HookedModel
from ..model.inputs import Inputs
from ..model.ledger import parts_of
from ..model.stack import Stack
from ..results import Provenance, Result

if TYPE_CHECKING:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    from ..draw.view import ScoreView

MAX_TERM_BYTES: Final = 2 * 2**30
"""A term larger than this is not made at once."""


def decompose_scores(
    model: HookedModel,
    inputs: Inputs,
    *,
    layers: Iterable[int] | None = None,
    bos: bool | None = None,
    fold_norm: bool = False,
    stack: str | None = None,
) -> "ScoreDecomposition":
    """Splits every attention score into query-key, bias and position terms that add up to it.

    score_ij = query_key + key_bias + query_bias + constant + position + mask (equations in
    `attnmech.maths.scores`). The terms come from `attn_in`, the weights, and the model's own position tensors;
    none is a remainder. Their sum is compared with the scores that the model really used, over every visible
    pair of real tokens: where they differ by more than 1e-5 of the layer's largest visible score (float32;
    1e-12 in float64), `ExactnessError` is raised and nothing is returned. `CertificateError` is raised for a
    model whose certificate does not prove `attn_in` and `scores`.

    >>> import attnmech as am
    >>> split = am.decompose_scores(am.load(), "Anna sang of shells.")
    >>> split.terms["key_bias"].shape        # [batch layer head query key], 1 where it does not change
    torch.Size([1, 4, 8, 1, 6])
    >>> split.contrast(query=5, key_a=2, key_b=0).explain(layer=1, head=3)     # doctest: +SKIP

    `stack` says which attention of a model with several is meant: "encoder", "decoder" or "cross".
    `fold_norm` counts the shift β of the norm before attention as bias: q = W_Q(γ⊙n) + (W_Qβ + b_Q).
    What is kept of each layer are its queries and keys, and of all layers with one mask what is visible; the
    terms are made when asked for.
    """
    blocks = model.stack(stack)
    chosen = model.points.check_layers(layers, blocks.label)
    captures = model.points.resolve([blocks.point("attn_in")], chosen, model.refused)
    model.points.resolve([blocks.point("scores")], chosen, model.refused)
    batch = model.encode(inputs, bos=bos)
    queries, keys = batch.queries(blocks.label), batch.keys(blocks.label)
    audit = _Audit(model, blocks, queries.mask, chosen, fold_norm)
    model.forward(batch, captures=captures, rows=[audit])
    audit.require_exact()
    options = {"layers": chosen, "bos": batch.bos, "fold_norm": fold_norm, "stack": blocks.label or "self"}
    return ScoreDecomposition(
        layers=tuple(chosen),
        parts=tuple(audit.parts[layer] for layer in chosen),
        residual=torch.stack([audit.residual[layer] for layer in chosen]),
        largest=torch.stack([audit.largest[layer] for layer in chosen]),
        real=queries.mask,
        tokens=queries.tokens,
        key_tokens=keys.tokens,
        provenance=model.provenance(batch, queries.tokens, options),
    )


class _Audit:
    """Compares the ledger with the scores of every row block, as the model goes through them."""

    def __init__(self, model: HookedModel, stack: Stack, real: Tensor, layers: list[int], fold_norm: bool) -> None:
        self.model, self.stack, self.real, self.layers, self.fold_norm = model, stack, real, layers, fold_norm
        self.parts: dict[int, ScoreParts] = {}
        self.residual: dict[int, Tensor] = {}
        self.largest: dict[int, Tensor] = {}
        self._visible: list[tuple[MaskRule, Tensor]] = []

    def __call__(self, block: RowBlock) -> None:
        layer = block.layer
        if block.stack != self.stack.label or layer not in self.layers:
            return
        if layer not in self.parts:
            attn_in = block["attn_in"]
            visible = self._visible_of(block)
            self.parts[layer] = parts_of(self.model, block, attn_in, visible, fold_norm=self.fold_norm)
            self.residual[layer] = self.largest[layer] = attn_in.new_zeros(self.stack.n_heads, dtype=torch.float64)
        rows = slice(block.rows.start, block.rows.stop)
        keep = block.visible & self.real[:, None, rows, None]
        scores = block.scores.to(self.parts[layer].query_from_input.dtype)
        difference = self.parts[layer].total(rows)[..., : scores.shape[-1]] - scores
        self.residual[layer] = torch.maximum(self.residual[layer], _largest(difference, keep))
        self.largest[layer] = torch.maximum(self.largest[layer], _largest(scores, keep))

    def _visible_of(self, block: RowBlock) -> Tensor:
        # Layers with one mask share one tensor of what is visible.
        for mask, visible in self._visible:
            if mask is block.mask:
                return visible
        self._visible.append((block.mask, block.mask.visible(range(block.mask.queries))))
        return self._visible[-1][1]

    def require_exact(self) -> None:
        """Raises `ExactnessError` for the first layer whose terms do not add up."""
        for layer in self.layers:
            parts, residual = self.parts[layer], self.residual[layer]
            tolerance = step_tolerance(self.model.dtype)
            floor = rounding_floor(
                parts.query_from_input.to(self.model.dtype),
                parts.key_from_input.to(self.model.dtype),
                parts.scale,
            )
            allowed = max(tolerance * float(self.largest[layer].max()), float(floor))
            if not bool((residual <= allowed).all()):
                head = int(torch.where(residual <= allowed, -1.0, residual).argmax())
                raise ExactnessError(
                    f"the terms of layer {layer}, head {head} differ from the model's scores by "
                    f"{float(residual[head]):.2e}; at most {allowed:.2e} is allowed ({tolerance:g} of the layer's "
                    "largest score). Is a hook active that changes q, k or the scores? am.certify(model) says what "
                    "else is wrong."
                )


def _largest(value: Tensor, keep: Tensor) -> Float[Tensor, " head"]:
    """max |value| over the kept cells, a head; NaN where one of them is NaN."""
    return value.double().abs().masked_fill(~keep, 0.0).amax(dim=(0, 2, 3))


@dataclass(frozen=True, repr=False)
class ScoreDecomposition(Result):
    """Attention scores as a sum of terms, with the proof that they add up.

    Scores are in the units of the softmax's input (natural logarithm of odds).
    """

    layers: tuple[int, ...]
    """The layers decomposed, in the order of the axis `layer`."""
    parts: tuple[ScoreParts, ...]
    """What the terms are made of, layer by layer."""
    residual: Float[Tensor, "layer head"]
    """Largest |Σ terms − score| over visible pairs of real tokens, in units of the score."""
    largest: Float[Tensor, "layer head"]
    """Largest |score| over the same pairs."""
    real: Bool[Tensor, "batch position"]
    """True at real tokens, False at padding."""
    tokens: tuple[tuple[str, ...], ...]
    """The tokens that look, as text."""
    key_tokens: tuple[tuple[str, ...], ...]
    """The tokens that are looked at: the same, but in cross-attention."""
    provenance: Provenance

    @property
    def terms(self) -> "Terms":
        """Each term by name, made when asked for; terms that the model has not are absent keys."""
        return Terms(self)

    @property
    def sink(self) -> Float[Tensor, "layer head"] | None:
        """The logit of each head's sink, one more in the normaliser of every row (gpt-oss); None without sinks."""
        sinks = [parts.sink for parts in self.parts if parts.sink is not None]
        return torch.stack(sinks) if sinks else None

    @property
    def visible(self) -> Bool[Tensor, "batch layer 1 query key"]:
        """Which keys each real token may look at; nothing at padding."""
        return torch.stack([_seen(parts, self.real) for parts in self.parts], dim=1)

    def select(self, layers: int | Iterable[int]) -> "ScoreDecomposition":
        """The same for some of its layers."""
        wanted = [self._index(layer) for layer in ([layers] if isinstance(layers, int) else layers)]
        if not wanted:
            raise InputError("`layers` must name at least one layer; got an empty list.")
        return replace(
            self,
            layers=tuple(self.layers[i] for i in wanted),
            parts=tuple(self.parts[i] for i in wanted),
            residual=self.residual[wanted],
            largest=self.largest[wanted],
        )

    def shares(self, rank: int = 0) -> "Shares":
        """What each term contributes to the `rank`-th highest key of each row (0 = the highest): figure 2.

        share = (t_ij − min_j t_ij) / Σ_terms (t_ij − min_j t_ij), over the terms that survive the softmax.
        NaN where the row has no such key, or sees one key only (row 0 of a causal model).
        """
        length = len(self.key_tokens[0])
        rank = index_of("rank", rank, length, "0 is the highest score")
        found = [_shares_of(parts, rank + 1, self.real) for parts in self.parts]
        names = found[0][1]
        return Shares(
            rank,
            self.layers,
            {name: torch.stack([share[name][..., rank] for _, share in found], dim=1) for name in names},
            torch.stack([keys[..., rank] for keys, _ in found], dim=1),
        )

    def contrast(self, query: int, key_a: int, key_b: int) -> "Contrast":
        """Why each head prefers one key to another: term by term, score(query, key_a) − score(query, key_b).

        The exponential of the sum is by how much more likely `key_a` is than `key_b`.
        """
        queries, keys = self.real.shape[1], len(self.key_tokens[0])
        query = index_of("query", query, queries)
        key_a, key_b = index_of("key_a", key_a, keys), index_of("key_b", key_b, keys)
        both = self.visible[:, :, 0, query, [key_a, key_b]].all(dim=-1)
        if not both.any():
            raise InputError(f"token {query} cannot see both key {key_a} and key {key_b}; choose keys it may look at.")
        rows = slice(query, query + 1)
        batch = self.real.shape[0]
        differences: dict[str, list[Tensor]] = {}
        for parts in self.parts:
            for name in parts.names():
                if name != "mask":
                    term = parts.term(name, rows)
                    term = term.expand(batch, self.residual.shape[1], 1, keys)[:, :, 0]
                    differences.setdefault(name, []).append(term[..., key_a] - term[..., key_b])
        values = {
            name: torch.stack(layers, dim=1).masked_fill(~both[..., None], torch.nan)
            for name, layers in differences.items()
        }
        places = tuple(
            (row[query], others[key_a], others[key_b]) for row, others in zip(self.tokens, self.key_tokens, strict=True)
        )
        return Contrast(query, key_a, key_b, self.layers, values, places)

    def to_frame(self) -> pd.DataFrame:
        """A row a head: layer, head, residual, largest_score, and the mean share of each term in each row's
        highest score (row 0 left out).
        """
        shares = self.shares(0)
        rows = []
        for index, layer in enumerate(self.layers):
            for head in range(self.residual.shape[1]):
                row: dict[str, Any] = {
                    "layer": layer,
                    "head": head,
                    "residual": float(self.residual[index, head]),
                    "largest_score": float(self.largest[index, head]),
                }
                for name, share in shares.items():
                    row[f"{name}_share"] = float(share[:, index, head].nanmean())
                rows.append(row)
        return pd.DataFrame(rows)

    def view(self, sequence: int = 0, ranks: int = 10) -> "ScoreView":
        """The numbers of figures 1 to 3 for one text, as arrays for drawing."""
        from ..draw.view import ScoreView

        sequence = index_of("sequence", sequence, len(self.real), f"{len(self.real)} texts were run")
        if self.tokens != self.key_tokens:
            raise InputError(
                "figures 1 to 3 show a text that looks at itself; this is cross-attention. Use .to_frame()."
            )
        here = self.real[sequence].nonzero()[:, 0]
        length = len(here)
        tokens = tuple(self.tokens[sequence][place] for place in here.tolist())
        scores, patterns, keys, shares, key_terms, terms = [], [], [], [], [], []
        for parts in self.parts:
            one = parts.of_text(sequence, here)
            total = one.total()
            hidden = ~one.visible.expand_as(total)
            scores.append(total.masked_fill(hidden, torch.nan)[0])
            pattern = softmax_of(total.masked_fill(hidden, torch.finfo(total.dtype).min), one.sink)
            patterns.append(pattern.masked_fill(hidden, 0.0)[0])
            ranked, share = _shares_of(one, min(ranks, length), self.real.new_ones(1, length))
            keys.append(ranked[0])
            shares.append({name: value[0] for name, value in share.items()})
            key_terms.append({name: one.term(name)[0, :, 0].expand(-1, length) for name in one.names_by_key()})
            terms.append({name: one.term(name)[0] for name in one.names() if name != "mask"})
        heads = self.residual.shape[1]
        return ScoreView(
            tokens=tokens,
            layers=self.layers,
            scores=torch.stack(scores).float().cpu().numpy(),
            pattern=torch.stack(patterns).float().cpu().numpy(),
            ranked_key=torch.stack(keys).int().cpu().numpy(),
            ranked_share={
                name: torch.stack([share[name] for share in shares]).float().cpu().numpy() for name in shares[0]
            },
            key_terms={
                name: torch.stack([term[name].expand(heads, length) for term in key_terms]).float().cpu().numpy()
                for name in key_terms[0]
            },
            notes=_notes(self.parts[0]),
            terms={name: _of_layers([term[name] for term in terms], heads) for name in terms[0]},
        )

    def plot(
        self,
        figure: str = "score_shares",
        *,
        layer: int | None = None,
        head: int = 0,
        rank: int = 0,
        query: int | None = None,
        sequence: int = 0,
    ) -> "go.Figure":
        """Figure 1 (`attention_map`), 2 (`score_shares`) or 3 (`key_terms`) of one head; never shown, returned.

        Or `row_ledger`: the sum of one row, that of the text's token number `query` (else the last), padding not
        counted.
        """
        from ..draw import scores as draw

        index = 0 if layer is None else self._index(layer)
        rank = index_of("rank", rank, len(self.key_tokens[0]), "0 is the highest score")
        heads = self.residual.shape[1]
        head = index_of("head", head, heads, f"this model has {heads} heads in each layer")
        view = self.select([self.layers[index]]).view(sequence, ranks=rank + 1)
        if figure == "row_ledger":
            from ..draw.ledger import row_ledger

            length = len(view.tokens)
            query = length - 1 if query is None else index_of("query", query, length, f"the text has {length} tokens")
            row = (0, head, query)
            return row_ledger(view.terms_of_row(*row), view.scores[row], view.pattern[row], view.tokens, query=query)
        if figure == "attention_map":
            return draw.attention_map(view.scores[0, head], view.tokens)
        if figure == "key_terms":
            return draw.key_terms({name: term[0, head] for name, term in view.key_terms.items()}, view.tokens)
        if figure != "score_shares":
            raise InputError(
                f'`figure` must be "attention_map", "score_shares", "key_terms" or "row_ledger"; got {figure!r}.'
            )
        index_of("rank", rank, view.ranked_key.shape[-1], "of this text")
        shares = {name: share[0, head, :, rank] for name, share in view.ranked_share.items()}
        return draw.score_shares(shares, view.ranked_key[0, head, :, rank], view.tokens, rank=rank)

    def to_html(self, path: str | Path, *, sequence: int = 0) -> Path:
        """Writes figures 1 to 3 for every head of one text as one offline page."""
        from ..draw.page import render_page
        from ..draw.view import Fact

        target = Path(path)
        worst = float(self.residual.max())
        html = render_page(
            title=f"Attention scores of {self.provenance.model}",
            lead=f"Every score is the sum of its terms; the largest difference is {worst:.1e}.",
            view=self.view(sequence),
            facts=[Fact("largest residual", f"{worst:.1e}", "ok")],
            checks=[],
            provenance=self.provenance.entries,
            calls={
                "scores": 'split.plot("{figure}", layer={layer}, head={head}, rank={rank})',
                "ledger": 'split.plot("{figure}", layer={layer}, head={head}, query={query})',
                "view": 'acts.show("pattern", layer={layer}, head={head}, view="{figure}")',
            },
        )
        with writing(target) as draft:
            draft.write_text(html, encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        """All heads as maps and the table; the table alone of two texts or of more than a view can hold."""
        from ..draw.all_heads import model_view
        from ..draw.figure_page import Section, in_notebook_output

        if self.tokens != self.key_tokens:
            return super()._repr_html_()
        view = self.view()
        try:
            maps = model_view(view.pattern, view.tokens, layers=view.layers, sums_to_one=False, title="Attention")
        except InputError:
            return super()._repr_html_()
        section = Section("", maps.reading, maps)
        return in_notebook_output(title="Attention scores", lead=repr(self), sections=[section], frame=self.to_frame())

    def __repr__(self) -> str:
        batch, length = self.real.shape
        return (
            f"ScoreDecomposition({self.provenance.model!r}, layers {list(self.layers)}, {batch} × {length} tokens: "
            f"{', '.join(self.terms)}; residual {float(self.residual.max()):.1e})"
        )

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise InputError(f"`layer` must be one of the layers decomposed, {list(self.layers)}; got {layer!r}.")
        return self.layers.index(layer)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"residual": self.residual, "largest": self.largest, "real": self.real}
        for index, parts in enumerate(self.parts):
            for name in _PART_TENSORS:
                value = getattr(parts, name)
                if value is not None:
                    tensors[f"{index}.{name}"] = value
        return tensors

    def _facts(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "scales": [parts.scale for parts in self.parts],
            "softcaps": [parts.softcap for parts in self.parts],
            "tokens": [list(row) for row in self.tokens],
            "key_tokens": [list(row) for row in self.key_tokens],
        }

    @classmethod
    def _from_saved(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], provenance: Provenance) -> Self:
        parts = tuple(
            ScoreParts(
                **{name: tensors.get(f"{index}.{name}") for name in _PART_TENSORS},  # type: ignore[arg-type]
                scale=scale,
                softcap=softcap,
            )
            for index, (scale, softcap) in enumerate(zip(facts["scales"], facts["softcaps"], strict=True))
        )
        return cls(
            tuple(facts["layers"]),
            parts,
            tensors["residual"],
            tensors["largest"],
            tensors["real"],
            tuple(tuple(row) for row in facts["tokens"]),
            tuple(tuple(row) for row in facts["key_tokens"]),
            provenance,
        )


_PART_TENSORS: Final = (
    "query_from_input",
    "key_from_input",
    "query_from_bias",
    "key_from_bias",
    "position",
    "visible",
    "sink",
)


class Terms(Mapping[str, Tensor]):
    """The terms of a decomposition by name: `[batch layer head query key]`, length 1 along axes where a term
    does not change. Made when asked for.
    """

    def __init__(self, split: ScoreDecomposition) -> None:
        self._split = split

    def __iter__(self) -> Iterator[str]:
        return iter(self._split.parts[0].names())

    def __len__(self) -> int:
        return len(self._split.parts[0].names())

    def __getitem__(self, name: str) -> Float[Tensor, "#batch layer #head #query #key"]:
        split = self._split
        if name not in tuple(self):
            raise KeyError(f"this model's scores have no term {name!r}; they have {', '.join(self)}")
        first = split.parts[0].term(name, slice(0, 1))
        rows = split.real.shape[1] if split.parts[0].differs_by_query(name) else 1
        size = len(split.parts) * first[:, :, :1].numel() * rows * first.element_size()
        if size > MAX_TERM_BYTES:
            raise InputError(
                f"the term {name!r} of {len(split.parts)} layers takes {size / 2**30:.1f} GiB; at most "
                f"{MAX_TERM_BYTES / 2**30:.0f} GiB is made at once. Ask for fewer: decompose_scores(..., layers=[0]), "
                "or .select(layers=[0]).terms[...]."
            )
        return torch.stack([parts.term(name) for parts in split.parts], dim=1)

    def __repr__(self) -> str:
        return f"Terms({', '.join(self)})"


@dataclass(frozen=True)
class Shares(Mapping[str, Tensor]):
    """The shares of one rank: by term, `[batch layer head query]`, from 0 to 1, together 1; NaN where undefined."""

    rank: int
    layers: tuple[int, ...]
    by_term: Mapping[str, Float[Tensor, "batch layer head query"]]
    key: Int[Tensor, "batch layer head query"]
    """The key of that rank in each row; −1 where the row sees fewer keys."""

    def __getitem__(self, name: str) -> Float[Tensor, "batch layer head query"]:
        return self.by_term[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_term)

    def __len__(self) -> int:
        return len(self.by_term)


@dataclass(frozen=True)
class Contrast(Mapping[str, Tensor]):
    """Score differences between two keys: by term, `[batch layer head]`; NaN where a key is hidden."""

    query: int
    key_a: int
    key_b: int
    layers: tuple[int, ...]
    by_term: Mapping[str, Float[Tensor, "batch layer head"]]
    words: tuple[tuple[str, str, str], ...]
    """The tokens at query, key_a and key_b of every sequence."""

    @property
    def total(self) -> Float[Tensor, "batch layer head"]:
        """score(query, key_a) − score(query, key_b)."""
        return torch.stack(list(self.by_term.values())).sum(dim=0)

    def explain(self, layer: int, head: int, sequence: int = 0) -> str:
        """One line: which key is preferred, by how much, and which terms make it so."""
        if layer not in self.layers:
            raise InputError(f"`layer` must be one of {list(self.layers)}; got {layer!r}.")
        index = self.layers.index(layer)
        head = index_of("head", head, self.total.shape[2])
        sequence = index_of("sequence", sequence, len(self.words))
        total = float(self.total[sequence, index, head])
        query, a, b = self.words[sequence]
        if math.isnan(total):
            return f"layer {layer} head {head}: {query!r} ({self.query}) cannot see both keys in this text"
        if total < 0:
            a, b = b, a
        sign = 1 if total >= 0 else -1
        parts = {name: sign * float(value[sequence, index, head]) for name, value in self.items()}
        listed = sorted(parts.items(), key=lambda item: -abs(item[1]))
        because = ", ".join(f"{name} {value:+.2f}" for name, value in listed if value)
        places = (self.key_a, self.key_b) if total >= 0 else (self.key_b, self.key_a)
        return (
            f"layer {layer} head {head}: {query!r} ({self.query}) prefers {a!r} ({places[0]}) to {b!r} ({places[1]}) "
            f"by {abs(total):.2f}, that is {math.exp(min(abs(total), 700)):.3g} times: {because or 'no term differs'}"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row a sequence and head: sequence, layer, head, a column a term, and total."""
        batch, _, heads = self.total.shape
        rows = [
            {"sequence": n, "layer": layer, "head": head}
            | {name: float(value[n, index, head]) for name, value in self.items()}
            | {"total": float(self.total[n, index, head])}
            for n in range(batch)
            for index, layer in enumerate(self.layers)
            for head in range(heads)
        ]
        return pd.DataFrame(rows)

    def __getitem__(self, name: str) -> Float[Tensor, "batch layer head"]:
        return self.by_term[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_term)

    def __len__(self) -> int:
        return len(self.by_term)


def _seen(parts: ScoreParts, real: Tensor) -> Bool[Tensor, "batch 1 query key"]:
    return parts.visible & real[:, None, :, None]


def _shares_of(parts: ScoreParts, ranks: int, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    total = parts.total()
    visible = _seen(parts, real).expand_as(total)
    keys = rank_keys(total, visible, ranks)
    terms = {name: parts.term(name) for name in parts.names_along_row()}
    return keys, term_shares(terms, visible, keys)


def _of_layers(terms: list[Tensor], heads: int) -> Float32[np.ndarray, "layer head query_or_1 key_or_1"]:
    """One term of several layers as one array, of length 1 where no layer's depends on the axis."""
    shape = np.broadcast_shapes(*(term.shape for term in terms), (heads, 1, 1))
    return torch.stack([term.expand(shape) for term in terms]).float().cpu().numpy()


def _notes(parts: ScoreParts) -> tuple[str, ...]:
    notes = []
    if parts.position is None:
        notes.append(
            "This model's scores have no position term: what it knows of position is in the stream, or turns its "
            "queries and keys (rotary), and so is part of query_key."
        )
    if parts.query_from_bias is None:
        notes.append("This model's queries have no bias, so its scores have no key_bias term.")
    elif parts.query_from_bias.ndim == 4:
        notes.append("Rotary: key_bias depends on the distance between query and key too, so figure 3 leaves it out.")
    return tuple(notes)
