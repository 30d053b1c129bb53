"""Layers of public libraries, for `make bench` and `mk bench --peer tools/bench_peers.py`.

- vLLM's fused experts on its Triton kernels (bf16, fp8 by channel, fp8 by block, int4 by group),
  its DeepGEMM and CUTLASS experts, and its Marlin kernels (int4 by group, mxfp4)
- triton_kernels with SwiGLU fused into the first GEMM (bf16, and mxfp4 in vLLM's swizzled layout),
  with the interface of v3.5.1, which vLLM ships
- FlashInfer's CUTLASS layers (bf16, fp8 by block, mxfp4)

Weights are preprocessed (quantized, transposed, interleaved) in the untimed setup.
"""

import sys
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec

import torch
import triton
import triton.language as tl

from modular_kernel.bench.candidates import Layer
from modular_kernel.measure.cases import quantize

_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization.utils"
_BLOCK = 128
_MIN_DEEPGEMM_TOKENS = 128  # the limit that vLLM itself applies
_DEEPGEMM_COLUMNS = 1024  # hidden elements per program of vLLM's kernel that sums rows
_FLASHINFER_MOE = "flashinfer.fused_moe"
# With this many tokens or more, calls take milliseconds, and the autotuner would take minutes.
_MIN_LARGE_TOKENS = 4096


def _is_plain(problem):
    """Return whether the problem is a bf16 SwiGLU layer without options, as all peers support."""
    is_plain_swiglu = problem.act.kind == "silu" and not problem.bias and not problem.expert_map
    return (
        is_plain_swiglu and problem.dtype is torch.bfloat16 and problem.routed_scaling_factor == 1.0
    )


class LayerPeer(Layer):
    """Base class of peers.

    needs: modules that must be installed.
    blocks: whether H and I must be multiples of 128.
    """

    needs = ("vllm",)
    blocks = False

    def refusal(self, problem):
        if not _is_plain(problem):
            return "plain bf16 SwiGLU layers only"
        if self.blocks and (problem.hidden % _BLOCK or problem.intermediate % _BLOCK):
            return f"hidden and intermediate must be multiples of {_BLOCK}"
        return None

    def quantize_weights(self, problem, weights):
        """Return w1, w2 and their scales in the layer's scheme. Channel scales are (e, rows, 1)."""
        stored = quantize(weights, replace(problem, quant=self.quant))
        if self.quant == "fp8_w8a8_channel":
            return stored.w1, stored.w2, stored.w1_scale[..., None], stored.w2_scale[..., None]
        return stored.w1, stored.w2, stored.w1_scale, stored.w2_scale

    def make_quant_config(self, w1_scale, w2_scale):
        if self.quant == "int4_w4a16_group":
            make = import_module(f"{_MOE}.config").int4_w4a16_moe_quant_config
            scales = w1_scale.bfloat16(), w2_scale.bfloat16()  # the kernel multiplies in x's dtype
            return make(*scales, None, None, block_shape=[0, _BLOCK])
        make = import_module(f"{_MOE}.config").fp8_w8a8_moe_quant_config
        if self.quant == "fp8_w8a8_block":
            granularity = {"block_shape": [_BLOCK, _BLOCK]}
        else:
            granularity = {"per_act_token_quant": True, "per_out_ch_quant": True}
        return make(w1_scale=w1_scale, w2_scale=w2_scale, **granularity)


class VllmTriton(LayerPeer):
    """vLLM's Triton kernels.

    Steps: moe_align_block_size, fused_moe_kernel, silu_and_mul, fused_moe_kernel, moe_sum.
    """

    def __init__(self, quant):
        self.name, self.quant = "vllm_triton", quant
        self.blocks = quant in ("fp8_w8a8_block", "int4_w4a16_group")

    def setup(self, problem, weights):
        self.run = import_module(f"{_MOE}.fused_moe").fused_experts
        self.w1, self.w2, self.config = weights.w1, weights.w2, None
        if self.quant != "none":
            self.w1, self.w2, *scales = self.quantize_weights(problem, weights)
            self.config = self.make_quant_config(*scales)

    def call(self, x_TH, routing):
        ids, router = routing.topk_ids_TK, routing.topk_weights_TK
        return self.run(x_TH, self.w1, self.w2, router, ids, quant_config=self.config)


