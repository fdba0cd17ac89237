"""Loaders: what users give, the move to the device, the shards of ranks, ranks with unequal numbers of batches."""
