"""Compiles RASP programs to transformers whose circuits are known, and stores each with its truth.

    python -m venv tracr-venv && tracr-venv/bin/pip install -r benchmarks/truth/requirements.txt
    tracr-venv/bin/python benchmarks/truth/compile.py

Writes `models/NAME.safetensors`, which `model.py` reads: nonzero weights, reference inputs with the outputs of tracr's
own model, pairs of inputs with different outputs, and a description as JSON. The truth is read from the compilation:
the function of each head from its aggregate or selector width, and edges from the RASP graph. Each layer is filled up
with heads of zeros and three decoys, which have the queries and keys of the program's heads, read random dimensions of
the stream and write to dimensions that nothing else reads. Needs no torch.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import (
    basis_inference,
    craft_graph_to_model,
    craft_model_to_transformer,
    expr_to_craft_graph,
    lib,
    nodes,
    rasp_to_graph,
)
from tracr.craft import bases, transformers
from tracr.rasp import rasp

MODELS: Final = Path(__file__).parent / "models"
BOS: Final = "BOS"
PAD: Final = "PAD"
INPUTS: Final = 200
EXACT: Final = 12
"""Reference inputs, and how many of them keep all logits; the others keep the decoded output."""
PAIRS: Final = 24
DECOYS: Final = 3
SCRATCH: Final = 4
"""Dimensions of the stream that only decoys write and read."""

Edge = tuple[str, str]


@dataclass(frozen=True)
class Program:
    """A RASP program and the inputs that it is for."""

    summary: str
    make: Callable[[], rasp.SOp]
    vocabulary: Sequence[Any]
    length: int
    """The longest input, without BOS."""
    causal: bool = False
    valid: Callable[[Sequence[Any]], bool] = lambda text: True
    """Whether the program is defined on an input: an aggregate of categories must select at most one token."""
    n_heads: int = 8
    """The heads of each layer; a program of one head needs 20 of them for a p-value of 0.05."""

    def inputs(self, count: int, length: int | None = None, seed: int = 0) -> list[list[Any]]:
        """Random valid inputs; of random lengths, if none is given."""
        rng = np.random.default_rng(seed)
        texts: list[list[Any]] = []
        while len(texts) < count:
            size = length or int(rng.integers(1, self.length + 1))
            text = [self.vocabulary[number] for number in rng.integers(len(self.vocabulary), size=size)]
            texts += [text] if self.valid(text) else []
        return texts


class Evaluator(rasp.DefaultRASPEvaluator):
    """tracr's interpreter of RASP, with a causal mask if asked; like a compiled model, it never selects a null key."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self._causal = causal

    def eval_select(self, sel: rasp.Select, xs: Sequence[Any]) -> list[list[bool]]:
        """The selector's matrix."""
        keys, queries = self.evaluate(sel.keys, xs), self.evaluate(sel.queries, xs)
        return [
            [
                None not in (key, query) and not (self._causal and column > row) and bool(sel.predicate(key, query))
                for column, key in enumerate(keys)
            ]
            for row, query in enumerate(queries)
        ]


def named(name: str, sop: rasp.RASPExpr) -> Any:
    """The expression with a name, which labels its head."""
    return sop.named(name)


def running_count(token: Any, name: str) -> rasp.SOp:
    """The number of occurrences of a token; in a causal model, up to each position."""
    return named(name, rasp.SelectorWidth(rasp.Select(rasp.tokens, rasp.tokens, lambda k, q: k == token)))


def most_frequent() -> rasp.SOp:
    """At each position, the token with the largest histogram; of several, the first."""
    counts = lib.make_hist()
    rank = rasp.SequenceMap(lambda count, place: -count + place / 10, counts, rasp.indices)
    better = named("better", rasp.SelectorWidth(rasp.Select(rank, rank, rasp.Comparison.LT)))
    return named("most_frequent", rasp.Aggregate(rasp.Select(better, better, lambda k, q: k == 0), rasp.tokens))


def induction() -> rasp.SOp:
    """The token after the previous occurrence of this token."""
    previous = named("previous", lib.shift_by(1, rasp.tokens))
    return named("induction", rasp.Aggregate(rasp.Select(previous, rasp.tokens, rasp.Comparison.EQ), rasp.tokens))


