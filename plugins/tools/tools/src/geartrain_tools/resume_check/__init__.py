"""``geartrain verify resume``: whether a killed run ends as if nothing had happened."""
