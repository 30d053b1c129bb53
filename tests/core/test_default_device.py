"""Functions create tensors with an explicit device and dtype, regardless of torch's defaults.

Inference engines load and run models with a 16-bit default dtype. The meta device stands in for a
GPU as the default device: a tensor that is created on it has no values, and cannot be combined with
tensors on the CPU.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import modular_kernel as mk
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.lora import (
    ForwardBatch,
    FusedMoEWithLoRA,
    LoRAManager,
    MoELoRALayer,
)
from modular_kernel.ops.route import route
from modular_kernel.quant.quantized_weights import dequantize_weights, quantize_weights
from modular_kernel.spec.lora import Adapter
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.router import RouterSpec
from modular_kernel.tensors import ExpertWeights, Routing
from modular_kernel.testing.checkpoints.published_formats import CHECKPOINT_FORMATS
from modular_kernel.testing.checkpoints.samples import write

ROOT = Path(mk.__file__).parent.parent
FACTORIES = {
    *("tensor", "empty", "zeros", "ones", "full", "arange", "randn", "rand", "randint"),
    *("linspace", "logspace", "scalar_tensor", "eye", "randperm", "empty_strided", "from_file"),
}
FORMATS = ("bf16", "gptq", "compressed fp8 channel", "deepseek fp8", "compressed nvfp4", "mxfp4")


def make_floats(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / 4


def dequantize_nvfp4() -> list[torch.Tensor]:
    problem = mk.Problem(3, 32, 32, 4, 2, dtype=torch.float32, quant="nvfp4_w4a16")
    weights = quantize_weights(
        ExpertWeights(make_floats(4, 64, 32), make_floats(4, 32, 32)), problem
    )
    return [dequantize_weights(weights, name, problem) for name in ("w1", "w2")]


def make_placement_tables() -> list[torch.Tensor]:
    placement = Placement.round_robin(5, 2)
    return [placement.expert_map(1), *vars(placement.with_copies({0: (1,)}).tables()).values()]


def compute_adapted_output(mode: Any) -> list[torch.Tensor]:
    layer = FusedMoE(4, 32, 24, 3, 2, params_dtype=torch.float32, device="cpu")
    layer.set_weights(ExpertWeights(make_floats(4, 48, 32), make_floats(4, 32, 24)))
    manager = LoRAManager(layer.problem, "adapters=2,rank=3,a13=shared", [3, 4], mode=mode)
    factors = Adapter(
        make_floats(4, 3, 32), make_floats(4, 48, 3), make_floats(4, 3, 24), make_floats(4, 32, 3)
    )
    manager.load("mine", {3: MoELoRALayer(factors, 0.5)})
    starts = torch.tensor([0, 2, 5], device="cpu")
    info = manager.prepare_moe_lora_batch(ForwardBatch(("mine", None), starts), 3)
    ids = torch.tensor([[0, 3]] * 5, device="cpu")
    routing = Routing(make_floats(5, 2).abs(), ids)
    return [FusedMoEWithLoRA(layer, manager)(make_floats(5, 32), routing, moe_lora_info=info)]


DEVICE_CASES: dict[str, Callable[[], list[torch.Tensor]]] = {
    "nvfp4": dequantize_nvfp4,
    "tables": make_placement_tables,
    "merged": lambda: compute_adapted_output("merged"),
    "parallel_delta": lambda: compute_adapted_output("parallel_delta"),
}


def assert_equal_on_cpu(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert got.device.type == "cpu"
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


@contextmanager
def set_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)


def compute_identity_weights() -> list[torch.Tensor]:
    spec = RouterSpec(3, renormalize=True, zero_experts=4)
    routed = route(make_floats(7, 9), spec)
    assert routed.identity_T is not None
    return [routed.identity_T, routed.routing.topk_weights_TK]


def load_static_scales() -> list[torch.Tensor]:
    """Load static activation scales that no 16-bit dtype represents exactly."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    layer = FusedMoE(1, 32, 24, 3, 1, config, params_dtype=torch.bfloat16, device="cpu")
    codes = {"w1": (24, 32), "w3": (24, 32), "w2": (32, 24)}
    for shard, shape in codes.items():
        matrix = "w2" if shard == "w2" else "w13"
        for name, value in (
            ("weight", make_floats(*shape).to(torch.float8_e4m3fn)),
            ("weight_scale", torch.tensor(0.7654321, dtype=torch.float32, device="cpu")),
            ("input_scale", torch.tensor(1.2345678, dtype=torch.float32, device="cpu")),
        ):
            parameter = getattr(layer, f"{matrix}_{name}")
            layer.weight_loader(parameter, value, f"{matrix}_{name}", shard, 0)
    layer.process_weights_after_loading()
    weights = layer.weights()
    assert weights.a1_scale is not None
    assert weights.w1_scale is not None
    return [weights.a1_scale, weights.w1_scale]


DTYPE_CASES = {
    **DEVICE_CASES,
    "identity": compute_identity_weights,
    "static_scales": load_static_scales,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", DTYPE_CASES)
def test_results_do_not_depend_on_the_default_dtype(name: str, dtype: torch.dtype) -> None:
    expected = DTYPE_CASES[name]()
    with set_default_dtype(dtype):
        actual = DTYPE_CASES[name]()
    assert_equal_on_cpu(actual, expected)


@pytest.mark.parametrize("name", DEVICE_CASES)
def test_results_do_not_depend_on_the_default_device(name: str) -> None:
    expected = DEVICE_CASES[name]()
    with torch.device("meta"):
        actual = DEVICE_CASES[name]()
    assert_equal_on_cpu(actual, expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_is_loaded_to_the_given_device(kind: str, tmp_path: Path) -> None:
    assert kind in CHECKPOINT_FORMATS
    write(tmp_path, "mixtral", kind)

    def load() -> list[torch.Tensor]:
        weights = mk.load_experts(tmp_path, 0, tp=(1, 2)).weights
        layer = FusedMoE.from_config(tmp_path, 0, device="cpu")
        layer.load(tmp_path)
        loaded = [*vars(weights).values(), *layer.parameters()]
        tensors = [tensor for tensor in loaded if tensor is not None]
        return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]

    expected = load()
    with torch.device("meta"):
        actual = load()
    assert_equal_on_cpu(actual, expected)


@pytest.mark.parametrize("names", [{"device"}, {"dtype"}], ids=str)
def test_every_factory_names_the_device_and_the_dtype_of_its_tensor(names: set[str]) -> None:
    """Only library code is checked, which runs with the defaults that its caller sets."""
    # The default dtype of integers is always int64.
    integer_factories = {"arange", "randint", "randperm"} if names == {"dtype"} else set()
    tools = {"testing", "bench", "cli", "profiling", "tuning", "measure"}
    folders = ("modular_kernel", "experts", "prepare_finalize", "topk_reduce")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    checked_files = [path for path in files if not tools & {*path.relative_to(ROOT).parts}]
    assert len(checked_files) > 300
    missing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in checked_files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES - integer_factories
        and ast.unparse(node.func.value) == "torch"
        and not {keyword.arg for keyword in node.keywords} & {*names, None}
    ]
    assert missing == []
