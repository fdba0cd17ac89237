"""``precision="32-true"``. geartrain-callbacks has the others."""


class FullPrecision:
    """``32-true``: torch's default."""
