"""Train the demo model from scratch: `python examples/demo_model/train.py`."""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from checkpoint import Checkpoint
from language.sequences import batch
from language.tokenizer import build_tokenizer
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from attnmech.basics.messages import first_line
from attnmech.errors import AttnmechError


@dataclass(frozen=True)
class Settings:
    """What determines the weights, besides the grammar."""

    seed: int = 0
    steps: int = 8000
    layers: int = 4
    heads: int = 8
    width: int = 192
    batch_size: int = 32
    length: int = 128
    learning_rate: float = 2e-3
    warm_up: int = 300
    cool_down: float = 0.3
    """The share of the steps, at the end, in which the learning rate falls to 0."""
    weight_decay: float = 0.01


def train(
    settings: Settings,
    tokenizer: PreTrainedTokenizerFast,
    after_step: Callable[[int, BloomForCausalLM, float], None],
    *,
    until: int | None = None,
    device: str = "cpu",
    journal: Path | None = None,
    every: int = 250,
) -> BloomForCausalLM:
    """A trained model; the same settings give the same weights on the same kind of machine.

    `after_step(step, model, loss)` is called with step 0 before the first update (loss NaN), then after each.
    `until` ends the run early, with the weights that the whole run has after that step.
    `journal` is a file to which the run is saved every `every` steps; if it exists, the run resumes from it
    and ends with the same weights as if it had not been interrupted.
    Matrix products run in bfloat16 where that loses little; the weights and their updates are float32.
    """
    rng = Random(settings.seed)
    model = new_model(settings, tokenizer)
    model.to(torch.device(device))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay, fused=True
    )
    kept = Checkpoint(journal, asdict(settings)) if journal else None
    done = kept.resume(model, optimizer, rng) if kept else 0
    if not done:
        after_step(0, model, math.nan)
    for step in range(done + 1, (settings.steps if until is None else until) + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_share(step - 1, settings)
        tokens = batch(tokenizer, rng, size=settings.batch_size, length=settings.length).to(device)
        loss = next_word_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        after_step(step, model, loss.item())
        if kept and step % every == 0:
            kept.write(step, model, optimizer, rng)
    if kept:
        kept.remove()
    return model


def next_word_loss(model: BloomForCausalLM, tokens: Tensor) -> Tensor:
    """The mean of −ln p of each token but the first, with no [batch position vocabulary] array in float32.

    Saves about a quarter of a step's time on a CPU, compared with `model(input_ids=tokens, labels=tokens).loss`.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16):
        stream = model.transformer(input_ids=tokens, use_cache=False).last_hidden_state
    before = stream[:, :-1].flatten(0, 1).bfloat16()
    weight = model.lm_head.weight.bfloat16()
    return torch.nn.functional.linear_cross_entropy(before, weight, tokens[:, 1:].flatten())


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
    """The share of the highest learning rate at a step: a linear rise, a plateau, a linear fall to 0.

    Until the fall begins it does not depend on the number of steps, so a short run is the beginning of a long one.

    >>> settings = Settings(steps=1000, warm_up=100, cool_down=0.4)
    >>> [round(learning_rate_share(step, settings), 2) for step in (0, 50, 100, 600, 800, 1000)]
    [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    fall = settings.cool_down * settings.steps
    return max(0.0, min(step / max(1, settings.warm_up), 1.0, (settings.steps - step) / max(1.0, fall)))


def checkpoint_steps(steps: int, count: int) -> tuple[int, ...]:
    """`count` steps from 0 to `steps`, at equal ratios after the first; fewer if there are not enough steps.

    >>> checkpoint_steps(1024, 6), checkpoint_steps(8000, 12)
    ((0, 4, 16, 64, 256, 1024), (0, 2, 5, 12, 26, 59, 135, 305, 690, 1561, 3534, 8000))
    """
    ratio = steps ** (1 / (count - 1))
    return (0, *sorted({round(ratio**place) for place in range(1, count)}))


def save(
    model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write model and tokenizer in the Hugging Face format, with weights rounded to `dtype`.

    The config keeps float32, the precision in which transformers runs the model.
    """
    # `named_parameters` lists the tied embeddings once; `state_dict` would store them twice after rounding.
    weights = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the trained model (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=Settings.steps, help="training steps (default %(default)s)")
    parser.add_argument("--until", type=int, help="stop after this step (default: the last of --steps)")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of weights and texts")
    parser.add_argument("--checkpoints", type=int, help="how many models to keep on the way, in OUT/checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="processor threads (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to train, for example cuda (default %(default)s)")
    chosen = parser.parse_args(arguments)
    for name in ("steps", "until", "threads", "checkpoints"):
        if (number := getattr(chosen, name)) is not None and number < 1:
            parser.error(f"--{name} must be at least 1; got {number}")
    try:
        torch.zeros(1, device=chosen.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {chosen.device} cannot be used here ({first_line(error)}); try cpu")

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(chosen.threads)
    tokenizer = build_tokenizer()
    settings = Settings(seed=chosen.seed, steps=chosen.steps)
    last = settings.steps if chosen.until is None else min(chosen.until, settings.steps)
    kept = checkpoint_steps(last, max(2, chosen.checkpoints)) if chosen.checkpoints else ()
    journal = chosen.out / "unfinished.safetensors"
    if journal.exists():
        print(f"resuming from {journal}")

    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    started = time.perf_counter()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=last, loss="")

        def after_step(step: int, model: BloomForCausalLM, loss: float) -> None:
            progress.update(task, completed=step, loss=f"loss {loss:.3f}")
            if step in kept:
                save(model, tokenizer, chosen.out / "checkpoints" / f"step-{step:06d}")

        try:
            model = train(settings, tokenizer, after_step, until=last, device=chosen.device, journal=journal)
        except AttnmechError as error:
            parser.exit(2, f"{error}\n")
        except KeyboardInterrupt:
            parser.exit(130, "stopped; the same command resumes from the last state saved.\n")
    save(model, tokenizer, chosen.out, torch.bfloat16)
    minutes = (time.perf_counter() - started) / 60
    print(f"{last} of {settings.steps} steps, seed {settings.seed}, {minutes:.1f} minutes: {chosen.out}")


if __name__ == "__main__":
    main()
