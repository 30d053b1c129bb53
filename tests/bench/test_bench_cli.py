"""`mk bench` on the command line: output files, --peer files, shapes, options and exit codes."""

from dataclasses import replace
from pathlib import Path

import pytest
from run_mk import Mk, make_mk_fixture
from test_bench import ENVIRONMENT, PEAKS, _small_peaks, make_row  # noqa: F401  autouse fixture

from modular_kernel.bench import run as run_module
from modular_kernel.bench.candidates import peer_candidates
from modular_kernel.bench.run import BenchJob
from modular_kernel.cli import bench as bench_cli
from modular_kernel.errors import BrokenPartError, ConfigurationError
from modular_kernel.measure.records import Report, add_peer_ratios

PAIR_OPTIONS = ("--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "TorchExperts")


PEER_FILE = """
from modular_kernel.bench.candidates import Layer
from modular_kernel.reference import rounded_reference

class Mine(Layer):
    name, quant = "mine", "{quant}"

    def setup(self, problem, weights):
        self.problem, self.weights = problem, weights

    def call(self, x_TH, routing):
        out = rounded_reference(x_TH, self.weights, routing, self.problem).to(x_TH.dtype)
        return out * {factor}

def layers():
    return [Mine()]
"""


def write_peer_file(folder: Path, *, factor: float = 1.0, quant: str = "none") -> Path:
    path = folder / "my_peer.py"
    path.write_text(PEER_FILE.format(factor=factor, quant=quant), encoding="utf-8")
    return path


def test_peer_files_make_new_objects_each_time(tmp_path: Path) -> None:
    (candidate,) = peer_candidates(write_peer_file(tmp_path))
    assert (candidate.name, candidate.quant, candidate.origin) == ("mine", "none", "peer")
    assert candidate.make() is not candidate.make()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_engine", BrokenPartError),
        ("raise SystemExit(3)", BrokenPartError),
        ("x = 1", BrokenPartError),
        ("def layers(): return 5", ConfigurationError),
        ("def layers(): return [object()]", ConfigurationError),
    ],
)
def test_errors_name_the_invalid_peer_file(
    text: str, error: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=r"wrong\.py"):
        peer_candidates(path)
    with pytest.raises(ConfigurationError, match="absent"):
        peer_candidates(tmp_path / "absent.py")


mk = make_mk_fixture("bench", "--ms", "0.01")
load = make_mk_fixture("bench", "--load")


TINY = ("--hidden", "32", "--intermediate", "48", "--experts", "4", *PAIR_OPTIONS)


def test_command_writes_the_requested_files(mk: Mk, tmp_path: Path) -> None:
    record, document = tmp_path / "new" / "r.json", tmp_path / "r.md"
    arguments = ("--tokens-list", "1,5", "--routing", "uniform,hot1", "--bandwidth", "0.02")
    result = mk(*TINY, *arguments, "--json", str(record), "--markdown", str(document))
    assert result.code == 0, result.err
    report = Report.from_json(record.read_text(encoding="utf-8"))
    assert [(r.layer, r.tokens, r.routing) for r in report.rows] == [
        (layer, tokens, routing)
        for layer in ("TorchExperts", "torch_grouped_mm")
        for routing in ("uniform", "hot1")
        for tokens in (1, 5)
    ]
    assert {r.status for r in report.rows} == {"ok"}
    assert (report.peaks["bandwidth"], report.peaks["source"]) == (0.02e12, "given")
    assert report.rows[0].shape == "E4-K2-H32-I48"
    text = document.read_text(encoding="utf-8")
    assert "## bfloat16, hot1 routing" in text
    assert "torch_grouped_mm" in result.out
    assert f"written: {record}" in result.err


