"""Fuzz targets: copies of objects, edited state dicts, environment variables, cache folders.

A copy must compute the same as the original. An edited state dict or a damaged cache folder must be
refused or have no effect on results.
"""

import copy
import io
import json
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from modular_kernel.settings import VARIABLES, preserve_environment, read_settings, use_variables
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.files import changed_json, damaged_text
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM
from modular_kernel.testing.stress.fuzz.target import Target, import_object

_AUTOTUNE = "modular_kernel.select.autotune"


# ------------------------------------------------------------------------------------------ copies


def _save_and_load(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickle_and_load(protocol: int, value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


_COPY_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": _save_and_load,
    **{f"pickle {n}": partial(_pickle_and_load, n) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)},
}


@dataclass(frozen=True)
class CopyCase:
    """An object and how it is copied.

    Attributes:
        name: kind of object: "kernel", "plan", "layer", "weights" or "problem".
        parts: names of an exchange class and an experts class.
        before: what is done with the object before it is copied.
        copies: names in _COPY_FUNCTIONS, which are applied one after the other.
    """

    name: str
    parts: tuple[str, str]
    before: list[str]
    copies: list[str]


def check_copies(case: CopyCase) -> FuzzOutcome:
    """Copy an object in a random state. The copy must return the same output in its own memory."""
    inputs = samples.make_call_inputs()
    description = f"{case.copies} of {case.name}, {' x '.join(case.parts)}, after {case.before}"
    kernel = samples.make_torch_kernel(PROBLEM, case.parts)
    arguments = (inputs.x_TH, inputs.weights, inputs.routing)
    expected = kernel(*arguments).clone()
    factories: dict[str, Callable[[], Any]] = {
        "kernel": lambda: samples.make_torch_kernel(PROBLEM, case.parts),
        "plan": lambda: samples.make_torch_kernel(PROBLEM, case.parts).plan(),
        "layer": lambda: samples.make_loaded_layer(inputs.weights),
        "weights": lambda: inputs.weights,
        "problem": lambda: PROBLEM,
    }
    original = factories[case.name]()

    def call(value: Any) -> torch.Tensor:
        if case.name == "layer":
            output: torch.Tensor = value(inputs.x_TH, inputs.routing)
        elif case.name == "weights":
            output = kernel(inputs.x_TH, value, inputs.routing)
        elif case.name == "problem":
            output = samples.make_torch_kernel(value, case.parts)(*arguments)
        else:
            output = value(*arguments)
        return output

    def copy_and_call() -> torch.Tensor:
        for step in case.before:
            _run_step(original, step, lambda: call(original))
        value = original
        for name in case.copies:
            value = _COPY_FUNCTIONS[name](value)
        output = call(value)
        # The output of the copy must not change when the original is called.
        output = output.clone()
        call(original)
        return output

    result = run_or_classify(description, copy_and_call)
    if isinstance(result, FuzzOutcome):
        return replace(result, kind=WRONG_RESULT) if result.kind == TYPED_ERROR else result
    is_close = torch.allclose(result, expected, rtol=1e-4, atol=1e-5)
    return FuzzOutcome(CORRECT if is_close else WRONG_RESULT, description)


def _run_step(value: Any, step: str, call: Callable[[], object]) -> None:
    if step == "call":
        call()
    elif step == "inference":
        with torch.inference_mode():
            call()
    elif step == "reserve" and hasattr(value, "reserve_workspace"):
        value.reserve_workspace(3)
    elif step == "warm up" and hasattr(value, "warm_up"):
        value.warm_up(1, 2)
    elif step == "count" and hasattr(value, "invalid_ids"):
        _ = value.invalid_ids
    elif step == "prepare" and isinstance(value, torch.nn.Module):
        value.prepare_weights()  # type: ignore[operator]


# ------------------------------------------------------------------------------------- state dicts

_DTYPES = (torch.float64, torch.float16, torch.int8, torch.bool)
_EDITS = (
    "remove",
    "rename",
    "add",
    "dtype",
    "longer",
    "0-d",
    "nan",
    "meta",
    "transposed",
    "expanded",
)


