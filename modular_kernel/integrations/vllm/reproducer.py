"""Writes the lines of a reproducer that convert the weights and call an experts class of vLLM."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from modular_kernel.integrations.engine import EngineCase
from modular_kernel.integrations.reproducer import EngineLines, write_expert_map, write_program
from modular_kernel.spec.problem import Problem

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"


@dataclass(frozen=True)
class Source:
    """An experts class, and how it is called.

    module, name: module and name of the class.
    activation: value of vLLM's MoEActivation.
    options: limit, alpha and beta of the activation, and betas of situ.
    device: "cpu" or "cuda".
    max_rows: largest number of rows of an expert, or None if rows are not grouped by expert.
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
    """Return the source of the program.

    The program exits with 1 if the relative RMS error exceeds `bound`.
    """
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
    if problem.expert_map or source.options:
        lines.insert(0, "from dataclasses import replace")
    if problem.quant != "none":
        scheme = _SCHEMES[problem.scheme.name]
        lines.append(f"from {_FUSED_MOE}.oracle import {scheme.oracle} as oracle")
        if not _keeps_checkpoint_layout(problem, source):
            lines.insert(0, "from types import SimpleNamespace")
            lines += scheme.imports
    if source.device == "cuda":
        lines.append("from vllm.v1.worker.workspace import init_workspace_manager")
    return lines


def _write_call(problem: Problem, source: Source) -> list[str]:
    rows, rank = source.max_rows, 1 if problem.expert_map else 0
    batched_arguments = "" if rows is None else f", max_num_tokens={rows}, num_dispatchers=1"
    # vLLM's dispatch of grouped rows would otherwise count the tokens of remote experts, too.
    experts = problem.experts if rows is None else problem.e
    prepare = "" if rows is None else f"{rows}, {problem.e}, 1, {rank}"
    conversion = _write_conversion(problem, source) if problem.quant != "none" else []
    workspaces = []
    if source.device == "cuda":
        workspaces.append('init_workspace_manager(torch.device("cuda", 0))')
    config, configs = _write_config(problem, source), []
    if not (conversion and workspaces):  # otherwise, the program would have more than 10 statements
        config, configs = "config", [f"config = {config}"]
    return [
        *conversion,
        *workspaces,
        "set_current_vllm_config(VllmConfig()).__enter__()",
        *configs,
        f"out = mk.FusedMoEKernel(Prepare({prepare}), Experts(",
        f"    {config},",
        f"    {_write_quant_config(problem, source)}{batched_arguments},",
        ")).apply(",
        f'    x.clone(), w1, w2, router, ids, MoEActivation("{source.activation}"), {experts},',
        f"    {write_expert_map(problem, source.device)}, {problem.apply_router_weight_on_input},",
        ")",
    ]


def _write_config(problem: Problem, source: Source) -> str:
    """Return an expression for the FusedMoEConfig, with its fields in their order."""
    parallel = "c.FusedMoEParallelConfig.make_no_parallel()"
    if problem.expert_map:
        ranks = problem.experts // problem.e
        parallel = f"replace({parallel}, use_ep=True, ep_size={ranks}, ep_rank=1)"
    sizes = f"{problem.experts}, {problem.top_k}, {problem.hidden}, {problem.intermediate}"
    sizes += f", {problem.e}, {problem.experts}"
    field_by_option = {name: f"swiglu_{name}" for name in ("limit", "alpha", "beta")}
    field_by_option |= {f"situ_{x}beta": f"activation_situ_{x}beta" for x in ("", "linear_")}
    options = "".join(
        f", {field_by_option[name]}={value}" for name, value in source.options.items()
    )
    options += ", has_bias=True" if problem.bias else ""
    activation = f'MoEActivation("{source.activation}"), "{source.device}"'
    method = "c.RoutingMethodType.TopK"
    return f"c.FusedMoEConfig({sizes}, {activation}, {method}, {parallel}, x.dtype{options})"


