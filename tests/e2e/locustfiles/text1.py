"""Users who stream answers to logged prompts; a request with fewer than 10 tokens has failed.

    PROMPTS=prompts.jsonl locust -f text1.py --headless -u 128 -r 10 -t 30m --host http://...

Each line of the file is {"prompt": "...", "output_tokens": N}.
"""

import json
import os
import random
import time
from pathlib import Path

from locust import HttpUser, between, task

PROMPTS = [json.loads(line) for line in Path(os.environ["PROMPTS"]).read_text("utf-8").splitlines()]
MIN_TOKENS = 10


class StreamingUser(HttpUser):
    wait_time = between(0.1, 0.5)

    @task
    def generate(self):
        logged = random.choice(PROMPTS)
        body = {
            "prompt": logged["prompt"],
            "max_tokens": logged["output_tokens"],
            "stream": True,
            "temperature": 0.7,
        }
        started = time.perf_counter()
        first_token = None
        tokens = 0
        with self.client.post(
            "/generate", json=body, stream=True, catch_response=True, name="generate"
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                if json.loads(line[6:]).get("token") is not None:
                    tokens += 1
                    first_token = first_token or time.perf_counter()
            if tokens < MIN_TOKENS:
                response.failure(f"only {tokens} tokens")
                return
            response.success()
        self.report("first token", first_token - started)
        self.report("end to end", time.perf_counter() - started)

    def report(self, name, seconds):
        self.environment.events.request.fire(
            request_type="MEASURE",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=None,
            context={},
        )
