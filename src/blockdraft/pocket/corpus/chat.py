"""Family ``chat`` asks questions and makes small requests, which are answered in one of several tones.

What can be right or wrong is in `knowledge`, what pocket says of itself in `smalltalk`. Here are the kinds that have
many good answers: lists, instructions, advice, messages, stories.
"""

from blockdraft.pocket.corpus.dice import TOPICS, Dice, Exchange, capitalized, joined, read_talks
from blockdraft.pocket.corpus.knowledge import BY_GROUP, THINGS, comparison, definition, fact, two_definitions
from blockdraft.pocket.corpus.smalltalk import small_talk, unknown
from blockdraft.pocket.corpus.stories import MEN, SYLLABLES, WOMEN

TONES = {
    "plain": ("", "", "[|||| I hope this helps.| Let me know if you need more.]"),
    "friendly": (
        "[ Keep a friendly tone.| Please be friendly.| Be nice.]",
        "[Sure! |Happy to help! |Great question! |Of course! ]",
        "[ Have fun!| Have a nice day!| Let me know if you need more!]",
    ),
    "formal": (
        "[ Answer in a formal tone.| Please answer formally.| Be formal.]",
        "[Certainly. |Thank you for your question. |Here is the information you asked for. ]",
        "[| Please ask if anything is unclear.| I remain at your service.]",
    ),
    "child": (
        "[ Explain it to a child.| Use simple words.| I am six years old.]",
        "[Let us see! |Okay, listen. |That is easy to explain. ]",
        "[ Now you know!| Easy, right?| You can ask me more!]",
    ),
}
"""What a prompt says about the tone, how the answer opens, how it ends."""

MESSAGES = read_talks("talks.txt")["messages"]
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EVENTS = ("birthday", "dinner", "concert", "picnic", "game night", "house party", "school play", "boat trip", "wedding")
FAVORS = ("the book", "the flowers", "your help", "the lovely dinner", "the ride home", "the good advice", "the cake")
FAULTS = ("being late", "the broken cup", "missing the party", "my angry words", "not calling back", "the noise")


def problem(dice: Dice) -> Exchange:
    """Draw a question or request and a good answer."""
    kind = dice.pick(CHAT_FORMS)
    draft = kind(dice)
    prompt, response = draft.prompt, draft.response
    if kind in WITH_TONES:
        tone = dice.pick(("plain",) * 9 + ("friendly", "formal", "child"))
        asked, opening, ending = (dice.say(part) for part in TONES[tone])
        if tone == "plain" and dice.chance(0.12):
            prompt = dice.say("[Hi! |Hello! |Hey! |Quick question: |One question: |I have a question. ]") + prompt
        if "\n" in response and ending:
            ending = "\n" + ending.strip()
        prompt, response = prompt + asked, opening + response + ending
    return Exchange(dice.casually(prompt), response, draft.kind, draft.difficulty, draft.answer)


def ideas(dice: Dice) -> Exchange:
    """Ask for a list of a few things."""
    topic, *known = dice.pick(TOPICS["lists"])
    count = dice.pick([number for number in COUNTS if number <= len(known) - 1])
    number = COUNTS[count] if dice.chance(0.8) else str(count)
    words = {"topic": topic, "number": number}
    if dice.chance(0.3):
        words["number"], count = "some", max(3, count)
        question = (
            "[What are some {topic}?|Give me some {topic}.|Tell me some {topic}.|List some {topic}.|Name some {topic}."
            "|Can you list some {topic}?|I need some {topic}.|Do you know some {topic}?|Any ideas for {topic}?]"
        )
    else:
        question = (
            "[[List|Name|Give me|Tell me|Suggest|Write down] {number} {topic}.|What are {number} {topic}?"
            "|I need {number} {topic}.|Can you [name|list|give me] {number} {topic}?"
            "|Give me a list of {number} {topic}.]"
        )
    items = dice.sample(known, count)
    intro = "[Here are {number} {topic}|These are {number} {topic}|Some {topic}|My list of {topic}]"
    intro, question = capitalized(dice.say(intro, **words)), dice.say(question, **words)
    style = dice.pick(("dashes", "numbers", "sentence"))
    if style == "sentence":
        closing = "[|| I like the first one best.| All of them are good.| There are more, of course.]"
        return Exchange(question, f"{intro}: {joined(items)}." + dice.say(closing), "list")
    marks = ["-"] * count if style == "dashes" else [f"{i}." for i in range(1, count + 1)]
    lines = [f"{mark} {capitalized(item)}" for mark, item in zip(marks, items, strict=True)]
    closing = dice.say("[||\nChoose what you like.|\nThere are more, of course.|\nThat should be enough.]")
    return Exchange(question, "\n".join([f"{intro}:", *lines]) + closing, "list")


