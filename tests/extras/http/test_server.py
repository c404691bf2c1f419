"""The server by a real client on real ranks: texts, streams, refusals, clients that go away, ranks that die."""

import asyncio
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

import minipar
from minipar.cli import main
from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.extras.http import server
from minipar.extras.http.app import Served, make_app
from minipar.extras.http.bodies import read_body
from minipar.extras.http.choices import HTTP
from minipar.extras.http.live import Desk
from minipar.extras.http.server import HttpService, bound_socket, longest_text
from minipar.inference import Engine, Options, Request
from minipar.inference.serve import MeshSizes, serve_file
from minipar.model import Transformer
from minipar.support.errors import RankError
from minipar.train import train
from minipar.train.data.tokenizer import Bytes
from tests.extras.http.clients import wait_until

openai = pytest.importorskip("openai")

LONGEST = 1500
OPTIONS = Options(block_size=8, num_blocks=400, token_budget=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=LONGEST)
    config = TrainConfig(
        model=model, batch_size=2, seq_len=16, steps=1, verify_steps=0, trace_steps=0, warmup=0, dtype="float64",
        checkpoint_every=1, out=tmp_path_factory.mktemp("run"),
    )  # fmt: skip
    train(config)
    return config.folder


@contextmanager
def serving(folder, **how):
    """A service, answering in a thread; both are ended."""
    with HttpService(folder, OPTIONS, **how) as service:
        thread = threading.Thread(target=service.serve)
        thread.start()
        try:
            yield service
        finally:
            service.stop()
            thread.join()


@contextmanager
def client_of(service):
    with openai.OpenAI(
        base_url=f"{service.address}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:
        yield client


def bodies():
    return [
        dict(
            prompt=f"{'The very same beginning ' * (i % 2)}{i}", max_tokens=5 + 3 * (i % 4),
            temperature=[0, 0.8, 5.0][i % 3], top_p=[1, 0.9][i % 2], seed=i,
        )
        for i in range(12)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def in_a_file(folder, tmp_path_factory):
    """The texts of these requests in a file."""
    path = tmp_path_factory.mktemp("file") / "requests.jsonl"
    lines = [{"max_new_tokens": body["max_tokens"], **body} for body in bodies()]
    for line in lines:
        del line["max_tokens"]
    path.write_text("\n".join(map(json.dumps, lines)))
    service = serve_file(folder, path, path.parent, OPTIONS)
    return [Bytes().decode(result.tokens) for result in service.results]


def streamed(client, name, body):
    """The text of a stream, piece by piece."""
    with client.completions.create(model=name, stream=True, **body) as stream:
        return "".join(chunk.choices[0].text for chunk in stream)


def whole(client, name, body):
    answer = client.completions.create(model=name, **body)
    assert answer.usage.completion_tokens == body["max_tokens"]
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_text_over_http_is_the_text_of_a_file(folder, in_a_file, tp):
    with serving(folder, sizes=MeshSizes(tp=tp)) as service, client_of(service) as client:

        def ask(i):
            return (streamed if i % 2 else whole)(client, service.name, bodies()[i % 12])

        with ThreadPoolExecutor(6) as clients:
            texts = list(clients.map(ask, range(12)))
        assert texts == in_a_file
        assert [model.id for model in client.models.list()] == [service.name]
        assert httpx.get(f"{service.address}/health").json() == {"status": "ok"}
        chat_and_stop(client, service.name)
        page = httpx.get(f"{service.address}/metrics").text
    metrics = read_metrics(page)
    assert metrics["minipar_first_token_seconds_count"] >= 12
    assert metrics['minipar_requests_total{outcome="finished"}'] >= 12
    assert metrics["minipar_written_tokens_total"] >= sum(body["max_tokens"] for body in bodies())
    assert metrics["minipar_requests_open"] == 0
    assert metrics['minipar_requests_total{outcome="cancelled"}'] == 0, (
        "a text that ended at a stop was cancelled"
    )


def chat_and_stop(client, name):
    """A chat is a completion of its template; a stop text ends it, streamed or not."""
    say = [{"role": "user", "content": "Hi"}]
    how = dict(model=name, seed=5, temperature=5.0, max_tokens=20)
    text = client.completions.create(prompt="user: Hi\nassistant: ", **how).choices[0].text
    answer = client.chat.completions.create(messages=say, **how)
    assert answer.choices[0].message.content == text
    stop = next(text[i : i + 2] for i in range(1, 20) if "\N{REPLACEMENT CHARACTER}" not in text[i : i + 2])
    until = text[: text.index(stop)]
    answer = client.chat.completions.create(messages=say, stop=stop, **how)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (until, "stop")
    with client.chat.completions.create(
        messages=say, stop=[stop], stream=True, stream_options={"include_usage": True}, **how
    ) as stream:
        *pieces, last, used = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == until
    assert last.choices[0].finish_reason == "stop"
    assert used.usage.prompt_tokens == len("user: Hi\nassistant: ")
    for body, field in [(dict(logprobs=True), "logprobs"), (dict(temperature=-1), "temperature")]:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(messages=say, **{**how, **body})
        assert (error.value.status_code, error.value.param) == (400, field)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=f"exceed the maximum context length of {LONGEST}"):
            client.completions.create(prompt="x", stream=stream, **{**how, "max_tokens": LONGEST})
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' is not served"):
        client.completions.create(prompt="x", **{**how, "model": "gpt"})


def read_metrics(page):
    """Samples of a page in Prometheus's text format, by name and labels; every line is a sample or a comment."""
    samples = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("# ")]
    return {name: float(value) for name, value in samples}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(folder, stream):
    body = json.dumps(dict(prompt="x", max_tokens=LONGEST - 1, stream=stream))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(folder) as service:
        desk = service.desk
        with socket.create_connection(service._socket.getsockname()[:2]) as client:
            client.sendall((head + body).encode())
            if stream:
                assert client.recv(15) == b"HTTP/1.1 200 OK"
            else:
                wait_until(lambda: desk.progress.num_running == 1)
        wait_until(lambda: desk.totals.cancelled + desk.totals.finished == 1 and desk.progress.is_idle)
        assert desk.totals.cancelled == 1, "it was served to its end"
        assert desk.progress.num_blocks == desk.num_open == 0


