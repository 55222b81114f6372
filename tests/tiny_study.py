"""A study of two cells that takes seconds."""

TINY = """
name: tiny
targets: {pocket: {recipe: pocket, prompts: pocket, num_prompts: 24, max_new_tokens: 24, max_length: 160}}
drafters: [dflash]
objectives: {ce: {recipe: ce}, bv: {recipe: bv, set: [annealing.final=1.0]}}
seeds: [1]
set: [optimizer.max_steps=3, drafter.num_layers=1, drafter.num_proposals=4, data.num_heldout=4,
      logging.heldout_blocks=8, logging.save_steps=1, logging.logging_steps=1, runtime.device=cpu, data.features=cached]
evaluation: {tasks: [pocket-math], num_prompts: 2, num_decoded: 1, max_new_tokens: 12, rules: [token, block]}
"""
