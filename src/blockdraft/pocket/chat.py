"""Family ``chat``: short helpful answers in several tones."""

from blockdraft.pocket import facts
from blockdraft.pocket.dice import Dice, capitalized, with_article
from blockdraft.pocket.draft import Draft
from blockdraft.pocket.stories import MEN, WOMEN

TONES = {
    "plain": ("", "[||In short: ]", "[||| I hope this helps.]"),
    "friendly": (
        "[ Keep a friendly tone.| Please be friendly.]",
        "[Sure! |Happy to help! |Great question! |Of course! ]",
        "[ Have fun!| Enjoy it!| Let me know if you need more!]",
    ),
    "formal": (
        "[ Answer in a formal tone.| Please answer formally.]",
        "[Certainly. |Thank you for your question. |Here is the information you asked for. ]",
        "[| Please ask if anything is unclear.| Kind regards.]",
    ),
    "child": (
        "[ Explain it to a child.| Use simple words.]",
        "[Let us see! |Okay, listen. |That is easy to explain. ]",
        "[ Now you know!| Is that not nice?| Easy, right?]",
    ),
}
"""Per tone: what a prompt says about it, how an answer opens, how it ends."""

COUNTS = {3: "three", 4: "four", 5: "five"}


def problem(dice: Dice) -> Draft:
    """A question and an answer; half of the questions ask for a tone."""
    kind = dice.pick((definition, comparison, comparison, ideas, ideas, how_to, advice, invented, invented, message))
    question, answer = kind(dice)
    if kind is message:
        return Draft(question, answer)
    tone = dice.pick(("plain", "plain", "plain", "friendly", "formal", "child"))
    asked, opening, ending = (dice.say(part) for part in TONES[tone])
    return Draft(question + asked, opening + answer + ending)


def definition(dice: Dice) -> tuple[str, str]:
    """What a thing is, what it is good for, where it is found."""
    thing = dice.pick(facts.THINGS)
    words = {**thing._asdict(), "one": with_article(thing.name), "a_kind": with_article(thing.kind)}
    question = dice.say(
        "[What is {one}?|What is {one} used for?|Tell me about the {name}.|Explain what {one} is."
        "|Describe {one} in a few sentences.|Why do people need {one}?]",
        **words,
    )
    details = dice.sample(
        (
            "[You [usually|often|mostly] find it {place}.|It is usually kept {place}.]",
            "[It is {trait}.|Most of them are {trait}.|A good one is {trait}.]",
            "[Without it, it would be hard to {use}.|It makes it easy to {use}.|It is the best choice to {use}.]",
            "[Many people have one.|It has been known for a long time.|There are many kinds of it.]",
        ),
        dice.pick((2, 3, 3)),
    )
    first = "{one} is {a_kind} [that people use to|that helps you to|used to] {use}."
    return question, capitalized(dice.say(" ".join([first, *details]), **words))


def comparison(dice: Dice) -> tuple[str, str]:
    """Two things side by side."""
    left, right = dice.sample(facts.THINGS, 2)
    words = {
        "left": left.name,
        "right": right.name,
        "one": with_article(left.name),
        "other": with_article(right.name),
        "left_a_kind": with_article(left.kind),
        "right_a_kind": with_article(right.kind),
        **{f"left_{key}": value for key, value in left._asdict().items()},
        **{f"right_{key}": value for key, value in right._asdict().items()},
    }
    question = dice.say(
        "[What is the difference between {one} and {other}?|Compare {one} and {other}."
        "|How does {one} differ from {other}?|Should I buy {one} or {other}?]",
        **words,
    )
    main = dice.say(
        "[With {one} you [can |]{left_use}, [while|but] with {other} you [can |]{right_use}."
        "|People use {one} to {left_use} and {other} to {right_use}."
        "|The {left} is {left_a_kind}. The {right} is {right_a_kind}.]",
        **words,
    )
    details = dice.sample(
        (
            "[The {left} is {left_trait}, [and|but] the {right} is {right_trait}.|The {right} is {right_trait}.]",
            "[You find the {left} {left_place} and the {right} {right_place}.|The {left} is often {left_place}.]",
            "[If you want to {left_use}, [take|choose] the {left}.|To {right_use}, [take|choose] the {right}.]",
        ),
        dice.pick((1, 2, 2, 3)),
    )
    return question, " ".join([main, *(dice.say(detail, **words) for detail in details)])


def ideas(dice: Dice) -> tuple[str, str]:
    """A list of a few ideas, with marks or in one sentence."""
    topic = dice.pick(list(facts.IDEAS))
    count = dice.pick(list(COUNTS))
    words = {"topic": topic, "number": COUNTS[count]}
    question = dice.say(
        "[[List|Name|Give me|Tell me] {number} {topic}.|What are {number} {topic}?|I need {number} {topic}.]", **words
    )
    items = dice.sample(facts.IDEAS[topic], count)
    intro = dice.say("[Here are {number} {topic}|These are {number} {topic}|My list of {topic}]", **words)
    style = dice.pick(("dashes", "numbers", "sentence"))
    if style == "sentence":
        listed = f"{', '.join(items[:-1])} and {items[-1]}"
        return question, f"{intro}: {listed}. " + dice.say(
            "[The first one is the most [useful|popular].|All of them are [easy|good].|I like {best} best.]",
            best=dice.pick(items),
        )
    marks = ["-"] * count if style == "dashes" else [f"{i}." for i in range(1, count + 1)]
    lines = [f"{mark} {capitalized(item)}" for mark, item in zip(marks, items, strict=True)]
    return question, "\n".join(
        [f"{intro}:", *lines, dice.say("[All of them are easy to find.|Choose what you like.|That is all.]")]
    )


