"""Measure which test files run which lines; then break the source in forty places, one at a time.

    python tests/tools/mutations.py list
    python tests/tools/mutations.py measure FOLDER PYTEST'S ARGUMENTS ...
    python tests/tools/mutations.py try FOLDER [--only 3,7] [--seconds 600] PYTEST'S ARGUMENTS ...

``list`` checks the mutations and prints them. ``measure`` runs pytest under coverage and prints the
branch coverage of core and plugins. ``try`` runs, for each mutation, the test files that run the
changed lines, until one fails. Without ``-m`` both use the markers of ``tox -e work``.

Coverage's contexts are test files. A process that a test starts takes its context from
``COVERAGE_TEST_FILE``; a process forked by a server of tests/shared reads the variable again. Not
measured: processes killed by SIGKILL, programs without the test's environment, and installed
wheels. This file is also the pytest plugin of these runs.
"""

import argparse
import ast
import configparser
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "core/src/geartrain", *sorted(ROOT.glob("plugins/*/*/src/geartrain_*"))]
#: The running test file, relative to the repository, and the file with the names of failed tests.
TEST_FILE, FAILED_TESTS = "COVERAGE_TEST_FILE", "MUTATIONS_FAILED_TESTS"
#: Seconds for pytest to end after a signal, and then for the processes that it has started.
GRACE = 20.0
#: One data file per process. The C tracer, because sys.monitoring does not support contexts.
SETTINGS = """
[run]
core = ctrace
branch = true
parallel = true
context = ${{{variable}-}}
data_file = {folder}/processes/coverage
patch = fork, _exit
sigterm = true
source_dirs =
    {sources}
"""


class Mutation(NamedTuple):
    """A realistic bug. ``old`` occurs once in the file."""

    room: str
    file: str
    old: str
    new: str
    #: The effect that a user would see.
    why: str


