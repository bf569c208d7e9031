"""Faithfulness equals a model computed by hand, edge by edge, and interventions on whole nodes."""

import math
import random
from typing import Any

import models
import numpy as np
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, pair
from comparing import refuses
from scipy.stats import t as student_t
from torch import Tensor

import attnmech as am
from attnmech import Circuit
from attnmech.results import EdgeAttribution, Faithfulness
from attnmech.runs.residual_graph import graph_of


def some_edges(model: am.HookedModel, share: float, seed: int) -> Circuit:
    graph = graph_of(model)
    names = [
        (sender, receiver)
        for row, sender in enumerate(graph.senders)
        for column, receiver in enumerate(graph.receivers)
        if graph.exists[row, column]
    ]
    return Circuit(edges=tuple(random.Random(seed).sample(names, int(share * len(names)))))


def gpt2_by_hand(
    plain: Any, ids: Tensor, other: dict[str, Tensor] | None, kept: set[tuple[str, str]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """GPT-2, head by head: each input adds up what senders write, or write in the other run; logits, and the writes."""
    base, heads = plain.transformer, plain.config.n_head
    d = plain.config.n_embd // heads
    length = ids.shape[1]
    writes = {"embedding": base.wte(ids) + base.wpe(torch.arange(length))}
    biases = torch.zeros(plain.config.n_embd, dtype=torch.float64)

    def read(receiver: str) -> Tensor:
        parts = [
            value if other is None or (sender, receiver) in kept else other[sender] for sender, value in writes.items()
        ]
        return sum(parts) + biases  # type: ignore[no-any-return]

    for layer, block in enumerate(base.h):
        made = {}
        for head in range(heads):
            q, k, v = (
                block.attn.c_attn(block.ln_1(read(f"L{layer}H{head} {at}")))[
                    ..., (place * heads + head) * d : (place * heads + head + 1) * d
                ]
                for place, at in enumerate("qkv")
            )
            scores = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(
                torch.ones(length, length).triu(1).bool(), -torch.inf
            )
            z = scores.softmax(dim=-1) @ v
            made[f"L{layer}H{head}"] = z @ block.attn.c_proj.weight[head * d : (head + 1) * d]
        writes |= made
        biases = biases + block.attn.c_proj.bias
        writes[f"L{layer} MLP"] = block.mlp(block.ln_2(read(f"L{layer} MLP")))
    return plain.lm_head(base.ln_f(read("logits"))), writes


def differences(logits: Tensor) -> Tensor:
    last = logits[:, -1].detach()
    return last[range(3), ANSWERS] - last[range(3), AGAINST]


@pytest.mark.core
@pytest.mark.parametrize("outside", ["corrupted", "mean", "zero"])
def test_circuits_of_edges_equal_gpt2_by_hand(outside: str) -> None:
    plain, hooked = models.plain("gpt2", torch.float64), models.hooked("gpt2", torch.float64)
    clean, corrupted = pair("gpt2")
    circuits = [some_edges(hooked, share, seed) for seed, share in enumerate((0.02, 0.3, 0.8))]
    with torch.no_grad():
        whole, _ = gpt2_by_hand(plain, clean, None, set())
        _, other = gpt2_by_hand(plain, corrupted, None, set())
        if outside == "mean":
            other = {name: value.mean(dim=(0, 1), keepdim=True).expand_as(value) for name, value in other.items()}
        if outside == "zero":
            other = {name: torch.zeros_like(value) for name, value in other.items()}
        names = {(sender, receiver) for sender, receiver in some_edges(hooked, 1.0, 0).edges or ()}
        nothing, _ = gpt2_by_hand(plain, clean, other, set())
        expected = []
        for own in circuits:
            inside = set(own.edges or ())
            expected.append(
                [differences(gpt2_by_hand(plain, clean, other, left)[0]) for left in (inside, names - inside)]
            )
    torch.testing.assert_close(whole, plain(clean).logits)
    found = am.faithfulness(hooked, circuits, clean, corrupted, outside=outside, **JUDGED)
    torch.testing.assert_close(found.full, differences(whole), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.empty, differences(nothing), rtol=1e-9, atol=1e-9)
    for place, (inside, without) in enumerate(expected):
        torch.testing.assert_close(found.inside[place], inside, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.without[place], without, rtol=1e-9, atol=1e-9)
        share = (inside - found.empty).sum() / (found.full - found.empty).sum()
        assert float(found.faithfulness[place]) == pytest.approx(float(share), rel=1e-9)
    assert found.sizes == tuple(map(len, circuits)) and found.n_edges == 370


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "falcon_new"])
def test_circuits_of_nodes_equal_interventions_on_all_other_nodes(family: str) -> None:
    hooked, (clean, corrupted) = models.hooked(family, torch.float64), pair(family)
    heads, layers = hooked.n_heads, hooked.n_layers
    circuit = Circuit(nodes=("L0H1", "L1H0", f"L1H{heads - 1}", "L1 MLP"))
    acts = hooked.run(corrupted, points=["z", "mlp_out"])
    changes = []
    for layer in range(layers):
        others = [(layer, head) for head in range(heads) if f"L{layer}H{head}" not in circuit.nodes]
        changes.append(am.Intervention.replace(others, {layer: acts["z", layer]}))
        if f"L{layer} MLP" not in circuit.nodes:
            changes.append(am.Intervention.stream("mlp_out", [layer], {layer: acts["mlp_out", layer]}))
    with hooked.intervene(*changes):
        kept = differences(hooked.run(clean).logits)
    found = am.faithfulness(hooked, circuit, clean, corrupted, **JUDGED)
    # The embedding reaches the circuit's nodes as in the clean run.
    torch.testing.assert_close(found.inside[0], kept, rtol=1e-5, atol=1e-6)
    whole = am.faithfulness(hooked, some_edges(hooked, 1.0, 0), clean, corrupted, **JUDGED)
    torch.testing.assert_close(whole.inside[0], differences(hooked.run(clean).logits), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole.without[0], differences(hooked.run(corrupted).logits), rtol=1e-6, atol=1e-7)
    assert float(whole.faithfulness[0]) == pytest.approx(1) and abs(float(whole.completeness[0])) < 1e-6


