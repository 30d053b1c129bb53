"""Third-party files: tuned tiles, cached choices, and a model's config.json, valid or damaged."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from modular_kernel.spec.problem import Problem
from modular_kernel.testing.stress.fuzz.entry_functions import import_name
from modular_kernel.testing.stress.fuzz.outcome import RIGHT, WRONG, FuzzOutcome, run_or_outcome

# Replacements for a JSON value.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 17, 64, 128, 4096, 2**31, 2**63, 10**30, 0.5, 1e308, -0.0,
    "", "x", "64", "silu", "fp8", "aligned", "\x1b[2J", "é" * 500, [], [1], [[[[]]]], {}, {"a": 1},
    [None] * 300, {"quant_method": "fp8", "weight_block_size": [0, 128]}, {"quant_method": "awq"},
)  # fmt: skip
_WORDS = ("NaN", "-Infinity", "1e999", "0x10", "[" * 2000, "'x'", "\x00", "{", "", '"\\ud800"')


def stored_files(rng: Random) -> FuzzOutcome:
    """Read a file, unchanged or with up to four changes: correct, or a typed error."""
    kind, value, read, check = rng.choice(_KINDS)
    changes = rng.choice((0, 1, 1, 1, 2, 4))
    value = json.loads(json.dumps(value))
    for _ in range(changes):
        value = changed(rng, value)
    text = json.dumps(value)
    is_damaged = changes > 0 and rng.random() < 0.3
    if is_damaged:
        text = damage_text(rng, text)
    what = f"{kind}, {changes} changes{', then the text' if is_damaged else ''}: {text[:300]}"
    result = run_or_outcome(what, lambda: read(text))
    if isinstance(result, FuzzOutcome):
        return FuzzOutcome(WRONG, f"{what}: refused") if changes == 0 else result
    fault = run_or_outcome(what, lambda: check(result))
    if isinstance(fault, FuzzOutcome):
        return fault
    return FuzzOutcome(WRONG, f"{what}: {fault}") if fault else FuzzOutcome(RIGHT, what)


def changed(rng: Random, value: Any) -> Any:
    """Return `value` with one element, at any depth, removed, renamed, duplicated or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(sorted(value))
        kind = rng.randrange(6)
        if kind == 0:
            return {k: v for k, v in value.items() if k != name}
        if kind == 1:
            other = rng.choice((name.upper(), name + "x", "0", "-1", str(2**40), "١٢"))
            return {(other if k == name else k): v for k, v in value.items()}
        return value | {name: changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        kind = rng.randrange(6)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value, value[at]]
        return [*value[:at], changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice(_VALUES)


def damage_text(rng: Random, text: str) -> str:
    """Return `text` truncated, with an inserted word or character, or with a part repeated."""
    start, stop = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    kind = rng.randrange(4)
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + rng.choice(_WORDS) + text[start:]
    if kind == 2:
        return text[:stop] + text[start:]
    return text[:start] + chr(rng.choice((0, 9, 27, 34, 44, 58, 0x7F, 0x2028))) + text[start + 1 :]


def _launch(block_m: int) -> dict[str, int]:
    sizes = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return sizes | {"num_warps": 4, "num_stages": 3}


_OURS = {
    "format": "modular_kernel.tiles/2",
    "triton_version": "3.6.0",
    "tuned_for": {"experts_part": "TritonExperts", "hidden": 4096, "top_k": 2},
    **{
        tokens: {"gemm1": _launch(m), "gemm2": _launch(m), "path": "aligned", "us": 650.1}
        for tokens, m in (("1", 16), ("64", 32), ("512", 64))
    },
}
_THEIRS = {tokens: _launch(m) for tokens, m in (("1", 16), ("64", 32), ("512", 64))}


def _tiles(text: str) -> Any:
    return import_name("experts.triton.configs.files:parse_config_file")(text, "a file")


def _tiles_fault(recipe: Any) -> str:
    """Check that launches have positive 32-bit numbers and token counts are unique."""
    for steps in (recipe.gemm1, recipe.gemm2):
        tokens = [number for number, _ in steps]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            return f"numbers of tokens {tokens}"
        for _, tile in steps:
            if not all(type(n) is int and 0 < n <= 2**31 for n in vars(tile).values()):
                return str(tile)
    return "" if all(path.isascii() for _, path in recipe.paths) else "a path"


_IDENTITY = {"problem": "a layer", "machine": "cpu"}
_PLAIN = {"noise": 0.01, "rough": False, "why": ""}
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
                        {"pair": ["A", "B"], "us": 3.5, "ratio": 1.0, "mode": "graph", **_PLAIN},
                        {"pair": ["A", "C"], "us": 3.0, "ratio": 0.86, "mode": "graph", **_PLAIN},
                        {"pair": ["A", "D"], "us": None, "ratio": None, "mode": "", **_FAILED},
                    ],
                }
                for tokens in (1, 16)
            ],
        }
    ],
}


def _choices(text: str) -> Any:
    return import_name("modular_kernel.select.saved_choices:from_text")(text, _IDENTITY)


def _choices_fault(records: Any) -> str:
    """Check that times are finite, texts are printable, and writing and reading round-trips."""
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
    text = import_name("modular_kernel.select.saved_choices:to_text")(_IDENTITY, records)
    again = sorted(_choices(text), key=lambda record: str(record))
    return (
        ""
        if again == sorted(records, key=lambda record: str(record))
        else "differs after writing and reading"
    )


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


def _model(text: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return import_name("modular_kernel.models.config_file:problem_fields_of_file")(str(path))


def _model_fault(facts: dict[str, Any]) -> str:
    """Check that the facts make a problem; contradictory ones raise a typed error."""
    problem = Problem(tokens=1, **facts)
    return "" if problem.scheme.name and problem.experts >= problem.top_k else "sizes"


_Kind = tuple[str, Any, Callable[[str], Any], Callable[[Any], str]]
_KINDS: tuple[_Kind, ...] = (
    ("tiles", _OURS, _tiles, _tiles_fault),
    ("tiles of others", _THEIRS, _tiles, _tiles_fault),
    ("choices", _CHOICES, _choices, _choices_fault),
    ("config.json", _MODEL, _model, _model_fault),
    ("config.json inside", {"text_config": _MODEL}, _model, _model_fault),
)
