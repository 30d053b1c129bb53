"""The interfaces of vLLM that the plugin uses, and layers that stay on vLLM's own kernels."""

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm_layers import version_module, vllm_layer, vllm_process

from modular_kernel.errors import UnsupportedError
from modular_kernel.integrations import vllm as plugin
from modular_kernel.integrations.vllm import hooks
from modular_kernel.settings import make_child_environment
from modular_kernel.spec.problem import Problem

BASE = Problem(tokens=17, hidden=64, intermediate=32, experts=4, top_k=2)
version = version_module()


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with vllm_process():
        plugin.register()
        yield


def list_names(cls: type) -> set[str]:
    return {*dir(cls), *inspect.signature(cls).parameters}


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (FusedMoEConfig, version.CONFIG_FIELDS),
        (FusedMoEParallelConfig, version.PARALLEL_FIELDS),
        (FusedMoEQuantConfig, version.QUANT_FIELDS),
    ],
)
def test_configs_have_the_fields_that_the_plugin_reads(cls: type, names: tuple[str, ...]) -> None:
    assert set(names) - list_names(cls) == set()


@pytest.mark.parametrize("name", sorted(version.ORACLES))
def test_oracles_have_the_replaced_functions(name: str) -> None:
    oracle = version.ORACLES[name]
    module = import_module(oracle.module)
    assert oracle.find_missing(module) == []
    for function in oracle.select_functions + oracle.later_functions:
        assert hasattr(getattr(module, function), hooks.ORIGINAL_ATTRIBUTE), function


@pytest.mark.parametrize("name", ["apply", "workspace_shapes", "__init__", "activation_format"])
@pytest.mark.parametrize("experts", [version.StandardExperts, version.BatchedExperts])
def test_methods_accept_the_arguments_of_vllm(experts: type, name: str) -> None:
    vllm_parameters = inspect.signature(getattr(FusedMoEExpertsModular, name)).parameters
    parameters = inspect.signature(getattr(experts, name)).parameters
    assert name == "__init__" or list(parameters) == list(vllm_parameters)
    assert not getattr(experts, "__abstractmethods__", None)


def test_later_functions_have_the_arguments_that_the_plugin_reads() -> None:
    required_arguments = {
        "make_wna16_moe_kernel": {"experts_cls", "moe_config", "moe_quant_config"},
        "convert_to_wna16_moe_kernel_format": {
            "backend", "quant_config", "w13", "w13_scale", "w13_qzeros", "w2", "w2_scale",
            "w2_qzeros",
        },
        "convert_to_nvfp4_moe_kernel_format": {
            "layer", "w13", "w13_scale", "w13_scale_2", "a13_scale", "w2", "w2_scale",
            "w2_scale_2", "a2_scale",
        },
    }  # fmt: skip
    for oracle in version.ORACLES.values():
        for function in oracle.later_functions:
            vllm_function = getattr(
                getattr(import_module(oracle.module), function), hooks.ORIGINAL_ATTRIBUTE
            )
            assert required_arguments[function] <= set(inspect.signature(vllm_function).parameters)


def runs_on_our_parts(problem: Problem, **options: Any) -> bool:
    cls = vllm_layer(problem, **options).quant_method.experts_cls
    # In vLLM 0.26 on a CPU, cls is None.
    return cls is not None and issubclass(cls, version.StandardExperts)


def test_environment_variable_selects_the_part_of_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, only named parts are used, because vLLM's kernels are faster than those parts."""
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    assert runs_on_our_parts(BASE)
    for value in ("0", "1"):
        monkeypatch.setenv("MK_VLLM", value)
        assert not runs_on_our_parts(BASE)


PROGRAM = """
from vllm_layers import version_module, vllm_layer, vllm_process
import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
from modular_kernel.integrations.vllm import register
from modular_kernel.spec.problem import Problem
with vllm_process():
    for _ in range(2):
        method = vllm_layer(Problem(17, 64, 32, 4, 2)).quant_method
        selection = method.unquantized_backend, method.experts_cls
        print(*selection, hasattr(oracle.select_unquantized_moe_backend, "__wrapped__"))
        register()
"""


