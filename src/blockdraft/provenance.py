"""Which versions made an artefact."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Provenance(BaseModel):
    """Holds the versions of blockdraft, its main dependencies and Python, and the git revision if there is one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    blockdraft: str
    torch: str
    transformers: str
    python: str
    git: str | None = None

    @classmethod
    def here(cls) -> "Provenance":
        """Return the provenance of what this process makes."""
        return cls(
            blockdraft=package_version("blockdraft"),
            torch=package_version("torch"),
            transformers=package_version("transformers"),
            python=platform.python_version(),
            git=git_revision(),
        )


def package_version(name: str) -> str:
    """Return the version of an installed package, or ``unknown``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def git_revision() -> str | None:
    """Return the revision of the checkout that this package runs from; None if it is installed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
