"""A plugin in a file, like a user's file beside a script."""

from geartrain import hookimpl


class Steps:
    def __init__(self, every: int = 1, word: str = "step"):
        self.every, self.word = every, word

    @hookimpl
    def on_step_end(self, run):
        if run.step % self.every == 0:
            print(self.word, run.step)
