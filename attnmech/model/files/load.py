"""Makes a `HookedModel` with its certificate from a name, a folder, a file or a model object."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
import transformers
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...basics.arguments import option, optional_flag, shown, whole_number
from ...basics.files import path_of
from ...basics.messages import first_line, warn_user
from ...basics.public import public
from ...demo import model_folder
from ...errors import InputError, ModelNotFoundError, UnsupportedModelError, WeightsError
from ...maths.float64 import float64_device
from ..inputs.own_inputs import Labels, OwnInputs
from ..inputs.processors import check_processor, processor_in
from ..own.module import OwnModule
from ..own.structure import read_own
from ..parts.memory import names_lack_of_memory
from ..parts.packed import quantised_as, require_movable, require_unquantised
from ..parts.settings import require_own_settings
from ..parts.weights import check_finite, check_real
from ..proof.certify import check_runs, prove
from ..proof.depth import FULL, SHORT
from ..proof.merged import MergedProof
from ..proof.probe import Passes
from ..run.hooked import HookedModel, require_model
from ..structure.architecture import Architecture
from ..structure.copies import copy_of, moved, uncompiled
from ..structure.plan import architectures_of, described, require_transformers, unwrapped
from ..structure.rewritten import rewritten
from ..structure.signals import argument_of
from ..structure.text_part import sense_of
from . import adapters
from .gguf import dequantised, is_gguf
from .split import check_joined, devices_of, joined, without_dispatch
from .stored import READING, SHARDED, WHOLE, check_complete, check_labels, check_stored, precision_of
from .unbridged import Unbridged, unbridged

_WEIGHTS: Final = (WHOLE, SHARDED)
_ANSWER_WITHIN: Final = 5.0  # seconds to wait for the hub to say whether it has a model


class UnprovenWarning(UserWarning):
    """The certificate of a newly loaded model has failed checks."""


@public
@names_lack_of_memory
def load(
    source: str | Path | nn.Module | None = None,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    bos: bool | None = None,
    architecture: Architecture | None = None,
    example: Any = None,
    labels: Labels = None,
    processor: Any = None,
    certify: Literal["short", "full", "again"] = "short",
) -> HookedModel:
    """Loads a model with named, proven activation points.

    >>> am.load()                                          # the demo model            # doctest: +SKIP
    >>> am.load("bigscience/bloom-560m")                   # from the hub              # doctest: +SKIP
    >>> am.load("/models/mine")                            # a folder                  # doctest: +SKIP
    >>> am.load("/models/mine.Q4_1.gguf")                  # a GGUF file, dequantised  # doctest: +SKIP
    >>> am.load("/adapters/mine")                          # an adapter, merged into its base  # doctest: +SKIP
    >>> am.load(hf_model, tokenizer=hf_tokenizer)          # an object; never asks the hub  # doctest: +SKIP
    >>> am.load(bridge)                                    # TransformerLens's TransformerBridge  # doctest: +SKIP
    >>> am.load(hf_model, architecture=am.Architecture(...))   # a structure of your own    # doctest: +SKIP
    >>> am.load(module, example=x, labels=["mean", "age"])     # any module with nn.MultiheadAttention  # doctest: +SKIP

    attnmech reads how the model is built from its modules and a traced pass; where it cannot, you pass `architecture`.
    Either way the certificate proves it, and names the first statement that does not hold. Wrappers (`DataParallel`,
    `torch.compile`) are removed. Modules of a model that `device_map` splits over devices run where they are, while
    activations and results are on the first device. Adapters (a `PeftModel`, or a folder with an adapter_config.json:
    `pip install 'attnmech[peft]'`) are merged into a copy of the layers that they change, and the model's name says so.

    For a `TransformerBridge`, or the `original_model` that it rewrote, attnmech rebuilds the transformers model with
    the weights that the bridge uses, which are the processed ones in compatibility mode. Loading compares the logits of
    the rebuilt model with those of `original_model` and of the bridge's own forward pass, and refuses a bridge whose
    logits differ. The bridge keeps its hooks; the loaded model does not have them.

    Pictures and recordings go through the model's own processor. With a processor, `model.run` takes a PIL image, an
    array [height width 3] of uint8, (samples per second, samples) as `scipy.io.wavfile.read` returns them, a
    `pathlib.Path` of a picture or WAV file, or a list of these. Without a processor, a model of images or sound takes
    tensors.

    Any other module that holds `nn.MultiheadAttention` (or `nn.TransformerEncoder`, `nn.Transformer`) needs an
    `example`. Its layers are read from one call. Self-attention over one sequence gives a single stack; cross-attention
    gives the stacks "encoder", "decoder" and "cross". `model.run` and all methods then take the module's own inputs,
    and `logits` is the first tensor that the module returns. If attention is the module's own code, it is read if each
    layer calls `scaled_dot_product_attention` once; otherwise it is computed from the parts that `architecture` names:
    blocks, q, k, v, out, the number of heads, and `mask`, the name of the mask argument of the attention.

    Weights are read only from safetensors and GGUF, and no code from a model's folder is run. The network is used only
    for a hub name that is not in the local cache.

    A GGUF file (`pip install 'attnmech[gguf]'`) is read by transformers, which dequantises its weights: everything is
    computed with the dequantised weights, and the model's name says so. The first load takes longer; later loads read a
    float32 copy in `~/.cache/attnmech/gguf` (in `$XDG_CACHE_HOME/attnmech/gguf`, if that is set), which can be deleted
    at any time.

    The certificate of a model that consists of transformers' own code is kept in `~/.cache/attnmech/certificates`, and
    found again if weights, config, precision, device and the versions of all libraries are the same. It is then only
    checked that attnmech's output is that of plain transformers, and `model.certificate.proven_on` is the day of the
    proof. `certify="again"` proves anew; the environment variable ATTNMECH_CERTIFICATES names another folder, or, set
    to nothing, switches this off.

    Warns with `UnprovenWarning` if a check of the certificate failed; the points that it concerns are then refused.

    Args:
        source: a model object, which is not changed (the copy shares its parameters); or a string. A string is a folder
            if a folder of this name exists, a file if it ends in .gguf, and otherwise a hub name. None is the demo
            model.
        tokenizer: the tokenizer of a model object, which otherwise takes only token ids.
        device: the device of the model; parameters of a model object are copied if they are on another device.
        dtype: the precision; by default, the one in which a folder stores its weights, and float32 for GGUF and for the
            demo model (stored in bfloat16). Parameters of a model object are copied if they have another precision.
        bos: whether a text begins with the tokenizer's BOS or CLS token: None leaves it to the tokenizer.
        architecture: how the model is built, if attnmech cannot read that from the model.
        example: inputs for a module of your own: a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments.
        labels: names of the positions of this module: a list of strings; for two sequences, a mapping with a list for
            "source" and one for "target"; for images, an `am.architecture.PatchGrid`.
        processor: converts pictures and recordings, if the folder has no processor (preprocessor_config.json). If it
            also holds a tokenizer (Whisper), that is used too.
        certify: "again" proves a model that was proven before; "full" runs the longer proof of
            `am.certify(model, full=True)`.

    Returns:
        The model, with its certificate.

    Raises:
        ModelNotFoundError: if there are no weights under the name or in the folder.
        UnsupportedModelError: for a model without attention, or of a kind that cannot be expressed exactly.
        WeightsError: for weights that are damaged, not finite, or in a precision that this device does not support; for
            a bridge whose logits differ from its model's.
        DeviceMemoryError: if the device has too little memory for the model or its certificate.
        InputError: for an invalid argument, an example that does not run, or a GGUF file without the package to read
            it.
        OutputError: if no copy of a GGUF file can be written.
    """
    require_own_settings()
    demo, kind, place = source is None, _dtype(dtype), _device(device)
    _require_precision(place, kind)
    optional_flag("bos", bos)
    depth = FULL if option("certify", certify, ("short", "full", "again")) == "full" else SHORT
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(
            f"`tokenizer` must be a transformers tokenizer, or left out; got {shown(tokenizer)}. Make one with "
            "AutoTokenizer.from_pretrained(folder)."
        )
    if architecture is not None and not isinstance(architecture, Architecture):
        raise InputError(f"`architecture` must be an am.Architecture; got {shown(architecture)}.")
    plans: tuple[Architecture, ...] = ()
    own: OwnInputs | None = None
    bridge: Unbridged | None = None
    split: PreTrainedModel | None = None
    original: PreTrainedModel
    if example is not None or labels is not None:
        original, plans, own = _own(source, place, kind, tokenizer, example, labels, architecture)
        name = str(original.name_or_path)
    elif isinstance(source, nn.Module):
        bridge = unbridged(unwrapped(source))
        if bridge is not None and tokenizer is None:
            tokenizer = bridge.tokenizer
        original, name = _from_object(source if bridge is None else bridge.model, place, kind)
        if len(devices_of(original)) > 1:
            split, original = original, joined(original)
    else:
        original, tokenizer, name, folder = from_files(source, tokenizer, place, kind)
        processor = processor_in(folder, original) if processor is None else processor
    if tokenizer is None and (original.config.is_encoder_decoder or original.main_input_name == "input_ids"):
        tokenizer = getattr(processor, "tokenizer", None)
    processor = None if processor is None else check_processor(processor, original)
    check_real(original)
    check_finite(original.named_parameters())
    code = "model" if isinstance(source, nn.Module) else "am.load()" if demo else f"am.load({str(source)!r})"
    if not plans:
        original = rewritten(original)
        plans = architectures_of(original) if architecture is None else (described(original, architecture),)
    model = HookedModel(
        original, plans, tokenizer, name=name, source=code, is_demo=demo, bos=bos, own=own, processor=processor
    )
    model.files = "" if demo else None if isinstance(source, nn.Module) else str(source)
    kept, again = architecture is None and bridge is None and split is None and certify != "full", certify != "short"
    model.prove_merged, model.load_tower = MergedProof(kept=kept, again=again), partial(_tower, processor)
    passes = Passes(model, depth)
    check_runs(passes)
    if split is not None:
        check_joined(split, passes)
    if bridge is not None:
        bridge.check(passes)
    prove(passes, again=again, kept=kept)
    if not model.certificate.ok:
        warn_user(f"{name}: {model.certificate.verdict}", UnprovenWarning)
    return model


def _tower(processor: Any, model: HookedModel, kind: Literal["vision", "sound"]) -> HookedModel:
    """The part of a model that reads pictures ("vision") or sounds, as a model of its own."""
    sense, part = ("an image", "image_processor") if kind == "vision" else ("a sound", "feature_extractor")
    path = next((path for path in model.towers if sense_of(path) == sense), None)
    if path is None:
        raise InputError(f"{model.name} has no {kind} tower: no model inside it reads {sense}.")
    tower = copy_of(cast(PreTrainedModel, model.original.base_model.get_submodule(path)))
    tower.config.name_or_path = f"{model.name} ({kind} tower)"
    own = getattr(processor, part, None)
    loaded = load(tower, processor=own if argument_of(tower) in getattr(own, "model_input_names", ()) else None)
    loaded.source = f"{model.source}.{kind}"
    return loaded


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise InputError(f'dtype must be a floating-point type such as torch.float32 or "float32"; got {shown(dtype)}.')
    return kind


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    if not isinstance(device, str | torch.device):
        raise InputError(f'device must be a torch.device or its name, such as "cpu"; got {shown(device)}.')
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f'device {str(device)!r} cannot be used here ({first_line(error)}); try "cpu".') from error
    return place


def _require_precision(device: torch.device | None, dtype: torch.dtype | None) -> None:
    if device is not None and dtype == torch.float64 and float64_device(device) != device:
        raise InputError(
            f'device {str(device)!r} has no float64; use dtype="float32", or device="cpu" for a model in float64.'
        )


def _from_object(
    source: nn.Module, device: torch.device | None, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, str]:
    plain, remark = adapters.merged(unwrapped(source))
    source = uncompiled(require_transformers(plain))
    places = {parameter.device for parameter in source.parameters()}
    if any(place.type == "meta" for place in places):
        _require_no_offload(source)
        raise WeightsError("the model's weights are on the meta device, so they are not loaded; load them first.")
    # Checked before a cast to another precision, which would turn integers into real numbers.
    check_real(source)
    _require_precision(device, dtype or source.dtype)
    name = (getattr(source.config, "name_or_path", "") or type(source).__name__) + remark
    if {device or place for place in places} == places and dtype in (None, source.dtype):
        return source, f"{name}{quantised_as(source)}"
    require_movable(source)
    # The copy shares its parameters, so moving or casting it would move or cast the caller's model.
    copied = copy_of(source, lambda parameter: moved(parameter, device, dtype), device=device)
    return copied if device is None else without_dispatch(copied), name


def _require_no_offload(source: PreTrainedModel) -> None:
    placed: dict[str, Any] = getattr(source, "hf_device_map", None) or {}
    elsewhere = ("disk",) if set(placed.values()) <= {"cpu", "disk"} else ("cpu", "disk")
    away = [part for part, place in placed.items() if place in elsewhere]
    if away:
        raise WeightsError(
            f"the model's device_map keeps {len(away)} of its {len(placed)} parts away from the device that runs them "
            f"({away[0] or 'all of it'!r} on {str(placed[away[0]])!r}), where attnmech needs them. "
            'Load it with device_map={"": "cpu"}, or without; dtype="bfloat16" needs half the memory of float32.'
        )


def _own(
    source: object,
    device: torch.device | None,
    dtype: torch.dtype | None,
    tokenizer: Any,
    example: Any,
    labels: Labels,
    architecture: Architecture | None,
) -> tuple[OwnModule, tuple[Architecture, ...], OwnInputs]:
    """A module of the user's own, its stacks and its inputs."""
    if not isinstance(source, nn.Module) or isinstance(source, PreTrainedModel):
        raise InputError(
            "`example` and `labels` are for a torch module other than a transformers model; got "
            f"{'a transformers model' if isinstance(source, nn.Module) else shown(source)}."
        )
    if example is None:
        raise InputError("`labels` needs `example`, the inputs of the module.")
    if tokenizer is not None:
        raise InputError("`tokenizer` is for models of tokens; a module of your own is given tensors.")
    if device is not None or dtype is not None:
        raise InputError(
            "a module of your own keeps its precision and its device; to change them, call module.to(...) first."
        )
    module = unwrapped(source)
    check_real(module)
    check_finite(module.named_parameters())
    original, plans = read_own(module, example, architecture)
    return original, plans, OwnInputs(example, labels)


