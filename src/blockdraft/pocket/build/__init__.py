"""How pocket is made from its seed: ``python -m blockdraft.pocket.build --out build/pocket``.

`tokenizer` learns the vocabulary from the corpus, `packing` makes batches of conversations, `model` is the network and
how it grows, `training` trains it, `quality` measures the result. Nothing else imports this package.
"""
