"""Run the command line by ``python -m blockdraft``."""

from blockdraft.cli import main

main()
