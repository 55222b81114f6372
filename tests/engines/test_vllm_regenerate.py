"""The server engine against vLLM on a CPU, serving smollm2: `make test-engines`."""

import time

import pytest

from blockdraft.data import Conversation, GenerationSettings, LocalEngine, Prompt, ServerEngine
from blockdraft.decoding import generate
from blockdraft.targets import Sampling, load_target

from serving import free_port, sampling_z, served
from vllm_cpu import PYTHON, QUESTIONS

CONCURRENCY = 64


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2")


@pytest.fixture(scope="module")
def url(smollm2, tmp_path_factory):
    """vLLM's own command asks for the version of a package that `vllm-cpu` is not, hence the module.

    A seeded request whose prompt is read in parts ends vLLM's CPU worker, hence whole prompts.
    """
    folder, port = tmp_path_factory.mktemp("smollm2"), free_port()
    smollm2.save(folder)
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"]
    command += ["--max-model-len", "1024", "--max-num-seqs", str(CONCURRENCY)]
    log = tmp_path_factory.mktemp("log") / "vllm"
    with served(command, port, log, patience=600, VLLM_CPU_KVCACHE_SPACE="2") as url:
        yield url


def regenerate(target, url, settings, count, turns=1):
    """All conversations, none dropped, and the tokens a second that came from all of them together."""
    engine = ServerEngine([url], concurrency=CONCURRENCY)
    engine.prepare(target, settings.sampling)
    (used,) = engine.describe()["servers"]
    assert (used["prompts"], used["token_ids"], used["refused_fields"]) == ("token ids", "server", [])
    asked = []
    for i in range(count):
        questions = tuple(QUESTIONS[(i + turn) % len(QUESTIONS)] for turn in range(turns))
        asked.append(Conversation(Prompt(str(i), questions), target, settings, index=i))
    start = time.monotonic()
    done = list(engine.run(asked))
    seconds = time.monotonic() - start
    assert sorted(each.index for each in done) == list(range(count))
    assert {each.dropped for each in done} <= {None, "cut off before its last turn"}
    return done, sum(each.num_tokens for each in done) / seconds


def test_greedy_rows_are_the_targets_own(smollm2, url):
    done, _ = regenerate(smollm2, url, GenerationSettings(Sampling(0.0), 48, 512), len(QUESTIONS), turns=2)
    rows = [row for each in done for row in each.completions]
    assert len(rows) > len(QUESTIONS)
    for row in rows:
        assert row.response_ids == generate(smollm2, None, row.prompt_ids, rule="greedy", max_new_tokens=48).tokens
    print(f"\n{len(rows)} greedy rows, {sum(len(row.response_ids) for row in rows)} tokens, all as the target's own")


def test_sampled_rows_follow_the_targets_distribution(smollm2, url):
    done, speed = regenerate(smollm2, url, GenerationSettings(Sampling(1.0), 64, 512), 2 * CONCURRENCY)
    rows = [row for each in done for row in each.completions]
    z = sampling_z(smollm2, rows)
    num_tokens = sum(len(row.response_ids) for row in rows)
    print(f"\n{len(rows)} rows, {num_tokens} tokens at temperature 1: z = {z:.2f}")
    print(f"vLLM: {speed:.1f} tokens/s at concurrency {CONCURRENCY}")
    settings = GenerationSettings(Sampling(1.0), 64, 512)
    again = [Conversation(each.prompt, smollm2, settings) for each in done]
    start = time.monotonic()
    ours = sum(each.num_tokens for each in LocalEngine(smollm2, CONCURRENCY).run(again))
    print(f"the local engine, same prompts, the server idle: {ours / (time.monotonic() - start):.1f} tokens/s")
    assert abs(z) < 4


def test_another_distribution_is_sampled_when_asked_for_and_seen(smollm2, url):
    done, _ = regenerate(smollm2, url, GenerationSettings(Sampling(1.0, top_k=5), 64, 512), CONCURRENCY)
    z = sampling_z(smollm2, [row for each in done for row in each.completions])
    print(f"\ntop-k 5 against the whole vocabulary: z = {z:.2f}")
    assert z > 4
