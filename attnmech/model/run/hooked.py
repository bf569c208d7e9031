"""Defines `HookedModel`, a transformer whose named activation points can be run, read and edited without a trace."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ...activations.activations import Activations
from ...basics.arguments import flag, listed, optional_flag, shown, whole_number
from ...basics.lens_names import missing_name
from ...basics.public import public
from ...batch import Batch
from ...errors import InputError
from ...interventions import Heads, Intervention
from ...interventions.values import BatchPart
from ...points import PointName
from ...results.provenance import Provenance
from ..attention.applied import Applied
from ..attention.in_force import Hook, Pass
from ..inputs.embeddings import token_encoder
from ..inputs.encoder import Encoder, Inputs
from ..inputs.encoders import encoder_of, text_encoder
from ..inputs.images import PatchGrid
from ..inputs.lengths import warn_of_batch, warn_of_length
from ..inputs.own_inputs import OwnInputs
from ..own.module import NO_TOKENS
from ..parts.hashes import WeightsHash, model_hash
from ..parts.settings import require_own_settings
from ..parts.weights import AttentionWeights
from ..stack.carried import captured_norms
from ..stack.points import check_size, selected_heads
from ..stack.stack import Stack, stack_labelled
from ..structure.architecture import Architecture
from ..structure.passes_apart import follows_length
from .applying import placed_hooks, placed_intervention, require_means
from .bridge import Bridges
from .generation import Continuing, Generated, Sampling, cache_agrees, continued, ends_of, require_kept, require_tokens
from .gradients import Measure, run_with_gradients
from .loss import Prediction, mask_id_of, predicted_by, text_losses
from .wired import WiredModel

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge


@public
class HookedModel(WiredModel):
    """A transformers model with named activation points, each with one proven meaning.

    `am.load` makes it. The caller's model is never modified: this is a copy of its modules that shares its parameters,
    so in-place changes to a weight take effect here as well. Forward hooks on the caller's modules are copied at load.

    >>> acts = model.run("The keys are here.", points=["q", "pattern"])     # doctest: +SKIP
    >>> acts["pattern", 3]                                                   # doctest: +SKIP
    """

    files: str | None = None
    """The hub name, folder or file from which it was loaded; "" for the demo model, None for a model object."""

    load_tower: Callable[["HookedModel", Literal["vision", "sound"]], "HookedModel"]
    """Loads a part of the model that reads pictures or sounds."""

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
        super().__init__(original, plans)
        self.name = name
        self.source = source
        """The Python code that loads this model, such as am.load(); `model` if it was made from a model object."""
        self.is_demo = is_demo
        """Whether this is attnmech's own demo model."""
        self.tokenizer = tokenizer
        self._bridges = Bridges(original, tokenizer)
        self._hash = WeightsHash()
        self._cache_agrees: dict[tuple[Any, ...], bool] = {}
        text: Encoder | None = None
        if self.embeds_tokens:
            plain = partial(getattr, weakref.proxy(self), "plain")
            text = token_encoder(self._model, plans, tokenizer, bos, self.device, processor=processor, plain=plain)
        self.n_vocab = 0 if text is None else text.n_vocab
        first = next(iter(self.stacks.values()))
        weight = first.weights(first.layers[0]).W_Q
        self.encoder = encoder_of(original, self.architecture, text, own=own, like=weight, processor=processor)
        self.grid: PatchGrid | None = getattr(self.encoder, "grid", None)
        """How an image is cut into patches, which are its positions; None for other inputs."""

    @property
    def predicts(self) -> Prediction:
        """What its logits predict."""
        return predicted_by(self.original, causal=self.causal, writes_tokens=self.writes_tokens)

    @property
    def mask_id(self) -> int:
        """The id of the mask token; raises `InputError` if neither the tokenizer nor the config gives it."""
        return mask_id_of(self.tokenizer, self.config, self.name)

    @cached_property
    def vision(self) -> "HookedModel":
        """The tower that reads the pictures of a model of text, as a model with its own certificate and image
        processor; it is loaded once.

        >>> model.vision.run(Path("street.png"), points=["pattern"])["pattern", 3]      # doctest: +SKIP

        Its positions are the patches of a picture; those of this model are tokens, and some stand for a picture.
        Raises `InputError` if no part of the model reads pictures, and `UnsupportedModelError` if attnmech cannot read
        that part.
        """
        return self.load_tower(self, "vision")

    @cached_property
    def sound(self) -> "HookedModel":
        """The tower that reads the sounds of a model of text, as `vision` reads its pictures."""
        return self.load_tower(self, "sound")

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
                chat template, without a prompt for the answer.
            points: names ("pattern" means every layer, or those in `layers`), pairs ("pattern", 3), or
                TransformerLens's names; `model.points` lists them. By default, only the logits (for a model without a
                head, the last `resid_post`).
            layers: the layers of points that are named without a layer; by default all.
            bos: whether each text begins with the tokenizer's BOS or CLS token; by default as at load.
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
                self._run_pass(wanted)
            norms = captured_norms(self.stacks, wanted.values)
            acts = Activations(batch, wanted.values, unchecked=wanted.skipped, value_norms=norms)
        else:
            acts = run_with_gradients(self, batch, keys, gradients_of)
        return self._named(acts)

    @contextmanager
    def hooks(self, edits: Mapping[PointName, Hook]) -> Iterator["HookedModel"]:
        """Edits the values at points within the `with` block; the edits end with the block, however it ends.

        >>> with model.hooks({("pattern", 3): lambda pattern: pattern * 0}):     # doctest: +SKIP
        ...     model.run("The keys are here.")

        Blocks can be nested; edits of a point apply in the order in which they were added.

        Args:
            edits: functions by point. Each takes the value at its point and returns a value of the same shape, or None
                for the value itself (with its in-place changes, if any). A name without a layer means every layer.

        Yields:
            The model itself.

        Raises:
            InputError: for anything but a mapping from points to functions.
            MissingPointError: for a point that this model lacks.
            CertificateError: for a point whose meaning could not be proven.
        """
        with self.in_force.editing(placed_hooks(edits, self.points, self.refused)):
            yield self

    @contextmanager
    def intervene(self, *interventions: Intervention) -> Iterator["HookedModel"]:
        """Applies interventions within the `with` block; they end with the block, however it ends.

        >>> with model.intervene(am.Intervention.zero([(3, 5)])):       # doctest: +SKIP
        ...     model.run("Anna sang of shells.")

        Within a layer they act in the order of its steps (scores, keys removed, pattern, values, z) and, at the same
        step, in the order given; a term that is scaled twice is multiplied by both factors. Hooks at the same point
        come after them, except at `v`: there, interventions come after the hook and change the values that single heads
        read, while `v` itself, which heads may share, stays unchanged.

        Args:
            interventions: what to change.

        Yields:
            The model itself.

        Raises:
            InputError: for layers and heads that the model does not have, and for interventions that do not apply to
                it; in a run, for a term that the scores do not have, and for keys, positions or values that do not fit
                the texts.
            MissingPointError: for a point that the model lacks.
            CertificateError: for a point that could not be proven.
        """
        changes = [self.applied(intervention) for intervention in interventions]
        require_means(interventions, lambda: self.weights_hash)
        with self.in_force.applying(changes):
            yield self

    @property
    def bridge(self) -> "TransformerBridge":
        """TransformerLens's `TransformerBridge` of this model, on a second copy, for everything else that
        TransformerLens offers.

        Its hooks are TransformerLens's own; the certificate says which of them hold what their names say. Raises
        `InputError` for a module of your own, for which TransformerLens has no bridge.
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
        cache: bool = True,
        generator: torch.Generator | None = None,
        bos: bool | None = None,
        **options: Any,
    ) -> Generated:
        """Continues texts; returns each prompt with its continuation as a batch, which `run` accepts.

        >>> text = model.generate("The keys to the old chest", 5)       # doctest: +SKIP
        >>> model.run(text, points=["pattern"]), "".join(text.tokens[0])   # doctest: +SKIP

        transformers' `generate` chooses the tokens, with its cache of keys and values. Active hooks and interventions
        apply to every step: to the rows of the prompt first, then to one row per token, with the numbers of full
        passes. Hooks see the rows of all tokens so far, as in a full pass. An edit that changes rows of earlier tokens
        as the text grows is refused, since it would change cached keys. `run` on the result, under the same edits,
        gives the logits from which each token was chosen.

        Args:
            inputs: prompts, also of different lengths.
            max_new_tokens: the maximum number of new tokens.
            points: the points to capture in each step; `text.steps[2]["cross.pattern", 0]` is the attention that led to
                the third new token. With the cache, a step after the first has the row of its token alone.
            cache: whether keys and values of earlier tokens are cached. Without a cache, every token takes a full
                pass; so it does where a short text, or a first text with pictures or sounds, shows that a family's
                cache changes the logits, and if rotary tables depend on a text's length.
            generator: a torch.Generator, which makes draws repeatable.
            bos: whether each text begins with the tokenizer's BOS or CLS token.
            options: do_sample (without it, greedy), temperature, top_k, top_p and stop_at_eos; further options of
                transformers' `GenerationConfig` (repetition_penalty, stop_strings, ...); and its `logits_processor`,
                `stopping_criteria` and `streamer`. The model's own defaults do not count. Put first tokens that a
                family forces (mBART's target language, Whisper's language and task) into decoder_input_ids; no token is
                suppressed.

        Returns:
            The batch; an encoder-decoder's continuation is `text.target`. Ctrl-C returns the tokens so far, with a
            warning.

        Raises:
            InputError: for an unknown option (listing the known ones), for a continuation beyond the model's positions,
                for a model without a causal head, for prompts of different lengths without a cache or with pictures or
                sounds, and for edits that the cache does not allow.
        """
        batch = self.encoded(inputs, bos=bos)
        count = whole_number("max_new_tokens", max_new_tokens, least=1)
        asked: list[PointName] = [points] if isinstance(points, str) else listed("points", points, "a list of names")
        if self.is_own:
            raise InputError(f"generate continues a text, and {self.name} reads none: {NO_TOKENS}.")
        if not self.causal or self.points["logits"].absent:
            raise InputError(f"{self.name} has no head that continues a text token by token.")
        sampling = Sampling.of(options, count, generator, ends_of(self.tokenizer, self.config))
        keys = self.points.resolve(asked, None, self.refused)
        written = batch if batch.target is None else batch.target
        require_tokens(batch, count, self.encoder)
        if self.trained_length is not None:
            longest = written.ids.shape[1] + count
            warn_of_length("the continued text", longest, self.trained_length, "give a smaller `max_new_tokens`")
        watched = bool(keys or self.edited)
        cached = flag("cache", cache) and self._caches(batch, padded=written.padded, watched=watched)
        if written.padded and (not cached or batch.target is not None):
            raise InputError(
                "all prompts must have the same length here, since every token takes a full pass; give one at a time."
            )
        continuing = Continuing(self, self.encoder, batch, keys, cache=cached, watched=watched or not cached)
        if continuing.earlier is not None:
            require_kept(self.interventions, continuing.earlier)
        prompt, new, real = continuing(sampling)
        steps = [self._named(step) for step in continuing.steps[: new.shape[1]]]
        return Generated.of(continued(prompt, new, real, self.encoder), steps)

    def _caches(self, batch: Batch, *, padded: bool, watched: bool) -> bool:
        """Whether generation with a cache gives the numbers of full passes, which is tried once."""
        senses = tuple(batch.sensed)
        if (senses and padded) or any(map(follows_length, self.modules())):
            return False
        if (case := (padded, watched, senses)) not in self._cache_agrees:
            tried = partial(cache_agrees, self, self.encoder, batch, padded=padded, watched=watched)
            # A new context has no hooks and no interventions.
            self._cache_agrees[case] = Context().run(tried)
        return self._cache_agrees[case]

    def _named(self, acts: Activations) -> Activations:
        certificate = self.__dict__.get("certificate")
        hooks: frozenset[str] = frozenset() if certificate is None else certificate.lens_points
        return replace(acts, model=self.name, lens_points=hooks)

    def loss(self, inputs: Inputs, *, bos: bool | None = None) -> Float[Tensor, " text"]:
        """The mean cross-entropy of each text's tokens, in nats, which metric="loss" also measures.

        >>> model.loss(["Anna sang of shells.", "Tom lost his old anchor."]).shape     # doctest: +SKIP
        torch.Size([2])

        It is the loss of the next token or, in a masked language model (BERT), of masked tokens: each ordinary token is
        masked once, together with other tokens, about 15 % of the text at a time, drawn by the ids of the text. Special
        tokens are never masked. Padding is excluded; active hooks and interventions apply. In an encoder-decoder, the
        loss is over the decoder's tokens.

        Args:
            inputs: texts, or token ids.
            bos: whether each text begins with the tokenizer's BOS or CLS token.

        Returns:
            One number per text.

        Raises:
            InputError: for a text of a single token, without a token to mask, or with a token that has no logit; for a
                model that predicts neither the next token nor masked ones; and for a masked language model without a
                known mask token.

        Source: for masked tokens, the pseudo-log-likelihood of Salazar et al. 2020, which masks one token at a time.
        """
        predicts = "nothing" if self.points["logits"].absent is not None else self.predicts
        if predicts not in ("next token", "masked token"):
            raise InputError(
                f"a loss is that of the next token or of masked tokens; {self.name} has no head that predicts either."
            )
        batch, key = self.encode(inputs, bos=bos), ("logits", None)
        masked = self.mask_id if predicts == "masked token" else None
        return text_losses(batch, masked, lambda batch: self.forward(batch, captures=[key])[key])

    def encode(self, inputs: Inputs, *, target: str | Sequence[str] | None = None, bos: bool | None = None) -> Batch:
        """The batch of tokens that `run` makes from its inputs.

        >>> model.run(model.encode("The cat", target="Die Katze"), points=["cross.pattern"])    # doctest: +SKIP
        >>> whisper.encode(Path("speech.wav"), target="The keys are here.")                     # doctest: +SKIP

        Args:
            inputs: a text, a list of texts, token ids, a chat, a list of chats (as in `run`), a mapping of model
                inputs; or pictures and recordings.
            target: the texts for the decoder of an encoder-decoder, one for each text or recording of `inputs`; each is
                preceded by the token with which the decoder starts.
            bos: whether each text begins with the tokenizer's BOS or CLS token. A chat begins as its template says,
                unless `bos` is True or False.

        Returns:
            Token ids, texts of tokens, mask and lengths.

        Warns with `LongTextWarning` if a text is longer than those on which the model was trained.

        Raises:
            InputError: for a `target` on a model other than an encoder-decoder.
        """
        batch = self.encoded(inputs, target=target, bos=bos)
        if batch is not inputs:
            warn_of_batch(batch, self.trained_length)
        return batch

    def position_texts(self, ids: Sequence[int], stack: str = "") -> tuple[str, ...]:
        """The labels of positions with these ids: tokens, patches, or the labels of a user's own module."""
        return self.encoder.position_texts(ids, stack)

    def stack(self, label: str | None = None) -> Stack:
        """A stack of the model by its label; without a label, the only one."""
        return stack_labelled(self.stacks, label)

    def weights(self, layer: int, stack: str | None = None) -> AttentionWeights:
        """The attention weights of a layer, as views of the model's parameters; in a quantised model, unpacked.

        Each call unpacks the projections of its layer again, as what they return for unit vectors.
        """
        chosen = self.stack(stack)
        (checked,) = self.points.check_layers([layer], chosen.label)
        return chosen.weights(checked)

    @property
    def edited(self) -> tuple[str, ...]:
        """The points of active hooks ("pattern 3"), and active interventions ("z of L3H5 becomes 0")."""
        return self.in_force.edited

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The active interventions, in the order in which they were given."""
        return self.in_force.interventions

    @property
    def weights_hash(self) -> str:
        """SHA-256 of the config and the current values of all parameters."""
        return model_hash(self.config, self._hash.of(self._model))

    def provenance(
        self, digest: str, tokens: tuple[tuple[str, ...], ...], options: Mapping[str, Any], copies: tuple[int, ...] = ()
    ) -> Provenance:
        """The provenance of a result of this model: weights, inputs with their SHA-256, active edits, options."""
        return Provenance(self.name, self.weights_hash, digest, self.edited, tokens, options, copies=copies)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises an error that says what to call instead, since models of other libraries are called."""
        raise TypeError(
            "an attnmech model is not called: model.run(text).logits gives the logits, model.loss(text) the loss."
        )

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing_name("HookedModel", name), name=name, obj=self)

    def __repr__(self) -> str:
        shape = "; ".join(stack.shape for stack in self.stacks.values())
        certificate = self.__dict__.get("certificate")
        proof = "" if certificate is None else f", {certificate.verdict}"
        return (
            f"HookedModel({self.name!r}: {self.architecture.name}, {shape}, d_model {self.d_model}, "
            f"d_head {self.d_head}, {str(self.dtype).removeprefix('torch.')} on {self.device}{proof})"
        )

    def encoded(self, inputs: Inputs, *, target: str | Sequence[str] | None = None, bos: bool | None = None) -> Batch:
        """`encode` without its warning, for callers that cut texts."""
        require_own_settings(self.device)
        optional_flag("bos", bos)
        batch = inputs.on(self.device) if isinstance(inputs, Batch) else self.encoder.encode(inputs, bos)
        if target is None:
            return batch
        text = text_encoder(self.encoder)
        if text is None or text.decoder_start is None:
            raise InputError(f"`target` is the decoder's text in an encoder-decoder; {self.name} is not one.")
        return text.with_target(batch, target)

    def applied(
        self, intervention: Intervention, texts: slice = slice(None), source: slice | Tensor = slice(None)
    ) -> Applied:
        """An intervention applied to this model in some texts of a batch; `source` numbers them among its values."""
        part = BatchPart(texts, source)
        return placed_intervention(intervention, part, self.stacks, self.points, self.refused, self.encoder)

    def check_heads(
        self, heads: Heads, layers: Iterable[int] | None = None, stack: str | None = None
    ) -> list[tuple[int, int]]:
        """The (layer, head) pairs of a selection, in order; raises `InputError` for a head that the stack lacks."""
        return selected_heads(self.points, self.output_stack if stack is None else self.stack(stack), heads, layers)


def require_model(model: object) -> None:
    """Raises `InputError` for anything but a model from `am.load`, such as a name, and under `torch.autocast`."""
    if not isinstance(model, HookedModel):
        raise InputError(f"the model must come from am.load; got {shown(model)}. Load it with am.load(...).")
    require_own_settings(model.device)
