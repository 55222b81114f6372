"""Compiled layers: how often the compiler breaks off, and what happens where it is wrong."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from blockdraft.drafters import attention
from blockdraft.drafters.attention import Anchors, FlexAttention
from blockdraft.drafters.backbone import Layer
from blockdraft.selfcheck import SelfCheckError, SelfCheckWarning, _failures
from blockdraft.training import step

from tiny import tiny_drafter, tiny_target


@pytest.fixture(autouse=True)
def _fresh():
    _failures.clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    _failures.clear()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_layer_is_few_graphs_and_shapes_that_change_do_not_compile_it_anew_for_ever(monkeypatch):
    """Flex attention is left out of the graph, as its own call. The counts are those found, and may only shrink."""
    monkeypatch.setattr(attention, "_flex", lambda _compiled: torch._dynamo.disable(attention.flex_attention))
    target = tiny_target(dtype=torch.float32)
    drafter = tiny_drafter("dflash", target, num_layers=3)
    for layer in drafter.layers:
        layer.compile(backend="eager")
    graphs = []
    for num_blocks, length in ((3, 30), (5, 41), (7, 52), (4, 63)):
        position = torch.arange(num_blocks) * 4 + 2
        anchors = Anchors.of(torch.zeros_like(position), position)
        features = torch.randn(1, length, 3 * target.hidden_size)
        with torch.no_grad():  # PyTorch has no backward pass of flex attention on a CPU
            drafter(features, position, anchors, target, FlexAttention)
        graphs.append(counters["stats"]["unique_graphs"])
    # two pieces around attention in each of three layers, and the same once more for any shape
    assert graphs[-1] == graphs[-2] <= 12, graphs
    assert sum(counters["graph_break"].values()) <= 9, dict(counters["graph_break"])


def test_a_compiled_layer_passes_the_check_and_a_wrong_one_does_not(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(Layer, "compile", lambda _self: None)
    step.check_compiled(device, torch.float32)

    def wrong(self):
        with torch.no_grad():
            self.mlp.down_proj.weight.mul_(1.1)

    monkeypatch.setattr(Layer, "compile", wrong)
    with pytest.raises(SelfCheckError, match="off by"):
        step.check_compiled(device, torch.float32)


def test_compiling_is_for_gpus_unless_asked_for(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not step.compiles(None, cpu, torch.float32)
    assert step.compiles(True, cpu, torch.float32)
    assert not step.compiles(False, cuda, torch.bfloat16)

    monkeypatch.setattr(step, "check_compiled", lambda *_: None)
    assert step.compiles(None, cuda, torch.bfloat16)  # on by default
    _failures.clear()

    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(step, "check_compiled", fail)
    with pytest.warns(SelfCheckWarning, match="compiled layers cannot be used on cuda.*no compiler"):
        assert not step.compiles(None, cuda, torch.bfloat16)
    with pytest.raises(SelfCheckError, match="no compiler"):
        step.compiles(True, cuda, torch.bfloat16)
