from __future__ import annotations

import asyncio
import json
import time

import pytest

from tailrace.bench.metrics_source import source_at
from tailrace.bench.wire import resolve
from tailrace.errors import ConfigError
from tests.bench.plain_server import PlainServer

PAGE = 'vllm:num_requests_running 3\nDCGM_FI_DEV_GPU_UTIL{gpu="0"} 50\n'
MODELS = {"data": [{"id": "m"}]}


def reading(answers, make_url, use):
    """Serve `answers`, open the source at `make_url(server)` and return what `use` makes of it."""

    async def go():
        async with PlainServer({"/v1/models": MODELS} | answers) as server:
            endpoint = await resolve(server.url)
            return await use(await source_at(make_url(server), endpoint), server)

    return asyncio.run(go())


async def read_once(source, _server):
    return await source.read()


# A page


def test_a_server_is_read_at_its_own_page():
    (figures,) = reading({"/metrics": PAGE}, lambda _: "", read_once)
    assert figures.server == {"running": 3}
    assert figures.gpu == {"gpu0_utilisation": 0.5}
    assert 0 <= figures.age_s < 5


def test_a_server_without_a_page_has_no_source():
    assert reading({}, lambda _: "", lambda source, _: asyncio.sleep(0, source)) is None


def test_a_page_may_stand_elsewhere():
    answers = {"/other/page": PAGE}
    (figures,) = reading(answers, lambda server: f"{server.url}/other/page?x=1", read_once)
    assert figures.server == {"running": 3}


def test_a_page_that_fails_for_a_while_leaves_a_gap():
    async def use(source, server):
        server.answers["/metrics"] = 500
        during = await source.read()
        server.answers["/metrics"] = PAGE
        return during, len(await source.read())

    assert reading({"/metrics": PAGE}, lambda _: "", use) == ([], 1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("{url}/none", "HTTP 404"),
        ("ftp://x/metrics", "write http://"),
        ("prometheus+", "write http://"),
        ("http://127.0.0.1:1/metrics", "cannot connect"),
        ("telegraf+file:///no/such/file.json", "no such file"),
        ("telegraf+http://x", r"telegraf\+file:///PATH"),
        ("prometheus+{url}", "HTTP 404"),
    ],
)
def test_what_cannot_be_read_is_an_error_at_once(url, words):
    with pytest.raises(ConfigError, match=words):
        reading({}, lambda server: url.format(url=server.url), read_once)


# Prometheus


def series(name, *points, **labels):
    values = [[at_s, str(value)] for at_s, value in points]
    return {"metric": {"__name__": name} | labels, "values": values}


def matrix(*result):
    return {"status": "success", "data": {"resultType": "matrix", "result": list(result)}}


def test_prometheus_hands_on_each_scrape_once_at_its_own_time():
    now_s = time.time()
    early, late, later = now_s - 30, now_s + 1, now_s + 2
    before = matrix(series("vllm:num_requests_running", (early, 1), instance="a:8000"))

    async def use(source, server):
        start = await source.read()
        server.answers["/api/v1/query"] = matrix(
            series("vllm:num_requests_running", (early, 1), (late, 2), (later, 4), instance="a"),
            series("vllm:kv_cache_usage_perc", (late, 0.5), (later, "NaN"), instance="a"),
            series("DCGM_FI_DEV_POWER_USAGE", (late, 70), instance="a:9400", gpu="0"),
            series("vllm:unknown", (late, 9), instance="a"),
        )
        first, second = await source.read(), await source.read()
        return start, first, second, server.targets[-1]

    start, first, second, target = reading(
        {"/api/v1/query": before}, lambda server: f"prometheus+{server.url}", use
    )
    assert start == second == []
    assert [dict(figures.server) for figures in first if figures.server] == [
        {"running": 2, "kv_usage": 0.5},
        {"running": 4},
    ]
    assert [dict(figures.gpu) for figures in first if figures.gpu] == [{"gpu0_power_w": 70}]
    assert "vllm%3Anum_requests_running" in target
    assert "60s" in target


def test_the_age_of_a_scrape_is_its_distance_from_now():
    async def use(source, server):
        at_s = time.time() + 0.001
        await asyncio.sleep(0.05)
        server.answers["/api/v1/query"] = matrix(
            series("vllm:num_requests_running", (at_s, 2), instance="a")
        )
        (figures,) = await source.read()
        return figures.age_s

    known = matrix(series("vllm:num_requests_running", (time.time() - 9, 1), instance="a"))
    age_s = reading({"/api/v1/query": known}, lambda server: f"prometheus+{server.url}", use)
    assert 0.02 < age_s < 20


