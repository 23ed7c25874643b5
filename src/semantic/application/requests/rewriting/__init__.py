"""Changes conversations before they are rendered.

`repairs.py` applies the rules that keep volatile text from changing a prompt. `image_text.py`
replaces images by the text recognised in them, for models that accept only text.
"""
