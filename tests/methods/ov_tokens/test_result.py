"""OV circuits on tokens: against whole matrices of raw models, against the models' own values, and planted heads."""

from collections import Counter
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import models
import planted
import pytest
import reference
import tiny
import torch
from by_hand import until_the_end
from comparing import refuses
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import attnmech as am
from attnmech.methods.ov_tokens import formulas
from attnmech.methods.ov_tokens.claims import Steps
from attnmech.methods.ov_tokens.sums import Circuits
from attnmech.model.stack.carried import output_weights

F64: Final = torch.float64

# -- whole matrices from raw models ----------------------------------------------------------------------------


def unit(x: Tensor, epsilon: float, centred: bool) -> Tensor:
    """x divided by its root mean square, after its mean is subtracted if `centred`."""
    x = x - x.mean(dim=-1, keepdim=True) if centred else x
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + epsilon).sqrt()


FINAL: Final = {
    "gpt2": "transformer.ln_f", "llama": "model.norm", "llama_bias": "model.norm", "qwen2": "model.norm",
    "gemma2": "model.norm", "bloom": "transformer.ln_f", "opt": "model.decoder.final_layer_norm",
    "gpt_neox": "gpt_neox.final_layer_norm",
}  # fmt: skip
"""The final norm of each family; those of Qwen 2 have biases of values."""


