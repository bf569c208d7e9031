"""Attention to groups of words compared with matched words: against loops, planted heads, and invalid groups."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import models
import planted
import pytest
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.demo.text import documents
from attnmech.runs.words import bare, split_words

PLAIN = [word for word in models.WORDS if word.isalpha()]
GROUPS = {"places": ["campsite", "harbour", "beach", "office"], "verbs": ["is", "are", "stay", "stays"]}


def pieces_of(model: am.HookedModel, text: str) -> tuple[list[str], list[list[int]]]:
    """Words and their tokens, by the tokens' characters only."""
    pieces, tokens = list(split_words(text)), model.encode(text).tokens[0]
    ends = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
    members: list[list[int]] = [[] for _ in pieces]
    at = 0
    for place, token in enumerate(tokens[1:], start=1):
        inner = at + len(token) - len(token.lstrip())
        members[next(number for number, end in enumerate(ends) if inner < end)].append(place)
        at += len(token)
    assert at == len(text)
    return pieces, members


def by_hand(
    model: am.HookedModel, texts: list[str], patterns: list[Tensor], query: list[str], key: list[str]
) -> tuple[float, float, int, int]:
    """Attention, baseline, and the numbers of matched pairs and of all pairs, from the patterns of a head."""
    counts = Counter(word.strip().lower() for text in texts for word in split_words(text))
    named = {word for words in GROUPS.values() for word in words}
    got, expected, found = [], [], 0
    for text, pattern in zip(texts, patterns, strict=True):
        pieces, members = pieces_of(model, text)
        words = [piece.strip().lower() for piece in pieces]

        def mass(q: int, k: int, members: list[list[int]] = members, pattern: Tensor = pattern) -> float:
            return sum(float(pattern[i, j]) for i in members[q] for j in members[k]) / len(members[q])

        for q, asks in enumerate(words):
            for k, asked in enumerate(words[:q]):
                if asks not in query or asked not in key:
                    continue
                found += 1
                far = members[q][0] - members[k][0]
                alike = [
                    mass(q, c)
                    for c, word in enumerate(words)
                    if c < q
                    and any(character.isalnum() for character in word)
                    and word not in named
                    and len(members[c]) == len(members[k])
                    and abs(members[q][0] - members[c][0] - far) <= 2
                    and 0.5 <= counts[word] / counts[asked] <= 2
                ]
                if alike:
                    got.append(mass(q, k))
                    expected.append(sum(alike) / len(alike))
    return sum(got) / len(got), sum(expected) / len(got), len(got), found


@pytest.fixture(scope="module")
def found() -> am.results.GroupAttention:
    return am.group_attention(models.demo(), documents(25), GROUPS)


@pytest.mark.core
def test_numbers_are_those_of_a_loop(found: am.results.GroupAttention) -> None:
    model, texts = models.demo(), documents(25)
    runs = [model.run(text, points=["pattern"]) for text in texts]
    for layer, head in ((0, 2), (2, 6)):
        patterns = [acts["pattern", layer][0, head].double() for acts in runs]
        for query, key in (("places", "verbs"), ("verbs", "places")):
            attention, baseline, matched, pairs = by_hand(model, texts, patterns, GROUPS[query], GROUPS[key])
            rows = found.to_frame().set_index(["query", "key"]).loc[[(query, key)]]
            assert {*rows.matched} == {matched} and {*rows.pairs} == {pairs}
            assert 0 < matched < pairs
            assert float(found.attention(query, key)[layer, head]) == pytest.approx(attention, abs=1e-5)
            assert float(found.baseline(query, key)[layer, head]) == pytest.approx(baseline, abs=1e-5)
            assert float(found[f"{query} → {key}"].mean[layer, head]) == pytest.approx(attention - baseline, abs=1e-5)
    for by_word in (found.by_query, found.by_key):
        for place, name in enumerate(found.quantities):
            expected = found[name].mean * found.matched_pairs[place].sum()
            assert torch.allclose(by_word[place].sum(dim=-1), expected, atol=1e-9)
    assert torch.equal(found.query_pairs.sum(dim=-1), found.key_pairs.sum(dim=-1))
    # The words of the first group are queries in the first direction, and keys in the second.
    count = len(GROUPS["places"])
    assert not found.query_pairs[0, count:].any() and not found.key_pairs[0, :count].any()


