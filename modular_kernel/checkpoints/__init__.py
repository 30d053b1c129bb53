"""Conversion of checkpoint formats to the tensors of `modular_kernel.quant.quantized_weights`.

`gptq_awq`: GPTQ (4 and 8 bits) and AWQ. `compressed_tensors`: its packed integers. `fp8_mxfp4`:
per-tensor, per-channel and static activation scales of float8 checkpoints, and gpt-oss's mxfp4.
`formats`, `fusing`: all of these and nvfp4, selected by a quantization_config.
"""

from modular_kernel.checkpoints.compressed_tensors import from_compressed_tensors
from modular_kernel.checkpoints.formats import Format, fit, format_of
from modular_kernel.checkpoints.fp8_mxfp4 import (
    channel_scale,
    from_gpt_oss,
    one_scale,
    static_scale,
)
from modular_kernel.checkpoints.fusing import Matrix, merge
from modular_kernel.checkpoints.gptq_awq import (
    GroupWeights,
    fit_group,
    from_awq,
    from_gptq,
    regroup,
    shard_columns,
    shard_rows,
    symmetric,
)

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
