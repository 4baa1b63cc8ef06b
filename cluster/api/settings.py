"""What a server needs to know: the keys of `tiermoe serve --server-config`, and its options.

Keys are in a file (`keys.py`): what is an argument shows in process lists and in Ray's records.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ...actors.base_settings import Settings, in_unit
from ..checkpoints.generation import GenerationConfigMode
from .origins import checked_host, checked_origin

ToolFormatName = Literal[  # keys of `tools.TOOL_FORMATS`
    "harmony", "hermes", "qwen-xml", "seed-xml", "glm-xml", "hunyuan", "json-list", "mistral", "deepseek",
    "deepseek-dsml", "deepseek-v4", "minimax", "minimax-m3", "gemma", "kimi", "kimi-k3", "lfm", "pythonic",
    "llama-json",
]  # fmt: skip

RequestLogFormat = Literal["text", "json", "off"]


class LimitSettings(Settings):
    """What one client may ask for, and how much may wait."""

    waiting: int = Field(
        default=256, ge=0, description="choices that may wait for the runtime; more are refused with 429",
        json_schema_extra=in_unit("choices"),
    )  # fmt: skip
    choices: int = Field(
        default=128,
        ge=1,
        description="most choices of one request: prompts times n",
        json_schema_extra=in_unit("choices"),
    )
    body_bytes: int = Field(
        default=4 * 2**20, ge=1024, description="most bytes of a request's body; more are refused with 413"
    )
    held_bytes: int = Field(
        default=2**28,
        ge=1024,
        description="most bytes of all request bodies together, half of them of one key; more are refused with 429",
    )
    body_s: float = Field(default=60.0, gt=0, description="time limit for a body to arrive; after it 408")
    request_s: float = Field(default=3600.0, gt=0, description="time limit of one choice")
    stalled_s: float = Field(
        default=120.0, gt=0, description="/ready fails when running requests have received no token for this long"
    )


class ApiSettings(Settings):
    """One server."""

    deployment: str | None = Field(default=None, description="id of a running deployment; default: the only one")
    model_name: str | None = Field(
        default=None, description="name of the model for clients; default: its folder's name"
    )
    tokenizer: str | None = Field(
        default=None, description="folder with the tokenizer's files; default: the expert store"
    )
    chat_template: str | None = Field(
        default=None, description="Jinja file of the chat template; default: the model's own"
    )
    tool_format: ToolFormatName | None = Field(
        default=None, description="format of the model's tool calls; default: recognized from its chat template"
    )
    api_key_file: str | None = Field(
        default=None, description="file of bearer keys, one a line; default: no authentication"
    )
    allow_origins: tuple[Annotated[str, AfterValidator(checked_origin)], ...] = Field(
        default=(),
        description="origins of web pages that may use the server, such as https://chat.example.com, or *; default: "
        "none but its own",
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(checked_host)], ...] = Field(
        default=(),
        description="names of the server in `Host`, besides its addresses and this machine's name; *.NAME: those below "
        "a name, *: all. With a key they are checked only if given",
    )
    share_prefix_cache: bool = Field(
        default=False, description="share KV pages of equal prompts between keys, which see that in time and usage"
    )
    generation_config: GenerationConfigMode = Field(
        default="auto",
        description="defaults of sampling of the model's generation_config.json for what a request leaves out: auto, "
        "or none",
    )
    request_log: RequestLogFormat = Field(default="text", description="log a line for each request: text, json or off")
    request_log_file: str | None = Field(default=None, description="file of the request log; default: standard error")
    limits: LimitSettings = LimitSettings()
