"""Writes the lines of a reproducer that convert weights and call an experts class with vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modular_kernel.integrations.engine import EngineCase
from modular_kernel.integrations.reproducer import EngineLines, write_expert_map, write_program
from modular_kernel.spec.problem import Problem

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class Source:
    """An experts class, and how it is called.

    module, name: of the class.
    activation: value of vLLM's MoEActivation.
    options: limit, alpha and beta of the activation, and betas of situ.
    device: "cpu" or "cuda".
    max_rows: largest number of rows of an expert, if rows are grouped by expert; else None.
    backend: name of the oracle's backend that converts the weights, such as
        "Fp8MoeBackend.TRITON"; empty for weights that are not converted.
    is_gptq: whether integers with a scale per group are converted from GPTQ's layout.
    """

    module: str
    name: str
    activation: str
    options: Mapping[str, float]
    device: str
    max_rows: int | None
    backend: str = ""
    is_gptq: bool = False


def write_reproducer(case: EngineCase, source: Source, bound: float) -> str:
    """Return the program. It exits with 1 if the relative RMS error is above `bound`."""
    lines = EngineLines(_write_imports(case.problem, source), _write_call(case.problem, source))
    return write_program(case, lines, source.device, bound)


def _write_imports(problem: Problem, source: Source) -> list[str]:
    prepare = "no_dp_ep", "MoEPrepareAndFinalizeNoDPEPModular"
    if source.max_rows is not None:
        prepare = "batched", "BatchedPrepareAndFinalize"
    lines = [
        "from vllm.config import VllmConfig, set_current_vllm_config",
        f"from {_FUSED_MOE} import config as c, modular_kernel as mk",
        f"from {_FUSED_MOE}.activation import MoEActivation",
        f"from {_FUSED_MOE}.prepare_finalize.{prepare[0]} import {prepare[1]} as Prepare",
        f"from {source.module} import {source.name} as Experts",
    ]
    if problem.quant != "none":
        oracle = _CONVERSIONS[problem.scheme.name][0]
        lines.append(f"from {_FUSED_MOE}.oracle import {oracle} as oracle")
    if source.device == "cuda":
        lines.append("from vllm.v1.worker.workspace import init_workspace_manager")
    return lines


def _write_call(problem: Problem, source: Source) -> list[str]:
    rows, rank = source.max_rows, 1 if problem.expert_map else 0
    grouped = "" if rows is None else f", max_num_tokens={rows}, num_dispatchers=1"
    parallel = ["parallel = c.FusedMoEParallelConfig.make_no_parallel()"]
    if rank:
        fields = "parallel.use_ep, parallel.ep_size, parallel.ep_rank"
        parallel.append(f"{fields} = True, {problem.experts // problem.e}, 1")
    quant = ["quant = c.FusedMoEQuantConfig.make()"]
    if problem.quant != "none":
        quant = _CONVERSIONS[problem.scheme.name][1](problem, source)
    # vLLM's dispatch of grouped rows would otherwise count the tokens of remote experts, too.
    experts = problem.experts if rows is None else problem.e
    arguments = f"config.activation, {experts}, {write_expert_map(problem)}"
    arguments += f", {problem.apply_router_weight_on_input}"
    prepare = "" if rows is None else f"{rows}, {problem.e}, 1, {rank}"
    # The fields of FusedMoEConfig in their order.
    sizes = f"{problem.experts}, {problem.top_k}, {problem.hidden}, {problem.intermediate}"
    sizes += f", {problem.e}, {problem.experts}"
    call = f"MoEActivation({source.activation!r}), {source.device!r}, c.RoutingMethodType.TopK"
    bias = ", has_bias=True" if problem.bias else ""
    return [
        *(["init_workspace_manager(torch.device('cuda', 0))"] if source.device == "cuda" else []),
        "set_current_vllm_config(VllmConfig()).__enter__()",
        "; ".join(parallel),
        f"config = c.FusedMoEConfig({sizes}, {call}, parallel, x.dtype{bias})",
        *quant,
        *_write_options(problem, source.options),
        f"kernel = mk.FusedMoEKernel(Prepare({prepare}), Experts(config, quant{grouped}))",
        f"out = kernel.apply(x.clone(), w1, w2, router, ids, {arguments})",
    ]


def _write_options(problem: Problem, options: Mapping[str, float]) -> list[str]:
    """Return lines that set the activation's options and the biases."""
    names = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", "beta": "swiglu_beta"}
    names |= {f"situ_{x}beta": f"activation_situ_{x}beta" for x in ("", "linear_")}
    lines = [f"config.{names[name]} = {value}" for name, value in options.items()]
    lines += [
        f"quant.gemm1_{'clamp_limit' if name == 'limit' else name} = {value}"
        for name, value in options.items()
        if name in ("limit", "alpha", "beta")
    ]
    if problem.bias:
        lines.append("quant._w1.bias, quant._w2.bias = b1, b2")
    return ["; ".join(lines)] if lines else []


