"""A text of the demo language while it is being written, and the relations between its words."""

from dataclasses import dataclass
from typing import Literal

from . import words

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

    The query and the key of each relation:
    subject-verb: the verb, the head noun of its subject (each noun of two that are joined by "and"; in a
    question, where the verb comes first, the noun is the query and the verb the key);
    verb-object: the object, its verb;
    modifier: the noun, its adjective or number;
    pronoun-antecedent: "she", "his", "it", ..., the name or noun meant;
    recipient: the "to" before the recipient's name, that name's earlier mention;
    same-name: a name, its latest earlier mention;
    same-theme: a thing or place, the latest earlier one of the same theme;
    bracket: the closing bracket or quotation mark, the opening one;
    comma: the mark that ends the sentence, the last comma of its sentence;
    sentence-final: the mark that ends a sentence, the one before it;
    repeat: a word of a repeated span, the same word in the first copy.
    """

    query: int
    """Index of the later word."""
    key: int
    """Index of the earlier word."""
    relation: Kind


@dataclass(frozen=True)
class Document:
    """A text with its structure: `"".join(words)` is the text, each word with its leading space."""

    words: tuple[str, ...]
    relations: tuple[Relation, ...]
    surprisal: float
    """−ln of the probability, in nats, that the grammar gives this text among all texts with the same number of
    sentences.
    """

    @property
    def text(self) -> str:
        """The words as one string."""
        return "".join(self.words)


class Draft:
    """A document being written: takes words in order, sets spaces, capitals and articles, and notes relations.

    >>> draft = Draft()
    >>> subject = draft.add("the", "boats")
    >>> bracket = draft.open("(")
    >>> end = draft.add("from", "Anna")
    >>> draft.close("(", bracket)
    >>> draft.relate("subject-verb", query=draft.add("are"), key=subject)
    >>> draft.add("new")
    7
    >>> draft.stop()
    >>> draft.finish(surprisal=0.0).text, draft.finish(surprisal=0.0).relations[-1]
    ('The boats (from Anna) are new.', Relation(query=6, key=1, relation='subject-verb'))
    """

    def __init__(self) -> None:
        self._words: list[str] = []
        self._relations: list[Relation] = []
        self._last_seen: dict[str, int] = {}
        self._tight = True
        self._capital = True
        self._article = False

    def add(self, *added: str) -> int:
        """Write words one after another ("a" becomes "an" where it must); returns the index of the last."""
        for word in added:
            if self._article and word[0] in "aeiou":
                self._words[-1] += "n"
            mark = word in words.PUNCTUATION
            form = word[0].upper() + word[1:] if self._capital else word
            self.write(form if self._tight or mark else " " + form)
            self._tight = False
            self._capital = word in words.FINAL
            self._article = word == "a"
        return len(self._words) - 1

    def write(self, word: str) -> None:
        """Write a word unchanged, with its leading space; every word passes through here."""
        self._words.append(word)

    def open(self, mark: str) -> int:
        """Write an opening bracket or quotation mark; returns its index. A quotation begins with a capital."""
        self.write(mark if self._tight else " " + mark)
        self._tight = True
        self._capital = self._capital or mark == words.QUOTE
        return len(self._words) - 1

    def close(self, mark: str, opened: int) -> None:
        """Write the closing mark for the one at an index."""
        self.write(words.BRACKETS.get(mark, mark))
        self.relate("bracket", query=len(self._words) - 1, key=opened)

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

    def stop(self, mark: str = ".") -> None:
        """End the sentence."""
        index = self.add_again(mark, "sentence", "sentence-final")
        comma = self._last_seen.pop(words.COMMA, None)
        if comma is not None:
            self.relate("comma", query=index, key=comma)

    def pronoun(self, word: str, antecedent: int) -> int:
        """Write a pronoun that stands for the name or noun at index `antecedent`."""
        index = self.add(word)
        self.relate("pronoun-antecedent", query=index, key=antecedent)
        return index

    def finish(self, surprisal: float) -> Document:
        """The document written so far, with the surprisal of its choices."""
        return Document(tuple(self._words), tuple(self._relations), surprisal)
