"""What a model predicts and writes after a prompt, with and without edits of heads, and after two prompts."""

from itertools import compress

import pandas as pd
import torch

from ...draw.text import percent, quoted
from ...errors import InputError
from ...live.edits import Edits, best_of, compared, most_probable
from ...methods.answers.contrast_answers import at_rows, contrast_answers
from ...model.run.hooked import HookedModel
from ..terminal import Column, Rows, Summary
from .arguments import Edit


def predicted(model: HookedModel, text: str, edit: Edit | None) -> Summary:
    """The most probable next tokens, and the loss of every token."""
    read = compared(model, text, None if edit is None else _edits(edit))
    frame = pd.DataFrame({"token": read["tokens"], "loss": read["losses"][0]}).rename_axis("position").reset_index()
    if edit is not None:
        frame["loss_edited"] = read["losses"][1]
        frame["change"] = frame["loss_edited"] - frame["loss"]
    frame = frame.sort_values(frame.columns[-1], key=abs, ascending=False, kind="stable")
    columns = [Column("position"), Column("token"), *(Column(str(name), unit="nats") for name in frame.columns[2:])]
    shown = Rows("Tokens by their loss, or by how much the edits change it", frame, columns)
    following = [dict(zip(("token", "probability", "other"), entry, strict=False)) for entry in read["next"]]
    python = {"python": read["python"]} if edit else {}
    return Summary("predict", model, read["sentences"], shown, more={"next": following, **python})


def generated(model: HookedModel, prompt: str, count: int, edit: Edit | None) -> Summary:
    """The answer to a prompt; with edits, both answers and where they part."""
    if edit is None:
        text = model.generate(prompt, count)
        written = text.target or text
        answer = "".join(compress(written.tokens[0], written.is_answer[0].tolist()))
        shown = Rows("Answer", pd.DataFrame({"plain": [answer]}), [Column("plain")])
        return Summary("generate", model, [f"The model writes {quoted(answer)}."], shown)
    edits = _edits(edit)
    contrast = contrast_answers(model, prompt, edits.interventions(model, prompt), count)
    frame = contrast.answers.drop(columns="prompt")
    shown = Rows("Answers with and without the edits", frame, [Column(str(name)) for name in frame])
    sentence = f"If {edits.sentence}, {contrast.parted(0)}."
    return Summary("generate", model, [sentence], shown, more={"python": edits.python(count)})


def compared_prompts(model: HookedModel, prompt: str, other: str) -> Summary:
    """The next tokens after two prompts, and the heads whose attention from the last token differs most."""
    if not model.writes_tokens or not model.causal or len(model.stacks) > 1:
        raise InputError(f"prompts are compared in models of one stack that write text; {model.name} is not one.")
    batches = [model.encode(text) for text in (prompt, other)]
    patterns, log_probs = zip(*(at_rows(model, batch, batch.lengths.cpu() - 1) for batch in batches), strict=True)
    tokens = most_probable(model, torch.cat(log_probs).exp())
    best = f"{best_of(tokens)} after the first prompt, and {best_of(tokens, 1)} after the second"
    findings, notes = [f"The most probable next token is {best}."], list[str]()
    frame, lengths = pd.DataFrame(columns=["layer", "head", "shift"]), [len(batch.tokens[0]) for batch in batches]
    if lengths[0] != lengths[1]:
        notes.append(f"Attention is not compared: the prompts have {lengths[0]} and {lengths[1]} tokens.")
    else:
        shifts = (patterns[1] - patterns[0]).abs().sum(dim=-1)[..., 0] / 2
        heads = pd.MultiIndex.from_product([model.output_stack.layers, range(shifts.shape[1])], names=["layer", "head"])
        frame = pd.DataFrame({"shift": shifts.flatten().numpy()}, index=heads).reset_index()
        for name, batch, pattern in zip(("key", "other_key"), batches, patterns, strict=True):
            frame[name] = pattern[:, :, 0].argmax(dim=-1).flatten().numpy()
            frame[f"{name}_token"] = [batch.tokens[0][key] for key in frame[name]]
        frame = frame.sort_values("shift", ascending=False, kind="stable")
        layer, head, shift = next(frame[["layer", "head", "shift"]].itertuples(index=False))
        where = f"differs most in L{layer}H{head}: {percent(shift)} of it is on other keys"
        findings.append(f"The last token's attention {where}.")
    columns = [Column(str(name), unit="share" if name == "shift" else "") for name in frame]
    shown = Rows("Heads by the share of the last token's attention that differs", frame, columns)
    following = [dict(zip(("token", "probability", "other"), entry, strict=True)) for entry in tokens]
    return Summary("compare", model, findings, shown, notes, more={"next": following})


def _edits(edit: Edit) -> Edits:
    if not edit.prompt and any(head.way == "patch" for head in edit.heads):
        raise InputError('"patch" takes z from another prompt; name it in `prompt`.')
    return Edits.of(edit.model_dump() | {"heads": [(head.layer, head.head, head.way) for head in edit.heads]})
