"""Names of tuned config files: what they say, and which ones a problem is looked up under."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from modular_kernel.errors import ConfigurationError
from modular_kernel.types import Problem

_NUMBER = r"[1-9]\d{0,17}"
_WORD = r"[A-Za-z0-9_.()+-]"
_NAME = re.compile(
    rf"E=(?P<experts>{_NUMBER}),N=(?P<intermediate>{_NUMBER}),device_name=(?P<device>{_WORD}+?)"
    r"(,dtype=(?P<dtype>[a-z0-9_]+?))?"
    rf"(,block_shape=\[(?P<bn>0|{_NUMBER}), ?(?P<bk>{_NUMBER})\])?"
    r"(?P<per_channel>,per_channel_quant=True)?(?P<prepared>,prepared=True)?(?P<down>_down)?\.json",
    re.ASCII,
)
_LONGEST_DEVICE = 100  # file systems allow 255 bytes a name


def device_key(name: str) -> str:
    """Spell a device's name as files do: letters, digits and _.()+- only, "_" for the rest.

    vLLM and SGLang replace spaces alone, which is the same for every device they name.
    """
    key = re.sub(rf"(?!{_WORD}).", "_", name, flags=re.ASCII | re.DOTALL)[:_LONGEST_DEVICE]
    return key + "_" if not key or key.endswith("_down") else key


@dataclass(frozen=True)
class ConfigKey:
    """What a file name says.

    experts: on this rank, w2.shape[0]. intermediate: the logical I, w2.shape[2] where two values
    do not share a byte. device: as device_key gives it. dtype: "fp8_w8a8", "float32", ..., "" for
    float16 and bfloat16. block_shape: rows and depth of one weight scale, (0, g) for groups of g.
    prepared: of calls with prepared weights alone. down: SGLang's file for GEMM 2 alone.
    `ConfigKey.parse(key.file_name) == key` for every key.
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
        if match is None or _values(match) != vars(self):
            need = "sizes >= 1, a device as device_key gives it, and a dtype of [a-z0-9_]"
            raise ConfigurationError("name of a config file", got=repr(self.file_name), need=need)

    @property
    def file_name(self) -> str:
        """SGLang's spelling; vLLM's has no space in the block shape."""
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = f",block_shape={list(self.block_shape)}" if self.block_shape else ""
        channel = ",per_channel_quant=True" if self.per_channel else ""
        prepared = ",prepared=True" if self.prepared else ""
        down = "_down" if self.down else ""
        sizes = f"E={self.experts},N={self.intermediate},device_name={self.device}"
        return f"{sizes}{dtype}{block}{channel}{prepared}{down}.json"

    @classmethod
    def parse(cls, name: str) -> "ConfigKey":
        """From a file's name, with or without a space in the block shape."""
        match = _NAME.fullmatch(name)
        if match is None:
            need = "E=..,N=..,device_name=..[,dtype=..][,block_shape=[n, k]]"
            raise ConfigurationError(
                "name of a config file",
                got=repr(name),
                need=f"{need}[,per_channel_quant=True][,prepared=True].json",
            )
        return cls(**_values(match))

    @classmethod
    def of(cls, problem: Problem, device_name: str, *, prepared: bool = False) -> "ConfigKey":
        """Return the name under which tiles for `problem` are kept; of prepared weights another."""
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


def _values(match: re.Match[str]) -> dict[str, Any]:
    """Return the fields of a ConfigKey."""
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


def names_for(problem: Problem, device_name: str, *, prepared: bool = False) -> tuple[str, ...]:
    """Every name to look `problem` up under, best first.

    Of calls with prepared weights its own alone, which no other library writes. Of others:
    its own; vLLM's, which writes no space in the block shape and knows neither groups nor
    per_channel_quant; and, for 4-bit weights, SGLang's, which counts the bytes of a packed row:
    N = I / 2.
    """
    key = ConfigKey.of(problem, device_name, prepared=prepared)
    if prepared:
        return (key.file_name,)
    keys = list(_spellings(key))
    if problem.scheme.packed and problem.intermediate % 2 == 0:
        keys += _spellings(replace(key, intermediate=problem.intermediate // 2))
    names = [name for k in keys for name in (k.file_name, k.file_name.replace(", ", ","))]
    return tuple(dict.fromkeys(names))


def _spellings(key: ConfigKey) -> Iterator[ConfigKey]:
    yield key
    if key.block_shape is not None and key.block_shape[0] == 0:
        yield replace(key, block_shape=None)
    if key.per_channel:
        yield replace(key, per_channel=False)
