"""Statistics from queries and keys that a hook saved equal those of the model, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import randomised
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import eager_attention_forward

import attnmech as am

LENGTHS = (9, 23, 1, 40)
TEXTS = [torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
SLIDING, HEADS, KV_HEADS, D_HEAD = 7, 6, 2, 10


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose first layer has a window."""
    config = transformers.Qwen2Config(
        vocab_size=90, hidden_size=44, intermediate_size=34, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=D_HEAD, sliding_window=SLIDING, use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    return randomised(transformers.Qwen2ForCausalLM(config), seed=1)


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a hook on the attention function of transformers."""
    tensors: dict[str, torch.Tensor] = {}

    def recording(module: Any, q: Any, k: Any, v: Any, *arguments: Any, **options: Any) -> Any:
        output, pattern = eager_attention_forward(module, q, k, v, *arguments, **options)
        of_layer = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "output": output}
        for name, value in of_layer.items():
            tensors[f"{text}.{module.layer_idx}.{name}"] = value[0].contiguous().clone()
        return output, pattern

    transformers.AttentionInterface.register("recording", recording)
    transformers.AttentionMaskInterface.register("recording", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("recording")
    with torch.no_grad():
        for text, ids in enumerate(TEXTS):
            model(ids)
            tensors[f"{text}.ids"] = ids[0]
    model.set_attn_implementation("eager")
    path = tmp_path_factory.mktemp("saved") / "queries.safetensors"
    save_file(tensors, path, metadata={"attention": json.dumps(facts())})
    return path


def facts(**changed: Any) -> dict[str, Any]:
    layers = {str(layer): {"scale": D_HEAD**-0.5, "window": None} for layer in range(3)}
    layers["0"]["window"] = SLIDING
    for layer in layers.values():
        layer.update(changed)
    return {"model": "of a hook", "layers": layers, "special": [5, 8]}


@pytest.mark.core
def test_statistics_are_those_of_the_model(model: Any, saved: Path) -> None:
    focus = am.engine_statistics(saved)
    expected = am.attention_focus(am.load(model), iter(TEXTS))
    for name in focus.quantities:
        for one, other in (
            (getattr(focus, name), getattr(expected, name)),
            *zip(
                focus.where(first_row=True)[name].interval(),
                expected.where(first_row=True)[name].interval(),
                strict=True,
            ),
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(focus.received, expected.received, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(focus.sink_rate, expected.sink_rate, rtol=1e-4, atol=1e-6)
    assert focus.documents == len(TEXTS)
    assert max(focus.provenance.options["proof"]["largest error by layer"]) < 1e-5


def test_special_tokens_are_rows_of_their_own_class(saved: Path) -> None:
    focus = am.engine_statistics(saved)
    special = sum(int(torch.isin(ids[0, 1:], torch.tensor([5, 8])).sum()) for ids in TEXTS)
    assert focus.state["rows"].tolist() == [sum(LENGTHS) - len(LENGTHS) - special, special, len(LENGTHS)]


def test_the_last_queries_alone_are_enough(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved)
    kept = 5
    cut = {
        name: value[-kept:].contiguous() if name.endswith((".q", ".output")) else value
        for name, value in tensors.items()
    }
    path = tmp_path / "last.safetensors"
    save_file(cut, path, metadata={"attention": json.dumps(facts())})
    assert int(am.engine_statistics(path).state["rows"].sum()) == sum(min(kept, length) for length in LENGTHS)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scale": 0.3165}, "layer 0 of request 0 cannot be proved: pattern times values differs"),
        ({"window": 8}, "cannot be proved"),
        ({"softcap": 20.0}, "cannot be proved"),
        ({"sink": [0.0] * HEADS}, "cannot be proved"),
        ({"slopes": [0.1] * HEADS}, "cannot be proved"),
        ({"scale": None}, "has no statistics of an engine"),
    ],
)
def test_wrong_facts_are_refused(saved: Path, tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    path = tmp_path / "wrong.safetensors"
    save_file(load_file(saved), path, metadata={"attention": json.dumps(facts(**changed))})
    with pytest.raises(am.errors.InputError, match=words):
        am.engine_statistics(path)


def test_other_files_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(am.errors.InputError, match="there is no file"):
        am.engine_statistics(tmp_path / "none.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(am.errors.InputError, match="no statistics of an engine"):
        am.engine_statistics(tmp_path / "other.safetensors")
    tensors = load_file(saved)
    tensors["1.ids"] = tensors["1.ids"][1:].contiguous()
    save_file(tensors, tmp_path / "short.safetensors", metadata={"attention": json.dumps(facts())})
    with pytest.raises(am.errors.InputError, match="request 1 has 22 ids, 23 keys and 23 queries"):
        am.engine_statistics(tmp_path / "short.safetensors")