def test_disabled_plugin_does_not_change_vllm() -> None:
    """vLLM selects the same class before and after a call of `register`."""
    # The child process must find the helpers, which pytest added to sys.path, and this checkout.
    variables = {"MK_VLLM": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = make_child_environment(interpreted=False) | variables
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    before, after = result.stdout.splitlines()[-2:]
    assert before == after
    assert before.startswith("UnquantizedMoeBackend.CPU")
    assert before.endswith("False")


def test_unsupported_layers_run_on_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged once for all layers that it applies to."""
    monkeypatch.setenv("MK_VLLM", "TritonExperts")
    hooks.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "vllm.modular_kernel"):
        logging.getLogger("vllm").propagate = True
        supported = replace(BASE, experts=4, top_k=2, activation="swiglu_clamp_after")
        assert runs_on_our_parts(supported)
        monkeypatch.setenv("MK_VLLM", "TritonExpert")
        assert not runs_on_our_parts(BASE)
        assert not runs_on_our_parts(BASE)
    (message,) = {m for m in caplog.messages if "leaves a layer" in m}
    assert "got 'TritonExpert'" in message
    assert "TritonExperts" in message


def test_explicit_backends_of_vllm_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    oracle = version.ORACLES["fp8"]
    config = type("Config", (), {"moe_backend": "marlin"})()
    assert oracle.handle("select_fp8_moe_backend", {"config": config}) is None


def test_layers_with_adapters_run_on_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_VLLM", "TorchExperts")
    monkeypatch.setattr(get_current_vllm_config(), "lora_config", LoRAConfig())
    assert not runs_on_our_parts(BASE)


def test_four_bit_rows_of_deepep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DEEPEPLL_NVFP4_DISPATCH", "1")
    monkeypatch.setenv("MK_VLLM", "NaiveBatchedExperts")
    config = vllm_layer(BASE).moe_config
    parallel = replace(
        config.moe_parallel_config, use_ep=True, dp_size=2, all2all_backend="deepep_low_latency"
    )
    config = replace(config, moe_parallel_config=parallel)
    arguments = {"config": config, "weight_key": kNvfp4Static, "activation_key": kNvfp4Dynamic}
    oracle = version.ORACLES["nvfp4"]
    with pytest.raises(UnsupportedError, match="VLLM_DEEPEPLL_NVFP4_DISPATCH: got 1, need 0"):
        oracle.handle("select_nvfp4_moe_backend", arguments)
    monkeypatch.setenv("VLLM_DEEPEPLL_NVFP4_DISPATCH", "0")
    _, experts = oracle.handle("select_nvfp4_moe_backend", arguments)
    assert experts.scheme == "nvfp4_w4a16"


def test_vllm_is_not_changed_if_a_name_has_moved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = version.ORACLES["int8"]
    module = import_module(oracle.module)
    vllm_function = getattr(module.select_int8_moe_backend, hooks.ORIGINAL_ATTRIBUTE)
    monkeypatch.setattr(module, "select_int8_moe_backend", vllm_function)
    monkeypatch.delattr(module, "Int8MoeBackend")
    logging.getLogger("vllm").propagate = True
    hooks._replace_functions("int8", version.__name__)
    assert module.select_int8_moe_backend is vllm_function
    (message,) = [m for m in caplog.messages if "layers of int8" in m]
    assert "Int8MoeBackend.TRITON" in message


def test_workspaces_have_the_dtype_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MK_VLLM", "TritonExperts")
    layer = vllm_layer(BASE)
    layer.quant_method.process_weights_after_loading(layer)
    experts = layer.quant_method.moe_kernel.fused_experts
    sizes = [experts.workspace_shapes(m, 64, 64, 2, 4, 4, None, None) for m in (1, 17, 2048)]
    assert [first for first, _, _ in sizes] == [(0,)] * 3
    assert [out for _, _, out in sizes] == [(1, 64), (17, 64), (2048, 64)]
    assert sizes[0][1] <= sizes[1][1] <= sizes[2][1]
    nbytes = experts._calls.workspace_bytes(17, 2)
    assert sizes[1][1][0] * torch.bfloat16.itemsize >= nbytes
