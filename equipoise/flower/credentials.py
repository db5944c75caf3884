"""Certificates for a SuperLink and keys for SuperNodes, for users who have no certificate authority of their own."""

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from equipoise.errors import EquipoiseError
from equipoise.storage import atomic_files

_DAYS = 365
_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
"""What a certificate may allow a key to be used for."""


def write_certificates(folder: Path, hosts: Sequence[str], days: int = _DAYS) -> None:
    """Write ca.crt, which every machine gets, and server.pem and server.key, which only the SuperLink gets.

    The authority's private key is never written: a new certificate needs a new authority.

    Args:
        folder: the folder for the files.
        hosts: addresses or names under which the SuperLink is reached.
        days: for how long the certificates are valid.
    """
    names: list[x509.GeneralName] = [_host(host) for host in hosts]
    atomic_files.make_folder(folder)
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("equipoise deployment", authority, authority, days, None)
    leaf = _certificate(hosts[0], key, authority, days, names)
    _write(folder / "ca.crt", root.public_bytes(Encoding.PEM), private=False)
    _write(folder / "server.pem", leaf.public_bytes(Encoding.PEM), private=False)
    _write(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)


def write_key(path: Path) -> None:
    """Write a SuperNode's private key, and next to it, with .pub, the public key to register with the SuperLink."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), private=True)
    _write(path.with_name(path.name + ".pub"), public + b"\n", private=False)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
            raise EquipoiseError(
                f"{host!r} is not allowed as a host; give an address, or a name of letters, digits, dots and dashes"
            ) from None
        return x509.DNSName(host)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    names: list[x509.GeneralName] | None,
) -> x509.Certificate:
    """Return a certificate signed by `authority`, for a server with these names, or without any for the authority."""
    now = datetime.now(UTC)
    subject_name, issuer_name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (subject[:64], "equipoise deployment")
    )
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject_name)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=10))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=0 if names is None else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(identifier, critical=False)
    )
    allowed = {"key_cert_sign", "crl_sign"} if names is None else {"digital_signature"}
    builder = builder.add_extension(x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES}), critical=True)
    if names is not None:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(authority, hashes.SHA256())


def _write(path: Path, content: bytes, private: bool) -> None:
    with atomic_files.atomic_write(path) as temporary:
        temporary.touch(mode=0o600 if private else 0o644)
        temporary.write_bytes(content)
