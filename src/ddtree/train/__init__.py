"""Training of drafters: the target's own answers, the trainer, and what its drafters are worth."""
