"""Activations as nvfp4 holds them, by the definition, sharing no code with any part."""

import torch

# The magnitudes of e2m1, those of even codes first: they win where two are equally near.
_MAGNITUDES = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
_GROUP = 16


def held_by_nvfp4(
    rows: torch.Tensor, experts_R: torch.Tensor, scale_e: torch.Tensor, *, reciprocal: bool
) -> torch.Tensor:
    """Return float32 rows (R, K) as their experts' nvfp4 holds them.

    experts_R: (R,) int64; a negative one is of no expert, whose row's values do not matter.
    scale_e: (e,) float32, of each expert. reciprocal: a value is multiplied by the inverse of
    the expert's scale over that of its group, as kernels do, instead of divided by both.
    """
    whole = scale_e.float()[experts_R.clamp(min=0)][:, None]
    parts = []
    for start in range(0, rows.shape[1], _GROUP):
        part = rows[:, start : start + _GROUP]
        amax = part.abs().amax(1, keepdim=True)
        six = amax.new_tensor(6.0)
        wanted = (1 / whole) * amax / six if reciprocal else amax / (six * whole)
        scale = wanted.clamp(max=448.0).to(torch.float8_e4m3fn).to(rows.dtype)
        if reciprocal:
            scaled = part * torch.where(scale == 0, 0.0, (1 / whole) / scale)
        else:
            scaled = torch.where(scale == 0, 0.0, part / (scale * whole))
        parts.append(_nearest(scaled) * scale * whole)
    return torch.cat(parts, dim=1) if parts else rows


def _nearest(values: torch.Tensor) -> torch.Tensor:
    magnitude = values.abs().clamp(max=6.0)
    best, away = torch.zeros_like(values), magnitude
    for candidate in _MAGNITUDES[1:]:
        distance = (magnitude - candidate).abs()
        nearer = distance < away
        best, away = torch.where(nearer, candidate, best), torch.where(nearer, distance, away)
    return torch.where(values.isnan(), values, torch.copysign(best, values))
