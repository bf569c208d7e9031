"""The families that are not supported, and those whose blocks have no residual stream, with the reasons.

The attention of the latter is read and proven like any other: queries, keys, values, scores, pattern, z, results. The
points of the stream are absent, and so is everything computed from them.
"""

from collections.abc import Mapping
from typing import Final

_RECURRENT: Final = "a model without attention: its layers carry a state from token to token"
_SPARSE: Final = (
    "its attention is sparse, or has separate projections for local and global tokens; use a model with full attention"
)
_APPROXIMATED: Final = "its attention approximates the softmax ({}), so it has no pattern"
_SELECTED: Final = "in each layer, an indexer selects the keys that attention sees; use a model with full attention"
_IN_LISTS: Final = "its attentions, norms and MLPs are in separate lists, so no module is a block"

_WINDOWS: Final = (
    "it attends within windows of patches, which it shifts and merges from layer to layer, so the positions of its "
    "layers differ"
)

REFUSED: Final[Mapping[str, str]] = {  # families that are not supported, each with the reason
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bigbird_pegasus", "reformer", "longt5"), _SPARSE),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _WINDOWS),
    "wavlm": "the query gates its position bias, in its own attention code; use wav2vec2 or HuBERT",
    "vit_mae": (
        "it drops most patches at random in every pass; load its encoder as a ViTModel, which sees them all: "
        "ViTModel.from_pretrained(folder)"
    ),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    "nllb-moe": "its experts take a limited number of tokens from a batch, so a text's output depends on other texts",
    "pegasus_x": "its encoder attends to global tokens that are not part of the text",
    "prophetnet": "its decoder has several streams of attention, one for each of the next tokens that it predicts",
    "t5gemma": "a norm comes between its cross-attention and the stream, and encoder and decoder embed separately",
    "t5gemma2": "its decoder attends to its own tokens and to the encoder's in one softmax (merged attention)",
    **dict.fromkeys(("axk2", "dots3_note_text", "hy_v4"), _SELECTED),
    **dict.fromkeys(("xlm", "flaubert"), _IN_LISTS),
    "convbert": "half of the input of its W_O comes from a convolution, not from attention",
    "cpmant": "it prepends its own prompt tokens to every text, so its positions are not the text's tokens",
    "diffllama": "its heads subtract one pattern from another (differential attention), so rows do not sum to 1",
    "doge": "its attention adds a function of the values to the scores, which no term of the ledger covers",
    "fnet": "a model without attention: it mixes tokens by Fourier transforms",
    "funnel": "it pools positions between blocks, so its positions are not tokens",
    "ibert": "its projections are quantised layers, which also return a scaling factor",
    "mra": _APPROXIMATED.format("by blocks at several resolutions"),
    "nystromformer": _APPROXIMATED.format("by landmarks"),
    "squeezebert": "its projections are grouped convolutions, not matrices",
    "yoso": _APPROXIMATED.format("by hashing"),
    "recurrent_gemma": (
        "its recurrent layers read padding, so a text's output depends on the other texts of its batch; Gemma has "
        "attention in every layer"
    ),
}


_NORMED: Final = "its blocks add attention and MLP to a normalised, scaled stream, not to the stream that enters them"
_ENDS: Final = "each of its blocks ends by multiplying the stream by a number, and may add an embedding for its layer"
_STREAMS: Final = "its blocks mix several streams (AltUp) and write into them through low-rank side paths"
_ADAPTED: Final = "its blocks end in an adapter for the text's language, after the sum of stream and MLP"
_BOTTLENECK: Final = "the attention of each block reads and writes a narrower stream within the block"
_BESIDE: Final = (
    "its attention reads the stream concatenated with the token embedding, and writes into a Mamba layer "
    "through an MLP and a matrix"
)

NO_STREAM: Final[Mapping[str, str]] = {  # by transformers' `config.model_type`
    "minimax": _NORMED,
    "gemma3n": _STREAMS,
    "gemma3n_text": _STREAMS,
    "gemma4": _ENDS,
    "gemma4_text": _ENDS,
    "gemma4_unified": _ENDS,
    "gemma4_unified_text": _ENDS,
    "mobilebert": _BOTTLENECK,
    "xmod": _ADAPTED,
    "zamba": _BESIDE,
    "zamba2": _BESIDE,
}
