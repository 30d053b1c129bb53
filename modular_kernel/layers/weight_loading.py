"""Weight loading for engines: create a layer's parameters, then load the checkpoint's tensors.

    loader = ExpertLoader(Share(experts=8, hidden=64, intermediate=128, ep=(0, 2)))
    loader.create_weights(layer, torch.bfloat16)            # layer.w13_weight, layer.w2_weight, ...
    for param_prefix, ckpt_prefix, expert, shard in make_expert_params_mapping("w1", "w2", "w3", 8):
        ...                                                 # as in the engine's load_weights
        loader.weight_loader(param, loaded_weight, name, shard, expert)
    weights = loader.expert_weights(layer)                  # ExpertWeights for a kernel

The parameters have the shapes of the checkpoint's format, so that every format of
`modular_kernel.checkpoints` can be loaded. `rank_share.destination` computes where in a parameter a
tensor goes.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace

import torch

from modular_kernel.checkpoints.formats import Format, fit_scheme, format_of
from modular_kernel.checkpoints.fp8_mxfp4 import static_scale
from modular_kernel.checkpoints.fusing import Matrix, convert_share, fuse
from modular_kernel.checkpoints.matrix_layout import (
    FLOATS,
    UNREAD_ROLES,
    Dim,
    StoredTensor,
    slice_tensors,
)
from modular_kernel.checkpoints.padding import fill_padding
from modular_kernel.errors import (
    ConfigurationError,
    ShapeError,
    UnsupportedError,
    WeightsError,
)
from modular_kernel.layers.rank_share import (
    FUSED,
    SHARDS,
    Move,
    Share,
    destination,
    find_padding,
)
from modular_kernel.replay import modes
from modular_kernel.spec.quantization import QuantScheme
from modular_kernel.tensors import ExpertWeights
from modular_kernel.utils.argument_checks import Count, expect, resolve_device
from modular_kernel.utils.tensor_checks import check_output, check_tensor

ParamsMapping = list[tuple[str, str, int, str]]
WeightLoader = Callable[[torch.nn.Parameter, torch.Tensor, str, str, int], None]

_BIAS = StoredTensor("bias", "bias", (Dim("N"),), FLOATS)
_SCALE_TOLERANCE = 1e-5  # allowed difference between the input scales of gate and up
_MATRIX_SCALE_ROLES = ("scale", "global_scale")
_SCALE_ROLES = ("scale", "global_scale", "a_scale")
_INITIAL_SCALE = 1.0  # value of scales before they are loaded


def make_expert_params_mapping(
    ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
) -> ParamsMapping:
    """Return (parameter prefix, checkpoint prefix, expert, shard) for every projection.

    An engine finds the parameter of a checkpoint tensor by replacing the checkpoint prefix in the
    tensor's name with the parameter prefix.

    ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name: names of the projections in the
        checkpoint.
    """
    expect("num_experts", num_experts, Count)
    names = (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name)
    return [
        (f"experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
        for expert in range(num_experts)
        for shard, name in zip(SHARDS, names, strict=True)
    ]


class ExpertLoader:
    """Creates and loads the parameters of one layer's experts.

    share: the experts and the columns of I that this rank holds.
    format: the checkpoint's format, from `format_of`; None if the checkpoint is unquantized.
    bias: whether projections have a bias. b2 is loaded on TP rank 0 and is zero on other TP ranks.
    transposed: whether parameters have the shapes (e, H, 2I) and (e, I, H). Only for unquantized
        formats.
    """

    def __init__(
        self,
        share: Share,
        format: Format | None = None,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        expect("share", share, Share)
        expect("format", format, Format | None)
        expect("bias", bias, bool)
        expect("transposed", transposed, bool)
        self.format = format_of(None) if format is None else format
        self.bias, self.transposed = bias, transposed
        if self.format.expands_on_load or self.format.torchao is not None:
            need = "another format; `load_experts` reads bitsandbytes' 4 bits, torchao and GGUF"
            raise ConfigurationError("quant_config", got=str(self.format), need=need)
        matrix_scales = [
            stored
            for stored in self.format.stored_tensors
            if stored.role in _MATRIX_SCALE_ROLES and not stored.dims
        ]
        if share.interleaved and matrix_scales:
            need = "gate rows first, because this format has one scale for gate and one for up"
            raise ConfigurationError("interleaved", got=str(self.format), need=need)
        if transposed and self.format.scheme.quantized:
            raise ConfigurationError("transposed", got=str(self.format), need="no quantization")
        if self.format.scheme.act_order or self.format.scheme.scales_by_expert:
            need = "a format without act-order and 4-bit activations; use `load_experts` for these"
            raise ConfigurationError("quant_config", got=str(self.format), need=need)
        self.scheme = fit_scheme(
            self.format, share.intermediate, world=share.tp[1], gated=share.gated
        )
        self.share = replace(share, quant=str(self.scheme))
        self._check_gate_up_packing()
        self._rank_format = self.format.with_scheme(self.scheme)
        biases = (_BIAS,) if bias else ()
        self._stored: tuple[StoredTensor, ...] = (*self.format.stored_tensors, *biases)
        self._parameter_specs = {
            stored.name: stored for stored in (*self._rank_format.stored_tensors, *biases)
        }
        self._loaded: set[tuple[str, str, int]] = set()
        # Input scales of the experts of all ranks, and the keys that were set since the last call
        # of `expert_weights`.
        self._input_scales: dict[tuple[str, int, str], float] = {}
        self._scales_since_build: set[tuple[str, int, str]] = set()

    def _check_gate_up_packing(self) -> None:
        """Raise ConfigurationError if gate rows and up rows would share a packed word."""
        dims = [
            (stored, dim)
            for stored in self.format.stored_tensors
            for dim in stored.dims
            if dim.indivisible
        ]
        for stored, dim in dims if self.share.gated else ():
            if dim.axis == "N" and self.share.width % dim.step:
                need = f"a multiple of {dim.step} per rank: {stored.name} packs {dim.step} rows"
                raise ConfigurationError("intermediate", got=self.share.width, need=need)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Return (shape, dtype) of every parameter, by name. None means the layer's dtype."""
        share, shapes = self.share, {}
        w13_rows = (2 if share.gated else 1) * share.width
        sizes = {"w13": (w13_rows, share.hidden), "w2": (share.hidden, share.width)}
        for name, matrix in sizes.items():
            for tensor in self._parameter_specs.values():
                shape = tensor.shape(*matrix)
                per_projection = tensor.role in _MATRIX_SCALE_ROLES and not tensor.dims
                if per_projection and name == "w13" and share.gated:
                    shape = (2,)  # gate and up have separate scales until `expert_weights`
                if tensor.role == "w" and self.transposed:
                    shape = shape[::-1]
                # If several dtypes are allowed, the first is float32, which represents all of them.
                layer_dtype = tensor.role == "bias" or not self.scheme.quantized
                dtype = None if layer_dtype else tensor.dtypes[0]
                shapes[f"{name}_{tensor.name}"] = ((len(share.slots), *shape), dtype)
        return shapes

    @modes.disable_inference_mode()
    def create_weights(
        self,
        layer: torch.nn.Module,
        dtype: torch.dtype,
        *,
        device: torch.device | str | None = None,
        weight_loader: WeightLoader | None = None,
    ) -> None:
        """Register the parameters on `layer`: w13_weight, w2_weight, and others of the format.

        Every parameter has the attributes `weight_loader` and `quant_method`. `quant_method` is
        "tensor", "channel", "block" or "group" for a scale, and "" otherwise. Scales are
        initialized to 1, and all other parameters to 0.

        dtype: dtype of unquantized weights and biases.
        weight_loader: the attribute `weight_loader`; None uses the method of this loader.
        """
        expect("layer", layer, torch.nn.Module)
        expect("dtype", dtype, torch.dtype)
        expect("weight_loader", weight_loader, Callable | None)
        device = resolve_device(torch.get_default_device() if device is None else device, meta=True)
        roles = {
            f"{matrix}_{name}": tensor.role
            for matrix in ("w13", "w2")
            for name, tensor in self._parameter_specs.items()
        }
        for name, (shape, fixed_dtype) in self.shapes().items():
            data = torch.zeros(shape, dtype=fixed_dtype or dtype, device=device)
            if roles[name] in _SCALE_ROLES and data.is_floating_point():
                data.fill_(_INITIAL_SCALE)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            kind = self.scheme.granularity if roles[name] == "scale" else ""
            self.mark(parameter, weight_loader or self.weight_loader, kind)
            layer.register_parameter(name, parameter)

    @staticmethod
    def mark(parameter: torch.nn.Parameter, loader: WeightLoader, kind: str = "") -> None:
        """Set the attributes that engines read from a parameter.

        loader: the attribute `weight_loader`.
        kind: the attribute `quant_method`.
        """
        parameter.quant_method = kind  # type: ignore[attr-defined]
        parameter.weight_loader = loader  # type: ignore[attr-defined]

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Copy this rank's share of one checkpoint tensor to its destination in a parameter.

        param: a parameter that `create_weights` registered.
        loaded_weight: the whole tensor of one projection of one expert. For shard "w13", the tensor
            has gate and up: gate rows first, or alternating rows if share.interleaved.
        weight_name: a name that ends with the name of the parameter or of the checkpoint tensor,
            such as "w13_weight_scale".
        shard_id: "w1" (gate), "w2" (down), "w3" (up) or "w13" (gate and up).
        expert_id: global id of the expert. Tensors of experts on other ranks are skipped.

        Raises ConfigurationError for an unknown shard, name or expert; ShapeError or DtypeError for
        a tensor that does not match the format; and WeightsError if the input scales of gate and up
        differ.
        """
        expect("weight_name", weight_name, str)
        stored = self._find_stored_tensor(weight_name)
        check_tensor(f"{weight_name}: parameter", param, meta=True)
        check_tensor(weight_name, loaded_weight, meta=param.is_meta)
        check_output(f"{weight_name}: parameter", param, {weight_name: loaded_weight})
        if shard_id == FUSED and self.share.gated and not self.share.interleaved:
            halves = self._split_gate_up(weight_name, stored, loaded_weight)
            for shard, half in zip(("w1", "w3"), halves, strict=True):
                self.weight_loader(param, half, weight_name, shard, expert_id)
            return
        move = destination(expert_id, shard_id, self.share)
        sizes = self._get_matrix_shape(shard_id)
        need = stored.shape(*sizes)
        stored.check(weight_name, tuple(loaded_weight.shape), loaded_weight.dtype, need)
        matrix = "w2" if shard_id == "w2" else "w13"
        expected = self.shapes()[f"{matrix}_{stored.name}"][0]
        if tuple(param.shape) != expected:
            raise ShapeError(f"{weight_name}: parameter", got=tuple(param.shape), need=expected)
        if stored.role == "a_scale":
            self._set_input_scale(stored, matrix, expert_id, shard_id, float(loaded_weight))
        if move is None or stored.role in UNREAD_ROLES:
            return
        loaded_weight = loaded_weight.reshape(need)
        with torch.no_grad():
            if stored.role == "bias" and shard_id == "w2" and self.share.tp[0]:
                pass  # only TP rank 0 adds b2 to the sum over ranks
            elif self._parameter_specs[stored.name].dims:
                self._copy_slice(param.data[move.slot], loaded_weight, stored, move, sizes)
                self._clear_padding(param.data[move.slot], stored, shard_id)
            else:
                self._copy_scalar(param.data[move.slot], loaded_weight, stored, shard_id)
        self._loaded.add((stored.name, shard_id, move.slot))

    def _get_matrix_shape(self, shard: str) -> tuple[int, int]:
        """Return (N, K), the size of a shard's whole matrix."""
        width, hidden = self.share.intermediate, self.share.hidden
        return {"w2": (hidden, width), FUSED: (2 * width, hidden)}.get(shard, (width, hidden))

    def _split_gate_up(
        self, name: str, stored: StoredTensor, loaded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a tensor of gate and up along its rows. A tensor without rows is returned twice.

        Raises ConfigurationError if one scale covers both gate rows and up rows.
        """
        need, width = stored.shape(*self._get_matrix_shape(FUSED)), self.share.intermediate
        stored.check(name, tuple(loaded.shape), loaded.dtype, need)
        dim = next((index for index, dim in enumerate(stored.dims) if dim.axis == "N"), None)
        if dim is None:
            return loaded, loaded
        if width % stored.dims[dim].step:
            step = stored.dims[dim].step
            need_rows = f"a multiple of {step}, the rows per value of {stored.name}"
            raise ConfigurationError(f"{name}: gate rows", got=width, need=need_rows)
        first, second = loaded.reshape(need).chunk(2, dim)
        return first, second

    def expert_weights(self, layer: torch.nn.Module) -> ExpertWeights:
        """Create the kernel's weights from the parameters of `layer`.

        Packed integers stay packed. If gate and up have per-tensor scales, the larger scale becomes
        the common scale, and the weights of the other projection are requantized.

        Raises WeightsError, with the name of a missing tensor, unless all tensors were loaded.
        """
        expect("layer", layer, torch.nn.Module)
        self._check_complete()
        self._scales_since_build.clear()
        fields: dict[str, torch.Tensor | None] = {}
        for matrix, index in (("w13", "1"), ("w2", "2")):
            fused = self._fuse_matrix(layer, matrix)
            for suffix in ("w", "scale", "zero_point", "global_scale"):
                fields[f"w{index}" if suffix == "w" else f"w{index}_{suffix}"] = getattr(
                    fused, suffix
                )
            if self.scheme.static:
                scales = [v for key, v in self._input_scales.items() if key[0] == matrix]
                fields[f"a{index}_scale"] = static_scale(
                    torch.tensor(scales, dtype=torch.float32, device=fused.w.device)
                )
            if self.bias:
                fields[f"b{index}"] = _get_parameter(layer, f"{matrix}_bias")
        share = self.share
        split = (share.width - share.padding, share.width)
        fill_padding(fields, self.scheme, split, gated=share.gated, interleaved=share.interleaved)
        return ExpertWeights(**fields)  # type: ignore[arg-type]

    def _find_stored_tensor(self, weight_name: str) -> StoredTensor:
        last_component = weight_name.rpartition(".")[2]
        name = last_component.removeprefix("w13_").removeprefix("w2_")
        for stored in self._stored:
            if name in (stored.name, *stored.aliases):
                return stored
        need = f"a name that ends with one of {', '.join(stored.name for stored in self._stored)}"
        raise ConfigurationError("weight_name", got=repr(weight_name)[:160], need=need)

    def _copy_slice(
        self,
        target: torch.Tensor,
        loaded: torch.Tensor,
        stored: StoredTensor,
        move: Move,
        sizes: tuple[int, int],
    ) -> None:
        """Copy this rank's rows and columns, and convert them to this rank's group size."""
        stored.check_share(stored.name, move.source_rows, move.source_columns, sizes)
        source = slice_tensors(
            [stored], {stored.name: loaded}, move.source_rows, move.source_columns
        )
        converted = convert_share(
            self.format, self._rank_format, source, move.source_rows, move.source_columns
        )
        if stored.role == "order":
            return  # not a parameter: without act order, the group of column k is k // group
        if stored.role == "w" and self.transposed:
            target = target.mT
        slices = self._parameter_specs[stored.name].slices(move.rows, move.columns)
        target[slices] = converted[stored.name].to(target.dtype)

    def _clear_padding(self, target: torch.Tensor, stored: StoredTensor, shard: str) -> None:
        """Zero the padding of unquantized weights and biases.

        `expert_weights` fills the padding of other tensors.
        """
        if stored.role == "w" and self.transposed:
            target = target.mT
        if self.share.padding and target.dtype in FLOATS and stored.role in ("w", "bias"):
            if stored.role == "bias" and shard == "w2":
                return
            target[stored.slices(*find_padding(shard, self.share))] = 0

    def _copy_scalar(
        self, target: torch.Tensor, loaded: torch.Tensor, stored: StoredTensor, shard: str
    ) -> None:
        per_projection = stored.role in _MATRIX_SCALE_ROLES and target.dim()
        (target[0 if shard == "w1" else 1] if per_projection else target).copy_(loaded)

    def _set_input_scale(
        self, stored: StoredTensor, matrix: str, expert: int, shard: str, value: float
    ) -> None:
        """Store an input scale. Raises WeightsError if the scales of gate and up differ."""
        other_key = (matrix, expert, {"w1": "w3", "w3": "w1"}.get(shard, ""))
        if (
            other_key in self._scales_since_build
            and not abs(self._input_scales[other_key] - value) <= _SCALE_TOLERANCE
        ):
            need = f"{self._input_scales[other_key]}, the scale of the other projection"
            raise WeightsError(stored.name, got=value, need=need)
        self._scales_since_build.add((matrix, expert, shard))
        self._input_scales[matrix, expert, shard] = value

    def _fuse_matrix(self, layer: torch.nn.Module, matrix: str) -> Matrix:
        weight_tensors = [
            stored
            for stored in self._rank_format.stored_tensors
            if stored.role not in (*UNREAD_ROLES, "order", "a_scale")
        ]
        tensors = {
            stored.name: _get_parameter(layer, f"{matrix}_{stored.name}")
            for stored in weight_tensors
        }
        for stored in weight_tensors:
            self._fill_stored_padding(tensors[stored.name], stored, matrix)
        if self.transposed:
            tensors = {name: tensor.mT for name, tensor in tensors.items()}
        dtype = tensors["weight"].dtype if not self.scheme.quantized else torch.float32
        parts = [tensors]
        if self.scheme.granularity == "tensor" and matrix == "w13" and self.share.gated:
            parts = [
                {
                    name: t[:, half] if t.dim() == 2 else t.chunk(2, 1)[half]
                    for name, t in tensors.items()
                }
                for half in (0, 1)
            ]
        return fuse(self._rank_format, parts, dtype)

    def _fill_stored_padding(self, tensor: torch.Tensor, stored: StoredTensor, matrix: str) -> None:
        """Write valid scales and zero points to the padding of a parameter (e, ...)."""
        value_by_role = {"scale": 127 if tensor.dtype is torch.uint8 else 1.0}
        if stored.role == "zero_point":
            value_by_role["zero_point"] = self._compute_stored_zero_point()
        axis = "K" if matrix == "w2" else "N"
        is_split = any(dim.axis == axis for dim in stored.dims)
        if not self.share.padding or not is_split or stored.role not in value_by_role:
            return
        for shard in self.share.shards:
            if (shard == "w2") == (matrix == "w2"):
                rows, columns = find_padding(shard, self.share)
                tensor[(slice(None), *stored.slices_starting_in(rows, columns))] = value_by_role[
                    stored.role
                ]

    def _compute_stored_zero_point(self) -> int:
        """Return a packed int32 word in which every zero point is the middle of its range."""
        bits = 4 if self.scheme.packed else 8
        zero_point = (1 << (bits - 1)) - (self.format.method == "gptq" and self.format.minus_one)
        word = sum(zero_point << shift for shift in range(0, 32, bits))
        return word - (1 << 32) if word >> 31 else word

    def _check_complete(self) -> None:
        missing = [
            f"{stored.name} of {shard}, expert {self.share.slots[slot]}"
            for stored in self._stored
            for shard in self.share.shards
            for slot in range(len(self.share.slots))
            if not (stored.optional or stored.role in UNREAD_ROLES)
            and (stored.name, shard, slot) not in self._loaded
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            got = f"no {missing[0]}{more}"
            need = "all tensors of this rank's experts, loaded with weight_loader"
            raise WeightsError("experts", got=got, need=need)


def _get_parameter(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the values of a parameter that `create_weights` registered."""
    return check_tensor(name, getattr(layer, name, None), meta=True).data


def get_checkpoint_config(quant_config: object) -> str | abc.Mapping[str, object] | None:
    """Return a quantization_config, the name of a scheme, or None.

    quant_config: one of the results, which is returned unchanged; or an object with an
        `activation_scheme` of "dynamic" or "static", which means float8 with one scale per matrix,
        or per block if the object has a `weight_block_size`.

    Raises ConfigurationError for other objects.
    """
    if quant_config is None or isinstance(quant_config, str | abc.Mapping):
        return quant_config
    scheme = getattr(quant_config, "activation_scheme", None)
    if scheme not in ("dynamic", "static"):
        got = type(quant_config).__name__ if scheme is None else f"activation_scheme={scheme!r}"
        need = "a quantization_config, a scheme name, or an activation_scheme"
        raise ConfigurationError("quant_config", got=got, need=need)
    block = getattr(quant_config, "weight_block_size", None)
    return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}