def how_to(dice: Dice) -> Exchange:
    """Ask for instructions; neighboring steps may be told as one, and remarks may stand between them."""
    task, *steps = dice.pick(TOPICS["instructions"])
    question = dice.say(
        "[How do I {task}?|How can I {task}?|How do you {task}?|How to {task}?|Explain how to {task}."
        "|Tell me how to {task}."
        "|Tell me the steps to {task}.|What is the best way to {task}?|I want to {task}. What do I do?"
        "|Can you explain how to {task}?|What do I have to do to {task}?|Please tell me how to {task}.]",
        task=task,
    )
    steps = _merged(dice, steps)
    intro = dice.say(
        "[To {task}, follow these steps|This is how to {task}|You can {task} like this|Here is how to {task}]",
        task=task,
    )
    if dice.chance(0.6):
        lines = [f"{i}. {step}.{_remark(dice)}" for i, step in enumerate(steps, start=1)]
        closing = dice.say("[|||\nThat is it.|\nThen you are done.]")
        return Exchange(question, "\n".join([f"{intro}:", *lines]) + closing, "instructions")
    first, *rest = (step[0].lower() + step[1:] for step in steps)
    links = [dice.pick(("Then", "Next,", "After that,", "Now")) for _ in rest]
    prose = [f"First, {first}.", *(f"{link} {step}.{_remark(dice)}" for link, step in zip(links, rest, strict=True))]
    return Exchange(question, f"{intro}. {' '.join(prose)}", "instructions")


def _merged(dice: Dice, steps: list[str]) -> list[str]:
    """Tell some neighboring steps as one."""
    merged = steps[:1]
    for step in steps[1:]:
        if dice.chance(0.2) and " then " not in merged[-1]:
            merged[-1] += f", then {step[0].lower()}{step[1:]}"
        else:
            merged.append(step)
    return merged


def _remark(dice: Dice) -> str:
    return dice.say("[ Take your time.| Do not rush this.| This step matters.]") if dice.chance(0.12) else ""


def advice(dice: Dice) -> Exchange:
    """Tell a worry, and two or three things to do about it."""
    worry, *tips = dice.pick(TOPICS["worries"])
    tips = dice.sample(tips, dice.pick((2, 3, 3)))
    lasting = worry.startswith(("I am tired", "I am stressed", "I am bored", "I am sad", "I cannot", "I spend", "my "))
    since = dice.say("[|||| these days| again| lately]") if lasting and "decide" not in worry else ""
    question = dice.say(
        "[{worry}. What [can|should] I do?|{worry}. Any advice?|{worry}. Can you help me?|{worry}, what can I do?"
        "|What would you do if {worry}?|Help, {worry}!|{worry}.|What helps if {worry}?]",
        worry=worry + since,
    )
    opening = (
        "[I am sorry to hear that.|Many people know this problem.|Do not worry, this is common.|That can be hard.]"
    )
    if " want " in worry:
        opening = "[That is a good plan.|What a good idea.|Good for you.|That is a fine goal.]"
    first, *rest = tips
    mine = "" if "your" in first else "|I would {tip}."
    middle = dice.say(f"[First of all, {{tip}}.|You could {{tip}}.{mine}|Try to {{tip}}.]", tip=first)
    more = [dice.say("[Also, {tip}.|It helps to {tip}.|Then {tip}.|You can also {tip}.]", tip=tip) for tip in rest]
    soon = "" if " want " in worry else "|It will get better soon."
    ending = dice.say(f"[|Give it [some time|a few days].|Small steps are enough.{soon}]")
    response = " ".join([dice.say(opening), middle, *more, ending]).strip()
    return Exchange(capitalized(question), response, "advice")


