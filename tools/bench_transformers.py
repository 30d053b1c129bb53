"""Time whole transformers models with each experts implementation, eager and compiled.

    python tools/bench_transformers.py out.json --models qwen3
    python tools/bench_transformers.py out.json --models gpt_oss
    python tools/bench_transformers.py out.json --tiny                  # on a CPU

Builds models with the sizes of Qwen3-30B-A3B and gpt-oss-20b, but with 4 layers, full attention in
each layer, and random weights in bfloat16. Times the prefill of one sequence, and decoding steps
with a static cache. Prefill runs in the modes eager and default, decoding also in the mode
reduce-overhead. `default` and `reduce-overhead` are modes of torch.compile. First, all
implementations of a cell of the table are compiled. Each round then times every implementation
once, in random order. A result is the median over rounds.

In the table, `breaks` is the number of graph breaks in the compilation of a cell. `skipped graphs`
is the number of CUDA graphs that Inductor skipped in reduce-overhead mode. `error` is the relative
difference between the logits and those of grouped_mm in the same mode. In addition, each
implementation decodes tokens in float32, which are compared with those of transformers' eager
experts. modular_kernel decodes them in every mode, the other implementations in eager mode only.

Cells that do not fit into `--budget` seconds are omitted and listed. The record is written after
each cell.
"""

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import in_checkout  # noqa: F401  adds the checkout to sys.path
import torch
import transformers
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig, StaticCache

from modular_kernel.integrations.transformers import register, report

NO_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
MODELS = {
    "qwen3": (
        Qwen3MoeConfig,
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "vocab_size": 151936,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "max_position_embeddings": 8192, "tie_word_embeddings": False,
        },
        {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 128, "num_experts": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "max_position_embeddings": 8192, "tie_word_embeddings": False,
        },
        {"hidden_size": 64, "intermediate_size": 48, "vocab_size": 128, "num_local_experts": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    ),
}  # fmt: skip
OURS, BASELINE, EAGER_EXPERTS = "modular_kernel", "grouped_mm", "eager"
CACHE, PROMPT = 1024, 64  # tokens of the static cache, and tokens of the prompt


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON record")
    parser.add_argument("--models", default="qwen3,gpt_oss")
    parser.add_argument("--implementations", default=f"{OURS},{BASELINE},batched_mm")
    parser.add_argument("--modes", default="default,reduce-overhead,eager")
    parser.add_argument("--prefill", default="512,4096", help="prompt tokens")
    parser.add_argument("--decode", default="1,64", help="batch sizes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="decoding steps per round")
    parser.add_argument("--attention", help="attn_implementation; transformers' default if unset")
    parser.add_argument("--budget", type=float, default=330, help="seconds for all cells")
    parser.add_argument("--tokens", action=argparse.BooleanOptionalAction, default=True,
                        help="compare decoded tokens in float32")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
    options = parser.parse_args()
    if options.tiny:
        options.prefill, options.decode, options.rounds, options.steps = "32,64", "1,4", 3, 4
    for name in ("models", "implementations", "modes", "prefill", "decode"):
        setattr(options, name, [item for item in getattr(options, name).split(",") if item])
    return options


class Bench:
    """Builds the models and collects the results of all cells."""

    def __init__(self, options):
        self.options, self.start = options, time.perf_counter()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.rows, self.tokens, self.left_out, self.notes = [], [], [], []

    def get_seconds(self):
        return time.perf_counter() - self.start

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def write(self):
        record = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu",
            "options": {name: str(value) for name, value in vars(self.options).items()},
            "seconds": self.get_seconds(),
            "rows": self.rows,
            "tokens": self.tokens,
            "left_out": self.left_out,
            "notes": self.notes,
        }
        self.options.out.write_text(json.dumps(record, indent=1) + "\n")

    def build(self, name, dtype, layers):
        """Return a model with random weights in eval mode."""
        config_class, sizes, tiny = MODELS[name]
        values = {**sizes, **(tiny if self.options.tiny else {}), **NO_SPECIAL_TOKENS}
        if "sliding_window" in sizes:
            # The static cache of a sliding layer counts its tokens in a Python int, so
            # torch.compile would recompile the model in every decoding step.
            values["layer_types"] = ["full_attention"] * layers
        config = config_class(**values, num_hidden_layers=layers)
        torch.manual_seed(0)
        options = {"attn_implementation": self.options.attention} if self.options.attention else {}
        with self.device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation=EAGER_EXPERTS, **options
            ).eval()
            # With the initial weights, all experts would return nearly the same output.
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.04)
        return model

    def make_models(self, name, dtype, layers, implementations):
        """Return a model for each implementation. The models share their weights."""
        model, models = self.build(name, dtype, layers), {}
        for implementation in implementations:
            shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            models[implementation] = copy.deepcopy(model, memo=shared)
            models[implementation].set_experts_implementation(implementation)
        return models

    def draw_ids(self, model, *shape):
        generator = torch.Generator().manual_seed(1)
        return torch.randint(model.config.vocab_size, shape, generator=generator).to(self.device)


