"""Compiled RASP programs as transformers models, with the truth about their heads.

    from model import load
    model, program = load("induction")  # an attnmech model, and what is known about it

`compile.py` writes the files in `models/`. A program's model has no norms; its attention goes through transformers'
interface, so attnmech reads it like any other, by the `ARCHITECTURE` below.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnmech as am
from attnmech.architecture import Separate

MODELS: Final = Path(__file__).parent / "models"
TRAINED: Final = Path(__file__).parent / "trained"
"""GPT-2s that `interchange.py` trained to compute programs head by head."""
NAMES: Final = tuple(sorted(path.stem for path in MODELS.glob("*.safetensors")))
ARCHITECTURE: Final = am.Architecture(
    name="compiled", blocks="layers", attention="attention", qkv=Separate("q", "k", "v"), out="attention.out",
    mid_norm="between", mlp_out="mlp",
)  # fmt: skip
TRAINED_HEADS: Final = 8
Head = tuple[int, int]
Edge = tuple[str, str]


@dataclass(frozen=True)
class Program:
    """A compiled program: its description, and the outputs of tracr's own model on the reference inputs."""

    description: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, name: str) -> "Program":
        """Reads a program's file."""
        path = MODELS / f"{name}.safetensors"
        with safe_open(path, "pt") as file:
            return cls(json.loads(file.metadata()["program"]), load_file(path))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.description[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def trained(self) -> "Program":
        """The same truth for a GPT-2 of eight heads per layer, which has no decoys."""
        places = [(layer, head) for layer in range(self.n_layers) for head in range(TRAINED_HEADS)]
        idle = [place for place in places if place not in self.circuit]
        changed = {"n_heads": TRAINED_HEADS, "idle": idle, "decoys": []}
        return replace(self, description=self.description | changed)

    @property
    def compiled(self) -> "Program":
        """The program as compiled."""
        return Program.read(self.name)

    @cached_property
    def circuit(self) -> frozenset[Head]:
        """The heads of the program."""
        return frozenset((head["layer"], head["head"]) for head in self.heads)

    @cached_property
    def unused(self) -> frozenset[Head]:
        """Heads of zeros, and decoys."""
        return frozenset(map(tuple, self.idle + self.decoys))

    def weight(self, name: str) -> Tensor:
        """A weight matrix."""
        shape = self.shapes[name]
        matrix = torch.zeros(shape).flatten()
        matrix[self.tensors[f"{name}.places"].long()] = self.tensors[f"{name}.values"]
        return matrix.view(*shape)


class Attention(nn.Module):
    """Attention through transformers' interface."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.is_causal = config.is_decoder
        self.config, self.d_head, inner = config, config.d_head, config.num_attention_heads * config.d_head
        self.q, self.k, self.v = (nn.Linear(config.hidden_size, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        z, _ = attend(self, q, k, v, mask, scaling=self.d_head**-0.5, dropout=0.0)
        return self.out(z.flatten(2))


class Block(nn.Module):
    """Attention, then an MLP; no norms."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.between = nn.Identity()
        self.attention = Attention(config)
        self.mlp = nn.Sequential()
        self.mlp.add_module("linear_1", nn.Linear(config.hidden_size, config.intermediate_size, bias=False))
        self.mlp.add_module("relu", nn.ReLU())
        self.mlp.add_module("linear_2", nn.Linear(config.intermediate_size, config.hidden_size, bias=False))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(x, mask)
        return x + self.mlp(self.between(x))


class Compiled(PreTrainedModel):
    """A compiled program."""

    config_class = PretrainedConfig
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.unembed = nn.Linear(config.hidden_size, config.outputs, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module | None:
        return self.unembed if self.config.of_tokens else None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False, **options: Any
    ) -> CausalLMOutput:
        x = self.embed(input_ids)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        if self.config.is_decoder:
            mask = create_causal_mask(self.config, x, attention_mask, None)
        else:
            mask = create_bidirectional_mask(self.config, x, attention_mask)
        for layer in self.layers:
            x = layer(x, mask)
        return CausalLMOutput(logits=self.unembed(x))


def module_of(program: Program) -> Compiled:
    """The model of a program, as plain torch."""
    outputs, width = program.shapes["unembed"]
    config = PretrainedConfig(
        vocab_size=len(program.vocabulary), hidden_size=width, num_hidden_layers=program.n_layers,
        num_attention_heads=program.n_heads, intermediate_size=program.shapes["layers.0.mlp.linear_1"][0],
        max_position_embeddings=program.length + 1, is_decoder=program.causal, d_head=program.d_head, outputs=outputs,
        bos_token_id=program.vocabulary[program.bos], pad_token_id=program.vocabulary[program.pad],
        tie_word_embeddings=False, of_tokens=program.of_tokens, name_or_path=program.name,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = Compiled(config)
    model.load_state_dict({f"{name}.weight": program.weight(name) for name in program.shapes})
    return model.eval()


def tokenizer_of(program: Program) -> PreTrainedTokenizerFast:
    """Splits a text at spaces, and puts BOS before it."""
    tokenizer = Tokenizer(WordLevel(program.vocabulary, unk_token=program.pad))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{program.bos} $A", special_tokens=[(program.bos, program.vocabulary[program.bos])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=program.bos, pad_token=program.pad)


def gpt2_of(program: Program) -> GPT2LMHeadModel:
    """A GPT-2 with random weights for a program whose outputs are tokens."""
    config = GPT2Config(
        vocab_size=len(program.vocabulary), n_positions=program.length + 1, n_embd=64, n_layer=program.n_layers,
        n_head=program.n_heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, initializer_range=0.1,
        bos_token_id=program.vocabulary[program.bos], eos_token_id=program.vocabulary[program.pad],
        pad_token_id=program.vocabulary[program.pad], name_or_path=f"trained {program.name}",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trained_module(program: Program) -> GPT2LMHeadModel:
    """The trained GPT-2 of a program, as plain torch."""
    module = gpt2_of(program)
    module.load_state_dict(load_file(TRAINED / f"{program.name}.safetensors"), strict=False)
    return module.eval()


def load_trained(name: str, dtype: torch.dtype = torch.float32) -> tuple[am.HookedModel, Program]:
    """A trained model and the truth about it."""
    program = Program.read(name).trained
    return am.load(trained_module(program), tokenizer=tokenizer_of(program), dtype=dtype), program


def stored_shares(name: str) -> dict[str, float]:
    """The shares of right answers of a trained model, as measured when it was trained."""
    with safe_open(TRAINED / f"{name}.safetensors", "pt") as file:
        measured: dict[str, float] = json.loads(file.metadata()["shares"])
    return measured


def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[am.HookedModel, Program]:
    """A program's model and the truth about it."""
    program = Program.read(name)
    plan = replace(ARCHITECTURE, position_limit=program.length + 1, causal=program.causal)
    model = am.load(module_of(program), tokenizer=tokenizer_of(program), architecture=plan, dtype=dtype)
    return model, program
