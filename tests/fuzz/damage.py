"""What can be wrong with a file: its bytes, its JSON, its lines, its tensors, its kind."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Damage = tuple[str, Callable[[], None]]
"""What is wrong, and a function that makes it so."""

DEEP = 100_000
ODD_VALUES: dict[str, Any] = {
    "null": None, "true": True, "a word": "word", "empty text": "", "-1": -1, "0": 0, "1.5": 1.5, "NaN": float("nan"),
    "Infinity": float("inf"), "10^30": 10**30, "10^400": 10**400, "empty list": [], "empty object": {},
    "nested list": [[[]]], "a list of objects": [{}], "an object of lists": {"a": []},
    "control characters": "\x1b[31m\n\x00",
    "a long text": "x" * 5000, "a lone surrogate": "\ud800", "a path": "../../x",
}  # fmt: skip


def of_bytes(file: str, dice: random.Random, flips: int = 0) -> Iterator[Damage]:
    """Yield what no reader of any format can take for whole: cut short, overwritten, of another kind."""
    path = Path(file)
    size = path.stat().st_size

    def put(content: bytes) -> Callable[[], None]:
        return lambda: _write(path, content)

    content = path.read_bytes()
    yield "empty", put(b"")
    yield "one byte", put(b"\x00")
    yield "not UTF-8", put(b"\xff\xfe\x00" + content[: size // 2])
    yield "NUL bytes", put(b"\x00" * min(size, 4096))
    yield "HTML", put(b"<!DOCTYPE html><html><body>404</body></html>\n")
    yield "deep nesting", put(b"[" * DEEP)
    yield "deep objects", put(b'{"a":' * DEEP)
    yield "spaces", put(b" " * 64)
    for number in range(2):
        at = dice.randrange(1, max(2, size - 1))
        yield f"cut at {number}", put(content[:at])
    for number in range(flips):
        at, value = dice.randrange(size), dice.randrange(1, 256)
        yield f"flip {number}", put(content[:at] + bytes([content[at] ^ value]) + content[at + 1 :])


def of_kind(file: str) -> Iterator[Damage]:
    """Yield something else in the place of a file: nothing, a folder, a link that leads nowhere, a pipe, a device."""
    path = Path(file)

    def put(make: Callable[[], object]) -> Callable[[], None]:
        def do() -> None:
            remove(path)
            make()

        return do

    yield "missing", lambda: remove(path)
    yield "a folder", put(path.mkdir)
    yield "a link to nowhere", put(lambda: path.symlink_to("nowhere"))
    yield "a link to itself", put(lambda: path.symlink_to(path.name))
    yield "a pipe", put(lambda: os.mkfifo(path))
    yield "/dev/zero", put(lambda: path.symlink_to("/dev/zero"))
    yield "/dev/null", put(lambda: path.symlink_to("/dev/null"))


def of_json(file: str, dice: random.Random, num: int, *, only: tuple[str, ...] = ()) -> Iterator[Damage]:
    """Yield single changes of a JSON file: a key that is missing or unknown, or a value that cannot be.

    only: the first keys of paths to change; all if empty.
    """
    path = Path(file)
    values = json.loads(path.read_text())
    places = [place for place in paths_of(values) if not only or (place and place[0] in only)]
    for _ in range(num):
        place = dice.choice(places)
        kind = dice.choice(("missing", "unknown", "odd", "odd", "odd"))
        words = ".".join(map(str, place))
        if kind == "missing":
            yield f"{words} is missing", _json_change(path, lambda at=place: _without(values, at))
        elif kind == "unknown":
            yield f"{words} is renamed", _json_change(path, lambda at=place: _renamed(values, at))
        else:
            name = dice.choice(list(ODD_VALUES))
            if _at(values, place) != ODD_VALUES[name] or type(_at(values, place)) is not type(ODD_VALUES[name]):
                yield (
                    f"{words} is {name}",
                    _json_change(path, lambda at=place, n=name: _replaced(values, at, ODD_VALUES[n])),
                )


def of_lines(file: str, dice: random.Random, num: int) -> Iterator[Damage]:
    """Yield JSON lines of which one is odd: garbage, a changed key, twice the same."""
    path = Path(file)
    lines = path.read_text().splitlines()
    garbage = [
        "{",
        "[]",
        "null",
        "42",
        '"text"',
        "\x00",
        "{}",
        "[" * DEEP,
        "NaN",
        '{"step": 1, "step": 2}',
        "\ud7ff",
        "{'a': 1}",
    ]
    for _ in range(num):
        at = dice.randrange(len(lines))
        if dice.random() < 0.4:
            chosen = dice.choice(garbage)
            yield f"line {at + 1} is {chosen[:20]!r}", _write_lines(path, [*lines[:at], chosen, *lines[at + 1 :]])
            continue
        values = json.loads(lines[at])
        place = dice.choice(paths_of(values))
        name = dice.choice(list(ODD_VALUES))
        changed = json.dumps(_replaced(values, place, ODD_VALUES[name]))
        words = ".".join(map(str, place))
        yield f"line {at + 1}: {words} is {name}", _write_lines(path, [*lines[:at], changed, *lines[at + 1 :]])


def of_tensors(file: str, dice: random.Random) -> Iterator[Damage]:
    """Yield a safetensors file with a tensor that is missing, strange, of another shape or kind, or not finite."""
    from safetensors.torch import load_file, save_file

    path = Path(file)
    tensors = load_file(path)
    name = dice.choice([each for each, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() == 2])

    def put(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        def do() -> None:
            changed = {each: tensor.clone() for each, tensor in tensors.items()}
            change(changed)
            save_file(changed, path, metadata={"format": "pt"})

        return do

    yield f"{name} is missing", put(lambda t: t.pop(name))
    yield f"{name} is renamed", put(lambda t: t.update({f"{name}x": t.pop(name)}))
    yield (
        f"{name} has a row more",
        put(lambda t: t.update({name: t[name].new_zeros(len(t[name]) + 1, t[name].shape[1])})),
    )
    yield f"{name} is empty", put(lambda t: t.update({name: t[name][:0].clone()}))
    yield f"{name} is flat", put(lambda t: t.update({name: t[name].flatten()}))
    yield f"{name} holds NaN", put(lambda t: t[name].view(-1)[3].fill_(float("nan")))
    yield f"{name} holds infinity", put(lambda t: t[name].view(-1)[3].fill_(float("inf")))
    yield f"{name} is integers", put(lambda t: t.update({name: t[name].long()}))
    yield "no tensor at all", put(lambda t: t.clear())
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    yield "a header of 2^60 bytes", lambda: _write(path, (2**60).to_bytes(8, "little") + content[8:])
    yield "a header of no bytes", lambda: _write(path, bytes(8) + content[8:])
    yield "a header that is no JSON", lambda: _write(path, content[:8] + b"x" * header + content[8 + header :])
    yield "no tensor data", lambda: _write(path, content[: 8 + header])


def paths_of(values: Any, above: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the places of all values in nested lists and objects; of a long list, the first two."""
    found = [above] if above else []
    if isinstance(values, dict):
        for key, value in values.items():
            found += paths_of(value, (*above, key))
    elif isinstance(values, list):
        for index, value in enumerate(values[:2]):
            found += paths_of(value, (*above, index))
    return found


