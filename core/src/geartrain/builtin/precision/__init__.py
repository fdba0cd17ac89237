"""Precisions: which floating-point format the step methods compute in."""
