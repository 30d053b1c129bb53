"""MoeRunner: runs a layer's experts for an engine that has its own token dispatcher.

    runner = MoeRunner("triton", MoeRunnerConfig(num_experts=8, top_k=2, inplace=False))
    combine_input = runner.run(StandardDispatchOutput(x_TH, topk_output), MoeQuantInfo(w13, w2))

The name of the backend selects an experts part. If stages (`modular_kernel.runner`) are registered
under the name, a fused operation that replaces these stages is preferred. An argument that is not
supported raises an error. torch.compile and torch.export trace a call in the standard format as the
operator `torch.ops.modular_kernel.experts`. Calls in other formats break the graph.
"""

from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any

import torch
from torch.compiler import is_compiling

from modular_kernel.catalog import check, load_catalog
from modular_kernel.compatibility.support import Verdict
from modular_kernel.contracts import PermuteExpertsUnpermute
from modular_kernel.errors import (
    ConfigurationError,
    IncompatibleError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.integrations.fused_moe import flatten_topk_output
from modular_kernel.integrations.fused_moe_kernels import (
    FIELDS,
    check_config,
    count_values_per_element,
    get_kernel,
    make_weights,
)
from modular_kernel.integrations.fused_moe_options import (
    MoeRunnerConfig,
    Quantization,
    check_backend,
    quant_of,
)
from modular_kernel.integrations.runner_backends import (
    A2A_BACKENDS,
    BACKENDS,
    find_parts,
    has_stages,
    switches,
)
from modular_kernel.integrations.runner_checks import check_dispatched
from modular_kernel.integrations.runner_dispatched import run_received
from modular_kernel.integrations.runner_formats import (
    CombineInput,
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    DispatchOutput,
    StandardCombineInput,
    StandardDispatchOutput,
    expect_format,
)
from modular_kernel.operators.experts import call_experts_operator
from modular_kernel.operators.kernel_cache import NO_EP
from modular_kernel.operators.pairing import Pairing, serialize_layer_from_sizes
from modular_kernel.ops.routing_data import to_token_major
from modular_kernel.replay import modes
from modular_kernel.runner import FORMATS, FUSED, PERMUTES
from modular_kernel.settings import are_fused_operations_disabled
from modular_kernel.spec.problem import (
    DTYPES,
    ActivationFormat,
    IdSpace,
    Problem,
    parse_dtype,
)
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.spec.router import TritonKernelTopKOutput
from modular_kernel.tensors import (
    BatchedTokens,
    DispatchedRouting,
    ExpertWeights,
    Routing,
    StandardTokens,
)
from modular_kernel.utils.argument_checks import check_fields, expect
from modular_kernel.utils.tensor_checks import check_no_gradients, check_tensors

__all__ = ["BACKENDS", "MoeQuantInfo", "MoeRunner", "MoeRunnerConfig", "switches"]

# Backends that require a TritonKernelTopKOutput instead of a StandardTopKOutput.
_SORTED_BACKENDS = frozenset({"triton_kernel"})
_WEIGHT_FIELDS = tuple(field.name for field in fields(ExpertWeights))
_BATCHED = "BatchedPrepareAndFinalize"
_PADDED_SCHEMES = ("none", "fp8_w8a8_tensor", "fp8_w8a8_channel")


@dataclass(frozen=True)
class MoeQuantInfo:
    """Weights of this rank's experts, and their quantization.

    The names of tensors are those of `ExpertWeights`, with "13" instead of "1" and "_zp" instead of
    "_zero_point". `Quantization` describes the flags.

    w13_weight: (e, N, H).
    w2_weight: (e, H, I).
    expert_map: (E,) int32, which maps global ids to local ids. If None, ids are local.
    quant: name of a scheme, instead of the use_* flags.
    use_triton_kernels: whether the weights are transposed: w13_weight (e, H, N), w2_weight
        (e, I, H).
    """

    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    block_shape: list[int] | tuple[int, ...] | None = None
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w13_global_scale: torch.Tensor | None = None
    w2_global_scale: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    quant: str | None = None
    use_triton_kernels: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "MoeQuantInfo.")
        # Parsed here and not in a call, because torch.compile cannot trace the parser.
        parsed = None if self.quant is None else str(QuantScheme.parse(self.quant))
        object.__setattr__(self, "_parsed_quant", parsed)

    def options(self) -> Quantization:
        """Return the fields as keywords of `fused_experts`."""
        flags = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
        options: dict[str, Any] = {f"use_{flag}": getattr(self, f"use_{flag}") for flag in flags}
        same_names = (
            "per_channel_quant",
            "block_shape",
            "b2",
            "expert_map",
            "w2_scale",
            "w2_zp",
            "a2_scale",
        )
        options |= {name: getattr(self, name) for name in same_names}
        field_by_keyword = {
            "b1": "b13",
            "w1_scale": "w13_scale",
            "w1_zp": "w13_zp",
            "a1_scale": "a13_scale",
        }
        options |= {name: getattr(self, field) for name, field in field_by_keyword.items()}
        return options  # type: ignore[return-value]

    def scheme(self) -> str:
        """Return the quantization scheme, as in Problem.quant.

        Raises ConfigurationError if both `quant` and a flag are given.
        """
        flags_scheme = quant_of(self.options())
        if self.quant is None:
            return flags_scheme
        if flags_scheme != "none":
            raise ConfigurationError(
                "quant", got=f"{self.quant} and {flags_scheme}", need="either quant or a use_* flag"
            )
        scheme: str = self._parsed_quant  # type: ignore[attr-defined]
        return scheme


