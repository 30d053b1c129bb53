"""Every packaged tuned file is found, fits its device, and has times that improve on no tuning."""

from pathlib import Path

import pytest
from tuned_config_files import MACHINE

import experts
from experts.triton.configs.files import ConfigKey, TunedConfigs, read_config_file
from experts.triton.configs.lookup import ConfigLookup, fit_to_problem
from experts.triton.launch_config import Device
from modular_kernel.cli.presets import BASELINE_SHAPES, SHAPES
from modular_kernel.spec.problem import Problem

FOLDER = Path(experts.__file__).parent / "triton" / "configs" / "data"
FILES = sorted(FOLDER.glob("*/*.json"))
DEVICE = Device.from_machine(MACHINE)
SCHEMES = ("none", "fp8_w8a8_block", "fp8_w8a8_channel", "int4_w4a16_group", "mxfp4_w4a16")
LOOKUP = ConfigLookup((("packaged", FOLDER),), DEVICE, "3.6.0")


def get_experts_and_intermediate(name: str) -> tuple[int, int]:
    return SHAPES[name]["experts"], SHAPES[name]["intermediate"]


def read_file_and_problem(path: Path) -> tuple[TunedConfigs, Problem]:
    """Return the contents of a file, and the problem for which it was tuned."""
    key, tuned_configs = ConfigKey.parse(path.name), read_config_file(path)
    assert tuned_configs.tuned_for is not None
    for quant in SCHEMES:
        sizes = (
            tuned_configs.tuned_for.hidden,
            key.intermediate,
            key.experts,
            tuned_configs.tuned_for.top_k,
        )
        problem = Problem(1, *sizes, quant=quant)
        if ConfigKey.from_problem(problem, DEVICE.name) == key:
            return tuned_configs, problem
    raise AssertionError(f"{path.name} is for none of {SCHEMES}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.replace(",", "-"))
def test_a_file_is_found_and_fits(path: Path) -> None:
    tuned_configs, problem = read_file_and_problem(path)
    source = LOOKUP.find_source(problem)
    assert source.origin == str(path)
    assert source.notes == ()
    assert source.searched_locations == ()
    assert tuned_configs.triton == "3.6.0"
    assert fit_to_problem(tuned_configs, problem, DEVICE).steps == source.steps
    # Prefill uses the tiles of the largest number of tokens. Tiles that were tuned for a few
    # hundred tokens would be slow.
    assert min(tuned_configs.configs()) == 1
    assert max(tuned_configs.configs()) >= 4096
    assert set(tuned_configs.times) <= set(tuned_configs.configs())
    for times in tuned_configs.times.values():
        assert times.untuned_us is None or 0 < times.us <= times.untuned_us


def test_tuned_shapes_have_names() -> None:
    keys = ("experts", "hidden", "intermediate", "top_k")
    named_shapes = {tuple(shape[key] for key in keys) for shape in SHAPES.values()}
    for path in FILES:
        _, problem = read_file_and_problem(path)
        shape = problem.experts, problem.hidden, problem.intermediate, problem.top_k
        assert shape in named_shapes


@pytest.mark.parametrize("quant", ["none", "fp8_w8a8_block", "fp8_w8a8_channel"])
def test_all_baseline_shapes_are_tuned(quant: str) -> None:
    tuned_shapes = {
        (problem.experts, problem.intermediate)
        for _, problem in map(read_file_and_problem, FILES)
        if problem.quant == quant
    }
    assert {get_experts_and_intermediate(name) for name in BASELINE_SHAPES} <= tuned_shapes
    assert len(tuned_shapes) >= 11
