"""Compare the choices of `compose` with the default pairing and with the fastest valid pairing.

    python tools/check_choice.py --random-layers 4 --seed 1 --quant none,fp8_w8a8_block \
        --budgets 0,5,30 --json out/choice.json

For each layer and scheme, `compose` is called once per budget, in ascending order, with an empty
cache of choices each time. The calls share the cache of compiled kernels.

Then, at each number of tokens, the plan of the composed layer is timed interleaved with the plan of
the default pairing. Both plans are for the maximum number of tokens. Every valid pairing is also
timed interleaved with the default, once for each number of tokens. A pairing whose first calls take
more than 1.5 times as long as the default is not timed further.

Layers are those of --model, of --layer E,K,H,I, and --random-layers layers with random sizes. The
exit status is 1 in three cases:

- the time of a composed layer is more than --limit times that of the default, beyond 2 x the noise
- `compose` exceeds its budget by more than one second
- a second call of `compose`, with the filled cache, times a pairing or selects another one
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from modular_kernel.catalog import make_kernel
from modular_kernel.cli.options import TOKENS_LIST, parse_schemes
from modular_kernel.cli.presets import BASELINE_SHAPES, SHAPES
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.timing import capture_graphs, make_clock, make_l2_flush, time_runs_ms
from modular_kernel.select.autotune import BUDGET_S, MeasurementOptions, compose
from modular_kernel.select.budget import Budget
from modular_kernel.select.inputs import make_weights, make_workload
from modular_kernel.select.process_group import SingleProcess
from modular_kernel.select.selection import pairing_name
from modular_kernel.select.timing import PairingTimer
from modular_kernel.spec.problem import Problem

MAX_SLOWDOWN = 1.5  # a pairing is not timed further if its ratio to the default's time is larger
OVERRUN_S = 1.0  # allowed excess over a budget
MIN_ROUNDS, MAX_ROUNDS = 9, 41  # rounds of an interleaved comparison of two plans
TARGET_S = 0.06  # the number of rounds is TARGET_S divided by the seconds of a slow round
EXPERTS = (8, 16, 24, 32, 40, 48, 60, 64, 72, 96, 128, 160, 192, 256)
MIN_BYTES, MAX_BYTES = 3e8, 16e9  # bounds of the bytes of weights in bfloat16


def main() -> int:
    args = _parse_arguments()
    report = {"seed": args.seed, "tokens": args.tokens, "cells": [], "calls": []}
    # Warm up: import every part.
    compose(Problem(1, 256, 256, 8, 2), options=MeasurementOptions(budget=0))
    for name, sizes in _list_layers(args).items():
        for quant in parse_schemes(args.quant):
            if time.monotonic() < args.end:
                _check_layer(name, Problem(max(args.tokens), quant=quant, **sizes), args, report)
                if args.json is not None:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps(report, indent=1))
    return _print_summary(report, args.limit)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="names of layers, such as mixtral,qwen3_30b")
    parser.add_argument("--layer", action="append", default=[], help="sizes E,K,H,I of a layer")
    parser.add_argument("--random-layers", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--tokens-list", default="1,16,64,256,1024,4096")
    parser.add_argument("--budgets", default="0,5,30,default", help="seconds, or `default`")
    parser.add_argument(
        "--deadline", type=float, default=560, help="seconds after which no step starts"
    )
    parser.add_argument("--limit", type=float, default=1.02)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.end = time.monotonic() + args.deadline
    args.tokens = TOKENS_LIST.parse(args.tokens_list, "--tokens-list")
    budgets = args.budgets.split(",")
    args.seconds = sorted(
        {BUDGET_S if budget == "default" else float(budget) for budget in budgets}
    )
    return args


def _list_layers(args) -> dict[str, dict[str, int]]:
    names = args.model.split(",") if args.model else []
    if not names and not args.layer and not args.random_layers:
        names = list(BASELINE_SHAPES)
    layers = {name: dict(SHAPES[name]) for name in names}
    layers |= dict(_name_layer(*map(int, sizes.split(","))) for sizes in args.layer)
    return layers | random_layers(args.random_layers, args.seed)


def _name_layer(experts: int, top_k: int, hidden: int, intermediate: int):
    sizes = {"experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    return f"E{experts}-K{top_k}-H{hidden}-I{intermediate}", sizes


def random_layers(count: int, seed: int) -> dict[str, dict[str, int]]:
    """Draw random sizes in the range of published layers, excluding the shapes in SHAPES."""
    rng, layers = random.Random(seed), {}
    while len(layers) < count:
        experts = rng.choice(EXPERTS)
        top_k = rng.choice([k for k in (1, 2, 4, 6, 8, 10) if 4 * k <= experts])
        hidden, intermediate = 256 * rng.randint(4, 32), 128 * rng.randint(2, 112)
        name, sizes = _name_layer(experts, top_k, hidden, intermediate)
        nbytes = 2 * 3 * experts * hidden * intermediate
        if MIN_BYTES <= nbytes <= MAX_BYTES and sizes not in SHAPES.values():
            layers[name] = sizes
    return layers


def _check_layer(name: str, problem: Problem, args, report) -> None:
    """Compose one layer under every budget, time the results, and add them to the report."""
    composed = []
    for seconds in args.seconds:
        if time.monotonic() + seconds < args.end:
            kernel, call = _compose_twice(problem, args.tokens, seconds)
            print(f"{name} {problem.quant}: {call['summary']}", file=sys.stderr)
            report["calls"].append({"layer": name, "quant": problem.quant, **call})
            composed.append((seconds, kernel))
    with torch.no_grad():
        report["cells"] += _time_layer(name, problem, composed, args)
    composed.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compose_twice(problem: Problem, tokens, seconds: float):
    """Compose with an empty cache, and then with the filled cache and a budget of 0.

    Returns the kernel of the first call, and a record of both calls. The second call must read its
    choice from the cache, without timing.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = MeasurementOptions(tokens=tokens, budget=seconds, folder=Path(folder))
        start = time.perf_counter()
        kernel = compose(problem, options=options)
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        cached = compose(problem, options=replace(options, budget=0))
        second_s = time.perf_counter() - start
    choice = kernel.choice
    return kernel, {
        "budget": seconds,
        "first_s": round(first_s, 3),
        "second_s": round(second_s, 3),
        "same_again": cached.choice.segments == choice.segments and not cached.choice.num_timed,
        "summary": choice.summary,
        "segments": [[s.first, s.last, pairing_name(s.pair)] for s in choice.segments],
        "notes": list(choice.notes),
    }


