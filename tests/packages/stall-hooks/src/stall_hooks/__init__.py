"""``--plugin stall_hooks``: let other plugins implement ``on_stall``."""

from stall_hooks import hookspecs


class StallHooks:
    hookspecs = hookspecs
