"""Batches from texts, ids and mappings; and a one-line error for every invalid input."""

from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from comparing import message_of
from torch import Tensor

import attnmech as am

TEXT = "the keys to the cabinet are here"


def speaking(name: str = "gpt2", bos: bool | None = None, **options: bool) -> am.HookedModel:
    return am.load(models.fresh(name), tokenizer=models.tokenizer(**options), bos=bos)


@pytest.fixture(scope="module")
def words() -> am.HookedModel:
    return speaking()


# -- what can be given ---------------------------------------------------------------------------------------


def test_ids_in_every_form_are_the_same(words: am.HookedModel) -> None:
    ids = torch.tensor([3, 4, 5, 3, 6, 7, 8])
    logits = words.run(TEXT).logits
    forms: list[Any] = [ids, ids[None], ids.numpy(), ids.int(), ids.to(torch.uint8),
                        {"input_ids": ids}, {"input_ids": ids[None]},
                        {"input_ids": ids[None], "attention_mask": torch.ones(1, 7)},
                        {"input_ids": ids, "attention_mask": torch.ones(7, dtype=torch.bool)}]  # fmt: skip
    for form in forms:
        assert torch.equal(words.run(form).logits, logits)


@pytest.mark.parametrize("name", ["bloom", "gpt2", "llama", "bert"])
def test_a_batch_of_texts_is_each_text_alone(name: str) -> None:
    hooked = speaking(name)
    texts = [TEXT, "the dog", "a dog and the keys"]
    batch = hooked.encode(texts)
    assert batch.lengths.tolist() == [7, 2, 5]
    assert batch.padded
    assert batch.tokens[1] == ("the", "dog", *["[PAD]"] * 5)
    acts = hooked.run(texts, points=["pattern", "resid_post", "logits"])
    for row, text in enumerate(texts):
        alone = hooked.run(text, points=["pattern", "resid_post", "logits"])
        n = int(batch.lengths[row])
        torch.testing.assert_close(acts.logits[row, :n], alone.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(acts["pattern"][:, row, :, :n, :n], alone["pattern"][:, 0], rtol=1e-4, atol=1e-5)
        assert not bool(acts["pattern"][:, row, :, :n, n:].any())
        torch.testing.assert_close(acts["resid_post"][:, row, :n], alone["resid_post"][:, 0], rtol=1e-4, atol=1e-4)


FORMS: list[Callable[[Tensor], Any]] = [lambda ids: ids, lambda ids: ids.int().numpy(), lambda ids: ids[None]]


@pytest.mark.parametrize(("name", "form"), [*zip(("gpt2", "bert", "t5"), FORMS, strict=True)])
def test_a_list_of_token_ids_is_each_text_alone(name: str, form: Callable[[Tensor], Any]) -> None:
    hooked, rows = models.hooked(name), [torch.tensor(ids) for ids in ([5, 7, 9, 11], [3, 4], [8])]
    batch = hooked.encode([form(row) for row in rows])
    assert batch.lengths.tolist() == [4, 2, 1]
    assert [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)] == [r.tolist() for r in rows]
    assert batch.mask.tolist()[1] == [True, True, False, False]
    logits = hooked.run([form(row) for row in rows]).logits
    for row, ids in enumerate(rows):
        alone = hooked.run(ids).logits[0]
        torch.testing.assert_close(logits[row, : len(alone)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_lists_of_token_ids_that_cannot_be() -> None:
    hooked, ids = speaking(), torch.tensor([3, 4, 5])
    bad: list[tuple[Any, str]] = [
        ([TEXT, ids], "got a list of Tensor and str"),
        ([ids, [3, 4]], "got a list of Tensor and list"),
        ([ids, {"input_ids": ids}], "got a list of Tensor and dict"),
        ([ids, ids.float()], "token ids must be whole numbers; entry 1 of the list is a tensor of torch.float32"),
        ([ids, ids.double().numpy()], "entry 1 of the list is a tensor of torch.float64"),
        ([ids, ids > 3], "entry 1 of the list is a tensor of torch.bool"),
        ([ids, ids[:0]], "at least one token; entry 1 has (0,)"),
        ([ids, torch.tensor(3)], "entry 1 has ()"),
        ([ids, torch.tensor([3, 99])], "token ids must be from 0 to 52"),
    ]
    for given, said in bad:
        assert said in message_of(lambda given=given: hooked.run(given)), given
    for mixed in ([TEXT, ids], [ids, [3, 4]]):
        assert "got a list of" in message_of(lambda mixed=mixed: am.attention_focus(hooked, iter([mixed])))


def test_token_types_go_through_to_bert() -> None:
    ids, types = models.token_ids("bert"), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3)
    logits = models.hooked("bert").run({"input_ids": ids, "token_type_ids": types}).logits
    with torch.no_grad():
        theirs = models.plain("bert")(ids, token_type_ids=types).logits
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits, models.hooked("bert").run(ids).logits)


