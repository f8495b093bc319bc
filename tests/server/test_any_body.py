"""Whatever JSON a client sends, it gets an answer or a 4xx, and nothing stays behind."""

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.server.protocol import ChatBody, CompletionBody, GenerateBody
from tailrace.server.routes_generate import ROUTES as GENERATE
from tailrace.server.routes_openai import ROUTES as OPENAI
from tests.server.hand_made import HandMadeRequest, load_text, make_services

BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/generate": GenerateBody,
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30]),
    st.floats(-3, 3),
    st.sampled_from([1e308, 5e-324]),
    st.text(max_size=5),
    st.sampled_from(["<|im_end|>", "text", "user", "none", "\x00", "é"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "65", "n", "top_k"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
GOOD = {
    "prompt": st.sampled_from(["Hi", [72, 105], ["a", "b"]]),
    "messages": st.just([{"role": "user", "content": "Hi"}]),
    "max_tokens": st.integers(1, 5),
    "stream": st.booleans(),
    "n": st.integers(1, 3),
}


@st.composite
def bodies(draw, path):
    """A body of good fields, up to two of them replaced by anything."""
    names = BODIES[path].__struct_fields__
    body = {name: draw(good) for name, good in GOOD.items() if name in names}
    for name in draw(st.lists(st.sampled_from(names), max_size=2)):
        body[name] = draw(VALUES)
    return body


@pytest.fixture(scope="module")
def text(tiny_folder):
    return load_text(tiny_folder)


@pytest.mark.parametrize("path", list(BODIES))
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_is_answered_or_refused(text, path, data):
    body = data.draw(bodies(path))
    services = make_services(None, text=text)

    async def main():
        request = HandMadeRequest(body)
        try:
            await asyncio.wait_for({**OPENAI, **GENERATE}["POST", path](services, request), 120)
        except RequestError as error:
            return error.status, error.message
        return request.status, b"".join(request.sent)

    status, answered = asyncio.run(main())
    assert status in (200, 400, 404), answered
    if status == 200:
        assert answered.endswith(b"data: [DONE]\n\n") or msgspec.json.decode(answered)
    assert services.admission.sequences == 0
    assert services.engine.open_requests == 0
