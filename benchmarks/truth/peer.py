"""Compiled programs in TransformerLens, and its own measures of heads.

It refuses edge attribution patching for models that are not transformers' own ("use_attn_result: …").
"""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformer_lens import TransformerBridge
from transformer_lens.config.transformer_bridge_config import TransformerBridgeConfig
from transformer_lens.head_detector import HEAD_NAMES, detect_head
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

from attnmech.reducers import Batch

from .judge import Judge
from .model import Program, tokenizer_of

_NAMES: Final = {
    "unembed": "head", "embed": "tok_embed", "positions": "pos", "attention.out": "attn.o", "attention": "attn",
    "mlp.linear_1": "mlp.fc_in", "mlp.linear_2": "mlp.fc_out",
}  # fmt: skip
"""TransformerLens's names of weights."""


def _name_of(weight: str) -> str:
    old = next(old for old in _NAMES if old in weight)
    return f"{weight.replace(old, _NAMES[old])}.weight"


class Peer:
    """A program's model in TransformerLens; raises `ValueError` unless it computes the same."""

    def __init__(self, program: Program, judge: Judge) -> None:
        self._program, self._judge = program, judge
        outputs, width = program.shapes["unembed"]
        weights = {name: program.weight(name) for name in program.shapes}
        # `detect_head` needs texts shorter than the context.
        weights["positions"] = torch.nn.functional.pad(weights["positions"], (0, 0, 0, 1))
        config = TransformerBridgeConfig(
            n_layers=program.n_layers, d_model=width, d_head=program.d_head, n_ctx=program.length + 2,
            d_vocab=len(program.vocabulary), d_vocab_out=outputs, d_mlp=program.shapes["layers.0.mlp.linear_1"][0],
            n_heads=program.n_heads, act_fn="relu", normalization_type=None,
            attention_dir="causal" if program.causal else "bidirectional",
        )  # fmt: skip
        self._bridge: Any = TransformerBridge.boot_native(config)
        with torch.no_grad():
            for parameter in self._bridge.parameters():
                parameter.zero_()
        self._bridge.load_state_dict({_name_of(name): weight for name, weight in weights.items()}, strict=False)
        self._bridge.eval()
        self._bridge.tokenizer = tokenizer_of(program)
        with torch.no_grad():
            logits = self._bridge(judge.clean).double()
        wanted = torch.stack([judge.outputs[tuple(ids)] for ids in judge.clean.tolist()])
        if not torch.allclose(logits[:, 1:], wanted, atol=1e-5):
            raise ValueError(f"TransformerLens computes {program.name} differently")

    def detected(self) -> Tensor:
        """The largest score of `detect_head` over its three types."""
        texts = [self._bridge.tokenizer.decode(ids[1:]) for ids in self._judge.inputs.tolist()]
        return torch.stack([detect_head(self._bridge, texts, name) for name in HEAD_NAMES]).amax(dim=0)

    def attribution(self) -> Tensor:
        """The estimates of attribution patching, summed over positions, mean over pairs."""
        judge, (layers, heads) = self._judge, (self._program.n_layers, self._program.n_heads)
        effects = torch.zeros(layers, heads, dtype=torch.float64)
        for clean, corrupted in zip(judge.clean.split(1), judge.corrupted.split(1), strict=True):
            batch = Batch(clean, torch.ones_like(clean, dtype=torch.bool), (), None)
            metric = partial(lambda batch, logits: judge.restored(logits, batch).sum(), batch)
            for node, score in attribution_patch(self._bridge, clean, corrupted, metric).node_scores.items():
                if node.kind == "attn_head_out":
                    effects[node.layer, node.head] += score / len(judge.clean)
        return effects
