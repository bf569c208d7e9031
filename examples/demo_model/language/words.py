"""The words of the demo language: its people, its themes, its verbs and its small words."""

from dataclasses import dataclass
from functools import cache

FEMALE = (
    "Ada", "Agnes", "Alice", "Amy", "Anna", "Beth", "Carla", "Carol", "Clara", "Daisy", "Diana", "Edith",
    "Elena", "Ella", "Emily", "Emma", "Eva", "Fiona", "Grace", "Hannah", "Helen", "Ida", "Jane", "Jenny",
    "Julia", "Kate", "Laura", "Lena", "Linda", "Lisa", "Lucy", "Maria", "Mary", "Mia", "Nancy", "Nina",
    "Nora", "Olga", "Paula", "Rachel", "Rosa", "Ruth", "Sarah", "Sophie", "Susan", "Tina", "Vera", "Zoe",
)  # fmt: skip
MALE = (
    "Adam", "Albert", "Ben", "Boris", "Bruno", "Carl", "Daniel", "David", "Edgar", "Emil", "Eric", "Felix",
    "Frank", "Fred", "George", "Hans", "Harry", "Henry", "Hugo", "Ivan", "Jack", "Jacob", "James", "John",
    "Karl", "Kevin", "Leo", "Louis", "Luke", "Mark", "Martin", "Max", "Michael", "Nick", "Noah", "Oscar",
    "Oliver", "Otto", "Paul", "Peter", "Philip", "Ralph", "Robert", "Simon", "Thomas", "Tom", "Victor", "William",
)  # fmt: skip
UNTOLD = (
    "Alex", "Andy", "Billie", "Casey", "Chris", "Frankie", "Jamie", "Jordan", "Kim", "Lee", "Morgan", "Pat",
    "Robin", "Sam", "Terry", "Toni",
)  # fmt: skip
"""Names that do not reveal the gender; where it matters, a title does."""

UNSEEN = (
    "Ingrid", "Martha", "Stella", "Yvonne", "Petra", "Wanda", "Greta", "Olive", "Lydia", "Judith", "Irene", "Flora",
    "Arthur", "Dennis", "Edwin", "Gustav", "Howard", "Jasper", "Kurt", "Magnus", "Norman", "Ronald", "Stefan", "Walter",
)  # fmt: skip
"""Names that no text of the training side contains, for testing what was learnt."""

TITLES = {"female": ("Aunt", "Mrs", "Miss", "Lady"), "male": ("Uncle", "Mr", "Sir", "Lord")}
GENDERED = {
    "female": ("girl", "woman", "mother", "sister", "grandmother", "daughter", "queen", "princess"),
    "male": ("boy", "man", "father", "brother", "grandfather", "son", "king", "prince"),
}


@dataclass(frozen=True)
class Pronouns:
    """The words that stand for a person."""

    subject: str
    object: str
    possessive: str
    reflexive: str


PRONOUNS = {"female": Pronouns("she", "her", "her", "herself"), "male": Pronouns("he", "him", "his", "himself")}


@dataclass(frozen=True)
class Noun:
    """A countable noun for a thing or a person, in the singular and the plural."""

    singular: str
    plural: str

    def form(self, plural: bool) -> str:
        """The singular or the plural."""
        return self.plural if plural else self.singular


@dataclass(frozen=True)
class Verb:
    """A verb: `sing` (also the infinitive) and `sings` agree with a subject, `sang` does not."""

    plural: str
    singular: str
    past: str

    def form(self, plural: bool) -> str:
        """The present, in agreement with a subject."""
        return self.plural if plural else self.singular


@dataclass(frozen=True)
class Theme:
    """Things that go together, what they are like, what is done with them, and where they are found."""

    name: str
    nouns: tuple[Noun, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[Verb, ...]
    places: tuple[str, ...]


_PLURALS = {
    "calf": "calves", "child": "children", "fisherman": "fishermen", "goose": "geese", "knife": "knives",
    "leaf": "leaves", "loaf": "loaves", "mouse": "mice", "potato": "potatoes", "quiz": "quizzes", "scarf": "scarves",
    "shelf": "shelves", "snowman": "snowmen", "tomato": "tomatoes", "wolf": "wolves",
}  # fmt: skip
_PASTS = {
    "break": "broke", "bring": "brought", "build": "built", "buy": "bought", "catch": "caught", "choose": "chose",
    "come": "came", "draw": "drew", "drive": "drove", "eat": "ate", "feed": "fed", "find": "found", "forget": "forgot",
    "give": "gave", "go": "went", "hang": "hung", "hear": "heard", "hide": "hid", "hold": "held", "hurt": "hurt",
    "keep": "kept", "know": "knew", "lend": "lent", "lie": "lay", "lose": "lost", "make": "made", "ride": "rode",
    "run": "ran", "say": "said", "see": "saw", "sell": "sold", "send": "sent", "sew": "sewed", "show": "showed",
    "sing": "sang", "sit": "sat", "sleep": "slept", "stand": "stood", "steal": "stole", "swim": "swam",
    "teach": "taught", "tell": "told", "think": "thought", "throw": "threw", "understand": "understood",
    "wear": "wore", "write": "wrote",
}  # fmt: skip
_DOUBLED = ("drop", "knit", "label", "prefer", "scan", "spot", "trim", "unwrap", "wrap")


def _listed(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


def _with_s(word: str) -> str:
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "z", "ch", "sh")) or word == "go" else "s")


