"""One process: its launcher, its command, the signals that end it, and what its forked children do not keep."""
