"""The doctor's checks of versions and plugins, with fake distributions and the real torch."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import cells

from geartrain.planning.registry import Registry
from geartrain_tools.doctor import software as doctor_software
from geartrain_tools.doctor.findings import examine

GPUS = """
class Gpu:
    priority = {priority}

    @staticmethod
    def unavailable():
        return {reason!r}

    @staticmethod
    def device_count():
        return {count}

    @staticmethod
    def diagnose():
        {diagnose}
"""
TWO = {
    "facts": {"driver": "555.42", "NCCL": None},
    "devices": [
        {
            "index": 0,
            "name": "Fake GPU",
            "uuid": "GPU-0000",
            "memory_used_mib": 1000,
            "memory_total_mib": 8000,
            "compute_mode": "exclusive process",
            "processes": [
                {"pid": 4242, "name": "python", "memory_mib": 900},
                {"pid": 4343, "name": "other", "memory_mib": None},
            ],
        },
        {
            "index": 1,
            "name": "Fake GPU",
            "memory_used_mib": 0,
            "memory_total_mib": 8000,
            "compute_mode": "default",
            "processes": [],
        },
    ],
    "problems": ["GPU 0 is taken by process 4242. Fix: end it, or --devices 1,"],
}


def gpus(diagnose=f"return {TWO!r}", reason=None, priority=5, count="2"):
    return GPUS.format(diagnose=diagnose, reason=reason, priority=priority, count=count)


@pytest.fixture
def accelerators():
    """``accelerators("cpu")``: return the section for core's cpu and the test's accelerators."""
    return lambda wanted="auto": examine(
        "accelerators", doctor_software.accelerators, Registry(), wanted
    )


@pytest.fixture
def versions():
    return lambda: examine("versions", doctor_software.versions, Registry())


@pytest.fixture
def requires(install, folder):
    """``requires("geartrain<0.0.1")``: install a plugin with this requirement."""

    def add(*lines):
        install("geartrain-picky", "class A: pass\n", plugins={"picky": "A"})
        (path,) = (folder / "site" / "geartrain-picky").glob("*.dist-info/METADATA")
        path.write_text(path.read_text() + "".join(f"Requires-Dist: {line}\n" for line in lines))

    return add


def row(section, name):
    return next(row for row in section.facts["accelerators"] if row["name"] == name)


def found(section, must=True):
    return [(finding.what, finding.fix) for finding in section.findings if finding.must is must]


# --- accelerators ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_all_reduce")
def test_the_diagnosis_of_an_accelerator_is_shown(install, command):
    install("geartrain-gpux", gpus(), accelerators={"gpux": "Gpu"})
    done = command("doctor")
    assert done.code == 1
    first = cells(done.out, "0")
    assert first[1:] == [
        *("Fake GPU", "1000 of 8000 MiB", "exclusive process"),
        *("4242 python, 900 MiB", "4343 other, - MiB"),
    ]
    assert cells(done.out, "1")[1:] == ["Fake GPU", "0 of 8000 MiB", "default", "none"]
    assert cells(done.out, "driver") == ["driver", "555.42"]
    assert cells(done.out, "NCCL") == ["NCCL", "-"]
    ending = done.out.partition("what to fix")[2]
    assert "1.  geartrain-gpux[gpux]: GPU 0 is taken by process 4242." in ending
    assert "Fix: end it, or --devices 1," in ending
    assert "nothing to fix" not in ending


def test_problems_of_an_accelerator_that_is_not_chosen_are_warnings(install, accelerators):
    install("geartrain-gpux", gpus(), accelerators={"gpux": "Gpu"})
    section = accelerators("cpu")
    assert (row(section, "gpux")["device_count"], row(section, "gpux")["priority"]) == (2, 5)
    assert row(section, "gpux")["diagnosis"] == TWO
    assert found(section) == []
    assert found(section, must=False) == [
        ("geartrain-gpux[gpux]: GPU 0 is taken by process 4242", "end it, or --devices 1,"),
    ]


def test_an_unavailable_accelerator_is_shown_with_its_reason(install, accelerators):
    install(
        "geartrain-gpux",
        gpus(f"return {dict(TWO, problems=[])!r}", reason="no driver"),
        accelerators={"gpux": "Gpu"},
    )
    section = accelerators()
    assert found(section) == []
    assert section.facts["chosen"]["name"] == "cpu"
    assert section.facts["chosen"]["passed_over"] == {
        "geartrain-gpux[gpux]": "unavailable: no driver"
    }
    assert (row(section, "gpux")["state"], row(section, "gpux")["reason"]) == (
        "unavailable",
        "no driver",
    )
    assert row(section, "gpux")["diagnosis"]["facts"]["driver"] == "555.42"


def test_an_unavailable_accelerator_that_the_user_names_is_a_problem(install, accelerators):
    install("geartrain-gpux", gpus(reason="no driver"), accelerators={"gpux": "Gpu"})
    section = accelerators("gpux")
    assert section.facts["chosen"] is None
    assert "geartrain-gpux[gpux] cannot be used here: no driver" in [
        what for what, _ in found(section)
    ]
    assert len(found(section)) == 2  # the problem of its device must now be fixed as well


def test_gpu_without_an_installed_gpu_accelerator_is_a_problem(accelerators):
    ((what, fix),) = found(accelerators("gpu"))
    assert "no usable one is installed" in what
    assert "pip install geartrain-cuda" in fix


@pytest.mark.parametrize(
    ("diagnose", "said"),
    [
        ("raise RuntimeError('NVML fell over')", "RuntimeError: NVML fell over"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("return None", "not a mapping"),
        ("return {'fact': {}}", "'fact'"),
        ("return {'facts': ['driver']}", "'facts'"),
        ("return {'devices': {'index': 0}}", "'devices'"),
        ("return {'devices': [0]}", "among its devices, not a mapping"),
        ("return {'devices': [{'processes': [17]}]}", "17 among its processes"),
        ("return {'devices': [{'processes': 'python'}]}", "'python' among its processes"),
        ("return {'problems': [3]}", "3 among its problems, not a str"),
        ("return {'problems': 'all is lost'}", "'problems'"),
        ("return {'facts': {'driver': object()}}", "not JSON serializable"),
    ],
)
def test_a_broken_diagnose_names_its_plugin_and_the_others_are_checked(
    install, accelerators, diagnose, said
):
    install("geartrain-gpux", gpus(diagnose), accelerators={"gpux": "Gpu"})
    install(
        "geartrain-well",
        gpus("return {'facts': {'driver': 'x'}}", priority=1),
        accelerators={"well": "Gpu"},
    )
    section = accelerators()
    assert section.error is None
    ((what, fix),) = found(section)
    assert what.startswith("geartrain-gpux[gpux]: its diagnose() fails: ")
    assert said in what
    assert "geartrain-gpux" in fix
    assert row(section, "gpux")["diagnosis"] is None
    assert row(section, "well")["diagnosis"] == {"facts": {"driver": "x"}}


@pytest.mark.parametrize(
    "nothing",
    [
        "return {}",
        "return {'facts': {}, 'devices': [], 'problems': []}",
        "return {'devices': [{}]}",
    ],
)
def test_every_part_of_a_diagnosis_may_be_left_out(install, accelerators, command, nothing):
    install("geartrain-gpux", gpus(nothing), accelerators={"gpux": "Gpu"})
    assert found(accelerators()) == []


def test_an_accelerator_without_diagnose_is_no_problem(install, accelerators):
    install("geartrain-gpux", gpus().replace("diagnose", "other"), accelerators={"gpux": "Gpu"})
    section = accelerators()
    assert found(section) == []
    assert row(section, "gpux")["diagnosis"] is None


def test_accelerators_that_raise_are_problems(install, accelerators):
    install("geartrain-a", "import no_such_module_here\n", accelerators={"broken": "Gpu"})
    install("geartrain-b", gpus(count="1 // 0"), accelerators={"uncounted": "Gpu"})
    install(
        "geartrain-c",
        gpus().replace("return None", "raise OSError('no bus')"),
        accelerators={"mute": "Gpu"},
    )
    section = accelerators("cpu")
    what = [what for what, _ in found(section)]
    assert len(what) == 3
    assert any(
        w.startswith("geartrain-a[broken] could not be imported: ModuleNotFoundError") for w in what
    )
    assert any(
        "geartrain-b[uncounted] raised in its check" in w and "ZeroDivisionError" in w for w in what
    )
    assert any("geartrain-c[mute] raised in its check" in w and "no bus" in w for w in what)
    assert section.facts["chosen"]["name"] == "cpu"


@pytest.mark.usefixtures("known_all_reduce")
def test_a_problem_that_two_checks_find_is_listed_once(install, command):
    install("geartrain-a", "import no_such_module_here\n", accelerators={"broken": "Gpu"})
    facts = json.loads(command("doctor --json --accelerator broken").out)
    (what,) = [problem["what"] for problem in facts["problems"]]
    assert what.startswith("geartrain-a[broken] could not be imported")


@pytest.mark.usefixtures("known_all_reduce")
def test_one_gpu_is_not_enough_for_nccl(install, command, refused):
    install("geartrain-fake", gpus("return {}", count="1"), accelerators={"cuda": "Gpu"})
    facts = json.loads(command("doctor --json").out)
    assert facts["all_reduce"]["why"] == "nccl needs two GPUs, and this machine has 1"
    assert (facts["all_reduce"]["backend"], facts["all_reduce"]["error"]) == ("gloo", None)


def test_two_gpus_are_tried_with_nccl(monkeypatch):
    from geartrain_tools.doctor import processes as doctor_processes

    monkeypatch.setattr(doctor_processes, "backends", lambda: ["gloo", "nccl"])
    choose, cuda = doctor_processes.choose_backend, {"name": "cuda"}
    assert choose(None, cuda, 2)[0] == "nccl"
    assert choose(None, cuda, 1)[0] == "gloo"
    assert choose("gloo", cuda, 2)[0] == "gloo"
    assert choose(None, {"name": "mps"}, 2)[0] == "gloo"
    expected = "needs two CUDA devices, but this machine has 1 of cuda. Fix: --backend gloo"
    with pytest.raises(ValueError, match=re.escape(expected)):
        doctor_processes.check_backend("nccl", cuda, 1)
    monkeypatch.setattr(doctor_processes, "backends", lambda: ["gloo"])
    assert choose(None, cuda, 2) == ("gloo", "this torch has no nccl")


# --- strategies and plugins -----------------------------------------------------------------------


def test_plugins_that_cannot_be_imported_are_problems_with_their_fix(install, monkeypatch):
    install("geartrain-a", "import no_such_module_here\n", strategies={"broken": "A"})
    install("geartrain-b", "class A: pass\n", plugins={"well": "A", "twin": "A"})
    install("geartrain-c", "class A: pass\n", plugins={"twin": "A"})
    install("geartrain-d", "import no_such_module_here\n", plugins={"blocked": "A"})
    monkeypatch.setenv("GEARTRAIN_BLOCK", "blocked")
    section = examine("plugins", doctor_software.plugins, Registry())
    states = {(row["distribution"], row["name"]): row["state"] for row in section.facts["plugins"]}
    assert states["geartrain", "single"] == states["geartrain-b", "well"] == "available"
    assert states["geartrain-a", "broken"] == states["geartrain-c", "twin"] == "failed"
    assert states["geartrain-d", "blocked"] == "blocked"
    problems = dict(found(section))
    assert len(problems) == 2
    assert (
        problems["plugin 'twin': geartrain-b[twin] and geartrain-c[twin] claim the same name"]
        == "uninstall one, or --block geartrain-b[twin]"
    )
    (broken,) = [what for what in problems if "broken" in what]
    assert broken.startswith("geartrain-a[broken] could not be imported")
    assert (
        problems[broken]
        == "pip install --force-reinstall geartrain-a, or --block geartrain-a[broken]"
    )


def test_strategies_and_plugins_may_report_problems(install):
    source = "class A:\n    @staticmethod\n    def diagnose(): "
    diagnosis = "{'facts': {'library': None}, 'problems': ['it is old. Fix: pip install new']}"
    install("geartrain-a", f"{source}return {diagnosis}\n", strategies={"old": "A"})
    install("geartrain-b", f"{source}raise RuntimeError('asked')\n", plugins={"bad": "A"})
    section = examine("plugins", doctor_software.plugins, Registry())
    rows = {row["name"]: row for row in section.facts["plugins"]}
    assert rows["old"]["diagnosis"]["facts"] == {"library": None}
    assert rows["bad"]["diagnosis"] is rows["single"]["diagnosis"] is None
    findings = {finding.what: finding for finding in section.findings}
    assert findings.keys() == {
        "geartrain-a[old]: it is old",
        "geartrain-b[bad]: its diagnose() fails: RuntimeError: asked",
    }
    old = findings["geartrain-a[old]: it is old"]
    assert (old.fix, old.must) == ("pip install new", False)  # no run has chosen it


# --- versions -------------------------------------------------------------------------------------


def test_core_s_requirements_are_met(versions):
    section = versions()
    assert section.error is None
    assert found(section) == []
    assert next(iter(section.facts["distributions"])) == "geartrain"
    assert section.facts["python"] == sys.version.split()[0]


def test_a_plugin_for_another_geartrain(requires, versions):
    requires("geartrain<0.0.1")
    ((what, fix),) = found(versions())
    assert what.startswith("geartrain-picky 1.0 requires geartrain<0.0.1, but geartrain ")
    assert "another version of geartrain-picky" in fix


@pytest.mark.parametrize(
    "line",
    [
        "geartrain>=0.0.1",
        "torch>=1",
        "no-such-distribution; extra == 'more'",
        "no-such-distribution; python_version < '3'",
        "geartrain",
    ],
)
def test_a_requirement_that_is_met_or_does_not_apply_is_no_problem(requires, versions, line):
    requires(line)
    assert found(versions()) == []


@pytest.mark.parametrize(
    ("line", "said", "fix"),
    [
        (
            "no-such-distribution>=2",
            "requires no-such-distribution>=2, which is not installed",
            "pip install 'no-such-distribution>=2'",
        ),
        ("torch<1", "requires torch<1, but torch ", "pip install 'torch<1'"),
        ("geartrain >= what", "which cannot be read", "the author of geartrain-picky"),
    ],
)
def test_a_requirement_that_is_not_met_is_a_problem(requires, versions, line, said, fix):
    requires(line, "geartrain")
    ((what, fixed),) = found(versions())
    assert said in what
    assert fix in fixed


def test_an_nvidia_driver_without_geartrain_cuda_is_a_warning(
    versions, install, monkeypatch, tmp_path
):
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  555.42.06  Tue Jun  4\n"
        "GCC version: 12.2.0\n"
    )
    monkeypatch.setattr(doctor_software, "_DRIVER", Path(driver))
    section = versions()
    assert section.facts["nvidia_driver"] == "555.42.06"
    assert found(section) == []
    assert (
        "an NVIDIA driver is installed, but no cuda accelerator",
        "pip install geartrain-cuda",
    ) in found(section, must=False)
    install("geartrain-fake", gpus(), accelerators={"cuda": "Gpu"})
    assert not any("no cuda accelerator" in what for what, _ in found(versions(), must=False))
