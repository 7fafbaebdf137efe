"""The people and things of the gsm-mini stories."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MEN = _words("Tom Sam Ben Max Leo Jack John James Peter Paul Mark David Omar Ivan Luis Noah Liam Adam")
_WOMEN = _words("Mary Anna Emma Lily Mia Zoe Sara Jane Lucy Ella Kate Nina Rosa Maya Alice Julia Eva Amy")
_EITHER = _words("Alex Robin Kim Jordan")

PEOPLE: tuple[tuple[str, str], ...] = (
    *((name, "he") for name in _MEN),
    *((name, "she") for name in _WOMEN),
    *((name, pronoun) for name in _EITHER for pronoun in ("he", "she")),
)
GROUPS = ("The twins", "The children", "The neighbors", "The sisters", "The brothers")
POSSESSIVE = {"he": "his", "she": "her", "they": "their"}
OBJECTIVE = {"he": "him", "she": "her", "they": "them"}

FOODS = _words(
    """apple orange banana pear lemon egg cookie cake muffin candy grape mango peach carrot potato tomato plum
    donut sandwich strawberry cherry pie"""
)
THINGS = _words(
    """book pencil pen marble sticker card coin ball toy stamp balloon flower rose shell stone button crayon
    ticket doll block bead notebook star bottle cup plate hat shirt bike"""
)
CONTAINERS = _words("box bag basket jar pack crate tray shelf")
_IRREGULAR = {
    "box": "boxes",
    "candy": "candies",
    "cherry": "cherries",
    "mango": "mangoes",
    "peach": "peaches",
    "potato": "potatoes",
    "sandwich": "sandwiches",
    "shelf": "shelves",
    "strawberry": "strawberries",
    "tomato": "tomatoes",
}

# place, one kind, another kind, and what both are
PARTS: tuple[tuple[str, ...], ...] = (
    _words("farm cows sheep animals"),
    _words("farm pigs hens animals"),
    _words("zoo lions tigers animals"),
    _words("zoo birds monkeys animals"),
    _words("class boys girls children"),
    _words("school boys girls students"),
    _words("box pens pencils items"),
    _words("shop hats shirts items"),
    _words("park oaks pines trees"),
    _words("garden roses lilies flowers"),
    _words("library novels comics books"),
    _words("lake ducks geese birds"),
    _words("street cars bikes vehicles"),
    _words("bowl apples pears fruits"),
    _words("store dolls balls toys"),
    _words("bus men women people"),
)


def plural(word: str) -> str:
    """Return the plural of an item or container."""
    return _IRREGULAR.get(word, word + "s")
