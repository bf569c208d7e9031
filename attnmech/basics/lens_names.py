"""Maps names of TransformerLens to what a user of attnmech writes instead.

>>> print(missing_name("HookedModel", "to_tokens"))
'HookedModel' has no 'to_tokens'; TransformerLens's `to_tokens` is `model.encode(text).ids`.
"""

from collections.abc import Mapping
from typing import Final

_CAPTURE = '`acts = model.run(text, points=["pattern"])`, which keeps the points you name; then `acts["pattern", 3]`'
_HOOKS = '`with model.hooks({("pattern", 3): f}): model.run(text)`, f(value) -> value; hooks end with the block'
_POINTS = "`model.points`: every point with its shape and meaning, and why this model lacks others"
_WEIGHTS = "`model.weights(layer).{}`, one layer at a time"
_SIZES = (
    "`model.n_layers`, `.n_heads`, `.n_kv_heads`, `.d_model`, `.d_head`, `.n_vocab`; `model.config` is transformers's"
)
_LOAD = '`am.load("gpt2")`, or am.load(hf_model, tokenizer=tokenizer)'
_MOVE = '`am.load(name, device="cuda", dtype="bfloat16")`'
_NO_FOLDING = "not needed: weights are used as they are, and decompositions take the norms into account"
_ALWAYS = 'not needed: the point "{}" is captured whenever you name it'
_WRITERS = '`am.residual_updates(model, text, answers=" Anna", against=" Tom").logits`, [layer head text]'
_PATCH = '`am.patch(model, clean, corrupted, answers=" Anna", against=" Tom")`'
_BRIDGE = "not here; TransformerLens's own bridge of this model is `model.bridge`"