def message(dice: Dice) -> Exchange:
    """Ask for a short message to somebody."""
    reader, writer = dice.sample([*WOMEN, *MEN], 2)
    words = {
        "reader": reader, "writer": writer, "day": dice.pick(WEEKDAYS), "event": dice.pick(EVENTS),
        "favor": dice.pick(FAVORS), "fault": dice.pick(FAULTS), "hour": str(dice.between(2, 9)),
    }  # fmt: skip
    asked, body = dice.pick(MESSAGES)
    signed = dice.chance(0.6)
    words["who"] = f"{writer} is" if signed else "I am"
    form = "[Write|Draft|Please write|Can you write] a short [message|note|text|email] "
    question = dice.say(form + ("from {writer} to {reader}" if signed else "to {reader}") + asked, **words)
    if question.startswith("Can"):
        question = question.rstrip(".") + "?"
    ending = (
        "[See you soon|Best wishes|Yours|All the best],\n{writer}"
        if signed
        else "[See you soon|Best wishes|All the best]!"
    )
    response = dice.say(f"[Dear|Hello|Hi] {{reader}},\n{body}\n{ending}", **words)
    return Exchange(question, response, "message")


PLACES = ("by the sea", "at the edge of a forest", "in a small village", "on a high hill", "near an old bridge",
          "in a noisy city", "on a lonely island", "next to a quiet lake")  # fmt: skip
FINDS = ("a golden key", "an old map", "a small box", "a letter without a name", "a broken clock", "a blue stone",
         "a lost kitten", "a strange seed")  # fmt: skip
DEEDS = {
    "a golden key": "It opened an old gate, and behind it was a garden full of light.",
    "an old map": "It led to a tree under which somebody had hidden a song book.",
    "a small box": "There was nothing in it but a warm wind that smelled of summer.",
    "a letter without a name": "It said: somebody is thinking of you.",
    "a broken clock": "When it was repaired, it showed only the happy hours.",
    "a blue stone": "At night it shone and showed the way home.",
    "a lost kitten": "They looked for its home and became friends on the way.",
    "a strange seed": "By the next morning it had become a tree with silver leaves.",
}


def story(dice: Dice) -> Exchange:
    """Ask for a very short story."""
    hero = dice.pick([*BY_GROUP["animals"], *BY_GROUP["people"]])
    find, place = dice.pick(FINDS), dice.pick(PLACES)
    name = dice.pick([*WOMEN, *MEN])
    if dice.chance(0.4):
        question = (
            "[[Tell|Write] me a [very |]short story.|Tell me a [|short ]story.|Do you know a [|short ]story?"
            "|Please tell me a story.]"
        )
    else:
        question = "[Tell me a|Write a|Tell me a very|Please tell me a] short story about {one}[|| called {name}]."
    question = dice.say(question, one=hero.one, name=name)
    response = dice.say(
        "[Once upon a time|Long ago|Once], {one} [called|named] {name} lived {place}. "
        "[One morning|One day|One evening|One rainy night] {name} found {find}[|| on the way home]. {deed} "
        "[From that day on, {name} was never alone again.|And {name} lived happily ever after."
        "|{name} told everybody about it, but nobody believed a word.|Since then {name} smiles a little more often.]",
        one=hero.one, name=name, place=place, find=find, deed=DEEDS[find],
    )  # fmt: skip
    return Exchange(question, response, "story")


