"""Registers the backend "modular_kernel" in SGLang 0.5.23.

SGLang's quantization methods choose the layout of weights by the selected backend, and many methods
create `MoeRunner` with a fixed backend. Therefore, two hooks treat "modular_kernel" like "triton":
`is_triton` also returns True for "modular_kernel", and `MoeRunner.__init__` replaces "triton" with
"modular_kernel". The hooks are registered in SGLang's HookRegistry, and do nothing if another
backend is selected. The backend is a runner core, because SGLang supports fused operations only for
its own backends.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from modular_kernel.utils.after_import import call_after_import

_LOG = logging.getLogger("modular_kernel.integrations.sglang")
BACKEND_NAME = "modular_kernel"
_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.runner"
_UTILS_MODULE = "sglang.srt.layers.moe.utils"
# Classes of SGLang that load int4 weights for its triton backend, by module.
_QUANTIZATION = "sglang.srt.layers.quantization"
_INT4_METHODS = {
    f"{_QUANTIZATION}.moe_wna16": "MoeWNA16Method",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_wNa16_moe": (
        "CompressedTensorsWNA16TritonMoE"
    ),
}
_INIT_PARAMETERS = ["self", "runner_backend", "config", "lora_enabled"]


def install() -> None:
    """Add the choice "modular_kernel" to `--moe-runner-backend`, and install the backend.

    The backend is installed when SGLang imports its MoE modules, because a launcher process parses
    arguments without importing them. Raises an exception if a module or an attribute is missing.
    """
    from sglang.srt.arg_groups.choices import (
        MOE_RUNNER_BACKEND_CHOICES,
        add_moe_runner_backend_choices,
    )

    if _RUNNER_MODULE in sys.modules:
        _install_backend()
    else:
        call_after_import(_RUNNER_MODULE, _install_backend_later)
    for module, method in _INT4_METHODS.items():
        call_after_import(module, partial(_prepare_after_loading, module, method))
    if BACKEND_NAME not in MOE_RUNNER_BACKEND_CHOICES:
        add_moe_runner_backend_choices([BACKEND_NAME])


def _install_backend_later() -> None:
    """Install the backend and its hooks. Errors are logged, so that SGLang's import succeeds."""
    try:
        _install_backend()
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()
    except Exception as error:  # noqa: BLE001  (an import of SGLang must not fail)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning("SGLang runs without the MoE backend modular_kernel: %s", reason)


