"""Metrics of ``self.log``: the store, reductions over an epoch, objects of other libraries."""
