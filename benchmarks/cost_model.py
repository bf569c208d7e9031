"""Predicts the cost of each method: multiplications, score cells and bytes for a model and a length, and seconds.

    python benchmarks/cost_model.py --measure                     # this machine's constants, in half a minute
    python benchmarks/cost_model.py                               # predicted beside measured, over benchmarks/results
    python benchmarks/cost_model.py --model 7b --tokens 32768     # a prediction for another model

docs/how/cost.md has the formulas. The parts of a step run in sequence, so its time is the sum of their times, each at
the rate of the resource that bounds it:

    seconds = multiplications / products + in attention / attention + scores / rows + bytes / memory.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table

RESULTS: Final = Path(__file__).parent / "results"
CONSTANTS: Final = "constants.json"
CLOSE: Final = 0.3
"""A prediction may be off by this share of the measured time."""


@dataclass(frozen=True)
class Model:
    """The sizes of a model on which costs depend."""

    layers: int
    d_model: int
    heads: int
    d_head: int
    kv_heads: int
    d_mlp: int
    mlp_matrices: int
    """The number of matrices in the MLP: 2, or 3 with a gate."""
    activation: int
    """The number of times that transformers' activation reads or writes each number of the MLP: 5 for a single
    operation and a product with the gate. BLOOM's GELU is nine operations, GPT-2's eight, each with separate arrays."""
    vocabulary: int

    @classmethod
    def of_config(cls, config: Any) -> "Model":
        """The sizes in transformers' config of a BLOOM, GPT-2 or Llama."""
        heads, gated = config.num_attention_heads, hasattr(config, "num_key_value_heads")
        return cls(
            config.num_hidden_layers, config.hidden_size, heads, config.hidden_size // heads,
            config.num_key_value_heads if gated else heads,
            config.intermediate_size if gated else 4 * config.hidden_size, 3 if gated else 2,
            _ACTIVATIONS[config.model_type], config.vocab_size,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """The number of entries of z per token."""
        return self.heads * self.d_head

    @property
    def after_z(self) -> int:
        """The number of weights of a block after z."""
        return self.width * self.d_model + self.mlp_matrices * self.d_model * self.d_mlp

    @property
    def block(self) -> int:
        """The number of weights of a block: W_Q, W_K, W_V, W_O and the MLP."""
        return self.d_model * (self.width + 2 * self.kv_heads * self.d_head) + self.after_z

    @property
    def head(self) -> int:
        """The number of weights of the unembedding."""
        return self.d_model * self.vocabulary


_ACTIVATIONS: Final = {"bloom": 21, "gpt2": 18, "llama": 5}

KNOWN: Final = {
    "bloom": Model(24, 1024, 16, 64, 16, 4096, 2, 21, 8000),
    "gpt2": Model(12, 768, 12, 64, 12, 3072, 2, 18, 8000),
    "llama": Model(16, 1024, 16, 64, 4, 2816, 3, 5, 8000),
    "smollm2-135m": Model(30, 576, 9, 64, 3, 1536, 3, 5, 49_152),
    "1b": Model(16, 2048, 32, 64, 8, 8192, 3, 5, 128_256),
    "7b": Model(32, 4096, 32, 128, 32, 11_008, 3, 5, 32_000),
    "8b": Model(32, 4096, 32, 128, 8, 14_336, 3, 5, 128_256),
}
"""The benchmarks' models, with their small vocabulary, and the shapes of Llama 3.2 1B, Llama 2 7B and Llama 3.1 8B."""


@dataclass(frozen=True)
class Work:
    """All the work of a step, in parts that are bounded by different rates."""

    multiplications: float = 0
    """Multiplications by weights, and in other large matrix products: bounded by arithmetic."""
    attention: float = 0
    """Multiplications of q·k and of pattern · v, in products as small as a head."""
    cells: float = 0
    """Scores that go through the softmax in a pass without observers."""
    measured: float = 0
    """Scores that go through the softmax and whose rows, keys and distances are measured."""
    bytes: float = 0
    """Bytes read from or written to memory because they do not fit the cache: bounded by memory."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Work)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(getattr(self, each.name) * times for each in fields(Work)))

    def parts(self, constants: "Constants") -> dict[str, float]:
        """The time of each part, in seconds."""
        rates = asdict(constants)
        return {name: amount / rates[name] for name, amount in asdict(self).items()}

    def seconds(self, constants: "Constants") -> float:
        """The predicted time."""
        return sum(self.parts(constants).values())

    def bound(self, constants: "Constants") -> str:
        """The part that takes the most time."""
        parts = self.parts(constants)
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Constants:
    """The speed of a machine: the amount of each part of `Work` that it does per second."""

    multiplications: float
    attention: float
    cells: float
    measured: float
    bytes: float


# ---- the methods ----------------------------------------------------------------------------------------------------


def rows_of_block(model: Model, tokens: int) -> int:
    """The number of rows in a block, which has 8 MiB of scores and at least 32 rows."""
    return min(tokens, max(32, 2**23 // (4 * model.heads) // tokens))


def keys_of_row(model: Model, tokens: int) -> float:
    """The mean number of keys for which a row's products are computed: up to the end of its block."""
    return min(tokens, (tokens + rows_of_block(model, tokens)) / 2)


def plain(model: Model, tokens: int) -> Work:
    """A forward pass with eager attention: all T² scores of a layer are in memory at once.

    q·k writes them, the mask and the softmax read and write them, and pattern · v reads them.
    """
    scores = model.layers * model.heads * tokens**2
    return (
        Work(tokens * (model.layers * model.block + model.head))
        + Work(attention=2 * scores * model.d_head, bytes=4 * 6 * scores)
        + streams(model, tokens)
    )


def fused(model: Model, tokens: int) -> Work:
    """A forward pass with fused attention: half of the scores, none in memory."""
    scores = model.layers * model.heads * tokens * (tokens + 1) / 2
    return (
        Work(tokens * (model.layers * model.block + model.head))
        + Work(attention=2 * scores * model.d_head, cells=scores)
        + streams(model, tokens)
    )  # fmt: skip


def streams(model: Model, tokens: int) -> Work:
    """The bytes that norms, activations and residual additions read and write, and all weights, read once."""
    by_token = 14 * model.d_model + (model.mlp_matrices + model.activation) * model.d_mlp
    return Work(bytes=4 * model.layers * (tokens * by_token + model.block))


def bare(model: Model, tokens: int) -> Work:
    """attnmech's pass without reducers and without logits. Each block of rows reads keys and values from memory."""
    scores = model.layers * model.heads * tokens * keys_of_row(model, tokens)
    blocks = model.layers * tokens / rows_of_block(model, tokens)
    return (
        Work(tokens * model.layers * model.block, attention=2 * scores * model.d_head, cells=scores)
        + Work(bytes=4 * blocks * keys_of_row(model, tokens) * 2 * model.kv_heads * model.d_head)
        + streams(model, tokens)
    )


def focus_and_updates(model: Model, tokens: int) -> Work:
    """`am.stream` with both reducers.

    Updates: W_O x of each head, R z and R v with the triangle R of W_O W_Oᵀ, which d_head products of W_O make, and a
    dozen readings of arrays [token, d_model]. The weights are read once, to see whether they changed.
    """
    found = bare(model, tokens)
    heads = model.heads * model.d_head**2
    of_updates = tokens * (model.width * model.d_model + 2 * heads) + heads * model.d_model
    return (
        replace(found, cells=0.0, measured=found.cells)
        + Work(model.layers * of_updates, bytes=4 * model.layers * tokens * 12 * model.d_model)
        + Work(bytes=4 * (model.layers * model.block + model.head))
    )  # fmt: skip


def kept_by_stream(model: Model, tokens: int) -> float:
    """The bytes that focus and updates of a list of texts hold at the end: the statistics of every row of every
    head.
    """
    statistics, of_updates = 13, 9
    by_head = 4 * statistics + 4 + 5 * of_updates + 4 + 3 * 4
    return tokens * model.layers * (model.heads * by_head + statistics + 5 * 5)


def change(model: Model, tokens: int, blocks: float, *, after_z: bool) -> Work:
    """The work per token of a pass that runs the last `blocks` blocks, the first of them only after z, with logits."""
    scores = model.heads * (tokens + 1) / 2
    whole = blocks - after_z
    return (
        Work(whole * model.block + after_z * model.after_z + model.head * (tokens - 1) / tokens)
        + Work(attention=2 * whole * scores * model.d_head, cells=whole * scores)
        + Work(bytes=4 * 4 * model.vocabulary * (tokens - 1) / tokens)
    )


def ablation(model: Model, tokens: int) -> Work:
    """One head of `am.ablate_heads` on one text: on average over layers, (L − 1)/2 blocks, and one block after z."""
    return change(model, tokens, (model.layers + 1) / 2, after_z=True) * tokens


def ablate_heads(model: Model, tokens: int, texts: int = 1) -> Work:
    """All heads on some texts of equal length, and the clean pass."""
    return ablation(model, tokens) * (texts * model.layers * model.heads) + bare(model, tokens) * texts


def prune_heads(model: Model, tokens: int, texts: int, steps: int) -> Work:
    """Steps of `am.prune_heads` without random orders: each step ablates every remaining head, and runs half a pass.

    This is an upper bound: if streams fit into memory, heads below the one removed last begin at its block, not at
    their own.
    """
    heads = model.layers * model.heads
    measured = sum(heads - step for step in range(steps))
    return ablation(model, tokens) * (texts * measured) + bare(model, tokens) * (texts * (2 + steps / 2))


def null_attention(model: Model, tokens: int, texts: int = 1) -> Work:
    """Four changes of every head inside its attention, which each pass must therefore run, and the pass for sinks."""
    one = change(model, tokens, (model.layers + 1) / 2, after_z=False) * tokens
    return one * (4 * texts * model.layers * model.heads) + focus_and_updates(model, tokens) * texts


def rollout(model: Model, tokens: int) -> Work:
    """`am.attention_flow(method="rollout")`: a product of L matrices T × T, and the stored patterns."""
    scores = model.layers * tokens**2
    return bare(model, tokens) + Work(model.layers * tokens**3, bytes=4 * (model.heads + 4) * scores)


def norms(model: Model, tokens: int) -> Work:
    """`am.attention_flow(method="norm")`: f(x_j) of every head, and the products of heads at every key, in float64."""
    of_key = model.width * model.d_model + 2 * model.heads**2 * model.d_model
    of_cell = 2 * model.heads**2
    cells = model.layers * tokens**2
    work = model.layers * tokens * of_key + cells * of_cell
    return bare(model, tokens) + Work(work, bytes=cells * model.heads * (4 * 4 + 8 * 4))


def drift(model: Model, tokens: int) -> Work:
    """`am.residual_drift`: every stream against every row of the embedding, which is read once in 2048 streams."""
    streams_ = model.layers * tokens
    readings = max(1, streams_ / 2048)
    work = Work(streams_ * model.head, bytes=4 * (readings * 3 * model.head + 4 * streams_ * model.vocabulary))
    return bare(model, tokens) + work


def segments(model: Model, tokens: int) -> Work:
    """`am.segment_attention`: the pass, and two more readings of each pattern, by segment and by distance."""
    found = bare(model, tokens)
    return found + Work(bytes=4 * 2 * found.cells)


def head_types(model: Model, tokens: int = 75, texts: int = 24) -> Work:
    """`am.head_types` on its own 24 sequences: passes, the directions of logits, and ten readings of short patterns."""
    passes = bare(model, tokens) * texts
    reads = model.layers * model.width * (model.d_model + tokens)
    return passes + Work(texts * tokens * reads, bytes=4 * (10 * passes.cells + texts * model.layers * model.block))


def report(model: Model, tokens: int) -> Work:
    """`am.report` without its sweeps (at most 10¹² multiplications each): the ledger, one pass of reducers, head types.

    The ledger of the layers shown splits scores into some six terms, each [head, query, key].
    """
    shown = min(model.layers, 2_250_000 // (model.heads * tokens**2) or 1)
    cells = shown * model.heads * tokens**2
    ledger = Work(attention=6 * cells * model.d_head, bytes=4 * 20 * cells)
    types = head_types(model) if 1800 * model.layers * model.block <= 10**12 else Work()
    return focus_and_updates(model, tokens) + ledger + bare(model, tokens) + types


METHODS: Final[Mapping[str, Callable[[Model, int], Work]]] = {
    "plain forward": plain,
    "fused forward": fused,
    "pass without reducers": bare,
    "focus and updates": focus_and_updates,
    "ablate_heads, 1 text": ablate_heads,
    "prune_heads, 1 text, 10 steps": lambda model, tokens: prune_heads(model, tokens, 1, 10),
    "null_attention, 1 text": null_attention,
    "attention_flow, rollout": rollout,
    "attention_flow, norm": norms,
    "residual_drift": drift,
    "segment_attention": segments,
    "head_types": lambda model, tokens: head_types(model),
    "report, without sweeps": report,
}


# ---- against what was measured ---------------------------------------------------------------------------------------

STREAMED: Final = {
    "transformers, plain forward": plain,
    "transformers, fused attention": fused,
    "attnmech, focus and updates": focus_and_updates,
    "attnmech, pass without reducers": bare,
}


@dataclass(frozen=True)
class Compared:
    """A measured figure with its prediction."""

    what: str
    predicted: float
    measured: float
    bound: str

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def verdict(self) -> str:
        """Whether the prediction is off by more than `CLOSE`."""
        return "" if 1 / (1 + CLOSE) <= self.ratio <= 1 + CLOSE else "misses"


def compared(results: Path, constants: Constants) -> list[Compared]:
    """Every figure of the results that a formula predicts."""
    found = []
    for path in sorted(results.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        cut = data.get("settings", {}).get("layers")
        for row in data.get("rows", []):
            if not row.get("seconds") or (work := _work_of(path.stem, row, cut)) is None:
                continue
            name = ", ".join(str(each) for each in (row["shape"], f"{row['tokens']} tokens", row["contender"]))
            found.append(Compared(name, work.seconds(constants), median(row["seconds"]), work.bound(constants)))
    return found


def _work_of(kind: str, row: Mapping[str, Any], cut: int | None) -> Work | None:
    model, tokens, who = KNOWN[row["shape"]], row["tokens"], row["contender"]
    if kind.startswith("streaming") and who in STREAMED:
        return STREAMED[who](replace(model, layers=cut or model.layers), tokens)
    if kind.startswith("ablation") and who == "attnmech, ablate_heads":
        return ablate_heads(model, tokens, row.get("prompts", 8))
    if kind.startswith("pruning") and who == "attnmech, prune_heads":
        return prune_heads(replace(model, layers=row["layers"]), tokens, row["prompts"], row["steps"])
    return None


# ---- a machine's constants -------------------------------------------------------------------------------------------


def measured_constants() -> Constants:
    """The constants of this machine, with torch's current number of threads; each is the best of several rounds."""
    import torch

    tokens, heads, d_head, d_model, rows = 2048, 16, 64, 1024, 64
    x, weight = torch.randn(tokens, d_model), torch.randn(4 * d_model, d_model)
    q, k = torch.randn(heads, rows, d_head), torch.randn(heads, d_head, tokens)
    scores = torch.randn(1, heads, rows, tokens)
    pattern, large = scores.softmax(dim=-1), torch.randn(2**26)
    cells, of_products = scores.numel(), heads * rows * tokens * d_head
    return Constants(
        multiplications=rate(lambda: torch.nn.functional.linear(x, weight), x.numel() * len(weight)),
        attention=rate(lambda: (torch.bmm(q, k), torch.bmm(pattern[0], k.mT)), 2 * of_products),
        cells=rate(lambda: scores.softmax(dim=-1), cells),
        measured=rate(lambda: _measured(scores), cells),
        # A new array each time, as in models: the system must provide new pages.
        bytes=rate(lambda: large + 1.0, 8 * large.numel()),
    )


def _measured(scores: Any) -> None:
    import torch

    from attnmech.maths.focus import Places, RowMeasures, defined_rows, row_statistics
    from attnmech.maths.received import Received, neighbours
    from attnmech.maths.softmax import Attention, softmax_with_sink

    rows, tokens = scores.shape[-2:]
    here = range(tokens - rows, tokens)
    pattern, _ = softmax_with_sink(scores, None)
    attention = Attention(scores, pattern)
    real, visible = torch.ones(1, rows, dtype=torch.bool), torch.ones(1, 1, rows, tokens, dtype=torch.bool)
    first = torch.zeros(1, dtype=torch.long)
    places = Places.of(here, first, 8, None, tokens)
    defined = defined_rows(visible, here, real, first, places, 8, True)
    measures = RowMeasures.of(attention, here, places, 8, tokens)
    row_statistics(measures, defined)
    received = Received.nothing(torch.ones(1, 3, tokens, dtype=torch.bool), scores.shape[1], tokens, tokens)
    received.add(pattern, here, neighbours(None, tokens))


def rate(step: Callable[[], object], amount: float, rounds: int = 7) -> float:
    """The amount per second that a step achieves."""
    from time import perf_counter

    step()
    best = float("inf")
    for _ in range(rounds):
        start = perf_counter()
        step()
        best = min(best, perf_counter() - start)
    return amount / best


# ---- printing --------------------------------------------------------------------------------------------------------


def table_of_comparison(found: Sequence[Compared]) -> "Table":
    """The table of predicted and measured figures."""
    from rich.table import Table

    title = "The cost model beside measurements"
    table = Table("", "predicted, s", "measured, s", "ratio", "bound by", "", title=title)
    for each in found:
        table.add_row(
            each.what, f"{each.predicted:.3g}", f"{each.measured:.3g}", f"{each.ratio:.2f}", each.bound, each.verdict
        )
    close = sum(not each.verdict for each in found)
    table.caption = f"{close} of {len(found)} within {CLOSE:.0%}"
    return table


def table_of_methods(name: str, model: Model, tokens: int, constants: Constants) -> "Table":
    """The table of the cost of every method on a model."""
    from rich.table import Table

    title = f"{name}, {tokens:,} tokens"
    table = Table("", "multiplications", "scores", "GB moved", "seconds", "bound by", title=title)
    for method, work_of in METHODS.items():
        work = work_of(model, tokens)
        scores = work.cells + work.measured
        arithmetic = work.multiplications + work.attention
        cells = [f"{arithmetic:.3g}", f"{scores:.3g}", f"{work.bytes / 1e9:.3g}", f"{work.seconds(constants):.3g}"]
        table.add_row(method, *cells, work.bound(constants))
    weights = 4 * (model.layers * model.block + model.head)
    table.caption = (
        f"weights in float32 {weights / 1e9:.3g} GB; results of focus and updates "
        f"{kept_by_stream(model, tokens) / 1e9:.3g} GB"
    )
    return table


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the constants, and keep them in the results")
    parser.add_argument("--model", choices=list(KNOWN), help="predict every method on a model")
    parser.add_argument("--tokens", type=int, default=2048, help="the length of its text (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads for --measure (default %(default)s)")
    for each in fields(Constants):
        parser.add_argument(f"--{each.name}", type=float, help="of another machine, per second")
    return parser.parse_args()


def main() -> None:
    """Measures, compares or predicts."""
    from rich.console import Console

    chosen = arguments()
    console, path = Console(width=None if Console().is_terminal else 150), RESULTS / CONSTANTS
    if chosen.measure:
        import torch
        from measure import machine

        torch.set_num_threads(chosen.threads)
        found = asdict(measured_constants())
        about = machine(("attnmech", "torch"))
        kept = {"machine": about, "settings": {"threads": chosen.threads}, "constants": found}
        path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    if not path.exists():
        sys.exit(f"{path} is missing: run this with --measure first")
    constants = Constants(**json.loads(path.read_text("utf-8"))["constants"])
    given = {each.name: getattr(chosen, each.name) for each in fields(Constants)}
    constants = replace(constants, **{name: value for name, value in given.items() if value is not None})
    console.print({name: float(f"{value:.3g}") for name, value in asdict(constants).items()})
    if chosen.model:
        console.print(table_of_methods(chosen.model, KNOWN[chosen.model], chosen.tokens, constants))
    else:
        console.print(table_of_comparison(compared(RESULTS, constants)))


if __name__ == "__main__":
    main()