def test_labels_choose_one_server_of_several():
    now_s = time.time() + 100
    both = matrix(
        series("vllm:num_requests_running", (now_s, 1), instance="a:8000"),
        series("vllm:num_requests_running", (now_s, 2), instance="b:8000"),
        series("DCGM_FI_DEV_POWER_USAGE", (now_s, 70), Hostname="a", gpu="0"),
        series("DCGM_FI_DEV_POWER_USAGE", (now_s, 80), Hostname="b", gpu="0"),
    )
    answers = {"/api/v1/query": both}
    with pytest.raises(ConfigError, match=r"several servers \(a:8000, b:8000\).*\?instance=a:8000"):
        reading(answers, lambda server: f"prometheus+{server.url}", read_once)
    found = reading(
        answers,
        lambda server: f"prometheus+{server.url}?instance=b:8000&gpu.Hostname=b",
        read_once,
    )
    assert [f.server or f.gpu for f in found] == [{"running": 2}, {"gpu0_power_w": 80}]
    with pytest.raises(ConfigError, match="no metric of an engine"):
        reading(answers, lambda server: f"prometheus+{server.url}?instance=c", read_once)


def test_a_prometheus_that_refuses_once_brings_it_all_the_next_time():
    now_s = time.time() + 100
    known = matrix(series("vllm:num_requests_running", (now_s, 1), instance="a"))

    async def use(source, server):
        server.answers["/api/v1/query"] = {"status": "error", "error": "overloaded"}
        during = await source.read()
        server.answers["/api/v1/query"] = known
        return during, len(await source.read())

    answers = {"/api/v1/query": known}
    assert reading(answers, lambda server: f"prometheus+{server.url}", use) == ([], 1)


# telegraf


def row(fields, at, name="prometheus", **tags):
    return {"fields": fields, "name": name, "tags": tags, "timestamp": at}


def following(tmp_path, texts, query=""):
    """Follow a file to which `texts` are appended one by one; return each call's figures."""
    file = tmp_path / "metrics.json"
    old = row({"vllm:num_requests_running": 99}, time.time() + 50, url="u")
    file.write_text(json.dumps(old) + "\n")

    async def use(source, _server):
        found = []
        for text in texts:
            with file.open("a") as stream:
                stream.write(text)
            found.append([dict(f.server or f.gpu) for f in await source.read()])
        return found

    return reading({}, lambda _: f"telegraf+file://{file}{query}", use)


def test_telegraf_lines_are_followed_from_the_files_end_on(tmp_path):
    now_s = time.time() + 100
    line = json.dumps(row({"vllm:num_requests_running": 3}, now_s, url="u"))
    assert following(tmp_path, [line[:20], line[20:] + "\n", "no JSON\n", ""]) == [
        [],
        [{"running": 3}],
        [],
        [],
    ]


def test_both_layouts_batches_and_every_unit_of_time_are_read(tmp_path):
    now_s = time.time() + 100
    texts = [
        # Version 2 in a batch, in milliseconds.
        json.dumps(
            {
                "metrics": [
                    row({"sglang:num_running_reqs": 2.0}, int(now_s * 1e3), url="u"),
                    row({"sglang:num_queue_reqs": 1.0}, int(now_s * 1e3), url="u"),
                    row({"DCGM_FI_DEV_FB_USED": 1.0}, int(now_s * 1e3), url="d", gpu="0"),
                ]
            }
        ),
        # Version 1, in nanoseconds.
        json.dumps(
            row({"gauge": 5.0}, int((now_s + 1) * 1e9), name="vllm:num_requests_running", url="u")
        ),
    ]
    assert following(tmp_path, [text + "\n" for text in texts]) == [
        [{"running": 2, "waiting": 1}, {"gpu0_memory_bytes": 2**20}],
        [{"running": 5}],
    ]


def test_telegraf_of_several_servers_needs_a_label(tmp_path):
    now_s = time.time() + 100
    text = "".join(
        json.dumps(row({"vllm:num_requests_running": n}, now_s, url=f"http://{n}")) + "\n"
        for n in (1, 2)
    )
    with pytest.raises(ConfigError, match=r"several servers.*\?url="):
        following(tmp_path, [text])
    assert following(tmp_path, [text], "?url=http://2") == [[{"running": 2}]]


def test_telegraf_of_several_servers_is_an_error_before_the_first_trial(tmp_path):
    file = tmp_path / "metrics.json"
    rows = [row({"vllm:num_requests_running": n}, 1e9, url=f"http://{n}") for n in (1, 2)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    url = f"telegraf+file://{file}"
    with pytest.raises(ConfigError, match="several servers"):
        reading({}, lambda _: url, lambda *_: asyncio.sleep(0))
    reading({}, lambda _: url + "?url=http://1", lambda *_: asyncio.sleep(0))


def test_a_rotated_file_is_followed_under_its_name(tmp_path):
    file = tmp_path / "metrics.json"
    file.write_text("x" * 1000 + "\n")

    async def use(source, _server):
        file.write_text(json.dumps(row({"vllm:num_requests_running": 1}, time.time() + 9)) + "\n")
        (figures,) = await source.read()
        file.unlink()
        return figures.server, await source.read()

    assert reading({}, lambda _: f"telegraf+file://{file}", use) == ({"running": 1}, [])