def _with_ed(word: str) -> str:
    if word in _PASTS:
        return _PASTS[word]
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ied"
    if word in _DOUBLED:
        return word + word[-1] + "ed"
    return word + ("d" if word.endswith("e") else "ed")


def _nouns(listed: str) -> tuple[Noun, ...]:
    return tuple(Noun(word, _PLURALS.get(word, _with_s(word))) for word in _listed(listed))


def _verbs(listed: str) -> tuple[Verb, ...]:
    return tuple(Verb(word, _with_s(word), _with_ed(word)) for word in _listed(listed))


def _theme(name: str, nouns: str, adjectives: str, verbs: str, places: str) -> Theme:
    return Theme(name, _nouns(nouns), _listed(adjectives), _verbs(verbs), _listed(places))


THEMES = (
    _theme("garden",
           "rose apple tree seed flower bee spade hedge tulip pear lily rake daisy plum vine butterfly snail "
           "wheelbarrow sunflower cherry",
           "green ripe wild leafy juicy", "plant trim water", "garden orchard greenhouse"),
    _theme("kitchen",
           "cup plate spoon pot bowl kettle cake pie oven jug fork knife pan bun pancake cookie loaf sandwich tray "
           "biscuit",
           "sweet warm clean fresh crisp", "rinse serve taste", "kitchen bakery pantry"),
    _theme("sea",
           "boat sail wave shell gull net anchor island crab pebble dolphin whale lighthouse rope seal oar raft "
           "pearl turtle seahorse",
           "blue salty calm sandy deep", "chase tow rescue", "harbour beach shore"),
    _theme("music",
           "song drum flute violin piano bell guitar tune trumpet harp cello melody waltz choir banjo horn organ "
           "ballad tambourine clarinet",
           "loud merry soft cheerful lively", "play hear practise", "theatre hall studio"),
    _theme("school",
           "pen desk pupil pencil map lesson poem ruler globe notebook eraser chalkboard textbook essay crayon "
           "backpack quiz exam classmate dictionary",
           "clever neat short tricky useful", "study explain correct", "school library classroom"),
    _theme("farm",
           "cow horse goat hen duck lamb barn cart fence field tractor pig rooster donkey pony haystack goose calf "
           "plough turnip",
           "brown muddy sleepy woolly stubborn", "feed herd raise", "farm village stable"),
    _theme("winter",
           "coat hat glove sled candle blanket boot stove scarf snowman mitten icicle sweater snowflake fireplace "
           "snowball lantern quilt sleigh slipper",
           "cold thick icy frosty cosy", "fold mend knit", "cabin lodge cottage"),
    _theme("city",
           "train bus street tower bridge lamp car clock tram shop taxi building bicycle statue fountain avenue "
           "truck newspaper balcony elevator",
           "busy tall modern crowded noisy", "pass photograph approach", "station market square"),
    _theme("workshop",
           "key hammer nail box shelf cabinet drawer chair table lock screw wrench ladder bucket brush hinge toolbox "
           "plank wheel stool",
           "wooden rusty heavy sturdy dusty", "repair fix build", "workshop attic garage"),
    _theme("forest",
           "owl fox squirrel path leaf nest bear mushroom stream stone wolf hedgehog acorn branch pinecone fern "
           "badger log beetle woodpecker",
           "dark quiet mossy shady hollow", "spot follow disturb", "forest meadow clearing"),
    _theme("tale",
           "book letter story castle dragon riddle crown giant knight wizard fairy legend sword shield throne goblin "
           "unicorn minstrel treasure spell",
           "strange famous golden enchanted royal", "guard imagine retell", "palace museum dungeon"),
    _theme("sky",
           "star cloud planet kite balloon bird plane comet wing rocket helicopter satellite rainbow telescope "
           "airship parachute eagle feather moonbeam glider",
           "distant silver bright airy graceful", "watch track launch", "observatory airfield airport"),
    _theme("sport",
           "ball racket goal medal trophy bat helmet jersey basketball football skateboard whistle trampoline "
           "surfboard puck javelin dartboard hoop paddle scoreboard",
           "bouncy quick strong rubber sporty", "kick throw catch", "stadium gym park"),
    _theme("clothes",
           "shirt dress ring necklace bracelet jacket skirt sock shoe belt button ribbon purse sleeve pocket jewel "
           "earring tie zip umbrella",
           "elegant striped silky fancy loose", "wear iron sew", "boutique mall store"),
    _theme("office",
           "computer keyboard printer report document envelope folder stapler calendar contract invoice stamp memo "
           "phone laptop monitor cable spreadsheet email file",
           "official urgent important digital formal", "sign scan print", "office bank agency"),
    _theme("hospital",
           "bandage bed pillow needle thermometer pill crutch syringe wheelchair stretcher ambulance vitamin mask "
           "plaster bottle scalpel stethoscope toothbrush sponge uniform",
           "sterile healthy medical spotless sealed", "need sterilise unpack", "hospital clinic pharmacy"),
    _theme("restaurant",
           "drink snack burger pizza sausage salad soup menu napkin noodle omelette milkshake dumpling pickle olive "
           "tomato potato steak lemon meatball",
           "delicious tasty salted creamy spicy", "order eat share", "restaurant cafe canteen"),
    _theme("zoo",
           "lion tiger elephant monkey giraffe zebra camel parrot penguin kangaroo snake crocodile hippo panda gorilla "
           "ostrich lizard flamingo leopard rhino",
           "fierce furry speckled exotic lazy", "tame fear startle", "zoo jungle savannah"),
    _theme("travel",
           "suitcase ticket passport tent compass caravan rucksack postcard souvenir camera hammock torch guidebook "
           "flask canoe kayak campfire flag sandal timetable",
           "foreign portable sunny handy overseas", "pack label import", "hotel campsite valley"),
    _theme("laboratory",
           "microscope robot battery magnet beaker crystal magnifier atom molecule fossil bone experiment formula "
           "laser circuit engine sensor prism microbe gadget",
           "electric scientific precise tiny magnetic", "test measure invent", "laboratory factory university"),
    _theme("house",
           "door window carpet curtain mirror sofa vase cupboard doorbell couch cushion ceiling chimney stair rug "
           "wall roof armchair chandelier doormat",
           "tidy spacious creaky homely narrow", "wipe decorate cover", "house apartment hallway"),
    _theme("pets",
           "dog cat kitten puppy rabbit hamster collar leash basket cage aquarium tortoise canary mouse gerbil frog "
           "toad duckling parakeet ferret",
           "playful fluffy friendly naughty loyal", "stroke groom cuddle", "kennel yard barnyard"),
    _theme("art",
           "painting sketch portrait canvas easel frame sculpture poster mural mosaic palette paintbrush doodle "
           "drawing puppet costume collage figurine engraving tapestry",
           "colourful abstract creative delicate expressive", "paint hang design", "gallery academy exhibition"),
    _theme("party",
           "toy game doll puzzle teddy card lollipop cupcake invitation prize marble chocolate streamer banner joke "
           "firework gift party candy bonbon",
           "funny surprising festive sparkling glittering", "wrap hide unwrap", "playground circus ballroom"),
)  # fmt: skip

