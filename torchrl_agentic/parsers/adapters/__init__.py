"""Parsers of vLLM, SGLang and transformers behind our interface, for formats that have no parser of ours.

`get_parser("vllm:step3", tokenizer=tokenizer)`. They are imported when they first read something.
"""
