"""``geartrain compare``: strategies on a user's module and data, or two runs."""
