"""Opens a checkpoint's tensor files, which are either safetensors or GGUF.

with open_tensors(Path("checkpoint/")) as files:
    files.shape_and_dtype("model.norm.weight")  # (4096,), torch.bfloat16
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modular_kernel.checkpoints.checkpoint_files import find_index_or_files, resolve_path
from modular_kernel.checkpoints.gguf_files import GgufFiles
from modular_kernel.checkpoints.safetensors_files import TensorFiles, map_tensors_to_files
from modular_kernel.models.gguf_header import find_model_file, is_gguf, shard_paths


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFiles]:
    """Open the tensors of a checkpoint, and close the files on exit.

    path: a tensor file, an index, a folder, or the name of a model in the local cache of the Hub.
        `checkpoint_files` describes which files of a folder are read.

    Raises ConfigurationError for any other path, and WeightsError for an invalid index or header.
    """
    path = resolve_path(path)
    gguf_file = _find_gguf_model(path)
    files = (
        TensorFiles(path, map_tensors_to_files(path)) if gguf_file is None else GgufFiles(gguf_file)
    )
    try:
        yield files
    finally:
        files.close()


def _find_gguf_model(path: Path) -> Path | None:
    """Return the first file of a GGUF model, or None if safetensors files are to be read."""
    try:
        if path.is_dir():
            return None if find_index_or_files(path) else find_model_file(path)
    except OSError:
        return None
    return shard_paths(path)[0] if is_gguf(path) else None
