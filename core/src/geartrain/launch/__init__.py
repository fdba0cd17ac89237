"""Ranks: the launcher of this process, starting and watching other ranks, how they meet, and how they report failures."""