_INFO_FIELDS = tuple(field.name for field in fields(MoeQuantInfo))


class MoeRunner:
    """Runs the experts of a backend.

    runner_backend: a name in BACKENDS, the name of registered stages, or the name of an experts
        part.
    config: settings of the layer. Its sizes must match the tensors. With `inplace`, hidden_states
        are overwritten if they have the problem's dtype.
    fused: True uses fused operations. False uses the stages instead, for example to compare the
        results, and raises UnsupportedError if the backend has no stages. None means True, unless
        SGLANG_CI_DISABLE_MOE_FUSED_FUNC=1 is set and the backend has stages.
    padding: whether weights have additional columns after H and I, which are not read.
    quant: name of the quantization scheme. If it is given, the constructor raises UnsupportedError
        if no part of the backend supports the scheme, and IncompatibleError if the config has all
        sizes and the backend does not support the layer. If None, calls raise these errors.
    dtype: dtype of the results for quantized rows.
    fast_act, aiter: must be False.
    """

    def __init__(  # noqa: PLR0913  (one keyword for each switch of SGLang)
        self,
        runner_backend: str,
        config: MoeRunnerConfig,
        *,
        fused: bool | None = None,
        padding: bool = False,
        fast_act: bool = False,
        aiter: bool = False,
        quant: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        expect("config", config, MoeRunnerConfig)
        expect("fused", fused, bool | None)
        for name, value in {"padding": padding, "fast_act": fast_act, "aiter": aiter}.items():
            expect(name, value, bool)
        if fast_act:
            need = "False, because parts decide whether to fuse activation and quantization"
            raise UnsupportedError("fast_act", got=fast_act, need=need)
        if aiter:
            need = "False, because aiter is a library for AMD GPUs"
            raise UnsupportedError("aiter", got=aiter, need=need)
        self.runner_backend, self.config, self.dtype = runner_backend, config, parse_dtype(dtype)
        load_catalog()  # registers the stages and fused operations
        if fused is None:
            fused = not (are_fused_operations_disabled() and has_stages(runner_backend))
        self.fused, self.padding = fused, padding
        self._parts = find_parts(runner_backend, fused=fused)
        check_backend(config, runner_backend)
        self._pairings = {part: str(Pairing(NO_EP, part)) for part in self._parts.values()}
        self.quant = None if quant is None else str(QuantScheme.parse(quant))
        if self.quant is not None:
            self._check_quant(self.quant)

    def _check_quant(self, quant: str) -> None:
        """Raise an error if no part supports the scheme, or the layer if the sizes are known."""
        if None not in self._get_sizes():
            verdicts = self.verdicts(quant).values()
            refused = [verdict for verdict in verdicts if not verdict.ok]
            if len(refused) == len(self._parts):
                raise IncompatibleError(refused[0].pairing, refused[0].rejections)
            return
        schemes = {name for part in self._parts.values() for name in part.requires.schemes}
        if QuantScheme.parse(quant).name not in schemes:
            what = f"quant of backend {self.runner_backend!r}"
            raise UnsupportedError(what, got=quant, need=f"one of {', '.join(sorted(schemes))}")

    def run(self, dispatch_output: DispatchOutput, quant_info: MoeQuantInfo) -> CombineInput:
        """Run the experts on dispatched tokens, and return the result in the same format.

        Raises ConfigurationError if the backend has no part for the format, or if it requires
        another kind of router output; IncompatibleError if the part does not support the layer; and
        the InputErrors of a kernel call.
        """
        format = expect_format(dispatch_output, *self._parts)
        check_dispatched(dispatch_output)
        expect("quant_info", quant_info, MoeQuantInfo)
        # torch 2.11 does not trace `vars` of a frozen dataclass.
        info_fields = {name: getattr(quant_info, name) for name in _INFO_FIELDS}
        tensors = {n: v for n, v in info_fields.items() if isinstance(v, torch.Tensor)}
        check_tensors(tensors)
        check_no_gradients(tensors | {"hidden_states": dispatch_output.hidden_states})
        quant = quant_info.scheme()
        if self.quant is not None and quant != self.quant:
            raise ConfigurationError(
                "quant_info", got=quant, need=f"{self.quant}, as in the runner"
            )
        part = self._parts[format]
        if isinstance(dispatch_output, StandardDispatchOutput):
            routing = self._convert_routing(dispatch_output.topk_output)
            rows = self._run_standard(
                dispatch_output.hidden_states, routing, quant_info, quant, part
            )
            return StandardCombineInput(rows)
        if self.config.no_combine:
            need = "False, because the dispatcher's combine sums over top-k"
            raise ConfigurationError(f"no_combine of {format}", got=True, need=need)
        if quant_info.expert_map is not None:
            need = "None, because the dispatcher's ids are local"
            raise ConfigurationError(f"expert_map of {format}", got="a tensor", need=need)
        if isinstance(dispatch_output, DeepEPNormalDispatchOutput):
            received = dispatch_output
            routing = Routing(received.topk_weights, received.topk_ids)
            if received.hidden_states_scale is None:
                rows = self._run_standard(received.hidden_states, routing, quant_info, quant, part)
            else:
                rows = self._run_received(received, quant_info, quant, part)
            return DeepEPNormalCombineInput(rows, received.topk_ids, received.topk_weights)
        rows = self._run_received(dispatch_output, quant_info, quant, part)
        scale = self.config.scale
        weights = dispatch_output.topk_weights
        weights = weights if scale == 1 else weights * scale
        return DeepEPLLCombineInput(rows, dispatch_output.topk_ids, weights)

    def verdicts(self, quant: str = "none", tokens: int = 1) -> dict[str, Verdict]:
        """Return, by dispatch format, whether the part for the format supports the config's layer.

        quant: name of the quantization scheme.
        tokens: number of tokens.

        Raises ConfigurationError unless the config has all sizes.
        """
        experts, hidden, intermediate, top_k = self._get_sizes()
        if None in (experts, hidden, intermediate, top_k):
            need = "num_experts, hidden_size, intermediate_size_per_partition and top_k"
            raise ConfigurationError("config", got=self.config, need=need)
        local = self.config.num_local_experts or experts
        problem = Problem(
            tokens, hidden, intermediate, local, top_k, dtype=self.dtype, quant=quant,
            activation=self.config.activation_spec(),
            apply_router_weight_on_input=self.config.apply_router_weight_on_input,
            routed_scaling_factor=self.config.scale,
        )  # fmt: skip
        prepare_finalize_by_format = {
            ActivationFormat.STANDARD: NO_EP,
            ActivationFormat.BATCHED_EXPERTS: _BATCHED,
        }
        return {
            f: check(prepare_finalize_by_format[FORMATS[f]], part, problem)
            for f, part in self._parts.items()
        }

    def explain(self, quant: str = "none", tokens: int = 1) -> str:
        """Describe the part of each dispatch format, and why it can or cannot run."""
        lines = [f"backend {self.runner_backend}, quant {quant}"]
        for format, verdict in self.verdicts(quant, tokens).items():
            op = FUSED.find_fused_op(A2A_BACKENDS[format], self.runner_backend)
            description = "without stages"
            if op is not None and FORMATS[format] is op.unfused.requires.activation_format:
                staged = self._parts[format] is op.unfused
                description = "staged" if staged else f"fused, instead of {op.unfused.__name__}"
            elif (self.runner_backend, format) in PERMUTES.parts:
                description = "staged"
            lines.append(f"{format}: {self._parts[format].__name__}, {description}; {verdict}")
        lines += [f"{format}: no part" for format in A2A_BACKENDS if format not in self._parts]
        return "\n".join(lines)

    def _get_sizes(self) -> tuple[Any, ...]:
        config = self.config
        return (
            config.num_experts,
            config.hidden_size,
            config.intermediate_size_per_partition,
            config.top_k,
        )

    def _convert_routing(self, topk_output: object) -> Routing:
        """Return a router's output as a Routing.

        Raises ConfigurationError if the backend requires another kind of router output.
        """
        is_sorted = isinstance(topk_output, TritonKernelTopKOutput)
        if is_sorted != (self.runner_backend in _SORTED_BACKENDS):
            names = ("StandardTopKOutput", "TritonKernelTopKOutput")
            what = f"topk_output of backend {self.runner_backend!r}"
            raise ConfigurationError(what, got=names[is_sorted], need=names[not is_sorted])
        if isinstance(topk_output, TritonKernelTopKOutput):
            topk_output = to_token_major(topk_output)
        return Routing(*flatten_topk_output(topk_output, self.config))  # type: ignore[arg-type]

    def _make_weights(self, info: MoeQuantInfo, quant: str, hidden: int) -> ExpertWeights:
        w13, w2, options = info.w13_weight, info.w2_weight, info.options()
        for name, tensor in (("w13_weight", w13), ("w2_weight", w2)):
            if tensor.dim() != 3:
                raise ShapeError(name, got=tuple(tensor.shape), need="3 dimensions")
        if info.use_triton_kernels:
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        if self.padding:
            if quant.split(":")[0] not in _PADDED_SCHEMES:
                need = " or ".join(_PADDED_SCHEMES)
                raise UnsupportedError("padding", got=quant, need=need)
            intermediate = w13.shape[1] // (2 if self.config.activation_spec().gated else 1)
            if w13.shape[2] < hidden or w2.shape[2] < intermediate:
                got = f"{w13.shape[2]} columns in w13 and {w2.shape[2]} in w2"
                need = f">= {hidden} and >= {intermediate}"
                raise ShapeError("padded weights", got=got, need=need)
            w13, w2 = w13[:, :, :hidden], w2[:, :, :intermediate]
        extras = [options.get(name) for name in FIELDS.values()]
        weights = make_weights(w13, w2, extras, quant)  # type: ignore[arg-type]
        scales = info.w13_global_scale, info.w2_global_scale
        return replace(weights, w1_global_scale=scales[0], w2_global_scale=scales[1])

    def _make_checked_weights(
        self, info: MoeQuantInfo, quant: str, x: torch.Tensor
    ) -> ExpertWeights:
        weights, config = self._make_weights(info, quant, x.shape[-1]), self.config
        if info.expert_map is None and config.num_local_experts is not None:
            config = replace(config, num_experts=config.num_local_experts)  # local ids
        check_config(
            config,
            x,
            weights.w1,
            weights.w2,
            info.options(),
            values_per_element=count_values_per_element(quant),
        )
        return weights

    def _run_standard(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        info: MoeQuantInfo,
        quant: str,
        part: type[PermuteExpertsUnpermute],
    ) -> torch.Tensor:
        """Run a kernel without token exchange. Returns (T, H), or (T, K, H) with no_combine."""
        config = self.config
        if config.inplace and config.no_combine:
            need = "inplace=False, because a (T, K, H) output does not fit into x"
            raise ConfigurationError("inplace", got="True with no_combine=True", need=need)
        weights = self._make_checked_weights(info, quant, x_TH)
        if is_compiling():
            return self._run_operator(x_TH, routing, weights, quant, part)
        kernel_options = (
            quant,
            str(config.activation_spec()),
            config.apply_router_weight_on_input,
            config.scale,
            config.combine,
            config.inplace,
            config.chunk_tokens,
        )
        return get_kernel(x_TH, weights, routing, kernel_options, (part,))(x_TH, weights, routing)

    def _run_operator(
        self,
        x_TH: torch.Tensor,
        routing: Routing,
        weights: ExpertWeights,
        quant: str,
        part: type[PermuteExpertsUnpermute],
    ) -> torch.Tensor:
        """Compute the result of `_run_standard` with an operator that torch.compile can trace."""
        config, expert_map = self.config, weights.expert_map
        weights_TK, ids_TK = routing.topk_weights_TK, routing.topk_ids_TK
        if torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad):
            got = "x or topk_weights that require grad"
            need = "a call under torch.no_grad() or torch.inference_mode()"
            raise UnsupportedError("gradients", got=got, need=need)
        local_experts = weights.w1.shape[0]
        experts = local_experts if expert_map is None else expert_map.shape[0]
        intermediate = weights.w2.shape[2] * count_values_per_element(quant)
        layer = serialize_layer_from_sizes(
            (x_TH.shape[1], intermediate, experts, ids_TK.shape[1]),
            x_TH.dtype,
            quant,
            str(config.activation_spec()),
            bias=weights.b1 is not None or weights.b2 is not None,
            expert_map=expert_map is not None,
            local_experts=None if expert_map is None else index(local_experts),
            apply_router_weight_on_input=config.apply_router_weight_on_input,
            routed_scaling_factor=config.scale,
            combine=config.combine.name,
            chunk_tokens=config.chunk_tokens,
        )
        names = [name for name in _WEIGHT_FIELDS if getattr(weights, name) is not None]
        params = [getattr(weights, name) for name in names]
        rows = call_experts_operator(
            x_TH, ids_TK, weights_TK, params, ",".join(names), layer, self._pairings[part]
        )
        return x_TH.copy_(rows) if config.inplace else rows

    def _run_received(
        self,
        received: DeepEPNormalDispatchOutput | DeepEPLLDispatchOutput,
        info: MoeQuantInfo,
        quant: str,
        part: type[PermuteExpertsUnpermute],
    ) -> torch.Tensor:
        """Run the experts on the rows that an external dispatcher has received."""
        if is_compiling():
            reason = (
                f"a call in the format {received.format} is not traced: the graph breaks at "
                "MoeRunner.run"
            )
            return modes.run_with_graph_break(
                self._run_received, reason, received, info, quant, part
            )
        x, scale, ids = received.hidden_states, received.hidden_states_scale, received.topk_ids
        weights = self._make_checked_weights(info, quant, x)
        is_batched = isinstance(received, DeepEPLLDispatchOutput)
        if is_batched and len(x) != len(weights.w1):
            need = f"{len(weights.w1)} experts, as in w13_weight"
            raise ShapeError("hidden_states", got=f"{len(x)} experts", need=need)
        config = self.config
        problem = Problem(
            tokens=x.shape[-2],
            hidden=x.shape[-1],
            intermediate=weights.w2.shape[2] * count_values_per_element(quant),
            experts=weights.w1.shape[0],
            top_k=ids.shape[1],
            dtype=x.dtype if x.dtype in DTYPES.values() else self.dtype,
            quant=quant,
            activation=config.activation_spec(),
            bias=weights.b1 is not None or weights.b2 is not None,
            apply_router_weight_on_input=config.apply_router_weight_on_input,
            routed_scaling_factor=1.0 if is_batched else config.scale,
        )
        if isinstance(received, DeepEPLLDispatchOutput):
            return run_received(part, problem, BatchedTokens(x, received.masked_m, scale), weights)
        invalid_count = torch.zeros(1, dtype=torch.int32, device=x.device)
        routing = DispatchedRouting(
            received.topk_weights, ids, IdSpace.LOCAL, problem.experts, None, invalid_count
        )
        return run_received(part, problem, StandardTokens(x, routing, scale), weights)
