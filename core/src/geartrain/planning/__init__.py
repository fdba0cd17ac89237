"""Make a plan from names and options: installed plugins, hardware, the selection, its parts."""
