"""`route_kernel`: compute the scores, ids and weights of each token's experts.

A program handles a tile of logits (tokens, groups of experts, experts of a group). In grouped
routing, as in DeepSeek-V3, only experts of a token's best groups can be selected. Without groups,
all experts form one group. `choice` is the value by which experts are compared. It is -inf for
experts that cannot be selected.
"""

import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _tile_max(value, BLOCK_TOKENS: tl.constexpr):
    """Return the largest value of each token, (tokens, 1, 1)."""
    # NaN-free: no logit or score is NaN here
    return tl.max(tl.max(value, axis=2, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _compute_scores(logit, SCORE: tl.constexpr):
    """Return the sigmoid of float32 logits if SCORE is "sigmoid", sqrt(softplus) otherwise."""
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-logit))
    # softplus is max(logit, 0) + log1p(e). To be accurate for small e, log1p(e) is computed from
    # the series of 2 atanh(s), where s <= 1 / 3.
    e = tl.exp(-tl.abs(logit))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 13.0 + q * (1.0 / 15.0 + q * (1.0 / 17.0))
    series = 1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q * series))
    series = 1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * series))
    return tl.sqrt_rn(tl.maximum(logit, 0.0) + 2.0 * s * series)  # NaN-free: no logit is NaN here


@triton.jit
def _clamp_to_finite(logit, logit_mask):
    """Clamp infinities to the largest finite values, so that no difference of logits is NaN.

    logit_mask: False for logits that must become 0.
    """
    # NaN-free: NaN is masked
    return tl.minimum(tl.maximum(tl.where(logit_mask, logit, 0.0), -_FLOAT32_MAX), _FLOAT32_MAX)


