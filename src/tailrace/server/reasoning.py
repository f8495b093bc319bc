"""How much the model is to think, said once: what a chat template is given for `reasoning_effort`.

Templates know of thinking by three names, which are read as vLLM and SGLang give them:

                      reasoning_effort   enable_thinking, thinking
    none              (only if alone)    false
    any other         itself             true

`chat_template_kwargs` go before them. Where a template has none of the three, an effort would
change nothing: it is refused, as an unknown variable is, but for "none", which holds as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.errors import RequestError

if TYPE_CHECKING:
    from tailrace.server.protocol import ChatBody
    from tailrace.text.chat import ChatTemplate

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LEVEL = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")


def template_variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any] | None:
    """Return the chat's further variables for the template.

    Raises:
        RequestError: The effort is unknown, or the template has no variable for it.
    """
    effort = body.reasoning_effort
    if effort is None or not template.exists:
        return body.chat_template_kwargs
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort is {effort[:40]!r}: send one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    names = template.variables(has_tools=bool(body.tools) and body.tool_choice != "none")
    thinks = effort != "none"
    variables: dict[str, Any] = {name: thinks for name in _SWITCHES if name in names}
    if _LEVEL in names and (thinks or not variables):
        variables[_LEVEL] = effort
    if thinks and not variables:
        raise RequestError(
            f"reasoning_effort is {effort!r}, but the model's chat template has no variable for "
            f"it ({', '.join((_LEVEL, *_SWITCHES))}): leave it out, or send 'none'",
            param="reasoning_effort",
        )
    return variables | (body.chat_template_kwargs or {})
