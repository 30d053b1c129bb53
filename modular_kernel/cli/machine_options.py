"""Options that describe the machine to check or estimate pairings for."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from modular_kernel.cli.command import option
from modular_kernel.cli.machine_setup import prepare_host, select_machine
from modular_kernel.cli.options import ProblemOptions
from modular_kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from modular_kernel.perf_model.hardware import Cluster
    from modular_kernel.spec.problem import Machine


_PACKAGES_HELP = (
    "Python packages that the machine has: all (every package that a part needs), or a list such "
    "as deep_ep,triton."
)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of a machine: its GPUs, links and packages."""

    machine: str | None = None
    packages: str | None = None

    def parse_cluster(self) -> "Cluster | None":
        """Return the GPUs and links that --machine describes; None without --machine."""
        if self.machine is None:
            return None
        from modular_kernel.perf_model.machines import parse_machine

        return parse_machine(self.machine)

    def resolve_machine(
        self,
        cluster: "Cluster | None",
        arch: str | None = None,
        device: Literal["cuda", "cpu"] | None = None,
    ) -> "Machine":
        """Return the machine that the options describe.

        The first of these that is given determines the machine: `cluster`, `arch` and `device`,
        this machine.

        arch, device: values of --arch and --device. Raises ConfigurationError if they are combined
            with --machine.
        """
        if cluster is not None:
            for name, value in (("--arch", arch), ("--device", device)):
                if value is not None:
                    got = f"{name} together with --machine"
                    raise ConfigurationError(name, got=got, need="only one of them")
        prepare_host(quiet=any(value is not None for value in (cluster, arch, device)))
        is_described = cluster is not None or arch is not None
        packages = self.resolve_packages(cluster, is_described=is_described)
        if cluster is not None:
            assert packages is not None
            return cluster.machine(packages)
        return select_machine(arch, device, packages)

    def describe_packages(self, cluster: "Cluster | None", machine: "Machine") -> str:
        """Return the packages of a described machine, and which of them are assumed."""
        names = ", ".join(sorted(machine.packages)) or "none"
        if self.packages is not None:
            return f"packages: {names}"
        if cluster is not None and cluster.packages is not None:
            return f"packages of its file: {names}"
        return f"packages assumed: {names} (--packages sets others)"

    def resolve_packages(
        self, cluster: "Cluster | None" = None, *, is_described: bool = True
    ) -> frozenset[str] | None:
        """Return the packages of the machine; None stands for those installed on this machine.

        is_described: whether --machine or --arch describes the machine. The default of --packages
            is then BASE_PACKAGES. Raises ConfigurationError for an unknown package.
        """
        from modular_kernel.catalog import collect_packages, load_catalog
        from modular_kernel.perf_model.machines import BASE_PACKAGES, parse_packages

        known_packages = collect_packages(load_catalog())
        if self.packages is not None:
            return parse_packages(self.packages, known_packages)
        if cluster is not None and cluster.packages is not None:
            names = ",".join(sorted(cluster.packages))
            return parse_packages(names, known_packages, "packages of --machine")
        return BASE_PACKAGES if is_described else None


@dataclass(frozen=True, kw_only=True)
class CheckedMachineOptions(MachineOptions):
    """Options of the machine, which is this one unless an option describes another."""

    machine: Annotated[
        str | None,
        option(
            "Use a described machine instead of this one: [HOSTSx][GPUSx]GPU, such as 8xh200 or "
            "2x8xb200, where GPU is a100, h100, h200 or b200; or a JSON file.",
            metavar="NAME",
        ),
    ] = None
    arch: Annotated[
        str | None,
        option("Use a described GPU of this compute capability, such as 9.0, instead of this one."),
    ] = None
    device: Annotated[
        Literal["cuda", "cpu"] | None, option("Use a described machine with this device.")
    ] = None
    packages: Annotated[
        str | None,
        option(
            f"{_PACKAGES_HELP}  [default: triton,ml_dtypes with --machine or --arch, otherwise the "
            "packages installed here]"
        ),
    ] = None

    def resolve(self, cluster: "Cluster | None") -> "Machine":
        """Return the machine that the options describe.

        cluster: the result of `parse_cluster`. Raises ConfigurationError for invalid options.
        """
        return self.resolve_machine(cluster, self.arch, self.device)

    @property
    def is_described(self) -> bool:
        """Whether an option describes the GPUs or the packages of the machine."""
        return any(value is not None for value in (self.machine, self.arch, self.packages))


@dataclass(frozen=True, kw_only=True)
class PlannedMachineOptions(MachineOptions):
    """Options of the machines to plan for, which are always described."""

    machine: Annotated[
        str | None,
        option(
            "Machines to plan for, separated by commas: [HOSTSx][GPUSx]GPU, such as 8xh200 or "
            "2x8xb200, where GPU is a100, h100, h200 or b200; or a JSON file.  [default: 8xh200, "
            "or as many H200 as --world-size]",
            metavar="NAMES",
        ),
    ] = None
    packages: Annotated[
        str | None,
        option(
            f"{_PACKAGES_HELP}  [default: those in the JSON file of --machine, otherwise "
            "triton,ml_dtypes]"
        ),
    ] = None


def apply_cluster(options: ProblemOptions, cluster: "Cluster | None") -> ProblemOptions:
    """Return the options with the world_size and ranks_per_host of a described machine.

    Without --world-size, there is one rank per GPU. If `cluster` is None, the options are returned
    unchanged. Raises ConfigurationError if --world-size or --ranks-per-host contradicts the
    machine.
    """
    if cluster is None:
        return options
    world_size = cluster.gpus if options.world_size is None else options.world_size
    gpus_per_host = cluster.per_host
    if world_size > cluster.gpus:
        need = f"at most {cluster.gpus}, the GPUs of --machine"
        raise ConfigurationError("--world-size", got=world_size, need=need)
    if world_size > gpus_per_host and world_size % gpus_per_host:
        need = f"a multiple of {gpus_per_host}, the GPUs of a host"
        raise ConfigurationError("--world-size", got=world_size, need=need)
    if options.ranks_per_host not in (None, min(world_size, gpus_per_host)):
        need = f"{min(world_size, gpus_per_host)} as in --machine, or no --ranks-per-host"
        raise ConfigurationError("--ranks-per-host", got=options.ranks_per_host, need=need)
    ranks_per_host = gpus_per_host if world_size > gpus_per_host else None
    return replace(options, world_size=world_size, ranks_per_host=ranks_per_host)
