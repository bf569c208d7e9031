"""The words of the demo language: its people, its themes, its verbs and its small words."""

from dataclasses import dataclass

GIRLS = (
    "Alice", "Anna", "Clara", "Emma", "Grace", "Helen", "Julia", "Laura", "Maria", "Nina", "Rosa", "Sarah",
)  # fmt: skip
BOYS = (
    "Adam", "Ben", "Daniel", "Felix", "Henry", "Jack", "Leo", "Martin", "Oscar", "Paul", "Simon", "Tom",
)  # fmt: skip


@dataclass(frozen=True)
class Noun:
    """A thing that can be counted, in both numbers."""

    singular: str
    plural: str


@dataclass(frozen=True)
class Theme:
    """Things that go together, what they are like, and where they are found."""

    name: str
    nouns: tuple[Noun, ...]
    adjectives: tuple[str, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A verb in the two forms that agree with a subject."""

    singular: str
    plural: str


IRREGULAR = {
    "bench": "benches", "box": "boxes", "bus": "buses", "fox": "foxes", "leaf": "leaves", "shelf": "shelves",
    "scarf": "scarves", "story": "stories", "snowman": "snowmen",
}  # fmt: skip


def _theme(name: str, nouns: str, adjectives: str, places: str) -> Theme:
    return Theme(
        name,
        tuple(Noun(noun, IRREGULAR.get(noun, noun + "s")) for noun in nouns.split()),
        tuple(adjectives.split()),
        tuple(places.split()),
    )


THEMES = (
    _theme("garden", "rose apple tree seed flower bee spade hedge bench pear",
           "green ripe wild", "garden orchard"),
    _theme("kitchen", "cup plate spoon pot bowl kettle cake pie oven jug",
           "sweet warm clean", "kitchen bakery"),
    _theme("sea", "boat sail wave shell gull net anchor island crab pebble",
           "blue salty calm", "harbour beach"),
    _theme("music", "song drum flute violin piano singer bell guitar tune dancer",
           "loud merry soft", "theatre hall"),
    _theme("school", "pen desk teacher pupil pencil map lesson poem ruler globe",
           "clever neat short", "school library"),
    _theme("farm", "cow horse goat hen duck lamb barn cart fence field",
           "brown muddy sleepy", "farm village"),
    _theme("winter", "coat hat glove sled candle blanket boot stove scarf snowman",
           "cold thick icy", "cabin lodge"),
    _theme("city", "train bus street tower bridge lamp car clock tram shop",
           "busy tall modern", "station market"),
    _theme("workshop", "key hammer nail box shelf cabinet drawer chair table lock",
           "wooden rusty heavy", "workshop attic"),
    _theme("forest", "owl fox squirrel path leaf nest bear mushroom stream stone",
           "dark quiet mossy", "forest meadow"),
    _theme("tale", "book letter story castle king queen dragon riddle crown giant",
           "strange famous golden", "palace museum"),
    _theme("sky", "star cloud planet kite balloon bird plane comet wing rocket",
           "distant silver bright", "observatory airfield"),
)  # fmt: skip

ADJECTIVES = ("old", "new", "small", "large", "lovely", "red", "yellow", "plain", "beautiful", "little")

LINKING = (Verb("is", "are"), Verb("was", "were"), Verb("seems", "seem"), Verb("looks", "look"))
RESTING = (Verb("stands", "stand"), Verb("lies", "lie"), Verb("waits", "wait"), Verb("rests", "rest"))
AGREEING = LINKING + RESTING

ACTIONS = (
    "found", "painted", "carried", "washed", "borrowed", "sold", "bought", "lifted", "admired", "moved",
    "noticed", "counted", "drew", "wanted", "liked", "saw", "remembered", "described",
)  # fmt: skip
LOSING = ("lost", "forgot", "broke", "dropped", "missed")
GIVING = ("gave", "handed", "offered", "showed", "lent", "brought")
ARRIVING = ("went", "walked", "came", "ran")
FEELINGS = ("tired", "late", "hungry", "careless", "nervous", "excited", "ill", "cross")

NEARNESS = ("near", "behind", "beside", "with", "by", "under")
MOMENTS = ("today", "yesterday", "now", "then", "again", "later")
OPENINGS = (
    ("in", "the", "morning"), ("in", "the", "evening"), ("after", "lunch"), ("last", "summer"),
    ("one", "day"), ("at", "night"), ("before", "dinner"), ("on", "Sunday"),
)  # fmt: skip

PRONOUNS = {"girl": ("she", "her"), "boy": ("he", "his")}

COMMA, STOP = ",", "."
BRACKETS = {"(": ")", "[": "]"}
PUNCTUATION = (COMMA, STOP, "?", "!", ":", ";", "(", ")", "[", "]")

OPENERS = (
    "a", "an", "and", "after", "at", "because", "before", "but", "each", "every", "from", "he", "her", "his",
    "in", "it", "last", "many", "on", "once", "one", "she", "so", "some", "that", "the", "there", "these", "they",
    "this", "those", "three", "two", "when", "while", "with",
)  # fmt: skip
"""Words that can begin a sentence or a bracket."""

SMALL = (
    "to", "of", "very", "who", "for", "had", "has", "have", "not", "back", "home", "said", "sang",
    "friend", "friends", "gift", "gifts", "did", "them", "up", "down",
)  # fmt: skip


def plain_words() -> tuple[str, ...]:
    """Every word of the language in the form that it has in the middle of a sentence."""
    found = [
        *GIRLS,
        *BOYS,
        *ADJECTIVES,
        *ACTIONS,
        *LOSING,
        *GIVING,
        *ARRIVING,
        *FEELINGS,
        *NEARNESS,
        *MOMENTS,
    ]
    for theme in THEMES:
        found += [form for noun in theme.nouns for form in (noun.singular, noun.plural)]
        found += [*theme.adjectives, *theme.places]
    found += [form for verb in AGREEING for form in (verb.singular, verb.plural)]
    found += [word for opening in OPENINGS for word in opening]
    found += [word for pronouns in PRONOUNS.values() for word in pronouns]
    return tuple(dict.fromkeys([*found, *OPENERS, *SMALL]))


def vocabulary() -> tuple[str, ...]:
    """Every form that a word takes in a text, with its leading space: " the", " The", "The", "the", ".".

    A word has no space at the start of a text and behind an opening bracket.
    """
    names = GIRLS + BOYS
    capitals = tuple(word.capitalize() for word in OPENERS)
    spaced = (*plain_words(), *capitals, *BRACKETS)
    return tuple(dict.fromkeys([*PUNCTUATION, *(" " + word for word in spaced), *names, *capitals, *OPENERS]))