def _make_fp8_config(name: str) -> dict[str, object]:
    """Return the quantization_config of a float8 scheme with scales per matrix or per block."""
    scheme = QuantScheme.parse(name)
    if not scheme.name.startswith("fp8_w8a8") or scheme.granularity not in ("tensor", "block"):
        raise ConfigurationError("quant_config", got=name, need="a float8 format")
    block = list(scheme.group) if scheme.granularity == "block" else None
    activation = "static" if scheme.static else "dynamic"
    return {"quant_method": "fp8", "activation_scheme": activation, "weight_block_size": block}


class UnquantizedEPMoEMethod:
    """Creates the parameters of unquantized experts. The interface follows SGLang."""

    format: Format | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts_per_partition: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype,
        weight_loader: WeightLoader,
    ) -> None:
        """Register w13_weight (e, 2I, H), w2_weight (e, H, I), and the format's scales, if any."""
        share = Share(num_experts_per_partition, hidden_size, intermediate_size)
        create = ExpertLoader(share, self.format).create_weights
        create(layer, params_dtype, weight_loader=weight_loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Convert the tensors that `layer.weight_loader` has loaded to the kernels' layout.

        Raises UnsupportedError unless the layer is an EPMoE or another FusedMoE, and WeightsError
        if a tensor is missing.
        """
        expect("layer", layer, torch.nn.Module)
        process = getattr(layer, "process_weights_after_loading", None)
        if process is None:
            need = "an EPMoE or another FusedMoE"
            what = "layer for process_weights_after_loading"
            raise UnsupportedError(what, got=type(layer).__name__, need=need)
        process()


class Fp8EPMoEMethod(UnquantizedEPMoEMethod):
    """Creates the parameters of float8 experts, with one scale per matrix or per block.

    With one scale per matrix, w13_weight_scale is (e, 2), for gate and up. With static activation
    scales, w13_input_scale and w2_input_scale are (e,), initialized to 1.

    quant_config: the quantization_config of a checkpoint, an object with an `activation_scheme`, or
        the name of a scheme, as for EPMoE.
    """

    def __init__(self, quant_config: object) -> None:
        config = get_checkpoint_config(quant_config)
        self.format = format_of(_make_fp8_config(config) if isinstance(config, str) else config)
        if self.format.scheme.weight != "float8_e4m3fn":
            raise ConfigurationError("quant_config", got=str(self.format), need="a float8 format")
