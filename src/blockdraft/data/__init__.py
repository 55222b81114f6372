"""Training data from the target itself: prompts, regenerated responses, batches of blocks."""
