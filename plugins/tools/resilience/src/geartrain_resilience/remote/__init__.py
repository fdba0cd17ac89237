"""Remote storage through fsspec: the plugin ``remote``, and checkpoints that are read by URL."""
