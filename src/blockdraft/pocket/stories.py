"""The stories that word problems tell: who has what, what happens to it, what is asked."""

from blockdraft.pocket.arithmetic import LARGEST, Event, Story, product
from blockdraft.pocket.dice import Dice, listed
from blockdraft.pocket.draft import Draft

WOMEN = listed("Mia Anna Lena Zoe Ruth Clara Ida Nora Elsa Grace Maya Rosa Kate Alma Vera Jane")
MEN = listed("Tom Ben Max Paul Omar Hugo Leo Finn Karl Sam Noah Ravi Luis Adam Emil Jack")
THINGS = listed(
    "apples pears marbles stickers books coins shells cards pencils stamps cookies eggs flowers buttons stones "
    "balloons beads plums tickets candles toys photos lemons nuts"
)
CONTAINERS = listed("boxes bags baskets jars trays drawers shelves packs crates tins")
GOODS = listed("pen cup ball hat cake kite lamp plant scarf notebook sandwich puzzle")
GROUPS = listed("children friends players neighbors teams classes")
HABITS = (
    ("walks", "km"),
    ("runs", "km"),
    ("reads", "pages"),
    ("writes", "pages"),
    ("swims", "laps"),
    ("plants", "trees"),
)


def problem(dice: Dice) -> Draft:
    """A random problem; half of them take one step."""
    num_steps = dice.pick((1, 1, 1, 2, 2, 3))
    return dice.pick(STORIES)(dice, num_steps)


def finish(story: Story, question: str, closing: str) -> Draft:
    """The story as a conversation."""
    prompt = story.prompt(question)
    return Draft(prompt, story.solution(closing), len(story.steps), str(story.value))


def person(dice: Dice) -> dict[str, object]:
    """A name and its pronoun."""
    if dice.chance(0.5):
        return {"name": dice.pick(WOMEN), "who": "she"}
    return {"name": dice.pick(MEN), "who": "he"}


def gains_and_losses(dice: Dice, num_steps: int) -> Draft:
    """Somebody has things, gets some and gives some away."""
    start = dice.between(8, 80)
    words = person(dice) | {"things": dice.pick(THINGS), "start": start}
    story = Story(dice, start, "{name} [has|starts with|begins with] {start} {things}.", words)
    story.facts.append(story.say("{name} [has|owns|starts with|keeps] {start} {things}."))
    when = "[Then|Later|After that|The next day|One day] [{name}|{who}]"
    gain = Event(
        when + " [buys|finds|gets|wins|collects] {number} more[| {things}].",
        "[{number} are added|we add {number}|{who} gets {number} more]",
    )
    loss = Event(
        when + " [gives away|loses|sells|uses] {number}[| {things}| of them].",
        "[{number} are taken away|we subtract {number}|{who} has {number} fewer]",
    )
    for _ in range(num_steps):
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many {things} does [{name}|{who}] have [now|in the end|at the end]?",
        "[So|This means that|In the end,] {name} has {value} {things}[| now].",
    )


def groups(dice: Dice, num_steps: int) -> Draft:
    """Equal groups of things, then some come or go."""
    count, each = product(dice)
    words = {"things": dice.pick(THINGS), "boxes": dice.pick(CONTAINERS), "count": count}
    story = Story(dice, count, f"[There are|We have] {{count}} {{boxes}} [of|with] {each} {{things}}.", words)
    multiply = Event(
        "[There are {count} {boxes}. Each [one|of them] holds {number} {things}."
        "|A shop has {count} {boxes} with {number} {things} in each."
        "|{count} {boxes} hold {number} {things} each.]",
        "[we multiply to find all {things}|all {boxes} together hold]",
    )
    gain = Event(
        "[Another|Then another] {number} {things} are [put in|added].", "[we add {number}|{number} more come in]"
    )
    loss = Event(
        "[Then {number} {things} are [sold|taken out|lost]|{number} of the {things} are [broken|given away]].",
        "[we take away {number}|{number} are gone]",
    )
    story.apply("*", each, multiply)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many {things} are there[ in total| altogether| now|]?",
        "[So|This means that|In total] there are {value} {things}.",
    )


