"""The bodies clients send and get: OpenAI's API and vLLM's extensions to it, as msgspec structs.

A field that is not known is allowed and has no effect. A field that is known but not implemented is
refused when its value would change the result.
"""
