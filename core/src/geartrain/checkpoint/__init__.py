"""Checkpoints: what one holds, its file, and how a fit resumes."""