class Prefill:
    """The prefill of one sequence. A call returns the last logits."""

    def __init__(self, bench, model, mode, tokens):
        self.ids = bench.draw_ids(model, 1, tokens)
        self.model = compile_model(model, mode)

    def __call__(self):
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits

    def run_once(self):
        return self()


class Decode:
    """Decoding steps with a static cache, whose prompt is processed without compilation."""

    def __init__(self, bench, model, mode, batch):
        self.bench, self.model, self.batch = bench, compile_model(model, mode), batch
        self.steps = bench.options.steps
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
        prompt = bench.draw_ids(model, batch, PROMPT)
        logits = model(input_ids=prompt, past_key_values=self.cache, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)

    def __call__(self):
        torch.compiler.cudagraph_mark_step_begin()
        logits = self.model(input_ids=self.token, past_key_values=self.cache).logits
        self.token = logits[:, -1:].argmax(-1)
        return logits

    def run_once(self):
        for _ in range(self.steps):
            self()


def compile_model(model, mode):
    if mode == "eager":
        return model
    return torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)


def time_cell(bench, models, mode, workload_class, size):
    """Compile all implementations, time them interleaved, and return a row for each.

    workload_class: Prefill or Decode.
    size: the number of tokens of a prefill, or the batch size of decoding.
    """
    rows, runs, logits = {}, {}, {}
    for name, model in models.items():
        torch._dynamo.utils.counters.clear()
        start = time.perf_counter()
        row = rows[name] = {"implementation": name, "mode": mode, "size": size}
        row["kind"] = workload_class.__name__.lower()
        try:
            run = workload_class(bench, model, mode, size)
            for _ in range(4):
                result = run()
            logits[name] = result.float().clone()
            bench.synchronize()
        except Exception as error:  # noqa: BLE001 (compilation may raise anything)
            row["failed"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
            continue
        runs[name] = run
        row["compile_s"] = time.perf_counter() - start
        counters = torch._dynamo.utils.counters
        row["breaks"] = sum(counters["graph_break"].values())
        row["why"] = [reason[:300] for reason in counters["graph_break"]][:3]
        row["graphs"] = counters["stats"]["unique_graphs"]
        row["skipped_graphs"] = counters["inductor"]["cudagraph_skips"]
    if BASELINE in logits:
        for name, values in logits.items():
            rows[name]["error"] = float(
                (values - logits[BASELINE]).norm() / logits[BASELINE].norm()
            )
    times = time_interleaved(bench, runs)
    for name, values in times.items():
        steps = runs[name].steps if workload_class is Decode else 1
        rows[name]["ms"] = statistics.median(values) / steps
        rows[name]["all_ms"] = [milliseconds / steps for milliseconds in values]
    baseline_ms = rows.get(BASELINE, {}).get("ms")
    for row in rows.values():
        if baseline_ms and "ms" in row:
            row["times_base"] = baseline_ms / row["ms"]
    return list(rows.values())


def time_interleaved(bench, runs):
    """Time each run once per round, in random order. Returns lists of milliseconds by name."""
    times = {name: [] for name in runs}
    for _ in range(bench.options.rounds):
        for name in random.sample(sorted(runs), len(runs)):
            bench.synchronize()
            start = time.perf_counter()
            runs[name].run_once()
            bench.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def time_model(bench, name):
    options = bench.options
    models = bench.make_models(name, torch.bfloat16, options.layers, options.implementations)
    if OURS in models:
        bench.notes += [f"{name}: {row}" for row in report(models[OURS]) if not row.served]
    cells = [("default", Decode), ("reduce-overhead", Decode), ("default", Prefill),
             ("eager", Decode), ("eager", Prefill)]  # fmt: skip
    slowest = 0.0
    for mode, workload_class in cells:
        if mode not in options.modes:
            continue
        for size in map(int, options.decode if workload_class is Decode else options.prefill):
            label = f"{name} {mode} {workload_class.__name__.lower()} {size}"
            if bench.get_seconds() + (slowest if mode != "eager" else 5) > options.budget:
                bench.left_out.append(label)
                continue
            # batched_mm copies the weights of each token's experts, so it is only timed with few
            # tokens.
            included = {
                k: m
                for k, m in models.items()
                if k != "batched_mm" or has_few_tokens(workload_class, size)
            }
            torch._dynamo.reset()
            gc.collect()
            start = bench.get_seconds()
            rows = time_cell(bench, included, mode, workload_class, size)
            if mode != "eager":
                slowest = max(slowest, bench.get_seconds() - start)
            bench.rows += [{"model": name, **row} for row in rows]
            bench.write()
            print(f"{bench.get_seconds():6.1f} s  {label}", file=sys.stderr, flush=True)
    del models
    free_memory(bench)


def has_few_tokens(workload_class, size):
    return workload_class is Decode and size <= 4


def free_memory(bench):
    torch._dynamo.reset()
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def compare_tokens(bench, name):
    """Decode greedily in float32 with each implementation, and count tokens equal to eager's."""
    included = [
        implementation_name
        for implementation_name in bench.options.implementations
        if implementation_name != "batched_mm"
    ]
    models = bench.make_models(name, torch.float32, 2, [EAGER_EXPERTS, *included])
    prompt, num_new_tokens = bench.draw_ids(models[EAGER_EXPERTS], 2, 24), 24
    expected = None
    for implementation, model in models.items():
        for mode in ("eager", *(m for m in bench.options.modes if m != "eager")):
            if implementation != OURS and mode != "eager":
                continue
            if bench.get_seconds() > bench.options.budget:
                bench.left_out.append(f"{name} tokens {implementation} {mode}")
                continue
            torch._dynamo.reset()
            cache = StaticCache(config=model.config, max_cache_len=64)
            logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
            run, tokens = compile_model(model, mode), [logits[:, -1:].argmax(-1)]
            for _ in range(num_new_tokens - 1):
                torch.compiler.cudagraph_mark_step_begin()
                logits = run(input_ids=tokens[-1], past_key_values=cache).logits
                tokens.append(logits[:, -1:].argmax(-1))
            got = torch.cat(tokens, 1)
            expected = got if expected is None else expected
            bench.tokens.append({
                "model": name, "implementation": implementation, "mode": mode,
                "equal": int((got == expected).sum()), "of": expected.numel(),
                "different_tokens": int(expected.unique().numel()),
            })  # fmt: skip
            bench.write()
    del models
    free_memory(bench)


def print_table(bench):
    print(f"\ntorch {torch.__version__}, transformers {transformers.__version__}")
    print("model    mode             cell           " + "implementation   ms        x grouped_mm  "
          "breaks  skipped graphs  error")  # fmt: skip
    for row in bench.rows:
        prefix = f"{row['model']:8} {row['mode']:16} {row['kind'] + ' ' + str(row['size']):14} "
        prefix += f"{row['implementation']:16} "
        if "failed" in row:
            print(prefix + "failed: " + " ".join(row["failed"].split())[:100])
            continue
        print(prefix + f"{row['ms']:<9.4g} {row.get('times_base', float('nan')):<13.3f} "
              f"{row['breaks']:<7} {row['skipped_graphs']:<15} "
              f"{row.get('error', float('nan')):.1e}")  # fmt: skip
    for row in bench.tokens:
        prefix = f"{row['model']:8} float32 tokens, {row['implementation']}, {row['mode']}: "
        print(f"{prefix}{row['equal']} of {row['of']} equal ({row['different_tokens']} distinct)")
    breaks = Counter(reason for row in bench.rows for reason in row.get("why", ()))
    for reason, count in breaks.items():
        print(f"graph break in {count} rows: {' '.join(reason.split())}")
    for note in (*bench.notes, *(f"left out (--budget): {cell}" for cell in bench.left_out)):
        print(note)
    print(f"{bench.get_seconds():.0f} s")


def main():
    options = parse_arguments()
    torch._dynamo.config.recompile_limit = 64
    if OURS in options.implementations:
        register()
    bench = Bench(options)
    with torch.inference_mode(False), torch.no_grad():
        for name in options.models:
            if options.tokens:
                compare_tokens(bench, name)
            time_model(bench, name)
    bench.write()
    print_table(bench)


if __name__ == "__main__":
    main()
