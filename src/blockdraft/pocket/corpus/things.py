"""The things that family ``chat`` can define, read from ``things.txt``, with the words that sentences need."""

from dataclasses import dataclass

from blockdraft.pocket.corpus.dice import read_table, with_article

IRREGULAR = {
    "knife": "knives", "shelf": "shelves", "leaf": "leaves", "wolf": "wolves", "mouse": "mice", "goose": "geese",
    "sheep": "sheep", "deer": "deer", "fish": "fish", "tomato": "tomatoes", "potato": "potatoes", "postman": "postmen",
    "volcano": "volcanoes", "mosquito": "mosquitoes", "pair of scissors": "scissors", "cactus": "cacti",
}  # fmt: skip
NOT_AT_WORK = ("student", "king", "neighbor", "sailor")
DRINKS = ("milk", "tea", "coffee", "juice")
INGREDIENTS = ("salt", "sugar", "flour", "butter")


@dataclass(frozen=True)
class Thing:
    """An entry of the table.

    group: its section: objects, animals, nature, matter, food, people, places or computing.
    name: the bare noun, such as ``kettle``.
    one: the noun as it stands in a sentence: ``a kettle``, ``water``, ``the moon``.
    many: its plural, or the noun itself if it is not counted.
    kind: what it is, with an article: ``a kitchen device``.
    clause: what sets it apart, after the kind; for objects a template with alternatives around `fact`.
    fact: the part of the clause that an answer must contain to be right.
    where: an adverbial, such as ``in the kitchen``.
    note: one more sentence.
    num_legs: of animals, if that is known.
    """

    group: str
    name: str
    one: str
    many: str
    kind: str
    clause: str
    fact: str
    where: str
    note: str
    num_legs: int | None = None

    @property
    def counted(self) -> bool:
        """Tell whether there can be several of it."""
        return self.many != self.name

    @property
    def where_sentence(self) -> str:
        """Return a template that says where it is found, starting with a pronoun or a general subject."""
        often = "[usually|often|mostly]"
        if self.group == "animals":
            return f"[It [{often} |]lives {self.where}.|You [{often} |]find it {self.where}.]"
        if self.group == "people":
            meet = f"You {often} meet one {self.where}."
            return meet if self.name in NOT_AT_WORK else f"[They {often} work {self.where}.|{meet}]"
        if self.group == "food":
            verb = "drink" if self.name in DRINKS else "use" if self.name in INGREDIENTS else "eat"
            return f"[People {often} {verb} it {self.where}.|Many people {verb} it {self.where}.]"
        return f"[You [{often} |]find it {self.where}.|It is [{often} |]found {self.where}.]"


def plural(noun: str) -> str:
    """Return the plural of a noun: ``kettles``, ``batteries``, ``knives``."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "sh", "ch", "x", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _thing(group: str, cells: list[str]) -> Thing:
    name, *rest = cells
    first, _, tail = name.partition(" ")
    explicit = group in ("matter", "food", "computing")
    if first in ("a", "an"):
        one, name, many = name, tail, plural(tail)
    elif first == "the":
        one, name, many = name, name, name
    elif name.startswith("=") or explicit:
        name = name.removeprefix("=")
        one, many = name, name
    else:
        one, many = with_article(name), plural(name)
    legs = None
    if group == "people":
        does, where, note = rest
        kind, clause, fact = "[a person|someone|somebody]", f"who {does}", does
    elif group == "animals":
        kind, fact, where, num_legs, note = rest
        clause, legs = f"that {fact}", int(num_legs) if num_legs.isdecimal() else None
    else:
        kind, fact, where, note = rest
        use = "[used to|that you use to] " if "your" in fact else "[used to|that people use to|that you use to] "
        clause = {
            "objects": use + fact, "nature": f"that {fact}",
            "places": f"where {fact}",
        }.get(group, fact)  # fmt: skip
    if group not in ("matter", "people"):
        kind = with_article(kind)
    return Thing(group, name, one, many, kind, clause, fact, where, note, legs)


THINGS: tuple[Thing, ...] = tuple(
    _thing(group, cells) for group, rows in read_table("things.txt").items() for cells in rows
)
BY_GROUP: dict[str, list[Thing]] = {}
for _each in THINGS:
    BY_GROUP.setdefault(_each.group, []).append(_each)
