"""What may stand between a rank and its coordinator: nothing, a proxy, garbage, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

from kvaccord.errors import Invalid, NoVerdict, Refused, Unauthorized
from kvaccord.messages import Report
from tests.builders import lacking
from tests.fake_coordinator import REPORT, fake_coordinator
from worker_client import AsyncRendezvous, Rendezvous
from worker_client.causes import masked, masked_inputs
from worker_client.wire import tls_context


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith(("KVACCORD_", "TORCHELASTIC_", "SLURM_", "MASTER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def server():
    with fake_coordinator() as server:
        yield server


def start(url, **fields):
    with Rendezvous.join(url=url, engine="e", ranks=[0], **fields) as rdzv:
        rdzv.applied(built=rdzv.report(REPORT).entries)


# Nobody is there


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def no_verdict(url, said, *, patience_s=0.5, start=start):
    began_s = time.monotonic()
    with pytest.raises(NoVerdict, match=said) as silence:
        start(url, patience_s=patience_s)
    # A leave may be tried for 2 s more once the seat was taken.
    assert time.monotonic() - began_s < patience_s + 3.0
    assert str(silence.value).startswith(url)
    assert "tries" in str(silence.value)


def test_a_dead_coordinator_is_no_verdict():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    no_verdict(url, "refused")


def test_a_black_hole_is_no_verdict(address):
    no_verdict(address, "no answer within 0.5 s: ")


def test_a_host_without_a_name_is_no_verdict():
    no_verdict("http://no-such-host.invalid:8970", "ConnectError")


def start_awaited(url, **fields):
    asyncio.run(AsyncRendezvous.join(url=url, engine="e", ranks=[0], **fields))


BOTH = pytest.mark.parametrize("start", [start, start_awaited])


@pytest.fixture
def trickle():
    """Answers every connection with a few bytes, then one more every now and then, for ever."""
    ended = threading.Event()

    def answer(connection, first):
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(first)
            while not ended.wait(0.05):
                connection.sendall(b"x")

    def accept(listener, first):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection, first), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def begin(first):
            threading.Thread(target=accept, args=(listener, first), daemon=True).start()
            return f"http://127.0.0.1:{listener.getsockname()[1]}"

        yield begin
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


def calls():
    return [t for t in threading.enumerate() if t.name == "kvaccord-call"]


@BOTH
@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", "it took the call and sent no whole answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", "its answer had no end"),
    ],
)
def test_an_answer_that_trickles_does_not_outlast_patience_nor_leave_a_thread(
    trickle, start, first, said
):
    no_verdict(trickle(first), f"no answer within 0.5 s: {said}", start=start)
    until_s = time.monotonic() + 5.0
    while calls():
        assert time.monotonic() < until_s, "it is still being read"
        time.sleep(0.01)


@BOTH
def test_a_name_service_that_hangs_does_not_outlast_patience_nor_is_its_call_sent_later(
    server, monkeypatch, start
):
    found, look_up = threading.Event(), socket.getaddrinfo

    def hangs(*args, **fields):
        found.wait(20)
        return look_up("127.0.0.1", *args[1:], **fields)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    url = server.url.replace("127.0.0.1", "coordinator")
    no_verdict(url, "the host was not found or not reached", start=start)
    found.set()
    for call in calls():
        call.join(5.0)
    assert server.told == []


@pytest.mark.parametrize("status", [301, 308])
@pytest.mark.parametrize("word", ["join", "claim", "reports"])
def test_a_redirect_for_good_is_refused_at_once_and_names_where_to(server, word, status):
    server.answers[word] = (status, b"")
    server.headers[word] = {"Location": "https://kv.example/"}
    with pytest.raises(Refused, match=r"to https://kv\.example/, .* set KVACCORD_URL"):
        start(server.url)
    assert server.words().count(word) == 1


@pytest.mark.parametrize("word", ["join", "claim", "reports", "applied"])
@pytest.mark.parametrize(
    ("answer", "headers", "said"),
    [
        ((302, b""), {"Location": "http://127.0.0.1:9/in"}, "to http://127.0.0.1:9/in, .*_URL"),
        ((200, b"<html>"), {"Content-Type": "text/html"}, "a page of HTML"),
        ((200, b"\x00\xff"), {}, "garbage"),
        ((502, b"<html>"), {"Content-Type": "text/html"}, "answered 502 with a page of HTML"),
        ((503, b""), {}, "answered 503"),
    ],
)
def test_garbage_is_no_verdict_and_says_what_came(server, word, answer, headers, said):
    server.answers[word], server.headers[word] = answer, headers
    no_verdict(server.url, said)


# Proxies


@pytest.fixture
def proxies(monkeypatch, address):
    """Variables that point at a proxy which never answers."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, address)
        monkeypatch.setenv(name.upper(), address)


