"""`python -m genlab.eval.lm_eval`: the harness's command line with the model `genlab` known to it.

It takes what `lm_eval` takes. Releases of the harness that look for models of other packages find
`genlab` by themselves; up to 0.4.13 they know only their own, and `--register` (`--unregister`)
makes plain `lm_eval --model genlab` work in the environment by a file in it (see `plugin`).
"""

import sys

from ...errors import GenlabError
from . import plugin

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # as of every other command


def main() -> None:
    """Runs the harness; exits as `genlab` does."""
    if sys.argv[1:] in (["--register"], ["--unregister"]):
        _set_registered(sys.argv[1] == "--register")
        return
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        print(
            f"genlab: package {error.name!r} is missing: pip install 'genlab[lm_eval]'",
            file=sys.stderr,
        )
        sys.exit(FAILED)
    from . import adapter  # noqa: F401  (registers the model)

    try:
        cli_evaluate()
    except GenlabError as error:
        print(f"genlab: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _set_registered(wanted: bool) -> None:
    """Writes or removes the file by which plain `lm_eval` knows genlab, and says so."""
    try:
        if wanted:
            print(f"wrote {plugin.register()}: `lm_eval --model genlab` works here from now on")
        else:
            gone = plugin.unregister()
            print(f"removed {gone}" if gone else f"there is no {plugin.pth_file()}")
    except GenlabError as error:
        print(f"genlab: {error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
