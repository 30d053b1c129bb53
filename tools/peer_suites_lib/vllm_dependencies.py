"""vLLM's reference functions for layers, quantizers and activations.

Their calls of GPU kernels are replaced by the corresponding torch functions of vLLM.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from modular_kernel.tensors import ExpertWeights
from peer_suites_lib.checkout import EnumStandIn, Source
from peer_suites_lib.layers import Layer, LayerInputs

_FP8 = torch.float8_e4m3fn
_FP8_LIMITS = torch.finfo(_FP8).min, torch.finfo(_FP8).max
Pair = tuple[torch.Tensor, torch.Tensor | None]


class VllmReferences:
    """Reference functions of whole layers, quantizers and activations from one checkout."""

    def __init__(self, root: Path) -> None:
        platform = SimpleNamespace(
            fp8_dtype=lambda: _FP8, is_rocm=lambda: False, device_type="cpu",
            is_fp8_fnuz=lambda: False,
        )  # fmt: skip
        self._acts = Source(root, "vllm/model_executor/layers/activation.py",
                            {"current_platform": platform})  # fmt: skip
        self.activations = self._make_activations()
        self._quant = Source(root, "tests/kernels/quant_utils.py", {
            "current_platform": platform, "get_fp8_min_max": lambda: _FP8_LIMITS,
            "is_deep_gemm_e8m0_used": lambda: False,
        })  # fmt: skip
        self._quant.define(
            "as_float32_tensor", "ref_dynamic_per_token_quant", "ref_dynamic_per_tensor_fp8_quant",
            "native_w8a8_block_matmul", "native_per_token_group_quant_fp8",
            "native_per_token_group_quant_int8",
        )  # fmt: skip
        silu = _Layer(self.activations["silu_and_mul"])
        namespace: dict[str, object] = {
            "SiluAndMul": lambda: silu, "MoEActivation": EnumStandIn(),
            "current_platform": platform,
            "op_registry": {"SILU": lambda: silu},
            "moe_kernel_quantize_input": self._quantize_input,
            "native_w8a8_block_matmul": self._get_function("native_w8a8_block_matmul"),
            "native_per_token_group_quant_int8": self._get_function(
                "native_per_token_group_quant_int8"),
            "per_token_group_quant_fp8": lambda x, group, dtype: self.fp8_groups(x, group),
            "per_token_quant_int8": self.int8_rows,
            "ops": SimpleNamespace(scaled_fp8_quant=lambda x, **_: self.fp8_rows(x)),
        }  # fmt: skip
        kernels = "tests/kernels/"
        self._utils = Source(root, f"{kernels}utils.py", namespace)
        self._utils.define("torch_experts", "torch_moe")
        self._fp8_block = Source(root, f"{kernels}moe/test_block_fp8.py", namespace)
        self._int8_block = Source(root, f"{kernels}moe/test_block_int8.py", namespace)
        self._fp8_channel = Source(root, f"{kernels}moe/test_triton_moe_ptpc_fp8.py", namespace)
        self._fp8_channel.define("native_w8a8_per_token_matmul", "fp8_mask")
        self._int8_channel = Source(root, f"{kernels}quantization/test_int8_kernel.py", namespace)
        self._int8_channel.define("native_w8a8_per_token_matmul")
        self._packing = Source(
            root, "vllm/model_executor/layers/quantization/utils/quant_utils.py",
            {"scalar_types": EnumStandIn()},
        )  # fmt: skip
        self._packing.define("quantize_weights")

    def _get_function(self, name: str) -> Any:
        return self._quant.namespace[name]

    def _make_activations(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        def bind_native(owner: str, **fields: object) -> Callable[[torch.Tensor], torch.Tensor]:
            native: Any = self._acts.method(owner, "forward_native")
            return lambda x: native(SimpleNamespace(**fields), x)

        silu: Any = self._acts.method("SiluAndMul", "forward_native")
        return {
            "silu_and_mul": silu, "mul_and_silu": bind_native("MulAndSilu"),
            "gelu": bind_native("GeluAndMul", approximate="none"),
            "gelu_tanh": bind_native("GeluAndMul", approximate="tanh"),
            "swigluoai_and_mul": bind_native("SwigluOAIAndMul", alpha=1.702, limit=7.0),
            "swiglustep_and_mul": bind_native("SwigluStepAndMul", limit=7.0),
        }  # fmt: skip

    def make_clamped(
        self, alpha: float, beta: float, limit: float
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the native function of SiluAndMulWithClamp with these constants."""
        native: Any = self._acts.method("SiluAndMulWithClamp", "forward_native")
        state = SimpleNamespace(alpha=alpha, beta=beta, swiglu_limit=limit, limit=limit)
        return lambda x: native(state, x)

    # ---------------------------------------------------------------------------- quantizers

    def fp8_rows(self, x: torch.Tensor) -> Any:
        """Quantize to fp8 by rows."""
        return self._get_function("ref_dynamic_per_token_quant")(x, _FP8)

    def int8_rows(self, x: torch.Tensor) -> Any:
        """Quantize to int8 by rows."""
        return self._get_function("ref_dynamic_per_token_quant")(x, torch.int8)

    def fp8_tensor(self, x: torch.Tensor) -> Any:
        """Quantize to fp8 with one scale for the tensor."""
        return self._get_function("ref_dynamic_per_tensor_fp8_quant")(x)

    def fp8_groups(self, x: torch.Tensor, group: int) -> Any:
        """Quantize to fp8 by groups of columns."""
        return self._get_function("native_per_token_group_quant_fp8")(x.contiguous(), group)

    def int8_groups(self, x: torch.Tensor, group: int) -> Any:
        """Quantize to int8 by groups of columns, truncating as their kernel does."""
        native = self._get_function("native_per_token_group_quant_int8")
        return native(x.contiguous(), group, round_to_nearest=False)

    def _quantize_input(
        self, a: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype | None,
        by_row: bool, block: list[int] | None = None,
    ) -> Pair:  # fmt: skip
        """Quantize in place of their dispatch to quantization kernels.

        Codes are returned in float32, because torch cannot index fp8 tensors with masks.
        """
        if dtype is None:
            return a, scale
        if block is not None:
            q, s = self.fp8_groups(a, block[1])
        elif by_row:
            q, s = self.fp8_rows(a)
        else:
            q, s = self.fp8_tensor(a)
        return q.float(), s

    # -------------------------------------------------------------------------------- layers

    def torch_moe(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer with the dequantized weights that `store_groups` kept."""
        w1, w2 = self._dequantized[layer]
        return self._call(self._utils, "torch_moe", inputs.x, w1, w2, inputs.score, layer.top_k,
                          expert_map=inputs.weights.expert_map)  # fmt: skip

    def torch_experts(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer with activations quantized in the layer's scheme."""
        w, unquantized = inputs.weights, layer.quant == "none"
        scales = {}
        block = [128, 128] if "block" in layer.quant else None
        by_row = "channel" in layer.quant
        if not unquantized:
            assert w.w1_scale is not None
            assert w.w2_scale is not None
            scales = {"w1_scale": w.w1_scale, "w2_scale": w.w2_scale}
            if by_row:
                scales = {name: scale[..., None] for name, scale in scales.items()}
        return self._call(
            self._utils, "torch_experts", inputs.x, w.w1, w.w2, inputs.routing.topk_weights_TK,
            inputs.routing.topk_ids_TK.long(), quant_dtype=None if unquantized else _FP8,
            per_act_token_quant=by_row, block_shape=block, **scales,
        )  # fmt: skip

    def fp8_block(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer in fp8 with block scales."""
        w, block = inputs.weights, _get_block_shape(layer)
        return self._call(self._fp8_block, "torch_w8a8_block_fp8_moe", inputs.x, w.w1, w.w2,
                          w.w1_scale, w.w2_scale, inputs.routing.topk_weights_TK,
                          inputs.routing.topk_ids_TK, block)  # fmt: skip

    def int8_block(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer in int8 with block scales."""
        w, block = inputs.weights, _get_block_shape(layer)
        return self._call(self._int8_block, "torch_w8a8_block_int8_moe", inputs.x, w.w1, w.w2,
                          w.w1_scale, w.w2_scale, inputs.score, layer.top_k, block)  # fmt: skip

    def fp8_channel(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer in fp8 with channel scales."""
        w = inputs.weights
        self._fp8_channel.namespace["fp8_mask"] = lambda a, mask: (
            a.view(torch.int8)[mask].view(a.dtype) if a.dtype is _FP8 else a[mask]
        )
        return self._call(self._fp8_channel, "torch_w8a8_per_column_moe", inputs.x, w.w1, w.w2,
                          w.w1_scale, w.w2_scale, inputs.score, layer.top_k)  # fmt: skip

    def int8_channel(self, layer: Layer, inputs: LayerInputs) -> torch.Tensor:
        """Compute a layer in int8 with channel scales."""
        w = inputs.weights
        return self._call(self._int8_channel, "torch_w8a8_per_column_moe", inputs.x, w.w1, w.w2,
                          w.w1_scale, w.w2_scale, layer.top_k, inputs.routing.topk_weights_TK,
                          inputs.routing.topk_ids_TK)  # fmt: skip

    def _call(self, source: Source, name: str, *args: object, **kwargs: object) -> torch.Tensor:
        function: Any = source.function(name)
        output: torch.Tensor = function(*args, **kwargs)
        return output

    # ------------------------------------------------------------- weights of 4 and 8 bits

    _dequantized: dict[Layer, tuple[torch.Tensor, torch.Tensor]] = {}  # noqa: RUF012 (one layer)

    def store_groups(self, layer: Layer, weights: ExpertWeights) -> ExpertWeights:
        """Quantize and pack weights as their test does, and keep the dequantized weights."""
        is_int4, zero_points = layer.quant.startswith("int4"), "zero_points" in layer.quant
        scalar_type = _Integers(4 if is_int4 else 8, signed=not zero_points)
        quantize: Any = self._packing.namespace["quantize_weights"]
        fields: dict[str, torch.Tensor] = {}
        dequantized = []
        for name in ("w1", "w2"):
            values_e = getattr(weights, name)
            e, rows, _ = values_e.shape

            def split_experts(values: torch.Tensor, e: int = e, rows: int = rows) -> torch.Tensor:
                return values.T.reshape(e, rows, -1).contiguous()

            # Columns are quantized independently, so all experts are quantized together.
            w, q, s, z = quantize(
                values_e.flatten(0, 1).T, scalar_type, layer.multiple, zero_points, False
            )
            q = split_experts(q).to(torch.uint8)
            z = split_experts(z).to(torch.uint8) if zero_points else q
            if is_int4:
                q, z = q[:, :, 1::2] * 16 + q[:, :, ::2], z[:, 1::2] * 16 + z[:, ::2]
            dequantized.append(split_experts(w).to(layer.dtype))
            fields |= {name: q.contiguous(), f"{name}_scale": split_experts(s).to(layer.dtype)}
            if zero_points:
                fields[f"{name}_zero_point"] = z.contiguous()
        self._dequantized.clear()
        self._dequantized[layer] = dequantized[0], dequantized[1]
        return replace(weights, **fields)


class _Layer:
    """A stand-in for a module of vLLM, which is called directly or through forward_native."""

    def __init__(self, native: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.forward_native = native

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_native(x)


class _Integers:
    """A stand-in for vLLM's ScalarType, with the methods that its quantizer uses."""

    def __init__(self, bits: int, *, signed: bool) -> None:
        self._bits, self._biased = bits, signed
        self.bias = 2 ** (bits - 1)

    def is_integer(self) -> bool:
        return True

    def is_signed(self) -> bool:
        return False

    def has_bias(self) -> bool:
        return self._biased

    def max(self) -> int:
        return 2**self._bits - 1 - (self.bias if self._biased else 0)

    def min(self) -> int:
        return -self.bias if self._biased else 0


def _get_block_shape(layer: Layer) -> list[int]:
    return [int(side) for side in layer.quant.partition("=")[2].split("x")]