ROLES = _nouns(
    "teacher baker farmer sailor doctor nurse painter singer dancer driver pilot builder gardener cook scientist "
    "writer student neighbour child friend cousin judge artist actor miner tailor butcher plumber soldier guest "
    "visitor clerk lawyer poet engineer librarian athlete tourist hunter fisherman coach juggler magician clown "
    "mechanic dentist waiter player"
)
"""People referred to by what they do."""

ADJECTIVES = _listed(
    "old new small large lovely red yellow plain beautiful little big pretty ugly cheap broken empty round long thin "
    "orange purple pink grey black white wonderful ordinary rare unusual perfect huge shiny favourite splendid "
    "expensive simple"
)
FEELINGS = _listed(
    "tired late hungry careless nervous excited ill cross happy sad angry thirsty afraid bored proud lonely curious "
    "surprised worried ready"
)

BE, BE_PAST = Verb("are", "is", "were"), Verb("were", "was", "were")
LINKING = (BE, BE_PAST, *_verbs("seem look appear remain"))
RESTING = _verbs("stand lie wait rest sit stay")
ACTIONS = _verbs(
    "find carry wash borrow sell buy lift admire move notice count draw want like see remember describe choose keep "
    "hold fetch inspect collect deliver steal replace recognise touch own push pull love hate prefer examine make "
    "understand visit use open clear"
)
LOSING = _verbs("lose forget break drop miss")
GIVING = _verbs("give hand offer show lend bring send")
ARRIVING = tuple(verb.past for verb in _verbs("go walk come run drive hurry rush return stroll"))
THINKING = _verbs("think say know hope believe")
LIVING = _verbs("sing dance sleep laugh talk smile swim work")
REFLEXIVE = tuple(verb.past for verb in _verbs("hurt teach blame enjoy"))
DEGREES = ("very", "not", "never", "always", "still")
MODALS = ("can", "will", "must", "should", "may", "could", "would")

