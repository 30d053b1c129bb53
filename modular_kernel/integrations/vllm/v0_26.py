"""Support for vLLM 0.26, based on the module for 0.33.

Layers with int4 or int8 weights and group scales run on vLLM's own kernels, because in 0.26 the
function that selects their experts does not receive the group size.
"""

from dataclasses import replace

from modular_kernel.integrations.vllm import v0_33

# Attributes that vLLM has only after 0.26.
_NEWER_EXCHANGES = ("use_moonep_kernels", "use_passthrough_all2all")
_NEWER_FIELDS = ("activation_situ_beta", "activation_situ_linear_beta")

REFUSED_EXCHANGES = tuple(e for e in v0_33.REFUSED_EXCHANGES if e not in _NEWER_EXCHANGES)
CONFIG_FIELDS = tuple(f for f in v0_33.CONFIG_FIELDS if f not in _NEWER_FIELDS)
PARALLEL_FIELDS = tuple(f for f in v0_33.PARALLEL_FIELDS if f not in _NEWER_EXCHANGES)
QUANT_FIELDS = v0_33.QUANT_FIELDS


class StandardExperts(v0_33.StandardExperts):
    """Experts for tokens and their routing, with the interface of vLLM 0.26."""

    refused_exchanges = REFUSED_EXCHANGES


class BatchedExperts(v0_33.BatchedExperts):
    """Experts for rows grouped by expert, with the interface of vLLM 0.26."""

    refused_exchanges = REFUSED_EXCHANGES


make_experts_class = v0_33.make_experts_class

ORACLES = {
    name: replace(oracle, bases=(StandardExperts, BatchedExperts))
    for name, oracle in v0_33.ORACLES.items()
    if name != "int_wna16"
}