def _write_quant_config(problem: Problem, source: Source) -> str:
    """Return an expression for the FusedMoEQuantConfig, with biases and the activation's options.

    The parameters of vLLM's functions have different names, and the function for int8 has none.
    """
    biases = "w1_bias={0}1, w2_bias={0}2" if problem.bias else ""
    biases = biases.format("p" if _converts_biases(problem, source) else "b")
    if problem.quant == "none":
        config = f"c.FusedMoEQuantConfig.make({biases})"
    else:
        arguments = _SCHEMES[problem.scheme.name].write_arguments(problem, source)
        config = f"oracle.{arguments}{', ' * bool(biases)}{biases})"
    field_by_option = {"limit": "clamp_limit", "alpha": "alpha", "beta": "beta"}
    options = {
        field_by_option[n]: value for n, value in source.options.items() if n in field_by_option
    }
    if not options:
        return config
    fields = ", ".join(f"gemm1_{name}={value}" for name, value in options.items())
    return f"replace({config}, {fields})"


# -------------------------------------------------------------------------------- conversions

# Backends that read weights in the layout of the checkpoint.
_CHECKPOINT_LAYOUT_BACKENDS = ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS")


def _keeps_checkpoint_layout(problem: Problem, source: Source) -> bool:
    """Return whether vLLM's conversion returns the weights unchanged."""
    is_8_bit = problem.scheme.name.startswith(("fp8_w8a8", "int8_w8a8"))
    return not source.backend or (
        is_8_bit and source.backend.rpartition(".")[2] in _CHECKPOINT_LAYOUT_BACKENDS
    )


def _converts_biases(problem: Problem, source: Source) -> bool:
    """Return whether vLLM's conversion returns the biases p1 and p2 in another order."""
    is_group = problem.scheme.granularity == "group" and "MARLIN" in source.backend
    return problem.bias and (is_group or problem.scheme.name.startswith("mxfp4"))


def _write_conversion(problem: Problem, source: Source) -> list[str]:
    """Return the lines of a statement that converts the weights, or nothing."""
    write_conversion = _SCHEMES[problem.scheme.name].write_conversion
    if write_conversion is None or _keeps_checkpoint_layout(problem, source):
        return []
    sizes = f"num_experts={problem.e}, hidden_size={problem.hidden}"
    sizes += f", intermediate_size_per_partition={problem.intermediate}"
    block = ", weight_block_size=[128, 128]" if problem.scheme.granularity == "block" else ""
    targets, function, arguments = write_conversion(problem, source)
    return [
        f"{targets} = oracle.{function}(",
        f"    oracle.{source.backend},",
        f"    SimpleNamespace({sizes},",
        f"        params_dtype=x.dtype, orig_dtype=x.dtype, w13_weight=w1, w2_weight=w2{block}),",
        f"    {arguments},",
        ")",
    ]


def _write_static_scales(problem: Problem, source: Source) -> tuple[str, str]:
    """Return the static scales of the activations of both GEMMs."""
    if not problem.scheme.static:
        return "None", "None"
    if problem.scheme.name.startswith("nvfp4"):
        return f"g1.new_full(({problem.e},), 0.002)", f"g2.new_full(({problem.e},), 0.01)"
    return "s1.new_tensor([0.0125])", "s2.new_tensor([0.05])"


def _convert_fp8(problem: Problem, source: Source) -> tuple[str, str, str]:
    static = ", ".join(_write_static_scales(problem, source))
    weights = "w1, w2, s1, s2"
    return weights, "convert_to_fp8_moe_kernel_format", f"{weights}, {static}"


def _configure_fp8(problem: Problem, source: Source) -> str:
    static = ", ".join(_write_static_scales(problem, source))
    block = ", block_shape=[128, 128]" if problem.scheme.granularity == "block" else ""
    if problem.scheme.granularity == "channel":
        block = ", per_act_token_quant=True, per_out_ch_quant=True"
    return f"make_fp8_moe_quant_config(oracle.{source.backend}, s1, s2, {static}{block}"


def _configure_int8(problem: Problem, source: Source) -> str:
    backend = f"oracle.{source.backend}"
    return f"make_int8_moe_quant_config({backend}, s1, s2, per_act_token_quant=True"


