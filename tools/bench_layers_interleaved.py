"""Interleaved timing of whole layers, ours and public.

    python tools/bench_layers_interleaved.py fp8_block

GPU clocks depend on the preceding load, so timing layers one after the other is not a fair
comparison. Here all layers of a cell are set up first, each with a CUDA graph of calls on several
inputs. Each round replays every graph once, in random order, and the result is the median over
rounds. With `--sustained N`, in cells of at least N tokens each layer is then replayed alone for
half a second while the SM clock and the power are recorded. Every output is compared with that of
the first layer of the cell. Needs one GPU.

`--warm N` first compiles the kernels of all cells in N processes. `--once LAYER` makes one call of
that layer between cudaProfilerStart and Stop, for Nsight Compute:

    ncu --profile-from-start off --clock-control none --section SpeedOfLight --csv --page raw \\
        python tools/bench_layers_interleaved.py fp8_block --shapes mixtral --tokens 4096 \\
        --once mk_deepgemm
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import bench_peers
import bench_peers_flashinfer
import in_checkout  # noqa: F401  finds the packages
import torch

from modular_kernel import Problem
from modular_kernel.bench.candidates import PairLayer, TorchGroupedMm
from modular_kernel.catalog import make_kernel, this_machine
from modular_kernel.cli.presets import SHAPES
from modular_kernel.measure.cases import LayerCase, make_input, make_weights, quantize
from modular_kernel.measure.environment import environment
from modular_kernel.measure.routing_patterns import RoutingKind
from modular_kernel.measure.timing import capture

PF = "MoEPrepareAndFinalizeNoEP"
INT4_GROUP = {"gptoss": 64}  # int4 group size of shapes that 128 does not divide
ROUNDS = 11


class Pair(PairLayer):
    """One of our pairings. scales: dtype of int4 scales, for 16-bit checkpoints; None: float32."""

    def __init__(self, name, experts, quant, prepared=False, scales=None, machine=None):
        super().__init__(PF, experts, quant, machine or this_machine(), prepared)
        self.name, self.scales = name, scales

    def setup(self, problem, weights):
        self.problem = replace(problem, quant=self.quant)
        self.weights, self._plan = quantize(weights, self.problem), None
        if self.scales is not None:
            ours = self.weights
            scales = {n: getattr(ours, n).to(self.scales) for n in ("w1_scale", "w2_scale")}
            self.weights = replace(ours, **scales)
        if self.prepared:
            kernel = make_kernel(*self.pair, self.problem, machine=self.machine)
            self.weights = kernel.prepare_weights(self.weights)


def int4(shape, points=False):
    options = [f"group={INT4_GROUP[shape]}"] if shape in INT4_GROUP else []
    options += ["zero_points=true"] if points else []
    return "int4_w4a16_group" + (":" + ",".join(options) if options else "")


def peers(*wanted):
    layers = [*bench_peers.layers(), *bench_peers_flashinfer.layers()]
    return [layer for layer in layers if (layer.name, layer.quant) in wanted]


def fp8_block(shape):
    quant = "fp8_w8a8_block"
    return [
        Pair("mk_triton", "TritonExperts", quant),
        Pair("mk_cutlass", "CutlassExpertsFP8", quant),
        Pair("mk_deepgemm", "DeepGemmExperts", quant),
        *peers(("vllm_deepgemm", quant), ("vllm_triton", quant), ("flashinfer", quant)),
    ]


def four_bits(shape):
    bf16, prepared = torch.bfloat16, partial(Pair, experts="TritonExperts", prepared=True)
    return [
        Pair("bf16", "TritonExperts", "none"),
        prepared("int4_b16", quant=int4(shape), scales=bf16),
        prepared("int4_f16", quant=int4(shape), scales=torch.float16),
        prepared("int4_f32", quant=int4(shape)),
        prepared("int4_zp_b16", quant=int4(shape, points=True), scales=bf16),
        prepared("mxfp4", quant="mxfp4_w4a16"),
        prepared("mxfp4_repacked", quant="mxfp4_w4a16:repacked=true"),
        prepared("nvfp4", quant="nvfp4_w4a16"),
        Pair("mxfp4_each_call", "TritonExperts", "mxfp4_w4a16"),
        Pair("mxfp4_tk_part", "TritonKernelsExperts", "mxfp4_w4a16"),
        *peers(
            *((n, "mxfp4_w4a16") for n in ("triton_kernels", "vllm_marlin_mxfp4", "flashinfer")),
            *((n, "int4_w4a16_group") for n in ("vllm_triton", "vllm_marlin")),
        ),
    ]


def bf16(shape):
    return [
        Pair("mk_triton", "TritonExperts", "none"),
        Pair("mk_triton_kernels", "TritonKernelsExperts", "none"),
        Pair("mk_deepgemm", "DeepGemmExperts", "none"),
        *peers(*((name, "none") for name in ("triton_kernels", "vllm_triton", "flashinfer"))),
        TorchGroupedMm(),
    ]


class Invariant(Pair):
    """A pairing with batch invariance: the bits of a token do not depend on other tokens."""

    def refusal(self, problem):
        return super().refusal(replace(problem, batch_invariant=True))

    def setup(self, problem, weights):
        super().setup(replace(problem, batch_invariant=True), weights)


def batch_invariant(shape):
    layers = []
    for quant in ("none", "fp8_w8a8_block"):
        layers += [
            Pair(quant, "TritonExperts", quant),
            Invariant(f"{quant}_invariant", "TritonExperts", quant),
        ]
    return layers


SECTIONS = {make.__name__: make for make in (fp8_block, four_bits, bf16, batch_invariant)}


@dataclass
class Ready:
    layer: object
    run: object
    calls: int
    last: torch.Tensor


class Meter:
    """SM clock (MHz) and power (W) of the GPU, sampled every 20 ms by an nvidia-smi process."""

    def __init__(self):
        fields = "--query-gpu=clocks.sm,power.draw"
        form = "--format=csv,noheader,nounits"
        self.process = subprocess.Popen(
            ["nvidia-smi", fields, form, "-lms", "20"], stdout=subprocess.PIPE, text=True
        )
        self.seen = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            now = time.perf_counter()
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:
                continue
            self.seen.append((now, mhz, watts))

    def between(self, start, end):
        samples = [(mhz, watts) for now, mhz, watts in list(self.seen) if start <= now <= end]
        if not samples:
            return None
        mhz, watts = zip(*samples, strict=True)
        return {"mhz": statistics.median(mhz), "watts": round(statistics.median(watts))}

    def close(self):
        self.process.kill()


def cell_problem(shape, tokens):
    return Problem(tokens=tokens, dtype=torch.bfloat16, **SHAPES[shape])


def layers_of(section, shape, only):
    layers = SECTIONS[section](shape)
    return [layer for layer in layers if not only or layer.name in only]


def prepared_layers(section, shape, tokens, weights, args, tell):
    """Set up every layer that supports the cell; yield it with its calls and its first output."""
    problem = cell_problem(shape, tokens)
    inputs = [
        make_input(LayerCase(shape, problem, RoutingKind("uniform")), weights.w1.device, n)
        for n in range(8 if tokens <= 128 else 4 if tokens <= 1024 else 2)
    ]
    for layer in layers_of(section, shape, args.only):
        reason = layer.refusal(problem)
        if reason:
            tell(f"{layer.name}: {reason[:150]}")
            continue
        if args.compile_only and getattr(layer, "tuned", False):
            continue  # nothing to compile, and its autotuner would compete with compilers
        try:
            layer.setup(problem, weights)
            calls = [partial(layer.call, item.x_TH, item.routing) for item in inputs]
            last = calls[0]().clone()
            for call in calls:
                call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  a library can raise anything; continue
            tell(f"{layer.name}: {type(error).__name__}: {str(error)[:300]}")
            if args.trace:
                traceback.print_exc()
            continue
        yield layer, calls, last


def measure(section, shape, tokens, weights, args, meter, tell):
    ready = []
    for layer, calls, last in prepared_layers(section, shape, tokens, weights, args, tell):
        captured = capture([calls])
        if captured is None:
            tell(f"{layer.name}: cannot be captured")
            continue
        ready.append(Ready(layer, captured[0], len(calls), last))
    if not ready:
        return []
    times = {item.layer.name: [] for item in ready}
    for number in range(args.rounds + 2):  # the first two rounds are for clocks to settle
        for item in random.sample(ready, len(ready)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            item.run()
            end.record()
            end.synchronize()
            if number >= 2:
                times[item.layer.name].append(start.elapsed_time(end) * 1e3 / item.calls)
    first = ready[0].last.double()
    rows = []
    for item in ready:
        us = times[item.layer.name]
        error = (item.last.double() - first).norm() / first.norm()
        row = {
            "section": section, "shape": shape, "tokens": tokens, "layer": item.layer.name,
            "quant": item.layer.quant, "us": round(statistics.median(us), 2),
            "us_min": round(min(us), 2), "rounds": len(us),
            "err_to_first": round(error.item(), 5),
        }  # fmt: skip
        if args.sustained and tokens >= args.sustained:
            row |= sustained(item, row["us"], meter)
        rows.append(row)
    return rows


def sustained(item, us, meter):
    """Replay a layer for half a second; return its time, and clock and power in the second half."""
    replays = max(int(5e5 / (us * item.calls)), 1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        item.run()
    end.record()
    end.synchronize()
    finish = time.perf_counter()
    alone = start.elapsed_time(end) * 1e3 / (item.calls * replays)
    return {"us_sustained": round(alone, 2)} | (meter.between((begin + finish) / 2, finish) or {})


def once(section, shape, tokens, weights, args):
    """Make one call of the layer in --once between cudaProfilerStart and cudaProfilerStop."""
    args.only = [args.once]
    for _, calls, _ in prepared_layers(section, shape, tokens, weights, args, print):
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        calls[0]()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def warm(args, cells):
    """Compile the kernels of all cells, with one process per shape and number of tokens."""

    def compiled(cell):
        shape, tokens = cell
        arguments = [
            sys.executable,
            __file__,
            args.section,
            "--shapes",
            shape,
            "--tokens",
            str(tokens),
        ]
        arguments += ["--compile-only", *(["--only", ",".join(args.only)] if args.only else [])]
        process = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if process.returncode:
            print(f"warming {shape} {tokens}: {process.stderr[-500:]}", file=sys.stderr)

    with ThreadPoolExecutor(args.warm) as pool:
        list(pool.map(compiled, cells))


def shown(rows, base):
    """Print a line per cell: microseconds of each layer, and its ratio to the layer `base`."""
    cells = {}
    for row in rows:
        cells.setdefault((row["section"], row["shape"], row["tokens"]), []).append(row)
    for (section, shape, tokens), group in cells.items():
        base_us = next((r["us"] for r in group if r["layer"] == base), group[0]["us"])
        text = " ".join(f"{r['layer']}={r['us']:.0f}({r['us'] / base_us:.2f})" for r in group)
        print(f"{section} {shape} {tokens}: {text}")


def words(text):
    return [word for word in text.split(",") if word]


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--shapes", type=words, default=["mixtral", "dsv3_ep8", "qwen3_30b"])
    parser.add_argument("--tokens", type=words, default=["1024", "4096", "16384"])
    parser.add_argument("--only", type=words, default=[])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--sustained", type=int, default=0, help="from so many tokens on")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds; no cell begins later")
    parser.add_argument("--once", default="")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = {layer.name for layer in SECTIONS[args.section]("mixtral")}
    for requested, known in ((args.shapes, SHAPES), ([*args.only, *words(args.once)], names)):
        for name in requested:
            if name not in known:
                parser.error(f"got {name}, need one of {', '.join(sorted(known))}")
    return args


def main():
    args = parsed()
    cells = [(shape, int(tokens)) for shape in args.shapes for tokens in args.tokens]
    if args.warm:
        warm(args, cells)
    meter = Meter() if args.sustained else None
    notes = []
    facts = environment(torch.device("cuda"), " ".join(sys.argv[1:]))
    rows = []
    for row in measured(args, cells, meter, notes):
        rows.append(row)
        if args.out:  # after every row, because a library may crash the process in a later cell
            args.out.write_text(json.dumps({"environment": facts, "notes": notes, "rows": rows}))
    if meter:
        meter.close()
    if rows:
        shown(rows, "bf16" if args.section == "four_bits" else "vllm_deepgemm")


@torch.no_grad()
def measured(args, cells, meter, notes):
    """Yield the rows of every cell; none with --compile-only or --once."""
    start, weights, current = time.perf_counter(), None, None
    for shape, tokens in cells:

        def tell(text, cell=f"{shape} {tokens}"):
            notes.append(f"{cell}: {text}")
            print(notes[-1], flush=True)

        if time.perf_counter() - start > args.deadline:
            tell("not begun, time had ended")
            continue
        if current != shape:
            weights = None  # free the previous weights first
            weights, current = (
                make_weights(cell_problem(shape, tokens), torch.device("cuda")),
                shape,
            )
        if args.once:
            once(args.section, shape, tokens, weights, args)
        elif args.compile_only:
            list(map(bool, prepared_layers(args.section, shape, tokens, weights, args, tell)))
        else:
            yield from measure(args.section, shape, tokens, weights, args, meter, tell)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
