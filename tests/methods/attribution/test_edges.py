"""Estimates and exact effects of edges equal those on the raw model, in which one input reads a changed stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import models
import planted
import pytest
import torch
from by_hand import AGAINST, ANSWERS, JUDGED, block_of, columns, logit_differences, pair, plan_of, until_the_end
from torch import Tensor, nn
from torch.func import jvp
from transformer_lens.patching import get_act_patch_direct_path_all_sources

import attnmech as am
from attnmech.errors import InputError
from attnmech.model.parts.modules import submodule
from attnmech.results import EdgeAttribution


def edge_estimates(model: am.HookedModel, *prompts: Any, **options: Any) -> EdgeAttribution:
    attribution = am.attribute(model, *prompts, edges=True, **{"nodes": "heads+mlps", **options})
    assert isinstance(attribution, EdgeAttribution)
    return attribution


def mlp_of(family: str, block: Any, stream: Tensor) -> Tensor:
    """What the MLP of a raw block writes when it reads this stream."""
    if family == "gpt2":
        return block.mlp.forward(block.ln_2.forward(stream))  # type: ignore[no-any-return]
    if family == "gemma2":
        made = block.mlp.forward(block.pre_feedforward_layernorm.forward(stream))
        return block.post_feedforward_layernorm.forward(made)  # type: ignore[no-any-return]
    return block.mlp.forward(block.post_attention_layernorm.forward(stream))  # type: ignore[no-any-return]


@contextmanager
def reading(plain: Any, family: str, receiver: str, change: Tensor) -> Iterator[None]:
    """The raw model, in which one receiver reads its stream plus `change`."""
    plan, handles = plan_of(plain), []
    if receiver == "logits":
        norm = submodule(plain.base_model, plan.final_norm or "")
        handles.append(norm.register_forward_pre_hook(lambda module, args: (args[0] + change,)))
    else:
        node, _, at = receiver.rpartition(" ")
        block = block_of(plain, int(node.removeprefix("L").partition("H")[0].partition("KV")[0]))
        kept: list[Tensor] = []
        keep = lambda module, args, kwargs: kept.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
        if at == "MLP":
            source = block if plan.mid_norm is None else submodule(block, plan.mid_norm)
            write = submodule(block, plan.mlp_out or "")
            made = lambda module, args, output: mlp_of(family, block, kept[0] + change)  # noqa: E731
        else:
            source, head = block, int(node.rpartition("V" if "KV" in node else "H")[2])
            path, mine = columns(family, at, head, plain)
            write = submodule(block, path)
            norm = submodule(block, plan.attn_norm or "")

            def made(module: Any, args: Any, output: Tensor) -> Tensor:
                changed = output.clone()
                changed[..., mine] = module.forward(norm.forward(kept[0] + change))[..., mine]
                return changed

        handles += [source.register_forward_pre_hook(keep, with_kwargs=True), write.register_forward_hook(made)]
    with until_the_end(handles):
        yield


def written(plain: Any, ids: Tensor) -> dict[str, Tensor]:
    """The stream that enters the first block, and z, attn_raw and mlp_out of each layer."""
    plan, kept, handles = plan_of(plain), {}, []

    def keep(name: str, value: Tensor) -> None:
        kept.setdefault(name, value.detach())

    def entering(module: Any, args: Any, kwargs: Any) -> None:
        keep("embedding", args[0] if args else kwargs["hidden_states"])

    handles.append(block_of(plain, 0).register_forward_pre_hook(entering, with_kwargs=True))
    for layer in range(len(models.blocks_of(plain))):
        block = block_of(plain, layer)
        out, mlp = submodule(block, plan.out), submodule(block, plan.mlp_out or "")
        handles += [
            out.register_forward_pre_hook(lambda module, args, layer=layer: keep(f"z{layer}", args[0])),
            out.register_forward_hook(lambda module, args, output, layer=layer: keep(f"raw{layer}", output)),
            mlp.register_forward_hook(lambda module, args, output, layer=layer: keep(f"L{layer} MLP", output)),
        ]
    with until_the_end(handles), torch.no_grad():
        plain(ids)
    return kept


def changes_by_hand(plain: Any, clean: Tensor, corrupted: Tensor, *, first_order: bool) -> dict[str, Tensor]:
    """How each sender's write changes from the corrupted to the clean run, with all other heads corrupted."""
    plan, one, other = plan_of(plain), written(plain, clean), written(plain, corrupted)
    changes = {"embedding": one["embedding"] - other["embedding"]}
    for layer in range(len(models.blocks_of(plain))):
        block, d = block_of(plain, layer), one[f"z{layer}"].shape[-1] // plan.n_heads
        out = submodule(block, plan.out)
        for head in range(plan.n_heads):
            z = torch.zeros_like(one[f"z{layer}"])
            mine = slice(head * d, (head + 1) * d)
            z[..., mine] = (one[f"z{layer}"] - other[f"z{layer}"])[..., mine]
            raw, change = other[f"raw{layer}"], (out.forward(z) - out.forward(torch.zeros_like(z))).detach()
            if plan.attn_out:
                norm = submodule(block, plan.attn_out).forward
                moved = jvp(norm, (raw,), (change,))[1] if first_order else norm(raw + change) - norm(raw)
                change = moved.detach()
            changes[f"L{layer}H{head}"] = change
        changes[f"L{layer} MLP"] = one[f"L{layer} MLP"] - other[f"L{layer} MLP"]
    return changes