def test_top_k_above_experts_is_refused(mk: Mk, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    result = mk(*TINY, "--top-k", "5", "--tokens-list", "1", "--json", str(record))
    assert (result.code, result.out, record.exists()) == (2, "", False)
    assert "top_k: got 5, need <= experts = 4" in result.err


def test_plot_is_written(mk: Mk, tmp_path: Path) -> None:
    path = tmp_path / "r.png"
    assert mk(*TINY, "--tokens-list", "1,4", "--plot", str(path)).code == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_loaded_record_is_shown_and_plotted(mk: Mk, load: Mk, tmp_path: Path) -> None:
    record, path = tmp_path / "r.json", tmp_path / "r.png"
    first = mk(*TINY, "--tokens-list", "1,4", "--json", str(record))
    assert first.code == 0
    loaded = load(str(record), "--plot", str(path))
    assert loaded.code == 0
    assert loaded.out.splitlines()[:-1] == first.out.splitlines()[:-1]
    assert path.read_bytes()[:4] == b"\x89PNG"
    for text in ("{}", "broken", None):
        record_path = tmp_path / "other.json"
        if text is not None:
            record_path.write_text(text, encoding="utf-8")
        result = load(str(record_path if text is not None else tmp_path / "absent.json"))
        assert result.code == 2
        assert result.out == ""


@pytest.mark.parametrize(
    "option", [("--prepared",), ("--tokens", "3"), ("--experts-type", "TorchExperts")], ids=str
)
def test_options_that_load_would_ignore_are_refused(
    load: Mk, tmp_path: Path, option: tuple[str, ...]
) -> None:
    (tmp_path / "empty.json").touch()
    result = load(str(tmp_path / "empty.json"), *option)
    assert result.code == 2
    assert f"{option[0]}: got {option[0]} together with --load, need only one" in result.err


def test_plot_without_matplotlib_is_refused_first(
    mk: Mk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_cli, "find_spec", lambda _: None)
    result = mk(*TINY, "--plot", str(tmp_path / "r.png"))
    assert result.code == 2
    assert "modular-kernel[bench]" in result.err
    assert result.out == ""


def test_wrong_or_refused_layers_exit_with_1(mk: Mk, tmp_path: Path) -> None:
    inaccurate = mk(*TINY, "--tokens", "3", "--peer", str(write_peer_file(tmp_path, factor=1.1)))
    assert inaccurate.code == 1
    assert "WRONG" in inaccurate.out
    right = mk(*TINY, "--tokens", "3", "--peer", str(write_peer_file(tmp_path)))
    assert right.code == 0
    assert "mine" in right.out
    refused = mk("--pf-type", "BatchedPrepareAndFinalize", "--experts-type", "TorchExperts")
    assert refused.code == 1
    assert "\n format " in refused.out
    assert "\n reduce " in refused.out


def test_peer_with_other_operands_is_skipped(mk: Mk, tmp_path: Path) -> None:
    path = write_peer_file(tmp_path, quant="fp8_w8a8_block")
    result = mk(*TINY, "--tokens", "3", "--peer", str(path))
    assert "skipped mine" in result.err
    assert "mine" not in result.out
    result_of_two_schemes = mk(
        *TINY, "--tokens", "3", "--peer", str(path), "--quant", "none,fp8_w8a8_channel"
    )
    assert "mine fp8_w8a8_block" in result_of_two_schemes.out
    assert "skipped" not in result_of_two_schemes.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model mixtral,gpt-2", "model: got 'gpt-2', need"),
        ("--tokens-list 1,x", "--tokens-list: got '1,x'"),
        ("--tokens-list 0", "--tokens-list: got '0'"),
        ("--tokens-list 1 --tokens 2", "--tokens: got --tokens-list too"),
        ("--routing odd", "routing: got 'odd', need uniform"),
        ("--eager --graph", "--graph: got --eager too"),
        ("--deadline 0", "--deadline: got '0', need a number > 0"),
        ("--bandwidth -1", "--bandwidth: got '-1'"),
        ("--quant fp7", "quant: got fp7"),
        ("--peer no/such/file.py", "no/such/file.py"),
        ("--inplace", "inplace of a benchmark"),
        ("--world-size 2", "--world-size: got 2, need 1 rank"),
        ("--experts-type NoSuch", "'NoSuch', need one of"),
    ],
)
def test_bad_usage_has_exit_code_2_and_a_reason(mk: Mk, arguments: str, message: str) -> None:
    result = mk(*arguments.split())
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def record_job(monkeypatch: pytest.MonkeyPatch, mk: Mk, *arguments: str) -> BenchJob:
    """Return the job that `mk bench` would run."""
    jobs: list[BenchJob] = []

    def append_job(job: BenchJob, *_: object) -> Report:
        jobs.append(job)
        return Report(ENVIRONMENT, PEAKS)

    monkeypatch.setattr(run_module, "run", append_job)
    assert mk(*arguments).code == 0
    return jobs[0]


