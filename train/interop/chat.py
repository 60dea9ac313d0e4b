"""Chat templates: messages become the ids that a chat model was trained on.

A template is a program in Jinja that came with the checkpoint. It runs in Jinja's sandbox, which
gives it no attributes that could reach the interpreter and lets it change nothing.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, DataError
from ..data.tokenizer import Tokenizer
from .hf_config import read_json
from .tokenizer_files import SETTINGS

TEMPLATE = "chat_template.jinja"
ROLES = ("system", "user", "assistant", "tool")
MARK = "\U0010fffe"  # a code point that no text contains


class ChatTemplate:
    """A template with the names of the special tokens that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: Path | str):
        """Compiles the template.

        Args:
            source: in Jinja.
            tokens: such as `bos_token` -> its text.
            where: it came from, for messages.

        Raises:
            DataError: it is no template.
        """
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self._where, self._tokens = where, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"{where}: the chat template is wrong: {_line(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The text that the messages become.

        Args:
            messages: each with `role` and `content`.
            answer: begin the assistant's answer.

        Raises:
            ConfigError: the messages are malformed, or the template refuses them.
        """
        import jinja2

        for number, message in enumerate(messages, start=1):
            if not isinstance(message.get("content"), str) or message.get("role") not in ROLES:
                raise ConfigError(
                    f"message {number}: got {dict(message)!r}, want a role of {', '.join(ROLES)} "
                    "and a content"
                )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{self._where}: the chat template refuses these messages: {_line(error)}"
            ) from None

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, answer: bool = True
    ) -> NDArray[np.int32]:
        """The ids that the messages become.

        Names of special tokens are such where the template wrote them; in a message they stay
        plain text, so that what a user types never becomes a control token.

        Raises:
            ConfigError: see `render`.
        """
        names = sorted(tokenizer.special_tokens, key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, names)) or "(?!)")

        def marked(message: Mapping[str, Any]) -> dict[str, Any]:
            content = message.get("content")
            if not isinstance(content, str):
                return dict(message)
            plain = content.replace(MARK, "")
            return {**message, "content": special.sub(lambda m: m[0][0] + MARK + m[0][1:], plain)}

        text = self.render([marked(message) for message in messages], answer=answer)
        found = special.findall(text)
        plain = tokenizer.encode_between([part.replace(MARK, "") for part in special.split(text)])
        ids = [plain[0]]
        for name, after in zip(found, plain[1:], strict=True):
            ids += [np.array([tokenizer.special_tokens[name]], np.int32), after]
        return np.concatenate(ids)


def chat_template_of(folder: Path) -> ChatTemplate:
    """The template of a published checkpoint, from its own file or its tokenizer settings.

    Args:
        folder: with the published files; of a run, `source/`.

    Raises:
        ConfigError: there is none.
        DataError: it is no template.
    """
    path, settings_path = folder / TEMPLATE, folder / SETTINGS
    settings = read_json(settings_path) if settings_path.exists() else {}
    source: Any = settings.get("chat_template")
    where = settings_path
    if path.exists():
        source, where = path.read_text(encoding="utf-8"), path
    if isinstance(source, list):  # several by name, as in Command R
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{folder}: no chat template, so it is no chat model: leave out --chat, or import a "
            "checkpoint whose tokenizer_config.json or chat_template.jinja has one"
        )
    tokens = {}
    for key, value in settings.items():
        value = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return ChatTemplate(source, tokens, where)


def _to_json(value: Any, **options: Any) -> str:
    """As plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
