"""blockdraft: drafters for speculative decoding, trained for block verification."""

__version__ = "0.1.0"
