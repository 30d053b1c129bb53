"""Read and write tuned config files, in our format and in the formats of vLLM and SGLang.

A file in our format:

    {"format": "modular_kernel.tiles/2",
     "triton_version": "3.6.0",
     "tuned_for": {"experts_part": "TritonExperts", "hidden": 4096, "top_k": 2},
     "64": {"gemm1": {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128,
                      "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3},
            "gemm2": {...},
            "path": "aligned", "us": 650.1, "untuned_us": 664.0},
     "128": ...}

The key "64" is a number of tokens. "path" is the name of a path in `experts.triton.paths`, by
default the first one. The path determines the fields of a launch. Both GEMMs have the same
BLOCK_SIZE_M. BLOCK_SIZE_N is a number of output columns: a gated GEMM 1 computes BLOCK_SIZE_N gate
columns and BLOCK_SIZE_N up columns. "us" is the time of the layer in microseconds with this
configuration, and "untuned_us" the time with the default configuration.

Files of vLLM and SGLang have no "format" and use one launch for both GEMMs, {"64": {"BLOCK_SIZE_M":
...}}. SGLang may have a second file, NAME_down.json, for GEMM 2. In these files, BLOCK_SIZE_N
counts gate and up columns together. For a gated activation, it is therefore halved, but not below
16. Unknown keys are ignored.

If any part of a file is malformed, the whole file is rejected with a ConfigurationError. The
message names the file, what it contains and what is needed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from experts.triton.launch_config import Launch, LaunchConfig, MoEConfig
from experts.triton.paths import BASE_PATH, BY_NAME, NAMES
from modular_kernel.errors import ConfigurationError
from modular_kernel.spec.problem import Problem
from modular_kernel.utils import json_files

_NUMBER = r"[1-9]\d{0,17}"
_DEVICE_CHAR = r"[A-Za-z0-9_.()+-]"
_NAME = re.compile(
    rf"E=(?P<experts>{_NUMBER}),N=(?P<intermediate>{_NUMBER}),device_name=(?P<device>{_DEVICE_CHAR}+?)"
    r"(,dtype=(?P<dtype>[a-z0-9_]+?))?"
    rf"(,block_shape=\[(?P<bn>0|{_NUMBER}), ?(?P<bk>{_NUMBER})\])?"
    r"(?P<per_channel>,per_channel_quant=True)?(?P<prepared>,prepared=True)?(?P<down>_down)?\.json",
    re.ASCII,
)
_MAX_DEVICE_CHARS = 100  # file systems allow 255 bytes per file name


def device_key(name: str) -> str:
    """Return a device name as it is used in file names.

    Every character except letters, digits and _.()+- is replaced by "_". vLLM and SGLang replace
    only spaces, which gives the same result for all devices for which they ship files.
    """
    key = re.sub(rf"(?!{_DEVICE_CHAR}).", "_", name, flags=re.ASCII | re.DOTALL)[:_MAX_DEVICE_CHARS]
    return key + "_" if not key or key.endswith("_down") else key


@dataclass(frozen=True)
class ConfigKey:
    """The fields of the name of a config file.

    experts: number of local experts, w2.shape[0].
    intermediate: I, which is w2.shape[2] for unpacked weights.
    device: a result of `device_key`.
    dtype: "fp8_w8a8", "float32", ...; "" for float16 and bfloat16.
    block_shape: (rows, K elements) per weight scale; (0, g) for groups of g elements.
    per_channel: whether weights have one scale per row and activations are quantized.
    prepared: whether the file is only for calls with prepared weights.
    down: whether the file is SGLang's second file, which is only for GEMM 2.

    `ConfigKey.parse(key.file_name) == key` holds for every key. Raise ConfigurationError if a field
    cannot be written in a file name.
    """

    experts: int
    intermediate: int
    device: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    prepared: bool = False
    down: bool = False

    def __post_init__(self) -> None:
        match = _NAME.fullmatch(self.file_name)
        if match is None or _parse_key_fields(match) != vars(self):
            need = "sizes >= 1, a device name from device_key, and a dtype of characters [a-z0-9_]"
            raise ConfigurationError("name of a config file", got=repr(self.file_name), need=need)

    @property
    def file_name(self) -> str:
        """Return the file name as SGLang spells it. vLLM has no space in the block shape."""
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape={list(self.block_shape)}" if self.block_shape else ""
        channel = ",per_channel_quant=True" if self.per_channel else ""
        prepared = ",prepared=True" if self.prepared else ""
        down = "_down" if self.down else ""
        sizes = f"E={self.experts},N={self.intermediate},device_name={self.device}"
        return f"{sizes}{dtype}{block}{channel}{prepared}{down}.json"

    @classmethod
    def parse(cls, name: str) -> "ConfigKey":
        """Parse the name of a config file, with or without a space in the block shape.

        Raise ConfigurationError if `name` is not the name of a config file.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            need = "E=..,N=..,device_name=..[,dtype=..][,block_shape=[n, k]]"
            raise ConfigurationError(
                "name of a config file",
                got=repr(name),
                need=f"{need}[,per_channel_quant=True][,prepared=True].json",
            )
        return cls(**_parse_key_fields(match))

    @classmethod
    def from_problem(
        cls, problem: Problem, device_name: str, *, prepared: bool = False
    ) -> "ConfigKey":
        """Return the key of the file in which configurations for `problem` are stored."""
        scheme = problem.scheme
        dtype = "float32" if problem.dtype is torch.float32 else ""
        if scheme.quantized:
            dtype = re.sub("_(tensor|channel|block|group)$", "", scheme.name)
        block = None
        if scheme.group:
            block = (scheme.group[0] if scheme.granularity == "block" else 0, scheme.group[-1])
        return cls(
            experts=problem.e,
            intermediate=problem.intermediate,
            device=device_key(device_name),
            dtype=dtype,
            block_shape=block,
            per_channel=scheme.granularity == "channel" and scheme.quantizes_activations,
            prepared=prepared,
        )


