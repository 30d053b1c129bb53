"""The parameters of a layer's experts: what each must be, and how kernels see them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from modular_kernel.errors import DtypeError, StateError, UnsupportedError, WeightsError
from modular_kernel.layers.module_state import holds_loaded, moved_only
from modular_kernel.layers.parallel import GROUPS, LayerParallel
from modular_kernel.layers.weight_loading import ExpertLoader
from modular_kernel.operators.pairing import layer_text
from modular_kernel.quant import prepared
from modular_kernel.quant.quantized_weights import TensorSpec, weight_specs
from modular_kernel.replay import modes
from modular_kernel.spec.placement import Placement
from modular_kernel.spec.problem import DTYPES, Problem, dtype_name
from modular_kernel.tensors import ExpertWeights, check_loaded, fill_unloaded
from modular_kernel.utils.argument_checks import available_device, expect
from modular_kernel.utils.tensor_checks import check_local, check_tensor

# Fields of ExpertWeights, and the parameters that hold them.
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

_READY = "modular_kernel_ready"  # of a state_dict's metadata


class ExpertParameters(nn.Module):
    """The share of a layer's experts that one rank holds, as parameters by PARAMETERS.

    problem: of this rank. placement: where experts live over EP ranks. device: where parameters are
    made; floats are NaN until they are loaded. loader: of a checkpoint's format; if that is a
    quantized one, parameters are as the checkpoint has them until
    `process_weights_after_loading`.

    Moves and casts (`to`, `cuda`, `half`, `bfloat16`, `float`): what a scheme stores (codes,
    scales, zero points, orders) moves and is never cast. Unquantized weights and biases are cast,
    and problem.dtype becomes their dtype; of a quantized layer it becomes the dtype that the cast
    asks for. Prepared weights of parameters that moved are dropped. DtypeError, before anything
    changes, for a dtype that no layer computes in.
    """

    expert_map: torch.Tensor | None
    _no_bias: torch.Tensor | None

    @modes.kept()
    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        parallel: LayerParallel,
        loader: ExpertLoader | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        device = available_device(
            torch.get_default_device() if device is None else device, meta=True
        )
        self.problem, self.placement, self.parallel = problem, placement, parallel
        self._loader, self._ready = loader, loader is None or not loader.scheme.quantized
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
        where = placement.expert_map(parallel.ep[0], device) if problem.expert_map else None
        self.register_buffer("expert_map", where, persistent=False)
        # b2 is not cut over TP ranks: one of them adds it.
        zeros = None
        if problem.bias and parallel.tp[0] > 0:
            zeros = torch.zeros(self.specs()["b2"].shape, dtype=problem.dtype, device=device)
        self.register_buffer("_no_bias", zeros, persistent=False)
        self._bound: tuple[tuple[object, ...], ExpertWeights] | None = None
        self._unloaded = True  # as far as is known: the first call looks, see `weights`
        self._describe()

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Copy this rank's share of one tensor of a checkpoint, as `ExpertLoader` does.

        Every parameter has it as an attribute, too. UnsupportedError for a layer that was made for
        a scheme by its name, not for a checkpoint.
        """
        self._of_checkpoint("weight_loader").weight_loader(
            param, loaded_weight, weight_name, shard_id, expert_id
        )

    @modes.kept()
    def process_weights_after_loading(self) -> None:
        """Make what kernels take of what `weight_loader` has loaded, in place of it.

        WeightsError, and nothing is changed, if a tensor of this rank is missing.
        """
        self.set_weights(self._of_checkpoint("process_weights_after_loading").expert_weights(self))

    def _of_checkpoint(self, method: str) -> ExpertLoader:
        if self._loader is None:
            need = "quant_config: a checkpoint's quantization_config, or None"
            raise UnsupportedError(method, got=f"quant_config={self.problem.quant!r}", need=need)
        return self._loader

    def specs(self) -> dict[str, TensorSpec]:
        """Return what each parameter must be, by its field of ExpertWeights."""
        problem = self.problem
        found = dict(weight_specs(problem))
        if problem.bias:
            dtypes = (problem.dtype, torch.float32)
            rows, e = problem.w1_rows, problem.e
            found["b1"] = TensorSpec((e, rows), dtypes, "(e, N)")
            found["b2"] = TensorSpec((e, problem.hidden), dtypes, "(e, H)")
        return found

    def set_weights(self, weights: ExpertWeights) -> None:
        """Take tensors of this rank's share as parameters, without copying them.

        As `load_experts` returns them: of the experts here, cut along I. WeightsError, and nothing
        is taken, if one is missing, is not the layer's, or has another shape or dtype.
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
        for name in [*self._loader.shapes()] if self._loader is not None else ():
            if hasattr(self, name):
                delattr(self, name)
        for field in specs:
            parameter = nn.Parameter(tensors[field].detach(), requires_grad=False)
            if self._loader is not None and not self.problem.scheme.quantized:
                self._loader.mark(parameter, self.weight_loader)  # a checkpoint's shape still
            self.register_parameter(PARAMETERS[field], parameter)
        self._ready, self._bound, self._unloaded = True, None, False

    def mark_loaded(self) -> None:
        """Have calls run whatever the parameters hold.

        A layer whose parameters were all copied into needs no mark. It is for weights that really
        hold NaN in the first or last value of an expert, which look like those of a new layer.
        """
        self._unloaded = False

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[_READY] = self._ready

    @modes.kept()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        """Load what a layer like this one had, whether a checkpoint's tensors or kernels' own.

        Those of kernels make this layer ready, as `set_weights` does. Where both look alike, what
        the layer that was saved says of itself decides.
        """
        if not self._ready:
            self._take_ready(state_dict, prefix, bool(local_metadata.get(_READY, False)))
        if self._ready:
            self._make_room(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        self._let_go_if_moved()
        if self._ready and self._unloaded:
            names = [name for name, each in self._parameters.items() if each is not None]
            self._unloaded = not holds_loaded(names, state_dict, prefix)

    def _take_ready(self, state_dict: dict[str, Any], prefix: str, said: bool) -> None:
        """Take the state's tensors if they are as kernels want them; leave them else."""
        device, found = next(self.parameters()).device, {}
        for field, spec in self.specs().items():
            tensor = state_dict.get(prefix + PARAMETERS[field])
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != spec.shape:
                return
            if tensor.dtype not in spec.dtypes:
                return
            found[field] = tensor
        own = {name: (tuple(p.shape), p.dtype) for name, p in self.named_parameters(recurse=False)}
        theirs = {PARAMETERS[name]: (tuple(t.shape), t.dtype) for name, t in found.items()}
        if said or own != theirs:
            copies = {name: tensor.detach().clone().to(device) for name, tensor in found.items()}
            self.set_weights(ExpertWeights(**copies))

    def _make_room(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Give scales of 16 bits the dtype of those that come: they might not hold their values."""
        for field, spec in self.specs().items():
            name, tensor = PARAMETERS[field], state_dict.get(prefix + PARAMETERS[field])
            own = getattr(self, name)
            if not field.endswith("_scale") or own.itemsize != 2:
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.shape != own.shape:
                continue
            if tensor.dtype in {*spec.dtypes} - {own.dtype}:
                empty = torch.empty_like(own, dtype=tensor.dtype)
                self.register_parameter(name, nn.Parameter(empty, False))

    def weights(self) -> ExpertWeights:
        """Return the parameters as kernels take them; the same object until one is exchanged.

        StateError while they are as a checkpoint has them, or as the layer was made. A layer whose
        parameters were written by hand is looked at once, which synchronizes; loading methods and
        `load_state_dict` leave nothing to look at. LayoutError for a DTensor.
        """
        if not self._ready:
            raise _not_ready()
        found = self._found()
        places = _places(found)
        if self._bound is None or self._bound[0] != places:
            self._check(found)
            self._bound = places, ExpertWeights(**found)
        return self._bound[1]

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        """Check that nothing is a DTensor, and that all was loaded."""
        named = {PARAMETERS.get(field, field): tensor for field, tensor in found.items()}
        for name, tensor in named.items():
            check_local(name, tensor)
        if self._unloaded:
            named.pop("expert_map", None)  # is not loaded, and is -1 for experts elsewhere
            check_loaded(named)
            self._unloaded = next(iter(named.values())).is_meta

    def operands(self) -> tuple[list[torch.Tensor], str]:
        """Return params and fields of the operator `experts`, as torch.compile traces them.

        Errors of `weights`; where it would have to look at values, the operator does.
        """
        if not self._ready:
            raise _not_ready()
        found = [getattr(self, name) for name in self._operand_names]
        for name, tensor in zip(self._operand_names, found, strict=True):
            check_local(name, tensor)
        plain, looked_at = self._operand_fields
        return found, looked_at if self._unloaded else plain

    def _describe(self) -> None:
        """Write down what the operator `experts` is given of the layer, for torch.compile."""
        names = {field: PARAMETERS[field] for field in self.specs()}
        if self._no_bias is not None:
            names["b2"] = "_no_bias"
        if self.expert_map is not None:
            names["expert_map"] = "expert_map"
        self._operand_names = tuple(names.values())
        looked_at = [field if field == "expert_map" else f"{field}:loaded" for field in names]
        self._operand_fields = ",".join(names), ",".join(looked_at)
        self._described = self.problem
        try:
            self._layer_text = layer_text(self.problem)
        except UnsupportedError:  # over ranks: no operator
            self._layer_text = ""

    def plain_weights(self) -> ExpertWeights:
        """Return `weights` without what was prepared of them, and let that go."""
        self.keep_prepared(prepared.plain(self.weights()))
        return self.weights()

    def keep_prepared(self, weights: ExpertWeights) -> None:
        """Have `weights` return these, the same parameters with what was prepared of them."""
        assert self._bound is not None
        self._bound = self._bound[0], weights

    def _found(self) -> dict[str, torch.Tensor]:
        found = {field: getattr(self, PARAMETERS[field]) for field in self.specs()}
        if self._no_bias is not None:
            found["b2"] = self._no_bias
        if self.expert_map is not None:
            found["expert_map"] = self.expert_map
        return found

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Self:
        """Move or cast the layer, as the class says."""
        dtype = self._dtype_after(fn)
        kept = [tensor for name, tensor in self._own_tensors() if not self._is_cast(name)]
        was_meta = next(self.parameters(recurse=False)).is_meta

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if any(tensor is each for each in kept):
                return moved_only(fn, tensor)
            return fn(tensor)

        before = {name: vars(each) for name, each in self._parameters.items() if each is not None}
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        for name, attributes in before.items():  # of a parameter that torch made anew
            vars(self._parameters[name]).update(attributes)
        if dtype is not self.problem.dtype:
            self.problem = replace(self.problem, dtype=dtype)
            self._widen_scales()
            self._describe()
        if was_meta and not next(self.parameters(recurse=False)).is_meta:
            self._fill_made()
        self._let_go_if_moved()
        return self

    def _own_tensors(self) -> list[tuple[str, torch.Tensor]]:
        own = [*self._parameters.items(), *self._buffers.items()]
        return [(name, tensor) for name, tensor in own if tensor is not None]

    def _is_cast(self, name: str) -> bool:
        """Whether a cast reaches a parameter or buffer: unquantized weights, and biases."""
        if not self._ready and self._loader is not None:
            own = self._loader.shapes().get(name)
            return own is not None and own[1] is None
        plain = () if self.problem.scheme.quantized else ("w13_weight", "w2_weight")
        return name in (*plain, "w13_bias", "w2_bias", "_no_bias")

    def _dtype_after(self, fn: Callable[..., torch.Tensor]) -> torch.dtype:
        """Return the layer's dtype after `fn`; DtypeError if no layer computes in it."""
        device = next(self.parameters(recurse=False)).device
        dtype = fn(torch.empty(0, dtype=self.problem.dtype, device=device)).dtype
        if dtype is not self.problem.dtype and dtype not in DTYPES.values():
            need = " or ".join(DTYPES)
            raise DtypeError("cast of a layer", got=dtype_name(dtype), need=need)
        return dtype

    def _widen_scales(self) -> None:
        """Store scales of 16 bits that the layer's new dtype does not go with as float32.

        That loses nothing, as a cast to the new dtype might.
        """
        for field, spec in self.specs().items() if self._ready else ():
            own = getattr(self, PARAMETERS[field])
            if field.endswith("_scale") and own.dtype not in spec.dtypes:
                assert torch.float32 in spec.dtypes
                own.data = own.data.float()

    def _fill_unloaded(self) -> None:
        """Give parameters the values that tell that nothing was loaded."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                fill_unloaded(name, parameter.data)

    def _fill_made(self) -> None:
        """Give parameters that have memory for the first time the values that they are made with.

        They come from the meta device, by `to_empty`.
        """
        if self._ready:
            self._fill_unloaded()
            self._unloaded = True
        if self.expert_map is not None:
            self.expert_map.copy_(self.placement.expert_map(self.parallel.ep[0], "cpu"))
        if self._no_bias is not None:
            self._no_bias.zero_()

    def _let_go_if_moved(self) -> None:
        if self._bound is not None and self._bound[0] != _places(self._found()):
            self._bound = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: its parameters lie elsewhere, so nothing is prepared of them.

        UnsupportedError for a layer with process groups, which belong to one process.
        """
        held = [name for name in GROUPS if getattr(self.parallel, name) is not None]
        if held:
            need = "its state_dict, loaded into a layer made with the groups of the other process"
            raise UnsupportedError(
                "torch.save or copy of a layer", got=" and ".join(held), need=need
            )
        return self.__dict__ | {"_bound": None}


def _not_ready() -> StateError:
    need = "process_weights_after_loading, or set_weights, before a call"
    return StateError("weights", got="parameters as a checkpoint has them", need=need)


def _places(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    return tuple((id(each), each.data_ptr()) for each in tensors.values())
