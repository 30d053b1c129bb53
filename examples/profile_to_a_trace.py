"""Profile one call of a plan, and write a trace with a range for each stage.

    python examples/profile_to_a_trace.py [FILE.json]

https://ui.perfetto.dev opens the trace. `mk profile` also computes the roofline of each stage,
compares two pairings, and writes an HTML report.
"""

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import modular_kernel as mk
from modular_kernel.profiling.record import suppress_profiler_lines


def main(path: str = "layer.trace.json") -> None:
    """Profile a call of a plan, write the trace to `path`, and print the time of each stage."""
    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if has_gpu else "cpu")
    problem = mk.Problem(
        tokens=32, hidden=128, intermediate=128, experts=8, top_k=2, dtype=torch.float32
    )
    plan = mk.make_kernel("MoEPrepareAndFinalizeNoEP", "TorchExperts", problem).plan()
    weights = mk.ExpertWeights(w1=torch.randn(8, 256, 128) / 11, w2=torch.randn(8, 128, 128) / 11)
    topk_logits_TK, topk_ids_TK = torch.randn(32, 8).topk(2)
    x_TH = torch.randn(32, 128)
    routing = mk.Routing(topk_logits_TK.softmax(-1), topk_ids_TK)
    plan(x_TH, weights, routing)  # warm up, so that the profile does not include compilation

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with suppress_profiler_lines(), profile(activities=activities) as profiler:
        plan(x_TH, weights, routing)
    Path(path).parent.mkdir(parents=True, exist_ok=True)  # torch does not create the folder
    profiler.export_chrome_trace(path)

    for event in profiler.key_averages():
        if event.key.startswith("mk::"):
            print(f"{event.key:<24} {event.cpu_time_total:8.1f} us on the host")
    print(f"trace: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
