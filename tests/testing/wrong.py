"""Which cases of the kit must catch which wrong strategy: all of these, and no other."""

import os
from dataclasses import dataclass, field
from typing import Any

from geartrain.testing.program import COMPARED

EQUAL = "test_equals_one_process[{}]".format
#: Cases whose scenarios share programs; the others have programs of their own and are asked for by name.
SHARED = r"^(?!test_(error_in|signal|one_device|multi_node|loopback_only|key_on_one_rank))"
#: The cases about training, those about the rest of what ranks compute, and those about what surrounds it. A wrong strategy is given
#: its own part, because all of them for each would take a quarter of an hour; GEARTRAIN_TEST_FULL=1 gives it all.
_FULL = os.environ.get("GEARTRAIN_TEST_FULL") == "1"
TRAINING = SHARED if _FULL else r"equals_one_process|identical|start_apart|buffers|no_sync|is_left"
COMPUTED = SHARED if _FULL else r"\[sgd\]|coverage|sharded|samples|uneven|metrics|weighted|gather|broadcast|barrier|fit_v|caller|is_left"
AROUND = SHARED if _FULL else r"\[sgd\]|fit_v|caller|plugins|metadata|is_left"


@dataclass(frozen=True)
class Wrong:
    """A strategy as a test class describes it, and the cases that must fail."""

    strategy: str
    fails: set[str]
    #: Regular expression of the cases that are run.
    chosen: str
    options: dict[str, Any] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    #: Seconds for a scenario that hangs.
    deadline: float = 20
    timeout: float = 8
    #: Whether another one shows that its cases can fail: then only ``tox -e long`` runs it.
    long: bool = False