def _install_backend() -> None:
    """Register the core and the hooks, if they are not registered.

    SGLang applies the hooks after it has loaded its plugins.
    """
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, FusedOpPool
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner, register_moe_runner_core
    from sglang.srt.layers.moe.utils import (
        RegisteredMoeRunnerBackend,
        get_moe_a2a_backend,
        get_moe_runner_backend,
        resolve_moe_runner_backend,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    required_functions = (
        get_moe_a2a_backend,
        get_moe_runner_backend,
        FusedOpPool.get_fused_func,
        RegisteredMoeRunnerBackend.is_triton,
    )
    if not all(callable(function) for function in required_functions):
        got = required_functions
        raise TypeError(f"functions of SGLang's MoE runners: got {got}, need callables")
    arguments = list(inspect.signature(MoeRunner.__init__).parameters)
    if arguments != _INIT_PARAMETERS:
        raise TypeError(f"MoeRunner.__init__: got {arguments}, need {_INIT_PARAMETERS}")
    try:
        resolve_moe_runner_backend(BACKEND_NAME)
    except ValueError:
        core = type("ModularKernelRunnerCore", (RunnerCore, DispatchMoeRunnerCore), {})
        register_moe_runner_core(BACKEND_NAME, core)
        for target, hook in (
            (f"{_UTILS_MODULE}.RegisteredMoeRunnerBackend.is_triton", is_triton),
            (f"{_RUNNER_MODULE}.MoeRunner.__init__", init_runner),
        ):
            source = HookSource(BACKEND_NAME, "modular-kernel")
            HookRegistry.register(target, hook, HookType.AROUND, source=source)


def is_triton(original: Callable[[Any], bool], backend: Any) -> bool:
    """Return True also for our backend, because it reads weights in the layout of triton."""
    return backend.value == BACKEND_NAME or original(backend)


def init_runner(
    original: Callable[..., None],
    runner: Any,
    runner_backend: Any,
    config: Any,
    lora_enabled: bool = False,
) -> None:
    """Replace the backend "triton" in `MoeRunner.__init__`, if our backend is selected."""
    from sglang.srt.layers.moe.utils import (
        MoeRunnerBackend,
        get_moe_runner_backend,
        resolve_moe_runner_backend,
    )

    backend_names = runner_backend.value, get_moe_runner_backend().value
    if runner_backend.is_triton() and BACKEND_NAME in backend_names:
        reason = _find_unsupported_reason(config, lora_enabled=lora_enabled)
        if reason is None:
            runner_backend = resolve_moe_runner_backend(BACKEND_NAME)
        else:
            from modular_kernel.integrations.sglang.layer_runner import log_refusal

            log_refusal(config.layer_id, reason)
            runner_backend = MoeRunnerBackend.TRITON
    original(runner, runner_backend, config, lora_enabled)


def _prepare_after_loading(module: str, class_name: str) -> None:
    """Prepare int4 weights of layers on our backend after SGLang has loaded them.

    SGLang's HookRegistry is not used, because it would import modules during an import.
    """
    method_class: Any = getattr(sys.modules[module], class_name, None)
    original = getattr(method_class, "process_weights_after_loading", None)
    if original is None or hasattr(original, "modular_kernel_original"):
        return

    @wraps(original)
    def process_weights_after_loading(method: Any, layer: Any) -> None:
        original(method, layer)
        core = getattr(getattr(method, "runner", None), "runner_core", None)
        if isinstance(core, RunnerCore):
            core.layer_runner.prepare_weights(method.get_triton_quant_info(layer))

    process_weights_after_loading.modular_kernel_original = original  # type: ignore[attr-defined]
    method_class.process_weights_after_loading = process_weights_after_loading


def _find_unsupported_reason(config: Any, *, lora_enabled: bool) -> str | None:
    """Return why modular_kernel cannot run a layer that is being built, or None if it may."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    from modular_kernel.errors import ModularKernelError
    from modular_kernel.integrations.sglang.translation import convert_runner_config

    if lora_enabled:
        return "lora_enabled: got True, need False"
    all2all = get_moe_a2a_backend()
    if not all2all.is_none():
        return f"--moe-a2a-backend: got {all2all.value}, need none"
    try:
        convert_runner_config(config)
    except ModularKernelError as error:
        return str(error)
    return None


class RunnerCore:
    """The runner core of our backend. `_install_backend` adds SGLang's base class."""

    def __init__(self, config: Any) -> None:
        from modular_kernel.integrations.sglang.layer_runner import LayerRunner

        self.config = config
        self.layer_runner = LayerRunner(config, run_triton)

    @property
    def runner_backend(self) -> Any:
        """SGLang's object for the backend."""
        from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

        return resolve_moe_runner_backend(BACKEND_NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, config: Any, hooks: Any = None
    ) -> Any:
        """Return SGLang's combine input for a dispatch output.

        hooks: LoRA hooks, which are not supported. Must be None.
        """
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        if hooks is not None:
            raise NotImplementedError("LoRA hooks of modular_kernel: got hooks, need None")
        output = self.layer_runner.run(dispatch_output, quant_info, config)
        if isinstance(output, StandardCombineInput):
            return output
        return StandardCombineInput(hidden_states=output)


def run_triton(dispatch_output: Any, quant_info: Any, config: Any) -> Any:
    """Run SGLang's triton backend on a dispatch output."""
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    all2all = get_moe_a2a_backend().value
    fused_func = FusedOpPool.get_fused_func(all2all, "triton")
    if fused_func is None:
        raise NotImplementedError(f"backend triton: got --moe-a2a-backend {all2all}, need none")
    return fused_func(dispatch_output, quant_info, config)
