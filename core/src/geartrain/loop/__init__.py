"""The loop: set-up of a rank, the training step, evaluation."""
