"""Over TLS the connection goes to the checked address, and the certificate must still be the name's."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="NOT TESTED: the fetch needs httpx, install endstop[examples]")
pytest.importorskip("cryptography", reason="NOT TESTED: making a test certificate needs cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from endstop_examples import fetch
from endstop_examples.fetch import FetchRules, fetch_html
from tests.examples.peer import Peer, response, serve

BODY = b"<title>secure</title>"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server context with a certificate for shop.test, which the client is told to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shop.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("shop.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "trusted.pem").write_bytes(pem)
    (tmp_path / "server.pem").write_bytes(pem + secret)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem")
    return server


def secured(peer: Peer, context: ssl.SSLContext) -> FetchRules:
    peer.socket = context.wrap_socket(peer.socket, server_side=True)
    return FetchRules(allowed_hosts=frozenset({"shop.test", "other.test"}))


def test_the_certificate_is_checked_against_the_name_while_the_address_is_the_checked_one(
    context: ssl.SSLContext,
) -> None:
    with serve({"/": response(BODY)}) as peer:
        rules = secured(peer, context)
        page = fetch_html(f"https://shop.test:{peer.port}/", rules, resolve=lambda host, port: ["127.0.0.1"])
    assert page.body == BODY


def test_a_certificate_of_another_name_is_refused_before_the_request_is_sent(context: ssl.SSLContext) -> None:
    with serve({"/": response(BODY)}) as peer:
        rules = secured(peer, context)
        with pytest.raises(fetch.ConnectionFailedError):
            fetch_html(f"https://other.test:{peer.port}/", rules, resolve=lambda host, port: ["127.0.0.1"])
        assert peer.seen == []
