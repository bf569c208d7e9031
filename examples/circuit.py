"""Finds the circuit with which a model continues repeated tokens, and measures how much of the task it does alone.

    python examples/circuit.py [MODEL] [--pairs 24]

A clean prompt has twelve random tokens, then the first six again: the next token is the seventh. In the corrupted
prompt, the seventh is another token, so the answer is another one. Edges are estimated by gradients and by integrated
gradients; the strongest 20, and 20 at random, are patched exactly. Circuits of several sizes are then run with all
other edges patched.
"""

import argparse

import torch
from rich.console import Console

import attnmech as am

SIZES = (20, 50, 100, 200, 500, 1000)


def main() -> None:
    """Prints what the estimates say, and how faithful circuits are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder or a GGUF file; by default the demo model")
    parser.add_argument("--pairs", type=int, default=24, help="of prompts (default %(default)s)")
    chosen = parser.parse_args()
    model = am.load(chosen.model) if chosen.model else am.load()
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.n_vocab // 10, model.n_vocab, (chosen.pairs, 13), generator=drawn)
    first, other = tokens[:, :12], tokens[:, 12]
    clean = torch.cat([first, first[:, :6]], dim=1)
    corrupted = clean.clone()
    corrupted[:, 6] = other
    answers = {"answers": first[:, 6], "against": other}
    console = Console(width=None if Console().is_terminal else 200)
    console.print(repr(model), highlight=False)
    for method in ("gradient", "integrated"):
        edges = am.attribute(
            model, clean, corrupted, nodes="heads+mlps", edges=True, method=method, confirm=20, **answers
        )
        console.rule(method)
        console.print(edges.lead, highlight=False)
        console.print(edges.strongest(8)[["sender", "receiver", "effect", "exact"]].to_string(), highlight=False)
        sizes = [size for size in SIZES if size < len(edges.edges)]
        kept = am.faithfulness(model, [edges.circuit(size) for size in sizes], clean, corrupted, **answers)
        columns = ["size", "faithfulness", "faithfulness_low", "faithfulness_high", "completeness"]
        console.print(kept.to_frame()[columns].round(3).to_string(), highlight=False)


if __name__ == "__main__":
    main()