def measured(inside: Tensor, full: Tensor, empty: Tensor, sizes: tuple[int, ...]) -> Faithfulness:
    found = am.faithfulness(models.hooked("gpt2"), some_edges(models.hooked("gpt2"), 0.5, 0), *pair("gpt2"), **JUDGED)
    tokens = found.tokens[:1] * len(full)
    return Faithfulness("mine", "zero", sizes, 100, full, empty, inside, inside.flip(0), tokens, found.provenance)


def test_areas_and_their_intervals() -> None:
    generator = torch.Generator().manual_seed(2)
    empty = torch.randn(9, generator=generator, dtype=torch.float64)
    full = empty + 2  # a constant gap, so that each pair has its own share
    kept = torch.rand(4, 9, generator=generator, dtype=torch.float64) + torch.tensor([[1.2], [0.1], [0.9], [0.5]])
    found = measured(empty + 2 * kept, full, empty, (50, 2, 100, 10))
    order, x = [1, 3, 0, 2], np.array([0.02, 0.1, 0.5, 1.0])
    shares = kept.mean(dim=1).numpy()[order]
    assert found.faithfulness.numpy()[order] == pytest.approx(shares)
    assert found.cpr == pytest.approx(np.trapezoid(shares, x))
    assert found.cmd == pytest.approx(np.trapezoid(abs(1 - shares), x))
    by_pair = np.trapezoid(kept.numpy()[order], x, axis=0)
    half = student_t.ppf(0.975, 8) * by_pair.std(ddof=1) / 3
    assert found.area_interval("cpr") == pytest.approx((by_pair.mean() - half, by_pair.mean() + half))
    low, high = found.area_interval("cmd")
    assert low < found.cmd < high
    below = np.trapezoid((np.sign(1 - shares)[:, None] * (1 - kept.numpy()[order])), x, axis=0)
    assert (high - low) / 2 == pytest.approx(student_t.ppf(0.975, 8) * below.std(ddof=1) / 3)
    assert "CPR" in found.lead and f"CMD {found.cmd:.2f}" in found.lead
    assert found.lead.startswith(
        "On 9 pairs, 10 of 100 edges keep 0.98 of the metric (95 % interval, corrected for 4 circuits: "
    )
    alone = measured((empty + kept[0])[None], full, empty, (50,))
    for without in (alone, measured((empty + 2 * kept)[[1, 3]], full, empty, (2, 10))):
        assert math.isnan(without.cpr) and math.isnan(without.cmd) and "CPR" not in without.lead
    refuses("`area` must be one of cpr, cmd", found.area_interval, "auc")


