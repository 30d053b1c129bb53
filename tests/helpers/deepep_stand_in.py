"""The parts over DeepEP on gloo ranks: themselves, over stand-ins of both generations."""

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
from prepare_finalize.deepep.group import HighThroughput
from prepare_finalize.deepep.low_latency_buffer import LowLatency
from prepare_finalize.rendezvous.connect import rank_and_size
from prepare_finalize.rendezvous.hosts import Hosts

FOLDER = Path(__file__).parent / "stand_ins"


def stand_in(version):
    """The module deep_ep of a generation, under a name of its own."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = spec_from_file_location(f"deep_ep_{version}", FOLDER / version / "deep_ep.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRST, SECOND = stand_in("v1"), stand_in("v2")


class GlooGroup:
    """What a part asks of DeepEPGroup."""

    device, num_sms, is_capturing = "cpu", None, False

    def __init__(self, group=None):
        self.rank, self.world_size = rank_and_size(group)
        self.hosts = Hosts((0,) * self.world_size, ("here",))
        self._kept = {}

    def check_device(self, device):
        assert str(device) == "cpu"

    def agree(self, facts):
        pass

    def high_throughput(self, hidden):
        made = high_throughput_arguments(FIRST.Buffer, hidden, self.world_size, self.num_sms)
        return HighThroughput(made.arguments.make(FIRST.Buffer, None), made.dispatch, made.combine)

    def low_latency(self, tokens, hidden, experts):
        key = tokens, hidden, experts
        if key not in self._kept:
            arguments = low_latency_arguments(FIRST.Buffer, *key, self.world_size)
            self._kept[key] = LowLatency(arguments.make(FIRST.Buffer, None), tokens, experts)
        return self._kept[key]

    def elastic(self, tokens, hidden, top_k):
        return SECOND.ElasticBuffer(None, tokens, hidden, top_k, explicitly_destroy=True)

    def destroy(self):
        pass


class OneRankOfAHost(FIRST.Buffer):
    """Each rank stands for a host and its only GPU: the kernels between hosts on few ranks."""

    peers = 1


class HostsOverGloo(GlooGroup):
    """Every rank on a host of its own."""

    def __init__(self, group=None):
        super().__init__(group)
        ranks = range(self.world_size)
        self.hosts = Hosts(tuple(ranks), tuple(f"host{rank}" for rank in ranks))

    def high_throughput(self, hidden):
        config = FIRST.Buffer.get_dispatch_config(self.world_size)
        buffer = BufferArguments(128, 128, False, 10).make(OneRankOfAHost, None)
        return HighThroughput(buffer, config, config)


class OverGloo:
    """Over a stand-in instead of the library."""

    manager_class = GlooGroup

    def __init__(self, problem, group=None):
        before = sys.modules.get("deep_ep")
        sys.modules["deep_ep"] = FIRST if self.generation == 1 else SECOND
        try:
            super().__init__(problem, group)
        finally:
            sys.modules.pop("deep_ep")
            if before is not None:
                sys.modules["deep_ep"] = before


def here(requires, **changes):
    """As declared, but for a CPU."""
    return replace(requires, devices=frozenset({"cpu"}), min_arch=None, packages=(), **changes)


class HTOverGloo(OverGloo, DeepEPHTPrepareAndFinalize):
    requires = here(DeepEPHTPrepareAndFinalize.requires)


class HTBetweenHosts(HTOverGloo):
    manager_class = HostsOverGloo
    requires = here(DeepEPHTPrepareAndFinalize.requires, ranks_per_host=1)


class LLOverGloo(OverGloo, DeepEPLLPrepareAndFinalize):
    requires = here(DeepEPLLPrepareAndFinalize.requires, hidden_sizes=frozenset({512}))


class V2OverGloo(OverGloo, DeepEPV2PrepareAndFinalize):
    requires = here(DeepEPV2PrepareAndFinalize.requires)