CORE = "core/src/geartrain"
BAGUA, DDP, PARALLEL, SPAWN = (
    f"plugins/strategies/{name}/src/geartrain_{name}"
    for name in ("bagua", "ddp", "parallel", "spawn")
)
#: Room -> file -> (text that occurs once, its replacement, the effect that a user would see).
CHANGES = {
    "loop": {
        f"{CORE}/loop/fit.py": [
            ("loss / size", "loss + 0", "accumulated gradients are a sum"),
            (
                'step_schedules(run, "step", run.step + 1)',
                'step_schedules(run, "step", run.step)',
                "a scheduler of every second step is one step early",
            ),
            (
                "flushes = run.step % options.log_every_n_steps == 0",
                "flushes = (run.step - 1) % options.log_every_n_steps == 0",
                "metrics are reported at other steps",
            ),
            (
                "    run.loop.resumed = None\n",
                "    resumed = None\n",
                "the second epoch after a resume skips batches again",
            ),
            (
                "done // every > (done - taken) // every",
                "done % every == 0",
                "accumulation steps over a validation",
            ),
        ],
    },
    "sharding": {
        f"{PARALLEL}/sharding.py": [
            (
                "target = math.ceil(len(items) / size) * size",
                "target = len(items) // size * size",
                "the last samples are never trained on",
            ),
            (
                "seed = self.order_seed + self.epoch",
                "seed = self.order_seed",
                "each epoch has the same order",
            ),
            (
                "len(range(self.rank, total, self.size))",
                "len(range(0, total, self.size))",
                "a rank evaluates, or waits for, a batch too many",
            ),
            (
                'if type(batches) is BatchSampler and stage != "predict":',
                "if type(batches) is BatchSampler:",
                "predictions have another order than in one process",
            ),
            (
                "return int(run.hooks.broadcast(run=run, obj=drawn, src=0))",
                "return int(drawn)",
                "without a seed, ranks train on the same samples and leave others out",
            ),
        ],
    },
    "metrics": {
        f"{CORE}/metrics/store.py": [
            (
                "size = 1 if batch is None else sizer.size(batch) or 1",
                "size = 1",
                "a short last batch counts as much as a full one",
            ),
            (".last = (0.0, 0)\n", ".last += ()\n", "a value of an earlier step is reported again"),
            (
                "if self.source is not None:\n            self.source.reset()",
                "if self.source is not None and self.spec.on_epoch:\n"
                "            self.source.reset()",
                "a metric that is logged only by steps keeps its state over epochs",
            ),
        ],
        f"{CORE}/metrics/reductions.py": [
            ("return b if b != b else max(a, b)", "return max(a, b)", "a NaN is lost"),
        ],
        f"{PARALLEL}/metrics.py": [
            (
                "stop = bool(header[:, 2].any())",
                "stop = bool(header[0, 2])",
                "only rank 0 can stop a run",
            ),
        ],
    },
    "checkpoint": {
        f"{CORE}/checkpoint/checkpoints.py": [
            ("if run.world.size > 1:", "if False:", "a rank reads a file that rank 0 still writes"),
        ],
        f"{CORE}/checkpoint/files.py": [
            ("weights_only=True)\n", "weights_only=False)\n", "loading a file runs the code in it"),
        ],
        f"{CORE}/checkpoint/training_state.py": [
            (
                '"batch_idx": run.batch_idx if within else 0,',
                '"batch_idx": run.batch_idx,',
                "a resume after an epoch skips the next one's batches",
            ),
            (
                'run.loop.batches_seen = fit["batches_seen"]\n',
                "pass\n",
                "a validation interval across epochs starts from scratch",
            ),
        ],
        "plugins/callbacks/callbacks/src/geartrain_callbacks/best_files.py": [
            (
                "if 0 < self.save_top_k <= len(ranked)",
                "if 0 < self.save_top_k < len(ranked)",
                "save_top_k files and one more",
            ),
        ],
    },
    "launch": {
        f"{PARALLEL}/launching.py": [
            (
                "node * local_size + i,",
                "i * nodes + node,",
                "on several nodes a rank's number does not fit its local rank",
            ),
        ],
        f"{PARALLEL}/nodes.py": [
            (
                "if int(text) >= num_nodes:",
                "if int(text) > num_nodes:",
                "a node numbered from 1 waits without end",
            ),
        ],
        f"{PARALLEL}/rendezvous.py": [
            (
                'PrefixStore(f"geartrain/{attempt}", ',
                'PrefixStore("geartrain", ',
                "ranks that torchrun restarts look for the store of the first attempt",
            ),
        ],
        f"{PARALLEL}/failures.py": [
            (
                "key=lambda failure: (failure.is_lost_connection, failure.when)",
                "key=lambda failure: failure.when",
                "the error blames a rank that only lost its connection",
            ),
        ],
        f"{PARALLEL}/workers.py": [
            (
                "            sys.stdout.flush()\n",
                "",
                "the last lines of a program whose rank failed are lost",
            ),
        ],
    },
    "ddp": {
        f"{DDP}/strategy.py": [
            (
                "if last or not isinstance(",
                "if first or not isinstance(",
                "with accumulation, ranks use different gradients",
            ),
            (
                "world_size=place.size, timeout=self.timeout",
                "world_size=place.size",
                "a run whose rank hangs ends after half an hour, whatever its timeout",
            ),
        ],
        f"{PARALLEL}/strategy.py": [
            (
                "        if run.world.size > 1:\n            collectives.broadcast_weights",
                '        if run.world.size > 1 and run.command == "fit":\n'
                "            collectives.broadcast_weights",
                "without a seed each rank evaluates other weights",
            ),
        ],
        f"{PARALLEL}/collectives.py": [
            (".div_(", ".sub_(0 * ", "manual optimisation uses the sum over ranks"),
            (
                "return [part[: shape[0]] for part, shape in zip(table, shapes, strict=True)]",
                "return [part[: len(tensor)] for part in table]",
                "all_gather cuts or pads other ranks' rows",
            ),
        ],
    },
    "spawn": {
        f"{SPAWN}/rank.py": [
            (
                "if job.place.local_rank == 0 else DONE",
                "if job.place.rank == 0 else DONE",
                "the second node gets no result",
            ),
            (
                "        torch.set_rng_state(self.torch_random)\n",
                "",
                "a seed that the caller set is forgotten",
            ),
        ],
        f"{SPAWN}/files.py": [
            (
                "access=mmap.ACCESS_COPY",
                "access=mmap.ACCESS_WRITE",
                "ranks write into each other's weights",
            ),
        ],
        f"{SPAWN}/pickles.py": [
            ("obj.storage_offset(),", "0,", "a view is returned as the beginning of its tensor"),
        ],
        f"{SPAWN}/starter.py": [
            (
                "verdict = self._supervisor.judge(left=remaining)",
                "verdict = self._supervisor.judge()",
                "the error names a rank that lost its connection, not the rank that exited",
            ),
        ],
    },
    "bagua": {
        f"{BAGUA}/algorithms/decentralized.py": [
            (
                "number=self.steps // self.communication_interval",
                "number=self.steps",
                "shift_one with an interval always has the same partners",
            ),
        ],
        f"{BAGUA}/algorithms/power_sgd.py": [
            ("self.error -= approximation", "self.error.zero_()", "no error feedback"),
        ],
        f"{BAGUA}/qadam_optimizer.py": [
            (
                "if number < self.warmup_steps:",
                "if number <= self.warmup_steps:",
                "the warm-up is a step longer",
            ),
        ],
        f"{BAGUA}/buckets.py": [
            (
                "for view in (view for view, grad in pairs if grad is None):",
                "for view in ():",
                "a parameter that a step leaves out gets an earlier step's gradient",
            ),
        ],
        f"{BAGUA}/compression.py": [
            (
                "(parts.mean(0) if average else parts.sum(0))",
                "parts.mean(0)",
                "bytegrad with average=False averages",
            ),
        ],
    },
}
MUTATIONS = [
    Mutation(room, file, *change)
    for room, files in CHANGES.items()
    for file, changes in files.items()
    for change in changes
]


