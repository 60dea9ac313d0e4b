"""`genlab bench`: fair turns, records, floors, peers in a process of their own, wrong input."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from genlab import cli
from genlab.eval.benchmarks import gpu, peer_process
from genlab.eval.benchmarks.alternate import take_turns
from genlab.eval.benchmarks.kernels import KERNELS, make_call
from genlab.eval.benchmarks.model_shapes import SHAPES, shape_of
from genlab.eval.benchmarks.models import Case, floor_of
from genlab.eval.benchmarks.peer_process import PEERS, Peer, PeerRefused
from genlab.eval.benchmarks.records import BenchRecord, Floor
from genlab.eval.cost.records import BandwidthPoint, KernelRate, Machine, MatmulPoint
from genlab.eval.kernel_support import ops
from genlab.paradigms.model import abstract_model
from genlab.train.interop.hf_config import HFConfig
from genlab.train.interop.registry import architecture_of

MACHINE = Machine(
    device="cpu", jax="0", dtype="float32", peak_flops_per_s=1e12,
    bandwidth=[BandwidthPoint(working_set_bytes=1, bytes_per_s=1e10)],
    matmul=[MatmulPoint(rows=1, width=1, flops_per_s=1e12, loop_flops_per_s=1e12)],
    kernels={"other": KernelRate(flops_per_s=1e9, loop_flops_per_s=1e9)},
    loop_launch_s=0.0, launch_s=0.0, call_s=0.0,
)  # fmt: skip


class Scripted:
    """A subject that says how long each of its runs takes, on a clock that it moves."""

    def __init__(self, name, took_s, log, now):
        self.name, self.took_s, self.log, self.now = name, iter(took_s), log, now

    def run(self):
        took = next(self.took_s)
        self.log.append(self.name)
        self.now[0] += took
        return 1e3 * took


def turns(scripts, repeats, **options):
    log, now = [], [0.0]
    subjects = [Scripted(name, took, log, now) for name, took in scripts.items()]
    return take_turns(subjects, repeats, clock=lambda: now[0], **options), log


def test_turns_alternate_and_warm_up_is_not_counted():
    times, log = turns({"a": [9, 1, 3, 2], "b": [9, 4, 4, 7]}, 3)
    assert log == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert (times["a"].median_ms, times["b"].median_ms) == (2000, 4000)
    assert times["a"].runs == 3


def test_a_slow_subject_rests():
    times, log = turns({"a": [1] * 9, "b": [10] * 9, "c": [50] * 9}, 8, budget_s=35)
    assert times["a"].runs == 8
    assert times["b"].runs == 3
    assert times["c"].runs == 1
    assert log.count("c") == 2  # its warm-up is all that it had time for, and one run counts


def test_floor_is_the_slower_of_bytes_and_flops():
    by_bytes = Floor(flops=1e6, bytes_moved=1e7, flops_per_s=1e12, bytes_per_s=1e10)
    by_flops = Floor(flops=1e12, bytes_moved=1e7, flops_per_s=1e12, bytes_per_s=1e10)
    assert (by_bytes.ms, by_bytes.bound) == (pytest.approx(1.0), "bytes")
    assert (by_flops.ms, by_flops.bound) == (pytest.approx(1000.0), "flops")


@pytest.mark.parametrize(
    ("name", "params"),
    [("transformer_134m", 134e6), ("mamba_115m", 115e6), ("mamba2_140m", 140e6)],
)
def test_shapes_have_the_size_of_their_name_and_mean_the_same_to_a_peer(name, params):
    shape = shape_of(name)
    config = shape.config(512)
    assert abstract_model(config).num_params() == pytest.approx(params, rel=0.01)
    published = HFConfig(dict(shape.published), name)
    theirs = architecture_of(published).model_config(published)
    assert abstract_model(theirs).num_params() == abstract_model(config).num_params()


def test_decode_floor_counts_the_weights_once_whatever_the_batch():
    config = SHAPES["mamba2_tiny"].config(64)
    one, eight = (
        floor_of(config, Case("decode", rows, 16, "float32"), MACHINE) for rows in (1, 8)
    )
    params = abstract_model(config).num_params()
    assert one.bytes_moved < 4 * params + 4 * 40_000
    assert eight.bytes_moved < 2 * one.bytes_moved
    assert eight.flops == pytest.approx(8 * one.flops)


def test_every_kernel_has_its_bench_and_its_shapes():
    assert set(KERNELS) == set(ops())
    for op, kernel in KERNELS.items():
        assert set(kernel.default) <= set(kernel.shapes), op
        small = "tiny" if "tiny" in kernel.shapes else kernel.default[0]
        assert make_call(op, small, "float32").flops > 0


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("genlab.eval.cli_bench.Machines.get", lambda self, dtype: MACHINE)


def run_cli(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["genlab", "bench", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


NEEDED = {
    "bench", "shape", "dtype", "batch", "length", "implementation", "median_ms", "p90_ms",
    "compile_s", "floor_ms", "floor_fraction", "peer", "peer_median_ms", "ratio",
}  # fmt: skip


@pytest.mark.parametrize("bench", ["train", "prefill", "decode"])
def test_models_are_benched_and_put_on_record(bench, machine, monkeypatch, tmp_path):
    out = tmp_path / "records.json"
    code = run_cli(
        monkeypatch, bench, "--shape", "mamba2_tiny", "--dtype", "float32", "--batch", "1",
        "--batch", "2", "--length", "8", "--repeats", "2", "--json", str(out),
    )  # fmt: skip
    assert code == cli.OK
    records = json.loads(out.read_text())
    assert [r["batch"] for r in records] == [1, 2]
    for record in records:
        assert set(record) >= NEEDED
        BenchRecord.model_validate(record)
        assert record["tokens_per_s"] > 0
        assert record["peer"] is record["ratio"] is None


def test_kernels_are_benched_in_all_their_implementations(machine, monkeypatch, tmp_path):
    out = tmp_path / "records.json"
    code = run_cli(
        monkeypatch, "kernels", "--op", "selective_scan", "--shape", "tiny", "--dtype", "float32",
        "--repeats", "2", "--json", str(out),
    )  # fmt: skip
    assert code == cli.OK
    records = json.loads(out.read_text())
    assert {"xla_chunked", "xla_associative"} <= {r["implementation"] for r in records}
    ways = {r["bench"] for r in records}
    assert ways == {"selective_scan.forward", "selective_scan.forward_backward"}


@pytest.fixture
def fake_peer(monkeypatch, tmp_path):
    """A peer of three lines, beside the real server."""
    shutil.copy(peer_process.SERVE, tmp_path / "serve.py")
    (tmp_path / "fake.py").write_text(
        "import sys\n"
        "print('noise on the output')\n"
        "def build(case):\n"
        "    if case['dtype'] == 'bfloat16': raise ValueError('no such dtype')\n"
        "    if case.get('fall'): sys.exit('gone')\n"
        "    print('more noise')\n"
        "    return f\"fake {'genlab' in sys.modules}\", lambda: 12.5\n"
    )
    monkeypatch.setattr(peer_process, "SERVE", tmp_path / "serve.py")
    monkeypatch.setitem(PEERS, "fake", ("fake", ("train", "prefill", "decode")))


def test_a_peer_runs_apart_and_answers_in_its_turn(fake_peer):
    with Peer("fake", {"dtype": "float32"}) as peer:
        assert peer.about == "fake False"
        assert [peer.run(), peer.run()] == [12.5, 12.5]
    with pytest.raises(PeerRefused, match="no such dtype"):
        Peer("fake", {"dtype": "bfloat16"})
    with pytest.raises(PeerRefused, match="its process ended"):
        Peer("fake", {"dtype": "float32", "fall": True})


def test_the_fastest_peer_is_compared_with(fake_peer, machine, monkeypatch, tmp_path, capsys):
    out = tmp_path / "records.json"
    code = run_cli(
        monkeypatch, "prefill", "--shape", "mamba2_tiny", "--batch", "2", "--length", "8",
        "--repeats", "1", "--peer", "fake", "--json", str(out),
    )  # fmt: skip
    assert code == cli.OK
    for record in json.loads(out.read_text()):
        assert record["peer"] == "fake float32"
        assert record["ratio"] == pytest.approx(12.5 / record["median_ms"])
    assert "fake bfloat16: ValueError: no such dtype" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode", "--shape", "transformer_134"], "transformer_134m"),
        (["train", "--dtype", "float16"], "float32, bfloat16"),
        (["train", "--peer", "transformer"], "did you mean 'transformers'"),
        (["prefill", "--peer", "fla"], "transformers"),
        (["kernels", "--op", "atention"], "attention"),
        (["kernels", "--shape", "tiny"], "one --op"),
        (["kernels", "--op", "ssd", "--shape", "tinny"], "tiny"),
    ],
)
def test_wrong_input_is_named_before_anything_runs(arguments, words, monkeypatch, capsys):
    assert run_cli(monkeypatch, *arguments) == cli.BAD_INPUT
    assert words in capsys.readouterr().err


def test_peers_are_files_that_exist():
    folder = Path(peer_process.__file__).parent / "peers"
    for file, benches in PEERS.values():
        assert (folder / f"{file}.py").exists(), file
        assert benches


def test_the_prepared_run_for_a_gpu_works_on_its_smallest_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "KERNELS", {"ssd": KERNELS["ssd"]})
    assert gpu.main(["--small", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    kinds = [record["kind"] for record in written["records"]]
    assert set(kinds) == {"check", "kernel", "model"}
    right = [r["right"] for r in written["records"] if "right" in r]
    assert right and all(right)
    assert written["left_out"] == []


def test_the_prepared_run_says_what_it_had_no_time_for_and_what_is_wrong(capsys, monkeypatch):
    assert gpu.main(["--small", "--budget-s", "0"]) == 0
    assert "no time was left for: check of attention in float32" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "KERNELS", {"ssd": KERNELS["ssd"]})
    monkeypatch.setitem(gpu.TOLERANCE, "float32", -1.0)
    assert gpu.main(["--small", "--budget-s", "21"]) == 1
    assert "WRONG" in capsys.readouterr().out
