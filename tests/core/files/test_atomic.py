"""Atomic writes: readers find the old file or the new one; a failed write leaves no other."""

import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from geartrain import TrainingError
from geartrain.files.atomic import AppendedFile, remove_abandoned, replacing


@contextmanager
def files_of_at_most(size):
    """Imitate a full disk in a block: no file of this process can become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(path, data):
    with replacing(path) as file:
        file.write(data)


def test_folders_are_created_and_nothing_is_left_beside_the_file(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write(path, b"one")
    write(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path, monkeypatch
):
    done = []
    fsync, replace = os.fsync, os.replace

    def syncs(number):
        done.append("sync folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "sync file")
        fsync(number)

    def renames(old, new):
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", renames)
    write(tmp_path / "new" / "file", b"one")
    assert done == ["sync folder", "sync file", "rename", "sync folder"]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path):
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_bytes(b"precious")
    (tmp_path / f".file.{os.getpid()}").symlink_to(target)
    write(path, b"new")
    assert (target.read_bytes(), path.read_bytes()) == (b"precious", b"new")
    assert sorted(os.listdir(tmp_path)) == ["file", "target"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    write(path, b"old")

    def fails():
        with replacing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(TrainingError if error is OSError else error):
        fails()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "size", [10, 3 * 2**20]
)  # in the buffer until the end, and written at once
def test_a_full_disk_is_named_and_leaves_the_old_file(tmp_path, size):
    path = tmp_path / "file"
    write(path, b"old")
    with (
        files_of_at_most(5),
        pytest.raises(
            TrainingError,
            match=r"^disk full: \S+file could not be written \(.*MiB free\)\. Fix: free",
        ),
    ):
        write(path, bytes(size))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_named_under_torch_save(tmp_path):
    with (
        files_of_at_most(2**20),
        pytest.raises(TrainingError, match=r"^disk full"),
        replacing(tmp_path / "file") as file,
    ):
        torch.save(torch.zeros(2**20), file)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        TrainingError, match=r"file/in could not be written: .*Fix: use another output"
    ):
        write(tmp_path / "file" / "in", b"")
    with pytest.raises(
        TrainingError, match=r"file/in could not be written: .*Fix: use another output"
    ):
        AppendedFile(tmp_path / "file" / "in")


def test_a_full_disk_leaves_no_part_of_the_appended_data(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    file = AppendedFile(path)
    file.append(b"two\n")
    with (
        files_of_at_most(10),
        pytest.raises(TrainingError, match=r"^disk full: \S+file could not be written"),
    ):
        file.append(b"three\n")
    assert path.read_bytes() == b"one\ntwo\n"
    file.append(b"four\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nfour\n"


def test_a_file_that_the_user_removed_continues_in_a_new_one_with_a_warning(tmp_path):
    file = AppendedFile(tmp_path / "file")
    file.append(b"one\n")
    file.path.unlink()
    with pytest.warns(UserWarning, match=r"file was removed or moved during the run\. A new file"):
        file.append(b"two\n")
    file.append(b"three\n")
    file.close()
    assert file.path.read_bytes() == b"two\nthree\n"


def test_only_the_files_of_killed_processes_are_removed(tmp_path):
    others = [
        "last.ckpt",
        ".last.ckpt",
        ".ckpt.1",
        ".last.ckpt.old",
        "last.ckpt.1",
        ".summary.json.1",
    ]
    for name in (*others, ".last.ckpt.1", ".a.b.ckpt.23"):
        (tmp_path / name).write_text("")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / ".a.ckpt.1").write_text("")
    with replacing(tmp_path / "best.ckpt"):  # by a running process
        remove_abandoned(tmp_path, ".ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "below", "best.ckpt"])
    assert os.listdir(tmp_path / "below") == [".a.ckpt.1"]
    remove_abandoned(tmp_path, ".ckpt", below=True)
    assert os.listdir(tmp_path / "below") == []
    remove_abandoned(tmp_path / "none")


def test_a_process_that_is_killed_leaves_a_file_that_is_removed(tmp_path):
    body = (
        "import os, sys; from pathlib import Path; from geartrain.files.atomic import replacing\n"
    )
    body += "with replacing(Path(sys.argv[1])) as file:\n    file.write(bytes(2**21))\n"
    body += "    os.kill(os.getpid(), 9)"
    assert (
        subprocess.run([sys.executable, "-c", body, str(tmp_path / "last.ckpt")]).returncode == -9
    )
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".last.ckpt.")
    remove_abandoned(tmp_path, ".ckpt")
    assert not list(tmp_path.iterdir())
