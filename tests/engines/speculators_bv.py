"""Run by the interpreter of .venv-speculators: the package's own model, our loss in its forward, its backward.

    python speculators_bv.py FOLDER INPUTS OUTPUTS PAGE

INPUTS are tensors: tokens [1, T], features [1, T, K * H], hidden [1, T, H] of the target before its final norm, and
mask [1, T] of the response. PAGE is the guide, whose code is run as it stands; it replaces the package's models.
OUTPUTS get the loss, its numerator and denominator, and the gradients of all weights.
"""

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

folder, inputs, outputs, page = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
code = re.findall(r"^```py\n(.*?)^```", Path(page).read_text(), re.DOTALL | re.MULTILINE)
scope = {"__name__": "guide"}
for block in code:
    exec(compile(block, page, "exec"), scope)
model_class = SpeculatorModel.registry[config.speculators_model_type]
assert model_class is scope["DFlashWithBV" if config.speculators_model_type == "dflash" else "DSparkWithBV"]
model = model_class.from_pretrained(folder, config=config, dtype=torch.float32)
model.load_verifier_weights()
given = load_file(inputs)
options = {"loss_fn": "kl_div", "loss_implementation": "eager", "max_anchors": int(given["mask"].sum())}
torch.manual_seed(0)
_, loss, metrics = model.train()(
    hidden_states=given["features"], input_ids=given["tokens"], loss_mask=given["mask"],
    document_ids=given["documents"], verifier_last_hidden_states=given["hidden"],
    **model_class.get_trainer_kwargs(**options)[0],
)  # fmt: skip
loss.backward()
gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
numbers = {name: torch.as_tensor(metrics[name]).double().reshape(1) for name in ("loss_sum", "loss_total")}
save_file({"loss": loss.detach().double().reshape(1), **numbers, **gradients}, outputs)