@dataclass(frozen=True)
class StateCase:
    """A state dict and how it is loaded.

    edits: (one of _EDITS, index of the entry) for each edit.
    assign, strict: arguments of load_state_dict.
    bias: whether the layer has biases.
    """

    edits: list[tuple[str, int]]
    assign: bool
    strict: bool
    bias: bool


def check_state_dict(case: StateCase) -> FuzzOutcome:
    """Load an edited state dict. If it is accepted, outputs must match the loaded weights."""
    problem = replace(PROBLEM, bias=case.bias)
    inputs = samples.make_call_inputs(0, problem)
    layer = samples.make_loaded_layer(inputs.weights, bias=case.bias)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for edit, index in case.edits:
        names = sorted(state)
        try:
            _edit_state(state, edit, names[index % len(names)], index)
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue  # this edit cannot be applied to the tensor
    description = f"load_state_dict with {case}"

    def load() -> FuzzOutcome | None:
        try:
            layer.load_state_dict(state, strict=case.strict, assign=case.assign)
        except RuntimeError as error:  # torch raises it with a list of the wrong entries
            if "state_dict" not in str(error):
                raise
            return FuzzOutcome(TYPED_ERROR, description)
        return None

    refusal = run_or_classify(description, load)
    if refusal is not None:
        return refusal

    def call() -> str:
        output = layer(inputs.x_TH, inputs.routing)
        weights = layer.weights()
        return samples.find_output_mismatch(output, replace(inputs, weights=weights), problem)

    mismatch = run_or_classify(description, call)
    if isinstance(mismatch, FuzzOutcome):
        return mismatch
    has_nan = any(edit == "nan" for edit, _ in case.edits)
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch and not has_nan
        else FuzzOutcome(CORRECT)
    )


def _edit_state(state: dict[str, Any], edit: str, name: str, index: int) -> None:
    tensor = state[name]
    if edit == "remove":
        del state[name]
    elif edit == "rename":
        state[name + "x"] = state.pop(name)
    elif edit == "add":
        state["other"] = tensor
    else:
        edits: dict[str, Callable[[], torch.Tensor]] = {
            "dtype": lambda: tensor.to(_DTYPES[index % len(_DTYPES)]),
            "longer": lambda: torch.cat([tensor, tensor]),
            "0-d": lambda: tensor.new_zeros(()),
            "nan": lambda: torch.full_like(tensor, torch.nan),
            "meta": lambda: tensor.to("meta"),
            "transposed": lambda: tensor.mT.contiguous().mT,
            "expanded": lambda: tensor[:1].expand(tensor.shape),
        }
        state[name] = edits[edit]()


# ------------------------------------------------------------------------------- the environment

_VARIABLE_VALUES = st.one_of(
    st.sampled_from((
        "", " ", "0", "1", "-1", "nan", "inf", "1e309", "1e-400", "0x10", "١٢", "true", "10s", "/",
        "/dev/null", "/proc/x", ".", "~", "~nobody/x", "x" * 5000, "\x1b[2J", "é" * 300, "a\nb",
    )),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9),
)  # fmt: skip
# MK_CACHEDIR is unknown, as if MK_CACHE_DIR were misspelled.
_VARIABLE_NAMES = (
    *VARIABLES, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME", "RANK", "WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CC", "MK_CACHEDIR", "TRITON_INTERPRET",
    "NVSHMEM_IB_ENABLE_IBGDA", "EP_DISABLE_GIN",
)  # fmt: skip
_USES: dict[str, Callable[[], object]] = {
    "settings": read_settings,
    "launcher": lambda: import_object("modular_kernel.settings:read_launcher")(),
    "unknown": lambda: import_object("modular_kernel.settings:find_unknown_variables")(),
    "kernel": lambda: samples.make_torch_kernel()(*_make_arguments()),
    "compose": lambda: import_object(f"{_AUTOTUNE}:compose")(
        PROBLEM, options=import_object(f"{_AUTOTUNE}:MeasurementOptions")(budget=0.0)
    )(*_make_arguments()),
}


def _make_arguments() -> tuple[Any, ...]:
    inputs = samples.make_call_inputs()
    return inputs.x_TH, inputs.weights, inputs.routing