def test_what_a_result_says_and_draws() -> None:
    hooked, (clean, corrupted) = models.hooked("gpt2"), pair("gpt2")
    edges = am.attribute(hooked, clean, corrupted, edges=True, nodes="heads+mlps", **JUDGED)
    assert isinstance(edges, EdgeAttribution)
    found = am.faithfulness(hooked, edges.circuits(), clean, corrupted, **JUDGED)
    assert found.shares[-1] == 1 and float(found.faithfulness[-1]) == pytest.approx(1, abs=1e-5)
    frame = found.to_frame()
    assert list(frame["size"]) == [1, 3, 7, 18, 37, 74, 185, 370]
    assert "3 pairs are too few for an interval" in found.lead
    curve, other = found.plot().data
    assert list(curve.y) == list(frame["faithfulness"]) and list(other.y) == list(frame["completeness"])
    assert "Along edges outside the circuit, inputs read what senders write in the corrupted run" in found.to_html()
    refuses("subtract their `faithfulness`", lambda: found - found)


def pruned(edges: set[tuple[str, str]]) -> Circuit:
    """MIB's rule: only edges from nodes that something enters, to nodes that something leaves, until all are."""
    while True:
        entered = {"embedding", *(receiver.removesuffix(f" {receiver[-1]}") for _, receiver in edges)}
        left = {"logits", *(sender for sender, _ in edges)}
        kept = {edge for edge in edges if edge[0] in entered and edge[1].removesuffix(f" {edge[1][-1]}") in left}
        if kept == edges:
            return Circuit(edges=tuple(edges))
        edges = kept


def test_circuits_are_those_of_mib() -> None:
    """The n largest scores; pruning them changes nothing, and areas over nominal shares are nearly the same."""
    hooked, (clean, corrupted) = models.hooked("gpt2"), pair("gpt2")
    edges = am.attribute(hooked, clean, corrupted, edges=True, nodes="heads+mlps", **JUDGED)
    assert isinstance(edges, EdgeAttribution)
    scores = dict(zip(edges.graph.names, edges.effect.tolist(), strict=True))
    shares = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    mib: dict[str, list[Circuit]] = {}
    for by, value in (("size", lambda edge: abs(scores[edge])), ("score", scores.__getitem__)):
        order = sorted(scores, key=value, reverse=True)
        mib[by] = [Circuit(edges=tuple(order[: int(share * len(scores))])) for share in shares]
        assert edges.circuits(by=by) == [Circuit(edges=(order[0],)), *mib[by][3:]]
    of_mib = [*mib["score"], *(pruned(set(circuit.edges or ())) for circuit in mib["score"])]
    assert any(len(one) < len(other) for one, other in zip(of_mib[10:], of_mib, strict=False))
    of_mib += edges.circuits(by="score")
    measured = am.faithfulness(hooked, of_mib, clean, corrupted, **JUDGED)
    kept, without_dead_ends, ours = measured.faithfulness.split([10, 10, 8])
    torch.testing.assert_close(kept, without_dead_ends, rtol=0, atol=1e-5)
    assert torch.trapezoid(ours, torch.tensor(measured.shares[20:])) == pytest.approx(
        np.trapezoid(kept, shares), abs=0.01
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"circuits": []}, "`circuits` must be a circuit or several"),
        ({"circuits": Circuit(nodes=("L3H0",))}, "the model has no node 'L3H0'; its last one is 'L2 MLP'"),
        (
            {"circuits": Circuit(edges=(("L1H0", "L1H2 q"),))},
            "the model has no edge L1H0 → L1H2 q: senders are read by",
        ),
        ({"circuits": Circuit(edges=(("L0H0", "L1KV1 k"),))}, "the model has no edge L0H0 → L1KV1 k"),
        ({"outside": "noise"}, "`outside` must be one of corrupted, mean, zero"),
        ({"corrupted": None}, 'needs corrupted prompts; pass them, or use outside="zero"'),
        ({"corrupted": models.token_ids("gpt2")}, "those of pair 0 are the same"),
        (
            {"metric": lambda logits, batch: 0 * logits[:, 0, 0] + 1, "answers": None, "against": None},
            "patching all edges leaves metric at 1",
        ),
        ({"corrupted": models.token_ids("gpt2")[:, :5]}, "the same number of tokens; pair 0 has 7 clean"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    clean, corrupted = pair("gpt2")
    given = {"circuits": Circuit(nodes=("L0H0",)), "clean": clean, "corrupted": corrupted, **JUDGED, **options}
    refuses(message, am.faithfulness, models.hooked("gpt2"), **given)