def sharing(dice: Dice, num_steps: int) -> Draft:
    """Things are shared equally; each share then grows or shrinks."""
    each, count = product(dice)
    words = {"things": dice.pick(THINGS), "group": dice.pick(GROUPS), "total": each * count}
    story = Story(dice, each * count, f"[There are|We have] {{total}} {{things}} for {count} {{group}}.", words)
    divide = Event(
        "[{number} {group} share {total} {things} equally."
        "|{total} {things} are [divided|shared] equally among {number} {group}.]",
        "[we divide by {number}|each share is the same, so we divide]",
    )
    gain = Event(
        "[Then each|Each of them then] [gets|finds] {number} more.", "[each gets {number} more|we add {number}]"
    )
    loss = Event(
        "[Then each|Each of them then] [gives away|uses] {number}.",
        "[each has {number} fewer|we subtract {number}]",
    )
    story.apply("/", count, divide)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many {things} does each [get|have|have in the end]?",
        "[So|This means that|In the end] each of the {group} has {value} {things}.",
    )


def comparing(dice: Dice, num_steps: int) -> Draft:
    """Two people, one with more than the other; then both together; then a change."""
    first, second = dice.sample([*WOMEN, *MEN], 2)
    start = dice.between(6, 40)
    words: dict[str, object] = {"first": first, "second": second, "things": dice.pick(THINGS), "start": start}
    story = Story(dice, start, "[We know that {first} has|{first} has] {start} {things}.", words)
    story.facts.append(story.say("{first} has {start} {things}."))
    if dice.chance(0.5):
        reason = "[{second} has {number} more|for {second} we add {number}]"
        event = Event("{second} has {number} more[| {things}] than {first}.", reason)
        story.apply("+", dice.between(2, LARGEST - 2 * start), event)
    else:
        reason = "[{second} has {number} fewer|for {second} we subtract {number}]"
        event = Event("{second} has {number} fewer[| {things}] than {first}.", reason)
        story.apply("-", dice.between(2, start - 3), event)
    if num_steps == 1:
        asked = "How many {things} does {second} have?"
        return finish(story, asked, "[So|This means that] {second} has {value} {things}.")
    story.apply("+", start, Event("", "[we add the {number} of {first}|{first} has {number}, so together they have]"))
    if num_steps == 3:
        gain = Event("Together they [find|buy] {number} more.", "[we add {number}|{number} are new]")
        loss = Event("Together they [lose|sell|give away] {number}.", "[we subtract {number}|{number} are gone]")
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many {things} do they have [together|altogether|in total]?",
        "[So|This means that] [they have|both together have] {value} {things}.",
    )


def shopping(dice: Dice, num_steps: int) -> Draft:
    """Several goods at one price, then extra costs or a voucher."""
    count, price = product(dice)
    good, other = dice.sample(GOODS, 2)
    words = person(dice) | {"good": good, "other": other, "count": count}
    opening = f"[{{name}} buys {{count}} {{good}}s|There are {{count}} {{good}}s] at {price} coins each."
    story = Story(dice, count, opening, words)
    multiply = Event(
        "[One {good} costs {number} coins. {name} buys {count} {good}s."
        "|{name} buys {count} {good}s [for|at] {number} coins each.]",
        "[the {good}s cost|we multiply the number by the price]",
    )
    gain = Event(
        "[The delivery costs {number} coins more|{who} also buys a {other} for {number} coins].",
        "[we add {number}|there are {number} coins more to pay]",
    )
    loss = Event(
        "A [coupon|voucher|friend] pays {number} of the coins.", "[{number} are paid already|we subtract {number}]"
    )
    story.apply("*", price, multiply)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many coins does [{name}|{who}] [pay|spend][| in total]?",
        "[So|This means that|In total,] {name} pays {value} coins.",
    )


def days(dice: Dice, num_steps: int) -> Draft:
    """The same amount every day, then a bit more or a part of it."""
    each, count = product(dice)
    verb, unit = dice.pick(HABITS)
    words = person(dice) | {"verb": verb, "unit": unit, "each": each}
    opening = f"[{{name}} {{verb}} {{each}} {{unit}} a day|Each day has {{each}} {{unit}}, for {count} days]."
    story = Story(dice, each, opening, words)
    multiply = Event(
        "{name} {verb} {each} {unit} [every day|each day|a day] for {number} days.",
        "[in {number} days that makes|we multiply by {number} days]",
    )
    gain = Event(
        "[The week after|On the weekend] {who} {verb} {number} {unit} more.",
        "[we add {number}|there are {number} more]",
    )
    loss = Event("[Of these|But] {number} {unit} do not count.", "[we leave out {number}|we subtract {number}]")
    story.apply("*", count, multiply)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    return finish(
        story,
        "How many {unit} is that [in total|altogether|for {name}]?",
        "[So|This means that|In total,] it is {value} {unit} for {name}.",
    )


STORIES = (gains_and_losses, gains_and_losses, groups, sharing, comparing, comparing, shopping, days)
