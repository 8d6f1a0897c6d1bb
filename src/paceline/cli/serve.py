"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import tomllib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from paceline.cli.console import tell_notes
from paceline.cli.options import MethodOptions, ModelOptions, given_path, grouped
from paceline.errors import OptionError, require

#: Drafters that need no training and next to no memory: offered beside the default one.
OFFERED = ("none", "prompt-lookup", "suffix", "recycling")
KEY = "PACELINE_API_KEY"  #: Environment variable: a key that requests must send.


def _configured(context: Context, file: Path | None) -> Path | None:
    """Options that a file and the environment set, for those that the command line leaves out."""
    try:
        values = tomllib.loads(file.read_text("utf-8")) if file else {}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # the system's own text names the file again
        raise OptionError(f"cannot read the options in {file}: {why}") from error
    values = {key.replace("-", "_"): value for key, value in values.items()}
    known = {str(parameter.name): parameter for parameter in context.command.params}
    unknown = set(values) - (set(known) - {"config"})
    require(not unknown, f"{file} has unknown options: {', '.join(sorted(unknown))}")
    for name, value in values.items():
        switch = getattr(known[name], "is_flag", False)
        require(switch or not isinstance(value, bool), f"{file}: {name} is no switch, but true or false is given")
        listed = isinstance(value, list) or not getattr(known[name], "multiple", False)
        require(listed, f'{file}: {name} is a list, as in {name} = ["one", "another"]')
    if KEY in os.environ:
        values["api_key"] = [os.environ[KEY]]
    context.default_map = values
    return file


@grouped
def serve(
    source: ModelOptions,
    method: MethodOptions,
    host: Annotated[str, Option("--host", help="Address to listen on; 0.0.0.0 lets other machines connect.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    offer: Annotated[
        list[str] | None,
        Option("--offer", metavar="DRAFTER", help="A further drafter that requests may name; may be given again."),
    ] = None,
    rows: Annotated[int, Option("--rows", min=1, help="Most requests decoded at a time.")] = 4,
    context: Annotated[int, Option("--context", min=0, help="Most tokens of a request; 0: the model's, to 4096.")] = 0,
    queue: Annotated[int, Option("--queue", min=0, help="Most requests that wait; more are refused.")] = 64,
    keep: Annotated[int, Option("--keep", min=0, help="Tokens kept for prompts that begin alike; 0: none.")] = 8192,
    timeout: Annotated[float, Option("--timeout", help="Seconds that a request may take.")] = 600.0,
    drain: Annotated[float, Option("--drain", help="Seconds to finish requests in when told to stop.")] = 30.0,
    api_key: Annotated[
        list[str] | None,
        Option("--api-key", help=f"A key that requests must send; may be given again. Else ${KEY}, which is one."),
    ] = None,
    origin: Annotated[
        list[str] | None, Option("--origin", help="A web page's origin that may call (CORS); may be given again.")
    ] = None,
    body: Annotated[int, Option("--body", min=1, help="Most bytes of a request.")] = 4 * 2**20,
    log_json: Annotated[bool, Option("--log-json", help="Log lines are JSON objects.")] = False,
    config: Annotated[  # noqa: ARG001  # its callback reads it
        Path | None,
        Option(
            "--config",
            parser=given_path,
            metavar="FILE",
            callback=_configured,
            is_eager=True,
            help="TOML file of these options: name = value.",
        ),
    ] = None,
) -> None:
    """Serve the OpenAI API, and a page that shows who drafts what."""
    try:
        from paceline.serve.app import make_app
        from paceline.serve.guard import JsonLines
        from paceline.serve.server import bound, run
        from paceline.serve.settings import Settings
    except ImportError as error:
        raise OptionError(f"serve needs the extra 'serve': pip install 'paceline[serve]' ({error})") from error
    settings: dict[str, Any] = {
        "rows": rows,
        "queue": queue,
        "keep": keep,
        "timeout": timeout,
        "drain": drain,
        "keys": tuple(api_key or ()),
        "origins": tuple(origin or ()),
        "body": body,
        "name": source.model,
    }
    Settings(**settings)  # what is wrong is told before a model is loaded
    with bound(host, port) as address:  # a port that is taken, too
        llm = source.llm(method)
        settings["context"] = context or min(llm.target.context, 4096)
        llms = {method.parts()[0]: llm}
        for name in (*OFFERED, *(offer or ())):
            with suppress(OptionError) if name in OFFERED else nullcontext():  # some models read no trees
                if name not in llms:
                    llms[name] = llm.method(name)
        app = make_app(llms, Settings(**settings))
        tell_notes()
        lines = logging.StreamHandler()
        lines.setFormatter(JsonLines() if log_json else logging.Formatter("%(asctime)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[lines])
        run(app, address, drain)