def remove(path: Path) -> None:
    """Remove whatever stands here."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write(path: Path, content: bytes) -> None:
    remove(path)
    path.write_bytes(content)


def _json_change(path: Path, make: Callable[[], Any]) -> Callable[[], None]:
    return lambda: path.write_text(json.dumps(make()), encoding="utf-8", errors="surrogatepass")


def _write_lines(path: Path, lines: list[str]) -> Callable[[], None]:
    content = "".join(line + "\n" for line in lines)
    return lambda: path.write_text(content, encoding="utf-8", errors="surrogatepass")


def _at(values: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        values = values[key]
    return values


def _changed(values: Any, place: tuple[str | int, ...], change: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(values))
    change(_at(copy, place[:-1]), place[-1])
    return copy


def _without(values: Any, place: tuple[str | int, ...]) -> Any:
    return _changed(values, place, lambda above, key: above.pop(key))


def _renamed(values: Any, place: tuple[str | int, ...]) -> Any:
    def change(above: Any, key: Any) -> None:
        value = above.pop(key)
        if isinstance(above, dict):
            above[f"{key}_"] = value

    return _changed(values, place, change)


def _replaced(values: Any, place: tuple[str | int, ...], value: Any) -> Any:
    def change(above: Any, key: Any) -> None:
        above[key] = value

    return _changed(values, place, change)
