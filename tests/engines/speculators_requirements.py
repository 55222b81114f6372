"""What an installed speculators needs for loading and running drafters on a CPU, as a requirements file.

Its torchvision and torchaudio may bring other builds of torch along; neither is needed.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"hs-connectors", "torch", "torchaudio", "torchvision"}

print("torch==2.13.0")
for requirement in requires("speculators") or []:
    name = re.match(r"[\w.-]+", requirement)
    if name and name[0] not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
