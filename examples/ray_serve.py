"""Serves a model on a Ray cluster with Ray Serve: one deployment, whose replicas are forebay's engines.

    pip install ./python "ray[serve]"
    python examples/ray_serve.py model.gguf --vram 8GiB --num-gpus 1 --max-replicas 4

Each replica is an actor with one engine. It has the model in its own memory, and answers many requests together. Ray Serve scales the
deployment up to `--max-replicas` while requests wait, and down when replicas are idle. A replica that is to stop gets no new requests,
and ends those that it has. `model` must be on every node under the same path, or in the model library of every node.

The address takes a part of the chat interface of OpenAI:

    curl -N localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Fields: messages, max_tokens, temperature, top_p, seed, stop, stream. Errors are JSON with a message: 400 for a wrong request, 503 with
Retry-After if too many requests wait, 500 if the engine failed. If the node of a replica is lost, streams that it had begun end
without "[DONE]"; other requests go to other replicas.

To run it on a cluster, pass the address of its head node in RAY_ADDRESS. docs/ray.md tells how the same runs on KubeRay.
"""

import argparse
import json
import time
import uuid

import forebay
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

OPTIONS = {"max_tokens", "temperature", "top_p", "seed", "stop"}


def failure(status: int, message: str) -> JSONResponse:
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def failure_of(error: forebay.Error) -> JSONResponse:
    if isinstance(error, forebay.OptionError):
        return failure(400, str(error))
    return failure(503 if isinstance(error, forebay.QueueFullError) else 500, str(error))


class Chat:
    """The deployment. Each replica has one engine."""

    def __init__(self, model: str, options: dict) -> None:
        # The first requests would wait for a model that is read when they come.
        self.engine = forebay.Engine(model, **options)
        self.model = model

    async def __call__(self, request: Request) -> Response:
        if request.url.path.rstrip("/") != "/v1/chat/completions":
            return failure(404, f"there is no {request.url.path}: use /v1/chat/completions")
        if request.method != "POST":
            return failure(405, "use POST")
        try:
            body = json.loads(await request.body())
            messages = body.pop("messages")
            is_stream = body.pop("stream", False)
            body.pop("model", None)
        except (ValueError, KeyError, AttributeError) as error:
            return failure(400, f"the body must be a JSON object with messages: {error!r}")
        if unknown := body.keys() - OPTIONS:
            return failure(400, f"unknown fields: {', '.join(sorted(unknown))}")
        if is_stream:
            return await self.stream(messages, body)
        try:
            answer = await self.engine.achat(messages, **body)
        except (forebay.Error, TypeError) as error:
            return failure_of(error) if isinstance(error, forebay.Error) else failure(400, str(error))
        usage = {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "total_tokens": answer.usage.total_tokens,
        }
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
        return JSONResponse({**self.head("chat.completion"), "choices": [choice], "usage": usage})

    async def stream(self, messages: list, options: dict) -> Response:
        deltas = self.engine.achat_stream(messages, **options)
        try:
            # Wrong requests fail here, before anything is sent.
            first = await anext(deltas)
        except (forebay.Error, TypeError) as error:
            return failure_of(error) if isinstance(error, forebay.Error) else failure(400, str(error))
        head = self.head("chat.completion.chunk")

        async def events():
            # A client that goes away ends the request: Ray Serve closes this generator, and the stream with it.
            async with deltas:
                delta = first
                while delta is not None:
                    content = {"role": "assistant", "content": delta.text}
                    choice = {"index": 0, "delta": content, "finish_reason": delta.finish_reason}
                    if delta.text or delta.finish_reason:
                        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
                    delta = await anext(deltas, None)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def head(self, kind: str) -> dict:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.model}

    def check_health(self) -> None:
        """Ray Serve replaces the replica if this raises."""
        self.engine.statistics()

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


def application(
    model: str,
    options: dict,
    *,
    num_gpus: float = 0,
    num_cpus: float = 1,
    min_replicas: int = 1,
    max_replicas: int = 4,
    max_ongoing_requests: int = 16,
) -> serve.Application:
    """Return the application. `num_gpus`, `num_cpus` and `max_ongoing_requests` are those of each replica."""
    deployment = serve.deployment(
        Chat,
        name="chat",
        max_ongoing_requests=max_ongoing_requests,
        # Clients of requests beyond this get 503 at once.
        max_queued_requests=100 * max_ongoing_requests,
        autoscaling_config={
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "target_ongoing_requests": max(max_ongoing_requests // 2, 1),
            "upscale_delay_s": 5,
            "downscale_delay_s": 300,
        },
        ray_actor_options={"num_gpus": num_gpus, "num_cpus": num_cpus},
        # Answers that a replica has begun may take this long when it is to stop.
        graceful_shutdown_timeout_s=600,
        health_check_period_s=5,
        health_check_timeout_s=30,
    )
    return deployment.bind(model, options)


SCALING = ("num_gpus", "num_cpus", "min_replicas", "max_replicas", "max_ongoing_requests")


def app_builder(args: dict) -> serve.Application:
    """Build the application for a config file of Ray Serve, whose `args` are those of `application` and of the engine."""
    own = {name: args.pop(name) for name in SCALING if name in args}
    device = "cuda" if own.get("num_gpus") else "cpu"
    options = {"device": device, "parallel": own.get("max_ongoing_requests", 16), **args}
    return application(options.pop("model"), options, **own)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model with Ray Serve.")
    parser.add_argument("model", help="GGUF file, pack or folder, at the same path on every node, or a name")
    parser.add_argument("--vram", help='VRAM of a replica, such as "8GiB"')
    parser.add_argument("--ram", help="RAM of a replica for weights")
    parser.add_argument("--context", type=int, help="positions of context of a request")
    parser.add_argument("--num-gpus", type=float, default=0, help="GPUs of a replica (0)")
    parser.add_argument("--num-cpus", type=float, default=1, help="CPUs of a replica (1)")
    parser.add_argument("--min-replicas", type=int, default=1, help="replicas that always run (1)")
    parser.add_argument("--max-replicas", type=int, default=4, help="replicas that run at most (4)")
    parser.add_argument(
        "--max-ongoing-requests", type=int, default=16, help="requests that a replica answers together (16)"
    )
    given = parser.parse_args()
    options = {
        "vram": given.vram,
        "ram": given.ram,
        "context": given.context,
        "parallel": given.max_ongoing_requests,
        "device": "cuda" if given.num_gpus else "cpu",
        "threads": None if given.num_gpus else max(int(given.num_cpus), 1),
    }
    serve.run(
        application(
            given.model,
            options,
            num_gpus=given.num_gpus,
            num_cpus=given.num_cpus,
            min_replicas=given.min_replicas,
            max_replicas=given.max_replicas,
            max_ongoing_requests=given.max_ongoing_requests,
        ),
        blocking=True,
    )


if __name__ == "__main__":
    main()
