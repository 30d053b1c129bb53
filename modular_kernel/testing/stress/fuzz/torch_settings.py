"""Fuzz targets: torch settings, started calls whose memory changes, and module patterns.

Module patterns are the regular expressions and globs by which the quantization_config of a
checkpoint includes or excludes modules.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modular_kernel.quant.quantized_weights import dequantize_weights, quantize_weights
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.outcome import (
    CORRECT,
    INVALID_ACCEPTED,
    TYPED_ERROR,
    WRONG_RESULT,
    FuzzOutcome,
    run_or_classify,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E
from modular_kernel.testing.stress.fuzz.target import Target, import_object, seeds


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _change_temporarily(change: Callable[[Any], Any], value: Any, old_value: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(old_value)


_SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype float64": lambda: _change_temporarily(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "default dtype float16": lambda: _change_temporarily(
        torch.set_default_dtype, torch.float16, torch.float32
    ),
    "default device meta": lambda: torch.device("meta"),
    "flush denormals": lambda: _change_temporarily(torch.set_flush_denormal, True, False),
    "deterministic": lambda: _change_temporarily(torch.use_deterministic_algorithms, True, False),
    "function mode": _FunctionMode,
    "dispatch mode": _DispatchMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "precision": lambda: _change_temporarily(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "swapped parameters": lambda: _change_temporarily(
        torch.__future__.set_swap_module_params_on_conversion, True, False
    ),
    "short slices": lambda: _change_temporarily(
        sys.setswitchinterval, 1e-6, sys.getswitchinterval()
    ),
}


def _quantize_and_dequantize() -> list[torch.Tensor]:
    problem = replace(PROBLEM, hidden=32, intermediate=32, quant="nvfp4_w4a16")
    call_inputs = _with_default_settings(
        lambda: samples.make_call_inputs(0, replace(problem, quant="none"))
    )
    weights = quantize_weights(call_inputs.weights, problem)
    return [dequantize_weights(weights, name, problem) for name in ("w1", "w2")]


def _make_tables() -> list[torch.Tensor]:
    placement = import_object("modular_kernel.spec.placement:Placement").round_robin(E, 2)
    return [placement.expert_map(1), *vars(placement.with_copies({0: (1,)}).tables()).values()]


def _run_with_adapter(seed: int) -> list[torch.Tensor]:
    call_inputs = _with_default_settings(lambda: samples.make_call_inputs(seed))
    layer = samples.make_loaded_layer(call_inputs.weights, device="cpu")
    module = "modular_kernel.layers.lora"
    manager = import_object(f"{module}:LoRAManager")(PROBLEM, samples.LORA_OPTIONS, [3])
    adapter = _with_default_settings(lambda: samples.make_adapter(2, seed % 9))
    manager.load("mine", {3: import_object(f"{module}:MoELoRALayer")(adapter, 0.5)})
    starts = torch.tensor([0, 3, PROBLEM.tokens], device="cpu")
    batch = import_object(f"{module}:ForwardBatch")(("mine", None), starts)
    lora_info = manager.prepare_moe_lora_batch(batch, 3)
    adapted = import_object(f"{module}:FusedMoEWithLoRA")(layer, manager)
    return [adapted(call_inputs.x_TH, call_inputs.routing, moe_lora_info=lora_info)]


def _with_default_settings(make: Callable[[], Any]) -> Any:
    """Return `make()`, called with torch's initial default dtype and device."""
    old_dtype = torch.get_default_dtype()
    with (
        _change_temporarily(torch.set_default_dtype, torch.float32, old_dtype),
        torch.device("cpu"),
    ):
        return make()


def _run_call(name: str, seed: int) -> list[torch.Tensor]:
    call_inputs = _with_default_settings(lambda: samples.make_call_inputs(seed))
    arguments = (call_inputs.x_TH, call_inputs.weights, call_inputs.routing)
    if name == "layer":
        return [
            samples.make_loaded_layer(call_inputs.weights, device="cpu")(
                call_inputs.x_TH, call_inputs.routing
            )
        ]
    if name == "batched":
        return [samples.make_torch_kernel(PROBLEM, samples.BATCHED_PAIR)(*arguments)]
    if name == "start":
        return [samples.make_torch_kernel().start(*arguments).finish()]
    if name == "plan":
        return [samples.make_torch_kernel().plan()(*arguments).clone()]
    return [samples.make_torch_kernel()(*arguments)]


_USES: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "quantized": lambda _: _quantize_and_dequantize(),
    "tables": lambda _: _make_tables(),
    "adapted": _run_with_adapter,
    **{name: partial(_run_call, name) for name in ("kernel", "batched", "plan", "start", "layer")},
}


def check_torch_settings(case: tuple[str, list[str], int]) -> FuzzOutcome:
    """Use the package under unusual settings of torch. They must not change the results.

    case: (what to use, names of the settings, seed).
    """
    name, names, seed = case
    description = f"{name} with {names}"
    expected = _USES[name](seed)

    def run() -> list[torch.Tensor]:
        with ExitStack() as stack:
            for setting in names:
                stack.enter_context(_SETTINGS[setting]())
            return _USES[name](seed)

    result_or_outcome = run_or_classify(description, run)
    if isinstance(result_or_outcome, FuzzOutcome):
        return (
            replace(result_or_outcome, kind=WRONG_RESULT)
            if result_or_outcome.kind == TYPED_ERROR
            else result_or_outcome
        )
    is_same = all(
        actual_tensor.dtype is expected_tensor.dtype
        and actual_tensor.device == expected_tensor.device
        and torch.allclose(actual_tensor.float(), expected_tensor.float(), rtol=1e-4, atol=1e-5)
        for actual_tensor, expected_tensor in zip(result_or_outcome, expected, strict=True)
    )
    return FuzzOutcome(CORRECT if is_same else WRONG_RESULT, description)