def test_proxy_variables_neither_break_nor_redirect_a_start(server, proxies):
    start(server.url)
    assert server.words() == ["join", "claim", "reports", "applied"]


def test_a_proxy_that_cannot_be_read_breaks_nothing(server, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "nonsense://[")
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent")
    start(server.url)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ALL_PROXY", "nonsense://["), ("ALL_PROXY", "socks5://127.0.0.1:1"), ("HTTP_PROXY", "a:b")],
)
def test_whoever_trusts_the_environment_hears_what_is_wrong_in_it(
    server, monkeypatch, variable, value
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid, match=r"a proxy variable cannot be used: .*leave trust_env off"):
        start(server.url, trust_env=True)
    assert server.told == []


def test_whoever_asks_for_it_goes_through_the_proxy(server, monkeypatch):
    with fake_coordinator() as proxy:  # a forward proxy is sent the whole address
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        start(server.url, trust_env=True)
    assert server.told == []
    assert proxy.words() == ["join", "claim", "reports", "applied"]


def test_a_session_behind_a_proxy_says_so_and_sends_beats(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_PROXIED", "1")
    monkeypatch.setattr("worker_client.session.BEAT_S", 0.2)
    with Rendezvous.join(url=server.url, engine="e", ranks=[0]) as rdzv:
        rdzv.phase("load", 3)
        time.sleep(1.5)
    beats = [body for word, _, body in server.told if word == "phase"]
    assert len(beats) >= 3
    assert beats[-1] == {"phase": "load", "progress": 3}


# Credentials


def test_the_access_token_goes_with_every_call_and_the_attempt_token_beside_it(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_TOKEN", "s3cr3t")
    start(server.url)
    assert {headers["authorization"] for _, headers, _ in server.told} == {"Bearer s3cr3t"}
    assert [h["kvaccord-attempt"] for w, h, _ in server.told if w == "session"] == ["t0k3n"]


def test_a_wrong_access_token_is_refused_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_TOKEN", "s3cr3t")
    server.answers["join"] = (401, {"code": "unauthorized", "detail": "an unknown token"})
    with pytest.raises(Unauthorized) as refused:
        start(server.url)
    assert "s3cr3t" not in str(refused.value)


def test_a_token_that_no_header_can_carry_is_refused_unseen(server, monkeypatch):
    monkeypatch.setenv("KVACCORD_TOKEN", "s3 cr3t\u00e9")
    with pytest.raises(Invalid, match="KVACCORD_TOKEN") as refused:
        start(server.url)
    assert "cr3t" not in str(refused.value.document())


def test_an_address_with_a_password_is_refused_unseen():
    with pytest.raises(Invalid, match="KVACCORD_TOKEN") as refused:
        start("http://admin:s3cr3t@127.0.0.1:9")
    assert "s3cr3t" not in str(refused.value.document())


# Secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("token=abc123", "token=***"),
        ("password: hunter2, next", "password: ***, next"),
        ("{'api_key': 'abc123'}", "{'api_key': '***'}"),
        ("Authorization: Bearer abc123", "Authorization: Bearer ***"),
        ("GET http://me:pw@host/x", "GET http://***@host/x"),
        ("AWS_SECRET_ACCESS_KEY=abc/1", "AWS_SECRET_ACCESS_KEY=***"),
        ("AccountKey=abc;Endpoint=x", "AccountKey=***;Endpoint=x"),
        ("https://b/x?sig=a%2Fb&n=1", "https://b/x?sig=***&n=1"),
        ("Cookie: session=abc", "Cookie: ***"),
        (
            "a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b",
            "a *** b",
        ),
        ("cut -----BEGIN PRIVATE KEY-----\nMIIE", "cut ***"),
        ("page_size=16, key=value, sig=KILL", "page_size=16, key=value, sig=KILL"),
        ("hf_abcdefghijklmnopqrst is not valid", "*** is not valid"),
        ("max_num_batched_tokens=8192, tokens=5", "max_num_batched_tokens=8192, tokens=5"),
        ("tokenizer='llama' rank 3: 2.00 GiB", "tokenizer='llama' rank 3: 2.00 GiB"),
    ],
)
def test_what_looks_like_a_secret_is_hidden_and_what_does_not_is_kept(text, shown):
    assert masked(text) == shown


