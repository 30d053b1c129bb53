"""FlashInferExperts, with a stand-in that makes the same checks as the library."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from vendor_stand_in import (
    FlashInfer,
    flashinfer_0_7,
    library_site,
    prove_part,
    stand_in_libraries,
)

from experts.flashinfer import library
from experts.flashinfer.library import MoeArguments, run
from experts.flashinfer.merge_repeated_experts import (
    merge_repeated_experts,
    merge_repeated_experts_ref,
)
from experts.flashinfer.nan_rows import mark_nan_rows, mark_nan_rows_ref
from modular_kernel.catalog import make_kernel
from modular_kernel.errors import ConfigurationError, UnsupportedError
from modular_kernel.quant.quantized_weights import quantize_weights
from modular_kernel.quant.row_order import up_rows_first
from modular_kernel.reference import float64_reference
from modular_kernel.spec.problem import IdSpace, Machine, Problem
from modular_kernel.tensors import DispatchedRouting, ExpertWeights, Routing
from modular_kernel.testing.cases.inputs import InputVariation, make_inputs
from modular_kernel.utils.package_probes import find_package

STATIC, BLOCK = "fp8_w8a8_tensor:static=true", "fp8_w8a8_block"
BASE = Problem(
    tokens=9, hidden=128, intermediate=128, experts=5, top_k=2, activation="silu:up_first=true"
)
CPU = Machine("cpu", None, frozenset({"triton", "ml_dtypes"}), interpreter=True)
E4M3, FP32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16


OAI, BEFORE = "swiglu_oai:limit=1.0", "swiglu_clamp_before:limit=0.5"
AFTER, SITU = "swiglu_clamp_after:limit=0.5", "situ:alpha=1.5,limit=0.7"
LOCAL_EXPERTS = {"expert_map": True, "local_experts": 3}


@pytest.mark.parametrize(
    ("change", "act", "routing", "mode"),
    [
        ({}, "silu", "duplicates", "Swiglu none"),
        ({"dtype": torch.float16}, "relu2", "skips", "Relu2 none"),
        ({"quant": STATIC}, "gelu_tanh", "skips", "GegluTanh tensor"),
        ({"quant": BLOCK, "top_k": 4}, "silu", "duplicates", "Swiglu blocks"),
        ({}, OAI, "zipf", "SwigluBias none"),
        ({}, BEFORE, "uniform", "SwigluBias none"),
        ({}, AFTER, "uniform", "SwigluStep none"),
        ({}, SITU, "uniform", "Situ none"),
        ({"quant": BLOCK, **LOCAL_EXPERTS}, "silu", "out_of_range", "Swiglu blocks"),
        ({"routed_scaling_factor": 2.5, "inplace": True}, "silu", "all_to_one", "Swiglu none"),
    ],
)
def test_cases_are_proven(change: dict[str, Any], act: str, routing: str, mode: str) -> None:
    flashinfer_0_7.launched.clear()
    if act != "relu2":
        act += f"{',' if ':' in act else ':'}up_first=true"
    proof = prove_part(FlashInfer, replace(BASE, activation=act, **change), routing)
    assert proof.passed, str(proof)
    launched = flashinfer_0_7.launched
    assert {" ".join(name) for *name, fused_finalize in launched if not fused_finalize} == {mode}
    # The fused finalize adds with atomics, so its sums are not deterministic.
    assert not any(fused_finalize for *_, fused_finalize in launched)


@pytest.mark.parametrize("act", [OAI, BEFORE, AFTER, SITU, "relu2"])
def test_a_nan_token_has_a_nan_output(act: str) -> None:
    """The library's clamp replaces NaN by the limit, so the part must restore NaN."""
    if act != "relu2":
        act += ",up_first=true"
    problem = replace(BASE, activation=act, dtype=BF16, **LOCAL_EXPERTS)
    proof = prove_part(
        FlashInfer, problem, "uniform", variation=InputVariation("transposed", "nan_token")
    )
    assert proof.passed, str(proof)


