"""Wrong strategies, each with the kit's cases that must catch it, and their messages."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from geartrain_testing.program import COMPARED

EQUAL = "test_equals_one_process[{}]".format
#: Cases whose scenarios share programs. The other cases are chosen by name.
SHARED = r"^(?!test_(error_in|signal|one_device|multi_node|key_on_one_rank))"
#: Cases about long training, types, starts and checkpoints.
STEPPED = (
    r"\[(sgd|adam)\]|every_step|unequal_b|dtypes|unfreezing|resume|large_numbers|test_nan"
    r"|test_start|start_apart|is_left"
)
#: Cases about training, about other results of ranks, and about the rest. A wrong strategy runs one
#: of these groups and the cases that must fail, because all cases would take minutes. By default it
#: runs even fewer: see each().
TRAINING = (
    r"\[(sgd|adam|accumulation|unused_parameters|fit_twice)\]"
    r"|identical|communication|start_apart|buffers|no_sync|is_left"
)
COMPUTED = (
    r"\[sgd\]|coverage|sharded|samples|uneven|metrics|weighted_means|gather|broadcast|barrier"
    r"|fit_v|caller|is_left"
)
AROUND = r"\[sgd\]|fit_v|caller|plugins|metadata|loopback|is_left"

#: Regular expressions of the cases' messages.
LOSS = "the loss differs from one process's from step"
WEIGHTS = "has other weights than one process"
DIFFERS = (
    "weights on rank 1 differ from rank 0's(.|\n)*declare the capability identical_weights=False"
)
#: A failure names the parameters that differ, and the capability to declare, if there is one.
SUMS = (
    rf"{LOSS}(.|\n)*weights on rank 0 that differ.*last.weight(.|\n)*"
    r"(declare the capability convergence=|No convergence is possible)"
)
SEEN, UNSEEN = "were seen more than once", "no rank saw the samples"
NAN = r"gradient of the last rank was NaN in the last step, and the weight on rank \d is"
RESUMED = "rank [01] of a resumed fit ends with other weights than in a whole"
LEFT = "left behind by programs that succeeded(.|\n)*{}".format


@dataclass(frozen=True)
class Wrong:
    """A strategy's test class, and the cases that must fail, each with a regular expression."""

    strategy: str
    fails: Mapping[str, str]
    #: Regular expression of the cases to run.
    chosen: str
    options: dict[str, Any] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    #: Seconds for a scenario that hangs.
    deadline: float = 20
    timeout: float = 8
    #: Strategies with the same name share programs; empty: it has its own programs.
    program: str = "wrong"


