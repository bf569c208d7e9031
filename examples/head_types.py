"""Compares head types with two other rules, and the importance of heads chosen by attention or by writing.

    python examples/head_types.py                      # the demo model
    python examples/head_types.py --model model.gguf   # any other
    python examples/head_types.py --context 256        # retrieval from texts of 256 tokens instead

Prints tables in Markdown; docs/head_types.md shows them.
"""

import argparse
import random
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformer_lens import head_detector

import attnmech as am
from attnmech.runs.retrieval import repeated_sequences

CLARK = 0.5
"""In Clark et al. 2019, a head attends to a token type if it gives the type more than half of its attention."""

DETECTED = {
    "previous": head_detector.get_previous_token_head_detection_pattern,
    "duplicate": head_detector.get_duplicate_token_head_detection_pattern,
    "induction": head_detector.get_induction_head_detection_pattern,
}


def detected(model: am.HookedModel, texts: list[Tensor]) -> dict[str, Tensor]:
    """TransformerLens's score of every head, `[layer head]`, averaged over the texts as `detect_head` does."""
    scores = {name: torch.zeros(model.n_layers, model.n_heads) for name in DETECTED}
    for ids in texts:
        acts = model.run(ids, points=["pattern"])
        for name, pattern_of in DETECTED.items():
            wanted = pattern_of(ids)
            for layer in range(model.n_layers):
                pattern = acts["pattern", layer][0].float()
                scores[name][layer] += torch.tensor(
                    [
                        head_detector.compute_head_attention_similarity_score(
                            of_head, wanted, exclude_bos=False, exclude_current_token=False, error_measure="mul"
                        )
                        for of_head in pattern
                    ]
                )
    return {name: score / len(texts) for name, score in scores.items()}


def rules(model: am.HookedModel, texts: list[Tensor]) -> None:
    """Prints the number of heads that each rule names, and the strongest of them."""
    types, scores = am.head_types(model, iter(texts)), detected(model, texts)
    claims = types.to_frame()
    print("| type | attnmech claims | of these by position alone | Clark: mass > 0.5 | detect_head > 0.3 | strongest |")
    print("|---|---|---|---|---|---|")
    for name, score in scores.items():
        here = claims[claims.type == name]
        by_position = int(here.by_position_alone.sum())
        layer, head = divmod(int(types.scores[name].nan_to_num(-1).argmax()), model.n_heads)
        print(
            f"| {name} | {len(here)} | {by_position} | {int((types.scores[name] > CLARK).sum())} | "
            f"{int((score > 0.3).sum())} | L{layer}H{head}: {types.scores[name][layer, head]:.2f} "
            f"(detect_head {score[layer, head]:.2f}) |"
        )


def without(model: am.HookedModel, heads: list[tuple[int, int]]) -> AbstractContextManager[object]:
    """Sets some heads to zero."""

    def in_layer(layer: int):
        chosen = [head for at, head in heads if at == layer]

        def zeroed(z: Tensor) -> Tensor:
            z = z.clone()
            z[:, :, chosen] = 0
            return z

        return zeroed

    hooks = {("z", layer): in_layer(layer) for layer in {layer for layer, _ in heads}}
    return model.hooks(hooks) if hooks else nullcontext()


def loss_of_second_copies(model: am.HookedModel, texts: list[Tensor], heads: list[tuple[int, int]]) -> float:
    """The loss on the second copies with some heads set to zero, in nats per token."""
    losses = []
    with without(model, heads):
        for ids in texts:
            logits = model.run(ids)["logits"][0].float().log_softmax(dim=-1)
            half = ids.shape[1] - ids.shape[1] // 2
            losses.append(-logits[half - 1 : -1].gather(1, ids[0, half:, None])[:, 0])
    return float(torch.cat(losses).mean())


