"""Fuzz target: read valid and damaged JSON files.

The files are tuned launch configurations, saved choices of `compose`, and config.json of models.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.target import Target, biased_bool, import_object

# JSON values that replace other values.
_JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 17, 64, 128, 4096, 2**31, 2**63, 10**30, 0.5, 1e308, -0.0,
    "", "x", "64", "silu", "fp8", "aligned", "\x1b[2J", "é" * 500, [], [1], [[[[]]]], {}, {"a": 1},
    [None] * 300, {"quant_method": "fp8", "weight_block_size": [0, 128]}, {"quant_method": "awq"},
)  # fmt: skip
_INSERTED_WORDS = (
    "NaN",
    "-Infinity",
    "1e999",
    "0x10",
    "[" * 2000,
    "'x'",
    "\x00",
    "{",
    "",
    '"\\ud800"',
)


@dataclass(frozen=True)
class FileCase:
    """The text of a file.

    kind: a key of _FILE_KINDS.
    is_original: whether the text was not changed and is therefore valid.
    """

    kind: str
    text: str
    is_original: bool


def check_stored_file(case: FileCase) -> FuzzOutcome:
    """Read a file, unchanged or with up to four changes.

    An unchanged file must be accepted. For a changed file, any error must be typed.
    """
    _, read, check = _FILE_KINDS[case.kind]
    changes = "unchanged" if case.is_original else "changed"
    description = f"{case.kind}, {changes}: {case.text[:300]}"
    result = run_or_classify(description, lambda: read(case.text))
    if isinstance(result, FuzzOutcome):
        return FuzzOutcome(WRONG_RESULT, f"{description}: refused") if case.is_original else result
    mismatch = run_or_classify(description, lambda: check(result))
    if isinstance(mismatch, FuzzOutcome):
        return mismatch
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


@st.composite
def _file_cases(draw: st.DrawFn) -> FileCase:
    kind = draw(st.sampled_from(sorted(_FILE_KINDS)))
    value, changes = _FILE_KINDS[kind][0], draw(st.sampled_from((0, 1, 1, 1, 2, 4)))
    for _ in range(changes):
        value = draw(changed_json(value))
    text = json.dumps(value)
    if changes and draw(biased_bool(percent_true=30)):
        text = draw(damaged_text(text))
    return FileCase(kind, text, is_original=changes == 0)


@st.composite
def changed_json(draw: st.DrawFn, value: Any) -> Any:
    """Draw `value` with one element, at any depth, removed, renamed, repeated or replaced."""
    if isinstance(value, dict) and value and draw(biased_bool(percent_true=85)):
        name, kind = draw(st.sampled_from(sorted(value))), draw(st.integers(0, 5))
        if kind == 0:
            return {k: v for k, v in value.items() if k != name}
        if kind == 1:
            new_names = (name.upper(), name + "x", "0", "-1", str(2**40), "١٢")
            new_name = draw(st.sampled_from(new_names))
            return {(new_name if k == name else k): v for k, v in value.items()}
        return value | {name: draw(changed_json(value[name]))}
    if isinstance(value, list) and value and draw(biased_bool(percent_true=85)):
        index, kind = draw(st.integers(0, len(value) - 1)), draw(st.integers(0, 5))
        if kind == 0:
            return value[:index] + value[index + 1 :]
        if kind == 1:
            return [*value, value[index]]
        return [*value[:index], draw(changed_json(value[index])), *value[index + 1 :]]
    return draw(_value_strategy)


@st.composite
def damaged_text(draw: st.DrawFn, text: str) -> str:
    """Draw `text` truncated, with a part repeated, or with a word or character inserted."""
    positions = st.integers(0, len(text))
    start, stop = sorted((draw(positions), draw(positions)))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + draw(st.sampled_from(_INSERTED_WORDS)) + text[start:]
    if kind == 2:
        return text[:stop] + text[start:]
    character = draw(st.sampled_from((0, 9, 27, 34, 44, 58, 0x7F, 0x2028)))
    return text[:start] + chr(character) + text[start + 1 :]


_value_strategy = st.sampled_from(_JSON_VALUES)


def _make_launch_config(block_m: int) -> dict[str, int]:
    sizes = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return sizes | {"num_warps": 4, "num_stages": 3}


_TUNED_TILES = {
    "format": "modular_kernel.tiles/2",
    "triton_version": "3.6.0",
    "tuned_for": {"experts_part": "TritonExperts", "hidden": 4096, "top_k": 2},
    **{
        tokens: {
            "gemm1": _make_launch_config(m),
            "gemm2": _make_launch_config(m),
            "path": "aligned",
            "us": 650.1,
        }
        for tokens, m in (("1", 16), ("64", 32), ("512", 64))
    },
}
_PUBLIC_TILES = {
    tokens: _make_launch_config(m) for tokens, m in (("1", 16), ("64", 32), ("512", 64))
}


def _read_tiles(text: str) -> Any:
    return import_object("experts.triton.configs.files:parse_config_file")(text, "a file")


def _check_tiles(launch_configs: Any) -> str:
    """Describe why launch configurations are invalid; "" if they are valid.

    Their numbers must be positive and fit in 32 bits, and token counts must be unique and sorted.
    """
    for steps in (launch_configs.gemm1, launch_configs.gemm2):
        tokens = [number for number, _ in steps]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            return f"invalid token counts: {tokens}"
        for _, tile in steps:
            if not all(type(n) is int and 0 < n <= 2**31 for n in vars(tile).values()):
                return str(tile)
    return (
        ""
        if all(path.isascii() for _, path in launch_configs.paths)
        else "a path name that is not ASCII"
    )


_IDENTITY = {"problem": "a layer", "machine": "cpu"}
_SUCCEEDED = {"noise": 0.01, "rough": False, "why": ""}
_FAILED = {"noise": 0, "rough": False, "why": "no"}
_CHOICES = {
    "schema": "mk-choices/2",
    "identity": _IDENTITY,
    "records": [
        {
            "versions": {"torch": "2.13.0", "triton": "3.6.0"},
            "made": 1.7e9,
            "buckets": [
                {
                    "tokens": tokens,
                    "default": ["A", "B"],
                    "outcomes": [
                        {
                            "pair": ["A", "B"],
                            "us": 3.5,
                            "ratio": 1.0,
                            "mode": "graph",
                            **_SUCCEEDED,
                        },
                        {
                            "pair": ["A", "C"],
                            "us": 3.0,
                            "ratio": 0.86,
                            "mode": "graph",
                            **_SUCCEEDED,
                        },
                        {"pair": ["A", "D"], "us": None, "ratio": None, "mode": "", **_FAILED},
                    ],
                }
                for tokens in (1, 16)
            ],
        }
    ],
}


def _read_choices(text: str) -> Any:
    return import_object("modular_kernel.select.cache_file:from_text")(text, _IDENTITY)


def _check_choices(records: Any) -> str:
    """Describe why records are invalid; "" if they are valid.

    Times must be finite and texts printable. Records that are written and read must stay equal.
    """
    for record in records:
        if not all(text.isprintable() for text in (*record.versions, *record.versions.values())):
            return "a version that is not printable"
        for bucket in record.buckets:
            for outcome in bucket.outcomes:
                for number in (outcome.us, outcome.ratio):
                    if number is not None and not (math.isfinite(number) and number > 0):
                        return f"a time of {number}"
                if not (outcome.why.isprintable() and "".join(outcome.pair).isprintable()):
                    return "text that is not printable"
    text = import_object("modular_kernel.select.cache_file:to_text")(_IDENTITY, records)
    reread = sorted(_read_choices(text), key=lambda record: str(record))
    is_equal = reread == sorted(records, key=lambda record: str(record))
    return "" if is_equal else "differs after writing and reading"


_MODEL = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def _read_model(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return import_object("modular_kernel.models.config_file:problem_fields_of_file")(str(path))


def _check_model(problem_fields: dict[str, Any]) -> str:
    """Make a problem from the fields of a model; this may raise a typed error."""
    problem = Problem(tokens=1, **problem_fields)
    return "" if problem.scheme.name and problem.experts >= problem.top_k else "invalid sizes"


_FILE_KINDS: dict[str, tuple[Any, Callable[[str], Any], Callable[[Any], str]]] = {
    "tiles": (_TUNED_TILES, _read_tiles, _check_tiles),
    "public tiles": (_PUBLIC_TILES, _read_tiles, _check_tiles),
    "choices": (_CHOICES, _read_choices, _check_choices),
    "config.json": (_MODEL, _read_model, _check_model),
    "nested config.json": ({"text_config": _MODEL}, _read_model, _check_model),
}
TARGETS: tuple[Target[Any], ...] = (Target("stored_files", 4, _file_cases(), check_stored_file),)
