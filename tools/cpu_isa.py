"""Run a command under every CPU instruction set that oneDNN can be limited to on this machine.

    python tools/cpu_isa.py                       # prints the instruction sets of this machine
    python tools/cpu_isa.py -- COMMAND [ARG ...]  # runs the command once per instruction set

oneDNN computes torch's 16-bit GEMMs. It reads ONEDNN_MAX_CPU_ISA only once, so each run is a
separate process. ATEN_CPU_CAPABILITY limits torch's own kernels accordingly. If a run fails, the
remaining runs still take place, and the exit status is 1. On architectures other than x86, the
command runs once.
"""

import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from modular_kernel.settings import make_child_environment

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
# (value of ONEDNN_MAX_CPU_ISA, required flags in /proc/cpuinfo, value of ATEN_CPU_CAPABILITY).
ISAS = (
    ("AVX2", ("avx2", "fma"), "avx2"),
    ("AVX2_VNNI_2", ("avx2", "fma", "avx_vnni_int8", "avx_ne_convert"), "avx2"),
    ("AVX512_CORE", _AVX512, "avx512"),
    ("AVX512_CORE_BF16", (*_AVX512, "avx512_bf16"), "avx512"),
    ("AVX512_CORE_FP16", (*_AVX512, "avx512_bf16", "avx512_fp16"), "avx512"),
    ("AVX512_CORE_AMX", (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"), "avx512"),
    ("AVX512_CORE_AMX_FP16", (*_AVX512, "amx_tile", "amx_bf16", "amx_fp16"), "avx512"),
)
# Calls oneDNN, which prints its instruction set in the first call.
_CALL = "import torch; torch.ones(2, 2).to_mkldnn()"


def parse_cpu_flags(cpuinfo):
    """Return the flags of the first processor in the text of /proc/cpuinfo; empty on Arm."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def split_isas(flags):
    """Return the supported settings for these CPU flags, and the missing flags of the others."""
    missing = {name: sorted(set(required) - flags) for name, required, _ in ISAS}
    return [n for n in missing if not missing[n]], {n: m for n, m in missing.items() if m}


def make_environment(name=None):
    """Return the environment of a child process without Triton's interpreter.

    name: entry of ISAS that limits the instruction set. None means no limit.
    """
    env = make_child_environment(interpreted=False)
    capability = {isa: torch_capability for isa, _, torch_capability in ISAS}.get(name)
    if capability is None:
        return env
    return env | {"ONEDNN_MAX_CPU_ISA": name, "ATEN_CPU_CAPABILITY": capability}


def get_onednn_isa(env):
    """Return the instruction set that oneDNN reports, or "unknown" if it reports none."""
    output = subprocess.run(
        [sys.executable, "-c", _CALL],
        env={**env, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    reported = [line.split("isa:")[1] for line in output.splitlines() if ",cpu,isa:" in line]
    return reported[0] if reported else "unknown"


def print_report(supported, missing):
    """Print the CPU, the instruction sets that torch and oneDNN use, and the settings."""
    capability, env = torch.backends.cpu.get_cpu_capability(), make_environment()
    print(f"CPU: {platform.machine()}, torch {torch.__version__} uses {capability}")
    print(
        f"oneDNN uses {get_onednn_isa(env)}, ONEDNN_MAX_CPU_ISA is {env.get('ONEDNN_MAX_CPU_ISA')}"
    )
    print(f"has: {', '.join(supported) or 'none of the settings'}")
    for name, flags in missing.items():
        print(f"lacks: {name} ({', '.join(flags)})")
    sys.stdout.flush()


def run_all(command, supported):
    """Run the command under each setting. Returns the names of the settings that failed."""
    failed = []
    for name in supported or ["DEFAULT"]:
        env = make_environment(name)
        start = time.monotonic()
        print(f"ONEDNN_MAX_CPU_ISA={name}: oneDNN uses {get_onednn_isa(env)}", flush=True)
        if subprocess.run(command, env=env, check=False).returncode:
            failed.append(name)
        print(f"ONEDNN_MAX_CPU_ISA={name}: {time.monotonic() - start:.0f} s", flush=True)
    return failed


def main(arguments):
    """Print the report, and run the command after `--` if there is one. Returns the exit status."""
    if arguments and (arguments[0] != "--" or len(arguments) == 1):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path("/proc/cpuinfo")
    supported, missing = split_isas(parse_cpu_flags(file.read_text() if file.exists() else ""))
    print_report(supported, missing)
    if not arguments:
        return 0
    failed = run_all(arguments[1:], supported)
    suffix = f"; this machine lacks {', '.join(missing)}" if missing else ""
    print(f"ran under {', '.join(supported) or 'the default'}{suffix}")
    if failed:
        print(f"failed under {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
