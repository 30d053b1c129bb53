"""Checkpoints of other packers -> tensors as `modular_kernel.quant` wants them.

GPTQ (4 and 8 bits) and AWQ: `groups`. compressed-tensors' packed integers: `compressed`. One scale
per tensor, channel scales and static activation scales of float8 checkpoints, gpt-oss's mxfp4:
`tensors`. All of them and nvfp4, by the quantization_config that names them: `formats`, `merging`.
"""

from modular_kernel.importers.compressed import from_compressed_tensors
from modular_kernel.importers.formats import Format, fit, format_of
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
from modular_kernel.importers.merging import Matrix, merge
from modular_kernel.importers.tensors import channel_scale, from_gpt_oss, one_scale, static_scale

__all__ = [
    "Format",
    "GroupWeights",
    "Matrix",
    "channel_scale",
    "fit",
    "fit_group",
    "format_of",
    "from_awq",
    "from_compressed_tensors",
    "from_gpt_oss",
    "from_gptq",
    "merge",
    "one_scale",
    "regroup",
    "shard_columns",
    "shard_rows",
    "static_scale",
    "symmetric",
]