def _time_layer(name: str, problem: Problem, composed, args) -> list[dict]:
    """Time the composed layers. Returns a row for each budget and number of tokens."""
    if not composed:
        return []
    choice = composed[-1][1].choice
    device = torch.device(choice.machine.device)
    weights = make_weights(problem, device)
    default = make_kernel(*choice.pairing_options.valid_pairs(problem.tokens)[0], problem)
    default_plan, plans = default.plan(), [kernel.plan() for _, kernel in composed]
    rows = []
    for tokens in args.tokens:
        if time.monotonic() > args.end:
            break
        inputs = make_workload(
            problem.with_tokens(tokens), weights, RoutingKind("uniform"), replicated=False
        )
        seconds_left = max(args.end - time.monotonic(), 0)
        # With first_step_seconds=0, the first pairing is timed even if little time is left.
        budget = Budget(seconds_left, SingleProcess(), first_step_seconds=0)
        order, capturable = choice.pairing_options.valid_pairs(tokens), choice.candidates.capturable
        timer = PairingTimer(
            inputs, order, capturable, choice.machine, SingleProcess(), budget, MAX_SLOWDOWN
        )
        bucket = timer.time_bucket(order[1:])
        # The ratio of a much slower pairing is imprecise, because it is timed in only two rounds.
        ratios = {
            outcome.pair: outcome.ratio
            for outcome in bucket.outcomes
            if outcome.ratio is not None and not outcome.rough
        }
        if not ratios:  # no pairing could be timed, or the time is up
            continue
        best = min(ratios, key=ratios.__getitem__)
        measured: dict = {}
        for (seconds, kernel), plan in zip(composed, plans, strict=True):
            pair = kernel.choice.pair_by_tokens[tokens]
            if pair not in measured:  # budgets with the same choice run the same kernel
                measured[pair] = _compare_with_default(plan, default_plan, inputs, device)
            us, ratio, noise = measured[pair]
            rows.append(
                {
                    "layer": name,
                    "quant": problem.quant,
                    "budget": seconds,
                    "tokens": tokens,
                    "chosen": pairing_name(pair),
                    "by": kernel.choice.selected_by_tokens[tokens].reason.value,
                    "us": us,
                    "x_default": ratio,
                    "noise": noise,
                    "best": pairing_name(best),
                    "x_best": ratio / ratios[best],
                    "outcomes": [
                        [
                            pairing_name(outcome.pair),
                            outcome.us,
                            outcome.ratio,
                            outcome.rough,
                            outcome.mode,
                            outcome.why,
                        ]
                        for outcome in bucket.outcomes
                    ],
                }
            )
            _print_row(rows[-1])
    return rows


