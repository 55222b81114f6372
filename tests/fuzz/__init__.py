"""Bad input for every verb and every file that blockdraft reads: ``make fuzz``, and a short version in ``make test``.

bench.py      one good artefact of every kind, on a tiny target, and the commands that read each of them
damage.py     what can be wrong with a file, generated from a seed
classes.py    the table of classes: files, numbers, names, outputs, servers, each with its cases
running.py    a case in a process of its own, forked from one that has everything loaded, under limits and a clock
"""
