"""What `baton debug bundle` keeps of text, pages, metrics and settings, and what it cuts."""

import json
import stat
import tarfile
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.resolve import CommandLine, resolve
from baton.errors import ProtocolError
from baton.ops.bundle.archive import BundleContents, BundleError, Manifest
from baton.ops.bundle.logs import read_log
from baton.ops.bundle.redaction import CUT, PAGE_STRINGS, Redactor
from baton.ops.bundle.settings import find_secrets, show_settings

SECRET = "zQ9-planted-Xk2"
HEX_KEY = "0123456789abcdef" * 4
KNOWN = Redactor([SECRET])
UNKNOWING = Redactor([])

LINES = [
    f"authorization: Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"headers={{'authorization': '{SECRET}', 'host': 'a'}}",
    f"cookie: session=1; id={SECRET}",
    f"x-api-key: {SECRET}",
    f"x-forwarded-user: {SECRET}",
    f"x-baton-management-key: {SECRET}",
    f"redis://admin:{SECRET}@10.0.0.1:6379/0",
    f"https://hooks.example/services?token={SECRET}",
    f"--set store.options.redis.password={SECRET}",
    f'{{"api_key": "{SECRET}"}}',
    f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"the key is bk-0123456789ab-{SECRET}{SECRET}",
    f"sk-proj-{SECRET}{SECRET}",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
    f"Received request: prompt: '{SECRET} and more', params: x",
    f'"messages": [{{"role": "user", "content": "{SECRET}"}}]',
]


@pytest.mark.parametrize("line", LINES)
def test_what_looks_like_a_secret_is_cut_from_text(line):
    assert SECRET in line
    assert SECRET not in UNKNOWING.text(line)


def test_what_is_known_to_be_secret_is_cut_wherever_it_is():
    assert SECRET not in KNOWN.text(f"it failed for {SECRET}!")
    assert KNOWN.text("nothing to see") == "nothing to see"
    assert HEX_KEY not in UNKNOWING.text(f"key {HEX_KEY}")


@pytest.mark.parametrize(
    "part",
    [
        "a.",
        "x-",
        "a://",
        "://a@",
        "sk-",
        "token",
        "token=",
        "prompt",
        "'",
        "-----BEGIN A-----",
        "0",
    ],
)
def test_text_that_is_made_to_be_slow_is_not(part):
    text = part * ((1 << 19) // len(part))
    began = time.process_time()
    KNOWN.text(text)
    assert time.process_time() - began < 3, "it takes tenths of a second"


@pytest.mark.parametrize(
    "line",
    [
        "10:00:00 INFO baton.gateway: listening on http://127.0.0.1:8000",
        f"request {'ab' * 16}: handoff over shared, 12 pages, 3 ms",
        "worker prefill-0 is up: epoch 0123456789abcdef0123456789abcdef",
        "TTFT 0.12 s, max_tokens=16, num_tokens: 5",
        "prompt of 812 tokens, prompt_tokens=812",
    ],
)
def test_what_an_issue_report_needs_is_kept(line):
    assert UNKNOWING.text(line) == line


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.just(SECRET),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["prompt", "text", "tenant", "inner", "ticket"]), inner),
    max_leaves=12,
))  # fmt: skip
def test_strings_of_pages_are_kept_by_name_only(page):
    kept = UNKNOWING.page(json.dumps({"page": page, "mode": "push"}).encode())
    assert SECRET not in kept.decode()
    assert json.loads(kept)["mode"] == "push"


@pytest.mark.parametrize("part", [b'{"a":', b"["])
def test_a_page_that_is_nested_too_deep_is_refused(part):
    """It costs its own file: of some 400 levels on it decodes, and cannot be redacted."""
    body = part * 900 + b"1" + (b"}" if b"{" in part else b"]") * 900
    with pytest.raises(ProtocolError, match="it is not JSON"):
        Redactor([]).page(body)


def test_a_trace_keeps_its_figures_and_loses_tokens():
    page = {
        "summary": {"ttft_s": 0.25, "fallbacks": ["prefill_lost: gone"], "transport": "tcp"},
        "gateway": {"stamps": {"received": 1.5}, "verified_bytes": {"tcp": 7}, "ticket": "abc"},
        "token_ids": [1, 2, 3],
        "tokens": [[1, 2], [3]],
        "histograms": {"transfer_s": [[7, 8], [1, 2]]},
        "prompts": ["one"],
        "not_tokenized": {"demo": "no tokenizer"},
    }
    kept = json.loads(UNKNOWING.page(json.dumps(page).encode()))
    assert kept["summary"] == page["summary"]
    assert kept["gateway"] == {**page["gateway"], "ticket": CUT}
    assert kept["token_ids"] == [CUT] * 3
    assert kept["tokens"] == [[CUT] * 2, [CUT]]
    assert kept["histograms"] == page["histograms"]
    assert kept["prompts"] == [CUT]
    assert kept["not_tokenized"] == {"demo": "no tokenizer"}
    assert not {"ticket", "tenant", "prompt", "content", "text", "token_ids"} & PAGE_STRINGS
    with pytest.raises(ProtocolError, match="not JSON"):
        UNKNOWING.page(b"<html>")


