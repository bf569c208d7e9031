"""query_key over pairs of directions: exact for any directions, and the terms that plain transformers models give."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import reference
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import ExactnessError, InputError
from attnmech.methods.scores import decompose_by_source as decomposition_by_source
from attnmech.methods.scores.figures import pair_map

F32, F64 = torch.float32, torch.float64


def vectors(count: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return {f"direction {number}": vector for number, vector in enumerate(drawn)}


class Dictionary:
    """A sparse autoencoder as SAELens has it: ReLU of an affine map, and a decoder."""

    def __init__(self, features: int, width: int, *, size: float = 1.0, bias: bool = True, dtype: torch.dtype = F32):
        generator = torch.Generator().manual_seed(features)
        self.W_enc = size * torch.randn(width, features, generator=generator).to(dtype)
        self.W_dec = torch.randn(features, width, generator=generator).to(dtype)
        self.b_enc = torch.full((features,), -1.0, dtype=dtype)
        if bias:
            self.b_dec = torch.randn(width, generator=generator).to(dtype)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.W_enc + self.b_enc)


DIRECTIONS: dict[str, Callable[[int], Any]] = {
    "two": lambda width: vectors(2, width),
    "overcomplete": lambda width: vectors(2 * width + 1, width),
    "dictionary": lambda width: Dictionary(3 * width, width, size=0.3),
    "no bias": lambda width: Dictionary(5, width, bias=False),
    "bad": lambda width: Dictionary(4 * width, width, size=30.0),
}


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        ("gpt2", "two", F32), ("llama", "overcomplete", F64), ("gemma2", "dictionary", F32), ("bloom", "no bias", F64),
        ("bert", "bad", F32), ("qwen3", "two", F64), ("gpt2", "dictionary", F64), ("llama", "bad", F32),
        ("gemma2", "bad", F64), ("bert", "overcomplete", F64),
    ],
)  # fmt: skip
def test_the_pairs_add_up_to_query_key_whatever_the_directions(name: str, kind: str, dtype: torch.dtype) -> None:
    hooked, inputs = models.hooked(name, dtype), models.padded(name, length=6)
    why = am.decompose_by_source(hooked, inputs, layers=[1], directions=DIRECTIONS[kind](hooked.d_model))
    split = am.decompose_scores(hooked, inputs)
    query_key = split.terms["query_key"]
    part = why.parts[0]
    for head in range(hooked.n_heads):
        # The scale of the sum: the parts may be far larger than the score.
        size = max(float(split.largest[1].max()), part.scale * _product(part.query[:, head], part.key[:, head]))
        limit = (1e-9 if dtype == F64 else 1e-5) * size
        for text, query in inputs["attention_mask"].nonzero().tolist():
            key = int(part.key_at[text, head, query])
            row = query_key[text, 1, head, query]
            seen = split.visible[text, 1, 0, query].nonzero()[:, 0]
            assert abs(float(why.matrix(1, head, query, text=text).sum() - row[key])) <= limit
            contrast = why.matrix(1, head, query, text=text, contrast=True)
            assert abs(float(contrast.sum() - (row[key] - row[seen].mean()))) <= limit


def _product(query: Tensor, key: Tensor) -> float:
    return float(query.norm(dim=-1).sum(dim=-1).max() * key.norm(dim=-1).sum(dim=-1).max())


@torch.no_grad()
def parts_by_hand(name: str, ids: Tensor, layer: int, directions: Any) -> dict[str, Tensor]:
    """The parts of a layer's attn_in along directions, from the hidden states of the plain model."""
    model = models.plain(name, F64)
    x = model(ids, output_hidden_states=True).hidden_states[layer]
    if isinstance(directions, dict):
        matrix = torch.stack(list(directions.values()))
        activations = torch.linalg.lstsq(matrix.T, x.flatten(0, 1).T).solution.T.view(*x.shape[:2], -1)
        parts = {
            label: activations[..., place, None] * vector for place, (label, vector) in enumerate(directions.items())
        }
    else:
        activations = directions.encode(x)
        parts = {
            f"feature {place}": activations[..., place, None] * vector for place, vector in enumerate(directions.W_dec)
        }
        parts["bias"] = directions.b_dec.expand_as(x)
    parts["rest"] = x - torch.stack(list(parts.values())).sum(0)
    weights = reference.layer_weights(model, layer)
    if weights.beta is None:
        return {
            label: part * weights.gamma / (x.pow(2).mean(-1, True) + weights.eps).sqrt()
            for label, part in parts.items()
        }
    scale = weights.gamma / (x.var(-1, unbiased=False, keepdim=True) + weights.eps).sqrt()
    normed = {label: (part - part.mean(-1, keepdim=True)) * scale for label, part in parts.items()}
    return normed | {"norm shift": weights.beta.expand_as(x)}


