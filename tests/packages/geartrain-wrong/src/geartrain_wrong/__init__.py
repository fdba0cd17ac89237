"""Strategies that are wrong on purpose, each in one thing. The conformance kit must catch every one, by the cases that are about it."""
