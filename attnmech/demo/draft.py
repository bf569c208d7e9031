"""A text of the demo language while it is being written, and the relations noted on the way."""

from dataclasses import dataclass
from typing import Literal

from attnmech.demo import words

Kind = Literal[
    "subject-verb",
    "verb-object",
    "modifier",
    "pronoun-antecedent",
    "recipient",
    "same-name",
    "same-theme",
    "bracket",
    "comma",
    "sentence-final",
    "repeat",
]


@dataclass(frozen=True)
class Relation:
    """Two words of a document that belong together; `key` always stands before `query`.

    What query and key are, by relation:
    subject-verb: the verb, the head noun of its subject;
    verb-object: the object, its verb;
    modifier: the noun, its adjective;
    pronoun-antecedent: "she", "his", ..., the name meant;
    recipient: the "to" before the recipient's name, that name's earlier mention;
    same-name: a name, its latest earlier mention;
    same-theme: a thing or place, the latest earlier one of the same theme;
    bracket: the closing bracket, the opening one;
    comma: the full stop, the last comma of its sentence;
    sentence-final: the full stop, the one before it;
    repeat: a word of a repeated span, the same word in the first copy.
    """

    query: int
    """Index of the later word."""
    key: int
    """Index of the earlier word."""
    relation: Kind


@dataclass(frozen=True)
class Document:
    """A text with its structure: `"".join(words)` is the text, each word with the space that leads it."""

    words: tuple[str, ...]
    relations: tuple[Relation, ...]

    @property
    def text(self) -> str:
        """The words as one string."""
        return "".join(self.words)


class Draft:
    """A document being written: takes words in order, sets spaces and capitals, and notes relations.

    >>> draft = Draft()
    >>> subject = draft.add("the", "boats")
    >>> draft.relate("subject-verb", query=draft.add("(", "a", "gift", ")", "are"), key=subject)
    >>> draft.add("new", ".")
    8
    >>> draft.finish().text, draft.finish().relations
    ('The boats (a gift) are new.', (Relation(query=6, key=1, relation='subject-verb'),))
    """

    def __init__(self) -> None:
        self._words: list[str] = []
        self._relations: list[Relation] = []
        self._last_seen: dict[str, int] = {}

    def add(self, *added: str) -> int:
        """Write words one after another; returns the index of the last."""
        for word in added:
            previous = self._words[-1] if self._words else ""
            begins = not previous or previous == words.STOP
            form = word[0].upper() + word[1:] if begins else word
            opening = not previous or previous.strip() in words.BRACKETS
            closing = word in words.PUNCTUATION and word not in words.BRACKETS
            self._words.append(form if opening or closing else " " + form)
        return len(self._words) - 1

    def relate(self, relation: Kind, *, query: int, key: int) -> None:
        """Note that the word at `query` depends on the word at `key`."""
        self._relations.append(Relation(query, key, relation))

    def add_again(self, word: str, topic: str, relation: Kind) -> int:
        """Write a word and relate it to the last one of the same topic, if there was one."""
        index = self.add(word)
        if topic in self._last_seen:
            self.relate(relation, query=index, key=self._last_seen[topic])
        self._last_seen[topic] = index
        return index

    def name(self, name: str) -> int:
        """Write someone's name."""
        return self.add_again(name, name, "same-name")

    def comma(self) -> None:
        """Write a comma."""
        self._last_seen[words.COMMA] = self.add(words.COMMA)

    def stop(self) -> None:
        """End the sentence."""
        index = self.add_again(words.STOP, words.STOP, "sentence-final")
        comma = self._last_seen.pop(words.COMMA, None)
        if comma is not None:
            self.relate("comma", query=index, key=comma)

    def pronoun(self, word: str, antecedent: int) -> int:
        """Write a pronoun that stands for the name at index `antecedent`."""
        index = self.add(word)
        self.relate("pronoun-antecedent", query=index, key=antecedent)
        return index

    def finish(self) -> Document:
        """The document written so far."""
        return Document(tuple(self._words), tuple(self._relations))
