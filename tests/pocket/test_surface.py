"""What other packages see of pocket: a few names, without PyTorch, and nothing inside."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import blockdraft
from blockdraft import pocket

SOURCE = Path(blockdraft.__file__).parent


def test_the_names_are_there():
    assert pocket.FAMILIES == ("math", "code", "chat")
    assert next(pocket.prompts(0, "math")).family == "math"
    assert pocket.heldout("code", 1)[0].family == "code"
    assert issubclass(pocket.CorpusError, ValueError)
    with pytest.raises(AttributeError, match="no attribute 'grass'"):
        _ = pocket.grass


def test_the_model_folder_is_that_of_the_target():
    from blockdraft.targets.loading import POCKET_FOLDER

    assert pocket.MODEL_FOLDER == POCKET_FOLDER
    assert {"config.json", "model.safetensors", "tokenizer.json", "quality.json"} <= {
        path.name for path in pocket.MODEL_FOLDER.iterdir()
    }
    assert json.loads((pocket.MODEL_FOLDER / "config.json").read_text())["model_type"] == "qwen3"


def test_the_corpus_needs_no_pytorch():
    program = "import sys; from blockdraft import pocket; pocket.heldout('chat', 3); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_nobody_reaches_inside():
    inside = re.compile(r"blockdraft\.pocket\.\w+ import|import blockdraft\.pocket\.|from blockdraft\.pocket\.")
    found = [path for path in SOURCE.rglob("*.py") if inside.search(path.read_text())]
    assert found
    assert {path.relative_to(SOURCE).parts[0] for path in found} == {"pocket"}