@pytest.mark.core
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox"])
def test_estimates_and_exact_effects_equal_those_of_hooks_on_the_raw_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked, plain = models.hooked(family, torch.float64), models.fresh(family, torch.float64)
    models.in_attention(plain, "eager")
    clean, corrupted = pair(family)
    count = 69 if family == "gpt_neox" else 75
    edges = edge_estimates(hooked, clean, corrupted, confirm=20, controls=count - 20, seed=1, **JUDGED)
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, dtype=None: x.softmax(dim=dim))
    estimated, exact = (changes_by_hand(plain, clean, corrupted, first_order=order) for order in (True, False))
    assert edges.exact is not None
    for place, (sender, receiver) in enumerate(edges.graph.names):
        share = torch.zeros((), dtype=torch.float64, requires_grad=True)
        with reading(plain, family, receiver, share * estimated[sender]):
            # The texts do not depend on each other; each needs its own gradient.
            values = logit_differences(plain(corrupted).logits, ANSWERS, AGAINST)
        slopes = [torch.autograd.grad(value, share, retain_graph=True)[0] for value in values]
        # Gemma's norms round to float32.
        bound = {"rtol": 1e-5, "atol": 2e-6} if family in ("gemma2", "llama") else {"rtol": 1e-8, "atol": 1e-9}
        torch.testing.assert_close(edges.per_pair[place], torch.stack(slopes), **bound)
        if not edges.exact[place].isnan().any():
            with torch.no_grad(), reading(plain, family, receiver, exact[sender]):
                after = logit_differences(plain(corrupted).logits, ANSWERS, AGAINST)
            torch.testing.assert_close(edges.exact[place], after - edges.before, **bound)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gpt2", "gradient"), ("gemma2", "gradient"), ("opt", "gradient"), ("gptj", "gradient"), ("qwen3", "gradient"),
        ("falcon_new", "gradient"), ("mpt3", "integrated"), ("gpt_neox", "integrated"), ("llama", "relp"),
        ("bloom", "relp"),
    ],
)  # fmt: skip
def test_edges_add_up_to_nodes(family: str, method: str) -> None:
    """The edges are estimated in small batches, the nodes together."""
    hooked, (clean, corrupted) = models.hooked(family, torch.float64), pair(family)
    edges = edge_estimates(hooked, clean, corrupted, method=method, memory=1e-9, **JUDGED)
    nodes = am.attribute(hooked, clean, corrupted, method=method, nodes="heads+mlps", **JUDGED)
    senders = len(edges.graph.senders)
    sums = torch.zeros(senders, 3, dtype=torch.float64).index_add_(0, edges.edges[:, 0], edges.per_pair)
    torch.testing.assert_close(sums[1:], nodes.per_pair.flatten(0, 1), rtol=1e-5, atol=2e-6)
    by_node = edges.by_node()
    assert tuple(by_node["sender"]) == edges.graph.senders
    torch.testing.assert_close(torch.tensor(by_node["effect"]), sums.mean(dim=-1), rtol=1e-9, atol=1e-12)
    received = dict(edges.by_node("receiver")[["receiver", "effect"]].itertuples(index=False))
    for name in ("L1H1 q", "logits"):
        parts = [value for (_, to), value in zip(edges.graph.names, edges.effect.tolist(), strict=True) if to == name]
        assert received[name] == pytest.approx(sum(parts), rel=1e-9, abs=1e-12)
    heads = edges.by_head()
    torch.testing.assert_close(
        torch.tensor(heads["effect"]), nodes.effect[:, : hooked.n_heads].flatten(), rtol=1e-5, atol=2e-6
    )
    assert list(heads["layer"]) == [layer for layer in range(hooked.n_layers) for _ in range(hooked.n_heads)]


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", torch.bfloat16), ("gemma2", torch.float32)])
def test_other_precisions(family: str, dtype: torch.dtype) -> None:
    (clean, corrupted), truth = pair(family), models.hooked(family, torch.float64)
    exact = edge_estimates(truth, clean, corrupted, **JUDGED).effect
    rounded = edge_estimates(models.hooked(family, dtype), clean, corrupted, confirm=1, **JUDGED)
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    assert (rounded.effect - exact).norm() < bound * exact.norm()
    assert rounded.effect.dtype == torch.float64