def test_model_selects_named_shapes(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = record_job(monkeypatch, mk, "--model", "baseline", *PAIR_OPTIONS).cases
    assert len(cases) == 28
    sizes = {
        case.shape: (p.experts, p.top_k, p.hidden, p.intermediate, p.bias, str(p.act))
        for case in cases
        for p in [case.problem]
    }
    assert sizes == {
        "mixtral": (8, 2, 4096, 14336, False, "silu"),
        "dsv3_ep8": (32, 8, 7168, 2048, False, "silu"),
        "qwen3_30b": (128, 8, 2048, 768, False, "silu"),
        "gptoss": (128, 4, 2880, 2880, False, "silu"),
        "dsv3_256": (256, 8, 7168, 2048, False, "silu"),
    }
    tokens = [case.problem.tokens for case in cases if case.shape == "gptoss"]
    assert tokens == [1, 16, 128, 1024, 4096, 16384]
    options = ("--model", "gpt-oss-20b,mixtral,mixtral", "--tokens", "7", "--routing", "zipf,hot2")
    cases = record_job(monkeypatch, mk, *options, "--hidden", "96", *PAIR_OPTIONS).cases
    assert [(case.shape, case.problem.tokens, str(case.routing)) for case in cases] == [
        (shape, 7, kind) for shape in ("gpt-oss-20b", "mixtral") for kind in ("zipf1.2", "hot2")
    ]
    assert {case.problem.hidden for case in cases} == {96}
    assert [case.problem.bias for case in cases] == [True, True, False, False]


def test_schemes_with_options_are_distinguished(mk: Mk, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "int4_w4a16_group:group=16,zero_points=true,none,fp8_w8a8_block:block=32x32"
    job = record_job(monkeypatch, mk, *TINY, "--quant", text, "--eager", "--deadline", "9")
    quants = {candidate.quant for candidate in job.candidates}
    assert "int4_w4a16_group:group=16,zero_points=true" in quants
    assert "none" in quants
    assert "fp8_w8a8_block:block=32x32" in quants
    assert (job.graph, job.deadline, job.target_ms) == (False, 9.0, 0.01)
    candidates = record_job(monkeypatch, mk, *TINY, "--quant", "fp8_w8a8_channel").candidates
    assert [candidate.name for candidate in candidates] == ["TorchExperts"]


def test_interpreted_rows_are_noted_without_the_mode_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modular_kernel.cli.output.get_line_width", lambda _=None: 80)
    modes = {"BatchedTorchExperts": "cpu", "BatchedTritonExperts": "interpreter"}
    rows = [
        replace(make_row(name, 1234567.8, "ours"), shape="E8-K2-H64-I128", mode=mode, floor_us=3.0)
        for name, mode in modes.items()
    ]
    bench_cli._print_text(Report(ENVIRONMENT, PEAKS, add_peer_ratios(rows)))
    shown = capsys.readouterr().out
    assert "ran in Triton's interpreter, times are meaningless: BatchedTritonExperts\n" in shown
