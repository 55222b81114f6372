"""Family ``code`` makes requests in words, which are answered by short Python functions that do it.

A request is a row of a table (`blockdraft.pocket.corpus.tasks`) or composed here from a
condition, a transformation and a summary, so that most requests are seen once.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from blockdraft.pocket.corpus.dice import Dice, Exchange
from blockdraft.pocket.corpus.tasks import INPUTS, TASKS, Body, FunctionTask

Function = Callable[..., Any]


def largest_or_zero(values: list[int]) -> int:
    """Return the last of the values in ascending order, 0 if there are none."""
    return sorted(values)[-1] if values else 0


PARAMETERS = {
    "number": ("takes a number", "number n value x amount"),
    "whole": ("takes a positive whole number", "n number count limit"),
    "numbers": ("takes a list of numbers", "numbers values items data"),
    "text": ("takes a string", "text string word sentence"),
    "words": ("takes a list of words", "words names strings tokens"),
    "pair": ("takes two numbers", "a,b x,y first,second left,right"),
}
"""Per kind of argument: how a request calls it, and names for it."""

LOOP_VARIABLES = {"numbers": "number value item n", "words": "word item name s", "text": "letter character c"}

CONDITIONS: dict[str, Sequence[tuple[str, str, str, Function]]] = {
    "numbers": (
        ("even", "even", "$i % 2 == 0", lambda v, _: v % 2 == 0),
        ("odd", "odd", "$i % 2 == 1", lambda v, _: v % 2 != 0),
        ("positive", "positive", "$i > 0", lambda v, _: v > 0),
        ("negative", "negative", "$i < 0", lambda v, _: v < 0),
        ("greater than $k", "large", "$i > $k", lambda v, k: v > k),
        ("less than $k", "small", "$i < $k", lambda v, k: v < k),
        ("at least $k", "high", "$i >= $k", lambda v, k: v >= k),
        ("divisible by $k", "divisible", "$i % $k == 0", lambda v, k: v % k == 0),
        ("not equal to $k", "other", "$i != $k", lambda v, k: v != k),
    ),
    "words": (
        ("longer than $k letters", "long", "len($i) > $k", lambda v, k: len(v) > k),
        ("shorter than $k letters", "short", "len($i) < $k", lambda v, k: len(v) < k),
        ("exactly $k letters long", "fitting", "len($i) == $k", lambda v, k: len(v) == k),
        ("in lower case", "lower", "$i.islower()", lambda v, _: v.islower()),
        ("not empty", "real", "len($i) > 0", lambda v, _: v != ""),
        ("equal to their reverse", "mirrored", "$i == $i[::-1]", lambda v, _: v == v[::-1]),
    ),
}
"""How a request puts it, a word for a function's name, the test, and what it means."""

TRANSFORMATIONS: dict[str, Sequence[tuple[str, str, Function]]] = {
    "numbers": (
        ("", "$i", lambda v, _: v),
        (", each squared", "$i * $i", lambda v, _: v**2),
        (", each doubled", "$i * 2", lambda v, _: v + v),
        (", each times $m", "$i * $m", lambda v, m: v * m),
        (", each plus $m", "$i + $m", lambda v, m: v + m),
        (", each minus $m", "$i - $m", lambda v, m: v - m),
    ),
    "words": (
        ("", "$i", lambda v, _: v),
        (", each in upper case", "$i.upper()", lambda v, _: v.upper()),
        (", each reversed", "$i[::-1]", lambda v, _: "".join(reversed(v))),
        (", each repeated $m times", "$i * $m", lambda v, m: v * m),
        (", each cut to $m letters", "$i[:$m]", lambda v, m: v[:m]),
    ),
}
SUMMARIES: dict[str, Sequence[tuple[str, str, str, Function]]] = {
    "numbers": (
        ("a list of", "select", "[$e for $i in $x if $c]", list),
        ("the sum of", "sum", "sum($e for $i in $x if $c)", sum),
        ("the largest of", "largest", "max(($e for $i in $x if $c), default=0)", largest_or_zero),
    ),
    "words": (
        ("a list of", "select", "[$e for $i in $x if $c]", list),
        ("the total length of", "length_of", "sum(len($e) for $i in $x if $c)", lambda v: len("".join(v))),
    ),
}
"""How a request puts it, the start of a function's name, the code, and what it means."""

LOOPS = {
    "select": ("result = []", "result.append($e)", "result"),
    "sum": ("total = 0", "total += $e", "total"),
    "length_of": ("total = 0", "total += len($e)", "total"),
}
"""The same summaries as loops: before, inside, and what is returned."""

