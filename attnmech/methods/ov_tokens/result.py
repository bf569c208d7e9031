"""What a head writes when it reads a token: the logits that its OV circuit raises and lowers most.

Formulas: docs/formulas.md#ov-circuits-on-tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Unpack

import pandas as pd
import plotly.graph_objects as go  # type: ignore[import-untyped]
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...basics.arguments import index_of, listed, option, whole_number
from ...basics.nouns import counted
from ...basics.public import public
from ...draw.chart import ByChoice
from ...draw.head_maps import effect_map
from ...draw.section import Section
from ...draw.text import percent
from ...errors import InputError
from ...model.inputs.encoder import Inputs
from ...model.run.hooked import HookedModel, require_model
from ...model.stack.carried import output_weights
from ...results.by_layer import OfLayers, table_of
from ...results.provenance import Provenance
from ...results.table import framed
from ...runs.answers import answer_ids
from ...runs.options import CorpusOptions
from ...runs.reducer import Source, State
from ...runs.stream import stream
from ...runs.words import texts_by_id
from .claims import TYPES as CLAIMED
from .claims import Pair, Shares, Steps, Successors, claimed, pairs_chart
from .formulas import OWN, STATISTICS, TOP, OwnPlaces, TokenStatistics, extremes_of
from .sums import Circuits, ScaleSums

KINDS: Final = ("raised", "lowered")  # the kinds of pairs


@public
def ov_tokens(
    model: HookedModel,
    inputs: Inputs | Iterable[Inputs],
    *,
    tokens: int | Sequence[str] | Sequence[int] = 1000,
    k: int = 10,
    layers: Iterable[int] | None = None,
    stack: str | None = None,
    **options: Unpack[CorpusOptions],
) -> "OVTokens":
    """Lists what every head writes when it reads a token: the logits that its OV circuit raises and lowers most.

    >>> import attnmech as am
    >>> from attnmech.demo.text import documents
    >>> circuits = am.ov_tokens(am.load(), documents(12), k=3)
    >>> print(circuits.pairs_of(2, 7)[0])
    “·jungle” → “·jungle” +8.43
    >>> circuits.copied.shape
    torch.Size([4, 8])

    For a token t that a head of layer ℓ reads, logit_a = r · (N(E_t) W_V W_O)·d_a for every token a of the vocabulary.
    E_t is the embedding as layer 0 reads it, without positions; N is the norm before attention of layer ℓ, at its scale
    for E_t alone; d_a reads a's logit, minus the mean over the vocabulary; r is the mean factor of the final norm over
    the texts. Later layers read more than embeddings, so there the result shows the head's weights, not its input.

    The constants β W_V and b_V, from the norm's shift and the bias of values, are left out: a head writes them whatever
    it reads, and they count as part of b_O. If a norm lies between attention and stream (Gemma 2), W_O includes its γ,
    and logits are multiplied by the mean of its factor over the texts. Both means scale the logits of a layer alike;
    pairs and statistics do not depend on them.

    `own_rank`, `copied` and `suppressed` compare the own token's logit with those of all other tokens. In a head whose
    weights are random they are 0.5, 10 / vocabulary and 10 / vocabulary. `successor` compares the tokens of ordered
    classes (digits, letters, number words, weekdays, months) that the vocabulary holds as single tokens. `claims` lists
    the heads of two types: "copy suppression" and "successor".

    Active hooks change only r. After one pass over the texts, a head takes 2 (tokens + d_model) · d_head · vocabulary
    operations, block by block: about a minute on one core for 1,000 tokens and the 270 heads of SmolLM2-135M.

    Args:
        model: the model.
        inputs: texts, or an iterator of texts (a corpus). Their ordinary tokens, neither special nor the first of a
            text, are counted, and the factors of norms are averaged over them.
        tokens: how many of the most frequent tokens of the texts to read; or a list of tokens, as strings or ids.
        k: the number of pairs of each kind that are kept for a head, with different tokens read.
        layers: all by default.
        stack: "decoder" in an encoder-decoder.
        options: `bos`, `truncate`, `journal`, `engine` and `progress`, as in `am.stream`.

    Returns:
        For every head, the pairs (token read, token raised) and (token read, token lowered) with the highest and lowest
        logits, and how it writes the token that it reads.

    Raises:
        InputError: for unknown tokens and for texts without ordinary tokens; if logits are not one norm and one matrix
            of the stream (BERT); if values are gated, normed or expanded from latents; for encoders and cross-attention
            of an encoder-decoder; and in the cases of `am.stream`.
        CertificateError: if the certificate disproves the logits.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; McDougall et al. 2023, "Copy
    Suppression"; Gould et al. 2023, "Successor Heads", which reads E_t after the first MLP instead.

    """
    reducer = OVTokens.reducer(model, tokens=tokens, k=k, layers=layers, stack=stack)
    result: OVTokens
    passed = sorted({*reducer.measured, model.stack(stack).layers[-1]})
    (result,) = stream(model, inputs, [reducer], layers=passed, stack=stack, **options)
    return result


def _checked(model: HookedModel, tokens: Any) -> int | tuple[int, ...]:
    """The number of tokens to read, or their ids in order."""
    if not isinstance(tokens, str) and not isinstance(tokens, Iterable):
        return whole_number("tokens", tokens, least=1)
    wanted = "a number, or a list of tokens, such as [' Tom', 512]"
    items = listed("tokens", tokens, wanted)
    if not items:
        raise InputError(f"`tokens` must be {wanted}; got an empty list.")
    return tuple(sorted(set(answer_ids(model, "tokens", items, len(items)).tolist())))


@dataclass(frozen=True)
class OVReducer(ScaleSums):
    """Computes `OVTokens` once the texts' tokens are counted."""

    tokens: int | tuple[int, ...]
    k: int
    measured: tuple[int, ...]

    @torch.no_grad()
    def finish(self, state: State, source: Source) -> "OVTokens":
        model, stack = source.model, source.stack
        rows = int(state["rows"])
        if rows == 0:
            raise InputError(
                "`inputs` must have tokens that are neither special nor the first of a text; give longer texts."
            )
        circuits = Circuits.of(model, stack)
        vocab = len(circuits.unembedding.W_U)
        read = self._read(state["counts"][:vocab]).to(model.device)
        steps, directions = Steps.of(model.tokenizer, min(vocab, model.n_vocab)), circuits.unembedding.above_mean
        embedded = circuits.vocabulary.rows(torch.cat((read, steps.ids.to(read))), circuits.precision)
        of_layers, next_raised = [], []
        for layer in self.measured:
            values, W_O = circuits.values(layer, embedded), output_weights(stack, layer, circuits.precision)
            of_read, of_steps = torch.split(values, [len(read), len(steps.ids)], dim=1)
            of_layers.append(extremes_of(of_read, W_O, read, directions, vocab))
            next_raised.append(steps.raised(of_steps, W_O, directions))
        final = float(state["final"]) / rows
        of_attention = state["attention"] / rows if self.normed else stack.architecture.attn_scale
        scale = final * of_attention * torch.ones(len(source.layers), dtype=torch.float64)
        scale = scale[[source.layers.index(layer) for layer in self.measured]]
        above, below = (_stacked(of_layers, name) for name in ("above", "below"))
        pairs = {kind: self._pairs(kind, of_layers, read, scale) for kind in KINDS}
        ids = torch.cat([read.cpu(), *(pairs[kind][1].flatten() for kind in KINDS)])
        return OVTokens(
            layers=self.measured,
            n_layers=len(stack.places),
            documents=source.documents,
            truncated=source.truncated,
            read=read.cpu(),
            raised=pairs["raised"][1],
            raised_by=pairs["raised"][0],
            raised_logits=pairs["raised"][2],
            lowered=pairs["lowered"][1],
            lowered_by=pairs["lowered"][0],
            lowered_logits=pairs["lowered"][2],
            above=above.int(),
            below=below.int(),
            successors=Successors(steps.names, torch.stack(next_raised), steps.spellings, steps.by_chance),
            vocab=vocab,
            scale=scale,
            unit=circuits.unembedding.unit,
            texts=texts_by_id(model, ids, stack.label),
            provenance=source.provenance,
        )

    def _read(self, counts: Int[Tensor, " vocab"]) -> Int[Tensor, " token"]:
        if not isinstance(self.tokens, int):
            return torch.tensor(self.tokens)
        most_frequent = counts.argsort(descending=True, stable=True)[: self.tokens]
        return most_frequent[counts[most_frequent] > 0].sort().values

    def _pairs(
        self,
        kind: str,
        of_layers: Sequence[Mapping[str, Tensor]],
        read: Int[Tensor, " token"],
        scale: Float[Tensor, " layer"],
    ) -> tuple[Int[Tensor, "layer head pair"], Int[Tensor, "layer head pair"], Float[Tensor, "layer head pair"]]:
        highest = kind == "raised"
        logits = _stacked(of_layers, "highest" if highest else "lowest")
        best = logits.argsort(dim=-1, descending=highest, stable=True)[..., : self.k]
        values = logits.gather(-1, best).double() * scale[:, None, None]
        return read.cpu()[best], _stacked(of_layers, kind).gather(-1, best), values


