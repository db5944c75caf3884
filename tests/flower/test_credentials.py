"""Certificates and keys: accepted where they should be, and nowhere else."""

import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from equipoise.errors import EquipoiseError
from equipoise.flower.credentials import write_certificates, write_key
from tests.support.waiting import LIMIT

HOSTS = ["superlink.example.org", "127.0.0.1", "::1", "localhost"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "deep" / "ours"
    write_certificates(folder, HOSTS)
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made the same way, by another authority."""
    folder = tmp_path_factory.mktemp("certificates") / "theirs"
    write_certificates(folder, HOSTS)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A server on loopback that says hello to everybody who trusts it; gives its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if over.is_set():
                    return
                continue
            connection.settimeout(LIMIT)
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.sendall(b"hello")

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join()


@pytest.fixture(scope="module")
def port(ours: Path) -> Iterator[int]:
    with serving(ours) as port:
        yield port


def greeting(port: int, authority: Path, host: str) -> bytes:
    """What the server says to a client that trusts only this authority and looks for this host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of later Pythons
    with (
        socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        return secure.recv(5)


@pytest.mark.parametrize("host", HOSTS)
def test_a_client_that_trusts_the_authority_is_connected(host: str, port: int, ours: Path) -> None:
    assert greeting(port, ours / "ca.crt", host) == b"hello"


@pytest.mark.parametrize(
    "host",
    ["superlink.example.com", "example.org", "a.superlink.example.org", "127.0.0.2", "::2", "equipoise deployment"],
)
def test_another_host_is_refused(host: str, port: int, ours: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        greeting(port, ours / "ca.crt", host)


@pytest.mark.parametrize("host", HOSTS)
def test_another_authority_is_refused(host: str, port: int, theirs: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="CERTIFICATE_VERIFY_FAILED"):
        greeting(port, theirs / "ca.crt", host)


def test_a_certificate_does_not_vouch_for_another(ours: Path, theirs: Path) -> None:
    """Neither with the key of another, nor as an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        context.load_cert_chain(ours / "server.pem", theirs / "server.key")
    authority, server = certificate(ours / "ca.crt"), certificate(ours / "server.pem")
    assert limits(authority) == (True, 0)
    assert limits(server) == (False, None)
    server.verify_directly_issued_by(authority)
    with pytest.raises(ValueError, match=r"Issuer|signature"):
        certificate(theirs / "ca.crt").verify_directly_issued_by(server)


def certificate(path: Path) -> x509.Certificate:
    [found] = x509.load_pem_x509_certificates(path.read_bytes())
    return found


def limits(found: x509.Certificate) -> tuple[bool, int | None]:
    value = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    return value.ca, value.path_length


@pytest.mark.parametrize("days", [1, 365, 3650])
def test_certificates_are_valid_for_as_long_as_was_asked(days: int, tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], days)
    now = datetime.now(UTC)
    for name in ("ca.crt", "server.pem"):
        found = certificate(tmp_path / name)
        assert now - timedelta(hours=1) < found.not_valid_before_utc < now
        assert abs(found.not_valid_after_utc - now - timedelta(days=days)) < timedelta(minutes=5)


def test_a_certificate_whose_time_is_over_is_refused(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], 0)
    with serving(tmp_path) as port, pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
        greeting(port, tmp_path / "ca.crt", "localhost")


def test_a_long_name_is_still_the_name(tmp_path: Path) -> None:
    """The common name has room for 64 characters; the names that count are elsewhere."""
    host = ".".join(["a" * 40, "b" * 40, "example.org"])
    write_certificates(tmp_path, [host])
    with serving(tmp_path) as port:
        assert greeting(port, tmp_path / "ca.crt", host) == b"hello"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            greeting(port, tmp_path / "ca.crt", host[:64])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def careless() -> Iterator[None]:
    """A user whose files everybody may read and write, if nothing else is said."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("careless")
def test_private_files_are_for_their_owner_only(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"])
    write_key(tmp_path / "key")
    for _ in range(2):
        assert {p.name: mode(p) for p in tmp_path.iterdir()} == {
            **{"ca.crt": 0o644, "server.pem": 0o644, "server.key": 0o600},
            **{"key": 0o600, "key.pub": 0o644},
        }
        for path in tmp_path.iterdir():  # a second time, over files that everybody may read
            path.chmod(0o666)
        write_certificates(tmp_path, ["localhost"])
        write_key(tmp_path / "key")


def test_the_authoritys_key_is_nowhere(ours: Path) -> None:
    assert sorted(p.name for p in ours.iterdir()) == ["ca.crt", "server.key", "server.pem"]
    content = (ours / "server.key").read_bytes()
    assert content.count(b"PRIVATE KEY") == 2  # its first and its last line
    assert b"PRIVATE" not in (ours / "ca.crt").read_bytes() + (ours / "server.pem").read_bytes()
    key = load_pem_private_key(content, password=None)
    assert key.public_key() == certificate(ours / "server.pem").public_key()
    assert key.public_key() != certificate(ours / "ca.crt").public_key()


def test_a_nodes_key_is_what_flower_takes(tmp_path: Path) -> None:
    write_key(tmp_path / "key")
    key = load_ssh_private_key((tmp_path / "key").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    assert (tmp_path / "key").read_bytes().startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----\n")
    public = (tmp_path / "key.pub").read_bytes()
    assert public == key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    assert public.startswith(b"ecdsa-sha2-nistp384 ")
    assert load_ssh_public_key(public) == key.public_key()


def test_every_key_is_another(tmp_path: Path) -> None:
    for name in ("one", "two", "node.key"):
        write_key(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "node.key",
        "node.key.pub",
        "one",
        "one.pub",
        "two",
        "two.pub",
    ]
    assert len({p.read_bytes() for p in tmp_path.iterdir()}) == 6


def test_a_folder_that_cannot_be_made_brings_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(EquipoiseError, match="cannot create the folder"):
        write_certificates(tmp_path / "taken", ["localhost"])
    with pytest.raises(EquipoiseError, match=r"cannot write .*key: "):
        write_key(tmp_path / "nowhere" / "key")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