# ------------------------------------------------------------------------------ the order of rows


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_channel", BLOCK])
@pytest.mark.parametrize("order", ["silu", "silu:interleaved=true"])
def test_reordered_weights_are_the_same_layer(quant: str, order: str) -> None:
    problem = replace(BASE, activation=order, quant="none", hidden=256, intermediate=256)
    inputs = make_inputs(problem, "uniform", torch.device("cpu"))
    b1 = torch.randn(5, problem.w1_rows)
    problem = replace(problem, quant=quant, bias=True)
    weights = replace(inputs.weights, b1=b1, b2=torch.randn(5, 256))
    if quant != "none":
        weights = quantize_weights(weights, problem)
    x_TH, routing = inputs.x_TH, inputs.routing
    if order.endswith("true") and quant == BLOCK:
        with pytest.raises(ConfigurationError, match="interleaved rows, need gate and up rows in"):
            up_rows_first(weights, problem)
        return
    reordered, up_first = up_rows_first(weights, problem)
    assert str(up_first.act) == "silu:up_first=true"
    assert up_rows_first(reordered, up_first) == (reordered, up_first)
    expected = float64_reference(x_TH, weights, routing, problem)
    assert torch.equal(float64_reference(x_TH, reordered, routing, up_first), expected)
    assert not torch.equal(float64_reference(x_TH, weights, routing, up_first), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation": "relu2"}, "got relu2, need a gated one"),
        ({"quant": "int4_w4a16_group"}, "got int4_w4a16_group, need unquantized weights"),
        ({"quant": BLOCK, "intermediate": 192}, "got I=192, need gate and up rows in separate"),
    ],
)
def test_weights_that_cannot_be_reordered_are_refused(change: dict[str, Any], match: str) -> None:
    problem = replace(BASE, activation="silu")
    problem = replace(problem, **change)
    inputs = make_inputs(problem, "uniform", torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=match):
        up_rows_first(inputs.weights, problem)


# ------------------------------------------------------------------------------------ merged pairs


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_merge_repeated_experts_equals_the_reference(mapped: bool, weighted: bool) -> None:
    ids_TK = torch.tensor(
        [[3, 1, 3, -1, 3], [-1, -1, -1, -1, -1], [9, 2, -2, 2, 0], [0, 1, 2, 3, 1 << 40]]
    )
    router_TK = torch.rand(4, 5).masked_fill(ids_TK < 0, torch.nan)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32) if mapped else None
    results = []
    for operation in (merge_repeated_experts, merge_repeated_experts_ref):
        invalid = torch.zeros(1, dtype=torch.int32)
        routing = DispatchedRouting(
            router_TK if weighted else None, ids_TK, IdSpace.GLOBAL, 4, expert_map, invalid
        )
        out = torch.full((4, 5), -7, dtype=torch.int32), torch.full((4, 5), torch.nan)
        operation(routing, 3 if mapped else 4, factor=2.0, ids_TK=out[0], weights_TK=out[1])
        results.append((*out, invalid))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    ids, weights, invalid = results[0]
    assert invalid.tolist() == [3]  # 9, -2 and 1 << 40
    if mapped:
        expected = [[1, -1, -1, -1, -1], [-1] * 5, [-1, 0, -1, -1, 2], [2, -1, 0, 1, -1]]
    else:
        expected = [[3, 1, -1, -1, -1], [-1] * 5, [-1, 2, -1, -1, 0], [0, 1, 2, 3, -1]]
    assert ids.tolist() == expected
    weight_of_expert_3 = router_TK[0, [0, 2, 4]].sum() if weighted else torch.tensor(3.0)
    torch.testing.assert_close(weights[0, 0], 2 * weight_of_expert_3)
    assert not weights[1].any()


@pytest.mark.parametrize("hidden", [1, 40, 1025])
@pytest.mark.parametrize("transposed", [False, True])
def test_mark_nan_rows_equals_the_reference(hidden: int, transposed: bool) -> None:
    """Weights become NaN for rows with a NaN in any column, except those of skipped pairs."""
    x_TH = torch.randn(5, hidden).bfloat16()
    x_TH[1, 0] = x_TH[3, -1] = x_TH[4, -1] = torch.nan
    x_TH[2] = torch.inf
    x_TH = x_TH.T.contiguous().T if transposed else x_TH
    ids_TK = torch.tensor([[0, 1, 2], [0, -1, 2], [0, 1, 2], [0, 1, -1], [-1, -1, -1]]).int()
    for operation in (mark_nan_rows, mark_nan_rows_ref):
        weights_TK = torch.rand(5, 3).masked_fill(ids_TK < 0, 0)
        original_TK = weights_TK.clone()
        operation(x_TH, ids_TK=ids_TK, weights_TK=weights_TK)
        expected = [[False] * 3, [True, False, True], [False] * 3, [True, True, False], [False] * 3]
        assert weights_TK.isnan().tolist() == expected
        other_weights_TK = original_TK.masked_fill(torch.tensor(expected), 0)
        assert torch.equal(weights_TK.nan_to_num(0), other_weights_TK)


# ----------------------------------------------------------------------------- the stand-in itself


