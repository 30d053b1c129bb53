"""Give each of a token's K pairs a place of its own among all ranks' expert slots."""

import triton
import triton.language as tl


@triton.jit
def place_pairs_kernel(
    ids_ptr, router_ptr, homes_ptr, copies_ptr, places_ptr, weights_ptr, invalid_ptr,
    tokens, experts, most_copies, world_size, real, each, rank, factor,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """See modular_kernel.ops.places.place_pairs. One program for BLOCK_T tokens."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    pair = token * TOP_K + k
    here = (token < tokens) & (k < TOP_K)
    ids = tl.load(ids_ptr + pair, mask=here, other=-1).to(tl.int64)
    valid = here & (ids >= 0) & (ids < experts)
    wrong = here & ((ids < -1) | (ids >= experts))
    tl.atomic_add(invalid_ptr, tl.sum(tl.sum(wrong.to(tl.int32), 1), 0))
    expert = tl.where(valid, ids, 0)
    copies = tl.load(copies_ptr + expert)
    home = homes_ptr + (expert * most_copies + (token + rank) % copies) * 2
    place = tl.where(valid, tl.load(home) * each + tl.load(home + 1), -1 - k)
    router = tl.load(router_ptr + pair, mask=valid, other=0.0) * factor
    # [t, k, j]: pairs k and j of token t want the same place.
    same = place[:, :, None] == place[:, None, :]
    earlier = tl.arange(0, BLOCK_K)[None, None, :] < tl.arange(0, BLOCK_K)[None, :, None]
    repeat = tl.sum((same & earlier).to(tl.int32), 2) > 0
    live = valid & (repeat == 0)
    weight = tl.sum(tl.where(same, router[:, None, :], 0.0), 2)
    spare = (here & (live == 0)).to(tl.int32)
    sink = tl.sum(tl.where(earlier, spare[:, None, :], 0), 2)
    spare_place = (sink + rank) % world_size * each + real + sink // world_size
    tl.store(places_ptr + pair, tl.where(live, place, spare_place).to(tl.int32), mask=here)
    tl.store(weights_ptr + pair, tl.where(live, weight, 0.0), mask=here)
