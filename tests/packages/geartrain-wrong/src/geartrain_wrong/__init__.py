"""Strategies with one deliberate error each. The conformance kit must catch every one."""
