"""The formats, one file per family of models; `parsers.registry` lists them."""
