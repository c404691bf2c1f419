"""What a body may ask for, what is refused by which name, and where a streamed text may be cut."""

import pytest

from minipar.data.tokenizer import Bytes, Ids
from minipar.extras.http.bodies import BadRequest, read_body
from minipar.inference import Request

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
        ("completions", dict(prompt=["a"]), "prompt", "neither a text nor a list of token ids"),
        ("completions", dict(prompt="a", n=2), "n", "n=2; use 1"),
        ("completions", dict(prompt="a", logprobs=1), "logprobs", "'logprobs' is not supported; use prompt, model,"),
        ("completions", dict(prompt="a", max_tokens=0), "max_tokens", "max_tokens=0; use a whole number"),
        ("completions", dict(prompt="a", max_tokens=True), "max_tokens", "max_tokens=True; use a whole number"),
        ("completions", dict(prompt="a", temperature=-1), "temperature", "temperature=-1; use a finite number"),
        ("completions", dict(prompt="a", top_p="0.5"), "top_p", "top_p='0.5'; use a number"),
        ("completions", dict(prompt="a", seed=0.5), "seed", "seed=0.5; use a whole number"),
        ("completions", dict(prompt="a", stop=["x", ""]), "stop", "stop=['x', '']; use a text, or a list"),
        ("completions", dict(prompt="a", stop=list("abcde")), "stop", "at most 4 texts"),
        ("completions", dict(prompt="a", stream=1), "stream", "stream=1; use true or false"),
        ("completions", dict(prompt="a", stream_options={"x": 1}), "stream_options", "include_usage alone"),
        ("completions", dict(prompt="a", messages=[]), "messages", "'messages' is not supported"),
        ("chat", dict(messages=[]), "messages", "no list with at least one message"),
        ("chat", dict(messages=[{"role": "tool", "content": ""}]), "messages[0].role", "role='tool'; use system,"),
        ("chat", dict(messages=[*HELLO, {"role": "user", "content": [1]}]), "messages[2].content", "is no text"),
        ("chat", dict(messages=[{**HELLO[0], "name": "x"}]), "messages[0].name", "is not supported"),
        ("chat", dict(messages=HELLO, tools=[]), "tools", "'tools' is not supported"),
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


def test_a_text_that_is_no_list_of_ids_is_refused_where_ids_are_written():
    with pytest.raises(BadRequest, match="the run has no tokenizer; give token ids"):
        read(prompt="The ", codec=Ids())
    assert read(prompt="7 4", codec=Ids()).request.prompt == (7, 4)
