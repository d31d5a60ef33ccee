"""The dashboard in a real browser: hostile text, keyboard, screen readers, widths."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.browser.chromium import Page, chromium, needs_chromium
from tests.browser.synthetic import Fleet, Stream, serve_dashboard
from tests.integration.gateway_cluster import Cluster, cluster
from tests.integration.scripted_worker import ScriptedWorker, prefill_at_once

pytestmark = needs_chromium
HOSTILE = "<img src=x onerror='document.title=\"run\"'><script>document.title='run'</script>\"'&"
LIVE = "document.querySelector('#state')?.className === 'live'"
DRAWN = (
    f"{LIVE} && document.querySelectorAll('.worker').length && document.querySelector('.u-wrap')"
)

Scenario = Callable[[Page, Stream], Awaitable[None]]


def show(fleet: Fleet, *scenarios: Scenario, interval_s: float = 0.2) -> None:
    """One browser for several scenarios: it takes a second to start."""

    async def main() -> None:
        async with serve_dashboard(fleet, interval_s) as (url, stream), chromium() as page:
            await page.resize(1280)
            await page.open(url)
            await page.until(DRAWN)
            for scenario in scenarios:
                await scenario(page, stream)

    asyncio.run(asyncio.wait_for(main(), 120))


async def text_of(page: Page, selector: str) -> str:
    return await page.run(f"document.querySelector({selector!r}).textContent")


async def shows_hostile_names_as_text(page: Page, stream: Stream) -> None:
    await page.until("document.querySelector('#request-table .pick')")
    assert HOSTILE in await text_of(page, ".worker .name")
    assert HOSTILE in await text_of(page, "#request-table")
    await page.run("document.querySelector('#request-table .pick').click()")
    await page.until("document.querySelector('#request .waterfall')")
    assert HOSTILE in await text_of(page, "#request-body")
    await page.run("document.querySelector('.worker').click()")
    await page.until("!document.querySelector('#worker-detail').hidden")
    await asyncio.sleep(0.3)  # what was inserted as HTML would load, fail and run by now
    assert await page.run("document.title") == "Baton"
    assert await page.run("document.querySelectorAll('main img, dialog img').length") == 0
    assert page.problems == []


async def requests_nothing_from_elsewhere(page: Page, stream: Stream) -> None:
    origin = await page.run("location.origin")
    assert page.requested
    assert [url for url in page.requested if not url.startswith((origin, "about:"))] == []


def test_hostile_text_is_shown_and_nothing_runs() -> None:
    fleet = Fleet(num_workers=4, name="{role}-{index} " + HOSTILE, text=HOSTILE, model=HOSTILE)
    show(fleet, shows_hostile_names_as_text, requests_nothing_from_elsewhere)


async def tab_reaches_all_controls(page: Page, stream: Stream) -> None:
    await page.run("document.activeElement.blur()")
    reached: list[str] = []
    while reached.count("skip") < 2:
        await page.press("Tab")
        reached.append(
            await page.run("(e => e.id || e.className || e.textContent)(document.activeElement)")
        )
    assert reached[0] == "skip"
    order = [reached.index(name) for name in ("span", "pause", "heat-layer", "heat")]
    assert order == sorted(order)
    workers = [name for name in reached if name.startswith("worker ")]
    assert len(workers) == 1, ("one stop; arrow keys go on", reached)


async def arrow_keys_move_between_workers(page: Page, stream: Stream) -> None:
    await page.run("document.querySelector('.worker[tabindex=\"0\"]').focus()")
    await page.press("ArrowRight")
    focused = await page.run("document.activeElement.querySelector('.name').textContent")
    assert focused == stream.fleet.worker_name(1)
    await page.press("Enter")
    await page.until("!document.querySelector('#worker-detail').hidden")
    assert await text_of(page, "#worker-name") == focused
    outline = await page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus is visible"
    await page.press("Escape")
    await page.until("document.querySelector('#worker-detail').hidden")


async def escape_closes_a_request(page: Page, stream: Stream) -> None:
    await page.run("document.querySelector('#request-table .pick').focus()")
    await page.press("Enter")
    await page.until("document.querySelector('#request .waterfall')")
    body = await text_of(page, "#request-body")
    assert "exposed transfer" in body
    assert "predicted TTFT" in body, "the router's reasons"
    assert "chunk of 512 tokens" in body
    await page.press("Escape")
    await page.until("!document.querySelector('#request').open")
    assert await page.run("document.activeElement.className") == "pick", "the focus comes back"


async def has_landmarks_and_names(page: Page, stream: Stream) -> None:
    nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    shown = [
        (n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]
    ]
    roles = {role for role, _ in shown}
    assert {"banner", "navigation", "main", "table", "status", "region"} <= roles
    named = {"button", "combobox", "link", "navigation", "region", "table", "image"}
    nameless = [(role, name) for role, name in shown if role in named and not name.strip()]
    assert nameless == []


async def charts_have_tables(page: Page, stream: Stream) -> None:
    await page.run("document.querySelectorAll('.chart details').forEach(d => { d.open = true; })")
    await page.until("document.querySelectorAll('.chart tbody tr').length >= 6 * 10")
    await page.run("document.querySelectorAll('.chart details').forEach(d => { d.open = false; })")


async def fits_every_width(page: Page, stream: Stream) -> None:
    for width in (390, 768, 1024, 1920):
        await page.resize(width)
        await asyncio.sleep(0.3)
        wide = await page.run("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{wide} px too wide at {width}"
    await page.resize(1280)


async def ring_holds_an_hour(page: Page, stream: Stream) -> None:
    shown = await page.run("""
      import("./ring.js").then(({ Ring }) => {
        const ring = new Ring(["at", "value"], 3600);
        for (let at = 1; at <= 20000; at += 1) ring.add([at, at % 7 ? 2 * at : null]);
        ring.add([19999, 5]);  // told again after a reconnect
        const [all, minute] = [ring.column("at"), ring.column("value", 60)];
        return [ring.length, all[0], all.at(-1), minute.length, minute.at(-1),
                ring.columns[0].length, [...ring.column("value")].filter(Number.isNaN).length];
      })""")
    assert shown == [3600, 16_401, 20_000, 60, 40_000, 7200, 515]


async def alert_of_a_link_is_marked_where_the_link_is(page: Page, stream: Stream) -> None:
    pair = " → ".join(map(stream.fleet.worker_name, (0, 1)))
    await page.until("document.querySelector('.alert .pair-figures')?.textContent")
    figures = await text_of(page, ".alert .pair-figures")
    assert figures.startswith(f"{pair}, last minute: ")
    assert "tcp measured: " in figures
    assert "latency" in figures
    assert figures.endswith("1.01 % of 120 k TCP segments lost in the last minute")
    assert "an alert fires" in await text_of(page, "#link-legend")
    await page.run("document.querySelector('#heat').focus()")
    await page.press("ArrowDown")
    await page.press("ArrowUp")
    readout = await text_of(page, "#heat-readout")
    assert readout.startswith(pair)
    assert readout.endswith("an alert fires")
    await page.press("ArrowDown")
    assert "an alert" not in await text_of(page, "#heat-readout")


async def drifts_name_the_sender_first(page: Page, stream: Stream) -> None:
    await page.until("document.querySelector('#distance-transfers .problem li')")
    problems = await text_of(page, "#distance-transfers .problem")
    one, other = map(stream.fleet.worker_name, (0, 1))
    assert f"{one} → {other} (tcp WRITE): 9.8 times" in problems
    assert f"{other} → {one} (shared READ): 4.25 times" in problems


async def alerts_lead_to_what_to_do(page: Page, stream: Stream) -> None:
    links = await page.run("[...document.querySelectorAll('.alert a')].map(link => link.href)")
    own = await page.run("new URL('runbook.html#batonlinkdrift', location.href).href")
    assert set(links) == {"https://example.invalid/alerts.html#batontransportmismatch", own}
    shown = await page.run(f"fetch({own!r}).then(answer => answer.text())")
    assert '<section class="panel" id="batonlinkdrift">' in shown


async def tiers_show_what_they_hold_and_hit(page: Page, stream: Stream) -> None:
    await page.until("document.querySelectorAll('#store-tiers tbody tr').length === 3")
    host, _, redis = await page.run(
        "[...document.querySelectorAll('#store-tiers tbody tr')].map(row => row.textContent)"
    )
    assert host.startswith("host8")
    assert "31 GiB of 32 GiB, 96.9 %" in host
    assert "cannot reach it" in redis
    await page.run("document.querySelector('#store-worker-tiers').parentElement.open = true")
    await page.until("document.querySelectorAll('#store-worker-tiers tbody tr').length === 24")
    await page.run("document.querySelector('#store-worker-tiers').parentElement.open = false")
    targets = await text_of(page, "#slo-table tbody")
    assert "gaps between tokens (p99)200 ms15 k94 %" in targets


async def figures_of_an_alert_are_of_its_direction(page: Page, stream: Stream) -> None:
    shown = await page.run("""
      import("./transfers.js").then(({ figuresOfPair }) => {
        const pair = (prefill, decode, num) =>
          ({ prefill, decode, num, num_bytes: 1, transfer_p50_s: 0.5, s_per_mib_p50: 0.25 });
        const link = (from, to, latency_s) =>
          ({ from, to, latency_s, transport: "tcp", bytes_per_s: 1024 });
        const report = {
          transfers: { losses: [], pairs: [pair("b", "a", 500), pair("a", "b", 3)] },
          links: { models: [{ links: [link("b", "a", 1), link("a", "b", 2)] }] },
        };
        return [figuresOfPair(report, "a", "b"), figuresOfPair(report, "a", "c")];
      })""")
    took = "last minute: 3 handoffs, p50 500 ms, 250 ms for each MiB"
    assert shown == [f"a → b, {took} · tcp measured: 2 s latency, 1 KiB/s", ""]


async def workers_of_one_name_have_a_box_each(page: Page, stream: Stream) -> None:
    name = stream.fleet.name
    stream.fleet.name = "{role}"
    boxes = "[...document.querySelectorAll('.worker')]"
    await page.until(f"{boxes}.every(box => box.querySelector('.name').textContent.length < 8)")
    labels = await page.run(f"{boxes}.map(box => box.getAttribute('aria-label'))")
    assert [label[: label.index(",")] for label in labels] == ["prefill", "decode"] * 4
    await page.run(f"{boxes}[2].click()")
    await page.until("document.querySelector('.worker.picked')")
    assert await page.run(f"{boxes}.map(box => box.matches('.picked')).indexOf(true)") == 2
    assert "at https://10.0.0.2:8000" in await text_of(page, "#worker-facts")
    stream.fleet.name = name


async def pause_and_resume(page: Page, stream: Stream) -> None:
    await page.run("document.querySelector('#pause').click()")
    assert await text_of(page, "#state") == "paused"
    await page.run("document.querySelector('#pause').click()")
    await page.until(LIVE)
    assert page.problems == []


def test_keyboard_screen_reader_and_widths() -> None:
    show(
        Fleet(num_workers=8),
        tab_reaches_all_controls,
        arrow_keys_move_between_workers,
        escape_closes_a_request,
        has_landmarks_and_names,
        charts_have_tables,
        fits_every_width,
        ring_holds_an_hour,
        alert_of_a_link_is_marked_where_the_link_is,
        drifts_name_the_sender_first,
        alerts_lead_to_what_to_do,
        tiers_show_what_they_hold_and_hit,
        figures_of_an_alert_are_of_its_direction,
        workers_of_one_name_have_a_box_each,
        pause_and_resume,
    )


def test_page_of_a_gateway(tmp_path) -> None:
    """The real gateway's stream, behind its key; a worker whose name is HTML; a request."""
    name, key_file = "<b>decode</b>", tmp_path / "key"
    key_file.write_text("0123456789abcdef")

    async def main() -> None:
        workers = [ScriptedWorker(name, "decode", _say_four)]
        prefills = [ScriptedWorker("prefill-0", "prefill", prefill_at_once)]
        behind_key = {"management_key_file": str(key_file)}
        async with (
            cluster(prefills=prefills, decodes=workers, **behind_key) as running,
            chromium() as page,
        ):
            await page.answer_prompts("0123456789abcdef")
            await page.open(f"{running.url}/dashboard")
            await page.until(DRAWN)
            assert name in await text_of(page, "#topology-map")
            await _ask(running)
            await page.until("document.querySelector('#request-table .pick')")
            await page.run("document.querySelector('#request-table .pick').click()")
            await page.until("document.querySelector('#request .waterfall')")
            assert page.num_prompts == 1, "asked once: the stream and the traces use it, too"
            assert await page.run("document.querySelectorAll('#topology-map .name b').length") == 0
            assert page.problems == []

    asyncio.run(asyncio.wait_for(main(), 60))


async def _ask(running: Cluster) -> None:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 3, "stream": True}
    async with running.post(body) as answer:
        assert answer.status == 200
        await answer.read()


async def _say_four(visit) -> None:
    await visit.start_stream()
    for word in ("a", "b", "c", "d"):
        await visit.token(word)
        await asyncio.sleep(0.02)
    await visit.done()
