"""Several ranks as threads in the process of the test."""

from regression import one_trainer

from geartrain.testing import ThreadRanks


def on_threads(ranks=2, first=0, **options):
    """Return a trainer whose ranks are threads, and its strategy.

    After a run, ``strategy.runs[1].module`` is rank 1's module.
    """
    strategy = ThreadRanks(ranks, first)
    return one_trainer(strategy=strategy, **options), strategy


def equal(a, b):
    """True if both have the same names and bitwise equal tensors."""
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
