"""Rules on the machine: device, architecture, packages."""

from modular_kernel.compatibility.support import (
    Pairing,
    Rejection,
    Violations,
    archs_text,
    format_sorted,
)


def device(p: Pairing) -> Violations:
    for name, req in p.parts():
        if p.machine.device not in req.devices:
            yield Rejection(
                "device", (name, "machine"), p.machine.device, format_sorted(req.devices)
            )
        elif req.triton and p.machine.device == "cpu" and not p.machine.interpreter:
            need = "a GPU, or Triton's CPU interpreter"
            hint = "start with TRITON_INTERPRET=1 and ml_dtypes installed"
            yield Rejection("device", (name, "machine"), "cpu", need, hint)


def arch(p: Pairing) -> Violations:
    for name, req in p.parts():
        arch = p.machine.arch
        if req.min_arch is not None and arch is not None and arch < req.min_arch:
            need = f">= {req.min_arch[0]}.{req.min_arch[1]}"
            yield Rejection("arch", (name, "machine"), f"{arch[0]}.{arch[1]}", need)


def archs(p: Pairing) -> Violations:
    """Reject an architecture that lacks instructions the part uses."""
    for name, req in p.parts():
        arch = p.machine.arch
        if req.archs is not None and arch is not None and arch not in req.archs:
            got, need = f"{arch[0]}.{arch[1]}", archs_text(req.archs)
            yield Rejection("archs", (name, "machine"), got, need)


def package(p: Pairing) -> Violations:
    for name, req in p.parts():
        for package in req.packages:
            if package not in p.machine.packages:
                other_packages = dict(p.machine.others)
                needs_by_package = {probe.name: probe.need for probe in req.providers}
                got, need = (
                    other_packages.get(package, "not importable"),
                    needs_by_package.get(package, package),
                )
                hint = req.install_hint(package)
                yield Rejection("package", (name, "machine"), got, need, hint)
