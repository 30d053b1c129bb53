"""How good the choices of `mk compose` are: each beside the best of all valid pairings.

    python tools/check_choice.py --model mixtral,qwen3_30b --quant none --json out/choice.json

Chooses for each shape as compose() does, with an empty cache; asks again, which must not time
anything; then times every valid pairing by turns, on the same kind of inputs, and compares. Exits
with 1 where a choice is more than --limit times the best.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from modular_kernel.cli.lists import schemes, token_numbers
from modular_kernel.cli.presets import BASELINE_SHAPES, SHAPES
from modular_kernel.measure.routing import RoutingKind
from modular_kernel.select.choosing import Terms, choose, compose
from modular_kernel.select.inputs import make_weights, situation
from modular_kernel.select.team import Alone
from modular_kernel.select.timing import Stopwatch
from modular_kernel.types import Problem


def main() -> int:
    args = _arguments()
    end = time.monotonic() + args.deadline
    rows, calls = [], []
    for name in args.model.split(","):
        for quant in schemes(args.quant):
            if time.monotonic() < end:
                some, call = _shape(name, quant, args, end)
                rows += some
                calls.append(call)
                if args.json is not None:
                    args.json.write_text(json.dumps({"cells": rows, "calls": calls}, indent=1))
    if args.warm:
        return 0
    _print(rows, calls)
    worst = max((row["ratio"] for row in rows), default=math.inf)
    slow = [call for call in calls if not call["second_s"] < 1 or call["second_timed"]]
    return 0 if worst <= args.limit and not slow else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=",".join(BASELINE_SHAPES))
    parser.add_argument("--quant", default="none")
    parser.add_argument("--tokens-list", default="1,16,128,1024,4096,16384")
    parser.add_argument("--budget", type=float, default=120, help="seconds for each choice")
    parser.add_argument("--deadline", type=float, default=1e9, help="no shape is begun later")
    parser.add_argument("--limit", type=float, default=1.03)
    parser.add_argument("--warm", action="store_true", help="only choose, to have all compiled")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _shape(name, quant, args, end):
    tokens = token_numbers(args.tokens_list)
    problem = Problem(tokens=max(tokens), quant=quant, **SHAPES[name])
    with tempfile.TemporaryDirectory() as folder:
        budget = max(min(args.budget, end - time.monotonic()), 1)
        terms = Terms(tokens=tokens, budget=budget, folder=Path(folder))
        start = time.perf_counter()
        choice = choose(problem, terms=terms)
        first = time.perf_counter() - start
        start = time.perf_counter()
        again = compose(problem, terms=terms)
        second = time.perf_counter() - start
    call = {
        "shape": name,
        "quant": quant,
        "first_s": round(first, 3),
        "second_s": round(second, 3),
        "second_timed": again.choice.timed,
        "segments": [[s.first, s.last, " x ".join(s.pair)] for s in choice.segments],
        "notes": list(choice.notes),
    }
    print(f"{name} {quant}: chosen in {first:.1f} s, again in {second:.3f} s", file=sys.stderr)
    rows = [] if args.warm else _exhaustive(name, choice, end)
    del again
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows, call


def _exhaustive(name, choice, end):
    """Return a row for each bucket of a choice: every valid pairing timed anew, all by turns."""
    rows, problem, team = [], choice.problem, Alone()
    with torch.no_grad():
        weights = make_weights(problem, torch.device(choice.machine.device))
        for tokens, pick in choice.picks.items():
            if time.monotonic() > end:
                break
            given = situation(
                problem.with_tokens(tokens), weights, RoutingKind("uniform"), replicated=False
            )
            watch = Stopwatch(
                given, choice.candidates, choice.machine, team, lambda: False, math.inf
            )
            bucket = watch.bucket()
            times = bucket.times
            best = min(times, key=times.__getitem__)
            rows.append(
                {
                    "shape": name,
                    "quant": problem.quant,
                    "tokens": tokens,
                    "chosen": " x ".join(pick),
                    "chosen_us": times.get(pick),
                    "best": " x ".join(best),
                    "best_us": times[best],
                    "ratio": times[pick] / times[best] if pick in times else math.inf,
                    "outcomes": [
                        [" x ".join(o.pair), o.us, o.mode, o.why] for o in bucket.outcomes
                    ],
                }
            )
    return rows


def _print(rows, calls) -> None:
    for row in rows:
        us, better = row["chosen_us"] or -1, row["chosen"] != row["best"]
        head = f"{row['shape']:10} {row['quant']:16} {row['tokens']:6} {us:10.1f} us"
        other = f"  (best: {row['best']})" if better else ""
        print(f"{head}  {row['ratio']:.3f} x best  {row['chosen']}{other}")
    worst = max((row["ratio"] for row in rows), default=math.inf)
    print(f"{len(rows)} cells, worst {worst:.3f} x the best valid pairing")
    print("second calls: " + ", ".join(f"{c['shape']} {c['second_s']:.3f} s" for c in calls))
    for note in dict.fromkeys(note for call in calls for note in call["notes"]):
        print(f"note: {note}")


if __name__ == "__main__":
    sys.exit(main())