def _parse_key_fields(match: re.Match[str]) -> dict[str, Any]:
    """Return the fields of the ConfigKey that `match` describes."""
    return {
        "experts": int(match["experts"]),
        "intermediate": int(match["intermediate"]),
        "device": match["device"],
        "dtype": match["dtype"] or "",
        "block_shape": (int(match["bn"]), int(match["bk"])) if match["bk"] else None,
        "per_channel": match["per_channel"] is not None,
        "prepared": match["prepared"] is not None,
        "down": match["down"] is not None,
    }


def file_names_for(
    problem: Problem, device_name: str, *, prepared: bool = False
) -> tuple[str, ...]:
    """Return the names of the config files to look up for `problem`, best first.

    With prepared weights, only the name in our format is returned, because no other library writes
    such files. Otherwise, the names of vLLM's files follow, which may lack the space in the block
    shape, the groups or per_channel_quant. For 4-bit weights, the names of SGLang's files follow,
    in which N is the number of bytes of a packed row, I / 2.
    """
    key = ConfigKey.from_problem(problem, device_name, prepared=prepared)
    if prepared:
        return (key.file_name,)
    keys = list(_iter_key_variants(key))
    if problem.scheme.packed and problem.intermediate % 2 == 0:
        keys += _iter_key_variants(replace(key, intermediate=problem.intermediate // 2))
    names = [name for k in keys for name in (k.file_name, k.file_name.replace(", ", ","))]
    return tuple(dict.fromkeys(names))


def _iter_key_variants(key: ConfigKey) -> Iterator[ConfigKey]:
    yield key
    if key.block_shape is not None and key.block_shape[0] == 0:
        yield replace(key, block_shape=None)
    if key.per_channel:
        yield replace(key, per_channel=False)


FORMAT = "modular_kernel.tiles/2"
MAX_FILE_BYTES = 1 << 20
_TOKEN_COUNT = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_HEADER_KEYS = ("format", "triton_version", "tuned_for")
_INT_LIMIT = 1 << 31  # integers in launches must be smaller
_MAX_MICROSECONDS = 1e12  # longer times are discarded
# Field of a launch -> its key in JSON, where they differ. The keys are those of vLLM.
_JSON_KEYS = {
    "block_m": "BLOCK_SIZE_M",
    "block_n": "BLOCK_SIZE_N",
    "block_k": "BLOCK_SIZE_K",
    "group_m": "GROUP_SIZE_M",
}
_TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3}


@dataclass(frozen=True)
class TunedFor:
    """The part and the layer for which a file in our format was tuned.

    Sizes in the name of the file (see `ConfigKey`) are not repeated here.

    experts_part: the name of the part.
    hidden: H.
    top_k: K.
    """

    experts_part: str
    hidden: int
    top_k: int


@dataclass(frozen=True)
class Times:
    """Times of the layer in microseconds.

    us: with the tuned configuration.
    untuned_us: with the default configuration; None if it was not measured.
    """

    us: float
    untuned_us: float | None


@dataclass(frozen=True)
class TunedConfigs:
    """The contents of a config file: launches by number of tokens, not yet fitted to a problem.

    origin: the file, for messages.
    gemm1: (number of tokens, launch of GEMM 1) pairs, ascending.
    gemm2: (number of tokens, launch of GEMM 2) pairs, ascending.
    block_n_includes_up: whether block_n of GEMM 1 counts gate and up columns together.
    is_foreign: whether the file has the format of vLLM or SGLang. A launch of such a file that
        exceeds a limit of the device is clamped. In other files, such a launch is an error.
    triton: the version of Triton with which the file was tuned, if known.
    tuned_for: the layer for which the file was tuned, if the file contains it.
    paths: (number of tokens, name of a path) pairs. Numbers of tokens without a pair use BASE_PATH.
    times: measured times by number of tokens, where known.
    """

    origin: str
    gemm1: tuple[tuple[int, Launch], ...]
    gemm2: tuple[tuple[int, Launch], ...]
    block_n_includes_up: bool
    is_foreign: bool
    triton: str | None = None
    tuned_for: TunedFor | None = None
    paths: tuple[tuple[int, str], ...] = ()
    times: Mapping[int, Times] = field(default_factory=dict, hash=False, compare=False)

    def configs(self) -> dict[int, MoEConfig]:
        """Return the configurations by number of tokens.

        gemm1 and gemm2 must have the same numbers of tokens.
        """
        paths = dict(self.paths)
        return {
            tokens: MoEConfig(gemm1, gemm2, paths.get(tokens, BASE_PATH.name))
            for (tokens, gemm1), (_, gemm2) in zip(self.gemm1, self.gemm2, strict=True)
        }


def read_config_file(path: Path) -> TunedConfigs:
    """Read a config file. If it is malformed, raise a ConfigurationError that names the file."""
    return parse_config_file(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    what = f"config file {path}"
    try:
        if not path.is_file():  # also rejects a dangling link
            raise ValueError("not a regular file")
        return json_files.read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigurationError(what, got=str(error), need="a readable file") from error
    except ValueError as error:
        need = f"a JSON file of <= {MAX_FILE_BYTES} bytes"
        raise ConfigurationError(what, got=str(error), need=need) from error


def parse_config_file(text: str | bytes, origin: str) -> TunedConfigs:
    """Parse the text of a config file. `origin` names the file in error messages."""
    what = f"config file {origin}"
    try:
        value = json_files.parse(text)
    except ValueError as error:  # includes JSONDecodeError
        need = "JSON with unique keys and finite numbers"
        raise ConfigurationError(what, got=str(error), need=need) from error
    return _build_tuned_configs(value, what, origin)


def configs_from_override(value: "MoEConfig | Mapping[str, object]") -> TunedConfigs:
    """Convert the argument of `override_config` to tuned configs, whose launches are never clamped.

    value: a configuration, the contents of a config file, or one entry of a file. Contents follow
        the rules for files, except that token counts may be integers. A single entry applies to
        every call. An entry {"gemm1": .., "gemm2": ..} is in our format. An entry {"BLOCK_SIZE_M":
        ..} is in vLLM's format, in which BLOCK_SIZE_N counts gate and up columns together.

    Raise ConfigurationError for any other value.
    """
    what = "override_config"
    if isinstance(value, MoEConfig):
        if value.path not in BY_NAME:
            need = f"one of {', '.join(NAMES)}"
            raise ConfigurationError(f"{what}: path", got=_abbreviate(value.path), need=need)
        launches = ((1, value.gemm1),), ((1, value.gemm2),)
        paths = ((1, value.path),)
        return TunedConfigs(
            what, *launches, block_n_includes_up=False, is_foreign=False, paths=paths
        )
    contents: dict[Any, object] = dict(_require_mapping(value, what))
    if "gemm1" in contents:
        contents = {"format": FORMAT, "1": contents}
    elif "BLOCK_SIZE_M" in contents:
        contents = {"1": contents}
    contents_by_key = {
        str(key) if type(key) is int else key: entry for key, entry in contents.items()
    }
    tuned_configs = _build_tuned_configs(contents_by_key, what, what)
    return replace(tuned_configs, is_foreign=False, triton=None, tuned_for=None)


def _build_tuned_configs(value: object, what: str, origin: str) -> TunedConfigs:
    contents = _require_mapping(value, what)
    is_our_format = "format" in contents
    if is_our_format and contents["format"] != FORMAT:
        raise ConfigurationError(
            f"{what}: format", got=_abbreviate(contents["format"]), need=FORMAT
        )
    entries: dict[int, Mapping[str, object]] = {}
    for key, entry in contents.items():
        if key in _HEADER_KEYS:
            continue
        if not isinstance(key, str) or _TOKEN_COUNT.fullmatch(key) is None:
            need = f"a number of tokens, 1 to 999999999, or one of {', '.join(_HEADER_KEYS)}"
            raise ConfigurationError(f"{what}: key", got=_abbreviate(key), need=need)
        entries[int(key)] = _require_mapping(entry, f"{what}: tokens {key}")
    if not entries:
        need = "a configuration for at least one number of tokens"
        raise ConfigurationError(what, got="no configuration", need=need)
    configs: dict[int, MoEConfig] = {}
    for tokens in sorted(entries):
        entry_label = f"{what}: tokens {tokens}"
        configs[tokens] = (
            _parse_our_entry(entries[tokens], entry_label)
            if is_our_format
            else _parse_foreign_entry(entries[tokens], entry_label)
        )
    return TunedConfigs(
        origin=origin,
        gemm1=tuple((tokens, config.gemm1) for tokens, config in configs.items()),
        gemm2=tuple((tokens, config.gemm2) for tokens, config in configs.items()),
        block_n_includes_up=not is_our_format,
        is_foreign=not is_our_format,
        triton=_parse_triton_version(contents, what),
        tuned_for=_parse_tuned_for(contents, what) if is_our_format else None,
        paths=tuple((tokens, config.path) for tokens, config in configs.items())
        if is_our_format
        else (),
        times={
            tokens: times
            for tokens, entry in entries.items()
            if (times := _parse_times(entry)) is not None
        },
    )


def _abbreviate(value: object) -> str:
    """Return a short representation of any value, for messages."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int):
        return repr(value) if abs(value) < _MAX_MICROSECONDS else "a very large number"
    return repr(value) if isinstance(value, float) else type(value).__name__


def _require_mapping(value: object, what: str) -> Mapping[Any, object]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(what, got=type(value).__name__, need="a JSON object")
    return value


def _parse_our_entry(entry: Mapping[str, object], what: str) -> MoEConfig:
    path = _parse_path(entry, what)
    launch = BY_NAME[path].launch
    for name in ("gemm1", "gemm2"):
        if name not in entry:
            raise ConfigurationError(what, got=f"no {name}", need="gemm1 and gemm2")
    gemm1, gemm2 = (
        _parse_launch(_require_mapping(entry[name], f"{what} {name}"), f"{what} {name}", launch)
        for name in ("gemm1", "gemm2")
    )
    if gemm1.block_m != gemm2.block_m:
        got = f"{gemm1.block_m} and {gemm2.block_m}"
        raise ConfigurationError(f"{what} BLOCK_SIZE_M", got=got, need="the same for both GEMMs")
    return MoEConfig(gemm1, gemm2, path)


def _parse_foreign_entry(entry: Mapping[str, object], what: str) -> MoEConfig:
    launch = _parse_launch(entry, what, LaunchConfig)
    return MoEConfig(launch, launch, BASE_PATH.name)


def _parse_launch(values: Mapping[str, object], what: str, launch_type: type[Any]) -> Launch:
    """Build a launch of type `launch_type` from the JSON values of its fields.

    A field must be an integer of at least 1, or of at least 0 if its default is 0. This function
    does not check whether a problem allows the launch.
    """
    values_by_field = {}
    for launch_field in fields(launch_type):
        key = _JSON_KEYS.get(launch_field.name, launch_field.name)
        default = (
            _TRITON_DEFAULTS.get(launch_field.name)
            if launch_field.default is MISSING
            else launch_field.default
        )
        value, min_value = values.get(key, default), 0 if launch_field.default == 0 else 1
        if type(value) is not int or not min_value <= value < _INT_LIMIT:
            need = f"a whole number from {min_value} to {_INT_LIMIT - 1}"
            raise ConfigurationError(f"{what}: {key}", got=_abbreviate(value), need=need)
        values_by_field[launch_field.name] = value
    launch: Launch = launch_type(**values_by_field)
    return launch


def _parse_triton_version(contents: Mapping[str, object], what: str) -> str | None:
    version = contents.get("triton_version")
    if version is None or (isinstance(version, str) and len(version) <= 80):
        return version
    need = "a version of Triton, such as 3.6.0"
    raise ConfigurationError(f"{what}: triton_version", got=_abbreviate(version), need=need)


def _parse_tuned_for(contents: Mapping[str, object], what: str) -> TunedFor | None:
    if "tuned_for" not in contents:
        return None
    what = f"{what}: tuned_for"
    values = _require_mapping(contents["tuned_for"], what)
    part, hidden, top_k = (values.get(key) for key in ("experts_part", "hidden", "top_k"))
    if not isinstance(part, str) or type(hidden) is not int or type(top_k) is not int:
        need = "experts_part (a name), hidden and top_k (whole numbers)"
        raise ConfigurationError(what, got=_abbreviate(values), need=need)
    return TunedFor(part, hidden, top_k)


def _parse_path(entry: Mapping[str, object], what: str) -> str:
    path = entry.get("path", BASE_PATH.name)
    if isinstance(path, str) and path in NAMES:
        return path
    raise ConfigurationError(
        f"{what}: path", got=_abbreviate(path), need=f"one of {', '.join(NAMES)}"
    )


def _parse_times(entry: Mapping[str, object]) -> Times | None:
    us, untuned = (_parse_microseconds(entry.get(key)) for key in ("us", "untuned_us"))
    return None if us is None else Times(us, untuned)


def _parse_microseconds(value: object) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and 0 < value < _MAX_MICROSECONDS else None
    )


def config_to_json(config: MoEConfig) -> dict[str, object]:
    """Return the JSON entry of a configuration in our format, without times."""
    gemm1, gemm2 = (_launch_to_json(launch) for launch in (config.gemm1, config.gemm2))
    return {"gemm1": gemm1, "gemm2": gemm2, "path": config.path}


def dump_config_file(tuned_configs: TunedConfigs) -> str:
    """Return the text of a config file in our format."""
    contents: dict[str, object] = {"format": FORMAT}
    if tuned_configs.triton is not None:
        contents["triton_version"] = tuned_configs.triton
    if tuned_configs.tuned_for is not None:
        contents["tuned_for"] = asdict(tuned_configs.tuned_for)
    for tokens, config in tuned_configs.configs().items():
        times = tuned_configs.times.get(tokens)
        contents[str(tokens)] = config_to_json(config) | (
            asdict(times) if times is not None else {}
        )
    return json.dumps(contents, indent=2) + "\n"


def _launch_to_json(launch: Launch) -> dict[str, int]:
    return {_JSON_KEYS.get(name, name): value for name, value in vars(launch).items()}