def test_secrets_among_inputs_are_hidden_and_still_differ(server):
    inputs = {"hf_token": "abc", "tokenizer": "llama", "eos": "</s>", "max_tokens": 5, "on": True}
    with Rendezvous.join(url=server.url, engine="e", ranks=[0], inputs=inputs) as rdzv:
        rdzv.report(Report(**REPORT.model_dump() | {"inputs": {"secret": "abc", "n": 1}}))
    for said in (server.said("join")["inputs"], server.said("reports")["0"]["inputs"]):
        assert "abc" not in str(said)
    assert server.said("join")["inputs"] | {"hf_token": ""} == inputs | {"hf_token": ""}
    assert masked_inputs({"token": "a"}) == masked_inputs({"token": "a"})
    assert masked_inputs({"token": "a"}) != masked_inputs({"token": "b"})


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key) of 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        lacking("openssl, which makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=kvaccord", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True)
    return made


@pytest.fixture
def secure(certificate):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with fake_coordinator(tls) as server:
        yield server


def test_a_start_over_https_with_an_own_authority(secure, certificate, monkeypatch):
    monkeypatch.setenv("KVACCORD_CA_FILE", str(certificate[0]))
    tls_context.cache_clear()
    start(secure.url)
    start(secure.url)
    assert secure.words() == ["join", "claim", "reports", "applied"] * 2
    assert tls_context.cache_info().misses == 1


def test_a_certificate_of_nobody_known_is_no_verdict(secure):
    no_verdict(secure.url, "CERTIFICATE_VERIFY_FAILED", patience_s=3.0)
    assert secure.told == []


@pytest.mark.parametrize(
    ("variable", "trust_env"), [("SSL_CERT_FILE", True), ("SSLKEYLOGFILE", False)]
)
def test_a_variable_of_tls_that_points_nowhere_is_named(secure, monkeypatch, variable, trust_env):
    monkeypatch.setenv(variable, "/nonexistent/file")
    tls_context.cache_clear()
    with pytest.raises(Invalid, match=f"correct or unset .*{variable}"):
        start(secure.url, trust_env=trust_env)


def test_an_own_authority_is_read_whatever_else_the_environment_says(
    secure, certificate, monkeypatch
):
    monkeypatch.setenv("KVACCORD_CA_FILE", str(certificate[0]))
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"):
        monkeypatch.setenv(variable, "/nonexistent/file")
    tls_context.cache_clear()
    start(secure.url)


def test_an_authority_that_cannot_be_read_is_named(secure, monkeypatch):
    monkeypatch.setenv("KVACCORD_CA_FILE", "/nonexistent")
    with pytest.raises(Invalid, match="KVACCORD_CA_FILE is '/nonexistent'"):
        start(secure.url)
