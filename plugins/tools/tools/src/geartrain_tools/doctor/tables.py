"""The tables that ``geartrain doctor`` prints, one or more per section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from geartrain_tools.doctor.findings import Finding, Section
from geartrain_tools.doctor.network import LAUNCHER

Rows = Iterator[tuple[str, str]]


def show(sections: Iterable[Section], fixes: list[Finding], warnings: list[Finding]) -> None:
    """Print the verdict, the problems and the warnings, then every section."""
    # No markup: geartrain-cuda[cuda] is a name, not a style.
    console = Console(markup=False, highlight=False, emoji=False)
    n = len(fixes)
    verdict = "nothing to fix" if n == 0 else f"{n} thing{'s' * (n > 1)} must be fixed"
    console.print(verdict, style="bold")
    _show_findings(console, "what to fix", fixes)
    _show_findings(console, "what may matter", warnings)
    console.print()
    for section in sections:
        for table in _TABLES[section.name](section):
            console.print(table)
        if section.error is not None:
            console.print(f"{section.name}: this check failed: {section.error}")


def _show_findings(console: Console, title: str, findings: list[Finding]) -> None:
    if not findings:
        return
    console.print(f"\n{title}", style="bold")
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for i, finding in enumerate(findings, 1):
        table.add_row(
            f"{i}.", f"{finding.what}." + (f"\nFix: {finding.fix}" if finding.fix else "")
        )
    console.print(table)


def _pairs(title: str, rows: Rows) -> Table:
    table = Table(title=title, box=box.ROUNDED, show_header=False)
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for message, found in rows:
        table.add_row(message, found)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.ROUNDED)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _listed(values: Iterable[Any] | None) -> str:
    return ", ".join(map(str, values or ())) or "none"


# --- sections -------------------------------------------------------------------------------------


def _versions(section: Section) -> Iterator[Table]:
    facts = section.facts

    def rows() -> Rows:
        yield "Python", f"{_text(facts.get('python'))} ({_text(facts.get('executable'))})"
        yield "system", _text(facts.get("platform"))
        if facts.get("torch") is None:
            yield "torch", "not installed" if section.error is None else "-"
        else:
            yield "torch", f"{facts['torch']}, build: {facts['torch_build']}"
            yield (
                "torch's CUDA, NCCL",
                f"{_text(facts['torch_cuda'])}, {_text(facts['torch_nccl'])}",
            )
            yield "torch's backends", _listed(facts["torch_backends"])
        yield "NVIDIA driver", _text(facts.get("nvidia_driver"))
        yield from facts.get("distributions", {}).items()

    yield _pairs("versions", rows())


def _accelerators(section: Section) -> Iterator[Table]:
    table = _table("accelerators", "name", "state", "devices", "reason", "distribution")
    found = section.facts.get("accelerators", [])
    for row in found:
        distribution = f"{row['distribution']} {row['version']}"
        table.add_row(
            row["name"], row["state"], _text(row["device_count"]), row["reason"], distribution
        )
    yield table
    yield from _diagnoses(found)


def _diagnoses(rows: Iterable[Mapping[str, Any]]) -> Iterator[Table]:
    for row in rows:
        diagnosis = row["diagnosis"] or {}
        if diagnosis.get("facts"):
            yield _pairs(
                f"{row['name']}'s facts",
                ((str(name), _text(value)) for name, value in diagnosis["facts"].items()),
            )
        if diagnosis.get("devices"):
            yield _devices(row["name"], diagnosis["devices"])


def _devices(name: str, devices: list[Mapping[str, Any]]) -> Table:
    # The uuid is too wide for the table; --json has it.
    table = _table(f"{name}'s devices", "index", "name", "memory", "compute mode", "processes")
    table.columns[2].no_wrap = True
    for device in devices:
        processes = "\n".join(map(_process, device.get("processes") or ())) or "none"
        table.add_row(
            _text(device.get("index")),
            _text(device.get("name")),
            _used(device),
            _text(device.get("compute_mode")),
            processes,
        )
    return table


def _used(device: Mapping[str, Any]) -> str:
    return f"{_text(device.get('memory_used_mib'))} of {_text(device.get('memory_total_mib'))} MiB"


def _process(process: Mapping[str, Any]) -> str:
    pid, name, memory = (_text(process.get(key)) for key in ("pid", "name", "memory_mib"))
    return f"{pid} {name}, {memory} MiB"


def _plugins(section: Section) -> Iterator[Table]:
    table = _table("strategies and plugins", "name", "kind", "state", "reason", "distribution")
    rows = section.facts.get("plugins", [])
    for row in rows:
        table.add_row(
            row["name"],
            row["kind"],
            row["state"],
            row["reason"],
            f"{row['distribution']} {row['version']}",
        )
    yield table
    yield from _diagnoses(rows)


def _all_reduce(section: Section) -> Iterator[Table]:
    facts = section.facts

    def rows() -> Rows:
        yield "backend", f"{_text(facts.get('backend'))} ({_text(facts.get('why'))})"
        if facts.get("error") is not None:
            yield "failed", facts["error"]
        elif facts.get("all_reduce_ms") is not None:
            took = f"{facts['mib']:g} MiB in {facts['all_reduce_ms']:.1f} ms"
            yield "all-reduce", f"exact; {took} on {facts['device']}"
        if facts.get("seconds") is not None:
            yield "from start to end", f"{facts['seconds']:.1f} s"
        for rank in (rank for rank in facts.get("ranks", ()) if rank["blamed"]):
            yield (
                f"rank {rank['rank']}",
                rank["error"] or rank["output"] or f"exit code {rank['exit_code']}, no output",
            )

    yield _pairs("two processes", rows())


def _network(section: Section) -> Iterator[Table]:
    facts = section.facts

    def reached(key: str) -> str:
        found = facts.get(key) or {"port": None, "error": "-"}
        return (
            f"port {found['port']} is free and answers"
            if found["error"] is None
            else str(found["error"])
        )

    def names(key: str) -> str:
        found = facts.get(key)
        return _listed(found) if isinstance(found, list) else _text(found)

    def rows() -> Rows:
        yield "127.0.0.1", reached("loopback")
        yield "::1", reached("loopback_ipv6")
        yield "localhost", names("localhost")
        yield f"hostname {facts.get('hostname', '')}", names("hostname_addresses")
        yield "interfaces", names("interfaces")
        yield (
            "launched by",
            facts.get("launcher") or "no launcher: geartrain starts the processes",
        )
        for name, value in facts.get("launcher_variables", {}).items():
            yield f"{name}={value}", LAUNCHER[name]

    yield _pairs("network", rows())


def _machine(section: Section) -> Iterator[Table]:
    facts = section.facts

    def rows() -> Rows:
        for message, disk in facts.get("disk", {}).items():
            yield message, f"{_size(disk)} ({disk['path']})"
        shared = facts.get("shared_memory")
        yield "/dev/shm", "-" if shared is None else _size(shared)
        files = facts.get("open_files")
        limits = "-"
        if files is not None:
            soft, hard = (files[kind] or "none" for kind in ("soft", "hard"))
            limits = f"limit {soft} (ulimit -n), hard limit {hard}"
        yield "open files", limits
        cpus = facts.get("processors") or {}
        usable = f"{_text(cpus.get('usable'))} of {_text(cpus.get('machine'))}"
        yield "processors", f"{usable}, control group's limit {cpus.get('cgroup') or 'none'}"
        yield "OMP_NUM_THREADS", cpus.get("omp_num_threads") or "not set"
        memory = facts.get("memory") or {}
        yield (
            "memory",
            f"{_gib(memory.get('available_mib'))} available of {_gib(memory.get('total_mib'))}",
        )
        if memory.get("cgroup_mib") is not None:
            yield (
                "control group's memory",
                f"{_gib(memory['cgroup_free_mib'])} free of {_gib(memory['cgroup_mib'])}",
            )

    yield _pairs("machine", rows())


def _size(place: Mapping[str, int]) -> str:
    return f"{_gib(place['free_mib'])} free of {_gib(place['total_mib'])}"


def _gib(mib: int | None) -> str:
    return "-" if mib is None else f"{mib} MiB" if mib < 10 * 1024 else f"{mib / 1024:.0f} GiB"


def _environment(section: Section) -> Iterator[Table]:
    variables = section.facts.get("variables", {})
    yield _pairs(
        "environment",
        iter(variables.items())
        if variables
        else iter([("variables that change a run", "none is set")]),
    )


def _pickle(section: Section) -> Iterator[Table]:
    facts = section.facts
    title = f"objects of {facts.get('target')} that {facts.get('pickler')} cannot pickle"
    refused = section.facts.get("refused", [])
    if not refused:
        found = "-" if section.error is not None else "every object can go to another process"
        yield _pairs(title, iter([("none", found)]))
        return
    table = _table(title, "what", "is", "why", "needed by")
    for row in refused:
        table.add_row(
            row["path"],
            row["what"],
            row["why"],
            row["needed_by"] + ("" if row["needed"] else " (not as it is set now)"),
        )
    yield table


_TABLES: dict[str, Callable[[Section], Iterator[Table]]] = {
    "versions": _versions,
    "accelerators": _accelerators,
    "plugins": _plugins,
    "all_reduce": _all_reduce,
    "network": _network,
    "machine": _machine,
    "environment": _environment,
    "pickle": _pickle,
}
