import jinja2
import pytest

from tailrace.text import template_engine
from tailrace.text.template_engine import ChatEnvironment, RenderedTooLongError


def render(source, **variables):
    environment = ChatEnvironment()
    return environment.render(environment.from_string(source), variables)


def test_blocks_leave_no_white_space_and_loops_can_be_left():
    source = (
        "{% for x in [1, 2, 3] %}\n  {% if x == 3 %}{% break %}{% endif %}\n{{ x }}\n{% endfor %}"
    )
    assert render(source) == "1\n2\n"


def test_json_keeps_html_and_unicode():
    assert render("{{ x | tojson }}", x={"a": "<é>&'"}) == '{"a": "<é>&\'"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_a_generation_block_shows_its_text():
    assert render("a{% generation %}{{ x }}{% endgeneration %}c", x="b") == "abc"


def test_the_date_is_written_by_the_templates_format():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_the_template_can_refuse():
    with pytest.raises(jinja2.TemplateError, match="no system"):
        render("{{ raise_exception('no system') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ self._TemplateReference__context.environment }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ 2 ** 99999999 }}",
        "{% for _ in range(99999999) %}{% endfor %}",
    ],
)
def test_what_leads_out_of_the_sandbox_is_refused(source):
    with pytest.raises((jinja2.TemplateError, OverflowError)):
        render(source, messages=[])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'ab' * 600 }}",
        "{{ 600 * 'ab' }}",
        "{% set n = namespace(s='x') %}{% for _ in range(64) %}{% set n.s = n.s+n.s %}{% endfor %}",
        "{% for _ in range(99) %}{% for _ in range(99) %}x{% endfor %}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped_at_the_limit(monkeypatch, source):
    monkeypatch.setattr(template_engine, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RenderedTooLongError, match="limit of 1000"):
        render(source)


def test_free_names_are_those_that_the_template_does_not_set_for_good():
    source = (
        "{% if date is not defined %}{% set date = 'x' %}{% endif %}{% set own = 1 %}"
        "{% for m in messages %}{{ m.x }}{{ loop.index }}{{ own }}{{ date }}{% endfor %}"
        "{{ raise_exception(y) if thinking is defined and thinking is false }}"
    )
    assert ChatEnvironment().free_names(source) >= {"date", "messages", "thinking", "y"}
    assert not ChatEnvironment().free_names(source) & {"own", "m", "loop", "raise_exception"}
