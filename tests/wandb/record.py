"""Reads a run's ``.wandb`` file back: a LevelDB log of wandb's own records."""

import json
import struct
import zlib

import wandb
from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32 * 1024, 7
#: A fragment's type: the record is whole, or this is its first, a middle or its last piece.
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path):
    """Every record of the file, checked."""
    return [wandb_internal_pb2.Record.FromString(data) for data in _log(path.read_bytes())]


def _log(data):
    # ":W&B", a magic number of 16 bits and a version byte, before the first block's records and part of that block.
    assert data[:4] == b":W&B"
    assert struct.unpack("<H", data[4:6]) == (0xBEE1,)
    at, pieces = _HEADER, []
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            assert not any(data[at : at + left])
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        body = data[at + _HEADER : at + _HEADER + length]
        assert len(body) == length
        # wandb's checksum is CRC-32 of the type and the body, and not LevelDB's masked CRC-32C.
        assert checksum == zlib.crc32(body, zlib.crc32(bytes([kind])))
        at += _HEADER + length
        assert bool(pieces) == (kind in (_MIDDLE, _LAST))
        pieces.append(body)
        if kind in (_FULL, _LAST):
            yield b"".join(pieces)
            pieces = []
    assert not pieces


class Recorded:
    """What one run's file holds."""

    def __init__(self, path):
        self.all = records(path)
        self.id = path.stem.removeprefix("run-")

    def of(self, kind):
        return [
            getattr(record, kind) for record in self.all if record.WhichOneof("record_type") == kind
        ]

    @property
    def rows(self):
        """The history, wandb's own columns left out."""
        return [
            {k: v for k, v in _items(record.item).items() if not k.startswith("_")}
            for record in self.of("history")
        ]

    @property
    def config(self):
        found = {}
        for update in [*(run.config for run in self.of("run")), *self.of("config")]:
            found |= _items(update.update)
        return found

    @property
    def summary(self):
        found = {}
        for record in self.of("summary"):
            found |= _items(record.update)
        return found

    @property
    def run(self):
        (record,) = self.of("run")
        return record

    @property
    def exit_code(self):
        (record,) = self.of("exit")
        return record.exit_code

    @property
    def stats(self):
        """Names of the system figures."""
        return {item.key for record in self.of("stats") for item in record.item}


def _items(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def recorded(folder):
    """The runs below a folder, oldest first."""
    wandb.teardown()  # finish() returns before its service has written the end of the file
    return [
        Recorded(path)
        for path in sorted(folder.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    ]
