"""The live page: what the fleet does and why, in a browser. It reads what the gateway knows anyway and changes nothing.

`decisions` remembers the last decisions, `history` the last quarter of an hour, `live` makes one stream of frames of
them for all who look, `site` serves it with the page.
"""
