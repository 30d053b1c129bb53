"""The plugin for vLLM, without vLLM: registration, hooks, and conversion of layers and weights."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from devices import DEVICE

from modular_kernel.errors import IncompatibleError, ShapeError, UnknownPartError, UnsupportedError
from modular_kernel.integrations import vllm as plugin
from modular_kernel.integrations.vllm import hooks, layers
from modular_kernel.integrations.vllm.calls import BatchedCalls, StandardCalls
from modular_kernel.integrations.vllm.layers import (
    make_activation,
    make_operand,
    select_scheme,
    select_weight_only_scheme,
)
from modular_kernel.integrations.vllm.weights import convert_biases, convert_scales
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.reference import float64_reference, rounded_reference
from modular_kernel.spec.problem import ActivationSpec, Machine, Problem
from modular_kernel.tensors import BatchedTokens, ExpertWeights, Routing
from modular_kernel.testing.verify.compare import compare

TENSOR, TOKEN, CHANNEL = (-1, -1), (1, -1), (-1, 1)
BASE = Problem(tokens=9, hidden=64, intermediate=32, experts=4, top_k=2)
CPU = Machine("cpu")


def make_key(
    dtype: object,
    group: tuple[int, int],
    *,
    static: bool = True,
    scale: object = torch.float32,
    symmetric: bool = True,
) -> Any:
    """Return a stand-in for vLLM's QuantKey."""
    return SimpleNamespace(
        dtype=dtype,
        scale=SimpleNamespace(dtype=scale, static=static, group_shape=group),
        symmetric=symmetric,
    )


E4M3 = torch.float8_e4m3fn
SCHEMES = (
    (None, None, "none"),
    (make_key(E4M3, TENSOR), make_key(E4M3, TENSOR, static=False), "fp8_w8a8_tensor"),
    (make_key(E4M3, TENSOR), make_key(E4M3, TENSOR), "fp8_w8a8_tensor:static=true"),
    (make_key(E4M3, TENSOR), make_key(E4M3, TOKEN, static=False), "fp8_w8a8_channel"),
    (make_key(E4M3, CHANNEL), make_key(E4M3, TOKEN, static=False), "fp8_w8a8_channel"),
    (make_key(E4M3, (128, 128)), make_key(E4M3, (1, 128), static=False), "fp8_w8a8_block"),
    (
        make_key(E4M3, (64, 64)),
        make_key(E4M3, (1, 128), static=False),
        "fp8_w8a8_block:block=64x64",
    ),
    (make_key(E4M3, TENSOR), None, "fp8_w8a16_tensor"),
    (make_key(E4M3, CHANNEL), None, "fp8_w8a16_channel"),
    (make_key(E4M3, (128, 128)), None, "fp8_w8a16_block"),
    (make_key(torch.int8, CHANNEL), make_key(torch.int8, TOKEN, static=False), "int8_w8a8_channel"),
    (make_key(torch.int8, CHANNEL), None, "int8_w8a16_channel"),
    (make_key(torch.uint8, (1, 32), scale=torch.uint8), None, "mxfp4_w4a16"),
    (make_key(torch.uint8, (1, 16), scale=E4M3), None, "nvfp4_w4a16"),
)
UNSUPPORTED_KEYS = (
    (make_key(E4M3, TENSOR), make_key(E4M3, (1, 128), static=False)),
    (make_key(E4M3, CHANNEL), make_key(E4M3, TENSOR, static=False)),
    (make_key(E4M3, TENSOR, static=False), None),
    (
        make_key(E4M3, (1, 32), scale=torch.uint8),
        make_key(E4M3, (1, 32), static=False, scale=torch.uint8),
    ),
    (make_key(E4M3, (128, 128), scale=torch.float8_e8m0fnu), None),
    (
        make_key(torch.float8_e4m3fnuz, TENSOR),
        make_key(torch.float8_e4m3fnuz, TENSOR, static=False),
    ),
    (make_key(torch.int8, TENSOR), make_key(torch.int8, TENSOR, static=False)),
    (make_key(torch.int8, CHANNEL), make_key(torch.int8, TOKEN, static=False, symmetric=False)),
    (make_key("uint4b8", (1, 32), scale=torch.float16), None),
    (None, make_key(E4M3, TOKEN, static=False)),
)


@pytest.mark.parametrize(("weight", "activation", "scheme"), SCHEMES)
def test_keys_determine_the_scheme(weight: Any, activation: Any, scheme: str) -> None:
    assert select_scheme(make_operand(weight), make_operand(activation)) == scheme


