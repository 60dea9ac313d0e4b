"""Where lm-evaluation-harness is installed: its tasks, from local files, run on our models."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import genlab
import numpy as np
import pytest
from genlab.errors import ConfigError
from genlab.eval.lm_eval import adapter
from genlab.eval.lm_eval.scoring import Pair, windows
from genlab.eval.loaded import Loaded
from genlab.paradigms.autoregressive import Autoregressive
from genlab.paradigms.backbone import ModelConfig
from genlab.paradigms.decoding.registry import default_decoding
from genlab.paradigms.masked_diffusion import MaskedDiffusionConfig
from genlab.paradigms.model import build_model
from genlab.train.data.tokenizer import BytesTokenizer
from genlab.train.interop.import_run import import_checkpoint

FIXTURE = Path(__file__).parents[1] / "interop" / "fixtures" / "qwen3"
BYTES = BytesTokenizer()
CHOICE = [
    {"q": "one two", "c": [" three", " four", "!"], "a": 0},
    {"q": "", "c": ["a", "bc"], "a": 1},
    {"q": "spaces ", "c": ["x", "yy", "zzz"], "a": 0},
    {"q": "long " * 30, "c": ["p", "q"], "a": 1},
]
TEXTS = [{"t": "a text of its own"}, {"t": "long " * 40}, {"t": "x"}]
ASKED = [{"q": "Say", "a": "x"}, {"q": "Say more of it", "a": "y"}, {"q": "", "a": "z"}]
TASKS = {
    "choice": (CHOICE, "multiple_choice", "{{q}}", "{{a}}",
               "doc_to_choice: '{{c}}'\ntarget_delimiter: ''", "acc"),
    "text": (TEXTS, "loglikelihood_rolling", "", "{{t}}", "", "bits_per_byte"),
    "asked": (ASKED, "generate_until", "{{q}}", "{{a}}",
              "generation_kwargs: {until: ['e', 'Q:'], max_gen_toks: 6}", "exact_match"),
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the task files, and of everything that the harness and `datasets` write."""
    made = tmp_path_factory.mktemp("tasks")
    for name, (rows, kind, question, target, more, metric) in TASKS.items():
        file = made / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (made / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\n"
            f"test_split: test\noutput_type: {kind}\ndoc_to_text: '{question}'\n"
            f"doc_to_target: '{target}'\n{more}\nmetric_list: [{{metric: {metric}}}]\n"
        )
    return made


def tiny(paradigm, decoding):
    """An untrained model of bytes for 64 tokens."""
    config = {
        "width": 16, "vocab_size": 260, "max_len": 64, "pattern": ["a"],
        "layers": {"a": {"mixer": {"name": "attention", "num_heads": 2}}},
    }  # fmt: skip
    model = build_model(ModelConfig.model_validate_json(json.dumps(config)), seed=2)
    return Loaded(model.prepare("float32"), BYTES, paradigm, default_decoding(decoding), "tiny")


@pytest.fixture
def causal(monkeypatch):
    """What `path` stands for: an autoregressive model."""
    loaded = tiny(Autoregressive(), "autoregressive")
    monkeypatch.setattr(adapter, "load", lambda path, dtype: loaded)
    return loaded


