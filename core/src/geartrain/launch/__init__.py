"""Ranks: who started this process, starting and watching the others, meeting them, and how failures are told."""