WRONG = {
    # A correct strategy: nothing may fail.
    "plain": Wrong("plain", {}, SHARED),
    "plain on three": Wrong("plain", {}, "three"),
    "declares capabilities that it lacks": Wrong(
        "plain",
        {
            "test_recovers": "the run has not recovered",
            "test_ranks_on_one_device": "the run failed(.|\n)*unexpected keyword argument 'ranks'",
        },
        "recovers|ranks_on_one",
        capabilities={"recovers": True, "ranks_option": "ranks"},
    ),
    # Training.
    "sums": Wrong(
        "sums", {**{EQUAL(name): SUMS for name in COMPARED}, EQUAL("clipping"): WEIGHTS}, TRAINING
    ),
    "skips the last bucket": Wrong(
        "skips-the-last-bucket",
        {EQUAL("many_buckets"): LOSS, "test_identical_weights": DIFFERS},
        TRAINING,
    ),
    "forgets earlier micro-batches": Wrong(
        "forgets-earlier-micro-batches",
        {EQUAL("accumulation"): LOSS, EQUAL("weighted_loss"): LOSS},
        TRAINING,
    ),
    "clips first": Wrong("clips-first", {EQUAL("clipping"): LOSS}, TRAINING),
    "steps Adam as SGD": Wrong(
        "steps-adam-as-sgd",
        {EQUAL("adam"): LOSS, EQUAL("two_optimizers"): LOSS},
        TRAINING,
    ),
    "first optimizer only": Wrong(
        "first-optimizer-only",
        {EQUAL("two_optimizers"): LOSS, "test_identical_weights": DIFFERS},
        TRAINING,
    ),
    "needs every gradient": Wrong(
        "needs-every-gradient",
        {EQUAL("frozen"): "TypeError: unsupported operand.*'NoneType' and 'int'"},
        TRAINING,
    ),
    "divides by users": Wrong("divides-by-users", {EQUAL("unused_parameters"): LOSS}, TRAINING),
    "schedules once per rank": Wrong(
        "schedules-once-per-rank", {EQUAL("scheduler"): LOSS}, TRAINING
    ),
    "ends with a tuple": Wrong(
        "ends-with-a-tuple",
        {EQUAL("step_end"): "'training_step_end': 'tuple'"},
        TRAINING,
    ),
    "fits once": Wrong("fits-once", {EQUAL("fit_twice"): LOSS}, TRAINING),
    "keeps buffers apart": Wrong(
        "keeps-buffers-apart",
        {"test_buffers": "norm.running_mean is tensor(.|\n)*on rank 1"},
        TRAINING,
    ),
    "starts apart": Wrong("starts-apart", {"test_ranks_that_start_apart": DIFFERS}, TRAINING),
    "drifts": Wrong(
        "drifts",
        {"test_identical_weights": DIFFERS, "test_ranks_that_start_apart": DIFFERS},
        TRAINING,
    ),
    "reduces every micro-batch": Wrong(
        "reduces-every-micro-batch", {"test_no_sync": "every micro-batch is reduced"}, TRAINING
    ),
    # Long training, types, starts, checkpoints.
    "averages with a neighbour": Wrong(
        "averages-with-a-neighbour",
        {"test_three_devices[every_step]": r"in 80 of 80 steps: step 1: \S+, expected 2;"},
        r"\[sgd\]|three_devices\[every_step\]",
    ),
    "first dtype only": Wrong(
        "first-dtype-only",
        {
            "test_dtypes": "trained 'bf16' by .*reduce the gradients of each type",
            "test_every_step": "in 80 of 80 steps",
            "test_unequal_batches": "in 20 of 20 steps",
            "test_nan": NAN,
        },
        STEPPED,
    ),
    "caches parameters": Wrong(
        "caches-parameters", {"test_unfreezing": "its gradients were not averaged"}, STEPPED
    ),
    "weighs by batch size": Wrong(
        "weighs-by-batch-size", {"test_unequal_batches": r"Batch sizes by rank: \{"}, STEPPED
    ),
    "skips every 50th step": Wrong(
        "skips-every-50th-step",
        {"test_every_step": "in 2 of 80 steps: step 50: -?0, expected 1.5; step 100: -?0"},
        STEPPED,
    ),
    "is stale": Wrong(
        "stale",
        {"test_every_step": "in 1 of 80 steps: step 100: -?0", "test_resume": RESUMED},
        STEPPED,
        capabilities={"convergence": 0.5},
    ),
    "hides NaN": Wrong("hides-nan", {"test_nan": NAN}, STEPPED),
    "hides NaN in metrics": Wrong(
        "hides-nan-in-metrics", {"test_nan": "a metric that is NaN on one rank is"}, STEPPED
    ),
    "gathers as float32": Wrong(
        "gathers-as-float32", {"test_large_numbers": "all_gather of int64 on rank 0"}, STEPPED
    ),
    "broadcasts from rank 1": Wrong(
        "broadcasts-from-rank1", {"test_start": "rank 0 starts .* has those of rank 1"}, STEPPED
    ),
    "starts as float32": Wrong(
        "starts-as-float32",
        {"test_start": "rank 0 starts without .*in their own types"},
        STEPPED,
    ),
    "saves nothing": Wrong("saves-nothing", {"test_resume": "fit saved no checkpoint"}, STEPPED),
    "forgets its state": Wrong(
        "forgets-its-state",
        {"test_resume": f"{RESUMED}(.|\n)*has state_dict"},
        STEPPED,
        capabilities={"convergence": 0.1},
    ),
    # Data, metrics, collectives, the caller's view.
    "one order": Wrong(
        "one-order",
        {"test_training_coverage": "rank 0 had the same order in both epochs"},
        COMPUTED,
    ),
    "shares nothing": Wrong(
        "shares-nothing",
        {
            "test_training_coverage": "epoch 0: 41 samples too many",
            "test_sharded_loader": "ranks 0 and 1 both saw the samples",
        },
        COMPUTED,
    ),
    "pads predictions": Wrong(
        "pads-predictions",
        {"test_evaluation_coverage": f"predict: the samples .* {SEEN}"},
        COMPUTED,
    ),
    "drops tails": Wrong(
        "drops-tails",
        {
            "test_evaluation_coverage": f"test: {UNSEEN}",
            "test_fit_validate_test": "test gives the loss",
        },
        COMPUTED,
    ),
    "copies the only sample": Wrong(
        "copies-the-only-sample", {"test_rank_without_samples": rf"\[0\] {SEEN}"}, COMPUTED
    ),
    # Its ranks wait for each other, or gloo ends them.
    "leaves the others waiting": Wrong(
        "leaves-the-others-waiting",
        {"test_uneven_inputs": "hung .*: the scenario 'uneven_inputs'|exit code"},
        COMPUTED,
    ),
    "logs its own": Wrong(
        "logs-its-own",
        {
            "test_metrics": r"mean is 3502\.0 on rank 0",
            "test_weighted_means": "0.666",
            "test_evaluation_coverage": "the mean over all samples is 3502",
        },
        COMPUTED,
    ),
    "gathers backwards": Wrong(
        "gathers-backwards",
        {"test_all_gather": r"on rank 0: \[\[10, 11, 12\], \[0"},
        COMPUTED,
    ),
    "keeps padding": Wrong(
        "keeps-padding", {"test_all_gather": "on rank 0: of unequal lengths"}, COMPUTED
    ),
    "broadcasts from rank 0": Wrong(
        "broadcasts-from-rank0",
        {"test_broadcast": "rank 0 received .* from ranks 0 to 1"},
        "broadcast|gather",
    ),
    "passes barriers": Wrong(
        "passes-barriers",
        {"test_barrier": r"rank 0 passed the barrier before rank \[1\]"},
        COMPUTED,
    ),
    "forgets counters": Wrong(
        "forgets-counters",
        {"test_caller": "global_step and current_epoch are not rank 0's"},
        AROUND,
    ),
    "drops plugins": Wrong(
        "drops-plugins", {"test_plugins": "rank 1 has .*'object plugin': None"}, AROUND
    ),
    "untyped": Wrong("untyped", {"test_metadata": r"options without a type: \['depth'\]"}, AROUND),
    # Declares a feature unsupported that works.
    "no_sync works": Wrong(
        "plain",
        {"test_no_sync": "declared unsupported and works"},
        "no_sync",
        capabilities={"no_sync": False},
    ),
    "float64 works": Wrong(
        "plain",
        {EQUAL("sgd"): "declared unsupported and works"},
        r"\[(sgd|adam)\]",
        capabilities={"float64": False},
    ),
    "sharded_loader works": Wrong(
        "plain",
        {
            "test_training_coverage": "not every rank saw all samples once",
            "test_sharded_loader": "declared unsupported and works",
            "test_evaluation_coverage": "declared off, and rank 0 did not see all samples",
            "test_metrics": r"sum is 5253\.0",
            "test_rank_without_samples": "declared off, and rank 1 did not see all samples",
        },
        r"coverage|sharded|test_metrics|without_samples|weighted_means",
        capabilities={"sharded_loader": False},
    ),
    "uneven_inputs works": Wrong(
        "plain",
        {"test_uneven_inputs": "declared unsupported and works"},
        "uneven",
        capabilities={"uneven_inputs": False},
    ),
    "weighted_loss works": Wrong(
        "plain",
        {"test_weighted_loss_unsupported": "declared unsupported and works"},
        "weighted_loss",
        capabilities={"weighted_loss": False},
    ),
    "loopback_only works": Wrong(
        "plain",
        {"test_loopback_only": "declared off, and nothing listens outside loopback"},
        "loopback_only",
        capabilities={"loopback_only": False},
    ),
    # Declares as much as possible, and still fails.
    "trains alone": Wrong(
        "trains-alone",
        {"test_communication": "rank 0 trains alone: no gradient of another rank"},
        TRAINING,
        capabilities={"convergence": 0.5, "identical_weights": False},
    ),
    # Approximate strategies: within the bound, and outside.
    "near enough": Wrong(
        "clips-first", {}, r"\[(clipping|sgd)\]", capabilities={"convergence": 0.05}
    ),
    "not near enough": Wrong(
        "sums",
        {EQUAL("sgd"): "convergence=1e-06"},
        r"\[(clipping|sgd)\]",
        capabilities={"convergence": 1e-6},
    ),
    "listens everywhere": Wrong("listens-everywhere", {"test_loopback_only": "'00000000'"}, AROUND),
    # Leftovers. This one is last in its program, because later strategies would find its group.
    "stays in its group": Wrong(
        "stays-in-its-group",
        {"test_process_group_is_left": "torch.distributed is still initialized"},
        AROUND,
    ),
    "leaves a process": Wrong(
        "leaves",
        {"test_nothing_is_left": LEFT("process")},
        AROUND,
        options={"what": "process"},
        program="",
    ),
    "leaves shared memory": Wrong(
        "leaves",
        {"test_nothing_is_left": LEFT("shared memory")},
        AROUND,
        options={"what": "shared memory"},
        program="",
    ),
    # On one device, in the program of the references.
    "never alone": Wrong("never-alone", {"test_one_device": "assert world.size > 1"}, "one_device"),
    # Each with its own programs.
    "one node only": Wrong(
        "one-node-only",
        {"test_multi_node": f"rank 0 of two nodes {WEIGHTS}"},
        "multi_node",
    ),
    "multi_node works": Wrong(
        "plain",
        {"test_multi_node": "must be a UsageError"},
        "multi_node",
        options={"timeout": 5.0},  # seconds to wait for the second node, which does not start
        capabilities={"multi_node": False},
    ),
    "unused_parameters works": Wrong(
        "plain",
        {"test_unused_parameters_unsupported": "declared unsupported and no error came"},
        "unused",
        capabilities={"unused_parameters": False},
    ),
    "hides differences": Wrong(
        "hides-differences",
        {"test_key_on_one_rank": "still running|no error|does not say"},  # depends on timing
        "key_on_one_rank",
        deadline=5,
    ),
    "dies at once": Wrong(
        "dies-at-once",
        {
            "test_error_in[training_step]": "the output does not name",
            "test_signal[SIGTERM]": "the output does not name",
        },
        r"training_step|SIGTERM",
    ),
    "swallows": Wrong(
        "swallows",
        {
            "test_error_in[validation_step]": "the program succeeded, although",
            "test_signal[SIGKILL]": "the program succeeded, although",
        },
        r"validation_step|SIGKILL",
    ),
    "never times out": Wrong(
        "waits-for-ever",
        {"test_signal[SIGSTOP]": "still running after"},
        "SIGSTOP",
        deadline=5,
        timeout=2,
    ),
}


#: By default these run only two of the cases that must fail, and one that must not.
BY_DEFAULT = (
    *("sums", "forgets its state", "shares nothing", "logs its own", "keeps padding"),
    "stays in its group",
)


def each() -> Iterator[tuple[str, Wrong, bool]]:
    """Yield the strategies to test: the name, and whether a default run has it."""
    for name, wrong in WRONG.items():
        if name in BY_DEFAULT:
            fails = dict(list(wrong.fails.items())[:2])
            few = "|".join(map(re.escape, (*fails, EQUAL("sgd"))))
            yield f"{name}: few cases", replace(wrong, fails=fails, chosen=f"^({few})$"), True
        must = "|".join(map(re.escape, wrong.fails)) or "$^"
        yield name, replace(wrong, chosen=f"{wrong.chosen}|^({must})$"), False
