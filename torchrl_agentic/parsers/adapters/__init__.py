"""Parsers of vLLM, SGLang and transformers behind our interface, for formats that have no parser of ours.

Example: `get_parser("vllm:step3", tokenizer=tokenizer)`. The packages are imported at the first parse.
"""