def from_files(
    source: str | Path | None, tokenizer: Any, device: torch.device | None, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, Any, str, Path]:
    """The model of a hub name, folder or file (None: the demo model), with its tokenizer, name and folder."""
    if source is None:
        folder, name, dtype = model_folder(), "demo", dtype or torch.float32
    elif isinstance(source, (str, Path)):
        path, name = _path_of(source), str(source)
        if is_gguf(path):
            with _quiet():
                copy = dequantised(path)
            folder, name = copy.folder, f"{name}{copy.remark}"
        else:
            folder = _folder_of(source, path)
    else:
        raise InputError(
            "a model must be a hub name, a folder, a GGUF file, a transformers model, a TransformerBridge, or left "
            f"out; got {type(source).__name__}."
        )
    if (folder / adapters.CONFIG).is_file():
        return _with_adapter(folder, tokenizer, device, dtype, name)
    return _read_folder(folder, device, dtype), _tokenizer_of(folder) if tokenizer is None else tokenizer, name, folder


def _with_adapter(
    folder: Path, tokenizer: Any, device: torch.device | None, dtype: torch.dtype | None, name: str
) -> tuple[PreTrainedModel, Any, str, Path]:
    """The base model of a folder's adapter, with the adapter merged into it."""
    if any((folder / file).is_file() for file in _WEIGHTS):
        raise ModelNotFoundError(
            f"folder {folder} holds both an adapter and a model's weights; put one of them in a separate folder."
        )
    named = adapters.base_of(folder)
    try:
        base = _folder_of(named, _path_of(named))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"folder {folder} holds an adapter of {named!r}: {first_line(error)} If the base is elsewhere, load both "
            "yourself and give am.load the object: peft.PeftModel.from_pretrained(base, folder)."
        ) from error
    if (base / adapters.CONFIG).is_file():
        raise UnsupportedModelError(
            f"folder {folder} holds an adapter for {base}, which is an adapter itself; merge {base} into its base "
            f"first."
        )
    with _quiet():
        model, remark = adapters.merged(adapters.adapted(_read_folder(base, device, dtype), folder))
    assert isinstance(model, PreTrainedModel)
    if tokenizer is None:
        tokenizer = _tokenizer_of(folder) or _tokenizer_of(base)
    return model, tokenizer, f"{named}{remark} ({name})", base


