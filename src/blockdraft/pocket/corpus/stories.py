"""Tell the stories of word problems: who has what, what happens to it, what is asked."""

from itertools import pairwise

from blockdraft.pocket.corpus.arithmetic import LARGEST, Event, Story, bare_sum, product
from blockdraft.pocket.corpus.dice import Dice, Exchange, capitalized, words

WOMEN, MEN, SYLLABLES = words("women"), words("men"), words("syllables")
THINGS, MORE_THINGS = words("things to count"), words("more things to count")
CONTAINERS, GOODS, GROUPS = words("containers"), words("goods"), words("groups")
CURRENCIES = ("coins", "coins", "dollars", "euros")
HABITS = (
    ("walks", "km"),
    ("runs", "km"),
    ("reads", "pages"),
    ("writes", "pages"),
    ("swims", "laps"),
    ("bakes", "cakes"),
)
CROWDS = (
    ("on a bus", "people", "[get on|join them]", "[get off|leave]"),
    ("on a train", "people", "[get on|join them]", "[get off|leave]"),
    ("in a library", "people", "[come in|arrive]", "[leave|go home]"),
    ("in a classroom", "children", "[come in|arrive]", "[leave|go home]"),
    ("on a pond", "ducks", "[arrive|join them]", "[fly away|leave]"),
    ("in a tree", "birds", "[arrive|join them]", "[fly away|leave]"),
    ("in a park", "dogs", "[arrive|join them]", "[leave|run away]"),
    ("in a parking lot", "cars", "[arrive|drive in]", "[leave|drive away]"),
)


def problem(dice: Dice) -> Exchange:
    """Draw a problem; half of them take one step."""
    num_steps = dice.pick((1, 1, 1, 2, 2, 3))
    return dice.pick(STORIES)(dice, num_steps)


def person(dice: Dice) -> dict[str, object]:
    """Draw a name and its pronoun."""
    if dice.chance(0.5):
        return {"name": dice.pick(WOMEN), "who": "she"}
    return {"name": dice.pick(MEN), "who": "he"}


def people(dice: Dice, count: int) -> list[str]:
    """Draw different names; one in ten does not exist, so that the model learns to copy any."""
    names = dice.sample([*WOMEN, *MEN], count)
    return [capitalized("".join(dice.sample(SYLLABLES, 2))) if dice.chance(0.1) else name for name in names]


def things(dice: Dice) -> str:
    """Draw things to count, mostly usual ones."""
    return dice.pick(THINGS) if dice.chance(0.75) else dice.pick(MORE_THINGS)


def gains_and_losses(dice: Dice, num_steps: int) -> Exchange:
    """Somebody has things, gets some and gives some away; told in sentences or in one."""
    start = dice.between(3, 80)
    words = person(dice) | {"things": things(dice), "start": start}
    story = Story(dice, start, "{name} [has|starts with|begins with] {start} {things}.", words)
    in_one = dice.chance(0.3)
    when = "" if in_one else "[[Then|Later|After that|The next day|One day] |][{name}|{who}] "
    end = "" if in_one else "."
    gain = Event(
        when + "[buys|finds|gets|wins|collects] {number} more[| {things}]" + end,
        "[{number} are added|we add {number}|{who} gets {number} more]",
    )
    loss = Event(
        when + "[gives away|loses|sells|gives a friend] {number}[| {things}| of them]" + end,
        "[{number} are taken away|we subtract {number}|{who} has {number} fewer]",
    )
    for _ in range(num_steps):
        story.more_or_less(gain, loss)
    first = story.say("{name} [has|owns|starts with] {start} {things}")
    if in_one:
        events = [fact[0].lower() + fact[1:] for fact in story.facts]
        story.facts = [f"{', '.join([first, *events[:-1]])} {dice.pick(('and', 'and then'))} {events[-1]}."]
    else:
        story.facts.insert(0, f"{first}.")
    return story.finish(
        "How many {things} does [{name}|{who}] have[| now| in the end| at the end]?",
        "[[So|This means that] {name} has {value} {things}[| now]|In the end, {name} has {value} {things}].",
        "gains and losses",
    )


