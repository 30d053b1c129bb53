"""run_moe_lora, the parallel branch of adapters: each step and the whole beside float64 loops."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from modular_kernel import ExpertWeights, Problem, Routing, reference
from modular_kernel.adapters import adapters_of_sequences
from modular_kernel.errors import (
    ConfigurationError,
    DeviceError,
    DtypeError,
    InputError,
    LayoutError,
    ShapeError,
    UnsupportedError,
)
from modular_kernel.machine import torch_twins
from modular_kernel.ops.moe_lora import (
    BUFFERS,
    MoELoRABatchInfo,
    explain_strategy,
    run_moe_lora,
    should_use_fused_kernel,
)
from modular_kernel.ops.moe_lora_stages import (
    PairBatch,
    moe_lora_a,
    moe_lora_down_combine,
    moe_lora_fused,
    moe_lora_gate_up_b,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STRATEGIES = ("staged", "fused", "auto")


@dataclass(frozen=True)
class Sizes:
    """T, H, I, E, K, L, R of a call."""

    tokens: int = 21
    hidden: int = 72
    intermediate: int = 40
    experts: int = 5
    top_k: int = 3
    slots: int = 4
    rank: int = 20


@dataclass
class Call:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    info: MoELoRABatchInfo
    buffers: list[torch.Tensor]
    output: torch.Tensor

    def run(self, strategy: Any = "auto") -> torch.Tensor:
        out = self.output.clone()
        got = run_moe_lora(
            self.x, self.ids, self.weights, self.info, *self.buffers, out, strategy=strategy
        )
        assert got is out
        return out


def call(sizes: Sizes = Sizes(), dtype: torch.dtype = torch.float32, seed: int = 0) -> Call:
    """Ranks 3, 7, R and 0, one slot an expert's own; skipped pairs, tokens without an adapter.

    What a call must not read is NaN: what lies beyond ranks, and the weights of skipped pairs.
    """
    g = torch.Generator().manual_seed(seed)
    s = sizes
    x = torch.randn(s.tokens, s.hidden, generator=g)
    ids = torch.randint(-1, s.experts, (s.tokens, s.top_k), generator=g, dtype=torch.int32)
    weights = torch.rand(s.tokens, s.top_k, generator=g)
    slots = torch.randint(-1, s.slots, (s.tokens,), generator=g, dtype=torch.int32)
    ranks = torch.tensor([3, 7, s.rank, 0])[torch.arange(s.slots) % 4].clamp(max=s.rank)
    ranks_LE = ranks[:, None].repeat(1, s.experts)
    ranks_LE[0] = (torch.arange(s.experts) + 1).clamp(max=s.rank)
    scalings = torch.rand(s.slots, generator=g) + 0.5
    shapes = (
        (s.rank, s.hidden), (2 * s.intermediate, s.rank), (s.rank, s.intermediate),
        (s.hidden, s.rank),
    )  # fmt: skip
    buffers = []
    for name, (rows, columns) in zip(BUFFERS, shapes, strict=True):
        depth = s.hidden if name == "gate_up_a" else s.intermediate if name == "down_a" else 4
        each = torch.randn(s.slots, s.experts, rows, columns, generator=g) / depth**0.5
        beyond = torch.arange(s.rank) >= ranks_LE[..., None]
        beyond = beyond[..., None] if name.endswith("_a") else beyond[:, :, None]
        buffers.append(each.masked_fill(beyond, torch.nan).to(dtype))
    weights = weights.masked_fill(ids < 0, torch.nan)
    info = MoELoRABatchInfo(slots, ranks_LE, scalings)
    output = torch.randn(s.tokens, s.hidden, generator=g)
    made = Call(x.to(dtype), ids, weights, info, buffers, output.to(dtype))
    return on_device(made)


def on_device(c: Call) -> Call:
    info = MoELoRABatchInfo(*(
        None if each is None else each.to(DEVICE) for each in vars(c.info).values()
    ))  # fmt: skip
    return Call(
        c.x.to(DEVICE), c.ids.to(DEVICE), c.weights.to(DEVICE), info,
        [each.to(DEVICE) for each in c.buffers], c.output.to(DEVICE),
    )  # fmt: skip


def wanted(c: Call, *, rounded: bool = True) -> dict[str, torch.Tensor]:
    """u, h, v and the output in float64, pair by pair; each rounded to the call's dtype."""
    dtype = c.x.dtype if rounded else torch.float64
    tokens, top_k = c.ids.shape
    a13, b13, a2, b2 = (each.double() for each in c.buffers)
    rank, intermediate = a13.shape[2], a2.shape[3]
    out = c.output.double().clone()
    sizes = {"u": rank, "h": intermediate, "v": rank}
    found = {name: torch.zeros(tokens, top_k, n).double().to(DEVICE) for name, n in sizes.items()}
    slots = c.info.slots_of(tokens)
    for t in range(tokens):
        slot = int(slots[t])
        for k in range(top_k):
            e = int(c.ids[t, k])
            if not (0 <= slot < len(a13) and 0 <= e < a13.shape[1]):
                continue
            ranks = c.info.lora_ranks
            r = max(int(ranks[slot] if ranks.dim() == 1 else ranks[slot, e]), 0)
            u = (a13[slot, e, :r] @ c.x[t].double()).to(dtype).double()
            gate_up = b13[slot, e, :, :r] @ u
            gate, up = gate_up[:intermediate], gate_up[intermediate:]
            h = (torch.nn.functional.silu(gate) * up).to(dtype).double()
            v = (a2[slot, e, :r] @ h).to(dtype).double()
            found["u"][t, k, : len(u)], found["h"][t, k], found["v"][t, k, : len(v)] = u, h, v
            if r:
                factor = float(c.weights[t, k]) * float(c.info.scalings[slot])
                out[t] += factor * (b2[slot, e, :, :r] @ v)
    return found | {"out": out}


