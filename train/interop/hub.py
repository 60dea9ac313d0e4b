"""Checkpoints of the Hugging Face Hub: looked at, then downloaded into our cache.

`huggingface_hub` (the extra `genlab[hub]`) speaks to the Hub and shows a bar per file. What was cut
off is kept here and goes on where it was, for its own downloads begin anew in each process. Only
JSON, text and safetensors are asked for, never a pickle.
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

from ...errors import CheckpointError, GenlabError, suggest
from ..data.cache import default_cache_dir
from .hf_config import read_hf_config
from .registry import architecture_of
from .tensor_files import INDEX_SUFFIX
from .tokenizer_files import KEPT

INSTALL = "pip install 'genlab[hub]'"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = WEIGHTS + INDEX_SUFFIX
PARTIAL = ".partial"  # behind the name of a file that is on its way
# An owner and a name, as the Hub allows them.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OTHERS = {
    ".bin": "pickle files, which can run code and are never read",
    ".pt": "pickle files, which can run code and are never read",
    ".pth": "pickle files, which can run code and are never read",
    ".gguf": "GGUF files: download one and import its path",
}
Value = TypeVar("Value")


class Fetched(NamedTuple):
    """A checkpoint that lies in the cache.

    Attributes:
        folder: of its files.
        hub_id: owner and name.
        commit: what the revision stood for.
    """

    folder: Path
    hub_id: str
    commit: str


def is_hub_id(text: str) -> bool:
    """Whether a text could be the id of a checkpoint on the Hub, such as `owner/name`."""
    return HUB_ID.fullmatch(text) is not None


def fetch_checkpoint(hub_id: str, *, revision: str | None = None) -> Fetched:
    """Downloads a checkpoint, or what is missing of it.

    Its config comes first, so that an architecture that cannot be read is refused before the
    weights are on their way.

    Args:
        hub_id: owner and name.
        revision: a commit, branch or tag; None for the main branch.

    Raises:
        CheckpointError: `huggingface_hub` is missing, the Hub is out of reach, there is no such
            checkpoint or revision, or it has no safetensors.
        ConfigError: its config has something that is not implemented.
    """
    where = hub_id if revision is None else f"{hub_id} at {revision}"
    api = hub_api()
    nowhere = "no such folder here, and "
    about = _asked(where, lambda: api.model_info(hub_id, revision=revision), hint=nowhere)
    commit = str(about.sha)
    names = sorted(file.rfilename for file in about.siblings or ())

    if CONFIG not in names:
        raise CheckpointError(f"{where}: has no {CONFIG}, so it is no checkpoint that can be read")
    _refuse_without_weights(where, names)
    folder = default_cache_dir() / "checkpoints" / hub_id.replace("/", "--") / commit

    def download(*wanted: str) -> None:
        for name in wanted:
            _asked(where, lambda name=name: _download(api, hub_id, commit, name, folder))

    download(CONFIG)
    config = read_hf_config(folder)
    architecture_of(config).model_config(config)
    download(*[name for name in names if name in {*KEPT, INDEX}])
    weights = _shards(folder / INDEX) if INDEX in names else [WEIGHTS]
    missing = sorted(set(weights) - set(names))
    if missing:
        raise CheckpointError(f"{where}: {INDEX} names {missing[0]}, which is not there")
    download(*weights)
    return Fetched(folder, hub_id, commit)


def hub_api() -> Any:
    """The client of the Hub.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise CheckpointError(
            f"checkpoints of the Hub: package huggingface_hub is missing: {INSTALL}"
        ) from None
    return HfApi(library_name="genlab")


def _download(api: Any, hub_id: str, commit: str, name: str, folder: Path) -> None:
    """Downloads one file, or the rest of it.

    Raises:
        CheckpointError: another process is at it, or what came is not what was published.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    target, partial = folder / name, folder / f"{name}{PARTIAL}"
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(hub_id, name, revision=commit, endpoint=api.endpoint)
    about = get_hf_file_metadata(url, token=api.token)
    headers = build_hf_headers(token=api.token, library_name="genlab")
    if urlparse(about.location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # the token is for the Hub, not for where it stores
    with partial.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another process is downloading it") from None
        if file.tell() > about.size:
            file.seek(0)
            file.truncate()
        http_get(
            about.location,
            file,
            resume_size=file.tell(),
            headers=headers,
            expected_size=about.size,
        )
        file.flush()
        _check(partial, name, about)
        partial.rename(target)


def _check(partial: Path, name: str, about: Any) -> None:
    """Compares a download with its SHA-256, which the Hub gives for large files.

    Raises:
        CheckpointError: they differ; the download is deleted then.
    """
    if about.etag is None or not re.fullmatch("[0-9a-f]{64}", about.etag):
        return
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != about.etag:
        partial.unlink()
        raise CheckpointError(f"{name}: was damaged on its way; the same command fetches it anew")


def _refuse_without_weights(where: str, names: Sequence[str]) -> None:
    if WEIGHTS in names or INDEX in names:
        return
    found = sorted({Path(name).suffix for name in names} & set(OTHERS))
    has = f"; it has {OTHERS[found[0]]}" if found else ""
    near = suggest(WEIGHTS, [name for name in names if name.endswith(".safetensors")])
    raise CheckpointError(f"{where}: has no {WEIGHTS}{near if near else has}")


def _shards(index: Path) -> list[str]:
    """The files that an index names, each once.

    Raises:
        CheckpointError: it is damaged, or names something else than safetensors beside it.
    """
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
        bad = [name for name in files if "/" in name or not name.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: no index of safetensors files") from None
    if bad:
        raise CheckpointError(f"{index}: names {sorted(bad)[0]!r}, want safetensors files")
    return sorted(files)


def _asked(where: str, call: Callable[[], Value], *, hint: str = "") -> Value:
    """What a call to the Hub gives; its errors in one line, after the hint.

    Raises:
        CheckpointError: it failed.
    """
    from huggingface_hub import errors

    try:
        return call()
    except GenlabError:
        raise
    except errors.GatedRepoError:
        reason = "its owner asks for an agreement first: accept it on the Hub, then `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = "the Hub has no such revision of it"
    except errors.RepositoryNotFoundError:
        reason = f"{hint}no such checkpoint on the Hub (a private one needs HF_TOKEN)"
    except Exception as error:  # a network's errors are of many unrelated classes
        said = " ".join(str(error).split()) or type(error).__name__
        reason = f"{hint}the Hub cannot be read (what was downloaded is kept): {said[:200]}"
    raise CheckpointError(f"{where}: {reason}") from None
