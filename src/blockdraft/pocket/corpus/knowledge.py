"""This is the part of family ``chat`` that is right or wrong: what things are, how they differ, and plain facts.

The things are read from ``things.txt``, with the words that sentences need. An answer's wording is drawn at random, its
facts never are. `Exchange.answer` holds what a right answer must contain.
"""

from dataclasses import dataclass

from blockdraft.pocket.corpus.dice import TOPICS, Dice, Exchange, capitalized, joined, read_table, with_article

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
    """Holds an entry of the table.

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


WHAT = (
    "What is {one}?", "What is {one}?", "What is {one} exactly?", "What's {one}?", "So what is {one}?",
    "Can you [tell me|explain] what {one} is?", "Could you explain what {one} is?", "Do you know what {one} is?",
    "[Please explain|Explain] what {one} is.", "Explain {one} to me.", "[Describe|Define] {one}.",
    "Describe {one} in a few sentences.", "Tell me what {one} is.", "Tell me [about|something about] {many}.",
    "What do you know about {many}?", "I want to know what {one} is.", "I wonder what {one} is.",
    "[Give me|I need] a short [definition|description] of {one}.", "In a few words, what is {one}?",
    "How would you [describe|define] {one}?", "What does the word {name} mean?", "What does {name} mean?",
    "What is the meaning of {name}?", "What is meant by {one}?", "Define {name}.", "{name}?", "Whats {one}?",
    "What is {name}?", "Tell me about {the}.", "[And|And what is|What about] {one}?",
)  # fmt: skip
USE = (
    "What is {one} used for?", "What is {one} good for?", "What do people use {one} for?", "What do I need {one} for?",
    "Why do people need {one}?", "What can I do with {one}?", "What are {many} used for?", "What are {many} for?",
)  # fmt: skip
NAMES_OF_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def definition(dice: Dice) -> Exchange:
    """Ask what a thing is, what it is for, where it is found, what it does or how many legs it has."""
    return describe_thing(dice, dice.pick(THINGS))


def describe_thing(dice: Dice, thing: Thing) -> Exchange:
    """Ask about this thing."""
    the = f"the {thing.name}" if thing.counted else thing.one
    words = {"one": thing.one, "many": thing.many, "name": thing.name, "the": the}
    first = f"[|||In short, |Simply put, ]{thing.one} is {thing.kind} {thing.clause}."
    its_kind = f"{thing.one} is {thing.kind} {thing.clause}."
    answer, details = thing.fact, [thing.where_sentence, thing.note]
    aspect = dice.pick(("what", "what", "what", "what", *_aspects(thing)))
    if aspect == "what":
        question = dice.pick(WHAT if not thing.counted else (*WHAT, "What are {many}?", "What are {many}?"))
    elif aspect == "use":
        question = dice.pick(USE)
        people = "" if "your" in thing.fact else "|People [use|need]"
        first = f"[You [can use|need]{people}] {thing.one} to {thing.fact}."
        details = [f"It is {thing.kind}.", *details]
    elif aspect == "do":
        question = dice.pick(("What does {one} do?", "What does {one} do?", "What does {one} do all day?"))
        if thing.group == "people":
            question = dice.pick((question, "What is the job of {one}?", "What is the work of {one}?"))
        first = f"[|In short, ]{thing.one} {thing.fact}."
    elif aspect == "legs":
        assert thing.num_legs is not None
        number = NAMES_OF_NUMBERS[thing.num_legs]
        question = "How many legs [does {one} have|has {one}|do {many} have]?"
        first = (
            f"[{thing.one} has|[{thing.many}|All {thing.many}] have] {number} leg{'s' if thing.num_legs != 1 else ''}."
        )
        answer, details = f"{number} leg", [its_kind, *details]
    elif aspect == "where":
        question, first = _where(thing)
        answer, details = thing.where, [its_kind, thing.note]
    else:
        question = "[Do you like {many}?|Do you like {one}?|What do you think of {many}?]"
        first = (
            "[I am a program and have no taste of my own|As a small model I cannot like things], "
            f"but I [know|can tell you] [what {thing.one} is|this much]: {thing.one} is {thing.kind} {thing.clause}."
        )
    chosen = dice.sample(details, dice.pick((1, 2, 2)) if len(details) == 2 else dice.pick((1, 2, 2, 3)))
    if thing.counted and thing.group in ("objects", "food", "places") and dice.chance(0.2):
        chosen.append("[There are many kinds.|There are many kinds of it.|Most people have seen one.]")
    response = " ".join(capitalized(dice.say(part)) for part in (first, *chosen))
    return Exchange(capitalized(dice.say(question, **words)), response, "definition", answer=answer)


def _aspects(thing: Thing) -> list[str]:
    found = ["where"] if thing.group not in ("food", "computing") else []
    if thing.group == "objects":
        found.append("use")
    if thing.group in ("people", "animals"):
        found.append("do")
    if thing.num_legs is not None:
        found.append("legs")
    return [*found, "like"] if thing.group in ("animals", "food", "nature", "matter") else found


def _where(thing: Thing) -> tuple[str, str]:
    """Return a question for the place of a thing, and the sentence that answers it."""
    often = "[usually|often|mostly]"
    if thing.group == "animals":
        return (
            "[Where does {one} live?|Where do {many} live?|Where can I see {one}?]",
            f"[{thing.one} [{often} |]lives|{thing.many} [{often} |]live] {thing.where}.",
        )
    if thing.group == "people":
        return "[Where does {one} work?|Where do I find {one}?]", f"You {often} find {thing.one} {thing.where}."
    return (
        "Where [do you find|can I find|do I find|can you see|would I look for] {one}?",
        f"[You [can |{often} |]find {thing.one} {thing.where}.|{thing.one} is {often} found {thing.where}.]",
    )


def two_definitions(dice: Dice) -> Exchange:
    """Ask what two things are."""
    left, right = _two(dice)
    question = dice.say(
        "[What is {one}, and what is {other}?|What is {one} and what is {other}?|Explain what {one} and {other} are."
        "|What are {one} and {other}?|Tell me what {one} is and what {other} is.]",
        one=left.one,
        other=right.one,
    )
    parts = [f"{left.one} is {left.kind} {left.clause}.", f"[|And ]{right.one} is {right.kind} {right.clause}."]
    if dice.chance(0.6):
        parts.append(right.note)  # the last thing named, which its pronoun means
    response = " ".join(capitalized(dice.say(part)) for part in parts)
    return Exchange(question, response, "definitions", answer=f"{left.fact};{right.fact}")


def comparison(dice: Dice) -> Exchange:
    """Ask how two things differ, or which one to choose."""
    left, right = _two(dice)
    words = {"one": left.one, "other": right.one}
    if left.group == right.group == "objects" and dice.chance(0.25):
        question = "[Should I [buy|take|get] {one} or {other}?|{one} or {other}, what [do I need|should I buy]?]"
        parts = [
            "[That depends on what you [want|need].|It depends on your plans.]",
            f"[If you want to|To] {left.fact}, [take|choose|you need] {left.one}.",
            f"[If you want to|To] {right.fact}, [take|choose|you need] {right.one}.",
        ]
    else:
        question = (
            "[What is the difference between {one} and {other}?|How does {one} differ from {other}?"
            "|Compare {one} and {other}.|Compare {one} with {other}.|Is {one} the same as {other}?"
            "|How are {one} and {other} different?|What makes {one} different from {other}?]"
        )
        link = "[, while |, but |, whereas |. In contrast, |. On the other hand, ]"
        parts = [f"{left.one} is {left.kind} {left.clause}{link}{right.one} is {right.kind} {right.clause}."]
        if left.group == right.group and dice.chance(0.5) and left.group not in ("food", "people", "computing"):
            parts.append(f"You [usually |]find {left.one} {left.where} and {right.one} {right.where}.")
        if dice.chance(0.4):
            parts.append(right.note)  # the last thing named, which its pronoun means
    question = capitalized(dice.say(question, **words))
    if question.startswith("Is "):
        parts.insert(0, "[No.|No, they are different.|They are not the same.]")
    response = " ".join(capitalized(dice.say(part)) for part in parts)
    return Exchange(question, response, "comparison", answer=f"{left.fact};{right.fact}")


def _two(dice: Dice) -> tuple[Thing, Thing]:
    """Draw two things, mostly of the same group."""
    group = dice.pick(THINGS).group
    left, right = dice.sample(BY_GROUP[group] if dice.chance(0.85) else THINGS, 2)
    return left, right


def fact(dice: Dice) -> Exchange:
    """Ask a question that has one short answer."""
    return dice.pick((_table_fact, _table_fact, _table_fact, _capital, _capital, _opposite, _rhyme))(dice)


def _table_fact(dice: Dice) -> Exchange:
    questions, key, answers, note = dice.pick(TOPICS["facts"])
    parts = [dice.pick(answers.split(" / "))]
    if dice.chance(0.7):
        parts.append(note)
    question = dice.say("[||||Do you know this? |Can you tell me: ]") + dice.pick(questions.split(" / "))
    return Exchange(question, " ".join(parts), "fact", answer=key)


def _capital(dice: Dice) -> Exchange:
    country, city = dice.pick(TOPICS["capitals"])
    words = {"country": country, "city": city}
    if dice.chance(0.25):
        question = "[Which country has the capital {city}?|{city} is the capital of which country?|Where is {city}?]"
        answer = "[{city} is the capital of {country}.|{city} is in {country}[.|, it is the capital.]]"
        return Exchange(dice.say(question, **words), dice.say(answer, **words), "fact", answer=country)
    question = (
        "[What is the capital of {country}?|What is the capital of {country}?|What's the capital of {country}?"
        "|Which city is the capital of {country}?|Tell me the capital of {country}.|Name the capital of {country}."
        "|Do you know the capital of {country}?|Capital of {country}?]"
    )
    answer = "[The capital of {country} is {city}.|{city} is the capital of {country}.|It is {city}.]"
    more = "[|| It is well worth a visit.| Many people visit it every year.| The government has its seat there.]"
    return Exchange(dice.say(question, **words), dice.say(answer + more, **words), "fact", answer=city)


def _opposite(dice: Dice) -> Exchange:
    word, other = dice.pick(TOPICS["opposites"])
    question = (
        "[What is the opposite of {word}?|Tell me the opposite of {word}.|Give me the opposite of {word}."
        "|What's the opposite of the word {word}?]"
    )
    answer = "[The opposite of {word} is {other}.|It is {other}.|That would be {other}.]"
    return Exchange(dice.say(question, word=word), dice.say(answer, word=word, other=other), "fact", answer=other)


def _rhyme(dice: Dice) -> Exchange:
    word, *rhymes = dice.pick(TOPICS["rhymes"])
    if dice.chance(0.6):
        question = (
            "[Give me a word that rhymes with {word}.|What rhymes with {word}?|Find a rhyme for {word}."
            "|Which word rhymes with {word}?|I need a rhyme for {word}.]"
        )
        answer = (
            "[{rhyme} rhymes with {word}.|A word that rhymes with {word} is {rhyme}.|How about {rhyme}?"
            "|You could use {rhyme}.]"
        )
        text = dice.say(answer, word=word, rhyme=dice.pick(rhymes))
        return Exchange(dice.say(question, word=word), capitalized(text), "rhyme")
    chosen = dice.sample(rhymes, min(len(rhymes), dice.pick((2, 3))))
    question = (
        "[Give me some words that rhyme with {word}.|Which words rhyme with {word}?|List words that rhyme with {word}.]"
    )
    answer = "[{rhymes} rhyme with {word}.|Some words that rhyme with {word} are {rhymes}.|How about {rhymes}?]"
    text = dice.say(answer, word=word, rhymes=joined(chosen))
    return Exchange(dice.say(question, word=word), capitalized(text), "rhyme")


def is_right(answer: str, response: str) -> bool:
    """Tell whether a response contains what a right answer must: every part between semicolons, one way of each."""
    text = response.casefold()
    return all(any(way.casefold() in text for way in part.split("|")) for part in answer.split(";"))
