"""Settings of TLS say what is wrong with which file, and what to do."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from kvxfer import Config, ConfigError
from kvxfer.config import Credentials, TlsConfig


@pytest.fixture
def ours(authority):
    return authority.issue()


def refusal(**settings):
    with pytest.raises(ConfigError) as caught:
        Config(tls=settings)
    return str(caught.value)


def test_a_file_that_is_not_there_and_a_path_that_none_can_have_which_is_not_quoted_whole(ours, tmp_path):
    for name in ours:
        text = refusal(**{**ours, name: str(tmp_path / "nowhere.pem")})
        assert f"tls.{name} is '{tmp_path}/nowhere.pem', which cannot be read: No such file" in text
        assert "correct the path" in text
        text = refusal(**{**ours, name: "x" * 100_000})
        assert f"tls.{name} is 'xxx" in text
        assert len(text) < 5_000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(ours):
    Path(ours["key"]).chmod(0)
    assert "Permission denied; correct the path, or let this user read it" in refusal(**ours)


def test_a_key_of_another_certificate(authority, ours):
    other = authority.issue(file="other")
    text = refusal(**{**ours, "key": other["key"]})
    assert f"tls.certificate {ours['certificate']} with tls.key {other['key']}" in text
    assert "the key does not belong to the certificate" in text


@pytest.mark.parametrize(("name", "kind"), [("authorities", "certificate"), ("certificate", "certificate")])
def test_a_file_of_something_else(ours, name, kind):
    assert f"tls.{name} is '{ours['key']}', which holds no {kind} in PEM form" in refusal(**{**ours, name: ours["key"]})


def test_damaged_pem(ours):
    Path(ours["certificate"]).write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    assert "cannot be used" in refusal(**ours)
    assert "replace the file" in refusal(**ours)


@pytest.mark.timeout(10)  # OpenSSL would wait for somebody to type
def test_an_encrypted_key(ours):
    key = Path(ours["key"])
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    form, kept = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"a passphrase")
    key.write_bytes(plain.private_bytes(serialization.Encoding.PEM, form, kept))
    assert f"tls.key {key} is encrypted" in refusal(**ours)


def test_what_belongs_together(ours):
    assert "tls.authorities is not" in refusal(certificate=ours["certificate"], key=ours["key"])
    assert "tls.authorities is not" in refusal(server_name="kv")
    assert "tls.certificate is not" in refusal(authorities=ours["authorities"], key=ours["key"])
    with pytest.raises(ConfigError, match=r"a listener shows a certificate; set tls\.certificate"):
        Config(listen="tcp:127.0.0.1:0", tls={"authorities": ours["authorities"]})
    Config(listen="unix", tls={"authorities": ours["authorities"]})  # it only connects


@pytest.mark.parametrize("name", [".kv", "kv..example", "k" * 64, "kv\0"])
def test_a_name_that_no_handshake_could_ask_for(ours, name):
    assert f"tls.server_name is {name!r}: no certificate can carry this name" in refusal(**ours, server_name=name)


@pytest.mark.parametrize("name", ["authorities", "certificate", "key"])
def test_a_key_that_was_pasted_is_not_shown(ours, name, monkeypatch):
    held = Path(ours["key"]).read_text()
    monkeypatch.setenv(f"KVXFER_TLS__{name.upper()}", held)
    with pytest.raises(ConfigError, match="put it into a file") as caught:
        Config()
    seen: BaseException | None = caught.value
    while seen is not None:
        assert held.splitlines()[1] not in f"{seen}{seen!r}"
        seen = seen.__cause__ or seen.__context__


def test_the_environment_can_say_that_nothing_is_set(ours, monkeypatch):
    monkeypatch.setenv("KVXFER_TLS__KEY", "")
    monkeypatch.setenv("KVXFER_TLS__SERVER_NAME", "none")
    config = Config(tls={"authorities": ours["authorities"]})
    assert (config.tls.key, config.tls.server_name) == (None, None)


def test_only_the_newest_version_is_spoken(ours):
    contexts = Credentials(TlsConfig(**ours)).renew()
    assert contexts.server is not None
    for context in (contexts.client, contexts.server):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert contexts.client.check_hostname


def test_files_are_read_again_when_they_changed(ours, authority):
    credentials = Credentials(TlsConfig(**ours))
    first = credentials.renew()
    assert credentials.renew() is first
    authority.issue()  # into the same files
    second = credentials.renew()
    assert second is not first
    Path(ours["key"]).unlink()
    for _ in range(2):  # not taken for seen
        with pytest.raises(ConfigError, match="cannot be read"):
            credentials.renew()
    assert credentials.contexts is second
