"""Files: shards, precisions, quantised weights and device maps, each read correctly or refused in one clear
sentence."""

import json
import time
from pathlib import Path
from typing import Any

import accelerate
import models
import pytest
import torch
import transformers
from comparing import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor

import attnmech as am
from attnmech.errors import UnsupportedModelError, WeightsError
from attnmech.model.files.stored import SHARDED, WHOLE
from attnmech.model.parts.packed import require_unquantised

IDS = torch.arange(3, 12)[None]


def sharded(folder: Path) -> list[Path]:
    """A folder of several files, the largest first."""
    models.fresh("llama").save_pretrained(folder, max_shard_size="8KB")
    assert (folder / SHARDED).is_file() and not (folder / WHOLE).is_file()
    return sorted(folder.glob("model-*.safetensors"), key=lambda path: -path.stat().st_size)


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_sharded_folder_is_the_object_that_was_saved(tmp_path: Path) -> None:
    assert len(sharded(tmp_path)) > 3
    hooked = am.load(tmp_path)
    assert hooked.weights_hash == am.load(models.fresh("llama")).weights_hash
    assert torch.equal(hooked.run(IDS).logits, models.hooked("llama").run(IDS).logits)


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    first, second, *_ = files = sharded(tmp_path)
    whole = first.read_bytes()
    for cut in (len(whole) - 9, 30, 4, 0):
        first.write_bytes(whole[:cut])
        refuses(first.name, am.load, tmp_path, error=WeightsError)
    first.write_bytes(whole[:-9])
    refuses(r"incomplete metadata.* It is cut short: copy it again", am.load, tmp_path, error=WeightsError)
    first.unlink()
    refuses(f"1 of the {len(files)} files .* missing, including {first.name}", am.load, tmp_path, error=WeightsError)
    first.write_bytes(second.read_bytes())
    refuses(f"is in {first.name}, which does not hold it", am.load, tmp_path, error=WeightsError)


def test_an_index_that_is_wrong_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = json.loads((tmp_path / SHARDED).read_text())
    for places, said in (
        (index["weight_map"] | {"model.layers.9.mlp.up_proj.weight": next(iter(index["weight_map"].values()))},
         r"model\.layers\.9\.mlp\.up_proj\.weight is in .* does not hold it \(1 such"),
        (index["weight_map"] | {"lm_head.weight": "../elsewhere.safetensors"}, "not a file of the folder"),
    ):  # fmt: skip
        (tmp_path / SHARDED).write_text(json.dumps(index | {"weight_map": places}))
        refuses(said, am.load, tmp_path, error=WeightsError)
    (tmp_path / SHARDED).write_text(json.dumps({"weight_map": ["model"]}))
    refuses(rf"its {SHARDED} cannot be read", am.load, tmp_path, error=WeightsError)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_loads_in_the_precision_in_which_it_is_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    models.fresh("gpt2", dtype).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # A config may be older than its weights.
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert am.load(tmp_path).dtype == dtype
    assert am.load(tmp_path, dtype="float32").dtype == torch.float32


def test_several_precisions_are_loaded_in_that_of_the_config_and_said(tmp_path: Path) -> None:
    models.fresh("gpt2", torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / WHOLE)
    stored["transformer.ln_f.weight"] = stored["transformer.ln_f.weight"].float()
    save_file(stored, tmp_path / WHOLE, metadata={"format": "pt"})
    said = rf"several precisions \((.*, )?{len(stored) - 1} in bfloat16(, .*)?\)"
    with pytest.warns(UserWarning, match=said):
        assert am.load(tmp_path).dtype == torch.bfloat16
    assert am.load(tmp_path, dtype=torch.float32).dtype == torch.float32


QUANTISED: dict[str, tuple[Any, str]] = {
    "bitsandbytes 4": (transformers.BitsAndBytesConfig(load_in_4bit=True).to_dict(), "bitsandbytes to 4 bits"),
    "bitsandbytes 8": (transformers.BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes to 8 bits"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq to 4 bits"),
    "awq": ({"quant_method": "awq", "bits": 4}, "awq to 4 bits"),
    "fp8": ({"quant_method": "fp8"}, "fp8"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "torchao": ({"quant_method": "torchao"}, "torchao"),
    "hqq": ({"quant_method": "hqq"}, "hqq"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_models_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    given, said = QUANTISED[kind]
    models.fresh("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    about = given if isinstance(given, dict) else given.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": about}, default=str))
    what = f"the model in folder .* is quantised by {said}, .* give am.load the object.* a GGUF file"
    refuses(what, am.load, tmp_path, error=UnsupportedModelError)


def test_gguf_and_plain_models_are_not_taken_for_quantised_ones() -> None:
    config = models.fresh("gpt2").config
    require_unquantised(config, "it")
    config.quantization_config = transformers.GgufConfig(dequantize=True)
    require_unquantised(config, "it")


def test_a_model_that_a_device_map_put_in_one_place(tmp_path: Path) -> None:
    models.fresh("llama").save_pretrained(tmp_path)
    kind = transformers.AutoModelForCausalLM
    mapped = [kind.from_pretrained(tmp_path, device_map=each) for each in ({"": "cpu"}, "auto")]
    mapped.append(accelerate.dispatch_model(models.fresh("llama"), {"": "cpu"}, force_hooks=True))
    for source in mapped:
        hooked = am.load(source)
        assert hooked.certificate.ok
        assert torch.allclose(hooked.run(IDS).logits, logits_of(models.fresh("llama")), atol=1e-5)
        assert torch.allclose(logits_of(source), logits_of(models.fresh("llama")), atol=1e-5)


def test_a_model_with_parts_on_disk_is_refused_with_what_to_do(tmp_path: Path) -> None:
    models.fresh("llama").save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    source = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**places, "model.layers.1": "disk"}, offload_folder=tmp_path / "away"
    )
    with pytest.raises(
        WeightsError,
        match=r"keeps 1 of its 6 parts away .* \('model\.layers\.1' on 'disk'\).* device_map=\{\"\": \"cpu\"\}",
    ):
        am.load(source)


def edited(folder: Path, name: str, **changed: Any) -> Path:
    """A folder with a model and changed values in its config."""
    models.fresh(name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", "n_positions"),
        ("bert", "max_position_embeddings"),
        ("gptj", "n_positions"),
        ("codegen", "n_positions"),
        ("gpt_neo", "max_position_embeddings"),
    ],
)
def test_a_config_that_asks_for_a_hundred_million_positions(name: str, count: str, tmp_path: Path) -> None:
    """Learned positions are parameters; sinusoids and masks are buffers."""
    folder = edited(tmp_path, name, **{count: 10**8})
    expected = r"asks for [\d,]{11,} parameters( and entries of tables)?, but its weights hold"
    began = time.perf_counter()
    refuses(expected, am.load, folder, error=WeightsError)
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_config_that_asks_for_a_hundred_million_labels(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"asks for 100,000,000 labels, but no tensor of its weights has more"):
        am.load(edited(tmp_path, name, num_labels=10**8))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_rotary_models_may_name_millions_of_positions(name: str, tmp_path: Path) -> None:
    """Llama 4's config has 10,485,760 positions; nothing of that size is built."""
    hooked = am.load(edited(tmp_path, name, max_position_embeddings=10_485_760))
    ids = models.token_ids(name)
    assert torch.equal(hooked.run(ids).logits, models.hooked(name).run(ids).logits)
