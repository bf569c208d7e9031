"""What a model predicts and writes after a prompt, with and without edits of heads, and after two prompts."""

from itertools import compress
from typing import Any

import pandas as pd
import torch

from ...draw.text import percent, quoted
from ...errors import InputError
from ...live.edits import NEW_TOKENS, Edits, compared
from ...maths.float64 import as_float64
from ...methods.answers.contrast_answers import at_rows, contrast_answers
from ...model.run.hooked import HookedModel
from ..terminal import Column, Rows, Summary
from .arguments import Edit


def predicted(model: HookedModel, text: str, edit: Edit | None) -> Summary:
    """The most probable next tokens, and the loss of every token."""
    read = _read(model, text) if edit is None else compared(model, text, _edits(edit))
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


def _read(model: HookedModel, text: str) -> dict[str, Any]:
    """What `compared` returns, for a run without edits."""
    if not model.writes_tokens or not model.causal:
        raise InputError(f"next tokens are predicted by models that write text; {model.name} does not.")
    batch = model.encode(text)
    if batch.target is not None:
        batch = model.generate(batch, NEW_TOKENS)
    read = batch.target or batch
    log_probs = as_float64(model.run(batch, points=["logits"])["logits"][0]).cpu().log_softmax(dim=-1)
    losses = -log_probs[:-1].gather(1, read.ids[0].cpu()[1:, None])[:, 0]
    following = _most_probable(model, log_probs[-1:].exp())
    sentences = [f"The most probable next token is {_best(following, 1)}."]
    if len(losses):
        sentences.append(f"The mean loss of the text's tokens is {float(losses.mean()):.3f} nats.")
    losses_of_run = [None, *losses.tolist()]
    return {"sentences": sentences, "tokens": read.real_tokens[0], "losses": [losses_of_run], "next": following}


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
    return Summary("generate", model, [sentence], shown, more={"python": edits.python})


def compared_prompts(model: HookedModel, prompt: str, other: str) -> Summary:
    """The next tokens after two prompts, and the heads whose attention from the last token differs most."""
    if not model.writes_tokens or not model.causal or len(model.stacks) > 1:
        raise InputError(f"prompts are compared in models of one stack that write text; {model.name} is not one.")
    batches = [model.encode(text) for text in (prompt, other)]
    patterns, log_probs = zip(*(at_rows(model, batch, batch.lengths.cpu() - 1) for batch in batches), strict=True)
    tokens = _most_probable(model, torch.cat(log_probs).exp())
    best = f"{_best(tokens, 1)} after the first prompt, and {_best(tokens, 2)} after the second"
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


def _most_probable(model: HookedModel, runs: torch.Tensor) -> list[tuple[Any, ...]]:
    """The next tokens by the largest of their probabilities in all runs `[run vocab]`, with these."""
    ids = runs.amax(dim=0).topk(min(6, runs.shape[1])).indices  # `compared` lists six too
    return [*zip(model.position_texts(ids.tolist(), model.output_stack.label), *runs[:, ids].tolist(), strict=True)]


def _best(tokens: list[tuple[Any, ...]], run: int) -> str:
    best = max(tokens, key=lambda entry: entry[run])
    return f"{quoted(best[0])} ({percent(best[run], 0)})"