@pytest.mark.core
@pytest.mark.parametrize("method", ["gradient", "integrated", "relp"])
def test_the_edges_of_a_planted_chain_are_found(method: str) -> None:
    """One head passes the cue on, and a second reads what it passes through v."""
    clean, corrupted, judged = planted.cued_pairs()
    edges = edge_estimates(planted.and_pair("gpt2"), clean, corrupted, method=method, confirm=3, controls=10, **judged)
    circuit = edges.circuit(3)
    assert circuit.edges == (("embedding", "L0H2 v"), ("L0H2", "L2H5 v"), ("L2H5", "logits"))
    assert circuit.heads == [(0, 2), (2, 5)]
    confirmation = edges.confirmation
    assert confirmation is not None and confirmation.holds[~confirmation.control].all()
    assert "3 of the 3 strongest hold; about 0 of" in edges.lead


def test_greedy_circuits_are_connected_to_the_logits() -> None:
    hooked, (clean, corrupted) = models.hooked("llama"), pair("llama")
    edges = edge_estimates(hooked, clean, corrupted, **JUDGED)
    effect = dict(zip(edges.graph.names, edges.effect.abs().tolist(), strict=True))
    circuit = edges.circuit(9)
    assert circuit.edges is not None and len(circuit) == 9
    reached: set[str] = set()
    chosen: list[tuple[str, str]] = []
    for _ in range(9):  # the same choice, without a heap
        open_edges = [
            edge
            for edge in effect
            if edge not in chosen and (edge[1] == "logits" or reached & set(edges.graph.nodes_of(edge[1])))
        ]
        chosen.append(max(open_edges, key=effect.__getitem__))
        reached.add(chosen[-1][0])
    assert set(circuit.edges) == set(chosen)
    assert edges.circuit(1.0) == am.Circuit(edges=tuple(edges.graph.names))
    assert [len(some) for some in edges.circuits()] == [1, 2, 6, 12, 25, 63, 126]


