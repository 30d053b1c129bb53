"""Reference nvfp4 quantization of activations, by definition; shares no code with any part."""

import torch

# Magnitudes of e2m1, even codes first, so that they win ties.
_MAGNITUDES = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
_GROUP = 16


def nvfp4_round_trip(
    rows: torch.Tensor, experts_R: torch.Tensor, scale_e: torch.Tensor, *, reciprocal: bool
) -> torch.Tensor:
    """Round float32 rows (R, K) to values of nvfp4 with their experts' scales.

    experts_R: (R,) int64. A negative one means no expert; that row's result is then irrelevant.
    scale_e: (e,) float32, one for each expert.
    reciprocal: multiply by the inverse of the expert's scale divided by the group's scale, as
        kernels do, instead of dividing by both scales.
    """
    expert_scale = scale_e.float()[experts_R.clamp(min=0)][:, None]
    groups = []
    for start in range(0, rows.shape[1], _GROUP):
        group = rows[:, start : start + _GROUP]
        amax = group.abs().amax(1, keepdim=True)
        six = amax.new_tensor(6.0)
        unclamped = (1 / expert_scale) * amax / six if reciprocal else amax / (six * expert_scale)
        scale = unclamped.clamp(max=448.0).to(torch.float8_e4m3fn).to(rows.dtype)
        if reciprocal:
            scaled = group * torch.where(scale == 0, 0.0, (1 / expert_scale) / scale)
        else:
            scaled = torch.where(scale == 0, 0.0, group / (scale * expert_scale))
        groups.append(_nearest(scaled) * scale * expert_scale)
    return torch.cat(groups, dim=1) if groups else rows


def _nearest(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs().clamp(max=6.0)
    best, best_distance = torch.zeros_like(values), magnitude
    for candidate in _MAGNITUDES[1:]:
        distance = (magnitude - candidate).abs()
        nearer = distance < best_distance
        best, best_distance = (
            torch.where(nearer, candidate, best),
            torch.where(nearer, distance, best_distance),
        )
    return torch.where(values.isnan(), values, torch.copysign(best, values))
