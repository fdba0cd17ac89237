"""geartrain-bagua's algorithms, each an entry point in ``geartrain_bagua.algorithms``."""