@triton.jit
def _mask_other_groups(
    choice, expert,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2_GROUP_SCORE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return `choice` with -inf outside each token's TOPK_GROUPS best groups.

    choice: (tokens, groups, experts of a group).
    expert: (1, groups, experts of a group), the id of each expert.
    TOP2_GROUP_SCORE: whether groups are compared by the sum of their two largest values. Otherwise,
        they are compared by their largest value.
    """
    neg_inf = float("-inf")
    best = tl.max(choice, axis=2, keep_dims=True)  # NaN-free: -inf stands for NaN
    if TOP2_GROUP_SCORE:
        best_ids = tl.where(choice == best, expert, 2147483647)
        # NaN-free: integer operands
        others = tl.where(expert == tl.min(best_ids, axis=2, keep_dims=True), neg_inf, choice)
        second = tl.max(others, axis=2, keep_dims=True)  # NaN-free: -inf stands for NaN
        # Halve the values, because their sum may overflow.
        best = 0.5 * best + 0.5 * tl.where(second > neg_inf, second, 0.0)
    group = tl.arange(0, BLOCK_GROUPS)[None, :, None]
    is_kept = tl.zeros_like(best).to(tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        top = tl.max(best, axis=1, keep_dims=True)  # NaN-free: -inf stands for NaN
        is_best = (best == top) & (best > neg_inf)
        # NaN-free: integer operands
        best_group = tl.min(tl.where(is_best, group, BLOCK_GROUPS), axis=1, keep_dims=True)
        is_kept = tl.where(group == best_group, 1, is_kept)
        best = tl.where(group == best_group, neg_inf, best)
    return tl.where(is_kept != 0, choice, neg_inf)


@triton.jit
def _select_experts(
    choice, expert,
    TOP_K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Return the ids (tokens, BLOCK_TOP_K) of the TOP_K largest values of `choice`.

    If values are equal, the lower id comes first. The id of a value of -inf is -1.
    """
    neg_inf = float("-inf")
    k = tl.arange(0, BLOCK_TOP_K)[None, :]
    ids = tl.full((BLOCK_TOKENS, BLOCK_TOP_K), -1, tl.int32)
    for step in tl.static_range(TOP_K):
        top = _tile_max(choice, BLOCK_TOKENS)
        top_ids = tl.where((choice == top) & (choice > neg_inf), expert, 2147483647)
        # NaN-free: integer operands
        best_expert = tl.min(tl.min(top_ids, axis=2, keep_dims=True), axis=1, keep_dims=True)
        choice = tl.where(expert == best_expert, neg_inf, choice)
        best_id = tl.reshape(best_expert, (BLOCK_TOKENS, 1))
        ids = tl.where((k == step) & (best_id != 2147483647), best_id, ids)
    return ids


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, expert_table_ptr, token_ids_ptr, topk_weights_ptr, topk_ids_ptr,
    zero_expert_weights_ptr,
    num_tokens, num_experts, num_columns, vocab_size, stride_logits, eps, floor,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, TOPK_FIRST: tl.constexpr,
    COMPARE_LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr,
    RENORMALIZE: tl.constexpr, HAS_ZERO_EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2_GROUP_SCORE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_GROUP_SIZE: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Compute router weights and expert ids of BLOCK_TOKENS tokens, as `RouterSpec` describes.

    Grid: (blocks of BLOCK_TOKENS tokens,).

    logits_ptr: (num_tokens, num_columns); rows are stride_logits apart. Columns from num_experts on
        are zero experts, which return their input. Pairs with a zero expert get the id -1.
    bias_ptr: (num_columns,), added to the scores for selection if HAS_BIAS.
    expert_table_ptr: (vocab_size, TOP_K), the experts of each token id. If HAS_TABLE, they are used
        instead of a selection by logits. A pair with an invalid entry or token id gets the id -2,
        which later kernels count as invalid.
    token_ids_ptr: (num_tokens,), used if HAS_TABLE.
    topk_weights_ptr: float32 output (num_tokens, TOP_K).
    topk_ids_ptr: integer output (num_tokens, TOP_K).
    zero_expert_weights_ptr: float32 output (num_tokens,), the sum of the weights of each token's
        zero experts. Written if HAS_ZERO_EXPERTS.
    eps, floor: if RENORMALIZE, weights are divided by max(sum of weights + eps, floor).
    SCORE: "softmax", "sigmoid" or "sqrtsoftplus", the function that computes scores from logits.
    TOPK_FIRST: whether experts are selected by logits before scores are computed. A softmax then
        covers only the selected experts.
    COMPARE_LOGITS: whether experts are compared by logits instead of scores. The selection is the
        same if scores grow monotonically with logits and no bias is added.
    GROUPS, GROUP_SIZE: number of groups, and experts per group.
    TOPK_GROUPS: number of groups from which a token's experts are selected.
    TOP2_GROUP_SCORE: how groups are compared; see `_mask_other_groups`.
    BLOCK_GROUPS, BLOCK_GROUP_SIZE, BLOCK_TOP_K: powers of two >= GROUPS, GROUP_SIZE and TOP_K.
    """
    neg_inf = float("-inf")
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = token < num_tokens
    row = logits_ptr + token.to(tl.int64) * stride_logits
    group = tl.arange(0, BLOCK_GROUPS)[None, :, None]
    index_in_group = tl.arange(0, BLOCK_GROUP_SIZE)[None, None, :]
    expert = group * GROUP_SIZE + index_in_group
    valid = (group < GROUPS) & (index_in_group < GROUP_SIZE)
    peak_logit = tl.zeros((BLOCK_TOKENS, 1, 1), tl.float32)
    total = tl.full((BLOCK_TOKENS, 1, 1), 1.0, tl.float32)
    logit_mask = valid & token_mask[:, None, None]
    logit = tl.load(row[:, None, None] + expert, mask=logit_mask, other=0.0).to(tl.float32)
    logit_mask = logit_mask & (logit == logit)
    logit = _clamp_to_finite(logit, logit_mask)
    exponential = logit
    if SCORE == "softmax" and not TOPK_FIRST:
        peak_logit = _tile_max(tl.where(logit_mask, logit, -_FLOAT32_MAX), BLOCK_TOKENS)
        exponential = tl.where(logit_mask, tl.exp(logit - peak_logit), 0.0)
        total = tl.sum(tl.sum(exponential, axis=2, keep_dims=True), axis=1, keep_dims=True)
        total = tl.where(total > 0.0, total, 1.0)
    k = tl.arange(0, BLOCK_TOP_K)[None, :]
    pair_mask = (k < TOP_K) & token_mask[:, None]
    if HAS_TABLE:
        token_id = tl.load(token_ids_ptr + token, mask=token_mask, other=0)
        in_vocabulary = (token_id >= 0) & (token_id < vocab_size)
        table_offsets = tl.where(in_vocabulary, token_id, 0).to(tl.int64)[:, None] * TOP_K + k
        table_ids = tl.load(
            expert_table_ptr + table_offsets, mask=pair_mask & in_vocabulary[:, None], other=-2
        )
        table_ids = tl.where((table_ids < -1) | (table_ids >= num_columns), -2, table_ids)
        ids = tl.where(pair_mask, table_ids, -1).to(tl.int32)
    else:
        if COMPARE_LOGITS:
            choice = logit
        elif SCORE == "softmax":
            choice = exponential / total
        else:
            choice = _compute_scores(logit, SCORE)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert, mask=valid, other=0.0).to(tl.float32)
            choice += bias
        choice = tl.where(logit_mask & (choice == choice), choice, neg_inf)
        if TOPK_GROUPS < GROUPS:
            choice = _mask_other_groups(
                choice, expert, GROUPS, TOPK_GROUPS, TOP2_GROUP_SCORE, BLOCK_GROUPS
            )
        ids = _select_experts(choice, expert, TOP_K, BLOCK_TOKENS, BLOCK_TOP_K)
    is_chosen = pair_mask & (ids >= 0)
    logit_k = tl.load(row[:, None] + ids, mask=is_chosen, other=0.0).to(tl.float32)
    if HAS_TABLE:
        # Skip experts with a NaN logit, too.
        ids = tl.where(is_chosen & (logit_k != logit_k), -1, ids)
        is_chosen = is_chosen & (logit_k == logit_k)
    logit_k = _clamp_to_finite(logit_k, is_chosen)
    if SCORE == "softmax":
        if TOPK_FIRST:
            # NaN-free: logits are finite
            peak = tl.max(tl.where(is_chosen, logit_k, -_FLOAT32_MAX), axis=1)[:, None]
            weight = tl.where(is_chosen, tl.exp(logit_k - peak), 0.0)
            weight_sum = tl.sum(weight, axis=1)[:, None]
            weight = weight / tl.where(weight_sum > 0.0, weight_sum, 1.0)
        else:
            weight = tl.exp(logit_k - tl.reshape(peak_logit, (BLOCK_TOKENS, 1)))
            weight = weight / tl.reshape(total, (BLOCK_TOKENS, 1))
    else:
        weight = _compute_scores(logit_k, SCORE)
    weight = tl.where(is_chosen, weight, 0.0)
    if RENORMALIZE:
        # NaN-free: weights are finite
        divisor = tl.maximum(tl.sum(weight, axis=1) + eps, floor)[:, None]
        weight = weight / tl.where(divisor > 0.0, divisor, 1.0)
    if HAS_ZERO_EXPERTS:
        is_zero_expert = is_chosen & (ids >= num_experts)
        tl.store(
            zero_expert_weights_ptr + token,
            tl.sum(tl.where(is_zero_expert, weight, 0.0), axis=1),
            mask=token_mask,
        )
        weight = tl.where(is_zero_expert, 0.0, weight)
        ids = tl.where(is_zero_expert, -1, ids)
    out = token.to(tl.int64)[:, None] * TOP_K + k
    tl.store(topk_weights_ptr + out, weight, mask=pair_mask)
    tl.store(topk_ids_ptr + out, ids.to(topk_ids_ptr.dtype.element_ty), mask=pair_mask)
