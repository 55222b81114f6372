"""This module is the table of single tasks for family ``code``.

In code and text, ``$x`` is the parameter, ``$a`` and ``$b`` a pair of them, ``$i``
the loop variable, ``$k`` a small constant that is drawn anew each time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

INPUTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "number": ((7,), (0,), (-3,), (12,), (30,)),
    "whole": ((1,), (2,), (5,), (12,), (13,)),
    "numbers": (([3, 8, -2, 5, 8],), ([4],), ([9, 1, 6, 12, -7, 2],), ([10, 20, 30, 5],)),
    "text": (("hello world",), ("level",), ("A quiet Sea",), ("x",)),
    "words": ((["tea", "Anna", "river", "level"],), (["go"],), (["sun", "moonlight", "stone", "", "abc"],)),
    "pair": ((3, 5), (10, 4), (7, 7), (2, 9)),
}
"""Example arguments per kind of parameter; a task must be defined on all of them."""


@dataclass(frozen=True)
class Body:
    """Holds a way to write a function: the code below its docstring, and what an explanation says (``It ...``)."""

    code: str
    how: str


@dataclass(frozen=True)
class FunctionTask:
    """Describes one function to write.

    kind: of its parameter, a key of `INPUTS`.
    names: possible names of the function, the most usual first.
    does: template that completes "a function that ..." in a request which does not name it.
    result: template that completes "returns ...".
    reference: what is right, written apart from the bodies; takes k last if the result mentions ``$k``.
    bodies: equally good ways to write it.
    """

    kind: str
    names: tuple[str, ...]
    does: str
    result: str
    reference: Callable[..., Any]
    bodies: tuple[Body, ...]

    def expected(self, arguments: tuple[Any, ...], k: int) -> Any:
        """Return the right result on one input."""
        return self.reference(*arguments, k) if "$k" in self.result else self.reference(*arguments)


def task(
    kind: str, names: str, does: str, result: str, reference: Callable[..., Any], *bodies: tuple[str, str]
) -> FunctionTask:
    """Make a row of the table."""
    return FunctionTask(
        kind, tuple(names.split()), does, result, reference, tuple(Body(code, how) for code, how in bodies)
    )


FIBONACCI = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
BUILT_IN = "uses a built-in function"
LOOP = "uses a simple loop"

# fmt: off
NUMBERS = (
    task("number", "square power_two", "[squares a number|computes the square of a number]",
         "[the square of the number|the number times itself]", lambda x: x * x,
         ("return $x * $x", "multiplies the number by itself"),
         ("return $x ** 2", "uses the power operator")),
    task("number", "cube third_power", "computes the cube of a number",
         "[the cube of the number|the third power of the number]", lambda x: x**3,
         ("return $x ** 3", "uses the power operator"),
         ("return $x * $x * $x", "multiplies three times")),
    task("number", "is_even even check_even", "[checks if a number is even|tells whether a number is even]",
         "[whether the number is even|True if it is even]", lambda x: x % 2 == 0,
         ("return $x % 2 == 0", "looks at the remainder"),
         ("if $x % 2 == 0:\n    return True\nreturn False", "tests the remainder")),
    task("number", "is_multiple check", "[checks if a number is a multiple of $k|checks if $k divides a number]",
         "[whether the number is a multiple of $k|True if $k divides the number]", lambda x, k: x % k == 0,
         ("return $x % $k == 0", "checks the remainder after dividing by $k")),
    task("number", "absolute distance size", "computes the absolute value of a number",
         "[the absolute value|the distance from zero]", abs,
         ("return abs($x)", BUILT_IN),
         ("if $x < 0:\n    return -$x\nreturn $x", "turns negative values around")),
    task("number", "sign sign_of", "returns the sign of a number",
         "[the sign of the number as -1, 0 or 1|-1, 0 or 1 by the sign of the number]", lambda x: (x > 0) - (x < 0),
         ("if $x > 0:\n    return 1\nif $x < 0:\n    return -1\nreturn 0", "looks at the three cases in turn")),
    task("number", "last_digit final_digit", "returns the last digit of a number",
         "the last digit of the number", lambda x: int(str(x)[-1]),
         ("return abs($x) % 10", "takes the remainder after dividing by 10")),
    task("number", "at_most limit cap", "limits a number to at most $k",
         "[the number, but at most $k|the smaller of the number and $k]", min,
         ("return min($x, $k)", BUILT_IN),
         ("if $x > $k:\n    return $k\nreturn $x", "cuts off everything above $k")),
    task("whole", "factorial product_to", "[computes the factorial of a number|computes a factorial]",
         "[the factorial of the number|the product of all numbers up to it]",
         math.factorial,
         ("result = 1\nfor i in range(2, $x + 1):\n    result *= i\nreturn result", "multiplies step by step"),
         ("result = 1\nwhile $x > 1:\n    result *= $x\n    $x -= 1\nreturn result", "counts down to one")),
    task("whole", "sum_to triangle add_up_to", "[adds up the numbers from 1 to n|sums all numbers up to n]",
         "[the sum of all numbers from 1 to it|the sum of the numbers up to it]", lambda x: x * (x + 1) // 2,
         ("return sum(range(1, $x + 1))", BUILT_IN),
         ("return $x * ($x + 1) // 2", "uses the formula for the sum"),
         ("total = 0\nfor i in range(1, $x + 1):\n    total += i\nreturn total", LOOP)),
    task("whole", "is_prime prime check_prime", "[checks if a number is prime|tells whether a number is prime]",
         "[whether the number is prime|True if it is a prime number]",
         lambda x: sum(x % d == 0 for d in range(1, x + 1)) == 2,
         ("for i in range(2, $x):\n    if $x % i == 0:\n        return False\nreturn $x > 1",
          "tries every possible divisor")),
    task("whole", "digit_sum sum_digits", "adds up the digits of a number",
         "[the sum of its digits|the sum of all digits of the number]", lambda x: sum(int(d) for d in str(x)),
         ("return sum(int(digit) for digit in str($x))", "turns the number into text first"),
         ("total = 0\nwhile $x > 0:\n    total += $x % 10\n    $x //= 10\nreturn total",
          "takes one digit after the other")),
    task("whole", "fibonacci fib", "[computes Fibonacci numbers|returns the n-th Fibonacci number]",
         "the Fibonacci number at that position", lambda x: FIBONACCI[x],
         ("a, b = 0, 1\nfor i in range($x):\n    a, b = b, a + b\nreturn a", "keeps the last two numbers")),
    task("whole", "countdown count_down", "counts down from a number",
         "[a list that counts down from it to 1|the numbers from it down to 1]",
         lambda x: sorted(range(1, x + 1), reverse=True),
         ("return list(range($x, 0, -1))", "uses a range with a negative step")),
    task("pair", "largest maximum bigger", "returns the larger of two numbers",
         "[the larger of the two|the bigger one]", max,
         ("return max($a, $b)", BUILT_IN),
         ("if $a > $b:\n    return $a\nreturn $b", "compares the two values"),
         ("return $a if $a > $b else $b", "uses a conditional expression")),
    task("pair", "difference gap", "computes the difference between two numbers",
         "[the absolute difference|how far they are apart]", lambda a, b: max(a, b) - min(a, b),
         ("return abs($a - $b)", "ignores the sign of the difference")),
    task("pair", "average middle mean", "computes the average of two numbers",
         "[their average|the mean of both]", lambda a, b: a / 2 + b / 2,
         ("return ($a + $b) / 2", "adds both and halves the sum")),
    task("pair", "area rectangle_area", "computes the area of a rectangle",
         "the area of a rectangle with these sides", lambda a, b: a * b,
         ("return $a * $b", "multiplies the two sides")),
    task("pair", "perimeter border", "computes the perimeter of a rectangle",
         "[the perimeter of a rectangle with these sides|the border of such a rectangle]", lambda a, b: a + b + a + b,
         ("return 2 * ($a + $b)", "adds the sides and doubles the sum")),
    task("pair", "gcd common_divisor",
         "[computes the greatest common divisor of two numbers|finds the gcd of two numbers]",
         "[their greatest common divisor|the largest number that divides both]", math.gcd,
         ("while $b:\n    $a, $b = $b, $a % $b\nreturn $a", "uses the method of Euclid")),
    task("pair", "power raise_to", "raises a number to a power", "the first raised to the second", pow,
         ("return $a ** $b", "uses the power operator"),
         ("result = 1\nfor i in range($b):\n    result *= $a\nreturn result", "multiplies again and again")),
)

LISTS = (
    task("numbers", "total add_all sum_all", "[adds up a list of numbers|sums the numbers in a list]",
         "[the sum of the numbers|all numbers added up]", lambda v: list(accumulate(v))[-1],
         ("return sum($x)", BUILT_IN),
         ("total = 0\nfor $i in $x:\n    total += $i\nreturn total", "keeps a running total")),
    task("numbers", "product multiply_all", "multiplies all numbers in a list",
         "[the product of the numbers|all numbers multiplied]", math.prod,
         ("result = 1\nfor $i in $x:\n    result *= $i\nreturn result", "multiplies one by one")),
    task("numbers", "average mean", "computes the average of a list",
         "[the average of the numbers|the mean value]", lambda v: sum(v) / len(v),
         ("return sum($x) / len($x)", "divides the sum by the length")),
    task("numbers", "largest maximum find_max", "[finds the largest number in a list|finds the maximum of a list]",
         "[the largest number|the biggest value in the list]", lambda v: sorted(v)[-1],
         ("return max($x)", BUILT_IN),
         ("best = $x[0]\nfor $i in $x:\n    if $i > best:\n        best = $i\nreturn best",
          "remembers the best value so far")),
    task("numbers", "smallest minimum find_min", "[finds the smallest number in a list|finds the minimum of a list]",
         "[the smallest number|the lowest value in the list]", lambda v: sorted(v)[0],
         ("return min($x)", BUILT_IN),
         ("best = $x[0]\nfor $i in $x:\n    if $i < best:\n        best = $i\nreturn best",
          "remembers the best value so far")),
    task("numbers", "spread value_range", "computes the range of a list of numbers",
         "the difference between the largest and the smallest", lambda v: sorted(v)[-1] - sorted(v)[0],
         ("return max($x) - min($x)", "needs only one line")),
    task("numbers", "reverse backwards flip", "reverses a list",
         "[the list in reverse order|the numbers from last to first]", lambda v: list(reversed(v)),
         ("return $x[::-1]", "uses a slice with a negative step"),
         ("result = []\nfor $i in $x:\n    result.insert(0, $i)\nreturn result", "puts each element in front")),
    task("numbers", "first_items take start", "takes the first $k elements of a list",
         "[the first $k elements|a list of the first $k numbers]", lambda v, k: [e for i, e in enumerate(v) if i < k],
         ("return $x[:$k]", "uses a slice")),
    task("numbers", "count_above how_many", "counts the numbers above $k in a list",
         "[how many numbers are above $k|the count of numbers greater than $k]",
         lambda v, k: len([e for e in v if e > k]),
         ("return sum(1 for $i in $x if $i > $k)", "adds one for every match"),
         ("count = 0\nfor $i in $x:\n    if $i > $k:\n        count += 1\nreturn count", "counts in a loop")),
    task("numbers", "contains has includes", "checks if a list contains $k",
         "[whether $k is in the list|True if the list contains $k]", lambda v, k: v.count(k) > 0,
         ("return $k in $x", "uses the in operator"),
         ("for $i in $x:\n    if $i == $k:\n        return True\nreturn False", "stops at the first match")),
    task("numbers", "unique distinct no_repeats", "removes duplicates from a list",
         "[the list without duplicates|the numbers without repeats]", lambda v: list(dict.fromkeys(v)),
         ("result = []\nfor $i in $x:\n    if $i not in result:\n        result.append($i)\nreturn result",
          "keeps only the first of equal values")),
    task("numbers", "descending sort_down", "sorts a list in descending order",
         "[the numbers from large to small|the list in descending order]", lambda v: sorted(v)[::-1],
         ("return sorted($x, reverse=True)", BUILT_IN)),
    task("numbers", "running_totals sums_so_far", "computes the running totals of a list",
         "the list of running totals", lambda v: list(accumulate(v)),
         ("total = 0\nresult = []\nfor $i in $x:\n    total += $i\n    result.append(total)\nreturn result",
          "adds up and stores every sum")),
    task("numbers", "is_sorted in_order", "checks if a list is sorted",
         "[whether the list is in ascending order|True if no number gets smaller]",
         lambda v: all(a <= b for a, b in pairwise(v)),
         ("return $x == sorted($x)", "compares the list with a sorted copy")),
)
TEXTS = (
    task("text", "reverse backwards mirror", "[reverses a string|reverses a text]",
         "[the text backwards|the letters in reverse order]", lambda s: "".join(reversed(s)),
         ("return $x[::-1]", "uses a slice with a negative step"),
         ('result = ""\nfor $i in $x:\n    result = $i + result\nreturn result', "puts each letter in front")),
    task("text", "count_vowels vowels", "counts the vowels in a string",
         "[the number of vowels|how many vowels it has]", lambda s: len([c for c in s if c.lower() in "aeiou"]),
         ('return sum(1 for $i in $x.lower() if $i in "aeiou")', "adds one for every vowel"),
         ('count = 0\nfor $i in $x.lower():\n    if $i in "aeiou":\n        count += 1\nreturn count',
          "checks letter by letter")),
    task("text", "is_palindrome same_backwards",
         "[checks if a string is a palindrome|tells whether a word is a palindrome]",
         "[whether it reads the same backwards|True if it is a palindrome]", lambda s: list(s) == list(reversed(s)),
         ("return $x == $x[::-1]", "compares the text with its reverse")),
    task("text", "count_words word_count", "[counts the words in a text|counts the words in a string]",
         "[the number of words|how many words it has]", lambda s: s.count(" ") + 1,
         ("return len($x.split())", "splits the text at the spaces")),
    task("text", "shout loud", "turns a text into a shout in upper case with an exclamation mark",
         "[the text in upper case with an exclamation mark|it in capital letters with a !]", lambda s: f"{s.upper()}!",
         ('return $x.upper() + "!"', "needs only one line")),
    task("text", "repeat copies", "repeats a text $k times",
         "[the text repeated $k times|$k copies of the text in a row]", lambda s, k: "".join(s for _ in range(k)),
         ("return $x * $k", "multiplies the string")),
    task("text", "no_spaces remove_spaces squeeze", "removes all spaces from a string",
         "[the text without spaces|it with all spaces removed]", lambda s: "".join(s.split(" ")),
         ('return $x.replace(" ", "")', "replaces every space by nothing"),
         ('return "".join($i for $i in $x if $i != " ")', "keeps everything but the spaces")),
    task("text", "prefix beginning", "returns the first $k characters of a string",
         "[the first $k characters|its first $k letters]", lambda s, k: "".join(c for i, c in enumerate(s) if i < k),
         ("return $x[:$k]", "uses a slice")),
    task("text", "letter_counts frequencies", "counts how often each letter occurs in a string",
         "a dictionary that counts each character", lambda s: {c: s.count(c) for c in s},
         ("counts = {}\nfor $i in $x:\n    counts[$i] = counts.get($i, 0) + 1\nreturn counts",
          "builds the dictionary in a loop")),
    task("words", "lengths word_lengths", "returns the lengths of a list of words",
         "[the length of each word|a list of the lengths]", lambda v: list(map(len, v)),
         ("return [len($i) for $i in $x]", "uses a list comprehension"),
         ("result = []\nfor $i in $x:\n    result.append(len($i))\nreturn result", LOOP)),
    task("words", "longest longest_word", "finds the longest word in a list", "the longest word",
         lambda v: next(w for w in v if len(w) == max(map(len, v))),
         ("return max($x, key=len)", "compares the words by their length"),
         ("best = $x[0]\nfor $i in $x:\n    if len($i) > len(best):\n        best = $i\nreturn best",
          "remembers the longest word so far")),
    task("words", "join_words combine", "joins a list of words with commas",
         "[the words joined by commas|one string with commas between the words]",
         ",".join,
         ('return ",".join($x)', "uses the join method")),
    task("words", "total_length letters", "counts all letters in a list of words",
         "[the total number of letters|how many letters they have in all]", lambda v: len("".join(v)),
         ("return sum(len($i) for $i in $x)", "adds up the lengths")),
    task("words", "alphabetical sort_words", "sorts a list of words alphabetically",
         "[the words in alphabetical order without regard to case]", lambda v: sorted(v, key=lambda w: w.lower()),
         ("return sorted($x, key=str.lower)", "sorts by the lower case form")),
)
FAMOUS = (
    task("number", "to_fahrenheit fahrenheit", "converts Celsius to Fahrenheit",
         "the temperature in Fahrenheit for one in Celsius", lambda c: c * 9 / 5 + 32,
         ("return $x * 9 / 5 + 32", "multiplies by nine fifths and adds 32")),
    task("number", "double twice", "doubles a number", "[the number doubled|twice the number]", lambda x: x + x,
         ("return 2 * $x", "multiplies by two"),
         ("return $x + $x", "adds the number to itself")),
    task("number", "is_positive positive", "checks if a number is positive",
         "[whether the number is positive|True if the number is above zero]", lambda x: x > 0,
         ("return $x > 0", "compares the number with zero")),
    task("number", "is_odd odd check_odd", "[checks if a number is odd|tells whether a number is odd]",
         "[whether the number is odd|True if it is odd]", lambda x: x % 2 != 0,
         ("return $x % 2 == 1", "looks at the remainder"),
         ("if $x % 2 == 1:\n    return True\nreturn False", "tests the remainder")),
    task("whole", "fizzbuzz fizz_buzz", "[plays FizzBuzz|implements FizzBuzz]",
         "Fizz for multiples of 3, Buzz for multiples of 5, FizzBuzz for both, and the number as text otherwise",
         lambda n: ("Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0)) or str(n),
         ((
             'if $x % 15 == 0:\n    return "FizzBuzz"\nif $x % 3 == 0:\n    return "Fizz"\nif $x % 5 == 0:\n'
             '    return "Buzz"\nreturn str($x)'
          ), "checks for multiples of both numbers first")),
    task("whole", "is_leap_year leap_year", "checks if a year is a leap year",
         "[whether the year is a leap year|True if it is a leap year]",
         lambda y: (y % 4 == 0) - (y % 100 == 0) + (y % 400 == 0) == 1,
         ("return $x % 4 == 0 and ($x % 100 != 0 or $x % 400 == 0)", "follows the rules of the calendar")),
    task("whole", "to_binary binary", "converts a number to binary",
         "[the number in binary as a string|its binary digits as a string]", "{:b}".format,
         ('result = ""\nwhile $x > 0:\n    result = str($x % 2) + result\n    $x //= 2\nreturn result',
          "collects the remainders of dividing by two"),
         ("return bin($x)[2:]", "cuts the prefix from the built-in result")),
    task("whole", "divisors factors", "[lists the divisors of a number|finds all divisors of a number]",
         "[a list of its divisors|all numbers that divide it]", lambda n: [d for d in range(1, n + 1) if n % d == 0],
         ("return [i for i in range(1, $x + 1) if $x % i == 0]", "tries all numbers up to it")),
    task("whole", "squares square_list", "lists the first square numbers",
         "[a list of the first square numbers|the squares of 1 up to it]", lambda n: [i * i for i in range(1, n + 1)],
         ("return [i * i for i in range(1, $x + 1)]", "uses a list comprehension"),
         ("result = []\nfor i in range(1, $x + 1):\n    result.append(i ** 2)\nreturn result", LOOP)),
    task("pair", "add add_numbers sum_of_two", "[adds two numbers|returns the sum of two numbers]",
         "[their sum|the sum of the two]", lambda a, b: b + a,
         ("return $a + $b", "adds the two numbers"),
         ("result = $a + $b\nreturn result", "keeps the sum in a variable")),
    task("pair", "multiply times", "multiplies two numbers",
         "[their product|the product of the two]", lambda a, b: b * a,
         ("return $a * $b", "multiplies the two numbers")),
    task("pair", "smallest minimum smaller", "returns the smaller of two numbers",
         "[the smaller of the two|the smaller one]", min,
         ("return min($a, $b)", BUILT_IN),
         ("if $a < $b:\n    return $a\nreturn $b", "compares the two values")),
    task("pair", "swap exchange", "swaps two values",
         "[the two in reverse order|a tuple with both swapped]", lambda a, b: (b, a),
         ("return $b, $a", "returns them the other way round")),
    task("pair", "lcm common_multiple", "computes the least common multiple of two numbers",
         "[their least common multiple|the smallest number that both divide]", math.lcm,
         ("result = $a\nwhile result % $b != 0:\n    result += $a\nreturn result",
          "goes through the multiples of the first number")),
    task("numbers", "count_items length size", "counts the elements of a list",
         "[how many numbers there are|the length of the list]", lambda v: sum(1 for _ in v),
         ("return len($x)", BUILT_IN),
         ("count = 0\nfor $i in $x:\n    count += 1\nreturn count", LOOP)),
    task("numbers", "sort_numbers ascending", "[sorts a list of numbers|sorts a list]",
         "[the numbers from small to large|the list in ascending order]", lambda v: sorted(v, key=lambda e: e),
         ("return sorted($x)", BUILT_IN)),
    task("numbers", "bubble_sort simple_sort", "[implements bubble sort|sorts a list with bubble sort]",
         "the list sorted by bubble sort", lambda v: sorted(v, key=lambda e: e),
         ((
             "result = list($x)\nfor i in range(len(result)):\n    for j in range(len(result) - 1 - i):\n"
             "        if result[j] > result[j + 1]:\n            result[j], result[j + 1] = result[j + 1], result[j]\n"
             "return result"
          ), "swaps neighbors that are in the wrong order")),
    task("numbers", "last_item last", "returns the last element of a list",
         "[the last element|the last number of the list]", lambda v: next(reversed(v)),
         ("return $x[-1]", "uses a negative index")),
    task("numbers", "double_all doubled", "doubles every number in a list",
         "[each number doubled|a list with every number doubled]", lambda v: [e + e for e in v],
         ("return [2 * $i for $i in $x]", "uses a list comprehension"),
         ("result = []\nfor $i in $x:\n    result.append(2 * $i)\nreturn result", LOOP)),
    task("text", "upper_case to_upper", "converts a string to upper case",
         "[the text in upper case|it in capital letters]", lambda s: "".join(c.upper() for c in s),
         ("return $x.upper()", "uses a string method")),
    task("text", "text_length count_letters", "returns the length of a string",
         "[the number of characters|how long the text is]", lambda s: sum(1 for _ in s),
         ("return len($x)", BUILT_IN),
         ("count = 0\nfor $i in $x:\n    count += 1\nreturn count", LOOP)),
    task("text", "first_letter initial", "returns the first letter of a word",
         "[the first letter|its first character]", lambda s: next(iter(s)),
         ("return $x[0]", "uses the index zero")),
    task("text", "greet hello", "[greets somebody|says hello to somebody|prints hello]",
         "[the word Hello, a comma, the text and an exclamation mark|a greeting such as Hello, Tom!]",
         lambda s: "Hello, " + s + "!",
         ('return f"Hello, {$x}!"', "uses a format string"),
         ('return "Hello, " + $x + "!"', "joins three strings")),
)
# fmt: on

TASKS = (*NUMBERS, *LISTS, *TEXTS, *FAMOUS)