OF_MODEL: Final[Mapping[str, str]] = {  # what to write instead of a method or an attribute of TransformerLens's models
    "run_with_cache": _CAPTURE,
    "add_caching_hooks": _CAPTURE,
    "get_caching_hooks": _CAPTURE,
    "cache_all": _CAPTURE,
    "cache_some": _CAPTURE,
    "run_with_hooks": _HOOKS,
    "add_hook": _HOOKS,
    "add_perma_hook": _HOOKS,
    "reset_hooks": f"not needed: {_HOOKS}",
    "remove_all_hook_fns": f"not needed: {_HOOKS}",
    "hook_dict": _POINTS,
    "hook_points": _POINTS,
    "list_hooks": _POINTS,
    "get_hook_point": _POINTS,
    "cfg": _SIZES,
    "blocks": "`model.weights(layer)` for weights, `model.run(text, points=[...])` for activations",
    "to_tokens": "`model.encode(text).ids`",
    "to_str_tokens": "`model.encode(text).tokens[0]`",
    "to_string": "`model.position_texts(ids)`, or `model.tokenizer.decode(ids)`",
    "to_single_token": '`model.encode(" Anna", bos=False).ids`; `answers=" Anna"` takes the text itself',
    "to_single_str_token": "`model.position_texts([id])[0]`",
    "get_token_position": "`model.encode(text).tokens[0].index(token)`",
    "tokens_to_residual_directions": _WRITERS,
    "loss_fn": '`model.loss(texts)`, or `metric="loss"`',
    "W_E": "`model.embedding`, [vocab d_model]",
    "W_U": "`model.unembedding`, [vocab d_model]: TransformerLens's, transposed",
    "embed": '`model.embedding`, [vocab d_model]; its output is the point "embed"',
    "unembed": '`model.unembedding`, [vocab d_model]; its output is the point "logits"',
    **{name: _WEIGHTS.format(name) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")},
    "QK": "`am.composition(model)`, of any two heads",
    "OV": "`am.ov_tokens(model, texts)` on tokens; `am.composition(model)` of any two heads",
    "all_composition_scores": "`am.composition(model)`, of any two heads",
    "all_head_labels": "the columns `layer` and `head` of every `result.to_frame()`",
    "set_use_attn_result": _ALWAYS.format("result"),
    "set_use_attn_in": _ALWAYS.format("attn_in"),
    "set_use_split_qkv_input": 'not needed: `am.path_patch(model, clean, corrupted, heads, "q")`',
    "set_use_hook_mlp_in": _BRIDGE,
    "enable_compatibility_mode": _NO_FOLDING,
    "process_weights": _NO_FOLDING,
    "fold_layer_norm": _NO_FOLDING,
    "center_writing_weights": _NO_FOLDING,
    "center_unembed": _NO_FOLDING,
    "from_pretrained": _LOAD,
    "boot_transformers": _LOAD,
    "generate_stream": "`model.generate(text, 20)`",
    "state_dict": "`model.named_parameters()`",
    "load_state_dict": "`am.load(hf_model)` of the model with the other weights",
    "to": _MOVE,
    "cuda": _MOVE,
    "cpu": _MOVE,
    "mps": _MOVE,
    "eval": "not needed: a loaded model never trains",
}

OF_CACHE: Final[Mapping[str, str]] = {  # what to write instead of a method of TransformerLens's ActivationCache
    "accumulated_resid": '`am.residual_drift(model, text)`, or the point "resid_post" of every layer',
    "decompose_resid": _WRITERS,
    "get_full_resid_decomposition": _WRITERS,
    "logit_attrs": _WRITERS,
    "stack_head_results": '`model.run(text, points=["result"])`, then `acts["result"]`',
    "compute_head_results": '`model.run(text, points=["result"])`, then `acts["result"]`',
    "stack_activation": '`acts["pattern"]`, which stacks the layers that were captured',
    "logit_lens": "`am.residual_drift(model, text).nearest(0, 4)`: the token embeddings nearest to token 4, by layer",
    "apply_ln_to_stack": _NO_FOLDING,
    "remove_batch_dim": 'not here: the first axis is always the batch; `acts["pattern", 3][0]`',
    "items": "`acts.values.items()`",
    "keys": "`acts.values.keys()`",
}

OF_PACKAGE: Final[Mapping[str, str]] = {  # what to write instead of a name of TransformerLens's package
    "HookedTransformer": _LOAD,
    "TransformerBridge": f"{_LOAD}, or `am.load(bridge)` of one that you have; the bridge itself is `model.bridge`",
    "HookedEncoder": _LOAD,
    "ActivationCache": "`acts = model.run(text, points=[...])`; `acts.to_cache()` is TransformerLens's own",
    "patching": _PATCH,
    "head_detector": "`am.head_types(model)`, on repeated random tokens",
    "FactoredMatrix": "`am.composition(model)`, of any two heads",
    "utils": "not here; `attnmech.demo.text` has texts of the demo model's language",
}


_ABLATE = "`am.ablate_heads(model, texts)`, or `am.Intervention.zero([(2, 6), (2, 7)])` in `model.intervene`"
_MEAN = "`am.Intervention.replace([(2, 6), (2, 7)], am.mean_z(model, texts))` in `model.intervene`"
_ADD = '`am.Intervention.add("resid_post", vector, layers=[2])` in `model.intervene`; `am.steer` tries several factors'
_LOSS = "`model.loss(texts)`, nats per token; of a masked language model, of tokens that it masks"
_WORD = '`acts["pattern", 2][0, 6, :, acts.tokens[0].index(" Tom")]`, what each row of L2H6 gives to " Tom"'
_FIGURE = '`result.save_figure("figure.png")`, or .pdf or .svg; `result.plot()` is a plotly figure'
_TABLE = "`result.to_frame().{}(path)`"

OTHERS: Final[Mapping[str, Mapping[str, str]]] = {
    "attnmech": {
        "global_attention": "`.global_mass` of `am.attention_focus(model, texts).where(first_row=True)`",
        **dict.fromkeys(("ablate", "zero_ablate", "knockout"), _ABLATE),
        **dict.fromkeys(("mean_ablate", "mean_ablation"), _MEAN),
        **dict.fromkeys(("direct_logit_attribution", "logit_attribution", "logit_attrs", "dla"), _WRITERS),
        **dict.fromkeys(("activation_patching", "activation_patch", "patch_heads"), _PATCH),
        **dict.fromkeys(("attention_to", "attention_to_word", "word_attention"), _WORD),
        **dict.fromkeys(("circuitsvis", "attention_heads", "attention_patterns"), "`am.draw.attention(acts, layer=2)`"),
        **dict.fromkeys(("loss", "perplexity"), _LOSS),
        "save_figure": _FIGURE,
        "save": '`result.save("result.safetensors")`, which `am.load_result` reads',
    },
    "HookedModel": {
        **dict.fromkeys(("ablate", "zero_ablate"), _ABLATE),
        **dict.fromkeys(("perplexity", "mlm_loss", "masked_loss", "pseudo_log_likelihood"), _LOSS),
    },
    "Intervention": {
        **dict.fromkeys(("mean", "mean_ablate", "mean_ablation"), _MEAN),
        **dict.fromkeys(("ablate", "zero_ablate", "knockout"), _ABLATE),
        **dict.fromkeys(("steer", "add_vector"), _ADD),
        "patch": '`am.Intervention.replace([(2, 6)], acts["z", 2])`, of a run on another text',
    },
    "View": dict.fromkeys(
        ("save", "savefig", "write_image"), '`view.write_html("view.html")` or `view.save_figure("view.png")`'
    ),
    "Activations": {
        "plot": '`acts.show("pattern")`',
        **dict.fromkeys(
            ("attention", "attentions", "attn", "patterns"), '`acts["pattern", 2]`, [batch head query key]'
        ),
    },
    "result": {
        **dict.fromkeys(("savefig", "save_fig", "write_image"), _FIGURE),
        **{name: _TABLE.format(name) for name in ("to_csv", "to_json", "to_parquet", "to_excel", "to_latex")},
        "to_netcdf": "`result.to_xarray().to_netcdf(path)`",
        "show": '`result.plot()`, or `result.write_html("page.html")`',
        "plot_heads": '`claim.plot("heads")`',
        **dict.fromkeys(("about_matched", "about_restored"), "`claim.findings`"),
        "of": '`trajectory["induction"]`, of any of its `columns`',
        "sources_of": "`why.labels_of(layer)`",
        "baseline": "`result.baselines[name]`, or a column of `to_frame()`",
        **dict.fromkeys(("difference", "logit_unit"), '`result["NAME"]`, with its `.mean` and `.statistic.unit`'),
        **dict.fromkeys(("robust_score", "disparity", "mass", "n_pairs", "n_matched"), "`result.to_frame()`'s column"),
    },
}
"""What to write instead of other names that people try, by the owner of the name."""


def missing_name(owner: str, name: str, table: Mapping[str, str] = OF_MODEL) -> str:
    """The message of an `AttributeError`; if TransformerLens or another habit has the name, with what to write here."""
    if name in table:
        return f"{owner!r} has no {name!r}; TransformerLens's `{name}` is {table[name]}."
    instead = OTHERS.get(owner, OTHERS["result"]).get(name)
    return f"{owner!r} has no {name!r}" + (f"; `{name}` is {instead}." if instead else "")
