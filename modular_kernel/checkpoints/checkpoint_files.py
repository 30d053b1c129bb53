"""Selects the files of a checkpoint.

A checkpoint is a file, a folder, or the name of a model on the Hugging Face Hub. Nothing is
downloaded; the model is looked up in the local cache. In a folder, the first of these that exists
is read, and all other files are ignored:

1. `model.safetensors`, as in transformers
2. the files listed in `model.safetensors.index.json`, as in transformers
3. the files listed in another `*.safetensors.index.json`, if there is only one
4. all `*.safetensors` files; each tensor must be in only one of them
5. the `*.gguf` files, if they belong to one model

Steps 3 and 4 ignore files named `consolidated*` if there are others. Mistral publishes these as a
second copy of the weights with its own tensor names.
"""

import re
from pathlib import Path

from modular_kernel.errors import ConfigurationError, WeightsError
from modular_kernel.models.gguf_header import is_gguf
from modular_kernel.utils import json_files

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_MODEL, _SECOND_COPY = "model", "consolidated"  # stems of file names
_MAX_INDEX_BYTES = 1 << 28
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
_FILE_SUFFIXES = (SUFFIX, ".json", ".gguf", *_PICKLE_SUFFIXES)


def resolve_path(checkpoint: str | Path) -> Path:
    """Return the path of a checkpoint, or the folder in the local cache for a name on the Hub.

    Raises ConfigurationError, with the command that downloads the model, for a name that is neither
    an existing path nor in the cache.
    """
    path = Path(checkpoint)
    name = str(checkpoint)
    if not _HUB_NAME.fullmatch(name) or name.endswith(_FILE_SUFFIXES) or path.exists():
        return path
    cached_folder = _find_cached_folder(name)
    if cached_folder is None:
        got = f"{name[:200]!r}: no such file or folder, and no such model in the local Hub cache"
        need = f"a path, or a downloaded model: hf download {name[:200]} (of huggingface_hub)"
        raise ConfigurationError("checkpoint", got=got, need=need)
    return cached_folder


def _find_cached_folder(name: str) -> Path | None:
    """Return a model's newest folder in the cache of huggingface_hub, or None. Works offline."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (optional)
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or no valid name
        return None


def has_tensors(path: Path) -> bool:
    """Return whether `path` is a folder with safetensors or GGUF files, or has their suffix."""
    try:
        if path.is_dir():
            return bool(find_index_or_files(path)) or any(map(is_gguf, path.iterdir()))
        return path.name.endswith(SUFFIX) or is_gguf(path)
    except OSError:
        return False


def find_index_or_files(folder: Path) -> list[Path]:
    """Return [index] or the safetensors files of a folder, in the order of the module docstring.

    Raises ConfigurationError for several indices if none is `model.safetensors.index.json`.
    """
    names = sorted(file.name for file in folder.iterdir())
    if (folder / (_MODEL + SUFFIX)).is_file():
        return [folder / (_MODEL + SUFFIX)]
    if _MODEL + INDEX_SUFFIX in names:
        return [folder / (_MODEL + INDEX_SUFFIX)]
    candidates = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
    non_consolidated = [name for name in candidates if not name.startswith(_SECOND_COPY)]
    candidates = non_consolidated or candidates
    indices = [name for name in candidates if name.endswith(INDEX_SUFFIX)]
    if len(indices) > 1:
        got = " and ".join(indices[:3])
        need = f"{_MODEL}{INDEX_SUFFIX}, or the path of one index or file"
        raise ConfigurationError(f"checkpoint {folder}", got=got, need=need)
    return [folder / name for name in indices or candidates]


def make_no_tensors_error(folder: Path) -> ConfigurationError:
    """Return the error for a folder without safetensors files."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    need, got = f"*{SUFFIX} or *.gguf in it", "no safetensors"
    if pickles:
        got = f"no safetensors, and {pickles[0]}"
        need += ": pickled tensors are not read, because a pickle can run any code"
    return ConfigurationError(f"checkpoint {folder}", got=got, need=need)


def read_index(index: Path) -> dict[str, Path]:
    """Return {tensor name: file} from a safetensors index.

    All files must be in the folder of the index. They need not exist, because a folder may have the
    files of only some layers. Raises WeightsError for an invalid index.
    """
    try:
        content = json_files.parse(json_files.read_file(index, _MAX_INDEX_BYTES))
    except (OSError, ValueError) as error:
        got = f"no JSON: {str(error)[:100]}"
        raise WeightsError(str(index), got=got, need="an index of safetensors") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(str(index), got="no weight_map", need="an object: tensor -> file")
    for name, file in weight_map.items():
        is_file_name = isinstance(file, str) and file.endswith(SUFFIX) and len(file) <= 255
        if not is_file_name or Path(file).name != file or "\0" in file or "\\" in file:
            got = f"{name[:200]} in {str(file)[:200]!r}"
            need = f"a file in the folder of the index, *{SUFFIX}"
            raise WeightsError(str(index), got=got, need=need)
    return {name: index.parent / file for name, file in weight_map.items()}


def make_absent_files_error(path: Path, files: set[Path]) -> WeightsError:
    """Return the error for a tensor whose file does not exist.

    path: path of the checkpoint.
    files: all files listed in its index.
    """
    absent = sorted(file.name for file in files if not file.exists())
    more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
    got = f"no {', '.join(absent[:4])}{more}, of {len(files)} files that the index lists"
    need = "these files: complete the download, or remove a stale index"
    return WeightsError(str(path), got=got, need=need)
