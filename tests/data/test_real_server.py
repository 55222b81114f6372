"""The server engine against a server that this project did not write: `transformers serve`."""

import sys

import pytest
from transformers.utils.import_utils import is_serve_available

from blockdraft.data import Conversation, GenerationSettings, Prompt, ServerEngine
from blockdraft.decoding import generate
from blockdraft.pocket import heldout
from blockdraft.targets import Sampling, load_target
from blockdraft.targets.loading import POCKET_FOLDER

from serving import free_port, sampling_z, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_serve_available(), reason="needs fastapi, uvicorn and openai"),
]

TOKENISED_OTHERWISE = (
    "its text has another number of tokens than were sampled",
    "its text does not survive tokenisation",
)
"""A text can be sampled in other tokens than it is tokenised to."""


@pytest.fixture(scope="module")
def pocket():
    return load_target("pocket")


@pytest.fixture
def url(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(POCKET_FOLDER)]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    with served(command, port, tmp_path / "log", HF_HOME=str(tmp_path / "hf"), OMP_NUM_THREADS="1") as url:
        yield url


def regenerate(pocket, url, prompts, settings):
    """All conversations, done, and what the engine says of its server."""
    engine = ServerEngine([url], model=str(POCKET_FOLDER), concurrency=4)
    done = list(engine.run(Conversation(prompt, pocket, settings, index=i) for i, prompt in enumerate(prompts)))
    assert sorted(each.index for each in done) == list(range(len(prompts)))
    return done, engine.describe()["servers"][0]


def test_rows_from_transformers_serve(pocket, url):
    """Its generation config says greedy, at both temperatures: what is sampled is what was asked for."""
    questions = [example.prompt for task in ("chat", "math") for example in heldout(task, 5)]
    single = [Prompt(str(i), (question,)) for i, question in enumerate(questions)]
    double = Prompt("double", (questions[0], questions[1]))

    done, used = regenerate(pocket, url, [*single[:2], double], GenerationSettings(Sampling(0.0), 100, 500))
    assert (used["prompts"], used["token_ids"]) == ("text", "re-tokenised")
    assert used["sampling_left_to_server"] == []
    rows = [row for each in done for row in each.completions]
    assert len(rows) >= 3
    for row in rows:
        assert row.response_ids == generate(pocket, None, row.prompt_ids, rule="greedy", max_new_tokens=100).tokens

    done, _ = regenerate(pocket, url, single, GenerationSettings(Sampling(1.0), 100, 500))
    rows = [row for each in done for row in each.completions]
    assert {each.dropped for each in done} <= {None, *TOKENISED_OTHERWISE}
    assert len(rows) >= len(single) // 2
    assert abs(sampling_z(pocket, rows)) < 5
    greedy = [generate(pocket, None, row.prompt_ids, rule="greedy", max_new_tokens=100).tokens for row in rows[:3]]
    assert [row.response_ids for row in rows[:3]] != greedy
