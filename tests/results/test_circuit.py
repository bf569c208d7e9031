"""Circuits are values: they combine, compare, save and load."""

import json
import operator
from pathlib import Path
from typing import Any

import pytest
from comparing import refuses

from attnmech import Circuit
from attnmech.errors import InputError
from attnmech.results.graph import Graph

EDGES = (("embedding", "L0H3 v"), ("L0H3", "L2KV1 k"), ("L0H3", "L0 MLP"), ("L2H10", "logits"), ("L2H9", "logits"))


def test_edges_are_sorted_and_name_their_nodes() -> None:
    circuit = Circuit(edges=EDGES + EDGES[:2])
    assert circuit.nodes == ("L0H3", "L0 MLP", "L2H9", "L2H10") and len(circuit) == 5
    assert circuit.edges == (EDGES[0], EDGES[2], EDGES[1], EDGES[4], EDGES[3])
    assert circuit.heads == [(0, 3), (2, 9), (2, 10)]
    assert circuit == Circuit(edges=tuple(reversed(EDGES))) and hash(circuit) == hash(Circuit(edges=EDGES))


def test_circuits_combine() -> None:
    one, other = Circuit(edges=EDGES[:3]), Circuit(edges=EDGES[2:])
    assert one | other == Circuit(edges=EDGES) and one & other == Circuit(edges=EDGES[2:3])
    assert one - other == Circuit(edges=EDGES[:2]) and len(one - one) == 0
    assert Circuit(nodes=("L1H0", "L0 MLP")) - Circuit(nodes=("L1H0",)) == Circuit(nodes=("L0 MLP",))
    for wrong in (Circuit(nodes=("L0H3",)), {"L0H3"}):
        refuses("a circuit of edges can be combined with another circuit of edges; got", operator.or_, one, wrong)


def test_circuits_save_and_load(tmp_path: Path) -> None:
    for circuit in (Circuit(edges=EDGES), Circuit(nodes=("L1H0", "L0 MLP")), Circuit(edges=())):
        assert Circuit.load(circuit.save(tmp_path / "circuit.json")) == circuit
    Circuit(edges=EDGES[:1]).save(tmp_path / "one.json")
    content = json.loads((tmp_path / "one.json").read_text())
    assert content.pop("digest") and content == {"edges": [["embedding", "L0H3 v"]]}
    (tmp_path / "by_hand.json").write_text(json.dumps(content))
    assert Circuit.load(tmp_path / "by_hand.json") == Circuit(edges=EDGES[:1])
    (tmp_path / "one.json").write_text((tmp_path / "one.json").read_text().replace("L0H3 v", "L0H2 v"))
    refuses(r"one.json .*its content does not match its digest", Circuit.load, tmp_path / "one.json")
    for content in ("{", "[]", '{"nodes": 3}', '{"heads": []}', '{"edges": [["L0H3"]]}', '{"nodes": [], "edges": []}'):
        (tmp_path / "wrong.json").write_text(content)
        with pytest.raises(InputError):
            Circuit.load(tmp_path / "wrong.json")
    refuses(r"missing.json is not a valid file of a circuit", Circuit.load, tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": ("L1",)}, 'a node is named as "L2H1" or "L2 MLP"; got \'L1\''),
        ({"nodes": ("embedding",)}, "a node is named as"),
        ({"nodes": "L1H2"}, "`nodes` must be a list such as"),
        ({"edges": (("L0H1", "L1H2"),)}, 'to "L2H1 q", "L2KV0 k", "L2 MLP" or "logits"; got'),
        ({"edges": (("logits", "L1H2 q"),)}, "an edge goes from"),
        ({"edges": (("L0KV1", "L1H2 q"),)}, "an edge goes from"),
        ({"edges": (("L0H1",),)}, "an edge is \\(sender, receiver\\)"),
        ({"nodes": ("L0H1",), "edges": (("L1H1", "logits"),)}, "give the nodes of a circuit or its edges, not both"),
    ],
)
def test_wrong_names(given: dict[str, Any], message: str) -> None:
    refuses(message, Circuit, **given)


def test_a_circuit_of_nodes_has_all_edges_between_them() -> None:
    graph = Graph(n_layers=2, n_heads=4, n_kv_heads=2, mlps=True, parallel=False)
    mask = Circuit(nodes=("L0H3", "L1H2", "L1 MLP")).mask(graph)
    names = {(graph.senders[row], graph.receivers[column]) for row, column in mask.nonzero().tolist()}
    inputs = {"L0H3": ("L0H3 q", "L0KV1 k", "L0KV1 v"), "L1H2": ("L1H2 q", "L1KV1 k", "L1KV1 v"), "L1 MLP": ("L1 MLP",)}
    expected = {("embedding", name) for names in inputs.values() for name in names}
    expected |= {("L0H3", name) for node in ("L1H2", "L1 MLP") for name in inputs[node]} | {("L1H2", "L1 MLP")}
    expected |= {(sender, "logits") for sender in ("embedding", "L0H3", "L1H2", "L1 MLP")}
    assert names == expected


def test_the_graph_of_gpt2_small_has_as_many_edges_as_in_the_papers() -> None:
    """32,491, as in Hanna et al. 2024 and MIB."""
    graph = Graph(n_layers=12, n_heads=12, n_kv_heads=12, mlps=True, parallel=False)
    assert int(graph.exists.sum()) == 32_491
    assert len(graph.senders) == 157 and len(graph.receivers) == 12 * 37 + 1
