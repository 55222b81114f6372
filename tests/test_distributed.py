"""What torchrun tells its processes: numbers that cannot be are said in one line, and nothing is waited for."""

import pytest

from blockdraft.distributed import DeviceError, Distributed

GOOD = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "²"}, "RANK is '²'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_that_no_torchrun_has_set(monkeypatch, changes, reason):
    for name, value in (GOOD | changes).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=reason):
        Distributed("cpu")


def test_a_process_alone(monkeypatch):
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    alone = Distributed("cpu")
    assert (alone.rank, alone.world_size, alone.is_distributed) == (0, 1, False)
