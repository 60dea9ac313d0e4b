"""`python -m genlab.eval.lm_eval`: the harness's command line with the model `genlab` known to it.

It takes what `lm_eval` takes. Releases of the harness that look for models of other packages find
`genlab` by themselves; up to 0.4.13 they know only their own.
"""

import sys

from ...errors import GenlabError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # as of every other command


def main() -> None:
    """Runs the harness; exits as `genlab` does."""
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


if __name__ == "__main__":
    main()
