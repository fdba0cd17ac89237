"""Core's own features, written as plugins are."""
