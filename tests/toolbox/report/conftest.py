"""Run each test in an own folder. ``run_folder`` writes the files of a run by hand."""

import json
import struct
import zlib

import pytest
from command_line import command, folder, installed, refused

__all__ = ["command", "folder", "installed", "refused"]


@pytest.fixture
def run_folder(folder):
    """``run_folder("a", lines=[...], summary={...})``: write a run's folder; return its path.

    Args of the function: ``lines`` of metrics.jsonl (objects, or strings as they are), ``plan``,
    ``summary``, ``profile``, ``logs`` (rank -> text), ``media`` (kind, name, step, file, bytes),
    ``provenance`` (its lines).
    """

    def write(name, *, lines=None, logs=None, media=(), provenance=(), **files):
        home = folder / name
        home.mkdir(parents=True)
        if lines is not None:
            text = (one if isinstance(one, str) else f"{json.dumps(one)}\n" for one in lines)
            (home / "metrics.jsonl").write_text("".join(text))
        if provenance:
            text = "".join(f"{json.dumps(one)}\n" for one in provenance)
            (home / "provenance.jsonl").write_text(text)
        for file, contents in files.items():
            (home / f"{file}.json").write_text(json.dumps(contents))
        for rank, text in (logs or {}).items():
            (home / "logs").mkdir(exist_ok=True)
            (home / "logs" / f"rank-{rank}.log").write_text(text)
        for kind, called, step, file, data in media:
            (home / "media").mkdir(exist_ok=True)
            if data is not None:
                (home / file).write_bytes(data)
            line = {"kind": kind, "name": called, "step": step, "file": file}
            with (home / "media" / "index.jsonl").open("a") as index:
                index.write(f"{json.dumps(line)}\n")
        return home

    return write


def line(step, stage="train", epoch=0, **metrics):
    return {"step": step, "epoch": epoch, "stage": stage, **metrics}


def png(width=8, height=8):
    """Return a black PNG."""

    def chunk(kind, data):
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(height * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
