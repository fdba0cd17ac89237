"""The parts of a batch: split it, and combine the outputs and the logged values of its parts."""
