"""Checks, in a reducer, the terms of a layer's scores against the scores, block by block."""

from torch import Tensor

from ..errors import InputError
from ..maths.scores import ScoreParts
from ..model.attention.observed import RowBlock
from ..model.stack.centring import Centre
from ..model.stack.ledger import ScoreAudit
from .reducer import Reducer, Run


class ScoreAudits:
    """The audits of the layers that a batch has begun. Needs the point `attn_in`."""

    def __init__(self) -> None:
        self._audits: dict[int, ScoreAudit] = {}

    @classmethod
    def of(cls, run: Run, reducer: Reducer) -> "ScoreAudits":
        """The audits of a reducer, which a run keeps between blocks."""
        audits: ScoreAudits = run.between.setdefault(reducer, cls())
        return audits

    def parts(self, run: Run, block: RowBlock, centre: Centre | None) -> ScoreParts:
        """The ledger of the block's layer, split at reference means unless `centre` is None."""
        if block.layer not in self._audits:
            everywhere = block.visible.new_ones(1).expand(len(block.q), 1, block.mask.queries, block.k.shape[2])
            self._audits[block.layer] = ScoreAudit(run.model.stacks, block, block["attn_in"], everywhere, centre=centre)
        return self._audits[block.layer].parts

    def add(self, block: RowBlock, total: Tensor) -> None:
        """Compares the terms' sum with the scores; at a layer's end, `ExactnessError` if rounding cannot explain it."""
        self._audits[block.layer].add(block, total)
        if block.rows.stop == block.mask.queries:
            self._audits.pop(block.layer).require_exact()


def require_whole(run: Run, centre: Centre | None) -> None:
    """Raises `InputError` for means by position over the texts of a corpus."""
    if centre == "position" and run.corpus:
        raise InputError(
            'centre="position" takes means over texts that run together, but a corpus runs in batches; give fixed '
            "means: centre=am.mean_qk(model, corpus, per_position=True)."
        )
