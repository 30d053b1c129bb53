"""Torch parts are measured as users run them, although the interpreter is active."""

import threading

import pytest
import torch
from run_mk import Mk, make_mk_fixture

from modular_kernel.catalog import needs_triton, this_machine
from modular_kernel.machine import prefer_torch_reference
from modular_kernel.replay.launch.runtime import use_triton

HERE = this_machine(device="cpu")
SMALL = ("--tokens", "4", "--hidden", "32", "--intermediate", "32", "--experts", "4")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not HERE.interpreter, reason="needs the interpreter"
)


mk = make_mk_fixture()


def test_operations_use_their_torch_references_only_inside_it() -> None:
    x = torch.ones(2)
    assert use_triton(x)
    with prefer_torch_reference():
        assert not use_triton(x)
        assert use_triton(x.to("meta"))
        with prefer_torch_reference(enabled=False):
            assert not use_triton(x)
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(use_triton(x)))
        thread.start()
        thread.join()
        assert found == [True]  # another thread may be verifying
    with prefer_torch_reference(enabled=False):
        assert use_triton(x)
    assert use_triton(x)


def test_which_pairs_are_interpreted() -> None:
    assert not needs_triton("MoEPrepareAndFinalizeNoEP", "TorchExperts")
    assert needs_triton("MoEPrepareAndFinalizeNoEP", "TritonExperts")
    assert needs_triton("SymmMemPrepareAndFinalize", "TorchExperts")


@pytest.mark.parametrize(
    ("experts", "mode"), [("TorchExperts", "cpu"), ("TritonExperts", "interpreter")]
)
def test_bench_and_profile_state_what_ran(
    mk: Mk, experts: str, mode: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    from modular_kernel.ops import reduce

    whole = reduce.use_triton
    monkeypatch.setattr(reduce, "use_triton", lambda x: used.append(whole(x)) or used[-1])
    pair = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", experts)
    rows = mk("bench", *pair, *SMALL, "--ms", "0.01", "--json").json["rows"]
    (row,) = [row for row in rows if row["layer"] == experts]
    assert (row["status"], row["mode"]) == ("ok", mode)
    assert (row["over_floor"] is None) is (mode == "interpreter")
    shown = mk("profile", *pair, *SMALL, "--calls", "1", "--out", str(tmp_path), "--json").json
    assert [rank["total"]["mode"] for one in shown["pairs"] for rank in one["ranks"]] == [mode]
    assert set(used) <= {mode == "interpreter"}
    assert used


@pytest.mark.parametrize(
    ("part", "mode"), [("TorchAll2AllBatched", "cpu"), ("SymmMem", "interpreter")]
)
def test_exchange_states_what_ran(mk: Mk, part: str, mode: str) -> None:
    words = ("--tokens-list", "1", "--quant", "none", "--replays", "1", "--rounds", "1")
    rows = mk("exchange", "--backend", "gloo", "--only", part, *words, "--json").json["rows"]
    assert [(row["status"], row["mode"]) for row in rows] == [("ok", mode)]
