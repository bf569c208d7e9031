"""Shows when head types appear: a small model learns to copy sequences, and its heads are measured at twelve steps.

    python examples/trajectory.py --out trajectory.html

Two layers with rotation, trained on random tokens that are repeated once. For the demo model's own training:

    python examples/demo_model/train.py --checkpoints 12
    python examples/trajectory.py --folders demo/checkpoints --out trajectory.html
"""

import argparse
import copy
from collections.abc import Container, Iterator
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import attnmech as am

VOCABULARY, STEPS, TEXTS = 40, 1000, 32
KEPT = (0, 100, 200, 250, 300, 350, 400, 450, 500, 600, 800, 1000)


def small_model() -> LlamaForCausalLM:
    """Two layers with rotation, untrained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def repeated(length: int) -> Tensor:
    """Texts of different random tokens, repeated once: token ids [text position]."""
    once = torch.rand(TEXTS, VOCABULARY - 3).argsort(dim=1)[:, :length] + 3
    return torch.cat((once, once), dim=1)


def second_copy_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The mean loss of the tokens of the second copies, in nats."""
    length = ids.shape[1] // 2
    logits = model(input_ids=ids).logits[:, length - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, length:].flatten())


def trained(
    model: LlamaForCausalLM, kept: Container[int] = KEPT, steps: int = STEPS
) -> Iterator[tuple[str, LlamaForCausalLM]]:
    """The model at each of the kept steps of its training, with the name of the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in track(range(steps + 1), "training", transient=True):
        if step in kept:
            yield f"{step}", copy.deepcopy(model).eval()
        second_copy_loss(model, repeated(int(torch.randint(6, 37, ())))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Prints a table of what appears at which step, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=Path, help="a folder of checkpoints step-*; a small model is trained without")
    parser.add_argument("--out", type=Path, default=Path("trajectory.html"))
    options = parser.parse_args()
    checkpoints = trained(small_model()) if options.folders is None else sorted(options.folders.glob("step-*"))
    run = am.trajectory(checkpoints, am.head_types)
    print("| step | previous | induction | prefix matching | copying | breadth |\n|---|---|---|---|---|---|")
    for step, *values in zip(
        run.steps, *(run[name].amax(dim=1) for name in ("previous", "induction", "matching", "copying")),
        run["broad"].mean(dim=1), strict=True,
    ):  # fmt: skip
        print(f"| {step} | {' | '.join(f'{value:.2f}' for value in values)} |")
    print(run.write_html(options.out))


if __name__ == "__main__":
    main()