NEARNESS = _listed("near behind beside with by under of from to on above below against inside around in")
SPOTS = ("at", "near", "outside", "inside")
MOMENTS = _listed("today yesterday again later often slowly quickly carefully happily suddenly there twice")
SOON = ("tomorrow", "soon", "tonight", "now")
OPENINGS = tuple(
    _listed(opening)
    for opening in (
        "in the morning", "in the evening", "after lunch", "last summer", "one day", "at night", "before dinner",
        "on Sunday", "on Monday", "at noon", "last week", "this year", "long ago", "after a while", "then",
    )
)  # fmt: skip
HABITS = tuple(
    _listed(habit)
    for habit in ("every morning", "every day", "every evening", "each week", "on Fridays", "on Saturdays")
)
JOINING = ("when", "after", "while", "as", "once")

SINGULAR_DETERMINERS = ("the", "a", "this", "that", "every", "each", "one", "my", "your", "our")
PLURAL_DETERMINERS = ("the", "these", "those", "some", "many", "several", "all", "both", "my", "your", "our")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty")

COMMA, COLON, QUOTE = ",", ":", '"'
FINAL = (".", "?", "!")
BRACKETS = {"(": ")", "[": "]"}
PUNCTUATION = (COMMA, COLON, ";", *FINAL, *BRACKETS, *BRACKETS.values(), QUOTE, "'", "-")

OPENERS = _listed(
    "a an and as after all almost at because before both but each every everyone few from he her his how i if in "
    "it its last long made many most my no not on once one our several she so some such that the their then there "
    "these they this those to under we what when where which while who why with yes you your"
)
"""Words that can begin a text, a sentence or a bracket."""

SMALL = _listed(
    "am be been do does did had has have us me than too very whom whose back home up down out over into off about "
    "also always never here not or nor neither either only just even same other another first second third next "
    "time day night year people its them their themselves"
)
"""Words that a user may type but that the grammar hardly needs."""

FRAME = _listed(
    "am and as at because but by decided did from gave had him in it made met of once said sang so that them they to "
    "wanted was were where who with wrote everyone"
)
"""Words that the grammar uses."""


def names() -> tuple[str, ...]:
    """All names, on both sides of the split."""
    return FEMALE + MALE + UNTOLD + UNSEEN


@cache
def things() -> tuple[Noun, ...]:
    """The nouns of every theme."""
    return tuple(noun for theme in THEMES for noun in theme.nouns)


@cache
def transitive() -> tuple[Verb, ...]:
    """The verbs that take an object."""
    return (*ACTIONS, *LOSING, *GIVING, *(verb for theme in THEMES for verb in theme.verbs))


@cache
def plain_words() -> tuple[str, ...]:
    """Every word of the language in the form that it has in the middle of a sentence."""
    nouns = (*things(), *ROLES)
    verbs = (*transitive(), *LINKING, *RESTING, *THINKING, *LIVING)
    forms = [
        *names(),
        *(title for titles in TITLES.values() for title in titles),
        *(person for people in GENDERED.values() for person in people),
        *(form for noun in nouns for form in (noun.singular, noun.plural)),
        *(form for verb in verbs for form in (verb.plural, verb.singular, verb.past)),
        *(word for theme in THEMES for word in (*theme.adjectives, *theme.places)),
        *(word for phrase in (*OPENINGS, *HABITS) for word in phrase),
        *(form for pronouns in PRONOUNS.values() for form in vars(pronouns).values()),
        *(*ADJECTIVES, *FEELINGS, *ARRIVING, *REFLEXIVE, *DEGREES, *MODALS),
        *(*NEARNESS, *SPOTS, *MOMENTS, *SOON, *JOINING),
        *(*SINGULAR_DETERMINERS, *PLURAL_DETERMINERS, *NUMBERS, *OPENERS, *FRAME, *SMALL),
    ]
    return tuple(dict.fromkeys(forms))


@cache
def vocabulary() -> tuple[str, ...]:
    """Every form that a word takes in a text, with its leading space: " the", " The", "The", "the", ".".

    A word has no space at the start of a text and after an opening bracket or quotation mark.
    """
    titles = tuple(title for titles in TITLES.values() for title in titles)
    capitals = tuple(word.capitalize() for word in (*OPENERS, *NUMBERS, *(noun.plural for noun in (*things(), *ROLES))))
    spaced = (*plain_words(), *capitals, *BRACKETS, QUOTE, "-")
    bare = (*names(), *titles, *capitals, *OPENERS)
    return tuple(dict.fromkeys([*PUNCTUATION, *(" " + word for word in spaced), *bare]))
