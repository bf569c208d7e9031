"""The answers that a model writes with and without an edit: where they part, and which heads attend otherwise there.

Formulas: docs/formulas.md#answers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, takewhile
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...basics.arguments import listed, shown, whole_number
from ...basics.public import public
from ...batch import Batch
from ...draw.section import Section
from ...draw.text import percent, quoted, with_minus_signs
from ...errors import InputError
from ...interventions import Intervention
from ...maths.copies import copies_of
from ...maths.float64 import as_float64
from ...maths.intervals import TextMeans
from ...maths.statistic import Statistic
from ...model.attention.observed import RowBlock
from ...model.inputs.encoder import Inputs
from ...model.parts.hashes import batch_hash
from ...model.run.hooked import HookedModel, require_model
from ...results.by_layer import OfLayers
from ...results.provenance import Provenance
from ...results.quantity import Places
from ...results.table import Table
from ...runs.progress import Steps, steps


@dataclass(frozen=True, repr=False)
class AnswerContrast(Table, OfLayers):
    """Answers with and without an edit, and by head the change of attention where they part. Intervals are over
    prompts.

    Up to the parting both texts are the same, so the row that predicts the first different token belongs to the same
    token in both runs.
    """

    _TITLE = "Answers of {model} with and without an edit"
    _SUBTRACT: ClassVar[str] = "compare their `shift`"
    _MAIN = "shift"
    _SAMPLE = "prompt"
    _is_about_heads: ClassVar[bool] = False
    _AXES: ClassVar = {"text": "prompts", "layer": "layers"}
    shift = Statistic(
        meaning="Half of Σ_j |p′_ij − p_ij| in the row that predicts the parting: the share of attention that moved.",
        label="attention moved",
        unit="share",
        printed=True,
        axes="layer head",
    )

    edits: tuple[str, ...]
    layers: tuple[int, ...]
    n_layers: int
    prompts: tuple[tuple[str, ...], ...]
    """The tokens of each prompt."""
    plain: tuple[tuple[str, ...], ...]
    """The tokens of each answer without the edit."""
    edited: tuple[tuple[str, ...], ...]
    """The tokens of each answer with the edit."""
    parting: Int[Tensor, " text"]
    """The number of the first token of the answer that differs; -1 where none does."""
    log_probs: Float[Tensor, "text run=2 token=2"]
    """ln p of the token without the edit and of that with it, in both runs, at the parting; NaN where there is none."""
    shifts: Float[Tensor, "layer head text"]
    provenance: Provenance

    @property
    def answers(self) -> pd.DataFrame:
        """One row per text: prompt, both answers, and at the parting its number, both tokens and their probabilities in
        both runs (`p_plain_edited` is that of the plain token in the edited run).
        """
        rows = []
        for text, at in enumerate(self.parting.tolist()):
            answers = self.plain[text], self.edited[text]
            tokens = [answer[at] if at >= 0 else None for answer in answers]
            chances = self.log_probs[text].double().exp().flatten().tolist()
            rows.append(["".join(self.prompts[text]), *map("".join, answers), at, *tokens, *chances])
        runs = "p_plain_plain", "p_edited_plain", "p_plain_edited", "p_edited_edited"
        return pd.DataFrame(rows, columns=["prompt", "plain", "edited", "parting", "token", "edited_token", *runs])

    def _by_text(self, name: str) -> TextMeans:
        return TextMeans.of_values(self.shifts)

    @property
    def _places(self) -> Places:
        return Places.of_heads(self.layers, self.shifts.shape[1], self.n_layers)

    @property
    def _n_texts(self) -> int:
        return len(self.prompts)

    def parted(self, text: int) -> str:
        """Where the two answers to a prompt part, as the end of a sentence."""
        row = self.answers.iloc[text]
        if row["parting"] < 0:
            return "the model writes the same"
        return (
            f"the model writes {quoted(row['edited_token'])} instead of {quoted(row['token'])} as token "
            f"{row['parting'] + 1} (probability {percent(row['p_edited_plain'], 0)} without the edit, "
            f"{percent(row['p_edited_edited'], 0)} with it)"
        )

    @property
    def lead(self) -> str:
        parted = int((self.parting >= 0).sum())
        answers = self.parted(0)
        if len(self.parting) > 1:
            answers = f"the model answers {parted} of {self._texts} differently"
            if parted:
                first = int((self.parting >= 0).int().argmax())
                answers = f"{answers}: after prompt {first}, {self.parted(first)}"
        if parted:
            largest = self._largest("shift", what="shift of attention", signed=False)
            answers = f"{answers}; where answers part, {largest}"
        return with_minus_signs(f"If {' and '.join(self.edits)}, {answers}.")

    @property
    def _table(self) -> pd.DataFrame:
        return self.answers

    def _sections(self) -> "Sequence[Section]":
        if not bool((self.parting >= 0).any()):
            return []
        reading = (
            "The share of attention that moved in the row that predicts the first different token, mean over prompts."
        )
        return [Section("Attention where the answers part", reading, {"shift": self.plot()}, "contrast.plot()")]


@public
def contrast_answers(
    model: HookedModel,
    inputs: Inputs,
    interventions: Intervention | Iterable[Intervention],
    max_new_tokens: int = 20,
    *,
    bos: bool | None = None,
) -> AnswerContrast:
    """Continues prompts with and without edits: where the answers part, and how much attention moved there.

    >>> import attnmech as am
    >>> model, prompts = am.load(), ["Anna gave an old anchor", "The keys to the old chest", "Tom met the"]
    >>> contrast = am.contrast_answers(model, prompts, am.Intervention.zero([(2, 6)]), 8)
    >>> contrast.shift.shape, contrast.answers["parting"].tolist()
    (torch.Size([4, 8]), [2, 4, -1])

    Both answers are greedy. Up to the first different token they are the same, so the row that predicts it can be
    compared between the two runs. Edits that are in force already act on both.

    Args:
        model: a model that writes text.
        inputs: prompts, as in `model.generate`.
        interventions: one intervention or several, applied together.
        max_new_tokens: the largest number of tokens of an answer.
        bos: whether each text begins with the tokenizer's BOS or CLS token.

    Returns:
        Both answers to each prompt (`answers`), and by head the share of attention that moved (`shift`).

    Raises:
        InputError: for no edits, and as `model.generate` does.
    """
    require_model(model)
    count = whole_number("max_new_tokens", max_new_tokens, least=1)
    wanted = "an am.Intervention, or a list of them"
    changes = (
        [interventions] if isinstance(interventions, Intervention) else listed("interventions", interventions, wanted)
    )
    if not changes or not all(isinstance(change, Intervention) for change in changes):
        raise InputError(f"`interventions` must be {wanted}; got {shown(interventions)}.")
    batch = model.encode(inputs, bos=bos)
    with steps("tokens", 2 * count, show=False) as bar:
        seen = [partial(_seen, bar)]
        plain = model.generate(batch, count, stopping_criteria=seen)
        bar.reach(count)
        with model.intervene(*changes):
            edited = model.generate(batch, count, stopping_criteria=seen)
    answers, other_answers = (_answers(text.target or text) for text in (plain, edited))
    parting = torch.tensor([_parting(*pair) for pair in zip(plain.answer_ids, edited.answer_ids, strict=True)])
    written, stack = plain.target or plain, model.output_stack
    rows = torch.tensor(written.prompt_lengths) + parting - 1
    there = (parting >= 0).nonzero()[:, 0]
    log_probs = torch.full((len(parting), 2, 2), torch.nan, dtype=torch.float64)
    shifts = torch.full((len(stack.layers), stack.n_heads, len(parting)), torch.nan, dtype=torch.float64)
    if len(there):
        tokens = torch.tensor(
            [[text.answer_ids[place][parting[place]] for text in (plain, edited)] for place in there.tolist()]
        )
        one, logits = at_rows(model, plain.texts(there), rows[there])
        with model.intervene(*changes):
            other, changed = at_rows(model, plain.texts(there), rows[there])
        log_probs[there] = torch.stack([of_run.gather(1, tokens) for of_run in (logits, changed)], dim=1)
        shifts[..., there] = (other - one).abs().sum(dim=-1) / 2
    provenance = model.provenance(
        batch_hash(batch), batch.tokens, {"edits": [*map(str, changes)], "max_new_tokens": count, "bos": batch.bos},
        copies_of(batch.digests.tolist()) if len(batch.ids) > 1 else (),
    )  # fmt: skip
    return AnswerContrast(
        tuple(map(str, changes)), stack.layers, len(stack.places), batch.real_tokens, answers, other_answers, parting,
        log_probs, shifts, provenance,
    )  # fmt: skip


def _seen(bar: Steps, ids: Int[Tensor, "text position"], _: Any) -> Bool[Tensor, " text"]:
    """Counts a token of each answer, and ends none; a stopping criterion of transformers."""
    bar.advance(1)
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def _answers(text: Batch) -> tuple[tuple[str, ...], ...]:
    of_text = zip(text.tokens, text.is_answer.tolist(), strict=True)
    return tuple(tuple(compress(row, written)) for row, written in of_text)


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of the first token that differs; -1 if one answer begins with the other."""
    alike = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    return alike if alike < min(len(one), len(other)) else -1


def at_rows(
    model: HookedModel, batch: Batch, rows: Int[Tensor, " text"]
) -> tuple[Float[Tensor, "layer head text key"], Float[Tensor, "text vocab"]]:
    """The pattern and the log-probabilities of one row of each text."""
    stack, texts = model.output_stack, torch.arange(len(rows))
    keys = batch.keys(stack.label).ids.shape[1]
    patterns = torch.zeros(len(stack.layers), stack.n_heads, len(rows), keys, dtype=torch.float64)

    def read(block: RowBlock) -> None:
        for text, row in enumerate(rows.tolist()):
            if block.stack == stack.label and row in block.rows:
                pattern = as_float64(block.pattern[text, :, row - block.rows.start]).cpu()
                patterns[stack.layers.index(block.layer), :, text, : pattern.shape[-1]] = pattern

    values = model.forward(batch, captures=[("logits", None)], rows=[read])
    return patterns, as_float64(values["logits", None][texts, rows]).cpu().log_softmax(dim=-1)
