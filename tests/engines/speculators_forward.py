"""Run by the interpreter of .venv-speculators: load an exported drafter, say what was missing, run its own forward.

    python speculators_forward.py FOLDER INPUTS OUTPUTS

INPUTS are tensors: tokens [1, T], features [1, T, K * H], hidden [1, T, H] of the target before its final norm, and
positions [A] of the anchors. OUTPUTS get logits [A, S, V] of all slots. Prints the loading report as JSON.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash import core as dflash
from speculators.models.dspark import core as dspark

MODELS = {"dflash": (dflash, dflash.DFlashDraftModel), "dspark": (dspark, dspark.DSparkDraftModel)}
VERIFIERS = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}

folder, inputs, outputs = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "eager"
module, model_class = MODELS[config.speculators_model_type]
model, info = model_class.from_pretrained(folder, config=config, output_loading_info=True, dtype=torch.float32)
stored = load_file(f"{folder}/model.safetensors").keys()
model.load_verifier_weights()
given = load_file(inputs)
seen = {}


def watch(logits, *others, original=module.compute_metrics, **options):
    seen["logits"] = logits
    return original(logits, *others, **options)


module.compute_metrics = watch
tokens, positions = given["tokens"], given["positions"]
mask = torch.zeros_like(tokens, dtype=torch.float32)
mask[:, positions] = 1
losses = model_class.get_trainer_kwargs(loss_fn="kl_div", loss_implementation="eager", max_anchors=len(positions))[0]
with torch.no_grad():
    model.eval()(
        hidden_states=given["features"], input_ids=tokens, loss_mask=mask, document_ids=torch.zeros_like(tokens),
        verifier_last_hidden_states=given["hidden"], **losses,
    )  # fmt: skip
logits = seen["logits"].view(len(positions), config.block_size, -1)
save_file({"logits": logits.contiguous()}, outputs)
report = {
    "missing": sorted(set(info["missing_keys"]) - VERIFIERS),
    "unexpected": sorted(info["unexpected_keys"]),
    "mismatched": [str(each) for each in info["mismatched_keys"]],
    "not_stored": sorted(model.state_dict().keys() - stored),
    "nan": sorted(name for name, parameter in model.named_parameters() if parameter.isnan().any()),
    "finite": bool(logits.isfinite().all()),
}
print(json.dumps(report))
