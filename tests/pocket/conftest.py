import pytest

from blockdraft.pocket.build.text import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer that the build trains."""
    return train_tokenizer()
