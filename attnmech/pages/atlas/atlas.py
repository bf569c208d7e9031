"""Builds the atlas of a model: one pass over a corpus, one over repeated random tokens, and perhaps ablations."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Final, Unpack

from ...basics.arguments import shown, whole_number
from ...basics.messages import noted
from ...basics.public import public
from ...batch import Batch
from ...errors import AttnmechError, CertificateError, InputError, MissingPointError, UnsupportedModelError
from ...methods.ablation.heads import ablate_heads
from ...methods.examples.result import HeadExamples
from ...methods.examples.sums import Statistic
from ...methods.focus.attention_focus import AttentionFocus
from ...methods.head_types.head_types import head_types
from ...methods.likeness.divergences import OverlapReducer
from ...methods.null_attention.result import NullAttention, null_attention
from ...methods.ov_tokens.result import OVTokens
from ...methods.scores.composition import composition
from ...methods.scores.decompose_scores import decompose_scores
from ...methods.scores.variance_shares import VarianceReducer
from ...methods.scores.wavelengths import PositionKernel
from ...methods.updates.result import ResidualUpdates
from ...model.inputs.encoder import Inputs
from ...model.proof.certify import certificate_of
from ...model.run.hooked import HookedModel, require_model
from ...results.mean_qk import MeanQK
from ...runs.ablations import checked_seed
from ...runs.corpus import batches
from ...runs.effects import HeadEffects
from ...runs.journal import kept
from ...runs.mean_qk import MeanQKReducer
from ...runs.options import CorpusOptions
from ...runs.reducer import Reducer
from ...runs.stream import stream
from ..limits import MAX_TOKENS
from .heads import OnTargets
from .result import Atlas

FEW: Final = 16  # the number of texts at the beginning of the corpus from which small measurements are taken


@public
def atlas(
    model: HookedModel,
    inputs: Iterable[Inputs],
    *,
    by: Statistic = "type",
    k: int = 10,
    ablate: int = 0,
    seed: int = 0,
    **options: Unpack[CorpusOptions],
) -> Atlas:
    """Describes what every head of a model does over a corpus: examples, statistics, types, likeness, and effects.

    >>> atlas = am.atlas(am.load(), am.Corpus("corpus.txt"))                                 # doctest: +SKIP
    >>> atlas.write("atlas/")                                                              # doctest: +SKIP

    One pass over the corpus measures the rows of `am.examples`, the statistics of `am.attention_focus` and
    `am.residual_updates`, the shares of `am.variance_shares`, mean queries and keys for position kernels, the overlap
    of any two heads, and the tokens and factors for `am.ov_tokens`. `am.head_types` reads repeated random tokens, and
    `am.composition` the weights.

    Args:
        model: a model with one stack that reads tokens.
        inputs: texts: a list, an iterator, an `am.Corpus`, or a dataset with a column "text".
        by: the statistic that orders the rows of examples: "type", the attention to the targets of the head's type
            (for an induction head, to tokens that followed an earlier copy) or, of heads without a type and of those
            that rest on one token, the highest attention to another token; or one of `am.examples`.
        k: the number of example rows of each kind.
        ablate: the number of texts, the first of the corpus, on which every head is ablated, and heads that attend to
            the first token are tested; 0 for none. Intervals need five texts or more.
        seed: the seed of random rows and of random tokens.
        options: `bos`, `truncate`, `journal`, `engine` and `progress`, as in `am.stream`. After an
            interruption, a call with the same journal resumes; ablations have a journal of their own beside it.

    Returns:
        The results, and their page: `.write(folder)` writes an index with one file for each layer, `.write_html(path)`
        one file.

    Raises:
        InputError: for models that read images or sound, or have several stacks; and in the cases of `am.stream`.

    """
    require_model(model)
    if not model.reads_tokens or len(model.stacks) > 1:
        raise InputError("an atlas needs a model with one stack that reads tokens; see am.examples for other models.")
    ablate, seed, notes = whole_number("ablate", ablate), checked_seed(seed), list[str]()
    types = noted(notes, "Types of heads are", lambda: head_types(model, seed=seed), InputError)
    if by == "type":
        by = "attention" if types is None else OnTargets.of(types, model.causal)
    reducers = _reducers(model, by, k, seed, notes)
    beginning, corpus = _beginning(inputs, max(FEW, ablate))
    journal = options.get("journal")
    journals = [None if journal is None else f"{journal}.{part}" for part in ("ablation", "null")]
    with kept(journal), kept(journals[0]), kept(journals[1]):
        results = dict(zip(reducers, stream(model, corpus, list(reducers.values()), **options), strict=True))
        texts = _encoded(model, beginning, options)
        effects, null = _ablations(model, texts[:ablate], journals, options, notes)
    means, optional = results.pop("means"), {"updates": None, "ov": None}
    return Atlas(
        **(optional | results),
        kernel=_kernel(model, texts, means, notes),
        types=types,
        composition=noted(notes, "Composition of weights is", lambda: composition(model), InputError),
        effects=effects,
        null=null,
        ablated=len(texts[:ablate]),
        certificate=certificate_of(model),
        notes=tuple(notes),
        source=model.source,
    )


def _beginning(inputs: Any, count: int) -> tuple[list[Any], Iterable[Any]]:
    if isinstance(inputs, str) or not isinstance(inputs, Iterable):
        raise InputError(
            f'`inputs` must be texts, such as am.Corpus("corpus.txt") or a list of strings; got {shown(inputs)}.'
        )
    if isinstance(inputs, Iterator):
        texts = list(islice(inputs, count))
        return texts, chain(texts, inputs)
    return list(islice(iter(inputs), count)), iter(inputs) if isinstance(inputs, Sequence) else inputs


def _encoded(model: HookedModel, texts: list[Any], options: Any) -> list[Batch]:
    read = {name: options[name] for name in ("bos", "truncate") if name in options}
    parts = list(batches(iter(texts), model, **read))
    numbered = {
        int(number): part.batch.alone(row) for part in parts for row, number in enumerate(part.documents.tolist())
    }
    return [numbered[number] for number in sorted(numbered)]


def _reducers(model: HookedModel, by: Statistic, k: int, seed: int, notes: list[str]) -> dict[str, Reducer]:
    reducers: dict[str, Reducer] = {
        "focus": AttentionFocus.reducer(),
        "examples": HeadExamples.reducer(by=by, k=k, seed=seed),
        "overlap": OverlapReducer(seed),
        "means": MeanQKReducer(),
        "shares": VarianceReducer(),
    }
    ov = noted(notes, "The tokens that heads write are", lambda: OVTokens.reducer(model), InputError, CertificateError)
    reducers |= {} if ov is None else {"ov": ov}
    if model.output_stack.architecture.streams:
        reducers["updates"] = ResidualUpdates.reducer()
    else:
        notes.append(f"What heads write is omitted: {model.points['resid_pre'].absent}.")
    return reducers


def _kernel(model: HookedModel, texts: Sequence[Batch], means: MeanQK, notes: list[str]) -> PositionKernel | None:
    """The position kernel of every head, split at the corpus's means if the model rotates queries and keys."""
    centre = means if model.output_stack.architecture.rotary is not None else None
    longest = max(texts, key=lambda text: text.ids.shape[1]).part(0, MAX_TOKENS)
    scores = partial(decompose_scores, model, longest, centre=centre)
    return noted(notes, "Position kernels are", lambda: scores().position_kernel(), AttnmechError)


def _ablations(
    model: HookedModel, texts: list[Batch], journals: Sequence[str | None], options: Any, notes: list[str]
) -> tuple[HeadEffects | None, NullAttention | None]:
    if not texts:
        return None, None
    run = {name: options[name] for name in ("engine", "progress") if name in options}
    refused = (InputError, MissingPointError, UnsupportedModelError)
    ablated = partial(ablate_heads, model, iter(texts), journal=journals[0], **run)
    effects = noted(notes, "Ablations are", ablated, *refused)
    if effects is None:
        return None, None
    tested = partial(null_attention, model, iter(texts), heads="attending", journal=journals[1], **run)
    return effects, noted(notes, "The test of attention to the first token is", tested, *refused)
