"""An event around a text is what encoding the whole of it would give."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace.server.text_frame import TextFrame

texts = st.text(st.characters(exclude_categories=["Cs"]))


def event_of(model):
    return lambda text: msgspec.json.encode({"model": model, "text": text, "ends": None})


@given(model=texts | st.sampled_from(["the text", '"the text"']), said=st.lists(texts, max_size=4))
def test_any_text_stands_where_it_would_be_encoded(model, said):
    frame = TextFrame(event_of(model))
    for text in said:
        assert frame.around(text) == event_of(model)(text)
        assert json.loads(frame.around(text)) == {"model": model, "text": text, "ends": None}
