"""Hyperparameters as records for TensorBoard's HPARAMS table.

``SummaryWriter.add_hparams`` writes them into another folder, named after the time, which
TensorBoard shows as a second run with other metrics. Here the same records are written into the
run's own folder, so they belong to its scalars. The third record (experiment) is left out:
TensorBoard then collects names and values from all runs it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def session_start(hyperparameters: Mapping[str, Any]) -> Any:
    """Return the record of a run's start, with these hyperparameters.

    Args:
        hyperparameters: numbers and strings are kept; other values become text, lists and dicts
            JSON.

    Returns:
        A ``Summary``.
    """
    from torch.utils.tensorboard.summary import hparams

    plain = {
        name: value if _is_plain(value) else json.dumps(value)
        for name, value in hyperparameters.items()
    }
    return hparams(plain, {})[1]  # type: ignore[no-untyped-call]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def session_end(succeeded: bool) -> Any:
    """Return the record of a run's end.

    Returns:
        A ``Summary``.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.metadata import (
        PLUGIN_DATA_VERSION,
        PLUGIN_NAME,
        SESSION_END_INFO_TAG,
    )
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    # Copied from torch.utils.tensorboard.summary.hparams, which can only record success.
    info = SessionEndInfo(status=Status.Value("STATUS_SUCCESS" if succeeded else "STATUS_FAILURE"))
    content = HParamsPluginData(
        session_end_info=info, version=PLUGIN_DATA_VERSION
    ).SerializeToString()
    metadata = SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content)
    )
    return Summary(value=[Summary.Value(tag=SESSION_END_INFO_TAG, metadata=metadata)])