# ----------------------------------------------------------------------------------- started calls


@dataclass(frozen=True)
class StartedCase:
    """A started call, and a change of the memory of one tensor before the call is finished."""

    parts: tuple[str, str]
    tensor: str
    change: str
    seed: int


def check_started_call(case: StartedCase) -> FuzzOutcome:
    """Change the memory of a tensor between start and finish.

    `finish` must raise a typed error, and the next call must be correct.
    """
    call_inputs, kernel = (
        samples.make_call_inputs(case.seed),
        samples.make_torch_kernel(PROBLEM, case.parts),
    )
    routing = call_inputs.routing
    out = torch.full_like(call_inputs.x_TH, torch.nan)
    tensor = {
        "x": call_inputs.x_TH, "w1": call_inputs.weights.w1, "w2": call_inputs.weights.w2,
        "out": out,
        "ids": routing.topk_ids_TK, "topk_weights": routing.topk_weights_TK,
    }[case.tensor]  # fmt: skip
    pending = kernel.start(call_inputs.x_TH, call_inputs.weights, routing, out=out)
    storage = tensor.untyped_storage()
    changes: dict[str, Callable[[], object]] = {
        "freed": lambda: storage.resize_(0),
        "halved": lambda: storage.resize_(storage.nbytes() // 2),
        "smaller": lambda: tensor.resize_(1, 1),
        "replaced": lambda: tensor.set_(tensor.clone()),  # type: ignore[call-overload]
    }
    changes[case.change]()
    description = f"{case.tensor} {case.change} between start and finish, {' x '.join(case.parts)}"
    result = run_or_classify(description, pending.finish)
    if not isinstance(result, FuzzOutcome):
        return FuzzOutcome(INVALID_ACCEPTED, description)
    if result.kind != TYPED_ERROR:
        return result
    new_inputs = samples.make_call_inputs(case.seed + 1)
    mismatch = samples.find_output_mismatch(
        kernel(new_inputs.x_TH, new_inputs.weights, new_inputs.routing), new_inputs
    )
    return FuzzOutcome(WRONG_RESULT, f"{description}: then {mismatch}") if mismatch else result


# --------------------------------------------------------------------------------- module patterns

_ATOMS = (
    "a", "b", "1", "_", ".", r"\.", r"\d", r"\w", "[ab]", "[^a.]", "[0-9]", r"[\d_]", "[]a]",
    "[^]1]", "(a|b1)", "(?:1|.a)", "^", "$",
)  # fmt: skip
_regexes = st.lists(
    st.tuples(st.sampled_from(_ATOMS), st.sampled_from(("", "", "", "*", "+", "?", "{2}", "{1,2}")))
    .filter(lambda pair: pair[0] not in "^$" or not pair[1])
    .map("".join),
    min_size=1,
    max_size=5,
).map("".join)
_globs = st.text(st.sampled_from("ab1._*?"), min_size=1, max_size=6)
_names = st.text(st.sampled_from("ab.1_"), max_size=18)


def check_module_pattern(case: tuple[str, str, str]) -> FuzzOutcome:
    """Match a module name with an entry of a module list; compare with `re` or `fnmatch`.

    case: (kind of entry, pattern of the entry, name of a module).
    """
    kind, pattern, name = case
    description = f"{kind} {pattern!r} and {name!r}"
    module = "modular_kernel.models.module_matcher"
    entry = import_object(f"{module}:Entry")(pattern, kind)
    try:
        is_match = import_object(f"{module}:ModuleMatcher")([entry]).first_match([name]) is not None
    except import_object(f"{module}:PatternError"):
        return FuzzOutcome(TYPED_ERROR, description)
    parent_modules = [name[:end] for end, character in enumerate(name) if character == "."]
    if kind == "modules":
        parts = name.split(".")
        spans = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
        stripped = pattern.strip(".").removesuffix(".*")  # an entry also matches submodules
        allowed_results = [any(fnmatchcase(".".join(parts[i:j]), stripped) for i, j in spans)]
    else:
        matches = re.compile(pattern, re.ASCII)
        matches_name = matches.match if kind == "regex" else matches.search
        # An entry with an end anchor also matches submodules of the modules that it matches.
        matches_parent = "$" in pattern and any(map(matches_name, parent_modules))
        allowed_results = [True] if matches_name(name) else [False, matches_parent]
    return FuzzOutcome(CORRECT if is_match in allowed_results else WRONG_RESULT, description)


_PARTS = st.sampled_from((samples.STANDARD_PAIR, samples.BATCHED_PAIR))
_STARTED = st.builds(
    StartedCase,
    parts=_PARTS,
    tensor=st.sampled_from(("x", "w1", "w2", "out", "ids", "topk_weights")),
    change=st.sampled_from(("freed", "halved", "smaller", "replaced")),
    seed=st.integers(0, 99),
)
_SETTING_CASES = st.tuples(
    st.sampled_from(sorted(_USES)),
    st.lists(st.sampled_from(sorted(_SETTINGS)), min_size=1, max_size=3, unique=True),
    seeds,
)
_PATTERNS = st.one_of(
    st.tuples(st.sampled_from(("regex", "search")), _regexes, _names),
    st.tuples(st.just("modules"), _globs.filter(lambda text: bool(text.strip("."))), _names),
)
TARGETS: tuple[Target[Any], ...] = (
    Target("torch_settings", 2, _SETTING_CASES, check_torch_settings),
    Target("started_calls", 1, _STARTED, check_started_call),
    Target("module_patterns", 2, _PATTERNS, check_module_pattern),
)
