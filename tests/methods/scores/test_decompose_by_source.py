"""query_key over pairs of writers, against a naive model that keeps its stream as a list of writers."""

import itertools
from collections.abc import Callable
from itertools import cycle
from typing import Any

import models
import pytest
import reference
import torch
from comparing import close, refuses
from torch import Tensor

import attnmech as am
from attnmech.draw.text import signed
from attnmech.errors import ExactnessError, UnsupportedModelError
from attnmech.methods.scores import decompose_by_source as decomposition_by_source
from attnmech.methods.scores import sources
from attnmech.model.reading.writers import most_writers

F32, F64 = torch.float32, torch.float64
NAIVE = (
    "gpt2", "llama", "llama_bias", "bert", "bloom", "gemma2", "gpt_neox", "gpt_neox_serial", "qwen3", "qwen3_bias",
    "roberta", "opt", "gptj", "mpt3", "falcon_alibi_serial", "mistral",
)  # fmt: skip
"""One model for every arrangement of norms, embeddings and biases."""

Parts = dict[str, Tensor]


# -- the naive model -----------------------------------------------------------------------------------------

MLP: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gpt2": lambda block, x: block.mlp(block.ln_2(x)),
    "bloom": lambda block, x: block.mlp(block.post_attention_layernorm(x), torch.zeros_like(x)),
    "llama": lambda block, x: block.mlp(block.post_attention_layernorm(x)),
    "gemma2": lambda block, x: block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(x))),
    "bert": lambda block, x: block.output.dense(block.intermediate(x)),
    "opt": lambda block, x: block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(x)))),
    "gptj": lambda block, x: block.mlp(block.ln_1(x)),
    "mpt": lambda block, x: block.ffn(block.norm_2(x), torch.zeros_like(x)),
}
MLP |= dict.fromkeys(("gpt_neox", "qwen3", "falcon", "mistral"), MLP["llama"]) | {"roberta": MLP["bert"]}


def embeddings(model: Any, ids: Tensor, mask: Tensor) -> Parts:
    kind, state = reference.family(model), model.state_dict()
    found = {"token embedding": model.get_input_embeddings().weight[ids]}
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    if kind == "gemma2":
        found["token embedding"] = found["token embedding"] * model.config.hidden_size**0.5
    elif kind == "gpt2":
        found["position embedding"] = state["transformer.wpe.weight"][places]
    elif kind == "opt":
        counted = mask.cumsum(1) * mask - 1
        found["position embedding"] = state["model.decoder.embed_positions.weight"][counted + 2]
    elif kind in ("bert", "roberta"):
        if kind == "roberta":
            real = (ids != model.config.pad_token_id).long()
            places = real.cumsum(1) * real + model.config.pad_token_id
        at = f"{kind}.embeddings."
        found["position embedding"] = state[at + "position_embeddings.weight"][places]
        found["token-type embedding"] = state[at + "token_type_embeddings.weight"][torch.zeros_like(ids)]
    return found


