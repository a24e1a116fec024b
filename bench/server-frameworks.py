#!/usr/bin/env python3
"""Runs the frameworks instructor and openai-agents against a running `forebay serve`: objects, streams, agents with tools, errors.

    bench/server-frameworks.py [ADDRESS] [--key KEY] [--models NAME...]

ADDRESS is http://127.0.0.1:8080 unless given. Checks all models of the server unless some are named. Needs the packages instructor,
openai-agents and anthropic; `.ci/clients` installs them apart from those of bench/server-clients.py, because instructor wants an older
version of openai. Prints a table of frameworks and models. Exit status 1 if a check failed.

Every model is made to call tools, which its grammar guarantees even if its weights are random.
"""

import asyncio
import logging
import os

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # Otherwise it reports each run to a server elsewhere.

import anthropic
import instructor
import openai
from agents import (Agent, AgentOutputSchema, ModelBehaviorError, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel,
                    RunConfig, Runner, function_tool)
from instructor.core import InstructorRetryException
from openai.types.shared import Reasoning
from pydantic import BaseModel, ConfigDict, Field, field_validator

from client_checks import MESSAGES, check, finish, read_arguments, refused

arguments = read_arguments()
ADDRESS, KEY, V1 = arguments.address, arguments.key, arguments.address + "/v1"
# Both log the errors that are expected here.
logging.getLogger("instructor").setLevel(logging.CRITICAL)
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)
LOOP = asyncio.new_event_loop()
plain = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)


class Fox(BaseModel):
    """A fox."""

    model_config = ConfigDict(extra="forbid")
    legs: int = Field(ge=0, le=9)


def is_fox(value):
    return isinstance(value, Fox) and list(value.model_dump()) == ["legs"] and 0 <= value.legs <= 9


def check_instructor(model):
    def ask(mode, kind=Fox, call="create", **more):
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)
        # Responses name the limit and the effort otherwise.
        usual = ({"max_output_tokens": 200, "reasoning": {"effort": "none"}} if mode == instructor.Mode.RESPONSES_TOOLS
                 else {"max_tokens": 200, "reasoning_effort": "none"})
        return getattr(client, call)(**{"model": model, "response_model": kind, "messages": MESSAGES, "max_retries": 0, **usual, **more})

    def claude(mode):
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0), mode=mode)
        return client.create(model=model, response_model=Fox, max_tokens=200, max_retries=0, messages=MESSAGES)

    def partly():
        parts = list(ask(instructor.Mode.TOOLS, call="create_partial"))
        assert len(parts) > 1 and parts[0].legs is None, parts
        return is_fox(Fox(**parts[-1].model_dump()))

    def asked_again():
        seen = []

        class Patient(Fox):
            """A fox that is right at the second time."""

            @field_validator("legs")
            @classmethod
            def second(cls, value):
                seen.append(value)
                if len(seen) == 1:
                    raise ValueError("once more")
                return value

        # The second request has the first call and the validator's words as the result of the tool.
        fox, answer = ask(instructor.Mode.TOOLS, Patient, call="create_with_completion", max_retries=2)
        first = plain.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1).usage.prompt_tokens
        return is_fox(fox) and len(seen) == 2 and answer.usage.prompt_tokens > first

    for name, work in {
        "tools": lambda: is_fox(ask(instructor.Mode.TOOLS)),
        "schema": lambda: is_fox(ask(instructor.Mode.JSON_SCHEMA)),
        "response, tools": lambda: is_fox(ask(instructor.Mode.RESPONSES_TOOLS)),
        "anthropic, tools": lambda: is_fox(claude(instructor.Mode.ANTHROPIC_TOOLS)),
        "tools, streamed": partly,
        "asked again": asked_again,
        "error: unknown model": lambda: refused(
            InstructorRetryException, lambda: ask(instructor.Mode.TOOLS, model="none"), lambda e: "model_not_found" in str(e)),
    }.items():
        check("instructor", model, name, work)


