"""The result of one check of ``geartrain doctor``: facts, problems and warnings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that must be fixed or, if ``must`` is false, a warning."""

    check: str
    what: str
    fix: str
    must: bool = True

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "what": self.what, "fix": self.fix}


@dataclass(slots=True)
class Section:
    """One check and its findings so far."""

    name: str
    #: Shown by ``--json``. Filled step by step, so a check that fails shows its facts so far.
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    #: The exception of a check that failed itself.
    error: str | None = None

    def problem(self, what: str, fix: str = "", must: bool = True) -> None:
        """Add a finding; ``what`` may end with "Fix: " and the fix."""
        what, _, ending = what.partition("Fix: ")
        self.findings.append(
            Finding(self.name, what.strip().rstrip("."), (fix or ending).strip(), must)
        )

    def warn(self, what: str, fix: str = "") -> None:
        self.problem(what, fix, must=False)


def examine(name: str, check: Callable[..., None], *arguments: Any) -> Section:
    """Run one check. An exception becomes a finding, so that the other checks continue."""
    section = Section(name)
    try:
        check(section, *arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # plugins and targets may raise anything, even SystemExit
        section.error = f"{type(error).__name__}: {error}"
        section.problem(
            f"{name}: this check failed: {section.error}",
            "fix the cause that the error names; the other checks are not affected",
        )
    return section