def test_wider_matches_and_many_texts(found: am.results.GroupAttention) -> None:
    """Wider matches leave fewer pairs out; beyond 256 texts, some share a group."""
    model, texts = models.demo(), documents(25)
    strict, wide = (
        int(am.group_attention(model, texts, GROUPS, within=within, factor=factor).matched_pairs[1].sum())
        for within, factor in ((0, 1.0), (20, 50.0))
    )
    assert strict < found.matched_pairs[1].sum() < wide <= found.all_pairs[1].sum()
    many = am.group_attention(model, texts * 11, GROUPS)
    assert many.documents == 275 and many.matched_pairs.shape[-1] <= 256
    assert many.matched_pairs[1].sum() == 11 * found.matched_pairs[1].sum()
    assert torch.allclose(many["verbs → places"].mean, found["verbs → places"].mean, atol=1e-9)


def test_words_split_over_tokens_are_summed() -> None:
    """Names that the demo model reads as bytes; a matched word has the same number."""
    model = models.demo()
    texts = [f"Then Zxqv gave Zxqw {thing} and then Wxzy left." for thing in ("shells", "ropes", "anchors")]
    found = am.group_attention(model, texts, {"givers": ["wxzy"], "takers": ["zxqv"]}, within=7)
    pieces, members = pieces_of(model, texts[0])
    assert [bare(piece) for piece in pieces[1:4:2]] == ["zxqv", "zxqw"] and len(members[1]) == len(members[3]) > 1
    giver = next(number for number, piece in enumerate(pieces) if bare(piece) == "wxzy")
    total, base = 0.0, 0.0
    for text in texts:
        pattern = model.run(text, points=["pattern"])["pattern", 1][0, 3]
        own = pieces_of(model, text)[1]
        total += float(pattern[own[giver]][:, own[1]].sum(dim=1).mean()) / 3
        base += float(pattern[own[giver]][:, own[3]].sum(dim=1).mean()) / 3
    assert abs((members[giver][0] - members[1][0]) - (members[giver][0] - members[3][0])) <= 7
    assert float(found.attention("givers", "takers")[1, 3]) == pytest.approx(total, abs=1e-5)
    assert float(found.baseline("givers", "takers")[1, 3]) == pytest.approx(base, abs=1e-5)


def test_a_planted_bias_is_claimed_and_no_other() -> None:
    """Uniform attention everywhere, except that head 3 of layer 1 gives words of a group five times as much."""
    model, texts = models.demo(), documents(40)
    groups = {"articles": ["the", "a", "an"], "verbs": ["is", "are", "was", "were"]}
    names = [model.encode(torch.tensor([[token]])).tokens[0][0] for token in range(model.n_vocab)]
    verbs = torch.tensor([name.strip().lower() in groups["verbs"] for name in names])

    def even(pattern: Tensor) -> Tensor:
        seen = torch.ones_like(pattern).tril()
        return seen / seen.sum(dim=-1, keepdim=True)

    def biased(pattern: Tensor, ids: Tensor) -> Tensor:
        pattern = even(pattern)
        pattern[:, 3] *= 1 + 4 * verbs[ids][:, None].to(pattern)
        pattern[:, 3] /= pattern[:, 3].sum(dim=-1, keepdim=True)
        return pattern

    with planted.with_tokens(model, 1, biased), model.hooks({("pattern", layer): even for layer in (0, 2, 3)}):
        found = am.group_attention(model, texts, groups)
        plain = am.group_attention(model, texts, {"articles": groups["articles"], "places": ["campsite", "forest"]})
    assert found.claims[["query", "key", "layer", "head"]].to_numpy().tolist() == [["articles", "verbs", 1, 3]]
    assert (
        "from “articles” to “verbs”" in found.lead
        and "L1H3 attends more to “verbs” than to matched words" in found.lead
    )
    assert "this holds for these words" in found.lead
    assert "From articles to verbs" in found.to_html() and len(found.to_frame()) == 2 * 4 * 8
    assert plain.claims.empty
    of_one_word = torch.zeros_like(found.by_query)
    of_one_word[..., 0] = found.by_query.sum(dim=-1)
    assert replace(found, by_query=of_one_word, query_pairs=torch.ones_like(found.query_pairs)).claims.empty


