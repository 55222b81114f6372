"""The table of classes, in the order in which it is printed."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzz import argument_classes, file_classes, server_classes, surrounding_classes
from fuzz.running import Case

CLASSES: dict[str, Callable[[random.Random, int], Iterator[Case]]] = {
    "files cut or overwritten": file_classes.cut_or_overwritten,
    "something else in a file's place": file_classes.of_another_kind,
    "our JSON, keys and values": file_classes.own_json,
    "others' JSON, keys and values": file_classes.others_json,
    "JSON lines": file_classes.lines,
    "journals": server_classes.journals,
    "tensors": file_classes.tensors,
    "shards and caches that lie": file_classes.consistent_lies,
    "YAML": file_classes.yaml_files,
    "recipe fields and sizes": argument_classes.fields,
    "numbers": argument_classes.numbers,
    "seeds": argument_classes.seeds,
    "devices": argument_classes.devices,
    "names and paths": argument_classes.paths,
    "misspelt names": argument_classes.misspelt,
    "words": surrounding_classes.words,
    "recipe fields that hold words": surrounding_classes.text_fields,
    "the environment": surrounding_classes.environments,
    "costs that were remembered": surrounding_classes.remembered,
    "targets in other forms": surrounding_classes.models,
    "prompts in other containers": surrounding_classes.prompt_files,
    "studies": surrounding_classes.studies,
    "prompts and the context": argument_classes.prompt_texts,
    "artefacts mixed up": argument_classes.mixed_up,
    "outputs": argument_classes.outputs,
    "full disks": argument_classes.full_disks,
    "servers that lie": server_classes.lying,
    "servers that break": server_classes.broken,
    "strange files beside ours": server_classes.strays,
    "nothing wrong at all": surrounding_classes.healthy,
}


def cases(good: Path, scale: int, seed: int = 0) -> dict[str, list[Case]]:
    """Return the cases of every class; the same seed and scale give the same cases."""
    found = {}
    with contextlib.chdir(good):
        for name, generate in CLASSES.items():
            by_name = {case.name: case for case in generate(random.Random(f"{seed}/{name}"), scale)}
            found[name] = list(by_name.values())
    return found