def make_arguments(
    kind: str = "none", experts: int = 3, hidden: int = 128, inter: int = 128
) -> MoeArguments:
    """Return valid arguments of a call of the library.

    kind: the quantization, which is "none", "tensor" or "blocks".
    """
    x = torch.randn(4, hidden).bfloat16()
    sizes = (2 * inter, hidden), (hidden, inter)
    w1, w2 = ((torch.randn(experts, *size) / 11).bfloat16() for size in sizes)
    scales: tuple[torch.Tensor, ...] = ()
    if kind == "tensor":
        x, w1, w2 = x.to(E4M3), w1.to(E4M3), w2.to(E4M3)
        scales = torch.rand(experts), torch.tensor(0.5), torch.rand(experts), torch.tensor(0.25)
    if kind == "blocks":
        w1, w2 = w1.to(E4M3), w2.to(E4M3)
        scales = tuple(torch.rand(experts, -(-w.shape[1] // 128), 1) for w in (w1, w2))
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 1]], dtype=torch.int32)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 128 :]
    out = torch.full((4, hidden), torch.nan, dtype=BF16)
    return MoeArguments(x, ids, torch.rand(4, 2), w1, w2, scales, None, workspace, out)


def make_problem(kind: str) -> Problem:
    return replace(BASE, quant={"none": "none", "tensor": STATIC, "blocks": BLOCK}[kind])


def test_stand_in_equals_float64() -> None:
    args = make_arguments()
    run(flashinfer_0_7, make_problem("none"), args)
    x, expected = args.x_TH.float(), torch.zeros(4, 128)
    for token, ids in enumerate(args.ids_TK.tolist()):
        for k, expert in enumerate(ids):
            if expert >= 0:
                up, gate = (args.w1[expert].float() @ x[token]).bfloat16().float().chunk(2)
                h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
                expected[token] += args.weights_TK[token, k] * (args.w2[expert].float() @ h)
    torch.testing.assert_close(args.output.float(), expected, rtol=2e-2, atol=2e-2)
    assert not args.output[2].any()
    assert bool((args.workspace == 255).all())


