"""ExpertParameters: the parameters of a layer's experts, with loading, moves and casts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from modular_kernel.errors import DtypeError, StateError, UnsupportedError, WeightsError
from modular_kernel.layers.module_state import is_state_loaded, move_without_cast
from modular_kernel.layers.parallel import GROUP_FIELDS, LayerParallel
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.operators.pairing import serialize_layer
from modular_kernel.quant import prepared
from modular_kernel.quant.auto_prepare import AUTO_PREPARED
from modular_kernel.quant.quantized_weights import TensorSpec, weight_specs
from modular_kernel.replay import modes
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import DTYPES, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights, check_loaded, fill_with_sentinel
from modular_kernel.utils.argument_checks import expect, resolve_device
from modular_kernel.utils.tensor_checks import check_not_dtensor, check_tensor

# Field of ExpertWeights -> parameter of the layer.
PARAMETERS = {
    "w1": "w13_weight",
    "w2": "w2_weight",
    "b1": "w13_bias",
    "b2": "w2_bias",
    "w1_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
    "w1_zero_point": "w13_weight_zero_point",
    "w2_zero_point": "w2_weight_zero_point",
    "w1_global_scale": "w13_weight_global_scale",
    "w2_global_scale": "w2_weight_global_scale",
    "w1_order": "w13_weight_order",
    "a1_scale": "w13_input_scale",
    "a2_scale": "w2_input_scale",
}

_READY_KEY = "modular_kernel_ready"  # key of `_ready` in the metadata of a state_dict


class ExpertParameters(nn.Module):
    """One rank's share of a layer's experts, as the parameters that PARAMETERS lists.

    problem: the problem of this rank.
    placement: the experts of each EP rank.
    parallel: this rank's position.
    loader: loader of the checkpoint's format; None if the layer was created with the name of a
        scheme. With a quantized format, the parameters have the checkpoint's layout until
        `process_weights_after_loading`.
    device: device of the parameters. Floating-point parameters are NaN until they are loaded.

    Moves and casts (`to`, `cuda`, `half`, `bfloat16`, `float`) have these effects:

    - Quantized tensors (codes, scales, zero points and orders) are moved but never cast.
    - Unquantized weights and biases are moved and cast.
    - problem.dtype becomes the dtype of the cast.
    - If parameters moved, their prepared weights are dropped.
    - A cast to an unsupported dtype raises DtypeError before anything changes.
    """

    expert_map: torch.Tensor | None
    _no_bias: torch.Tensor | None

    @modes.disable_inference_mode()
    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        parallel: LayerParallel,
        loader: ExpertLoader | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        device = resolve_device(torch.get_default_device() if device is None else device, meta=True)
        self.problem, self.placement, self.parallel = problem, placement, parallel
        self._loader = loader
        # Whether the parameters have the layout of the kernels.
        self._ready = loader is None or not loader.scheme.quantized
        if loader is not None:
            loader.create_weights(
                self, problem.dtype, device=device, weight_loader=self.weight_loader
            )
        else:
            for field, spec in self.specs().items():
                empty = torch.empty(spec.shape, dtype=spec.dtypes[0], device=device)
                self.register_parameter(PARAMETERS[field], nn.Parameter(empty, False))
        if self._ready:
            self._fill_unloaded()
        expert_map = placement.expert_map(parallel.ep[0], device) if problem.expert_map else None
        self.register_buffer("expert_map", expert_map, persistent=False)
        # b2 is not split over TP ranks. Only rank 0 adds it, and the other ranks add zeros.
        zeros = None
        if problem.bias and parallel.tp[0] > 0:
            zeros = torch.zeros(self.specs()["b2"].shape, dtype=problem.dtype, device=device)
        self.register_buffer("_no_bias", zeros, persistent=False)
        # (identities of the tensors, the ExpertWeights that hold them)
        self._cached_weights: tuple[tuple[object, ...], ExpertWeights] | None = None
        self._must_check_loaded = True  # whether `weights` must check that all tensors are loaded
        self._cached_names: tuple[Problem | None, dict[str, str]] = None, {}
        self._store_operator_arguments()

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Copy this rank's share of one checkpoint tensor (`ExpertLoader.weight_loader`).

        Every parameter also has this method as its attribute `weight_loader`. Raises
        UnsupportedError if the layer was created with the name of a scheme instead of a
        checkpoint's quantization_config.
        """
        self._get_checkpoint_loader("weight_loader").weight_loader(
            param, loaded_weight, weight_name, shard_id, expert_id
        )

    @modes.disable_inference_mode()
    def process_weights_after_loading(self) -> None:
        """Convert the tensors that `weight_loader` has loaded to the layout of the kernels.

        If a tensor of this rank is missing, raises WeightsError and changes nothing.
        """
        self.set_weights(
            self._get_checkpoint_loader("process_weights_after_loading").expert_weights(self)
        )

    def _get_checkpoint_loader(self, method: str) -> ExpertLoader:
        if self._loader is None:
            need = "a checkpoint's quantization_config, or None"
            raise UnsupportedError(method, got=f"quant_config={self.problem.quant!r}", need=need)
        return self._loader

    def specs(self) -> dict[str, TensorSpec]:
        """Return the shape and dtypes of each parameter, by its field of ExpertWeights."""
        problem = self.problem
        specs = dict(weight_specs(problem))
        if problem.bias:
            dtypes = (problem.dtype, torch.float32)
            rows, e = problem.w1_rows, problem.e
            specs["b1"] = TensorSpec((e, rows), dtypes, "(e, N)")
            specs["b2"] = TensorSpec((e, problem.hidden), dtypes, "(e, H)")
        return specs

    def set_weights(self, weights: ExpertWeights) -> None:
        """Use the tensors of `weights` as parameters, without copying them.

        weights: this rank's experts and columns of I, as `load_experts` returns them.

        If a tensor is missing, unexpected, or has another shape or dtype, raises WeightsError and
        changes nothing.
        """
        expect("weights", weights, ExpertWeights)
        specs, tensors = self.specs(), vars(weights)
        for field, name in PARAMETERS.items():
            spec, tensor = specs.get(field), tensors[field]
            if (tensor is None) != (spec is None):
                got = "None" if tensor is None else "a tensor"
                raise WeightsError(name, got=got, need=str(spec))
            if tensor is None or spec is None:
                continue
            check_tensor(name, tensor, meta=True)
            if tuple(tensor.shape) != spec.shape or tensor.dtype not in spec.dtypes:
                got = f"{tuple(tensor.shape)} {tensor.dtype}".replace("torch.", "")
                raise WeightsError(name, got=got, need=str(spec))
        replaced = set() if self._loader is None else {*self._loader.shapes()}
        parameters = {n: p for n, p in self._parameters.items() if n not in replaced}
        for field in specs:
            parameter = nn.Parameter(tensors[field].detach(), requires_grad=False)
            if self._loader is not None and not self.problem.scheme.quantized:
                # Unquantized parameters keep the checkpoint's shape and can be loaded again.
                self._loader.mark(parameter, self.weight_loader)
            parameters[PARAMETERS[field]] = parameter
        # Update in one step, so that an interrupt leaves either the old or the new parameters.
        vars(self).update(
            _parameters=parameters, _ready=True, _cached_weights=None, _must_check_loaded=False
        )

    def mark_loaded(self) -> None:
        """Skip the check that parameters are loaded.

        Call this method only for weights that are meant to have a NaN as the first or last value of
        an expert. The check cannot distinguish such weights from parameters that were not loaded.
        """
        self._must_check_loaded = False

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[_READY_KEY] = self._ready

    @modes.disable_inference_mode()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        """Load tensors in the checkpoint's layout, or in the layout of the kernels.

        If both layouts have the same shapes and dtypes, the metadata of the state says which layout
        the tensors have.
        """
        if not self._ready:
            self._load_kernel_layout(
                state_dict, prefix, bool(local_metadata.get(_READY_KEY, False))
            )
        if self._ready:
            self._match_scale_dtypes(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self._drop_prepared_if_moved()
        if self._cached_weights is not None:
            AUTO_PREPARED.refresh(self._cached_weights[1])
        if self._ready and self._must_check_loaded:
            names = [name for name, parameter in self._parameters.items() if parameter is not None]
            self._must_check_loaded = not is_state_loaded(names, state_dict, prefix)

    def _load_kernel_layout(
        self, state_dict: dict[str, Any], prefix: str, is_marked_ready: bool
    ) -> None:
        """Set copies of the state's tensors as weights if they have the layout of the kernels.

        is_marked_ready: whether the metadata of the state says that they have this layout.
        """
        device, tensors = next(self.parameters()).device, {}
        for field, spec in self.specs().items():
            tensor = state_dict.get(prefix + PARAMETERS[field])
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
                return
            if tensor.dtype not in spec.dtypes:
                return
            tensors[field] = tensor
        current_specs = {
            name: (tuple(p.shape), p.dtype) for name, p in self.named_parameters(recurse=False)
        }
        loaded_specs = {PARAMETERS[name]: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        if is_marked_ready or current_specs != loaded_specs:
            copies = {name: tensor.detach().clone().to(device) for name, tensor in tensors.items()}
            self.set_weights(ExpertWeights(**copies))

    def _match_scale_dtypes(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Give scales the dtype that they have in the state.

        The dtype of 16-bit scales is changed so that loading is exact. The dtype of float32 scales
        is changed only before the layer is loaded: float32 can hold 16-bit scales exactly, but
        kernels are slower with float32 scales.
        """
        for field, spec in self.specs().items():
            name, tensor = PARAMETERS[field], state_dict.get(prefix + PARAMETERS[field])
            current = getattr(self, name)
            if not field.endswith("_scale") or not (
                self._must_check_loaded or current.itemsize == 2
            ):
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.shape != current.shape:
                continue
            if tensor.dtype in {*spec.dtypes} - {current.dtype}:
                converted = current.detach().to(tensor.dtype)  # keeps the NaN of unloaded scales
                self.register_parameter(name, nn.Parameter(converted, False))

    def weights(self) -> ExpertWeights:
        """Return the parameters as ExpertWeights.

        The same object is returned until a parameter is replaced. If parameters were not loaded
        with a method of this class or `load_state_dict`, the first call checks that their values
        were set, which synchronizes.

        Raises StateError if the parameters have the checkpoint's layout or were not loaded, and
        LayoutError for a DTensor.
        """
        if not self._ready:
            raise _make_not_ready_error()
        tensors = self._collect_tensors()
        identity = _get_identities(tensors)
        if self._cached_weights is None or self._cached_weights[0] != identity:
            self._check_tensors(tensors)
            self._cached_weights = identity, ExpertWeights(**tensors)
        return self._cached_weights[1]

    def _check_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that no tensor is a DTensor, and that all tensors were loaded."""
        parameters = {PARAMETERS.get(field, field): tensor for field, tensor in tensors.items()}
        for name, tensor in parameters.items():
            check_not_dtensor(name, tensor)
        if self._must_check_loaded:
            # -1 is a valid value of expert_map, but marks other integers as unloaded.
            parameters.pop("expert_map", None)
            check_loaded(parameters)
            self._must_check_loaded = next(iter(parameters.values())).is_meta

    def operands(self) -> tuple[list[torch.Tensor], str]:
        """Return the arguments `params` and `fields` of the operator `experts`.

        torch.compile can trace this method, which raises the same errors as `weights`, except for
        the check of values, which the operator does.
        """
        if not self._ready:
            raise _make_not_ready_error()
        operands = [getattr(self, name) for name in self._operand_names]
        for name, tensor in zip(self._operand_names, operands, strict=True):
            check_not_dtensor(name, tensor)
        unchecked_fields, checked_fields = self._operand_fields
        return operands, checked_fields if self._must_check_loaded else unchecked_fields

    def _store_operator_arguments(self) -> None:
        """Store the constant arguments of the operator `experts`, for torch.compile."""
        names = self._get_names_by_field()
        self._operand_names = tuple(names.values())
        checked = [field if field == "expert_map" else f"{field}:loaded" for field in names]
        self._operand_fields = ",".join(names), ",".join(checked)
        self._operator_problem = self.problem
        try:
            self._layer_text = serialize_layer(self.problem)
        except UnsupportedError:  # a problem over several ranks has no operator
            self._layer_text = ""

    def plain_weights(self) -> ExpertWeights:
        """Drop prepared tensors, and return `weights` without them."""
        self.keep_prepared(prepared.remove_prepared(self.weights()))
        return self.weights()

    def keep_prepared(self, weights: ExpertWeights) -> None:
        """Make `weights` return this object: the parameters, with or without prepared tensors."""
        assert self._cached_weights is not None
        self._cached_weights = self._cached_weights[0], weights

    def _collect_tensors(self) -> dict[str, torch.Tensor]:
        # Read the dict directly: nn.Module's attribute lookup is slow, and this runs in every call.
        parameters, tensors = self._parameters, {}
        for field, name in self._get_names_by_field().items():
            tensor = parameters.get(name)
            tensors[field] = self._get_tensor_attribute(name) if tensor is None else tensor
        return tensors

    def _get_tensor_attribute(self, name: str) -> torch.Tensor:
        """Return a buffer or a computed parameter. Raises StateError if there is none."""
        tensor: object = getattr(self, name, None)
        if not isinstance(tensor, torch.Tensor):
            got = "None" if tensor is None else type(tensor).__name__
            raise StateError(name, got=got, need="a parameter; call set_weights to register it")
        return tensor

    def _get_names_by_field(self) -> dict[str, str]:
        """Return the parameter or buffer of each field of ExpertWeights that the layer has."""
        problem, names = self._cached_names
        if problem is not self.problem:
            names = {field: PARAMETERS[field] for field in self.specs()}
            if self._no_bias is not None:
                names["b2"] = "_no_bias"
            if self.expert_map is not None:
                names["expert_map"] = "expert_map"
            self._cached_names = self.problem, names
        return names

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast the layer, as the class docstring describes."""
        dtype = self._dtype_after(fn)
        moved_tensors = [tensor for name, tensor in self._list_tensors() if not self._is_cast(name)]
        was_meta = next(self.parameters(recurse=False)).is_meta

        def apply_or_move(tensor: torch.Tensor) -> torch.Tensor:
            if any(tensor is moved_tensor for moved_tensor in moved_tensors):
                return move_without_cast(fn, tensor)
            return fn(tensor)

        attributes_by_name = {
            name: vars(p) for name, p in self._parameters.items() if p is not None
        }
        super()._apply(apply_or_move, recurse)  # type: ignore[no-untyped-call]
        # torch may have created new Parameters, which do not have the attributes of the old ones.
        for name, attributes in attributes_by_name.items():
            vars(self._parameters[name]).update(attributes)
        if dtype is not self.problem.dtype:
            self.problem = replace(self.problem, dtype=dtype)
            self._widen_scales()
            self._store_operator_arguments()
        if was_meta and not next(self.parameters(recurse=False)).is_meta:
            self._reset_after_to_empty()
        self._drop_prepared_if_moved()
        return self

    def _list_tensors(self) -> list[tuple[str, torch.Tensor]]:
        tensors = [*self._parameters.items(), *self._buffers.items()]
        return [(name, tensor) for name, tensor in tensors if tensor is not None]

    def _is_cast(self, name: str) -> bool:
        """Return whether casts apply to the tensor: it is an unquantized weight or a bias."""
        if not self._ready and self._loader is not None:
            shape_dtype = self._loader.shapes().get(name)
            return shape_dtype is not None and shape_dtype[1] is None
        unquantized_names = () if self.problem.scheme.quantized else ("w13_weight", "w2_weight")
        return name in (*unquantized_names, "w13_bias", "w2_bias", "_no_bias")

    def _dtype_after(self, fn: Callable[..., torch.Tensor]) -> torch.dtype:
        """Return the layer's dtype after `fn`. Raises DtypeError for an unsupported dtype."""
        device = next(self.parameters(recurse=False)).device
        dtype = fn(torch.empty(0, dtype=self.problem.dtype, device=device)).dtype
        if dtype is not self.problem.dtype and dtype not in DTYPES.values():
            need = " or ".join(DTYPES)
            raise DtypeError("cast of a layer", got=dtype_name(dtype), need=need)
        return dtype

    def _widen_scales(self) -> None:
        """Convert scales whose dtype is not allowed with the layer's new dtype to float32.

        Unlike a cast to the new dtype, this is exact.
        """
        for field, spec in self.specs().items() if self._ready else ():
            parameter = getattr(self, PARAMETERS[field])
            if field.endswith("_scale") and parameter.dtype not in spec.dtypes:
                assert torch.float32 in spec.dtypes
                parameter.data = parameter.data.float()

    def _fill_unloaded(self) -> None:
        """Fill parameters with the values that mark them as not loaded."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                fill_with_sentinel(name, parameter.data)

    def _reset_after_to_empty(self) -> None:
        """Set the initial values of parameters that `to_empty` has moved from the meta device."""
        if self._ready:
            self._fill_unloaded()
            self._must_check_loaded = True
        if self.expert_map is not None:
            self.expert_map.copy_(self.placement.expert_map(self.parallel.ep[0], "cpu"))
        if self._no_bias is not None:
            self._no_bias.zero_()

    def _drop_prepared_if_moved(self) -> None:
        if self._cached_weights is None:
            return
        if self._cached_weights[0] != _get_identities(self._collect_tensors()):
            self._cached_weights = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without prepared weights.

        Raises UnsupportedError for a layer with process groups, which belong to one process.
        """
        groups = [name for name in GROUP_FIELDS if getattr(self.parallel, name) is not None]
        if groups:
            need = "no process groups; create the layer in each process and load its state_dict"
            raise UnsupportedError(
                "torch.save or copy of a layer", got=" and ".join(groups), need=need
            )
        return self.__dict__ | {"_cached_weights": None}


def _make_not_ready_error() -> StateError:
    need = "parameters in the kernels' layout; call process_weights_after_loading or set_weights"
    return StateError("weights", got="parameters in the checkpoint's layout", need=need)


def _get_identities(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    return tuple((id(tensor), tensor.data_ptr()) for tensor in tensors.values())