@pytest.mark.parametrize(("weight", "activation"), UNSUPPORTED_KEYS)
def test_unsupported_keys_are_refused(weight: Any, activation: Any) -> None:
    with pytest.raises(UnsupportedError, match="quantization: got"):
        select_scheme(make_operand(weight), make_operand(activation))


def test_weight_only_schemes() -> None:
    assert select_weight_only_scheme(4, 128, zero_points=False) == "int4_w4a16_group"
    assert (
        select_weight_only_scheme(4, 32, zero_points=True)
        == "int4_w4a16_group:group=32,zero_points=true"
    )
    assert select_weight_only_scheme(8, 64, zero_points=False) == "int8_w8a16_group:group=64"
    for bits, group, act_order in ((3, 32, False), (4, -1, False), (4, 33, False), (4, 32, True)):
        with pytest.raises(UnsupportedError):
            select_weight_only_scheme(bits, group, zero_points=False, act_order=act_order)


ACTIVATIONS = (
    ("silu", {}, "silu"),
    ("silu", {"limit": 5.0, "alpha": 1.5, "beta": 1.0}, "swiglu_clamp_before:limit=5.0"),
    ("silu", {"alpha": 1.5, "beta": 1.0}, "silu"),
    ("gelu", {}, "gelu"),
    ("gelu_tanh", {}, "gelu_tanh"),
    ("swigluoai", {}, "swiglu_oai"),
    ("swigluoai", {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, "swiglu_oai"),
    ("swigluoai_uninterleave", {"limit": 5.0, "alpha": 1.5, "beta": 1.0},
     "swiglu_oai:alpha=1.5,limit=5.0,interleaved=false"),
    ("swigluoai_uninterleave", {"limit": 5.0}, "swiglu_clamp_before:limit=5.0"),
    ("swiglustep", {}, "swiglu_clamp_after:limit=7"),
    ("situ", {"situ_beta": 3.0}, "situ:alpha=3.0"),
    ("situ", {"situ_beta": 3.0, "situ_linear_beta": 2.0}, "situ:alpha=3.0,limit=2.0"),
    ("situ", {"situ_beta": 3.0, "situ_linear_beta": -1.0}, "situ:alpha=3.0"),
    ("relu2_no_mul", {}, "relu2"),
    ("silu_no_mul", {}, "silu_no_mul"),
    ("gelu_no_mul", {}, "gelu_no_mul"),
    ("gelu_tanh_no_mul", {}, "gelu_tanh_no_mul"),
)  # fmt: skip
UNSUPPORTED_ACTIVATIONS = (
    ("relu2", {}),
    ("situ", {}),
    ("swigluoai", {"limit": 5.0}),
    ("swigluoai", {"alpha": 1.5}),
    ("swigluoai_uninterleave", {}),
    ("swigluoai_uninterleave", {"limit": 5.0, "alpha": 1.5}),
)


@pytest.mark.parametrize(("name", "options", "spec"), ACTIVATIONS)
def test_activations_are_translated(name: str, options: dict[str, float], spec: str) -> None:
    assert make_activation(name, **options) == ActivationSpec.parse(spec)


@pytest.mark.parametrize(("name", "options"), UNSUPPORTED_ACTIVATIONS)
def test_unsupported_activations_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError, match="activation: got"):
        make_activation(name, **options)


def test_environment_variable_selects_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine("cuda", (9, 0))
    monkeypatch.delenv("MK_VLLM", raising=False)
    assert layers.list_candidate_parts(gpu) == layers.DEFAULT_PARTS
    assert layers.list_candidate_parts(CPU) == ()
    monkeypatch.setenv("MK_VLLM", "0")
    assert layers.list_candidate_parts(gpu) == ()
    monkeypatch.setenv("MK_VLLM", "TorchExperts, NaiveBatchedExperts")
    assert layers.list_candidate_parts(CPU) == ("TorchExperts", "NaiveBatchedExperts")


def test_the_compatibility_check_selects_parts() -> None:
    parts = "TorchExperts", "NaiveBatchedExperts"
    assert layers.select_part(BASE, parts, CPU, batched=False) == "TorchExperts"
    assert layers.select_part(BASE, parts, CPU, batched=True) == "NaiveBatchedExperts"
    with pytest.raises(UnsupportedError, match="batched_experts format"):
        layers.select_part(BASE, ("TorchExperts",), CPU, batched=True)
    with pytest.raises(IncompatibleError, match="TritonExperts"):
        layers.select_part(BASE, ("TritonExperts",), CPU, batched=False)
    with pytest.raises(UnknownPartError, match="TorchExperts"):
        layers.select_part(BASE, ("TorchExpert",), CPU, batched=False)


