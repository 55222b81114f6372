"""Fixtures for the tests of data."""

import pytest

from scripted import WORDS, Scripted, completion
from tiny import EOS


@pytest.fixture
def serve():
    """Start scripted servers, which are stopped after the test."""
    started = []

    def start(answer=lambda body, _: completion(body, [*WORDS, EOS]), **options):
        started.append(Scripted(answer, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()
