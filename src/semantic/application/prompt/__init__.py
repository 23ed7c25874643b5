"""From a conversation to the tokens a model reads."""
