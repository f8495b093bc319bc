"""Keys: every path but the probes, and no way around."""

import pytest

from tailrace.access import Access, KeyClass, KeyHolder
from tailrace.config import Config, ServerConfig
from tailrace.server.app import ROUTES
from tailrace.server.auth import PUBLIC_PATHS
from tests.server.running_app import running_app

KEY = "geheim-schlüssel"


@pytest.fixture(scope="module")
def app(tiny_folder):
    with running_app(tiny_folder, config=Config(server=ServerConfig(api_key=KEY))) as app:
        yield app


def named(name, key):
    return KeyHolder(name=name, key=key, key_class=KeyClass(name="c", priority=3, share=2.0))


def bearer(key):
    return {"authorization": f"Bearer {key}".encode()}


def test_three_probes_are_open_and_no_more():
    assert {"/health", "/ready", "/live"} == PUBLIC_PATHS


@pytest.mark.parametrize(("method", "path"), sorted(ROUTES))
def test_every_route_but_the_probes_asks_for_a_key(app, method, path):
    answer = app.client.request(method, path)
    assert (answer.status_code == 401) is (path not in PUBLIC_PATHS)
    if path not in PUBLIC_PATHS:
        error = answer.json()["error"]
        assert error["type"] == "authentication_error"
        assert "X-Api-Key" in error["message"]
        assert KEY not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1//models",
        "/v1/../metrics",
        "/health/../metrics",
        "/health/",
        "/health/..;/metrics",
        "//health",
        "/Health",
        "/health%2f..%2fmetrics",
        "/health%00",
        "/health;/metrics",
        "/%2e/metrics",
        "/metrics?/health",
        "/metrics#/health",
        "/v1%2Fmodels",
        "/%76ersion",
        "/nowhere",
        "/",
        "*",
        "http://127.0.0.1/metrics",
        "http://health/metrics",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE", "TRACE"])
def test_no_spelling_of_a_path_gets_around_the_key(app, method, path):
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    status = int(app.raw(head.encode()).split(b" ", 2)[1])
    assert status in (400, 401)  # 400: the target is no path at all
    assert status == 401 or path in ("*", "/metrics#/health")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(KEY + "x"),
        bearer(KEY[:-1]),
        bearer(KEY.upper()),
        {"authorization": KEY.encode()},
        {"authorization": f"Basic {KEY}".encode()},
        {"authorization": b"Bearer"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"cookie": f"key={KEY}".encode()},
    ],
)
def test_a_wrong_key_is_401(app, headers):
    assert app.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        {"authorization": f"bearer  {KEY}".encode()},
        {"authorization": f"BEARER {KEY}".encode()},
        {"x-api-key": KEY.encode()},
    ],
)
def test_the_key_opens_were_it_outside_ascii(app, headers):
    assert app.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["clé-à", "à", "Å"])
def test_a_key_may_end_in_bytes_that_latin1_reads_as_white_space(tiny_folder, key):
    # UTF-8 of "à" ends in 0xA0, a no-break space, and that of "Å" in 0x85, a next line.
    with running_app(tiny_folder, config=Config(server=ServerConfig(api_key=key))) as app:
        for headers in (bearer(key), {"x-api-key": key.encode()}):
            assert app.get("/v1/models", headers=headers).status_code == 200
        assert app.get("/v1/models", headers=bearer(key + "\u00a0")).status_code == 401


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
def test_probes_answer_without_a_key_and_with_a_wrong_one(app, path):
    assert app.get(path).status_code == 200
    assert app.get(path, headers=bearer("wrong")).status_code == 200


def test_a_refused_request_does_not_reach_the_engine(app):
    app.post("/generate", {"prompt": "Hi", "max_tokens": 1})
    assert app.engine.requests == []
    app.post("/generate", {"prompt": "Hi", "max_tokens": 1}, headers=bearer(KEY))
    assert len(app.engine.requests) == 1


def test_without_a_key_of_the_servers_everyone_may_come(tiny_folder):
    with running_app(tiny_folder) as app:
        assert app.get("/v1/models").status_code == 200
        assert app.get("/v1/models", headers=bearer("any")).status_code == 200


def test_each_named_key_opens_beside_the_one_without_a_name_and_tells_its_name(tiny_folder):
    access = Access((named("a", "key-a"), named("b", "schlüssel-b")))
    config = Config(server=ServerConfig(api_key=KEY), access=access)
    body = {"prompt": "Hi", "max_tokens": 2}
    with running_app(tiny_folder, config=config) as app:
        for key, name, priority in ((KEY, "", 0), ("key-a", "a", 3), ("schlüssel-b", "b", 3)):
            answer = app.post("/generate", body, headers=bearer(key))
            assert answer.status_code == 200
            told = app.engine.requests[-1]
            assert (told.key, told.priority) == (name, priority)
            assert key not in repr(told)
        for wrong in ("a", "key-", "key-ab", "KEY-A"):
            assert app.post("/generate", body, headers=bearer(wrong)).status_code == 401
        app.post("/generate", body, headers=bearer("key-a") | {"x-tailrace-priority": "4"})
        assert app.engine.requests[-1].priority == 4
        answer = app.post("/generate", body | {"priority": 2}, headers=bearer("key-a"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        answer = app.post("/generate", body, headers=bearer(KEY) | {"x-tailrace-priority": "x"})
        assert answer.status_code == 400


def salts(tiny_folder, config, askers):
    """Return the engine's salt for each key and body salt."""
    with running_app(tiny_folder, config=config) as app:
        for key, salt in askers:
            body = {"prompt": "Hi", "max_tokens": 1, "cache_salt": salt}
            assert app.post("/generate", body, headers=bearer(key)).status_code == 200
        return [asked.cache_salt for asked in app.engine.requests]


def test_of_several_keys_each_finds_its_own_cached_prefixes_alone(tiny_folder):
    access = Access((named("a", "key-a"), named("a-b", "key-b")))
    config = Config(server=ServerConfig(api_key=KEY), access=access)
    askers = [(key, salt) for key in (KEY, "key-a", "key-b") for salt in ("", "s", "1:a:", "0::s")]
    found = salts(tiny_folder, config, [*askers, ("key-a", "s")])
    assert len(set(found)) == len(askers)
    assert found[-1] == found[askers.index(("key-a", "s"))]  # the same key and salt: shared


@pytest.mark.parametrize(
    "config",
    [
        Config(server=ServerConfig(api_key="k")),
        Config(access=Access((named("a", "k"),))),
        Config(),
        Config(
            server=ServerConfig(api_key="k", share_prefix_cache=True),
            access=Access((named("a", "key-a"),)),
        ),
    ],
    ids=["one", "one named", "none", "shared by choice"],
)
def test_one_key_or_none_or_the_operators_word_leaves_salts_to_bodies(tiny_folder, config):
    assert salts(tiny_folder, config, [("k", ""), ("k", "s")]) == ["", "s"]


def test_named_keys_alone_close_the_door(tiny_folder):
    with running_app(tiny_folder, config=Config(access=Access((named("a", "key-a"),)))) as app:
        assert app.get("/v1/models").status_code == 401
        assert app.get("/v1/models", headers=bearer("key-a")).status_code == 200