@pytest.mark.core
@pytest.mark.parametrize("kind", ["named", "dictionary"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_pair_is_what_the_plain_model_gives(name: str, kind: str) -> None:
    hooked, ids, layer = models.hooked(name, F64), models.token_ids(name, 2, 6), 1
    width = hooked.d_model
    directions = vectors(3, width) if kind == "named" else Dictionary(2 * width, width, dtype=F64)
    why = am.decompose_by_source(hooked, ids, layers=[layer], directions=directions)
    parts = parts_by_hand(name, ids, layer, directions)
    model = models.plain(name, F64)
    weights, turned = reference.layer_weights(model, layer), reference.turns(model, 6, F64)
    scale, group = reference.scale(model), len(weights.W_Q) // len(weights.W_K)
    tolerance = 1e-9 if name == "gpt2" else 3e-6  # Llama's norm computes in float32
    assert set(why.sources) - {"other features"} <= parts.keys()

    def turn(vector: Tensor, place: int) -> Tensor:
        return vector if turned is None else vector @ turned[place]

    for head in range(hooked.n_heads):
        W_Q, W_K = weights.W_Q[head].detach(), weights.W_K[head // group].detach()
        for query in (1, 5):
            key = int(why.parts[0].key_at[1, head, query])
            pairs = why.matrix(layer, head, query, text=1)
            expected = torch.zeros_like(pairs)
            for row, source_q in enumerate(why.sources):
                for column, source_k in enumerate(why.sources):
                    if "other features" not in (source_q, source_k):
                        q = turn(parts[source_q][1, query] @ W_Q, query)
                        expected[row, column] = scale * (q @ turn(parts[source_k][1, key] @ W_K, key))
            assert float((pairs - expected).abs().max()) <= tolerance * float(expected.abs().max())
            best = divmod(int(expected.abs().argmax()), len(expected))
            top = why.pairs(layer, head, query, text=1, top=1).iloc[0]
            assert (top["source_q"], top["source_k"]) == tuple(why.sources[place] for place in best)
            assert top["contribution"] == pytest.approx(float(expected[best]), rel=1e-5)


@pytest.mark.parametrize(("name", "spare"), [("gpt2", 0), ("llama", 7)])
def test_directions_that_span_the_stream_leave_no_rest(name: str, spare: int) -> None:
    hooked = models.hooked(name, F64)
    directions = vectors(hooked.d_model + spare, hooked.d_model)
    why = am.decompose_by_source(hooked, models.token_ids(name), layers=[1], directions=directions)
    rest = why.sources.index("rest")
    for head in range(hooked.n_heads):
        pairs = why.matrix(1, head)
        assert float(torch.cat([pairs[rest], pairs[:, rest]]).abs().max()) <= 1e-10 * float(pairs.abs().max())


def test_dependent_directions_share_what_they_explain_and_the_result_says_so() -> None:
    hooked, ids = models.hooked("llama", F64), models.token_ids("llama")
    one, other = vectors(2, hooked.d_model).values()
    alone = am.decompose_by_source(hooked, ids, layers=[1], directions={"one": one, "other": other})
    twice = am.decompose_by_source(
        hooked, ids, layers=[1], directions={"one": one, "again": -3.0 * one.float(), "other": other.tolist()}
    )
    assert alone.sources == ("one", "other", "rest") and twice.sources == ("one", "again", "other", "rest")
    pairs, shared = alone.matrix(1, 2, 5), twice.matrix(1, 2, 5)
    torch.testing.assert_close(shared[0], shared[1], rtol=1e-5, atol=1e-7)
    joined = torch.stack([shared[0] + shared[1], *shared[2:]])
    joined = torch.stack([joined[:, 0] + joined[:, 1], *joined[:, 2:].T], dim=1)
    torch.testing.assert_close(joined, pairs, rtol=1e-5, atol=1e-7)
    assert "4 sources from 3 directions of rank 2 (activations of the smallest norm); residual" in repr(twice)
    assert "3 sources from 2 directions; residual" in repr(alone)


def test_a_large_dictionary_has_only_its_active_features_as_sources() -> None:
    hooked, ids = models.hooked("gpt2", F64), models.token_ids("gpt2", 1, 7)
    dictionary = Dictionary(20_000, hooked.d_model, size=0.05, dtype=F64)
    dictionary.b_enc -= 0.5
    active = dictionary.encode(hooked.run(ids, points=["resid_pre"], layers=[2])["resid_pre", 2])[0] > 0
    why = am.decompose_by_source(hooked, ids, heads=[(2, 3)], cells=[(6, 2)], directions=dictionary)
    numbers = (active[6] | active[2]).nonzero()[:, 0].tolist()
    assert 0 < len(numbers) < 2000
    assert why.sources == (
        *(f"feature {number}" for number in numbers), "other features", "bias", "rest", "norm shift",
    )  # fmt: skip
    pairs, contrast = why.matrix(2, 3, 6), why.matrix(2, 3, 6, contrast=True)
    for place, number in enumerate(numbers):
        assert active[6, number] or bool((pairs[place] == 0).all())
        assert active[2, number] or bool((pairs[:, place] == 0).all())
    others = why.sources.index("other features")
    assert float(torch.cat([pairs[others], pairs[:, others]]).abs().max()) < 1e-12
    assert float(contrast[:, others].abs().max()) > 1e-6  # in the mean over keys that the contrast subtracts
    row = am.decompose_scores(hooked, ids).terms["query_key"][0, 2, 3, 6]
    assert float(contrast.sum()) == pytest.approx(float(row[2] - row.mean()), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_a_dictionary_keeps_what_it_returned_and_computes_in_its_own_precision(dtype: torch.dtype) -> None:
    class Keeps(Dictionary):
        def encode(self, x: Tensor) -> Tensor:
            assert x.dtype == dtype
            self.kept = super().encode(x)
            return self.kept

    hooked, ids = models.hooked("bloom"), models.token_ids("bloom")
    dictionary = Keeps(50, hooked.d_model, dtype=dtype)
    why = am.decompose_by_source(hooked, ids, cells=[(4, 1)], layers=[1], directions=dictionary)
    assert torch.equal(dictionary.kept, Dictionary(50, hooked.d_model, dtype=dtype).encode(
        hooked.run(ids, points=["resid_pre"], layers=[1])["resid_pre", 1].to(dtype)
    ))  # fmt: skip
    expected = am.decompose_scores(hooked, ids).terms["query_key"][0, 1, 0, 4, 1]
    assert float(why.matrix(1, 0, 4).sum()) == pytest.approx(float(expected), abs=1e-3)


def test_half_precision_models() -> None:
    hooked = am.load(models.fresh("gpt2"), dtype=torch.bfloat16)
    for directions in (vectors(3, hooked.d_model), Dictionary(40, hooked.d_model)):
        why = am.decompose_by_source(hooked, models.token_ids("gpt2"), layers=[2], directions=directions)
        assert why.parts[0].query.dtype == F32


def test_a_result_names_its_directions() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    made = [
        am.decompose_by_source(hooked, ids, layers=[1], directions=directions)
        for directions in (vectors(2, 20), vectors(2, 20, seed=1), Dictionary(9, 20), None)
    ]
    assert len({why.provenance.options["directions"] for why in made}) == 4
    assert "from a dictionary of 9 features; residual" in repr(made[2])
    assert made[3].provenance.options["directions"] is None


def test_pairs_and_the_figure_show_the_matrix() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    for why in (
        am.decompose_by_source(hooked, ids, layers=[1], directions=vectors(5, 20)),
        am.decompose_by_source(hooked, ids, layers=[1]),
    ):
        for options in ({}, {"query": 5, "text": 1}, {"query": 5, "text": 1, "contrast": True}):
            matrix = why.matrix(1, 2, **options)
            pairs = why.pairs(1, 2, top=7, **options)
            assert list(pairs.columns) == ["source_q", "source_k", "contribution"] and len(pairs) == 7
            sizes = matrix.flatten().abs().sort(descending=True).values
            assert pairs["contribution"].abs().tolist() == sizes[:7].tolist()
            for source_q, source_k, value in pairs.itertuples(index=False):
                assert float(matrix[why.sources.index(source_q), why.sources.index(source_k)]) == value
            assert len(why.pairs(1, 2, top=10**6, **options)) == matrix.numel()
            assert f"<td>{why.pairs(1, 2, top=1, contrast=True)['source_q'][0]}</td>" in why._repr_html_()
            drawn = pair_map(matrix, why.sources, top=3, label="").data[0]
            assert drawn.z.shape == (4, 4) and drawn.x[3] == drawn.y[3] == f"{len(matrix) - 3} other"
            assert float(drawn.z.sum()) == pytest.approx(float(matrix.sum()), abs=1e-4)
            assert float(abs(drawn.z[:3, :3]).max()) == pytest.approx(float(sizes[0]), rel=1e-6)
            where = {name: value for name, value in options.items() if name != "contrast"}
            figure = why.plot("contrast" if "contrast" in options else None, layer=1, head=2, **where)
            named = "contrast" if "contrast" in options else "query_key"
            assert figure == pair_map(matrix, why.sources, top=12, label=named)
            whole = pair_map(matrix, why.sources, top=50, label="").data[0]
            at = whole.y.index("norm shift"), whole.x.index("rest" if "rest" in whole.x else "L0 MLP")
            names = "norm shift", whole.x[at[1]]
            assert float(whole.z[at]) == pytest.approx(float(matrix[tuple(map(why.sources.index, names))]), rel=1e-6)


def test_a_hook_on_the_stream_is_part_of_it_and_one_on_attn_in_is_refused() -> None:
    hooked, ids, directions = models.hooked("gpt2", F64), models.token_ids("gpt2"), vectors(2, 20)
    with hooked.hooks({("resid_pre", 1): lambda x: 2 * x + 1}):
        why = am.decompose_by_source(hooked, ids, layers=[1], directions=directions)
        query_key = am.decompose_scores(hooked, ids).terms["query_key"][1, 1, 2, 6]
    key = int(why.parts[0].key_at[1, 2, 6])
    assert float(why.matrix(1, 2, 6, text=1).sum()) == pytest.approx(float(query_key[key]), abs=1e-9)
    with hooked.hooks({("attn_in", 1): lambda x: x + x.abs()}), pytest.raises(ExactnessError, match="the sources of"):
        am.decompose_by_source(hooked, ids, layers=[1], directions=directions)


def test_features_that_take_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decomposition_by_source, "MAX_BYTES", 20_000)
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    dictionary = Dictionary(500, 20)
    with pytest.raises(InputError, match=r"the parts of every source in 7 cells of 5 heads take about .* GiB"):
        am.decompose_by_source(hooked, ids, layers=[1], directions=dictionary)
    monkeypatch.setattr(decomposition_by_source, "MAX_BYTES", 100_000)
    assert am.decompose_by_source(hooked, ids[:1], heads=[(1, 2)], cells=[(4, 1)], directions=dictionary).layers == (1,)


def changed(**values: Any) -> Dictionary:
    dictionary = Dictionary(6, 20)
    for name, value in values.items():
        setattr(dictionary, name, value)
    return dictionary


def test_directions_that_are_none_are_named_with_what_to_try(unchecked: None) -> None:
    hooked, ids, nan = models.hooked("gpt2"), models.token_ids("gpt2"), float("nan")
    one = torch.ones(20)
    wide = "must be a vector of 20 numbers, the width of the stream; got"
    bad: list[tuple[Any, str]] = [
        ({"a": torch.ones(19)}, f"direction 'a' {wide} a Tensor of torch.float32 \\[19\\]"),
        ({"a": 3.0}, f"direction 'a' {wide} 3.0"),
        ({"a": "up"}, "direction 'a' must be a vector of 20 numbers; got 'up'"),
        ({"a": ["up"] * 20}, "direction 'a' must be a vector of 20 numbers; got"),
        ({"a": one, "b": torch.zeros(20)}, "direction 'b' must not be zero"),
        ({"a": one * nan}, "direction 'a' must hold finite real numbers"),
        ({"a": one * 1j}, "direction 'a' must hold finite real numbers"),
        ({}, "`directions` must hold at least one direction; got an empty mapping"),
        ({3: one}, "names of `directions` must be strings other than rest, bias, other features, norm shift; got 3"),
        ({"rest": one}, "names of `directions` must be strings other than .*; got 'rest'"),
        (torch.ones(2, 20), "`directions` must map names to vectors, or have `encode` and `W_dec`"),
        (changed(W_dec=None), r"`directions.W_dec` must be a tensor \[feature, 20\]; got None"),
        (
            changed(W_dec=torch.ones(20, 6)),
            r"must be a tensor \[feature, 20\]; got a Tensor of torch.float32 \[20, 6\]",
        ),
        (changed(W_dec=torch.full((6, 20), nan)), "`directions.W_dec` must hold finite real numbers"),
        (changed(b_dec=torch.ones(6)), r"`directions.b_dec` must be a tensor \[20\]; got"),
        (changed(b_dec=one * nan), "`directions.b_dec` must hold finite real numbers"),
        (changed(encode=None), "`directions` must map names to vectors, or have `encode`"),
        (changed(encode=lambda x: x), r"an activation for each of the 6 rows of `W_dec`, \[3, 7, 6\]; got a Tensor"),
        (changed(encode=lambda x: x[..., :6].to_sparse()), "what `directions.encode` returns must be a dense tensor"),
        (changed(encode=lambda x: x[..., :6] * nan), "must return finite activations; got NaN or infinity"),
    ]
    for directions, message in bad:
        refuses(message, am.decompose_by_source, hooked, ids, layers=[1], directions=directions)
    for options in ({}, {"layers": [0, 2]}, {"heads": [(0, 1), (1, 1)]}):
        with pytest.raises(InputError, match=r"belong to the stream of one layer; got layers \[0, .*layers=\[0\]"):
            am.decompose_by_source(hooked, ids, directions={"a": one}, **options)
    why = am.decompose_by_source(hooked, ids, layers=[1], directions={"a": one})
    refuses("`top` must be a whole number, 1 or more; got 0", why.pairs, layer=1, head=0, top=0)
    for call in (why.pairs, why.plot):
        refuses(r"`layer` must be one of the layers decomposed, \[1\]; got 0", call, layer=0, head=0)
