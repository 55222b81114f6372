"""What an installed speculators needs for training, as a requirements file.

Its packages for sound and images are not needed, and would bring other builds of torch along.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision"}

print("torch==2.13.0")
for requirement in requires("speculators") or []:
    name = re.match(r"[\w.-]+", requirement)
    if name and name[0] not in LEFT_OUT and "extra ==" not in requirement:
        print(requirement)
