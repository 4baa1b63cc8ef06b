"""The `tiermoe prepare` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....errors import ConfigError
from .job import default_store_dir, prepare


def prepare_command(
    model: Annotated[Path, typer.Argument(help="Folder of a safetensors checkpoint.", metavar="MODEL")],
    out: Annotated[
        Path | None, typer.Argument(help="Store folder to make; by default one in the cache.", metavar="[OUT]")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where stores go when OUT is not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make the store anew even if it is there.")] = False,
) -> None:
    """Turn a checkpoint into an expert store, which `tiermoe run` maps. Interrupted, it resumes."""
    if out is not None and cache_dir is not None:
        raise ConfigError("OUT and --cache-dir are both given", "leave one out: OUT names the store folder itself")
    target = out if out is not None else default_store_dir(model, cache_dir)
    typer.echo(prepare(model, target, force=force))
