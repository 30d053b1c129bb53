"""Every compatibility rule refuses the values that it must, and no others.

`CASES` has at least one case for each rule. A case names one field and two values. With the value
`refused`, the rule refuses the pairing, and no other rule does. With the value `accepted`, the
pairing is valid. The tests fail for a rule that never refuses, that always refuses, or that has no
case.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modular_kernel.catalog import check, make_kernel
from modular_kernel.compatibility.rules import RULES, judge, judge_part
from modular_kernel.compatibility.support import (
    ExpertsRequirements,
    PrepareFinalizeRequirements,
    Rejection,
    Verdict,
)
from modular_kernel.contracts import PermuteExpertsUnpermute, PrepareAndFinalize
from modular_kernel.errors import IncompatibleError
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import (
    ActivationFormat,
    ActivationSpec,
    Combine,
    Machine,
    Parallel,
    Problem,
    Reduce,
    RowContents,
)
from modular_kernel.utils.package_probes import PackageProbe

BATCHED, STANDARD = ActivationFormat.BATCHED_EXPERTS, ActivationFormat.STANDARD
PREPARE, EXPERTS = "FakePrepare", "FakeExperts"

# A valid combination: the requirements of two parts, a problem, and a machine. No rule refuses it.
# Cases change fields.
VALID_INPUTS: dict[str, Any] = {
    "pf": PrepareFinalizeRequirements(
        activation_format=STANDARD,
        reduces=frozenset(Reduce),
        keep_topk=True,
        world_sizes=(1, None),
        linear_placement=False,
        asynchronous=True,
        graph_capturable=True,
        batch_invariant=True,
        lora=True,
    ),
    "ex": ExpertsRequirements(
        activation_format=STANDARD,
        reduce=Reduce.NOOP,
        keep_topk=True,
        expert_map=True,
        chunking=True,
        tf32=True,
        schemes=frozenset({"none", "fp8_w8a8_block", "int8_w8a16_group"}),
        quantizes_input=True,
        graph_capturable=True,
        batch_invariant=True,
        lora=True,
    ),
    "problem": Problem(tokens=16, hidden=64, intermediate=128, experts=8, top_k=2),
    "machine": Machine("cuda", (9, 0), frozenset({"triton"})),
}
CPU = Machine("cpu")
LORA = "adapters=2,rank=8"


@dataclass(frozen=True)
class Case:
    """A field with a value that `rule` must refuse and a value that it must accept.

    path: the field, such as "ex.bias".
    parties: for each rejection, the parts, "problem" or "machine" that it names, in order.
    got, need: substrings of each rejection.
    given: further fields of VALID_INPUTS that are changed for both values.
    """

    rule: str
    path: str
    refused: object
    accepted: object
    parties: tuple[tuple[str, ...], ...]
    got: str
    need: str
    given: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{self.path}={self.refused}"

    def verdict(self, value: object) -> Verdict:
        """Return the verdict on VALID_INPUTS, changed by `given`, and with `value` at `path`."""
        changes: dict[str, dict[str, object]] = {key: {} for key in VALID_INPUTS}
        for path, new_value in {**self.given, self.path: value}.items():
            key, _, name = path.partition(".")
            changes[key][name] = new_value
        inputs = {key: replace(base, **changes[key]) for key, base in VALID_INPUTS.items()}
        part_classes = make_part_classes(inputs["pf"], inputs["ex"])
        return judge(*part_classes, inputs["problem"], inputs["machine"])


def make_part_classes(
    pf: PrepareFinalizeRequirements, ex: ExpertsRequirements
) -> tuple[type[PrepareAndFinalize], type[PermuteExpertsUnpermute]]:
    """Return two part classes that have no code, only these requirements."""
    return (
        type(PREPARE, (PrepareAndFinalize,), {"requires": pf}),
        type(EXPERTS, (PermuteExpertsUnpermute,), {"requires": ex}),
    )


PAIR, PREPARE_AND_PROBLEM, EXPERTS_AND_PROBLEM = (
    ((PREPARE, EXPERTS),),
    ((PREPARE, "problem"),),
    ((EXPERTS, "problem"),),
)
PREPARE_AND_MACHINE, EXPERTS_AND_MACHINE = ((PREPARE, "machine"),), ((EXPERTS, "machine"),)
BF16_FP32 = frozenset({torch.bfloat16, torch.float32})
FP8_BLOCK = frozenset({"fp8_w8a8_block"})
FP8 = {"problem.quant": "fp8_w8a8_block", "problem.hidden": 128}
INT4 = {"problem.quant": "int4_w4a16_group", "ex.schemes": {"int4_w4a16_group"}}
REPACKED = {"problem.quant": "mxfp4_w4a16:repacked=true", "ex.schemes": {"mxfp4_w4a16"}}
PREQUANTIZED = FP8 | {"ex.quantizes_input": False}
INVARIANT = {"problem.batch_invariant": True}
COPIES = Placement.linear(8, 2).with_copies({0: (1,)})
ON_INPUT = {"problem.apply_router_weight_on_input": True}
BATCHED_PAIR = {"pf.activation_format": BATCHED, "ex.activation_format": BATCHED}
INTERPRETED = {
    "machine.device": "cpu",
    "machine.arch": None,
    "pf.triton": True,
    "ex.triton": True,
}
LINEAR = {"pf.linear_placement": True, "problem.expert_map": True}
TWO_RANKS = {"problem.parallel": Parallel(2)}
ROUND_ROBIN = Placement.round_robin(8, 2)
INTERLEAVED = ActivationSpec("silu", interleaved=True)
UP_FIRST = ActivationSpec("silu", up_first=True)
REQUIRED_TEXT_BY_FILE = (("__init__.py", "gemm"),)
PROBE = PackageProbe(
    "fake_package", ("fake_package",), REQUIRED_TEXT_BY_FILE, "fake_package 2 (gemm)", "build it"
)
OTHER_PACKAGES = (("fake_package", "unsupported fake_package 1.0: no gemm in __init__.py"),)
NEEDS_PROBED_PACKAGE = {
    "ex.packages": ("fake_package",),
    "ex.providers": (PROBE,),
    "machine.others": OTHER_PACKAGES,
}
CAPACITY_MULTIPLE_OF_128 = {"ex.capacity_multiple": 128, "problem.expert_map": True}
LIMIT = 8192  # elements: 16 tokens x top-2 x max(2 x 128, 64)

# fmt: off
CASES = (
    Case("format", "ex.activation_format", BATCHED, STANDARD, PAIR, "standard", "batched_experts"),
    Case("format", "pf.activation_format", BATCHED, STANDARD, PAIR, "batched_experts", "standard"),
    Case("device", "ex.devices", {"cpu"}, {"cuda"}, EXPERTS_AND_MACHINE, "cuda", "cpu"),
    Case("device", "pf.devices", {"cpu"}, {"cuda"}, PREPARE_AND_MACHINE, "cuda", "cpu"),
    Case("device", "machine.interpreter", False, True, PREPARE_AND_MACHINE + EXPERTS_AND_MACHINE,
         "cpu", "GPU", INTERPRETED),
    Case("arch", "ex.min_arch", (10, 0), (9, 0), EXPERTS_AND_MACHINE, "9.0", ">= 10.0"),
    Case("arch", "pf.min_arch", (9, 1), None, PREPARE_AND_MACHINE, "9.0", ">= 9.1"),
    Case("archs", "ex.archs", {(10, 0), (8, 0)}, {(9, 0)}, EXPERTS_AND_MACHINE, "9.0",
         "8.0 or 10.0"),
    Case("package", "pf.packages", ("deep_ep",), ("triton",), PREPARE_AND_MACHINE,
         "not importable", "deep_ep"),
    Case("package", "ex.packages", ("cutlass",), (), EXPERTS_AND_MACHINE, "not importable",
         "cutlass"),
    Case("package", "machine.packages", frozenset({"triton"}), frozenset({"fake_package"}),
         EXPERTS_AND_MACHINE, "unsupported fake_package 1.0: no gemm in __init__.py",
         "fake_package 2 (gemm)", NEEDS_PROBED_PACKAGE),
    Case("dtype", "ex.dtypes", {torch.float16}, BF16_FP32, EXPERTS_AND_PROBLEM, "bfloat16",
         "float16"),
    Case("dtype", "problem.dtype", torch.float16, torch.float32, PREPARE_AND_PROBLEM, "float16",
         "bfloat16, float32", {"pf.dtypes": BF16_FP32}),
    Case("fp32_precision", "ex.tf32", False, True, EXPERTS_AND_PROBLEM, "tf32", "ieee",
         {"problem.fp32_precision": "tf32"}),
    Case("top_k", "problem.top_k", 33, 32, PREPARE_AND_PROBLEM + EXPERTS_AND_PROBLEM, "33",
         "1 to 32"),
    Case("top_k", "ex.top_k", (4, 8), (2, 8), EXPERTS_AND_PROBLEM, "2", "4 to 8"),
    Case("hidden", "pf.hidden_multiple", 128, 32, PREPARE_AND_PROBLEM, "64", "a multiple of 128"),
    Case("hidden", "ex.hidden_sizes", {2048, 96}, {64}, EXPERTS_AND_PROBLEM, "64",
         "one of 96, 2048"),
    Case("intermediate", "ex.intermediate_multiple", 48, 64, EXPERTS_AND_PROBLEM, "128",
         "a multiple of 48"),
    Case("quant", "problem.quant", "mxfp4_w4a16", "int8_w8a16_group", EXPERTS_AND_PROBLEM,
         "mxfp4_w4a16", "fp8_w8a8_block, int8_w8a16_group, none"),
    Case("dispatch_quant", "pf.can_defer_quant", False, True, PAIR, "always quantizes",
         "unquantized", FP8),
    Case("dispatch_quant", "pf.dispatch_schemes", frozenset(), FP8_BLOCK, PAIR, "none",
         "dispatches fp8_w8a8_block", PREQUANTIZED),
    Case("scale_layout", "ex.scale_layout", "column_major", "row_major", PAIR, "row_major",
         "column_major", PREQUANTIZED | {"pf.dispatch_schemes": FP8_BLOCK}),
    Case("quant_block", "problem.hidden", 192, 256, EXPERTS_AND_PROBLEM, "hidden=192", "group 128",
         FP8 | {"ex.whole_blocks": True}),
    Case("quant_block", "problem.intermediate", 96, 256, EXPERTS_AND_PROBLEM, "intermediate=96",
         "group 128", FP8 | {"ex.whole_blocks": True}),
    Case("blocks", "problem.quant", "fp8_w8a8_block:block=64x128", "fp8_w8a8_block",
         EXPERTS_AND_PROBLEM, "64x128", "128x128", {"problem.hidden": 128,
         "ex.blocks": frozenset({(128, 128)})}),
    Case("packing", "problem.hidden", 65, 66, EXPERTS_AND_PROBLEM, "hidden=65", "a multiple of 2",
         INT4),
    Case("packing", "problem.intermediate", 127, 128, EXPERTS_AND_PROBLEM, "intermediate=127",
         "of 2", INT4),
    Case("packing", "problem.hidden", 36, 40, EXPERTS_AND_PROBLEM, "hidden=36", "a multiple of 8",
         REPACKED),
    Case("min_tokens", "problem.tokens", 127, 128, EXPERTS_AND_PROBLEM, "127", ">= 128",
         {"ex.min_tokens": 128}),
    Case("max_experts", "problem.experts", 9, 8, EXPERTS_AND_PROBLEM, "9", "<= 8",
         {"ex.max_experts": 8}),
    Case("addressing", "ex.max_elements", LIMIT - 1, LIMIT, EXPERTS_AND_PROBLEM, str(LIMIT),
         "<= 8191"),
    Case("addressing", "problem.chunk_tokens", 9, 8, EXPERTS_AND_PROBLEM, "4608", "<= 4096",
         {"ex.max_elements": LIMIT // 2}),
    Case("world_size", "pf.world_sizes", (2, 8), (1, 8), PREPARE_AND_PROBLEM, "1", "2 to 8"),
    Case("world_size", "pf.world_sizes", (2, None), (1, None), PREPARE_AND_PROBLEM, "1", ">= 2"),
    Case("world_size", "problem.parallel", Parallel(4), Parallel(2), PREPARE_AND_PROBLEM, "4",
         "1 to 2", {"pf.world_sizes": (1, 2), "problem.expert_map": True}),
    Case("hosts", "pf.one_host", True, False, PREPARE_AND_PROBLEM, "2 hosts", "at most 1",
         {"problem.parallel": Parallel(2, ranks_per_host=1), "problem.expert_map": True}),
    Case("hosts", "pf.ranks_per_host", 3, 4, PREPARE_AND_PROBLEM, "4 ranks on a host", "at most 3",
         {"problem.parallel": Parallel(4), "problem.expert_map": True}),
    Case("hosts", "pf.full_hosts", True, False, PREPARE_AND_PROBLEM, "2 on each of 2 hosts",
         "4 ranks on each", {"problem.parallel": Parallel(4, ranks_per_host=2),
         "problem.expert_map": True, "pf.ranks_per_host": 4}),
    Case("hosts", "pf.graph_across_hosts", False, True, PREPARE_AND_PROBLEM, "graph=True",
         "graph=False", {"problem.parallel": Parallel(2, ranks_per_host=1),
         "problem.expert_map": True, "problem.graph": True}),
    Case("placement", "problem.experts", 9, 8, PREPARE_AND_PROBLEM, "experts=9",
         "a multiple of world_size 2", LINEAR | TWO_RANKS),
    Case("placement", "problem.parallel", Parallel(2, ROUND_ROBIN), Parallel(2),
         PREPARE_AND_PROBLEM, "another", "linear", LINEAR),
    Case("capacity", "problem.tokens", 9, 8, PREPARE_AND_PROBLEM, "tokens=9", "<= 8",
         {"pf.max_tokens": 8}),
    Case("capacity_multiple", "problem.tokens", 66, 64, PAIR, "132 rows", "a multiple of 128",
         BATCHED_PAIR | TWO_RANKS | CAPACITY_MULTIPLE_OF_128),
    Case("capacity_multiple", "pf.capacity_unit", 2, 4, PAIR, "8196 rows", "a multiple of 8",
         BATCHED_PAIR | TWO_RANKS | {"ex.capacity_multiple": 8, "problem.tokens": 4098}
         | {"problem.expert_map": True}),
    Case("capacity_multiple", "pf.rounds_capacity", False, True, PAIR, "16 rows", "of 128",
         BATCHED_PAIR | {"ex.capacity_multiple": 128}),
    Case("ids_dtype", "problem.ids_dtype", torch.int32, torch.int64, PREPARE_AND_PROBLEM, "int32",
         "int64", {"pf.topk_indices_dtype": torch.int64}),
    Case("reduce", "pf.reduces", {Reduce.DELEGATE}, {Reduce.NOOP}, PAIR, f"noop left by {EXPERTS}",
         "one of delegate"),
    Case("keep_topk", "pf.keep_topk", False, True, PREPARE_AND_PROBLEM, "topk_weighted", "sum",
         {"problem.combine": Combine.TOPK_WEIGHTED}),
    Case("keep_topk", "ex.keep_topk", False, True, EXPERTS_AND_PROBLEM, "topk_unweighted", "sum",
         {"problem.combine": Combine.TOPK_UNWEIGHTED}),
    Case("router_weight_on_input", "problem.top_k", 2, 1, PREPARE_AND_PROBLEM, "top_k=2", "top_k=1",
         ON_INPUT | {"pf.multiplies_input": True}),
    Case("router_weight_on_input", "pf.multiplies_input", False, True, PREPARE_AND_PROBLEM,
         "batched rows", "weights applied by prepare", ON_INPUT | BATCHED_PAIR
         | {"problem.top_k": 1}),
    Case("router_weight_on_input", "ex.weight_on_input", False, True, EXPERTS_AND_PROBLEM,
         "on input", "on output", ON_INPUT),
    Case("activation", "problem.activation", "gelu", "silu", EXPERTS_AND_PROBLEM, "gelu",
         "relu2, silu", {"ex.activations": {"silu", "relu2"}}),
    Case("activation", "problem.activation", INTERLEAVED, "silu", EXPERTS_AND_PROBLEM,
         "interleaved", "gate rows first", {"ex.interleaved": False}),
    Case("activation", "problem.activation", UP_FIRST, "silu", EXPERTS_AND_PROBLEM, "up rows",
         "gate rows first"),
    Case("activation", "ex.up_first", True, False, EXPERTS_AND_PROBLEM, "gate rows first",
         "up rows first"),
    Case("bias", "ex.bias", False, True, EXPERTS_AND_PROBLEM, "b1 and b2", "no biases",
         {"problem.bias": True}),
    Case("padding", "pf.padding", RowContents.UNDEFINED, RowContents.ZERO, PAIR,
         "padding rows with undefined", "padding rows that are zero", {"ex.skips_padding": False}),
    Case("invalid_rows", "ex.invalid_rows", RowContents.UNDEFINED, RowContents.ZERO, PAIR,
         "undefined rows", "zero rows", {"ex.reduce": Reduce.CONTIGUOUS}),
    Case("invalid_rows", "ex.reduce", Reduce.DELEGATE, Reduce.NOOP, PAIR, "undefined rows", "zero"),
    Case("expert_map", "ex.expert_map", False, True, EXPERTS_AND_PROBLEM, "an expert_map",
         "no expert_map", {"problem.expert_map": True}),
    Case("expert_map", "problem.local_experts", 4, 8, PREPARE_AND_PROBLEM, "4 of 8 experts",
         "an expert_map"),
    Case("expert_map", "pf.localizes_ids", False, True, PREPARE_AND_PROBLEM, "4 of 8 experts",
         "an expert_map", {"problem.local_experts": 4}),
    Case("chunking", "ex.chunking", False, True, EXPERTS_AND_PROBLEM, "chunk_tokens=8", "None",
         {"problem.chunk_tokens": 8}),
    Case("max_received", "pf.bounds_received", False, True, PREPARE_AND_PROBLEM, "max_received=8",
         "None", {"problem.max_received": 8}),
    Case("inplace", "ex.inplace", False, True, EXPERTS_AND_PROBLEM, "not inplace", "inplace",
         {"problem.inplace": True}),
    Case("inplace", "pf.inplace", False, True, PREPARE_AND_PROBLEM, "not inplace", "inplace",
         {"problem.inplace": True}),
    Case("graph", "ex.graph_capturable", False, True, EXPERTS_AND_PROBLEM, "not graph",
         "graph_capturable", {"problem.graph": True}),
    Case("graph", "pf.graph_capturable", False, True, PREPARE_AND_PROBLEM, "not graph",
         "graph_capturable", {"problem.graph": True}),
    Case("deterministic", "ex.deterministic", False, True, EXPERTS_AND_PROBLEM, "not",
         "deterministic", {"problem.deterministic": True}),
    Case("deterministic", "pf.deterministic", False, True, PREPARE_AND_PROBLEM, "not",
         "deterministic", {"problem.deterministic": True}),
    Case("batch_invariant", "ex.batch_invariant", False, True, EXPERTS_AND_PROBLEM,
         "depend on the other tokens", "batch_invariant", INVARIANT),
    Case("batch_invariant", "pf.batch_invariant", False, True, PREPARE_AND_PROBLEM,
         "depend on the other tokens", "batch_invariant", INVARIANT),
    Case("batch_invariant", "problem.quant", "fp8_w8a8_tensor", "fp8_w8a8_tensor:static=true",
         (("problem",),), "which computes one activation scale from all tokens", "static",
         INVARIANT | {"ex.schemes": {"fp8_w8a8_tensor"}}),
    Case("batch_invariant", "problem.parallel", Parallel(2, COPIES), Parallel(2),
         (("problem",),), "copies of experts", "one rank", INVARIANT | {"pf.localizes_ids": True}),
    Case("asynchronous", "pf.asynchronous", False, True, PREPARE_AND_PROBLEM,
         "no prepare_no_receive", "prepare_no_receive", {"problem.asynchronous": True}),
    Case("lora", "ex.lora", False, True, EXPERTS_AND_PROBLEM, LORA, "no adapters",
         {"problem.lora": LORA}),
    Case("lora", "pf.lora", False, True, PREPARE_AND_PROBLEM, LORA, "no adapters",
         {"problem.lora": LORA}),
    Case("lora", "problem.quant", "int4_w4a16_act_order", "int4_w4a16_group", (("problem",),),
         "int4_w4a16_act_order", "no act_order",
         {"problem.lora": LORA, "ex.schemes": {"int4_w4a16_act_order", "int4_w4a16_group"}}),
)
# fmt: on
CASES_BY_RULE = {
    rule: [case for case in CASES if case.rule == rule] for rule in {c.rule for c in CASES}
}


def test_every_rule_has_a_case() -> None:
    assert set(CASES_BY_RULE) == set(RULES)


def test_the_unchanged_inputs_are_valid() -> None:
    part_classes = make_part_classes(VALID_INPUTS["pf"], VALID_INPUTS["ex"])
    assert judge(*part_classes, VALID_INPUTS["problem"], VALID_INPUTS["machine"]).ok


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_refuses_the_value(case: Case) -> None:
    verdict = case.verdict(case.refused)
    assert not verdict.ok
    assert [r.rule for r in verdict.rejections] == [case.rule] * len(case.parties)
    assert tuple(r.parties for r in verdict.rejections) == case.parties
    for rejection in verdict.rejections:
        assert case.got in rejection.got
        assert case.need in rejection.need
        for string in (case.rule, *rejection.parties, rejection.got, rejection.need):
            assert string in str(verdict)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule_accepts_the_value(case: Case) -> None:
    assert case.verdict(case.accepted).rejections == ()


def test_several_rules_are_all_reported() -> None:
    pf, ex = make_part_classes(
        replace(VALID_INPUTS["pf"], max_tokens=8),
        replace(VALID_INPUTS["ex"], bias=False, min_arch=(10, 0), hidden_multiple=128),
    )
    verdict = judge(pf, ex, replace(VALID_INPUTS["problem"], bias=True), VALID_INPUTS["machine"])
    assert [r.rule for r in verdict.rejections] == ["arch", "hidden", "capacity", "bias"]
    for rule in ("arch", "hidden", "capacity", "bias"):
        assert f"[{rule}]" in str(verdict)


def test_a_part_can_add_a_rule() -> None:
    pf, ex = make_part_classes(VALID_INPUTS["pf"], VALID_INPUTS["ex"])
    rejection = Rejection("FakeExperts.moon", (EXPERTS, "machine"), "full moon", "new moon")

    def reject_tokens(cls: type, problem: Problem, machine: Machine) -> tuple[Rejection, ...]:
        return (rejection,) if problem.tokens else ()

    ex.extra_rejections = classmethod(reject_tokens)  # type: ignore[assignment]
    problem, machine = VALID_INPUTS["problem"], VALID_INPUTS["machine"]
    assert judge(pf, ex, problem, machine).rejections == (rejection,)
    assert judge(pf, ex, problem.with_tokens(0), machine).ok


def test_a_pairing_is_refused_before_construction() -> None:
    """A part's constructor may call a vendor library, so rules must be checked first."""

    def fail_construction(self: object, *_: object) -> None:
        raise AssertionError("constructed")

    pf, ex = make_part_classes(
        replace(VALID_INPUTS["pf"], max_tokens=8), replace(VALID_INPUTS["ex"], bias=False)
    )
    for part_class in (pf, ex):
        part_class.__init__ = fail_construction  # type: ignore[misc]
        part_class.__abstractmethods__ = frozenset()
    problem = replace(VALID_INPUTS["problem"], bias=True)
    with pytest.raises(IncompatibleError) as caught:
        make_kernel(pf, ex, problem, machine=VALID_INPUTS["machine"])
    assert [r.rule for r in caught.value.rejections] == ["capacity", "bias"]
    with pytest.raises(AssertionError, match="constructed"):
        make_kernel(pf, ex, replace(problem, tokens=8, bias=False), machine=VALID_INPUTS["machine"])