def test_between_which_workers_a_link_drifts_or_loses_is_kept():
    page = {
        "links": [{"worker": "p0", "peer": "d0", "drift": {"state": "drifted", "ranks": "0 to 1"}}],
        "segments": [{"sender": "p0", "receiver": "d0", "transport": "tcp", "distance": "rack"}],
    }
    assert json.loads(UNKNOWING.page(json.dumps(page).encode())) == page


def test_metrics_keep_listed_labels():
    body = (
        "# HELP baton_a Things.\n# TYPE baton_a counter\n"
        f'baton_a_total{{transport="tcp",tenant="{SECRET}",le="+Inf"}} 3.0\n'
        f"up 1\nnot a metric: {SECRET}\n"
        f'baton_b{{worker="a\\"}},x=\\"{SECRET}",url="http://u:{SECRET}@h:1"}} 1.0\n'
    )
    kept = UNKNOWING.metrics(body.encode()).decode()
    assert SECRET not in kept.replace(f'x=\\"{SECRET}', "")  # a worker's name is the operator's
    assert f'baton_a_total{{transport="tcp",tenant="{CUT}",le="+Inf"}} 3.0\n' in kept
    assert "up 1\n" in kept
    assert "# TYPE baton_a counter\n" in kept
    assert "not a metric" not in kept


@pytest.fixture(name="planted")
def planted_fixture(tmp_path):
    """Every kind of setting with a secret in it; what each of them is."""
    secrets = {name: f"{name}-{SECRET}" for name in ("url", "option", "file", "flag", "variable")}
    (tmp_path / "password").write_text(secrets["file"])
    (tmp_path / "baton.toml").write_text(
        f"""
[gateway]
decode = ["http://user:{secrets["url"]}@10.0.0.1:8000"]
[store.options.redis]
url = "redis://10.0.0.2:6379/0"
password_file = "{tmp_path / "password"}"
pin = 31415926
timeout_s = 1.5
[engine]
hub = "{secrets["option"]}"
dtype = "float32"
num_blocks = 77
"""
    )
    environment = {
        "BATON_CONFIG": str(tmp_path / "baton.toml"),
        "BATON_ALERTS__WEBHOOK_URL": f"https://hooks/x?t={secrets['variable']}",
        "AWS_SECRET_ACCESS_KEY": secrets["variable"],
        "BATON_CLUSTER_KEY": HEX_KEY,
        "OMP_NUM_THREADS": "3",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    assignments = [f"engine.secret_option={secrets['flag']}"]
    return resolve(CommandLine(None, {}, assignments), environment), environment, secrets


def test_settings_are_kept_by_name_only(planted):
    resolved, environment, secrets = planted
    redactor = Redactor(find_secrets(resolved, environment))
    shown = show_settings(resolved, environment, redactor)
    text = msgspec.json.encode(shown).decode()
    for name, secret in secrets.items():
        assert secret not in text, name
    assert HEX_KEY not in text
    assert "31415926" not in text, "a number may be a password"
    settings = {name: each.value for name, each in shown.settings.items()}
    assert settings["gateway.decode"] == [f"http://{CUT}@10.0.0.1:8000"]
    assert settings["engine.dtype"] == "float32"
    assert settings["engine.num_blocks"] == 77
    assert settings["store.options.redis.timeout_s"] == 1.5
    assert settings["gateway.port"] == 8000
    assert settings["alerts.webhook_url"] == CUT
    assert shown.variables["OMP_NUM_THREADS"] == "3"
    assert shown.variables["BATON_CLUSTER_KEY"] == CUT


def test_secrets_of_this_machine_are_known(planted):
    resolved, environment, secrets = planted
    found = find_secrets(resolved, environment)
    assert set(secrets.values()) <= found | {secrets["variable"]}
    assert HEX_KEY in found
    redactor = Redactor(found)
    for secret in (*secrets.values(), HEX_KEY):
        assert secret not in redactor.text(f"it said {secret} here")


def manifest_of(contents):
    return Manifest(
        created_at=1.0,
        duration_s=0.5,
        gateways=(),
        files=contents.files,
        missing=contents.missing,
    )


def test_an_archive_is_bounded_private_and_lists_what_is_missing(tmp_path):
    contents = BundleContents(max_total_bytes=10)
    contents.add("a.txt", b"12345678")
    contents.add("b.txt", b"123")
    contents.add("c.txt", b"12")
    path = tmp_path / "bundle.tar.gz"
    path.write_text("an older one")
    path.chmod(0o644)
    contents.write(path, manifest_of(contents))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        assert archive.getnames() == [
            "baton-bundle/manifest.json",
            "baton-bundle/a.txt",
            "baton-bundle/c.txt",
        ]
        manifest = json.load(archive.extractfile("baton-bundle/manifest.json"))
    assert [each["name"] for each in manifest["missing"]] == ["b.txt"]
    assert "no room" in manifest["missing"][0]["why"]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.tar.gz"]


def test_an_archive_that_cannot_be_written_leaves_nothing(tmp_path):
    contents = BundleContents()
    with pytest.raises(BundleError, match="--output"):
        contents.write(tmp_path / "none" / "bundle.tar.gz", manifest_of(contents))
    (tmp_path / "folder").mkdir()
    with pytest.raises(BundleError, match="cannot write"):
        contents.write(tmp_path / "folder", manifest_of(contents))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_of_a_log_the_last_whole_lines_are_read(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("first line\nsecond line\nthird\n")
    assert read_log(log) == "first line\nsecond line\nthird\n"
    assert read_log(log, 12) == "third\n"
