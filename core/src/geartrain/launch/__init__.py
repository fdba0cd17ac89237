"""One process: its launcher, its command, the signals that end it, and its forks."""