def test_what_a_result_says_draws_and_subtracts() -> None:
    clean, corrupted, judged = planted.cued_pairs(8)
    model = planted.and_pair("gpt2")
    edges = edge_estimates(model, clean, corrupted, confirm=3, controls=5, **judged)
    assert repr(edges).startswith("EdgeAttribution(First-order estimate of patching each of ")
    frame = edges.to_frame()
    assert len(frame) == len(edges.edges) and frame["exact"].notna().sum() == 8
    lines = [trace for trace in edges.plot().data if trace.mode == "lines"]
    assert len(lines) == 40 and sum(trace.line.dash == "solid" for trace in lines) == 3
    assert max(trace.line.width for trace in lines) == pytest.approx(5.7)
    page = edges.to_html()
    assert "Exact effects" in page and "solid edges hold" in page
    assert f"The 200 edges with the largest estimates, of {len(edges.edges)}" in page and len(edges._table) == 200
    with pytest.raises(InputError, match="same nodes; got 'heads\\+mlps' and 'heads'"):
        edges - edge_estimates(model, clean, corrupted, nodes="heads", **judged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0]}, "edges are those of all layers; leave `layers` out"),
        ({"confirm": 371}, r"`confirm` must be a whole number, 0 to 370 \(the number of edges\)"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    clean, corrupted = pair("gpt2")
    with pytest.raises(InputError, match=message):
        am.attribute(
            models.hooked("gpt2"), clean, corrupted, **{"edges": True, "nodes": "heads+mlps", **JUDGED, **options}
        )


def test_hooks_are_refused_and_sizes_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, (clean, corrupted) = models.hooked("gpt2"), pair("gpt2")
    with (
        hooked.intervene(am.Intervention.zero([(0, 1)])),
        pytest.raises(InputError, match=r"hooks or interventions are active \(z of L0H1 becomes 0\); leave the `with`"),
    ):
        edge_estimates(hooked, clean, corrupted, **JUDGED)
    edges = edge_estimates(hooked, clean, corrupted, **JUDGED)
    heads = edge_estimates(hooked, clean, corrupted, nodes="heads", **JUDGED)
    effects, of_heads = (dict(zip(each.graph.names, each.effect.tolist(), strict=True)) for each in (edges, heads))
    among = [name for name in edges.graph.names if not any("MLP" in end for end in name)]
    assert of_heads == pytest.approx({name: effects[name] for name in among}, rel=1e-4, abs=1e-5)
    for size, message in ((0, "1 to 370"), (371, "1 to 370"), (-0.5, "above 0")):
        with pytest.raises(InputError, match=message):
            edges.circuit(size)  # type: ignore[arg-type]
    monkeypatch.setattr("attnmech.methods.attribution.result.MAX_BYTES", 8 * 370 * 3 - 1)
    with pytest.raises(InputError, match=r'370 edges on 3 pairs would take .* Use fewer pairs, nodes="heads"'):
        edge_estimates(hooked, clean, corrupted, **JUDGED)


def test_exact_effects_of_edges_between_heads_are_those_of_transformer_lens() -> None:
    """It patches the q, k or v of one later head with what one head writes in the clean run."""
    model, (clean, corrupted), answer, against = models.hooked("gpt2", torch.float64), pair("gpt2", 1), 5, 7

    def difference(logits: Tensor) -> Tensor:
        return logits[0, -1, answer] - logits[0, -1, against]

    ours = edge_estimates(model, clean, corrupted, confirm=200, controls=0, answers=[answer], against=[against])
    assert ours.exact is not None
    exact = {
        edge: effect
        for edge, effect in zip(ours.graph.names, ours.exact[:, 0].tolist(), strict=True)
        if effect == effect
    }
    with torch.no_grad():
        before = difference(model.bridge(corrupted))
        caches = [model.bridge.run_with_cache(ids)[1] for ids in (clean, corrupted)]
    theirs: dict[tuple[str, str], float] = {}
    for at in ("q", "k", "v"):
        with torch.no_grad():
            effects = get_act_patch_direct_path_all_sources(
                model.bridge, corrupted, *caches, lambda logits: difference(logits) - before, component=at,
                verbose=False,
            )  # fmt: skip
        for layer, head, above, reader in product(range(3), range(5), range(3), range(5)):
            theirs[f"L{layer}H{head}", f"L{above}H{reader} {at}"] = float(effects[layer, head, above, reader])
    both = exact.keys() & theirs.keys()
    assert len(exact) == 200 and len(both) >= 40
    # Theirs are float32.
    largest = max(abs(theirs[edge]) for edge in both)
    assert max(abs(exact[edge] - theirs[edge]) for edge in both) < 1e-6 * largest
