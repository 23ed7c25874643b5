"""Images that clients send: their files, and where these come from.

`files.py` recognises and decodes image files. `sources.py` returns the bytes behind a data URI,
base64 or an allowed URL, and `fetch.py` downloads from such a URL. `ocr.py` recognises text.
"""
