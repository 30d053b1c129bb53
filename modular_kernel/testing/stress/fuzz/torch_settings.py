"""Calls in settings of the process, changed memory of started calls, and patterns of modules."""

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

from modular_kernel.quant.quantized_weights import dequantized_weights, quantize_weights
from modular_kernel.testing.stress.fuzz import samples
from modular_kernel.testing.stress.fuzz.outcome import (
    ACCEPTED,
    RIGHT,
    TYPED,
    WRONG,
    FuzzOutcome,
    run_or_outcome,
)
from modular_kernel.testing.stress.fuzz.samples import PROBLEM, E
from modular_kernel.testing.stress.fuzz.target import Target, import_name, seeds


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
def _set(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


_SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype float16": lambda: _set(torch.set_default_dtype, torch.float16, torch.float32),
    "default device meta": lambda: torch.device("meta"),
    "flush denormals": lambda: _set(torch.set_flush_denormal, True, False),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "function mode": _FunctionMode,
    "dispatch mode": _DispatchMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "swapped parameters": lambda: _set(
        torch.__future__.set_swap_module_params_on_conversion, True, False
    ),
    "short slices": lambda: _set(sys.setswitchinterval, 1e-6, sys.getswitchinterval()),
}


def _quantized() -> list[torch.Tensor]:
    problem = replace(PROBLEM, hidden=32, intermediate=32, quant="nvfp4_w4a16")
    given = _plain(lambda: samples.inputs(0, replace(problem, quant="none")))
    weights = quantize_weights(given.weights, problem)
    return [dequantized_weights(weights, name, problem) for name in ("w1", "w2")]


def _tables() -> list[torch.Tensor]:
    placement = import_name("modular_kernel.spec.placement:Placement").round_robin(E, 2)
    return [placement.expert_map(1), *vars(placement.with_copies({0: (1,)}).tables()).values()]


def _adapted(seed: int) -> list[torch.Tensor]:
    given = _plain(lambda: samples.inputs(seed))
    layer = samples.loaded_layer(given.weights, device="cpu")
    home = "modular_kernel.layers.lora"
    manager = import_name(f"{home}:LoRAManager")(PROBLEM, samples.LORA, [3])
    factors = _plain(lambda: samples.adapter(2, seed % 9))
    manager.load("mine", {3: import_name(f"{home}:MoELoRALayer")(factors, 0.5)})
    starts = torch.tensor([0, 3, PROBLEM.tokens], device="cpu")
    batch = import_name(f"{home}:ForwardBatch")(("mine", None), starts)
    info = manager.prepare_moe_lora_batch(batch, 3)
    adapted = import_name(f"{home}:FusedMoEWithLoRA")(layer, manager)
    return [adapted(given.x_TH, given.routing, moe_lora_info=info)]


def _plain(make: Callable[[], Any]) -> Any:
    """Return inputs, made with torch's initial defaults."""
    before = torch.get_default_dtype()
    with _set(torch.set_default_dtype, torch.float32, before), torch.device("cpu"):
        return make()


def _calls(name: str, seed: int) -> list[torch.Tensor]:
    given = _plain(lambda: samples.inputs(seed))
    arguments = (given.x_TH, given.weights, given.routing)
    if name == "layer":
        return [samples.loaded_layer(given.weights, device="cpu")(given.x_TH, given.routing)]
    if name == "batched":
        return [samples.kernel(PROBLEM, samples.BATCHED)(*arguments)]
    if name == "start":
        return [samples.kernel().start(*arguments).finish()]
    if name == "plan":
        return [samples.kernel().plan()(*arguments).clone()]
    return [samples.kernel()(*arguments)]


_USES: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "quantized": lambda _: _quantized(),
    "tables": lambda _: _tables(),
    "adapted": _adapted,
    **{name: partial(_calls, name) for name in ("kernel", "batched", "plan", "start", "layer")},
}


