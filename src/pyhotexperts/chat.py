"""The prompts of chats: a model's template, and the tokens of a conversation that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyhotexperts.chat_template import Message, render
from pyhotexperts.errors import UnavailableError
from pyhotexperts.results import ModelInfo
from pyhotexperts.vocab import Vocab


class ChatPrompts:
    """Makes the prompts of a model's chats.

    Parameters
    ----------
    template
        A Jinja template, None = the one in the model's file.
    """

    def __init__(self, path: str, info: ModelInfo, vocab: Vocab, template: str | None) -> None:
        self._path = path
        self._info = info
        self._vocab = vocab
        self._template = template
        self._last: tuple[str, list[int]] = ("", [])  # the last prompt, and its tokens

    @property
    def template(self) -> str | None:
        """The template in use, None = there is none."""
        return self._template or self._vocab.metadata("tokenizer.chat_template")

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, template_options: Mapping[str, Any] | None
    ) -> str:
        """What the template makes of messages. Parameters and errors as of `Model.chat`."""
        template = self.template
        if template is None:
            raise UnavailableError(
                f"{self._path} has no chat template: if it is no chat model, use `generate`, else give one with "
                "Model(chat_template=...), on the command line --chat-template-file"
            )
        variables = {
            "add_generation_prompt": True,
            "bos_token": self._vocab.name(self._info.token_bos),
            "eos_token": self._vocab.name(self._info.token_eos),
            "tools": tools,
            **(template_options or {}),
        }
        return render(template, messages, variables)

    def ids(self, text: str, known: Sequence[int]) -> list[int]:
        """Token ids of a prompt: as far as it repeats the last one and its answer, the tokens of those.

        Text that a model wrote is not always made of the tokens that the tokenizer would choose for it.

        Parameters
        ----------
        text
            What `text` returned.
        known
            The tokens in the model's context.
        """
        ids = self._vocab.chat_prompt(text)
        last_text, last_ids = self._last
        if last_ids and text.startswith(last_text) and known[: len(last_ids)] == last_ids:
            ids = last_ids + self._vocab.continued(known[len(last_ids) :], text[len(last_text) :])
        self._last = (text, ids)
        return ids