def test_scales_are_reshaped() -> None:
    problem = Problem(9, 64, 32, 4, 2, quant="fp8_w8a8_channel")
    per_expert, per_row = torch.arange(4.0), torch.rand(4, 64, 1)
    copies: dict[str, torch.Tensor] = {}
    sources = {"w1_scale": per_expert, "w2_scale": per_row, "a1_scale": None, "w1_zero_point": None}
    scales = convert_scales(problem, sources, copies)
    assert scales.keys() == {"w1_scale", "w2_scale"}
    assert torch.equal(scales["w1_scale"], per_expert[:, None].expand(4, 64))
    assert scales["w2_scale"].data_ptr() == per_row.data_ptr()
    with pytest.raises(ShapeError, match="w1_scale: got"):
        convert_scales(problem, sources | {"w1_scale": torch.rand(4, 2)}, copies)


def test_converted_scales_keep_their_memory() -> None:
    problem = Problem(9, 64, 32, 4, 2, quant="fp8_w8a8_channel")
    copies: dict[str, torch.Tensor] = {}
    sources = {"w1_scale": torch.arange(4.0), "w2_scale": torch.rand(4, 64)}
    first = convert_scales(problem, sources, copies)
    second = convert_scales(problem, sources | {"w1_scale": torch.arange(4.0) + 1}, copies)
    assert copies.keys() == {"w1_scale"}
    assert second["w1_scale"] is first["w1_scale"]
    assert torch.equal(first["w1_scale"], (torch.arange(4.0) + 1)[:, None].expand(4, 64))
    larger_problem = replace(problem, intermediate=64)
    third = convert_scales(larger_problem, sources, copies)
    assert third["w1_scale"].shape == (4, 128)


def test_recomputed_global_scales_keep_their_memory() -> None:
    """CUDA graphs read the memory of the first load."""
    problem = Problem(9, 64, 32, 4, 2, quant="nvfp4_w4a16")
    copies: dict[str, torch.Tensor] = {}
    loads = [
        {"w1_global_scale": torch.rand(4, 2), "w2_global_scale": torch.rand(4)} for _ in range(2)
    ]
    first = convert_scales(problem, loads[0], copies)
    addresses = {name: scale.data_ptr() for name, scale in first.items()}
    second = convert_scales(problem, loads[1], copies)
    for name, source in loads[1].items():
        assert second[name].data_ptr() == addresses[name] != source.data_ptr()
        assert torch.equal(second[name].flatten(), source.flatten())


@pytest.mark.parametrize("present", [("b1", "b2"), ("b1",), ("b2",), ()])
def test_a_missing_bias_is_zero(present: tuple[str, ...]) -> None:
    biases = {"b1": torch.ones(4, 64), "b2": torch.ones(4, 64)}
    sources = [biases[name] if name in present else None for name in ("b1", "b2")]
    converted = convert_biases(BASE, *sources, {})
    assert converted.keys() == (biases.keys() if present else set())
    for name, bias in converted.items():
        assert torch.equal(bias, biases[name] if name in present else torch.zeros(4, 64))


def test_schemes_take_the_block_shape_of_loaded_weights() -> None:
    assert layers.set_block_shape("fp8_w8a8_block", [64, 32]) == "fp8_w8a8_block:block=64x32"
    assert layers.set_block_shape("fp8_w8a8_block:block=64x64", [128, 128]) == "fp8_w8a8_block"
    for scheme in ("none", "int4_w4a16_group:group=32"):
        assert layers.set_block_shape(scheme, [0, 32]) == scheme
    assert layers.set_block_shape("fp8_w8a8_block", None) == "fp8_w8a8_block"


def make_layer(problem: Problem) -> tuple[torch.Tensor, ExpertWeights, Routing]:
    generator = torch.Generator().manual_seed(5)
    e, h, i = problem.experts, problem.hidden, problem.intermediate
    x_TH = torch.randn(problem.tokens, h, generator=generator).to(DEVICE, problem.dtype)
    w1 = torch.randn(e, problem.w1_rows, h, generator=generator).to(DEVICE, problem.dtype) / 8
    w2 = torch.randn(e, h, i, generator=generator).to(DEVICE, problem.dtype) / 5
    weights = ExpertWeights(w1, w2)
    if problem.scheme.quantized:
        weights = quantize_weights(weights, problem)
    values, ids = torch.randn(problem.tokens, e, generator=generator).to(DEVICE).topk(problem.top_k)
    return x_TH, weights, Routing(values.softmax(-1), ids)


