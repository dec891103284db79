"""OpenTelemetry's own SDK, with an exporter that keeps what it is given."""

from functools import cache

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@cache
def exporter() -> InMemorySpanExporter:
    """The one of this process: a tracer provider is set once."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


class Spans:
    """What was exported since this was made."""

    def __init__(self):
        exporter().clear()

    @property
    def all(self):
        return exporter().get_finished_spans()

    @property
    def names(self):
        return sorted(span.name.removeprefix("kvxfer.") for span in self.all)

    def one(self, name):
        found = [span for span in self.all if span.name == f"kvxfer.{name}"]
        assert len(found) == 1, self.names
        return found[0]

    def below(self, parent):
        """The stages of a transfer, by name."""
        return {
            span.name.removeprefix("kvxfer."): span
            for span in self.all
            if span.parent is not None and span.parent.span_id == parent.context.span_id and span.name != "kvxfer.send"
        }
