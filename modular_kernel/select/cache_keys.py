"""Keys of the measurements that `compose` caches on disk (`select.cache`).

The identity (device, problem, distribution of the input) selects a file of the cache. The versions
of the software select a record in that file.
"""

import hashlib
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from modular_kernel.catalog import collect_probes, load_catalog
from modular_kernel.settings import read_settings
from modular_kernel.spec.problem import Machine, Problem
from modular_kernel.utils.package_probes import find_package, installed_version

_DIGITS = 16

KeyFields = dict[str, str]


def make_identity_fields(
    problem: Problem, machine: Machine, *, routing: str, replicated: bool
) -> KeyFields:
    """Return the fields that identify a cache file: the device, the problem, and the input.

    The number of tokens and the rank of the problem are not part of the identity.

    routing: distribution of tokens over experts, in the syntax of RoutingKind.parse.
    replicated: whether all ranks pass the same tokens.
    """
    parallel = problem.parallel
    problem_without_tokens = replace(problem, tokens=0, parallel=replace(parallel, rank=0))
    fields = {
        "device": machine.name or platform.processor() or platform.machine(),
        "arch": f"{machine.arch[0]}.{machine.arch[1]}" if machine.arch else machine.device,
        "problem": str(problem_without_tokens),
        "world_size": str(parallel.world_size),
        "placement": _hash_text(repr(problem.placement.slots)),
        "routing": routing,
        "input": "replicated" if replicated else "own",  # "own": each rank has different tokens
    }
    return {name: text[:400] for name, text in fields.items()}


def version_fields(machine: Machine) -> KeyFields:
    """Return the versions and settings that must be equal for cached times to be valid.

    They include a digest of the tuned files in the configuration folder, because `mk tune` changes
    launch configurations. On a CPU, they include the number of torch threads.
    """
    fields = {
        "modular-kernel": _version("modular-kernel"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "parts": _hash_text(repr(_get_part_versions())),
        "packages": ", ".join(f"{name} {_version(name)}" for name in sorted(machine.packages)),
        "tuned": _hash_files(read_settings().config_dir),
    }
    if machine.device == "cpu":
        fields["threads"] = str(torch.get_num_threads())
    return fields


def file_stem(fields: KeyFields) -> str:
    """Return the name, without suffix, of the cache file of an identity."""
    return _hash_text(repr(sorted(fields.items())))


@cache
def _get_part_versions() -> tuple[tuple[str, str, str], ...]:
    """Return the name, the origin and the version of the package of every part."""
    catalog = load_catalog()
    return tuple((p.name, p.origin, _version(p.origin.split(" ")[0])) for p in catalog.parts)


@cache
def _version(name: str) -> str:
    """Return the version of a package, by its distribution name or import name, or "none"."""
    # A probe also finds copies of the package inside other packages.
    for probe in collect_probes(load_catalog()):
        if probe.name == name and (version := find_package(probe).version):
            return version
    name_variants = (name, name.replace("_", "-"), name.replace("_", ""))
    return next(filter(None, map(installed_version, name_variants)), "none")


def _hash_files(folder: Path | None) -> str:
    """Return a digest of the names, sizes and dates of JSON files below `folder`, or "none"."""
    if folder is None:
        return "none"
    try:
        stats = [(path, path.stat()) for path in sorted(folder.rglob("*.json"))]
    except OSError:
        return "unreadable"
    fields = [(str(p.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for p, stat in stats]
    return _hash_text(repr(fields)) if fields else "none"


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