def close(got: torch.Tensor, want: torch.Tensor, depth: int = 0) -> None:
    """depth: of the longest sum, whose roundings in float32 are u sqrt(depth) together."""
    exact = max(2e-6, 6e-8 * depth**0.5)
    relative = {torch.float32: exact, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[got.dtype]
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert float(error) <= relative


def batch_of(c: Call, *, grouped: bool) -> PairBatch:
    batch = PairBatch(c.ids, c.info.slots_of(len(c.x)), c.info.lora_ranks)
    return batch.grouped() if grouped else batch


@pytest.fixture(params=["kernels", "twins"])
def _way(request: pytest.FixtureRequest) -> Any:
    with torch_twins(wanted=request.param == "twins"):
        yield


WAY = pytest.mark.usefixtures("_way")


@WAY
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_is_its_float64_loop(dtype: torch.dtype, grouped: bool) -> None:
    """What a step has of pairs that are skipped, and beyond a rank, is zero."""
    c = call(dtype=dtype)
    want, batch = wanted(c), batch_of(c, grouped=grouped)
    a13, b13, a2, b2 = c.buffers
    u = moe_lora_a(c.x, a13, batch)
    h = moe_lora_gate_up_b(want["u"].to(dtype), b13, batch)
    v = moe_lora_a(want["h"].to(dtype), a2, batch)
    for name, got in (("u", u), ("h", h), ("v", v)):
        assert got.shape == want[name].shape
        assert not got[want[name] == 0].any()
        close(got, want[name])
    out = c.output.clone()
    moe_lora_down_combine(want["v"].to(dtype), b2, batch, c.weights, c.info.scalings, out)
    close(out, want["out"])


def test_pairs_of_one_adapter_and_expert_lie_together() -> None:
    c = call()
    batch = batch_of(c, grouped=True)
    assert batch.order_P is not None
    assert sorted(batch.order_P.tolist()) == list(range(63))
    keys = batch.keys().flatten()[batch.order_P].tolist()
    assert keys == sorted(keys)
    assert 1 < len(set(keys)) < 63
    assert batch.keys().max() == 4 * 5  # nobody's, which come last


@pytest.mark.parametrize("step", ["a", "gate_up_b"])
def test_programs_take_pairs_in_the_order_they_are_given(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An order that names one pair alone: no other's row is written."""
    c = call()
    batch = replace(batch_of(c, grouped=True), order_P=torch.full((63,), 7, device=DEVICE))
    empty = torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *shape: int, **how: Any) -> torch.Tensor:
        made = empty(like, *shape, **how)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    with torch_twins(wanted=False):
        if step == "a":
            got = moe_lora_a(c.x, c.buffers[0], batch)
        else:
            got = moe_lora_gate_up_b(wanted(c)["u"].float(), c.buffers[1], batch)
    assert (~got.isnan().flatten(0, 1).any(1)).nonzero().tolist() == [[7]]


@WAY
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_staged_is_fused_is_the_loop(dtype: torch.dtype, strategy: str) -> None:
    c = call(dtype=dtype)
    close(c.run(strategy), wanted(c)["out"])


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tokens=1, top_k=1, rank=1, slots=1),
        Sizes(tokens=5, top_k=8, experts=9, rank=8),
        Sizes(tokens=3, hidden=40, intermediate=24, rank=130, experts=2, top_k=2),
        Sizes(tokens=35, top_k=2, hidden=33, intermediate=17, rank=33),
        Sizes(tokens=17, top_k=2, hidden=130, intermediate=130, rank=32),
        Sizes(tokens=6, slots=1, experts=1),
    ],
    ids=str,
)
def test_any_size(sizes: Sizes, strategy: str) -> None:
    c = call(sizes)
    if sizes.tokens == 1:
        c = replace_info(replace_ids(c, torch.zeros_like(c.ids)), weight_indices=[0])
        c.weights.fill_(0.7)
    close(c.run(strategy), wanted(c)["out"])


