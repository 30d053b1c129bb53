"""`mk list`: lists the parts, their capabilities, and why they cannot run on a machine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from modular_kernel.cli import output
from modular_kernel.cli.engine import EngineName, list_engine
from modular_kernel.cli.machine_options import CheckedMachineOptions
from modular_kernel.cli.options import AsJson, refuse_combination

if TYPE_CHECKING:
    from modular_kernel.catalog import Catalog, Part
    from modular_kernel.compatibility.support import Rejection, Requirements
    from modular_kernel.contracts import PathInfo
    from modular_kernel.spec.external_schemes import ExternalSchemes, TableScheme
    from modular_kernel.spec.problem import Machine

_KINDS = ("prepare_finalize", "experts", "topk_reduce")
# Field of Requirements that declares an optional capability -> description in the glossary.
_CAPABILITIES = {
    "bias": "both GEMMs may have a bias",
    "interleaved": "gate and up rows of w1 may alternate",
    "weight_on_input": "experts can apply the router weight in GEMM 1 (K = 1)",
    "multiplies_input": "dispatch can multiply x by the router weight",
    "expert_map": "accepts an expert_map from global expert ids to local experts",
    "localizes_ids": "dispatch returns local expert ids, so experts need no expert_map",
    "keep_topk": "can return (T, K, H) instead of the sum over K",
    "chunking": "calls can be split along their tokens",
    "inplace": "the output may overwrite x",
    "tf32": "float32 products may use tensor cores",
    "graph_capturable": "calls can be captured in a CUDA graph",
    "deterministic": "results are deterministic",
    "batch_invariant": "a token's bits do not depend on the other tokens",
    "asynchronous": "dispatch is asynchronous and can overlap with other work",
    "lora": "supports LoRA adapters",
}
_GLOSSARY = {
    "standard": "tokens as (T, H), with separate routing tensors",
    "batched_experts": "tokens grouped by expert, (experts, capacity, H)",
    "schemes": "quantization schemes of the experts; w4a16: 4-bit weights, 16-bit activations",
    "quantizes": "schemes whose activations are quantized before dispatch",
    **_CAPABILITIES,
    "noop": "experts have applied the router weights and summed over K",
    "contiguous": "finalize applies router weights and sums (T, K, H) over K",
    "naive_batched": "finalize applies router weights and sums (experts, capacity, H)",
    "delegate": "finalize chooses how to apply router weights and sum",
}


def list_parts(
    *, machine_options: CheckedMachineOptions, engine: EngineName = None, as_json: AsJson = None
) -> None:
    """List every part, its requirements, whether it can run on the machine, and its origin.

    --engine vllm or sglang lists the experts classes of the installed vLLM or SGLang instead, with
    the quantization schemes that they support on this machine.
    """
    if engine is not None:
        refuse_combination("--engine", (machine_options,))
        list_engine(engine, as_json)
        return
    cluster = machine_options.parse_cluster()
    machine = machine_options.resolve(cluster)
    from modular_kernel.catalog import load_catalog
    from modular_kernel.spec.quantization import load_external_schemes

    catalog, schemes = load_catalog(), load_external_schemes()
    catalog.require_parts()
    record = {
        "machine": machine,
        "parts": [_make_record(part, machine) for part in catalog.parts],
        "planned": catalog.planned,
        "schemes": schemes.usable,
        "broken": catalog.broken,
        "broken_schemes": schemes.broken,
        "duplicates": catalog.duplicates(),
    }
    machine_name = machine_options.machine or "this machine"
    if machine_options.arch is not None or machine_options.device is not None:
        machine_name = "a described machine"

    def print_text() -> None:
        _print_title(machine, machine_name)
        if machine_options.is_described:
            output.print_line(machine_options.describe_packages(cluster, machine))
        _print_parts(catalog, schemes, machine)

    output.print_result(record, as_json, print_text)


def _get_requirements(part: "Part") -> "Requirements | None":
    """Return the requirements that the part declares, or None for a TopKWeightAndReduce."""
    requires: Requirements | None = getattr(part.cls, "requires", None)
    return requires


def _find_unavailable_reasons(part: "Part", machine: "Machine") -> "tuple[Rejection, ...]":
    from modular_kernel.compatibility.rules import judge_part

    requires = _get_requirements(part)
    return judge_part(part.name, requires, machine) if requires is not None else ()


def _make_record(part: "Part", machine: "Machine") -> dict[str, object]:
    reasons = _find_unavailable_reasons(part, machine)
    return {
        "name": part.name,
        "kind": part.kind,
        "origin": part.origin,
        "available": not reasons,
        "unavailable": reasons,
        "requires": _get_requirements(part),
        "paths": _list_paths(part),
    }


def _list_paths(part: "Part") -> "tuple[PathInfo, ...]":
    """Return the code paths of an experts part, or () if it has only one."""
    paths: tuple[PathInfo, ...] = getattr(part.cls, "paths", tuple)()
    return paths


def _print_title(machine: "Machine", machine_name: str) -> None:
    interpreted = ", Triton interpreted" if machine.interpreter else ""
    output.print_line(
        f"Parts on {machine_name} ({machine}{interpreted}); terms are explained at the end:"
    )


def _print_parts(catalog: "Catalog", schemes: "ExternalSchemes", machine: "Machine") -> None:
    for kind in _KINDS:
        output.print_line(f"\n{kind}")
        for part in (part for part in catalog.parts if part.kind == kind):
            output.print_line("\n      ".join(["  " + part.name, *_describe_part(part, machine)]))
    rows = [
        (s.name, f"{s.scheme.bits}-bit codes, {_describe_scale_group(s.scheme)}", s.origin)
        for s in schemes.usable
    ]
    output.print_table(("scheme of another package", "weights", "from"), rows)
    planned = [(part.name, part.kind, part.blocked_on) for part in catalog.planned]
    output.print_table(("planned, not yet implemented", "kind", "why"), planned)
    rows = [(entry.name, entry.origin, entry.error) for entry in catalog.broken]
    rows += [(entry.name, entry.origin, entry.error) for entry in schemes.broken]
    paths = dict.fromkeys(path for part in catalog.parts for path in _list_paths(part))
    rows += [(path.name, path.origin, path.error) for path in paths if path.error]
    output.print_table(("broken entry point", "from", "error"), rows)
    duplicates = [(name, " and ".join(origins)) for name, origins in catalog.duplicates().items()]
    output.print_table(("name registered twice", "by"), duplicates)
    output.print_table(("term", "meaning"), _GLOSSARY.items())


def _describe_scale_group(scheme: "TableScheme") -> str:
    sizes = "x".join(map(str, scheme.group))
    return f"one scale for each {scheme.granularity}{f' of {sizes}' if sizes else ''}"


def _describe_part(part: "Part", machine: "Machine") -> list[str]:
    """Return the lines that describe a part.

    They show its activation format and devices, its dtypes and schemes, its capabilities, code
    paths and origin, and the reasons why it is not available on the machine.
    """
    requires = _get_requirements(part)
    if requires is None:
        reduce_kind = getattr(part.cls, "kind", None)
        return [
            reduce_kind.value if reduce_kind is not None else "keeps top-k",
            f"from {part.origin}",
        ]
    capabilities = [name for name in _CAPABILITIES if getattr(requires, name, False)]
    reasons = [f"unavailable: {reason}" for reason in _find_unavailable_reasons(part, machine)]
    return [
        f"{requires.activation_format.value}, on {_format_devices(requires)}",
        _format_accepted_types(requires),
        ", ".join(capabilities) or "no optional capabilities",
        *_describe_paths(part),
        f"from {part.origin}",
        *reasons,
    ]


def _describe_paths(part: "Part") -> Iterator[str]:
    """Yield a line with the code paths of a part if it has several.

    The origin of a path is appended if it differs from the origin of the first path.
    """
    paths = [path for path in _list_paths(part) if not path.error]
    if paths:
        origin = paths[0].origin
        names = (p.name if p.origin == origin else f"{p.name} (from {p.origin})" for p in paths)
        yield f"paths: {', '.join(names)}"


def _format_accepted_types(requires: "Requirements") -> str:
    from modular_kernel.compatibility.support import ALL_ACTIVATIONS, ALL_DTYPES, format_sorted

    accepted = {
        "dtypes": "all" if requires.dtypes == ALL_DTYPES else format_sorted(requires.dtypes)
    }
    for name, label in (("schemes", "schemes"), ("dispatch_schemes", "quantizes")):
        if hasattr(requires, name):
            accepted[label] = format_sorted(getattr(requires, name)) or "nothing"
    if getattr(requires, "external_schemes", False):
        accepted["schemes"] += ", those of other packages"
    activations: frozenset[str] | None = getattr(requires, "activations", None)
    if activations is not None:
        all_activations = activations == ALL_ACTIVATIONS
        accepted["activations"] = "all" if all_activations else format_sorted(activations)
    return "; ".join(f"{label}: {names}" for label, names in accepted.items())


def _format_devices(requires: "Requirements") -> str:
    from modular_kernel.compatibility.support import format_archs

    devices = sorted(requires.devices)
    if requires.min_arch is not None and "cuda" in devices:
        devices[devices.index("cuda")] = f"cuda >= {requires.min_arch[0]}.{requires.min_arch[1]}"
    if requires.archs is not None and "cuda" in devices:
        devices[devices.index("cuda")] = f"cuda {format_archs(requires.archs)}"
    return ", ".join([*devices, *requires.packages])
