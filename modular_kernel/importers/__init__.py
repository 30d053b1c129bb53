"""Checkpoints of other packers -> tensors as `modular_kernel.quant` wants them.

GPTQ (4 and 8 bits) and AWQ: `groups`. One scale per tensor, channel scales and static activation
scales of float8 checkpoints, gpt-oss's mxfp4: `tensors`. What is in no need of an importer: float8
with blocks (a checkpoint's weight_scale_inv is the scale) and int8 channels.
"""

from modular_kernel.importers.groups import (
    GroupWeights,
    fit_group,
    from_awq,
    from_gptq,
    regroup,
    shard_columns,
    shard_rows,
    symmetric,
)
from modular_kernel.importers.tensors import channel_scale, from_gpt_oss, one_scale, static_scale

__all__ = [
    "GroupWeights",
    "channel_scale",
    "fit_group",
    "from_awq",
    "from_gpt_oss",
    "from_gptq",
    "one_scale",
    "regroup",
    "shard_columns",
    "shard_rows",
    "static_scale",
    "symmetric",
]