def _convert_groups(problem: Problem, source: Source) -> tuple[str, str, str]:
    group, bits = problem.scheme.group[0], 4 if problem.scheme.packed else 8
    arguments = f'num_bits={bits}, type="int", strategy="group", group_size={group}'
    tensors, optional_tensors = "w1.view(torch.int32), w2.view(torch.int32), s1, s2", "None, None"
    if source.is_gptq:
        tensors = ", ".join(f"w{n}.view(torch.int32).mT.contiguous()" for n in (1, 2))
        tensors += ", s1.mT.contiguous(), s2.mT.contiguous()"
        optional_tensors = f"*2 * [ids.new_empty({problem.e}, 0)], None, None"
    targets = "w1, w2, s1, s2, *_"
    if _converts_biases(problem, source):
        targets, optional_tensors = f"{targets}, p1, p2", f"{optional_tensors}, b1, b2"
    arguments = (
        f"QuantizationArgs({arguments}, symmetric=True), None, {tensors}, {optional_tensors}"
    )
    return targets, "convert_to_wna16_moe_kernel_format", arguments


def _configure_groups(problem: Problem, source: Source) -> str:
    group, bits = problem.scheme.group[0], 4 if problem.scheme.packed else 8
    return f"make_wna16_moe_quant_config(s1, s2, {group}, {bits}"


def _convert_mxfp4(problem: Problem, source: Source) -> tuple[str, str, str]:
    convert = "convert_weight_to_mxfp4_moe_kernel_format"
    if source.activation == "swigluoai":
        convert = "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"
    targets, biases = ("p1, p2", "b1, b2") if problem.bias else ("*_", "None, None")
    return f"w1, w2, s1, s2, {targets}", convert, f"w1, w2, s1, s2, {biases}"


def _configure_mxfp4(problem: Problem, source: Source) -> str:
    return f"make_mxfp4_moe_quant_config(oracle.{source.backend}, s1, s2"


def _convert_nvfp4(problem: Problem, source: Source) -> tuple[str, str, str]:
    a1, a2 = _write_static_scales(problem, source)
    targets = "w1, s1, g1, a1, w2, s2, g2, a2"
    arguments = f"w1, s1, g1, {a1}, w2, s2, g2, {a2}, {problem.act.gated}"
    return targets, "convert_to_nvfp4_moe_kernel_format", arguments


def _configure_nvfp4(problem: Problem, source: Source) -> str:
    return f"make_nvfp4_moe_quant_config(oracle.{source.backend}, s1, s2, g1, g2, a1, a2"


@dataclass(frozen=True)
class _Scheme:
    """What vLLM does with weights in a scheme.

    oracle: name of the module in vLLM's folder `oracle`.
    write_conversion: returns the variables that a conversion sets, its name, and its arguments
        after the layer. None if vLLM runs the layout of checkpoints.
    write_arguments: returns the call that makes the FusedMoEQuantConfig, without its end.
    imports: import statements for the conversion.
    """

    oracle: str
    write_conversion: Callable[[Problem, Source], tuple[str, str, str]] | None
    write_arguments: Callable[[Problem, Source], str]
    imports: tuple[str, ...] = ()


_FP8 = _Scheme("fp8", _convert_fp8, _configure_fp8)
_GROUPS = _Scheme(
    "int_wna16",
    _convert_groups,
    _configure_groups,
    ("from compressed_tensors.quantization import QuantizationArgs",),
)
_NVFP4 = _Scheme("nvfp4", _convert_nvfp4, _configure_nvfp4)
_SCHEMES: Mapping[str, _Scheme] = {
    "fp8_w8a8_tensor": _FP8,
    "fp8_w8a8_channel": _FP8,
    "fp8_w8a8_block": _FP8,
    "int8_w8a8_channel": _Scheme("int8", None, _configure_int8),
    "int8_w8a16_group": _GROUPS,
    "int4_w4a16_group": _GROUPS,
    "mxfp4_w4a16": _Scheme("mxfp4", _convert_mxfp4, _configure_mxfp4),
    "nvfp4_w4a16": _NVFP4,
    "nvfp4_w4a4": _NVFP4,
}