def test_an_unavailable_part_states_every_reason() -> None:
    requires = replace(
        VALID_INPUTS["ex"], triton=True, min_arch=(10, 0), packages=("cutlass", "deep_ep")
    )
    on_cpu = judge_part(EXPERTS, requires, CPU)
    assert [r.rule for r in on_cpu] == ["device", "package", "package"]
    on_gpu = judge_part(EXPERTS, requires, VALID_INPUTS["machine"])
    assert [(r.rule, r.need) for r in on_gpu] == [
        ("arch", ">= 10.0"),
        ("package", "cutlass"),
        ("package", "deep_ep"),
    ]
    assert judge_part(EXPERTS, VALID_INPUTS["ex"], VALID_INPUTS["machine"]) == ()
    assert [
        r.need for r in judge_part(PREPARE, replace(VALID_INPUTS["pf"], packages=("x",)), CPU)
    ] == ["x"]


def test_the_hint_for_a_package_that_is_not_on_an_index_names_its_sources() -> None:
    problem = Problem(8, 256, 128, 8, 2, parallel=Parallel(2))
    machine = Machine("cuda", (9, 0), frozenset())  # without packages
    hints = {
        rejection.need: rejection.hint
        for part in ("DeepEPHTPrepareAndFinalize", "PplxPrepareAndFinalize")
        for rejection in check(part, "TritonExperts", problem, machine).rejections
        if rejection.rule == "package"
    }
    assert hints["triton"] == "pip install triton"
    deep_ep_hint = hints["DeepEP 1.2 with deep_ep_cpp, or DeepEP 2 with deep_ep._C"]
    assert deep_ep_hint.startswith("build DeepEP from https://github.com/deepseek-ai/DeepEP")
    assert "pip install" not in deep_ep_hint + hints["pplx_kernels"]


def test_every_declared_requirement_is_read() -> None:
    root = Path(__file__).parents[2]
    support = root / "modular_kernel" / "compatibility" / "support.py"
    names_read = set[str]()
    for package in ("modular_kernel", "prepare_finalize", "experts"):
        for path in root.joinpath(package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute):
                    names_read.add(node.attr)
                elif isinstance(node, ast.Constant) and path != support:
                    # `make_property_rule` passes names to getattr.
                    names_read.add(str(node.value))
    for requirements in (PrepareFinalizeRequirements, ExpertsRequirements):
        assert {field.name for field in fields(requirements)} <= names_read
