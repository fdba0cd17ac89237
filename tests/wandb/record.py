"""Read a run's ``.wandb`` file: a LevelDB log of wandb's records."""

import json
import struct
import zlib

import wandb
from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32 * 1024, 7
#: Types of a fragment: a whole record, or its first, middle or last piece.
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path):
    """Yield every record of the file; check the checksums."""
    return [wandb_internal_pb2.Record.FromString(data) for data in _log(path.read_bytes())]


def _log(data):
    # ":W&B", a 16-bit magic number and a version byte precede the records in the first block.
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
        # wandb's checksum is CRC-32 of type and body, not LevelDB's masked CRC-32C.
        assert checksum == zlib.crc32(body, zlib.crc32(bytes([kind])))
        at += _HEADER + length
        assert bool(pieces) == (kind in (_MIDDLE, _LAST))
        pieces.append(body)
        if kind in (_FULL, _LAST):
            yield b"".join(pieces)
            pieces = []
    assert not pieces


class Recorded:
    """The content of a run's file."""

    def __init__(self, path):
        self.all = records(path)
        self.id = path.stem.removeprefix("run-")

    def of(self, kind):
        return [
            getattr(record, kind) for record in self.all if record.WhichOneof("record_type") == kind
        ]

    @property
    def rows(self):
        """Return the history without wandb's own columns."""
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
        """Return the names of the system metrics."""
        return {item.key for record in self.of("stats") for item in record.item}


def _items(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def recorded(folder):
    """Return the runs below a folder, oldest first."""
    wandb.teardown()  # finish() returns before the service has written the end of the file
    return [
        Recorded(path)
        for path in sorted(folder.rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    ]
