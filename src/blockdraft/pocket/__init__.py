"""pocket: a tiny Qwen3-architecture language model made by this project, with the corpus it speaks.

`blockdraft.pocket.corpus` gives training conversations and held-out prompts;
``python -m blockdraft.pocket.build`` makes the model from nothing but a seed.
"""