def replace_ids(c: Call, ids: torch.Tensor) -> Call:
    return replace(c, ids=ids)


def replace_info(c: Call, **changed: Any) -> Call:
    """Lists become int32 tensors on the device."""
    tensors = {
        name: torch.tensor(value, dtype=torch.int32, device=DEVICE)
        if isinstance(value, list)
        else value
        for name, value in changed.items()
    }
    return replace(c, info=replace(c.info, **tensors))


def test_no_tokens() -> None:
    c = call(Sizes(tokens=0))
    for strategy in STRATEGIES:
        assert c.run(strategy).shape == (0, 72)


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_rows_without_an_adapter_or_an_expert_keep_their_bits(strategy: str) -> None:
    """Negative zeros too: nothing is added to them."""
    c = call()
    c.ids[4] = torch.tensor([-1, 5, 2**31 - 1], dtype=torch.int32)
    c.weights[4] = torch.nan
    slots = c.info.weight_indices.clone()
    slots[:4] = torch.tensor([-1, 4, -(2**31), 2**31 - 1], dtype=torch.int32)
    slots[5:7] = 3  # of rank 0
    c.output[:7] = -0.0
    got = replace_info(c, weight_indices=slots).run(strategy)
    assert bool(torch.signbit(got[:7]).all())
    assert torch.equal(got[slots < 0], c.output[slots < 0])
    assert bool((got[7:][slots[7:] == 2] != c.output[7:][slots[7:] == 2]).any(1).all())


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_other_adapters_and_experts_are_not_read(strategy: str) -> None:
    """Tokens of one slot and three experts beside NaN in all the rest, and in a second slot's."""
    c = call()
    c.ids.remainder_(3)
    c.weights.nan_to_num_(0.3)
    c.info.weight_indices[:] = torch.where(torch.arange(21, device=DEVICE) % 2 > 0, 2, 1).int()
    want = wanted(c)["out"]
    for each in c.buffers:
        each[[0, 3]] = torch.nan
        each[:, 3:] = torch.nan
        each[1] = torch.inf  # of the even tokens
    got = c.run(strategy)
    close(got[1::2], want[1::2])
    assert not got[::2].isfinite().any()


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_strides_are_passed(strategy: str) -> None:
    """Buffers that are parts of larger ones, rows of x and of the output apart."""
    c = call()
    want = c.run(strategy)

    def parted(each: torch.Tensor) -> torch.Tensor:
        wide = torch.full([2 * n for n in each.shape], torch.nan, device=DEVICE, dtype=each.dtype)
        part = wide[tuple(slice(n) for n in each.shape)]
        return part.copy_(each)

    ranks = c.info.lora_ranks.T.contiguous().T
    apart = replace_info(c, lora_ranks=ranks, scalings=c.info.scalings.repeat_interleave(2)[::2])
    apart = replace(apart, x=parted(c.x), buffers=[parted(each) for each in c.buffers])
    apart = replace(apart, ids=c.ids.T.contiguous().T, weights=c.weights.T.contiguous().T)
    out = parted(c.output)
    run_moe_lora(
        apart.x, apart.ids, apart.weights, apart.info, *apart.buffers, out, strategy=strategy
    )
    if DEVICE.type == "cpu":
        assert torch.equal(out, want)
    else:  # compiled for rows on 16 bytes, a kernel loads and sums them in another order
        close(out, want.double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequences_and_tokens_name_adapters(dtype: torch.dtype) -> None:
    c = replace_ids(call(), call().ids.to(dtype))
    starts = torch.tensor([0, 5, 5, 20], dtype=dtype, device=DEVICE)
    slots = torch.tensor([2, 0, 1], dtype=dtype, device=DEVICE)
    by_sequence = replace_info(c, weight_indices=slots, seg_indptr=starts)
    by_token = replace_info(c, weight_indices=adapters_of_sequences(starts, slots, 21))
    assert by_token.info.weight_indices.tolist() == [2] * 5 + [1] * 15 + [-1]
    assert torch.equal(by_sequence.run(), by_token.run())
    wide = replace_info(c, weight_indices=torch.full((21,), 1 << 32, device=DEVICE))
    assert torch.equal(wide.run(), c.output)  # not slot 0


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(experts=9, rank=4)], ids=str)
def test_one_rank_for_all_experts_and_ranks_above_the_buffers(sizes: Sizes, strategy: str) -> None:
    """Fewer experts than ranks, of which an id names one too many, and more of them. Behind the
    last slot, whose rank is above the buffers, is no memory of theirs."""
    c = call(sizes)
    c.buffers = [each.nan_to_num_(0.1) for each in c.buffers]
    c.ids[::4, 0] = sizes.experts
    c.weights[::4, 0] = torch.nan
    c = replace_info(c, lora_ranks=[2, -1, 5, 99])
    close(c.run(strategy), wanted(c)["out"])


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_what_is_masked_off_is_not_summed(strategy: str) -> None:
    """Each u is near the largest float32, so that their sum is infinite, and B near the least."""
    c = call()
    c.info.weight_indices[:] = 2  # of rank 20
    c.x[:] = torch.eye(1, c.x.shape[1], device=DEVICE)
    c.buffers[0][2] = 3e37
    c.buffers[1][2] = c.buffers[1][2].sign() * 1e-37
    want = wanted(c)
    assert want["u"].sum(2).max() > torch.finfo(torch.float32).max
    assert bool(want["out"].isfinite().all())
    close(c.run(strategy), want["out"])


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
def test_products_of_narrow_values_are_not_rounded(strategy: str) -> None:
    """(1 + 2^-7)^2 - (1 + 2^-6) is 2^-14, of which bf16 products leave nothing."""
    c = call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # of rank 20
    c.output.zero_()
    c.x.zero_()[:, :2] = torch.tensor([1 + 2**-7, 1])
    c.buffers[0][2] = 0
    c.buffers[0][2, ..., :2] = torch.tensor([1 + 2**-7, -1 - 2**-6])
    c.buffers[1][2] *= 2**14
    close(c.run(strategy), wanted(c)["out"])


