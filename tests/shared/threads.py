"""Several ranks in the process of the test."""

from regression import one_trainer

from geartrain.testing import ThreadRanks


def on_threads(ranks=2, first=0, **options):
    """A trainer whose ranks are threads, and its strategy: after a run, ``strategy.runs[1].module`` is rank 1's module."""
    strategy = ThreadRanks(ranks, first)
    return one_trainer(strategy=strategy, **options), strategy


def equal(a, b):
    """Bitwise equal tensors under the same names."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