# -------------------------------------------------------------------------------- conversions


def _convert_fp8(problem: Problem, source: Source) -> list[str]:
    scheme = problem.scheme
    static = "a1, a2" if scheme.static else "None, None"
    block = "[128, 128]" if scheme.granularity == "block" else "None"
    per_row = scheme.granularity == "channel"
    layer = "layer = torch.nn.Module()"
    if scheme.granularity == "block":
        layer += "; layer.weight_block_size = [128, 128]"
    convert, weights = "oracle.convert_to_fp8_moe_kernel_format", "w1, w2, s1, s2"
    rows = f"None, None, {block}, {per_row}, {per_row}"
    return [
        f"{layer}; backend = oracle.{source.backend}",
        f"{weights} = {convert}(backend, layer, {weights}, {static})",
        f"quant = oracle.make_fp8_moe_quant_config(backend, s1, s2, {static}, {rows})",
    ]


def _convert_int8(problem: Problem, source: Source) -> list[str]:
    return [
        f"backend = oracle.{source.backend}",
        "w1, w2 = oracle.convert_to_int8_moe_kernel_format(backend, w1, w2)",
        "quant = oracle.make_int8_moe_quant_config(backend, s1, s2, per_act_token_quant=True)",
    ]


def _convert_groups(problem: Problem, source: Source) -> list[str]:
    group, bits = problem.scheme.group[0], 4 if problem.scheme.packed else 8
    make = f"quant = oracle.make_wna16_moe_quant_config(s1, s2, {group}, {bits})"
    if not source.backend:  # the class reads the bytes of rows
        return [make]
    words, order = "w1.view(torch.int32), w2.view(torch.int32), s1, s2", ""
    if source.is_gptq:
        words = ", ".join(f"w{n}.view(torch.int32).mT.contiguous()" for n in (1, 2))
        words += ", s1.mT.contiguous(), s2.mT.contiguous()"
        order = f", *2 * [torch.empty({problem.e}, 0, dtype=torch.int32)]"
    arguments = f"num_bits={bits}, type='int', strategy='group', group_size={group}"
    sizes = f"{problem.e}, {problem.hidden}, {problem.intermediate}"
    convert = f"oracle.convert_to_wna16_moe_kernel_format(oracle.{source.backend}, layer"
    return [
        "from compressed_tensors.quantization import QuantizationArgs",
        f"layer, arguments = torch.nn.Module(), QuantizationArgs({arguments}, symmetric=True)",
        f"layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition = {sizes}",
        f"w1, w2, s1, s2, *_ = {convert}, arguments, None, {words}{order})",
        make,
    ]


def _convert_mxfp4(problem: Problem, source: Source) -> list[str]:
    convert = "convert_weight_to_mxfp4_moe_kernel_format"
    if source.activation == "swigluoai":
        convert = "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"
    biases = "b1, b2" if problem.bias else "None, None"
    return [
        f"layer, backend = torch.nn.Module(), oracle.{source.backend}",
        f"w1, w2, s1, s2, *_ = oracle.{convert}(backend, layer, w1, w2, s1, s2, {biases})",
        "quant = oracle.make_mxfp4_moe_quant_config(backend, s1, s2)",
    ]


def _convert_nvfp4(problem: Problem, source: Source) -> list[str]:
    scales = ("a1", "a2") if problem.scheme.static else ("None", "None")
    arguments = f"w1, s1, g1, {scales[0]}, w2, s2, g2, {scales[1]}, {problem.act.gated}"
    convert = "oracle.convert_to_nvfp4_moe_kernel_format"
    return [
        f"layer, backend = torch.nn.Module(), oracle.{source.backend}",
        f"converted = {convert}(backend, layer, {arguments})",
        "w1, s1, g1, a1, w2, s2, g2, a2 = converted",
        "quant = oracle.make_nvfp4_moe_quant_config(backend, s1, s2, g1, g2, a1, a2)",
    ]


# Scheme -> name of the module in vLLM's folder `oracle`, and a function that writes the lines that
# convert the weights and make the configuration `quant`.
_CONVERSIONS: Mapping[str, tuple[str, Callable[[Problem, Source], list[str]]]] = {
    "fp8_w8a8_tensor": ("fp8", _convert_fp8),
    "fp8_w8a8_channel": ("fp8", _convert_fp8),
    "fp8_w8a8_block": ("fp8", _convert_fp8),
    "int8_w8a8_channel": ("int8", _convert_int8),
    "int8_w8a16_group": ("int_wna16", _convert_groups),
    "int4_w4a16_group": ("int_wna16", _convert_groups),
    "mxfp4_w4a16": ("mxfp4", _convert_mxfp4),
    "nvfp4_w4a16": ("nvfp4", _convert_nvfp4),
    "nvfp4_w4a4": ("nvfp4", _convert_nvfp4),
}