def looks_or_writes(model: am.HookedModel, texts: list[Tensor], others: list[Tensor]) -> None:
    """Chooses heads on some sequences by attention, by writing and at random, and ablates them on others."""
    types = am.head_types(model, iter(texts))
    looks, writes = types.scores["induction"].nan_to_num(-1), types.writes["induction"].nan_to_num(-1)
    named = set(map(tuple, types.to_frame().query("type == 'induction'")[["layer", "head"]].to_numpy().tolist()))

    def ranked(score: Tensor) -> list[tuple[int, int]]:
        return [divmod(place, model.n_heads) for place in score.flatten().argsort(descending=True).tolist()]

    unnamed = [head for head in ranked(writes) if head not in named]
    rng = random.Random(0)
    everything = ranked(looks)
    clean = loss_of_second_copies(model, others, [])
    print(f"\nLoss on second copies {clean:.2f} nats; by how much it rises without k heads:\n")
    print("| k | by attention | by writing | by writing, not claimed by attention | at random, mean of 8 (largest) |")
    print("|---|---|---|---|---|")
    for count in (1, 2, 4, 8):
        at_random = [
            loss_of_second_copies(model, others, rng.sample([head for head in everything if head not in named], count))
            - clean
            for _ in range(8)
        ]
        rises = [
            loss_of_second_copies(model, others, chosen[:count]) - clean
            for chosen in (ranked(looks), ranked(writes), unnamed)
        ]
        print(
            f"| {count} | {' | '.join(f'{rise:+.2f}' for rise in rises)} | "
            f"{sum(at_random) / len(at_random):+.2f} ({max(at_random):+.2f}) |"
        )


def retrieval(model: am.HookedModel, context: int, texts: int, sets: int) -> None:
    """Prints the heads that retrieve, and whether other needles are retrieved worse without them than without others.

    Heads come from the texts of seed 0, and claims are tested on some of those of seed 1.
    """
    claims = am.head_types(model, context=context).to_frame().query("type == 'retrieval'")
    claims = claims.sort_values("score", ascending=False)
    chosen = list(zip(claims.layer.tolist(), claims["head"].tolist(), strict=True))
    print(f"{len(chosen)} of {model.n_layers * model.n_heads} heads retrieve, most first:")
    print(", ".join(f"L{layer}H{head} {score:.2f}" for (layer, head), score in zip(chosen, claims.score, strict=True)))
    task, finding = am.Task.of_retrieval(model, context), am.Task.of_retrieval(model, context, seed=0)
    task = task.only(task.groups[:: len(task.groups) // texts])
    print("\n| k | ln p of a needle | change without the k heads | other sets (as harmful) | p | p_each | verdict |")
    print("|---|---|---|---|---|---|---|")
    for count in (1, 2, 4):
        claim = am.confirm_heads(model, chosen[:count], task, discovery=finding, sets=sets)
        low, high = map(float, claim.interval())
        others, harmful = len(claim.sets) - 1, int(claim.as_strong.sum()) - 1
        print(
            f"| {count} | {float(claim.before.mean()):.1f} | {claim.effect:.1f} ({low:.1f} to {high:.1f}) | "
            f"{others} ({harmful}) | {claim.p:.3f} | {claim.p_each:.3f} | {claim.verdict} |",
            flush=True,
        )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what am.load takes; the demo model if left out")
    parser.add_argument("--context", type=int, default=0, help="the length of texts from which heads retrieve")
    parser.add_argument("--texts", type=int, default=24, help="of these, how many confirm the heads that retrieve")
    parser.add_argument("--sets", type=int, default=200, help="how many sets of heads they are compared with")
    options = parser.parse_args()
    model = am.load() if options.model is None else am.load(options.model)
    if options.context:
        retrieval(model, options.context, options.texts, options.sets)
        return
    texts = list(repeated_sequences(model))
    rules(model, texts)
    looks_or_writes(model, texts, list(repeated_sequences(model, seed=1))[:8])


if __name__ == "__main__":
    main()
