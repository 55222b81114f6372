"""``python -m blockdraft``."""

from blockdraft.cli import main

main()
