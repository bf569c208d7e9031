"""Adapters: a model is read with the weights that it computes with, and keeps its adapter."""

import copy
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from comparing import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor

import attnmech as am
from attnmech.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from attnmech.model.files import adapters

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore::UserWarning:peft")

IDS = torch.arange(3, 12)[None]
LORA = {"r": 2, "lora_alpha": 3}
KINDS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(**LORA, target_modules=["q_proj", "v_proj", "o_proj"]),
    "DoRA": lambda: peft.LoraConfig(**LORA, use_dora=True, target_modules=["q_proj", "k_proj"]),
    "all layers, a module retrained": lambda: peft.LoraConfig(
        **LORA, use_rslora=True, target_modules="all-linear", modules_to_save=["embed_tokens"]
    ),
    "embedding": lambda: peft.LoraConfig(**LORA, target_modules=["embed_tokens", "q_proj"]),
    "tokens retrained": lambda: peft.LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
    "IA³": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
}
PROMPTS: dict[str, Any] = {
    "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(config: Any, base: Any = None, name: str = "default") -> Any:
    found = peft.get_peft_model(models.fresh("llama") if base is None else base, config, adapter_name=name)
    return spread(found)


def spread(model: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "hada_", "modules_to_save", "trainable_tokens")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 2e-5 * float(theirs.abs().max())


@pytest.mark.parametrize(("kind", "tied"), [*zip(KINDS, cycle((False, True)))])
def test_a_model_with_an_adapter_is_read_with_it_and_keeps_it(kind: str, tied: bool) -> None:
    base = models.fresh("llama")
    if tied:
        base.config.tie_word_embeddings = True
        base.lm_head.weight = base.model.embed_tokens.weight
    without = logits_of(base)
    source = adapted(KINDS[kind](), base)
    before, kept = logits_of(source), {name: each.clone() for name, each in source.state_dict().items()}
    assert float((before - without).abs().max()) > 0.1
    hooked = am.load(source)
    assert hooked.certificate.ok and hooked.name == "LlamaForCausalLM with adapter 'default' merged"
    close(hooked.run(IDS).logits, before)
    assert list(kept) == list(source.state_dict())
    assert all(torch.equal(each, kept[name]) for name, each in source.state_dict().items())
    assert torch.equal(logits_of(source), before)
    assert hooked.weights_hash != models.hooked("llama").weights_hash
    with source.disable_adapter():
        off = am.load(source)
    assert off.name.endswith("with adapter 'default' switched off")
    close(off.run(IDS).logits, without)


def test_w_q_is_the_matrix_and_what_lora_adds_to_it() -> None:
    source = adapted(KINDS["LoRA"]())
    hooked, layer = am.load(source), source.base_model.model.model.layers[1].self_attn.q_proj
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    whole = (layer.base_layer.weight + 1.5 * B @ A).T.detach()
    close(hooked.stack().weights(1).W_Q, whole.unflatten(1, (6, 8)).transpose(0, 1))
    split = am.decompose_scores(hooked, IDS)
    assert split.provenance.model == hooked.name and split.provenance.weights == hooked.weights_hash


def test_layers_without_an_adapter_stay_shared() -> None:
    source = adapted(KINDS["LoRA"]())
    inner = dict(source.get_base_model().named_parameters())
    here = dict(am.load(source).named_parameters())
    assert here["model.layers.0.mlp.up_proj.weight"] is inner["model.layers.0.mlp.up_proj.weight"]
    assert (
        here["model.layers.0.self_attn.q_proj.weight"] is not inner["model.layers.0.self_attn.q_proj.base_layer.weight"]
    )


def test_of_several_adapters_those_that_are_active() -> None:
    source = adapted(KINDS["LoRA"](), name="one")
    source.add_adapter("two", peft.LoraConfig(r=3, target_modules=["k_proj", "q_proj"]))
    spread(source, seed=5)
    hashes = set()
    for active, said in (("one", "'one'"), ("two", "'two'"), (["one", "two"], "'one', 'two'")):
        source.base_model.set_adapter(active)
        hooked = am.load(source)
        assert hooked.name.endswith(f" with adapter {said} merged")
        close(hooked.run(IDS).logits, logits_of(source))
        hashes.add(hooked.weights_hash)
    assert len(hashes) == 3


def test_an_adapter_that_is_merged_already() -> None:
    source = adapted(KINDS["LoRA"]())
    before = logits_of(source)
    source.merge_adapter()
    close(am.load(source).run(IDS).logits, before)
    with source.disable_adapter(), pytest.raises(UnsupportedModelError, match="merged and switched off"):
        am.load(source)


def test_an_adapter_inside_a_transformers_model() -> None:
    source = models.fresh("llama")
    source.add_adapter(KINDS["LoRA"](), adapter_name="mine")
    spread(source)
    hooked = am.load(source)
    assert hooked.name.endswith("with adapter 'mine' merged")
    close(hooked.run(IDS).logits, logits_of(source))


def test_an_encoder_and_another_precision() -> None:
    source = adapted(peft.LoraConfig(**LORA, target_modules=["query", "value"]), models.fresh("bert"))
    for dtype in (None, torch.float64):
        close(am.load(source, dtype=dtype).run(IDS).logits.to(torch.float32), logits_of(source))


@pytest.mark.parametrize("kind", PROMPTS)
def test_adapters_that_are_no_weights_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'default' \\({kind}\\) does not change weights"):
        am.load(peft.get_peft_model(models.fresh("gpt2"), PROMPTS[kind]()))


def test_an_adapter_that_does_more_than_its_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = adapted(KINDS["LoRA"]())
    source.register_forward_hook(lambda module, args, output: (2 * output[0],))
    refuses("does not compute what the merged weights compute", am.load, source, error=UnsupportedModelError)
    monkeypatch.setattr(adapters, "_require_same_output", lambda *_: None)
    source.base_model.model.model.layers[0].self_attn.q_proj.merge = lambda **_: None
    refuses(r"at model\.layers\.0\.self_attn\.q_proj does not compute", am.load, source, error=UnsupportedModelError)


def saved(tmp_path: Path, config: Any, **changes: Any) -> tuple[Path, Any]:
    """A folder with an adapter for a base in another folder, and the adapted model."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    models.fresh("llama").save_pretrained(base)
    source = adapted(config)
    source.save_pretrained(folder)
    about = json.loads((folder / adapters.CONFIG).read_text())
    (folder / adapters.CONFIG).write_text(json.dumps(about | {"base_model_name_or_path": str(base)} | changes))
    return folder, source


@pytest.mark.parametrize("kind", ["DoRA", "all layers, a module retrained"])
def test_a_folder_with_an_adapter_is_the_object_that_was_saved(kind: str, tmp_path: Path) -> None:
    folder, source = saved(tmp_path, KINDS[kind]())
    hooked = am.load(folder)
    assert hooked.name == f"{tmp_path / 'base'} with adapter 'default' merged ({folder})"
    assert hooked.weights_hash == am.load(source).weights_hash
    close(hooked.run(IDS).logits, logits_of(source))


def test_the_tokenizer_is_the_adapters_or_its_bases(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, KINDS["LoRA"]())
    models.tokenizer().save_pretrained(tmp_path / "base")
    assert am.load(folder).run("the keys").logits.shape[1] == 2
    models.tokenizer(adds_bos=True).save_pretrained(folder)
    assert am.load(folder).run("the keys").logits.shape[1] == 3


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, KINDS["LoRA"](), base_model_name_or_path=str(tmp_path / "none"))
    refuses(r"holds an adapter of '.*none': there is no folder", am.load, folder, error=ModelNotFoundError)
    about = json.loads((folder / adapters.CONFIG).read_text())
    (folder / adapters.CONFIG).write_text(json.dumps(about | {"base_model_name_or_path": None}))
    refuses("does not name its base model", am.load, folder, error=ModelNotFoundError)
    (folder / adapters.CONFIG).write_text(json.dumps(about | {"base_model_name_or_path": str(tmp_path / "base")}))
    stored = load_file(folder / adapters.WEIGHTS)
    lost = min(stored)
    save_file({name: each for name, each in stored.items() if name != lost}, folder / adapters.WEIGHTS)
    refuses(f"its adapter lacks 1 of the adapter's weights, including {lost}", am.load, folder, error=WeightsError)
    save_file(stored | {lost.replace("layers.0", "layers.7"): stored[lost].clone()}, folder / adapters.WEIGHTS)
    refuses(r"has no place for 1 of the adapter's weights, including .*layers\.7", am.load, folder, error=WeightsError)
    save_file({name: each[:1].clone() for name, each in stored.items()}, folder / adapters.WEIGHTS)
    refuses("its adapter does not fit LlamaForCausalLM", am.load, folder, error=WeightsError)
    (folder / adapters.WEIGHTS).write_bytes((folder / adapters.WEIGHTS).read_bytes()[:-9])
    refuses(r"adapter_model\.safetensors.* cut short", am.load, folder, error=WeightsError)
    (folder / adapters.WEIGHTS).unlink()
    refuses(r"but no adapter_model\.safetensors", am.load, folder, error=ModelNotFoundError)
    models.fresh("llama").save_pretrained(folder)
    refuses("holds both an adapter and a model's weights", am.load, folder, error=ModelNotFoundError)


def test_without_peft_a_folder_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved(tmp_path, KINDS["LoRA"]())

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(adapters, "import_module", absent)
    refuses(r"pip install 'attnmech\[peft\]'", am.load, folder)


def test_a_model_without_an_adapter_is_as_it_was() -> None:
    source = models.fresh("gpt2")
    assert adapters.merged(source) == (source, "")
    assert am.load(copy.deepcopy(source)).name == "GPT2LMHeadModel"
