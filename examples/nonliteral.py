"""Measures whether a model retrieves an answer that does not repeat the context's words.

    python examples/nonliteral.py --model model.gguf

The context says where some people live ("Anna lives in Paris."), and the prompt asks for the city (literal) or the
country (not literal) of one of them. Prints a table in Markdown; docs/head_types.md shows it.
"""

import argparse
import random

import attnmech as am

COUNTRIES = {
    "Paris": "France", "Berlin": "Germany", "Rome": "Italy", "Madrid": "Spain", "Tokyo": "Japan", "Beijing": "China",
    "Moscow": "Russia", "Cairo": "Egypt", "London": "England", "Athens": "Greece", "Dublin": "Ireland",
    "Toronto": "Canada",
}  # fmt: skip
CITIES = {city: city for city in COUNTRIES}
NAMES = ["Anna", "Tom", "Mia", "Leo", "Max", "Ben", "Eva", "Paul", "Mary", "John", "Peter", "Lucy"]
COUNT = 24
"""The number of prompts."""


def question(rng: random.Random, people: int, kind: str, answers: dict[str, str]) -> tuple[str, list[str]]:
    """A prompt, and its possible answers, the right one first."""
    names, cities = rng.sample(NAMES, people), rng.sample(sorted(COUNTRIES), people)
    facts = " ".join(f"{name} lives in {city}." for name, city in zip(names, cities, strict=True))
    asked = rng.randrange(people)
    cities.insert(0, cities.pop(asked))
    return f"{facts} The {kind} where {names[asked]} lives is", [answers[city] for city in cities]


def accuracies(
    model: am.HookedModel, people: int, solved: int, kind: str, answers: dict[str, str]
) -> tuple[float, float]:
    """The share of prompts whose answer is the most probable token, and the most probable of the possible answers.

    `solved` other questions with their answers stand before each prompt. Answers are compared by their first tokens.
    """
    rng, first, among = random.Random(1), 0, 0
    for _ in range(COUNT):
        examples = [question(rng, people, kind, answers) for _ in range(solved)]
        prompt, possible = question(rng, people, kind, answers)
        before = "".join(f"{text} {right[0]}.\n" for text, right in examples)
        logits = model.run(before + prompt, points=["logits"])["logits"][0, -1]
        ids = [model.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in possible]
        first += int(logits.argmax()) == ids[0]
        among += int(logits[ids].argmax()) == 0
    return first / COUNT, among / COUNT


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="what am.load takes; the demo model if left out")
    options = parser.parse_args()
    model = am.load() if options.model is None else am.load(options.model)
    print("| people | solved examples | city: first choice, among cities | country: first choice, among countries |")
    print("|---|---|---|---|")
    for people, solved in ((2, 0), (4, 0), (4, 2)):
        kinds = (("city", CITIES), ("country", COUNTRIES))
        cells = [accuracies(model, people, solved, kind, answers) for kind, answers in kinds]
        print(f"| {people} | {solved} | {' | '.join(f'{one:.2f}, {other:.2f}' for one, other in cells)} |", flush=True)


if __name__ == "__main__":
    main()
