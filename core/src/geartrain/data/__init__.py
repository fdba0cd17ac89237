"""Loaders: what users give, the move to the device, the seeds, and what the loop asks of samplers."""
