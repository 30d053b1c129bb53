"""Run a command under every CPU instruction set that oneDNN can be limited to on this machine.

    python tools/cpu_isa.py                      what this machine has
    python tools/cpu_isa.py -- COMMAND [ARG ...]  the command once for each, one after the other

oneDNN, which computes torch's 16-bit products, reads ONEDNN_MAX_CPU_ISA once, so each run is a
process of its own; torch's own kernels are limited by ATEN_CPU_CAPABILITY with it. Exits with 1 if
a run fails; the others run nevertheless. A machine of another architecture runs the command once.
"""

import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from modular_kernel.settings import environment_of_child

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
# A value of ONEDNN_MAX_CPU_ISA, the flags in /proc/cpuinfo that it needs, and torch's capability.
ISAS = (
    ("AVX2", ("avx2", "fma"), "avx2"),
    ("AVX2_VNNI_2", ("avx2", "fma", "avx_vnni_int8", "avx_ne_convert"), "avx2"),
    ("AVX512_CORE", _AVX512, "avx512"),
    ("AVX512_CORE_BF16", (*_AVX512, "avx512_bf16"), "avx512"),
    ("AVX512_CORE_FP16", (*_AVX512, "avx512_bf16", "avx512_fp16"), "avx512"),
    ("AVX512_CORE_AMX", (*_AVX512, "amx_tile", "amx_bf16", "amx_int8"), "avx512"),
    ("AVX512_CORE_AMX_FP16", (*_AVX512, "amx_tile", "amx_bf16", "amx_fp16"), "avx512"),
)
# oneDNN prints what it uses when it is first called; this calls it on every CPU.
_CALL = "import torch; torch.ones(2, 2).to_mkldnn()"


def cpu_flags(cpuinfo):
    """Return the flags of the first processor in the text of /proc/cpuinfo; none of an Arm's."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def split_isas(flags):
    """Return the settings that a CPU of these flags has, and the missing flags of the others."""
    missing = {name: sorted(set(needed) - flags) for name, needed, _ in ISAS}
    return [n for n in missing if not missing[n]], {n: m for n, m in missing.items() if m}


def environment(name=None):
    """Return the environment of a process without the interpreter; name: limits it."""
    env = environment_of_child(interpreted=False)
    capability = {isa: of_torch for isa, _, of_torch in ISAS}.get(name)
    if capability is None:
        return env
    return env | {"ONEDNN_MAX_CPU_ISA": name, "ATEN_CPU_CAPABILITY": capability}


def onednn_isa(env):
    """Return what oneDNN says that it uses, "unknown" if it says nothing."""
    shown = subprocess.run(
        [sys.executable, "-c", _CALL],
        env={**env, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [line.split("isa:")[1] for line in shown.splitlines() if ",cpu,isa:" in line]
    return found[0] if found else "unknown"


def report(present, missing):
    """Print what this machine has: the CPU, what torch and oneDNN use, and the settings."""
    capability, env = torch.backends.cpu.get_cpu_capability(), environment()
    print(f"CPU: {platform.machine()}, torch {torch.__version__} uses {capability}")
    print(f"oneDNN uses {onednn_isa(env)}, ONEDNN_MAX_CPU_ISA is {env.get('ONEDNN_MAX_CPU_ISA')}")
    print(f"has: {', '.join(present) or 'none of the settings'}")
    for name, flags in missing.items():
        print(f"lacks: {name} ({', '.join(flags)})")
    sys.stdout.flush()


def run_all(command, present):
    """Run the command under each setting; return the names of those under which it failed."""
    failed = []
    for name in present or ["DEFAULT"]:
        env = environment(name)
        begin = time.monotonic()
        print(f"ONEDNN_MAX_CPU_ISA={name}: oneDNN uses {onednn_isa(env)}", flush=True)
        if subprocess.run(command, env=env, check=False).returncode:
            failed.append(name)
        print(f"ONEDNN_MAX_CPU_ISA={name}: {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def main(arguments):
    """Print what this machine has, run a command after `--`, and return the exit status."""
    if arguments and (arguments[0] != "--" or len(arguments) == 1):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path("/proc/cpuinfo")
    present, missing = split_isas(cpu_flags(file.read_text() if file.exists() else ""))
    report(present, missing)
    if not arguments:
        return 0
    failed = run_all(arguments[1:], present)
    lacking = f"; this machine lacks {', '.join(missing)}" if missing else ""
    print(f"ran under {', '.join(present) or 'the default'}{lacking}")
    if failed:
        print(f"failed under {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
