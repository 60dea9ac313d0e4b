"""The command line: one function per command, errors in one line, exit codes that scripts can use.

Exit codes: 0 done, 1 an unexpected failure (with traceback), 2 the input's fault (one line),
130 interrupted.
"""

import signal
import sys

from .allocator import restart_with_large_pages
from .errors import GenlabError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def build_app():
    """Returns the typer application with all commands; typer is imported only here."""
    import typer

    from . import __version__
    from .eval.cli_bench import bench_app
    from .eval.cli_compare import compare_command, evaluate_command, tune_command
    from .eval.cli_cost import cost_command
    from .eval.cli_generate import generate_command
    from .eval.cli_info import doctor_command, list_command
    from .eval.cli_interop import export_command, import_command
    from .train.cli_train import schema_command, train_command

    app = typer.Typer(
        name="genlab",
        help="Train, run and honestly compare the ways of generating text.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.command("train")(train_command)
    app.command("generate")(generate_command)
    app.command("eval")(evaluate_command)
    app.command("compare")(compare_command)
    app.command("cost")(cost_command)
    app.command("tune")(tune_command)
    app.command("schema")(schema_command)
    app.command("import")(import_command)
    app.command("export")(export_command)
    app.add_typer(bench_app, name="bench")
    app.command("list")(list_command)
    app.command("doctor")(doctor_command)

    @app.command("version")
    def version_command() -> None:
        """Prints the version."""
        typer.echo(__version__)

    return app


def main() -> None:
    """Runs the command line and exits with its code."""
    import typer

    # Typer may carry a click of its own: the classes come from there, not from an import of click.
    usage_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.partition(".")[0] == __package__:
            raise
        print(
            f"genlab: package {name!r} is missing: install genlab again (make, or pip install .)",
            file=sys.stderr,
        )
        sys.exit(FAILED)
    try:
        code = app(standalone_mode=False)
    except GenlabError as error:
        print(f"genlab: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except usage_error as error:
        if error.format_message():  # empty after the help that no argument at all prints
            print(f"genlab: {error.format_message()}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except (typer.Abort, KeyboardInterrupt) as stop:
        # Typer hides an interrupt behind its own exception; training's says what was saved.
        reason = stop.__cause__ or stop
        print(f"genlab: {str(reason) or 'interrupted; the same command goes on'}", file=sys.stderr)
        sys.exit(OK if getattr(reason, "number", None) == signal.SIGTERM else INTERRUPTED)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    sys.exit(code if isinstance(code, int) else OK)


def start() -> None:
    """The entry of a process of its own; `main` with memory in large pages."""
    restart_with_large_pages()
    main()


if __name__ == "__main__":
    start()