class VllmExperts(LayerPeer):
    """One of vLLM's modular experts classes, after vLLM's quantization of x.

    The experts write the final output.
    """

    def __init__(self, name, quant, module, cls):
        self.name, self.quant, self.module_and_class = name, quant, (module, cls)
        self.blocks = quant == "fp8_w8a8_block"

    def refusal(self, problem):
        if "deepgemm" in self.name and problem.tokens < _MIN_DEEPGEMM_TOKENS:
            return f"{_MIN_DEEPGEMM_TOKENS} tokens or more only"
        # vLLM's `ep_gather` asserts this.
        if "deepgemm" in self.name and problem.hidden % min(problem.hidden, _DEEPGEMM_COLUMNS):
            return f"hidden must be less than {_DEEPGEMM_COLUMNS}, or a multiple of it"
        return super().refusal(problem)

    def setup(self, problem, weights):
        module, cls = self.module_and_class
        self.silu = import_module(f"{_MOE}.activation").MoEActivation.SILU
        self.quantize = import_module(f"{_MOE}.utils").moe_kernel_quantize_input
        self.problem = problem
        self.w1, self.w2, *scales = self.quantize_weights(problem, weights)
        self.config = self.make_quant_config(*scales)
        experts_cls = getattr(import_module(f"{_MOE}.experts.{module}"), cls)
        self.experts = experts_cls(self._make_moe_config(problem), self.config)

    def _make_moe_config(self, problem):
        config = import_module(f"{_MOE}.config")
        field_names = {field.name for field in fields(config.FusedMoEConfig) if field.init}
        # vLLM before 0.26 has only the second of these fields.
        size, size_per_rank = "intermediate_size", "intermediate_size_per_partition"
        return config.FusedMoEConfig(
            **{size if size in field_names else size_per_rank: problem.intermediate},
            # size of the buffers of the CUTLASS experts; the default is 256
            max_num_tokens=problem.tokens,
            num_experts=problem.experts,
            experts_per_token=problem.top_k,
            hidden_dim=problem.hidden,
            num_local_experts=problem.experts,
            num_logical_experts=problem.experts,
            activation=self.silu,
            device="cuda",
            routing_method=config.RoutingMethodType.Renormalize,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=problem.dtype,
        )

    def call(self, x_TH, routing):
        problem, tokens, config = self.problem, x_TH.shape[0], self.config
        x, scale = self.quantize(
            x_TH,
            None,
            quant_dtype=torch.float8_e4m3fn,
            per_act_token_quant=config.per_act_token_quant,
            block_shape=config.block_shape,
        )
        shapes = self.experts.workspace_shapes(
            tokens,
            2 * problem.intermediate,
            problem.hidden,
            problem.top_k,
            problem.experts,
            problem.experts,
            None,
            self.silu,
        )
        workspace13, workspace2, out = (
            torch.empty(s, device=x.device, dtype=x_TH.dtype) for s in shapes
        )
        router, ids = routing.topk_weights_TK, routing.topk_ids_TK
        self.experts.apply(
            out, x, self.w1, self.w2, router, ids, self.silu, problem.experts, None, scale, None,
            workspace13, workspace2, None, False,
        )  # fmt: skip
        return out