@pytest.mark.parametrize("part", ["TritonExperts", "TorchExperts"])
@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel"])
def test_standard_calls_use_only_their_workspace(part: str, quant: str, machine: Machine) -> None:
    """A call writes nothing beyond the declared bytes of its workspace."""
    problem = Problem(9, 64, 32, 4, 2, quant=quant)
    calls = StandardCalls(problem.with_tokens(2048), part, machine)
    x_TH, weights, routing = make_layer(problem)
    nbytes = calls.workspace_bytes(9, 2)
    memory = torch.full((nbytes + 256,), 255, dtype=torch.uint8, device=DEVICE)
    out = torch.full((9, 64), torch.nan, dtype=problem.dtype, device=DEVICE)
    calls(x_TH, weights, routing, memory=memory[:nbytes], out=out)
    result = compare(out, float64_reference(x_TH, weights, routing, problem),
                     rounded_reference(x_TH, weights, routing, problem), problem)  # fmt: skip
    assert result.ok, result.problems
    assert bool((memory[nbytes:] == 255).all())


@pytest.mark.parametrize("part", ["BatchedTritonExperts", "NaiveBatchedExperts"])
def test_batched_calls_equal_the_layer(part: str) -> None:
    """The outputs of an expert equal those of a layer that routes the same tokens to it alone."""
    x_TH, weights, _ = make_layer(BASE)
    counts_e = torch.tensor([3, 0, 9, 1], dtype=torch.int32, device=DEVICE)
    x_eCH = torch.full((4, 9, 64), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for expert, count in enumerate(counts_e.tolist()):
        x_eCH[expert, :count] = x_TH[:count]
    calls = BatchedCalls(BASE, part)
    nbytes = calls.workspace_bytes(4, 9)
    memory = torch.full((nbytes,), 255, dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(x_eCH)
    calls(BatchedTokens(x_eCH, counts_e), weights, memory=memory, out=out)
    for expert, count in enumerate(counts_e.tolist()):
        ids = torch.full((count, 1), expert, device=DEVICE)
        routing = Routing(torch.ones(count, 1, device=DEVICE), ids)
        problem = Problem(count, 64, 32, 4, 1)
        inputs = x_TH[:count], weights, routing, problem
        result = compare(
            out[expert, :count], float64_reference(*inputs), rounded_reference(*inputs), problem
        )
        assert result.ok, result.problems


# ------------------------------------------------------------------------------- registration


def run_python(code: str, **variables: str) -> str:
    """Run a program in a new process, and return its output. It can import this checkout."""
    root = str(Path(__file__).parents[2])
    from modular_kernel.settings import make_child_environment

    environment = make_child_environment(interpreted=False) | {"PYTHONPATH": root} | variables
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_register_imports_neither_torch_nor_triton() -> None:
    code = """
import sys, types
vllm = types.ModuleType("vllm")
vllm.__version__ = "0.33.0"
sys.modules["vllm"] = vllm
from modular_kernel.integrations.vllm import register
register()
register()
print(sorted({"torch", "triton", "experts"} & set(sys.modules)))
"""
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev", ""])
def test_unknown_versions_are_not_changed(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(hooks, "install", pytest.fail)
    with caplog.at_level(logging.WARNING, "vllm.modular_kernel"):
        plugin.register()
    (message,) = caplog.messages
    assert message.startswith(f"modular_kernel is off: vLLM is {version}, supported: 0.26, 0.33")


def test_register_without_vllm_does_not_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    (message,) = caplog.messages
    assert "modular_kernel is off: ModuleNotFoundError" in message


def test_variable_disables_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MK_VLLM", "0")
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert caplog.messages == []


# --------------------------------------------------------------------------------------- hooks


class FakeOracle:
    """A stand-in for an oracle, whose module has a select function `first` and a later `second`."""

    select_functions: tuple[str, ...] = ("first",)
    later_functions: tuple[str, ...] = ("second",)
    callers: tuple[tuple[str, str], ...] = ()

    def __init__(self, module: str, missing: tuple[str, ...] = ()) -> None:
        self.module, self._missing = module, missing

    def find_missing(self, module: ModuleType) -> tuple[str, ...]:
        return self._missing

    def handle(self, function: str, arguments: dict[str, Any]) -> Any | None:
        if arguments["config"] == "refused":
            raise UnsupportedError("layer", got=1, need=2)
        if arguments["config"] == "broken":
            raise RuntimeError("a defect of ours")
        return f"ours: {function}" if arguments["config"] == "served" else None


@pytest.fixture
def vllm_modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return a module with two functions, and a module that imported the first by name."""
    owner, user = ModuleType("vllm.fake_oracle"), ModuleType("vllm.fake_method")

    def first(config: str, other: int = 0) -> str:
        return f"vllm: first {config} {other}"

    def second(config: str) -> str:
        return f"vllm: second {config}"

    owner.first, owner.second = first, second  # type: ignore[attr-defined]
    user.first = first  # type: ignore[attr-defined]
    for module in (owner, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return owner, user


def install(oracle: FakeOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    version = ModuleType("fake_version")
    version.ORACLES = {"fp8": oracle}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_version", version)
    hooks._replace_functions("fp8", "fake_version")


def test_functions_are_replaced_once_in_all_modules(
    vllm_modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, user = vllm_modules
    install(FakeOracle(owner.__name__), monkeypatch)
    first = owner.first
    install(FakeOracle(owner.__name__), monkeypatch)
    assert owner.first is user.first is first
    assert first("served", other=3) == "ours: first"
    assert owner.second("served") == "ours: second"
    assert first("theirs", other=3) == "vllm: first theirs 3"
    with caplog.at_level(logging.INFO, "vllm.modular_kernel"):
        hooks.log_once.cache_clear()
        assert [first("refused"), first("refused"), first("broken")] == [
            "vllm: first refused 0",
            "vllm: first refused 0",
            "vllm: first broken 0",
        ]
    with pytest.raises(RuntimeError, match="a defect of ours"):
        owner.second("broken")  # After the selection, vLLM can no longer run the layer.
    refused, broken = caplog.messages
    assert refused == "modular_kernel leaves a layer to vLLM (first): layer: got 1, need 2"
    assert "a defect of ours" in broken


class CallerOracle(FakeOracle):
    """An oracle that needs an argument of the constructor that calls the select function."""

    callers = (("vllm.fake_method", "Method"),)

    def handle(self, function: str, arguments: dict[str, Any]) -> Any | None:
        return f"group size {arguments['group_size']}" if "group_size" in arguments else None


def test_arguments_of_the_constructor_that_selects(
    vllm_modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, user = vllm_modules

    class Method:
        def __init__(self, group_size: int, config: str = "theirs") -> None:
            self.selected = user.first(config)
            if config == "broken":
                raise ValueError(config)

    user.Method = Method  # type: ignore[attr-defined]
    install(CallerOracle(owner.__name__), monkeypatch)
    assert Method(64).selected == "group size 64"
    assert Method(group_size=32).selected == "group size 32"
    with pytest.raises(ValueError, match="broken"):
        Method(16, config="broken")
    assert owner.first("theirs") == "vllm: first theirs 0"  # outside of a constructor
    wrapped_init = Method.__init__
    hooks._record_arguments(*CallerOracle.callers[0])
    assert Method.__init__ is wrapped_init


def test_a_missing_caller_leaves_the_layers_to_vllm(
    vllm_modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, _ = vllm_modules
    install(CallerOracle(owner.__name__), monkeypatch)
    assert caplog.messages == ["modular_kernel does not find Method in vllm.fake_method"]
    assert owner.first("theirs") == "vllm: first theirs 0"


@pytest.mark.parametrize("missing_item", ["a function", "an internal", "the module of the version"])
def test_nothing_is_replaced_if_a_dependency_is_missing(
    missing_item: str,
    vllm_modules: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner, user = vllm_modules
    before = dict(vars(owner)), dict(vars(user))
    oracle = FakeOracle(owner.__name__, ("Some.Enum",) if missing_item == "an internal" else ())
    if missing_item == "a function":
        oracle.later_functions = ("third",)
    if missing_item == "the module of the version":
        monkeypatch.setitem(sys.modules, "fake_version", None)
        hooks._replace_functions("fp8", "fake_version")
    else:
        install(oracle, monkeypatch)
    assert (vars(owner), vars(user)) == before
    (message,) = caplog.messages
    assert message.startswith("modular_kernel leaves layers of fp8 to vLLM: ")
    names = {"a function": "third", "an internal": "Some.Enum"}
    assert names.get(missing_item, "fake_version") in message
