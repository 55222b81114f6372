"""This is the part of family ``chat`` about pocket itself: greetings, who it is, what it can and cannot do."""

from blockdraft.pocket.corpus.dice import TOPICS, Dice, Exchange, capitalized, joined, read_talks, with_article
from blockdraft.pocket.corpus.knowledge import THINGS, WHAT, plural
from blockdraft.pocket.corpus.stories import MEN, WOMEN

_TEMPLATES = read_talks("talks.txt")
TALKS = _TEMPLATES["small talk"]
BEYOND = [question for question, _ in _TEMPLATES["beyond"]]

ABILITIES = (
    "solve small word problems", "write short Python functions", "explain everyday things", "compare two things",
    "make short lists", "give simple instructions", "write short messages", "tell a very short story",
)  # fmt: skip

ONSETS = (
    "b", "bl", "br", "d", "dr", "f", "fl", "g", "gl", "gr", "h", "j", "k", "kl", "kr", "l", "m", "n", "p", "pl", "pr",
    "qu", "r", "s", "sk", "sl", "sn", "st", "t", "tr", "v", "vr", "w", "y", "z", "zw",
)  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou")
CODAS = (
    "", "", "b", "ck", "d", "g", "l", "m", "mp", "n", "nd", "ng", "nk", "p", "r", "rt", "s", "sk", "t", "x", "zz",
)  # fmt: skip
ENDINGS = ("", "", "", "o", "a", "er", "ette", "ling", "ium", "ation", "ism", "ware", "scope", "ist")
UNKNOWN_DEEDS = (
    "repair", "build", "sell", "paint", "clean", "buy", "draw", "move", "choose", "open", "store", "carry", "weigh",
)  # fmt: skip
UNKNOWN_LISTS = (
    "kinds of {many}", "facts about {many}", "famous {many}", "books about {many}", "places with {many}",
    "words for {one}",
)  # fmt: skip

KNOWN = {thing.name for thing in THINGS}
NOT_KNOWN = "not know|know nothing|never heard|cannot"
"""Words of which an honest answer contains one."""


def small_talk(dice: Dice) -> Exchange:
    """Draw a greeting, thanks, or a question about the model itself."""
    asked, answered = dice.pick((*TALKS, TALKS[0], TALKS[4], TALKS[6], TALKS[10]))  # the most usual ones twice
    ability, second, third = dice.sample(ABILITIES, 3)
    words = {"name": dice.pick([*WOMEN, *MEN]), "ability": ability, "second": second, "third": third}
    return Exchange(dice.say(asked, **words), dice.say(answered, **words).strip(), "small talk")


def made_up_word(dice: Dice) -> str:
    """Draw a word that does not exist: ``glaimp``, ``snoverling``."""
    syllables = [dice.pick(ONSETS) + dice.pick(VOWELS) for _ in range(dice.pick((1, 1, 2, 2, 3)))]
    word = "".join(syllables) + dice.pick(CODAS) + dice.pick(ENDINGS)
    return word if len(word) > 3 else made_up_word(dice)


def unknown(dice: Dice) -> Exchange:
    """Ask about what pocket does not know; it says so."""
    return dice.pick((_unknown_thing,) * 4 + (_unknown_person, _unknown_capital, _unknown_task, _beyond, _too_large))(
        dice
    )


def _sorry(dice: Dice, what: str, clause: str) -> str:
    """Say that this is not known, in one of several ways."""
    first = "[I do not know much about {what}|I am sorry, I know nothing about {what}|Sorry, I do not know {clause}"
    second = (
        "[ I am a small model and know only everyday things.| I only know some everyday things."
        "| My knowledge is small.||]"
    )
    third = (
        "[ Can you tell me more?| Please ask me something else.| You could ask me about {other}."
        "| Try asking about {other}.|]"
    )
    return dice.say(
        f"{first}|I have never heard of {{what}}|I am afraid I do not know {{clause}}].{second}{third}",
        what=what,
        clause=clause,
        other=dice.pick(THINGS).one,
    )


