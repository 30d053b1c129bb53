"""CutlassExpertsFP8 without CUTLASS: verdicts, and the host code with a torch reference.

The reference stands in for the GEMM kernel on a CPU. It refuses operands that TMA cannot load, and
leaves rows after the last tile unwritten.
"""

from dataclasses import replace

import pytest
import torch
from ops_fixtures import odd_address

from experts.cutlass.block_gemm import block_gemm
from experts.cutlass.path import CutlassPath
from experts.triton.configs.select import on_device
from experts.triton.grouped_tma.grouped_tma_config import default_config
from experts.triton.grouped_tma.grouped_tma_path import GroupedTmaPath
from experts.triton.launch_config import Device
from experts.triton.operands import gemm1_operands, gemm2_operands
from experts.triton.path import PathCall
from modular_kernel import Problem, check, make_kernel
from modular_kernel.catalog import this_machine
from modular_kernel.errors import LayoutError, ShapeError
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.ops.quantize import QuantizedRows, quantize_rows, quantize_specs, take_quantized
from modular_kernel.ops.sort import SortedPairs
from modular_kernel.spec.problem import Combine, IdSpace, Machine
from modular_kernel.tensors import DispatchedRouting, ExpertWeights, Routing, StandardTokens
from modular_kernel.testing.random_inputs import random_inputs
from modular_kernel.workspace import Workspace

NAMES = ("MoEPrepareAndFinalizeNoEP", "CutlassExpertsFP8")
CPU = torch.device("cpu")
PROBLEM = Problem(150, 256, 128, 3, 2, "bfloat16", "fp8_w8a8_block")
PACKAGES = frozenset({"triton", "nvidia_cutlass_dsl", "tvm_ffi"})
H200 = Machine("cuda", (9, 0), PACKAGES, name="NVIDIA H200")


# ------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("change", "machine", "rule"),
    [
        ({}, H200, None),
        ({"combine": Combine.TOPK_WEIGHTED, "expert_map": True}, H200, None),
        ({"dtype": "float16"}, H200, "dtype"),
        ({"dtype": "float32"}, H200, "dtype"),
        ({"quant": "none"}, H200, "quant"),
        ({"quant": "fp8_w8a8_channel"}, H200, "quant"),
        ({"quant": "int8_w8a8_block"}, H200, "quant"),
        ({"quant": "fp8_w8a8_block:block=64x128"}, H200, "blocks"),
        ({"hidden": 192}, H200, "hidden"),
        ({"intermediate": 192}, H200, "intermediate"),
        ({"activation": "gelu"}, H200, "activation"),
        ({"activation": "silu:interleaved=true"}, H200, "activation"),
        ({"bias": True}, H200, "bias"),
        ({"top_k": 1, "apply_router_weight_on_input": True}, H200, "router_weight_on_input"),
        ({"batch_invariant": True}, H200, "batch_invariant"),
        ({}, replace(H200, arch=(8, 9)), "archs"),
        ({}, replace(H200, arch=(10, 0)), "archs"),
        ({}, replace(H200, packages=PACKAGES - {"tvm_ffi"}), "package"),
        ({}, Machine("cpu", None, H200.packages | {"ml_dtypes"}, True), "device"),
    ],
)
def test_verdicts_of_the_part(
    change: dict[str, object], machine: Machine, rule: str | None
) -> None:
    verdict = check(*NAMES, replace(PROBLEM, **change), machine)
    assert [r.rule for r in verdict.rejections] == ([] if rule is None else [rule]), str(verdict)


def test_hint_names_the_package_to_install() -> None:
    verdict = check(*NAMES, PROBLEM, replace(H200, packages=frozenset({"triton"})))
    assert "pip install 'modular-kernel[cutlass]'" in str(verdict)


def test_another_package_of_the_name_is_refused() -> None:
    """PyPI has a package named cutlass that is not NVIDIA's."""
    machine = replace(H200, packages=frozenset({"triton", "tvm_ffi", "cutlass"}))
    (rejection,) = check(*NAMES, PROBLEM, machine).rejections
    assert (rejection.rule, rejection.need) == ("package", "nvidia_cutlass_dsl")


# ------------------------------------------------------------------------------------ host code


