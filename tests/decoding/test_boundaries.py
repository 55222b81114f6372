"""Every time that is charged to a phase begins and ends with a device that has nothing left to do."""

from types import SimpleNamespace

import torch

from blockdraft.decoding import generate, generation

from tiny import tiny_drafter, tiny_target


def test_the_device_is_waited_for_at_every_timed_boundary(monkeypatch):
    """On a GPU; here its clock and its waiting are watched."""
    target = tiny_target(tokenizer=False, mask_token_id=2, eos=None)
    drafter, events = tiny_drafter("dflash", target), []
    begin = generation._Text.__init__

    def on_cuda(self, *args):
        begin(self, *args)
        self.device = SimpleNamespace(type="cuda")

    monkeypatch.setattr(generation._Text, "__init__", on_cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: events.append("waited"))
    monkeypatch.setattr(generation, "clock", lambda: events.append("clock") or float(len(events)))
    out = generate(target, drafter, [5, 6, 7], max_new_tokens=12)
    assert events == ["waited", "clock"] * (2 + 5 * len(out.rounds))
