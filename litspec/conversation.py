"""Turns a conversation into the text that the target reads, by its prompt style or chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from litgpt.prompts import PromptStyle, has_prompt_style

from litspec.errors import InputError

Message = Mapping[str, str]
_ROLES = ("system", "user", "assistant")


class Turns:
    """Joins the turns of a conversation into one text.

    Args:
        checkpoint_dir: The target's folder.
        style: Its prompt style.

    Attributes:
        kind: What joins the turns. "style": the prompt style, if it accepts a list of messages. "template": the
            folder's chat template, rendered as by Hugging Face's `apply_chat_template`, unless the folder's
            `prompt_style.yaml` names a style that formats the first prompt differently. "text": concatenation, as the
            style adds nothing to a prompt; prompts and answers are one text. "single": nothing; each prompt is
            independent of earlier turns.
    """

    def __init__(self, checkpoint_dir: Path, style: PromptStyle) -> None:
        self._dir = checkpoint_dir
        self._style = style
        self._template: str | None = None
        self._names: dict[str, str] = {}
        self.kind: Literal["style", "template", "text", "single"] = "single"
        if "list[" in str(inspect.signature(style.apply).parameters["prompt"].annotation):
            self.kind = "style"
            return
        self._template, self._names = _read_template(checkpoint_dir)
        if self._template is not None and (not has_prompt_style(checkpoint_dir) or self._agree()):
            self.kind = "template"
        elif style.apply("a") == "a":
            self.kind = "text"

    def _agree(self) -> bool:
        """Whether template and style give the same text for one prompt.

        A model that was fine-tuned with LitGPT has the style of its training in `prompt_style.yaml`, beside the chat
        template of its base model.
        """
        try:
            rendered = self._render_template([{"role": "user", "content": "a"}], None)
        except InputError:
            return False
        bos = self._names.get("bos_token", "")
        return rendered.removeprefix(bos) == self._style.apply("a").removeprefix(bos)

    @property
    def keeps_history(self) -> bool:
        """Whether the target reads earlier turns."""
        return self.kind != "single"

    def describe(self) -> str:
        """How the turns are joined, as a sentence."""
        name = type(self._style).__name__
        return {
            "style": f"Turns are joined by the prompt style {name}.",
            "template": "Turns are joined by the checkpoint's chat template.",
            "text": "The checkpoint's prompts have no format, so prompts and answers are one text.",
            "single": f"The prompt style {name} has no turns, and the checkpoint has no chat template that agrees "
            "with it; each prompt is independent of earlier turns.",
        }[self.kind]

    def render(self, messages: Sequence[Message], sys_prompt: str | None = None) -> str:
        """The text that the target reads, up to where the next answer begins.

        Args:
            messages: {"role": "user" or "assistant", "content": text}, alternating, the last from the user. A message
                with the role "system" may come first.
            sys_prompt: A system prompt, used if the messages have none.

        Raises:
            InputError: The messages are not a conversation, or the chat template is invalid or rejects them.
        """
        _check(messages)
        if messages[0]["role"] == "system":
            sys_prompt, messages = messages[0]["content"], messages[1:]
        if self.kind == "template":
            return self._render_template(messages, sys_prompt)
        if self.kind == "text":
            return "".join(
                ("\n" if i and each["role"] == "user" else "") + each["content"] for i, each in enumerate(messages)
            )
        # The first turn gives the same text as `generate` uses for the prompt.
        prompt: Any = list(messages) if self.kind == "style" and len(messages) > 1 else messages[-1]["content"]
        return str(self._style.apply(prompt, sys_prompt=sys_prompt))

    def _render_template(self, messages: Sequence[Message], sys_prompt: str | None) -> str:
        system = [{"role": "system", "content": sys_prompt}] if sys_prompt else []
        # Settings, globals and filters as in Hugging Face's `apply_chat_template`, for which templates are written.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            template = environment.from_string(self._template or "")
            return template.render(
                messages=[*system, *map(dict, messages)],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise InputError(f"The chat template of {str(self._dir)!r} cannot be used: {reason}.") from error


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InputError('messages must be a list such as [{"role": "user", "content": "Hello"}].')
    for i, each in enumerate(messages):
        if not isinstance(each, Mapping) or set(each) != {"role", "content"}:
            raise InputError(f"Message {i} must have role and content and nothing else, got {str(each)[:60]!r}.")
        if not isinstance(each["content"], str):
            raise InputError(f"Message {i}'s content must be a string, got a {type(each['content']).__name__}.")
    roles = [each["role"] for each in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    expected = [_ROLES[1 + i % 2] for i in range(len(turns))]
    if turns != expected or len(turns) % 2 == 0:
        raise InputError(
            f"Roles must alternate (user, assistant, user and so on) and end with user; one system message may come "
            f"first; got {', '.join(map(str, roles))}."
        )


def _read_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template, from its own file or from `tokenizer_config.json`, and the special tokens it may name."""
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        own = folder / "chat_template.jinja"
        template = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"The chat template of {str(folder)!r} cannot be read: {error}.") from error
    if isinstance(template, list):  # several templates, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[name] = token
    return template if isinstance(template, str) and template else None, names


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own filter escapes HTML
