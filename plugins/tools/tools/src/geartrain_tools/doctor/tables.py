"""The tables that ``geartrain doctor`` prints, one or more per section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from geartrain_cli.tables import Group, by_version, show as show_groups, show_text
from geartrain_tools.doctor.findings import Finding, Section
from geartrain_tools.doctor.network import LAUNCHER

Rows = Iterator[tuple[str, str]]


def show(sections: Iterable[Section], fixes: list[Finding], warnings: list[Finding]) -> None:
    """Print the verdict, the problems and the warnings, then every section."""
    n = len(fixes)
    show_text("nothing to fix" if n == 0 else f"{n} thing{'s' * (n > 1)} must be fixed")
    print()
    groups = [_found("what to fix", fixes), _found("what may matter", warnings)]
    for section in sections:
        groups += _TABLES[section.name](section)
        if section.error is not None:
            groups.append(Group(section.name, [(f"this check failed: {section.error}",)]))
    show_groups(groups)


def _found(title: str, findings: list[Finding]) -> Group:
    group = Group(title)
    for i, finding in enumerate(findings, 1):
        group.rows.append((f"{i}.", f"{finding.what}."))
        if finding.fix:
            group.rows.append(("", f"Fix: {finding.fix}"))
    return group


def _pairs(title: str, rows: Rows) -> Group:
    return Group(title, rows)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _listed(values: Iterable[Any] | None) -> str:
    return ", ".join(map(str, values or ())) or "none"


# --- sections -------------------------------------------------------------------------------------


def _versions(section: Section) -> Iterator[Group]:
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

    yield _pairs("versions", rows())
    yield Group("distributions", by_version(facts.get("distributions", {})))


def _accelerators(section: Section) -> Iterator[Group]:
    found = section.facts.get("accelerators", [])
    rows = [
        (
            row["name"],
            row["state"],
            _text(row["device_count"]),
            f"{row['distribution']} {row['version']}",
            row["reason"],
        )
        for row in found
    ]
    yield Group("accelerators", rows, ("state", "devices", "distribution"))
    yield from _diagnoses(found)


def _diagnoses(rows: Iterable[Mapping[str, Any]]) -> Iterator[Group]:
    for row in rows:
        diagnosis = row["diagnosis"] or {}
        if diagnosis.get("facts"):
            yield _pairs(
                f"{row['name']}'s facts",
                ((str(name), _text(value)) for name, value in diagnosis["facts"].items()),
            )
        if diagnosis.get("devices"):
            yield _devices(row["name"], diagnosis["devices"])


def _devices(name: str, devices: list[Mapping[str, Any]]) -> Group:
    # The uuid is too wide for the table; --json has it.
    rows = [
        (
            _text(device.get("index")),
            _text(device.get("name")),
            _used(device),
            _text(device.get("compute_mode")),
            "\n".join(map(_process, device.get("processes") or ())) or "none",
        )
        for device in devices
    ]
    return Group(f"{name}'s devices", rows, ("name", "memory", "compute mode", "processes"))


def _used(device: Mapping[str, Any]) -> str:
    return f"{_text(device.get('memory_used_mib'))} of {_text(device.get('memory_total_mib'))} MiB"


def _process(process: Mapping[str, Any]) -> str:
    pid, name, memory = (_text(process.get(key)) for key in ("pid", "name", "memory_mib"))
    return f"{pid} {name}, {memory} MiB"


def _plugins(section: Section) -> Iterator[Group]:
    found = section.facts.get("plugins", [])
    for kind, title in (("strategy", "strategies"), ("plugin", "plugins")):
        rows = [
            (row["name"], row["state"], row["distribution"], row["reason"])
            for row in found
            if row["kind"] == kind
        ]
        yield Group(title, rows, ("state", "distribution"))
    yield from _diagnoses(found)


def _all_reduce(section: Section) -> Iterator[Group]:
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


def _network(section: Section) -> Iterator[Group]:
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


def _machine(section: Section) -> Iterator[Group]:
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


def _environment(section: Section) -> Iterator[Group]:
    variables = section.facts.get("variables", {})
    yield _pairs(
        "environment",
        iter(variables.items())
        if variables
        else iter([("variables that change a run", "none is set")]),
    )


def _pickle(section: Section) -> Iterator[Group]:
    facts = section.facts
    title = f"objects of {facts.get('target')} that {facts.get('pickler')} cannot pickle"
    refused = section.facts.get("refused", [])
    if not refused:
        found = "-" if section.error is not None else "every object can go to another process"
        yield _pairs(title, iter([("none", found)]))
        return
    rows = [
        (
            row["path"],
            row["what"],
            row["why"],
            f"needed by {row['needed_by']}" + ("" if row["needed"] else " (not as it is set now)"),
        )
        for row in refused
    ]
    yield Group(title, rows)


_TABLES: dict[str, Callable[[Section], Iterator[Group]]] = {
    "versions": _versions,
    "accelerators": _accelerators,
    "plugins": _plugins,
    "all_reduce": _all_reduce,
    "network": _network,
    "machine": _machine,
    "environment": _environment,
    "pickle": _pickle,
}