WRONG = {
    # A right one: nothing may fail.
    "plain": Wrong("plain", set(), SHARED),
    # Training.
    "sums": Wrong(
        "sums",
        {EQUAL(name) for name in COMPARED},
        TRAINING,
    ),
    "skips the last bucket": Wrong("skips-the-last-bucket", {EQUAL("many_buckets"), "test_identical_weights"}, TRAINING, long=True),
    "forgets earlier micro-batches": Wrong("forgets-earlier-micro-batches", {EQUAL("accumulation")}, TRAINING, long=True),
    "clips first": Wrong("clips-first", {EQUAL("clipping")}, TRAINING, long=True),
    "steps Adam as SGD": Wrong("steps-adam-as-sgd", {EQUAL("adam"), EQUAL("two_optimizers")}, TRAINING, long=True),
    "first optimizer only": Wrong("first-optimizer-only", {EQUAL("two_optimizers"), "test_identical_weights"}, TRAINING, long=True),
    "needs every gradient": Wrong("needs-every-gradient", {EQUAL("frozen")}, TRAINING, long=True),
    "divides by users": Wrong("divides-by-users", {EQUAL("unused_parameters")}, TRAINING, long=True),
    "schedules once per rank": Wrong("schedules-once-per-rank", {EQUAL("scheduler")}, TRAINING, long=True),
    "ends with a tuple": Wrong("ends-with-a-tuple", {EQUAL("step_end")}, TRAINING, long=True),
    "fits once": Wrong("fits-once", {EQUAL("fit_twice")}, TRAINING, long=True),
    "keeps buffers apart": Wrong("keeps-buffers-apart", {"test_buffers"}, TRAINING),
    "starts apart": Wrong("starts-apart", {"test_ranks_that_start_apart"}, TRAINING),
    "drifts": Wrong("drifts", {"test_identical_weights", "test_ranks_that_start_apart"}, TRAINING),
    "reduces every micro-batch": Wrong("reduces-every-micro-batch", {"test_no_sync"}, TRAINING),
    # Data, metrics, collectives, what the caller sees.
    "one order": Wrong("one-order", {"test_training_coverage"}, COMPUTED, long=True),
    "shares nothing": Wrong("shares-nothing", {"test_training_coverage", "test_sharded_loader"}, COMPUTED),
    "pads predictions": Wrong("pads-predictions", {"test_evaluation_coverage"}, COMPUTED, long=True),
    "drops tails": Wrong("drops-tails", {"test_evaluation_coverage", "test_fit_validate_test"}, COMPUTED),
    "copies the only sample": Wrong("copies-the-only-sample", {"test_rank_without_samples"}, COMPUTED),
    "leaves the others waiting": Wrong("leaves-the-others-waiting", {"test_uneven_inputs"}, COMPUTED),
    "logs its own": Wrong("logs-its-own", {"test_metrics", "test_weighted_means", "test_evaluation_coverage"}, COMPUTED),
    "gathers backwards": Wrong("gathers-backwards", {"test_all_gather"}, COMPUTED, long=True),
    "keeps padding": Wrong("keeps-padding", {"test_all_gather"}, COMPUTED),
    "broadcasts from rank 0": Wrong("broadcasts-from-rank0", {"test_broadcast", "test_evaluation_coverage"}, COMPUTED),
    "passes barriers": Wrong("passes-barriers", {"test_barrier"}, COMPUTED),
    "evaluates zeros": Wrong("evaluates-zeros", {"test_fit_validate_test"}, COMPUTED),
    "forgets counters": Wrong("forgets-counters", {"test_caller"}, AROUND),
    "drops plugins": Wrong("drops-plugins", {"test_plugins"}, AROUND),
    # What it leaves.
    "stays in its group": Wrong("stays-in-its-group", {"test_process_group_is_left"}, AROUND),
    "leaves a process": Wrong("leaves", {"test_nothing_is_left"}, AROUND, options={"what": "process"}),
    "leaves a file": Wrong("leaves", {"test_nothing_is_left"}, AROUND, options={"what": "file"}, long=True),
    "leaves shared memory": Wrong("leaves", {"test_nothing_is_left"}, AROUND, options={"what": "shared memory"}, long=True),
    "untyped": Wrong("untyped", {"test_metadata"}, AROUND),
    # Declared unsupported, and works.
    "no_sync works": Wrong("plain", {"test_no_sync"}, "no_sync", capabilities={"no_sync": False}),
    "sharded_loader works": Wrong(
        "plain",
        {"test_training_coverage", "test_sharded_loader", "test_evaluation_coverage", "test_metrics", "test_rank_without_samples"},
        r"coverage|sharded|test_metrics|without_samples|weighted",
        capabilities={"sharded_loader": False},
    ),
    "uneven_inputs works": Wrong("plain", {"test_uneven_inputs"}, "uneven", capabilities={"uneven_inputs": False}),
    "unused_parameters works": Wrong("plain", {"test_unused_parameters_unsupported"}, "unused", capabilities={"unused_parameters": False}),
    "multi_node works": Wrong("plain", {"test_multi_node"}, "multi_node", capabilities={"multi_node": False}),
    "loopback_only works": Wrong("plain", {"test_loopback_only"}, "loopback_only", capabilities={"loopback_only": False}),
    # Approximate: what is no equality may still be near, or not.
    "near enough": Wrong("clips-first", set(), r"\[(clipping|sgd)\]", capabilities={"convergence": 0.05}),
    "not near enough": Wrong("sums", {EQUAL("sgd")}, r"\[(clipping|sgd)\]", capabilities={"convergence": 1e-6}),
    # In programs of their own.
    "never alone": Wrong("never-alone", {"test_one_device"}, "one_device"),
    "one node only": Wrong("one-node-only", {"test_multi_node"}, "multi_node"),
    "hides differences": Wrong("hides-differences", {"test_key_on_one_rank"}, "key_on_one_rank"),
    "listens everywhere": Wrong("listens-everywhere", {"test_loopback_only"}, "loopback_only"),
    "dies at once": Wrong("dies-at-once", {"test_error_in[training_step]", "test_signal[SIGTERM]"}, r"training_step|SIGTERM"),
    "swallows": Wrong("swallows", {"test_error_in[validation_step]", "test_signal[SIGKILL]"}, r"validation_step|SIGKILL"),
    "waits for ever": Wrong("waits-for-ever", {"test_signal[SIGSTOP]"}, "SIGSTOP", deadline=10, timeout=2),
}