def layer_norm(part: Tensor, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """A LayerNorm applied to a part of x, with the variance of x and without the shift."""
    return (part - part.mean(-1, keepdim=True)) * gamma / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


def rms_norm(part: Tensor, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return part * gamma / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def total(parts: Parts) -> Tensor:
    return torch.stack(list(parts.values())).sum(0)


def through(parts: Parts, norm: Callable[..., Tensor], gamma: Tensor, eps: float) -> Parts:
    x = total(parts)
    return {label: norm(part, x, gamma, eps) for label, part in parts.items()}


def everywhere(value: Tensor, like: Tensor) -> Tensor:
    return value.expand_as(like)


@torch.no_grad()
def naive(name: str, dtype: torch.dtype, inputs: dict[str, Tensor]) -> list[Parts]:
    """The parts of each layer's attn_in by writer, from raw weights and the model's MLPs."""
    model, ids, mask = models.plain(name, dtype), inputs["input_ids"], inputs["attention_mask"]
    kind, state = reference.family(model), model.state_dict()
    parts = embeddings(model, ids, mask)
    example = parts["token embedding"]
    norms = {"bloom": "transformer.word_embeddings_layernorm", "bert": "bert.embeddings.LayerNorm"}
    norms["roberta"] = "roberta.embeddings.LayerNorm"
    if kind in norms:
        parts = through(parts, layer_norm, state[norms[kind] + ".weight"], reference.layer_weights(model, 0).eps)
        parts["embedding norm shift"] = everywhere(state[norms[kind] + ".bias"], example)
    found = []
    for layer, block in enumerate(models.blocks_of(model)):
        weights, place = reference.layer_weights(model, layer), reference._place(model)
        stream, read = total(parts), parts
        if place.norm is not None:
            one = 1 if place.norm_kind == "rms + 1" else 0
            norm = layer_norm if place.norm_kind == "layer" else rms_norm
            assert weights.gamma is not None
            read = through(parts, norm, weights.gamma + one, weights.eps)
            if weights.beta is not None:
                read = {**read, "norm shift": everywhere(weights.beta, example)}
        found.append(read)
        attn_in = reference.attention_input(model, layer, stream)
        terms = reference.terms(model, layer, attn_in, mask)
        scores = sum(value for term, value in terms.items() if term != "mask")
        pattern = torch.softmax(scores.masked_fill(~reference.visible(model, mask, layer), -1e30), dim=-1)
        group = len(weights.W_Q) // len(weights.W_V)
        written = {}
        for head, W_O in enumerate(weights.W_O):
            value = attn_in @ weights.W_V[head // group]
            value = value if weights.b_V is None else value + weights.b_V[head // group]
            written[f"L{layer}H{head}"] = pattern[:, head] @ value @ W_O
        if weights.b_O is not None:
            written[f"L{layer} b_O"] = everywhere(weights.b_O, example)
        if kind == "gemma2":
            gamma = state[f"model.layers.{layer}.post_attention_layernorm.weight"] + 1
            written = through(written, rms_norm, gamma, weights.eps)
        parts = parts | written
        at = place.block.format(layer)
        if kind in ("bert", "roberta"):
            parts = through(parts, layer_norm, state[at + "attention.output.LayerNorm.weight"], weights.eps)
            parts[f"L{layer} attention norm shift"] = everywhere(state[at + "attention.output.LayerNorm.bias"], example)
        parallel = kind == "gptj" or (kind == "gpt_neox" and model.config.use_parallel_residual)
        parts[f"L{layer} MLP"] = MLP[kind](block, stream if parallel else total(parts))
        if kind in ("bert", "roberta"):
            parts = through(parts, layer_norm, state[at + "output.LayerNorm.weight"], weights.eps)
            parts[f"L{layer} MLP norm shift"] = everywhere(state[at + "output.LayerNorm.bias"], example)
    return found


@torch.no_grad()
def naive_vectors(name: str, dtype: torch.dtype, layer: int, head: int, parts: Parts) -> tuple[Parts, Parts]:
    """Each writer's part of a head's queries and keys `[batch position d_head]`, normalised and rotated."""
    model, weights = models.plain(name, dtype), reference.layer_weights(models.plain(name, dtype), layer)
    kv = head // (len(weights.W_Q) // len(weights.W_K))
    x = total(parts)
    turned = reference.turns(model, x.shape[1], dtype)

    def side(W: Tensor, b: Tensor | None, which: str) -> Parts:
        frozen = reference._frozen(model, layer, x @ W if b is None else x @ W + b, which)
        made = {label: part @ W * frozen for label, part in parts.items()}
        if turned is None:
            return made
        return {
            label: torch.stack([value[:, place] @ turned[place] for place in range(x.shape[1])], dim=1)
            for label, value in made.items()
        }

    b_Q = None if weights.b_Q is None else weights.b_Q[head]
    b_K = None if weights.b_K is None else weights.b_K[kv]
    return side(weights.W_Q[head], b_Q, "q"), side(weights.W_K[kv], b_K, "k")


CASES = [(name, F32, "right") for name in NAIVE] + [
    (name, F64, side)
    for name, side in zip(("gpt2", "gemma2", "llama", "qwen3", "bert", "bloom"), cycle(("left", "right")))
]


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype", "side"), CASES)
def test_every_pair_is_what_the_raw_weights_give(name: str, dtype: torch.dtype, side: str) -> None:
    inputs, hooked = models.padded(name, side, length=6), models.hooked(name, dtype)
    why, by_layer = am.decompose_by_source(hooked, inputs), naive(name, dtype, inputs)
    scale, mask = reference.scale(models.plain(name, dtype)), inputs["attention_mask"].bool()
    # In float64, an RMSNorm computes in float32, which amplifies a change in the last bit of the stream.
    rms = reference._place(models.plain(name, dtype)).norm_kind != "layer"
    tolerance = 2e-5 if dtype == F32 else 1e-6 if rms else 1e-10
    assert why.layers == tuple(range(hooked.n_layers)) and why.residual.shape == (hooked.n_layers, hooked.n_heads)
    for layer, parts in enumerate(by_layer):
        assert why.labels_of(layer) == tuple(parts)
        assert len(parts) <= most_writers(hooked.stack(), layer)
        top, visible = why.parts[layer].key_at, reference.visible(models.plain(name, dtype), mask, layer)
        for head in range(hooked.n_heads):
            queries, keys = naive_vectors(name, dtype, layer, head, parts)
            largest = max(float(total(queries).norm(dim=-1).max() * total(keys).norm(dim=-1).max()) * scale, 1.0)
            for text, query in mask.nonzero().tolist():
                key = int(top[text, head, query])
                seen = visible.expand(len(mask), hooked.n_heads, -1, -1)[text, head, query].nonzero()[:, 0].tolist()
                assert int(why.parts[layer].keys_seen[text, query]) == len(seen)
                # Query-key is linear in the keys: the contrast is with the mean of the keys that the row sees.
                for contrast, less in ((False, []), (True, seen)):
                    of_query = torch.stack([q[text, query] for q in queries.values()])
                    means = [k[text, less].sum(dim=0) / max(1, len(less)) for k in keys.values()]
                    of_key = torch.stack([k[text, key] for k in keys.values()]) - torch.stack(means)
                    expected = scale * of_query @ of_key.T
                    found = why.matrix(layer, head, query, key, text=text, contrast=contrast)
                    assert float((found - expected).abs().max()) <= tolerance * largest
            assert bool((top[:, head][~mask] == -1).all())


@pytest.mark.parametrize("name", ["bloom", "gemma2", "qwen3"])
def test_writers_give_the_same_one_at_a_time_and_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, inputs = models.hooked(name, F64), models.padded(name, length=6)
    together = am.decompose_by_source(hooked, inputs)
    monkeypatch.setattr(sources, "_TOGETHER_BYTES", 1)
    for one, other in zip(am.decompose_by_source(hooked, inputs).parts, together.parts, strict=True):
        assert one.sources == other.sources
        for field in ("query", "key", "mean_key"):
            # Cells that a text lacks hold arbitrary numbers.
            there = (one.key_at >= 0)[..., None, None]
            close(getattr(other, field) * there, getattr(one, field) * there, 1e-12)


# -- cells, means and what is read off them ------------------------------------------------------------------


def test_the_mean_is_over_the_rows_that_have_a_choice() -> None:
    inputs = models.padded("bloom", length=6)
    why = am.decompose_by_source(models.hooked("bloom", F64), inputs)
    rows = [(text, query) for text, query in inputs["attention_mask"].nonzero().tolist() if query > 0]
    for contrast in (False, True):
        each = [why.matrix(1, 2, query, text=text, contrast=contrast) for text, query in rows]
        torch.testing.assert_close(
            why.matrix(1, 2, contrast=contrast), torch.stack(each).mean(0), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", ["llama_bias", "bert"])
def test_cells_of_ones_own_are_the_same_cells(name: str) -> None:
    hooked, ids = models.hooked(name, F64), models.token_ids(name, 2, 6)
    why = am.decompose_by_source(hooked, ids)
    cells = [(5, 1), (2, 0), (5, 4), (5, 1)]
    chosen = am.decompose_by_source(hooked, ids, cells=cells, heads=[(1, 2), (1, 0), (0, 1)], layers=[1, 0])
    assert chosen.layers == (1, 0) and chosen.parts[0].heads == (2, 0) and chosen.parts[1].heads == (1,)
    assert chosen.parts[0].query_at.tolist() == [2, 5, 5] and chosen.parts[0].key_at[1, 0].tolist() == [0, 1, 4]
    query_key = am.decompose_scores(hooked, ids).terms["query_key"]
    for text in (0, 1):
        for query, key in cells:
            found = chosen.matrix(1, 0, query, key, text=text)
            assert float(found.sum()) == pytest.approx(float(query_key[text, 1, 0, query, key]), abs=1e-10)
            if int(why.parts[1].key_at[text, 0, query]) == key:
                torch.testing.assert_close(found, why.matrix(1, 0, query, text=text), rtol=1e-12, atol=1e-12)
    mean = torch.stack([chosen.matrix(1, 0, q, k, text=n) for q, k in set(cells) for n in (0, 1)]).mean(0)
    torch.testing.assert_close(chosen.matrix(1, 0), mean, rtol=1e-10, atol=1e-12)
    assert why.provenance.options["heads"] == "all" and why.provenance.options["cells"] is None
    assert chosen.provenance.options["heads"] == [[1, 2], [1, 0], [0, 1]]
    assert chosen.provenance.options["cells"] == [[2, 0], [5, 1], [5, 4]]
    heads = {0: [1], 1: [0, 2]}
    assert chosen.residual.isnan().tolist() == [
        [head not in heads.get(layer, []) for head in range(hooked.n_heads)] for layer in range(hooked.n_layers)
    ]
    line = chosen.explain(1, 0, 2)
    assert ", key" not in line and line.startswith("L1H0 at 2 “") and "” and 0 “" in line
    refuses(r"query 5 has several cells; `key` must be one of 1, 4\.", chosen.matrix, 1, 0, 5)


def test_a_cell_counts_in_the_texts_that_have_it() -> None:
    inputs = models.padded("gpt2", length=7)
    why = am.decompose_by_source(models.hooked("gpt2"), inputs, cells=[(5, 3), (2, 1)], layers=[1])
    assert (why.parts[0].key_at[:, 0] >= 0).tolist() == [[True, True], [True, False], [True, False]]
    both = [why.matrix(1, 4, 2, text=text) for text in range(3)]
    mean = (torch.stack(both).sum(0) + why.matrix(1, 4, 5)) / 4
    torch.testing.assert_close(why.matrix(1, 4), mean, rtol=1e-4, atol=1e-6)
    refuses(r"no cell \(5, 3\) in text 1", why.matrix, 1, 4, 5, 3, text=1)
    tops = am.decompose_by_source(models.hooked("gpt2"), inputs, layers=[1])
    refuses(r"no cell \(5, \.\.\.\) in text 1", tops.matrix, 1, 4, 5, text=1)


def test_a_cell_that_a_sliding_window_hides_in_some_layers() -> None:
    assert models.plain("gemma2").config.layer_types == ["sliding_attention", "full_attention"]
    why = am.decompose_by_source(models.hooked("gemma2"), models.token_ids("gemma2"), cells=[(6, 1)])
    assert bool((why.parts[0].key_at == -1).all() and (why.parts[1].key_at == 1).all())
    assert bool(why.matrix(0, 1).isnan().all()) and not bool(why.matrix(1, 1).isnan().any())


def test_a_long_text_in_row_blocks_is_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.model.attention import attend as attention

    ids, hooked = models.token_ids("bloom", 2, 50), models.hooked("bloom", F64)
    chosen = (None, [(3, 1), (40, 2), (40, 39), (17, 0)])
    whole = [am.decompose_by_source(hooked, ids, cells=cells) for cells in chosen]
    monkeypatch.setattr(attention, "block_bytes", lambda device: 1)
    blocks = [am.decompose_by_source(hooked, ids, cells=cells) for cells in chosen]
    for one, other in zip(whole, blocks, strict=True):
        for part, same in zip(one.parts, other.parts, strict=True):
            assert torch.equal(part.key_at, same.key_at) and torch.equal(part.keys_seen, same.keys_seen)
            torch.testing.assert_close(part.query, same.query, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(part.mean_key, same.mean_key, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(part.preference, same.preference, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_the_frame_holds_every_pair() -> None:
    why = am.decompose_by_source(models.hooked("bloom"), models.token_ids("bloom"), heads=[(1, 2), (0, 1)])
    frame = why.to_frame()
    assert list(frame.columns) == ["layer", "head", "source_q", "source_k", "query_key", "contrast"]
    assert len(frame) == sum(len(why.labels_of(layer)) ** 2 for layer in (0, 1))
    assert why.labels_of(0) == ("token embedding", "embedding norm shift", "norm shift")
    row = frame[(frame["layer"] == 1) & (frame["source_q"] == "L0 MLP") & (frame["source_k"] == "L0H2")]
    place = (why.sources.index("L0 MLP"), why.sources.index("L0H2"))
    assert float(row["query_key"].iloc[0]) == float(why.matrix(1, 2)[place])
    assert float(row["contrast"].iloc[0]) == float(why.matrix(1, 2, contrast=True)[place])
    assert "<table" in why._repr_html_()


def test_a_line_names_the_strongest_pairs_and_the_rest() -> None:
    why = am.decompose_by_source(models.hooked("gpt2"), models.token_ids("gpt2"), layers=[2])
    for query in range(1, 7):
        for head in range(5):
            pairs = why.matrix(2, head, query, text=1, contrast=True)
            line = why.explain(2, head, query, text=1).replace("−", "-")
            whole, (source_q, source_k) = float(pairs.sum()), divmod(int(pairs.abs().argmax()), len(pairs))
            value = float(pairs[source_q, source_k])
            named = f": {why.sources[source_k]} (key) × {why.sources[source_q]} (query) {value:+.2f}"
            assert f"L2H{head} at {query} “" in line and f"relative to the mean of the {query + 1} keys it sees" in line
            assert named + (f" ({100 * value / whole:.0f}\u00a0%), " if whole > 0 else ", ") in line
            assert f"query_key gives {whole:+.2f}: " in line
            assert line.count(" × ") == 3 and f"{len(pairs) ** 2 - 3} other pairs" in line
            parts = [float(piece.rsplit("(query) ")[1].split()[0].rstrip(",")) for piece in line.split(" × ")[1:]]
            assert sum(parts) + float(line.split(" other pairs ")[1].split(";")[0]) == pytest.approx(whole, abs=0.021)


@pytest.mark.parametrize("name", ["bloom", "gpt2", "gemma2", "llama_bias"])
def test_the_other_terms_complete_the_score_and_the_largest_is_named(name: str) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    why, terms = am.decompose_by_source(hooked, ids, layers=[1]), am.decompose_scores(hooked, ids, layers=[1]).terms
    (part,) = why.parts
    assert part.others and set(part.others) <= set(terms)
    named = 0
    for head, query in itertools.product(part.heads, range(1, ids.shape[1])):
        key, pairs = int(part.key_at[0, head, query]), float(why.matrix(1, head, query, contrast=True).sum())
        others = {}
        scores = sum(value.expand(3, 1, hooked.n_heads, 7, 7)[0, 0, head, query] for value in terms.values())
        assert key == int(scores.argmax())
        for other in part.others:
            row = terms[other][0, 0, head, query if terms[other].shape[3] > 1 else 0]
            others[other] = float(row[key] - row[terms["mask"][0, 0, 0, query] == 0].mean())
            assert float(part.others[other][0, head, query]) == pytest.approx(others[other], abs=1e-4)
        assert pairs + sum(others.values()) == pytest.approx(float(part.preference[0, head, query]), abs=1e-3)
        largest = max(others, key=lambda other: abs(others[other]))
        end = why.explain(1, head, query).partition("; query_key")[2].partition("; ")[2]
        if abs(others[largest]) > abs(pairs):
            assert end.startswith(f"the largest term is {largest}: {signed(others[largest], '.2f')}")
            named += 1
        else:
            assert not end
    assert named or name == "gemma2"


def test_one_token_has_no_choice() -> None:
    for name in ("gpt2", "llama", "bert"):
        why = am.decompose_by_source(models.hooked(name), torch.tensor([[5]]))
        assert bool(why.matrix(1, 0).isnan().all()) and not bool(why.matrix(1, 0, 0).isnan().any())
        assert bool((why.matrix(1, 0, 0, contrast=True) == 0).all())
        assert why.explain(0, 0, 0).endswith("sees only one key, so its attention is fixed")
        assert "<table" in why._repr_html_()


# -- what it leaves alone, and what it refuses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "point"),
    [("gpt2", "resid_pre"), ("gpt2", "attn_out"), ("bert", "attn_in"), ("bert", "attn_out"), ("llama", "q"),
     ("llama", "k"), ("llama", "scores")],
)  # fmt: skip
def test_a_hook_that_no_writer_explains_is_refused(name: str, point: str) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    layer = 0 if point == "attn_out" else 1
    generator = torch.Generator().manual_seed(4)

    def change(x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.randn(x.shape, generator=generator))

    with hooked.hooks({(point, layer): change}), pytest.raises(ExactnessError, match=r"layer 1, head [0-9]: the "):
        am.decompose_by_source(hooked, ids, layers=[1])


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("point", [("z", 0), ("mlp_out", 0), ("pattern", 0), ("v", 0), ("embed", None)])
def test_a_hook_on_what_is_written_is_part_of_it(name: str, point: tuple[str, int | None]) -> None:
    hooked, ids = models.hooked(name), models.token_ids(name)
    where = point[0] if point[1] is None else point
    with hooked.hooks({where: lambda x: x * 0.5}):  # type: ignore[dict-item]
        why, split = am.decompose_by_source(hooked, ids), am.decompose_scores(hooked, ids)
    key = int(why.parts[1].key_at[1, 2, 6])
    found = float(why.matrix(1, 2, 6, text=1).sum())
    assert found == pytest.approx(float(split.terms["query_key"][1, 1, 2, 6, key]), abs=1e-4)


def test_a_projected_embedding_is_refused_with_the_reason() -> None:
    """Reasons of other families: tests/test_matrix.py."""
    with pytest.raises(UnsupportedModelError, match="its token embedding of 10 dimensions is projected to the 24 of"):
        am.decompose_by_source(am.load(models.fresh("opt_post")), torch.tensor([[3, 4]]))


@pytest.mark.parametrize("name", ["gpt_oss", "t5_encoder_alone", "falcon_new", "falcon_multi_query", "opt_post_norm"])
def test_models_of_other_makes_add_up_too(name: str) -> None:
    post = models.randomised(models.opt(do_layer_norm_before=False)) if name == "opt_post_norm" else None
    hooked = am.load(post or models.fresh(name))
    why = am.decompose_by_source(hooked, torch.tensor([[5, 9, 7, 12, 5, 30]]))
    assert len(why.to_frame()) == sum(hooked.n_heads * len(why.labels_of(layer)) ** 2 for layer in why.layers)


def test_half_precision_models_keep_to_their_own_tolerance() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        why = am.decompose_by_source(am.load(models.fresh("bloom"), dtype=dtype), models.token_ids("bloom"))
        assert why.parts[1].query.dtype == F32


def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decomposition_by_source, "MAX_BYTES", 20_000)
    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    refuses(r"in 7 cells of 6 heads take about .* GiB.*layers=\[3\]", am.decompose_by_source, hooked, ids)
    assert len(am.decompose_by_source(hooked, ids, cells=[(4, 1)], heads=[(1, 2)]).sources) == 8


def test_what_is_out_of_range_is_named_with_its_range(unchecked: None) -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    why = am.decompose_by_source(hooked, ids, heads=[(2, 1), (0, 3)])

    def ask(**options: Any) -> Callable[[], Any]:
        return lambda: am.decompose_by_source(hooked, ids, **options)

    bad: list[tuple[Callable[[], Any], str]] = [
        (ask(layers=[3]), r"from 0 to 2 \(this model has 3 layers\); got 3"),
        (ask(heads="some"), r'`heads` must be "all" or a list of \(layer, head\); got \'some\''),
        (ask(heads=[(0, 5)]), r"`head` must be from 0 to 4 \(this model has 5 heads in each layer\); got 5"),
        (ask(heads=[(1, 0)], layers=[0, 2]), "`heads` names layer 1, which is not in `layers`"),
        (ask(cells=[(7, 0)]), "`query` must be from 0 to 6; got 7"),
        (ask(cells=[(2, -1)]), "`key` must be from 0 to 6; got -1"),
        (ask(cells=[]), r"`cells` must be a list of \(query, key\); got an empty list"),
        (ask(cells=[3]), r"`cells` must be a list of \(query, key\); got \[3\]"),
        (ask(cells=[(4, 1), (2, 5)]), "token 2 cannot see key 5 in any text"),
        (lambda: why.matrix(1, 1), r"one of the layers decomposed, \[2, 0\]; got 1"),
        (lambda: why.matrix(2, 3), r"one of those decomposed in layer 2, \[1\]; got 3"),
        (lambda: why.labels_of(4), r"one of the layers decomposed, \[2, 0\]; got 4"),
        (lambda: why.explain(2, 1, 7), "`query` must be from 0 to 6; got 7"),
        (lambda: why.explain(2, 1, 4, 9), "`key` must be from 0 to 6; got 9"),
        (lambda: why.explain(2, 1, 4, text=3), r"`text` must be from 0 to 2 \(3 texts were run\); got 3"),
        (lambda: why.explain(2, 1, 1, 5), r"no cell \(1, 5\) in text 0\. Choose a key .*cells=\[\(1, 5\)\]"),
    ]
    for call, message in bad:
        refuses(message, call)
