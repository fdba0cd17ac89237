"""Paths that users give, and files that are written whole or not at all."""