def logits_by_hand(name: str, read: list[int]) -> Tensor:
    """The logits above their mean over the vocabulary, before the mean factors of norms, `[layer head token vocab]`."""
    plain = models.plain(name, F64)
    norm, offset = plain.get_submodule(FINAL[name]), float(name == "gemma2")
    embedded = plain.get_input_embeddings().weight[read]
    if name == "bloom":
        before = plain.transformer.word_embeddings_layernorm
        embedded = before.weight * unit(embedded, before.eps, centred=True) + before.bias
    if name == "gemma2":
        embedded = embedded * plain.config.hidden_size**0.5
    written = []
    for layer in range(plain.config.num_hidden_layers):
        weights = reference.layer_weights(plain, layer)
        x = (weights.gamma + offset) * unit(embedded, weights.eps, centred=isinstance(norm, torch.nn.LayerNorm))
        behind = 1 + plain.model.layers[layer].post_attention_layernorm.weight if name == "gemma2" else 1.0
        group = len(weights.W_O) // len(weights.W_V)
        heads = [x @ weights.W_V[head // group] @ W_O * behind for head, W_O in enumerate(weights.W_O)]
        written.append(torch.stack(heads))
    vectors = torch.stack(written)
    if isinstance(norm, torch.nn.LayerNorm):
        vectors = vectors - vectors.mean(dim=-1, keepdim=True)
    logits = (norm.weight + offset) * vectors @ plain.get_output_embeddings().weight.T
    above_mean: Tensor = (logits - logits.mean(dim=-1, keepdim=True)).detach()
    return above_mean


def pairs_by_hand(logits: Tensor, read: list[int], k: int, sign: int) -> list[tuple[int, int, float]]:
    """For each token read, the token with the highest (or, with sign −1, lowest) logit; the k strongest of these."""
    best = []
    for token, row in zip(read, logits.tolist(), strict=True):
        value, written = min((-sign * logit, place) for place, logit in enumerate(row))
        best.append((value, token, written))
    return [(token, written, -sign * value) for value, token, written in sorted(best)[:k]]


def texts_of(name: str) -> list[Tensor]:
    vocab = models.plain(name).config.vocab_size
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in (9, 4, 12, 7, 9)]


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "small_blocks"), [*((name, False) for name in FINAL), ("gpt2", True), ("gemma2", True)]
)
def test_pairs_and_places_are_those_of_whole_matrices(
    name: str, small_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_blocks:
        monkeypatch.setattr(formulas, "block_bytes", lambda device: 400)
        monkeypatch.setattr(formulas, "_TOKENS", 5)
    model, texts, k = models.hooked(name, F64), texts_of(name), 4
    result = am.ov_tokens(model, iter(texts), tokens=13, k=k)
    counted = Counter(token for ids in texts for token in ids[1:].tolist())
    read = sorted(sorted(counted, key=lambda token: (-counted[token], token))[:13])
    assert result.read.tolist() == read
    logits = logits_by_hand(name, read)
    for layer, head in [(0, 0), (0, 1), (model.n_layers - 1, model.n_heads - 1)]:
        of_head = logits[layer, head]
        for kind, sign in (("raised", 1), ("lowered", -1)):
            pairs = result.pairs_of(layer, head, kind)
            expected = pairs_by_hand(of_head, read, k, sign)
            assert [(pair.read_id, pair.written_id) for pair in pairs] == [pair[:2] for pair in expected]
            unscaled = [pair.logit / float(result.scale[layer]) for pair in pairs]
            # Gemma 2's γ behind attention is read from the norm, which computes in float32.
            within = 1e-6 if name == "gemma2" else 1e-9
            assert unscaled == pytest.approx([logit for *_, logit in expected], rel=within)
        places = list(zip(read, of_head.tolist(), strict=True))
        above = [sum(logit > row[token] for logit in row) for token, row in places]
        below = [sum(logit < row[token] for logit in row) for token, row in places]
        assert result.above[layer, head].tolist() == above and result.below[layer, head].tolist() == below
        vocab = len(of_head[0])
        rank = sum(number / (vocab - 1) for number in below) / len(read)
        assert float(result.own_rank[layer, head]) == pytest.approx(rank, rel=1e-12)
        copied, suppressed = (sum(number < 10 for number in numbers) / len(read) for numbers in (above, below))
        assert float(result.copied[layer, head]) == copied and float(result.suppressed[layer, head]) == suppressed


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_logits_have_the_mean_factors_of_norms(name: str) -> None:
    """Of the final norm and, in Gemma 2, of the norm behind attention, over all tokens but the first of each text."""
    plain, texts = models.plain(name, F64), texts_of(name)
    final = plain.get_submodule(FINAL[name])
    behind = [] if name == "gpt2" else [layer.post_attention_layernorm for layer in plain.model.layers]
    factors: dict[Any, list[Tensor]] = {norm: [] for norm in (final, *behind)}

    def at_norm(norm: Any, args: Any) -> None:
        x = args[0][0, 1:]
        x = x - x.mean(dim=-1, keepdim=True) if name == "gpt2" else x
        factors[norm].append((x.pow(2).mean(dim=-1) + norm.eps).rsqrt())

    handles = [norm.register_forward_pre_hook(at_norm) for norm in factors]
    with until_the_end(handles), torch.no_grad():
        for ids in texts:
            plain(input_ids=ids[None])
    means = {norm: float(torch.cat(values).mean()) for norm, values in factors.items()}
    scale = [means[final] * (means[behind[layer]] if behind else 1) for layer in range(plain.config.num_hidden_layers)]
    result = am.ov_tokens(models.hooked(name, F64), iter(texts), tokens=[5, 3])
    assert result.scale.tolist() == pytest.approx(scale, rel=1e-6)
    assert result.unit == ("logits" if name == "gpt2" else "pre-cap logits")


# -- what models compute ---------------------------------------------------------------------------------------

OTHERS: Final = ("gemma3_text", "olmo2", "cohere", "granite", "gpt_oss", "mpt", "falcon", "falcon_h1", "phi3")
LIKE_OTHERS: Final = ("gemma", "qwen3", "phi", "gptj", "mixtral", "jamba", "llama4_text", "olmo_hybrid", "glm4")


@pytest.mark.parametrize("kind", [*OTHERS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in LIKE_OTHERS)])
def test_values_are_those_of_the_model_for_a_stream_of_embeddings(kind: str) -> None:
    """The difference of two tokens' values, in which the constants β W_V and b_V cancel."""
    model = am.load(tiny.model_of(kind))
    stack = model.output_stack
    circuits, ids = Circuits.of(model, stack), torch.arange(5, 11)
    embedded = circuits.vocabulary.rows(ids, circuits.precision)
    for layer in stack.layers:
        edits: Any = {("resid_pre", layer): lambda stream: embedded[:, None].to(stream)}
        with model.hooks(edits):
            v = model.run(ids[:, None], points=["v"], layers=[layer])["v", layer][:, 0]
        ours = circuits.values(layer, embedded).transpose(0, 1)
        expected = v[1:] - v[:1]
        torch.testing.assert_close(ours[1:] - ours[:1], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def granite() -> Any:
    """A model with factors of the embedding, of attention's output and of the logits."""
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.37, "logits_scaling": 1.7}
    return models.randomised(models.like_llama("Granite", d_head=None, **factors))


