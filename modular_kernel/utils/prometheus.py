"""Counters of layers and kernels as text for Prometheus.

    text = prometheus_text({"model.layers.0.mlp": layer, "draft": kernel})

Serve the text with the content type "text/plain; version=0.0.4". `prometheus_text` does not
synchronize with a device.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from modular_kernel.errors import ConfigurationError
from modular_kernel.utils.argument_checks import expect

PREFIX = "modular_kernel_"
# Key of `counters()` -> (metric, type of the metric, help text).
_LAYER_METRICS = {
    "calls": ("layer_calls_total", "counter", "Calls of the layer."),
    "tokens": ("layer_tokens_total", "counter", "Tokens of these calls."),
    "adapters": ("layer_adapters", "gauge", "LoRA adapters loaded."),
}
_KERNEL_METRICS = {
    "calls": ("calls_total", "counter", "Calls of the kernel, which layers may share."),
    "tokens": ("tokens_total", "counter", "Tokens of these calls."),
    "replayed_calls": ("replayed_calls_total", "counter", "Calls that replayed launches."),
    "recorded_calls": ("recorded_calls_total", "counter", "Calls whose launches were recorded."),
    "fallback_calls": ("fallback_calls_total", "counter", "Calls without replay, by reason."),
    "plans": ("plans", "gauge", "Plans made."),
    "invalid_ids": ("invalid_ids_total", "counter", "Expert ids outside [-1, E) skipped."),
}
_PROCESS_METRIC = ("workspace_bytes", "gauge", "Workspace held between calls by the process.")
_Sample = tuple[dict[str, str], int]  # (labels, value)


class HasCounters(Protocol):
    """A kernel, or a layer, which also has `kernels()`."""

    def counters(self) -> dict[str, object]: ...


def prometheus_text(counted: Mapping[str, HasCounters]) -> str:
    """Return counters in Prometheus's text exposition format, version 0.0.4.

    Metrics of a layer have the label "layer", and metrics of a kernel have the label "kernel". A
    kernel that several layers use appears once, under the name of the first layer.

    counted: kernels (`FusedMoEModularKernel`) and layers (`FusedMoE`, `FusedMoEWithLoRA`) by name.

    Raises ConfigurationError for any other value.
    """
    expect("counted", counted, Mapping)
    for name, owner in counted.items():
        expect("name of a kernel or layer", name, str)
        if not callable(getattr(owner, "counters", None)):
            need = "a kernel or a layer by name: an object with counters()"
            got = f"{type(owner).__name__} under {name!r}"
            raise ConfigurationError("counted", got=got, need=need)
    layers, kernels = {}, dict[int, tuple[str, dict[str, object]]]()
    for name, owner in counted.items():
        kernels_of_layer = getattr(owner, "kernels", None)
        if kernels_of_layer is not None:
            layers[name] = owner.counters()
        for number, kernel in enumerate(
            [owner] if kernels_of_layer is None else kernels_of_layer()
        ):
            label = name if number == 0 else f"{name}/{number}"
            kernels.setdefault(id(kernel), (label, kernel.counters()))
    kernel_counters = dict(kernels.values())
    lines = [
        *_format_metrics("layer", _LAYER_METRICS, layers),
        *_format_metrics("kernel", _KERNEL_METRICS, kernel_counters),
    ]
    # Every kernel reports the workspace of the whole process.
    workspace = [values["workspace_bytes"] for values in kernel_counters.values()]
    if workspace and isinstance(workspace[0], int):
        lines += _format_metric(*_PROCESS_METRIC, [({}, workspace[0])])
    return "".join(f"{line}\n" for line in lines)


def _format_metrics(
    label: str,
    metrics: Mapping[str, tuple[str, str, str]],
    counters: Mapping[str, Mapping[str, object]],
) -> Iterator[str]:
    for key, (name, kind, help_text) in metrics.items():
        samples = list[_Sample]()
        for owner, values in counters.items():
            value = values.get(key)
            if isinstance(value, Mapping):
                samples += [({label: owner, "reason": reason}, n) for reason, n in value.items()]
            elif isinstance(value, int):
                samples.append(({label: owner}, value))
        if samples:
            yield from _format_metric(name, kind, help_text, samples)


def _format_metric(name: str, kind: str, help_text: str, samples: Iterable[_Sample]) -> list[str]:
    name = f"{PREFIX}{name}"
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")
    return lines


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
