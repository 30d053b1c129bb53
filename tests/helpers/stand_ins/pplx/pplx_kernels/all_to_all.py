"""A stand-in for pplx-kernels over any process group."""

import torch
from moved_rows import send_rows_to_experts, sum_rows_by_expert


class AllToAll:
    @classmethod
    def intranode(
        cls,
        max_num_tokens,
        num_experts,
        experts_per_token,
        rank,
        world_size,
        dp_size,
        hidden_dim,
        hidden_dim_bytes,
        hidden_dim_scale_bytes,
        group_name="default",
    ):
        assert hidden_dim_bytes % 16 == hidden_dim_scale_bytes % 16 == 0
        assert dp_size == 1
        assert group_name
        self = cls()
        self.experts, self.scales = num_experts, hidden_dim_scale_bytes // 4
        return self

    def dispatch(
        self,
        out_expert_num_tokens,
        out_expert_x,
        out_expert_x_scale,
        dp_x,
        dp_x_scale,
        indices,
        bound_m,
        do_send=True,
        do_recv=True,
    ):
        assert indices.dtype == torch.uint32
        assert (out_expert_x_scale is None) == (dp_x_scale is None)
        for scale in (out_expert_x_scale, dp_x_scale):
            assert (0 if scale is None else scale.shape[-1]) == self.scales, "read or written past"
        out = [t for t in (out_expert_x, out_expert_x_scale) if t is not None]
        payloads = [t for t in (dp_x, dp_x_scale) if t is not None]
        for rows in out:
            rows.copy_(torch.full(rows.shape, torch.nan).to(rows.dtype))
        self.places = send_rows_to_experts(
            tuple(payloads), indices.to(torch.int64), self.experts, out, out_expert_num_tokens
        )

    def combine(self, out_tokens, indices, weights, expert_y, bound_m, do_send=True, do_recv=True):
        ids = indices.to(torch.int64)
        out_tokens.copy_(sum_rows_by_expert(expert_y, self.places, ids, weights, self.experts))

    def destroy(self):
        pass
