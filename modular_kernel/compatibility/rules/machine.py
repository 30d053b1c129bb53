"""Rules that check the machine: device type, compute capability and installed packages."""

from modular_kernel.compatibility.support import (
    Rejection,
    RuleInput,
    Violations,
    format_archs,
    format_sorted,
)


def check_device(pairing: RuleInput) -> Violations:
    for name, requires in pairing.parts():
        if pairing.machine.device not in requires.devices:
            yield Rejection(
                "device", (name, "machine"), pairing.machine.device, format_sorted(requires.devices)
            )
        elif (
            requires.triton and pairing.machine.device == "cpu" and not pairing.machine.interpreter
        ):
            need = "a GPU, or Triton's CPU interpreter"
            hint = "start with TRITON_INTERPRET=1 and ml_dtypes installed"
            yield Rejection("device", (name, "machine"), "cpu", need, hint)


def check_arch(pairing: RuleInput) -> Violations:
    for name, requires in pairing.parts():
        arch = pairing.machine.arch
        if requires.min_arch is not None and arch is not None and arch < requires.min_arch:
            need = f">= {requires.min_arch[0]}.{requires.min_arch[1]}"
            yield Rejection("arch", (name, "machine"), f"{arch[0]}.{arch[1]}", need)


def check_archs(pairing: RuleInput) -> Violations:
    """Reject an architecture that lacks instructions the part uses."""
    for name, requires in pairing.parts():
        arch = pairing.machine.arch
        if requires.archs is not None and arch is not None and arch not in requires.archs:
            got, need = f"{arch[0]}.{arch[1]}", format_archs(requires.archs)
            yield Rejection("archs", (name, "machine"), got, need)


def check_package(pairing: RuleInput) -> Violations:
    for name, requires in pairing.parts():
        for package in requires.packages:
            if package not in pairing.machine.packages:
                other_packages = dict(pairing.machine.others)
                needs_by_package = {probe.name: probe.need for probe in requires.providers}
                got, need = (
                    other_packages.get(package, "not importable"),
                    needs_by_package.get(package, package),
                )
                hint = requires.install_hint(package)
                yield Rejection("package", (name, "machine"), got, need, hint)
