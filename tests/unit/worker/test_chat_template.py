from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from baton.errors import ConfigError, InvalidRequestError
from baton.testing.clocks import ManualClock
from baton.tokenizer.chat_template import ChatTemplate, TemplateMessage, load_chat_template
from baton.tokenizer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [TemplateMessage("user", "hello")]


def render(source: str, **variables: str | bool) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, ManualClock()).render(HELLO, variables)


def write(folder: Path, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_blocks_are_trimmed_as_template_authors_expect() -> None:
    source = "{{ bos_token }}\n{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n"
    assert render(source + "  {% endif %}\n{% endfor %}\nend") == "<s>\nhello\nend"


def test_special_tokens_may_be_objects_and_templates_a_named_list(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{eos_token}}"},
    ]
    write(tmp_path, eos_token={"content": "</s>", "special": True}, chat_template=named)
    template = load_chat_template(tmp_path, ManualClock())
    assert template is not None
    assert template.render(HELLO, {}) == "</s>"


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    write(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_chat_template(tmp_path, ManualClock())
    assert template is not None
    assert template.render(HELLO, {}) == "file"


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, ManualClock()) is None


def test_what_templates_of_known_models_use_is_there() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{{ {'ö': [1]} | tojson }}") == '{"ö": [1]}'
    assert render("{{ {'ö': 1} | tojson(ensure_ascii=True) }}") == r'{"\u00f6": 1}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}") == '{"b":1,"a":2}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}") == '{"a": 2, "b": 1}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == "2027"
    assert render("{{ 'on' if enable_thinking else 'off' }}", enable_thinking=True) == "on"


def test_a_client_cannot_replace_messages_or_special_tokens() -> None:
    got = render("{{ bos_token }}{{ messages[0].content }}", bos_token="<x>", messages="no")
    assert got == "<s>hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('system must come first') }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 10) | list }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses the messages") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_is_the_operators_error(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        load_chat_template(tmp_path, ManualClock())


def test_broken_model_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_chat_template(tmp_path, ManualClock())