# --- the list -------------------------------------------------------------------------------------


def check():
    """Exit with an error if the list does not fit the source."""
    wrong = [
        f"{room}: {number} mutations, not 5"
        for room, number in Counter(each.room for each in MUTATIONS).items()
        if number != 5
    ]
    for number, each in enumerate(MUTATIONS, 1):
        text = (ROOT / each.file).read_text(encoding="utf-8")
        if (times := text.count(each.old)) != 1:
            wrong.append(f"{number}: {each.file} has {each.old.strip()!r} {times} times, not once")
        elif ast.dump(ast.parse(text)) == ast.dump(ast.parse(text.replace(each.old, each.new))):
            wrong.append(f"{number}: {each.file} is the same program after the change")
    if wrong:
        sys.exit("\n".join(["tests/tools/mutations.py does not fit the source:", *wrong]))


def lines(mutation):
    """Return the changed lines and the rest of their statement, or a compound statement's head."""
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    offset = text.index(mutation.old) + len(mutation.old) - len(mutation.old.lstrip())
    first = text.count("\n", 0, offset) + 1
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= first <= node.end_lineno
    ]
    statement = max(around, key=lambda node: node.lineno)
    body = getattr(statement, "body", None)
    return range(statement.lineno, (body[0].lineno if body else statement.end_lineno + 1))


def describe(number, mutation):
    old, new = (
        re.sub(r"\s+", " ", text.strip()) or "nothing" for text in (mutation.old, mutation.new)
    )
    place = f"{mutation.file}:{lines(mutation)[0]}"
    return f"{number:2} {mutation.room:10} {place}\n   {old}  ->  {new}\n   {mutation.why}"


# --- measure --------------------------------------------------------------------------------------


