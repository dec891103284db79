r"""A small inference service with prefill and decode apart, as one reads it to build one: start with `make serve`.

    client --> router.py --> prefill.py    runs the prompt, and offers its K and V while it computes
                        \-> decode.py     fetches them, and generates
    api.py          what clients say and hear: OpenAI's completions, chat and server-sent events
    engine.py       the model in a thread of its own; scheduler.py decides what it does next
    node.py         what a prefill and a decode server have in common
    ranks.py        the workers of an engine that divides its heads, as if they were one
    tokenizer.py    text to tokens and back
    service.py      the servers as processes
    __main__.py     starts them: all of them, or one
    load.py         clients that measure, and compare one arrangement of the servers with another

The model is a real Llama of transformers with random weights, so what it says is noise; everything else is as in a
service: paged K and V, continuous batching, chunked prefill, streams, clients that go away, servers that die.
"""