@pytest.mark.parametrize("kind", ["granite", "cohere2", "llama"])
def test_a_pair_is_what_the_head_adds_to_a_logit_in_a_text_of_one_token(kind: str) -> None:
    """Heads of a text of one token attend only to it; these models have no biases of values."""
    model, ids = am.load(granite() if kind == "granite" else tiny.model_of(kind)), torch.arange(5, 11)
    assert (model.architecture.attn_scale == pytest.approx(0.37)) == (kind == "granite")
    circuits = Circuits.of(model, model.stack())
    embedded, layer = circuits.vocabulary.rows(ids, circuits.precision), model.n_layers - 1
    text_ids = torch.arange(3, 20)[None]
    result = am.ov_tokens(model, text_ids, tokens=ids.tolist(), k=len(ids), layers=[layer])
    stream = model.run(text_ids, points=["resid_post"])["resid_post", layer]
    r = float(circuits.unembedding.scale(stream)[0, 1:].mean())
    W_O = output_weights(circuits.stack, layer, circuits.precision)
    for head in range(model.n_heads):
        for pair in result.pairs_of(layer, head):
            with model.hooks({("resid_pre", layer): lambda stream: embedded[:, None].to(stream)}):
                answers = {"answers": [pair.written_id] * len(ids), "against": [3] * len(ids)}
                updates = am.residual_updates(model, ids[:, None], **answers)
            text = ids.tolist().index(pair.read_id)
            final = float(updates.state["final_scale"][text])
            row, read = circuits.values(layer, embedded), torch.tensor([3])
            other = row[head * len(row) // model.n_heads, text] @ W_O[head] @ circuits.unembedding.above_mean(read)[0]
            ours = (pair.logit - float(other) * float(result.scale[0])) * final / r
            assert ours == pytest.approx(float(updates.logits[layer, head, text]), rel=1e-4, abs=1e-5)


def test_a_16_bit_model_is_computed_in_float32() -> None:
    raw, texts = models.fresh("gpt2").to(torch.bfloat16), texts_of("gpt2")
    both = am.load(raw), am.load(deepcopy(raw).float())
    assert [model.dtype for model in both] == [torch.bfloat16, torch.float32]
    result, expected = (am.ov_tokens(model, iter(texts), tokens=9, k=2) for model in both)
    assert result.raised.tolist() == expected.raised.tolist() and result.above.tolist() == expected.above.tolist()
    one, other = (tokens.lowered_logits / tokens.scale[:, None, None] for tokens in (result, expected))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_chosen_tokens_and_layers_agree_with_the_whole() -> None:
    model, texts = models.hooked("gpt2", F64), texts_of("gpt2")
    whole = am.ov_tokens(model, iter(texts), tokens=8, k=3)
    some = am.ov_tokens(model, iter(texts), tokens=whole.read.tolist()[::-1], k=3, layers=[1])
    assert whole.read.tolist() == some.read.tolist() and some.raised[0].tolist() == whole.raised[1].tolist()
    for name in ("own_rank", "copied", "suppressed"):
        one, other = getattr(some, name), getattr(whole, name)
        assert one.shape == other.shape and bool(one[[0, 2]].isnan().all())
        assert one[1].tolist() == other[1].tolist()
    torch.testing.assert_close(some.raised_logits[0], whole.raised_logits[1])


def test_the_self_attention_of_a_decoder() -> None:
    model = models.hooked("mbart")
    inputs = models.inputs_of("mbart")
    result = am.ov_tokens(model, inputs, tokens=5, stack="decoder")
    assert result.copied.shape == (3, 3) and len(result.read) == 5
    counted = Counter(inputs["decoder_input_ids"][:, 1:].flatten().tolist())
    assert result.read.tolist() == sorted(sorted(counted, key=lambda token: (-counted[token], token))[:5])


# -- planted heads ---------------------------------------------------------------------------------------------

READ: Final = list(range(5, 13))


def with_heads() -> am.HookedModel:
    """A model in which L0H3 copies the tokens of `READ`, L1H5 suppresses them, and other heads write nothing."""
    model = planted.blank(planted.MAKERS["gpt2"])
    for (layer, head), sign in (((0, 3), 1.0), ((1, 5), -1.0)):
        weights = model.weights(layer)
        with torch.no_grad():
            for channel, token in enumerate(READ):
                weights.W_V[head, token, channel] = 1.0
                weights.W_O[head, channel, token] = sign
    return model


def test_a_head_that_copies_and_one_that_suppresses() -> None:
    result = am.ov_tokens(with_heads(), torch.arange(3, 20)[None], tokens=READ)
    for place, rank in (((0, 3), 1.0), ((1, 5), 0.0)):
        assert float(result.own_rank[place]) == rank
        assert float(result.copied[place]) == rank and float(result.suppressed[place]) == 1 - rank
    assert all(pair.read_id == pair.written_id for pair in result.pairs_of(0, 3) + result.pairs_of(1, 5, "lowered"))
    # A head that writes nothing raises no token more than another.
    assert [float(getattr(result, name)[2, 0]) for name in formulas.OWN] == [0.5, 0.0, 0.0]
    assert result.lead.startswith("L0H3 copies most: the own token is among the 10 raised most for 100\u00a0% of 8 tok")
    assert "L1H5 suppresses most: among the 10 lowered most for 100\u00a0%." in result.lead
    assert result.claims[["layer", "head", "type", "score", "tokens"]].values.tolist() == [
        [1, 5, "copy suppression", 1.0, 8]
    ]
    assert result.types_of(1, 5) == ("copy suppression",) and result.types_of(0, 3) == ()


@pytest.mark.parametrize("size", [2**20, 60])
def test_equal_logits_are_ordered_by_id(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the tokens lie in different blocks of the vocabulary."""
    monkeypatch.setattr(formulas, "block_bytes", lambda device: size)
    model = planted.blank(planted.MAKERS["gpt2"])
    weights = model.weights(0)
    with torch.no_grad():
        for token in (9, 6):
            weights.W_V[2, token, 0] = 1.0
        for written, value in ((31, 1.0), (17, 1.0), (40, 1.0), (33, -1.0), (50, -1.0), (22, -1.0)):
            weights.W_O[2, 0, written] = value
    result = am.ov_tokens(model, torch.arange(3, 20)[None], tokens=[9, 6, 12], k=3)
    assert [(pair.read_id, pair.written_id) for pair in result.pairs_of(0, 2)][:2] == [(6, 17), (9, 17)]
    assert [(pair.read_id, pair.written_id) for pair in result.pairs_of(0, 2, "lowered")][:2] == [(6, 22), (9, 22)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_random_weights_have_no_claim(name: str) -> None:
    """With tied and with separate embeddings, on 20 random models."""
    raw, made, claims = models.fresh(name), 0, 0
    model = with_tokenizer(raw)
    for seed in range(20):
        models.randomised(raw, seed=seed)
        result = am.ov_tokens(model, torch.arange(3, 19)[None], tokens=list(range(40)))
        made += bool(result.successors.steps)
        claims += len(result.claims)
    assert made == 20 and claims == 0
    assert result.chance("copied") == result.chance("suppressed") == 10 / raw.config.vocab_size


# -- successors ------------------------------------------------------------------------------------------------

WEEKDAYS: Final = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
MONTHS: Final = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
]  # fmt: skip
NAMES: Final = (
    *(f"filler{number}" for number in range(10)), *"0123456789", *(f"Ġ{month.capitalize()}" for month in MONTHS),
    *WEEKDAYS[:3], *WEEKDAYS[4:], "▁monday", "one", "three", "four", "▁five", "▁six", "▁seven", "▁nine", " ten", "▁ten",
    *(f"filler{number}" for number in range(10, 15)),
)  # fmt: skip
"""A vocabulary with 10 digits, 12 months, and 6 weekdays without Thursday; too few number words in one spelling, except
those after ▁: five, six, seven, nine and ten."""

ORDERED: Final = (list("0123456789"), [f"Ġ{month.capitalize()}" for month in MONTHS], WEEKDAYS)
NUMBERS: Final = ["▁five", "▁six", "▁seven", "▁eight", "▁nine", "▁ten"]


def with_tokenizer(raw: Any) -> am.HookedModel:
    vocab = {name: number for number, name in enumerate(NAMES[: raw.config.vocab_size])}
    of_words = Tokenizer(WordLevel(vocab, unk_token="filler0"))
    return am.load(raw, tokenizer=PreTrainedTokenizerFast(tokenizer_object=of_words, unk_token="filler0"))


def steps_by_hand() -> dict[str, list[tuple[int, int, list[int]]]]:
    """(token, successor, tokens of the class) for each step of the vocabulary above."""
    steps = {}
    for names in (*ORDERED, NUMBERS):
        held = [NAMES.index(name) for name in names if name in NAMES]
        for one, other in pairwise(names):
            if one in NAMES and other in NAMES:
                step = " → ".join(name.lower().strip("ġ▁") for name in (one, other))
                steps[step] = [(NAMES.index(one), NAMES.index(other), held)]
    return steps


@pytest.mark.core
def test_successors_are_those_of_whole_matrices() -> None:
    model, steps = with_tokenizer(models.fresh("gpt2", F64)), steps_by_hand()
    assert len(steps) == 9 + 11 + 4 + 3
    result = am.ov_tokens(model, iter(texts_of("gpt2")), tokens=3)
    assert set(result.successors.steps) == steps.keys()
    logits = logits_by_hand("gpt2", list(range(53)))
    for layer in range(model.n_layers):
        for head in range(model.n_heads):
            of_head, hits, chance = logits[layer, head].tolist(), 0, 0.0
            for pairs in steps.values():
                for token, successor, held in pairs:
                    hits += max(held, key=lambda other: of_head[token][other]) == successor
                    chance += 1 / len(held)
            assert float(result.successor[layer, head]) == pytest.approx(hits / len(steps), rel=1e-12)
            assert result.chance("successor") == pytest.approx(chance / len(steps), rel=1e-12)
    assert result.successors.raised.sum() > 0


def test_spellings_of_a_step_count_together() -> None:
    """Two spellings of the weekdays: the head raises the successor most in one of them."""
    names = [*WEEKDAYS, *(f"Ġ{day.capitalize()}" for day in WEEKDAYS)]
    steps = Steps.of(SimpleNamespace(get_vocab=lambda: {name: number for number, name in enumerate(names)}), 14)
    values = torch.eye(14).roll(1, dims=1)[None]
    values[0, 7:] = torch.eye(14)[7:]
    raised = steps.raised(values, torch.eye(14)[None], lambda ids: torch.eye(14)[ids])
    assert steps.spellings.tolist() == [2] * 6 and raised.tolist() == [[1] * 6]
    assert steps.by_chance.tolist() == pytest.approx([2 / 7] * 6)


def test_a_head_that_writes_successors_is_claimed_and_no_other() -> None:
    """Each class lies on a circle, and the head turns it by one step."""
    raw = models.randomised(planted.MAKERS["gpt2"]())
    weights = planted.blank(lambda: raw).weights(1)
    with torch.no_grad():
        for plane, names in enumerate(ORDERED):
            for place, name in enumerate(names):
                if name in NAMES:
                    angles = 2 * torch.pi / len(names) * torch.tensor([place, place - 1])
                    read, written = torch.stack((angles.cos(), angles.sin()), dim=1)
                    token, channels = NAMES.index(name), slice(2 * plane, 2 * plane + 2)
                    weights.W_V[2, token, channels], weights.W_O[2, channels, token] = read, written
    result = am.ov_tokens(with_tokenizer(raw), torch.arange(3, 20)[None], tokens=READ)
    assert float(result.successor[1, 2]) == pytest.approx(24 / 27)
    assert result.lead.endswith(" L1H2 writes successors.")
    assert "successor" not in result.types_of(0, 0)
    assert result.claims[["layer", "head", "type"]].values.tolist() == [[1, 2, "successor"]]


# -- how the result is shown and saved --------------------------------------------------------------------------


def test_tables_page_and_figure() -> None:
    result = am.ov_tokens(models.demo(), ["Anna sang of shells. Tom lost his anchor."], tokens=[" Tom", " Anna"], k=2)
    frame = result.to_frame()
    assert len(frame) == 4 * 8 * 2 * 2
    assert {" Tom", " Anna"} == set(frame["read"])
    heads = result.by_head()
    assert heads["copied"].tolist() == result.copied.flatten().tolist()
    assert heads["highest"].tolist() == frame[(frame["kind"] == "raised") & (frame["rank"] == 0)]["logit"].tolist()
    pair = result.pairs_of(2, 7)[0]
    assert str(pair).startswith("“·") and "→" in str(pair)
    page = result.to_html()
    assert "Successors are not measured" not in page
    bare = am.ov_tokens(models.hooked("gpt2"), torch.arange(3, 20)[None], tokens=3)
    assert bool(bare.successor.isnan().all()) and bare.claims.type.tolist() == []
    assert "Successors are not measured" in bare.to_html()
    assert "Heads that copy or suppress the token they read" in page
    assert result.plot("own_rank").layout.coloraxis.colorbar.title.text == "mean rank of the own token"


# -- bad input ---------------------------------------------------------------------------------------------------

IDS: Final = torch.arange(3, 11)[None]
TINY: Final = ("bitnet",)
"""A model of `tests/tiny.py`; the other families that are refused are in the table of `tests/test_matrix.py`."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, r"`tokens` must be a whole number, 1 or more; got"),
        ({"tokens": True}, r"`tokens` must be a whole number, 1 or more; got"),
        ({"tokens": []}, r"`tokens` must be a number, or a list of tokens, such as \[' Tom', 512\]; got an empty list"),
        ({"tokens": "Tom"}, r"`tokens` must be a number, or a list of tokens, such as \[' Tom', 512\]; got 'Tom'\."),
        ({"tokens": [3, 53]}, r"`tokens` must be from 0 to 52"),
        ({"tokens": [" Tom"]}, r"`tokens` must be token ids: this model was loaded without a tokenizer\."),
        ({"k": 0}, r"`k` must be a whole number, 1 or more; got 0\."),
        ({"inputs": torch.tensor([[5], [6]])}, "must have tokens that are neither special nor the first of a text"),
        ({"inputs": iter([])}, "no documents"),
        ({"model": "demo", "inputs": "a", "tokens": [" zebrafish"]}, "must be single tokens; ' zebrafish' becomes"),
        ({"model": "opt_post"}, "does not compute logits with one norm and one matrix"),
        ({"model": "t5", "stack": "encoder"}, 'heads of the stack "encoder" do not. Give stack="decoder"'),
        ({"model": "bitnet"}, "a norm between W_V and W_O"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    name = options.pop("model", "gpt2")
    model = models.demo() if name == "demo" else am.load(tiny.model_of(name)) if name in TINY else models.hooked(name)
    refuses(message, am.ov_tokens, model, **{"inputs": IDS, **options})


def test_unknown_statistics_and_kinds() -> None:
    result = am.ov_tokens(models.hooked("gpt2"), IDS, layers=[1])
    for call, message in (
        (lambda: result.plot("mean"), "`figure` must be one of own_rank, copied, suppressed"),
        (lambda: result.chance("mean"), "`statistic` must be one of"),
        (lambda: result.pairs_of(1, 0, "top"), "`which` must be one of raised, lowered"),
        (lambda: result.pairs_of(0, 0), "`layer` must be one of the layers measured"),
        (lambda: result.pairs_of(1, 5), "`head` must be from 0 to 4"),
        (lambda: result - result, "cannot be subtracted; subtract their statistics: one.copied - other.copied"),
    ):
        refuses(message, call)