LABEL_PAIRS = (
    *(("big", "small"), ("yes", "no"), ("high", "low"), ("stop", "go"), ("left", "right")),
    *(("red", "blue"), ("hot", "cold"), ("open", "closed"), ("old", "new")),
)


def code_of(response: str) -> str | None:
    """Return what is in the first fenced Python block, None without one."""
    match = re.search(r"```python\n(.*?)```", response, flags=re.DOTALL)
    return match.group(1) if match else None


def parses(response: str) -> bool:
    """Tell whether the response holds valid Python with a function in it."""
    return _function_name(response) is not None


def fulfils(prompt: str, response: str, checks: str, seconds: float = 10.0) -> bool:
    """Tell whether the response's function passes the checks, and has the name that the prompt gives, if any.

    A language model wrote the code, so it runs in a Python process of its own, for ``seconds`` at most.
    """
    name, code = _function_name(response), code_of(response)
    asked = re.search(r"`(\w+)[`(]", prompt)
    if name is None or code is None or (asked is not None and asked.group(1).lower() != name.lower()):
        return False
    program = f"{code}\nfunction = {name}\n{checks}\n"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _function_name(response: str) -> str | None:
    """Return the name of the last function that the response defines, None if its code does not parse."""
    code = code_of(response)
    try:
        tree = ast.parse(code or "")
    except (SyntaxError, ValueError):
        return None
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return names[-1] if names else None


def problem(dice: Dice) -> Exchange:
    """Draw a request and a function that fulfils it; ``answer`` holds assertions about the function."""
    task = dice.pick((composed_list, composed_list, formula, branch, *(from_table,) * 6))(dice)
    takes, parameters = PARAMETERS[task.kind]
    parameter = dice.pick(parameters.split())
    k = dice.between(2, 9)
    blanks = {
        "$x": parameter.replace(",", ", "),
        "$i": dice.pick(LOOP_VARIABLES.get(task.kind, "i").split()),
        "$k": str(k),
        **dict(zip(("$a", "$b"), parameter.split(","), strict=False)),
    }
    if task.does and dice.chance(0.5):
        name = task.names[0] if dice.chance(0.6) else dice.pick(task.names)
        prompt = short_request(dice, task, blanks)
    else:
        name = dice.pick(task.names)
        prompt = request(dice, name, takes, task, blanks)
    response = answer(dice, name, task, blanks)
    checks = [f"assert {call(each)} == {task.expected(each, k)!r}" for each in INPUTS[task.kind]]
    return Exchange(
        dice.casually(prompt) if dice.chance(0.2) else prompt, response, "function", answer="\n".join(checks)
    )


def call(arguments: tuple[Any, ...]) -> str:
    """Write a call such as ``function(1, 'a')``; checks know the function under this name, whatever it is called."""
    return f"function({', '.join(map(repr, arguments))})"


def fill(text: str, blanks: dict[str, str]) -> str:
    """Replace every ``$x`` that has a value."""
    return re.sub(r"\$\w", lambda match: blanks.get(match.group(), match.group()), text)


def request(dice: Dice, name: str, takes: str, task: FunctionTask, blanks: dict[str, str]) -> str:
    """Say what the user asks for."""
    return dice.say(
        "[[Write|Please write|I need] a [Python function|function in Python|function] [called|named] `{name}` that "
        "{takes}[|, `{x}`,] and returns {result}."
        "|[Can|Could] you [write|give me] a [Python function|function] `{name}({x})` that {takes} and returns {result}?"
        "|[Define|Implement] `{name}({x})`. It {takes} and returns {result}."
        "|Write a Python function that {takes} and returns {result}.]",
        name=name,
        takes=takes,
        x=blanks["$x"],
        result=fill(dice.say(task.result), blanks),
    )


def short_request(dice: Dice, task: FunctionTask, blanks: dict[str, str]) -> str:
    """Say it in a few words, without a name for the function."""
    return dice.say(
        "[[Write|Please write|Give me|Show me|I need] a [Python function|function|Python function|short function] "
        "[that|which] {does}.|[Can|Could] you [write|show me] a [Python |]function that {does}?"
        "|How do I write a [Python |]function that {does}?|[Python|A Python] function that {does}"
        "|What does a [Python |]function look like that {does}?]",
        does=fill(dice.say(task.does), blanks),
    )


