"""What a body may ask for, what is refused by which name, and where a streamed text may be cut."""

import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar.extras.http.bodies import FIELDS, NEUTRAL, BadRequest, read_body
from minipar.inference import Request
from minipar.train.data.tokenizer import Bytes, Ids

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TEMPLATE = "system: Be brief.\nuser: Hi\nassistant: "


def read(shape="completions", codec=None, **body):
    return read_body(shape, body, "dp4", 64, codec or Bytes())


def test_what_is_left_out_is_as_in_a_file():
    assert read(prompt="ab").request == Request((97, 98), 16)
    assert read(prompt="ab", temperature=None, seed=None).request == Request((97, 98), 16)
    chat = read("chat", messages=HELLO)
    assert chat.request == Request(tuple(TEMPLATE.encode()), 64 - len(TEMPLATE))


def test_what_is_given_is_kept():
    asked = read(
        model="dp4", prompt=[1, 2], max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop="x", n=1, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert asked.request == Request((1, 2), 3, temperature=0.5, top_p=0.9, seed=7)
    assert (asked.stop, asked.stream, asked.include_usage) == (("x",), True, True)
    assert read("chat", messages=HELLO, max_completion_tokens=5).request.max_new_tokens == 5


@pytest.mark.parametrize(
    ("shape", "body", "field", "says"),
    [
        ("completions", dict(), "prompt", "prompt is missing"),
        ("completions", dict(prompt=""), "prompt", "prompt is empty"),
        ("completions", dict(prompt=["a", "b"]), "prompt", "neither a text nor a list of token ids"),
        ("completions", dict(prompt=[["a"]]), "prompt", "neither a text nor a list of token ids"),
        ("completions", dict(prompt=[True]), "prompt", "neither a text nor a list of token ids"),
        ("completions", dict(prompt="a", n=2), "n", "n=2 is not supported; use null or 1"),
        ("completions", dict(prompt="a", n=True), "n", "n=True is not supported"),
        ("completions", dict(prompt="a", logprobs=1), "logprobs", "logprobs=1 is not supported; use null or false"),
        ("completions", dict(prompt="a", max_token=1), "max_token", "did you mean max_tokens?"),
        ("completions", dict(prompt="a", max_tokens=0), "max_tokens", "max_tokens=0; use a whole number"),
        ("completions", dict(prompt="a", max_tokens=True), "max_tokens", "max_tokens=True; use a whole number"),
        ("completions", dict(prompt="a", temperature=-1), "temperature", "temperature=-1; use a finite number"),
        ("completions", dict(prompt="a", top_p="0.5"), "top_p", "top_p='0.5'; use a number"),
        ("completions", dict(prompt="a", seed=0.5), "seed", "seed=0.5; use a whole number"),
        ("completions", dict(prompt="a", stop=["x", ""]), "stop", "stop=['x', '']; use a text, or a list"),
        ("completions", dict(prompt="a", seed=True), "seed", "seed=True; use a whole number"),
        ("completions", dict(prompt="a", temperature=True), "temperature", "temperature=True; use a finite number"),
        ("completions", dict(prompt="a", top_p=True), "top_p", "top_p=True; use a number"),
        ("completions", dict(prompt="a", stop=list("abcde")), "stop", "at most 4 texts"),
        ("completions", dict(prompt="a", stop="x" * 1001), "stop", "each of 1 to 1000 characters"),
        ("completions", dict(prompt="a", stream=1), "stream", "stream=1; use true or false"),
        ("completions", dict(prompt="a", stream_options=1), "stream_options", "use an object with include_usage"),
        ("completions", dict(prompt="a", stream_options={"x": 1}), "stream_options.x", "is not supported"),
        ("completions", dict(prompt="a", stream_options={"include_usage": 1}), "stream_options.include_usage", "use true"),
        ("completions", dict(prompt="a", messages=[]), "messages", "'messages' is not supported"),
        ("chat", dict(messages=[]), "messages", "no list with at least one message"),
        ("chat", dict(messages=[{"role": "tool", "content": ""}]), "messages[0].role", "role='tool'; use system,"),
        ("chat", dict(messages=[*HELLO, {"role": "user", "content": [1]}]), "messages[2].content", "is no text"),
        ("chat", dict(messages=[{**HELLO[0], "name": "x"}]), "messages[0].name", "is not supported"),
        ("chat", dict(messages=[{"role": "user", "content": None}]), "messages[0].content", "is no text"),
        ("chat", dict(messages=[{"role": "user", "content": []}]), "messages[0].content", "is no text"),
        ("chat", dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
         "messages[0].content[0].type", "'image_url' is not supported"),
        ("chat", dict(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text", "is no"),
        ("chat", dict(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages[0].tool_calls",
         "is not supported; use null or []"),
        ("chat", dict(messages=HELLO, tools=[{}]), "tools", "tools=[{}] is not supported; use null or []"),
        ("chat", dict(messages=HELLO, user=1), "user", "user=1 is not supported; use null or a text"),
        ("chat", dict(messages=HELLO, audio={}), "audio", "audio={} is not supported; use null"),
        ("chat", dict(messages=HELLO, max_tokens=1, max_completion_tokens=2), "max_tokens", "are the same"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(shape, body, field, says):
    with pytest.raises(BadRequest) as error:
        read(shape, **body)
    told = error.value.body["error"]
    assert (told["param"], told["type"], error.value.status) == (field, "invalid_request_error", 400)
    assert says in told["message"]
    assert "\n" not in told["message"]


# A value that asks for nothing, and one that asks for something, of what OpenAI's endpoints have and this server has not.
ASKS = {
    "n": (1, 2),
    "best_of": (1, 2),
    "echo": (False, True),
    "suffix": ("", "x"),
    "logprobs": (False, True),
    "top_logprobs": (0, 1),
    "presence_penalty": (0, 0.5),
    "frequency_penalty": (0.0, -1),
    "logit_bias": ({}, {"5": 1}),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "modalities": (["text"], ["text", "audio"]),
    "tools": ([], [{"type": "function"}]),
    "tool_choice": ("auto", "required"),
    "parallel_tool_calls": (True, 1),
    "functions": ([], [{"name": "x"}]),
    "function_call": ("none", {"name": "x"}),
    "reasoning_effort": ("none", "high"),
    "verbosity": ("medium", "low"),
    "service_tier": ("auto", "priority"),
    "store": (False, True),
    "metadata": ({"a": "b"}, "x"),
    "user": ("me", 1),
    "safety_identifier": ("me", 1),
    "prompt_cache_key": ("me", 1),
    "prompt_cache_retention": ("in_memory", "24h"),
    "prompt_cache_options": ({"mode": "implicit"}, {"mode": "explicit"}),
    "audio": (None, {"voice": "x"}),
    "moderation": (None, {"model": "x"}),
    "prediction": (None, {"type": "content"}),
    "web_search_options": (None, {}),
    "repetition_penalty": (1.0, 1.1),
}
LEAST = {"completions": dict(prompt="ab"), "chat": dict(messages=HELLO)}


@pytest.mark.parametrize("shape", FIELDS)
def test_each_field_of_the_client_is_served_or_known(shape):
    types = pytest.importorskip("openai.types")
    params = {"chat": types.chat.completion_create_params, "completions": types.completion_create_params}[
        shape
    ]
    fields = {*typing.get_type_hints(params.CompletionCreateParamsNonStreaming), "stream"}
    assert fields - set(FIELDS[shape]) - set(NEUTRAL) == set()
    assert set(NEUTRAL) == set(ASKS)
    for name in fields - set(LEAST[shape]):
        assert read(shape, **LEAST[shape], **{name: None}) == read(shape, **LEAST[shape])


@given(shape=st.sampled_from(list(FIELDS)), data=st.data())
def test_what_asks_for_nothing_changes_nothing(shape, data):
    names = data.draw(st.lists(st.sampled_from(list(ASKS)), unique=True))
    nothing = {name: data.draw(st.sampled_from([None, ASKS[name][0]])) for name in names}
    assert read(shape, **LEAST[shape], **nothing) == read(shape, **LEAST[shape])
    asks = data.draw(st.sampled_from(list(ASKS)))
    with pytest.raises(BadRequest) as error:
        read(shape, **LEAST[shape], **nothing | {asks: ASKS[asks][1]})
    assert (error.value.param, error.value.status) == (asks, 400)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(
    shape=st.sampled_from(list(FIELDS)),
    body=st.dictionaries(st.sampled_from([*NEUTRAL, *sum(FIELDS.values(), ()), "role", "x\n"]), VALUES),
    messages=st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "type", "name"]), VALUES | st.just("user"))
    ),
)
def test_any_body_is_read_or_refused_in_one_line(shape, body, messages):
    for values in (body, {**body, "messages": messages}, {**LEAST[shape], **body}):
        refused = None
        try:
            asked = read(shape, **values)
        except BadRequest as error:
            refused = error
        if refused is None:
            assert asked.request.max_tokens <= 64
            continue
        assert len(str(refused)) < 1100
        assert "\n" not in str(refused)
        assert str(refused.body).encode()
        assert "missing" in str(refused) or re.split(r"[.\[]", refused.param)[0] in values


def test_content_may_be_parts_and_a_prompt_a_list_of_one():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    said = {
        "role": "user",
        "content": parts,
        "type": "text",
        "tool_calls": None,
        "refusal": None,
        "annotations": [],
    }
    assert read("chat", messages=[HELLO[0], said]) == read("chat", messages=HELLO)
    assert read(prompt=["ab"]) == read(prompt=[[97, 98]]) == read(prompt=[97, 98]) == read(prompt="ab")


@pytest.mark.parametrize("shape", FIELDS)
def test_a_text_may_fill_the_context_and_no_more(shape):
    length = len(read(shape, **LEAST[shape]).request.prompt)
    assert read(shape, **LEAST[shape], max_tokens=64 - length).request.max_tokens == 64
    with pytest.raises(BadRequest, match="exceed the maximum context length of 64") as error:
        read(shape, **LEAST[shape], max_tokens=65 - length)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", next(iter(LEAST[shape])))
    assert read(prompt="x" * 48).request.max_tokens == 64
    assert read("chat", messages=[{"role": "user", "content": "x" * 45}]).request.max_new_tokens == 1
    for shape, body in [
        ("completions", dict(prompt="x" * 49)),
        ("chat", dict(messages=[{**HELLO[1], "content": "x" * 46}])),
    ]:
        with pytest.raises(BadRequest, match="exceed the maximum context length of 64"):
            read(shape, **body)


def test_a_name_that_cannot_be_encoded_is_escaped():
    for shape, body in [
        ("completions", {"prompt": "a", "\ud800": 1}),
        ("chat", dict(messages=[{**HELLO[0], "\ud800": 1}])),
    ]:
        with pytest.raises(BadRequest) as error:
            read(shape, **body)
        told = error.value.body["error"]
        assert told["param"].encode().endswith(rb"\ud800")
        assert rb"\ud800" in told["message"].encode()


def test_another_model_is_not_found():
    with pytest.raises(BadRequest, match="the model 'gpt' is not served; use 'dp4'") as error:
        read(prompt="a", model="gpt")
    assert (error.value.status, error.value.code) == (404, "model_not_found")


def test_a_prompt_must_be_ids_where_the_run_has_no_tokenizer():
    with pytest.raises(BadRequest, match="the run has no tokenizer; give token ids"):
        read(prompt="The ", codec=Ids())
    assert read(prompt="7 4", codec=Ids()).request.prompt == (7, 4)