# The first rows and columns of A13, gate and up of B13, A2 and B2; the others are 0.
LOW = "low"
SQUARES: dict[str, tuple[list[list[Any]], ...]] = {
    "u": ([[1, LOW], [1, 0]], [[64, -64]], [[1, 0]], [[1, 0]], [[1, 0]]),
    "h": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, LOW], [1, 0]], [[1, -1]], [[1, 0]]),
    "v": ([[1, 0], [1, 0]], [[64, 0], [64, 0]], [[1, 0], [1, 0]], [[1, LOW], [1, 0]], [[1, -1]]),
}


@WAY
@pytest.mark.parametrize("strategy", ["staged", "fused"])
@pytest.mark.parametrize("step", SQUARES)
def test_u_h_and_v_are_rounded_to_the_dtype_of_x(step: str, strategy: str) -> None:
    """Two values that a step makes, one subtracted from the other behind it: of 1 + 2^-9 and 1
    bf16 leaves no difference, of 1 + 2^-7 and 1 it does."""
    c = call(dtype=torch.bfloat16)
    c.info.weight_indices[:] = 2  # of rank 20
    c.output.zero_()
    c.x.zero_()[:, :2] = 1
    half = c.buffers[1].shape[2] // 2
    places = (
        c.buffers[0][2], c.buffers[1][2, :, :half], c.buffers[1][2, :, half:],
        c.buffers[2][2], c.buffers[3][2],
    )  # fmt: skip
    for low, differs in ((2**-9, False), (2**-7, True)):
        for place, values in zip(places, SQUARES[step], strict=True):
            square = [[low if value == LOW else value for value in row] for row in values]
            place.zero_()[:, : len(square), :2] = torch.tensor(square)
        assert bool(c.run(strategy).any()) is differs


