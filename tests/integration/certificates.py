"""Authorities and certificates for tests, made when they are needed: nothing here is ever valid elsewhere."""

import datetime as dt
from pathlib import Path

import trustme


class Authority:
    """One that signs certificates, as files in a folder."""

    def __init__(self, folder: Path, name="authority"):
        self.path = folder / f"{name}.pem"  # its own certificate
        self._ca, self._folder, self._name = trustme.CA(), folder, name
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, *names, file="worker", expired=False):
        """Settings `tls` of a worker with a certificate for these names, 127.0.0.1 if there are none."""
        ended = dt.datetime.now(dt.UTC) - dt.timedelta(days=365) if expired else None
        made = self._ca.issue_cert(*(names or ("127.0.0.1",)), not_after=ended)
        certificate, key = self._folder / f"{self._name}-{file}.pem", self._folder / f"{self._name}-{file}.key"
        made.cert_chain_pems[0].write_to_path(certificate)
        made.private_key_pem.write_to_path(key)
        return {"authorities": str(self.path), "certificate": str(certificate), "key": str(key)}

    @property
    def trusted(self):
        """Settings `tls` of a worker that shows no certificate."""
        return {"authorities": str(self.path)}
