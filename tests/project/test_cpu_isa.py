"""Tests of tools/cpu_isa.py, which `make test-isa` uses to run a command under every CPU
instruction set.
"""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "cpu_isa.py"
AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = spec_from_file_location("cpu_isa", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "present"),
    [
        (set(), []),
        ({"avx2", "fma"}, ["AVX2"]),
        (AVX512, ["AVX2", "AVX512_CORE"]),
        (
            AMX,
            ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX"],
        ),
    ],
    ids=["none", "avx2", "avx512", "amx"],
)
def test_instruction_sets_follow_from_cpu_flags(
    tool: ModuleType, flags: set[str], present: list[str]
) -> None:
    cpuinfo = (
        f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\nprocessor\t: 1\nflags\t\t: other\n"
    )
    present_isas, missing = tool.split_isas(tool.parse_cpu_flags(cpuinfo))
    assert present_isas == present
    assert sorted([*present_isas, *missing]) == sorted(name for name, *_ in tool.ISAS)
    assert all(set(needed) & flags == set() for needed in missing.values())
    assert tool.parse_cpu_flags("processor : 0\nFeatures : asimd bf16\n") == frozenset()


def test_environment_limits_the_instruction_set(tool: ModuleType) -> None:
    for name, _, capability in tool.ISAS:
        env = tool.make_environment(name)
        assert (env["ONEDNN_MAX_CPU_ISA"], env["ATEN_CPU_CAPABILITY"]) == (name, capability)
        assert "TRITON_INTERPRET" not in env


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("code", [0, 3])
def test_command_runs_under_each_instruction_set(tool: ModuleType, code: int) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    present, missing = tool.split_isas(tool.parse_cpu_flags(cpuinfo.read_text()))
    program = (
        f"import os; print('in', os.environ.get('ONEDNN_MAX_CPU_ISA')); raise SystemExit({code})"
    )
    result = run_tool("--", sys.executable, "-c", program)
    assert result.returncode == int(bool(code)), result.stderr
    lines = result.stdout.splitlines()
    assert [line[3:] for line in lines if line.startswith("in ")] == (present or ["None"])
    assert [line.split()[1] for line in lines if line.startswith("lacks: ")] == list(missing)
    assert "oneDNN uses unknown" not in result.stdout
    assert any(line.startswith("failed under") for line in lines) is bool(code)


def test_invalid_arguments_are_refused() -> None:
    assert run_tool("--").returncode == 2
    assert run_tool("ls").returncode == 2
