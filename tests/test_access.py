"""Keys and classes of the config file."""

import msgspec
import pytest

from tailrace.access import Access, KeyClass, KeyHolder
from tailrace.config import Config, load
from tailrace.errors import ConfigError

GOOD = """
max-batch-size = 4

[[classes]]
name = "interactive"
share = 4
max-sequences = 16

[[classes]]
name = "batch"
priority = 10

[keys.alice]
key = "sk-alice"
class = "interactive"

[keys."bob.2"]
key-env = "TAILRACE_BOB_KEY"
class = "batch"
"""


def written(folder, text):
    file = folder / "t.toml"
    file.write_text(text)
    return file


def test_keys_are_read_with_their_classes_beside_the_settings(tmp_path):
    config = load({}, file=written(tmp_path, GOOD), environ={"TAILRACE_BOB_KEY": "sk-bob"})
    assert config.engine.max_batch_size == 4
    alice, bob = config.access.holders
    assert alice == KeyHolder(
        name="alice",
        key="sk-alice",
        key_class=KeyClass(name="interactive", priority=0, share=4.0, max_sequences=16),
    )
    assert (bob.name, bob.key, bob.key_class.priority) == ("bob.2", "sk-bob", 10)
    assert bob.key_class.share == 1.0
    assert "sk-alice" not in repr(config)
    assert "sk-alice" not in repr(config.as_flat())
    # Other front ends get the configuration as JSON.
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_without_tables_there_are_no_keys(tmp_path):
    assert load({}, file=written(tmp_path, "port = 1"), environ={}).access == Access()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("keys = 3", r"\[keys.NAME\]"),
        ("classes = 3", r"\[\[classes\]\]"),
        ("[[classes]]\npriority = 1", "name 'None' must be"),
        ("[[classes]]\nname = 'a b'", "letters"),
        ("[[classes]]\nname = 'a'\n[[classes]]\nname = 'a'", "already"),
        ("[[classes]]\nname = 'a'\nprioritty = 1", "did you mean 'priority'"),
        ("[[classes]]\nname = 'a'\npriority = 1.5", "whole number"),
        ("[[classes]]\nname = 'a'\npriority = true", "whole number"),
        ("[[classes]]\nname = 'a'\nshare = 0", "share is 0"),
        ("[[classes]]\nname = 'a'\nshare = nan", "share is nan"),
        ("[[classes]]\nname = 'a'\nmax-sequences = -1", "max-sequences is -1"),
        ("[keys.k]\nkey = 'x'\nclass = 'a'", r"none of \[\[classes\]\] \(none\)"),
        ("[[classes]]\nname = 'batch'\n[keys.k]\nkey = 'x'\nclass = 'bacth'", "did you mean"),
        ("[[classes]]\nname = 'a'\n[keys.k]\nclass = 'a'", "one of key and key-env"),
        ("[[classes]]\nname = 'a'\n[keys.k]\nkey = ''\nclass = 'a'", "not empty"),
        ("[[classes]]\nname = 'a'\n[keys.k]\nkey = ' x'\nclass = 'a'", "without blanks"),
        ("[[classes]]\nname = 'a'\n[keys.k]\nkey-env = 'NOT'\nclass = 'a'", "no environment"),
        ("[[classes]]\nname = 'a'\n[keys.k]\nkey = 'x'\nclass = 'a'\nid = 1", "unknown setting"),
        ("[keys]\nk = 'x'", "must be a table"),
        (
            "[[classes]]\nname='a'\n[keys.k]\nkey='x'\nclass='a'\n[keys.l]\nkey='x'\nclass='a'",
            "the same key",
        ),
    ],
    ids=lambda value: value[:24].replace("\n", " ") if "=" in value else None,
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, text, wanted):
    with pytest.raises(ConfigError, match=wanted) as caught:
        load({}, file=written(tmp_path, text), environ={})
    assert "t.toml" in str(caught.value)
    assert "'x'" not in str(caught.value)
