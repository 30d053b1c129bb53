"""Pack tiny experts with the quantization libraries that publishers use, and load the files.

    python tools/pack_checkpoints.py                  # every packer that is installed
    python tools/pack_checkpoints.py bitsandbytes gguf --folder /tmp/packed

Each packer gets four experts with the names of Qwen3-MoE, and writes them in its own format.
`load_experts`, `FusedMoE.load` and `from_pretrained` read them. Prints the version of the packer,
the scheme, and the largest relative error of w1 and w2 from `load_experts`. The reference is the
result of the packer's own unpacking or, if the error is marked with ~, the weights before rounding.
`FusedMoE.load` and `from_pretrained` must give bitwise the same tensors. The packers are not
dependencies of this package, so run this in an environment that has them.
"""

# ruff: noqa: PLC0415 (packers are optional)

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import in_checkout  # noqa: F401  adds the checkout to sys.path
import torch
from safetensors.torch import load_file, save_file

import modular_kernel as mk
from modular_kernel.checkpoints.loading import LoadedExperts
from modular_kernel.integrations.transformers import from_pretrained, register
from modular_kernel.layers.fused_moe import FusedMoE
from modular_kernel.layers.parameters import PARAMETERS
from modular_kernel.quant.quantized_weights import dequantize_weights

EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS = 4, 256, 512, 64, 4
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
}
Tensors = dict[str, torch.Tensor]
# Packs a weight (N, K) float32. Returns its tensors, and the values that they represent.
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
Case = tuple[str, Path, dict[str, torch.Tensor], bool]  # name, checkpoint, values, whether exact


