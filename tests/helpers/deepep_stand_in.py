"""The DeepEP parts on gloo ranks, with stand-ins for both generations of the library."""

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

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


class GlooGroup:
    """A stand-in for DeepEPGroup over gloo, with the methods that parts call."""

    device, num_sms, is_capturing = "cpu", None, False

    def __init__(self, group=None):
        self.rank, self.world_size = get_rank_and_size(group)
        self.hosts = Hosts((0,) * self.world_size, ("here",))
        self._buffers = {}

    def check_device(self, device):
        assert str(device) == "cpu"

    def check_equal(self, values):
        pass

    def high_throughput(self, hidden):
        arguments = high_throughput_arguments(
            DEEP_EP_V1.Buffer, hidden, self.world_size, self.num_sms
        )
        return HighThroughputBuffer(
            arguments.buffer.make_buffer(DEEP_EP_V1.Buffer, None),
            arguments.dispatch,
            arguments.combine,
        )

    def low_latency(self, tokens, hidden, experts):
        key = tokens, hidden, experts
        if key not in self._buffers:
            arguments = low_latency_arguments(DEEP_EP_V1.Buffer, *key, self.world_size)
            self._buffers[key] = LowLatencyBuffer(
                arguments.make_buffer(DEEP_EP_V1.Buffer, None), tokens, experts
            )
        return self._buffers[key]

    def elastic(self, tokens, hidden, top_k):
        return DEEP_EP_V2.ElasticBuffer(None, tokens, hidden, top_k, explicitly_destroy=True)

    def destroy(self):
        pass


class OneRankPerHostBuffer(DEEP_EP_V1.Buffer):
    """A buffer for hosts with one GPU each, so that few ranks use the internode kernels."""

    peers = 1


class HostsOverGloo(GlooGroup):
    """A GlooGroup in which each rank is on a separate host."""

    def __init__(self, group=None):
        super().__init__(group)
        ranks = range(self.world_size)
        self.hosts = Hosts(tuple(ranks), tuple(f"host{rank}" for rank in ranks))

    def high_throughput(self, hidden):
        config = DEEP_EP_V1.Buffer.get_dispatch_config(self.world_size)
        buffer = BufferArguments(128, 128, False, 10).make_buffer(OneRankPerHostBuffer, None)
        return HighThroughputBuffer(buffer, config, config)


class OverGloo:
    """A mixin for parts that imports a stand-in in place of the library."""

    manager_class = GlooGroup

    def __init__(self, problem, group=None):
        original = sys.modules.get("deep_ep")
        sys.modules["deep_ep"] = DEEP_EP_V1 if self.generation == 1 else DEEP_EP_V2
        try:
            super().__init__(problem, group)
        finally:
            sys.modules.pop("deep_ep")
            if original is not None:
                sys.modules["deep_ep"] = original


def adapt_to_cpu(requires, **changes):
    """Return the declared requirements, adapted to a CPU."""
    return replace(requires, devices=frozenset({"cpu"}), min_arch=None, packages=(), **changes)


class HTOverGloo(OverGloo, DeepEPHTPrepareAndFinalize):
    requires = adapt_to_cpu(DeepEPHTPrepareAndFinalize.requires)


class HTBetweenHosts(HTOverGloo):
    manager_class = HostsOverGloo
    requires = adapt_to_cpu(DeepEPHTPrepareAndFinalize.requires, ranks_per_host=1)


class LLOverGloo(OverGloo, DeepEPLLPrepareAndFinalize):
    requires = adapt_to_cpu(DeepEPLLPrepareAndFinalize.requires, hidden_sizes=frozenset({512}))


class V2OverGloo(OverGloo, DeepEPV2PrepareAndFinalize):
    requires = adapt_to_cpu(DeepEPV2PrepareAndFinalize.requires)
