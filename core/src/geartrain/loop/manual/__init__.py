"""automatic_optimization = False."""