def run_path_and_reference(
    problem: Problem, ids_TK: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Run the path and TorchExperts for the same layer on the CPU, and return both outputs."""
    x_TH, weights, routing = random_inputs(problem, CPU)
    if ids_TK is not None:
        routing = Routing(routing.topk_weights_TK, ids_TK)
    with prefer_torch_reference():
        kernel = make_kernel(
            "MoEPrepareAndFinalizeNoEP", "TorchExperts", problem, machine=this_machine(device="cpu")
        )
        expected = kernel(x_TH, weights, routing)
        path = CutlassPath(problem)
        specs = path.specs(problem.tokens, 128)
        scheme = problem.scheme
        workspace = Workspace(specs | quantize_specs("x", scheme, *x_TH.shape), CPU, poison=True)
        x = take_quantized(workspace, "x", scheme, tuple(x_TH.shape))
        quantize_rows(x_TH, scheme, out=x)
        dispatched = DispatchedRouting(
            routing.topk_weights_TK, routing.topk_ids_TK, IdSpace.GLOBAL, problem.experts,
            weights.expert_map, torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        output = torch.full(problem.output_shape, torch.nan, dtype=problem.dtype)
        tokens = StandardTokens(x.q_RK, dispatched, x.scale)
        assert path.supports_tensors(weights, x.q_RK)
        path.run(PathCall(tokens, weights, workspace, output, default_config(problem)))
    return output, expected


def skips(problem: Problem) -> torch.Tensor:
    ids = torch.randint(0, problem.experts, (problem.tokens, problem.top_k), dtype=torch.int32)
    ids[::5] = -1
    return ids


@pytest.mark.parametrize(
    ("change", "route"),
    [
        ({}, None),
        ({"combine": Combine.TOPK_UNWEIGHTED}, skips),
        ({"routed_scaling_factor": 2.5}, skips),
        ({"hidden": 128, "intermediate": 256}, lambda p: torch.full((p.tokens, 2), 1).int()),
        ({"tokens": 1}, None),
        ({"experts": 40}, None),
    ],
)
def test_output_equals_torch_experts(change: dict[str, object], route: object) -> None:
    torch.manual_seed(3)
    problem = replace(PROBLEM, **change)
    output, expected = run_path_and_reference(problem, route(problem) if callable(route) else None)
    error = (output.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4e-3


def test_activations_between_gemms_are_stored_in_8_bits() -> None:
    """The CUTLASS path needs no buffer for a 16-bit output of GEMM 1."""
    specs, tma_specs = (path(PROBLEM).specs(150, 128) for path in (CutlassPath, GroupedTmaPath))
    assert set(tma_specs) - set(specs) == {"workspace13"}
    assert sum(s.nbytes for s in specs.values()) < sum(s.nbytes for s in tma_specs.values())


def test_the_part_uses_the_cutlass_path() -> None:
    from experts import CutlassExpertsFP8

    with on_device(Device.from_machine(H200)):
        paths = CutlassExpertsFP8(PROBLEM)._paths
    assert type(paths["grouped_tma"]) is CutlassPath
    assert len(paths) > 1  # calls with few tokens take other paths


# ------------------------------------------------------------------- operands of the GEMM kernel


def make_sorted_rows(counts: tuple[int, ...]) -> SortedPairs:
    """Return tiles of 128 rows for the given number of rows of each expert."""
    tiles, start = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, row, start + count) for row in range(start, start + count, 128)]
        start += count
    tiles_tensor = torch.full((3 * len(tiles) + 4,), 0x3F3F3F3F, dtype=torch.int32)
    tiles_tensor[:-1].view(3, -1)[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32).T
    tiles_tensor[-1] = len(tiles)
    unused = torch.empty(0, 1, dtype=torch.int32)
    return SortedPairs(unused, unused, tiles_tensor, unused)


def make_operands(rows: int, depth: int) -> tuple[QuantizedRows, ExpertWeights]:
    problem = replace(PROBLEM, tokens=rows, hidden=depth)
    x, weights, _ = random_inputs(problem, CPU)
    a = QuantizedRows(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, depth // 128)
    )
    with prefer_torch_reference():
        quantize_rows(x, problem.scheme, out=a)
    return a, weights


def test_rows_after_the_last_one_are_unchanged() -> None:
    a, weights = make_operands(330, 256)
    h = QuantizedRows(torch.zeros(330, 128).to(torch.float8_e4m3fn), torch.full((330, 1), -7.0))
    block_gemm(a, gemm1_operands(weights, PROBLEM), PROBLEM, make_sorted_rows((129, 0, 65)), h)
    assert (h.scale[194:] == -7).all()
    assert (h.scale[:194] > 0).all()
    assert not h.q_RK[194:].float().any()
    assert h.q_RK[:194].float().any(1).all()


DEFECTS = {
    "rows with gaps": (LayoutError, "q_RK", lambda q: q.repeat(1, 2)[:, ::2]),
    "row scales along K": (LayoutError, "scale", lambda scale: scale.T.contiguous().T),
    "too few row scales": (ShapeError, "scale", lambda scale: scale[:, :1].contiguous()),
    "rows off 16 bytes": (LayoutError, "q_RK", odd_address),
    "weights along N": (LayoutError, "w2", lambda w: w.mT.contiguous().mT),
    "weights off 16 bytes": (LayoutError, "w2", odd_address),
    "too few block scales": (ShapeError, "w2_scale", lambda scale: scale[:, :1].contiguous()),
    "no scales": (ShapeError, "w2_scale", lambda scale: None),
    "too few rows": (ShapeError, "q_RK", lambda q: q[:-1]),
    "too few rows of weights": (ShapeError, "w2", lambda w: w[:, :128].contiguous()),
    "weights of one expert": (ShapeError, "w2", lambda w: w[:1]),
    "another depth": (ShapeError, "w2", lambda w: w[:, :, :64].contiguous()),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_detected(name: str) -> None:
    error, field, change = DEFECTS[name]
    problem = replace(PROBLEM, hidden=256, intermediate=256)
    a, _ = make_operands(70, 256)
    weights = random_inputs(problem, CPU)[1]
    order, out = make_sorted_rows((70,)), torch.zeros(70, 256, dtype=torch.bfloat16)
    block_gemm(a, gemm2_operands(weights, problem), problem, order, out)
    assert out.any(1).all()
    if hasattr(a, field):
        a = replace(a, **{field: change(getattr(a, field))})
    else:
        weights = replace(weights, **{field: change(getattr(weights, field))})
    with pytest.raises(error):
        block_gemm(a, gemm2_operands(weights, problem), problem, order, out)
