"""Certificates of a cluster's own authority, made by the `openssl` command."""

import shutil
import subprocess

import pytest

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def run_openssl(directory, *arguments):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_authority(directory, name):
    """`{name}.pem` and `{name}.key`."""
    arguments = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
    run_openssl(directory, "req", "-x509", *NEW_KEY, *arguments, "-days", "2")


def make_certificate(directory, name, *, authority, days=2):
    """A worker's certificate, as the options of `tcp`'s `tls`; expired if `days` is negative."""
    request = ["-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=worker"]
    run_openssl(directory, "req", *NEW_KEY, *request)
    signing = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
    signed = ["-in", f"{name}.csr", "-out", f"{name}.pem", "-days", str(days)]
    run_openssl(directory, "x509", "-req", *signed, *signing)
    files = {"certificate": f"{name}.pem", "key": f"{name}.key", "ca": f"{authority}.pem"}
    return {option: str(directory / file) for option, file in files.items()}
