"""Loads the experts of a layer from a checkpoint, and converts the formats of quantizers.

- `loading.load_experts` reads one rank's experts of one layer from a folder of safetensors or GGUF.
- `inspection.inspect` checks the headers of all layers without reading tensors.
- `formats` derives the storage format from a quantization_config, and `fusing` converts the stored
  tensors of one matrix to the tensors of `modular_kernel.quant.quantized_weights`.
- `gptq_awq`, `compressed_tensors`, `fp8_mxfp4`, `bitsandbytes`, `torchao` and `ggml_blocks` convert
  the layouts of individual quantizers.

The functions that this package exports have no side effects, and none of them reads files.
"""

from modular_kernel.checkpoints.compressed_tensors import from_compressed_tensors
from modular_kernel.checkpoints.formats import Format, fit_scheme, format_of
from modular_kernel.checkpoints.fp8_mxfp4 import (
    channel_scale,
    from_gpt_oss,
    merge_scales,
    static_scale,
)
from modular_kernel.checkpoints.fusing import Matrix, merge
from modular_kernel.checkpoints.gptq_awq import (
    GroupWeights,
    drop_zero_points,
    fit_group,
    from_awq,
    from_gptq,
    regroup,
    shard_columns,
    shard_rows,
)

__all__ = [
    "Format",
    "GroupWeights",
    "Matrix",
    "channel_scale",
    "drop_zero_points",
    "fit_group",
    "fit_scheme",
    "format_of",
    "from_awq",
    "from_compressed_tensors",
    "from_gpt_oss",
    "from_gptq",
    "merge",
    "merge_scales",
    "regroup",
    "shard_columns",
    "shard_rows",
    "static_scale",
]
