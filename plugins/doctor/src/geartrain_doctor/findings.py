"""What one check of ``geartrain doctor`` finds: facts, and what to fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to fix, or (``must`` is false) something that may matter."""

    check: str
    what: str
    fix: str
    must: bool = True

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "what": self.what, "fix": self.fix}


@dataclass(slots=True)
class Section:
    """One check and what it has found so far."""

    name: str
    #: What ``--json`` shows; filled while the check goes on, so that one which fails shows what it had.
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    #: Why the check itself failed.
    error: str | None = None

    def problem(self, what: str, fix: str = "", must: bool = True) -> None:
        """Add a finding; the fix may stand at the end of ``what``, after "Fix: "."""
        what, _, ending = what.partition("Fix: ")
        self.findings.append(
            Finding(self.name, what.strip().rstrip("."), (fix or ending).strip(), must)
        )

    def warn(self, what: str, fix: str = "") -> None:
        self.problem(what, fix, must=False)


def examine(name: str, check: Callable[..., None], *arguments: Any) -> Section:
    """Make one check. Whatever it raises is a finding, so that the others go on."""
    section = Section(name)
    try:
        check(section, *arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin or a target may raise anything, SystemExit too
        section.error = f"{type(error).__name__}: {error}"
        section.problem(
            f"{name}: this check failed: {section.error}",
            "what the error names; the other checks are not touched by it",
        )
    return section
