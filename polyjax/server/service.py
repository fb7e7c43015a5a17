"""What the routes of one HTTP process share: the engine, the served model, and whether to serve."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyjax.core.errors import ConfigError, RequestError
from polyjax.engine.client import EngineClient
from polyjax.engine.types import EngineInfo, SamplingParams
from polyjax.io.chat import ChatTemplate
from polyjax.io.files import ModelFiles
from polyjax.io.tokenizer import Tokenizer
from polyjax.server.config import ServerConfig
from polyjax.server.metrics import Metrics
from polyjax.server.tool_formats import FORMATS, format_of
from polyjax.server.tool_support import ToolSupport

INLINE_BODY_BYTES = 16 << 10  # larger bodies are parsed and tokenized off the event loop,
GRAMMAR_FIELDS = (b"response_format", b"structured_outputs", b"guided_", b"tools")  # as are these

# Names in generation_config.json of the sampling parameters that it gives defaults for.
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as requests see it. `defaults` are sampling parameters that requests leave open.

    `default_max_tokens` None means up to the context limit.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_source: str | None
    tools: ToolSupport
    defaults: Mapping[str, Any]
    default_max_tokens: int | None
    created_s: int
    any_name: bool = False  # whether requests may call it as they like

    @classmethod
    def build(
        cls, files: ModelFiles, tokenizer: Tokenizer, info: EngineInfo, config: ServerConfig
    ) -> ServedModel:
        """Raises ConfigError for a chat template or sampling defaults that cannot be used."""
        source = files.chat_template
        if config.chat_template is not None:
            try:
                source = Path(config.chat_template).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--chat_template={config.chat_template}: {error}") from error
        follows_model = config.generation_config == "auto"
        generation = files.generation_config if follows_model else {}
        defaults = {k: generation[k] for k in _DEFAULTED if generation.get(k) is not None}
        try:
            SamplingParams(**defaults)
        except RequestError as error:
            raise ConfigError(
                f"generation_config.json of {files.name}: {error}; "
                "--generation_config=vllm serves without it"
            ) from error
        return cls(
            info=info,
            tokenizer=tokenizer,
            template=None if source is None else ChatTemplate(source, tokenizer.special_tokens),
            template_source=source,
            tools=_tool_support(files, source, tokenizer, info, config),
            defaults=defaults,
            default_max_tokens=generation.get("max_new_tokens"),
            created_s=int(time.time()),
        )

    def check_name(self, name: str | None) -> None:
        """Raises RequestError (404) if a request names another model."""
        if name is not None and name != self.info.model_name and not self.any_name:
            raise RequestError(
                f"The model `{name[:200]}` does not exist; this server has "
                f"`{self.info.model_name}`.",
                "model",
                404,
            )


def _tool_support(
    files: ModelFiles,
    source: str | None,
    tokenizer: Tokenizer,
    info: EngineInfo,
    config: ServerConfig,
) -> ToolSupport:
    """`source` is the chat template in use; a model may bring another one for tools."""
    name = f"the chat template in {config.chat_template}"
    if config.chat_template is None:
        source = files.chat_templates.get("tool_use", source)
        name = f"the chat template of {files.name}"
    is_named = config.tool_call_parser != "auto"
    found = FORMATS[config.tool_call_parser] if is_named else source and format_of(source)
    return ToolSupport.build(
        None if source is None else ChatTemplate(source, tokenizer.special_tokens),
        name,
        found or None,
        config.enable_auto_tool_choice,
        tokenizer,
        info.eos_token_ids,
    )


class Service:
    """State of one HTTP process. `model` is None until the engine is ready."""

    def __init__(self, config: ServerConfig, client: EngineClient):
        self.config = config
        self.client = client
        self.model: ServedModel | None = None
        self.metrics: Metrics | None = None
        self.is_draining = False
        self.num_open = 0
        self._last_step = 0

    def become_ready(self, model: ServedModel) -> None:
        self.metrics = Metrics(self.config.metrics_prefix, model.info, self.client)
        self.model = model

    def ready_model(self) -> ServedModel:
        """Returns the model. Raises RequestError (503) while there is none."""
        if self.model is None:
            progress = self.client.progress
            doing = f": {progress.what}" if progress else ""
            raise RequestError(f"the model is not ready yet{doing}", status=503)
        return self.model

    def model_for_work(self) -> tuple[ServedModel, Metrics]:
        """Returns what a new request needs. Raises RequestError (503) if none may start."""
        if self.is_draining:
            raise RequestError("the server is shutting down", status=503)
        model = self.ready_model()
        if self.client.stats.sleep_level:
            raise RequestError("the engine is asleep: POST /admin/wake wakes it", status=503)
        assert self.metrics is not None
        return model, self.metrics

    async def drained(self, timeout_s: float) -> bool:
        """Refuses new work from now on; returns whether all running work ended in time."""
        self.is_draining = True
        deadline_s = time.monotonic() + timeout_s
        while self.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        return not self.num_open

    def sample(self) -> None:
        """Observes this process, and the engine's latest step if it is another one than before."""
        if self.metrics is None:
            return
        self.metrics.count_cpu()
        stats = self.client.stats
        if stats.step != self._last_step:
            self._last_step = stats.step
            self.metrics.on_iteration(stats.iteration_tokens)


async def off_loop[**P, R](
    raw: bytes, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Runs `work` here if the body `raw` it is about is small, else in a thread.

    A small grammar may take long to check.
    """
    if len(raw) <= INLINE_BODY_BYTES and not any(field in raw for field in GRAMMAR_FIELDS):
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
