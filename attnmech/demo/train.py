"""Train the demo model from nothing: `python -m attnmech.demo.train --out FOLDER`."""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.optim.lr_scheduler import LambdaLR
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from attnmech.demo.sequences import batch
from attnmech.demo.tokenizer import build_tokenizer

PROBE_STEPS = 20
"""Steps that are timed to learn how many fit into the minutes given."""


@dataclass(frozen=True)
class Settings:
    """What decides the weights, besides the grammar."""

    seed: int = 0
    steps: int = 5000
    layers: int = 4
    heads: int = 8
    width: int = 160
    batch_size: int = 32
    length: int = 64
    learning_rate: float = 2e-3
    warm_up: int = 200
    weight_decay: float = 0.01


def train(
    settings: Settings,
    tokenizer: PreTrainedTokenizerFast,
    after_step: Callable[[int, BloomForCausalLM, float], None],
) -> BloomForCausalLM:
    """A trained model; the same settings give the same weights on the same kind of machine.

    `after_step(step, model, loss)` is called with step 0 before the first update (loss NaN), then after each.
    Forward passes run in bfloat16 where that loses little; the weights and their updates are float32.
    """
    rng = Random(settings.seed)
    model = new_model(settings, tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda step: learning_rate_share(step, settings))
    after_step(0, model, math.nan)
    for step in range(1, settings.steps + 1):
        tokens = batch(tokenizer, rng, size=settings.batch_size, length=settings.length)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        after_step(step, model, loss.item())
    return model


def new_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> BloomForCausalLM:
    """The model before training, with weights drawn from the seed."""
    torch.manual_seed(settings.seed)
    config = BloomConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = BloomForCausalLM(config)
    model.train()
    return model


def learning_rate_share(step: int, settings: Settings) -> float:
    """The share of the highest learning rate at a step: a linear rise, then half a cosine down to 0.

    >>> settings = Settings(steps=300, warm_up=100)
    >>> [round(learning_rate_share(step, settings), 2) for step in (0, 50, 100, 200, 300)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if step < settings.warm_up:
        return step / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return (1 + math.cos(math.pi * done)) / 2


def checkpoint_steps(steps: int, *, count: int = 12) -> tuple[int, ...]:
    """Step 0 and about `count` more, evenly spaced in the logarithm, the last one included.

    >>> checkpoint_steps(1000, count=4)
    (0, 1, 10, 100, 1000)
    """
    spaced = {round(steps ** (place / (count - 1))) for place in range(count)}
    return (0, *sorted(spaced))


def save(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer in the Hugging Face format."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def steps_in(minutes: float, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> int:
    """How many training steps take that long here, judged by the first few."""
    started = time.perf_counter()
    train(replace(settings, steps=PROBE_STEPS), tokenizer, lambda step, model, loss: None)
    return max(1, round(PROBE_STEPS * 60 * minutes / (time.perf_counter() - started)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m attnmech.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--steps", type=int, default=Settings.steps, help="training steps (default %(default)s)")
    amount.add_argument("--minutes", type=float, help="instead of steps: as many as fit into this time")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="decides weights and texts")
    parser.add_argument("--checkpoints", type=Path, help="folder for 13 models along the way, log-spaced")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (default %(default)s)")
    chosen = parser.parse_args(arguments)

    torch.set_num_threads(chosen.threads)
    tokenizer = build_tokenizer()
    settings = Settings(seed=chosen.seed, steps=chosen.steps)
    if chosen.minutes is not None:
        settings = replace(settings, steps=steps_in(chosen.minutes, settings, tokenizer))
    kept = checkpoint_steps(settings.steps) if chosen.checkpoints else ()

    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=settings.steps, loss="")

        def after_step(step: int, model: BloomForCausalLM, loss: float) -> None:
            progress.update(task, completed=step, loss=f"loss {loss:.3f}")
            if step in kept:
                save(model, tokenizer, chosen.checkpoints / f"step-{step:06d}")

        model = train(settings, tokenizer, after_step)
    save(model, tokenizer, chosen.out)
    print(f"{settings.steps} steps, seed {settings.seed}: {chosen.out}")


if __name__ == "__main__":
    main()
