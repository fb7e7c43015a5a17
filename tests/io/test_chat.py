"""Chat templates: rendering, what a template may do, and whose mistake a failure is."""

import re
from typing import Any

import pytest

from polyjax.core.errors import ConfigError, RequestError
from polyjax.io.chat import ChatTemplate
from polyjax.io.files import open_model
from tests.goldens import ROOT, real_golden

ROLES = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_real_template_gives_the_tokens_of_transformers() -> None:
    files = open_model(None)
    tokenizer = files.load_tokenizer()
    assert files.chat_template is not None
    template = ChatTemplate(files.chat_template, tokenizer.special_tokens)
    text = template.render([{"role": "user", "content": "What is the capital of France?"}])
    assert tokenizer.encode(text, add_special_tokens=False) == real_golden("smollm2").prompt(0)


def test_tiny_template_uses_special_tokens_and_the_generation_prompt() -> None:
    files = open_model(ROOT / "llama" / "gqa")
    assert files.chat_template is not None
    template = ChatTemplate(files.chat_template, files.load_tokenizer().special_tokens)
    body = "<|begin|><|turn|>user\nHi<|end|>"
    assert template.render(USER) == body + "<|turn|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == body


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"


def test_extras_that_hugging_face_templates_use() -> None:
    assert render("{{ ['é', '<', \"'\"] | tojson }}") == '["é", "<", "\'"]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% generation %}said{% endgeneration %}") == "said"
    assert render("{{ bos_token }}{{ unk_token is defined }}") == "<s>False"


def test_tools_and_variables_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render("{{ tools[0].function.name }}", tools=tools) == "f"
    assert render("{{ tools is none }}") == "True"
    assert render("{{ enable_thinking }}", variables={"enable_thinking": False}) == "False"


def test_text_parts_are_joined_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(ROLES, [{"role": "user", "content": parts}]) == "[user]ab"


def test_messages_are_not_changed() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render(ROLES, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(RequestError):
        render("{% set _ = messages.append(1) %}")


# Going on with the last message


def test_continued_message_ends_the_prompt() -> None:
    messages = [*USER, {"role": "assistant", "content": "Hi, I am "}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(ROLES + "<end>", messages, **options) == "[user]Hi[assistant]Hi, I am "
    trimmed = ROLES.replace("m['content']", "m['content'] | trim") + "<end>"
    assert render(trimmed, messages, **options) == "[user]Hi[assistant]Hi, I am"
    with pytest.raises(RequestError, match="cannot be continued"):
        render(ROLES.replace("m['content']", "m['content'] | upper"), messages, **options)
    with pytest.raises(RequestError, match="last message with text"):
        render(ROLES, [{"role": "assistant", "content": " "}], **options)
    with pytest.raises(RequestError, match="exclude each other"):
        render(ROLES, messages, continue_final_message=True)


# Whose mistake


def test_template_that_does_not_parse_is_the_operators() -> None:
    with pytest.raises(ConfigError, match=r"line 2.*--chat_template"):
        ChatTemplate("\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5]['role'] }}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_template_that_refuses_or_fails_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages" and caught.value.status == 400


def test_a_templates_own_message_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_format_strings_do_not_lead_to_attributes() -> None:
    assert render("{{ '{0.__class__}'.format(1) }}") == ""
    assert render("{{ '{0.real}'.format(1) }}") == "1"


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(RequestError, match="messages") as caught:
        render(ROLES, variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


# Tools


@pytest.mark.parametrize(
    ("source", "takes_tools"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}", True),
        ("{% for tool in tools %}{{ tool.function.name }}{% endfor %}", True),
        ("{{ messages[0].tools }} {{ xml_tools }} tools {# tools #}", False),
        ("{% set tools = [] %}", False),
        (ROLES, False),
    ],
)
def test_whether_a_template_takes_tools(source: str, takes_tools: bool) -> None:
    assert ChatTemplate(source).takes_tools is takes_tools


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{{ arguments | tojson }}", '{"a": "é", "b": [1]}'),
        ("{{ arguments }}", '{"a": "é", "b": [1]}'),
        ("{{ '<' + arguments + '>' }}", '<{"a": "é", "b": [1]}>'),
        ("{{ '<' ~ arguments ~ '>' }}", '<{"a": "é", "b": [1]}>'),
        ("{% for name, value in arguments | items %}{{ name }}={{ value }} {% endfor %}", None),
        ("{% for name in arguments %}{{ name }}={{ arguments[name] }} {% endfor %}", None),
        ("{{ arguments is mapping }} {{ arguments is string }}", "True False"),
    ],
)
def test_arguments_of_calls_as_templates_read_them(expression: str, expected: str | None) -> None:
    source = "{% set arguments = messages[1].tool_calls[0].function.arguments %}" + expression
    messages = called('{"a": "\\u00e9", "b": [1]}')
    assert render(source, messages) == (expected or "a=é b=[1] ")
    assert messages == called('{"a": "\\u00e9", "b": [1]}')  # unchanged


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "none of it"])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert render(source, called(arguments)) == arguments


def test_empty_arguments_are_an_empty_mapping() -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert render(source, called("")) == "{}"
