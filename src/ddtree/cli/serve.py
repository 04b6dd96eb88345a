"""``ddtree serve``: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree.cli.loading import load_engine
from ddtree.cli.options import PairOptions, SpeculationOptions, chosen_mode, to_speculation
from ddtree.cli.output import ProgressLine, note
from ddtree.extras import require_extra

if TYPE_CHECKING:
    from ddtree.engine import Engine
    from ddtree.engine.engine import Progress

DEMO_MODEL_NAME = "smollm2-135m-instruct"


def serve(
    pair: PairOptions,
    speculation: SpeculationOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model for clients. Default: its folder's.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="DDTREE_API_KEY",
            help="Key that clients must show. Others on this machine can read it here: better in a file, or in the "
            "environment.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys that clients must show, one a line.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", "--allow-unauthenticated", help="Let other machines in without a key.")
    ] = False,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more are refused with 429.")] = 64,
    queue_timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait for a place, in seconds.")] = 60.0,
    request_timeout: Annotated[float, typer.Option(metavar="S", help="Longest answer, in seconds.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(metavar="S", help="After SIGTERM, time to finish answers.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(metavar="S", help="A longer round makes /ready fail.")] = 60.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="Largest body of a request.")] = 4 * 2**20,
    prefix_cache: Annotated[
        bool,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Keep what prompts that begin alike have in common."),
    ] = True,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Show the words of the last tree on the status page.")
    ] = False,
) -> None:
    """Serve OpenAI's API until Ctrl-C or SIGTERM.

    The status page is at /, facts at /server_info, metrics at /metrics. /ready answers 200 once a token was generated
    from end to end.
    """
    mode = chosen_mode(pair, speculation)
    require_extra("server", "ddtree serve")
    with ProgressLine() as progress:
        progress("starting torch", 0.0)
        from ddtree.server import ApiKeys, ServerSettings, read_api_keys
        from ddtree.server import api_key as one_key
        from ddtree.server import serve as run

    keys = ApiKeys() if api_key is None else one_key(api_key)
    keys += ApiKeys() if api_key_file is None else read_api_keys(api_key_file)
    settings = ServerSettings(
        model_name=served_model_name or (DEMO_MODEL_NAME if pair.model is None else pair.model.resolve().name),
        host=host,
        port=port,
        api_keys=keys,
        insecure=insecure,
        max_queue=max_queue,
        queue_timeout_s=queue_timeout,
        request_timeout_s=request_timeout,
        drain_s=drain_timeout,
        stall_s=stall_timeout,
        max_body_bytes=max_body_bytes,
        show_text=show_text,
    )

    def load(tell: Progress) -> Engine:
        return load_engine(pair, mode, to_speculation(mode, speculation), tell, prefix_cache=prefix_cache)

    run(settings, load, requested(pair, speculation) | {"prefix_cache": prefix_cache}, announce=note)


def requested(pair: PairOptions, speculation: SpeculationOptions) -> dict[str, Any]:
    """The options as they were given, for the server's facts."""
    options = asdict(pair) | asdict(speculation)

    def plain(value: Any) -> Any:
        return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in options.items()}