class Story(BaseModel):
    """A story of three words."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(pattern="^[a-z]{3,9}( [a-z]{3,9}){2}$")


def check_agents(model):
    # openai-agents takes a response that the limit cut off for an error, so these answers end by their schema.
    few = {"max_tokens": 90, "temperature": 0, "reasoning": Reasoning(effort="none")}
    forced = {**few, "max_tokens": 200, "tool_choice": "required", "parallel_tool_calls": False}
    untraced = RunConfig(tracing_disabled=True)

    def talk(kind, settings=few, words="Once upon a time", stream=False, model=model, others=(), agent=None, **options):
        """Runs an agent, and returns its result. `others` are names of agents to which it may hand over, `agent` its other options."""
        async def run():
            async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as client:
                own = kind(model, client)
                common = {"model": own, "output_type": Story}
                handoffs = [Agent(name=name, model_settings=ModelSettings(**few), **common) for name in others]
                teller = Agent(**{"name": "teller", "instructions": "Be short.", "model_settings": ModelSettings(**settings),
                                  "handoffs": handoffs, **common, **(agent or {})})
                if not stream:
                    return await Runner.run(teller, words, run_config=untraced, **options)
                result = Runner.run_streamed(teller, words, run_config=untraced, **options)
                result.pieces = "".join([event.data.delta async for event in result.stream_events() if event.type == "raw_response_event"
                                         and event.data.type == "response.output_text.delta"])
                return result
        return LOOP.run_until_complete(run())

    def tokens(result):
        return result.context_wrapper.usage.input_tokens

    def called(kind, output_type=None, **options):
        """Runs an agent until its first call of a tool, and returns the result. What the tool got decides about what it returns."""
        given = []

        @function_tool
        def look(legs: int) -> str:
            """Looks at an animal."""
            given.append(legs)
            return f"an animal of {legs} legs"

        own = {"tools": [look], "tool_use_behavior": "stop_on_first_tool", "output_type": output_type}
        result = talk(kind, forced, agent=own, **options)
        assert len(given) == 1 and result.final_output == f"an animal of {given[0]} legs", (given, result.final_output)
        return result

    def answered(kind):
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Once upon a time"}]
        form = {"name": "final_output", "strict": True, "schema": AgentOutputSchema(Story).json_schema()}
        answer = plain.chat.completions.create(model=model, messages=messages, max_tokens=90, temperature=0, reasoning_effort="none",
                                               response_format={"type": "json_schema", "json_schema": form})
        result = talk(kind)
        story = Story.model_validate_json(answer.choices[0].message.content)
        return (result.final_output, tokens(result)) == (story, answer.usage.prompt_tokens)

    def streamed(kind):
        result = talk(kind, stream=True)
        return result.final_output == Story.model_validate_json(result.pieces) == talk(kind).final_output

    def went_on(kind):
        """The conversation goes on with the call and its result, without tools."""
        asked = [*called(kind).to_input_list(), {"role": "user", "content": "And then?"}]
        return tokens(talk(kind, words=asked)) > tokens(talk(kind, words=[asked[0], asked[-1]])) + 10

    def unknown(kind):
        return refused(openai.NotFoundError, lambda: talk(kind, model="none"), lambda e: e.code == "model_not_found")

    for interface, kind in (("chat", OpenAIChatCompletionsModel), ("response", OpenAIResponsesModel)):
        for name, work in {
            "answer": answered,
            "streamed": streamed,
            "tools": lambda kind: called(kind).last_agent.name == "teller",
            "tools, streamed": lambda kind: called(kind, stream=True).last_agent.name == "teller",
            "tools beside a schema": lambda kind: called(kind, Story).last_agent.name == "teller",
            "results of tools": went_on,
            "handed over": lambda kind: talk(kind, forced, others=["other"]).last_agent.name == "other",
            "error: unknown model": unknown,
        }.items():
            check("openai-agents", model, f"{interface}: {name}", lambda work=work, kind=kind: work(kind))

    def continued():
        first = talk(OpenAIResponsesModel)
        return tokens(talk(OpenAIResponsesModel, words="And then?", previous_response_id=first.last_response_id)) > tokens(first)

    def cut():
        return refused(ModelBehaviorError, lambda: talk(OpenAIResponsesModel, {**few, "max_tokens": 1}), lambda e: "max_output_tokens" in str(e))

    check("openai-agents", model, "response: continued", continued)
    check("openai-agents", model, "response: cut off", cut)


names = arguments.models or [found.id for found in plain.models.list().data]
checks = {"instructor": check_instructor, "openai-agents": check_agents}
for of_framework in checks.values():
    for name in names:
        of_framework(name)
finish(checks, names)
