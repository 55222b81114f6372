"""This package is the command line: `blockdraft <verb>`."""

from blockdraft.cli.app import main

__all__ = ["main"]