def _unknown_thing(dice: Dice) -> Exchange:
    name = made_up_word(dice) if dice.chance(0.6) else dice.pick(dice.pick(TOPICS["unknown"]))
    counted = not name.startswith("=") and dice.chance(0.8)
    name = name.removeprefix("=")
    if name in KNOWN:
        return _unknown_thing(dice)
    one, many = (with_article(name), plural(name)) if counted else (name, name)
    words = {"one": one, "many": many, "name": name, "the": f"the {name}" if counted else name}
    question = dice.pick((*WHAT, "What is {one} used for?", "Where do you find {one}?", "Do you like {many}?"))
    if dice.chance(0.15):
        words["other"] = dice.pick(THINGS).one
        question = "[What is the difference between {one} and {other}?|Compare {other} and {one}.]"
    response = _sorry(dice, one, f"what {one} is")
    return Exchange(capitalized(dice.say(question, **words)), response, "unknown", answer=NOT_KNOWN)


def _unknown_person(dice: Dice) -> Exchange:
    name = dice.pick(dice.pick(TOPICS["unknown people"]))
    if dice.chance(0.5):
        name = f"{dice.pick([*WOMEN, *MEN])} {capitalized(made_up_word(dice))}"
    question = (
        "[Who is {name}?|Who was {name}?|Do you know {name}?|Tell me about {name}.|What did {name} do?"
        "|When was {name} born?|What do you know about {name}?]"
    )
    return Exchange(dice.say(question, name=name), _sorry(dice, name, f"who {name} is"), "unknown", answer=NOT_KNOWN)


def _unknown_capital(dice: Dice) -> Exchange:
    place = dice.pick(dice.pick(TOPICS["unknown capitals"]))
    if dice.chance(0.4):
        place = capitalized(made_up_word(dice))
    question = "[What is the capital of {place}?|What's the capital of {place}?|Tell me the capital of {place}.]"
    response = _sorry(dice, place, f"the capital of {place}")
    return Exchange(dice.say(question, place=place), response, "unknown", answer=NOT_KNOWN)


def _unknown_task(dice: Dice) -> Exchange:
    thing = dice.pick([each for each in THINGS if each.group in ("objects", "animals", "nature", "places")])
    if dice.chance(0.5):
        task = f"{dice.pick(UNKNOWN_DEEDS)} {thing.one}"
        question = "[How do I {task}?|How can I {task}?|Explain how to {task}.|Tell me how to {task}.]"
        what = f"how to {task}"
    else:
        task = dice.pick(UNKNOWN_LISTS).format(one=thing.one, many=thing.many)
        question = "[List|Name|Give me|Tell me] [three|some|five] {task}."
        what = f"any {task}"
    answer = dice.say(
        "[I am sorry, I do not know {what}|I do not know {what}|Sorry, I cannot tell you {what}|I am afraid I do not "
        "know {what}]. [But I know what {one} is|I can only tell you what {one} is]: {one} is {kind} {clause}.",
        what=what, one=thing.one, kind=thing.kind, clause=thing.clause,
    )  # fmt: skip
    return Exchange(dice.say(question, task=task), dice.say(answer), "unknown", answer=NOT_KNOWN)


def _beyond(dice: Dice) -> Exchange:
    answer = dice.say(
        "[I am sorry, I cannot do that|Sorry, that is beyond me|I am afraid I cannot help with that"
        "|That is too hard for me]. [I am a small model, but I can|But I can] [{abilities}|{abilities}, for example].",
        abilities=joined(dice.sample(ABILITIES, dice.pick((2, 3)))),
    )
    return Exchange(dice.pick(BEYOND), answer, "unknown", answer="cannot|beyond me|too hard")


def _too_large(dice: Dice) -> Exchange:
    """Ask for a sum beyond the numbers that family ``math`` works with."""
    symbol = dice.pick(("+", "-", "*", "plus", "minus", "times"))
    if symbol in ("-", "minus") or dice.chance(0.5):
        left, right = dice.between(100, 9999), dice.between(2, 999)
    elif symbol in ("+", "plus"):
        left = dice.between(20, 98)
        right = dice.between(100 - left, 98)
    else:
        left = dice.between(12, 98)
        right = dice.between(100 // left + 1, 98)
    question = dice.say(
        "[What is {sum}?|What is {sum}?|How much is {sum}?|Calculate {sum}.|{sum}]", sum=f"{left} {symbol} {right}"
    )
    answer = dice.say(
        "[That is too large for me|These numbers are too large for me|Sorry, that is too large for me]. "
        "[I only work with numbers up to 99.|I can only count up to 99.]"
    )
    return Exchange(question, answer, "unknown", answer="too large")
