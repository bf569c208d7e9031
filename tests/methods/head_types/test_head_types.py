"""Types of heads: scores against loops, heads planted by hand, and no claims about random weights."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import models
import planted
import pytest
import tiny
import torch
from comparing import refuses
from torch import Tensor

import attnmech as am
from attnmech.draw.embed import View
from attnmech.draw.text import percent
from attnmech.methods.head_types.formulas import CONTENT, POSITIONAL, TYPES
from attnmech.methods.head_types.head_types import top_scores, why_unclaimed
from attnmech.model.parts.norms import epsilon_of
from attnmech.runs.retrieval import repeated_sequences

CAUSAL = ["bloom", "llama", "gpt2"]


@cache
def hooked(name: str) -> am.HookedModel:
    """Random models; the one with learned positions has room for sequences of many lengths."""
    return am.load(tiny.model_of("gpt2") if name == "gpt2" else models.fresh(name))


def texts(count: int = 8, vocabulary: int = 9) -> list[Tensor]:
    """Texts with many repetitions."""
    return models.texts_of(count, 20, vocabulary=3 + vocabulary)


def is_target(kind: str, ids: list[int], query: int, key: int, causal: bool = True) -> bool:
    if kind in ("previous", "next", "self") or kind.endswith("back"):
        distance = {"previous": 1, "next": -1, "self": 0}.get(kind)
        return query - key == (int(kind[0]) if distance is None else distance)
    if kind == "first":
        return key == 0
    if kind == "duplicate":
        return ids[key] == ids[query] and (key < query if causal else key != query)
    if kind == "induction":
        return causal and 0 < key < query and ids[key - 1] == ids[query]
    return False


def by_hand(model: am.HookedModel, given: list[Tensor], layer: int, head: int, stack: str) -> dict[str, dict[str, Any]]:
    """Mass, baseline, top and rows of every kind, text by text."""
    causal, point = model.causal and not stack, f"{stack}.pattern".lstrip(".")
    patterns = [model.run(ids, points=[point])[point, layer][0, head].double() for ids in given]
    attended: dict[int, float] = {}
    pairs: dict[int, int] = {}
    for pattern in patterns:
        for query in range(1, len(pattern)):
            for key in range(query + 1 if causal else len(pattern)):
                attended[query - key] = attended.get(query - key, 0.0) + float(pattern[query, key])
                pairs[query - key] = pairs.get(query - key, 0) + 1
    found: dict[str, dict[str, Any]] = {}
    for kind in TYPES:
        sums = {"mass": 0.0, "baseline": 0.0, "top": 0.0, "rows": 0}
        for ids, pattern in zip((each[0].tolist() for each in given), patterns, strict=True):
            for query in range(1, len(ids)):
                keys = range(query + 1 if causal else len(ids))
                there = [key for key in keys if is_target(kind, ids, query, key, causal)]
                if not there:
                    continue
                row = pattern[query]
                sums["rows"] += 1
                sums["mass"] += sum(float(row[key]) for key in there)
                # A tied row counts for no key.
                sums["top"] += int(row.argmax()) in there and int((row == row.max()).sum()) == 1
                if kind in POSITIONAL:
                    sums["baseline"] += len(there) / len(keys)
                else:
                    sums["baseline"] += sum(attended[query - key] / pairs[query - key] for key in there)
        found[kind] = sums
    return found


@pytest.mark.core
@pytest.mark.parametrize(("name", "stack"), [*((name, "") for name in (*CAUSAL, "bert")), ("t5", "encoder")])
def test_scores_are_those_of_a_loop_over_the_pattern(name: str, stack: str) -> None:
    """T5's encoder has duplicates on both sides and no induction; its decoder has both types in causal form."""
    model, given = hooked(name), texts()
    types = am.head_types(model, given, **({"stack": stack} if stack else {}))
    focus = am.attention_focus(model, iter(given), **({"stack": stack} if stack else {}))
    assert torch.allclose(types.breadth, focus.normalised_entropy, atol=1e-5)
    assert torch.equal(types.scores["broad"], types.breadth)
    if stack:
        decoded = [{"input_ids": given[0], "decoder_input_ids": ids} for ids in given]
        assert bool(am.head_types(model, iter(decoded), stack="decoder").scores["induction"].isfinite().all())
    for layer, head in ((0, 0), (1, 2)):
        for kind, sums in by_hand(model, given, layer, head, stack).items():
            if not sums["rows"]:
                assert bool(types.scores[kind].isnan().all())
                continue
            for measure, of in (("mass", "scores"), ("baseline", "baselines"), ("top", "tops")):
                value = float(getattr(types, of)[kind][layer, head])
                assert value == pytest.approx(sums[measure] / sums["rows"], abs=2e-5), (kind, measure)


