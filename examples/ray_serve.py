"""Serves a model on several machines or GPUs with Ray Serve: replicas of forebay's engine behind one address.

    pip install ./python "ray[serve]"
    python examples/ray_serve.py model.gguf --vram 8GiB --gpus 1 --most 4

Each replica is one engine with the model in its own memory, and answers many requests together. Ray starts more replicas, up to
`--most`, while requests wait, and stops them when they are idle. A replica that is to stop gets no new requests, and ends those
that it has. `model` must be on every machine under the same path.

The address takes a part of the chat interface of OpenAI:

    curl -N localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Fields: messages, max_tokens, temperature, top_p, seed, stop, stream. Errors are JSON with a message: 400 for a wrong request, 503 with
Retry-After if too many requests wait, 500 if the engine failed. If the machine of a replica is lost, streams that it had begun end
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
    """A replica: one engine."""

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
    model: str, options: dict, *, gpus: float = 0, cpus: float = 1, least: int = 1, most: int = 4, together: int = 16
) -> serve.Application:
    """Return the application. Each replica has `gpus` GPUs and `cpus` processors, and gets `together` requests at most."""
    deployment = serve.deployment(
        Chat,
        name="chat",
        max_ongoing_requests=together,
        # Clients of requests beyond this get 503 at once.
        max_queued_requests=100 * together,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": max(together // 2, 1),
            "upscale_delay_s": 5,
            "downscale_delay_s": 300,
        },
        ray_actor_options={"num_gpus": gpus, "num_cpus": cpus},
        # Answers that a replica has begun may take this long when it is to stop.
        graceful_shutdown_timeout_s=600,
        health_check_period_s=5,
        health_check_timeout_s=30,
    )
    return deployment.bind(model, options)


def built(args: dict) -> serve.Application:
    """Return the application for a configuration file of Ray Serve, whose `args` are those of `application` and of the engine."""
    own = {name: args.pop(name) for name in ("gpus", "cpus", "least", "most", "together") if name in args}
    options = {"device": "cuda" if own.get("gpus") else "cpu", "parallel": own.get("together", 16), **args}
    return application(options.pop("model"), options, **own)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model with Ray Serve.")
    parser.add_argument("model", help="GGUF file, pack or folder, at the same path on every machine")
    parser.add_argument("--vram", help='VRAM of a replica, such as "8GiB"')
    parser.add_argument("--ram", help="RAM of a replica for weights")
    parser.add_argument("--context", type=int, help="positions of context of a request")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of a replica (0)")
    parser.add_argument("--cpus", type=float, default=1, help="processors of a replica (1)")
    parser.add_argument("--least", type=int, default=1, help="replicas that always run (1)")
    parser.add_argument("--most", type=int, default=4, help="replicas that run at most (4)")
    parser.add_argument("--together", type=int, default=16, help="requests that a replica answers together (16)")
    given = parser.parse_args()
    options = {
        "vram": given.vram,
        "ram": given.ram,
        "context": given.context,
        "parallel": given.together,
        "device": "cuda" if given.gpus else "cpu",
        "threads": None if given.gpus else max(int(given.cpus), 1),
    }
    serve.run(
        application(
            given.model,
            options,
            gpus=given.gpus,
            cpus=given.cpus,
            least=given.least,
            most=given.most,
            together=given.together,
        ),
        blocking=True,
    )


if __name__ == "__main__":
    main()