def prefix_sums() -> rasp.SOp:
    """The sum of the digits so far."""
    ones, twos = running_count(1, "ones"), running_count(2, "twos")
    return named("prefix_sums", rasp.SequenceMap(lambda one, two: one + 2 * two, ones, twos))


def after_comma() -> rasp.SOp:
    """The token after the last comma: its previous token is a comma, and it follows as many commas as this token."""
    previous = named("previous", lib.shift_by(1, rasp.tokens))
    commas = running_count(",", "commas")
    starts = rasp.SequenceMap(lambda token, count: count if token == "," else 0, previous, commas)
    since = rasp.Select(named("starts", starts), commas, lambda k, q: k == q and q > 0)
    return named("after_comma", rasp.Aggregate(since, rasp.tokens))


def two_back() -> rasp.SOp:
    """The token two back, as the previous token's previous token."""
    return named("second_shift", lib.shift_by(1, named("first_shift", lib.shift_by(1, rasp.tokens))))


def agrees() -> rasp.SOp:
    """Whether the first token, the previous token and this token are alike: two heads of one layer."""
    first = named("first", rasp.Aggregate(rasp.Select(rasp.indices, rasp.indices, lambda k, q: k == 0), rasp.tokens))
    previous = named("previous", lib.shift_by(1, rasp.tokens))
    return named("agrees", rasp.SequenceMap(lambda one, other: int(one == other), first, previous))


def rarer() -> rasp.SOp:
    """The number of tokens that are rarer than this token."""
    counts = lib.make_hist()
    return named("rarer", rasp.SelectorWidth(rasp.Select(counts, counts, rasp.Comparison.LT)))


def at_most(count: int, text: Sequence[Any]) -> bool:
    """Whether no token occurs more often."""
    return max(map(text.count, text)) <= count


def without_empty_parts(text: Sequence[Any]) -> bool:
    """Whether no comma follows another."""
    return ",," not in "".join(text)


PROGRAMS: Final[Mapping[str, Program]] = {
    "shift": Program("the previous token", partial(lib.shift_by, 1, rasp.tokens), "abcde", 10, causal=True, n_heads=24),
    "two_back": Program("the token two back, by two steps", two_back, "abcde", 9, causal=True),
    "induction": Program(
        "the token after the previous occurrence of this token", induction, "abcdefgh", 12, True, partial(at_most, 2)
    ),
    "frac_prevs": Program(
        "the share of x so far", lambda: lib.make_frac_prevs(rasp.tokens == "x"), "wxyz", 9, causal=True, n_heads=24
    ),
    "prefix_sums": Program("the sum of the digits so far", prefix_sums, (0, 1, 2), 7, causal=True),
    "after_comma": Program("the token after the last comma", after_comma, "abc,", 8, True, without_empty_parts),
    "pattern": Program("whether abc ends here", lambda: lib.detect_pattern(rasp.tokens, "abc"), "abc", 9, causal=True),
    "agrees": Program("whether the first and the previous token are alike", agrees, "abc", 8, causal=True),
    "count": Program("the number of a in the text", lambda: lib.make_count(rasp.tokens, "a"), "abc", 9, n_heads=24),
    "histogram": Program("how often this token occurs", lib.make_hist, "abcde", 9, n_heads=24),
    "rarer": Program("the number of tokens that are rarer than this one", rarer, "abcd", 8),
    "most_frequent": Program("the most frequent token", most_frequent, "abcd", 6),
    "reverse": Program("the text reversed", lambda: lib.make_reverse(rasp.tokens), "abcde", 8),
    "sort": Program(
        "the tokens in order", lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens), tuple(range(8)), 6,
        valid=partial(at_most, 1),
    ),
    "dyck": Program("whether the brackets balance", lambda: lib.make_shuffle_dyck(["()"]), "()", 10),
}  # fmt: skip