# -- BOS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bos", "starts"),
    [
        ({"adds_bos": True}, None, True),
        ({"adds_bos": True}, True, True),
        ({"adds_bos": True}, False, False),
        ({"has_bos": True}, None, False),
        ({"has_bos": True}, True, True),
        ({"has_bos": True}, False, False),
    ],
)
def test_bos_as_the_tokenizer_does_or_as_asked(options: dict[str, bool], bos: bool | None, starts: bool) -> None:
    hooked = speaking(**options)
    at_load = speaking(**options, bos=bos)
    for batch in (hooked.encode(TEXT, bos=bos), at_load.encode(TEXT), at_load.run(TEXT).batch):
        assert batch.tokens[0][0] == ("[BOS]" if starts else "the")
        assert batch.tokens[0].count("[BOS]") == int(starts)
        assert batch.bos is starts
        assert len(batch.tokens[0]) == 7 + starts
    split = am.decompose_scores(hooked, TEXT, bos=bos)
    assert split.provenance.options["bos"] is starts
    assert split.tokens[0][0] == ("[BOS]" if starts else "the")
    if bos is not None:
        assert at_load.encode(TEXT, bos=not bos).bos is (not starts)


@pytest.mark.parametrize(
    ("template", "typed"),
    [
        ("[BOS] $A", "[BOS]"),
        ("[BOS] $A [EOS]", "[BOS]"),
        ("[BOS] $A [EOS]", "[BOS] the keys [EOS]"),
        ("$A [EOS]", "the keys [EOS]"),
        ("[BOS] [EOS] $A", "[BOS] [EOS] the keys"),
        ("[BOS] $A", "[BOS] the keys [EOS] [BOS] the keys"),
        ("[BOS] $A", "[BOS] [BOS] the keys"),
    ],
)
def test_special_tokens_that_a_text_has_already_are_not_added_again(template: str, typed: str) -> None:
    tokenizer = models.tokenizer(has_bos=True)
    tokenizer.add_special_tokens({"eos_token": "[EOS]"})
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[BOS]", "[EOS]")]
    tokenizer.backend_tokenizer.post_processor = models.processors.TemplateProcessing(
        single=template, special_tokens=special
    )
    hooked = am.load(models.fresh("gpt2"), tokenizer=tokenizer)
    before, after = (part.split() for part in template.split("$A"))
    typed = f"{typed} the dog" if typed == "[BOS]" else typed
    words = typed.split()
    wanted = [*(() if words[0] in before else before), *words, *(() if words[-1] in after else after)]
    (tokens,) = hooked.encode(typed).tokens
    assert list(tokens) == wanted
    (without,) = hooked.encode(typed, bos=False).tokens
    assert without[0] != "[BOS]" and list(without) == wanted[len(wanted) - len(without) :]


def test_provenance_says_whether_texts_begin_with_bos() -> None:
    hooked = speaking(has_bos=True)
    texts = [f"[BOS] the keys to {word}" for word in ("the", "cabinet", "a", "dog")]
    calls: dict[str, Callable[[Any], Any]] = {
        "together": lambda inputs: am.attention_focus(hooked, inputs),
        "corpus": lambda inputs: am.attention_focus(hooked, iter(inputs)),
        "sweep": lambda inputs: am.ablate_heads(hooked, inputs, [(0, 1)]),
        "importance": lambda inputs: am.head_importance(hooked, inputs),
        "flow": lambda inputs: am.attention_flow(hooked, inputs[0], method="gradient"),
        "difference": lambda inputs: am.mean_difference(hooked, inputs, [f"{text} keys" for text in inputs]),
        "relations": lambda inputs: am.relations(hooked, [(inputs[0], 3, 1, "r")]),
        "attribution": lambda inputs: am.attribute(
            hooked, inputs, inputs[::-1], metric="logit_difference", answers=["a"] * 4, against=["dog"] * 4
        ),
    }
    for name, call in calls.items():
        options = [call(inputs).provenance.options for inputs in (texts, [text[6:] for text in texts])]
        assert [option["bos"] for option in options] == [True, False], name
    assert am.attention_focus(hooked, iter([*texts, "the keys"])).provenance.options["bos"] is False


