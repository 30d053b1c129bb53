"""Runs one MoE layer of SGLang on `MoeRunner`, or on SGLang's own runner.

The first call of the layer determines which runner computes the layer, and logs one line. This
module does not import SGLang.
"""

import logging
from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from modular_kernel.errors import ModularKernelError, UnsupportedError
from modular_kernel.integrations.moe_runner import MoeRunner
from modular_kernel.integrations.runner_formats import StandardDispatchOutput
from modular_kernel.integrations.sglang import translation
from modular_kernel.quant.auto_prepare import AUTO_PREPARED
from modular_kernel.settings import read_settings
from modular_kernel.tensors import ExpertWeights

_LOG = logging.getLogger("modular_kernel.integrations.sglang")


class LayerRunner:
    """Computes a layer's calls, or passes them to SGLang's runner.

    config: SGLang's MoeRunnerConfig. It is read in the first call, because SGLang changes it while
        it builds the layer.
    fallback: SGLang's runner. It is called with the arguments of `run`.
    """

    def __init__(self, config: Any, fallback: Callable[[Any, Any, Any], Any]) -> None:
        self.config, self._fallback = config, fallback
        self._runner: MoeRunner | None = None
        self._runner_config: Any = None  # a copy of the config of `_runner`
        self._interleaved = False
        self.refusal: str | None = None
        self._logged_reasons: set[str] = set()

    def run(self, dispatch_output: Any, quant_info: Any, config: Any) -> torch.Tensor | Any:
        """Return the output tensor, or the result of the fallback.

        A call that this package does not support runs on the fallback. If the first call of the
        layer, or the first call after a change of the config, is not supported, all later calls
        also run on the fallback. Errors of supported calls are raised.
        """
        if self.refusal is None:
            reason = find_unsupported_reason(dispatch_output)
            if reason is None and self._runner is not None and config == self._runner_config:
                return self._run(dispatch_output, quant_info)
            if reason is None:
                return self._run_first(dispatch_output, quant_info, config)
            self._refuse(reason, permanently=self._runner is None)
        return self._fallback(dispatch_output, quant_info, config)

    def prepare_weights(self, quant_info: Any) -> None:
        """Prepare the layer's 4-bit weights, which SGLang has loaded into its tensors.

        The first load makes the prepared copy, before SGLang reserves memory for its KV cache. A
        later load updates the copy, because torch does not track how SGLang writes weights. If the
        layer cannot run on this package, this does nothing.
        """
        try:
            info, _ = translation.convert_quant_info(quant_info)
        except ModularKernelError:
            return  # the first call of the layer logs the error
        weights = ExpertWeights(
            info.w13_weight, info.w2_weight,
            w1_scale=info.w13_scale, w2_scale=info.w2_scale,
            w1_zero_point=info.w13_zp, w2_zero_point=info.w2_zp,
        )  # fmt: skip
        AUTO_PREPARED.refresh(weights, force=True)
        config = self.config
        sizes = config.hidden_size, config.top_k, config.params_dtype
        if self._runner is not None or not info.use_int4_w4a16 or None in sizes:
            return
        try:
            runner, _ = self._make_runner(quant_info, config, weights.w1.device)
            runner.run(_make_empty_call(config, weights.w1.device), info)
        except ModularKernelError:
            return  # the first call of the layer logs the error

    def _make_runner(
        self, quant_info: Any, config: Any, device: torch.device
    ) -> tuple[MoeRunner, bool]:
        """Return the runner of a layer, and whether rows of w13 are interleaved."""
        info, interleaved = translation.convert_quant_info(quant_info)
        our_config = translation.convert_runner_config(config, interleaved=interleaved)
        translation.check_biases(our_config, info)
        return MoeRunner(select_backend(device), our_config), interleaved

    def _run_first(self, dispatch_output: Any, quant_info: Any, config: Any) -> torch.Tensor | Any:
        try:
            device = dispatch_output.hidden_states.device
            runner, self._interleaved = self._make_runner(quant_info, config, device)
            self._runner, self._runner_config = runner, copy(config)
            output = self._run(dispatch_output, quant_info)
        except ModularKernelError as error:  # raised before anything is launched
            self._runner = None
            self._refuse(str(error), permanently=True)
            return self._fallback(dispatch_output, quant_info, config)
        layer, backend = self.config.layer_id, self._runner.runner_backend
        info, _ = translation.convert_quant_info(quant_info)
        _LOG.info("MoE layer %s runs on modular_kernel (%s, %s)", layer, backend, info.scheme())
        return output

    def _run(self, dispatch_output: Any, quant_info: Any) -> torch.Tensor:
        assert self._runner is not None
        info, interleaved = translation.convert_quant_info(quant_info)
        if interleaved != self._interleaved:
            need = f"{self._interleaved}, as in the layer's first call"
            raise UnsupportedError("fuse_swiglu_interleaved", got=interleaved, need=need)
        topk = dispatch_output.topk_output
        our_dispatch_output = StandardDispatchOutput(
            dispatch_output.hidden_states, (topk.topk_weights, topk.topk_ids, None)
        )
        output: torch.Tensor = self._runner.run(our_dispatch_output, info).hidden_states
        return output

    def _refuse(self, reason: str, *, permanently: bool) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            log_refusal(self.config.layer_id, reason)
        if permanently:
            self.refusal = reason


def _make_empty_call(config: Any, device: torch.device) -> StandardDispatchOutput:
    """Return a call without tokens, which makes a kernel prepare its weights."""
    x_TH = torch.empty(0, config.hidden_size, dtype=config.params_dtype, device=device)
    weights_TK = torch.empty(0, config.top_k, dtype=torch.float32, device=device)
    ids_TK = torch.empty(0, config.top_k, dtype=torch.int32, device=device)
    return StandardDispatchOutput(x_TH, (weights_TK, ids_TK, None))


def log_refusal(layer: object, reason: str) -> None:
    """Log that SGLang's own runner computes a layer, and why."""
    first_line = reason.splitlines()[0] if reason else "unknown"
    _LOG.warning("MoE layer %s runs on SGLang's triton, not modular_kernel: %s", layer, first_line)


def find_unsupported_reason(dispatch_output: Any) -> str | None:
    """Return why modular_kernel cannot run a call with any weights.

    Return None if this depends on the weights. If `dispatch_output` has a quantized copy of the
    tokens, the copy is ignored, because the part quantizes the tokens itself.
    """
    format = getattr(dispatch_output.format, "value", dispatch_output.format)
    if format != "standard":
        return f"dispatch format: got {format}, need standard"
    if dispatch_output.hidden_states_scale is not None:
        return "hidden_states_scale: got a tensor, need None, that is, unquantized tokens"
    topk = dispatch_output.topk_output
    if not hasattr(topk, "topk_ids") or not hasattr(topk, "topk_weights"):
        return f"topk_output: got {type(topk).__name__}, need topk_weights and topk_ids"
    return None


def select_backend(device: torch.device) -> str:
    """Return the name of `MoeRunner`'s backend for a device."""
    if device.type != "cpu" or read_settings().triton_interpret:
        return "triton"
    return "torch"
