"""Writes programs that show a wrong result of an experts class with vLLM and torch alone.

A program makes random weights in the scheme's format, converts them with vLLM's functions, calls
the class in vLLM's FusedMoEKernel, and compares the output with plain torch in float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from modular_kernel.integrations.engine import EngineCase
from modular_kernel.spec.problem import Problem, dtype_name

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


_EXPERT_MAP = "torch.where(torch.arange(E) < first, -1, torch.arange(E) - first).int()"
# h (N,) -> a (I,), in float64. Limits and factors are filled in.
_ACTIVATIONS = {
    "silu": "g, u = h.chunk(2); a = F.silu({gate}) * {up}",
    "gelu": "g, u = h.chunk(2); a = F.gelu(g) * u",
    "gelu_tanh": "g, u = h.chunk(2); a = F.gelu(g, approximate='tanh') * u",
    "swigluoai": (
        "g, u = h[::2].clamp(max=7), h[1::2].clamp(-7, 7); a = g * (1.702 * g).sigmoid() * (u + 1)"
    ),
    "swigluoai_uninterleave": (
        "g, u = h.chunk(2); g = {gate}; a = g * ({alpha} * g).sigmoid() * ({up} + {beta})"
    ),
    "swiglustep": "g, u = h.chunk(2); a = F.silu(g).clamp(max=7) * u.clamp(-7, 7)",
    "situ": (
        "g, u = h.chunk(2); a = {situ_beta} * (g / {situ_beta}).tanh() * g.sigmoid() "
        "* {situ_linear_beta} * (u / {situ_linear_beta}).tanh()"
    ),
    "silu_no_mul": "a = F.silu(h)",
    "gelu_no_mul": "a = F.gelu(h)",
    "gelu_tanh_no_mul": "a = F.gelu(h, approximate='tanh')",
    "relu2_no_mul": "a = h.relu() ** 2",
}


def write_reproducer(case: EngineCase, source: Source, bound: float) -> str:
    """Return the program. It exits with 1 if the relative RMS error is above `bound`."""
    problem = case.problem
    formatted = _FORMATS[problem.scheme.name]
    sizes = problem.tokens, problem.hidden, problem.intermediate, problem.experts, problem.top_k
    lines = [
        f"# {source.name}, {problem.scheme}, {case.activation}, {case.shape}",
        *_write_imports(source, formatted),
        f"T, H, I, E, K = {', '.join(map(str, sizes))}",
        f"N, dtype = {'2 * I' if problem.act.gated else 'I'}, torch.{dtype_name(problem.dtype)}",
        f"e, first = {problem.e}, {_get_first(problem)}  # experts on this rank",
        f"torch.manual_seed(0); torch.set_default_device({source.device!r})",
        "x, router = torch.randn(T, H).to(dtype), torch.rand(T, K).to(dtype).float()",
        f"ids = {_write_ids(case)}",
        *formatted.make_weights(problem),
        "b1, b2 = (torch.randn(e, n).to(dtype) / 2 for n in (N, H))" if problem.bias else "",
        "with set_current_vllm_config(VllmConfig()):",
        *(f"    {line}" for line in _write_call(case, source, formatted)),
        *_write_reference(problem, source),
        "error = float((out.double() - expected).norm() / expected.norm())",
        f"print(f'relative RMS error {{error:.2e}}, allowed {bound:.2e}')",
        f"raise SystemExit(not error <= {bound:.3e})",
    ]
    return "\n".join(line for line in lines if line.strip()) + "\n"


def _get_first(problem: Problem) -> int:
    """Return the first expert on this rank."""
    return problem.e if problem.expert_map else 0


def _write_reference(problem: Problem, source: Source) -> list[str]:
    on_input, bias = problem.apply_router_weight_on_input, problem.bias
    x = "router[t, k] * x[t].double()" if on_input else "x[t].double()"
    y = f"(a @ d2[i].double().T{' + b2[i].double()' if bias else ''})"
    return [
        "expected = torch.zeros(T, H, dtype=torch.float64)",
        "for t, k in ((t, k) for t in range(T) for k in range(K)):",
        "    i = int(ids[t, k]) - first",
        "    if not 0 <= i < e: continue" if problem.expert_map else "",
        f"    h = {x} @ d1[i].double().T{' + b1[i].double()' if bias else ''}",
        f"    {_write_activation(source)}",
        f"    expected[t] += {'' if on_input else 'router[t, k] * '}{y}",
    ]


def _write_imports(source: Source, formatted: "_Format") -> list[str]:
    prepare = "no_dp_ep", "MoEPrepareAndFinalizeNoDPEPModular"
    if source.max_rows is not None:
        prepare = "batched", "BatchedPrepareAndFinalize"
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        "from vllm.config import VllmConfig, set_current_vllm_config",
        f"from {_FUSED_MOE} import config as c, modular_kernel as mk",
        f"from {_FUSED_MOE}.activation import MoEActivation",
        f"from {_FUSED_MOE}.prepare_finalize.{prepare[0]} import {prepare[1]} as Prepare",
        f"from {source.module} import {source.name} as Experts",
    ]
    if formatted.oracle:
        lines.append(f"from {_FUSED_MOE}.oracle import {formatted.oracle} as oracle")
    if source.device == "cuda":
        lines.append("from vllm.v1.worker.workspace import init_workspace_manager")
    return lines


def _write_ids(case: EngineCase) -> str:
    if case.routing == "all_to_one":
        return "torch.arange(K, dtype=torch.int32).repeat(T, 1) + first"
    experts = "torch.rand(T, E)"
    if case.routing == "empty_experts":
        experts = "(torch.rand(T, E) - torch.arange(E) % 2)"
    return f"{experts}.topk(K).indices.int()"


def _write_activation(source: Source) -> str:
    limit = source.options.get("limit")
    values = {
        "gate": "g" if limit is None else f"g.clamp(max={limit})",
        "up": "u" if limit is None else f"u.clamp(-{limit}, {limit})",
    }
    return _ACTIVATIONS[source.activation].format_map({**source.options, **values})


def _write_call(case: EngineCase, source: Source, formatted: "_Format") -> list[str]:
    problem, options = case.problem, source.options
    names = {"limit": "swiglu_limit", "alpha": "swiglu_alpha", "beta": "swiglu_beta"}
    names |= {f"situ_{x}beta": f"activation_situ_{x}beta" for x in ("", "linear_")}
    rows = source.max_rows
    grouped = "" if rows is None else f", max_num_tokens={rows}, num_dispatchers=1"
    rank = 1 if problem.expert_map else 0
    return [
        "init_workspace_manager(torch.device('cuda', 0))" if source.device == "cuda" else "",
        "parallel = c.FusedMoEParallelConfig.make_no_parallel()",
        "parallel.use_ep, parallel.ep_size, parallel.ep_rank = True, E // e, 1" if rank else "",
        "config = c.FusedMoEConfig(",
        "    num_experts=E, experts_per_token=K, hidden_dim=H, intermediate_size=I,",
        "    num_local_experts=e, num_logical_experts=E, moe_parallel_config=parallel,",
        f"    activation=MoEActivation({source.activation!r}), device={source.device!r},",
        f"    in_dtype=dtype, routing_method=c.RoutingMethodType.TopK, has_bias={problem.bias})",
        *(f"config.{names[k]} = {v}" for k, v in options.items()),
        *formatted.make_config(problem, source),
        *(
            f"quant.gemm1_{'clamp_limit' if k == 'limit' else k} = {v}"
            for k, v in options.items()
            if k in ("limit", "alpha", "beta")
        ),
        "quant._w1.bias, quant._w2.bias = b1, b2" if problem.bias else "",
        f"prepare = Prepare({'' if rows is None else f'{rows}, e, 1, {rank}'})",
        f"kernel = mk.FusedMoEKernel(prepare, Experts(config, quant{grouped}))",
        f"expert_map = {_EXPERT_MAP if problem.expert_map else None}",
        # vLLM's dispatch would otherwise count the tokens of remote experts, too.
        f"num_experts = {'E' if rows is None else 'e'}",
        "out = kernel.apply(x.clone(), w1, w2, router, ids, config.activation, num_experts,",
        f"    expert_map, {problem.apply_router_weight_on_input})",
    ]


@dataclass(frozen=True)
class _Format(ABC):
    """How a program makes weights of a scheme.

    oracle: name of the module in vLLM's folder `oracle`; empty for unquantized weights.
    """

    oracle: str = ""

    def make_weights(self, problem: Problem) -> list[str]:
        """Return lines that make w1 and w2, their scales s1 and s2, and their values d1 and d2."""
        return [
            f"w{n}, s{n}, d{n} = make({rows}, {columns})"
            for n, rows, columns in (("1", "N", "H"), ("2", "H", "I"))
        ]

    @abstractmethod
    def make_config(self, problem: Problem, source: Source) -> list[str]:
        """Return lines that convert the weights and make the configuration `quant`."""


class _Unquantized(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        return [
            "w1, w2 = (torch.randn(e, n, k).to(dtype) / k**0.5 for n, k in ((N, H), (H, I)))",
            "d1, d2 = w1, w2",
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        return ["quant = c.FusedMoEQuantConfig.make()"]


class _Fp8(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        scheme = problem.scheme
        shapes = {"tensor": "e", "channel": "e, n, 1", "block": "e, n // 128, k // 128"}
        expand = {"tensor": "s[:, None, None]", "channel": "s"}.get(
            scheme.granularity, "s.repeat_interleave(128, 1).repeat_interleave(128, 2)"
        )
        static = "torch.tensor([0.0125]), torch.tensor([0.05])" if scheme.static else "None, None"
        return [
            "def make(n, k):",
            "    w = torch.randn(e, n, k).to(torch.float8_e4m3fn)",
            f"    s = (torch.rand({shapes[scheme.granularity]}) + 0.5) / k**0.5",
            f"    return w, s, w.float() * {expand}",
            *super().make_weights(problem),
            f"a1, a2 = {static}",
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        scheme = problem.scheme
        block = "[128, 128]" if scheme.granularity == "block" else "None"
        per_row = scheme.granularity == "channel"
        return [
            "layer = torch.nn.Module()",
            "layer.weight_block_size = [128, 128]" if scheme.granularity == "block" else "",
            f"backend = oracle.{source.backend}",
            "w1, w2, s1, s2 = oracle.convert_to_fp8_moe_kernel_format(",
            "    backend, layer, w1, w2, s1, s2, a1, a2)",
            "quant = oracle.make_fp8_moe_quant_config(backend, s1, s2, a1, a2,",
            f"    None, None, {block}, {per_row}, {per_row})",
        ]


class _Int8(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        return [
            "def make(n, k):",
            "    w = torch.randint(-127, 128, (e, n, k), dtype=torch.int8)",
            "    s = (torch.rand(e, n, 1) + 0.5) / (73 * k**0.5)",
            "    return w, s, w.float() * s",
            *super().make_weights(problem),
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        return [
            f"backend = oracle.{source.backend}",
            "w1, w2 = oracle.convert_to_int8_moe_kernel_format(backend, w1, w2)",
            "quant = oracle.make_int8_moe_quant_config(backend, s1, s2, per_act_token_quant=True)",
        ]


class _Groups(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        scheme, group = problem.scheme, problem.scheme.group[0]
        width, std, values = "k", 74, "w.float() - 128"
        if scheme.packed:
            width, std = "k // 2", 5
            values = "torch.stack((w & 15, w >> 4), -1).flatten(2).float() - 8"
        return [
            "def make(n, k):",
            f"    w = torch.randint(0, 256, (e, n, {width}), dtype=torch.uint8)",
            f"    s = ((torch.rand(e, n, k // {group}) + 0.5) / ({std} * k**0.5)).to(dtype)",
            f"    return w, s, ({values}) * s.float().repeat_interleave({group}, 2)",
            *super().make_weights(problem),
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        scheme, group = problem.scheme, problem.scheme.group[0]
        bits = 4 if scheme.packed else 8
        make = f"quant = oracle.make_wna16_moe_quant_config(s1, s2, {group}, {bits})"
        if not source.backend:  # the class reads the bytes of rows
            return [make]
        words, order = "w1.view(torch.int32), w2.view(torch.int32), s1, s2", ""
        if source.is_gptq:
            words = ", ".join(f"w{n}.view(torch.int32).mT.contiguous()" for n in (1, 2))
            words += ", s1.mT.contiguous(), s2.mT.contiguous()"
            order = ", *2 * [torch.empty(e, 0, dtype=torch.int32)]"
        return [
            "from compressed_tensors.quantization import QuantizationArgs",
            f"arguments = QuantizationArgs(num_bits={bits}, type='int', strategy='group',",
            f"    group_size={group}, symmetric=True)",
            "layer = torch.nn.Module()",
            "layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition = e, H, I",
            "w1, w2, s1, s2, *_ = oracle.convert_to_wna16_moe_kernel_format(",
            f"    oracle.{source.backend}, layer, arguments, None,",
            f"    {words}{order})",
            make,
        ]


_E2M1 = "torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])"


class _Mxfp4(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        return [
            "def make(n, k):",
            "    w = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)",
            "    s = torch.randint(120, 124, (e, n, k // 32), dtype=torch.uint8)",
            "    codes = torch.stack((w & 15, w >> 4), -1).flatten(2).long()",
            "    scale = (2.0 ** (s.float() - 127)).repeat_interleave(32, 2)",
            f"    return w, s, {_E2M1}[codes] * scale",
            *super().make_weights(problem),
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        convert = "convert_weight_to_mxfp4_moe_kernel_format"
        if source.activation == "swigluoai":
            convert = "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"
        biases = "b1, b2" if problem.bias else "None, None"
        return [
            "layer = torch.nn.Module()",
            f"backend = oracle.{source.backend}",
            f"w1, w2, s1, s2, *_ = oracle.{convert}(",
            f"    backend, layer, w1, w2, s1, s2, {biases})",
            "quant = oracle.make_mxfp4_moe_quant_config(backend, s1, s2)",
        ]


class _Nvfp4(_Format):
    def make_weights(self, problem: Problem) -> list[str]:
        static = "torch.full((e,), 0.002), torch.full((e,), 0.01)"
        return [
            "def make(n, k):",
            "    w = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)",
            "    s = (torch.rand(e, n, k // 16) * 100 + 50).to(torch.float8_e4m3fn)",
            "    g = (torch.rand(e) + 0.5) / (300 * k**0.5)",
            "    codes = torch.stack((w & 15, w >> 4), -1).flatten(2).long()",
            f"    d = {_E2M1}[codes] * s.float().repeat_interleave(16, 2) * g[:, None, None]",
            "    return w, (s, g), d",
            *super().make_weights(problem),
            f"a1, a2 = {static if problem.scheme.static else 'None, None'}",
        ]

    def make_config(self, problem: Problem, source: Source) -> list[str]:
        return [
            f"layer, backend = torch.nn.Module(), oracle.{source.backend}",
            "w1, s1, g1, a1, w2, s2, g2, a2 = oracle.convert_to_nvfp4_moe_kernel_format(",
            f"    backend, layer, w1, *s1, a1, w2, *s2, a2, {problem.act.gated})",
            "quant = oracle.make_nvfp4_moe_quant_config(backend, s1, s2, g1, g2, a1, a2)",
        ]


_FORMATS: Mapping[str, _Format] = {
    "none": _Unquantized(),
    "fp8_w8a8_tensor": _Fp8("fp8"),
    "fp8_w8a8_channel": _Fp8("fp8"),
    "fp8_w8a8_block": _Fp8("fp8"),
    "int8_w8a8_channel": _Int8("int8"),
    "int8_w8a16_group": _Groups("int_wna16"),
    "int4_w4a16_group": _Groups("int_wna16"),
    "mxfp4_w4a16": _Mxfp4("mxfp4"),
    "nvfp4_w4a16": _Nvfp4("nvfp4"),
    "nvfp4_w4a4": _Nvfp4("nvfp4"),
}
