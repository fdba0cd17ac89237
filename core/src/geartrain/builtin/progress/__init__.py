"""The progress bar and the closing table."""
