"""The families that are not supported, with the reasons."""

from collections.abc import Mapping
from typing import Final

_RECURRENT: Final = "a model without attention: its layers carry a state from token to token"
_SPARSE: Final = (
    "whose attention is sparse, or local and global with separate projections; use a model with full attention"
)
_APPROXIMATED: Final = "its attention approximates the softmax ({}), so it has no pattern"
_SELECTED: Final = "its attention sees the keys that an indexer selects in each layer; take a model with full attention"
_IN_LISTS: Final = "its attentions, norms and MLPs are in separate lists, so no module is a block"

_WINDOWS: Final = (
    "it attends within windows of patches, shifted and merged from layer to layer, so that its positions are not those "
    "of one stream"
)

REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bigbird_pegasus", "reformer", "longt5"), _SPARSE),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _WINDOWS),
    "wavlm": "its position bias is gated by the query, in attention code of its own; take wav2vec2 or HuBERT",
    "vit_mae": (
        "it leaves out most patches at random in every pass; its encoder sees all of them in a ViTModel: "
        "ViTModel.from_pretrained(folder)"
    ),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), _SPARSE),
    "nllb-moe": "its experts take a limited number of tokens from a batch, so a text's output depends on other texts",
    "pegasus_x": "its encoder attends to global tokens beside those of the text",
    "prophetnet": "its decoder attends in several streams, one for each of the next tokens",
    "t5gemma": "a norm stands between its cross-attention and the stream, and encoder and decoder embed separately",
    "t5gemma2": "its decoder attends to its own tokens and to the encoder's in one softmax (merged attention)",
    **dict.fromkeys(("axk2", "dots3_note_text", "hy_v4"), _SELECTED),
    **dict.fromkeys(("xlm", "flaubert"), _IN_LISTS),
    "convbert": "half of what its W_O reads comes from a convolution beside the attention",
    "cpmant": "it puts prompt tokens of its own before every text, so its positions are not the text's tokens",
    "diffllama": "its heads subtract one pattern from another (differential attention), so rows do not sum to 1",
    "doge": "its attention adds a function of the values to the scores, which no term of the ledger covers",
    "fnet": "a model without attention: it mixes tokens by Fourier transforms",
    "funnel": "it pools positions between blocks, so that they are not tokens",
    "ibert": "its projections are quantised layers, which also return a scaling factor",
    "mra": _APPROXIMATED.format("blocks at several resolutions"),
    "nystromformer": _APPROXIMATED.format("by landmarks"),
    "squeezebert": "its projections are grouped convolutions, not matrices",
    "yoso": _APPROXIMATED.format("by hashing"),
    "recurrent_gemma": (
        "whose recurrent layers read padding, so that what a text gives depends on the texts beside it; Gemma has "
        "attention in every layer"
    ),
}
"""Families that are not supported, each with the reason."""
