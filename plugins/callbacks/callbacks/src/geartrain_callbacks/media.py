"""Images, histograms, texts and tables: what ``self.log_image`` and the like log."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geartrain import TrainingError
from geartrain.plugin_api import AppendedFile, replacing, warn

if TYPE_CHECKING:
    from geartrain import Run

#: Buckets of a histogram.
_BUCKETS = 64


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the finite values of a tensor."""

    #: One count a bucket.
    counts: list[float]
    #: The limits of the buckets: one more than counts.
    edges: list[float]
    sum: float
    sum_squares: float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of numbers, strings, booleans and ``None``."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Media:
    """One logged object."""

    #: ``"image"``, ``"histogram"``, ``"text"`` or ``"table"``.
    kind: str
    name: str
    #: Optimizer steps done, with the step in which it was logged.
    step: int
    #: An image is uint8 ``[height, width, channels]`` on the CPU, with 1, 3 or 4 channels. The
    #: others are a :class:`Histogram`, a string, a :class:`Table`.
    value: Any

    def encoded(self) -> tuple[str, bytes]:
        """Return the suffix and the bytes of a file: ``.png``, ``.json`` or ``.txt``."""
        if self.kind == "image":
            return ".png", _png(self.value)
        if self.kind == "text":
            return ".txt", self.value.encode()
        fields = {name: getattr(self.value, name) for name in self.value.__dataclass_fields__}
        return ".json", json.dumps(fields).encode()


def log(run: Run | None, kind: str, name: str, *value: Any) -> None:
    """Give an object of the user to the hook ``log_media`` and to the run's folder, on rank 0.

    Args:
        kind: the kind of Media, or ``"figure"``, which becomes an image.
        value: the arguments of this module's function for the kind.

    Raises:
        RuntimeError: outside a run.
        TrainingError: a value that is no such object.
    """
    if run is None:
        raise RuntimeError(f"self.log_{kind}({name!r}) works only while a Trainer runs this module")
    if run.world.rank or run.stage == "sanity_check" or run.repeating:
        return
    if not isinstance(name, str) or not name.strip("/. "):
        raise TrainingError(f"log_{kind}({name!r}) needs a name. Fix: use a string")
    if run.output is None and not run.hooks.implementers("log_media"):
        if not run.plan.options.fast_dev_run:
            hint = "give the run a folder (output=DIR), or choose a logger"
            warn(f"log_{kind}({name!r}) goes nowhere. Fix: {hint}")
        return
    made = _MAKERS[kind](name, *value)
    if made is not None:
        step = run.step + (run.batch is not None and run.stage == "train")
        media = Media("image" if kind == "figure" else kind, name, step, made)
        run.hooks.log_media(run=run, media=media)
        if run.output is not None:
            _write(media, run.output)


def _write(media: Media, output: Path) -> None:
    """Write a file in the folder ``media`` of the run's folder, and a line of its index."""
    suffix, data = media.encoded()
    name, folder = re.sub(r"[^\w.-]+|^\.+", "_", media.name)[:80], output / "media"
    # A resumed run logs again in the same step, and a loop several times.
    files = (
        folder / f"{name}-{media.step:08}{more}{suffix}"
        for more in chain([""], (f"-{n}" for n in count(2)))
    )
    file = next(file for file in files if not file.exists())
    with replacing(file) as written:
        written.write(data)
    facts = {"kind": media.kind, "name": media.name, "step": media.step}
    index = AppendedFile(folder / "index.jsonl")
    index.append(f"{json.dumps({**facts, 'file': f'media/{file.name}'})}\n".encode())
    index.close()


# --- from the user's value to Media's -------------------------------------------------------------


def _image(name: str, value: Any) -> torch.Tensor:
    """Return an image as Media has it. Several images become one, in a grid.

    Args:
        value: a tensor ``[H, W]``, ``[C, H, W]`` or ``[N, C, H, W]``, a NumPy array (channels last
            too) or a PIL image. Floats are from 0 to 1, integers from 0 to 255.

    Raises:
        TrainingError: another type or shape.
    """
    channels_first = isinstance(value, torch.Tensor)
    try:
        pixels = value.detach().cpu() if channels_first else torch.tensor(_array(value))
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        message = f"log_image({name!r}) got {type(value).__name__}"
        raise TrainingError(
            f"{message}. Fix: use a tensor, a NumPy array or a PIL image"
        ) from error
    shape = list(pixels.shape)
    if pixels.dim() == 2:
        pixels = pixels[None, :, :, None]
    elif pixels.dim() in (3, 4):
        pixels = pixels if pixels.dim() == 4 else pixels[None]
        ends = [pixels.shape[1] in (1, 3, 4), pixels.shape[3] in (1, 3, 4)]
        if ends[0] and (channels_first or not ends[1]):
            pixels = pixels.permute(0, 2, 3, 1)
    if pixels.dim() != 4 or pixels.shape[3] not in (1, 3, 4) or not pixels.numel():
        hint = "use [H, W], [C, H, W] or [N, C, H, W] with 1, 3 or 4 channels"
        raise TrainingError(f"log_image({name!r}) got the shape {shape}. Fix: {hint}")
    return _grid(_to_uint8(name, pixels))


def _array(value: Any) -> Any:
    """Return a NumPy array of an array or a PIL image, as a copy that may be written."""
    if not hasattr(value, "__array_interface__"):
        raise TypeError
    import numpy

    return numpy.array(value)