def _make_name(expert: int, projection: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{projection}"


def _draw_weights(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        _make_name(e, projection): torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for e in range(EXPERTS)
        for projection, shape in SHAPES.items()
    }


def _write(folder: Path, quantization: dict[str, Any] | None, pack: Pack) -> Tensors:
    """Pack every weight, and return the values."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, values = _draw_other_tensors(), Tensors()
    for name, weight in _draw_weights().items():
        packed, values[name] = pack(weight)
        tensors |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    config = CONFIG | ({} if quantization is None else {"quantization_config": quantization})
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _draw_other_tensors() -> Tensors:
    """Return the tensors of the model that are not experts, so that transformers loads it."""
    generator = torch.Generator().manual_seed(1)
    layer, attention = "model.layers.0.", "model.layers.0.self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        f"{layer}mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    shapes |= {f"{attention}{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    norms = {"model.norm.weight": HIDDEN}
    norms |= {f"{layer}{name}_layernorm.weight": HIDDEN for name in ("input", "post_attention")}
    norms |= {f"{attention}{name}_norm.weight": HIDDEN // HEADS for name in "qk"}
    tensors = {name: torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()}
    return tensors | {name: torch.ones(size) for name, size in norms.items()}


def _round_to_grid(
    weight: torch.Tensor, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, ...]:
    """Return weights that 4 bits represent exactly, and scales and zero points (N, K / group)."""
    groups = weight.unflatten(1, (-1, group))
    scale = (groups.abs().amax(-1) / 7).half().float()
    generator = torch.Generator().manual_seed(1)
    zero = torch.full(scale.shape, 8.0)
    if not symmetric:
        zero += torch.randint(-2, 3, scale.shape, generator=generator)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return ((codes - zero[..., None]) * scale[..., None]).flatten(1), scale, zero


def pack_with_bitsandbytes(folder: Path) -> Iterator[Case]:
    import bitsandbytes as bnb

    for kind in ("nf4", "fp4"):
        for double in (False, True):

            def pack(
                weight: torch.Tensor, kind: str = kind, double: bool = double
            ) -> tuple[Tensors, torch.Tensor]:
                options = {"quant_type": kind, "compress_statistics": double}
                options["quant_storage"] = torch.bfloat16 if double else torch.uint8
                linear = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, **options)
                parameter = bnb.nn.Params4bit(weight, requires_grad=False, module=linear, **options)
                linear.weight = parameter
                linear = linear.to("cpu")
                state = linear.weight.quant_state
                exact = bnb.functional.dequantize_4bit(linear.weight.data, state)
                return dict(linear.state_dict()), exact.view(weight.shape)

            name = f"{kind}{', double quantization, bf16 storage' if double else ''}"
            config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
            config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
            yield name, folder / name, _write(folder / name, config, pack), True

    def pack_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        linear = bnb.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
        linear.weight = bnb.nn.Int8Params(weight.half(), requires_grad=False)
        linear = linear.to("cpu")
        tensors = dict(linear.state_dict())
        return tensors, bnb.functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    yield "int8", folder / "int8", _write(folder / "int8", config, pack_int8), True


def pack_with_gguf(folder: Path) -> Iterator[Case]:
    import gguf as library
    import numpy as np

    names = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
    weights = _draw_weights()
    # Offsets of the float16 factors in blocks of types that the package can only unpack.
    factor_offsets = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
    }
    factor_offsets |= dict.fromkeys(
        ("IQ4_NL", "IQ4_XS", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S"), (0,)
    )
    factor_offsets |= {"IQ3_XXS": (0,), "IQ3_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}
    float_types = ("F32", "F16", "BF16")
    for type_name in (
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "MXFP4",
        *factor_offsets,
        *float_types,
    ):
        kind = library.GGMLQuantizationType[type_name]
        path = folder / f"{type_name}.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        writer = library.GGUFWriter(path, "qwen3moe")
        writer.add_block_count(1)
        writer.add_embedding_length(HIDDEN)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INTERMEDIATE)
        writer.add_token_list(["a", "b"] * 4000)
        values, rng = Tensors(), np.random.default_rng(0)
        for projection, name in names.items():
            stack = np.stack([weights[_make_name(e, projection)].numpy() for e in range(EXPERTS)])
            if type_name in factor_offsets:
                size, bytes_of_block = library.GGML_QUANT_SIZES[kind]
                shape = (*stack.shape[:2], stack.shape[2] // size * bytes_of_block)
                packed = rng.integers(0, 256, shape, dtype=np.uint8)
                blocks = packed.reshape(-1, bytes_of_block)
                # Make the factors finite and not too small.
                for offset in factor_offsets[type_name]:
                    blocks[:, offset + 1] = blocks[:, offset + 1] & 0x83 | 0x18
            else:
                packed = library.quants.quantize(stack, kind)
            writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=kind)
            exact = library.quants.dequantize(packed, kind)
            values |= {
                _make_name(e, projection): torch.from_numpy(exact[e]) for e in range(EXPERTS)
            }
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield type_name, path, values, True


def pack_with_autoawq(folder: Path) -> Iterator[Case]:
    from awq.modules.linear.gemm import WQLinear_GEMM

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        exact, scale, zero = _round_to_grid(weight, 64, symmetric=False)
        linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
        linear.weight.data = exact
        packed = WQLinear_GEMM.from_linear(
            linear, 4, 64, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
        )
        return dict(packed.state_dict()), exact

    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    config |= {"version": "gemm"}
    yield "int4, groups of 64", folder / "awq", _write(folder / "awq", config, pack), True


def pack_with_gptqmodel(folder: Path) -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    for act_order in (False, True):

        def pack(weight: torch.Tensor, act_order: bool = act_order) -> tuple[Tensors, torch.Tensor]:
            exact, scale, zero = _round_to_grid(weight, 64, symmetric=True)
            rows, depth = weight.shape
            order = torch.arange(depth)
            if act_order:
                order = torch.randperm(depth, generator=torch.Generator().manual_seed(depth))
            exact, groups = exact[:, order], (order // 64).int()
            linear = torch.nn.Linear(depth, rows, bias=False)
            linear.weight.data = exact
            options = {"in_features": depth, "out_features": rows, "bias": False}
            module = TorchLinear(4, 64, True, act_order, **options)
            module.pack_original(linear, scale, zero, groups)
            kinds = ("qweight", "qzeros", "scales", "g_idx")
            return {kind: getattr(module, kind) for kind in kinds}, exact

        name = f"int4, groups of 64{', act-order' if act_order else ''}"
        config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
        config |= {"desc_act": act_order, "checkpoint_format": "gptq_v2"}
        yield name, folder / name, _write(folder / name, config, pack), True


def pack_with_auto_round(folder: Path) -> Iterator[Case]:
    from auto_round_extension.torch.qlinear_torch import QuantLinear

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        exact, scale, zero = _round_to_grid(weight, 64, symmetric=False)
        linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
        linear.weight.data = exact
        module = QuantLinear(4, 64, *weight.shape[::-1], False)
        module.device = torch.device("cpu")
        module.pack(linear, scale, zero, device="cpu")
        kinds = ("qweight", "qzeros", "scales")
        return {kind: getattr(module, kind) for kind in kinds}, exact

    config = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False}
    config |= {"packing_format": "auto_round", "data_type": "int"}
    yield "int4, groups of 64", folder / "ar", _write(folder / "ar", config, pack), True


def pack_with_llmcompressor(folder: Path) -> Iterator[Case]:
    from llmcompressor import model_free_ptq

    unquantized_folder = folder / "plain"
    values = _write(
        unquantized_folder, None, lambda weight: ({"weight": weight.bfloat16()}, weight)
    )
    for scheme in ("FP8_BLOCK", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "W8A16", "W4A16"):
        target = folder / scheme
        try:
            model_free_ptq(
                unquantized_folder, target, scheme=scheme, device="cpu", ignore=["lm_head"]
            )
        except Exception as error:  # noqa: BLE001  schemes that the library does not support
            print(f"  llmcompressor {scheme}: {type(error).__name__}: {str(error)[:100]}")
            continue
        yield scheme, target, values, False


def pack_with_modelopt(folder: Path) -> Iterator[Case]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        packed, scale, matrix_scale = NVFP4QTensor.quantize(weight, 16)
        exact = packed.dequantize(torch.float32, scale=scale, double_scale=matrix_scale,
                                  block_sizes={-1: 16})  # fmt: skip
        tensors = {"weight": packed._quantized_data, "weight_scale": scale}
        return tensors | {"weight_scale_2": matrix_scale.float()}, exact

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    yield "NVFP4", folder / "nvfp4", _write(folder / "nvfp4", config, pack), True


def pack_with_compressed_tensors(folder: Path) -> Iterator[Case]:
    from compressed_tensors.compressors import pack_to_int32

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        exact, scale, zero = _round_to_grid(weight, 64, symmetric=False)
        codes = (exact.unflatten(1, (-1, 64)) / scale[..., None]).round() + zero[..., None] - 8
        tensors = {
            "weight_packed": pack_to_int32(codes.flatten(1).to(torch.int8), 4),
            "weight_scale": scale,
            "weight_zero_point": pack_to_int32((zero - 8).to(torch.int8), 4, packed_dim=0),
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, exact

    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": 64}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config |= {"config_groups": {"group_0": group}}
    yield "int4, zero points", folder / "ct", _write(folder / "ct", config, pack), True


def pack_with_quark(folder: Path) -> Iterator[Case]:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
    from transformers import PreTrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self) -> None:
            super().__init__(PreTrainedConfig())
            for name, weight in _draw_weights().items():
                module: torch.nn.Module = self
                *parents, last = name.split(".")
                for parent in parents:
                    if not hasattr(module, parent):
                        module.add_module(parent, torch.nn.Module())
                    module = getattr(module, parent)
                linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
                linear.weight.data = weight.bfloat16()
                module.add_module(last, linear)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for expert in self.model.layers.get_submodule("0").mlp.experts.children():
                expert.down_proj(torch.nn.functional.silu(expert.gate_proj(x)) * expert.up_proj(x))
            return x

    weight = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False)
    spec = weight.to_quantization_spec()
    config = QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec))
    calibration = [torch.randn(8, HIDDEN).bfloat16()]
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(Model(), calibration))
    export_safetensors(model, str(folder / "fp8"), custom_mode="quark")
    file = folder / "fp8" / "config.json"
    exported = json.loads(file.read_text())
    quantization = {"quantization_config": exported["quantization_config"]}
    file.write_text(json.dumps(CONFIG | quantization))
    tensors = load_file(folder / "fp8" / "model.safetensors")
    save_file(_draw_other_tensors() | tensors, folder / "fp8" / "model.safetensors")
    yield "fp8 by tensor", folder / "fp8", _draw_weights(), False


def pack_with_transformers(folder: Path) -> Iterator[Case]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    for scale in ("float", "ue8m0"):
        options = FineGrainedFP8Config(scale_fmt=scale)
        quantize = Fp8Quantize(SimpleNamespace(quantization_config=options))

        def pack(weight: torch.Tensor, quantize: Any = quantize) -> tuple[Tensors, torch.Tensor]:
            stored = quantize.convert({"weight": weight})
            scales = next(tensor for name, tensor in stored.items() if name != "weight")
            tiles = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensors = {"weight": stored["weight"], "weight_scale_inv": scales}
            return tensors, stored["weight"].float() * tiles

        name = f"fp8 by block, {scale}"
        yield name, folder / name, _write(folder / name, options.to_dict(), pack), True


def pack_with_torchao(folder: Path) -> Iterator[Case]:  # noqa: C901 (a case for each kind of tensor)
    from torchao.core.config import config_to_dict
    from torchao.prototype.mx_formats import (
        MXDynamicActivationMXWeightConfig,
        NVFP4DynamicActivationNVFP4WeightConfig,
        NVFP4WeightOnlyConfig,
    )
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8Tensor,
        Float8WeightOnlyConfig,
        FqnToConfig,
        Int4WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
        PerRow,
        PerTensor,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    def pack(config: Any, weight: torch.Tensor) -> torch.Tensor:
        # `quantize_` needs a GPU for these configs.
        if isinstance(config, Float8DynamicActivationFloat8WeightConfig):
            granularity = config.granularity[1]
            kwargs = QuantizeTensorToFloat8Kwargs(granularity=granularity)
            return Float8Tensor.from_hp(weight, granularity=granularity, act_quant_kwargs=kwargs)
        if isinstance(config, NVFP4DynamicActivationNVFP4WeightConfig):
            scale = per_tensor_amax_to_scale(weight.abs().amax((-2, -1), keepdim=weight.dim() > 2))
            return NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale, is_swizzled_scales=True)
        if isinstance(config, NVFP4WeightOnlyConfig):
            linear = torch.nn.Linear(*weight.shape[::-1], bias=False)
            linear.weight.data = weight
            quantize_(linear, config)
            return linear.weight.data
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight)
        quantize_(module, FqnToConfig({"weight": config}), filter_fn=None)
        return module.weight.data

    rows, matrix, groups = PerRow(), PerTensor(), PerGroup(64)
    configs = {
        "int8, rows": Int8WeightOnlyConfig(granularity=rows),
        "int8, groups of 64": Int8WeightOnlyConfig(granularity=groups),
        "int8 with int8 inputs": Int8DynamicActivationInt8WeightConfig(granularity=rows),
        "fp8, rows": Float8WeightOnlyConfig(granularity=rows),
        "fp8, matrices": Float8WeightOnlyConfig(granularity=matrix),
        "fp8 with fp8 inputs, rows": Float8DynamicActivationFloat8WeightConfig(granularity=rows),
        "fp8 with fp8 inputs, matrices": Float8DynamicActivationFloat8WeightConfig(
            granularity=matrix
        ),
    }
    configs |= {
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4, scales of blocks alone": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
        "nvfp4 with nvfp4 inputs": NVFP4DynamicActivationNVFP4WeightConfig(),
        "mxfp8 with mxfp8 inputs": MXDynamicActivationMXWeightConfig(),
        "mxfp4 with mxfp4 inputs": MXDynamicActivationMXWeightConfig(
            activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2
        ),
    }
    if _install_int4_packer():
        configs["int4, groups of 64"] = Int4WeightOnlyConfig(group_size=64)
    weights = {name: weight.bfloat16() for name, weight in _draw_weights().items()}
    stacks = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for name, config in configs.items():
        modules = {f"{key}.weight": pack(config, weight) for key, weight in weights.items()}
        options = config_to_dict(config)
        values = {key.removesuffix(".weight"): _dequantize_torchao(w) for key, w in modules.items()}
        yield f"{name}; modules", _write_torchao(folder / name, options, modules), values, True
        if isinstance(config, NVFP4WeightOnlyConfig):
            continue  # matrices only
        parameters, values = {}, Tensors()
        for key, parts in stacks.items():
            stacked = torch.stack(
                [torch.cat([weights[_make_name(e, p)] for p in parts]) for e in range(EXPERTS)]
            )
            path = f"model.layers.0.mlp.experts.{key}"
            parameters[path] = pack(config, stacked)
            for e, matrices in enumerate(_dequantize_torchao(parameters[path])):
                projections = zip(parts, matrices.chunk(len(parts)), strict=True)
                values |= {_make_name(e, part): matrix for part, matrix in projections}
        options = config_to_dict(FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": config}))
        path = folder / f"{name}, parameters"
        yield f"{name}; parameters", _write_torchao(path, options, parameters), values, True
    unquantized_folder = folder / "plain"
    _write(unquantized_folder, None, lambda weight: ({"weight": weight}, weight))
    for name in ("int8, rows", "fp8, rows"):
        yield (
            f"{name}; saved by transformers",
            *_save_with_transformers(unquantized_folder, configs[name]),
            True,
        )


def _save_with_transformers(unquantized_folder: Path, config: Any) -> tuple[Path, Tensors]:
    """Quantize a model, attention included, and save it. Returns its folder and experts' values."""
    from torchao.quantization import FqnToConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    names = {r"re:.*\.experts\.(gate_up|down)_proj": config, r"re:.*\.[qkvo]_proj": config}
    model = AutoModelForCausalLM.from_pretrained(
        unquantized_folder,
        dtype=torch.bfloat16,
        quantization_config=TorchAoConfig(FqnToConfig(names)),
    )
    folder = unquantized_folder.with_name(f"saved {type(config).__name__}")
    model.save_pretrained(folder)
    experts, values = model.model.layers[0].mlp.experts, Tensors()
    for e in range(EXPERTS):
        gate_up = _dequantize_torchao(experts.gate_up_proj)[e].chunk(2)
        parts = {"gate_proj": gate_up[0], "up_proj": gate_up[1]}
        parts["down_proj"] = _dequantize_torchao(experts.down_proj)[e]
        values |= {_make_name(e, part): matrix for part, matrix in parts.items()}
    return folder, values


def _install_int4_packer() -> bool:
    """Install FBGEMM's int4 packer in torchao, without the import that needs a GPU.

    Returns False if the packer is not installed.
    """
    from torchao.quantization.quantize_.workflows.int4 import int4_tensor

    if int4_tensor.int4_row_quantize_zp is not None:
        return True
    for folder in sys.path:
        file = Path(folder) / "fbgemm_gpu" / "experimental" / "gen_ai" / "quantize.py"
        if file.is_file():
            name = "fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm"
            parts = name.split(".")
            for depth in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:depth]), ModuleType(parts[depth - 1]))
            sys.modules[name].quantize_fp8_row = None  # type: ignore[attr-defined]
            spec = importlib.util.spec_from_file_location("fbgemm_int4", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            int4_tensor.int4_row_quantize_zp = module.int4_row_quantize_zp
            int4_tensor.pack_int4 = module.pack_int4
            return True
    print("  torchao int4: no fbgemm-gpu-genai or mslk, whose packer it uses")
    return False


def _dequantize_torchao(weight: Any) -> torch.Tensor:
    """Return the values of a packed weight as float32.

    Int4Tensor has no function for this. Its kernels compute code times scale plus zero point.
    """
    if type(weight).__name__ != "Int4Tensor":
        return weight.dequantize(torch.float32)
    signed = torch.stack([weight.qdata << 4 >> 4, weight.qdata >> 4], -1).flatten(-2).float()
    scale, zero = (
        tensor.float().mT.repeat_interleave(weight.block_size[-1], -1)
        for tensor in (weight.scale, weight.zero_point)
    )
    return signed * scale + zero


def _write_torchao(folder: Path, options: Any, weights: Tensors) -> Path:
    """Write packed weights as transformers does, and return the folder."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors, metadata = flatten_tensor_state_dict(_draw_other_tensors() | weights)
    save_file(tensors, folder / "model.safetensors", metadata | {"format": "pt"})
    config = {"quant_method": "torchao", "quant_type": {"default": options}}
    config |= {"modules_to_not_convert": None, "include_input_output_embeddings": False}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    return folder


PACKERS: dict[str, tuple[Callable[[Path], Iterator[Case]], str]] = {
    "bitsandbytes": (pack_with_bitsandbytes, "bitsandbytes"),
    "gguf": (pack_with_gguf, "gguf"),
    "autoawq": (pack_with_autoawq, "autoawq"),
    "gptqmodel": (pack_with_gptqmodel, "gptqmodel"),
    "auto-round": (pack_with_auto_round, "auto-round"),
    "compressed-tensors": (pack_with_compressed_tensors, "compressed-tensors"),
    "llmcompressor": (pack_with_llmcompressor, "llmcompressor"),
    "modelopt": (pack_with_modelopt, "nvidia-modelopt"),
    "quark": (pack_with_quark, "amd-quark"),
    "transformers": (pack_with_transformers, "transformers"),
    "torchao": (pack_with_torchao, "torchao"),
}


def check(loaded: LoadedExperts, values: Tensors) -> tuple[str, float]:
    """Return the scheme of loaded experts and the largest relative error of their weights.

    Act-order sorts rows and columns, so the error of the layer's output is returned instead.
    """
    problem = loaded.problem(16)
    exact = {
        "w1": [_stack_projections(values, e, "gate_proj", "up_proj") for e in range(EXPERTS)],
        "w2": [_stack_projections(values, e, "down_proj") for e in range(EXPERTS)],
    }
    if problem.scheme.act_order:
        return str(problem.scheme), _compute_output_error(loaded, exact)
    worst = 0.0
    for name, matrices in exact.items():
        weights = getattr(loaded.weights, name)
        if problem.scheme.quantized:
            weights = dequantize_weights(loaded.weights, name, problem)
        for expert, matrix in enumerate(matrices):
            difference = (weights[expert].double() - matrix).norm() / matrix.norm()
            worst = max(worst, float(difference))
    return str(loaded.problem_fields["quant"]), worst


def check_other_ways(checkpoint: Path, loaded: LoadedExperts) -> str:
    """Load a checkpoint in the other two ways. Returns the ways that gave the weights of `loaded`.

    Raises AssertionError for different weights.
    """
    layer = FusedMoE.from_config(checkpoint, 0, params_dtype="float32")
    layer.load(checkpoint)
    _assert_equal(layer, loaded)
    if checkpoint.suffix == ".gguf":
        return "load_experts, FusedMoE.load"
    register()
    model = from_pretrained(checkpoint, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    for parameter_name, field in {"gate_up_proj": "w1", "down_proj": "w2"}.items():
        assert torch.equal(getattr(experts, parameter_name), getattr(loaded.weights, field)), field
    assert bool(model(torch.arange(8)[None]).logits.isfinite().all())
    return "load_experts, FusedMoE.load, from_pretrained"


def _assert_equal(layer: FusedMoE, loaded: LoadedExperts) -> None:
    for field, name in PARAMETERS.items():
        tensor = getattr(loaded.weights, field)
        assert tensor is None or torch.equal(getattr(layer, name), tensor), field


def _stack_projections(values: Tensors, expert: int, *projections: str) -> torch.Tensor:
    return torch.cat([values[_make_name(expert, name)] for name in projections]).double()


def _compute_output_error(loaded: LoadedExperts, exact: dict[str, list[torch.Tensor]]) -> float:
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(16)[:, None] % EXPERTS
    pair = ("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    kernel = mk.make_kernel(*pair, loaded.problem(16, top_k=1))
    y = kernel(x, loaded.weights, mk.Routing(torch.ones(16, 1), ids))
    rows = []
    for row, expert in zip(x.double(), ids[:, 0].tolist(), strict=True):
        gate, up = (exact["w1"][expert] @ row).chunk(2)
        rows.append(exact["w2"][expert] @ (torch.nn.functional.silu(gate) * up))
    expected = torch.stack(rows)
    return float((y.double() - expected).norm() / expected.norm())


def main() -> None:
    """Pack with each packer, load the files, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packers", nargs="*", choices=[[], *PACKERS], help="default: all")
    parser.add_argument("--folder", type=Path, help="where to leave the files")
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp())
    for name in options.packers or PACKERS:
        run, package = PACKERS[name]
        try:
            package_version = version(package)
        except PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        for case, checkpoint, values, exact in run(root / name):
            loaded = mk.load_experts(checkpoint, 0, dtype="float32")
            scheme, worst = check(loaded, values)
            ways = check_other_ways(checkpoint, loaded)
            error = f"{'' if exact else '~'}{worst:.1e}"
            print(f"{package} {package_version}, {case}: {scheme}, {error}, by {ways}")


if __name__ == "__main__":
    main()