def test_bos_of_ids_is_what_stands_there() -> None:
    hooked = speaking(has_bos=True)
    assert hooked.encode(torch.tensor([[2, 3, 4]])).bos is True
    assert hooked.encode(torch.tensor([[3, 3, 4]])).bos is False
    mixed = {"input_ids": torch.tensor([[0, 2, 4], [2, 3, 4]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    assert hooked.encode(mixed).bos is True
    assert "no token" in message_of(lambda: hooked.run("[BOS]", bos=False))
    without = speaking()
    assert without.encode(TEXT, bos=False).ids.shape == (1, 7)
    said = message_of(lambda: without.run(TEXT, bos=True))
    assert said.startswith("bos=True needs a tokenizer with a BOS or CLS token")


# -- refused inputs ------------------------------------------------------------------------------------------


IDS = torch.tensor([[5, 7, 9]])
RANGE = "token ids must be from 0 to 52 (the model's vocabulary); got "
WHOLE = "token ids must be whole numbers; got a tensor of"
SHAPE = "must have the shape [batch position]"
REFUSED: list[tuple[str, Any, str]] = [
    ("speaking", "", "the text is empty; give at least one word."),
    ("speaking", " \n\t", "the text is empty; give at least one word."),
    ("speaking", [TEXT, ""], "text 1 is empty; give at least one word."),
    ("speaking", [], "the list of texts is empty; give at least one text."),
    ("gpt2", "the keys", "loaded without a tokenizer, so it takes token ids"),
    ("gpt2", torch.tensor([[5, 53]]), f"{RANGE}53."),
    ("gpt2", torch.tensor([[5, -1]]), f"{RANGE}-1."),
    ("gpt2", torch.tensor([[1.0, 2.0]]), WHOLE),
    ("gpt2", torch.tensor([[True]]), WHOLE),
    *(("gpt2", torch.zeros(shape).long(), SHAPE) for shape in ((0,), (2, 0), (0, 3), (1, 2, 3), ())),
    ("gpt2", {}, 'a mapping of model inputs must hold "input_ids"'),
    *(
        ("gpt2", {"input_ids": IDS, name: value}, said)
        for name, value, said in (
            ("attention_mask", torch.ones(1, 2), "attention_mask must have the shape of the token ids"),
            ("attention_mask", torch.ones(1, 1, 3, 3), "attention_mask must have the shape"),
            ("attention_mask", torch.zeros(1, 3), "attention_mask hides a whole sequence"),
            ("attention_mask", torch.full((1, 3), torch.nan), "attention_mask"),
            ("attention_mask", torch.tensor([[0.0, 0.0, -1e9]]), "attention_mask"),
            ("labels", IDS, "got labels as well"),
            ("past_key_values", IDS, "got past_key_values as well"),
            ("position_ids", torch.tensor([[0, 1, 99]]), "position_ids"),
            ("position_ids", torch.tensor([[0, 1]]), "position_ids"),
            ("position_ids", torch.tensor([[0, 1, -1]]), "position_ids"),
        )
    ),
    ("gpt2", {"input_ids": IDS.float()}, "must be whole numbers"),
    ("bloom", {"input_ids": IDS, "position_ids": torch.arange(3)[None]}, "position_ids"),
    ("llama", {"input_ids": IDS, "token_typ_ids": torch.zeros_like(IDS)}, "got token_typ_ids as well"),
    *(
        ("bert", {"input_ids": IDS, "token_type_ids": torch.tensor([types])}, "token_type_ids")
        for types in ([0, 1, 2], [0, 1], [0.0, 1.0, 1.0])
    ),
]


def test_what_cannot_be_read_is_refused(words: am.HookedModel) -> None:
    for name, given, message in REFUSED:
        model = words if name == "speaking" else models.hooked(name)
        assert message in message_of(lambda model=model, given=given: model.run(given)), given


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 19), ("bert", 23)])
def test_a_text_longer_than_the_models_positions(name: str, limit: int) -> None:
    hooked = models.hooked(name)
    assert hooked.run(torch.full((1, limit), 7)).logits.shape[1] == limit
    said = message_of(lambda: hooked.run(torch.full((2, limit + 1), 7)))
    assert said.startswith(f"this model has {limit} positions; the text has {limit + 1} tokens. Shorten")
    assert "positions" in message_of(lambda: am.decompose_scores(hooked, torch.full((1, 10**5), 7)))
    assert f"this model has {limit} positions" in message_of(lambda: speaking(name).run("the " * (limit + 1)))


