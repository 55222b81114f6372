"""How fast a run goes, from a clock and a loader whose values are known."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from blockdraft.data import Completion, TextDataset
from blockdraft.recipes import RecipeError, load_recipe
from blockdraft.training import measuring
from blockdraft.training import step as loader_module
from blockdraft.training.measuring import Rates
from blockdraft.training.step import PrefetchingLoader

from tiny import tiny_drafter, tiny_target


def rates(monkeypatch, *, device="cpu", peak_tflops=None):
    """Measure 4 steps of 30 blocks in 8 seconds, 2 of them spent waiting, on two devices that hold 3 GiB."""
    times = iter((100.0, 108.0))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(measuring, "peak_memory", lambda _device: 3 * 2**30)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(name="NVIDIA A100-SXM4-80GB")
    )
    loader = SimpleNamespace(seconds_waited=5.0)
    distributed = SimpleNamespace(device=torch.device(device), world_size=2)
    made = Rates(distributed, loader, 624e12, peak_tflops)
    loader.seconds_waited = 7.0
    return made.measure(4, 30.0)


def texts(*lengths):
    """Texts of the token 7, with prompts of these lengths."""
    return TextDataset.of([Completion(f"t{each}#0", [7] * each, [7, 7], "length") for each in lengths])


def test_prompts_are_decoded_as_far_as_the_context_reaches(monkeypatch):
    """A prompt of 500 tokens leaves 8 of 512 positions besides a block of 4, one of 509 leaves none."""
    target, budgets, generate = tiny_target(), [], measuring.generate

    def record(*models_and_prompt, max_new_tokens, **options):
        budgets.append(max_new_tokens)
        return generate(*models_and_prompt, max_new_tokens=max_new_tokens, **options)

    monkeypatch.setattr(measuring, "generate", record)
    drafter = tiny_drafter("dflash", target)
    found = measuring.DecodedPrompts(texts(500, 509, 3), 3, target, 1.0, 0).measure(drafter)
    assert budgets == [8, measuring.DECODED_TOKENS]
    assert set(found) == {"decoded_length_block", "decoded_text"}
    assert measuring.DecodedPrompts(texts(509), 1, target, 1.0, 0).measure(drafter) == {}


def test_rates(monkeypatch):
    assert rates(monkeypatch) == {
        "steps_per_second": 0.5, "blocks_per_second": 15.0, "waiting_for_data": 0.25, "peak_memory_gib": 3.0,
    }  # fmt: skip


def test_utilization_is_known_by_the_name_of_the_device_or_from_the_peak_rate_given(monkeypatch):
    """Half of 624 TFLOP a second, over two devices of 312 or of 156."""
    assert rates(monkeypatch, device="cuda")["flop_utilization"] == pytest.approx(0.5)
    assert rates(monkeypatch, device="cuda", peak_tflops=156.0)["flop_utilization"] == pytest.approx(1.0)
    assert rates(monkeypatch, peak_tflops=156.0)["flop_utilization"] == pytest.approx(1.0)


@pytest.mark.parametrize("value", ["0", "-3", ".nan", ".inf", "fast"])
def test_a_peak_rate_is_a_positive_number(value):
    assert load_recipe("pocket-dflash-ce", ["runtime.peak_tflops=12.5"]).runtime.peak_tflops == 12.5
    with pytest.raises(RecipeError, match=r"runtime\.peak_tflops"):
        load_recipe("pocket-dflash-ce", [f"runtime.peak_tflops={value}"])


def test_batches_are_prepared_by_a_thread_and_waiting_is_counted(monkeypatch):
    """Every look at the clock is a second later than the one before: each step waits for one."""
    clock = itertools.count()
    monkeypatch.setattr(loader_module.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(loader_module, "partition", lambda chosen, num, _dataset: [chosen] * num)
    monkeypatch.setattr(loader_module, "collate", lambda part, _dataset, _num: part[0])
    sampler = SimpleNamespace(
        step=lambda epoch, step: [10 * epoch + step], steps_per_epoch=3, dataset=None, num_proposals=4
    )
    threads = []

    def prepare(batch):
        threads.append(threading.current_thread())
        return -batch

    loader = PrefetchingLoader(sampler, rank=1, world_size=2, accumulation=2, prepare=prepare)
    assert list(loader.steps(1, 5)) == [[-1, -1], [-2, -2], [-10, -10], [-11, -11]]
    assert loader.seconds_waited == 4.0
    assert len(threads) == 8
    assert threading.main_thread() not in threads