def crowds(dice: Dice, num_steps: int) -> Exchange:
    """People or animals are somewhere; some come and some go."""
    start = dice.between(3, 80)
    place, beings, come, leave = dice.pick(CROWDS)
    there = place.replace(" a ", " the ")
    words: dict[str, object] = {"place": place, "there": there, "beings": beings, "start": start}
    story = Story(dice, start, "[At first there are {start} {beings} {place}.|We start with {start} {beings}.]", words)
    story.facts.append(story.say("[There are {start} {beings} {place}|{start} {beings} are {place}]."))
    gain = Event(f"[Then |Later |]{{number}} more {{beings}} {come}.", "[{number} are added|we add {number}]")
    loss = Event(f"[Then |Later |]{{number}} {{beings}} {leave}.", "[{number} are gone|we subtract {number}]")
    for _ in range(num_steps):
        story.more_or_less(gain, loss)
    return story.finish(
        "How many {beings} are [there now|{there} now|{there} in the end|there in the end]?",
        "[So|This means that|In the end] there are {value} {beings} {there}.",
        "crowds",
    )


def groups(dice: Dice, num_steps: int) -> Exchange:
    """Things come in equal groups; then some are added or taken away."""
    count, each = product(dice)
    words: dict[str, object] = {"things": things(dice), "boxes": dice.pick(CONTAINERS), "count": count}
    story = Story(dice, count, f"[There are|We have] {{count}} {{boxes}} with {each} {{things}} each.", words)
    multiply = Event(
        "[There are {count} {boxes}. Each [one|of them] holds {number} {things}."
        "|A shop has {count} {boxes} with {number} {things} in each."
        "|There are {count} {boxes} with {number} {things} each."
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
    asked = "[ in total| altogether|]" if num_steps == 1 else "[ now| in the end|]"
    return story.finish(
        "How many {things} are there" + asked + "?",
        "[So|This means that|In total] there are {value} {things}.",
        "groups",
    )


def sharing(dice: Dice, num_steps: int) -> Exchange:
    """Things are shared equally; each share then grows or shrinks."""
    each, count = product(dice)
    words: dict[str, object] = {"things": things(dice), "group": dice.pick(GROUPS), "total": each * count}
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
        "[Then each|Each of them then] [gives away|uses] {number}.", "[each has {number} fewer|we subtract {number}]"
    )
    story.apply("/", count, divide)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    asked = "[get|have]" if num_steps == 1 else "have[| in the end| now]"
    return story.finish(
        f"How many {{things}} does each [of them |]{asked}?",
        "[So|This means that|In the end] each of the {group} has {value} {things}.",
        "sharing",
    )


def comparing(dice: Dice, num_steps: int) -> Exchange:
    """One of two people has more than the other; then both count together; then something changes."""
    first, second = people(dice, 2)
    start = dice.between(6, 40)
    words: dict[str, object] = {"first": first, "second": second, "things": things(dice), "start": start}
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
    return _together(story, num_steps, start)