def torch_settings(case: tuple[str, list[str], int]) -> FuzzOutcome:
    """Use the package in settings of the process: the numbers are those without them."""
    name, names, seed = case
    what = f"{name} with {names}"
    expected = _USES[name](seed)

    def run() -> list[torch.Tensor]:
        with ExitStack() as stack:
            for each in names:
                stack.enter_context(_SETTINGS[each]())
            return _USES[name](seed)

    found = run_or_outcome(what, run)
    if isinstance(found, FuzzOutcome):
        return replace(found, kind=WRONG) if found.kind == TYPED else found
    same = all(
        mine.dtype is other.dtype
        and mine.device == other.device
        and torch.allclose(mine.float(), other.float(), rtol=1e-4, atol=1e-5)
        for mine, other in zip(found, expected, strict=True)
    )
    return FuzzOutcome(RIGHT if same else WRONG, what)


# ----------------------------------------------------------------------------------- started calls


@dataclass(frozen=True)
class StartedCase:
    """A started call, and what changes the memory of one of its tensors before it is finished."""

    parts: tuple[str, str]
    tensor: str
    change: str
    seed: int


def started_calls(case: StartedCase) -> FuzzOutcome:
    """Change the memory of a tensor between start and finish: refused, and the next call right."""
    given, kernel = samples.inputs(case.seed), samples.kernel(PROBLEM, case.parts)
    routing = given.routing
    out = torch.full_like(given.x_TH, torch.nan)
    tensor = {
        "x": given.x_TH, "w1": given.weights.w1, "w2": given.weights.w2, "out": out,
        "ids": routing.topk_ids_TK, "topk_weights": routing.topk_weights_TK,
    }[case.tensor]  # fmt: skip
    pending = kernel.start(given.x_TH, given.weights, routing, out=out)
    storage = tensor.untyped_storage()
    changes: dict[str, Callable[[], object]] = {
        "freed": lambda: storage.resize_(0),
        "halved": lambda: storage.resize_(storage.nbytes() // 2),
        "smaller": lambda: tensor.resize_(1, 1),
        "replaced": lambda: tensor.set_(tensor.clone()),  # type: ignore[call-overload]
    }
    changes[case.change]()
    what = f"{case.tensor} {case.change} between start and finish, {' x '.join(case.parts)}"
    result = run_or_outcome(what, pending.finish)
    if not isinstance(result, FuzzOutcome):
        return FuzzOutcome(ACCEPTED, what)
    if result.kind != TYPED:
        return result
    again = samples.inputs(case.seed + 1)
    fault = samples.output_mismatch(kernel(again.x_TH, again.weights, again.routing), again)
    return FuzzOutcome(WRONG, f"{what}: then {fault}") if fault else result


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


def module_patterns(case: tuple[str, str, str]) -> FuzzOutcome:
    """Match an entry of a list of modules with a name, as `re` or `fnmatch` does."""
    kind, text, name = case
    what = f"{kind} {text!r} and {name!r}"
    home = "modular_kernel.models.module_matcher"
    entry = import_name(f"{home}:Entry")(text, kind)
    try:
        found = import_name(f"{home}:ModuleMatcher")([entry]).first([name]) is not None
    except import_name(f"{home}:PatternError"):
        return FuzzOutcome(TYPED, what)
    inner = [name[:end] for end, character in enumerate(name) if character == "."]
    if kind == "modules":
        parts = name.split(".")
        spans = [(i, j) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
        stripped = text.strip(".").removesuffix(".*")  # an entry covers what is inside a module
        allowed = [any(fnmatchcase(".".join(parts[i:j]), stripped) for i, j in spans)]
    else:
        matches = re.compile(text, re.ASCII)
        test = matches.match if kind == "regex" else matches.search
        # An entry that ends a name also covers everything inside the modules that it matches.
        covered = "$" in text and any(map(test, inner))
        allowed = [True, True] if (matched := bool(test(name))) else [matched, bool(covered)]
    return FuzzOutcome(RIGHT if found in allowed else WRONG, what)


_PARTS = st.sampled_from((samples.PAIR, samples.BATCHED))
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
    Target("torch_settings", 2, _SETTING_CASES, torch_settings),
    Target("started_calls", 1, _STARTED, started_calls),
    Target("module_patterns", 2, _PATTERNS, module_patterns),
)
