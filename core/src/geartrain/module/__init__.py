"""The user's classes: Module, DataModule, and the arguments of both."""
