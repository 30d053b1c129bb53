"""Whether a configuration can be launched, whatever path it is for."""

from collections.abc import Iterator

from experts.triton.launch_config import Device, MoEConfig, Violation, gemms
from experts.triton.paths import BY_NAME
from modular_kernel.errors import ConfigurationError
from modular_kernel.types import Problem


def config_violations(
    config: MoEConfig, problem: Problem, device: Device
) -> Iterator[tuple[str, Violation]]:
    """Yield every reason not to launch `config`, each with the GEMM that it is about, or ""."""
    path = BY_NAME[config.path]
    if not path.serves(problem, device):
        yield "", Violation("path", config.path, f"one that serves {problem.quant}")
        return
    for launch, gemm in zip((config.gemm1, config.gemm2), gemms(problem), strict=True):
        if not isinstance(launch, path.launch):
            need = f"{path.launch.__name__}, as the {path.name} path has it"
            yield str(gemm), Violation("launch", type(launch).__name__, need)
            continue
        for violation in path.violations(launch, gemm, problem, device):
            yield str(gemm), violation


def fits(config: MoEConfig, problem: Problem, device: Device) -> bool:
    """Return whether `config` can be launched for `problem` on `device`."""
    return next(config_violations(config, problem, device), None) is None


def require_config(config: MoEConfig, problem: Problem, device: Device, origin: str) -> None:
    """Raise ConfigurationError with origin, got and need if `config` cannot be launched."""
    for gemm, violation in config_violations(config, problem, device):
        what = f"{origin}: {gemm} {violation.what}" if gemm else f"{origin}: {violation.what}"
        raise ConfigurationError(what, got=violation.got, need=violation.need)
