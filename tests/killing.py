"""Work that is killed with SIGKILL at random moments, again and again, until one attempt is left alone."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SERVER = """
import os, sys, torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[1].split(os.pathsep)
exec(sys.argv[2])
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        work(*sys.argv[3:])
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()  # until then a child that has ended keeps its number
    print(os.waitpid(child, 0)[1], flush=True)
"""


TIMES = int(os.environ.get("BLOCKDRAFT_KILLS", "1"))
"""How many times as often to kill as the tests say; `make fuzz` sets it to 3."""


def killed(source: str, *arguments: object, kills: int, within: float, seed: int) -> Iterator[int]:
    """How each attempt ended: ``kills * TIMES`` times some moment within so many seconds, then once undisturbed.

    ``source`` defines ``work(*arguments)``, which takes text; it is imported once and forked for every attempt.
    """
    dice = random.Random(seed)
    here = Path(__file__).parent
    folders = os.pathsep.join(str(path) for path in (here, here / "data", here / "training"))
    command = [sys.executable, "-c", SERVER, folders, source, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for attempt in range(kills * TIMES + 1):
            server.stdin.write("go\n")
            child = int(server.stdout.readline())
            if attempt < kills * TIMES:
                time.sleep(dice.uniform(0.0, within))
                os.kill(child, signal.SIGKILL)
            server.stdin.write("wait\n")
            yield int(server.stdout.readline())
        server.stdin.close()