class VllmMarlin(LayerPeer):
    """vLLM's Marlin kernels.

    Steps: moe_align_block_size, moe_wna16_marlin_gemm, silu_and_mul, moe_wna16_marlin_gemm,
    moe_sum.
    """

    def __init__(self, name, quant):
        self.name, self.quant, self.blocks = name, quant, quant == "int4_w4a16_group"

    def setup(self, problem, weights):
        types = import_module("vllm.scalar_type").scalar_types
        utils = import_module(f"{_QUANT}.marlin_utils")
        self.run = import_module(f"{_MOE}.experts.marlin_moe").fused_marlin_moe
        self.ops = import_module("vllm._custom_ops")
        self.type = (types.uint4b8 if self.blocks else types.float4_e2m1f).id
        w1, w2, *scales = self.quantize_weights(problem, weights)
        self.w1, self.w2 = map(self.repack, (w1, w2))
        device, dtype = w1.device, problem.dtype
        self.workspace = utils.marlin_make_workspace_new(device, 4)
        self.scales = []
        for packed, scale in zip((w1, w2), scales, strict=True):
            (rows, columns), group = packed.shape[1:], packed.shape[2] * 2 // scale.shape[2]
            scale = scale if self.blocks else scale.view(torch.float8_e8m0fnu)
            scale_eGN = scale.to(dtype).mT.contiguous()
            permuted = utils.marlin_moe_permute_scales(scale_eGN, columns * 2, rows, group)
            if not self.blocks:
                as_e8m0 = import_module(f"{_QUANT}.marlin_utils_fp4").mxfp4_marlin_process_scales
                permuted = torch.stack([as_e8m0(scale_GN) for scale_GN in permuted])
            self.scales.append(permuted)

    def repack(self, w_eNK):
        """Repack 4-bit codes into Marlin's tile layout, from int32 words of eight codes along K."""
        experts, rows, half = w_eNK.shape
        words = w_eNK.view(torch.int32).mT
        perm = torch.empty(experts, 0, dtype=torch.int32, device=w_eNK.device)
        repack = self.ops.gptq_marlin_moe_repack
        return repack(words.contiguous(), perm, half * 2, rows, 4)

    def sum(self, rows_TKH, out_TH, *_):
        self.ops.moe_sum(rows_TKH, out_TH)
        return out_TH

    def call(self, x_TH, routing):
        ids, router = routing.topk_ids_TK, routing.topk_weights_TK
        out = torch.empty_like(x_TH)
        self.run(
            x_TH, self.w1, self.w2, None, None, *self.scales, router, ids, self.type,
            workspace=self.workspace, moe_sum=self.sum, output=out,
        )  # fmt: skip
        return out


