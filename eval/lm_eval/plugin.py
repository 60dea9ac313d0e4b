"""Makes plain `lm_eval --model genlab` find our model, in an environment whose user asks for it.

Up to 0.4.13 the harness knows only the models in its own list and offers no place to add one. What
Python offers is a `.pth` file: its line runs at every start of the environment's interpreter. Ours
imports this module, which waits for `lm_eval.models` and adds one name to the harness's registry.
Because that touches every start of Python, nothing installs it unasked.
"""

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ...errors import GenlabError

MODELS = "lm_eval.models"  # the module of the harness whose import fills its registry
TARGET = "genlab.eval.lm_eval.adapter:GenlabLM"
FILE = "genlab_lm_eval.pth"
# One line that begins with `import`: others of a `.pth` file are taken for folders. Without genlab
# (uninstalled since) it does nothing.
LINE = (
    r'import sys; exec("try:\n from genlab.eval.lm_eval.plugin import watch\n'
    r'except ImportError: pass\nelse: watch()")' + "\n"
)


def pth_file() -> Path:
    """Where the file lies, or would, in the environment of this interpreter."""
    return Path(sysconfig.get_path("purelib")) / FILE


def register() -> Path:
    """Writes the file.

    Returns:
        Its path.

    Raises:
        GenlabError: the harness is missing, or the environment cannot be written to.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise GenlabError("package 'lm_eval' is missing: pip install 'genlab[lm_eval]'")
    file = pth_file()
    try:
        file.write_text(LINE)
    except OSError as error:
        raise GenlabError(
            f"{file}: {error.strerror}; `python -m genlab.eval.lm_eval` needs no such file"
        ) from error
    return file


def unregister() -> Path | None:
    """Removes the file.

    Returns:
        Its path; None if there was none.

    Raises:
        GenlabError: the environment cannot be written to.
    """
    file = pth_file()
    try:
        file.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GenlabError(f"{file}: {error.strerror}") from error
    return file


def watch() -> None:
    """From now on an import of the harness's models adds ours; once, however often it is called."""
    if MODELS not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the other finders find `lm_eval.models`, and wraps the loader they give."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Runs the module as its own loader does, then names our model beside the harness's."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module's own loader stays the one that is seen, for resources beside it.
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        from lm_eval.api.registry import model_registry

        if "genlab" not in model_registry:  # a release that reads entry points has it already
            model_registry.register("genlab", target=TARGET)