def letters(number: int) -> str:
    return "w" + "abcdefgh"[number // 8] + "abcdefgh"[number % 8]


def test_random_weights_are_claimed_no_more_often_than_the_nominal_rate() -> None:
    """A head with random weights prefers some words in every text, which is not a bias between groups."""
    words = tuple(map(letters, range(40)))
    tokenizer = models.tokenizer(adds_bos=True, words=("[PAD]", "[UNK]", "[BOS]", *words))
    claimed, over_texts = 0, 0
    weights = models.fresh("llama")
    model = am.load(weights, tokenizer=tokenizer)
    for seed in range(16):
        models.randomised(weights, seed=seed)
        rng = Random(seed)
        given = [" ".join(rng.choices(words, k=40)) for _ in range(9)]
        found = am.group_attention(model, given, {"one": words[:8], "other": words[8:16]}, within=6, factor=9.0)
        assert found.matched_pairs[0].sum() >= 5 and set(found.to_frame().holds_for) == {"words like these"}
        claimed += not found.claims.empty
        over_texts += bool(found.to_frame().clear_size.any())
    assert claimed <= 2 and claimed <= over_texts


def test_both_sides_count_where_a_model_looks_both_ways() -> None:
    text = [" ".join(Random(seed).choices(PLAIN, k=15)) for seed in range(3)]
    groups = {"one": PLAIN[1:4], "other": PLAIN[5:8]}
    model = am.load(models.fresh("bert"), tokenizer=models.tokenizer(adds_bos=True))
    found = am.group_attention(model, text, groups, within=9, factor=9.0)
    assert found.all_pairs[0].sum() == found.all_pairs[1].sum() > 0


def test_few_texts_claim_nothing() -> None:
    model = models.demo()
    few = am.group_attention(model, documents(4), {"verbs": ["is", "are"], "articles": ["the", "zebra"]}, factor=9.0)
    assert few.claims.empty and "too few pairs for a claim" in few.lead
    assert few.missing == ("are", "zebra") and "No text contains are, zebra." in few.lead
    refuses("two of the groups verbs, articles; got 'verbs' and 'verbs'", few.attention, "verbs", "verbs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Anna's boat-house.", ["Anna's", " boat-house", "."]),
        ("  a  b ", ["  a", "  b "]),
        ("", []),
        ("«हिन्दी», naïve!", ["«", "हिन्दी", "»", ",", " naïve", "!"]),
        ("- 'tis -", ["-", " '", "tis", " -"]),
    ],
)
def test_words_make_up_the_text(text: str, words: list[str]) -> None:
    assert list(split_words(text)) == words and "".join(words) == text


TWO = {"one": ["is"], "other": ["the"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": []}, "must be a dictionary from names to lists of words"),
        ({"groups": {"one": ["is"]}}, "must be a dictionary from names to lists of words"),
        ({"groups": {"one": ["is"], "other": []}}, "group 'other' has no words"),
        ({"groups": {"one": ["is"], "other": ["Is", "the"]}}, "in both 'one' and 'other'"),
        ({"groups": {"one": ["is", "IS"], "other": ["the"]}}, "in 'one' twice"),
        ({"groups": {"one": ["is"], "other": ["the boat"]}}, "must hold single words; got 'the boat'"),
        ({"groups": {"one": ["is"], "other": ["."]}}, "must hold single words"),
        ({"groups": {"one": ["is"], "other": "the"}}, "must be a list of words"),
        ({"groups": {"one": ["is"], 5: ["the"]}}, "a group's name must be a string"),
        ({"groups": {"one": ["is"], "other": ["zebra", "gnu"]}}, "no text has a word of group 'other': zebra, gnu"),
        ({"within": -1}, "`within` must be"),
        ({"factor": 0.5}, "`factor` must be at least 1"),
        ({"layers": [7]}, "7"),
        ({"inputs": [torch.tensor([[3, 4]])]}, "every text must be a string"),
        ({"inputs": ["It is.", "The boat."]}, "no text has words of two groups"),
        ({"inputs": 5}, "`inputs` must be texts"),
        ({"model": "bloom", "inputs": "a"}, "fast tokenizer"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(options: dict[str, Any], message: str) -> None:
    given = {"model": models.demo(), "inputs": documents(3), "groups": TWO, **options}
    if "model" in options:
        given["model"] = models.hooked(options["model"])
    refuses(message, am.group_attention, **given)