@cache
def types_of_demo() -> am.results.HeadTypes:
    return am.head_types(models.demo())


def test_delimiters_are_told_by_the_tokenizer() -> None:
    model = models.demo()
    given = ["Anna sang of shells. Tom lost it, and left.", "The keys, and the chest, are here. Anna sang."] * 3
    types = am.head_types(model, given)
    for kind, marks in (("sentence end", "."), ("comma", ",")):
        mass, rows = 0.0, 0
        for text in given:
            acts = model.run(text, points=["pattern"])
            pattern = acts["pattern", 0][0, 6].double()
            for query in range(1, len(pattern)):
                there = [key for key in range(1, query) if acts.tokens[0][key].strip() == marks]
                rows += bool(there)
                mass += sum(float(pattern[query, key]) for key in there)
        assert float(types.scores[kind][0, 6]) == pytest.approx(mass / rows, abs=1e-5)


def planting(kinds: Sequence[str], causal: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Heads 0, 1, … put 0.9 on the targets of each kind, if there are any, and spread the rest evenly."""

    def edited(pattern: Tensor, ids: Tensor) -> Tensor:
        for (text, row_ids), (head, kind) in itertools.product(enumerate(ids.tolist()), enumerate(kinds)):
            for query in range(pattern.shape[2]):
                seen = query + 1 if causal else pattern.shape[2]
                there = [key for key in range(seen) if is_target(kind, row_ids, query, key, causal)]
                pattern[text, head, query] = 0.0
                pattern[text, head, query, :seen] = (0.1 if there else 1.0) / seen
                pattern[text, head, query, there] += 0.9 / max(len(there), 1)
        return pattern

    return edited


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("bloom", ("previous", "first", "induction")),
        ("llama", ("3 back", "duplicate", "induction", "previous")),
        ("gpt2", ("self", "previous", "induction")),
        ("bert", ("previous", "next", "self", "3 back", "first", "duplicate")),
    ],
)
def test_planted_heads_are_named_so_and_nothing_else(name: str, kinds: tuple[str, ...]) -> None:
    model = am.load(tiny.model_of("bert")) if name == "bert" else hooked(name)
    with planted.with_tokens(model, 1, planting(kinds, model.causal)):
        types = am.head_types(model)
    assert [types.types_of(1, head) for head in range(len(kinds))] == [(kind,) for kind in kinds]
    assert types.generated and "24 repeated sequences" in types.lead
    if "induction" in kinds:
        example = types.example_of(1, kinds.index("induction"))
        assert example is not None and example.type == "induction"
        assert example.before[-1] == example.around[example.key_at - 1]


def test_random_weights_have_no_content_kind_and_do_not_retrieve() -> None:
    """On 12 random models of several families, only positional types are claimed, and by the position term alone."""
    for name in ("bloom", "llama", "gpt2", "gpt_neox"):
        weights = tiny.model_of("gpt2") if name == "gpt2" else models.fresh(name)
        model = am.load(weights)
        for seed in range(3):
            models.randomised(weights, seed=seed)
            claims = am.head_types(model, context=min(70, model.architecture.position_limit or 70)).to_frame()
            assert not set(claims.type) & {*CONTENT, "retrieval"} and all(claims.by_position_alone)


def test_the_demo_models_heads() -> None:
    """Heads 4 to 7 of layer 2 continue repeated text; the position term explains heads 0 and 1."""
    types = types_of_demo()
    assert {head for head in range(8) if "induction" in types.types_of(2, head)} == {4, 5, 6, 7}
    assert "previous" in types.types_of(1, 1)
    assert "4 continue repeated text" in types.lead
    assert types.plot().data


def test_repeated_sequences_are_distinct_tokens_twice() -> None:
    model = models.demo()
    found = list(repeated_sequences(model))
    assert len(found) == 24
    lengths = set()
    for ids in found:
        body = ids[0, 1:]
        half = len(body) // 2
        assert torch.equal(body[:half], body[half:]) and len(body[:half].unique()) == half
        lengths.add(half)
    assert len(lengths) > 15
    assert not torch.equal(found[3], list(repeated_sequences(model, seed=1))[3])


def test_position_alone_is_the_softmax_of_the_position_term() -> None:
    model, given = hooked("bloom"), texts(5)
    types = am.head_types(model, given)
    for kind in ("previous", "self", "2 back"):
        mass, rows = 0.0, 0
        for ids in given:
            term = am.decompose_scores(model, ids, centre="mean").terms["position"][0, 1, 2]
            length = ids.shape[1]
            for query in range(1, length):
                row = torch.softmax(term.expand(length, length)[query, : query + 1].double(), dim=-1)
                key = query - {"previous": 1, "self": 0, "2 back": 2}[kind]
                if key >= 0:
                    mass, rows = mass + float(row[key]), rows + 1
        assert float(types.position_alone[kind][1, 2]) == pytest.approx(mass / rows, abs=1e-5)
    assert bool(types.position_alone["induction"].isnan().all())


def test_bad_input() -> None:
    few = am.head_types(hooked("bloom"), texts(4))
    assert few.to_frame().empty and "needs 5 texts" in few.lead
    refuses("cross-attention", am.head_types, hooked("t5"), stack="cross")
    refuses("what the decoder reads", am.head_types, hooked("t5"), stack="decoder")
    refuses("seed", am.head_types, hooked("bloom"), seed=-1)
    types = am.head_types(hooked("bloom"), texts(5))
    refuses("type", lambda: types.scores["prev"])
    refuses(r"one\.scores", lambda: types - types)
    refuses("give images", am.head_types, hooked("vit"))


def test_much_attention_is_no_type_without_an_interval_above_the_baseline() -> None:
    """In texts of three tokens, random heads attend much to the first token and to themselves, as any head would."""
    types = am.head_types(hooked("llama"), iter([torch.tensor([[3 + number, 4, 5]]) for number in range(9)]))
    low = torch.stack([types[name].simultaneous()[0] for name in TYPES])
    much = torch.stack([(types.scores[name] >= 0.3) | (types.tops[name] >= 0.5) for name in TYPES])
    assert bool((much & (low < 0)).any())
    assert torch.equal(types.claimed, much & (low > 0))


def test_a_head_rests_where_it_finds_no_target() -> None:
    """The demo model's induction heads, against loops: mass on the first token with and without an earlier copy."""
    model = models.demo()
    given = list(repeated_sequences(model))
    types = am.head_types(model, iter(given))
    assert set(types.resting.type) == {"induction"}
    for row in types.resting.to_dict("records"):
        found: dict[bool, list[float]] = {True: [], False: []}
        for ids in given:
            pattern = model.run(ids, points=["pattern"])["pattern", row["layer"]][0, row["head"]]
            tokens = ids[0].tolist()
            for query in range(1, len(tokens)):
                there = any(is_target("induction", tokens, query, key) for key in range(query))
                found[there].append(float(pattern[query, 0]))
        means = {there: sum(masses) / len(masses) for there, masses in found.items()}
        assert row["with_target"] == pytest.approx(means[True], abs=1e-5)
        assert row["without_target"] == pytest.approx(means[False], abs=1e-5)
        assert row["difference"] == pytest.approx(means[False] - means[True], abs=1e-2)
        assert row["low"] > 0


def test_texts_of_one_token_count_for_nothing() -> None:
    """Texts of one token have only a first row: alone they give no number, and in a corpus they change none."""
    model, given = hooked("bloom"), texts(6)
    alone = am.head_types(model, torch.tensor([[5]]))
    assert all(bool(alone.scores[kind].isnan().all()) for kind in TYPES)
    assert alone.to_frame().empty and alone.plot().data and len(alone.by_head()) == 6
    expected = am.head_types(model, iter(given))
    found = am.head_types(model, iter([*given, torch.tensor([[5]])]))
    for kind in TYPES:
        for measure in ("scores", "baselines", "tops", "position_alone"):
            one, other = getattr(found, measure)[kind], getattr(expected, measure)[kind]
            assert torch.allclose(one, other, atol=1e-6, equal_nan=True)


def test_rows_that_cannot_see_the_first_token_do_not_rest_on_it() -> None:
    """With a sliding window of three tokens, only rows 1 and 2 can attend to the first token."""
    model = am.load(models.fresh("gemma2"))
    given = [torch.cat((torch.arange(3 + number, 6 + number).repeat_interleave(2),) * 2)[None] for number in range(6)]
    types = am.head_types(model, given, layers=[0])
    kind = CONTENT.index("duplicate")
    assert types.state["count_with"][kind].sum() == types.state["count_without"][kind].sum() == 6
    for name, query in (("with", 1), ("without", 2)):
        expected = sum(float(model.run(ids, points=["pattern"])["pattern", 0][0, 1, query, 0]) for ids in given)
        assert float(types.state[f"rest_{name}"][kind, 0, 1].sum()) == pytest.approx(expected, abs=1e-5)


def test_random_tokens_have_no_delimiters_and_no_padding() -> None:
    types = types_of_demo()
    for kind in ("sentence end", "comma", "special"):
        assert bool(types.scores[kind].isnan().all())
    roberta = hooked("roberta")
    assert all(roberta.config.pad_token_id not in ids for ids in repeated_sequences(roberta))


def written_by_hand(model: am.HookedModel, given: list[Tensor], layer: int, head: int) -> dict[str, dict[str, float]]:
    """What a head writes towards the answer from its targets and other keys, from transformers' own weights."""
    plain, base = model.plain, model.base
    W_U = plain.get_output_embeddings().weight.detach().double()
    norm = base.norm if hasattr(base, "norm") else base.ln_f
    centred, gamma = isinstance(norm, torch.nn.LayerNorm), norm.weight.detach().double()
    found = {kind: {"there": 0.0, "elsewhere": 0.0, "rows": 0.0} for kind in ("duplicate", "induction")}
    W_O = model.stack(None).weights(layer).W_O[head].detach().double()
    group = model.n_heads // model.run(given[0], points=["v"])["v", 0].shape[2]
    for ids in given:
        acts = model.run(ids, points=["pattern", "v", "resid_post"])
        pattern, v = acts["pattern", layer][0, head].double(), acts["v", layer][0, :, head // group].double()
        last = acts["resid_post", model.n_layers - 1][0].double()
        tokens = ids[0].tolist()
        for kind, sums in found.items():
            for query in range(1, len(tokens)):
                there = [key for key in range(query + 1) if is_target(kind, tokens, query, key)]
                if not there:
                    continue
                answer = tokens[query] if kind == "duplicate" else tokens[there[-1]]
                sums["rows"] += 1
                for key in range(query + 1):
                    update = pattern[query, key] * (v[key] @ W_O)
                    x = last[query] - last[query].mean() if centred else last[query]
                    part = update - update.mean() if centred else update
                    normed = part * gamma / (x.pow(2).mean() + epsilon_of(norm)).sqrt()
                    logits = W_U @ normed
                    sums["there" if key in there else "elsewhere"] += float(logits[answer] - logits.mean())
    return found


@pytest.mark.parametrize("name", CAUSAL)
def test_what_heads_write_is_that_of_the_raw_weights(name: str) -> None:
    model, given = hooked(name), texts(6)
    types = am.head_types(model, given)
    for layer, head in ((0, 1), (1, 2)):
        for kind, sums in written_by_hand(model, given, layer, head).items():
            for ending, measure in (("there", types.writes), ("elsewhere", types.writes_elsewhere)):
                expected = sums[ending] / sums["rows"]
                assert float(measure[kind][layer, head]) == pytest.approx(expected, rel=1e-4, abs=1e-6), (kind, ending)
    assert bool(am.head_types(model, given, layers=[0]).writes["induction"].isnan().all())


def test_copying_and_matching_are_ranks() -> None:
    """Against loops over tokens and keys; with a planted head whose OV copies and one whose QK matches prefixes."""
    model, given = hooked("llama"), texts(5, vocabulary=6)
    types = am.head_types(model, iter(given))
    W_U = model.plain.get_output_embeddings().weight.detach().double()
    gamma = model.base.norm.weight.detach().double()
    for layer, head in ((0, 1), (1, 2)):
        copied, matched = [], []
        W_O = model.stack(None).weights(layer).W_O[head].detach().double()
        for ids in given:
            acts = model.run(ids, points=["scores", "v"])
            tokens, scores = ids[0].tolist(), acts["scores", layer][0, head].double()
            v = acts["v", layer][0].double()
            v = v[:, head * v.shape[1] // model.n_heads]
            for key in range(1, len(tokens)):
                logits = W_U @ (gamma * (v[key] @ W_O))
                others = [token for token in dict.fromkeys(tokens[1:]) if token != tokens[key]]
                copied.append(sum(float(logits[tokens[key]] > logits[other]) for other in others) / len(others))
            for query in range(1, len(tokens)):
                there = [key for key in range(query + 1) if is_target("induction", tokens, query, key)]
                others = [key for key in range(query + 1) if key not in there]
                if there and others:
                    best = scores[query, there[-1]]
                    matched.append(sum(float(best > scores[query, other]) for other in others) / len(others))
        assert float(types.copying[layer, head]) == pytest.approx(sum(copied) / len(copied), abs=1e-3)
        assert float(types.matching[layer, head]) == pytest.approx(sum(matched) / len(matched), abs=1e-3)


@pytest.mark.parametrize("corpus", [True, False])
def test_the_example_is_the_row_above_uniform_attention_most(corpus: bool) -> None:
    model, given = hooked("bloom"), texts(9)
    types = am.head_types(model, iter(given) if corpus else given)
    for layer, head in ((0, 0), (1, 2)):
        example = types.example_of(layer, head)
        assert example is not None
        best: tuple[float, int, int, int, float] = (-1.0, -1, -1, -1, 0.0)
        for document, ids in enumerate(given):
            pattern, tokens = model.run(ids, points=["pattern"])["pattern", layer][0, head].double(), ids[0].tolist()
            for query in range(1, len(tokens)):
                there = [key for key in range(query + 1) if is_target(example.type, tokens, query, key)]
                if there and (0 not in there or example.type == "first"):
                    above = float(pattern[query, there].sum()) - len(there) / (query + 1)
                    key = max(there, key=lambda key: float(pattern[query, key]))
                    best = max(best, (above, document, query, key, float(pattern[query, key])))
        assert example.above == pytest.approx(best[0], abs=1e-5)
        assert (example.document, example.query, example.key) == best[1:4]
        assert example.weight == pytest.approx(best[4], abs=1e-5)
        tokens = model.encode(given[best[1]]).tokens[0]
        assert example.before == tokens[max(0, best[2] - 3) : best[2] + 1]
        assert example.around == tokens[max(0, best[3] - 2) : best[3] + 3]
        assert example.around[example.key_at] == tokens[best[3]]
    shards = [am.head_types(model, iter(given), shard=(part, 2)) for part in range(2)]
    assert shards[0].merged(shards[1]).example_of(0, 0) == am.head_types(model, iter(given)).example_of(0, 0)
    # Of equal examples, that of the earlier text is kept.
    parts = [am.head_types(model, iter(given[:1] * 6), shard=(part, 2)) for part in (1, 0)]
    for one, other in (parts, parts[::-1]):
        example = one.merged(other).example_of(0, 0)
        assert example is not None and example.document == 0


def test_an_atlas_row_says_what_the_result_says() -> None:
    types = types_of_demo()
    (atlas,) = [each for section in types._sections() for name, each in section.figures.items() if name == "atlas"]
    assert isinstance(atlas, View)
    row = next(each for each in atlas.data["rows"] if each["name"] == "L2H6")
    assert row["types"] == ["induction"]
    assert row["cells"][2] == f"{float(types.scores['induction'][2, 6]):.3f}"
    low, high = (float(end[2, 6]) for end in types["induction"].simultaneous())
    assert row["cells"][4] == f"{low:+.2f} to {high:+.2f}"
    claims = types.to_frame()
    assert (claims.score_low < claims.score).all() and (claims.score < claims.score_high + 1e-9).all()
    assert row["cells"][5] == f"{float(types.writes['induction'][2, 6]):+.1f}"
    example = types.example_of(2, 6)
    assert example is not None and row["example"]["distance"] == example.query - example.key
    assert top_scores(types, 2, 6).startswith("induction 0.96")


@pytest.mark.parametrize("name", ["demo", "bloom", "gpt2"])
def test_a_head_without_a_claim_says_what_it_lacks(name: str) -> None:
    hooked = models.demo() if name == "demo" else models.hooked(name)
    texts = None if name == "demo" else iter([models.token_ids(name, 1, 12, seed=seed) for seed in range(8)])
    types = am.head_types(hooked, texts)
    low, unclaimed = {kind: types[kind].simultaneous()[0] for kind in types.quantities}, 0
    for layer, head in itertools.product(range(types.n_layers), range(hooked.n_heads)):
        if types.types_of(layer, head):
            continue
        unclaimed += 1
        best = max(low, key=lambda kind: types.scores[kind][layer, head].nan_to_num(-1))
        sentence, score = why_unclaimed(types, layer, head), float(types.scores[best][layer, head])
        assert sentence.startswith(f"No type is claimed: {best} ({score:.2f}) is ")
        assert ("not clearly above" in sentence) == bool(low[best][layer, head] <= 0)
        assert ("but below 0.3" in sentence) == bool(low[best][layer, head] > 0)
        assert low[best][layer, head] <= 0 or (score < 0.3 and types.tops[best][layer, head] < 0.5)
    assert unclaimed
    few = am.head_types(models.demo(), "Anna sang of shells.")
    assert why_unclaimed(few, 0, 0) == "No type is claimed: a claim needs 5 texts with targets."


def test_delimiters_of_one_text_are_described() -> None:
    text = "Anna sang of shells. Tom lost it, and left. Ben sang."
    types = am.head_types(models.demo(), text)
    assert types.to_frame().empty and "supports no claim" in types.on_text()
    layer, head = divmod(int(types.excess["comma"].argmax()), 8)
    assert f"L{layer}H{head} gives commas {percent(float(types.scores['comma'][layer, head]), 0)}" in types.on_text()
    assert types_of_demo().on_text() == ""
    assert am.head_types(models.demo(), [text, text]).on_text() == ""