def line(dice: Dice) -> Exchange:
    """Ask for a line about something; what is no topic of its own gets a plain one."""
    form = (
        "[Write|Give me] [one line|a line|a sentence|one sentence] about {topic}.|Say something [nice |]about {topic}."
    )
    if dice.chance(0.75):
        topic, says = dice.pick(TOPICS["lines"])
        response = capitalized(f"{topic} {says}.")
    else:
        thing = dice.pick(THINGS)
        topic, response = thing.one, capitalized(dice.say(f"{thing.one} is {thing.kind} {thing.clause}."))
    question = dice.say(f"[{form}|[Write|Make] a [very |]short poem about {{topic}}.]", topic=topic)
    if "poem" in question:
        response = (
            dice.say("[I am no great poet, but here is a line:|Here is one line of a poem:|A very short one:] ")
            + response
        )
    return Exchange(question, response, "line")


def joke(dice: Dice) -> Exchange:
    """Ask for a joke."""
    asked, answered = dice.pick(TOPICS["jokes"])
    question = dice.say(
        "[Tell me a joke.|Tell me a joke!|Do you know a joke?|Make me laugh.|Say something funny.|A joke, please."
        "|Can you tell me a joke?|I need a good joke.|Tell me [a riddle|something funny].]"
    )
    return Exchange(
        question, dice.say("[|Here is one: |Okay: ]{asked} {answered}", asked=asked, answered=answered), "joke"
    )


COLORS = ("red", "blue", "green", "white", "black", "yellow", "gray", "golden", "silver", "brown")
INVENTION_SIZES = ("tiny", "small", "large", "huge")
INVENTIONS = ("bird", "fish", "lizard", "fox", "beetle", "flower", "tree")
LANDSCAPES = ("river", "lake", "forest", "mountain", "desert", "coast", "valley", "island")

FAME = (
    "its songs",
    "its warm light",
    "its sweet smell",
    "its bright colors",
    "its friendly nature",
    "its strange shape",
)


def invention(dice: Dice) -> Exchange:
    """Ask for something that does not exist: some of it is given, the rest is made up."""
    words = {
        "name": capitalized("".join(dice.sample(SYLLABLES, dice.pick((2, 3))))), "kind": dice.pick(INVENTIONS),
        "color": dice.pick(COLORS), "size": dice.pick(INVENTION_SIZES), "place": dice.pick(LANDSCAPES),
        "side": dice.pick(("north", "south", "east", "west")), "fame": dice.pick(FAME),
        "person": dice.pick([*WOMEN, *MEN]),
    }  # fmt: skip
    given = "{name} is a {size} {color} {kind} from the {place} in the {side}."
    question = dice.say(
        f"[{given} [Tell me more about it.|Describe it.|What can you say about {{name}}?]"
        "|Invent a {color} {kind} called {name}.|Invent a {kind} called {name}."
        "|Make up a {size} {color} {kind} named {name}.]",
        **words,
    )
    details = dice.sample(
        (
            "[People know it for {fame}.|It is famous for {fame}.|Everybody loves {fame}.]",
            "{person} [was the first to write about it|found it by chance|drew the first picture of it].",
            "[It is best seen in [spring|summer|autumn|winter].|Look for it in [May|June|July].]",
            "[Nobody knows how old it gets.|It is older than it looks.|Only a few have seen it.]",
        ),
        dice.pick((2, 3, 3)),
    )
    first = "[|The ]{name} is a {size} {color} {kind} [from|that lives near] the {place} in the {side}."
    if words["kind"] in ("flower", "tree"):
        first = "[|The ]{name} is a {size} {color} {kind} [from|that grows near] the {place} in the {side}."
    return Exchange(question, dice.say(" ".join([first, *details]), **words), "invention")


CHAT_FORMS = (
    *(definition,) * 12, two_definitions, *(comparison,) * 3, *(fact,) * 6, *(ideas,) * 3, *(how_to,) * 3,
    *(advice,) * 2, *(message,) * 2, *(story,) * 2, line, joke, invention, *(small_talk,) * 3, *(unknown,) * 4,
)  # fmt: skip
"""How often each kind comes, by repetition."""

WITH_TONES = (definition, two_definitions, comparison, fact, ideas, how_to, advice)
