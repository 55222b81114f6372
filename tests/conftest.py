import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state and leaves a second core to its neighbour."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
