"""From names and options to a plan: installed plugins, hardware, the selection and its parts."""
