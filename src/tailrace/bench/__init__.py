"""The harness: real traffic against any OpenAI-compatible URL, judged from the schedule.

It talks HTTP like any client and imports nothing of the engine or the server. In order of use:
`traffic` (when, how long), `prompts` (what), `load` (send, stamp), `records` (what happened),
`stats` and `validity` (what it means, and whether to believe it), `report` (for people).
`replay` joins them; `launch` starts a server on this machine; `demo` is both in one command.
"""
