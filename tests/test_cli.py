import subprocess
import sys
from dataclasses import fields

import pytest

from tailrace.config import EngineConfig, ServerConfig


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": ""},
    )


def test_serve_has_one_option_for_each_setting():
    shown = run("serve", "--help").stdout
    for entry in [*fields(EngineConfig), *fields(ServerConfig)]:
        assert f"--{entry.name.replace('_', '-')}" in shown
        assert entry.metadata["help"]


@pytest.mark.parametrize("command", [["--help"], ["serve", "--help"], ["bench", "--help"]])
def test_help_imports_neither_torch_nor_the_server(command):
    probe = (
        "import sys; from tailrace.cli import app\n"
        f"try: app({command!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'uvicorn', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_print_config_shows_what_would_run():
    shown = run("serve", "--print-config", "--port", "9", "--no-prefix-cache").stdout
    assert "port = 9\n" in shown
    assert "prefix-cache = False\n" in shown


def test_a_bad_setting_is_one_readable_line_and_status_1():
    done = run("serve", "--block-size", "7")
    assert done.returncode == 1
    assert done.stderr == "tailrace: --block-size 7: must be one of auto, 8, 16, 32\n"


def test_a_mistyped_option_names_the_nearest():
    done = run("serve", "--blok-size", "8")
    assert done.returncode == 2
    assert "--block-size" in done.stderr
