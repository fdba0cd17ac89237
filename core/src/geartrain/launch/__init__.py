"""What one process knows of its launcher, signals that end a run, and what forked children do not keep."""