class Compiled:
    """A program's tracr model, and where each expression of the program is computed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        sop = program.make()
        extracted = rasp_to_graph.extract_rasp_graph(sop)
        self.graph, self.sink = extracted.graph, extracted.sink
        basis_inference.infer_bases(self.graph, self.sink, set(program.vocabulary), program.length)
        bos = bases.BasisDirection(rasp.tokens.label, BOS)
        expr_to_craft_graph.add_craft_components_to_rasp_graph(self.graph, bos_dir=bos)
        craft = craft_graph_to_model.craft_graph_to_model(self.graph, extracted.sources)
        self.model = craft_model_to_transformer.craft_model_to_transformer(
            craft, self.graph, self.sink, program.length, BOS, PAD, program.causal
        )
        self.writers = {"tokens": "embedding", "indices": "embedding"} | dict(self._places(craft))
        self._varies = self._varying()

    def _places(self, craft: transformers.SeriesWithResiduals) -> Iterator[tuple[str, str]]:
        """Each expression's name with the head or MLP that writes it; selector widths are written by an MLP."""
        layer, after = -1, transformers.MLP
        for block in craft.blocks:
            kind = type(block)
            layer += kind is not transformers.MLP or after is transformers.MLP
            after = kind
            for label, node in self.graph.nodes.items():
                own = node.get(nodes.MODEL_BLOCK)
                parts = getattr(own, "blocks", [own])
                if kind is transformers.MLP and isinstance(parts[-1], transformers.MLP):
                    basis = {str(direction) for direction in node[nodes.OUTPUT_BASIS]}
                    if basis <= {str(direction) for direction in block.snd.output_space.basis}:
                        yield label, f"L{layer} MLP"
                for number, head in enumerate(block.heads() if kind is not transformers.MLP else ()):
                    if parts[0] is head:
                        yield label if len(parts) == 1 else f"{label} head", f"L{layer}H{number}"

    def _varying(self) -> dict[str, bool]:
        """Whether each expression depends on the tokens of an input of a given length."""
        texts = self.program.inputs(300, self.program.length, seed=1)
        evaluate, varies = Evaluator(self.program.causal).evaluate, {}
        for label, node in self.graph.nodes.items():
            values = [evaluate(node[nodes.EXPR], text) for text in texts]
            varies[label] = any(value != values[0] for value in values)
        return varies

    def heads(self) -> list[dict[str, Any]]:
        """The function of each head, by layer."""
        heads = []
        for label, place in self.writers.items():
            if "H" not in place:
                continue
            expression = self.graph.nodes[label.removesuffix(" head")][nodes.EXPR]
            selector = expression.selector
            values = expression.sop.name if isinstance(expression, rasp.Aggregate) else "its width"
            layer, head = map(int, place[1:].split("H"))
            heads.append({
                "layer": layer, "head": head, "name": expression.name, "queries": selector.queries.name,
                "keys": selector.keys.name, "values": values, "varies": self._varies[expression.label],
            })  # fmt: skip
        return sorted(heads, key=lambda head: (head["layer"], head["head"]))

    def edges(self) -> list[dict[str, Any]]:
        """What reads which expression: the edges of the residual graph that the program uses."""
        edges: dict[Edge, bool] = {}

        def add(expression: rasp.SOp, reader: str, matters: bool = True) -> None:
            edge = self.writers[expression.label], reader
            edges[edge] = edges.get(edge, False) or (matters and self._varies[expression.label])

        for label, node in self.graph.nodes.items():
            expression, place = node[nodes.EXPR], self.writers.get(label)
            if isinstance(expression, rasp.Aggregate | rasp.SelectorWidth):
                aggregates = isinstance(expression, rasp.Aggregate)
                head = place if aggregates else self.writers[f"{label} head"]
                for side, sop, matters in zip("qk", *self._sides(expression.selector), strict=True):
                    add(sop, f"{head} {side}", matters)
                if aggregates:
                    add(expression.sop, f"{head} v")
                else:
                    edges[head, place] = edges.get((head, place), False) or self._varies[label]
            elif isinstance(expression, rasp.Map):
                add(expression.inner, place)
            elif isinstance(expression, rasp.SequenceMap):
                add(expression.fst, place)
                add(expression.snd, place)
        add(self.sink[nodes.EXPR], "logits")
        return [{"writer": one, "reader": other, "varies": varies} for (one, other), varies in edges.items()]

    def _sides(self, selector: rasp.Select) -> tuple[tuple[rasp.SOp, rasp.SOp], tuple[bool, bool]]:
        """Queries and keys of a selector, and whether its values depend on them."""
        sops = selector.queries, selector.keys
        queries, keys = (sorted(self.graph.nodes[sop.label][nodes.VALUE_SET], key=str) for sop in sops)
        matrix = np.array([[bool(selector.predicate(key, query)) for key in keys] for query in queries])
        return sops, (bool((matrix != matrix[:1]).any()), bool((matrix != matrix[:, :1]).any()))

    @cached_property
    def rows(self) -> dict[int, int]:
        """The row of the output that holds each dimension of the stream: the token's id if the outputs are tokens."""
        directions, ids = sorted(self.sink[nodes.OUTPUT_BASIS]), self.model.input_encoder.encoding_map
        numbers = [ids[way.value] if self.of_tokens else row for row, way in enumerate(directions)]
        labels = [self.model.residual_labels.index(str(way)) for way in directions]
        return dict(zip(labels, numbers, strict=True))

    @property
    def of_tokens(self) -> bool:
        """Whether the program returns tokens of its vocabulary."""
        return {way.value for way in self.sink[nodes.OUTPUT_BASIS]} <= set(self.program.vocabulary)

    @property
    def outputs(self) -> int:
        """The number of outputs at each position."""
        return len(self.model.input_encoder.encoding_map) if self.of_tokens else len(self.rows)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights by the names of `model.py`, with idle heads and decoys in each layer."""
        params, config, n_heads = self.model.params, self.model.model_config, self.program.n_heads
        embed, positions = (np.asarray(params[name]["embeddings"]) for name in ("token_embed", "pos_embed"))
        width, d_head = embed.shape[1], config.key_size
        unembed = np.zeros((self.outputs, width))
        unembed[list(self.rows.values()), list(self.rows)] = 1
        weights = {"embed": embed, "positions": positions, "unembed": unembed}
        attention = np.zeros((config.num_layers, 4, n_heads, d_head, width + SCRATCH), np.float32)
        """[layer, q k v or out, head, d_head, stream]"""
        for layer in range(config.num_layers):
            here = f"transformer/layer_{layer}"
            for number, name in enumerate(("query", "key", "value", "linear")):
                matrix = np.asarray(params[f"{here}/attn/{name}"]["w"])
                by_head = (matrix if name == "linear" else matrix.T).reshape(-1, d_head, width)
                attention[layer, number, : config.num_heads, :, :width] = by_head
            for name in ("linear_1", "linear_2"):
                assert not np.asarray(params[f"{here}/mlp/{name}"]["b"]).any()
                weights[f"layers.{layer}.mlp.{name}"] = np.asarray(params[f"{here}/mlp/{name}"]["w"]).T
        self._add_decoys(attention)
        for layer, parts in enumerate(attention):
            flat = parts.reshape(4, -1, width + SCRATCH)
            weights |= {f"layers.{layer}.attention.{name}": flat[number] for number, name in enumerate("qkv")}
            weights[f"layers.{layer}.attention.out"] = flat[3].T
        for name, matrix in weights.items():
            if "attention" not in name:
                further = ((0, SCRATCH), (0, 0)) if name.endswith("linear_2") else ((0, 0), (0, SCRATCH))
                weights[name] = np.pad(matrix, further)
        return weights

    def _add_decoys(self, attention: np.ndarray) -> None:
        """Makes the last heads of each layer look like heads of the program, and write what nothing reads."""
        copied, rng = cycle(self.heads()), np.random.default_rng(0)
        width, d_head = attention.shape[-1], attention.shape[-2]
        for layer in range(len(attention)):
            for head in range(self.program.n_heads - DECOYS, self.program.n_heads):
                original = next(copied)
                attention[layer, :2, head] = attention[original["layer"], :2, original["head"]]
                for place in range(SCRATCH):
                    attention[layer, 2, head, place % d_head, rng.integers(width)] = 1
                    attention[layer, 3, head, place % d_head, width - SCRATCH + place] = 1

    def reference(self) -> dict[str, np.ndarray]:
        """Inputs as token ids after BOS (−1 after their end), and what tracr's own model computes from them.

        `decoded` holds the row of the largest output, or the only output, and −1 where the program returns nothing.
        """
        length, labels, rows = self.program.length + 1, list(self.rows), list(self.rows.values())
        texts = self.program.inputs(INPUTS)
        ids = np.full((INPUTS, length), -1, np.int16)
        logits = np.zeros((EXACT, length, self.outputs), np.float32)
        categorical = rasp.is_categorical(self.sink[nodes.EXPR])
        decoded = np.full((INPUTS, length), -1, np.int16 if categorical else np.float32)
        forward = jax.jit(partial(self.model.forward, self.model.params))
        for size in {len(text) for text in texts}:
            numbers = [number for number, text in enumerate(texts) if len(text) == size]
            inputs = np.array([self.encoded(texts[number]) for number in numbers])
            output = forward(inputs)
            states = np.asarray(output.transformer_output.output)[..., labels]
            for row, number in enumerate(numbers):
                ids[number, : size + 1] = inputs[row]
                for place, value in enumerate(self.evaluated(texts[number]), start=1):
                    if value is not None:
                        came = np.asarray(output.unembedded_output[row, place])
                        decoded[number, place] = rows[int(came)] if categorical else came
                        right = self._values[int(came)] == value if categorical else abs(came - value) < 1e-3
                        assert right, f"{texts[number]}: {value} expected at {place}, {came} computed"
                if number < EXACT:
                    logits[number, : size + 1, rows] = states[row].T
        return {"inputs": ids, "decoded": decoded, "logits": logits}

    def pairs(self) -> dict[str, np.ndarray]:
        """Pairs of inputs of the full length with different outputs, all of them different."""
        texts = {tuple(text): self.evaluated(text) for text in self.program.inputs(3000, self.program.length, seed=2)}
        clean: list[tuple[Any, ...]] = []
        corrupted: list[tuple[Any, ...]] = []
        left = list(texts)
        while len(clean) < PAIRS:
            one = left.pop(0)
            other = next(text for text in left if texts[text] != texts[one])
            left.remove(other)
            clean, corrupted = [*clean, one], [*corrupted, other]
        return {
            name: np.array([self.encoded(text) for text in chosen], np.int16)
            for name, chosen in (("clean", clean), ("corrupted", corrupted))
        }

    def encoded(self, text: Sequence[Any]) -> list[int]:
        """The ids of a text, after BOS."""
        return self.model.input_encoder.encode([BOS, *text])

    def evaluated(self, text: Sequence[Any]) -> list[Any]:
        """What the program returns."""
        return Evaluator(self.program.causal).evaluate(self.sink[nodes.EXPR], text)

    @cached_property
    def _values(self) -> list[Any]:
        return [way.value for way in sorted(self.sink[nodes.OUTPUT_BASIS])]


def sparse(name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """The nonzero entries of a matrix and their places."""
    places = matrix.reshape(-1).nonzero()[0]
    return {f"{name}.places": places.astype(np.int32), f"{name}.values": matrix.reshape(-1)[places].astype(np.float32)}


def store(name: str) -> None:
    """Compiles one program and writes its file."""
    program = PROGRAMS[name]
    compiled = Compiled(program)
    weights, config, heads = compiled.weights(), compiled.model.model_config, compiled.heads()
    places = [(layer, head) for layer in range(config.num_layers) for head in range(program.n_heads)]
    decoys = [place for place in places if place[1] >= program.n_heads - DECOYS]
    used = {(head["layer"], head["head"]) for head in heads}
    vocabulary = {str(token): number for token, number in compiled.model.input_encoder.encoding_map.items()}
    description = {
        "name": name, "about": program.summary, "bos": BOS, "pad": PAD, "vocabulary": vocabulary,
        "length": program.length, "causal": program.causal, "of_tokens": compiled.of_tokens,
        "categorical": rasp.is_categorical(compiled.sink[nodes.EXPR]), "n_layers": config.num_layers,
        "n_heads": program.n_heads, "d_head": config.key_size, "heads": heads, "decoys": decoys,
        "idle": [place for place in places if place not in used and place not in decoys],
        "edges": compiled.edges(), "shapes": {key: matrix.shape for key, matrix in weights.items()},
    }  # fmt: skip
    tensors = compiled.reference() | compiled.pairs()
    for key, matrix in weights.items():
        tensors |= sparse(key, matrix)
    MODELS.mkdir(exist_ok=True)
    path = MODELS / f"{name}.safetensors"
    save_file(tensors, path, metadata={"program": json.dumps(description)})
    print(
        f"{name:14} {path.stat().st_size / 1000:6.1f} kB, {config.num_layers} layers, stream of "
        f"{weights['embed'].shape[1]}, d_head {config.key_size}, MLP {config.mlp_hidden_size}"
    )
    for head in heads:
        print("   ", *head.values())
    print("   ", [(edge["writer"], edge["reader"], edge["varies"]) for edge in compiled.edges()])


def main() -> None:
    """Compiles every program."""
    for name in sys.argv[1:] or PROGRAMS:
        store(name)


if __name__ == "__main__":
    main()
