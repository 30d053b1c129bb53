"""The DeepEP parts on gloo ranks, with stand-ins for DeepEP 1.2.1, and for DeepEP 2.1.0 in builds
with ids of 64 and of 32 bits.
"""

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from prepare_finalize import (
    DeepEPHTPrepareAndFinalize,
    DeepEPLLPrepareAndFinalize,
    DeepEPV2PrepareAndFinalize,
)
from prepare_finalize.deepep.arguments import (
    BufferArguments,
    high_throughput_arguments,
    low_latency_arguments,
)
from prepare_finalize.deepep.group import HighThroughputBuffer
from prepare_finalize.deepep.low_latency_buffer import LowLatencyBuffer
from prepare_finalize.rendezvous.connect import get_rank_and_size
from prepare_finalize.rendezvous.hosts import Hosts

FOLDER = Path(__file__).parent / "stand_ins"


def load_stand_in(version):
    """Load the stand-in for one generation of deep_ep under its own module name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = spec_from_file_location(f"deep_ep_{version}", FOLDER / version / "deep_ep.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DEEP_EP_V1, DEEP_EP_V2 = load_stand_in("v1"), load_stand_in("v2")
DEEP_EP_V2_INT32 = load_stand_in("v2")
DEEP_EP_V2_INT32.topk_idx_t = torch.int32


class GlooGroup:
    """A stand-in for DeepEPGroup over gloo, with the methods that parts call.

    library: the stand-in for the library.
    """

    device, num_sms, is_capturing = "cpu", None, False
    library = DEEP_EP_V1

    def __init__(self, group=None):
        self.rank, self.world_size = get_rank_and_size(group)
        self.hosts = Hosts((0,) * self.world_size, ("here",))
        self._buffers = {}

    def check_device(self, device):
        assert str(device) == "cpu"

    def check_equal(self, values):
        pass

    def high_throughput(self, hidden):
        buffer_class = self.library.Buffer
        arguments = high_throughput_arguments(buffer_class, hidden, self.world_size, self.num_sms)
        return HighThroughputBuffer(
            arguments.buffer.make_buffer(buffer_class, None), arguments.dispatch, arguments.combine
        )

    def low_latency(self, tokens, hidden, experts):
        key = tokens, hidden, experts
        if key not in self._buffers:
            buffer_class = self.library.Buffer
            arguments = low_latency_arguments(buffer_class, *key, self.world_size)
            self._buffers[key] = LowLatencyBuffer(
                arguments.make_buffer(buffer_class, None), tokens, experts
            )
        return self._buffers[key]

    def elastic(self, tokens, hidden, top_k):
        return self.library.ElasticBuffer(
            None,
            num_max_tokens_per_rank=tokens,
            hidden=hidden,
            num_topk=top_k,
            explicitly_destroy=True,
        )

    def destroy(self):
        pass


class GlooGroupV2(GlooGroup):
    library = DEEP_EP_V2


class GlooGroupV2Int32(GlooGroup):
    library = DEEP_EP_V2_INT32


class OneRankPerHostBuffer(DEEP_EP_V1.Buffer):
    """A buffer for hosts with one GPU each, so that few ranks use the internode kernels."""

    peers = 1


class OneRankPerHostBufferV2(DEEP_EP_V2.Buffer):
    peers = 1


class HostsOverGloo(GlooGroup):
    """A GlooGroup in which each rank is on a separate host."""

    buffer_class = OneRankPerHostBuffer

    def __init__(self, group=None):
        super().__init__(group)
        ranks = range(self.world_size)
        self.hosts = Hosts(tuple(ranks), tuple(f"host{rank}" for rank in ranks))

    def high_throughput(self, hidden):
        config = self.buffer_class.get_dispatch_config(self.world_size)
        buffer = BufferArguments(128, 128, False, 10).make_buffer(self.buffer_class, None)
        return HighThroughputBuffer(buffer, config, config)


class HostsOverGlooV2(HostsOverGloo):
    library, buffer_class = DEEP_EP_V2, OneRankPerHostBufferV2


class OverGloo:
    """A mixin for parts that imports a stand-in in place of the library."""

    manager_class = GlooGroup

    def __init__(self, problem, group=None):
        original = sys.modules.get("deep_ep")
        sys.modules["deep_ep"] = self.manager_class.library
        try:
            super().__init__(problem, group)
        finally:
            sys.modules.pop("deep_ep")
            if original is not None:
                sys.modules["deep_ep"] = original


def adapt_to_cpu(requires, **changes):
    """Return the declared requirements, adapted to a CPU."""
    return replace(
        requires,
        devices=frozenset({"cpu"}),
        min_arch=None,
        packages=(),
        excluded_packages=(),
        providers=(),
        **changes,
    )


class HTOverGloo(OverGloo, DeepEPHTPrepareAndFinalize):
    requires = adapt_to_cpu(DeepEPHTPrepareAndFinalize.requires)


class HTBetweenHosts(HTOverGloo):
    manager_class = HostsOverGloo
    requires = adapt_to_cpu(DeepEPHTPrepareAndFinalize.requires, ranks_per_host=1)


class LLOverGloo(OverGloo, DeepEPLLPrepareAndFinalize):
    requires = adapt_to_cpu(DeepEPLLPrepareAndFinalize.requires, hidden_sizes=frozenset({512}))


class V2OverGloo(OverGloo, DeepEPV2PrepareAndFinalize):
    manager_class = GlooGroupV2
    requires = adapt_to_cpu(DeepEPV2PrepareAndFinalize.requires)


# The parts over Buffer with DeepEP 2. Names end in the release, as case ids contain them.


class HTOverGlooV2(HTOverGloo):
    manager_class = GlooGroupV2


class HTOverGlooV2Int32(HTOverGloo):
    manager_class = GlooGroupV2Int32


class HTBetweenHostsV2(HTBetweenHosts):
    manager_class = HostsOverGlooV2


class LLOverGlooV2(LLOverGloo):
    manager_class = GlooGroupV2


class LLOverGlooV2Int32(LLOverGloo):
    manager_class = GlooGroupV2Int32