def test_a_full_queue_is_refused():
    desk = Desk(max_open=1)
    desk.submit(Request((1,), 1), lambda heard: None)
    app = make_app(Served("x", 64, Bytes(), desk))

    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            health = await client.get("/health")
            broken = await client.post("/v1/completions", content="{")
            return await client.post("/v1/completions", json=dict(prompt="x")), health, broken

    answer, health, broken = asyncio.run(ask())
    assert answer.status_code == 429
    assert answer.json()["error"]["message"] == "1 requests are open, and no more are taken; try again later"
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    assert broken.status_code == 400
    assert "the body is not JSON" in broken.json()["error"]["message"]
    assert desk.totals.turned_away == 1


def test_a_body_that_is_nested_too_deeply_is_refused():
    app = make_app(Served("x", 64, Bytes(), Desk(max_open=1)))

    async def ask(content):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/v1/completions", content=content)

    answer = asyncio.run(ask("[" * 100_000))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body's values are nested too deeply"


def test_a_client_that_goes_away_within_its_body_is_no_error():
    desk, sent = Desk(max_open=1), []
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    async def send(message):
        sent.append(message)

    scope = dict(type="http", method="POST", path="/v1/completions", query_string=b"", headers=[])
    asyncio.run(make_app(Served("x", 64, Bytes(), desk))(scope, receive, send))
    assert sent[0]["status"] == 499
    assert desk.num_open == 0


def test_a_chat_without_a_limit_fits_a_cache_below_the_context():
    config, codec = ModelConfig(dim=16, num_layers=1, num_heads=2, max_seq_len=256), Bytes()
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for blocks, longest in [(8, 8 * 16 + 1), (16, 256)]:
        options = Options(num_blocks=blocks)
        request = read_body("chat", body, "x", longest_text(config, options), codec).request
        assert request.max_tokens == longest
        assert Engine(Transformer(config), options).run([request])[0].error is None


def test_when_a_rank_dies_clients_are_told_and_the_service_ends(folder, monkeypatch):
    def serve_and_die(world, *args, serve_rank=server.serve_rank):
        def asks(progress, ask=world.ask):
            if sum(map(len, progress.written.values())) and progress.num_blocks > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return ask(progress)

        world.ask = asks
        return serve_rank(world, *args)

    monkeypatch.setattr(server, "serve_rank", serve_and_die)
    with (
        pytest.raises(RankError, match="SIGKILL"),
        serving(folder) as service,
        client_of(service) as client,
        pytest.raises(openai.APIError, match="the ranks have ended"),
    ):
        streamed(client, service.name, dict(prompt="x", max_tokens=100))
    assert minipar.run(lambda world: world.rank, world_size=1) == [0]


def test_a_second_interrupt_logs_nothing(folder, caplog):
    body = dict(prompt="ab", max_tokens=LONGEST - 2, stream=True)
    with (
        serving(folder) as service,
        httpx.stream("POST", f"{service.address}/v1/completions", json=body, timeout=600) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        service._server.force_exit = True  # what uvicorn's handler does at the second signal
        service.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_an_address_that_cannot_be_had_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"port {port} of 127.0.0.1 cannot be used: Address already in use;"
        ):
            bound_socket("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"host=no\.such\.host\.invalid has no address; use 127\.0\.0\.1"):
        bound_socket("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "serve needs --requests FILE or --http, and not both"),
        ("--http --requests x", "serve needs --requests FILE or --http, and not both"),
        ("--http 70000", "http=70000; use one port from 1 to 65535, or 0 for any that is free"),
        ("--http 1 2", "http=1 2; use one port"),
        ("--http --port 8765", "Unrecognized options: --port, 8765; did you mean --http 8765?"),
        ("--port=8765", "did you mean --http 8765?"),
        ("--http --port", "did you mean --http?"),
        ("--http --max-open 0", "max_open=0; use a whole number of 1 or more"),
    ],
)
def test_words_that_ask_for_no_service_are_one_line(folder, words, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(folder), *words.split()])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_the_choice_of_the_extra_serves():
    assert HTTP.load() is server.serve_http
