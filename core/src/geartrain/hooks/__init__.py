"""The plugin manager: a run's plugins, the owner of each hook, and the frozen callers."""