def _stacked(of_layers: Sequence[Mapping[str, Tensor]], name: str) -> Tensor:
    return torch.stack([extremes[name] for extremes in of_layers]).cpu()


@dataclass(frozen=True, repr=False)
class OVTokens(TokenStatistics, OfLayers):
    """What every head writes when it reads a token: the logits raised and lowered most, and those of the token itself.

    Logits are above their mean over the vocabulary, and are what a head would add if it attended to one token only.
    """

    _TITLE = "What heads of {model} write for the tokens that they read"
    _SUBTRACT = "subtract their statistics: one.copied - other.copied"
    FIGURES = tuple(STATISTICS)
    _AXES: ClassVar = {"measured": "layers"}

    layers: tuple[int, ...]
    """The layers measured."""
    n_layers: int
    """The model's number of layers: the length of the axis `layer` of statistics, which are NaN at layers not
    measured."""
    documents: int
    """The number of texts."""
    truncated: int
    """The number of texts cut to the model's length."""
    read: Int[Tensor, " token"]
    """The ids of the tokens read, in order."""
    raised: Int[Tensor, "measured head pair"]
    """The tokens whose logits a head raises most: the highest for each token read, strongest first; ties by id."""
    raised_by: Int[Tensor, "measured head pair"]
    """The tokens read for which it raises them."""
    raised_logits: Float[Tensor, "measured head pair"]
    lowered: Int[Tensor, "measured head pair"]
    """The tokens whose logits a head lowers most."""
    lowered_by: Int[Tensor, "measured head pair"]
    lowered_logits: Float[Tensor, "measured head pair"]
    above: Int[Tensor, "measured head token"]
    """For each token read, the number of tokens of the vocabulary that a head raises more than the token itself."""
    below: Int[Tensor, "measured head token"]
    """The number of tokens that it raises less."""
    successors: Successors
    vocab: int
    """The number of tokens with a logit."""
    scale: Float[Tensor, " measured"]
    """The factor of a layer's logits: r, times the mean factor of a norm between attention and stream."""
    unit: str
    """"logits", or "pre-cap logits" if the model soft-caps them (Gemma 2)."""
    texts: Mapping[int, str]
    """The texts of the tokens, by id."""
    provenance: Provenance

    @classmethod
    def reducer(
        cls,
        model: HookedModel,
        *,
        tokens: int | Sequence[str] | Sequence[int] = 1000,
        k: int = 10,
        layers: Iterable[int] | None = None,
        stack: str | None = None,
    ) -> OVReducer:
        """The reducer that computes an `OVTokens` in `am.stream` over layers that include the last; the arguments are
        those of `am.ov_tokens`.
        """
        require_model(model)
        chosen = model.stack(stack)
        k = whole_number("k", k, least=1)
        measured = tuple(dict.fromkeys(model.points.check_layers(layers, chosen.label)))
        Circuits.of(model, chosen)
        plan = chosen.architecture
        return OVReducer(plan.attn_out not in ("", plan.out), _checked(model, tokens), k, measured)

    def _check(self) -> None:
        super()._check()
        for ids in (self.read, self.raised, self.raised_by, self.lowered, self.lowered_by):
            for token in ids.flatten().tolist():
                self.texts[token]

    @property
    def own(self) -> OwnPlaces:
        """The places of the own tokens in the order of logits."""
        return OwnPlaces(self.above, self.below, self.vocab)

    def _value_of(self, statistic: str) -> Float[Tensor, "layer head"]:
        return self._by_layer(self._by_head(statistic))

    def _by_head(self, statistic: str) -> Float[Tensor, "measured head"]:
        if statistic in OWN:
            values: Tensor = OWN[statistic].value(self.own)
            return values.double().mean(dim=-1)
        return self.successors.share

    def chance(self, statistic: str) -> float:
        """Returns a statistic's mean over heads whose logits are unrelated to the token read: 0.5 for "own_rank",
        10 / vocabulary for "copied" and "suppressed", and the mean of 1 / (tokens of the class) for "successor".
        """
        if option("statistic", statistic, STATISTICS) in OWN:
            return OWN[statistic].chance(self.vocab)
        return self.successors.chance

    @cached_property
    def claims(self) -> pd.DataFrame:
        """One row per claimed type of a head, the highest score first: "copy suppression" (the share `suppressed`) and
        "successor".

        A type is claimed if the exact 95 % interval of its share, for all heads and both types together, is above
        chance (`baseline`), and the share is at least 0.5. `tokens` is the number of tokens read, or of steps such as
        "monday → tuesday", whose spellings count as one.
        """
        counts = {name: len(self.read) if of in OWN else len(self.successors.steps) for name, of in CLAIMED.items()}
        shares = {
            name: Shares(self._by_head(CLAIMED[name]), count, self.chance(CLAIMED[name]))
            for name, count in counts.items()
            if count
        }
        return claimed(shares, self.layers)

    def types_of(self, layer: int, head: int) -> tuple[str, ...]:
        """The claimed types of a head, the highest score first."""
        here = self.claims[(self.claims.layer == layer) & (self.claims["head"] == head)]
        return tuple(here.type)

    def pairs_of(self, layer: int, head: int, which: str = "raised") -> list[Pair]:
        """Returns the pairs of one head, strongest first: "raised" or "lowered"."""
        row = self._place_of(layer)
        heads = self.raised.shape[1]
        head = index_of("head", head, heads, f"this model has {heads} heads per layer")
        kind = option("which", which, KINDS)
        read, written, logits = (getattr(self, f"{kind}{end}")[row, head].tolist() for end in ("_by", "", "_logits"))
        return [
            Pair(self.layers[row], head, kind, rank, self.texts[token], self.texts[to], logit, token, to)
            for rank, (token, to, logit) in enumerate(zip(read, written, logits, strict=True))
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per pair: layer, head, kind, rank, read and written (the tokens), logit, read_id, written_id."""
        pairs = [
            vars(pair)
            for layer in self.layers
            for head in range(self.raised.shape[1])
            for kind in KINDS
            for pair in self.pairs_of(layer, head, kind)
        ]
        return pd.DataFrame(pairs)

    def by_head(self) -> pd.DataFrame:
        """One row per head: layer, head, own_rank, copied, suppressed, successor, and the highest and the lowest
        logit.
        """
        columns = {name: self._by_head(name) for name in STATISTICS}
        columns |= {"highest": self.raised_logits[..., 0], "lowest": self.lowered_logits[..., 0]}
        return table_of({"layer": self.layers, "head": range(self.raised.shape[1])}, columns)

    def plot(self, figure: str | None = None, *, layer: int | None = None, head: int | None = None) -> "go.Figure":
        """Draws layers × heads, coloured by "own_rank", "copied" (the default), "suppressed" or "successor"."""
        statistic = "copied" if figure is None else option("figure", figure, self.FIGURES)
        label = STATISTICS[statistic].axis
        drawn = effect_map(self._by_head(statistic), layers=self.layers, label=label, signed=False)
        return framed(drawn, self.layers, layer, head)

    @property
    def lead(self) -> str:
        """The heads that copy and suppress most."""
        chance = percent(self.chance("copied"), 2)
        copies, suppresses = (self._most(name) for name in ("copied", "suppressed"))
        claims = self.claims[self.claims.type == "successor"].head(1)
        successors = [f" L{claim.layer}H{claim.head} writes successors." for claim in claims.itertuples()]
        return (
            f"{copies[0]} copies most: the own token is among the {TOP} raised most for {copies[1]} of "
            f"{counted(len(self.read), noun='token')} (chance: {chance}). {suppresses[0]} suppresses most: among the "
            f"{TOP} lowered most for {suppresses[1]}.{''.join(successors)}"
        )

    def _most(self, statistic: str) -> tuple[str, str]:
        shares = self._by_head(statistic)
        row, head = divmod(int(shares.argmax()), shares.shape[1])
        return f"L{self.layers[row]}H{head}", percent(float(shares[row, head]), 0)

    def _sections(self) -> "Sequence[Section]":
        reading = (
            "Each cell is one head. Its colour is a mean over the tokens that the head reads through W_V W_O. In a "
            f"head with random weights, the own token has a mean rank of 0.5, and is among the {TOP} raised most for "
            f"{percent(self.chance('copied'), 2)} of the tokens."
        )
        figures = {f"ov-{name}": self.plot(name) for name in STATISTICS if name in OWN or self.successors.steps}
        if not self.successors.steps:
            reading += " Successors are not measured: the vocabulary holds too few ordered words as single tokens."
        return [
            Section("Heads that copy or suppress the token they read", reading, figures, "circuits.plot()", tab="write")
        ]


def ov_section(tokens: OVTokens, call: str) -> Section:
    """The pairs of the chosen head, for a page."""
    heads = range(tokens.raised.shape[1])
    copied, suppressed = (tokens._by_head(name) for name in ("copied", "suppressed"))
    chance = percent(tokens.chance("copied"), 2)

    def finding(row: int, head: int) -> str:
        return (
            f"The token read is among the {TOP} that it raises most for {percent(float(copied[row, head]))} of the "
            f"tokens, and among the {TOP} that it lowers most for {percent(float(suppressed[row, head]))} (chance: "
            f"{chance})."
        )

    figures = {
        f"ov-{kind}": pairs_chart(
            [[tokens.pairs_of(layer, head, kind) for head in heads] for layer in tokens.layers], kind
        )
        for kind in KINDS
    }
    return Section(
        tab="write",
        contents="From token to token",
        heading="What it writes for a token that it attends to",
        finding=ByChoice.texts(("layer", "head"), copied.shape, finding),
        reading="Each line is a token that the head may read, and the token whose logit it then raises (left) or "
        f"lowers (right) most, in {tokens.unit} above the mean over the vocabulary, if all its attention were there. "
        f"Read are the {len(tokens.read):,} most frequent tokens of the texts, by their embeddings alone.",
        caveat="Later layers read more than embeddings. The final norm's factor is its mean over the texts.",
        figures=figures,
        call=f"{call}.pairs_of({{layer}}, {{head}})",
    )
