"""The command ``geartrain doctor``."""
