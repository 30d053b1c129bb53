"""The plugin as SGLang loads it: its changes, how to disable it, and the time of its import."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang_program

from modular_kernel.integrations.moe_runner import MoeQuantInfo, MoeRunnerConfig
from modular_kernel.integrations.sglang import MODULE_BY_VERSION, register, v0_5_23
from modular_kernel.settings import make_child_environment

PROGRAM = Path(sglang_program.__file__)


def run_program(backend: str, **variables: str) -> dict[str, Any]:
    """Run sglang_program.py in a new process, and return the report that it prints."""
    environment = make_child_environment(interpreted=True) | variables
    result = subprocess.run(
        [sys.executable, str(PROGRAM), backend],
        capture_output=True, text=True, env=environment, check=False, timeout=280,
    )  # fmt: skip
    assert not result.returncode, result.stderr[-2000:]
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_selected_backend_runs_every_layer() -> None:
    report = run_program("modular_kernel")
    assert set(map(tuple, report["selected"].values())) == {
        ("modular_kernel", "ModularKernelRunnerCore", None)
    }
    assert report["choices"].count("modular_kernel") == 1
    assert report["logs"] == []
    assert not report["loaded"], "loaded before a layer was built"
    assert report["seconds"] < 1


def test_disabled_plugin_does_not_change_the_selection() -> None:
    disabled = run_program("auto", MK_SGLANG="0")
    assert "modular_kernel" not in disabled["choices"]
    assert disabled["selected"] == run_program("auto")["selected"]
    names = {name for name, _, _ in disabled["selected"].values()}
    assert names == {"triton"}


def test_backend_name_is_refused_if_the_plugin_is_disabled() -> None:
    with pytest.raises(
        AssertionError, match=r"modular_kernel.* is neither built in nor registered"
    ):
        run_program("modular_kernel", MK_SGLANG="0")


def test_untested_sglang_is_not_patched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["modular_kernel.integrations.sglang"]
    monkeypatch.setattr(module, "version", lambda name: "0.6.0")
    monkeypatch.setattr(module, "import_module", pytest.fail)
    register()
    (record,) = caplog.records
    assert record.getMessage() == (
        "SGLang runs without the MoE backend modular_kernel: got SGLang 0.6.0, need 0.5.23"
    )


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("sglang.srt.layers.moe.moe_runner.runner.register_moe_runner_core", None, "cannot import"),
        ("sglang.srt.arg_groups.choices.add_moe_runner_backend_choices", None, "cannot import"),
        (
            "sglang.srt.layers.moe.moe_runner.runner.MoeRunner.__init__",
            lambda self, backend: None,
            "MoeRunner.__init__: got ['self', 'backend'], need",
        ),
        ("sglang.srt.layers.moe.utils.get_moe_a2a_backend", 1, "need callables"),
    ],
)
def test_moved_internals_are_logged_once(
    target: str,
    value: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if value is None:
        monkeypatch.delattr(target)
    else:
        monkeypatch.setattr(target, value)
    register()
    (record,) = caplog.records
    assert record.getMessage().startswith("SGLang runs without the MoE backend modular_kernel: ")
    assert message in record.getMessage()


def test_plugin_can_be_registered_again(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    register()
    assert HookRegistry._hooks == before
    assert MOE_RUNNER_BACKEND_CHOICES.count("modular_kernel") == 1
    assert not caplog.records


def test_fused_operations_cannot_use_a_registered_name() -> None:
    """SGLang accepts only its own backend names for fused operations.

    The plugin therefore hooks MoeRunner. If this test fails with a later SGLang,
    `register_fused_func` can replace the hook.
    """
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool

    with pytest.raises(ValueError, match="modular_kernel"):
        FusedOpPool.register_fused_func("none", v0_5_23.BACKEND_NAME, lambda *arguments: None)


def test_installed_version_is_tested() -> None:
    from importlib.metadata import version

    assert version("sglang") in MODULE_BY_VERSION


def get_field_defaults(record: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(record)}


def test_fields_equal_those_of_the_installed_sglang() -> None:
    """If SGLang adds a field, the plugin must translate it, or refuse values except the default."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig as SGLangConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    defaults = get_field_defaults(MoeRunnerConfig)
    assert defaults.pop("chunk_tokens") == 64 * 1024
    assert defaults == get_field_defaults(SGLangConfig)
    assert list(defaults) == list(get_field_defaults(SGLangConfig))
    quant, sglang_quant = get_field_defaults(MoeQuantInfo), get_field_defaults(TritonMoeQuantInfo)
    assert sglang_quant.keys() - quant.keys() == {"use_mxfp8", "fuse_swiglu_interleaved"}
    shared_names = sglang_quant.keys() & quant.keys()
    assert {name: quant[name] for name in shared_names} == {
        name: sglang_quant[name] for name in shared_names
    }
