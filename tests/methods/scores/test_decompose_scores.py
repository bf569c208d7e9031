"""The score ledger against the same terms computed from raw transformers weights, and results derived from it."""

import itertools
import json
import math
import re
from typing import Any

import models
import pytest
import reference
import torch
from comparing import close, refuses
from torch import Tensor

import attnmech as am
from attnmech.errors import ExactnessError
from attnmech.model.stack import ledger
from attnmech.results import score_terms

F32, F64 = torch.float32, torch.float64
WINDOWED = ("mistral", "gemma2", "gpt_oss", "gpt_oss_yarn")
CASES = [
    *(
        (name, dtype, "right")
        for name in ("bloom", "bloom5", "gpt2", "llama", "llama_bias", "bert")
        for dtype in (F32, F64)
    ),
    *((name, dtype, "left") for name in ("bloom", "llama_bias") for dtype in (F32, F64)),
    *(
        (name, F32 if number % 2 or name in models.SINGLE_ONLY else F64, ("right", "left")[number // 2 % 2])
        for number, name in enumerate(models.NEW)
    ),
]
"""Precision and padding alternate among further families."""


@pytest.mark.core
@pytest.mark.parametrize(("name", "dtype", "side"), CASES)
def test_every_term_is_what_the_raw_weights_give_and_they_add_up(name: str, dtype: torch.dtype, side: str) -> None:
    """The terms of every layer on the stream that enters it; their sum is the score that the model used.

    In float64, transformers gives NaN for rows that see no key: windows of 3 tokens need longer texts.
    """
    model, hooked = models.plain(name, dtype), models.hooked(name, dtype)
    inputs = models.padded(name, side, batch=2 if name in WINDOWED else 3)
    splits = {fold_norm: am.decompose_scores(hooked, inputs, fold_norm=fold_norm) for fold_norm in (False, True)}
    acts, mask = hooked.run(inputs, points=["scores", "resid_pre", "attn_in"]), inputs["attention_mask"]
    given = models.plain(name, F32 if side == "left" else dtype)
    with torch.no_grad():
        attentions = given(**inputs, output_attentions=True).attentions if name in models.MAKERS else None
    real = mask.bool()
    rows, both = real[:, None, :, None], real[:, None, :, None] & real[:, None, None, :]
    tolerance = 1e-5 if dtype == F32 else 1e-12
    for (fold_norm, split), layer in itertools.product(splits.items(), range(hooked.n_layers)):
        scores, visible = acts["scores", layer], reference.visible(model, mask, layer) & rows
        x = reference.attention_input(model, layer, acts["resid_pre", layer])
        close(acts["attn_in", layer][real], x[real], tolerance)
        expected = reference.terms(model, layer, x, mask, fold_norm)
        assert set(split.terms) == set(expected)
        terms = {term: value[:, layer].expand_as(scores) for term, value in split.terms.items()}
        keep = visible.expand_as(scores)
        largest = scores.masked_fill(~keep, 0.0).abs().amax(dim=(0, 2, 3))
        for term, value in expected.items():
            here = both.expand_as(value) if name in models.MAKERS else keep
            ours, theirs = terms[term].expand_as(value)[here], value.expand_as(scores)[here]
            # ALiBi's slopes are computed in float32 in every model.
            close(ours, theirs, 1e-6 if term == "position" and dtype == F64 else tolerance)
        total = sum(value for term, value in terms.items() if term != "mask")
        assert torch.equal(split.visible[:, layer], visible)
        close(total[keep], scores[keep], tolerance)
        if attentions is not None:
            ours, here = torch.softmax(total + terms["mask"], dim=-1), rows.expand_as(scores)
            close(ours[here], attentions[layer][here].to(dtype), 1e-5 if given.dtype == F32 else 1e-6)
        torch.testing.assert_close(split.largest[layer].to(scores), largest, rtol=1e-6, atol=0)
        assert float((split.residual[layer] / split.largest[layer].max()).max()) <= tolerance


def split_of(name: str, dtype: torch.dtype = F32, length: int = 7, **options: Any) -> am.results.ScoreDecomposition:
    return am.decompose_scores(models.hooked(name, dtype), models.padded(name, length=length), **options)


def test_positions_that_a_caller_gives_turn_the_queries_and_keys() -> None:
    hooked, ids = models.hooked("llama", F64), models.token_ids("llama", 1, 5)
    places = torch.tensor([[3, 4, 9, 11, 12]])
    split = am.decompose_scores(hooked, {"input_ids": ids, "position_ids": places})
    model = models.plain("llama", F64)
    x = reference.attention_input(model, 0, model.get_input_embeddings()(ids).detach())
    w = reference.layer_weights(model, 0)
    for query, key in ((4, 0), (3, 2)):
        left = x[0, query] @ w.W_Q[5] @ reference.rotation(int(places[0, query]), 8, 10000.0, F64)
        right = x[0, key] @ w.W_K[1] @ reference.rotation(int(places[0, key]), 8, 10000.0, F64)
        assert float(split.terms["query_key"][0, 0, 5, query, key]) == pytest.approx(
            float(left @ right) / math.sqrt(8), abs=1e-12
        )


# -- which terms there are, and along which axes they change -------------------------------------------------


@pytest.mark.parametrize("name", models.FAMILIES)
def test_terms_that_a_model_has_not_are_absent_and_others_broadcast(name: str) -> None:
    hooked, split = models.hooked(name), split_of(name)
    biases = set() if name == "llama" else {"key_bias", "query_bias", "constant"}
    present = {"query_key", "mask"} | biases | ({"position"} if name == "bloom" else set())
    assert set(split.terms) == present and len(split.terms) == len(present)
    for absent in {"key_bias", "position"} - present:
        with pytest.raises(KeyError, match=f"no term '{absent}'; they have query_key"):
            split.terms[absent]
    full = (3, hooked.n_layers, hooked.n_heads, 7, 7)
    for term in split.terms.values():
        assert torch.broadcast_shapes(term.shape, full) == full and term.shape[1] == hooked.n_layers
    if hooked.architecture.rotary is None:
        shapes = [split.terms[term].shape[3:] for term in ("key_bias", "query_bias", "constant")]
        assert shapes == [(1, 7), (7, 1), (1, 1)]


# -- shares --------------------------------------------------------------------------------------------------


def naive_shares(
    split: am.results.ScoreDecomposition, rank: int, survives: list[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    heads = split.residual.shape[1]
    batch, length = split.real.shape
    shape = (batch, len(split.layers), heads, length)
    terms = {name: split.terms[name].expand(*shape, length) for name in split.terms}
    keys = torch.full(shape, -1)
    shares = {name: torch.full(shape, torch.nan, dtype=terms["query_key"].dtype) for name in survives}
    for n in range(batch):
        for index in range(len(split.layers)):
            for h in range(heads):
                for i in range(length):
                    seen = [j for j in range(length) if split.visible[n, index, 0, i, j]]
                    score = {
                        j: sum(float(t[n, index, h, i, j]) for name, t in terms.items() if name != "mask") for j in seen
                    }
                    order = sorted(seen, key=lambda j: -score[j])
                    if rank >= len(order):
                        continue
                    key = keys[n, index, h, i] = order[rank]
                    above = {
                        name: float(terms[name][n, index, h, i, key])
                        - min(float(terms[name][n, index, h, i, j]) for j in seen)
                        for name in survives
                    }
                    if len(seen) > 1 and sum(above.values()) > 0:
                        for name in survives:
                            shares[name][n, index, h, i] = above[name] / sum(above.values())
    return keys, shares


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    ("name", "survives"),
    [
        ("bloom", ["query_key", "key_bias", "position"]),
        ("gpt2", ["query_key", "key_bias"]),
        ("bert", ["query_key", "key_bias"]),
        ("llama_bias", ["query_key", "key_bias", "query_bias", "constant"]),
        ("llama", ["query_key"]),
    ],
)
def test_shares_are_those_of_the_definition(name: str, survives: list[str], rank: int) -> None:
    split = split_of(name, F64, length=6)
    shares = split.shares_at(rank)
    keys, expected = naive_shares(split, rank, survives)
    assert list(shares) == survives
    assert torch.equal(shares.key, keys)
    for term in survives:
        torch.testing.assert_close(shares[term], expected[term], rtol=0, atol=1e-12, equal_nan=True)


# -- contrast ------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_contrast_is_the_difference_of_two_scores_term_by_term() -> None:
    for name in models.FAMILIES:
        hooked, ids = models.hooked(name, F64), models.token_ids(name)
        split = am.decompose_scores(hooked, ids)
        scores = hooked.run(ids, points=["scores"])["scores"]
        contrast = split.contrast(query=5, key_a=1, key_b=4)
        assert set(contrast) == set(split.terms) - {"mask"}
        difference = (scores[..., 5, 1] - scores[..., 5, 4]).transpose(0, 1)
        torch.testing.assert_close(contrast.total, difference, rtol=0, atol=1e-12)
        for term, value in contrast.items():
            whole = split.terms[term].expand(3, hooked.n_layers, hooked.n_heads, 7, 7)
            torch.testing.assert_close(value, whole[..., 5, 1] - whole[..., 5, 4], rtol=0, atol=1e-12)
        row = contrast.to_frame().query("sequence == 2 and layer == 1 and head == 2").iloc[0]
        assert row.total == pytest.approx(float(difference[2, 1, 2]), abs=1e-12)


def test_contrast_says_in_words_which_key_wins_and_why() -> None:
    split = am.decompose_scores(models.hooked("bloom"), torch.tensor([[7, 11, 13, 17, 19]]))
    contrast = split.contrast(query=4, key_a=1, key_b=3)
    for head in range(3):
        total = float(contrast.total[0, 1, head])
        said = contrast.explain(layer=1, head=head)
        winner, loser = ("'11' (1)", "'17' (3)") if total > 0 else ("'17' (3)", "'11' (1)")
        assert said.startswith(f"layer 1 head {head}: '19' (4) prefers {winner} to {loser} by {abs(total):.2f}")
        assert f"that is {math.exp(abs(total)):.3g} times" in said
        biggest = max(contrast, key=lambda name: abs(float(contrast[name][0, 1, head])))
        assert said.split("times: ")[1].startswith(biggest)
        sign = 1 if total > 0 else -1
        assert f"position {sign * float(contrast['position'][0, 1, head]):+.2f}" in said
        assert "constant" not in said
        assert "mask" not in said


def test_contrast_is_blank_where_a_text_is_too_short() -> None:
    split = am.decompose_scores(models.hooked("bloom"), models.padded("bloom"))
    contrast = split.contrast(query=5, key_a=0, key_b=1)
    assert bool(contrast.total[0].isfinite().all())
    assert bool(contrast.total[1:].isnan().all())
    assert "cannot see both keys" in contrast.explain(layer=0, head=0, text=1)


# -- the ledger of one row -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sequence", "query"),
    [("bloom", 1, 3), ("bloom", 0, None), ("gpt2", 2, None), ("bert", 1, 2), ("gemma2", 0, 4), ("gpt_oss", 1, None)],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_ledger_of_a_row_is_that_row_of_the_terms(name: str, sequence: int, query: int | None, side: str) -> None:
    hooked, inputs, layer, head = models.hooked(name), models.padded(name, side), 1, 2
    split = am.decompose_scores(hooked, inputs)
    pattern = hooked.run(inputs, points=["pattern"])["pattern", layer][sequence, head]
    here = inputs["attention_mask"][sequence].nonzero()[:, 0]
    number = len(here) - 1 if query is None else query
    row = here[number]
    seen = split.visible[sequence, layer, 0, row][here]
    order = sorted(seen.nonzero()[:, 0].tolist(), key=lambda key: -float(pattern[row, here[key]]))
    figure = split.plot("row_ledger", layer=layer, head=head, query=query, text=sequence)
    traces = {trace.meta: trace for trace in figure.data}
    assert set(traces) == set(split.terms) - {"mask"} | {"score", "probability"}
    for trace in figure.data:
        assert [int(label.split()[0]) for label in trace.y] == order
    shape = (3, hooked.n_layers, hooked.n_heads, 7, 7)
    keys = here[order]
    for term in set(split.terms) - {"mask"}:
        expected = split.terms[term].expand(shape)[sequence, layer, head, row, keys]
        close(torch.tensor(traces[term].x), expected, 1e-6)
    close(torch.tensor(traces["probability"].x), pattern[row, keys], 1e-5)
    total = sum(torch.tensor(traces[term].x) for term in set(split.terms) - {"mask"})
    close(total, torch.tensor(traces["score"].x), 1e-6)
    assert figure.layout.title.text.startswith(f"query {number} “{split.tokens[sequence][row]}”")


def test_a_view_with_heads_to_choose_opens_on_the_figure_of_one() -> None:
    split = am.decompose_scores(models.hooked("gpt2"), models.padded("gpt2", "right"), layers=[0, 2])
    view = split.show(layer=2, head=3, query=3, text=1)
    drawn = json.loads(split.plot("row_ledger", layer=2, head=3, query=3, text=1).to_json())
    assert (view.data["data"], view.data["layout"]) == (drawn["data"], drawn["layout"])
    assert view.data["choices"] == {"layer": [0, 2], "head": [0, 1, 2, 3, 4]}
    assert view.data["chosen"] == {"layer": 1, "head": 3}


@pytest.mark.parametrize("name", ["bloom", "gemma2", "gpt_oss"])
def test_one_score_in_one_line(name: str) -> None:
    hooked, inputs, layer, head = models.hooked(name), models.padded(name, "left"), 1, 2
    split = am.decompose_scores(hooked, inputs)
    pattern = hooked.run(inputs, points=["pattern"])["pattern", layer][1, head]
    here = inputs["attention_mask"][1].nonzero()[:, 0]
    query, key = here[-1], here[int(pattern[here[-1], here].argmax())]
    found = re.fullmatch(
        r"L1H2: .+ \((\d+)\) attends to .+ \((\d+)\) with weight ([\d.]+), score (-?[\d.]+): (.+)",
        split.explain(layer, head, query=len(here) - 1, text=1),
        flags=re.DOTALL,
    )
    assert found is not None
    assert (int(found[1]), int(found[2])) == (len(here) - 1, (here == key).nonzero().item())
    assert float(found[3]) == pytest.approx(float(pattern[query, key]), abs=6e-5)
    terms = dict(each.split(" ") for each in found[5].split(", "))
    assert set(terms) == set(split.terms) - {"mask"}
    shape = (3, hooked.n_layers, hooked.n_heads, 7, 7)
    for term, value in terms.items():
        expected = float(split.terms[term].expand(shape)[1, layer, head, query, key])
        assert float(value) == pytest.approx(expected, abs=6e-3)
    assert sum(map(float, terms.values())) == pytest.approx(float(found[4]), abs=0.03)
    refuses("token 0 cannot see key 1 in this text", split.explain, layer, head, query=0, key=1, text=1)


# -- select, provenance --------------------------------------------------------------------------------------


def test_layers_chosen_at_once_or_afterwards_are_the_same() -> None:
    whole, some = split_of("gpt2"), split_of("gpt2", layers=[2, 0])
    assert some.layers == (2, 0)
    chosen = whole.select([2, 0])
    assert chosen.layers == (2, 0)
    for name in whole.terms:
        assert torch.equal(some.terms[name], chosen.terms[name])
        if whole.terms[name].shape[1] == 3:
            assert torch.equal(chosen.terms[name][:, 0], whole.terms[name][:, 2])
    for found in (some, chosen):
        assert torch.equal(found.residual[[2, 0]], whole.residual[[2, 0]]) and found.residual[1].isnan().all()
        assert torch.equal(found.largest[[2, 0]], whole.largest[[2, 0]]) and found.largest[1].isnan().all()
    assert repr(some) == repr(chosen) and "nan" not in repr(some)
    assert torch.equal(chosen.shares_at(1).key, whole.shares_at(1).key[:, [2, 0]])


def test_a_result_stays_as_it_is_when_the_model_is_trained_on() -> None:
    model = models.fresh("gpt2")
    split = am.decompose_scores(am.load(model), models.token_ids("gpt2"))
    before = {term: value.clone() for term, value in split.terms.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1).add_(0.01)
    assert all(torch.equal(split.terms[term], value) for term, value in before.items())


def test_the_frame_has_a_row_a_head() -> None:
    split = split_of("bloom", layers=[1])
    frame = split.to_frame()
    assert frame[["layer", "head"]].to_numpy().tolist() == [[1, 0], [1, 1], [1, 2]]
    shares = split.shares_at(0)
    assert frame.position_share[2] == pytest.approx(float(shares["position"][:, 0, 2].nanmean()))
    assert frame.residual[1] == float(split.residual[1, 1])


# -- refusals ------------------------------------------------------------------------------------------------


def test_a_term_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_of("bloom")
    size = 3 * 2 * 3 * 7 * 7 * 4
    monkeypatch.setattr(score_terms, "MAX_TERM_BYTES", size)
    assert split.terms["query_key"].numel() * 4 == size
    monkeypatch.setattr(score_terms, "MAX_TERM_BYTES", size - 1)
    refuses(r"the term 'query_key' of 2 layers takes .* GiB.*layers=\[0\]", lambda: split.terms["query_key"])
    assert split.select([0]).terms["query_key"].shape == (3, 1, 3, 7, 7)
    assert split.terms["key_bias"].shape == (3, 2, 3, 1, 7)


@pytest.mark.parametrize(("name", "point"), [("bloom", "q"), ("bloom", "scores"), ("llama", "q"), ("llama", "k")])
def test_a_hook_that_changes_the_scores_is_not_explained_away(name: str, point: str) -> None:
    hooked = models.hooked(name)
    with hooked.hooks({(point, 1): lambda x: x * 1.01}), pytest.raises(ExactnessError, match="layer 1, head"):
        am.decompose_scores(hooked, models.token_ids(name))
    assert am.decompose_scores(hooked, models.token_ids(name)).layers[-1] == hooked.n_layers - 1


def strong_and_weak(name: str) -> Any:
    """A model in which head 0 of layer 1 has scores thousands of times as large as another head's."""
    model = models.fresh(name)
    attention = models.blocks_of(model)[1]
    with torch.no_grad():
        if name == "gpt2":
            fused, bias = attention.attn.c_attn.weight.view(20, 3, 5, 4), attention.attn.c_attn.bias.view(3, 5, 4)
            for part in (0, 1):
                fused[:, part, 0] *= 50
                fused[:, part, 1] *= 0.05
                bias[part, 0] *= 50
                bias[part, 1] *= 0.05
        else:
            for projection in (attention.self_attn.q_proj, attention.self_attn.k_proj):
                for value in (projection.weight, projection.bias):
                    value[:6] *= 20  # at 50, the softmax amplifies the rounding of ties into different streams
                    value[6:12] *= 0.05
    return model


@pytest.mark.parametrize(
    ("name", "weak", "share", "dtype"),
    [("gpt2", 1, 0.5, F32), ("gpt2", 1, 1e-3, F64), ("llama_bias", 2, 0.5, F64), ("llama_bias", 2, 1e-3, F32)],
)
def test_noise_in_a_weak_head_beside_a_strong_one_is_refused(
    name: str, weak: int, share: float, dtype: torch.dtype
) -> None:
    hooked, ids = am.load(strong_and_weak(name), dtype=dtype), models.token_ids(name)
    split = am.decompose_scores(hooked, ids)
    strongest, weakest = float(split.largest[1, 0]), float(split.largest[1, weak])
    assert strongest > 1000 * weakest

    def noisy(scores: Tensor) -> Tensor:
        noise = torch.randn(scores[:, weak].shape, generator=torch.Generator().manual_seed(0)).to(scores)
        scores[:, weak] += torch.where(scores[:, weak] > -1e30, share * weakest * noise, 0.0)
        return scores

    assert share * weakest < 1e-5 * strongest or dtype == F64 or share == 0.5
    with hooked.hooks({("scores", 1): noisy}):
        with pytest.raises(
            ExactnessError, match=rf"layer 1, head {weak}: the terms .* times the most that rounding can explain"
        ):
            am.decompose_scores(hooked, ids)
        certificate = am.certify(hooked)
    assert "ledger" in {check.name for check in certificate.failed}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bloom", torch.bfloat16), ("bloom", torch.float16), ("gpt2", F32), ("llama_bias", F64),
        ("qwen3_bias", torch.float16), ("gemma2", torch.bfloat16), ("gpt_neox", F32),
    ],
)  # fmt: skip
def test_what_rounding_leaves_is_well_within_what_it_explains(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    excess: list[float] = []
    honest = ledger.require_exact

    def recorded(layer: int, heads: Any, what: str, residual: Tensor, found: Tensor) -> None:
        excess.append(float(found.max()))
        honest(layer, heads, what, residual, found)

    monkeypatch.setattr(ledger, "require_exact", recorded)
    hooked = am.load(models.fresh(name), dtype=dtype)
    split = am.decompose_scores(hooked, models.padded(name, "left"))
    assert split.terms["query_key"].dtype == torch.promote_types(dtype, F32)
    am.decompose_scores(hooked, models.token_ids(name, 2, 15), fold_norm=True)
    assert len(excess) == 2 * hooked.n_layers
    assert max(excess) < 0.5


def test_nan_in_the_scores_is_refused() -> None:
    hooked, spoil = models.hooked("bloom"), {("resid_pre", 1): lambda x: x.index_fill(1, torch.tensor([2]), torch.nan)}
    with hooked.hooks(spoil), pytest.raises(ExactnessError, match="layer 1"):
        am.decompose_scores(hooked, models.token_ids("bloom"))


def test_what_is_out_of_range_is_named_with_its_range() -> None:
    hooked, ids = models.hooked("gpt2"), models.token_ids("gpt2")
    split = am.decompose_scores(hooked, ids, layers=[0, 2])
    bad: list[tuple[Any, str]] = [
        (lambda: am.decompose_scores(hooked, ids, layers=[3]), r"from 0 to 2 \(this model has 3 layers\); got 3"),
        (lambda: am.decompose_scores(hooked, ids, layers=[]), "at least one layer"),
        (lambda: split.select([1]), r"one of the layers decomposed, \[0, 2\]; got 1"),
        (lambda: split.shares_at(7), r"`rank` must be from 0 to 6 \(0 is the highest score\); got 7"),
        (lambda: split.contrast(7, 0, 1), "`query` must be from 0 to 6; got 7"),
        (lambda: split.contrast(4, -1, 1), "`key_a` must be from 0 to 6; got -1"),
        (lambda: split.contrast(4, 0, 9), "`key_b` must be from 0 to 6; got 9"),
        (lambda: split.contrast(2, 0, 3), "token 2 cannot see both key 0 and key 3"),
        (lambda: split.contrast(4, 0, 3).explain(layer=1, head=0), r"one of the layers decomposed, \[0, 2\]; got 1"),
        (lambda: split.contrast(4, 0, 3).explain(layer=0, head=5), "`head` must be from 0 to 4; got 5"),
        (lambda: split.contrast(4, 0, 3).explain(layer=0, head=0, text=3), "`text` must be from 0 to 2"),
        (lambda: split.plot(head=5), r"`head` must be from 0 to 4 \(this model has 5 heads in each layer\); got 5"),
        (lambda: split.plot(layer=1), "`layer` must be one of the layers"),
        (lambda: split.plot(text=3), r"`text` must be from 0 to 2 \(3 texts were run\); got 3"),
        (lambda: split.plot("row_ledger", query=7), r"`query` must be from 0 to 6 \(the text has 7 tokens\); got 7"),
        (lambda: split.plot("nothing"), "`figure` must be one of attention_map, "),
        (lambda: split.show("nothing"), "`figure` must be one of attention_map, "),
        (lambda: split.show(head=5), "`head` must be from 0 to 4; got 5"),
    ]
    for call, message in bad:
        refuses(message, call)


def test_one_token_and_one_text() -> None:
    for name in models.FAMILIES:
        split = am.decompose_scores(models.hooked(name), torch.tensor([[5]]))
        assert split.terms["query_key"].shape[-2:] == (1, 1)
        assert bool(split.shares_at(0)["query_key"].isnan().all())
        assert len(split.to_frame()) == split.residual.numel()


def test_a_long_text_in_row_blocks_is_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnmech.model.attention import attend as attention

    ids = models.token_ids("bloom", 2, 50)
    whole = am.decompose_scores(models.hooked("bloom", F64), ids)
    monkeypatch.setattr(attention, "block_bytes", lambda device: 1)
    blocks = am.decompose_scores(models.hooked("bloom", F64), ids)
    torch.testing.assert_close(blocks.residual, whole.residual, rtol=0, atol=1e-12)
    torch.testing.assert_close(blocks.largest, whole.largest, rtol=1e-12, atol=0)
