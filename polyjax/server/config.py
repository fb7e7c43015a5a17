"""Settings of the HTTP side. Every field is a flag of the same name; its help is the flag's."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyjax.core.errors import ConfigError
from polyjax.server.tool_formats import FORMATS


def _setting(default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@dataclasses.dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = _setting("0.0.0.0", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one and says which.")
    api_server_count: int = _setting(
        1, "HTTP processes that share the port. One streams roughly 10,000 tokens/s."
    )
    api_key: tuple[str, ...] = _setting(
        (), "Keys, one of which /v1 and tokenizer routes require (Authorization: Bearer)."
    )
    admin_key: str | None = _setting(None, "Key of the /admin routes, which are off without it.")
    allowed_origins: tuple[str, ...] = _setting(
        (), "Origins that browsers may call from (CORS); * is any."
    )
    max_body_bytes: int = _setting(32 << 20, "Larger request bodies are refused with 413.")
    shutdown_timeout_s: float = _setting(
        30.0, "After SIGTERM, running requests get this long to finish."
    )
    health_timeout_s: float = _setting(
        60.0, "/health fails once the engine has finished no step for this long."
    )
    chat_template: str | None = _setting(
        None, "File with the Jinja chat template to use in place of the model's own."
    )
    tool_call_parser: str = _setting(
        "auto",
        f"How the model writes tool calls: {', '.join(FORMATS)}; auto: as its chat template does.",
    )
    enable_auto_tool_choice: bool = _setting(
        True, "Whether the model may call tools where a request leaves that to it."
    )
    generation_config: str = _setting(
        "auto",
        "auto: default sampling parameters are those of the model's generation_config.json; "
        "vllm: they are not, and neutral ones apply.",
    )
    metrics_prefix: str = _setting("vllm:", "Prefix of the standard metrics' names.")
    log_interval_s: float = _setting(5.0, "Seconds between lines of statistics under load.")
    dry_run: bool = _setting(
        False, "Print what the model takes on each device, from its config alone, and exit."
    )
    scripted_engine: str | None = _setting(
        None,
        "JSON settings of an engine without a model, for tests and HTTP measurements; {} works.",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError("--port must be in [0, 65535]")
        if not 1 <= self.api_server_count <= 256:
            raise ConfigError("--api_server_count must be in [1, 256]")
        if self.max_body_bytes < 1024:
            raise ConfigError("--max_body_bytes must be at least 1024")
        if self.tool_call_parser != "auto" and self.tool_call_parser not in FORMATS:
            raise ConfigError(f"--tool_call_parser must be auto or one of {', '.join(FORMATS)}")
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError("--generation_config must be auto or vllm")
        if any(not key for key in self.api_key) or self.admin_key == "":
            raise ConfigError("--api_key and --admin_key must not be empty strings")
        if self.shutdown_timeout_s < 0 or self.health_timeout_s <= 0 or self.log_interval_s <= 0:
            raise ConfigError("timeouts and intervals must be positive")
