"""The command ``geartrain ckpt``: list, verify, show, compare and export checkpoints."""
