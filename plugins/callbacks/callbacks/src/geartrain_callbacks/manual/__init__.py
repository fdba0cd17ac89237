"""``automatic_optimization = False``, and a module's own ``optimizer_step`` and the like."""