def test_a_text_of_ten_megabytes_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = speaking("bloom")
    monkeypatch.setattr(type(hooked.tokenizer), "__call__", lambda *_, **__: pytest.fail("tokenized"))
    said = message_of(lambda: hooked.run(["a dog", "the keys . " * 10**6]))
    assert said == ("text 1 has 11,000,000 characters; at most 4,194,304 are tokenized. Split it.")


@pytest.mark.usefixtures("unchecked")
def test_things_that_are_no_inputs() -> None:
    hooked = speaking()
    bad: list[Any] = [None, 5, [5, 7], [TEXT, 7], object(), b"bytes", 1.5, {"a": 1}.keys()]
    for thing in bad:
        message_of(lambda thing=thing: hooked.run(thing))
    lists: Any = {"input_ids": [[5, 7, 9]], "attention_mask": [[1, 1, 0]]}
    assert hooked.encode(lists).lengths.tolist() == [2]
    ragged: Any = {"input_ids": [[5, 7, 9], [5]]}
    message_of(lambda: hooked.encode(ragged))


# -- what the model would take anyway ------------------------------------------------------------------------

NAMES = ["gpt2", "llama", "bert", "roberta", "deberta_v2", "opt", "gptj", "longformer"]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_the_defaults_are_no_part_of_a_text(name: str) -> None:
    model, ids = models.hooked(name), models.token_ids(name, batch=3, length=7)
    taken = {each for each in model.encoder.further if each in ("token_type_ids", "position_ids")}
    first = getattr(model.config, "pad_token_id", None) + 1 if name in ("roberta", "longformer") else 0
    defaults = {"token_type_ids": torch.zeros_like(ids), "position_ids": first + torch.arange(7)[None]}
    given = {each: defaults[each] for each in taken}
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    plain = model.encode({"input_ids": ids, "attention_mask": mask})
    same = model.encode({"input_ids": ids, "attention_mask": mask, **given})
    assert same.extra.keys() == plain.extra.keys() and torch.equal(same.digests, plain.digests)
    with torch.no_grad():
        theirs = models.plain(name)(ids, attention_mask=mask, **given)
        bare = models.plain(name)(ids, attention_mask=mask)
    assert torch.equal(theirs[0][mask.bool()], bare[0][mask.bool()])
    changed = {
        "token_type_ids": torch.ones_like(ids) if getattr(model.config, "type_vocab_size", 0) else None,
        "position_ids": first + torch.arange(7).flip(0)[None],
    } if taken else {}  # fmt: skip
    for each in taken:
        if changed[each] is not None:
            assert each in model.encode({"input_ids": ids, each: changed[each]}).extra


# -- chats ---------------------------------------------------------------------------------------------------

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} . {% endfor %}"
CHAT = [{"role": "dog", "content": "the keys"}, {"role": "here", "content": "to the cabinet"}]
"""A chat template whose roles are words of the tokenizer."""
OTHER_CHAT = [{"role": "dog", "content": "a"}]
SPOKEN = [2, 12, 3, 4, 13, 8, 5, 3, 6, 13]


