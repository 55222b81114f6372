"""Make pocket from its seed: ``python -m blockdraft.pocket.build --out build/pocket``.

`text` learns the tokenizer from the corpus and packs conversations into batches, `training` holds the network and
trains it, `__main__` measures the result and writes the folder. Nothing else imports this package.
"""