def answer(dice: Dice, name: str, task: FunctionTask, blanks: dict[str, str]) -> str:
    """Write the function in a fenced block, with a docstring, an explanation, or both."""
    style = dice.pick(("docstring", "docstring", "explanation", "both"))
    body = dice.pick(task.bodies)
    lines = [f"def {name}({blanks['$x']}):"]
    if style != "explanation":
        result = fill(dice.say(task.result), blanks)
        verbs = {"whether": "[Return|Tell|Check]", "True": "Return"}.get(
            result.split()[0], "[Return|Compute|Give back]"
        )
        lines.append(f'    """{dice.say(verbs)} {result}."""')
    lines += [f"    {line}" for line in fill(body.code, blanks).split("\n")]
    intro = dice.say(
        "[Here is the function|Here is one way to do it|Sure, here is the function|You can write it like this"
        "|This function does what you ask|Here is a short version]:"
    )
    parts = [intro, "\n".join(["```python", *lines, "```"])]
    if style != "docstring":
        parts.append(dice.say("[It|The function|This version] {how}.", how=fill(body.how, blanks)))
    return "\n\n".join(parts)


def from_table(dice: Dice) -> FunctionTask:
    """Draw a task of the table."""
    return dice.pick(TASKS)


def composed_list(dice: Dice) -> FunctionTask:
    """Compose a task on a list: take the elements that meet a condition, transform each, then summarize."""
    kind = dice.pick(("numbers", "numbers", "words"))
    condition, short, test, holds = dice.pick(CONDITIONS[kind])
    transformed, expression, transform = dice.pick(TRANSFORMATIONS[kind])
    summary, verb, one_line, summarize = dice.pick(SUMMARIES[kind])
    k, m = dice.between(2, 9), dice.between(2, 9)

    def put(text: str) -> str:
        return fill(fill(text, {"$e": expression, "$c": test}), {"$k": str(k), "$m": str(m)})

    def reference(values: list[Any]) -> Any:
        return summarize([transform(value, m) for value in values if holds(value, k)])

    bodies = [Body(put(f"return {one_line}"), "does it in one line")]
    if verb in LOOPS:
        code = put("{}\nfor $i in $x:\n    if $c:\n        {}\nreturn {}".format(*LOOPS[verb]))
        bodies += [Body(code, f"goes through the {kind} and checks each of them")] * 2
    or_zero = ", or 0 if there is none" if verb == "largest" else ""
    result = put(f"{summary} the {kind} that are {condition}{transformed}{or_zero}")
    names = (f"{verb}_{short}", f"{verb}_{kind}", f"{short}_{kind}", f"{verb}_{short}_{kind}")
    return FunctionTask(kind, names, "", result, reference, tuple(bodies))


def formula(dice: Dice) -> FunctionTask:
    """Compose a linear formula of one number."""
    k, m, plus = dice.between(2, 20), dice.between(1, 50), dice.chance(0.6)
    symbol, word = ("+", "plus") if plus else ("-", "minus")
    bodies = (
        Body(f"return $x * {k} {symbol} {m}", f"multiplies by {k} first"),
        Body(f"result = {k} * $x\nreturn result {symbol} {m}", "works in two steps"),
    )
    result = f"[{k} times the number {word} {m}|the number times {k} {word} {m}]"
    names = ("formula", "compute", "scale", "price", "score", "linear", "convert", "cost")
    return FunctionTask("number", names, "", result, lambda x: k * x + (m if plus else -m), bodies)


def branch(dice: Dice) -> FunctionTask:
    """Compose a choice between two words, by a condition on a number."""
    condition, _, test, holds = dice.pick(CONDITIONS["numbers"])
    yes, no = dice.pick(LABEL_PAIRS)
    k = dice.between(2, 30)
    condition, test = (fill(part, {"$k": str(k), "$i": "$x"}) for part in (condition, test))
    bodies = (
        Body(f'if {test}:\n    return "{yes}"\nreturn "{no}"', "checks the condition and returns early"),
        Body(f'return "{yes}" if {test} else "{no}"', "uses a conditional expression"),
        Body(f'if {test}:\n    return "{yes}"\nelse:\n    return "{no}"', "has one branch for each case"),
    )
    result = f"the word {yes} if it is {condition} and the word {no} otherwise"
    names = ("label", "classify", "check", "decide", "name_of", "kind_of", f"{yes}_or_{no}", "describe")
    return FunctionTask("number", names, "", result, lambda x: yes if holds(x, k) else no, bodies)
