"""Scripts of several ranks that can use the trainings of cases.py."""

from several_ranks import Scripts

_scripts = Scripts(
    __file__, more="from geartrain.strategies import BaguaStrategy, QAdamOptimizer\n"
)
PREAMBLE, script, results = _scripts.preamble, _scripts.script, _scripts.results
