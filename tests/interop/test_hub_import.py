"""Checkpoints by their id on the Hub, from a server on this machine that answers like the Hub."""

import contextlib
import fcntl
import hashlib
import http.server
import json
import re
import sys
import threading
from pathlib import Path

import genlab
import numpy as np
import pytest
from genlab.cli import build_app
from genlab.errors import CheckpointError, ConfigError
from genlab.train.interop import hub
from genlab.train.interop.hub import fetch_checkpoint, is_hub_id
from huggingface_hub import HfApi, constants
from typer.testing import CliRunner

FIXTURE = Path(__file__).parent / "fixtures" / "qwen3"
ID, COMMIT = "someone/tiny", "0123456789abcdef" * 2 + "01234567"


class Hub:
    """What the server has, what it was asked for, and what goes wrong.

    Attributes:
        files: name -> content.
        asked: names of files whose content was sent, with the range asked for.
        break_at: bytes of a file of weights after which the connection is cut, and the server is
            away; None for never.
        status: 403 for what needs an agreement.
        away: every answer is 410.
    """

    def __init__(self, files):
        self.files, self.asked, self.break_at = dict(files), [], None
        self.status, self.away = 200, False

    def listing(self):
        return {
            "id": ID, "modelId": ID, "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
            "siblings": [{"rfilename": name} for name in self.files],
        }  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        state = self.server.hub
        path, _, _ = self.path.partition("?")
        if state.away:
            return self.send(410, b"", body, {})
        if state.status != 200 or f"/{ID}" not in path:
            code = "GatedRepo" if state.status == 403 else "RepoNotFound"
            return self.send(403 if state.status == 403 else 404, b"", body, {"X-Error-Code": code})
        if path.startswith("/api/models/"):
            if "/revision/" in path and path.rpartition("/")[2] not in (COMMIT, "main"):
                return self.send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
            data = state.listing()
            if "/tree/" in path:
                data = [
                    {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                    for name, content in state.files.items()
                ]
            return self.send(200, json.dumps(data).encode(), body, {})
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if name not in state.files:
            return self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        content = state.files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", ""))
        start = int(begin[1]) if begin else 0
        if body:
            state.asked.append((name, start))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = state.break_at if body and name.endswith(".safetensors") else None
        return self.send(206 if start else 200, content[start:], body, headers, cut)

    def send(self, status, content, body, headers, cut=None):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and cut is not None and cut < len(content):
            self.wfile.write(content[:cut])
            self.close_connection = self.server.hub.away = True
        elif body:
            self.wfile.write(content)


def _etag(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """serve(files) -> `Hub`; the cache is a folder of the test."""
    monkeypatch.setenv("GENLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with contextlib.ExitStack() as stack:

        def start(files):
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            server.hub = Hub(files)
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            address = f"http://127.0.0.1:{server.server_address[1]}"
            monkeypatch.setattr(hub, "hub_api", lambda: HfApi(endpoint=address, token=False))
            return server.hub

        yield start


@pytest.fixture(scope="module")
def published():
    """The fixture's files and more, as they lie on the Hub beside what is not wanted."""
    files = {path.name: path.read_bytes() for path in FIXTURE.iterdir() if path.suffix != ".npz"}
    others = ("README.md", "pytorch_model.bin", "onnx/model.onnx", "model.fp16.safetensors")
    return files | {name: b"not wanted" for name in others}


def run(*arguments):
    result = CliRunner().invoke(build_app(), ["import", *map(str, arguments)])
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def refusal(*arguments, kind=CheckpointError, **options):
    with pytest.raises(kind) as error:
        fetch_checkpoint(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_import_by_id(serve, published, expected, tmp_path):
    state = serve(published)
    out = tmp_path / "run"
    assert "parameters" in run(ID, "--out", out).output
    want = {"config.json", "model.safetensors", *(set(published) & set(hub.KEPT))}
    assert sorted(name for name, _ in state.asked) == sorted(want)  # each once, and nothing else
    about = json.loads((out / "source" / "hub.json").read_text())
    assert about == {"id": ID, "commit": COMMIT}
    logits = genlab.load(out)(expected("qwen3")["tokens"])
    np.testing.assert_allclose(logits, expected("qwen3")["logits"], rtol=1e-4, atol=1e-4)

    state.asked.clear()
    with pytest.raises(CheckpointError, match="is taken; choose another folder, or --overwrite"):
        run(ID, "--out", out)
    run(ID, "--out", out, "--overwrite", "--revision", COMMIT)
    assert state.asked == []  # it lay in the cache


def test_a_download_goes_on_where_it_was_cut(serve, published, monkeypatch):
    """The same command resumes, after the connection broke and the Hub was away."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # what is lost at most
    state = serve(published)
    state.break_at = 50_000
    assert "what was downloaded is kept" in refusal(ID)
    state.break_at, state.away = None, False
    folder = fetch_checkpoint(ID).folder
    assert (folder / "model.safetensors").read_bytes() == published["model.safetensors"]
    first, second = [start for name, start in state.asked if name == "model.safetensors"]
    assert first == 0 and 50_000 - 1024 < second <= 50_000


def test_what_was_damaged_is_fetched_anew(serve, published):
    state = serve(published)
    folder = fetch_checkpoint(ID).folder
    weights = folder / "model.safetensors"
    weights.rename(folder / "model.safetensors.partial")
    (folder / "model.safetensors.partial").write_bytes(b"x" * 1000)
    assert "model.safetensors: was damaged on its way" in refusal(ID)
    state.asked.clear()
    assert (fetch_checkpoint(ID).folder / weights.name).read_bytes() == published[weights.name]
    assert state.asked == [(weights.name, 0)]
    weights.rename(folder / "model.safetensors.partial")
    with (folder / "model.safetensors.partial").open("ab") as file:
        file.write(b"more than there is")
    fetch_checkpoint(ID)
    assert weights.read_bytes() == published[weights.name]


def test_one_process_at_a_time(serve, published):
    serve(published)
    folder = fetch_checkpoint(ID).folder
    (folder / "config.json").unlink()
    with (folder / "config.json.partial").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "config.json: another process is downloading it" in refusal(ID)


def test_shards(serve, published):
    state = serve(published)
    weights = state.files.pop("model.safetensors")
    names = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    state.files |= {name: weights for name in names}
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    state.files[hub.INDEX] = json.dumps(index).encode()
    folder = fetch_checkpoint(ID, revision="main").folder
    assert {path.name for path in folder.glob("*.safetensors")} == set(names)
    assert next(name for name, _ in state.asked) == "config.json"


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "gone.safetensors"}, "names gone.safetensors, which is not there"),
        ({"a": "../x.safetensors"}, "names '../x.safetensors', want safetensors files"),
        ({"a": "model.bin"}, "names 'model.bin', want safetensors files"),
        ([1], "no index of safetensors files"),
    ],
)
def test_wrong_indices(serve, published, weight_map, said):
    state = serve(published)
    state.files[hub.INDEX] = json.dumps({"weight_map": weight_map}).encode()
    assert said in refusal(ID)


def test_what_cannot_be_read_is_refused_before_the_weights(serve, published):
    state = serve(published)
    config = json.loads(published["config.json"])
    state.files["config.json"] = json.dumps(config | {"model_type": "t5"}).encode()
    assert "model_type is 't5'" in refusal(ID, kind=ConfigError)
    assert [name for name, _ in state.asked] == ["config.json"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["config.json", "pytorch_model.bin"],
         "has no model.safetensors; it has pickle files, which can run code and are never read"),
        (["config.json", "q4.gguf"], "it has GGUF files: download one and import its path"),
        (["config.json", "models.safetensors"], "did you mean 'models.safetensors'?"),
        (["config.json"], "someone/tiny: has no model.safetensors"),
        (["model.safetensors"], "has no config.json, so it is no checkpoint"),
    ],
)  # fmt: skip
def test_what_is_no_checkpoint(serve, names, said):
    state = serve(dict.fromkeys(names, b"{}"))
    assert said in refusal(ID)
    assert state.asked == []


def test_what_the_hub_refuses(serve, published, monkeypatch):
    state = serve(published)
    assert "no such folder here, and no such checkpoint on the Hub" in refusal("someone/else")
    assert "the Hub has no such revision of it" in refusal(ID, revision="v9")
    state.status = 403
    assert "accept it on the Hub, then `hf auth login`" in refusal(ID)
    monkeypatch.setattr(hub, "hub_api", lambda: HfApi(endpoint="http://127.0.0.1:9", token=False))
    assert "no such folder here, and the Hub cannot be read (what was" in refusal(ID)


def test_what_is_an_id(tmp_path):
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert not any(map(is_hub_id, ("name", "a/b/c", "./a", "../a", "/a/b", "a/", "a b/c", "~/a")))
    with pytest.raises(CheckpointError, match="no such folder"):
        run(tmp_path / "none", "--out", tmp_path / "run")
    with pytest.raises(ConfigError, match="--revision 'x': is of an id on the Hub"):
        run(FIXTURE, "--out", tmp_path / "run", "--revision", "x")


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal(ID) == (
        "checkpoints of the Hub: package huggingface_hub is missing: pip install 'genlab[hub]'"
    )
