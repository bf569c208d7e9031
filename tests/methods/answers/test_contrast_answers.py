"""Answers, partings, probabilities and moved attention equal those of a greedy loop of full passes, text by text."""

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am

NEW = 6


def edits_of(model: am.HookedModel) -> list[am.Intervention]:
    stack = model.output_stack
    first, last = stack.layers[0], stack.layers[-1]
    return [am.Intervention.zero(heads, stack=stack.label) for heads in ([(first, 1), (last, 0)], [(last, 1)])]


def written_by(model: am.HookedModel, ids: Tensor, target: Tensor | None, edits: Any) -> list[int]:
    """The answer to one prompt, by full passes."""
    new: list[int] = []
    for _ in range(NEW):
        grown = torch.tensor([new], dtype=torch.long)
        inputs = (
            torch.cat((ids, grown), dim=1)
            if target is None
            else {"input_ids": ids, "decoder_input_ids": torch.cat((target, grown), dim=1)}
        )
        with model.intervene(*edits):
            new.append(int(model.run(inputs).logits[0, -1].argmax()))
        if new[-1] == model.config.eos_token_id:
            break
    return new


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "t5", "lfm2"])
def test_answers_are_contrasted_where_they_part(name: str) -> None:
    model, stack = models.hooked(name), models.hooked(name).output_stack
    ids, edits = torch.randint(3, 40, (5, 7), generator=torch.Generator().manual_seed(5)), edits_of(model)
    target = ids[:, :3] if "decoder" in model.stacks else None
    lengths = [7] * 5 if target is not None else [7, 5, 7, 4, 6]
    given = (
        {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor(lengths)[:, None]).long()}
        if target is None
        else {"input_ids": ids, "decoder_input_ids": target}
    )
    contrast = am.contrast_answers(model, given, edits, NEW)
    pattern, parted = stack.point("pattern"), 0
    for text, length in enumerate(lengths):
        prompt = ids[text : text + 1, :length], None if target is None else target[text : text + 1]
        one, other = (written_by(model, *prompt, changes) for changes in ((), edits))
        labels = [
            model.encoder.position_texts(answer, "decoder" if target is not None else "") for answer in (one, other)
        ]
        assert [contrast.plain[text], contrast.edited[text]] == labels
        at = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
        assert int(contrast.parting[text]) == at
        if at < 0:
            assert contrast.shifts[..., text].isnan().all() and contrast.log_probs[text].isnan().all()
            continue
        parted += 1
        so_far = torch.cat(
            ((prompt[0] if prompt[1] is None else prompt[1]), torch.tensor([one[:at]], dtype=torch.long)), dim=1
        )
        inputs: Any = so_far if prompt[1] is None else {"input_ids": prompt[0], "decoder_input_ids": so_far}
        rows, chances = [], []
        for context in (nullcontext(), model.intervene(*edits)):
            with context:
                acts = model.run(inputs, points=[pattern, "logits"])
            rows.append(torch.stack([acts[pattern, layer][0, :, -1] for layer in stack.layers]).double())
            chances.append(acts.logits[0, -1].log_softmax(dim=-1)[[one[at], other[at]]].double())
        moved = (rows[0] - rows[1]).abs().sum(dim=-1) / 2
        torch.testing.assert_close(contrast.shifts[..., text], moved, rtol=0, atol=2e-5)
        torch.testing.assert_close(contrast.log_probs[text], torch.stack(chances), rtol=0, atol=1e-4)
    assert parted > 0
    shift = contrast.shift[list(stack.layers)]
    torch.testing.assert_close(shift, contrast.shifts.nanmean(dim=-1), equal_nan=True)
    assert len(contrast.shift) == len(stack.places)
    assert (
        contrast.lead.startswith("If z of ") and f"the model answers {parted} of 5 prompts differently" in contrast.lead
    )


def test_an_edit_that_changes_nothing_parts_no_answer() -> None:
    model = models.hooked("gpt2")
    contrast = am.contrast_answers(
        model, models.token_ids("gpt2"), am.Intervention.scale("query_key", 1.0, [(0, 0)]), 3
    )
    assert contrast.parting.tolist() == [-1] * len(contrast.prompts) and contrast.shift.isnan().all()
    assert contrast.lead.endswith("differently.") and "answers 0 of" in contrast.lead
    assert contrast.answers["token"].isna().all() and "<table" in contrast.to_html()
    refuses("`interventions` must be an am.Intervention", am.contrast_answers, model, models.token_ids("gpt2"), [])
    refuses("`interventions` must be an am.Intervention", am.contrast_answers, model, models.token_ids("gpt2"), [5])
