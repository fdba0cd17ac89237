"""The algorithms that geartrain-bagua ships, each chosen by its entry point in ``geartrain_bagua.algorithms``."""
