"""mk bench, profile and exchange run torch parts without the interpreter, even if it is active."""

import threading

import pytest
import torch
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import needs_triton, this_machine
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.replay.launch.runtime import use_triton

MACHINE = this_machine(device="cpu")
SMALL = ("--tokens", "4", "--hidden", "32", "--intermediate", "32", "--experts", "4")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not MACHINE.interpreter, reason="needs the interpreter"
)


mk = make_mk_fixture()


def test_torch_references_are_used_only_inside_prefer_torch_reference() -> None:
    x = torch.ones(2)
    assert use_triton(x)
    with prefer_torch_reference():
        assert not use_triton(x)
        assert use_triton(x.to("meta"))
        with prefer_torch_reference(enabled=False):
            assert not use_triton(x)
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(use_triton(x)))
        thread.start()
        thread.join()
        assert results == [True]
    with prefer_torch_reference(enabled=False):
        assert use_triton(x)
    assert use_triton(x)


def test_torch_pairings_need_no_triton() -> None:
    assert not needs_triton("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    assert needs_triton("MoEPrepareAndFinalizeNoEP", "TritonExperts")
    assert needs_triton("SymmMemPrepareAndFinalize", "TorchExperts")


@pytest.mark.parametrize(
    ("experts", "mode"), [("TorchExperts", "cpu"), ("TritonExperts", "interpreter")]
)
def test_bench_and_profile_state_what_ran(
    mk: Mk, experts: str, mode: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses_triton: list[bool] = []
    from modular_kernel.ops import reduce

    original = reduce.use_triton
    monkeypatch.setattr(
        reduce, "use_triton", lambda x: uses_triton.append(original(x)) or uses_triton[-1]
    )
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", experts)
    rows = mk("bench", *pair, *SMALL, "--ms", "0.01", "--json").json["rows"]
    (row,) = [row for row in rows if row["layer"] == experts]
    assert (row["status"], row["mode"]) == ("ok", mode)
    assert (row["over_floor"] is None) is (mode == "interpreter")
    shown = mk("profile", *pair, *SMALL, "--calls", "1", "--out", str(tmp_path), "--json").json
    assert [
        rank["total"]["mode"] for pair_report in shown["pairs"] for rank in pair_report["ranks"]
    ] == [mode]
    assert set(uses_triton) <= {mode == "interpreter"}
    assert uses_triton


@pytest.mark.parametrize(
    ("part", "mode"), [("TorchAll2AllBatched", "cpu"), ("SymmMem", "interpreter")]
)
def test_exchange_states_what_ran(mk: Mk, part: str, mode: str) -> None:
    options = ("--tokens-list", "1", "--quant", "none", "--replays", "1", "--rounds", "1")
    rows = mk("exchange", "--backend", "gloo", "--only", part, *options, "--json").json["rows"]
    assert [(row["status"], row["mode"]) for row in rows] == [("ok", mode)]