def _to_uint8(name: str, pixels: torch.Tensor) -> torch.Tensor:
    if pixels.dtype is torch.uint8:
        return pixels
    highest = 1 if pixels.is_floating_point() or pixels.dtype is torch.bool else 255
    pixels = pixels.float()
    inside = (pixels >= 0) & (pixels <= highest + 1e-3)  # rounding, as of a resized image
    if not inside.all():
        outside = int((~inside).sum())
        warn(
            f"log_image({name!r}): {outside} of {pixels.numel()} values are not from 0 to "
            f"{highest}, and are shown as if they were. Fix: scale the image"
        )
    return (pixels.nan_to_num(0).clamp(0, highest) * (255 / highest)).round().to(torch.uint8)


def _grid(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 ``[N, H, W, C]`` as one image, nearly square, with lines of one pixel."""
    count, height, width, channels = images.shape
    if count == 1:
        return images[0].contiguous()
    across = int((count - 1) ** 0.5) + 1
    down = -(-count // across)
    shape = (down * (height + 1) - 1, across * (width + 1) - 1, channels)
    grid = torch.full(shape, 255, dtype=torch.uint8)
    for i, image in enumerate(images):
        top, column = i // across * (height + 1), i % across * (width + 1)
        grid[top : top + height, column : column + width] = image
    return grid


def _figure(name: str, value: Any) -> torch.Tensor:
    """Return a drawn figure as an image, and close it, so that pyplot does not collect figures.

    Raises:
        TrainingError: no matplotlib figure.
    """
    if not type(value).__module__.startswith("matplotlib.") or not hasattr(value, "savefig"):
        message = f"log_figure({name!r}) got {type(value).__name__}"
        hint = (
            "use a matplotlib Figure; for others, the logger's own object: self.logger.experiment"
        )
        raise TrainingError(f"{message}. Fix: {hint}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(value)
    canvas.draw()
    width, height = canvas.get_width_height()
    pixels = torch.tensor(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None:
        pyplot.close(value)
    return _image(name, pixels.reshape(height, width, 4).permute(2, 0, 1))


def _histogram(name: str, value: Any) -> Histogram | None:
    """Return the histogram of a tensor or of numbers; ``None`` if no value is finite.

    Raises:
        TrainingError: no tensor and no numbers.
    """
    try:
        values = torch.as_tensor(value).detach().flatten()
        values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"log_histogram({name!r}) got {type(value).__name__}"
        raise TrainingError(f"{message}. Fix: use a tensor or a list of numbers") from error
    finite = values[values.isfinite()]
    if (lost := values.numel() - finite.numel()) or not values.numel():
        message = (
            f"{lost} of {values.numel()} values are NaN or infinite" if lost else "has no values"
        )
        warn(f"log_histogram({name!r}): {message}, and left out")
    if not finite.numel():
        return None
    low, high = (float(end) for end in finite.aminmax())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite.cpu(), _BUCKETS, low, high)
    edges = torch.linspace(low, high, _BUCKETS + 1, dtype=torch.float64)
    total, squares = float(finite.sum()), float(finite.square().sum())
    return Histogram(counts.tolist(), edges.tolist(), total, squares)


def _text(name: str, value: Any) -> str:
    """Return a text.

    Raises:
        TrainingError: no string.
    """
    if not isinstance(value, str):
        message = f"log_text({name!r}) got {type(value).__name__}"
        raise TrainingError(f"{message}. Fix: use a string: str(...)")
    return value


def _table(name: str, data: Any, columns: Sequence[str] | None = None) -> Table:
    """Return a table.

    Args:
        data: rows, with ``columns``; columns by name; or a pandas DataFrame.

    Raises:
        TrainingError: no rows of equal length, or no names of columns.
    """
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("list")
    names: Sequence[str] = ()
    try:
        names = list(data if columns is None else columns)
        rows = list(zip(*data.values(), strict=True) if columns is None else data)
        fits = all(len(row) == len(names) for row in rows)
    except (AttributeError, TypeError, ValueError):
        fits = False
    if not names or not fits:
        hint = "log_table(name, {'column': [values], ...}), or (name, rows, columns=[names])"
        message = "needs columns of equal length, each with a name"
        raise TrainingError(f"log_table({name!r}) {message}. Fix: {hint}")
    return Table([str(column) for column in names], [[_cell(cell) for cell in row] for row in rows])


def _cell(cell: Any) -> Any:
    if hasattr(cell, "item") and getattr(cell, "ndim", 1) == 0:  # a tensor or NumPy's number
        cell = cell.item()
    return cell if cell is None or isinstance(cell, bool | int | float | str) else str(cell)


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "image": _image,
    "figure": _figure,
    "histogram": _histogram,
    "text": _text,
    "table": _table,
}


def _png(pixels: torch.Tensor) -> bytes:
    """Encode uint8 ``[H, W, C]``: W3C's PNG with one IDAT chunk and no filters."""
    height, width, channels = pixels.shape
    rows = torch.zeros(height, 1 + width * channels, dtype=torch.uint8)  # each begins with filter 0
    rows[:, 1:] = pixels.reshape(height, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    body = zlib.compress(ctypes.string_at(rows.data_ptr(), rows.numel()))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