@triton.jit(repr=lambda _: "_silu_and_multiply")
def _silu_and_multiply(value):
    """Apply SwiGLU to columns that alternate between gate and up."""
    pairs = tl.reshape(value, (value.shape[0], value.shape[1] // 2, 2))
    gate, up = tl.split(pairs)
    return gate / (1 + tl.exp(-gate)) * up


class TritonKernels(LayerPeer):
    """triton_kernels: routing tables, gather GEMM with SwiGLU epilogue, scatter GEMM."""

    name = "triton_kernels"

    def __init__(self, quant="none"):
        self.quant = quant

    def setup(self, problem, weights):
        self.tables = import_module(f"{_MOE}.experts.gpt_oss_triton_kernels_moe").make_routing_data
        self.mm = mm = import_module("triton_kernels.matmul_ogs")
        specs = mm.FnSpecs("silu_and_multiply", _silu_and_multiply, ())
        self.act, self.experts = mm.FusedActivation(specs, (), 2), problem.experts
        if self.quant == "none":
            self.w1 = interleave_gate_up(weights.w1).mT.contiguous()
            self.w2 = weights.w2.mT.contiguous()
            self.configs = mm.PrecisionConfig(), mm.PrecisionConfig()
            return
        stored = quantize(weights, replace(problem, quant=self.quant))
        swizzle = import_module(f"{_QUANT}.mxfp4_utils")
        scales = stored.w1_scale.view(torch.uint8), stored.w2_scale.view(torch.uint8)
        w1_and_scale = swizzle._swizzle_mxfp4(
            interleave_gate_up(stored.w1), interleave_gate_up(scales[0])
        )
        w2_and_scale = swizzle._swizzle_mxfp4(stored.w2, scales[1])
        self.w1, self.w2 = w1_and_scale[0], w2_and_scale[0]
        self.configs = [
            mm.PrecisionConfig(weight_scale=scale, flex_ctx=mm.FlexCtx(rhs_data=flex))
            for _, flex, scale in (w1_and_scale, w2_and_scale)
        ]

    def call(self, x_TH, routing):
        mm = self.mm.matmul_ogs
        ids, router = routing.topk_ids_TK, routing.topk_weights_TK
        routing_data, gather, scatter = self.tables(ids, router, self.experts)
        h = mm(
            x_TH, self.w1, None, routing_data,
            gather_indx=gather, precision_config=self.configs[0], fused_activation=self.act,
        )  # fmt: skip
        return mm(
            h, self.w2, None, routing_data,
            scatter_indx=scatter, precision_config=self.configs[1], gammas=routing_data.gate_scal,
        )  # fmt: skip


def interleave_gate_up(rows_eNK):
    """Interleave the gate and up rows of (e, 2I, K), which has gate rows first."""
    return rows_eNK.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


class Padded(Layer):
    """Pads the operands of a layer that requires sizes in whole blocks with zeros.

    Weights are padded in `setup`, and x in every call. The output is a view of the unpadded
    columns.

    hidden, intermediate: block sizes in elements.
    """

    def __init__(self, layer, hidden, intermediate):
        self.layer, self.blocks = layer, (hidden, intermediate)
        self.name, self.quant, self.needs = layer.name, layer.quant, layer.needs
        self.tuned = getattr(layer, "tuned", False)

    def pad(self, problem):
        """Return the problem with sizes rounded up to whole blocks."""
        sizes = problem.hidden, problem.intermediate
        hidden, intermediate = (-(-n // b) * b for n, b in zip(sizes, self.blocks, strict=True))
        return replace(problem, hidden=hidden, intermediate=intermediate)

    def refusal(self, problem):
        return self.layer.refusal(self.pad(problem))

    def setup(self, problem, weights):
        padded = self.pad(problem)
        self.columns, self.padding = problem.hidden, padded.hidden - problem.hidden
        rows = padded.intermediate - problem.intermediate
        gate_up = weights.w1.unflatten(1, (2, -1))
        w1 = torch.nn.functional.pad(gate_up, (0, self.padding, 0, rows)).flatten(1, 2)
        w2 = torch.nn.functional.pad(weights.w2, (0, rows, 0, self.padding))
        self.layer.setup(padded, replace(weights, w1=w1, w2=w2))

    def tune(self, problem):
        self.layer.tune(self.pad(problem))

    def call(self, x_TH, routing):
        if self.padding:
            x_TH = torch.nn.functional.pad(x_TH, (0, self.padding))
        return self.layer.call(x_TH, routing)[:, : self.columns]


def put_up_first(rows_eNK):
    """Swap the halves of (e, 2I, ...) from gate rows first to up rows first."""
    gate, up = rows_eNK.view(torch.uint8).chunk(2, dim=1)
    return torch.cat([up, gate], dim=1).view(rows_eNK.dtype)


class FlashInfer(LayerPeer):
    """FlashInfer's CUTLASS layers: sort, GEMM with SwiGLU, GEMM with the weighted sum.

    FlashInfer compiles its module `fused_moe_90` on first use if it has not been built.

    tuned: whether FlashInfer's autotuner runs for each number of tokens. It has nothing to tune for
        the block-scaled GEMMs.
    """

    name, needs = "flashinfer", ("flashinfer",)
    tuned = True

    def options(self):
        """Return the keyword arguments of the call other than tensors."""
        return {}

    def setup(self, problem, weights):
        self.run = import_module(_FLASHINFER_MOE).cutlass_fused_moe
        self.problem, self.scales = problem, None
        self.load(problem, weights)
        self.tuned_tokens = set()
        self.tune(problem)

    def tune(self, problem):
        """Run FlashInfer's autotuner for this number of tokens, on random x and routing."""
        if not self.tuned or problem.tokens in self.tuned_tokens:
            return
        self.tuned_tokens.add(problem.tokens)
        tuner = import_module("flashinfer.autotuner")
        if problem.tokens >= _MIN_LARGE_TOKENS:  # the defaults, 3 and 10, are for short kernels
            tuner.AutoTuner.get().warmup, tuner.AutoTuner.get().repeat = 1, 3
        generator = torch.Generator(self.w1.device).manual_seed(0)
        device = {"device": self.w1.device, "generator": generator}
        x = torch.randn(problem.tokens, problem.hidden, dtype=problem.dtype, **device)
        scores = torch.rand(problem.tokens, problem.experts, **device)
        ids = scores.topk(problem.top_k).indices.int()
        with tuner.autotune(True, tuning_buckets=(problem.tokens,)):
            self.run_with_ids(x, ids, torch.ones_like(ids, dtype=torch.float32) / problem.top_k)
        torch.cuda.synchronize()

    def call(self, x_TH, routing):
        ids, router = routing.topk_ids_TK.int(), routing.topk_weights_TK
        return self.run_with_ids(x_TH, ids, router)

    def run_with_ids(self, x_TH, ids_TK, router_TK):
        """Return the layer's output.

        ids_TK: int32.
        """
        out = torch.empty_like(x_TH)
        self.run(
            x_TH, ids_TK, router_TK, self.w1, self.w2, x_TH.dtype,
            quant_scales=self.scales, output=out,
            tune_max_num_tokens=self.problem.tokens, **self.options(),
        )  # fmt: skip
        return out


class FlashInferBf16(FlashInfer):
    quant = "none"

    def load(self, problem, weights):
        self.w1, self.w2 = put_up_first(weights.w1), weights.w2


class FlashInferFp8Block(FlashInfer):
    quant, tuned, blocks = "fp8_w8a8_block", False, True

    def options(self):
        return {"use_deepseek_fp8_block_scale": True}

    def load(self, problem, weights):
        w1, self.w2, w1_scale, w2_scale = self.quantize_weights(problem, weights)
        self.w1, self.scales = put_up_first(w1), [put_up_first(w1_scale), w2_scale.contiguous()]


class FlashInferMxfp4(FlashInfer):
    """mxfp4 weights in the layout of the Hopper GEMMs, to be used in `Padded`, as in vLLM."""

    quant, blocks = "mxfp4_w4a16", True

    def options(self):
        return {"use_w4_group_scaling": True}

    def load(self, problem, weights):
        stored = self.quantize_weights(problem, weights)
        prepare = import_module(f"{_FLASHINFER_MOE}.prepare")
        interleave_weights = prepare.interleave_moe_weights_for_sm90_mixed_gemm
        interleave_scales = prepare.interleave_moe_scales_for_sm90_mixed_gemm
        w1, w2, w1_scale, w2_scale = (tensor.view(torch.uint8) for tensor in stored)
        self.w1, self.w2 = (
            interleave_weights(put_up_first(w1), "fp4"),
            interleave_weights(w2, "fp4"),
        )
        self.scales = [
            interleave_scales(scale).view(torch.int32)
            for scale in (put_up_first(w1_scale), w2_scale)
        ]


def layers():
    """Return the layers whose packages are installed, and list the others on stderr."""
    for name in list_missing():
        print(f"not installed: {name}", file=sys.stderr)
    return [peer for peer in make_all_layers() if not list_absent_packages(peer)]


def list_missing():
    """Return the names of the layers that cannot be imported, with the absent packages."""
    return [
        f"{peer.name} {peer.quant} (needs {', '.join(absent)})"
        for peer in make_all_layers()
        if (absent := list_absent_packages(peer))
    ]


def list_absent_packages(peer):
    return [name for name in peer.needs if find_spec(name) is None]


def make_all_layers():
    """Return every layer, installed or not."""
    return [
        *map(VllmTriton, ("none", "fp8_w8a8_channel", "fp8_w8a8_block", "int4_w4a16_group")),
        VllmExperts("vllm_deepgemm", "fp8_w8a8_block", "deep_gemm_moe", "DeepGemmExperts"),
        VllmExperts("vllm_cutlass", "fp8_w8a8_channel", "cutlass_moe", "CutlassExpertsFp8"),
        VllmMarlin("vllm_marlin", "int4_w4a16_group"),
        Padded(VllmMarlin("vllm_marlin_mxfp4", "mxfp4_w4a16"), 256, 128),  # the padding of vLLM
        TritonKernels(),
        TritonKernels("mxfp4_w4a16"),
        FlashInferBf16(),
        FlashInferFp8Block(),
        Padded(FlashInferMxfp4(), _BLOCK, _BLOCK),
    ]