def chatting(**options: bool) -> am.HookedModel:
    hooked = speaking(has_bos=True, **options)
    hooked.tokenizer.chat_template = TEMPLATE
    return hooked


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_goes_through_the_chat_template(adds_bos: bool) -> None:
    """BOS occurs once, even if the tokenizer puts another one before every text."""
    hooked = chatting(adds_bos=adds_bos)
    batch = hooked.encode(CHAT)
    assert batch.ids.tolist() == [SPOKEN]
    theirs = hooked.tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=False, return_dict=True)
    assert theirs["input_ids"] == SPOKEN
    words = ("[BOS]", "dog", "the", "keys", ".", "here", "to", "the", "cabinet", ".")
    assert batch.tokens == (words,) and batch.bos is True
    assert hooked.encode(CHAT, bos=True).ids.tolist() == [SPOKEN]
    assert hooked.encode(CHAT, bos=False).ids.tolist() == [SPOKEN[1:]]
    rendered = hooked.tokenizer.apply_chat_template(CHAT, tokenize=False)
    for bos in (None, True, False):
        assert torch.equal(hooked.encode(rendered, bos=bos).ids, hooked.encode(CHAT, bos=bos).ids)
    several = hooked.encode([CHAT, OTHER_CHAT])
    assert several.ids[0].tolist() == SPOKEN and several.lengths.tolist() == [10, 4]
    assert several.ids[1, :4].tolist() == [2, 12, 11, 13]
    assert torch.equal(hooked.run(tuple(CHAT)).logits, hooked.run(torch.tensor(SPOKEN)).logits)


CALLS: dict[str, Callable[[am.HookedModel, Any], Any]] = {
    "focus": am.attention_focus,
    "corpus of batches": lambda model, inputs: am.attention_focus(model, iter([inputs])),
    "updates": am.residual_updates,
    "scores": am.decompose_scores,
    "sources": lambda model, inputs: am.decompose_by_source(model, inputs, heads=[(1, 2)]),
    "ablation": lambda model, inputs: am.ablate_heads(model, inputs, [(0, 1), (2, 3)], "mean", reference=inputs),
    "resampling": lambda model, inputs: am.ablate_heads(model, inputs, [(0, 1)], "resample"),
    "importance": am.head_importance,
    "pairs": lambda model, inputs: am.ablate_pairs(model, inputs, [((0, 1), (2, 3))]),
    "pruning": lambda model, inputs: am.prune_heads(model, inputs, layers=[0], steps=1, random=0),
    "null": lambda model, inputs: am.null_attention(model, inputs, heads=[(0, 1)], reference=inputs),
}


def test_whatever_takes_texts_takes_chats_lists_of_ids_and_a_mask() -> None:
    hooked, ids = chatting(), [torch.tensor(SPOKEN), torch.tensor([2, 12, 11, 13])]
    padded = {"input_ids": torch.zeros(2, 10).long(), "attention_mask": torch.zeros(2, 10).long()}
    for row, each in enumerate(ids):
        padded["input_ids"][row, : len(each)], padded["attention_mask"][row, : len(each)] = each, 1
    for name, call in CALLS.items():
        found, wanted, masked = (call(hooked, given).to_frame() for given in ([CHAT, OTHER_CHAT], ids, padded))
        assert len(found) and list(found.columns) == list(wanted.columns) == list(masked.columns), name
        numbers = found.select_dtypes("number")
        np.testing.assert_allclose(numbers, wanted[numbers.columns], rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(numbers, masked[numbers.columns], rtol=1e-3, atol=1e-4, err_msg=name)
    assert torch.equal(hooked.loss(CHAT), hooked.loss(ids[0]))
    assert hooked.generate(CHAT, 2).ids[0, :10].tolist() == SPOKEN
    assert "cabinet" in am.report(hooked, CHAT).to_html()


def test_chats_that_cannot_be() -> None:
    assert "has no chat template, so it takes texts" in message_of(lambda: speaking().encode(CHAT))
    assert "loaded without a tokenizer" in message_of(lambda: models.hooked("gpt2").encode(CHAT))
    hooked = chatting()
    missing: Any = [{"role": "dog", "content": "a"}, {"role": "dog"}]
    assert message_of(lambda: hooked.encode(missing)) == (
        "a message must have \"role\" and \"content\"; got {'role': 'dog'}."
    )
    hooked.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    said = message_of(lambda: hooked.encode([CHAT]))
    assert said == "the tokenizer's chat template does not take these messages: roles must alternate."
