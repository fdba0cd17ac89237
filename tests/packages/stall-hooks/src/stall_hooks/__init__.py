"""``--plugin stall_hooks``: lets other plugins implement ``on_stall``."""

from stall_hooks import hookspecs


class StallHooks:
    hookspecs = hookspecs
