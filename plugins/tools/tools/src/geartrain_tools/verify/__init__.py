"""``geartrain verify``: whether kills, or the number of processes, change a training."""
