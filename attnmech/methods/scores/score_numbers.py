"""The numbers of figures 1 to 3 for one text: scores, terms and shares as arrays for drawing."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from ...basics.nouns import TEXT, Nouns
from ...draw.numbers import ScoreNumbers
from ...maths.scores import ScoreParts, names_along_row, ranked_shares
from ...maths.softmax import softmax_of


def score_numbers(
    text: Sequence[ScoreParts],
    *,
    layers: tuple[int, ...],
    tokens: tuple[str, ...],
    keys: tuple[str, ...] = (),
    ranks: int,
    pattern: Float[Tensor, "layer head query key"] | None,
    notes: tuple[str, ...],
    nouns: Nouns = TEXT,
) -> ScoreNumbers:
    """Computes the numbers of a text from its score parts in each layer.

    If `pattern` is None, figures show the softmax of the scores. `keys` are the key tokens if they belong to another
    text.
    """
    rows, length, heads = len(tokens), len(keys or tokens), text[0].query.shape[1]
    names = names_along_row(text)
    by_key = [
        name for name in names
        if all(name in parts.names_along_row() and not parts.differs_by_query(name) for parts in text)
    ]  # fmt: skip
    # Under rotation no term depends on the key alone; centred terms are shown for the last query.
    by_last = [name for name in names if name in ("position", "key_bias")] if text[0].centred and not by_key else []
    scores, patterns, ranked_keys, shares, key_terms, terms = [], [], [], [], [], []
    for parts in text:
        total = parts.total()
        hidden = ~parts.visible.expand_as(total)
        scores.append(total.masked_fill(hidden, torch.nan)[0])
        if pattern is None:
            attention = softmax_of(total.masked_fill(hidden, torch.finfo(total.dtype).min), parts.sink)
            patterns.append(attention.masked_fill(hidden, 0.0)[0])
        ranked, share = ranked_shares(parts, names, ranks, parts.visible)
        ranked_keys.append(ranked[0])
        shares.append({name: value[0] for name, value in share.items()})
        unseen = hidden[0, :, -1] if by_last else torch.zeros_like(hidden[0, :, -1])
        last = slice(rows - 1, rows)
        key_terms.append(
            {
                name: parts.term(name, last)[0, :, 0].expand(heads, length).masked_fill(unseen, torch.nan)
                for name in by_key or by_last
            }
        )
        terms.append({name: parts.term(name)[0] for name in parts.names() if name != "mask"})
    return ScoreNumbers(
        tokens=tokens,
        keys=keys,
        layers=layers,
        scores=_stacked(scores),
        pattern=_stacked(patterns) if pattern is None else pattern.float().cpu().numpy(),
        ranked_key=torch.stack(ranked_keys).int().cpu().numpy(),
        ranked_share={name: _stacked([share[name] for share in shares]) for name in shares[0]},
        key_terms={name: _stacked([term[name] for term in key_terms]) for name in key_terms[0]},
        key_terms_of_last=bool(by_last),
        notes=notes,
        nouns=nouns,
        terms={name: _of_layers([term[name] for term in terms], heads) for name in terms[0]},
    )


def _stacked(values: Sequence[Tensor]) -> Float32[np.ndarray, "layer head *rest"]:
    stacked: Float32[np.ndarray, "layer head *rest"] = torch.stack(list(values)).float().cpu().numpy()
    return stacked


def _of_layers(terms: list[Tensor], heads: int) -> Float32[np.ndarray, "layer head query_or_1 key_or_1"]:
    """Stacks one term of several layers; an axis along which the term varies in no layer has length 1."""
    shape = np.broadcast_shapes(*(term.shape for term in terms), (heads, 1, 1))
    return torch.stack([term.expand(shape) for term in terms]).float().cpu().numpy()
