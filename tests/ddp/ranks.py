"""Scripts of several ranks that know the trainings of cases.py."""

from several_ranks import Scripts

_scripts = Scripts(__file__)
PREAMBLE, script, results, failure = _scripts.preamble, _scripts.script, _scripts.results, _scripts.failure