def multiples(dice: Dice, num_steps: int) -> Exchange:
    """One of two people has several times as many as the other; then both count together; then something changes."""
    first, second = people(dice, 2)
    times = dice.between(2, 5)
    start = dice.between(3, LARGEST // (times + 1))
    words: dict[str, object] = {"first": first, "second": second, "things": things(dice), "start": start}
    story = Story(dice, start, "[We know that {first} has|{first} has] {start} {things}.", words)
    story.facts.append(story.say("{first} has {start} {things}."))
    many = "twice" if times == 2 else "{number} times"
    event = Event(
        f"{{second}} has {many} as many[| {{things}}] as {{first}}.",
        "[for {second} we multiply by {number}|{second} has]",
    )
    story.apply("*", times, event)
    return _together(story, num_steps, start)


def _together(story: Story, num_steps: int, start: int) -> Exchange:
    """Ask for the second one's things, or for those of both, perhaps after a change."""
    if num_steps == 1:
        asked = "How many {things} does {second} have?"
        return story.finish(asked, "[So|This means that] {second} has {value} {things}.", "two people")
    story.apply("+", start, Event("", "[we add the {number} of {first}|{first} has {number}, so together they have]"))
    if num_steps == 3:
        gain = Event("Together they [find|buy] {number} more.", "[we add {number}|{number} are new]")
        loss = Event("Together they [lose|sell|give away] {number}.", "[we subtract {number}|{number} are gone]")
        story.more_or_less(gain, loss)
    return story.finish(
        "How many {things} do they have [together|altogether|in total]?",
        "[So|This means that] [they have|both together have] {value} {things}.",
        "two people",
    )


def ages(dice: Dice, num_steps: int) -> Exchange:
    """Each person is older or younger than the one before; then, perhaps, some years pass."""
    names = people(dice, 3)
    start = dice.between(8, 50)
    story = Story(dice, start, f"[{names[0]} is {start} years old|We know that {names[0]} is {start}].", {})
    story.facts.append(f"{names[0]} is {start} years old.")
    num_links = num_steps - 1 if num_steps == 3 or dice.chance(0.5) else num_steps
    for before, after in list(pairwise(names))[:num_links]:
        if story.value < 6 or dice.chance(0.5):
            reason = f"[we add {{number}}|{after} is older, so we add]"
            story.apply("+", dice.between(2, 15), Event(f"{after} is {{number}} years older than {before}.", reason))
        else:
            reason = f"[we subtract {{number}}|{after} is younger, so we subtract]"
            event = Event(f"{after} is {{number}} years younger than {before}.", reason)
            story.apply("-", dice.between(2, min(15, story.value - 3)), event)
    last = names[num_links]
    if num_links == num_steps:
        return story.finish(f"How old is {last}?", f"[So|This means that] {last} is {{value}} years old.", "ages")
    years = dice.between(2, 15)
    story.apply("+", years, Event("", "[we add {number}|after {number} years we have]"))
    question = f"How old will {last} be in {years} years?"
    return story.finish(question, f"[So|This means that] {last} will be {{value}} years old.", "ages")


def shopping(dice: Dice, num_steps: int) -> Exchange:
    """Somebody buys several goods at one price, with extra costs or a voucher."""
    count, price = product(dice)
    good, other = dice.sample(GOODS, 2)
    words = person(dice) | {"good": good, "other": other, "count": count, "coins": dice.pick(CURRENCIES)}
    opening = (
        f"[{{name}} buys {{count}} {_plural(good)}|There are {{count}} {_plural(good)}] at {price} {{coins}} each."
    )
    story = Story(dice, count, opening, words)
    multiply = Event(
        f"[One {{good}} costs {{number}} {{coins}}. {{name}} buys {{count}} {_plural(good)}."
        f"|{{name}} buys {{count}} {_plural(good)} [for|at] {{number}} {{coins}} each.]",
        f"[the {_plural(good)} cost|we multiply the number by the price]",
    )
    gain = Event(
        "[The delivery costs {number} {coins} more|{who} also buys a {other} for {number} {coins}].",
        "[we add {number}|there are {number} {coins} more to pay]",
    )
    loss = Event(
        "[A coupon takes off {number} {coins}|A voucher takes {number} {coins} off the price].",
        "[{number} {coins} are taken off|we subtract {number}]",
    )
    story.apply("*", price, multiply)
    for _ in range(num_steps - 1):
        story.more_or_less(gain, loss)
    return story.finish(
        "How many {coins} does [{name}|{who}] [pay|spend][| in total]?",
        "[So|This means that|In total,] {name} pays {value} {coins}.",
        "shopping",
    )


def change(dice: Dice, num_steps: int) -> Exchange:
    """Somebody has money and buys something, and the question is what is left."""
    count, price = product(dice)
    good = dice.pick(GOODS)
    words = person(dice) | {"good": good, "count": count, "price": price, "coins": dice.pick(CURRENCIES)}
    if num_steps == 1 or count * price > LARGEST - 2:
        money, cost = dice.between(10, LARGEST), 0
        words["money"] = money
        story = Story(dice, money, "{name} [has|starts with] {money} {coins}.", words)
        story.facts.append(story.say("{name} has {money} {coins}."))
        cost = dice.between(2, money - 2)
        pay = Event(
            "[{who}|{name}] buys a {good} for {number} {coins}.", "[we subtract the price|the {good} costs {number}]"
        )
        story.apply("-", cost, pay)
    else:
        money = dice.between(count * price + 2, LARGEST)
        words["money"] = money
        story = Story(dice, count, "[First we find the price|First we need the whole price].", words)
        asked = (
            f"[{{name}} has {{money}} {{coins}} and buys {{count}} {_plural(good)} [for|at] {{number}} {{coins}} each."
        )
        asked += f"|{{name}} has {{money}} {{coins}}. [{{who}}|{{name}}] buys {{count}} {_plural(good)} "
        asked += "[for|at] {number} {coins} each.]"
        story.apply("*", price, Event(asked, f"[the {_plural(good)} cost|we multiply the number by the price]"))
        story.apply(
            "-", money, Event("", "[we subtract this from {number}|{number} {coins} minus this leaves]"), reverse=True
        )
        if num_steps == 3:
            gain = Event("Then {who} [gets|finds] {number} more {coins}.", "[we add {number}|{number} {coins} are new]")
            loss = Event(
                "Then {who} [loses|gives away] {number} {coins}.", "[we subtract {number}|{number} {coins} are gone]"
            )
            story.more_or_less(gain, loss)
    return story.finish(
        "How many {coins} [are left|does [{name}|{who}] have left|does [{name}|{who}] have now]?",
        "[So|This means that|In the end,] {name} has {value} {coins}[| left].",
        "change",
    )


def days(dice: Dice, num_steps: int) -> Exchange:
    """Somebody does the same amount every day, and then some more."""
    each, count = _product_below(dice, LARGEST - 5 * (num_steps - 1))
    verb, unit = dice.pick(HABITS)
    words = person(dice) | {"verb": verb, "unit": unit, "each": each}
    opening = f"[{{name}} {{verb}} {{each}} {{unit}} a day|We have {{each}} {{unit}} a day for {count} days]."
    story = Story(dice, each, opening, words)
    multiply = Event(
        "{name} {verb} {each} {unit} [every day|each day|a day] for {number} days.",
        "[in {number} days that makes|we multiply by {number} days]",
    )
    gain = Event(
        "[After that|On the weekend|Then] {who} {verb} {number} {unit} more.",
        "[we add {number}|there are {number} more]",
    )
    story.apply("*", count, multiply)
    _add_up(story, num_steps - 1, gain)
    return story.finish(
        "How many {unit} is that [in total|altogether|in all]?",
        "[So|This means that|In total,] {name} {verb} {value} {unit}.",
        "days",
    )


def trips(dice: Dice, num_steps: int) -> Exchange:
    """Something moves at a constant speed for some hours, then goes on."""
    speed, hours = _product_below(dice, LARGEST - 5 * (num_steps - 1))
    vehicle = dice.pick(("car", "train", "bus", "bicycle", "boat", "ship", "truck"))
    words: dict[str, object] = {"vehicle": vehicle, "speed": speed}
    story = Story(dice, speed, "The {vehicle} [travels|goes] {speed} km in each hour.", words)
    multiply = Event(
        "A {vehicle} [travels|goes|moves] {speed} km [per hour|an hour|every hour] for {number} hours.",
        "[in {number} hours that makes|we multiply by {number} hours]",
    )
    gain = Event(
        "[Then|After a break|Later] it [travels|goes] another {number} km.",
        "[we add {number}|there are {number} km more]",
    )
    story.apply("*", hours, multiply)
    _add_up(story, num_steps - 1, gain)
    return story.finish(
        "[How far does it [go|travel][| in total| altogether]?|How many km is that[| in total]?]",
        "[So|This means that|In total,] the {vehicle} [travels|goes] {value} km.",
        "trips",
    )


def _product_below(dice: Dice, limit: int) -> tuple[int, int]:
    while True:
        left, right = product(dice)
        if left * right <= limit:
            return left, right


def _add_up(story: Story, num_steps: int, gain: Event) -> None:
    """Add ``num_steps`` times, and leave room for each."""
    for still in reversed(range(num_steps)):
        story.apply("+", story.dice.between(2, LARGEST - story.value - 2 * still), gain)


def _plural(good: str) -> str:
    return f"{good}es" if good.endswith(("ch", "x", "s")) else f"{good}s"


STORIES = (
    gains_and_losses, gains_and_losses, gains_and_losses, crowds, groups, groups, sharing, sharing, comparing,
    comparing, multiples, ages, shopping, shopping, change, days, trips, bare_sum, bare_sum,
)  # fmt: skip
"""How often each story is told, by repetition."""