def _compare_with_default(plan, default, inputs, device) -> tuple[float, float, float]:
    """Time a plan interleaved with the plan of the default pairing.

    Returns the plan's microseconds, its time divided by that of the default, and the noise of this
    ratio.
    """
    clock, flush_l2 = make_clock(device), make_l2_flush(device) if inputs.flush else None
    runs_of_plans = [_capture_calls(timed_plan, inputs, device) for timed_plan in (plan, default)]

    def time_once(runs) -> float:
        return sum(time_runs_ms(runs, clock, flush_l2)) / len(inputs.inputs)

    longest = (
        max(time_once(runs) for runs in runs_of_plans for _ in range(2)) * len(inputs.inputs) / 1e3
    )
    rounds = min(max(int(TARGET_S / max(longest, 1e-9)), MIN_ROUNDS), MAX_ROUNDS)
    times: tuple[list[float], list[float]] = [], []
    for round_index in range(rounds):
        for index in (0, 1) if round_index % 2 else (1, 0):
            times[index].append(time_once(runs_of_plans[index]))
    ratios = [plan_time / default_time for plan_time, default_time in zip(*times, strict=True)]
    quarters = quantiles(ratios, n=4)
    noise = (quarters[2] - quarters[0]) / rounds**0.5
    return median(times[0]) * 1e3, median(ratios), noise


def _capture_calls(plan, inputs, device):
    calls = [lambda x=x, r=r: plan(x, inputs.weights, r) for x, r in inputs.inputs]
    for call in calls:
        call()
    if device.type == "cuda":
        graphs = capture_graphs([[call] for call in calls] if inputs.flush else [calls])
        if graphs is not None:
            return graphs
    return calls


def _print_row(row) -> None:
    cell = f"{row['layer']:24} {row['quant']:16} {row['budget']:4g} s {row['tokens']:6}"
    measurements = (
        f"{row['us']:10.1f} us {row['x_default']:6.3f} x default {row['x_best']:6.3f} x best"
    )
    best = f"  (best: {row['best']})" if row["chosen"] != row["best"] else ""
    print(f"{cell} {measurements}  {row['chosen']} by {row['by']}{best}", flush=True)


def _print_summary(report, limit: float) -> int:
    cells, calls = report["cells"], report["calls"]
    slower_rows = [row for row in cells if row["x_default"] > limit + 2 * row["noise"]]
    overruns = [call for call in calls if call["first_s"] > call["budget"] + OVERRUN_S]
    changed = [call for call in calls if not call["same_again"]]
    for budget in sorted({row["budget"] for row in cells}):
        budget_cells = [row for row in cells if row["budget"] == budget]
        to_default, to_best = (
            [row[key] for row in budget_cells] for key in ("x_default", "x_best")
        )
        spent = max(call["first_s"] for call in calls if call["budget"] == budget)
        print(
            f"budget {budget:g} s: {len(budget_cells)} cells, "
            f"x default median {median(to_default):.3f}, "
            f"worst {max(to_default):.3f}; x best median {median(to_best):.3f}, "
            f"worst {max(to_best):.3f}; at most {spent:.1f} s"
        )
    for row in slower_rows:
        print(f"slower than the default: {row['layer']} {row['quant']} at {row['tokens']} tokens")
    for call in overruns:
        times = f"{call['first_s']:.1f} s with a budget of {call['budget']:g} s"
        print(f"overrun: {call['layer']} {call['quant']} took {times}")
    for call in changed:
        print(f"the choice read from the cache differs: {call['layer']} {call['quant']}")
    return int(bool(slower_rows or overruns or changed or not cells))


if __name__ == "__main__":
    sys.exit(main())