def check_environment(case: tuple[dict[str, str], str]) -> FuzzOutcome:
    """Use the package with junk in environment variables. Errors must be typed."""
    values, use_name = case
    description = f"{use_name} with {values}"
    if use_name == "compose" and any(name in values for name in ("HOME", "MK_CACHE_DIR")):
        use_name = "settings"  # compose might create a folder at a valid path

    def run() -> object:
        with preserve_environment(), use_variables(values):
            return _USES[use_name]()

    result = run_or_classify(description, run)
    return result if isinstance(result, FuzzOutcome) else FuzzOutcome(CORRECT, description)


# --------------------------------------------------------------------------------- cache folders


@dataclass(frozen=True)
class CacheCase:
    """Damage to the files in the cache folder of `compose`.

    kind: how files are damaged.
    data: draws details of the damage, which depend on the contents of the file.
    """

    kind: str
    data: st.DataObject


def check_cache_folder(case: CacheCase) -> FuzzOutcome:
    """Compose with damaged files in the cache folder. The output must still be correct."""
    description = f"compose with a cache folder: {case.kind}"
    inputs = samples.make_call_inputs()
    options_class = import_object(f"{_AUTOTUNE}:MeasurementOptions")
    compose = import_object(f"{_AUTOTUNE}:compose")

    def call() -> str:
        with tempfile.TemporaryDirectory() as folder:
            for budget in (0.02, 0.0):
                layer = compose(PROBLEM, options=options_class(folder=Path(folder), budget=budget))
                output = layer(inputs.x_TH, inputs.weights, inputs.routing)
                mismatch = samples.find_output_mismatch(output, inputs)
                if mismatch:
                    return mismatch
                for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
                    _damage(path, case)
        return ""

    mismatch = run_or_classify(description, call)
    if isinstance(mismatch, FuzzOutcome):
        return replace(mismatch, kind=WRONG_RESULT) if mismatch.kind == TYPED_ERROR else mismatch
    return (
        FuzzOutcome(WRONG_RESULT, f"{description}: {mismatch}")
        if mismatch
        else FuzzOutcome(CORRECT, description)
    )


def _damage(path: Path, case: CacheCase) -> None:
    draw, content = case.data.draw, path.read_bytes()
    if case.kind == "json":
        try:
            value = json.loads(content)
        except ValueError:
            return
        for _ in range(draw(st.integers(1, 4))):
            value = draw(changed_json(value))
        path.write_text(json.dumps(value))
    elif case.kind == "text":
        text = draw(damaged_text(content.decode("utf-8", "replace")))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif case.kind == "bytes":
        path.write_bytes(draw(st.binary(max_size=50)))
    elif case.kind == "deep":
        path.write_text("[" * 100_000)
    elif case.kind == "folder":
        path.unlink()
        path.mkdir()
    elif case.kind == "loop":
        path.unlink()
        path.symlink_to(path)
    elif case.kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content * 50)


_PARTS = st.sampled_from((samples.STANDARD_PAIR, samples.BATCHED_PAIR))
_COPY_CASES = st.builds(
    CopyCase,
    name=st.sampled_from(("kernel", "plan", "layer", "weights", "problem")),
    parts=_PARTS,
    before=st.lists(
        st.sampled_from(("call", "inference", "reserve", "warm up", "count", "prepare")), max_size=3
    ),
    copies=st.lists(st.sampled_from(sorted(_COPY_FUNCTIONS)), min_size=1, max_size=3),
)
_STATE_CASES = st.builds(
    StateCase,
    edits=st.lists(st.tuples(st.sampled_from(_EDITS), st.integers(0, 59)), min_size=1, max_size=3),
    assign=st.booleans(),
    strict=st.booleans(),
    bias=st.booleans(),
)
_ENVIRONMENTS = st.tuples(
    st.dictionaries(st.sampled_from(_VARIABLE_NAMES), _VARIABLE_VALUES, min_size=1, max_size=4),
    st.sampled_from(sorted(_USES)),
)
_CACHES = st.builds(
    CacheCase,
    kind=st.sampled_from(
        ("json", "json", "json", "text", "bytes", "deep", "folder", "loop", "gone", "repeated")
    ),
    data=st.data(),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("copies", 2, _COPY_CASES, check_copies),
    Target("state_dicts", 2, _STATE_CASES, check_state_dict),
    Target("environments", 2, _ENVIRONMENTS, check_environment),
    Target("cache_folders", 0.5, _CACHES, check_cache_folder),
)