def how_to(dice: Dice) -> tuple[str, str]:
    """Instructions; a step or two may be left out."""
    task = dice.pick(list(facts.HOW_TO))
    steps = facts.HOW_TO[task]
    steps = dice.some(steps, len(steps) - dice.pick((0, 1, 1, 2)))
    question = dice.say(
        "[How do I {task}?|How can I {task}?|Explain how to {task}.|Tell me the steps to {task}.]", task=task
    )
    intro = dice.say("[To {task}, follow these steps|This is how to {task}|You can {task} like this]", task=task)
    if dice.chance(0.6):
        lines = [f"{i}. {step}." for i, step in enumerate(steps, start=1)]
        return question, "\n".join([f"{intro}:", *lines, dice.say("[Take your time.|That is it.|Then you are done.]")])
    first, *rest = (step[0].lower() + step[1:] for step in steps)
    links = [dice.pick(("Then", "Next,", "After that,", "Now")) for _ in rest]
    prose = [f"First {first}.", *(f"{link} {step}." for link, step in zip(links, rest, strict=True))]
    return question, f"{intro}. {' '.join(prose)}"


def advice(dice: Dice) -> tuple[str, str]:
    """A worry, and two or three things to do about it."""
    worry = dice.pick(list(facts.WORRIES))
    tips = dice.sample(facts.WORRIES[worry], dice.pick((2, 3)))
    since = dice.say("[| these days| again| lately]")
    question = dice.say(
        "[{worry}. What [can|should] I do?|What would you do if {worry}?|Help, {worry}!]", worry=worry + since
    )
    opening = dice.say(
        "[I am sorry to hear that.|Many people know this problem.|Do not worry, this is common.|That can be hard.]"
    )
    first, *rest = tips
    middle = dice.say("[First of all, {tip}.|You could {tip}.|I would {tip}.]", tip=first)
    more = [dice.say("[Also, {tip}.|It helps to {tip}.|Then {tip}.|You can also {tip}.]", tip=tip) for tip in rest]
    ending = dice.say("[Give it [some time|a few days].|Small steps are enough.|It will get better soon.]")
    return capitalized(question), " ".join([opening, middle, *more, ending])


def invented(dice: Dice) -> tuple[str, str]:
    """Something that does not exist: some facts are given, the rest is made up."""
    name = capitalized("".join(dice.sample(facts.SYLLABLES, dice.pick((2, 3)))))
    words = {
        "name": name,
        "kind": dice.pick(facts.INVENTED_KINDS),
        "color": dice.pick(facts.COLORS),
        "size": dice.pick(facts.SIZES),
        "place": dice.pick(facts.LANDSCAPES),
        "side": dice.pick(facts.DIRECTIONS),
        "fame": dice.pick(facts.FAME),
        "person": dice.pick([*WOMEN, *MEN]),
    }
    known = "{name} is a {size} {color} {kind} [from|near] the {place} in the {side}."
    question = dice.say(
        f"[{known} [Tell me more about it.|Describe it.|What can you say about {{name}}?]"
        "|Invent a {kind} called {name}.|Write a few sentences about the {color} {kind} {name}.]",
        **words,
    )
    details = dice.sample(
        (
            "[People know it for {fame}.|It is famous for {fame}.]",
            "[{person} was the first to write about it.|{person} found it by chance.|{person} made a song about it.]",
            "[It is best seen in [spring|summer|autumn|winter].|Most visitors come in [May|June|July].]",
            "[Nobody knows how old it is.|It is older than it looks.|It is [only ten|about fifty] years old.]",
        ),
        dice.pick((2, 3, 3)),
    )
    first = "{name} is a {size} {color} {kind} [in|near] the {place} [in|of] the {side}."
    return question, dice.say(" ".join([first, *details]), **words)


def message(dice: Dice) -> tuple[str, str]:
    """A short message to somebody."""
    reader, writer = dice.sample([*WOMEN, *MEN], 2)
    words = {"reader": reader, "writer": writer, "day": dice.pick(facts.WEEKDAYS)}
    words |= {"event": dice.pick(facts.EVENTS), "favor": dice.pick(facts.FAVORS), "hour": str(dice.between(2, 9))}
    if dice.chance(0.5):
        question = (
            "[Write|Draft] a short [message|note] from {writer} to {reader}: an invitation to a {event} on {day}."
        )
        body = (
            "[I would like to invite you to|I hope you can come to|Please come to] my {event} on {day}. "
            "[We start at {hour}.|Come at {hour} or later.|It begins at {hour}.] "
            "[There will be [cake|music|good food].|Bring a friend if you like.|You do not have to bring anything.]"
        )
    else:
        question = "[Write|Draft] a short [message|note] from {writer} to {reader} to say thanks for {favor}."
        body = (
            "[Thank you so much|Many thanks|I want to thank you] for {favor}. "
            "[It made me very happy.|That was very kind of you.|I will not forget it.] "
            "[I hope to see you on {day}.|Let us meet on {day}.|Next time it is my turn.]"
        )
    ending = "[See you soon|Best wishes|Yours|All the best],\n{writer}"
    return dice.say(question, **words), dice.say(f"[Dear|Hello|Hi] {{reader}},\n{body}\n{ending}", **words)
