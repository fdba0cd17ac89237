"""Checkpoints: their contents, their file, and how a fit resumes."""
