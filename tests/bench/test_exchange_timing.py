"""Timing of dispatch and combine, with a clock that only the transport advances."""

from functools import partial

import pytest
import torch

from modular_kernel.bench.all2all import timing as exchange_time
from modular_kernel.bench.all2all.cases import ExchangeCase, ExchangeInputs, RankContext, Transport
from modular_kernel.bench.all2all.timing import Repeats, time_transport


class Clock:
    """A clock that the tests advance explicitly, in seconds."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def wait(self) -> None: ...


CLOCK = Clock()


def advance_clock(seconds: float) -> None:
    CLOCK.now += seconds


class SlowTransport(Transport):
    """A transport with known times, whose output is wrong from dispatch `wrong_from` on."""

    name = "slow"
    wrong_from = 10**9
    calls = 0

    def open(self, cell, context): ...

    def load(self, inputs):
        self.x, self.out = inputs.x_TH, torch.empty_like(inputs.x_TH)

    def dispatch(self):
        advance_clock(0.002)
        self.calls += 1
        self.dispatched = self.x * (1 if self.calls < self.wrong_from else 2)

    def identity(self):
        self.y = self.dispatched

    def combine(self):
        advance_clock(0.005)
        return self.out.copy_(self.y)


def fake_capture(groups: list) -> list:
    """Run every call once, as a capture does, and return functions that repeat the calls."""

    def replay(group: list) -> torch.Tensor:
        return [call() for call in group][-1]

    for group in groups:
        replay(group)
    return [partial(replay, group) for group in groups]


@pytest.fixture
def gpu_context(monkeypatch: pytest.MonkeyPatch) -> RankContext:
    """Return the context of a GPU whose graphs are plain calls."""
    monkeypatch.setattr(exchange_time, "capture_graphs", fake_capture)
    monkeypatch.setattr(exchange_time.dist, "barrier", lambda group: None)
    monkeypatch.setattr(exchange_time, "make_clock", lambda device: CLOCK)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return RankContext(0, 1, None, torch.device("cuda"))


def make_slow_transport(**fields: object) -> tuple[SlowTransport, ExchangeInputs]:
    inputs = ExchangeInputs.from_case(
        ExchangeCase(1, 3, 3, hidden=64, experts=2, top_k=1), 0, torch.device("cpu")
    )
    transport = SlowTransport()
    vars(transport).update({"capturable": True, **fields})
    transport.load(inputs)
    transport.dispatch()
    transport.identity()
    return transport, inputs


@pytest.mark.parametrize("capturable", [True, False])
def test_dispatch_combine_and_pairs_are_timed_separately(
    gpu_context: RankContext, capturable: bool
) -> None:
    transport, inputs = make_slow_transport(capturable=capturable)
    times = time_transport(transport, inputs, gpu_context, Repeats(2, 2), lambda ok: ok)
    assert times.mode == ("graph" if capturable else "eager")
    measured = times.dispatch_us, times.combine_us, times.pair_us, times.spread
    assert measured == pytest.approx((2000, 5000, 7000, 0))
    assert times.error == 0


def test_wrong_replay_is_detected(gpu_context: RankContext) -> None:
    # The first dispatch is eager, the second is captured alone, and the next four are captured with
    # a combine. The seventh is a replay.
    transport, inputs = make_slow_transport(wrong_from=7)
    transport.identity = lambda: setattr(transport, "y", transport.x * (transport.calls < 7))
    times = time_transport(transport, inputs, gpu_context, Repeats(1, 1), lambda ok: ok)
    assert times.error == 1


def test_no_rank_replays_if_one_cannot_capture(gpu_context: RankContext) -> None:
    transport, inputs = make_slow_transport()
    times = time_transport(transport, inputs, gpu_context, Repeats(1, 1), lambda ok: False)
    assert times.mode == "eager"


def test_first_replay_is_not_counted(gpu_context: RankContext) -> None:
    waits = iter([0.02, 0.001, 0.002, 0.0025, 0.001, 0.002])
    runs = [lambda: advance_clock(next(waits))] * 2
    first, second = exchange_time._time_replays(runs, gpu_context, 2)
    assert first == pytest.approx([2000, 1000])
    assert second == pytest.approx([2500, 2000])
