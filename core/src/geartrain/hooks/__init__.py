"""The plugin manager: which plugins a run has, who owns each hook, and the calls that are frozen for the loop."""
