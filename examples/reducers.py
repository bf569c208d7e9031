"""Two reducers for `am.stream`: statistics that are computed while the model runs.

    python examples/reducers.py

`LargestScore` finds the largest score of each head; `TopPairs` the query-key pairs that match best, head by head, over
a corpus, with the texts around them. Both see the blocks of one forward pass, and neither keeps more than its
answer. The corpus is a hundred documents of the language that the demo model was trained on.
"""

from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import attnmech as am
from attnmech.demo.text import documents

DOCUMENTS = 100
NOTHING = -1
"""Fills the places of a window without a token."""


def counted(scores: Tensor, block: am.reducers.RowBlock) -> Tensor:
    """The scores of a block, −∞ at padding and at keys that a row may not see."""
    return scores.masked_fill(~(block.visible & block.real[:, None, :, None]), -torch.inf)


def matches(block: am.reducers.RowBlock) -> Tensor:
    """The scores of a block without the model's own position term, which would make them grow with the text."""
    if block.position is None:
        return block.scores
    # The position term may have a single row for all queries.
    rows = slice(None) if block.position.shape[2] == 1 else slice(block.rows.start, block.rows.stop)
    return block.scores - block.position[:, :, rows, : block.scores.shape[-1]]


class LargestScore(am.Reducer):
    """The largest score of each head, to compare with the range of half precision."""

    def start(self, run: am.reducers.Run) -> dict[str, Tensor]:
        """No score yet."""
        return {"largest": torch.full((run.n_layers, run.n_heads), -torch.inf, device=run.model.device)}

    def add(self, state: dict[str, Tensor], block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        """Keeps the larger of the score so far and the largest score of this block."""
        here = counted(block.scores, block).amax(dim=(0, 2, 3))
        state["largest"][block.index] = torch.maximum(state["largest"][block.index], here)

    def merge(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
        """The larger score of two parts."""
        return {"largest": torch.maximum(one["largest"], other["largest"])}


class TopPairs(am.Reducer):
    """The `count` query-key pairs that match best in each head, with `around` tokens on both sides of each.

    A state holds "score" `[layer head place]`, "pair" `[layer head place 3]` (document, query, key) and "window"
    `[layer head place side token]`, the token ids around query and key. Scores are finite, so a place whose score is
    −∞ is empty. Among equal pairs, any may be left out.
    """

    def __init__(self, count: int = 3, around: int = 2) -> None:
        self.count, self.around = count, around

    def start(self, run: am.reducers.Run) -> dict[str, Tensor]:
        """Empty places."""
        places, device = (run.n_layers, run.n_heads, self.count), run.model.device
        return {
            "score": torch.full(places, -torch.inf, device=device),
            "pair": torch.full((*places, 3), NOTHING, device=device),
            "window": torch.full((*places, 2, 2 * self.around + 1), NOTHING, device=device),
        }

    def add(self, state: dict[str, Tensor], block: am.reducers.RowBlock, run: am.reducers.Run) -> None:
        """Keeps the best pairs among those so far in this layer and those of this block."""
        scores = counted(matches(block), block).transpose(0, 1)
        score, place = scores.flatten(1).topk(min(self.count, scores[0].numel()))
        text, row, key = torch.unravel_index(place, scores.shape[1:])
        query = row + block.rows.start
        looking, looked_at = block.batch.queries(block.stack), block.batch.keys(block.stack)
        best_here = {
            "score": score.to(state["score"].dtype),
            "pair": torch.stack((run.documents.to(text.device)[text], query, key), dim=-1),
            "window": torch.stack((self._around(looking, text, query), self._around(looked_at, text, key)), dim=-2),
        }
        best = self._best({name: value[block.index] for name, value in state.items()}, best_here, head=0)
        for name, value in best.items():
            state[name][block.index] = value

    def merge(self, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
        """The best pairs of both parts."""
        return self._best(one, other, head=1)

    def finish(self, state: dict[str, Tensor], source: am.reducers.Source) -> pd.DataFrame:
        """A row for each pair: layer, head, score, document, query, key, and the texts around query and key."""
        rows = []
        for index, head, place in state["score"].isfinite().nonzero().tolist():
            at = index, head, place
            pair = dict(zip(("document", "query", "key"), state["pair"][at].tolist(), strict=True))
            windows = (self._text(source, window) for window in state["window"][at])
            texts = dict(zip(("query_text", "key_text"), windows, strict=True))
            score = float(state["score"][at])
            rows.append({"layer": source.layers[index], "head": head, "score": score, **pair, **texts})
        return pd.DataFrame(rows)

    def _best(self, one: dict[str, Tensor], other: dict[str, Tensor], head: int) -> dict[str, Tensor]:
        """The `count` best pairs of two states, whose axis of places follows the axis `head`."""
        both = {name: torch.cat((one[name], other[name]), dim=head + 1) for name in one}
        order = both["score"].topk(self.count, dim=head + 1).indices
        return {name: _gathered(value, order) for name, value in both.items()}

    def _around(self, batch: Any, text: Tensor, position: Tensor) -> Tensor:
        """The token ids from `around` before a position to `around` after it."""
        ids = batch.ids.masked_fill(~batch.mask, NOTHING)
        ids = torch.nn.functional.pad(ids, (self.around, self.around), value=NOTHING)
        reach = torch.arange(2 * self.around + 1, device=ids.device)
        return ids[text[..., None], position[..., None] + reach]

    def _text(self, source: am.reducers.Source, window: Tensor) -> str:
        """A window as text, with its token in brackets."""
        there = window != NOTHING
        (tokens,) = source.model.encode(window[there]).tokens
        middle = int(there[: self.around].sum())
        return "".join(f" [{token.strip()}]" if place == middle else token for place, token in enumerate(tokens))


def _gathered(values: Tensor, order: Tensor) -> Tensor:
    """The places of `order` on its last axis, which further axes of `values` may follow."""
    further = values.shape[order.ndim :]
    index = order.reshape(*order.shape, *(1 for _ in further)).expand(*order.shape, *further)
    return values.gather(order.ndim - 1, index)


def main() -> None:
    """Prints the largest score of every head, and the best pairs of one head of each layer."""
    disable_progress_bar()
    model = am.load()
    largest, pairs = am.stream(model, iter(documents(DOCUMENTS)), [LargestScore(), TopPairs()])
    heads = Table("layer", *(f"head {head}" for head in range(model.n_heads)), title="largest score")
    for layer, scores in enumerate(largest["largest"].tolist()):
        heads.add_row(str(layer), *(f"{score:.1f}" for score in scores))
    shown = Table("head", "score", "document", "query", "key", title="pairs that match best")
    best = pairs.loc[pairs.groupby("layer")["score"].idxmax(), ["layer", "head"]]
    for row in pairs.merge(best).itertuples():
        shown.add_row(f"L{row.layer}H{row.head}", f"{row.score:.2f}", str(row.document), row.query_text, row.key_text)
    for table in (heads, shown):
        # Brackets are part of the text here.
        Console(width=120, markup=False).print(table)


if __name__ == "__main__":
    main()
