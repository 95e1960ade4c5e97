"""What may stand between a rank and its coordinator: nothing, a proxy, garbage, TLS."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from kvaccord.errors import Invalid, NoVerdict, Unauthorized
from kvaccord.messages import Report
from tests.builders import lacking
from tests.fake_coordinator import REPORT, fake_coordinator
from worker_client import Rendezvous
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


def no_verdict(url, said, *, patience_s=0.5):
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
    no_verdict(address, "ReadTimeout")


def test_a_host_without_a_name_is_no_verdict():
    no_verdict("http://no-such-host.invalid:8970", "ConnectError")


@pytest.mark.parametrize("word", ["join", "claim", "reports", "applied"])
@pytest.mark.parametrize(
    ("answer", "headers", "said"),
    [
        ((302, b""), {"Location": "http://127.0.0.1:9/login"}, "a redirect to http://127.0.0.1:9"),
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
    no_verdict(secure.url, "CERTIFICATE_VERIFY_FAILED")
    assert secure.told == []


def test_an_authority_that_cannot_be_read_is_named(secure, monkeypatch):
    monkeypatch.setenv("KVACCORD_CA_FILE", "/nonexistent")
    with pytest.raises(Invalid, match="KVACCORD_CA_FILE is '/nonexistent'"):
        start(secure.url)