def test_a_last_dimension_of_one_value_has_any_stride() -> None:
    c = call(Sizes(rank=1))
    want = c.run()
    for number in (1, 3):
        each = c.buffers[number]
        c.buffers[number] = each.as_strided(each.shape, (*each.stride()[:-1], 7))
    assert torch.equal(c.run(), want)
    assert not torch.equal(want, c.output)


def windows(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A matrix for each expert, all of them different: rows of one, an expert's a row further."""
    _, experts, rows, columns = shape
    g = torch.Generator().manual_seed(seed)
    tall = torch.randn(rows + experts, columns, generator=g).to(DEVICE) / columns**0.5
    return tall.as_strided(shape, (0, columns, columns, 1))


# The two configurations that the branch is specified with: H, E, K of DeepSeek-V2-Lite and -V3.
SPECIFIED = [(3, 2048, 64, 6), (1, 7168, 256, 8)]


@pytest.mark.share(2)
@pytest.mark.parametrize(("tokens", "hidden", "experts", "top_k"), SPECIFIED)
def test_the_specified_configurations(tokens: int, hidden: int, experts: int, top_k: int) -> None:
    """The delta alone, added to zeros, of rank 8; in fp32 within 1e-3, as only IEEE dots are."""
    rank = 8
    g = torch.Generator().manual_seed(hidden)
    shapes = (rank, hidden), (2 * 48, rank), (rank, 48), (hidden, rank)
    buffers = [windows((1, experts, *shape), i) for i, shape in enumerate(shapes)]
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    ranks, scalings = torch.full((1,), rank), torch.full((1,), 2.0)
    c = on_device(Call(
        torch.randn(tokens, hidden, generator=g), ids, torch.rand(tokens, top_k, generator=g),
        MoELoRABatchInfo(torch.zeros(tokens).int(), ranks, scalings), [],
        torch.zeros(tokens, hidden),
    ))  # fmt: skip
    c.buffers = buffers
    want = wanted(c)["out"]
    for strategy in ("staged", "fused"):
        got = c.run(strategy)
        close(got, want, hidden)
        torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-3)


