"""Data: loaders, the move to the device, seeds, and the samplers' epochs."""