if importlib.util.find_spec("lm_eval"):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @pytest.fixture(scope="module")
    def evaluate(folder):
        """Runs tasks; gives the results, and the answers of each task's documents in order."""
        manager = TaskManager(include_path=str(folder), include_defaults=False)

        def run(*tasks, args="path=x,batch_size=4", **options):
            found = simple_evaluate(
                model="genlab",
                model_args=args,
                tasks=list(tasks),
                task_manager=manager,
                bootstrap_iters=0,
                **options,
            )
            answers = {
                name: [
                    [responses[0] for responses in sample["resps"]]
                    for sample in sorted(rows, key=lambda one: one["doc_id"])
                ]
                for name, rows in found["samples"].items()
            }
            return found, answers

        return run

    @pytest.fixture(autouse=True)
    def no_network(folder, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))

    def log_likelihood(loaded, text):
        return -float(loaded.log_likelihood(text).nll_nats[0])

    def test_answers_are_the_models_own(evaluate, causal, folder):
        """Log-likelihoods by `Loaded.log_likelihood`, which is other code; whatever the batch."""
        found, answers = evaluate("choice", "text", "asked", args="path=x,batch_size=4")
        alone = evaluate("choice", "text", "asked", args="path=x", batch_size=1)[1]
        for row, responses in zip(CHOICE[:3], answers["choice"], strict=False):
            for choice, (value, _) in zip(row["c"], responses, strict=True):
                context, continuation = row["q"].rstrip(), row["q"] + choice
                want = log_likelihood(causal, continuation)
                want -= log_likelihood(causal, context) if context else 0.0
                assert value == pytest.approx(want, abs=1e-4), (row, choice)
        for row, (value,) in zip(TEXTS[::2], answers["text"][::2], strict=True):
            assert value == pytest.approx(log_likelihood(causal, row["t"]), abs=1e-4)
        for row, (text,) in zip(ASKED, answers["asked"], strict=True):
            own = causal.generate(row["q"], max_new=6, temperature=0.0, stop=("e", "Q:"))
            assert text == own.text
        for one, other in zip(answers["choice"], alone["choice"], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(answers["text"], alone["text"], rtol=1e-5)
        assert answers["asked"] == alone["asked"]
        config = found["config"]
        assert (config["likelihood"], config["max_length"]) == ("exact", 64)
        assert config["model_num_parameters"] == causal.model.num_params()

    def test_limit_and_cache(evaluate, causal, folder, monkeypatch):
        cache = str(folder / "answers")
        first = evaluate("choice", "asked", limit=2, use_cache=cache)[1]
        assert [len(docs) for docs in first.values()] == [2, 2]
        scored = []
        score = adapter.Scorer.score

        def counting(self, pairs, progress=None):
            scored.extend(pairs)
            return score(self, pairs, progress)

        monkeypatch.setattr(adapter.Scorer, "score", counting)
        again = evaluate("choice", "asked", limit=3, use_cache=cache)[1]
        assert len(scored) == 3  # of the third document alone
        assert again["choice"][:2] == first["choice"] and again["asked"][:2] == first["asked"]

    @pytest.mark.parametrize("length", [1, 5, 8, 9, 16, 17, 30])
    def test_windows_are_the_harness_own(length):
        ids = list(range(1, length + 1))
        theirs = get_rolling_token_windows(
            token_list=ids, prefix_token=0, max_seq_len=8, context_len=1
        )
        ours = [
            (list(part.context), list(part.continuation)) for part in windows(Pair([0], ids), 8)
        ]
        assert ours == [tuple(map(list, make_disjoint_window(pair))) for pair in theirs]

    def test_a_bound_says_so(evaluate, monkeypatch):
        paradigm = MaskedDiffusionConfig().build(BYTES.specials)
        loaded = tiny(paradigm, "masked_diffusion")
        monkeypatch.setattr(adapter, "load", lambda path, dtype: loaded)
        found, answers = evaluate("choice", "asked", args="path=x,batch_size=8,draws=4,seed=3")
        config = found["config"]
        assert (config["likelihood"], config["likelihood_draws"], config["seed"]) == (
            "lower bound", 4, 3,
        )  # fmt: skip
        assert 0 < config["likelihood_standard_error_mean_nats"]
        assert all(value < 0 for document in answers["choice"] for value, _ in document)
        again = evaluate("choice", args="path=x,batch_size=8,draws=4,seed=3", limit=1)[1]
        np.testing.assert_allclose(again["choice"][0], answers["choice"][0], rtol=1e-5)
        fast = evaluate("asked", args="path=x,batch_size=8,steps=2", limit=1)[1]
        assert isinstance(fast["asked"][0][0], str)

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ({}, "model_args: path is missing"),
            ({"pth": "x"}, "model_args: no argument 'pth'; did you mean 'path'?"),
            ({"path": "x", "device": "cdua"}, "device: got 'cdua'; did you mean 'cuda'?"),
            ({"path": "x", "device": "tpu"}, "device: got 'tpu', but JAX .* found only cpu"),
            ({"path": "x", "steps": 3}, "steps 3: an autoregressive run makes one call per token"),
            (
                {"path": "x", "draws": 4},
                "draws 4: the likelihood of an autoregressive run is exact",
            ),
        ],
    )
    def test_faults_of_model_args(causal, args, said):
        with pytest.raises(ConfigError, match=said):
            adapter.GenlabLM.create_from_arg_obj(args, {"device": "cuda:0", "batch_size": 1})

    def test_chat(causal, tmp_path):
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        model = adapter.GenlabLM(path=str(tmp_path))
        messages = [{"role": "user", "content": "Hi"}]
        assert model.apply_chat_template(messages) == "<user>Hi</user><assistant>"
        begun = [*messages, {"role": "assistant", "content": "It is "}]
        assert model.apply_chat_template(begun, False) == "<user>Hi</user><assistant>It is"
        assert model.chat_template(True) == CHATML and model.chat_template(False) is None
        with pytest.raises(ConfigError, match="templates have no names here"):
            model.chat_template("rag")

    def test_the_command_line(folder, tmp_path):
        """An imported checkpoint whose texts are ids, in a process of its own."""
        import_checkpoint(FIXTURE, tmp_path / "run")
        (tmp_path / "ids.jsonl").write_text(
            "".join(json.dumps({"q": q, "c": [" 5", " 6 7"], "a": 0}) + "\n" for q in ("1 2", "3"))
        )
        task = (folder / "choice.yaml").read_text().replace("task: choice", "task: ids")
        task = task.replace(str(folder / "choice.jsonl"), str(tmp_path / "ids.jsonl"))
        (tmp_path / "ids.yaml").write_text(task)

        def run(*options):
            return subprocess.run(
                [sys.executable, "-m", "genlab.eval.lm_eval", "--model", "genlab", *options],
                cwd=tmp_path,
                env=os.environ | {"GENLAB_CACHE": str(tmp_path / "cache")},
                capture_output=True,
                text=True,
            )

        args = ["--tasks", str(tmp_path / "ids.yaml"), "--model_args"]
        done = run(*args, "path=run,batch_size=2", "--limit", "1", "--output_path", "results")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "|ids" in done.stdout
        (results,) = (tmp_path / "results").rglob("results_*.json")
        config = json.loads(results.read_text())["config"]
        assert (config["likelihood"], config["model_path"]) == ("exact", "run")
        done = run(*args, "path=nowhere")
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == "genlab: nowhere: no such run folder"

    def test_the_harness_own_command(folder, tmp_path):
        """`python -m lm_eval`, which is the command `lm_eval`, in an environment where
        `--register` was run; the packages are those of this one."""
        import_checkpoint(FIXTURE, tmp_path / "run")
        venv.create(tmp_path / "venv", symlinks=True)
        (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
        (packages / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (packages / "genlab").symlink_to(Path(genlab.__file__).parent)
        task = (folder / "choice.yaml").read_text()
        (tmp_path / "ids.jsonl").write_text(json.dumps({"q": "1 2", "c": [" 5", " 6 7"], "a": 0}))
        task = task.replace(str(folder / "choice.jsonl"), str(tmp_path / "ids.jsonl"))
        (tmp_path / "ids.yaml").write_text(task)

        def run(*arguments):
            return subprocess.run(
                [tmp_path / "venv" / "bin" / "python", "-P", "-m", *arguments],
                cwd=tmp_path,
                env=os.environ | {"GENLAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""},
                capture_output=True,
                text=True,
            )

        asked = ("lm_eval", "--model", "genlab", "--model_args", "path=run", "--tasks", "ids.yaml")
        assert "genlab" in run("genlab.eval.lm_eval", "--register").stdout
        done = run(*asked)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "|choice" in done.stdout