def test_it_is_another_function_than_merged_weights() -> None:
    """Not LoRA as it is trained: with one projection zero the branch adds nothing at all."""
    c = call(Sizes(tokens=9, hidden=32, intermediate=24, experts=4, top_k=2, slots=1, rank=6))
    g = torch.Generator().manual_seed(3)
    ranks = torch.full((1,), 6)
    info = MoELoRABatchInfo(torch.zeros(9).int(), ranks, torch.ones(1))
    c = Call(
        c.x.cpu(), c.ids.cpu().clamp(min=0), torch.rand(9, 2, generator=g), info,
        [each.cpu().nan_to_num(0.1) for each in c.buffers], torch.zeros(9, 32),
    )  # fmt: skip
    problem = Problem(9, 32, 24, 4, 2, torch.float32, lora="adapters=1,rank=6,a13=shared")
    names = ("lora_a13", "lora_b13", "lora_a2", "lora_b2")
    w1, w2 = torch.randn(4, 48, 32, generator=g) / 6, torch.randn(4, 32, 24, generator=g) / 5
    routing = Routing(c.weights, c.ids, torch.zeros(9).int())

    def merged(buffers: list[torch.Tensor]) -> torch.Tensor:
        layers = ExpertWeights(w1, w2, **dict(zip(names, buffers, strict=True)))
        base = ExpertWeights(w1, w2)
        plain = replace(problem, lora="none")
        without = reference.oracle(c.x, base, replace(routing, adapters_T=None), plain)
        return reference.oracle(c.x, layers, routing, problem) - without

    with torch_twins():
        branch, exact = c.run().double(), merged(c.buffers)
        cosine = float((branch * exact).sum() / branch.norm() / exact.norm())
        assert abs(cosine) < 0.9
        half = [torch.zeros_like(each) if i < 2 else each for i, each in enumerate(c.buffers)]
        down_only = replace(c, buffers=half)
        assert not down_only.run().any()
        assert bool(merged(half).any())


def test_auto_takes_what_it_says() -> None:
    few, many = ((1, 2048), (1, 8)), ((256, 2048), (256, 8))
    assert should_use_fused_kernel(*few)
    assert not should_use_fused_kernel(*many)
    assert explain_strategy(*few) == "fused: 8 pairs x 8 blocks of H, fused up to 512"
    assert explain_strategy(*many).startswith("staged: 2048 pairs x 8 blocks")
    # Larger ranks leave a program fewer columns.
    assert should_use_fused_kernel((8, 2048), (8, 8), 16)
    assert not should_use_fused_kernel((8, 2048), (8, 8), 64)


def test_auto_runs_one_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from modular_kernel.ops import moe_lora

    c, taken = call(), list[str]()
    for name in ("fused", "staged"):
        monkeypatch.setattr(moe_lora, f"moe_lora_{name}", lambda *_, name=name: taken.append(name))
    arguments = (c.x, c.ids, c.weights, c.info, *c.buffers, c.output)
    for fused in (True, False):
        monkeypatch.setattr(moe_lora, "should_use_fused_kernel", lambda *_, fused=fused: fused)
        run_moe_lora(*arguments)
        run_moe_lora(*arguments, strategy="staged")
        run_moe_lora(*arguments, strategy="fused")
    assert taken == ["fused", "staged", "fused", "staged", "staged", "fused"]


