"""An agent on `openai-agents`, OpenAI's Agents SDK, that asks a second agent to add."""

import json
import os
import sys
import urllib.request

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> str:
    """Adds two integers."""
    return str(a + b)


def main() -> None:
    set_tracing_disabled(True)
    row, model = json.load(sys.stdin), os.environ["JAXRL_MODEL"]
    adder = Agent(name="adder", instructions="Use your tool.", model=model, tools=[add])
    ask = adder.as_tool(tool_name="ask_adder", tool_description="Asks an agent that adds.")
    lead = Agent(name="lead", instructions="Ask the adder.", model=model, tools=[ask])
    answer = Runner.run_sync(lead, sys.argv[1]).final_output
    reward = {"reward": float(answer == row["answer"])}
    request = urllib.request.Request(os.environ["JAXRL_REWARD_URL"], json.dumps(reward).encode())
    urllib.request.urlopen(request).close()


if __name__ == "__main__":
    main()
