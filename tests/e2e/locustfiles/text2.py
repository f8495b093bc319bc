"""A closed loop of short and long prompts; an answer over 300 ms is a breach, counted apart.

locust -f text2.py --headless -u 50 -r 10 -t 10m --host http://...
"""

import os
import random

from locust import HttpUser, between, events, task

LIMIT_MS = 300
OUTPUT_TOKENS = int(os.environ.get("OUTPUT_TOKENS", "256"))
TEXT = (
    "the server queue holds many requests while each user waits for an answer about rivers "
    "mountains bread music history numbers and the weather of a long summer"
)
WORDS = TEXT.split()


def prompt():
    """About so many tokens: a common English word is one."""
    length = random.randint(32, 128) if random.random() < 0.7 else random.randint(512, 2048)
    return " ".join(random.choices(WORDS, k=length))


class GenerateUser(HttpUser):
    wait_time = between(0.1, 2.0)

    @task
    def generate(self):
        body = {
            "prompt": prompt(),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0.7,
            "top_p": 0.95,
        }
        with self.client.post("/generate", json=body, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
                return
            latency_ms = response.json()["metrics"]["request_latency_ms"]
            response.success()
        if latency_ms > LIMIT_MS:
            events.request.fire(
                request_type="BREACH",
                name=f"over {LIMIT_MS} ms",
                response_time=latency_ms,
                response_length=0,
                exception=None,
                context={},
            )
