"""The commands `list` and `doctor`."""

import json
import sys
from typing import Annotated

import typer

from .doctor import examine, report_lines
from .inventory import configs_folder, inventory

OK, NOT_USABLE = 0, 1
AsJson = Annotated[bool, typer.Option("--json", help="Print records, not text.")]


def list_command(
    kind: Annotated[
        str | None, typer.Argument(help="Only this kind, such as mixers; all when left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists what a configuration or a command can name, with one line about each."""
    found = inventory(kind)
    if as_json:
        typer.echo(json.dumps({k: [o._asdict() for o in v] for k, v in found.items()}, indent=2))
        return
    for number, (name, offers) in enumerate(found.items()):
        where = f" (below {configs_folder()})" if name == "configs" else ""
        typer.echo(("\n" if number else "") + name + where)
        width = max((len(offer.name) for offer in offers), default=0)
        for offer in offers:
            typer.echo(f"  {offer.name:{width}}  {offer.about}".rstrip())


def doctor_command(as_json: AsJson = False) -> int:
    """Looks whether genlab can run here: versions, devices, disk, kernels, extras.

    Exits with 0 if it can, and with 1 and a line for each fault if it cannot.
    """
    found = examine()
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        for line in report_lines(found):
            typer.echo(line)
    for fault in found.faults:
        print(f"genlab: {fault}", file=sys.stderr)
    return NOT_USABLE if found.faults else OK
