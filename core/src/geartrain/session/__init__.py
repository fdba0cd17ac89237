"""For those who keep their own loop: ``geartrain.Session``.

- ``session``: the loop's side: models, steps, collectives, what is written.
- ``launched``: planning, processes, teardown.
- ``working``: what each process does around the loop.
- ``parts``: the models, optimizers and loaders that a session hands back.
- ``state``: what a checkpoint holds.
"""
