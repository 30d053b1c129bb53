"""Reference for the quantization of activations to nvfp4, which shares no code with any part."""

import torch

# Magnitudes of e2m1, with even codes first. If two values are equally near, the first is chosen, so
# that ties go to the even code.
_MAGNITUDES = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
_GROUP_SIZE = 16


def round_to_nvfp4(
    rows: torch.Tensor, experts_R: torch.Tensor, scale_e: torch.Tensor, *, reciprocal: bool
) -> torch.Tensor:
    """Round float32 rows (R, K) to values that nvfp4 can represent with their experts' scales.

    experts_R: (R,) int64, the expert of each row. A row with a negative expert is skipped: its
        result is not used.
    scale_e: (e,) float32, the scale of each expert.
    reciprocal: multiply by (1 / expert scale) / group scale, as kernels do, instead of dividing by
        both scales.
    """
    expert_scale = scale_e.float()[experts_R.clamp(min=0)][:, None]
    groups = []
    for start in range(0, rows.shape[1], _GROUP_SIZE):
        group = rows[:, start : start + _GROUP_SIZE]
        amax = group.abs().amax(1, keepdim=True)
        max_magnitude = amax.new_tensor(6.0)
        unclamped = (
            (1 / expert_scale) * amax / max_magnitude
            if reciprocal
            else amax / (max_magnitude * expert_scale)
        )
        scale = unclamped.clamp(max=448.0).to(torch.float8_e4m3fn).to(rows.dtype)
        if reciprocal:
            scaled = group * torch.where(scale == 0, 0.0, (1 / expert_scale) / scale)
        else:
            scaled = torch.where(scale == 0, 0.0, group / (scale * expert_scale))
        groups.append(_round_to_e2m1(scaled) * scale * expert_scale)
    return torch.cat(groups, dim=1) if groups else rows


def _round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs().clamp(max=6.0)
    best, best_distance = torch.zeros_like(values), magnitude
    for candidate in _MAGNITUDES[1:]:
        distance = (magnitude - candidate).abs()
        is_nearer = distance < best_distance
        best, best_distance = (
            torch.where(is_nearer, candidate, best),
            torch.where(is_nearer, distance, best_distance),
        )
    return torch.where(values.isnan(), values, torch.copysign(best, values))