def shift_by_one_element(t: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(t.numel() + 1, dtype=t.dtype)
    buffer[1:] = t.flatten()
    return buffer[1:].view(t.shape)


def set_ids(rows: list[list[int]]) -> Callable[[MoeArguments], MoeArguments]:
    return lambda args: replace(args, ids_TK=torch.tensor(rows, dtype=torch.int32))


def change_scale(
    index: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[MoeArguments], MoeArguments]:
    """Return a function that applies `change` to one of the scales."""

    def change_arguments(args: MoeArguments) -> MoeArguments:
        scales = list(args.scales)
        scales[index] = change(scales[index])
        return replace(args, scales=tuple(scales))

    return change_arguments


DEFECTS: dict[str, tuple[str, Callable[[MoeArguments], MoeArguments]]] = {
    "ids of 64 bits": ("none", lambda o: replace(o, ids_TK=o.ids_TK.long())),
    "an expert twice in a token": ("none", set_ids([[0, 0], [1, 2], [0, 1], [2, 1]])),
    "an expert of another rank": ("none", set_ids([[0, 3], [1, 2], [0, 1], [2, 1]])),
    "another sentinel": ("none", set_ids([[0, -2], [1, 2], [0, 1], [2, 1]])),
    "router weights of 16 bits": ("none", lambda o: replace(o, weights_TK=o.weights_TK.bfloat16())),
    "x in column-major order": ("none", lambda o: replace(o, x_TH=o.x_TH.T.contiguous().T)),
    "x off 16 bytes": ("none", lambda o: replace(o, x_TH=shift_by_one_element(o.x_TH))),
    "x of another dtype": ("none", lambda o: replace(o, x_TH=o.x_TH.half())),
    "w1 off 16 bytes": ("none", lambda o: replace(o, w1=shift_by_one_element(o.w1))),
    "w2 in column-major order": ("none", lambda o: replace(o, w2=o.w2.transpose(1, 2))),
    "w1 with too few rows": ("none", lambda o: replace(o, w1=o.w1[:, :-1].contiguous())),
    "w2 of another H": ("none", lambda o: replace(o, w2=o.w2[:, :-8].contiguous())),
    "a weight of fewer experts": ("none", lambda o: replace(o, w2=o.w2[:-1])),
    "scales in 16 bits": ("none", lambda o: replace(o, scales=(torch.ones(3),))),
    "an output of another dtype": ("none", lambda o: replace(o, output=o.output.float())),
    "an output of fewer tokens": ("none", lambda o: replace(o, output=o.output[:-1])),
    "a workspace too small": ("none", lambda o: replace(o, workspace=o.workspace[:1024])),
    "a workspace off 128 bytes": ("none", lambda o: replace(o, workspace=o.workspace[1:])),
    "a workspace of words": ("none", lambda o: replace(o, workspace=o.workspace.float())),
    "three scales of a tensor": ("tensor", lambda o: replace(o, scales=o.scales[:3])),
    "one scale for all experts": ("tensor", change_scale(0, lambda s: s[:1])),
    "a1 of one dimension": ("tensor", change_scale(3, lambda s: s.view(1))),
    "scales of double": ("tensor", change_scale(2, torch.Tensor.double)),
    "unquantized x with fp8 weights": ("tensor", lambda o: replace(o, x_TH=o.x_TH.bfloat16())),
    "x quantized by blocks": ("blocks", lambda o: replace(o, x_TH=o.x_TH.to(E4M3))),
    "too few block scales": ("blocks", change_scale(0, lambda s: s[:, :1])),
    "block scales with gaps": ("blocks", change_scale(0, lambda s: s.repeat(1, 1, 2)[..., ::2])),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_detected(name: str) -> None:
    kind, change = DEFECTS[name]
    run(flashinfer_0_7, make_problem(kind), make_arguments(kind))
    with pytest.raises(RuntimeError, match="Check failed"):
        run(flashinfer_0_7, make_problem(kind), change(make_arguments(kind)))


def test_sizes_unsupported_by_tma_are_refused() -> None:
    with pytest.raises(RuntimeError, match="divisible by 8"):
        run(flashinfer_0_7, make_problem("none"), make_arguments(hidden=132))


# ------------------------------------------------------------------------------------ the library


def write_package(site: Path, core_source: str, init_source: str = "") -> None:
    """Write a package like FlashInfer, with the source of fused_moe/core.py and __init__.py."""
    folder = site / "flashinfer"
    (folder / "fused_moe").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "_build_meta.py").write_text('__version__ = "0.7.2.post1"\n')
    (folder / "fused_moe/core.py").write_text(core_source)
    (folder / "fused_moe/__init__.py").write_text(init_source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with library_site(tmp_path, monkeypatch, library, "flashinfer") as folder:
        yield folder


SUPPORTED_API = "def cutlass_fused_moe_workspace_size(use_fused_finalize): ...\n"


def test_library_is_loaded(site: Path) -> None:
    init_source = "cutlass_fused_moe = cutlass_fused_moe_workspace_size = ActivationType = 1\n"
    write_package(site, SUPPORTED_API, init_source)
    assert find_package(library.FLASHINFER).version == "0.7.2.post1"
    assert library.load().cutlass_fused_moe == 1


def test_missing_old_and_broken_libraries_are_refused(site: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"got nothing, need FlashInfer 0\.6\.16"):
        library.load()
    write_package(site, "def cutlass_fused_moe(): ...\n")
    with pytest.raises(
        ConfigurationError, match=r"unsupported flashinfer 0\.7\.2\.post1: no def cut"
    ):
        library.load()
    (site / "flashinfer/fused_moe/core.py").write_text(SUPPORTED_API)
    (site / "flashinfer/fused_moe/__init__.py").write_text("raise RuntimeError('no nvcc')")
    with pytest.raises(ConfigurationError, match="no nvcc, need a build for this torch"):
        library.load()


def test_an_activation_of_a_newer_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    older_activations = IntEnum("ActivationType", ["Swiglu", "Relu2"])
    monkeypatch.setattr(flashinfer_0_7, "ActivationType", older_activations)
    FlashInfer(BASE)
    with pytest.raises(UnsupportedError, match=r"got situ, need .* ActivationType\.Situ"):
        FlashInfer(replace(BASE, activation="situ:alpha=1.5,limit=0.7,up_first=true"))


def test_a_plan_declares_the_workspace_of_the_library() -> None:
    """A call with fewer tokens uses only some of the plan's workspace."""
    problem = replace(BASE, quant=STATIC)
    with stand_in_libraries():
        kernel = make_kernel("MoEPrepareAndFinalizeNoEP", FlashInfer, problem, machine=CPU)
        plan = kernel.plan()
        for tokens in (9, 4, 0):
            inputs = make_inputs(problem.with_tokens(tokens), "uniform", torch.device("cpu"))
            weights: ExpertWeights = inputs.weights
            routing: Routing = inputs.routing
            assert tuple(plan(inputs.x_TH, weights, routing).shape) == (tokens, 128)