def measure(folder, arguments):
    """Run pytest under coverage; print the total and save it, with the contexts, in the folder."""
    from coverage import Coverage

    settings, failed_tests = folder / "coveragerc", folder / "failed"
    if folder.exists() and any(folder.iterdir()) and not settings.exists():
        sys.exit(f"{folder} has other files. Fix: a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "processes").mkdir(parents=True)
    sources = "\n    ".join(map(str, SOURCES))
    settings.write_text(
        SETTINGS.format(variable=TEST_FILE, folder=folder, sources=sources), encoding="utf-8"
    )
    variables = {"COVERAGE_PROCESS_START": str(settings), FAILED_TESTS: str(failed_tests)}
    status = run(pytest(*arguments), variables)
    if status not in (0, 1):
        sys.exit(f"pytest ended with {status}: nothing is measured")
    whole = Coverage(data_file=folder / "coverage", config_file=settings)
    whole.combine([str(folder / "processes")], strict=True)
    whole.save()
    whole.json_report(outfile=str(folder / "report.json"))
    totals = json.loads((folder / "report.json").read_text(encoding="utf-8"))["totals"]
    total = {
        "percent": totals["percent_covered"],
        "lines": [totals["covered_lines"], totals["num_statements"]],
        "branches": [totals["covered_branches"], totals["num_branches"]],
        "failed": read_failed(failed_tests),
        "sources": {each.file: digest(each.file) for each in MUTATIONS},
    }
    (folder / "total.json").write_text(json.dumps(total, indent=1), encoding="utf-8")
    parts = ", ".join(
        f"{total[what][0]} of {total[what][1]} {what}" for what in ("lines", "branches")
    )
    print(f"branch coverage of core and plugins: {total['percent']:.2f} %: {parts}")
    if total["failed"]:
        print(f"{len(total['failed'])} tests failed: `try` leaves them out")


def pytest(*arguments):
    """Return the command that runs pytest with this file as a plugin.

    It uses the default's markers unless ``-m`` is given.
    """
    if not any(word.startswith("-m") for word in arguments):
        tox = configparser.ConfigParser(interpolation=None)
        tox.read(ROOT / "tox.ini", encoding="utf-8")
        arguments = ("-m", tox["testenv:work"]["chosen"], *arguments)
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.tools.mutations",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]


def run(command, variables, output=None, seconds=None):
    """Run pytest and wait for its processes. Return its exit status; ``None`` after ``seconds``."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # pytest ends its own processes
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        deadline = time.monotonic() + GRACE
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def digest(file):
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def read_failed(path):
    return (
        list(dict.fromkeys(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
    )


class Measured:
    """The results of ``measure`` in a folder."""

    def __init__(self, folder):
        from coverage import CoverageData

        if not (folder / "total.json").exists():
            sys.exit(
                f"{folder} holds no measurement. "
                f"Fix: python tests/tools/mutations.py measure {folder} ..."
            )
        total = json.loads((folder / "total.json").read_text(encoding="utf-8"))
        changed = [file for file, before in total["sources"].items() if digest(file) != before]
        if changed:
            sys.exit(f"changed since the measurement: {', '.join(changed)}. Fix: measure again")
        #: Tests that fail without a mutation.
        self.failed = total["failed"]
        data = CoverageData(basename=str(folder / "coverage"))
        data.read()
        self._by_line = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
        self._size = Counter()
        for by_line in self._by_line.values():
            for contexts in by_line.values():
                self._size.update({self._last(context) for context in contexts})

    @staticmethod
    def _last(context):
        # coverage joins the contexts of a process and of the code that runs in it.
        return context.rpartition("|")[2]

    def files(self, mutation):
        """Return the test files that run the changed lines; first those that run few lines."""
        by_line = self._by_line.get(str(ROOT / mutation.file), {})
        sizes = {}
        for context in {
            self._last(context) for line in lines(mutation) for context in by_line.get(line, ())
        } - {""}:
            if (ROOT / context).is_file():
                sizes[context] = self._size[context]
        return sorted(sizes, key=lambda file: (sizes[file], self._size[file], file))


# --- try ------------------------------------------------------------------------------------------


def try_all(folder, only, seconds, arguments):
    """Try mutations; True if each was caught."""
    if changes := git("status", "--porcelain", "--", *(str(path) for path in SOURCES)):
        sys.exit(
            "the source has uncommitted changes; a mutation could not be distinguished from them:\n"
            f"{changes}"
        )
    measured, results = Measured(folder), {}
    for number, mutation in enumerate(MUTATIONS, 1):
        if only and number not in only:
            continue
        print(describe(number, mutation), flush=True)
        began, files = time.monotonic(), measured.files(mutation)
        outcome, by = (
            ("not run", "")
            if not files
            else attempt(folder, number, mutation, files, measured.failed, seconds, arguments)
        )
        took = round(time.monotonic() - began, 1)
        results[number] = {
            "room": mutation.room,
            "outcome": outcome,
            "by": by,
            "files": files,
            "seconds": took,
        }
        said = {
            "caught": f"caught by {by}",
            "missed": f"MISSED by all that run it: {', '.join(files)}",
            "not run": "NO TEST runs it",
        }
        print(f"   {said.get(outcome, f'{outcome}: {by}')} ({took:.0f} s)\n", flush=True)
        (folder / "mutations.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    rooms = defaultdict(Counter)
    for result in results.values():
        rooms[result["room"]][result["outcome"]] += 1
    for room, outcomes in rooms.items():
        print(
            f"{room:10} {outcomes['caught']} of {outcomes.total()} caught",
            *(f"{n} {o}" for o, n in outcomes.items() if o != "caught"),
            sep=", ",
        )
    return all(result["outcome"] == "caught" for result in results.values())


def attempt(folder, number, mutation, files, failing, seconds, arguments):
    """Run test files with a mutation in place. Return the outcome and its reason."""
    failed_tests, log = folder / f"failed-{number}", folder / f"mutation-{number}.log"
    failed_tests.unlink(missing_ok=True)
    variables = {FAILED_TESTS: str(failed_tests), "PYTHONDONTWRITEBYTECODE": "1"}
    command = pytest("-x", "-q", *arguments, *(f"--deselect={test}" for test in failing), *files)
    with mutated(number, mutation), log.open("wb") as output:
        status = run(command, variables, output, seconds)
    if failed := read_failed(failed_tests):
        return "caught", failed[0]
    if status in (0, 5):
        return "missed", ""
    return (
        "unknown",
        f"no test failed in {seconds} s"
        if status is None
        else f"pytest ended with {status}, see {log}",
    )


@contextmanager
def mutated(number, mutation):
    """Change the source; put it back also after an error or a signal."""
    path = ROOT / mutation.file
    before, stat = path.read_bytes(), path.stat()
    try:
        path.write_bytes(before.replace(mutation.old.encode(), mutation.new.encode()))
        # Python reuses a .pyc if second and size of its source are equal, so two mutations, or a
        # mutation and the original, must not have the same second.
        os.utime(path, (time.time() + number, time.time() + number))
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def end_with_an_error(number, _frame):
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # restore the source first
    sys.exit(128 + number)


def git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.rstrip()


# --- the plugin -----------------------------------------------------------------------------------


def pytest_runtest_protocol(item):
    """Set the context of the following code to the test's file."""
    if "COVERAGE_PROCESS_START" not in os.environ:
        return
    from coverage import Coverage

    file, running = item.path.relative_to(ROOT).as_posix(), Coverage.current()
    if running.get_option("run:context") == file:
        return
    running.switch_context(file)
    running.set_option("run:context", file)  # for forked processes
    os.environ[TEST_FILE] = file  # for programs
    if (servers := sys.modules.get("multiprocessing.forkserver")) is not None:
        # It has the old variables; the next process starts a new server.
        servers._forkserver._stop()


def pytest_runtest_logreport(report):
    note(report)


def pytest_collectreport(report):
    note(report)


def note(report):
    if report.failed and (path := os.environ.get(FAILED_TESTS)):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


def main():
    check()
    command, *rest = sys.argv[1:] or ["list"]
    if command == "list":
        print(*(describe(number, each) for number, each in enumerate(MUTATIONS, 1)), sep="\n")
        return
    if command not in ("measure", "try") or not rest or rest[0].startswith("-"):
        sys.exit(__doc__)
    folder, rest = Path(rest[0]).absolute(), rest[1:]
    for path in SOURCES:
        spec = find_spec(path.name)
        if spec is None or spec.origin is None or Path(spec.origin).parent != path:
            sys.exit(
                f"{path.name} is not imported from {path}. Fix: pip install -e {path.parents[1]}"
            )
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, end_with_an_error)
    if command == "measure":
        measure(folder, rest)
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--only",
        type=lambda text: {int(word) for word in text.split(",")},
        help="numbers of mutations",
    )
    parser.add_argument("--seconds", type=float, default=600, help="deadline of a mutation")
    options, arguments = parser.parse_known_args(rest)
    sys.exit(not try_all(folder, options.only, options.seconds, arguments))


if __name__ == "__main__":
    main()
