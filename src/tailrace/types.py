"""The contract between the rooms: what crosses a process border, as plain values.

Everything here is a msgspec Struct, so it travels over ZeroMQ as MessagePack and never as a
pickle. The front end owns text; the engine owns token ids. A request enters the engine as
`EngineRequest` and leaves it as `TokenOutput`s, the last of which has a `finish_reason`.
"""

from __future__ import annotations

import math

import msgspec

STEP_HUNG_STATUS = 75
"""The exit status of an engine whose device did not end a step: sysexits' "temporary failure", for
another process may fare better."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the engine turns logits into token ids for one sequence.

    Stop strings and `n` are not here: the front end owns text and fans out.
    Order of application: logit_bias, min_tokens mask, grammar mask, penalties (repetition, then
    frequency and presence), temperature, top_k, top_p, min_p (each on what the former left), draw.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the arg-max after bias and penalties, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Drops tokens less likely than `min_p` times the most likely one."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence besides the model's own end-of-sequence ids; the token is not text."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Until so many tokens are out, end-of-sequence and stop ids cannot be drawn."""
    logprobs: int | None = None
    """For each output token: its log-probability, and those of the top n. 0: its own only."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first, under the model's prediction for it."""
    grammar: str = ""
    """What the output must match, in llguidance's form (see text/grammar); "" is no constraint.
    The sequence ends with "stop" once nothing can follow, without an end-of-sequence token."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """One sequence to continue."""

    request_id: str
    token_ids: list[int]
    """The prompt; never empty."""
    sampling: SamplingParams
    arrival_s: float
    """Monotonic seconds at which the front end had the request complete."""
    priority: int = 0
    """Smaller is served sooner."""
    key: str = ""
    """Whose it is: the name of an API key, never the key; requests share by it."""
    share: float = 1.0
    """Of the tokens served to keys of one priority."""
    max_sequences: int = 0
    """Most that this key may have here, waiting or running; 0: no limit of its own."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only between requests of one salt."""


class ReserveKv(msgspec.Struct, frozen=True, tag="reserve"):
    """Lease KV for a request whose body is still arriving.

    The request of this id takes the lease over; `AbortRequests`, or time, gives it back.
    """

    request_id: str
    num_tokens: int
    """Known of its prompt so far. Only what nobody else was promised is leased."""
    lifetime_s: float
    """Given back where the request has not come by then."""


class GrowPrompt(msgspec.Struct, frozen=True, tag="grow"):
    """More of the prompt of a request whose body is still arriving: it may be computed early.

    Such work is the least urgent and may be given up at any time. The request of this id goes on
    from it where its ids begin so and nothing else of it says otherwise; `AbortRequests`, or time,
    ends it.
    """

    request_id: str
    start: int
    """Where `token_ids` stand in the prompt. A piece that does not follow on the last is ignored;
    so the pieces of a prompt that was given up are."""
    token_ids: list[int]
    """Certain if the body goes on as it began."""
    lifetime_s: float
    """Of the first piece: given up where the request has not come by then."""
    cache_salt: str = ""
    """Of the first piece: as the request's will be, if its body says nothing of one."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; their KV units return within one step. Unknown ids are no error."""

    request_ids: list[str]


class ForgetFrontend(msgspec.Struct, frozen=True, tag="forget"):
    """A front end has died: end what it asked for. Sent by whoever watches the front ends."""

    name: str
    """Of its socket's identity, as it chose it, all that comes before the last dot."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask the engine for `EngineStats` now (an idle engine publishes none)."""


class InspectKv(msgspec.Struct, frozen=True, tag="inspect_kv"):
    """Ask for a `KvReport`; checking a large pool holds the next step up."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit with status 0 once no request is left."""


FrontendMessage = (
    EngineRequest
    | ReserveKv
    | GrowPrompt
    | AbortRequests
    | ForgetFrontend
    | Ping
    | InspectKv
    | Shutdown
)
"""What a front end sends to the engine."""


class TokenLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities (natural logarithm, of the raw logits) at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class RequestTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """When things happened to a request, in monotonic seconds, as the engine saw them.

    The phases `queue_s` to `preempted_s` are durations; they add up to `finished_s - arrival_s`.
    """

    arrival_s: float
    """The request's own."""
    scheduled_s: float
    """Its first step began; 0 where it was in none."""
    first_token_s: float
    finished_s: float
    """When this was said: final with the last output."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    queue_s: float = 0.0
    """Until its first step began."""
    prefill_s: float = 0.0
    """From there to its first token, but for the part of other sequences' prompts."""
    prefill_wait_s: float = 0.0
    """That part: steps are divided among their tokens alike."""
    decode_s: float = 0.0
    """From the first token on."""
    decode_wait_s: float = 0.0
    """Of `decode_s`: other sequences' prompts."""
    preempted_s: float = 0.0
    """Sent back to wait, and computed again as far as it was."""


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step brought to one request."""

    request_id: str
    token_ids: list[int]
    """New tokens; a token that ended the sequence (EOS or stop id) is included as the last."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, where the request asked."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Sent once, with the first token; one for each prompt token, the first being None."""
    finish_reason: str | None = None
    """"stop" (EOS or stop id), "length", "abort", "error" or "refused" (no room, or too late); None
    while the sequence goes on."""
    stop_token_id: int | None = None
    """The token that caused "stop", so that the front end leaves it out of the text."""
    error: str | None = None
    """For "error" and "refused": what happened, fit for the client."""
    may_retry: bool = False
    """For "error": the same request may succeed later."""
    retry_after_s: float | None = None
    """For "refused": when there will be room, as predicted; None where nothing can be."""
    refusal: str = ""
    """For "refused": which rule it was, as the client's error code has it."""
    predicted_ttft_s: float | None = None
    """With the first token, and where it was refused: from `arrival_s` to the first token, as
    expected when the request came."""
    times: RequestTimes | None = None
    """With the first token, with the first one after a preemption, and with the last output."""


FEW_DECODES = 32
"""Their arithmetic hides behind reading weights of 4 bits."""


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """What a step costs on this machine, as last learnt; see engine/step_time.py for the form.

    All seconds; none is negative. Front ends may predict with it what the engine will do.
    """

    base_s: float
    """Of any step: the weights are read once, whoever is in it."""
    token_s: float
    """Of each row beyond `free_rows`: what the arithmetic takes once it outlasts the reading."""
    free_rows: int
    """Rows (prompt tokens and decodes) whose arithmetic hides behind the reading of weights."""
    attention_s: float
    """Of each pair of a prompt token and a position that it attends to."""
    decode_s: float
    """Of each decode."""
    kv_s: float
    """Of each position that a decode attends to."""
    prompts_apart: bool = False
    """Whether prompts are multiplied by a copy of the weights of their own: then `token_s` and
    `free_rows` are of prompt tokens alone, and what follows is not 0."""
    prompts_s: float = 0.0
    """Of a step with prompt tokens: their copy is read."""
    decodes_s: float = 0.0
    """Of a step with decodes: theirs is."""
    crowd_s: float = 0.0
    """Of each decode beyond `FEW_DECODES`: its arithmetic no longer hides behind that."""
    late_token_s: float = 0.0
    """Of each prompt token beyond twice `free_rows`, as well: what hides does not end at once."""

    def seconds(self, tokens: float, pairs: float, decodes: int, context: float) -> float:
        """Return the seconds of a step as `predict` does, of parts of tokens too, and never 0."""
        return (
            self.base_s
            + self.arithmetic_s(tokens, decodes)
            + self.attention_s * pairs
            + self.decode_s * decodes
            + self.kv_s * context
            # These are 0 where one copy serves both.
            + (self.prompts_s if tokens > 0.0 else 0.0)
            + (self.decodes_s if decodes else 0.0)
            + self.crowd_s * max(0, decodes - FEW_DECODES)
        )

    def arithmetic_s(self, tokens: float, decodes: int) -> float:
        """Return what prompt tokens beside decodes add, and decodes beyond the free rows."""
        rows = tokens if self.prompts_apart else tokens + decodes
        late = self.late_token_s * max(0.0, rows - 2 * self.free_rows)
        return self.token_s * max(0.0, rows - self.free_rows) + late

    def again_s(self, tokens: int) -> float:
        """Return what so many tokens of one sequence, from its first, add to steps full of others.

        Such steps have used up the free rows, and twice as many, so each token pays for all of its
        arithmetic; what a step costs once is paid already.
        """
        return (self.token_s + self.late_token_s) * tokens + self.attention_s * attended(0, tokens)

    def tokens_within(self, seconds: float, depth: float, decodes: int) -> float:
        """Return how many prompt tokens, at most, add so many seconds to a step of decodes.

        Args:
            seconds: That they may add; what any prompt adds is not among them.
            depth: Positions that each of them attends to.
            decodes: Of the step.
        """
        beside = 0 if self.prompts_apart else decodes
        fitting, taken_s = 0.0, 0.0
        slope_s = self.attention_s * depth
        for rows, steeper_s in (
            (self.free_rows, self.token_s),
            (2 * self.free_rows, self.late_token_s),
            (math.inf, 0.0),
        ):
            here = max(fitting, rows - beside)
            if slope_s and taken_s + slope_s * (here - fitting) > seconds:
                return fitting + max(0.0, seconds - taken_s) / slope_s
            taken_s += slope_s * (here - fitting) if slope_s else 0.0
            fitting, slope_s = here, slope_s + steeper_s
        return math.inf

    def predict(
        self, prefill_tokens: int, prefill_context: int, decodes: int, decode_context: int
    ) -> float:
        """Return the seconds of a step; 0 for an empty one.

        Args:
            prefill_tokens: Prompt tokens computed.
            prefill_context: Positions that they attend to, summed: `attended(start, end)` a chunk.
            decodes: Sequences that get their next token.
            decode_context: Positions that those attend to, summed.
        """
        if not prefill_tokens + decodes:
            return 0.0
        return self.seconds(prefill_tokens, prefill_context, decodes, decode_context)


