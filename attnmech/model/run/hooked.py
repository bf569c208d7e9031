"""A transformer with named activation points: run it, read any point, edit any point, leave no trace."""

import hashlib
import inspect
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ...activations.activations import Activations
from ...basics.arguments import index_of, listed, optional_flag, shown, whole_number
from ...basics.lens_names import missing_name
from ...batch import Batch
from ...errors import CertificateError, InputError
from ...interventions import Head, Heads, Intervention, checked_heads
from ...interventions.edits import TermEdit
from ...interventions.place import BatchPart, Place
from ...points import PointKey, PointName
from ...results.provenance import Provenance
from ..attention.applied import Applied
from ..attention.attend import IMPLEMENTATION
from ..attention.in_force import Hook, InForce, Part, Pass, Watch
from ..attention.local_global import GLOBAL_MASK
from ..attention.observed import LayerObserver, RowObserver
from ..inputs.embeddings import encoder_of, first_position_of, token_embedding, wire_further, wire_tokens
from ..inputs.encoder import Encoder, Inputs
from ..inputs.images import ImageEncoder, PatchGrid
from ..inputs.own_inputs import OwnEncoder, OwnInputs
from ..inputs.senses import signal_encoder
from ..inputs.sounds import SoundEncoder
from ..inputs.transcripts import TranscriptEncoder
from ..own.module import NO_TOKENS, OwnModule
from ..parts.modules import submodule
from ..parts.predictions import Prediction, predicted_by
from ..parts.weights import AttentionWeights, WeightsHash, tensors_hash
from ..stack.carried import captured_norms
from ..stack.centring import require_fitting, require_weights
from ..stack.ledger import ledger_split_at
from ..stack.points import ModelPoints, check_size, points_of
from ..stack.stack import Stack
from ..stack.wiring import wired_stack
from ..structure.architecture import Architecture
from ..structure.copies import copy_of, forget_lengths, take_apart, use_attention
from ..structure.signals import signal_config
from .bridges import Bridges
from .generation import Continuing, Generated, Sampling, ends_of
from .gradients import Measure, run_with_gradients
from .loss import masked_token_losses, next_token_losses
from .masking import known_mask_id, mask_id_of
from .passes import CheckedPasses, call

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

    from ..parts.certificate import Certificate

