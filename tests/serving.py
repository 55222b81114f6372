"""Real servers as subprocesses, and whether what they sampled follows the target's distribution."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import torch


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def served(command, port, log, *, patience=120, **environment):
    """The URL of a server that `command` starts on `port`; it and all its children are gone afterwards."""
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            give_up = time.monotonic() + patience
            while not _is_healthy(url):
                said = log.read_text()[-3000:]
                assert process.poll() is None, f"the server ended:\n{said}"
                assert time.monotonic() < give_up, f"the server did not start:\n{said}"
                time.sleep(0.2)
            yield url
        finally:
            _end(process)


def _is_healthy(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _end(process):
    """The process was the first of its own session: the signals reach its children and nobody else."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def sampling_z(target, rows):
    """Mean of ``log p(x_t) + entropy(p_t)`` over sampled tokens, in standard errors: near 0 if sampled from p."""
    surprises = []
    for row in rows:
        tokens = torch.tensor([row.prompt_ids + row.response_ids])
        hidden = target.forward(tokens).hidden[0, len(row.prompt_ids) - 1 : -1]
        log_p = target.logits(hidden).double().log_softmax(-1)
        taken = log_p.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]
        surprises.append(taken - (log_p.exp() * log_p).sum(-1))
    values = torch.cat(surprises)
    return float(values.sum() / values.square().sum().sqrt())