def _read_folder(folder: Path, device: torch.device | None, dtype: torch.dtype | None) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"folder {folder} has no config.json, so it is not a model's folder.")
    if not any((folder / file).is_file() for file in _WEIGHTS):
        other = " (other weight files are not read: they may run code)" if any(folder.glob("*.bin")) else ""
        raise ModelNotFoundError(
            f"folder {folder} has no weights: expected {_WEIGHTS[0]}{other}. "
            "Write them with model.save_pretrained(folder)."
        )
    check_labels(folder)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config can hold anything, and fail in many ways
        raise UnsupportedModelError(f"folder {folder}: its config cannot be read: {first_line(error)}") from error
    require_unquantised(config, f"the model in folder {folder}")
    config._attn_implementation = None  # a name with a slash would make transformers fetch and run a kernel
    names = getattr(config, "architectures", None)
    named = names[0] if isinstance(names, list) and names else names
    kind: Any = getattr(transformers, named, None) if isinstance(named, str) else None
    known = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    if not known:
        raise UnsupportedModelError(
            f"folder {folder} names the class {named!r}, which transformers {transformers.__version__} does not have. "
            "If the folder brings code, read that code, load the model with it yourself, and give am.load the object."
        )
    with _quiet():
        check_stored(folder, kind, config)
    precision = precision_of(folder) if dtype is None else dtype
    try:
        with READING, _quiet():
            model, report = kind.from_pretrained(
                str(folder),
                config=config,
                dtype=precision or "auto",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise WeightsError(f"folder {folder}: its weights cannot be read: {first_line(error)}") from error
    for name, stored, wanted in report["mismatched_keys"]:
        raise WeightsError(
            f"folder {folder}: {name} has the shape {tuple(stored)}, but its config implies {tuple(wanted)}; the "
            "two do not belong together."
        )
    check_complete(f"folder {folder}", kind.__name__, report["missing_keys"])
    assert isinstance(model, PreTrainedModel)
    return model if device is None else model.to(device=device)  # type: ignore[call-arg]


def _tokenizer_of(folder: Path) -> Any:
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"folder {folder}: its tokenizer cannot be read: {first_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' progress bar and loading report; attnmech's errors say the same."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _path_of(source: str | Path) -> Path:
    try:
        return path_of(Path(source).expanduser(), ModelNotFoundError)
    except RuntimeError as error:  # "~" before an unknown user's name
        raise ModelNotFoundError(f"there is no folder {source}: {first_line(error)}") from error


def _folder_of(source: str | Path, path: Path) -> Path:
    if path.is_dir():
        return path
    name = str(source)
    if isinstance(source, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {name}.")
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=wanted))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is neither a folder nor a hub name: {first_line(error)}") from error
    except LocalEntryNotFoundError:
        pass
    unreachable = f"{name!r} is not a folder and not in the local cache, and the hub cannot be reached"
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(f"{unreachable} (HF_HUB_OFFLINE is set).")
    try:
        HfApi().model_info(name, timeout=_ANSWER_WITHIN)
        return Path(snapshot_download(name, allow_patterns=wanted))
    except HfHubHTTPError as error:
        raise ModelNotFoundError(f"the hub has no model {name!r} that you may read: {first_line(error)}") from error
    except Exception as error:  # the class depends on which http client the hub library uses
        raise ModelNotFoundError(f"{unreachable} ({first_line(error)}).") from error


@public
def untrained(model: HookedModel, seed: int = 0) -> HookedModel:
    """A model of the same config and tokenizer with random weights, as transformers initialises them.

    >>> import attnmech as am
    >>> am.untrained(am.load(), seed=1).name
    'demo (random weights, seed 1)'

    Args:
        model: the model.
        seed: the seed of the random weights; torch's global generator is left alone.

    Returns:
        A new model, which takes as much memory as the original.
    """
    require_model(model)
    if model.is_own:
        raise InputError(
            "untrained is for transformers models, which can be made anew from their config; make a new instance of "
            "your module, and load it: am.load(module, example=...)."
        )
    seed = whole_number("seed", seed, most=2**63 - 1)
    kind = type(model.plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind._from_config(copy.deepcopy(model.plain.config), dtype=model.dtype)  # type: ignore[no-untyped-call]
    random = load(made.eval(), tokenizer=model.tokenizer, device=model.device, bos=getattr(model.encoder, "bos", None))
    random.name = f"{model.name} (random weights, seed {seed})"
    return random
