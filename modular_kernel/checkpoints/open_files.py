"""Opening of a checkpoint's files, in safetensors or GGUF.

with open_tensors(Path("checkpoint/")) as files:
    files.shape_and_dtype("model.norm.weight")  # (4096,), torch.bfloat16
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modular_kernel.checkpoints.checkpoint_files import index_or_files, local_path
from modular_kernel.checkpoints.gguf_files import GgufFiles
from modular_kernel.checkpoints.safetensors_files import TensorFiles, files_by_tensor
from modular_kernel.models.gguf_header import is_gguf, model_file, shards


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFiles]:
    """Open a file of tensors, an index, a folder, or a model of the Hub that is in the cache.

    Raises ConfigurationError for another file or folder, WeightsError for an invalid index or
    header. See `checkpoint_files` for the files that are read.
    """
    path = local_path(path)
    gguf = _gguf_model(path)
    files = TensorFiles(path, files_by_tensor(path)) if gguf is None else GgufFiles(gguf)
    try:
        yield files
    finally:
        files.close()


def _gguf_model(path: Path) -> Path | None:
    """Return the first file of a GGUF model; None for safetensors, which come first in a folder."""
    try:
        if path.is_dir():
            return None if index_or_files(path) else model_file(path)
    except OSError:
        return None
    return shards(path)[0] if is_gguf(path) else None