def attended(start: int, end: int) -> int:
    """Return how many positions the tokens [start, end) of a prompt attend to, summed."""
    return (end - start) * (start + end + 1) // 2


HOST_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05)
STEP_BOUNDS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0),
)
STEP_RATIO_BOUNDS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0)
FORECAST_ERROR_BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """A histogram over the bounds that its name stands for above."""

    counts: tuple[int, ...]
    """One for each bound, of what is above the bound before; the last of what is above all."""
    total: float
    """Of all values."""


class StepTimings(msgspec.Struct, frozen=True, array_like=True):
    """Where steps' time went; see engine/step_meter.py. Totals grow while the process lives."""

    schedule_s_total: float
    prepare_s_total: float
    queue_s_total: float
    """Of the runner's thread: kernels and copies queued on a device; 0 on a CPU."""
    commit_s_total: float
    publish_s_total: float
    idle_s_total: float
    """Of the device, between two steps although the second was there."""
    predicted_s: float
    """Of the last step, when it was issued."""
    pace_margin: float
    """What predictions of steps cut to a time are taken by; see engine/pace_margin.py."""
    host: Distribution
    """`HOST_BOUNDS_S`: schedule, prepare, commit and publish of one step together."""
    device: Distribution
    """`STEP_BOUNDS_S`: what the device took for one step."""
    error: Distribution
    """`FORECAST_ERROR_BOUNDS`: |predicted - measured| / measured."""
    ratio: Distribution
    """`STEP_RATIO_BOUNDS`: measured / predicted; 1000 where that is more."""
    recent_error: float
    """Share by which predictions were off of late; see engine/prediction_watch.py."""
    off_s: float
    """Seconds of the device's time for which that has been too much, up to now."""
    is_off: bool
    """Whether that is long."""


class EngineStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine's state after a step; counters only grow while the process lives."""

    time_s: float
    running_requests: int
    waiting_requests: int
    total_blocks: int
    """A block here is a unit: the piece that the kernels address, `block_size` tokens."""
    free_blocks: int
    """Free now; those that only the prefix cache holds, or that are set aside, count as free."""
    block_size: int
    live_tokens: int
    """Tokens of running requests whose KV is held; what several share counts once."""
    held_blocks: int
    """Held by running requests, each counted once."""
    leased_blocks: int = 0
    """Promised to requests ahead of need."""
    lent_blocks: int = 0
    """Of those promised, how many others hold now."""
    wide_share: float = 0.0
    """Share of the block tables' entries that lie in aligned runs of 4."""
    prompt_tokens_total: int = 0
    """Computed; what a preemption makes them compute again is not counted again."""
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    preemptions_total: int = 0
    returns_total: int = 0
    """Preemptions of borrowers whose lender needed its blocks; others had outgrown their lease."""
    lent_blocks_total: int = 0
    evictions_total: int = 0
    """Cached blocks given to another text."""
    runs_total: tuple[int, int, int] = (0, 0, 0)
    """Runs of 1, 2 and 4 blocks handed out."""
    host_blocks: int = 0
    """Blocks that host memory can hold for preempted requests."""
    swapped_blocks: int = 0
    """Blocks that it holds."""
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    block_bytes: int = 0
    """Of KV in one block, over all layers."""
    steps_total: int = 0
    step_time_s: float = 0.0
    """Of the last step."""
    step_tokens: int = 0
    busy_s_total: float = 0.0
    """Seconds during which the device had a step to run."""
    frontends: dict[str, int] = {}
    """Requests held for each front end that has a name, by that name."""
    early_used_tokens_total: int = 0
    """Prompt tokens computed while their bodies arrived, and used."""
    early_dropped_tokens_total: int = 0
    """The same, given up: the body came to nothing or to another prompt, or units ran short."""
    step_costs: StepCosts | None = None
    """As learnt up to now; None where there was no warm-up to fit them."""
    timings: StepTimings | None = None
    place_free_s: float | None = None
    """From `time_s` until one of those that run ends, as predicted; None where nobody waits, or
    without a model of step time."""
    late_refusals_total: int = 0
    """Requests refused for a first token that would have come too late."""
    memory_failures_total: int = 0
    """Steps that found no memory on the device."""


class EngineOutputs(msgspec.Struct, frozen=True, omit_defaults=True, tag="outputs"):
    """One message per front end and step."""

    outputs: list[TokenOutput]
    stats: EngineStats


class KvTable(msgspec.Struct, frozen=True):
    """What one running request holds of the pool and is promised of it, in blocks."""

    request_id: str
    held: int
    shared: int
    """Leading ones that another request held when this one started."""
    ahead: int
    """Set aside next to its last one; lent where nothing else is free."""
    claim: int
    """Promised and not yet taken."""
    short: int
    """Expected to be needed beyond that."""
    debt: int
    """Taken of what others were promised."""


class KvReport(msgspec.Struct, frozen=True, tag="kv"):
    """The KV pool between two steps."""

    fault: str
    """The first rule that the pool breaks; empty where it is sound."""
    block_size: int
    total_blocks: int
    free_blocks: int
    reserved_blocks: int
    """Promised to requests that are still arriving."""
    tables: list[KvTable]
    host_blocks: int = 0
    """Blocks that host memory can hold for preempted requests."""
    swapped_blocks: int = 0
    """Blocks that it holds."""


class ModelResolved(msgspec.Struct, frozen=True, tag="resolved"):
    """The checkpoint is found and, where it was GGUF, converted: the tokenizer can be loaded."""

    folder: str
    """Holds tokenizer.json, tokenizer_config.json and config.json."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded and warmed up."""

    context_length: int
    """Most tokens (prompt and output) of one sequence."""
    vocab_size: int
    eos_token_ids: list[int]
    total_blocks: int
    block_size: int
    device: str
    """As a person would say it, such as "cpu (2 threads, native kernels, avx512)"."""
    load_s: float
    warmup_s: float
    step_costs: StepCosts | None = None
    """As fitted at warm-up; None where there was none."""


class EngineFatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or go on; the process exits after this."""

    error: str


EngineMessage = EngineOutputs | KvReport | ModelResolved | EngineReady | EngineFatal
"""What the engine sends to a front end."""