F, META = torch.float32, torch.device("meta")
BAD: list[tuple[str, Any, type[InputError], str]] = [
    ("x", torch.zeros(21, 71), ShapeError, r"gate_up_a_buffer: got \(4, 5, 20, 72\), need \(4, 5"),
    ("x", torch.zeros(21, 72, 1), ShapeError, "hidden_states: got"),
    ("x", torch.zeros(21, 72).double(), DtypeError, "hidden_states: got torch.float64"),
    ("x", torch.zeros(72, 21).T, LayoutError, "hidden_states: got strides"),
    ("x", torch.zeros(21, 72, requires_grad=True), UnsupportedError, "gradients: got hidden_st"),
    ("x", None, DtypeError, "hidden_states: got NoneType"),
    ("ids", torch.zeros(21, 3), DtypeError, "topk_ids: got torch.float32, need torch.int32 or"),
    ("ids", torch.zeros(20, 3).int(), ShapeError, r"topk_ids: got \(20, 3\), need \(21, 3\)"),
    ("ids", torch.zeros(21, 0).int(), ShapeError, "K = 0"),
    ("ids", torch.zeros(21).int(), ShapeError, "topk_ids: got"),
    ("weights", torch.zeros(21, 2), ShapeError, r"topk_weights: got \(21, 2\), need \(21, 3\)"),
    ("weights", torch.zeros(21, 3).half(), DtypeError, "topk_weights: got torch.float16"),
    ("weights", torch.zeros(21, 3, device=META), DeviceError, "topk_weights: got meta"),
    ("output", torch.zeros(21, 72).half(), DtypeError, "output: got torch.float16, need torch.fl"),
    ("output", torch.zeros(21, 71), ShapeError, "output: got"),
    ("output", torch.zeros(72).expand(21, 72), LayoutError, r"output: got strides \(0, 1\)"),
    ("gate_up_a", torch.zeros(4, 5, 257, 72), ShapeError, "gate_up_a_buffer: got .*R at most 256"),
    ("gate_up_a", torch.zeros(5, 20, 72), ShapeError, "gate_up_a_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 79, 20), ShapeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 4, 80, 20), ShapeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 80, 20).half(), DtypeError, "gate_up_b_buffer: got"),
    ("gate_up_b", torch.zeros(4, 5, 20, 80).mT, LayoutError, "gate_up_b_buffer: got strides"),
    ("down_a", torch.zeros(4, 5, 20, 40)[..., ::2], ShapeError, "gate_up_b_buffer"),
    ("down_a", torch.zeros(4, 5, 20), ShapeError, "down_a_buffer: got"),
    ("down_b", torch.zeros(4, 5, 72, 19), ShapeError, "down_b_buffer: got"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad[0]} {bad[3][:24]}")
def test_what_does_not_fit_is_named_before_anything_runs(
    bad: tuple[str, Any, type[InputError], str],
) -> None:
    name, tensor, error, words = bad
    c = call()
    if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
        values = tensor.untyped_storage().nbytes() // tensor.element_size()
        there = torch.zeros(values, dtype=tensor.dtype, device=DEVICE)
        there = there.as_strided(tensor.shape, tensor.stride())
        tensor = there.requires_grad_(tensor.requires_grad)
    if name in BUFFERS:
        c.buffers[BUFFERS.index(name)] = tensor
    else:
        c = replace(c, **{name: tensor})
    before = c.output.clone()
    with pytest.raises(error, match=words):
        run_moe_lora(c.x, c.ids, c.weights, c.info, *c.buffers, c.output)
    assert torch.equal(c.output, before)


def test_an_output_over_an_input_is_refused() -> None:
    c = call()
    with pytest.raises(ConfigurationError, match="output: got memory of hidden_states"):
        run_moe_lora(c.x, c.ids, c.weights, c.info, *c.buffers, c.x)
    with pytest.raises(ConfigurationError, match="strategy: got 'both', need auto or fused or st"):
        c.run("both")
    with pytest.raises(ConfigurationError, match="moe_lora_info: got None"):
        replace(c, info=None).run()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"weight_indices": torch.zeros(20).int()}, ShapeError, r"got \(20,\), need \(21,\), or"),
        ({"weight_indices": torch.zeros(21, 1).int()}, ShapeError, "weight_indices: got"),
        ({"weight_indices": torch.zeros(21)}, DtypeError, "weight_indices: got torch.float32"),
        ({"lora_ranks": torch.zeros(3).int()}, ShapeError, r"scalings: got \(4,\), need \(3,\)"),
        ({"lora_ranks": torch.zeros(4, 6).int()}, ShapeError, r"lora_ranks: got \(4, 6\), need"),
        ({"lora_ranks": torch.zeros(4)}, DtypeError, "lora_ranks: got torch.float32"),
        ({"scalings": torch.zeros(4).double()}, DtypeError, "scalings: got torch.float64"),
        ({"scalings": [1.0] * 4}, DtypeError, "scalings: got list"),
        ({"seg_indptr": torch.zeros(4).int()}, ShapeError, "sequences: got"),
        ({"scalings": torch.zeros(4, device=META)}, DeviceError, "scalings: got meta"),
    ],
)
def test_batches_that_are_none_are_refused(
    changed: dict[str, Any], error: type[InputError], words: str
) -> None:
    c = call()
    on = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in changed.items()
    }
    with pytest.raises(error, match=words):
        replace(c, info=replace(c.info, **on)).run()


def test_the_fused_kernel_alone() -> None:
    c = call()
    out = c.output.clone()
    batch = batch_of(c, grouped=False)
    moe_lora_fused(c.x, tuple(c.buffers), batch, c.weights, c.info.scalings, out)  # type: ignore[arg-type]
    close(out, wanted(c)["out"])
