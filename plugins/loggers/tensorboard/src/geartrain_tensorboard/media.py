"""Images and tables as TensorBoard shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geartrain.callbacks import Media, Table


def image(media: Media) -> Any:
    """Return an image as a ``Summary``. ``SummaryWriter.add_image`` would need Pillow."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width, channels = media.value.shape
    encoded = Summary.Image(
        height=height,
        width=width,
        colorspace=channels,  # the number of channels
        encoded_image_string=media.encoded()[1],
    )
    return Summary(value=[Summary.Value(tag=media.name, image=encoded)])


def markdown(table: Table) -> str:
    """Return a table in Markdown, which TensorBoard's texts may contain."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
