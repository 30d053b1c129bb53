"""The cases of tests/gpu that force a path of TritonExperts are valid for that path."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from experts.triton.configs.select import choose_config, on_device, override_config
from experts.triton.dequantized import dequantized_config
from experts.triton.gemv_tma import gemv_tma_config
from experts.triton.grouped_tma import grouped_tma_config
from experts.triton.grouped_w4 import grouped_w4_config
from experts.triton.launch_config import Device
from experts.triton.standard import supported_paths
from modular_kernel.spec.problem import Machine

MAKE_DEFAULT_CONFIG = {
    "gemv_tma": lambda problem: gemv_tma_config.default_config(problem, H100),
    "grouped_tma": grouped_tma_config.default_config,
    "dequantized": dequantized_config.default_config,
    "grouped_w4": grouped_w4_config.default_config,
}
TESTS = Path(__file__).parents[1]
H100 = Device.from_machine(Machine("cuda", (9, 0), frozenset({"triton"}), name="NVIDIA H100"))


def load_gpu_test(name: str) -> ModuleType:
    """Import a module of tests/gpu."""
    spec = importlib.util.spec_from_file_location(f"drawn_{name}", TESTS / f"gpu/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("test_streamed_path", "gemv_tma"),
        ("test_permuted_path", "grouped_tma"),
        ("test_dequantized_on_gpu", "dequantized"),
        ("test_grouped_w4_on_gpu", "grouped_w4"),
    ],
)
def test_every_sampled_case_supports_the_path(name: str, path: str) -> None:
    with on_device(H100):
        module = load_gpu_test(name)
        assert len(module.CASES) > 60
        for case in (*module.CASES, *getattr(module, "OTHER_CASES", ())):
            default_config = MAKE_DEFAULT_CONFIG[path](case.problem)
            assert default_config.path == path
            with override_config(default_config):
                config = choose_config(
                    case.problem, case.problem.tokens, supported_paths(case.problem)
                )
            assert config == default_config, str(case)