_NOT_THE_MODEL: Final = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Config entries that change when a model is saved and loaded, but not what it computes."""


class HookedModel:
    """A transformers model whose every activation point has one meaning.

    Made by `am.load`. The caller's model is never modified: this is a copy of its modules that shares its parameters,
    so later in-place changes to a weight show here as well. Forward hooks on the caller's modules are copied as they
    were at load.

    >>> acts = model.run("The keys are here.", points=["q", "pattern"])     # doctest: +SKIP
    >>> acts["pattern", 3]                                                   # doctest: +SKIP
    >>> with model.hooks({("pattern", 3): lambda pattern: pattern * 0}):     # doctest: +SKIP
    ...     model.run("The keys are here.")
    """

    certificate: "Certificate"
    """What `certify` last proved about this model, at load or since."""
    files: str | None = None
    """The hub name, folder or file that it was loaded from, "" for the demo model; None if it was an object."""

    def __init__(
        self,
        original: PreTrainedModel,
        plans: Sequence[Architecture],
        tokenizer: Any = None,
        *,
        name: str,
        source: str = "model",
        is_demo: bool = False,
        bos: bool | None = None,
        own: OwnInputs | None = None,
        processor: Any = None,
    ) -> None:
        self.name = name
        self.source = source
        """The Python code that loads this model, such as am.load(); `model` if it was made from an object."""
        self.is_demo = is_demo
        """Whether this is attnmech's own demo model."""
        self.config = original.config
        self.tokenizer = tokenizer
        self._original = original
        self._in_force = InForce()
        self._bridges = Bridges(original, tokenizer)
        self._hash = WeightsHash()
        self._model = copy_of(original)
        # Hooks and replaced forwards refer to the modules that hold them: without this, weights would stay until Python
        # looks for circles.
        weakref.finalize(self, take_apart, self._model).atexit = False
        use_attention(self._model, IMPLEMENTATION)
        forget_lengths(self._model)
        base: nn.Module = self._model.base_model
        for plan in plans:
            if plan.adapt is not None:
                plan.adapt(base)
        self.stacks = {plan.stack: wired_stack(base, plan, self._in_force) for plan in plans}
        first = next(iter(self.stacks.values()))
        self.architecture: Architecture = first.architecture
        self.n_layers, self.n_heads, self.n_kv_heads = first.n_layers, first.n_heads, first.n_kv_heads
        self.d_model, self.d_head = first.d_model, first.d_head
        weight = first.weights(first.layers[0]).W_Q
        self.device = weight.device
        this = weakref.proxy(self)
        self._passes = CheckedPasses(self._model, self.stacks, self._in_force, self.device, lambda: this.refused)
        self.points: ModelPoints = points_of(list(self.stacks.values()), has_logits=_has_head(self._model))
        self.grid = PatchGrid.of(signal_config(original)) if self.architecture.reads == "pixels" else None
        """How an image is cut into the patches that are its positions; None for other inputs."""
        self.n_vocab = 0
        self.further_embeddings: tuple[str, ...] = ()
        """What is embedded besides tokens, such as "position embedding": a pass can capture it, but it is not a point.
        """
        self.encoder: Encoder | ImageEncoder | SoundEncoder | OwnEncoder
        if isinstance(original, OwnModule):
            assert own is not None
            self.encoder = OwnEncoder(original, own.labels, self.device, own.example)
            self.grid = self.encoder.grid
        elif self.grid is not None or self.architecture.reads == "sound":
            text = self._token_encoder(plans, bos) if "decoder" in self.stacks else None
            self.encoder = signal_encoder(original, self.architecture.blocks, self.grid, weight, processor, text)
        else:
            self.encoder = self._token_encoder(plans, bos)

    def _token_encoder(self, plans: Sequence[Architecture], bos: bool | None) -> Encoder:
        """What makes tokens, whose embeddings are wired."""
        wire_tokens(
            self._model,
            self._in_force,
            is_point=self.points["embed"].absent is None,
            batch_first=self.architecture.batch_first,
        )
        self.further_embeddings = wire_further(self._model, plans, self._in_force, d_model=self.d_model)
        self.n_vocab = len(self.embedding)
        decoder = self.output_stack.architecture if "decoder" in self.stacks else None
        plan = self.architecture if self.reads_tokens else self.output_stack.architecture
        this = weakref.proxy(self)
        return encoder_of(
            self._model,
            plan,
            self.tokenizer,
            bos,
            self.device,
            decoder=decoder,
            first_position=lambda: first_position_of(this.plain),
        )

    @property
    def is_own(self) -> bool:
        """Whether it is a module of the user's own, and no transformers model."""
        return self.architecture.reads == "tensors"

    @property
    def reads_tokens(self) -> bool:
        """Whether its positions are tokens of a vocabulary, in every stack."""
        return self.architecture.reads == "tokens"

    @property
    def writes_tokens(self) -> bool:
        """Whether the positions of its output's stack are tokens of a vocabulary."""
        return self.output_stack.architecture.reads == "tokens"

    @property
    def predicts(self) -> Prediction:
        """What its logits are of."""
        return predicted_by(self._original, causal=self.causal, writes_tokens=self.writes_tokens)

    @property
    def mask_id(self) -> int:
        """The id of the mask token; `InputError` if neither the tokenizer nor the config says it."""
        return mask_id_of(self.tokenizer, self.config, self.name)

    @property
    def has_loss(self) -> bool:
        """Whether `loss` can be measured: it predicts the next token, or a masked one and its mask token is known."""
        masks = self.predicts == "masked token" and known_mask_id(self.tokenizer, self.config) is not None
        return self.predicts == "next token" or masks

    def special_keys(self, stack: str) -> frozenset[int]:
        """The ids of the tokenizer's special tokens among the keys of a stack; frames have none."""
        if isinstance(self.encoder, TranscriptEncoder) and stack == "decoder":
            return self.encoder.text.special
        return self.encoder.special

    # -- what a user calls ---------------------------------------------------------------------------------

    def run(
        self,
        inputs: Inputs,
        points: Iterable[PointName] = (),
        *,
        layers: Iterable[int] | None = None,
        bos: bool | None = None,
        gradients_of: Measure | None = None,
    ) -> Activations:
        """Runs one forward pass and returns the requested points; nothing else is kept.

        >>> acts = model.run("Anna sang of shells.", points=["q", ("pattern", 3)])          # doctest: +SKIP

        Values are as the model used them: after all active edits. They have the model's dtype and device.

        Args:
            inputs: a text, a list of texts (a batch), token ids, a chat, a list of chats, or a mapping of model inputs.
                A chat is a list of messages, [{"role": "user", "content": "Hi."}], and goes through the tokenizer's
                chat template, without a prompt for an answer.
            points: names ("pattern": every layer, or those in `layers`), pairs ("pattern", 3), or TransformerLens's
                names. Without points: only the logits (for a model without a head, the last `resid_post`).
                `model.points` lists them.
            layers: the layers of points named without one; by default all.
            bos: whether each text begins with the tokenizer's first token; by default as at load.
            gradients_of: a function of the logits (and, if it takes two arguments, of the `Batch`) that returns one
                number or one per sequence; `.gradients` then holds the derivative of their sum with respect to every
                requested point.

        Returns:
            The points: `acts["pattern", 3]` is `[batch head query key]`.

        Raises:
            InputError: for invalid inputs, layers or names, and for more than 4 GiB of values (reduce those with
                `am.stream`).
            MissingPointError: for a point that this model lacks.
            CertificateError: for a point whose meaning could not be proven.
        """
        batch = self.encode(inputs, bos=bos)
        known = 'a name or a list of names, such as ["q", ("pattern", 3)]'
        asked: list[PointName] = [points] if isinstance(points, str) else listed("points", points, known)
        if not asked:
            asked = ["logits"] if self.points["logits"].absent is None else [self.last_stream]
        keys = self.points.resolve(asked, layers, self.refused)
        check_size(keys, self.stacks, batch, self.dtype.itemsize, gradients=gradients_of is not None)
        if gradients_of is None:
            wanted = Pass(batch, frozenset(keys))
            with torch.no_grad():
                self._passes.run(wanted)
            norms = captured_norms(self.stacks, wanted.values)
            return Activations(batch, wanted.values, unchecked=wanted.skipped, value_norms=norms, model=self.name)
        found = run_with_gradients(self._passes, batch, keys, gradients_of)
        return replace(found, model=self.name)

    @contextmanager
    def hooks(self, edits: Mapping[PointName, Hook]) -> Iterator["HookedModel"]:
        """Edits the values at points within the `with` block, however it ends.

        >>> with model.hooks({("pattern", 3): lambda pattern: pattern * 0}):     # doctest: +SKIP
        ...     model.run("The keys are here.")

        Blocks nest; edits of the same point apply in the order in which they were added.

        Args:
            edits: functions by point. Each takes the value at its point and returns one of the same shape, or None to
                keep it (in-place changes count). A name without a layer means every layer.

        Yields:
            The model itself.

        Raises:
            InputError: for anything but a mapping from points to functions.
            MissingPointError: for a point that this model lacks.
            CertificateError: for a point whose meaning could not be proven.
        """
        if not isinstance(edits, Mapping):
            raise InputError(f'hooks must map points to functions, as in {{("pattern", 3): f}}; got {shown(edits)}.')
        resolved: list[tuple[PointKey, Hook]] = []
        for name, edit in edits.items():
            if not callable(edit):
                raise InputError(f"the hook at {name!r} must be a function of the value; got {edit!r}.")
            if not _takes_one(edit):
                raise InputError(
                    f"the hook at {name!r} must take the value alone, f(value) -> value; got {edit!r} with the "
                    f"signature {inspect.signature(edit)}. TransformerLens's hooks take (value, hook): drop `hook`."
                )
            resolved += [(key, edit) for key in self.points.resolve([name], None, self.refused)]
        with self._in_force.editing(resolved):
            yield self

    @contextmanager
    def intervene(self, *interventions: Intervention) -> Iterator["HookedModel"]:
        """Applies interventions within the `with` block, however it ends.

        >>> with model.intervene(am.Intervention.zero([(3, 5)])):       # doctest: +SKIP
        ...     model.run("Anna sang of shells.")

        Within a layer they act in the order of its steps (scores, keys removed, pattern, values, z) and, at the same
        step, in the order given; a term that is scaled twice is multiplied by both factors. Hooks at the same point
        come after them, except at `v`: interventions change what single heads read after the hook, and `v` itself,
        which heads may share, stays as it is.

        Args:
            interventions: what to change.

        Yields:
            The model itself.

        Raises:
            InputError: for layers and heads that the model does not have, and for interventions without meaning there;
                in a run, for a term that the scores do not have, and for keys, positions or values that belong to other
                texts.
            MissingPointError: for a point that the model lacks.
            CertificateError: for a point that could not be proven.
        """
        acts = [self.applied(each) for each in interventions]
        self.check_means(interventions)
        with self._in_force.applying(acts):
            yield self

    def check_means(self, interventions: Iterable[Intervention]) -> None:
        """Raises `InputError` for an intervention whose means are of other weights; hashes the model's, so ask once."""
        edits = [one.edit for one in interventions if isinstance(one.edit, TermEdit)]
        means = {edit.centre for edit in edits if edit.centre is not None}
        weights = self.weights_hash if means else ""
        for each in means:
            require_weights(each, weights)

    @property
    def bridge(self) -> "TransformerBridge":
        """TransformerLens's `TransformerBridge` on a second copy, for everything else in its ecosystem.

        Its hooks are TransformerLens's own; the certificate says which of them mean what their names say. Raises
        `InputError` for a module of your own, which TransformerLens has no bridge for.
        """
        if self.is_own:
            raise InputError(f"TransformerLens has no bridge for {self.name}: {NO_TOKENS}.")
        return self._bridges.first

    def generate(
        self,
        inputs: Inputs,
        max_new_tokens: int = 20,
        *,
        points: Iterable[PointName] = (),
        generator: torch.Generator | None = None,
        bos: bool | None = None,
        **options: Any,
    ) -> Generated:
        """Continues a text; returns prompt and continuation as a batch, which `run` takes as it is.

        >>> said = model.generate("The keys to the old chest", 5)       # doctest: +SKIP
        >>> model.run(said, points=["pattern"]), "".join(said.tokens[0])   # doctest: +SKIP

        Under hooks and interventions, with `points` or a `generator`, and in an encoder-decoder, every token comes from
        a whole pass, which hooks and interventions see. Else `model.bridge.generate` is used, which is faster since it
        keeps keys and values. Its cache does not change any number: `run` on the result gives the logits that each
        token came from.

        Args:
            inputs: prompts of the same length.
            max_new_tokens: how many tokens to add at most.
            points: captured in each of the passes: `said.steps[2]["cross.pattern", 0]` is what the third new token came
                from.
            generator: a torch.Generator, which makes draws repeatable.
            bos: whether each text begins with the tokenizer's first token.
            options: do_sample (without it, greedy), temperature, top_k, top_p and stop_at_eos; with the bridge, its
                further options (repetition_penalty, ...). What a family forces as first tokens (mBART's target
                language, Whisper's language and task) is given as decoder_input_ids; no token is suppressed.

        Returns:
            The batch; an encoder-decoder's continuation is `said.target`.

        Raises:
            InputError: for prompts of different lengths, for an unknown option (listing the known ones), for a
                continuation beyond the model's positions, and for a model without a causal head.
            CertificateError: if the bridge is used and computes something else.
        """
        batch = self.encode(inputs, bos=bos)
        count = whole_number("max_new_tokens", max_new_tokens, least=1)
        asked: list[PointName] = [points] if isinstance(points, str) else listed("points", points, "a list of names")
        if self.is_own:
            raise InputError(f"generate continues a text, and {self.name} reads none: {NO_TOKENS}.")
        if not self.causal or self.points["logits"].absent:
            raise InputError(f"{self.name} has no head that continues a text token by token.")
        if (batch if batch.target is None else batch.target).padded:
            raise InputError("all prompts must have the same length: generate cannot pad; give one at a time.")
        if self._in_force.edited or asked or generator is not None or batch.target is not None:
            return self._continued(batch, count, Sampling.of(options, generator), asked)
        differs = [check for check in self.certificate.remarks if check.name == "bridge"]
        if differs:
            raise CertificateError(
                f"TransformerLens's bridge computes something else on this model ({differs[0].detail})."
            )
        from .bridge import continued

        with self._bridges.one() as bridge:
            return Generated.of(self.encode(continued(bridge, batch.ids, count, options)))

    def _continued(self, batch: Batch, count: int, sampling: Sampling, points: list[PointName]) -> Generated:
        """A continuation by passes of our own."""
        length, limit = batch.ids.shape[1], getattr(self.encoder, "position_limit", None)
        if batch.target is None and limit is not None and length + count > limit:
            raise InputError(
                f"this model has {limit} positions; a prompt of {length} tokens and {count} new ones do not fit. Give "
                "a smaller `max_new_tokens`."
            )
        others = sorted(batch.extra.keys() - {GLOBAL_MASK})
        if others and not isinstance(self.encoder, TranscriptEncoder):
            raise InputError(f"generate takes tokens alone; got also {', '.join(others)}.")
        proceed = Continuing(lambda now, asked: self.run(now, asked), self.encode, ends_of(self.tokenizer, self.config))
        return proceed(batch, count, sampling, points)

    def loss(self, inputs: Inputs, *, bos: bool | None = None) -> Float[Tensor, " text"]:
        """The mean cross-entropy of each text's tokens, in nats: what metric="loss" measures.

        >>> model.loss(["Anna sang of shells.", "Tom lost his old anchor."]).shape     # doctest: +SKIP
        torch.Size([2])

        Of the next token, or in a masked language model (BERT) of masked tokens: each ordinary token is masked once,
        together with about 15 % of the text's others, drawn by its ids; special tokens never are. Padding is excluded;
        active hooks and interventions act. In an encoder-decoder, of the decoder's tokens.

        Args:
            inputs: texts, or token ids.
            bos: whether each text begins with the tokenizer's first token.

        Returns:
            One number per text.

        Raises:
            InputError: for a text of a single token, or without one to mask; for a model that predicts neither the next
                token nor masked ones; and for a masked language model whose mask token is not known.

        Source: for masked tokens, the pseudo-log-likelihood of Salazar et al. 2020, which masks one token at a time.
        """
        predicts = "nothing" if self.points["logits"].absent is not None else self.predicts
        key: PointKey = ("logits", None)

        def logits_of(batch: Batch) -> Tensor:
            return self.forward(batch, captures=[key])[key]

        if predicts == "next token":
            return next_token_losses(self.encode(inputs, bos=bos), logits_of)
        if predicts == "masked token":
            return masked_token_losses(self.encode(inputs, bos=bos), self.mask_id, logits_of)
        raise InputError(f"a loss is for the next token or a masked one; {self.name} has no head that predicts it.")

    def encode(self, inputs: Inputs, *, bos: bool | None = None, target: str | Sequence[str] | None = None) -> Batch:
        """The batch of tokens that `run` makes from its inputs.

        >>> model.run(model.encode("The cat", target="Die Katze"), points=["cross.pattern"])    # doctest: +SKIP
        >>> whisper.encode(Path("speech.wav"), target="The keys are here.")                     # doctest: +SKIP

        Args:
            inputs: a text, a list of texts, token ids, a chat, a list of chats (as in `run`), a mapping of model
                inputs; or pictures and recordings.
            bos: whether each text begins with the tokenizer's first token. A chat begins as its template says, unless
                this is True or False.
            target: what the decoder of an encoder-decoder reads, one text for each text or recording of `inputs`; the
                token that the decoder starts with is put before it.

        Returns:
            Token ids, texts of tokens, mask and lengths.

        Raises:
            InputError: for a `target` on a model that is no encoder-decoder.
        """
        optional_flag("bos", bos)
        batch = inputs if isinstance(inputs, Batch) else self.encoder.encode(inputs, bos)
        if target is None:
            return batch
        text = self.encoder.text if isinstance(self.encoder, TranscriptEncoder) else self.encoder
        if not isinstance(text, Encoder) or text.decoder_start is None:
            raise InputError(f"`target` is the text of a decoder beside an encoder, which {self.name} does not have.")
        return text.with_target(batch, target)

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """What the positions with these ids read as: tokens, patches, or what a user's own module calls them."""
        if isinstance(self.encoder, Encoder):
            return tuple(self.encode(torch.tensor([each])).tokens[0][0] for each in ids)
        return self.encoder.position_texts(ids, stack)

    def images(self, batch: Batch) -> Float[Tensor, "batch channel height width"] | None:
        """The images whose patches are the positions of a batch; None where they are something else."""
        if self.grid is None:
            return None
        shape = self.grid.shape
        if not self.is_own:
            return batch.extra["pixel_values"]
        return next((each for each in batch.extra.values() if each.ndim == 4 and each.shape[1:] == shape), None)

    def stack(self, label: str | None = None) -> Stack:
        """A stack of the model by its label; without a label, the only one."""
        if (label is None or (isinstance(label, str) and label == "self")) and len(self.stacks) == 1:
            return next(iter(self.stacks.values()))
        if not isinstance(label, str) or label not in self.stacks:
            known = ", ".join(repr(each or "self") for each in self.stacks)
            raise InputError(f"`stack` must be one of {known} on this model; got {label!r}.")
        return self.stacks[label]

    def weights(self, layer: int, stack: str | None = None) -> AttentionWeights:
        """The attention weights of a layer, as views of the model's parameters."""
        found = self.stack(stack)
        (chosen,) = self.points.check_layers([layer], found.label)
        return found.weights(chosen)

    @property
    def refused(self) -> dict[str, str]:
        """The points whose meaning the certificate could not prove, each with the reason."""
        certificate = self.__dict__.get("certificate")
        return {} if certificate is None else certificate.refused

    @property
    def edited(self) -> tuple[str, ...]:
        """What is active: the points of hooks, "pattern 3", and the interventions, "z of L3H5 becomes 0"."""
        return self._in_force.edited

    @property
    def edit_functions(self) -> tuple[tuple[PointKey, Hook], ...]:
        """The active hook functions with their points, in the order in which they act."""
        return self._in_force.edit_functions

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The active interventions, in the order in which they were given."""
        return self._in_force.interventions

    @property
    def causal(self) -> bool:
        """Whether tokens in the output's stack can attend only to themselves and to earlier tokens."""
        return self.output_stack.architecture.causal

    @property
    def output_stack(self) -> Stack:
        """The stack that the model's output comes from."""
        return self.stacks["decoder"] if "decoder" in self.stacks else next(iter(self.stacks.values()))

    @property
    def last_stream(self) -> tuple[str, int]:
        """The point where the stream leaves the last block; without a stream, the last layer's `attn_raw`."""
        if not self.output_stack.architecture.streams:
            return self.output_stack.point("attn_raw"), self.output_stack.layers[-1]
        return self.output_stack.point("resid_post"), self.output_stack.layers[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights, as they are now."""
        return next(self._model.parameters()).dtype

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the config and all parameters as they are now."""
        config = {name: value for name, value in self.config.to_dict().items() if name not in _NOT_THE_MODEL}
        written = json.dumps(config, sort_keys=True, default=str)
        return hashlib.sha256(f"{written} {self._hash.of(self._model)}".encode()).hexdigest()

    def provenance(self, batch: Batch, tokens: tuple[tuple[str, ...], ...], options: Mapping[str, Any]) -> Provenance:
        """Where a result of this model comes from: weights, inputs, active edits, options."""
        given = {"ids": batch.ids, "mask": batch.mask, **batch.extra}
        if batch.target is not None:
            given |= {"target ids": batch.target.ids, "target mask": batch.target.mask}
        return self.provenance_of(tensors_hash(given), tokens, options)

    def provenance_of(self, digest: str, tokens: tuple[tuple[str, ...], ...], options: Mapping[str, Any]) -> Provenance:
        """The same for inputs whose SHA-256 is known, such as a corpus."""
        return Provenance(self.name, self.weights_hash, digest, self._in_force.edited, tokens, options)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Says what to call instead, for those who know models that are called."""
        raise TypeError("a model is not called; model.run(text).logits gives the logits, model.loss(text) the loss.")

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing_name("HookedModel", name), name=name, obj=self)

    def __repr__(self) -> str:
        shape = "; ".join(_shape_of(stack) for stack in self.stacks.values())
        certificate = self.__dict__.get("certificate")
        proof = "" if certificate is None else f", {certificate.verdict}"
        return (
            f"HookedModel({self.name!r}: {self.architecture.name}, {shape}, d_model {self.d_model}, "
            f"d_head {self.d_head}, {str(self.dtype).removeprefix('torch.')} on {self.device}{proof})"
        )

    # -- for methods and the certificate -------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        *,
        captures: Iterable[PointKey] = (),
        rows: Sequence[RowObserver] = (),
        ends: Sequence[LayerObserver] = (),
        passing: Iterable[PointKey] = (),
        layers: Iterable[tuple[str, int]] | None = None,
        part: Part | None = None,
    ) -> dict[PointKey, Tensor]:
        """One pass without gradients; returns the captured values and feeds the observers.

        `rows` see every block of rows and `ends` every finished layer, for the (stack, layer) in `layers` or for all;
        they can read the points in `passing`, which are freed when their layer ends. `part` says which blocks run.
        Besides points, `captures` may name `further_embeddings`, without a layer.
        """
        if layers is None:
            layers = [(stack.label, layer) for stack in self.stacks.values() for layer in stack.layers]
        places = {layer: place for place, layer in enumerate(layers)}
        watch = Watch(places, rows, ends, frozenset(passing)) if rows or ends else Watch()
        wanted = Pass(batch, frozenset(captures), watch, part=part)
        with torch.no_grad():
            self._passes.run(wanted)
        return wanted.values

    def output(self, batch: Batch) -> Any:
        """What transformers returns for a batch, computed by our attention."""
        with torch.no_grad(), self._passes.checked(Pass(batch)):
            output = call(self._model, batch)
            if getattr(output, "logits", None) is not None:
                output.logits = self._in_force.visit("logits", None, output.logits)
            return output

    def applied(
        self, intervention: Intervention, texts: slice = slice(None), source: slice | Tensor = slice(None)
    ) -> Applied:
        """An intervention on this model, in some rows of a batch, which correspond to texts `source` of its values."""
        if not isinstance(intervention, Intervention):
            raise InputError(
                f"expected an am.Intervention, such as am.Intervention.zero([(0, 1)]); got {intervention!r}."
            )
        stack, edit = self.stack(intervention.stack or None), intervention.edit
        by_layer: dict[int, tuple[int, ...]] = {}
        if not intervention.by_head:
            by_layer = dict.fromkeys(self.points.check_layers(intervention.layers, stack.label), ())
        for layer, head in self._heads_of(intervention, stack) if intervention.by_head else ():
            by_layer[layer] = (*by_layer.get(layer, ()), head)
        self.points.resolve([stack.point(edit.point)], by_layer, self.refused)
        if isinstance(edit, TermEdit):
            self.points.resolve([stack.point("attn_in")], by_layer, self.refused)
            if edit.centre is not None:
                require_fitting(edit.centre, stack, by_layer)
        applied = Applied(intervention, by_layer, BatchPart(texts, source), partial(ledger_split_at, self.stacks))
        with applied.named():
            edit.check(Place(stack.label, tuple(by_layer), stack.sizes(edit.point), self._no_special_keys(stack)))
        return applied

    def _no_special_keys(self, stack: Stack) -> str:
        """Why no key of a stack is a special token; empty where some may be."""
        if self.special_keys(stack.label):
            return ""
        frames = isinstance(self.encoder, TranscriptEncoder) and stack.label != "decoder"
        return "frames are no special tokens" if frames else "special tokens need a model loaded with a tokenizer"

    def check_heads(
        self, heads: Heads, layers: Iterable[int] | None = None, stack: str | None = None
    ) -> list[tuple[int, int]]:
        """The (layer, head) of a selection in order; `InputError` for any that the stack does not have."""
        chosen = self.output_stack if stack is None else self.stack(stack)
        within = self.points.check_layers(layers, chosen.label)
        named = checked_heads(heads)
        if named == "all":
            return [(layer, head) for layer in within for head in range(chosen.n_heads)]
        self.require_heads(named, within, chosen, "of each layer of this model")
        return sorted(named)

    def _heads_of(self, intervention: Intervention, stack: Stack) -> list[Head]:
        """The heads that an intervention touches; at k and v as a whole, kv heads."""
        if not intervention.by_kv_head:
            return self.check_heads(intervention.heads, None, stack.label or "self")
        if intervention.heads == "all":
            return [(layer, head) for layer in stack.layers for head in range(stack.n_kv_heads)]
        self.points.check_layers([layer for layer, _ in intervention.heads], stack.label)
        for _, head in intervention.heads:
            index_of("kv_head", head, stack.n_kv_heads, f"{intervention}: k and v have one of each layer per kv head")
        return list(intervention.heads)

    def require_heads(self, named: Sequence[Head], within: Sequence[int], stack: Stack, owner: str) -> None:
        """Raises `InputError` for a head that the stack does not have, or whose layer is not in `within`."""
        self.points.check_layers([layer for layer, _ in named], stack.label)
        for _, head in named:
            index_of("head", head, stack.n_heads, owner)
        for layer, _ in named:
            if layer not in within:
                raise InputError(f"`heads` names layer {layer}, which is not in `layers`; give only one of the two.")

    def applying(self, acts: Sequence[Applied]) -> AbstractContextManager[None]:
        """`intervene` for sweeps: each act applies to its own rows of the batch."""
        return self._in_force.applying(acts)

    def editing(self, edits: Mapping[PointKey, Hook]) -> AbstractContextManager[None]:
        """`hooks` for the certificate: also on refused points."""
        return self._in_force.editing(list(edits.items()))

    @cached_property
    def plain(self) -> PreTrainedModel:
        """The caller's model as transformers itself runs it, on another copy in eval mode.

        In the attention implementation that the caller chose or, if that does not compute what was trained, the other.
        """
        trusted = self.architecture.trusted
        return copy_of(self._original) if trusted is None else self.plain_in(trusted)

    def plain_in(self, implementation: str) -> PreTrainedModel:
        """A plain copy in one of transformers' attention implementations; only "eager" returns its patterns."""
        return use_attention(copy_of(self._original), implementation)

    def plain_module(self, stack: Stack, layer: int, path: str) -> nn.Module:
        """A module of one block of `plain`, by its dotted path."""
        plan = stack.architecture
        if plan.replaced and plan.replacement is not None and path.startswith(f"{plan.replaced}."):
            # Under a name of ours, of the module that ours replaces.
            made = plan.replacement(self.plain_module(stack, layer, plan.replaced))
            return submodule(made, path.removeprefix(f"{plan.replaced}."))
        inner = f"{layer}.{plan.within}.{path}" if plan.within else f"{layer}.{path}"
        return submodule(submodule(self.plain.base_model, plan.blocks), inner)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under transformers' names."""
        return self._model.named_parameters()

    @property
    def embedding(self) -> Float[Tensor, "vocab d_model"]:
        """The token embedding W_E."""
        return token_embedding(self._model)

    @property
    def unembedding(self) -> Float[Tensor, "vocab d_model"] | None:
        """W_U, one row per token; None if the model has no such matrix."""
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight = getattr(head, "weight", None)
        return weight if isinstance(weight, torch.Tensor) else None

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return self._model.base_model

    def unchecked(self) -> AbstractContextManager[None]:
        """Without the running certificate: for `certify`, whose passes must show what a model does wrong."""
        return self._in_force.unchecked()


def require_model(model: object) -> None:
    """Raises `InputError` for anything that `am.load` did not make, such as a name or a transformers model."""
    if not isinstance(model, HookedModel):
        raise InputError(f"the model must be what am.load returns; got {shown(model)}. Load it with am.load(...).")


def _takes_one(function: Hook) -> bool:
    """Whether a function can be called with a value alone; True where Python cannot tell."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin
        return True
    return True


def _has_head(model: PreTrainedModel) -> bool:
    """Whether the model's output is logits, or whatever a module of the user's own returns."""
    returned = inspect.signature(type(model).forward).return_annotation
    kinds = [each for each in (returned, *get_args(returned)) if isinstance(each, type)]
    outputs = [each for each in kinds if issubclass(each, ModelOutput)]
    says = any("logits" in getattr(each, "__dataclass_fields__", ()) for each in outputs)
    if says or (outputs and model.get_output_embeddings() is None):  # type: ignore[no-untyped-call]
        return says
    return isinstance(model, OwnModule) or model.base_model is not model or model.get_output_embeddings() is not None  # type: ignore[no-untyped-call]


def _shape_of(stack: Stack) -> str:
    label = f"{stack.label} " if stack.label else ""
    kv = "" if stack.n_kv_heads == stack.n_heads else f" ({stack.n_kv_heads} kv heads)"
    kind = "layers with attention" if stack.architecture.hybrid else "layers"
    return f"{label}{stack.n_layers} {kind} × {stack.n_heads} heads{kv}"
