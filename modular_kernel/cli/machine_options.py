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


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of the machine, which is this one unless --machine describes another."""

    machine: Annotated[
        str | None,
        option(
            "Use a described machine instead of this one: [HOSTSx][GPUSx]GPU, such as 8xh200 or "
            "2x8xb200, "
            "where GPU is a100, h100, h200 or b200; or a JSON file.",
            metavar="NAME",
        ),
    ] = None
    packages: Annotated[
        str | None,
        option(
            "Python packages of the machine: all, or a list such as deep_ep,triton.  [default: "
            "those installed here; with --machine or --arch: triton,ml_dtypes]"
        ),
    ] = None

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
