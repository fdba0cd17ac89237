"""What the user writes: Module, DataModule, and the arguments of both."""
