"""An endpoint picker for the Gateway API Inference Extension: Baton's placement behind Envoy.

Enters: HTTP requests as Envoy's external processing shows them (gRPC, `ExternalProcessor`). Leaves:
the address of the worker that each one goes to, in the header and the metadata that the extension's
protocol names, and the body without what clients may not send. Envoy forwards; workers compute
their prompts themselves.

File map:
    picked_request.py   one request: authenticated, placed, counted in and out
    processing.py       one gRPC stream: Envoy's messages to and from a `PickedRequest`
    server.py           `run_picker`: the gRPC server, health, the end
"""
